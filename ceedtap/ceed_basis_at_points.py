"""Bases at any points of the elements."""

from __future__ import annotations

import abc

import numpy as np
import numpy.typing as npt

from ceedtap.ceed_constants import NOTRANSPOSE, TRANSPOSE, EvalMode, MemType, TransposeMode
from ceedtap.ceed_ffi import CeedUnsupportedError, check
from ceedtap.ceed_object import INT_MAX, CeedObject, enum, integers
from ceedtap.ceed_restriction import check_distinct, check_vector
from ceedtap.ceed_vector import Vector


class BasisAtPoints(CeedObject):
    """What bases do at any points."""

    dim: int
    ncomp: int
    num_nodes: int

    @abc.abstractmethod
    def field_size(self, emode: int) -> int: ...

    def apply_at_points(
        self,
        num_points: npt.ArrayLike,
        emode: int,
        x_ref: Vector,
        u: Vector,
        v: Vector,
        tmode: int = NOTRANSPOSE,
    ) -> None:
        """Evaluates at any points of the elements, not only at the quadrature points; for tensor bases.

        Args:
            num_points: the number of points in each element, a sequence. Backends on a CPU take one element: call
                it for one after the other.
            emode: EVAL_INTERP or EVAL_GRAD.
            x_ref: coordinates in [-1, 1] of the points of all elements, direction slowest.
            u: values at the nodes, an E-vector; with TRANSPOSE at the points: direction, component, point of all.
            v: values at the points; with TRANSPOSE at the nodes; overwritten.
            tmode: NOTRANSPOSE or TRANSPOSE.

        Raises:
            CeedUnsupportedError: no tensor basis, several elements on a CPU, or libCEED is older than 1.0, which has
                another order of values.
            TypeError, ValueError: an unknown mode, or vectors of other lengths.
            CeedAccessError: a vector has no data or is locked by an array view.
        """
        self._apply_at_points("CeedBasisApplyAtPoints", num_points, emode, (x_ref, u, v), tmode)

    def apply_add_at_points(
        self,
        num_points: npt.ArrayLike,
        emode: int,
        x_ref: Vector,
        u: Vector,
        v: Vector,
        tmode: int = TRANSPOSE,
    ) -> None:
        """As :meth:`apply_at_points`, but adds to `v`: with TRANSPOSE only."""
        if enum("tmode", tmode, TransposeMode) is not TRANSPOSE:
            raise ValueError("tmode: libCEED adds with TRANSPOSE only")
        self._apply_at_points("CeedBasisApplyAddAtPoints", num_points, emode, (x_ref, u, v), tmode)

    def _apply_at_points(
        self, function: str, num_points: npt.ArrayLike, emode: int, vectors: tuple[Vector, Vector, Vector], tmode: int
    ) -> None:
        x_ref, u, v = vectors
        mode, transpose = enum("emode", emode, EvalMode), enum("tmode", tmode, TransposeMode)
        counts = integers("num_points", num_points, np.size(num_points), 1, INT_MAX)
        if mode not in (EvalMode.INTERP, EvalMode.GRAD):
            raise ValueError(f"emode: at points there are EVAL_INTERP and EVAL_GRAD, not EVAL_{mode.name}")
        if not hasattr(self, "P1d"):
            raise CeedUnsupportedError(f"{self!r}: evaluation at points needs a tensor basis")
        if not counts.size:
            raise ValueError("num_points: there are no elements")
        if counts.size > 1 and self.ceed.get_preferred_memtype() is MemType.HOST:
            raise CeedUnsupportedError(
                f"num_points: {counts.size} elements; backends on a CPU evaluate at the points of one element at a time"
            )
        library, total = self.ceed.library, int(counts.sum(dtype=np.int64))
        ffi = library.ffi
        tail = "CeedTransposeMode, CeedEvalMode, CeedVector, CeedVector, CeedVector)"
        library.first("CeedOperatorCreateAtPoints")
        prototype = f"int(*)(CeedBasis, CeedInt, const CeedInt *, {tail}"
        sizes = counts.size, ffi.from_buffer("CeedInt[]", counts)
        at_nodes, at_points = counts.size * self.num_nodes * self.ncomp, total * self.field_size(mode)
        with self.ceed.lock:
            check_vector(self, "x_ref", x_ref, total * self.dim)
            check_vector(self, "u", u, at_points if transpose is TRANSPOSE else at_nodes)
            check_vector(self, "v", v, at_nodes if transpose is TRANSPOSE else at_points)
            check_distinct(u, v)
            check_distinct(x_ref, v, "x_ref and v")
            x_ref._check_input("x_ref")
            u._check_input("u")
            v._check_output("v")
            if "Add" in function:
                v._check_input("v")
            v._prepare_output()
            call = ffi.cast(prototype, getattr(library.lib, function))
            rc = call(self.pointer, *sizes, transpose, mode, *(vector.pointer for vector in vectors))
            check(rc, function, self.ceed.pointer, library)
