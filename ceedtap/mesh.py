"""Meshes of quadrilaterals and hexahedra of first and second order: boxes, arrays, files.

A cell is the image of the reference cell [-1, 1]**dim under the tensor-product Lagrange map of its
``(order + 1)**dim`` nodes, which are equidistant and in lexicographic order (x fastest). Local facet
``2 * direction + side`` of a cell is the one where that reference coordinate is -1 (side 0) or 1 (side 1).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ceedtap import lattice
from ceedtap.lattice import FloatArray, IntArray
from ceedtap.plain_arrays import check_plain, plain_array

__all__ = ["Mesh", "MeshError", "box", "read"]

_CHUNK = 8192  # cells per batch of the Jacobian check, so that its temporaries stay in tens of MiB
_SCALED_JACOBIAN_TOLERANCE = 1e-12


class MeshError(ValueError):
    """A mesh that cannot be used, or a file that holds none; the message names the cells or points at fault."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mesh:
    """An immutable mesh of quadrilaterals (dim 2) or hexahedra (dim 3) with first- or second-order geometry.

    :func:`box`, :func:`read` and :meth:`Mesh.from_arrays` make checked meshes. The constructor itself takes arrays that
    are already in this class's form and checks their form only; :meth:`check` looks at the geometry. Meshes with the
    same content are equal; they can be copied and pickled, for other processes for example.

    Args:
        points: (num_points, dim) float64 coordinates; every point is a node of some cell.
        cells: (num_cells, (order + 1)**dim) int64 indices into ``points``, lexicographic within each cell.
        order: 1 or 2, the order of the geometry.
        boundary: name -> (n, 2) int64 rows of (cell, local facet); a facet inside of the mesh may be named from either
            of its cells, which its normal points out of. ``"all"``, the facets that belong to one cell only, is added
            where the mapping has no set of this name.
        regions: name -> (n,) int64 cell numbers, such as the materials of a mesh file.
        ridges: name -> (n, 2) int64 rows of (cell, local ridge): named corners and, in 3D, edges, such as a held point.
            Local ridges are numbered as in :func:`ceedtap.lattice.ridges`.

    Raises:
        MeshError: wrong shapes, indices out of range, unused points, coordinates that are not finite.

    Examples:
        >>> import numpy as np
        >>> square = Mesh(np.array([[0, 0], [1, 0], [0, 1], [1, 1]]), np.array([[0, 1, 2, 3]]), 1)
        >>> square
        Mesh(dim=2, order=1, num_cells=1, num_points=4, boundary={'all': 4})
        >>> square.boundary["all"].tolist()
        [[0, 0], [0, 1], [0, 2], [0, 3]]
    """

    points: FloatArray
    cells: IntArray
    order: int
    boundary: Mapping[str, IntArray] = dataclasses.field(default_factory=dict)
    regions: Mapping[str, IntArray] = dataclasses.field(default_factory=dict)
    ridges: Mapping[str, IntArray] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        points = np.array(plain_array("points", self.points), dtype=np.float64, order="C")
        cells = _integers(self.cells, "cells")
        if points.ndim != 2 or points.shape[1] not in (2, 3):
            raise MeshError(f"points: expected shape (num_points, 2) or (num_points, 3), got {points.shape}")
        dim = points.shape[1]
        if self.order not in (1, 2):
            raise MeshError(f"order: the geometry is of order 1 or 2, not {self.order!r}")
        nodes = (self.order + 1) ** dim
        if cells.ndim != 2 or cells.shape[1] != nodes or len(cells) == 0:
            raise MeshError(
                f"cells: order {self.order} in {dim} dimensions needs shape (num_cells >= 1, {nodes}), "
                f"got {cells.shape}"
            )
        _check_indices(cells, len(points), "cells", "points")
        _check_finite(points)
        unused = np.flatnonzero(np.bincount(cells.ravel(), minlength=len(points)) == 0)
        if unused.size:
            raise MeshError(
                f"{unused.size} points belong to no cell: {_some(unused)}. Mesh.from_arrays removes such points"
            )
        object.__setattr__(self, "points", lattice.frozen(points))
        object.__setattr__(self, "cells", lattice.frozen(cells))
        boundary = _entity_sets(self.boundary, "boundary set", len(cells), 2 * dim, "local facets")
        if "all" not in boundary:
            boundary["all"] = self.boundary_facets
        object.__setattr__(self, "boundary", MappingProxyType(boundary))
        regions = {}
        for name, numbers in self.regions.items():
            ids = _integers(numbers, f"region {name!r}", columns=1)[:, 0]
            _check_indices(ids, len(cells), f"region {name!r}", "cells")
            regions[str(name)] = lattice.frozen(ids)
        object.__setattr__(self, "regions", MappingProxyType(regions))
        ridges = _entity_sets(self.ridges, "ridge set", len(cells), len(lattice.ridges(dim)), "local ridges")
        object.__setattr__(self, "ridges", MappingProxyType(ridges))

    def __eq__(self, other: object) -> bool:
        """By content: a mesh that another process sent is the same one."""
        if not isinstance(other, Mesh):
            return NotImplemented
        if self is other:
            return True
        pairs = [(self.points, other.points), (self.cells, other.cells)]
        for ours, theirs in zip(self._sets(), other._sets(), strict=True):
            if ours.keys() != theirs.keys():
                return False
            pairs += [(ours[name], theirs[name]) for name in ours]
        return self.order == other.order and all(np.array_equal(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self.order, self.points.shape, self.cells.shape, *(len(named) for named in self._sets())))

    def _sets(self) -> tuple[Mapping[str, IntArray], ...]:
        return self.boundary, self.regions, self.ridges

    def __reduce__(self) -> tuple[Any, ...]:
        sets = (dict(named) for named in self._sets())  # their views are not picklable
        return Mesh, (self.points, self.cells, self.order, *sets)

    def __repr__(self) -> str:
        sizes = {name: len(rows) for name, rows in self.boundary.items()}
        more = "".join(
            f", {kind}={ {name: len(ids) for name, ids in sets.items()} }"
            for kind, sets in (("regions", self.regions), ("ridges", self.ridges))
            if sets
        )
        return (
            f"Mesh(dim={self.dim}, order={self.order}, num_cells={self.num_cells}, num_points={self.num_points}, "
            f"boundary={sizes}{more})"
        )

    @property
    def dim(self) -> int:
        """2 (quadrilaterals) or 3 (hexahedra)."""
        return int(self.points.shape[1])

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return len(self.cells)

    @property
    def num_points(self) -> int:
        """Number of geometry nodes."""
        return len(self.points)

    @functools.cached_property
    def corners(self) -> IntArray:
        """(num_cells, 2**dim) point numbers of the corners of each cell, lexicographic."""
        n = self.order + 1
        positions = np.array([int(lattice.entity_nodes(c, n, True)[0]) for c in lattice.entities(self.dim, 0)])
        return lattice.frozen(self.cells[:, positions])

    @functools.cached_property
    def facet_numbers(self) -> IntArray:
        """(num_cells, 2 * dim) numbers 0, 1, ... of each cell's facets; cells that share a facet have its number."""
        keys = entity_keys(self.corners, lattice.facets(self.dim))
        _, index = lattice.unique_rows(keys.reshape(-1, keys.shape[-1]))
        return lattice.frozen(index.reshape(self.num_cells, 2 * self.dim))

    @functools.cached_property
    def boundary_facets(self) -> IntArray:
        """(n, 2) rows of (cell, local facet): the facets that belong to exactly one cell."""
        uses = np.bincount(self.facet_numbers.ravel())
        return lattice.frozen(np.argwhere(uses[self.facet_numbers] == 1).astype(np.int64))

    def other_side(self, facets: npt.ArrayLike) -> IntArray:
        """The facets as those of the cells on their other side.

        Args:
            facets: (n, 2) rows of (cell, local facet).

        Returns:
            (n, 2) rows of (cell, local facet); -1 for facets that belong to one cell only.

        Examples:
            >>> box(2, 1).other_side([[0, 1], [0, 0]]).tolist()
            [[1, 0], [-1, -1]]
        """
        rows = _entity_sets({"": facets}, "facets", self.num_cells, 2 * self.dim, "local facets")[""]
        place = self._partners[rows[:, 0], rows[:, 1]]
        other = np.stack(np.divmod(place, 2 * self.dim), axis=1)
        return np.where(place[:, None] < 0, -1, other)

    @functools.cached_property
    def _partners(self) -> IntArray:
        """(num_cells, 2 * dim): of each facet the place (cell * 2 * dim + local facet) in the other cell, or -1."""
        numbers = self.facet_numbers.ravel()
        order = np.argsort(numbers, kind="stable")
        twice = np.flatnonzero(numbers[order[1:]] == numbers[order[:-1]])
        partners = np.full(len(numbers), -1, dtype=np.int64)
        partners[order[twice]], partners[order[twice + 1]] = order[twice + 1], order[twice]
        return lattice.frozen(partners.reshape(self.facet_numbers.shape))

    def facets(self, name: str | Sequence[str] | None = None) -> IntArray:
        """(n, 2) rows of (cell, local facet) of one boundary set, of several together, or (None) of the whole boundary.

        Raises:
            KeyError: no set of this name; the message lists the names there are.
        """
        if name is None:
            return self.boundary_facets
        names = [name] if isinstance(name, str) else list(name)
        for one in names:
            if one not in self.boundary:
                more = f" and the ridge sets {sorted(self.ridges)}" if self.ridges else ""
                raise KeyError(f"the mesh has no boundary set {one!r}; it has {sorted(self.boundary)}{more}")
        return np.concatenate([np.zeros((0, 2), np.int64), *(self.boundary[one] for one in names)])

    def check(self) -> Mesh:
        """Verify the geometry and the way the cells fit together; returns the mesh itself. Repeated calls cost nothing.

        The Jacobian determinant is sampled at the ``order + 1`` Gauss points per direction and at the corners.

        Raises:
            MeshError: a determinant is zero or negative (cell numbers and values are named), a facet belongs to more
                than two cells, two cells are the same, or neighbours disagree on their common second-order nodes.
        """
        self._checked  # noqa: B018 (evaluating the cached property is the point)
        return self

    @functools.cached_property
    def _checked(self) -> bool:
        worst, best = self._determinants
        bad = np.flatnonzero(~(worst > 0))
        if bad.size:
            first = ", ".join(f"cell {c}: {worst[c]:.6g}" for c in bad[:5])
            more = f" and {bad.size - 5} more cells" if bad.size > 5 else ""
            if np.all(best[bad] < 0):
                hint = "left-handed node order; Mesh.reoriented(), or orient=True in read and from_arrays, turns it"
            else:
                hint = "inverted or collapsed"
            raise MeshError(f"Jacobian determinant not positive in {first}{more} ({hint})")
        uses = np.bincount(self.facet_numbers.ravel())
        if np.any(uses > 2):
            cells = np.unique(np.argwhere(uses[self.facet_numbers] > 2)[:, 0])
            raise MeshError(f"a facet belongs to more than two cells: {_some(cells)} are involved")
        same_count, same = lattice.unique_rows(np.sort(self.corners, axis=1))
        if same_count < self.num_cells:
            twice = np.flatnonzero(np.bincount(same) > 1)[0]
            raise MeshError(f"the same cell is there more than once: cells {_some(np.flatnonzero(same == twice))}")
        if self.order == 2:
            total, numbers = lattice.number_nodes(self.corners, 2)
            point = np.empty(total, dtype=np.int64)
            point[numbers] = self.cells
            wrong = np.flatnonzero(np.any(point[numbers] != self.cells, axis=1))
            if wrong.size:
                raise MeshError(f"neighbours disagree on the second-order nodes they share: cells {_some(wrong)}")
            if total != self.num_points:
                raise MeshError(f"{self.num_points} points serve {total} distinct second-order nodes")
        return True

    @functools.cached_property
    def _determinants(self) -> tuple[FloatArray, FloatArray]:
        """(num_cells,) smallest and largest sampled Jacobian determinant; rounding noise around 0 counts as 0."""
        n = self.order + 1
        gauss = np.polynomial.legendre.leggauss(n)[0]
        samples = [np.array([-1.0, 1.0]), gauss] if self.order == 1 else [gauss, np.array([-1.0, 1.0])]
        tables = [gradients(self.order, self.dim, x) for x in samples]
        table = np.concatenate(tables, axis=1)
        low, high = np.empty(self.num_cells), np.empty(self.num_cells)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, self.num_cells, _CHUNK):
                chunk = slice(start, start + _CHUNK)
                x = self.points[self.cells[chunk]]
                jacobian = np.stack([t @ x for t in table], axis=-1)  # (cells, samples, space, reference)
                det = np.linalg.det(jacobian)
                # Relative to the product of the column lengths, so that flat cells of boundary layers are fine.
                scale = np.prod(np.linalg.norm(jacobian, axis=-2), axis=-1)
                det = np.where(np.abs(det) <= _SCALED_JACOBIAN_TOLERANCE * scale, 0.0, det)
                low[chunk], high[chunk] = det.min(axis=1), det.max(axis=1)
        return low, high

    def reoriented(self) -> Mesh:
        """The same mesh with every left-handed cell turned into a right-handed one (its first two directions swapped).

        Only cells whose sampled determinants are all negative are turned; the result is checked.

        Raises:
            MeshError: as :meth:`check`, for cells that no renumbering can repair.

        Examples:
            >>> import numpy as np
            >>> corner_points = np.array([[0, 0], [1, 0], [0, 1], [1, 1]])
            >>> mirrored = Mesh(corner_points, np.array([[0, 2, 1, 3]]), 1)
            >>> mirrored.reoriented().cells.tolist()
            [[0, 1, 2, 3]]
        """
        turned = self._determinants[1] < 0
        if not turned.any():
            return self.check()
        position = lattice.lexicographic(self.order + 1, self.dim)
        swapped = position.copy()
        swapped[:, [0, 1]] = position[:, [1, 0]]
        permutation = swapped @ ((self.order + 1) ** np.arange(self.dim))
        cells = self.cells.copy()
        cells[turned] = cells[turned][:, permutation]
        sets = []
        for entities, codes in self._entity_sets():
            swapped_code = np.array([codes.index((code[1], code[0], *code[2:])) for code in codes])
            sets.append(
                {
                    name: np.stack([r[:, 0], np.where(turned[r[:, 0]], swapped_code[r[:, 1]], r[:, 1])], axis=1)
                    for name, r in entities.items()
                }
            )
        return Mesh(self.points, cells, self.order, sets[0], self.regions, sets[1]).check()

    def _entity_sets(self) -> list[tuple[Mapping[str, IntArray], tuple[tuple[int, ...], ...]]]:
        """Boundary and ridge sets with the entity codes that their local numbers stand for."""
        return [(self.boundary, lattice.facets(self.dim)), (self.ridges, lattice.ridges(self.dim))]

    def refine(self) -> Mesh:
        """Split every cell into 2**dim cells at the middle of its reference directions.

        The children cover exactly their parent: second-order geometry stays second order on the parent's own map (it is
        not moved onto a CAD surface). Child ``k`` of cell ``c`` is cell ``2**dim * c + k``, children lexicographic.
        Boundary sets and regions are inherited.

        Examples:
            >>> fine = box(1, 1).refine().refine()
            >>> fine.num_cells, fine.num_points, len(fine.boundary["left"])
            (16, 25, 4)
        """
        n = self.order + 1
        fine = 2 * self.order + 1
        num_points, numbers = lattice.number_nodes(self.corners, fine - 1)
        points = np.empty((num_points, self.dim))
        points[numbers] = self.map(lattice.equispaced_points(fine))
        offsets = lattice.lexicographic(2, self.dim)
        strides = fine ** np.arange(self.dim)
        local = (self.order * offsets[:, None, :] + lattice.lexicographic(n, self.dim)[None]) @ strides
        cells = numbers[:, local].reshape(-1, n**self.dim)
        sets: list[dict[str, IntArray]] = []
        for entities, codes in self._entity_sets():
            # An entity's children are those of the child cells that lie on its own sides, under the same local number.
            fixed = [np.array(code) != lattice.FREE for code in codes]
            children = [
                np.flatnonzero(np.all(offsets[:, f] == np.array(code)[f], axis=1))
                for f, code in zip(fixed, codes, strict=True)
            ]
            sets.append({})
            for name, rows in entities.items():
                parts = [np.zeros((0, 2), dtype=np.int64)]
                for number in np.unique(rows[:, 1]):
                    cell = rows[rows[:, 1] == number, 0]
                    child = (len(offsets) * cell[:, None] + children[number]).ravel()
                    parts.append(np.stack([child, np.full_like(child, number)], axis=1))
                sets[-1][name] = np.concatenate(parts)
        regions = {
            name: (len(offsets) * ids[:, None] + np.arange(len(offsets))).ravel() for name, ids in self.regions.items()
        }
        return Mesh(points, cells, self.order, sets[0], regions, sets[1])

    def map(self, x: FloatArray) -> FloatArray:
        """Physical points (num_cells, len(x)**dim, dim) of the lattice of reference coordinates ``x`` in [-1, 1]."""
        values, _ = lattice.lagrange(lattice.equispaced_points(self.order + 1), np.asarray(x, dtype=np.float64))
        return np.asarray(lattice.tensor([values] * self.dim) @ self.points[self.cells])

    @staticmethod
    def from_arrays(
        points: npt.ArrayLike,
        cells: npt.ArrayLike,
        cell_type: str,
        boundary: Mapping[str, npt.ArrayLike] | None = None,
        regions: Mapping[str, npt.ArrayLike] | None = None,
        *,
        orient: bool = False,
    ) -> Mesh:
        """A checked mesh from plain arrays in the node order of mesh files.

        Args:
            points: (num_points, 2 or 3) coordinates. Points of no cell are removed; a constant third coordinate of a
                quadrilateral mesh is dropped.
            cells: (num_cells, nodes) indices into ``points``: corners counter-clockwise (bottom, then top, for
                hexahedra), then the second-order nodes, whose order is found from where they lie.
            cell_type: meshio's name: ``quad``, ``quad8``, ``quad9``, ``hexahedron``, ``hexahedron20``,
                ``hexahedron27``. The serendipity cells (8, 20) become full second-order cells of the same shape.
            boundary: name -> facets by point numbers, corners first: (n, 2 or 3) lines in 2D, (n, 4, 8 or 9)
                quadrilaterals in 3D. A facet between two cells becomes that of the cell which its normal points out
                of: to the right of a line, by the right-hand rule of a quadrilateral. Rows of (n, 1) points and, in 3D,
                of (n, 2 or 3) lines become ridges.
            regions: name -> (n,) cell numbers.
            orient: turn left-handed cells (:meth:`Mesh.reoriented`) instead of refusing them.

        Raises:
            MeshError: as :meth:`check`; also for unknown cell types and facets that no cell has.

        Examples:
            >>> Mesh.from_arrays([[0, 0], [1, 0], [1, 1], [0, 1]], [[0, 1, 2, 3]], "quad", {"floor": [[0, 1]]})
            Mesh(dim=2, order=1, num_cells=1, num_points=4, boundary={'floor': 1, 'all': 4})
        """
        from ceedtap import mesh_io

        sets = list((boundary or {}).items())
        return mesh_io.from_arrays(points, cells, cell_type, sets, regions or {}, orient=orient)


