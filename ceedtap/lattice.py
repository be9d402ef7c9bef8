"""Node lattices of tensor-product cells: one-dimensional Lagrange tables and the numbering of shared nodes.

Cells are quadrilaterals or hexahedra whose ``n**dim`` nodes are stored in lexicographic order, x fastest. An *entity*
of the reference cell (corner, edge, face, interior) is written as one code per direction: 0 = low side, 1 = high
side, 2 = free. Everything here is NumPy on whole meshes; nothing depends on libCEED or JAX.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

FREE = 2


@functools.cache
def lobatto_points(n: int) -> FloatArray:
    """The ``n >= 2`` Gauss-Lobatto-Legendre points on [-1, 1], ascending and exactly antisymmetric.

    Examples:
        >>> lobatto_points(3)
        array([-1.,  0.,  1.])
    """
    if n < 2:
        raise ValueError(f"a Gauss-Lobatto rule has at least 2 points, not {n}")
    legendre = np.polynomial.legendre.Legendre.basis(n - 1)
    first, second = legendre.deriv(1), legendre.deriv(2)
    # The companion-matrix roots carry ~1e-14; the Chebyshev start with Newton's method reaches rounding error.
    x = -np.cos(np.pi * np.arange(1, n - 1) / (n - 1))
    for _ in range(50):
        step = first(x) / second(x)
        x = x - step
        if np.all(np.abs(step) <= 1e-16):
            break
    x = np.concatenate([[-1.0], x, [1.0]])
    return frozen(0.5 * (x - x[::-1]))


@functools.cache
def equispaced_points(n: int) -> FloatArray:
    """``n >= 2`` equidistant points on [-1, 1]."""
    return frozen(np.linspace(-1.0, 1.0, n))


def lagrange(nodes: FloatArray, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Values and derivatives at ``x`` of the Lagrange polynomials on ``nodes``; both of shape (len(x), len(nodes)).

    The product form is exact (0.0 and 1.0) where a point of ``x`` is a node.
    """
    n = len(nodes)
    values = np.ones((len(x), n))
    derivatives = np.zeros((len(x), n))
    for j in range(n):
        for m in range(n):
            if m == j:
                continue
            values[:, j] *= (x - nodes[m]) / (nodes[j] - nodes[m])
            term = np.full(len(x), 1.0 / (nodes[j] - nodes[m]))
            for k in range(n):
                if k not in (j, m):
                    term *= (x - nodes[k]) / (nodes[j] - nodes[k])
            derivatives[:, j] += term
    return values, derivatives


def tensor(factors: list[FloatArray]) -> FloatArray:
    """The tensor product of one matrix per direction (x first) for lexicographic rows and columns."""
    product = factors[0]
    for factor in factors[1:]:
        product = np.asarray(np.kron(factor, product))
    return product


@functools.cache
def lexicographic(n: int, dim: int) -> IntArray:
    """Indices 0..n-1 per direction of every lattice node, shape (n**dim, dim), x fastest."""
    grid = np.indices((n,) * dim).reshape(dim, -1)[::-1].T
    return frozen(np.ascontiguousarray(grid, dtype=np.int64))


def linear_cells(cells: IntArray, degree: int, dim: int) -> IntArray:
    """Cells with ``(degree + 1)**dim`` nodes each, split at their nodes into first-order cells.

    Returns:
        (num_cells * degree**dim, 2**dim) node numbers in the corner order of VTK and meshio.

    >>> linear_cells(np.arange(6)[None, [0, 1, 2, 3, 4, 5, 0, 1, 2]], 2, 2)[0].tolist()
    [0, 1, 4, 3]
    """
    order = [0, 1, 3, 2] if dim == 2 else [0, 1, 3, 2, 4, 5, 7, 6]
    strides = (degree + 1) ** np.arange(dim)
    corner = lexicographic(2, dim)[order] @ strides
    first = lexicographic(degree, dim) @ strides
    return np.asarray(cells[:, first[:, None] + corner[None, :]].reshape(-1, 2**dim))


