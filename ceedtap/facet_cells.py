"""Cells at the quadrature points of their facets: whole gradients on facets, from either side."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ceedtap import lattice
from ceedtap.ceed import HEX, QUAD, BasisH1, Ceed
from ceedtap.ceed_constants import EvalMode
from ceedtap.elements import LagrangeElements
from ceedtap.lattice import IntArray

if TYPE_CHECKING:
    from ceedtap.boundary_space import BoundarySpace
    from ceedtap.space import Space

__all__ = ["FacetCells"]


class FacetCells(LagrangeElements):
    """The cells on one side of the facets of a trace; :attr:`BoundarySpace.inside` and :attr:`BoundarySpace.outside`.

    Its fields are the arrays of the space. Its elements are the cells, one for each facet, its quadrature points those
    of the facet: ``.value`` and ``.weight`` are as on the trace, but ``.grad`` has all derivatives. The directions of
    each cell are turned such that the first ones are those of the facet, so the first rows of ``.grad`` are the
    tangential ones of the trace, and the last one crosses the facet the way that the normal points, on both sides
    alike: what is inside and outside of one trace can be in one operator, with the trace itself.

    Attributes:
        space: the space.
        facets: as of the trace: (num_elements, 2) rows of (cell inside, local facet).

    The normal derivative of x y on the right side of a square is y:

    >>> import ceedtap as ct, jax, jax.numpy as jnp
    >>> jax.config.update("jax_enable_x64", True)
    >>> V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=2)
    >>> side = V.boundary("right").inside
    >>> @ct.operator(inputs=dict(u=side.grad, x=side.geometry.grad, w=side.weight), outputs=dict(q=ct.quadrature()))
    ... def flux(u, x, w):
    ...     return w * ct.normal(x[:-1]) @ jnp.linalg.solve(x, u)
    >>> print(round(float(flux(V.interpolate(lambda x: x[:, 0] * x[:, 1]), V.mesh.points).sum()), 12))
    0.5
    """

    facets: IntArray

    def __init__(self, trace: BoundarySpace, space: Space, inside: bool) -> None:
        self._trace = trace
        self._inside = inside
        self.space = space
        self.facets = trace.facets
        self.ceed, self.mesh = space.ceed, space.mesh
        self.degree, self.quadrature = space.degree, space.quadrature
        self.components, self.qmode = space.components, space.qmode
        self.num_nodes = space.num_nodes
        rows = self.facets if inside else self._other_side()
        order = layers(self.mesh.dim, self.degree + 1)[rows[:, 1]]  # (facets, layers into the cell, nodes)
        if inside:
            order = order[:, ::-1]
        else:
            order = np.take_along_axis(order, self._turns(rows)[:, None], axis=2)
        nodes = np.take_along_axis(space.element_nodes[rows[:, 0]], order.reshape(len(rows), -1), axis=1)
        self.element_nodes: IntArray = lattice.frozen(nodes)

    def __repr__(self) -> str:
        return f"<{self.where} of {self.space!r}, {self.num_elements} facets>"

    @property
    def dim(self) -> int:
        """Dimension of the mesh."""
        return self.mesh.dim

    @property
    def where(self) -> str:
        """Which cells they are, for messages."""
        return f"the cells {'inside' if self._inside else 'outside'} of {self._trace.where}"

    @property
    def num_quadrature_points(self) -> int:
        """Quadrature points of one facet: ``quadrature ** (dim - 1)``."""
        return self._trace.num_quadrature_points

    def on(self, ceed: Ceed) -> FacetCells:
        """The same on another Ceed."""
        trace = self._trace.on(ceed)
        return trace.inside if self._inside else trace.outside

    @functools.cached_property
    def geometry(self) -> FacetCells:
        """The mesh's own geometry in the same cells, with ``mesh.points`` as a field."""
        geometry = self._trace.geometry
        return geometry.inside if self._inside else geometry.outside

    @functools.cached_property
    def basis(self) -> BasisH1:
        """libCEED's basis of a cell, evaluated on the facet where the last coordinate is 1 (inside) or -1 (outside)."""
        end = 1.0 if self._inside else -1.0
        value, slope = lattice.lagrange(lattice.lobatto_points(self.degree + 1), np.array([end]))
        on_facet, along = self._trace.table(EvalMode.INTERP)[:, :, 0], self._trace.table(EvalMode.GRAD)
        gradient = [np.kron(value, table) for table in np.moveaxis(along, 2, 0)]
        of_trace: Any = self._trace.basis
        on_line = of_trace.get_q_ref_1d()
        points = on_line[lattice.lexicographic(len(on_line), self.dim - 1)]
        return self.ceed.BasisH1(
            HEX if self.dim == 3 else QUAD,
            self.components,
            (self.degree + 1) ** self.dim,
            self.num_quadrature_points,
            np.kron(value, on_facet),
            np.stack([*gradient, np.kron(slope, on_facet)]),
            np.column_stack([points, np.full(len(points), end)]).T,
            self._trace.weights,
        )

    def _other_side(self) -> IntArray:
        rows = self.mesh.other_side(self.facets)
        alone = np.flatnonzero(rows[:, 0] < 0)
        if alone.size:
            first = ", ".join(map(str, self.facets[alone[:5]].tolist()))
            raise ValueError(
                f"{alone.size} of {len(rows)} facets of {self._trace.where} have no cell outside, they are on the "
                f"boundary of the mesh: [cell, local facet] {first}{', ...' if alone.size > 5 else ''}"
            )
        return rows

    def _turns(self, rows: IntArray) -> IntArray:
        """(facets, nodes of a facet): which of the nodes in the order of the cell outside is each of those inside."""
        dim, corner_nodes = self.mesh.dim, lattice.facet_nodes(self.mesh.dim, 2)
        table = lattice.orientation_table(dim - 1, self.degree + 1)
        canonical = []
        for cells in (self.facets, rows):
            corners = np.take_along_axis(self.mesh.corners[cells[:, 0]], corner_nodes[cells[:, 1]], axis=1)
            canonical.append(table[lattice.canonical(corners)[1]])
        ours, theirs = canonical
        return np.take_along_axis(np.argsort(theirs, axis=1), ours, axis=1)


@functools.cache
def layers(dim: int, n: int) -> IntArray:
    """(2 * dim, n, n**(dim - 1)) lattice positions of a cell's nodes, in layers from each local facet into the cell."""
    facets = lattice.facet_nodes(dim, n)
    step = np.array([(1 if side == 0 else -1) * n**direction for direction in range(dim) for side in (0, 1)])
    return lattice.frozen(facets[:, None, :] + np.arange(n)[None, :, None] * step[:, None, None])
