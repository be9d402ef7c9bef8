"""Elements cut into first-order pieces, to draw fields on them with common tools."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ceedtap import lattice
from ceedtap.ceed_constants import QuadMode
from ceedtap.elements import LagrangeElements
from ceedtap.facet_cells import FacetCells
from ceedtap.lattice import FloatArray, IntArray
from ceedtap.mesh import Mesh

#: All elements of a picture together are cut into about as many pieces.
BUDGET = 20_000
#: An element is not cut into more pieces in each direction.
MOST = 16


@dataclass(frozen=True)
class Pieces:
    """Elements, cut along a lattice of `n` points in each direction.

    Attributes:
        dim: of the elements.
        n: points of the lattice in each direction.
        points: (elements, n**dim, dim of the space) their places, lexicographic.
        values: (elements, n**dim) at these points, or (elements, (n - 1)**dim), one for each piece.
    """

    dim: int
    n: int
    points: FloatArray
    values: FloatArray

    @property
    def by_piece(self) -> bool:
        """Whether a value belongs to a piece, not to a point."""
        return self.values.shape[1] != self.points.shape[1]

    def corners(self, samples: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Samples (elements, n**dim, ...) at the points -> (elements, pieces, 2**dim, ...) at corners, as VTK wants."""
        return np.asarray(samples[:, _corners(self.n, self.dim)])

    @property
    def piece_values(self) -> FloatArray:
        """(elements, (n - 1)**dim), means of the corners where the values belong to points."""
        return self.values if self.by_piece else np.asarray(self.corners(self.values).mean(axis=2))

    def outlines(self) -> FloatArray:
        """(elements, points, dim of the space) the rims of two-dimensional elements, in a cycle."""
        index = np.arange(self.n**2).reshape(self.n, self.n)
        rim = np.concatenate([index[0], index[1:, -1], index[-1, -2::-1], index[-2::-1, 0]])
        return np.asarray(self.points[:, rim])


def _corners(n: int, dim: int) -> IntArray:
    """((n - 1)**dim, 2**dim) positions of the corners of each piece in a lattice, in the order of VTK."""
    order = [0, 1, 3, 2, 4, 5, 7, 6][: 2**dim] if dim > 1 else [0, 1]
    strides = n ** np.arange(dim)
    corner = lattice.lexicographic(2, dim)[order] @ strides
    first = lattice.lexicographic(n - 1, dim) @ strides
    return np.asarray(first[:, None] + corner[None, :])


@dataclass
class Elements:
    """What is known about the elements to be drawn."""

    dim: int
    degree: int  # of the nodes, which are Gauss-Lobatto points
    nodes: IntArray
    order: int  # of the geometry
    geometry: IntArray
    num_nodes: int
    points: FloatArray  # of the mesh
    quadrature: int | None  # points in each direction; None: whatever the values say
    qmode: int


def cut(on: Mesh | LagrangeElements, values: npt.ArrayLike, displacement: Any = None, surface: bool = False) -> Pieces:
    """Cuts the elements of a mesh or space so that a field can be seen.

    Args:
        on: a mesh, whose points are the nodes, or a space, or the trace of one.
        values: (num_nodes,) at the nodes, (num_nodes, components), of which the length is taken, (elements,) or
            (elements, quadrature points).
        displacement: (num_nodes, dim), added to the places.
        surface: of three-dimensional elements, only the facets on the boundary.

    Raises:
        TypeError: `on` or the values are something else.
        ValueError: the arrays have other shapes.
    """
    elements = elements_of(on)
    array = _real(values, "values")
    kind = _kind(elements, array)
    if kind == "nodes" and array.ndim == 2:
        array = np.linalg.norm(array, axis=1) if array.shape[1] > 1 else array[:, 0]
    if displacement is not None:
        displacement = _real(displacement, "displacement")
        expected = (elements.num_nodes, elements.points.shape[1])
        if displacement.shape != expected:
            raise ValueError(f"displacement: expected (nodes, dim) = {expected}, got {displacement.shape}")
    q = 1
    if kind == "quadrature":
        q = round(array.shape[1] ** (1 / elements.dim))
    if surface and elements.dim == 3:
        elements, array = _surface(elements, array, q if kind != "nodes" else None)
    return _cut(elements, array, displacement, q if kind != "nodes" else None)