def box(
    nx: int,
    ny: int,
    nz: int | None = None,
    *,
    lower: float | Sequence[float] = 0.0,
    upper: float | Sequence[float] = 1.0,
    order: int = 1,
    warp: Callable[[FloatArray], npt.ArrayLike] | None = None,
) -> Mesh:
    """A structured mesh of a rectangle (two counts) or of a box (three).

    Args:
        nx, ny, nz: cells per direction.
        lower, upper: opposite corners, one number for all directions or one each.
        order: order of the geometry, 1 or 2.
        warp: maps all points (num_points, dim) -> (num_points, dim); with order 2 the mid-side nodes are mapped too.

    Returns:
        A checked mesh. Cells and points are numbered lexicographically. Boundary sets, besides ``"all"``: ``left`` /
        ``right`` are at lower / upper x; in 2D ``bottom`` / ``top`` at y; in 3D ``front`` / ``back`` at y and
        ``bottom`` / ``top`` at z.

    Raises:
        MeshError: bad arguments, or a warp that gives NaN or inverted cells.

    Examples:
        >>> mesh = box(4, 3, lower=(-1, 0), upper=(1, 2))
        >>> mesh.num_cells, mesh.num_points, sorted(mesh.boundary)
        (12, 20, ['all', 'bottom', 'left', 'right', 'top'])
    """
    counts = [nx, ny] if nz is None else [nx, ny, nz]
    for name, count in zip(("nx", "ny", "nz"), counts, strict=False):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
            raise MeshError(f"{name}: expected a positive integer, got {count!r}")
    if order not in (1, 2):
        raise MeshError(f"order: the geometry is of order 1 or 2, not {order!r}")
    dim = len(counts)
    corners = []
    for name, value in (("lower", lower), ("upper", upper)):
        check_plain(name, value)
        try:
            corners.append(np.broadcast_to(np.asarray(value, dtype=np.float64), (dim,)))
        except (TypeError, ValueError):
            raise MeshError(f"{name}: expected one number or {dim}, got {value!r}") from None
    low, high = corners
    if not np.all(low < high):
        raise MeshError(f"lower {low.tolist()} is not below upper {high.tolist()} in every direction")
    axes = [np.linspace(a, b, order * n + 1) for a, b, n in zip(low, high, counts, strict=True)]
    points = np.stack([grid.ravel(order="F") for grid in np.meshgrid(*axes, indexing="ij")], axis=1)
    strides = np.cumprod([1, *[order * n + 1 for n in counts[:-1]]])
    position = np.stack([grid.ravel(order="F") for grid in np.indices(tuple(counts))], axis=1)
    cells = (order * position @ strides)[:, None] + (lattice.lexicographic(order + 1, dim) @ strides)[None, :]
    names = ("left", "right", "bottom", "top") if dim == 2 else ("left", "right", "front", "back", "bottom", "top")
    boundary = {}
    for facet, name in enumerate(names):
        direction, side = divmod(facet, 2)
        at = np.flatnonzero(position[:, direction] == (counts[direction] - 1 if side else 0))
        boundary[name] = np.stack([at, np.full_like(at, facet)], axis=1)
    if warp is not None:
        warped = np.asarray(plain_array("warp", warp(points.copy())), dtype=np.float64)
        if warped.shape != points.shape:
            raise MeshError(f"warp: expected an array of shape {points.shape} from it, got {warped.shape}")
        points = warped
    return Mesh(points, cells, order, boundary).check()


