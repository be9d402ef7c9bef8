"""A grid of equal elements on [0, 1]^dim, in one, two or three dimensions, for the examples."""

import numpy as np

import ceedtap as ct


class Grid:
    """Restriction, basis and nodes for Lagrange elements of a degree.

    Attributes:
        restriction, basis: of a field with `components`, which lie one after the other in the L-vector.
        nodes: coordinates, shape (dim, num_nodes).
    """

    def __init__(self, ceed: ct.Ceed, dim: int, elements: int, degree: int, components: int = 1) -> None:
        self.ceed, self.dim, self.quadrature = ceed, dim, degree + 2
        self.num_elem, per_side, P = elements**dim, elements * degree + 1, degree + 1
        self.num_nodes = per_side**dim
        numbers = np.arange(self.num_nodes).reshape([per_side] * dim)  # the first direction is the last axis
        windows = np.lib.stride_tricks.sliding_window_view(numbers, [P] * dim)
        offsets = windows[tuple([slice(None, None, degree)] * dim)].reshape(self.num_elem, P**dim)
        sizes = (self.num_elem, P**dim, components, self.num_nodes, components * self.num_nodes)
        self.restriction = ceed.ElemRestriction(*sizes, offsets)
        self.basis = ceed.BasisTensorH1Lagrange(dim, components, P, self.quadrature, ct.GAUSS)
        points = (ceed.lobatto_quadrature(P)[0] + 1) / 2
        line = np.append((np.arange(elements)[:, None] + points[:-1]).reshape(-1), elements) / elements
        self.nodes = np.stack([axis.reshape(-1) for axis in np.meshgrid(*[line] * dim, indexing="ij")[::-1]])

    def quadrature_data(self, components: int) -> ct.StridedElemRestriction:
        """The restriction of `components` values at each quadrature point."""
        n = self.quadrature**self.dim
        strides = [1, n, n * components]
        return self.ceed.StridedElemRestriction(self.num_elem, n, components, self.num_elem * n * components, strides)
