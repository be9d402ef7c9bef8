"""QFunctions: the physics at the quadrature points; and their contexts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ceedtap import toolchain
from ceedtap.ceed_constants import EvalMode
from ceedtap.ceed_context import QFunctionContext
from ceedtap.ceed_ffi import CeedAccessError, CeedError
from ceedtap.ceed_object import enum, integer, text
from ceedtap.ceed_poison import Poisonable
from ceedtap.ceed_restriction import check_vector
from ceedtap.ceed_vector import Vector

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed

MAX_FIELDS = 16  # of each kind: what libCEED's backends have room for
_CFunction: Any = type(ctypes.CFUNCTYPE(None)()).__mro__[1]  # of all ctypes functions; it has no public name


class QFunctionField(NamedTuple):
    """An input or output of a QFunction: its name, values per quadrature point, evaluation mode, and which it is."""

    name: str
    size: int
    eval_mode: EvalMode
    is_input: bool


class _QFunction(Poisonable):
    """What all QFunctions share.

    Attributes:
        name: of the function.
        fields: name -> :class:`QFunctionField`, inputs first.
    """

    name: str

    def _start(self) -> None:
        self._inputs: dict[str, QFunctionField] = {}
        self._outputs: dict[str, QFunctionField] = {}
        self._frozen = False  # used by an operator that was applied: libCEED allows no changes any more
        self._start_poison()

    @property
    def fields(self) -> dict[str, QFunctionField]:
        """Name -> field, inputs first."""
        return {**self._inputs, **self._outputs}

    def __repr__(self) -> str:
        inputs, outputs = ", ".join(self._inputs), ", ".join(self._outputs)
        return f"<{type(self).__name__.strip('_')} {self.name} ({inputs}) -> ({outputs})>"

    @classmethod
    def wrap(cls, obj: Any, ceed: Ceed | None = None, *, own: bool = False) -> _QFunction:
        """A QFunction that other code made; see :meth:`ceedtap.Vector.wrap`."""
        from ceedtap import ceed_foreign

        return ceed_foreign.WrappedQFunction(ceed_foreign.find(obj, ceed, "CeedQFunction", own), obj)

    def _read_fields(self) -> None:
        ffi, lib = self.ceed.library.ffi, self.ceed.library.lib
        counts = ffi.new("CeedInt[2]")
        lists = ffi.new("CeedQFunctionField *[2]")
        with self.ceed.lock:
            self._call("CeedQFunctionGetFields", self.pointer, counts, lists, counts + 1, lists + 1)
            for side, fields in enumerate((self._inputs, self._outputs)):
                for i in range(counts[side]):
                    name, size, mode = ffi.new("const char **"), ffi.new("CeedInt *"), ffi.new("CeedEvalMode *")
                    lib.CeedQFunctionFieldGetName(lists[side][i], name)
                    lib.CeedQFunctionFieldGetSize(lists[side][i], size)
                    lib.CeedQFunctionFieldGetEvalMode(lists[side][i], mode)
                    key = ffi.string(name[0]).decode()
                    fields[key] = QFunctionField(key, size[0], EvalMode(mode[0]), side == 0)

    def apply(self, q: int, inputs: Sequence[Vector], outputs: Sequence[Vector]) -> None:
        """Calls the function at `q` quadrature points.

        Args:
            q: number of points.
            inputs, outputs: one vector per field, of ``field.size * q`` entries: component slowest, point fastest.

        Raises:
            TypeError, ValueError: another number of vectors, or one of another length.
            CeedError: the function returned an error; the QFunction cannot be used any more.
        """
        q = integer("q", q, 1)
        ffi = self.ceed.library.ffi
        for kind, vectors, fields in (("inputs", inputs, self._inputs), ("outputs", outputs, self._outputs)):
            if len(vectors) != len(fields):
                raise ValueError(f"{kind}: {self!r} has {len(fields)}, got {len(vectors)} vectors")
            for vector, field in zip(vectors, fields.values(), strict=True):
                check_vector(self, f"{kind} {field.name!r}", vector, q * field.size)
        if len({*map(id, inputs), *map(id, outputs)}) < len({*map(id, inputs)}) + len(outputs):
            raise ValueError("outputs: every output needs a vector of its own")
        with self.ceed.lock:
            self._check_usable()
            for vector in inputs:
                vector._check_input("inputs")
            for vector in outputs:
                vector._check_output("outputs")
            for vector in outputs:
                vector._prepare_output()
            u, v = (ffi.new("CeedVector[]", [x.pointer for x in vectors] or 1) for vectors in (inputs, outputs))
            self._frozen = True
            try:
                self._call("CeedQFunctionApply", self.pointer, q, u, v)
            except CeedError as error:
                told = with_status(error, [self])
                self._set_poison(str(told))
                for vector in (*inputs, *outputs):
                    vector._after_failure(str(told))
                raise told from None
            self._raise_pending()

    def set_user_flops_estimate(self, flops: int) -> None:
        """Says how many floating-point operations a call needs per quadrature point; see `get_flops_estimate` of
        operators."""
        self._call("CeedQFunctionSetUserFlopsEstimate", self.pointer, integer("flops", flops, 0, 2**60))

    @property
    def take_status(self) -> Any:
        """A C function that returns what the last call that failed in this thread returned, once; None: not known."""
        return getattr(getattr(self, "_keep", None), "take_status", None)

    def _raise_pending(self) -> None:
        """Raises what Python code that libCEED called has raised; under the lock."""

    def _check_usable(self) -> None:
        self._check_poison()


def with_status(error: CeedError, functions: Iterable[_QFunction]) -> CeedError:
    """The error with what a QFunction returned, which libCEED's backends turn into a code of their own."""
    for function in functions:
        code = function.take_status() if function.take_status is not None else 0
        if code:
            text = f"{error.message}{'; ' if error.message else ''}the QFunction {function.name!r} returned {code}"
            return CeedError.from_code(error.code, text, error.function)
    return error