@functools.cache
def entities(dim: int, free: int) -> tuple[tuple[int, ...], ...]:
    """The codes of all entities with ``free`` free directions (0 corners, 1 edges, 2 faces, ...)."""
    codes = itertools.product((0, 1, FREE), repeat=dim)
    return tuple(code[::-1] for code in codes if code.count(FREE) == free)


@functools.cache
def facets(dim: int) -> tuple[tuple[int, ...], ...]:
    """The codes of the facets in the order of local facet numbers: ``2 * direction + side``."""
    return tuple(
        tuple(side if d == direction else FREE for d in range(dim)) for direction in range(dim) for side in (0, 1)
    )


@functools.cache
def ridges(dim: int) -> tuple[tuple[int, ...], ...]:
    """The codes of what bounds the facets, in the order of local ridge numbers: edges (3D only), then corners."""
    return tuple(code for free in range(dim - 2, -1, -1) for code in entities(dim, free))


@functools.cache
def entity_nodes(code: tuple[int, ...], n: int, closed: bool) -> IntArray:
    """Lattice positions of the nodes of an entity in a cell of ``n`` nodes per direction, lexicographic.

    With ``closed`` the nodes on the entity's own boundary are included, else only those in its interior.
    """
    free = range(n) if closed else range(1, n - 1)
    choices = [free if c == FREE else (0,) if c == 0 else (n - 1,) for c in code]
    strides = n ** np.arange(len(code))
    nodes = [int(np.dot(index[::-1], strides)) for index in itertools.product(*choices[::-1])]
    return frozen(np.array(nodes, dtype=np.int64))


@functools.cache
def facet_nodes(dim: int, n: int) -> IntArray:
    """(2 * dim, n**(dim - 1)) lattice positions of the nodes of each local facet, in an order such that the normal made
    of the facet's directions points out of a right-handed cell.

    The normal of a line is to the right of its direction, that of a quadrilateral the cross product of its directions.
    """
    rows = []
    for number, code in enumerate(facets(dim)):
        nodes = entity_nodes(code, n, True)
        direction, side = divmod(number, 2)
        # Turned clockwise, a line's tangent points out of a square on the sides right and bottom. The other two
        # coordinates in their order give the cross product +x, -y, +z.
        inward = (side == 1) == (direction == 1)
        if inward:
            nodes = nodes[::-1] if dim == 2 else nodes.reshape(n, n).T.ravel()
        rows.append(nodes)
    return frozen(np.stack(rows))


def unique_rows(rows: IntArray) -> tuple[int, IntArray]:
    """Number the distinct rows of a (m, k) array of ids in 0..2**62: (number of them, (m,) index of each row)."""
    if len(rows) == 0:
        return 0, np.zeros(0, dtype=np.int64)
    top = int(rows.max()) + 1
    if top ** rows.shape[1] < 2**62:  # one packed integer per row sorts several times faster than columns
        packed = rows[:, 0].astype(np.int64)
        for column in rows.T[1:]:
            packed = packed * top + column
        distinct, inverse = np.unique(packed, return_inverse=True)
        return len(distinct), inverse.reshape(-1)
    order = np.lexsort(rows.T)
    ordered = rows[order]
    starts = np.concatenate([[True], np.any(ordered[1:] != ordered[:-1], axis=1)])
    index = np.empty(len(rows), dtype=np.int64)
    index[order] = np.cumsum(starts) - 1
    return int(starts.sum()), index


