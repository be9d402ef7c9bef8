"""Traces of spaces on the boundary, whose elements are facets of the mesh."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

import numpy as np

from ceedtap import lattice
from ceedtap.elements import LagrangeElements
from ceedtap.facet_cells import FacetCells
from ceedtap.lattice import IntArray

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed
    from ceedtap.space import Space

__all__ = ["BoundarySpace"]


class BoundarySpace(LagrangeElements):
    """The trace of a space on facets of its mesh; made by :meth:`ceedtap.Space.boundary`.

    Its fields are the arrays of the space, of the same shape and with the same nodes. Its elements are the facets, of
    dimension ``dim = mesh.dim - 1``: ``.value``, ``.grad`` (of shape (dim, ...): derivatives along the facet),
    ``.weight`` and :func:`ceedtap.quadrature` mean the same as for cells, one dimension lower. The directions of each
    facet are such that :func:`ceedtap.normal` of the tangents ``.geometry.grad`` points out of its cell. A facet
    between two cells is in a set as a facet of one of them: of files and :meth:`Mesh.from_arrays` that one out of which
    the facet's own normal points, to the right of a line and by the right-hand rule of a quadrilateral.

    :attr:`inside` and :attr:`outside` are the cells on both sides, with the whole gradient of a field there: for normal
    derivatives, as in stresses on walls and Nitsche's method, and for jumps.

    Attributes:
        space: the space.
        facets: (num_elements, 2) rows of (cell, local facet).
    """

    def __init__(self, space: Space, name: str | tuple[str, ...] | None) -> None:
        facets = space.mesh.facets(name)
        # Of a facet that is named from both of its cells the first stays.
        _, first = np.unique(space.mesh.facet_numbers[facets[:, 0], facets[:, 1]], return_index=True)
        facets = np.unique(facets[first], axis=0)
        self._where = "the boundary" if name is None else f"the boundary {name!r}"
        if len(facets) == 0:
            raise ValueError(f"{self._where} of the mesh has no facets")
        self._name = name
        self.space = space
        self.facets: IntArray = lattice.frozen(facets)
        self.ceed, self.mesh = space.ceed, space.mesh
        self.degree, self.quadrature = space.degree, space.quadrature
        self.components, self.qmode = space.components, space.qmode
        self.num_nodes = space.num_nodes
        # Weak: these know the trace.
        self._cells: weakref.WeakValueDictionary[bool, FacetCells] = weakref.WeakValueDictionary()
        local = lattice.facet_nodes(self.mesh.dim, self.degree + 1)
        self.element_nodes: IntArray = lattice.frozen(
            np.take_along_axis(space.element_nodes[facets[:, 0]], local[facets[:, 1]], axis=1)
        )

    def __repr__(self) -> str:
        return f"<{self.where} of {self.space!r}, {self.num_elements} facets>"

    @property
    def dim(self) -> int:
        """Dimension of the facets."""
        return self.mesh.dim - 1

    @property
    def where(self) -> str:
        """Which boundary it is, for messages."""
        return self._where

    def on(self, ceed: Ceed) -> BoundarySpace:
        """The same trace on another Ceed."""
        return self.space.on(ceed).boundary(self._name)

    @property
    def inside(self) -> FacetCells:
        """The cells that the normals point out of, at the quadrature points of the facets."""
        return self._cells_of(True)

    @property
    def outside(self) -> FacetCells:
        """The cells on the other side, that the normals point into.

        Raises:
            ValueError: facets are on the boundary of the mesh, where there is no other cell.
        """
        return self._cells_of(False)

    def _cells_of(self, inside: bool) -> FacetCells:
        cells = self._cells.get(inside)
        if cells is None:
            cells = self._cells[inside] = FacetCells(self, self.space, inside)
        return cells

    @functools.cached_property
    def geometry(self) -> BoundarySpace:
        """The trace of the mesh's own geometry on the same facets, with ``mesh.points`` as a field."""
        return self.space.geometry.boundary(self._name)