class OpenQFunction(_QFunction):
    """A QFunction whose fields and context are set here."""

    _context: QFunctionContext | None = None

    def add_input(self, fieldname: str, size: int, emode: int) -> None:
        """Adds an input.

        Args:
            fieldname: a name that no other field has.
            size: values per quadrature point: the components, times the dimension for EVAL_GRAD; 1 for EVAL_WEIGHT.
            emode: EVAL_NONE, EVAL_INTERP, EVAL_GRAD, EVAL_DIV, EVAL_CURL or EVAL_WEIGHT.

        Raises:
            TypeError, ValueError: a name that is taken, a size or mode out of range, or too many fields.
            CeedAccessError: the QFunction is in use.
        """
        self._add("CeedQFunctionAddInput", self._inputs, fieldname, size, emode)

    def add_output(self, fieldname: str, size: int, emode: int) -> None:
        """Adds an output; see :meth:`add_input`. EVAL_WEIGHT is for inputs."""
        self._add("CeedQFunctionAddOutput", self._outputs, fieldname, size, emode)

    def _add(self, function: str, fields: dict[str, QFunctionField], fieldname: str, size: int, emode: int) -> None:
        name = text("fieldname", fieldname)
        size, mode = integer("size", size, 1), enum("emode", emode, EvalMode)
        is_input = fields is self._inputs
        if fieldname in self.fields:
            raise ValueError(f"fieldname: {self!r} has a field {fieldname!r} already")
        if mode is EvalMode.WEIGHT and (size != 1 or not is_input):
            raise ValueError(f"field {fieldname!r}: EVAL_WEIGHT is for inputs of size 1")
        if len(fields) == MAX_FIELDS:
            raise ValueError(f"field {fieldname!r}: libCEED has room for {MAX_FIELDS} inputs and {MAX_FIELDS} outputs")
        with self.ceed.lock:
            if self._frozen:
                raise CeedAccessError(f"{self!r} cannot be changed any more, an operator uses it")
            self._call(function, self.pointer, name, size, mode)
            fields[fieldname] = QFunctionField(fieldname, size, mode, is_input)

    def set_context(self, ctx: QFunctionContext) -> None:
        """Sets what the function gets as its first argument."""
        if not isinstance(ctx, QFunctionContext):
            raise TypeError(f"ctx: expected a QFunctionContext, got {type(ctx).__name__}")
        self._check_same_ceed("ctx", ctx)
        self._call("CeedQFunctionSetContext", self.pointer, ctx.pointer)
        self._context = ctx

    def set_context_writable(self, writable: bool) -> None:
        """Says whether the function writes to its context: if not, GPU backends save a copy per call."""
        self._call("CeedQFunctionSetContextWritable", self.pointer, bool(writable))

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._context is not None:
            self._context._check_ready()


