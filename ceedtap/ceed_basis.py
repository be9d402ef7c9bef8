"""Bases: from the nodes of an element to its quadrature points, and back."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ceedtap.ceed_basis_at_points import BasisAtPoints
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
from ceedtap.ceed_ffi import CeedUnsupportedError
from ceedtap.ceed_object import INT_MAX, enum, integer, scalars
from ceedtap.ceed_restriction import check_distinct, check_vector
from ceedtap.ceed_vector import Vector

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed


def writes_past_single_rows(ceed: Ceed) -> bool:
    """Whether the backend has the defect that :meth:`Basis.check_kernel` describes."""
    return ceed.get_resource().endswith("avx/serial")


class Basis(BasisAtPoints):
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

    @classmethod
    def wrap(cls, obj: Any, ceed: Ceed | None = None, *, own: bool = False) -> Basis:
        """A basis that other code made; see :meth:`ceedtap.Vector.wrap`."""
        from ceedtap import ceed_foreign

        found = ceed_foreign.find(obj, ceed, "CeedBasis", own)
        ffi = found.ceed.library.ffi

        def get(name: str, ctype: str = "CeedInt *") -> int:
            value = ffi.new(ctype)
            found.ceed._call(f"CeedBasis{name}", found.pointer, value)
            return int(value[0])

        with found.ceed.lock:
            tensor, space = get("IsTensor", "bool *"), ("", "H1", "H(div)", "H(curl)")[get("GetFESpace", "int *")]
            kinds = {"H1": BasisTensorH1 if tensor else Basis, "H(div)": BasisHdiv, "H(curl)": BasisHcurl}
            kind: Any = kinds.get(space, Basis)
            self: Basis = kind.__new__(kind)
            if isinstance(self, BasisTensorH1):
                self.P1d, self.Q1d = get("GetNumNodes1D"), get("GetNumQuadraturePoints1D")
            counts = get("GetNumNodes"), get("GetNumQuadraturePoints")
            self._size(get("GetDimension"), get("GetNumComponents"), *counts)
            self._own(found.ceed, "CeedBasis", found.create, lambda _: obj)
        return self

    def get_num_nodes(self) -> int:
        """Nodes of an element."""
        return self.num_nodes

    def get_num_quadrature_points(self) -> int:
        """Quadrature points of an element."""
        return self.num_quadrature_points

    space = "H1"
    _components: dict[EvalMode, int] | None = None

    def components(self, emode: int) -> int:
        """Values per quadrature point of one component; 0 where the basis does not have this evaluation mode."""
        if self._components is None:
            self._components = {
                "H1": {EvalMode.INTERP: 1, EvalMode.GRAD: self.dim, EvalMode.WEIGHT: 1},
                "H(div)": {EvalMode.INTERP: self.dim, EvalMode.DIV: 1, EvalMode.WEIGHT: 1},
                "H(curl)": {
                    EvalMode.INTERP: self.dim,
                    EvalMode.CURL: 1 if self.dim < 3 else self.dim,
                    EvalMode.WEIGHT: 1,
                },
            }[self.space]
        return self._components.get(EvalMode(emode), 0)

    def field_size(self, emode: int) -> int:
        """Values per quadrature point of one field: what a QFunction sees with this evaluation mode."""
        return 1 if emode == EvalMode.WEIGHT else self.components(emode) * self.ncomp

    def check_kernel(self, transpose: bool) -> None:
        """Refuses what a defect of libCEED would turn into a write past the end of an array.

        For single elements, its kernel for AVX handles rows of one entry in groups of four, and loads and stores two
        entries too many when one or two rows are left over (versions 0.12 and 1.0; ceed-avx-tensor.c,
        CeedTensorContract_Avx_Single).

        Raises:
            CeedUnsupportedError: so it is here.
        """
        dim, nodes, points = (self.dim, self.P1d, self.Q1d) if isinstance(self, BasisTensorH1) else (
            1, self.num_nodes, self.num_quadrature_points
        )  # fmt: skip
        rows, columns = (nodes, points) if transpose else (points, nodes)
        groups = [self.ncomp * columns**k for k in range(dim)]
        defective = rows == 1 and any(n > 4 and n % 4 in (1, 2) for n in groups)
        if defective and writes_past_single_rows(self.ceed):
            what = "node" if transpose else "quadrature point"
            raise CeedUnsupportedError(
                f"{self!r}: with one {what} in a direction and these components libCEED's backend avx/serial writes "
                "past the end of an array; use /cpu/self/avx/blocked or /cpu/self/opt/serial"
            )

    def apply(self, nelem: int, emode: int, u: Vector | Sentinel, v: Vector, tmode: int = NOTRANSPOSE) -> None:
        """Applies the basis to E-vectors, or its transpose.

        See also :meth:`apply_add`.

        Args:
            nelem: number of elements.
            emode: EVAL_INTERP, EVAL_GRAD (H1: gradients on the reference element, direction slowest), EVAL_DIV
                (H(div)), EVAL_CURL (H(curl)) or EVAL_WEIGHT.
            u: values at the nodes; with TRANSPOSE at the quadrature points; VECTOR_NONE for EVAL_WEIGHT.
            v: values at the quadrature points; with TRANSPOSE at the nodes; overwritten.
            tmode: NOTRANSPOSE or TRANSPOSE.

        Raises:
            TypeError, ValueError: an unknown mode, or vectors of other lengths.
            CeedAccessError: a vector has no data or is locked by an array view.
        """
        self._apply("CeedBasisApply", nelem, emode, u, v, tmode)

    def apply_add(self, nelem: int, emode: int, u: Vector, v: Vector, tmode: int = TRANSPOSE) -> None:
        """As :meth:`apply`, but adds to `v`: with TRANSPOSE only.

        Raises:
            CeedUnsupportedError: libCEED is older than 1.0.
            TypeError, ValueError, CeedAccessError: as there.
        """
        self.ceed.library.first("CeedBasisApplyAdd")
        if enum("tmode", tmode, TransposeMode) is not TRANSPOSE:
            raise ValueError("tmode: libCEED adds with TRANSPOSE only")
        self._apply("CeedBasisApplyAdd", nelem, emode, u, v, tmode)

    def _apply(self, function: str, nelem: int, emode: int, u: Vector | Sentinel, v: Vector, tmode: int) -> None:
        nelem = integer("nelem", nelem, 1)
        mode, transpose = enum("emode", emode, EvalMode), enum("tmode", tmode, TransposeMode)
        if not self.components(mode):
            known = " and ".join(f"EVAL_{m.name}" for m in EvalMode if self.components(m))
            raise ValueError(f"emode: an {self.space} basis has {known}, not EVAL_{mode.name}")
        nodes, points = nelem * self.num_nodes * self.ncomp, nelem * self.num_quadrature_points * self.field_size(mode)
        if mode is EvalMode.WEIGHT and (transpose is TRANSPOSE or u is not VECTOR_NONE):
            raise ValueError("EVAL_WEIGHT takes no input: u is VECTOR_NONE and tmode NOTRANSPOSE")
        if nelem == 1 and mode is not EvalMode.WEIGHT:
            self.check_kernel(transpose is TRANSPOSE)
        with self.ceed.lock:
            if mode is not EvalMode.WEIGHT:
                check_vector(self, "u", u, points if transpose is TRANSPOSE else nodes)
                assert isinstance(u, Vector)
                u._check_input("u")
            check_vector(self, "v", v, nodes if transpose is TRANSPOSE else points)
            if isinstance(u, Vector):
                check_distinct(u, v)
            v._check_output("v")
            if function == "CeedBasisApplyAdd":
                v._check_input("v")
            v._prepare_output()
            source = u.pointer(self.ceed.library) if isinstance(u, Sentinel) else u.pointer
            self._call(function, self.pointer, nelem, transpose, mode, source, v.pointer)

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
            if array[0] == ffi.NULL:
                raise CeedUnsupportedError(f"{self!r} has no such matrix")
            dtype = self.ceed.library.scalar_dtype
            size = int(np.prod(shape)) * dtype.itemsize
            return np.frombuffer(bytes(ffi.buffer(ffi.cast("char *", array[0]), size)), dtype).reshape(shape).copy()

    def get_q_ref(self) -> np.ndarray:
        """Coordinates of the quadrature points on the reference element, shape (dim, num_quadrature_points)."""
        return self._matrix("CeedBasisGetQRef", self.dim, self.num_quadrature_points)

    def get_q_weights(self) -> np.ndarray:
        """Weights of the quadrature points, shape (num_quadrature_points,)."""
        return self._matrix("CeedBasisGetQWeights", self.num_quadrature_points)

    def get_interp(self) -> np.ndarray:
        """Values of the basis functions, shape (num_quadrature_points, num_nodes); vectors have `dim` in front."""
        return self._mode_matrix("CeedBasisGetInterp", EvalMode.INTERP)

    def get_grad(self) -> np.ndarray:
        """Gradients on the reference element, shape (dim, num_quadrature_points, num_nodes).

        Raises:
            CeedUnsupportedError: the basis is not H1.
        """
        shape = (self.dim, self.num_quadrature_points, self.num_nodes)
        return self._mode_matrix("CeedBasisGetGrad", EvalMode.GRAD).reshape(shape)

    def get_div(self) -> np.ndarray:
        """Divergences of the basis functions, shape (num_quadrature_points, num_nodes).

        Raises:
            CeedUnsupportedError: the basis is not H(div).
        """
        return self._mode_matrix("CeedBasisGetDiv", EvalMode.DIV)

    def get_curl(self) -> np.ndarray:
        """Curls of the basis functions, shape (num_quadrature_points, num_nodes); in 3D with 3 in front.

        Raises:
            CeedUnsupportedError: the basis is not H(curl).
        """
        return self._mode_matrix("CeedBasisGetCurl", EvalMode.CURL)

    def _mode_matrix(self, function: str, mode: EvalMode) -> np.ndarray:
        count = self.components(mode)
        if not count:
            raise CeedUnsupportedError(f"{self!r} is {self.space}: it has no EVAL_{mode.name}")
        first = () if count == 1 else (count,)
        return self._matrix(function, *first, self.num_quadrature_points, self.num_nodes)

    def create_projection(self, basis_to: Basis) -> Basis:
        """The basis whose EVAL_INTERP takes nodal values of this basis to nodal values of another.

        It is the least-squares fit at the quadrature points, which both have in common: interpolation where the other
        space contains this one, and exact then. For p-multigrid.

        Raises:
            TypeError, ValueError: no basis, or one of another element or other quadrature points.
        """
        if not isinstance(basis_to, Basis):
            raise TypeError(f"basis_to: expected a Basis, got {basis_to!r}")
        self._check_same_ceed("basis_to", basis_to)
        for name in ("dim", "ncomp", "num_quadrature_points", "space"):
            if getattr(self, name) != getattr(basis_to, name):
                raise ValueError(f"basis_to: {basis_to!r} has another {name} than {self!r}")
        return _Projection(self, basis_to)


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

    def get_q_ref(self) -> np.ndarray:
        """Coordinates of the quadrature points on the reference element, shape (dim, num_quadrature_points)."""
        grids = np.meshgrid(*[self.get_q_ref_1d()] * self.dim, indexing="ij")  # the first direction is the fastest
        return np.stack([grid.reshape(-1) for grid in grids[::-1]])

    def get_q_weights(self) -> np.ndarray:
        """Weights of the quadrature points, shape (num_quadrature_points,)."""
        weights = self.get_q_weight_1d()
        return np.asarray(functools.reduce(np.multiply.outer, [weights] * self.dim).reshape(-1))

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


class _VectorBasis(Basis):
    """What H(div) and H(curl) bases share."""

    def _create(
        self,
        ceed: Ceed,
        function: str,
        topo: int,
        ncomp: int,
        nnodes: int,
        nqpts: int,
        derivative: str,
        arrays: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    ) -> None:
        self.topo = enum("topo", topo, ElemTopology)
        nnodes, nqpts = integer("nnodes", nnodes, 1), integer("nqpts", nqpts, 1)
        self._size(self.topo.dim, integer("ncomp", ncomp, 1), nnodes, nqpts)
        if self.dim < 2:
            raise ValueError(f"topo: an {self.space} basis is for two or three dimensions, not {self.topo.name}")
        mode = EvalMode.DIV if self.space == "H(div)" else EvalMode.CURL
        interp, other, qref, qweight = arrays
        values = [
            scalars("interp", interp, self.dim * nqpts * nnodes, ceed),
            scalars(derivative, other, self.components(mode) * nqpts * nnodes, ceed),
            scalars("qref", qref, self.dim * nqpts, ceed),
            scalars("qweight", qweight, nqpts, ceed),
        ]

        def create(handle: Any) -> None:
            pointers = [ceed.library.ffi.cast("CeedScalar *", array.ctypes.data) for array in values]
            ceed._call(function, ceed.pointer, self.topo, self.ncomp, nnodes, nqpts, *pointers, handle)

        self._own(ceed, "CeedBasis", create)


class BasisHdiv(_VectorBasis):
    """An H(div) basis of given matrices; made by :meth:`ceedtap.Ceed.BasisHdiv`.

    Args:
        topo: TRIANGLE, QUAD, TET, PYRAMID, PRISM or HEX.
        ncomp: components of a field, vectors in each.
        nnodes, nqpts: degrees of freedom and quadrature points of an element.
        interp: values of the basis functions, dim * nqpts * nnodes values, direction first, then points.
        div: their divergences, nqpts * nnodes values.
        qref: coordinates of the quadrature points, dim * nqpts values, direction first.
        qweight: their weights, nqpts values.

    Raises:
        TypeError: arrays of another type than libCEED's scalar.
        ValueError: sizes out of range or arrays of another size.
    """

    space = "H(div)"

    def __init__(
        self,
        ceed: Ceed,
        topo: int,
        ncomp: int,
        nnodes: int,
        nqpts: int,
        interp: npt.ArrayLike,
        div: npt.ArrayLike,
        qref: npt.ArrayLike,
        qweight: npt.ArrayLike,
    ) -> None:
        self._create(ceed, "CeedBasisCreateHdiv", topo, ncomp, nnodes, nqpts, "div", (interp, div, qref, qweight))


class BasisHcurl(_VectorBasis):
    """An H(curl) basis of given matrices; made by :meth:`ceedtap.Ceed.BasisHcurl`.

    Args:
        topo: TRIANGLE, QUAD, TET, PYRAMID, PRISM or HEX.
        ncomp: components of a field, vectors in each.
        nnodes, nqpts: degrees of freedom and quadrature points of an element.
        interp: values of the basis functions, dim * nqpts * nnodes values, direction first, then points.
        curl: their curls, nqpts * nnodes values in two dimensions, 3 * nqpts * nnodes in three, direction first.
        qref: coordinates of the quadrature points, dim * nqpts values, direction first.
        qweight: their weights, nqpts values.

    Raises:
        TypeError: arrays of another type than libCEED's scalar.
        ValueError: sizes out of range or arrays of another size.
    """

    space = "H(curl)"

    def __init__(
        self,
        ceed: Ceed,
        topo: int,
        ncomp: int,
        nnodes: int,
        nqpts: int,
        interp: npt.ArrayLike,
        curl: npt.ArrayLike,
        qref: npt.ArrayLike,
        qweight: npt.ArrayLike,
    ) -> None:
        self._create(ceed, "CeedBasisCreateHcurl", topo, ncomp, nnodes, nqpts, "curl", (interp, curl, qref, qweight))


class _Projection(Basis):
    """See :meth:`Basis.create_projection`."""

    def __init__(self, source: Basis, target: Basis) -> None:
        ceed = target.ceed
        self._size(source.dim, source.ncomp, source.num_nodes, target.num_nodes)

        def create(handle: Any) -> None:
            ceed._call("CeedBasisCreateProjection", source.pointer, target.pointer, handle)

        self._own(ceed, "CeedBasis", create)

    def __repr__(self) -> str:
        return super().__repr__().replace("_Projection", "Basis projection")


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