def read(path: str | os.PathLike[str], *, orient: bool = False) -> Mesh:
    """Read a mesh file in any format that meshio knows (``pip install ceedtap[mesh]``).

    Quadrilaterals and hexahedra of first and second order, serendipity cells included (they become full second-order
    cells of the same shape). The cells of the highest dimension are the mesh, numbered in the order of the file.
    Groups of facets (physical groups, markers, cell sets, numbers of materials or properties) become boundary sets,
    groups of cells regions, groups of points, and of lines among hexahedra, ridges; a group without a name is called by
    its number, lower-dimensional cells in no group are ignored. The normals of facets inside of the mesh are those of
    the file, see :class:`ceedtap.BoundarySpace`. A set of nodes becomes a boundary set of the facets of the boundary
    all of whose nodes it has, and ridges of its other nodes. A warning says what is not understood. Points that no cell
    uses are removed, as is the constant third coordinate of a flat mesh.

    Args:
        path: the file; its ending decides on the format.
        orient: turn left-handed cells (:meth:`Mesh.reoriented`) instead of refusing them.

    Raises:
        MeshError: no such file, not a mesh, other cells in it (with their names and counts), NaN coordinates, cells
            with a non-positive Jacobian determinant (with their numbers), a surface in space.
        ImportError: meshio is not installed.

    Examples:
        >>> read("plate.msh")  # doctest: +SKIP
    """
    from ceedtap import mesh_io

    return mesh_io.read(path, orient=orient)


