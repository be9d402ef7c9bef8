"""The volume of a quarter of a ring three times, by a mass operator on vectors: libCEED's third example.

With u = (1, 2, 3) the three components of M u add up to one, two and three times the volume.

Run: python ex3_vector_mass.py [dimension]
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


def volume(dim: int, resource: str = "/cpu/self", degree: int = 4, elements: int = 4) -> np.ndarray:
    """One, two and three times the volume, from the sums of the components of M u."""
    ceed = ct.Ceed(resource)
    coordinates = Grid(ceed, dim, elements, degree, dim)
    space = Grid(ceed, dim, elements, degree, 3)
    x = ct.Vector.from_dlpack(ceed, quarter_ring(coordinates.nodes))

    points = space.quadrature_data(1)
    qdata = ceed.Vector(points.lsize)
    build = ceed.Operator(ceed.QFunctionByName(f"Mass{dim}DBuild"))
    build.set_field("dx", coordinates.restriction, coordinates.basis, ct.VECTOR_ACTIVE)
    build.set_field("weights", ct.ELEMRESTRICTION_NONE, coordinates.basis, ct.VECTOR_NONE)
    build.set_field("qdata", points, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
    build.apply(x, qdata)

    mass = ceed.Operator(ceed.QFunctionByName("Vector3MassApply"))
    mass.set_field("u", space.restriction, space.basis, ct.VECTOR_ACTIVE)
    mass.set_field("qdata", points, ct.BASIS_NONE, qdata)
    mass.set_field("v", space.restriction, space.basis, ct.VECTOR_ACTIVE)
    u, v = ceed.Vector(space.restriction.lsize), ceed.Vector(space.restriction.lsize)
    with u.array_write(3, -1) as values:
        values[:] = [[1], [2], [3]]
    mass.apply(u, v)
    return v.to_numpy(3, -1).sum(axis=1)


def exact(dim: int) -> np.ndarray:
    return (1.0 if dim == 1 else 0.75 * math.pi) * np.arange(1, 4)


if __name__ == "__main__":
    for dim in [int(sys.argv[1])] if len(sys.argv) > 1 else [1, 2, 3]:
        computed = " ".join(f"{value:.10f}" for value in volume(dim))
        print(f"{dim}D volumes {computed}, exact {' '.join(f'{value:.10f}' for value in exact(dim))}")
