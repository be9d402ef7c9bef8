"""libCEED's objects in Python: :class:`Ceed`, and what is made from it.

Methods and arguments have the names of the `libceed` package. What is different: everything is checked before C code is
called, errors are exceptions of their own types, memory is Python's, and any thread may use anything.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ceedtap import (
    ceed_basis,
    ceed_blocked,
    ceed_callback,
    ceed_composite,
    ceed_context,
    ceed_gallery,
    ceed_operator,
    ceed_qfunction,
    ceed_restriction,
    ceed_vector,
)
from ceedtap.ceed_backends import check_backend, choose
from ceedtap.ceed_basis import Basis as Basis
from ceedtap.ceed_basis import BasisH1 as BasisH1
from ceedtap.ceed_basis import BasisHcurl as BasisHcurl
from ceedtap.ceed_basis import BasisHdiv as BasisHdiv
from ceedtap.ceed_basis import BasisTensorH1 as BasisTensorH1
from ceedtap.ceed_basis import BasisTensorH1Lagrange as BasisTensorH1Lagrange
from ceedtap.ceed_blocked import BlockedCurlOrientedElemRestriction as BlockedCurlOrientedElemRestriction
from ceedtap.ceed_blocked import BlockedElemRestriction as BlockedElemRestriction
from ceedtap.ceed_blocked import BlockedOrientedElemRestriction as BlockedOrientedElemRestriction
from ceedtap.ceed_blocked import BlockedStridedElemRestriction as BlockedStridedElemRestriction
from ceedtap.ceed_blocked import TransposeBlockedElemRestriction as TransposeBlockedElemRestriction
from ceedtap.ceed_callback import PythonQFunction as PythonQFunction
from ceedtap.ceed_composite import CompositeOperator as CompositeOperator
from ceedtap.ceed_composite import OperatorAtPoints as OperatorAtPoints
from ceedtap.ceed_constants import BASIS_NONE as BASIS_NONE
from ceedtap.ceed_constants import COPY_VALUES as COPY_VALUES
from ceedtap.ceed_constants import ELEMRESTRICTION_NONE as ELEMRESTRICTION_NONE
from ceedtap.ceed_constants import EVAL_CURL as EVAL_CURL
from ceedtap.ceed_constants import EVAL_DIV as EVAL_DIV
from ceedtap.ceed_constants import EVAL_GRAD as EVAL_GRAD
from ceedtap.ceed_constants import EVAL_INTERP as EVAL_INTERP
from ceedtap.ceed_constants import EVAL_NONE as EVAL_NONE
from ceedtap.ceed_constants import EVAL_WEIGHT as EVAL_WEIGHT
from ceedtap.ceed_constants import GAUSS as GAUSS
from ceedtap.ceed_constants import GAUSS_LOBATTO as GAUSS_LOBATTO
from ceedtap.ceed_constants import HEX as HEX
from ceedtap.ceed_constants import LINE as LINE
from ceedtap.ceed_constants import MEM_DEVICE as MEM_DEVICE
from ceedtap.ceed_constants import MEM_HOST as MEM_HOST
from ceedtap.ceed_constants import NORM_1 as NORM_1
from ceedtap.ceed_constants import NORM_2 as NORM_2
from ceedtap.ceed_constants import NORM_MAX as NORM_MAX
from ceedtap.ceed_constants import NOTRANSPOSE as NOTRANSPOSE
from ceedtap.ceed_constants import OWN_POINTER as OWN_POINTER
from ceedtap.ceed_constants import PRISM as PRISM
from ceedtap.ceed_constants import PYRAMID as PYRAMID
from ceedtap.ceed_constants import QUAD as QUAD
from ceedtap.ceed_constants import REQUEST_IMMEDIATE as REQUEST_IMMEDIATE
from ceedtap.ceed_constants import SCALAR_FP32 as SCALAR_FP32
from ceedtap.ceed_constants import SCALAR_FP64 as SCALAR_FP64
from ceedtap.ceed_constants import STRIDES_BACKEND as STRIDES_BACKEND
from ceedtap.ceed_constants import TET as TET
from ceedtap.ceed_constants import TRANSPOSE as TRANSPOSE
from ceedtap.ceed_constants import TRIANGLE as TRIANGLE
from ceedtap.ceed_constants import USE_POINTER as USE_POINTER
from ceedtap.ceed_constants import VECTOR_ACTIVE as VECTOR_ACTIVE
from ceedtap.ceed_constants import VECTOR_NONE as VECTOR_NONE
from ceedtap.ceed_constants import CopyMode as CopyMode
from ceedtap.ceed_constants import ElemTopology as ElemTopology
from ceedtap.ceed_constants import EvalMode as EvalMode
from ceedtap.ceed_constants import MemType as MemType
from ceedtap.ceed_constants import NormType as NormType
from ceedtap.ceed_constants import QuadMode as QuadMode
from ceedtap.ceed_constants import Sentinel as Sentinel
from ceedtap.ceed_constants import TransposeMode as TransposeMode
from ceedtap.ceed_constants import scalar_types as scalar_types
from ceedtap.ceed_context import QFunctionContext as QFunctionContext
from ceedtap.ceed_ffi import CeedLock, Library, call, initialize, load, lock_of, root_of
from ceedtap.ceed_gallery import IdentityQFunction as IdentityQFunction
from ceedtap.ceed_gallery import QFunctionByName as QFunctionByName
from ceedtap.ceed_object import captured, integer, text
from ceedtap.ceed_operator import Operator as Operator
from ceedtap.ceed_operator import OperatorField as OperatorField
from ceedtap.ceed_qfunction import QFunction as QFunction
from ceedtap.ceed_qfunction import QFunctionField as QFunctionField
from ceedtap.ceed_registry import registry_get_list
from ceedtap.ceed_restriction import AtPointsElemRestriction as AtPointsElemRestriction
from ceedtap.ceed_restriction import CurlOrientedElemRestriction as CurlOrientedElemRestriction
from ceedtap.ceed_restriction import ElemRestriction as ElemRestriction
from ceedtap.ceed_restriction import OrientedElemRestriction as OrientedElemRestriction
from ceedtap.ceed_restriction import StridedElemRestriction as StridedElemRestriction
from ceedtap.ceed_restriction import TransposeElemRestriction as TransposeElemRestriction
from ceedtap.ceed_vector import Vector as Vector
from ceedtap.unique import Unique


class Ceed(Unique):
    """A libCEED context: the backend that computes, and the maker of all other objects.

    Objects keep their Ceed alive. All calls into one Ceed are made one after the other, under its lock; to compute in
    parallel use several.

    Args:
        resource: the backend, for example ``"/cpu/self"`` (the fastest one that works on this CPU),
            ``"/cpu/self/ref/serial"``, ``"/gpu/cuda/gen:device_id=1"``.
        library: the libCEED to use; by default the one that :func:`ceedtap.ceed_ffi.load` finds.

    Raises:
        LibCEEDNotFound: there is no libCEED.
        CeedError: there is no such backend, or it does not work here, for example because the library was compiled for
            another processor. The process goes on.

    >>> import ceedtap as ct
    >>> ct.Ceed("/cpu/self/ref/serial")
    <Ceed /cpu/self/ref/serial>
    """

    _instead = "use it in any thread, or make another: ceedtap.Ceed(ceed.get_resource())"

    def __init__(self, resource: str = "/cpu/self", *, library: Library | None = None) -> None:
        self.library = load() if library is None else library
        handle = initialize(self.library, choose(self.library, resource))
        self._take(handle)

    def _take(self, handle: Any) -> None:
        library = self.library
        self._pointer = handle
        self.lock: CeedLock = lock_of(handle, library.ffi)
        box, destroy = library.ffi.new("Ceed *", handle), library.lib.CeedDestroy
        weakref.finalize(self, self.lock.destroy_later, lambda: destroy(box)).atexit = False

    @classmethod
    def _wrap(cls, library: Library, root: Any) -> Ceed:
        """A Ceed that other code made; takes a reference, and has errors come back instead of ending the process."""
        self = cls.__new__(cls)
        self.library = library
        copy = library.ffi.new("Ceed *")
        with lock_of(root, library.ffi):
            library.lib.CeedReferenceCopy(root, copy)
            library.lib.CeedSetErrorHandler(root, library.ffi.addressof(library.lib, "CeedErrorStore"))
            self._take(copy[0])
        check_backend(library, self.get_resource())
        return self

    @classmethod
    def wrap(cls, obj: Any, library: Library | None = None) -> Ceed:
        """A Ceed that other code made: a reference is taken. Its errors are returned from now on instead of ending the
        process.

        Args:
            obj: a Ceed of the `libceed` package, or the address of a ``struct Ceed_private``, which cannot be checked:
                it must be that of a living one of the same libCEED.
            library: that libCEED; by default the one that :func:`ceedtap.ceed_ffi.load` finds.

        Raises:
            TypeError, ValueError: an object of another kind.
            CeedIncompatibleError: it was made by another libCEED than ceedtap's.
            CeedUnsupportedError: its backend does not work on this processor.
        """
        from ceedtap import ceed_foreign

        library = load() if library is None else library
        if isinstance(obj, Ceed):
            raise TypeError(f"obj: {obj!r} is ceedtap's own; use it as it is")
        address = ceed_foreign.address_of(obj, library, "Ceed", False, library)
        return cls._wrap(library, root_of(library, library.ffi.cast("Ceed", address)))

    @property
    def address(self) -> int:
        """Address of libCEED's object, for other code in this process; valid as long as this object lives."""
        return int(self.library.ffi.cast("uintptr_t", self._pointer))

    def view(self) -> str:
        """What libCEED says about itself and its backend."""
        return captured(self, lambda stream: self._call("CeedView", self.pointer, stream))

    @property
    def pointer(self) -> Any:
        """libCEED's handle."""
        return self._pointer

    def _call(self, function: str, *args: Any) -> None:
        call(self, function, *args)

    def __repr__(self) -> str:
        return f"<Ceed {self.get_resource()}>"

    def get_resource(self) -> str:
        """The full name of the backend."""
        name = self.library.ffi.new("const char **")
        self._call("CeedGetResource", self.pointer, name)
        return str(self.library.ffi.string(name[0]).decode())

    def get_preferred_memtype(self) -> MemType:
        """MEM_HOST or MEM_DEVICE: where the backend computes."""
        kind = self.library.ffi.new("CeedMemType *")
        self._call("CeedGetPreferredMemType", self.pointer, kind)
        return MemType(kind[0])

    def is_deterministic(self) -> bool:
        """Whether repeated applications give the same bits."""
        flag = self.library.ffi.new("bool *")
        self._call("CeedIsDeterministic", self.pointer, flag)
        return bool(flag[0])

    def scalar_type(self) -> str:
        """``"float64"`` or ``"float32"``: what this libCEED computes in."""
        return str(self.library.scalar_dtype)

    def add_jit_source_root(self, jit_source_root: str | os.PathLike[str]) -> None:
        """Adds a directory in which backends that compile look for sources of QFunctions that have relative paths.

        Raises:
            NotADirectoryError: there is no such directory.
        """
        root = os.fspath(jit_source_root)
        if not os.path.isdir(root):
            raise NotADirectoryError(f"jit_source_root: there is no directory {root}")
        self._call("CeedAddJitSourceRoot", self.pointer, os.fsencode(os.path.abspath(root)))

    def add_jit_define(self, jit_define: str) -> None:
        """Adds a definition, such as ``"N=3"``, for backends that compile sources.

        Raises:
            CeedUnsupportedError: libCEED is older than 1.0.
            TypeError, ValueError: no text.
        """
        self._call("CeedAddJitDefine", self.pointer, text("jit_define", jit_define))

    def registry_get_list(self) -> list[str]:
        """Names of the backends that are compiled into this libCEED."""
        return registry_get_list(self.library)

    def gauss_quadrature(self, q: int) -> tuple[np.ndarray, np.ndarray]:
        """Points in [-1, 1] and weights of the Gauss rule of `q` points."""
        return self._quadrature("CeedGaussQuadrature", integer("q", q, 1, 10000))

    def lobatto_quadrature(self, q: int) -> tuple[np.ndarray, np.ndarray]:
        """Points in [-1, 1], both ends included, and weights of the Gauss-Lobatto rule of `q` points, at least 2."""
        return self._quadrature("CeedLobattoQuadrature", integer("q", q, 2, 10000))

    def _quadrature(self, function: str, q: int) -> tuple[np.ndarray, np.ndarray]:
        points, weights = np.empty((2, q), self.library.scalar_dtype)
        ffi = self.library.ffi
        self._call(function, q, *(ffi.cast("CeedScalar *", array.ctypes.data) for array in (points, weights)))
        return points, weights

    # -- objects -------------------------------------------------------------------------------------------------------

    def Vector(self, size: int) -> Vector:
        """See :class:`ceedtap.ceed.Vector`."""
        return ceed_vector.Vector(self, size)

    def ElemRestriction(
        self,
        nelem: int,
        elemsize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> ElemRestriction:
        """See :class:`ceedtap.ceed.ElemRestriction`."""
        return ceed_restriction.ElemRestriction(
            self, nelem, elemsize, ncomp, compstride, lsize, offsets, memtype, cmode
        )

    def OrientedElemRestriction(
        self,
        nelem: int,
        elemsize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        orients: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> OrientedElemRestriction:
        """See :class:`ceedtap.ceed.OrientedElemRestriction`."""
        return ceed_restriction.OrientedElemRestriction(
            self, nelem, elemsize, ncomp, compstride, lsize, offsets, orients, memtype, cmode
        )

    def CurlOrientedElemRestriction(
        self,
        nelem: int,
        elemsize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        curl_orients: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> CurlOrientedElemRestriction:
        """See :class:`ceedtap.ceed.CurlOrientedElemRestriction`."""
        return ceed_restriction.CurlOrientedElemRestriction(
            self, nelem, elemsize, ncomp, compstride, lsize, offsets, curl_orients, memtype, cmode
        )

    def BlockedElemRestriction(
        self,
        nelem: int,
        elemsize: int,
        blksize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> BlockedElemRestriction:
        """See :class:`ceedtap.ceed.BlockedElemRestriction`."""
        return ceed_blocked.BlockedElemRestriction(
            self, nelem, elemsize, blksize, ncomp, compstride, lsize, offsets, memtype, cmode
        )

    def BlockedOrientedElemRestriction(
        self,
        nelem: int,
        elemsize: int,
        blksize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        orients: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> BlockedOrientedElemRestriction:
        """See :class:`ceedtap.ceed.BlockedOrientedElemRestriction`."""
        return ceed_blocked.BlockedOrientedElemRestriction(
            self, nelem, elemsize, blksize, ncomp, compstride, lsize, offsets, orients, memtype, cmode
        )

    def BlockedCurlOrientedElemRestriction(
        self,
        nelem: int,
        elemsize: int,
        blksize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        curl_orients: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> BlockedCurlOrientedElemRestriction:
        """See :class:`ceedtap.ceed.BlockedCurlOrientedElemRestriction`."""
        return ceed_blocked.BlockedCurlOrientedElemRestriction(
            self, nelem, elemsize, blksize, ncomp, compstride, lsize, offsets, curl_orients, memtype, cmode
        )

    def BlockedStridedElemRestriction(
        self, nelem: int, elemsize: int, blksize: int, ncomp: int, lsize: int, strides: npt.ArrayLike | Sentinel
    ) -> BlockedStridedElemRestriction:
        """See :class:`ceedtap.ceed.BlockedStridedElemRestriction`."""
        return ceed_blocked.BlockedStridedElemRestriction(self, nelem, elemsize, blksize, ncomp, lsize, strides)

    def AtPointsElemRestriction(
        self, nelem: int, ncomp: int, lsize: int, points: Sequence[npt.ArrayLike]
    ) -> AtPointsElemRestriction:
        """See :class:`ceedtap.ceed.AtPointsElemRestriction`."""
        return ceed_restriction.AtPointsElemRestriction(self, nelem, ncomp, lsize, points)

    def StridedElemRestriction(
        self, nelem: int, elemsize: int, ncomp: int, lsize: int, strides: npt.ArrayLike | Sentinel
    ) -> StridedElemRestriction:
        """See :class:`ceedtap.ceed.StridedElemRestriction`."""
        return ceed_restriction.StridedElemRestriction(self, nelem, elemsize, ncomp, lsize, strides)

    def BasisTensorH1(
        self,
        dim: int,
        ncomp: int,
        P1d: int,
        Q1d: int,
        interp1d: npt.ArrayLike,
        grad1d: npt.ArrayLike,
        qref1d: npt.ArrayLike,
        qweight1d: npt.ArrayLike,
    ) -> BasisTensorH1:
        """See :class:`ceedtap.ceed.BasisTensorH1`."""
        return ceed_basis.BasisTensorH1(self, dim, ncomp, P1d, Q1d, interp1d, grad1d, qref1d, qweight1d)

    def BasisTensorH1Lagrange(self, dim: int, ncomp: int, P: int, Q: int, qmode: int) -> BasisTensorH1Lagrange:
        """See :class:`ceedtap.ceed.BasisTensorH1Lagrange`."""
        return ceed_basis.BasisTensorH1Lagrange(self, dim, ncomp, P, Q, qmode)

    def BasisH1(
        self,
        topo: int,
        ncomp: int,
        nnodes: int,
        nqpts: int,
        interp: npt.ArrayLike,
        grad: npt.ArrayLike,
        qref: npt.ArrayLike,
        qweight: npt.ArrayLike,
    ) -> BasisH1:
        """See :class:`ceedtap.ceed.BasisH1`."""
        return ceed_basis.BasisH1(self, topo, ncomp, nnodes, nqpts, interp, grad, qref, qweight)

    def BasisHdiv(
        self,
        topo: int,
        ncomp: int,
        nnodes: int,
        nqpts: int,
        interp: npt.ArrayLike,
        div: npt.ArrayLike,
        qref: npt.ArrayLike,
        qweight: npt.ArrayLike,
    ) -> BasisHdiv:
        """See :class:`ceedtap.ceed.BasisHdiv`."""
        return ceed_basis.BasisHdiv(self, topo, ncomp, nnodes, nqpts, interp, div, qref, qweight)

    def BasisHcurl(
        self,
        topo: int,
        ncomp: int,
        nnodes: int,
        nqpts: int,
        interp: npt.ArrayLike,
        curl: npt.ArrayLike,
        qref: npt.ArrayLike,
        qweight: npt.ArrayLike,
    ) -> BasisHcurl:
        """See :class:`ceedtap.ceed.BasisHcurl`."""
        return ceed_basis.BasisHcurl(self, topo, ncomp, nnodes, nqpts, interp, curl, qref, qweight)

    def QFunction(self, vlength: int, f: Callable[..., int] | int | None, source: str | os.PathLike[str]) -> QFunction:
        """See :class:`ceedtap.ceed.QFunction`."""
        return ceed_qfunction.QFunction(self, vlength, f, source)

    def QFunctionByName(self, name: str) -> QFunctionByName:
        """See :class:`ceedtap.ceed.QFunctionByName`."""
        return ceed_gallery.QFunctionByName(self, name)

    def IdentityQFunction(self, size: int, inmode: int, outmode: int) -> IdentityQFunction:
        """See :class:`ceedtap.ceed.IdentityQFunction`."""
        return ceed_gallery.IdentityQFunction(self, size, inmode, outmode)

    def QFunctionContext(self, fields: Any = None) -> QFunctionContext:
        """See :class:`ceedtap.ceed.QFunctionContext`."""
        return ceed_context.QFunctionContext(self, fields)

    def PythonQFunction(
        self,
        f: Callable[[Any, int, tuple[np.ndarray, ...], tuple[np.ndarray, ...]], object],
        inputs: Iterable[tuple[str, int, int]] = (),
        outputs: Iterable[tuple[str, int, int]] = (),
        context: ceed_context.QFunctionContext | None = None,
    ) -> PythonQFunction:
        """See :class:`ceedtap.ceed.PythonQFunction`."""
        return ceed_callback.PythonQFunction(self, f, inputs, outputs, context)

    def Operator(
        self,
        qf: ceed_qfunction._QFunction,
        dqf: ceed_qfunction._QFunction | None = None,
        qdfT: ceed_qfunction._QFunction | None = None,
    ) -> Operator:
        """See :class:`ceedtap.ceed.Operator`."""
        return ceed_operator.Operator(self, qf, dqf, qdfT)

    def OperatorAtPoints(
        self,
        qf: ceed_qfunction._QFunction,
        dqf: ceed_qfunction._QFunction | None = None,
        qdfT: ceed_qfunction._QFunction | None = None,
    ) -> OperatorAtPoints:
        """See :class:`ceedtap.ceed.OperatorAtPoints`."""
        return ceed_composite.OperatorAtPoints(self, qf, dqf, qdfT)

    def CompositeOperator(self) -> CompositeOperator:
        """See :class:`ceedtap.ceed.CompositeOperator`."""
        return ceed_composite.CompositeOperator(self)


def __getattr__(name: str) -> float:
    if name == "EPSILON":  # of the library, which is opened at first use
        return 1e-16 if load().scalar_dtype == np.float64 else 6e-08
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
