"""The surface area of a cube, by a diffusion operator: libCEED's second example.

For u = x the entries of K u are the fluxes through the two faces across x, of size one everywhere: the sum of their
absolute values is the area of the two. All directions together give 6; 4 for a square, 2 for a line. The mesh inside is
distorted.

Run: python ex2_surface.py [dimension]
"""

import math
import sys

import numpy as np
from structured import Grid

import ceedtap as ct


def distorted(x: np.ndarray) -> np.ndarray:
    """Maps [0, 1]^dim to itself, with smaller cells at the sides."""
    return 0.5 + np.sin(2 / 3 * math.pi * (x - 0.5)) / math.sqrt(3)


def surface(dim: int, resource: str = "/cpu/self", degree: int = 4, elements: int = 4) -> float:
    """The surface area, from the sums of |K x|, |K y| and |K z|."""
    ceed = ct.Ceed(resource)
    coordinates = Grid(ceed, dim, elements, degree, dim)
    space = Grid(ceed, dim, elements, degree)
    x = distorted(coordinates.nodes)

    points = space.quadrature_data(dim * (dim + 1) // 2)  # a symmetric matrix at each point
    qdata = ceed.Vector(points.lsize)
    build = ceed.Operator(ceed.QFunctionByName(f"Poisson{dim}DBuild"))
    build.set_field("dx", coordinates.restriction, coordinates.basis, ct.VECTOR_ACTIVE)
    build.set_field("weights", ct.ELEMRESTRICTION_NONE, coordinates.basis, ct.VECTOR_NONE)
    build.set_field("qdata", points, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
    build.apply(ct.Vector.from_dlpack(ceed, x), qdata)

    diffusion = ceed.Operator(ceed.QFunctionByName(f"Poisson{dim}DApply"))
    diffusion.set_field("du", space.restriction, space.basis, ct.VECTOR_ACTIVE)
    diffusion.set_field("qdata", points, ct.BASIS_NONE, qdata)
    diffusion.set_field("dv", space.restriction, space.basis, ct.VECTOR_ACTIVE)
    u, v = ceed.Vector(space.restriction.lsize), ceed.Vector(space.restriction.lsize)
    area = 0.0
    for coordinate in x:
        u.set_array(coordinate)
        diffusion.apply(u, v)
        area += v.norm(ct.NORM_1)
    return area


def exact(dim: int) -> float:
    return 2.0 * dim


if __name__ == "__main__":
    for dim in [int(sys.argv[1])] if len(sys.argv) > 1 else [1, 2, 3]:
        print(f"{dim}D surface {surface(dim):.10f}, exact {exact(dim):.10f}")
