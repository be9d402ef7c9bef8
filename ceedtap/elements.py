"""What spaces on cells and on facets have in common: Lagrange functions on a set of tensor-product elements."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ceedtap.ceed import VECTOR_NONE, Basis, Ceed, ElemRestriction, EvalMode, StridedElemRestriction
from ceedtap.fields import Field
from ceedtap.lattice import IntArray
from ceedtap.mesh import Mesh


class ElementSpace:
    """What point functions need of a space: a restriction and a basis of libCEED, on some elements.

    Attributes:
        ceed: the Ceed that they are on.
    """

    ceed: Ceed
    restriction: Any
    basis: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a field of the space, an array that is an L-vector when flattened."""
        raise NotImplementedError

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return int(self.restriction.nelem)

    @property
    def num_quadrature_points(self) -> int:
        """Quadrature points of one element."""
        return int(self.basis.num_quadrature_points)

    @property
    def where(self) -> str:
        """What the elements are, for messages."""
        raise NotImplementedError

    def on(self, ceed: Ceed) -> ElementSpace:
        """The same on another Ceed."""
        raise NotImplementedError

    def difference(self, other: ElementSpace) -> tuple[str, object, object] | None:
        """Why fields of both cannot be in one operator: what they do not share, as it is here and there."""
        for what, ours, theirs in (
            ("one ceed", self.ceed, other.ceed),
            ("their elements", f"on {self.where}", f"on {other.where}"),
            ("one number of quadrature points", self.num_quadrature_points, other.num_quadrature_points),
        ):
            same = self.num_elements == other.num_elements if what == "their elements" else ours == theirs
            if ours is not theirs and not same:
                return what, ours, theirs
        return None

    # -- fields of point functions -------------------------------------------------------------------------------

    def _field(self, mode: EvalMode) -> Field:
        count = self.basis.components(mode)
        if not count:
            raise AttributeError(f"{self!r} is in {self.basis.space}: it has no EVAL_{mode.name}")
        components = self.basis.ncomp
        first = (count,) if count > 1 or mode is EvalMode.GRAD else ()
        return Field(self, mode, (*first, components) if components > 1 else first)

    @property
    def value(self) -> Field:
        """Values at a quadrature point: of shape () for one component, else (components,); of vectors with dim in
        front."""
        return self._field(EvalMode.INTERP)

    @property
    def grad(self) -> Field:
        """Derivatives with respect to the reference coordinates: (dim,) for one component, else (dim, components)."""
        return self._field(EvalMode.GRAD)

    @property
    def div(self) -> Field:
        """The divergence in the reference coordinates, of a space in H(div)."""
        return self._field(EvalMode.DIV)

    @property
    def curl(self) -> Field:
        """The curl in the reference coordinates, of a space in H(curl): (3,) in three dimensions, () in two."""
        return self._field(EvalMode.CURL)

    @property
    def weight(self) -> Field:
        """The weight of the quadrature point on the reference element."""
        return Field(self, EvalMode.WEIGHT, ())

    # -- as matrices ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """(points,) weights of the quadrature points."""
        vector = self.ceed.Vector(self.num_quadrature_points)
        self.basis.apply(1, EvalMode.WEIGHT, VECTOR_NONE, vector)
        with vector.array_read() as values:
            return np.array(values)

    def table(self, mode: EvalMode) -> np.ndarray:
        """What an evaluation makes of the basis functions: (points, nodes, values of one component)."""
        get = {"INTERP": "get_interp", "GRAD": "get_grad", "DIV": "get_div", "CURL": "get_curl"}[mode.name]
        matrix: np.ndarray = getattr(self.basis, get)()
        return matrix[:, :, None] if matrix.ndim == 2 else np.moveaxis(matrix, 0, 2)

    @property
    def element_dofs(self) -> IntArray:
        """(elements, nodes, components) entries of the L-vector."""
        raise NotImplementedError

    @property
    def orientation(self) -> np.ndarray | None:
        """(elements, nodes, components) signs of the degrees of freedom in each element; None: all are +1."""
        return None


class LagrangeElements(ElementSpace):
    """Tensor-product Lagrange functions of one degree on elements that share the nodes of one L-vector.

    Attributes:
        ceed, mesh, degree, quadrature, components, qmode: as of :class:`ceedtap.Space`.
        num_nodes: nodes of the L-vector.
        element_nodes: (num_elements, (degree + 1)**dim) numbers of the nodes of each element, lexicographic.
        facets: (num_elements, 2) rows of (cell, local facet) where the elements are at facets, else None.
    """

    ceed: Ceed
    mesh: Mesh
    degree: int
    quadrature: int
    components: int
    qmode: int
    num_nodes: int
    element_nodes: IntArray
    facets: IntArray | None = None

    @property
    def dim(self) -> int:
        """Dimension of the elements."""
        raise NotImplementedError

    def same_elements(self, other: LagrangeElements) -> bool:
        """Whether the elements of another space on this mesh are the same, in the same order."""
        if self.facets is None or other.facets is None:
            return self.facets is other.facets
        return np.array_equal(self.facets, other.facets)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return len(self.element_nodes)

    def difference(self, other: ElementSpace) -> tuple[str, object, object] | None:
        if not isinstance(other, LagrangeElements):
            return super().difference(other)
        for what in ("mesh", "quadrature", "qmode", "ceed"):
            ours, theirs = getattr(self, what), getattr(other, what)
            if ours is not theirs and ours != theirs:
                return f"one {what}", ours, theirs
        return None if self.same_elements(other) else ("their elements", f"on {self.where}", f"on {other.where}")

    @functools.cached_property
    def element_dofs(self) -> IntArray:
        """(elements, nodes, components) entries of the L-vector."""
        return self.element_nodes[:, :, None] * self.components + np.arange(self.components)

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