def elements_of(on: Mesh | LagrangeElements) -> Elements:
    """The elements of a mesh or space.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(on, Mesh):
        return Elements(
            on.dim, on.order, on.cells, on.order, on.cells, on.num_points, on.points, None, QuadMode.GAUSS
        )  # fmt: skip
    if isinstance(on, FacetCells):
        raise TypeError(f"values at facets are drawn on the facets, V.boundary(...), not on {on!r}")
    if not isinstance(on, LagrangeElements):
        raise TypeError(f"expected a Space, a BoundarySpace or a Mesh to draw on, got {type(on).__name__}")
    mesh = on.mesh
    geometry: Any = on.geometry  # type: ignore[attr-defined]  # both kinds of spaces have one
    return Elements(
        on.dim, on.degree, on.element_nodes, mesh.order, geometry.element_nodes, on.num_nodes, mesh.points,
        on.quadrature, on.qmode,
    )  # fmt: skip


def _real(values: Any, name: str) -> FloatArray:
    array = np.asarray(values)
    if array.dtype == object or np.iscomplexobj(array) or not (array.dtype.kind in "biuf" or array.dtype.kind == "V"):
        raise TypeError(f"{name}: expected real numbers, got an array of {array.dtype}; draw .real, .imag or abs()")
    return array.astype(np.float64)


def _kind(elements: Elements, array: FloatArray) -> str:
    """Whether values are at nodes, of elements, or at quadrature points."""
    count, dim, shape = len(elements.nodes), elements.dim, array.shape
    if elements.quadrature is not None:
        at_points = shape == (count, elements.quadrature**dim)
        points = f"({count}, {elements.quadrature**dim})"
    else:
        at_points = len(shape) == 2 and shape[0] == count and round(shape[1] ** (1 / dim)) ** dim == shape[1] > 0
        points = f"({count}, q{f'**{dim}' if dim > 1 else ''})"
    if at_points:
        return "quadrature"
    if shape[:1] == (elements.num_nodes,) and len(shape) in (1, 2) and 0 not in shape:
        return "nodes"
    if shape == (count,):
        return "elements"
    nodes = elements.num_nodes
    raise ValueError(
        f"values: expected shape ({nodes},) or ({nodes}, components) for values at the nodes, ({count},) for one value "
        f"of each element, or {points} for values at the quadrature points; got {shape}"
    )


def _surface(elements: Elements, array: FloatArray, q: int | None) -> tuple[Elements, FloatArray]:
    """The facets on the boundary, turned outwards, with the values of their cells."""
    _, numbers = lattice.unique_rows(
        np.sort(_facet_corners(elements.geometry, elements.order + 1), axis=-1).reshape(-1, 4)
    )
    uses = np.bincount(numbers)
    rows = np.argwhere(uses[numbers].reshape(-1, 6) == 1)

    def on_facets(cells: Any, n: int) -> Any:
        return np.take_along_axis(cells[rows[:, 0]], lattice.facet_nodes(3, n)[rows[:, 1]], axis=1)

    if q is not None:
        array = on_facets(array.reshape(len(array), -1), q)
    facets = Elements(
        2, elements.degree, on_facets(elements.nodes, elements.degree + 1), elements.order,
        on_facets(elements.geometry, elements.order + 1), elements.num_nodes, elements.points, elements.quadrature,
        elements.qmode,
    )  # fmt: skip
    return facets, array


def _facet_corners(cells: IntArray, n: int) -> IntArray:
    corner = np.array([0, n - 1, n * (n - 1), n * n - 1])
    return np.asarray(cells[:, lattice.facet_nodes(3, n)[:, corner]])


def _cut(elements: Elements, array: FloatArray, displacement: FloatArray | None, q: int | None) -> Pieces:
    dim, count = elements.dim, len(elements.nodes)
    straight = elements.order == 1 and displacement is None
    finest = max(1, min(MOST, round((BUDGET / count) ** (1 / dim))))
    if q is None:
        needed = 1 if dim == 1 and straight and elements.degree == 1 else finest
        x = np.linspace(-1, 1, max(needed, elements.degree) + 1)
    else:
        parts = 1 if straight else max(1, finest // q, elements.degree // q)
        breaks = _breaks(q, elements.qmode)
        x = np.concatenate([np.linspace(a, b, parts + 1)[:-1] for a, b in itertools.pairwise(breaks)])
        x = np.append(x, 1.0)
    n = len(x)
    places, _ = lattice.lagrange(lattice.equispaced_points(elements.order + 1), x)
    points = lattice.tensor([places] * dim) @ elements.points[elements.geometry]
    to_points = None
    if q is None or displacement is not None:
        functions, _ = lattice.lagrange(lattice.lobatto_points(elements.degree + 1), x)
        to_points = lattice.tensor([functions] * dim)
    if displacement is not None and to_points is not None:
        points = points + to_points @ displacement[elements.nodes]
    if q is None and to_points is not None:
        values = array[elements.nodes] @ to_points.T
    else:
        of = lattice.lexicographic(n - 1, dim) // ((n - 1) // (q or 1))  # the quadrature point of each piece
        values = array.reshape(count, -1)[:, of @ ((q or 1) ** np.arange(dim))]
    return Pieces(dim, n, points, values)


def _breaks(q: int, qmode: int) -> FloatArray:
    """Where the parts of a line meet that belong to the points of a quadrature rule: half-way between them."""
    points = lattice.lobatto_points(q) if qmode == QuadMode.GAUSS_LOBATTO else np.polynomial.legendre.leggauss(q)[0]
    return np.concatenate([[-1.0], (points[1:] + points[:-1]) / 2, [1.0]])