def gradients(order: int, dim: int, x: FloatArray) -> FloatArray:
    """(dim, len(x)**dim, (order + 1)**dim) reference derivatives of the geometry functions on the lattice of ``x``."""
    values, derivatives = lattice.lagrange(lattice.equispaced_points(order + 1), x)
    return np.stack([lattice.tensor([derivatives if d == e else values for e in range(dim)]) for d in range(dim)])


def entity_keys(corners: IntArray, codes: Sequence[tuple[int, ...]]) -> IntArray:
    """(num_cells, len(codes), k) orientation-free keys of entities of one kind of cells given by their corners."""
    local = np.stack([lattice.entity_nodes(code, 2, True) for code in codes])
    return lattice.canonical(corners[:, local])[0]


def _entity_sets(
    sets: Mapping[str, npt.ArrayLike], kind: str, num_cells: int, num_entities: int, of: str
) -> dict[str, IntArray]:
    """Checked copies of named sets of (cell, local entity) rows."""
    out = {}
    for name, rows in sets.items():
        what = f"{kind} {name!r}"
        pairs = _integers(rows, what, columns=2)
        _check_indices(pairs[:, 0], num_cells, what, "cells")
        _check_indices(pairs[:, 1], num_entities, what, of)
        out[str(name)] = lattice.frozen(pairs)
    return out


