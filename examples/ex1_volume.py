"""The volume of a quarter of a ring, by a mass operator: libCEED's first example.

With u = 1 the entries of M u add up to the volume: 3/4 pi, and the length of a line, 1.

Run: python ex1_volume.py [dimension]
"""

import math
import sys

import numpy as np
from structured import Grid

import ceedtap as ct


def quarter_ring(x: np.ndarray) -> np.ndarray:
    """Bends [0, 1]^dim to a quarter of a ring from radius 1 to 2; a line keeps its ends."""
    if len(x) == 1:
        return 0.5 + np.sin(2 / 3 * math.pi * (x - 0.5)) / math.sqrt(3)
    radius, angle = 1 + x[0], math.pi / 2 * x[1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), *x[2:]])


def volume(dim: int, resource: str = "/cpu/self", degree: int = 4, elements: int = 4) -> float:
    """The volume, from the sum of M 1."""
    ceed = ct.Ceed(resource)
    coordinates = Grid(ceed, dim, elements, degree, dim)
    space = Grid(ceed, dim, elements, degree)
    x = ct.Vector.from_dlpack(ceed, quarter_ring(coordinates.nodes))

    points = space.quadrature_data(1)
    qdata = ceed.Vector(points.lsize)
    build = ceed.Operator(ceed.QFunctionByName(f"Mass{dim}DBuild"))
    build.set_field("dx", coordinates.restriction, coordinates.basis, ct.VECTOR_ACTIVE)
    build.set_field("weights", ct.ELEMRESTRICTION_NONE, coordinates.basis, ct.VECTOR_NONE)
    build.set_field("qdata", points, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
    build.apply(x, qdata)

    mass = ceed.Operator(ceed.QFunctionByName("MassApply"))
    mass.set_field("u", space.restriction, space.basis, ct.VECTOR_ACTIVE)
    mass.set_field("qdata", points, ct.BASIS_NONE, qdata)
    mass.set_field("v", space.restriction, space.basis, ct.VECTOR_ACTIVE)
    u, v = ceed.Vector(space.restriction.lsize), ceed.Vector(space.restriction.lsize)
    u.set_value(1)
    mass.apply(u, v)
    return float(v.to_numpy().sum())


def exact(dim: int) -> float:
    return 1.0 if dim == 1 else 0.75 * math.pi


if __name__ == "__main__":
    for dim in [int(sys.argv[1])] if len(sys.argv) > 1 else [1, 2, 3]:
        print(f"{dim}D volume {volume(dim):.10f}, exact {exact(dim):.10f}")