class QFunction(OpenQFunction):
    """A QFunction in C; made by :meth:`ceedtap.Ceed.QFunction` or :meth:`from_source`.

    Args:
        vlength: the number of points of a call is a multiple of it; 1 is always right.
        f: the compiled function: a ctypes function, a cffi function pointer, or its address; it is kept alive. None: it
            is compiled from `source`.
        source: ``"/path/file.h:name"``, where the source is, for backends that compile it themselves; may be empty if
            `f` is given and the Ceed is on a CPU.

    Raises:
        TypeError, ValueError: arguments of other kinds.
        FileNotFoundError: the file of `source` is not there.
        ceedtap.toolchain.CompileError: `source` does not compile.

    >>> import ceedtap as ct, numpy as np
    >>> square = ct.QFunction.from_source(ct.Ceed("/cpu/self"), '''
    ... CEED_QFUNCTION(square)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
    ...   for (CeedInt i = 0; i < Q; i++) out[0][i] = in[0][i] * in[0][i];
    ...   return 0;
    ... }''', "square", inputs=[("u", 1, ct.EVAL_INTERP)], outputs=[("v", 1, ct.EVAL_INTERP)])
    >>> u, v = square.ceed.Vector(3), square.ceed.Vector(3)
    >>> u.set_array([1.0, 2.0, 3.0])
    >>> square.apply(3, [u], [v])
    >>> with v.array_read() as values:
    ...     print(values)
    [1. 4. 9.]
    """

    def __init__(self, ceed: Ceed, vlength: int, f: Any, source: str | os.PathLike[str]) -> None:
        vlength = integer("vlength", vlength, 1)
        source = os.fspath(source)
        path, colon, name = source.rpartition(":")
        if source and not (colon and path and name):
            raise ValueError(f"source: expected '/path/file.h:name', got {source!r}")
        if path and not os.path.isfile(path):
            raise FileNotFoundError(f"source: there is no file {path}")
        if f is None:
            if not source:
                raise ValueError("source: needed, as '/path/file.h:name', when f is None")
            compiled = toolchain.compile_qfunction(ceed.library, Path(path), name)
            self._keep: Any = compiled
            address = compiled.address
        else:
            self._keep = f
            address = _address(ceed, f)
        self._create(ceed, vlength, address, os.path.abspath(path) + ":" + name if source else "", name or "(unnamed)")

    def _create(self, ceed: Ceed, vlength: int, address: int, source: str, name: str) -> None:
        self._start()
        self.name = name
        self.source = source
        self._context: QFunctionContext | None = None
        function = ceed.library.ffi.cast("CeedQFunctionUser", address)

        def create(handle: Any) -> None:
            ceed._call("CeedQFunctionCreateInterior", ceed.pointer, vlength, function, os.fsencode(source), handle)

        keep = self._keep
        self._own(ceed, "CeedQFunction", create, lambda _: keep)

    @classmethod
    def from_source(
        cls,
        ceed: Ceed,
        source: str | os.PathLike[str],
        name: str,
        inputs: Iterable[tuple[str, int, int]] = (),
        outputs: Iterable[tuple[str, int, int]] = (),
        vlength: int = 1,
        context: QFunctionContext | None = None,
    ) -> QFunction:
        """Compiles a QFunction.

        Args:
            ceed: the Ceed.
            source: C text, or a :class:`pathlib.Path` to a file. ``ceed/types.h`` is included before it.
            name: the function, defined there by ``CEED_QFUNCTION(name)(void *ctx, const CeedInt Q, const CeedScalar
                *const *in, CeedScalar *const *out)``. Component ``c`` of point ``i`` of field ``f`` is
                ``in[f][c * Q + i]``.
            inputs, outputs: the fields, as ``(name, size, evaluation mode)``.
            vlength: the number of points of a call is a multiple of it.
            context: what the function gets as ``ctx``.

        Raises:
            ceedtap.toolchain.CompileError: with the compiler's text, which names the user's own lines.
        """
        compiled = toolchain.compile_qfunction(ceed.library, source, name)
        self = cls.__new__(cls)
        self._keep = compiled
        self._create(ceed, integer("vlength", vlength, 1), compiled.address, compiled.source, name)
        for field in inputs:
            self.add_input(*field)
        for field in outputs:
            self.add_output(*field)
        if context is not None:
            self.set_context(context)
        return self


def _address(ceed: Ceed, f: Any) -> int:
    if isinstance(f, int) and not isinstance(f, bool):
        address: int | None = f
    elif isinstance(f, (_CFunction, ctypes.c_void_p)):
        address = ctypes.cast(f, ctypes.c_void_p).value
    elif isinstance(f, ceed.library.ffi.CData):
        address = int(ceed.library.ffi.cast("uintptr_t", f))
    else:
        raise TypeError(
            f"f: expected a ctypes function, a cffi function pointer, an address or None, got {type(f).__name__}"
        )
    if address is None or address < 4096:
        raise ValueError(f"f: {address or 'a null pointer'} is not the address of a function")
    return address