def canonical(corners: IntArray) -> tuple[IntArray, IntArray]:
    """Orientation-free key and orientation of corners, edges and faces.

    Args:
        corners: (..., 1), (..., 2) or (..., 4) vertex ids, lexicographic.

    Returns:
        ``key`` (..., 1), (..., 2) or (..., 3), equal for any two cells that share the entity, and ``orientation``
        (...): which of the 1, 2 or 8 symmetries takes the cell's own order to the order that the vertex ids single out
        (first corner = smallest id, first direction = towards the smaller neighbour).
    """
    origin = np.argmin(corners, axis=-1)

    def pick(index: IntArray) -> IntArray:
        return np.take_along_axis(corners, index[..., None], axis=-1)[..., 0]

    if corners.shape[-1] == 1:
        return corners, origin
    if corners.shape[-1] == 2:
        return np.stack([pick(origin), pick(1 - origin)], axis=-1), origin
    a, b = pick(origin ^ 1), pick(origin ^ 2)
    key = np.stack([pick(origin), np.minimum(a, b), np.maximum(a, b)], axis=-1)
    return key, origin + 4 * (a > b)


@functools.cache
def orientation_table(free: int, m: int) -> IntArray:
    """Row ``orientation`` of :func:`canonical`: the canonical position of each of the ``m**free`` interior nodes."""
    i = np.arange(m)
    if free == 1:
        return frozen(np.stack([i, i[::-1]]))
    rows = []
    for swap, origin in itertools.product((False, True), range(4)):
        x = i[::-1] if origin & 1 else i
        y = i[::-1] if origin & 2 else i
        grid = (m * x[None, :] + y[:, None]) if swap else (x[None, :] + m * y[:, None])
        rows.append(grid.ravel())
    return frozen(np.stack(rows))


def number_nodes(corners: IntArray, degree: int) -> tuple[int, IntArray]:
    """Number the nodes of a continuous tensor-product lattice of any degree on an unstructured mesh.

    Nodes belong to vertices, edges, faces and cell interiors. Those of an edge or face are ordered by its vertex ids,
    so the neighbours of an entity agree on its nodes whatever their own orientations are (2 for edges, 8 for faces).
    Numbers follow the first touch in cell order, which keeps the gathers of an apply local.

    Args:
        corners: (num_cells, 2**dim) vertex ids, lexicographic.
        degree: nodes per direction minus one, at least 1.

    Returns:
        The number of nodes and (num_cells, (degree + 1)**dim) node numbers, lexicographic.
    """
    num_cells, num_corners = corners.shape
    dim = num_corners.bit_length() - 1
    n, m = degree + 1, degree - 1
    out = np.empty((num_cells, n**dim), dtype=np.int64)

    def at(free: int) -> IntArray:
        """Lattice positions (num_entities, m**free) of the interiors of all entities with this many free directions."""
        return np.stack([entity_nodes(code, n, False) for code in entities(dim, free)])

    distinct, vertices = np.unique(corners, return_inverse=True)
    out[:, at(0)[:, 0]] = vertices.reshape(corners.shape)
    total = len(distinct)
    for free in range(1, dim):
        local = np.stack([entity_nodes(code, 2, True) for code in entities(dim, free)])
        key, orientation = canonical(out[:, at(0)[:, 0]][:, local])
        count, index = unique_rows(key.reshape(-1, key.shape[-1]))
        start = total + m**free * index.reshape(orientation.shape)
        if m > 0:
            out[:, at(free)] = start[..., None] + orientation_table(free, m)[orientation]
        total += count * m**free
    if m > 0:
        interior = m**dim
        out[:, at(dim)[0]] = total + np.arange(num_cells * interior).reshape(num_cells, interior)
        total += num_cells * interior
    return total, first_touch(out, total)[out]


def first_touch(ids: IntArray, total: int) -> IntArray:
    """New numbers (total,) of ids 0..total-1 such that they ascend in the order in which ``ids`` first names them."""
    flat = ids.ravel()
    first = np.empty(total, dtype=np.int64)
    first[flat[::-1]] = np.arange(flat.size)[::-1]  # of repeated indices the last assignment stays: the first touch
    number = np.empty(total, dtype=np.int64)
    number[np.argsort(first)] = np.arange(total)
    return number


def frozen(array: npt.NDArray[Any]) -> Any:
    """The same array, made read-only: cached and published tables must not change."""
    array.flags.writeable = False
    return array
