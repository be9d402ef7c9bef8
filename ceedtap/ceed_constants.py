"""libCEED's constants, named as in the `libceed` package."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from ceedtap.ceed_ffi import Library


class MemType(IntEnum):
    """Where data lives (``CeedMemType``)."""

    HOST = 0
    DEVICE = 1


class CopyMode(IntEnum):
    """What becomes of an array that is handed over (``CeedCopyMode``)."""

    COPY_VALUES = 0
    USE_POINTER = 1
    OWN_POINTER = 2


class NormType(IntEnum):
    """Norms of a vector (``CeedNormType``)."""

    NORM_1 = 0
    NORM_2 = 1
    NORM_MAX = 2


class TransposeMode(IntEnum):
    """Apply a map or its transpose (``CeedTransposeMode``)."""

    NOTRANSPOSE = 0
    TRANSPOSE = 1


class EvalMode(IntEnum):
    """What a field is at the quadrature points (``CeedEvalMode``)."""

    NONE = 0
    INTERP = 1
    GRAD = 2
    DIV = 4
    CURL = 8
    WEIGHT = 16


class QuadMode(IntEnum):
    """Quadrature rules (``CeedQuadMode``)."""

    GAUSS = 0
    GAUSS_LOBATTO = 1


class ElemTopology(IntEnum):
    """Shapes of elements (``CeedElemTopology``); the dimension is in the upper 16 bits."""

    LINE = 1 << 16 | 0
    TRIANGLE = 2 << 16 | 1
    QUAD = 2 << 16 | 2
    TET = 3 << 16 | 3
    PYRAMID = 3 << 16 | 4
    PRISM = 3 << 16 | 5
    HEX = 3 << 16 | 6

    @property
    def dim(self) -> int:
        """Dimension of the shape."""
        return self.value >> 16


class Sentinel:
    """A constant that stands where an object could be, for example ``VECTOR_ACTIVE``."""

    def __init__(self, name: str, symbol: str) -> None:
        self.name = name
        self.symbol = symbol

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name

    def pointer(self, library: Library) -> Any:
        """libCEED's handle for it."""
        return getattr(library.lib, self.symbol)


SCALAR_FP32: Final = 0
SCALAR_FP64: Final = 1
scalar_types: Final = {SCALAR_FP32: "float32", SCALAR_FP64: "float64"}
MEM_HOST: Final = MemType.HOST
MEM_DEVICE: Final = MemType.DEVICE
COPY_VALUES: Final = CopyMode.COPY_VALUES
USE_POINTER: Final = CopyMode.USE_POINTER
OWN_POINTER: Final = CopyMode.OWN_POINTER
NORM_1: Final = NormType.NORM_1
NORM_2: Final = NormType.NORM_2
NORM_MAX: Final = NormType.NORM_MAX
NOTRANSPOSE: Final = TransposeMode.NOTRANSPOSE
TRANSPOSE: Final = TransposeMode.TRANSPOSE
EVAL_NONE: Final = EvalMode.NONE
EVAL_INTERP: Final = EvalMode.INTERP
EVAL_GRAD: Final = EvalMode.GRAD
EVAL_DIV: Final = EvalMode.DIV
EVAL_CURL: Final = EvalMode.CURL
EVAL_WEIGHT: Final = EvalMode.WEIGHT
GAUSS: Final = QuadMode.GAUSS
GAUSS_LOBATTO: Final = QuadMode.GAUSS_LOBATTO
LINE: Final = ElemTopology.LINE
TRIANGLE: Final = ElemTopology.TRIANGLE
QUAD: Final = ElemTopology.QUAD
TET: Final = ElemTopology.TET
PYRAMID: Final = ElemTopology.PYRAMID
PRISM: Final = ElemTopology.PRISM
HEX: Final = ElemTopology.HEX

VECTOR_ACTIVE: Final = Sentinel("VECTOR_ACTIVE", "CEED_VECTOR_ACTIVE")
VECTOR_NONE: Final = Sentinel("VECTOR_NONE", "CEED_VECTOR_NONE")
BASIS_NONE: Final = Sentinel("BASIS_NONE", "CEED_BASIS_NONE")
ELEMRESTRICTION_NONE: Final = Sentinel("ELEMRESTRICTION_NONE", "CEED_ELEMRESTRICTION_NONE")
STRIDES_BACKEND: Final = Sentinel("STRIDES_BACKEND", "CEED_STRIDES_BACKEND")
REQUEST_IMMEDIATE: Final = Sentinel("REQUEST_IMMEDIATE", "CEED_REQUEST_IMMEDIATE")
