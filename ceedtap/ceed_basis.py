"""Bases: from the nodes of an element to its quadrature points, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ceedtap.ceed_constants import (
    GAUSS_LOBATTO,
    NOTRANSPOSE,
    TRANSPOSE,
    VECTOR_NONE,
    ElemTopology,
    EvalMode,
    QuadMode,
    Sentinel,
    TransposeMode,
)
from ceedtap.ceed_object import INT_MAX, CeedObject, enum, integer, scalars
from ceedtap.ceed_restriction import check_distinct, check_vector
from ceedtap.ceed_vector import Vector

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed


class Basis(CeedObject):
    """What all bases share.

    Attributes:
        dim: dimension of the element.
        ncomp: components of a field.
        num_nodes: nodes of an element.
        num_quadrature_points: quadrature points of an element.
    """

    dim: int
    ncomp: int
    num_nodes: int
    num_quadrature_points: int

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} dim={self.dim} ncomp={self.ncomp} num_nodes={self.num_nodes} "
            f"num_quadrature_points={self.num_quadrature_points}>"
        )

    def _size(self, dim: int, ncomp: int, nodes: int, points: int) -> None:
        self.dim, self.ncomp, self.num_nodes, self.num_quadrature_points = dim, ncomp, nodes, points
        if max(nodes, points) * ncomp * dim > INT_MAX:
            raise ValueError(f"an element of {nodes} nodes and {points} quadrature points is too large for libCEED")

    def get_num_nodes(self) -> int:
        """Nodes of an element."""
        return self.num_nodes

    def get_num_quadrature_points(self) -> int:
        """Quadrature points of an element."""
        return self.num_quadrature_points

    def field_size(self, emode: int) -> int:
        """Values per quadrature point of one field: what a QFunction sees with this evaluation mode."""
        return {EvalMode.INTERP: self.ncomp, EvalMode.GRAD: self.dim * self.ncomp, EvalMode.WEIGHT: 1}[EvalMode(emode)]

    def apply(self, nelem: int, emode: int, u: Vector | Sentinel, v: Vector, tmode: int = NOTRANSPOSE) -> None:
        """Applies the basis to E-vectors, or its transpose.

        Args:
            nelem: number of elements.
            emode: EVAL_INTERP, EVAL_GRAD (gradients on the reference element, direction slowest) or EVAL_WEIGHT.
            u: values at the nodes; with TRANSPOSE at the quadrature points; VECTOR_NONE for EVAL_WEIGHT.
            v: values at the quadrature points; with TRANSPOSE at the nodes; overwritten.
            tmode: NOTRANSPOSE or TRANSPOSE.

        Raises:
            TypeError, ValueError: an unknown mode, or vectors of other lengths.
            CeedAccessError: a vector has no data or is locked by an array view.
        """
        nelem = integer("nelem", nelem, 1)
        mode, transpose = enum("emode", emode, EvalMode), enum("tmode", tmode, TransposeMode)
        if mode not in (EvalMode.INTERP, EvalMode.GRAD, EvalMode.WEIGHT):
            raise ValueError(f"emode: an H1 basis has EVAL_INTERP, EVAL_GRAD and EVAL_WEIGHT, not EVAL_{mode.name}")
        nodes, points = nelem * self.num_nodes * self.ncomp, nelem * self.num_quadrature_points * self.field_size(mode)
        if mode is EvalMode.WEIGHT and (transpose is TRANSPOSE or u is not VECTOR_NONE):
            raise ValueError("EVAL_WEIGHT takes no input: u is VECTOR_NONE and tmode NOTRANSPOSE")
        with self.ceed.lock:
            if mode is not EvalMode.WEIGHT:
                check_vector(self, "u", u, points if transpose is TRANSPOSE else nodes)
                assert isinstance(u, Vector)
                u._check_input("u")
            check_vector(self, "v", v, nodes if transpose is TRANSPOSE else points)
            if isinstance(u, Vector):
                check_distinct(u, v)
            v._check_output("v")
            v._prepare_output()
            source = u.pointer(self.ceed.library) if isinstance(u, Sentinel) else u.pointer
            self._call("CeedBasisApply", self.pointer, nelem, transpose, mode, source, v.pointer)

    @property
    def T(self) -> TransposeBasis:
        """The transpose."""
        return TransposeBasis(self)

    def transpose(self) -> TransposeBasis:
        """The transpose."""
        return TransposeBasis(self)

    def _matrix(self, function: str, *shape: int) -> np.ndarray:
        """A private copy of an array that the basis owns."""
        ffi = self.ceed.library.ffi
        array = ffi.new("const CeedScalar **")
        with self.ceed.lock:
            self._call(function, self.pointer, array)
            dtype = self.ceed.library.scalar_dtype
            size = int(np.prod(shape)) * dtype.itemsize
            return np.frombuffer(bytes(ffi.buffer(ffi.cast("char *", array[0]), size)), dtype).reshape(shape).copy()

    def get_interp(self) -> np.ndarray:
        """Values of the basis functions, shape (num_quadrature_points, num_nodes)."""
        return self._matrix("CeedBasisGetInterp", self.num_quadrature_points, self.num_nodes)

    def get_grad(self) -> np.ndarray:
        """Gradients on the reference element, shape (dim, num_quadrature_points, num_nodes)."""
        return self._matrix("CeedBasisGetGrad", self.dim, self.num_quadrature_points, self.num_nodes)


class BasisTensorH1(Basis):
    """A tensor-product basis of given one-dimensional matrices; made by :meth:`ceedtap.Ceed.BasisTensorH1`.

    Args:
        dim: 1, 2 or 3.
        ncomp: components of a field.
        P1d, Q1d: nodes and quadrature points in each direction.
        interp1d, grad1d: values and derivatives of the basis functions, Q1d * P1d values, points first.
        qref1d, qweight1d: coordinates in [-1, 1] and weights of the quadrature points, Q1d values.

    Raises:
        TypeError: arrays of another type than libCEED's scalar.
        ValueError: sizes out of range or arrays of another size.
    """

    P1d: int
    Q1d: int

    def __init__(
        self,
        ceed: Ceed,
        dim: int,
        ncomp: int,
        P1d: int,
        Q1d: int,
        interp1d: npt.ArrayLike,
        grad1d: npt.ArrayLike,
        qref1d: npt.ArrayLike,
        qweight1d: npt.ArrayLike,
    ) -> None:
        self._tensor_size(dim, ncomp, P1d, Q1d, 1)
        arrays = [
            scalars("interp1d", interp1d, self.Q1d * self.P1d, ceed),
            scalars("grad1d", grad1d, self.Q1d * self.P1d, ceed),
            scalars("qref1d", qref1d, self.Q1d, ceed),
            scalars("qweight1d", qweight1d, self.Q1d, ceed),
        ]

        def create(handle: Any) -> None:
            pointers = [ceed.library.ffi.cast("CeedScalar *", array.ctypes.data) for array in arrays]
            sizes = (self.dim, self.ncomp, self.P1d, self.Q1d)
            ceed._call("CeedBasisCreateTensorH1", ceed.pointer, *sizes, *pointers, handle)

        self._own(ceed, "CeedBasis", create)

    def _tensor_size(self, dim: int, ncomp: int, P: int, Q: int, minimum: int) -> None:
        dim, ncomp = integer("dim", dim, 1, 3), integer("ncomp", ncomp, 1)
        self.P1d, self.Q1d = integer("P", P, minimum, 1000), integer("Q", Q, 1, 1000)
        self._size(dim, ncomp, self.P1d**dim, self.Q1d**dim)

    def get_interp_1d(self) -> np.ndarray:
        """Values of the one-dimensional basis functions, shape (Q1d, P1d)."""
        return self._matrix("CeedBasisGetInterp1D", self.Q1d, self.P1d)

    def get_grad_1d(self) -> np.ndarray:
        """Derivatives of the one-dimensional basis functions, shape (Q1d, P1d)."""
        return self._matrix("CeedBasisGetGrad1D", self.Q1d, self.P1d)

    def get_q_ref_1d(self) -> np.ndarray:
        """Coordinates of the quadrature points in [-1, 1], shape (Q1d,)."""
        return self._matrix("CeedBasisGetQRef", self.Q1d)

    def get_q_weight_1d(self) -> np.ndarray:
        """Weights of the quadrature points, shape (Q1d,)."""
        return self._matrix("CeedBasisGetQWeights", self.Q1d)


class BasisTensorH1Lagrange(BasisTensorH1):
    """Lagrange polynomials on Gauss-Lobatto nodes; made by :meth:`ceedtap.Ceed.BasisTensorH1Lagrange`.

    Args:
        dim: 1, 2 or 3.
        ncomp: components of a field.
        P: nodes in each direction, at least 2; the degree is ``P - 1``.
        Q: quadrature points in each direction, at least 2 for GAUSS_LOBATTO.
        qmode: GAUSS or GAUSS_LOBATTO.

    Raises:
        TypeError, ValueError: sizes or modes out of range.

    >>> import ceedtap as ct
    >>> basis = ct.Ceed("/cpu/self").BasisTensorH1Lagrange(3, 1, 2, 2, ct.GAUSS)
    >>> basis.get_num_nodes(), basis.get_interp_1d().sum(axis=1).round(14).tolist()
    (8, [1.0, 1.0])
    """

    def __init__(self, ceed: Ceed, dim: int, ncomp: int, P: int, Q: int, qmode: int) -> None:
        mode = enum("qmode", qmode, QuadMode)
        self._tensor_size(dim, ncomp, P, Q, 2)
        if mode is GAUSS_LOBATTO:
            integer("Q (Gauss-Lobatto points include both ends)", Q, 2)

        def create(handle: Any) -> None:
            sizes = (self.dim, self.ncomp, self.P1d, self.Q1d)
            ceed._call("CeedBasisCreateTensorH1Lagrange", ceed.pointer, *sizes, mode, handle)

        self._own(ceed, "CeedBasis", create)


class BasisH1(Basis):
    """A basis of given matrices, on any element; made by :meth:`ceedtap.Ceed.BasisH1`.

    Args:
        topo: LINE, TRIANGLE, QUAD, TET, PYRAMID, PRISM or HEX.
        ncomp: components of a field.
        nnodes, nqpts: nodes and quadrature points of an element.
        interp: values of the basis functions, nqpts * nnodes values, points first.
        grad: their gradients on the reference element, dim * nqpts * nnodes values, direction first.
        qref: coordinates of the quadrature points, dim * nqpts values, direction first.
        qweight: their weights, nqpts values.

    Raises:
        TypeError: arrays of another type than libCEED's scalar.
        ValueError: sizes out of range or arrays of another size.
    """

    def __init__(
        self,
        ceed: Ceed,
        topo: int,
        ncomp: int,
        nnodes: int,
        nqpts: int,
        interp: npt.ArrayLike,
        grad: npt.ArrayLike,
        qref: npt.ArrayLike,
        qweight: npt.ArrayLike,
    ) -> None:
        self.topo = enum("topo", topo, ElemTopology)
        nnodes, nqpts = integer("nnodes", nnodes, 1), integer("nqpts", nqpts, 1)
        self._size(self.topo.dim, integer("ncomp", ncomp, 1), nnodes, nqpts)
        arrays = [
            scalars("interp", interp, nqpts * nnodes, ceed),
            scalars("grad", grad, self.dim * nqpts * nnodes, ceed),
            scalars("qref", qref, self.dim * nqpts, ceed),
            scalars("qweight", qweight, nqpts, ceed),
        ]

        def create(handle: Any) -> None:
            pointers = [ceed.library.ffi.cast("CeedScalar *", array.ctypes.data) for array in arrays]
            ceed._call("CeedBasisCreateH1", ceed.pointer, self.topo, self.ncomp, nnodes, nqpts, *pointers, handle)

        self._own(ceed, "CeedBasis", create)


class TransposeBasis:
    """The transpose of a basis."""

    def __init__(self, basis: Basis) -> None:
        self._basis = basis

    def __repr__(self) -> str:
        return f"<transpose of {self._basis!r}>"

    @property
    def T(self) -> Basis:
        """The basis itself."""
        return self._basis

    def apply(self, nelem: int, emode: int, u: Vector, v: Vector) -> None:
        """From values at the quadrature points to values at the nodes."""
        self._basis.apply(nelem, emode, u, v, TRANSPOSE)
