"""Traces of spaces on the boundary, whose elements are facets of the mesh."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from ceedtap import lattice
from ceedtap.elements import LagrangeElements
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
    facet are such that :func:`ceedtap.normal` of the tangents ``.geometry.grad`` points out of its cell.

    Attributes:
        space: the space.
        facets: (num_elements, 2) rows of (cell, local facet).
    """

    def __init__(self, space: Space, name: str | tuple[str, ...] | None) -> None:
        facets = np.unique(space.mesh.facets(name), axis=0)
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
        local = facet_nodes(self.mesh.dim, self.degree + 1)
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

    def same_elements(self, other: LagrangeElements) -> bool:
        """Whether the other's facets are the same."""
        return isinstance(other, BoundarySpace) and np.array_equal(self.facets, other.facets)

    def on(self, ceed: Ceed) -> BoundarySpace:
        """The same trace on another Ceed."""
        return self.space.on(ceed).boundary(self._name)

    @functools.cached_property
    def geometry(self) -> BoundarySpace:
        """The trace of the mesh's own geometry on the same facets, with ``mesh.points`` as a field."""
        return self.space.geometry.boundary(self._name)


@functools.cache
def facet_nodes(dim: int, n: int) -> IntArray:
    """(2 * dim, n**(dim - 1)) lattice positions of the nodes of each local facet, in an order such that the normal made
    of the facet's directions points out of a right-handed cell."""
    rows = []
    for number, code in enumerate(lattice.facets(dim)):
        nodes = lattice.entity_nodes(code, n, True)
        direction, side = divmod(number, 2)
        # Turned clockwise, a line's tangent points out of a square on the sides right and bottom. The other two
        # coordinates in their order give the cross product +x, -y, +z.
        inward = (side == 1) == (direction == 1)
        if inward:
            nodes = nodes[::-1] if dim == 2 else nodes.reshape(n, n).T.ravel()
        rows.append(nodes)
    return lattice.frozen(np.stack(rows))
