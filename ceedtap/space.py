"""Continuous Lagrange spaces on a mesh, as libCEED restrictions and bases."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ceedtap import lattice
from ceedtap.boundary_space import BoundarySpace
from ceedtap.ceed import GAUSS, Ceed
from ceedtap.elements import LagrangeElements
from ceedtap.lattice import FloatArray, IntArray
from ceedtap.mesh import Mesh
from ceedtap.plain_arrays import plain_array

__all__ = ["Space"]

_Names = str | tuple[str, ...] | None


class Space(LagrangeElements):
    """Continuous tensor-product Lagrange functions of one degree on the Gauss-Lobatto nodes of every cell.

    A field of the space is an array of shape (num_nodes,) for one component and (num_nodes, components) for several,
    components fastest: flattened, it is libCEED's L-vector. Where the degree is the order of the mesh's geometry the
    nodes are the mesh's own points in their own order, so that ``mesh.points`` is a field of the space
    with ``dim`` components.

    Args:
        ceed: the libCEED context that the restriction and the basis live in.
        mesh: the mesh; it is checked (:meth:`Mesh.check`).
        degree: polynomial degree in each direction, at least 1.
        quadrature: quadrature points per direction; ``degree + 2`` by default, the rule of the CEED bake-off problems.
        components: components of a field.
        qmode: ``GAUSS`` (default) or ``GAUSS_LOBATTO`` of :mod:`ceedtap.ceed`.

    Raises:
        ValueError: degree, quadrature or components out of range, or more entries than 32-bit indices can name.
        MeshError: the mesh has inverted or inconsistent cells.

    Examples:
        >>> import ceedtap as ct
        >>> space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=3)
        >>> space
        Space(degree=3, quadrature=5, components=1, num_nodes=49, mesh=Mesh(dim=2, order=1, num_cells=4, ...))
        >>> space.interpolate(lambda x: x[:, 0] + x[:, 1]).shape
        (49,)
    """

    def __init__(
        self,
        ceed: Ceed,
        mesh: Mesh,
        degree: int,
        quadrature: int | None = None,
        components: int = 1,
        qmode: int = GAUSS,
    ) -> None:
        quadrature = degree + 2 if quadrature is None and isinstance(degree, (int, np.integer)) else quadrature
        for name, value in (("degree", degree), ("quadrature", quadrature), ("components", components)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")
        assert quadrature is not None
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh: expected a ceedtap.mesh.Mesh, got {type(mesh).__name__}")
        mesh.check()
        self.ceed = ceed
        self.mesh = mesh
        self.degree = int(degree)
        self.quadrature = int(quadrature)
        self.components = int(components)
        self.qmode = qmode
        # Weak: a trace knows its space, and nothing of libCEED should wait for the garbage collector.
        self._traces: weakref.WeakValueDictionary[_Names, BoundarySpace] = weakref.WeakValueDictionary()
        self._moved: weakref.WeakValueDictionary[Ceed, Space] = weakref.WeakValueDictionary()
        if self.degree == mesh.order:
            self.num_nodes, self.element_nodes = mesh.num_points, mesh.cells
        else:
            self.num_nodes, numbers = lattice.number_nodes(mesh.corners, self.degree)
            self.element_nodes = lattice.frozen(numbers)
        if max(self.lsize, mesh.num_cells * self.num_quadrature_points) >= 2**31:
            raise ValueError(
                f"{self.lsize} degrees of freedom and {mesh.num_cells * self.num_quadrature_points} quadrature points: "
                "libCEED's 32-bit indices end at 2147483647"
            )

    def __repr__(self) -> str:
        mesh = f"Mesh(dim={self.mesh.dim}, order={self.mesh.order}, num_cells={self.mesh.num_cells}, ...)"
        return (
            f"Space(degree={self.degree}, quadrature={self.quadrature}, components={self.components}, "
            f"num_nodes={self.num_nodes}, mesh={mesh})"
        )

    @property
    def dim(self) -> int:
        """Dimension of the mesh."""
        return self.mesh.dim

    @property
    def where(self) -> str:
        """What the elements are, for messages."""
        return "the cells"

    def on(self, ceed: Ceed) -> Space:
        """The same space on another Ceed; the same object as long as it lives, since fields of one array share it."""
        moved = self if ceed is self.ceed else self._moved.get(ceed)
        if moved is None:
            moved = Space(ceed, self.mesh, self.degree, self.quadrature, self.components, self.qmode)
            self._moved[ceed] = moved
        return moved

    @functools.cached_property
    def geometry(self) -> Space:
        """The space of the mesh's own geometry at the same quadrature points, with ``mesh.points`` as a field."""
        return Space(self.ceed, self.mesh, self.mesh.order, self.quadrature, self.mesh.dim, self.qmode)

    @functools.cached_property
    def nodes(self) -> FloatArray:
        """(num_nodes, dim) float64 physical coordinates of the nodes, by the mesh's geometry."""
        if self.degree == self.mesh.order:
            return self.mesh.points
        nodes = np.empty((self.num_nodes, self.mesh.dim))
        nodes[self.element_nodes] = self.mesh.map(lattice.lobatto_points(self.degree + 1))
        return lattice.frozen(nodes)

    def boundary(self, name: str | Sequence[str] | None = None) -> BoundarySpace:
        """The trace of the space on a boundary set, on several together, or (None) on the whole boundary.

        Its elements are the facets, once each. Fields are the arrays of the space itself, so operators on the boundary
        and on the cells can be added. A set may be inside of the mesh: see :class:`BoundarySpace`.

        Args:
            name: of the boundary set.

        Raises:
            KeyError: no set of this name; the message lists the names there are.
            ValueError: there are no facets in it.

        Examples:
            >>> import ceedtap as ct
            >>> space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(4, 2), degree=2)
            >>> space.boundary(["left", "top"])
            <the boundary ('left', 'top') of Space(degree=2, ...), 6 facets>
        """
        key = name if name is None or isinstance(name, str) else tuple(dict.fromkeys(name))
        trace = self._traces.get(key)
        if trace is None:
            trace = self._traces[key] = BoundarySpace(self, key)
        return trace

    def boundary_nodes(self, name: str | Sequence[str] | None = None) -> IntArray:
        """Sorted node numbers on a boundary set, on several together, or (None) on the whole boundary.

        A name may also be that of a ridge set of the mesh (single corners or edges); if it is both, both count.

        Raises:
            KeyError: no set of this name; the message lists the names there are.
        """
        mesh = self.mesh
        facets, ridges = lattice.facets(mesh.dim), lattice.ridges(mesh.dim)
        if name is None:
            return np.unique(self._entity_nodes(mesh.boundary_facets, facets))
        found = [np.zeros(0, dtype=np.int64)]
        for one in [name] if isinstance(name, str) else name:
            if one in mesh.boundary or one not in mesh.ridges:
                found.append(self._entity_nodes(mesh.facets(one), facets))
            if one in mesh.ridges:
                found.append(self._entity_nodes(mesh.ridges[one], ridges))
        return np.unique(np.concatenate(found))

    def _entity_nodes(self, rows: IntArray, codes: tuple[tuple[int, ...], ...]) -> IntArray:
        """All nodes of the (cell, local entity) rows, with repetitions."""
        found = [np.zeros(0, dtype=np.int64)]
        for number in np.unique(rows[:, 1]):
            local = lattice.entity_nodes(codes[number], self.degree + 1, True)
            found.append(self.element_nodes[rows[rows[:, 1] == number, 0]][:, local].ravel())
        return np.concatenate(found)

    def interpolate(self, f: Callable[[FloatArray], npt.ArrayLike] | npt.ArrayLike) -> FloatArray:
        """The field that equals ``f`` at the nodes.

        Args:
            f: a function of the node coordinates (num_nodes, dim) that returns (num_nodes,) or, for several components,
                (num_nodes, components); or a constant, one number or one per component.

        Returns:
            A new float64 array of shape :attr:`shape`.

        Raises:
            ValueError: the values do not have this shape.
        """
        values: Any = f(self.nodes) if callable(f) else f
        array = np.asarray(plain_array("values", values), dtype=np.float64)
        if array.shape == (self.num_nodes, 1) and self.components == 1:
            array = array[:, 0]
        if array.shape != self.shape and array.shape not in ((), self.shape[1:]):
            raise ValueError(f"f: expected values of shape {self.shape}, got {array.shape}")
        return np.array(np.broadcast_to(array, self.shape))

    def linear_cells(self) -> IntArray:
        """Every cell split at its nodes into ``degree**dim`` first-order cells, to look at a field with common tools.

        Returns:
            (num_cells * degree**dim, 2**dim) node numbers in the corner order of VTK and meshio.
        """
        return lattice.linear_cells(self.element_nodes, self.degree, self.mesh.dim)
