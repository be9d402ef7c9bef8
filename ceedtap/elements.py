"""What spaces on cells and on facets have in common: Lagrange functions on a set of tensor-product elements."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ceedtap.ceed import Basis, Ceed, ElemRestriction, EvalMode, StridedElemRestriction
from ceedtap.fields import Field
from ceedtap.lattice import IntArray
from ceedtap.mesh import Mesh


class LagrangeElements:
    """Tensor-product Lagrange functions of one degree on elements that share the nodes of one L-vector.

    Attributes:
        ceed, mesh, degree, quadrature, components, qmode: as of :class:`ceedtap.Space`.
        num_nodes: nodes of the L-vector.
        element_nodes: (num_elements, (degree + 1)**dim) numbers of the nodes of each element, lexicographic.
    """

    ceed: Ceed
    mesh: Mesh
    degree: int
    quadrature: int
    components: int
    qmode: int
    num_nodes: int
    element_nodes: IntArray

    @property
    def dim(self) -> int:
        """Dimension of the elements."""
        raise NotImplementedError

    @property
    def where(self) -> str:
        """What the elements are, for messages."""
        raise NotImplementedError

    def on(self, ceed: Ceed) -> LagrangeElements:
        """The same on another Ceed."""
        raise NotImplementedError

    def same_elements(self, other: LagrangeElements) -> bool:
        """Whether the elements of another space on this mesh are the same, in the same order."""
        raise NotImplementedError

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return len(self.element_nodes)

    @property
    def lsize(self) -> int:
        """Length of an L-vector: ``num_nodes * components``."""
        return self.num_nodes * self.components

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a field: (num_nodes,) for one component, else (num_nodes, components)."""
        return (self.num_nodes,) if self.components == 1 else (self.num_nodes, self.components)

    @property
    def num_quadrature_points(self) -> int:
        """Quadrature points of one element: ``quadrature ** dim``."""
        return int(self.quadrature**self.dim)

    # -- libCEED -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def restriction(self) -> ElemRestriction:
        """libCEED's element restriction: component stride 1, offsets ``element_nodes * components``."""
        offsets = (self.element_nodes * self.components).astype(np.int32).ravel()
        num_elements, size = self.element_nodes.shape
        return self.ceed.ElemRestriction(num_elements, size, self.components, 1, self.lsize, offsets)

    @functools.cached_property
    def basis(self) -> Basis:
        """libCEED's tensor-product Lagrange basis with ``degree + 1`` nodes and ``quadrature`` points per direction."""
        return self.ceed.BasisTensorH1Lagrange(self.dim, self.components, self.degree + 1, self.quadrature, self.qmode)

    def quadrature_restriction(self, components: int = 1) -> StridedElemRestriction:
        """A strided restriction for data at the quadrature points.

        Its L-vector seen from JAX has the shape (num_elements, components, num_quadrature_points): the strides are
        explicit because libCEED's backends choose different ones for ``STRIDES_BACKEND``. Restrictions are cached per
        component count.
        """
        if isinstance(components, bool) or not isinstance(components, (int, np.integer)) or components < 1:
            raise ValueError(f"components: expected a positive integer, got {components!r}")
        return self._quadrature_restriction(int(components))

    @functools.cached_property
    def _quadrature_restriction(self) -> Callable[[int], StridedElemRestriction]:
        @functools.cache  # per space: a cache on the class would keep every space alive
        def make(components: int) -> StridedElemRestriction:
            points, num_elements = self.num_quadrature_points, self.num_elements
            size = num_elements * points * components
            if size >= 2**31:
                raise ValueError(f"{size} values at quadrature points: libCEED's 32-bit indices end at 2147483647")
            strides = np.array([1, points, points * components], dtype=np.int32)
            return self.ceed.StridedElemRestriction(num_elements, points, components, size, strides)

        return make

    # -- fields of point functions -------------------------------------------------------------------------------

    @property
    def value(self) -> Field:
        """Values at a quadrature point: of shape () for one component, else (components,)."""
        return Field(self, EvalMode.INTERP, self.shape[1:])

    @property
    def grad(self) -> Field:
        """Derivatives with respect to the reference coordinates: (dim,) for one component, else (dim, components)."""
        return Field(self, EvalMode.GRAD, (self.dim, *self.shape[1:]))

    @property
    def weight(self) -> Field:
        """The weight of the quadrature point on the reference element."""
        return Field(self, EvalMode.WEIGHT, ())
