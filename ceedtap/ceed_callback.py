"""QFunctions in Python, for looking at what happens at the quadrature points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ceedtap.ceed_constants import EvalMode
from ceedtap.ceed_context import QFunctionContext
from ceedtap.ceed_ffi import CeedLock
from ceedtap.ceed_qfunction import QFunction
from ceedtap.host_functions import check_function

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed

Function = Callable[[Any, int, tuple[np.ndarray, ...], tuple[np.ndarray, ...]], object]


class _Trampoline:
    """What libCEED calls. It always says that all is well: after an error libCEED leaves the operator locked for good.

    It refers to the QFunction's fields and context, not to the QFunction, which owns it.
    """

    def __init__(self, f: Function, ceed: Ceed) -> None:
        self.f = f
        self.lock: CeedLock = ceed.lock
        self.ffi = ceed.library.ffi
        self.dtype = ceed.library.scalar_dtype
        self.input_sizes: list[int] = []
        self.output_sizes: list[int] = []
        self.context: QFunctionContext | None = None
        self.error: BaseException | None = None
        self.calls = 0

    def __call__(self, ctx: Any, q: int, inputs: Any, outputs: Any) -> int:
        # A Python call of libCEED is inside the lock with a depth; a compiled JAX program holds it from native code,
        # and no one is there to raise afterwards.
        embedded = self.lock.depth == 0
        with self.lock.inside_call():
            self.calls += 1
            targets = tuple(np.full((size, q), np.nan, self.dtype) for size in self.output_sizes)
            try:
                # Copies: libCEED's memory is gone or has other content when somebody looks at a kept array later.
                sources = tuple(self._at(inputs[i], size, q).copy() for i, size in enumerate(self.input_sizes))
                for source in sources:
                    source.flags.writeable = False
                result = self.f(self._context(ctx), q, sources, targets)
                if result is not None and not (type(result) is int and result == 0):
                    raise TypeError(
                        f"a Python QFunction writes into its outputs and returns None or 0; {self.f!r} returned "
                        f"{type(result).__name__}"
                    )
            except BaseException as error:
                for target in targets:
                    target[:] = np.nan
                if self.error is None:
                    self.error = error
                    if embedded:
                        self._report(error)
            for i, target in enumerate(targets):
                self._at(outputs[i], target.shape[0], q)[:] = target
        return 0

    def _at(self, pointer: Any, size: int, q: int) -> np.ndarray:
        buffer = self.ffi.buffer(self.ffi.cast("char *", pointer), size * q * self.dtype.itemsize)
        return np.frombuffer(buffer, self.dtype).reshape(size, q)

    def _context(self, ctx: Any) -> Any:
        context = self.context
        if context is None or ctx == self.ffi.NULL:
            return None
        data = bytes(self.ffi.buffer(self.ffi.cast("char *", ctx), context._bytes))
        values = np.frombuffer(data, context._dtype).reshape(context._shape)
        return values[()] if context.fields else values

    def _report(self, error: BaseException) -> None:
        hook: Any = sys.unraisablehook
        hook(_Unraisable(type(error), error, error.__traceback__, "ceedtap: Python QFunction", self.f))


class _Unraisable:
    """What `sys.unraisablehook` takes."""

    def __init__(
        self, exc_type: type[BaseException], exc_value: BaseException, tb: Any, message: str, obj: Any
    ) -> None:
        self.exc_type, self.exc_value, self.exc_traceback, self.err_msg, self.object = (
            exc_type,
            exc_value,
            tb,
            message,
            obj,
        )


class PythonQFunction(QFunction):
    """A QFunction in Python, for debugging; made by :meth:`ceedtap.Ceed.PythonQFunction`.

    It runs wherever one in C runs on a CPU, inside programs that JAX compiled too, at the price of a Python call per
    element or block of elements (a few microseconds).

    Args:
        ceed: a Ceed on a CPU.
        f: called as ``f(ctx, Q, inputs, outputs)``, like the function in C. `inputs` and `outputs` have an array of
            shape (size, Q) per field; `f` writes into the outputs, which are NaN before, and returns None. `ctx`
            is a copy of the context's data, a record for a context with named fields, None without one. The number of
            points Q is up to the backend; blocked ones repeat the last element to fill a block. All arrays are copies.
        inputs, outputs: the fields, as ``(name, size, evaluation mode)``.
        context: what `f` gets as `ctx`.

    An exception in `f` does not stop libCEED, but makes the outputs NaN. The first one is raised again when the call of
    libCEED is over. Inside a compiled JAX program it is passed to ``sys.unraisablehook``; :attr:`error` has it.

    >>> import ceedtap as ct
    >>> def square(ctx, Q, inputs, outputs):
    ...     outputs[0][:] = inputs[0] ** 2
    >>> ceed = ct.Ceed("/cpu/self")
    >>> qf = ceed.PythonQFunction(square, [("u", 1, ct.EVAL_NONE)], [("v", 1, ct.EVAL_NONE)])
    >>> u, v = ceed.Vector(3), ceed.Vector(3)
    >>> u.set_array([1.0, 2.0, 3.0])
    >>> qf.apply(3, [u], [v])
    >>> v.to_numpy()
    array([1., 4., 9.])
    """

    def __init__(
        self,
        ceed: Ceed,
        f: Function,
        inputs: Iterable[tuple[str, int, int]] = (),
        outputs: Iterable[tuple[str, int, int]] = (),
        context: QFunctionContext | None = None,
    ) -> None:
        if not callable(f):
            raise TypeError(f"f: expected a function, got {type(f).__name__}")
        check_function(f, "the QFunction")
        ffi = ceed.library.ffi
        self._trampoline = _Trampoline(f, ceed)
        callback = ffi.callback("CeedQFunctionUser", self._trampoline, error=0)
        self._keep = callback
        name = getattr(f, "__name__", type(f).__name__)
        self._create(ceed, 1, int(ffi.cast("uintptr_t", callback)), "", name)
        for field in inputs:
            self.add_input(*field)
        for field in outputs:
            self.add_output(*field)
        if context is not None:
            self.set_context(context)

    @property
    def calls(self) -> int:
        """How often libCEED has called the function."""
        return self._trampoline.calls

    @property
    def error(self) -> BaseException | None:
        """The first exception that has not been raised; None when there is none."""
        return self._trampoline.error

    def clear_error(self) -> BaseException | None:
        """Forgets and returns :attr:`error`."""
        error, self._trampoline.error = self._trampoline.error, None
        return error

    def _add(self, function: str, fields: dict[str, Any], fieldname: str, size: int, emode: int) -> None:
        super()._add(function, fields, fieldname, size, emode)
        sizes = self._trampoline.input_sizes if fields is self._inputs else self._trampoline.output_sizes
        sizes.append(fields[fieldname].size if EvalMode(emode) is not EvalMode.WEIGHT else 1)

    def set_context(self, ctx: QFunctionContext) -> None:
        """Sets what the function gets as its first argument."""
        super().set_context(ctx)
        self._trampoline.context = ctx

    def _raise_pending(self) -> None:
        error = self.clear_error()
        if error is not None:
            raise error