def _integers(values: Any, what: str, columns: int | None = None) -> IntArray:
    """A fresh int64 array; with ``columns`` of shape (n, columns), where an empty list is n = 0."""
    array = plain_array(what, values)
    if array.size == 0 and columns is not None:
        return np.zeros((0, columns), dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise MeshError(f"{what}: expected integers, got {array.dtype}")
    array = np.array(array, dtype=np.int64, order="C")
    if columns == 1 and array.ndim == 1:
        array = array[:, None]
    if columns is not None and (array.ndim != 2 or array.shape[1] != columns):
        raise MeshError(f"{what}: expected {columns} columns, got shape {array.shape}")
    return array


def _check_indices(ids: IntArray, bound: int, what: str, of: str) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= bound):
        raise MeshError(f"{what}: indices {ids.min()}..{ids.max()} are not in 0..{bound - 1}, the range of {of}")


def _check_finite(points: FloatArray, numbers: IntArray | None = None) -> None:
    bad = np.flatnonzero(~np.isfinite(points).all(axis=1))
    if bad.size:
        named = bad if numbers is None else numbers[bad]
        first = points[bad[0]].tolist()
        raise MeshError(f"coordinates that are not finite at points {_some(named)}: {first} at the first")


def _some(numbers: IntArray) -> str:
    """The first few of many numbers, for messages."""
    shown = ", ".join(str(int(i)) for i in numbers[:5])
    return shown if len(numbers) <= 5 else f"{shown}, ... ({len(numbers)} of them)"
