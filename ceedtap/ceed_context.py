"""Contexts: the data of a QFunction, as plain bytes, as an array, or as named fields."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ceedtap.ceed_constants import COPY_VALUES, MEM_HOST, USE_POINTER
from ceedtap.ceed_ffi import CeedAccessError, CeedIncompatibleError, CeedIncompleteError
from ceedtap.ceed_object import INT_MAX, CeedObject, copy_mode, host, integers, text
from ceedtap.plain_arrays import plain_array

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed

_C_TYPES = {np.dtype(np.float64): "double", np.dtype(np.int32): "int32_t", np.dtype(np.bool_): "bool"}
_REGISTER = {
    np.dtype(np.float64): "CeedQFunctionContextRegisterDouble",
    np.dtype(np.int32): "CeedQFunctionContextRegisterInt32",
    np.dtype(np.bool_): "CeedQFunctionContextRegisterBoolean",
}


class QFunctionContext(CeedObject):
    """Data for a QFunction, which gets it as ``void *ctx``; made by :meth:`ceedtap.Ceed.QFunctionContext`.

    Args:
        ceed: the Ceed.
        fields: named fields, as a mapping or an instance of a dataclass. A float or an array of float64 is ``double``
            in C, an int or integer array ``int32_t``, a bool or bool array ``bool``. They lie in memory as in a C
            struct of the same order; :meth:`c_struct` writes it. None: data comes by :meth:`set_data`.

    Raises:
        TypeError, ValueError: a value of another type, an integer that does not fit into 32 bits, an empty array.

    Named fields are read and set by name, here and, on all parts of an operator, by
    :meth:`ceedtap.Operator.set_context`:

    >>> import ceedtap as ct, numpy as np
    >>> context = ct.Ceed("/cpu/self").QFunctionContext({"nu": 0.3, "order": 2, "g": np.array([0.0, 0.0, -9.81])})
    >>> context["nu"] = 0.25
    >>> context["nu"], context["order"], context["g"]
    (0.25, 2, array([ 0.  ,  0.  , -9.81]))
    >>> print(context.c_struct("Material"))
    typedef struct {
      double nu;
      int32_t order;
      double g[3];
    } Material;

    Or it is an array, or any bytes:

    >>> import ceedtap as ct, numpy as np
    >>> context = ct.Ceed("/cpu/self").QFunctionContext()
    >>> context.set_data(np.array([1.5, 2.5]))
    >>> with context.data() as values:
    ...     values[0] = 3.5
    >>> context.get_data()
    array([3.5, 2.5])
    """

    _instead = "copy its data, get_data(), and make another context of it"

    def __init__(self, ceed: Ceed, fields: Any = None) -> None:
        record = None if fields is None else _record(fields)
        self._bytes = 0
        self._dtype = np.dtype(np.uint8)
        self._shape: tuple[int, ...] = ()
        self._out = False
        memory = self._memory = list[np.ndarray]()  # shared with libCEED, until the context is destroyed

        def create(handle: Any) -> None:
            ceed._call("CeedQFunctionContextCreate", ceed.pointer, handle)

        self._own(ceed, "CeedQFunctionContext", create, lambda _: memory)
        self.fields: tuple[str, ...] = ()
        if record is not None:
            self.set_data(record)
            self.fields = record.dtype.names or ()
            self._register()

    def _register(self) -> None:
        """Tells libCEED the fields, so that operators have them as well."""
        library = self.ceed.library
        for name in self.fields:
            dtype, offset = self._dtype.fields[name][:2]  # type: ignore[index]
            base, shape = dtype.subdtype or (dtype, ())
            if not library.has(_REGISTER[base]):  # bool before libCEED 1.0
                continue
            size = int(np.prod(shape, dtype=np.int64))
            self._call(_REGISTER[base], self.pointer, name.encode(), offset, size, _C_TYPES[base].encode())

    def __repr__(self) -> str:
        if not self.fields or self._out:
            return f"<QFunctionContext {self._bytes} bytes>"
        values = self._read()
        return f"<QFunctionContext {', '.join(f'{name}={_plain(values[name])!r}' for name in self.fields)}>"

    def c_struct(self, name: str) -> str:
        """The C declaration of a struct that has the named fields, for the source of a QFunction.

        Raises:
            CeedIncompleteError: the context has no named fields.
        """
        text("name", name)
        if not self.fields:
            raise CeedIncompleteError(f"{self!r} has no named fields")
        lines = []
        for field in self.fields:
            dtype = self._dtype.fields[field][0]  # type: ignore[index]
            base, shape = dtype.subdtype or (dtype, ())
            lines.append(f"  {_C_TYPES[base]} {field}{''.join(f'[{n}]' for n in shape)};")
        return "\n".join(["typedef struct {", *lines, f"}} {name};"])

    def __getitem__(self, name: str) -> Any:
        """Value of a named field: a Python number or bool, or an array."""
        self._check_field(name)
        return _plain(self._read()[name])

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets a named field; nothing happens when it has that value already."""
        self.update({name: value})

    def update(self, fields: Any = None, /, **named: Any) -> None:
        """Sets several named fields in one go, from a mapping, a dataclass or keywords. Unchanged values cost nothing.

        Raises:
            KeyError: no such field; nothing is set.
            TypeError, ValueError: a value that does not fit its field; nothing is set.
        """
        values = {**({} if fields is None else _mapping(fields)), **named}
        for name in values:
            self._check_field(name)
        with self.ceed.lock:
            data = self._read()
            before = data.tobytes()
            for name, value in values.items():
                dtype = self._dtype.fields[name][0]  # type: ignore[index]
                base, shape = dtype.subdtype or (dtype, ())
                data[name] = field_value(name, value, base, shape)
            if data.tobytes() != before:
                self._write(data)

    def _check_field(self, name: str) -> None:
        if name not in self.fields:
            raise KeyError(f"{name!r}: the fields of this context are {', '.join(self.fields) or 'not named'}")

    def _check_ready(self) -> None:
        if self._out:
            raise CeedAccessError(f"{self!r} is locked by a `with data()` block")
        if not self._bytes:
            raise CeedIncompleteError(f"{self!r} has no data; use set_data first")

    def set_data(self, data: Any, memtype: int = MEM_HOST, cmode: int = COPY_VALUES) -> None:
        """Sets the data.

        Args:
            data: bytes, a numpy array or structured scalar of any plain type (use ``align=True`` in a structured dtype
                that mirrors a C struct), a ctypes structure, or another object with a buffer.
            memtype: MEM_HOST.
            cmode: COPY_VALUES, or USE_POINTER to share memory with a writable numpy array.

        Raises:
            TypeError: an object without a buffer, Python objects, or foreign byte order.
            ValueError: no data, or an array that cannot be shared.
        """
        host(memtype)
        mode = copy_mode(cmode)
        if isinstance(data, (np.ndarray, np.generic)):
            array = plain_array("data", data)
        else:
            try:
                array = (
                    np.frombuffer(data, dtype=np.uint8) if len(memoryview(data).tobytes()) else np.empty(0, np.uint8)
                )
            except TypeError:
                raise TypeError(
                    f"data: expected bytes, a numpy array or an object with a buffer, got {type(data).__name__}"
                ) from None
        if array.dtype.hasobject or not _native(array.dtype):
            raise TypeError(f"data: C code cannot read {array.dtype}")
        if not array.nbytes:
            raise ValueError("data: empty")
        if mode is USE_POINTER:
            if array is not data or not (array.flags.c_contiguous and array.flags.writeable):
                raise ValueError("data: USE_POINTER shares memory with a writable, C-contiguous numpy array; copy it")
            kept = array
        else:
            kept = np.ascontiguousarray(array)
        ffi = self.ceed.library.ffi
        with self.ceed.lock:
            if self._out:
                self._check_ready()
            if self.fields and (kept.dtype != self._dtype or array.shape != self._shape):
                raise TypeError(f"data: {self!r} has named fields; use update, or data of the type {self._dtype}")
            address = ffi.cast("void *", kept.ctypes.data)
            self._call("CeedQFunctionContextSetData", self.pointer, MEM_HOST, mode, kept.nbytes, address)
            self._memory[:] = [kept] if mode is USE_POINTER else []
            self._bytes, self._dtype, self._shape = kept.nbytes, kept.dtype, array.shape

    def get_data(self, memtype: int = MEM_HOST) -> np.ndarray:
        """A copy of the data, in the type and shape in which it was set (bytes: uint8).

        What is changed in it goes into the context with :meth:`restore_data`.

        Raises:
            CeedIncompleteError: no data was set.
        """
        host(memtype)
        values = self._read()
        self._given = values
        return values

    _given: np.ndarray | None = None

    def restore_data(self) -> None:
        """Writes what the last :meth:`get_data` gave, as it is now, back to the context.

        Raises:
            CeedAccessError: nothing was given, or it was given back already.
            CeedIncompatibleError: other data was set meanwhile.
        """
        with self.ceed.lock:
            values = self._given
            if values is None:
                raise CeedAccessError(f"restore_data: no array of {self!r} is out; use get_data first")
            self._check_ready()
            if values.nbytes != self._bytes or values.dtype != self._dtype:
                raise CeedIncompatibleError(f"restore_data: other data was set in {self!r} meanwhile")
            self._write(values)
            self._given = None

    def take_data(self, memtype: int = MEM_HOST) -> np.ndarray:
        """Takes back the array that was shared with USE_POINTER; the context has no data then.

        Raises:
            CeedAccessError: no array is shared.
        """
        host(memtype)
        with self.ceed.lock:
            self._check_ready()
            if not self._memory:
                raise CeedAccessError(f"take_data: {self!r} shares no array")
            self._call("CeedQFunctionContextTakeData", self.pointer, MEM_HOST, self.ceed.library.ffi.new("void **"))
            array = self._memory.pop()
            self._bytes, self._given = 0, None
            return array

    def _read(self) -> np.ndarray:
        ffi = self.ceed.library.ffi
        pointer = ffi.new("void **")
        with self.ceed.lock:
            self._check_ready()
            self._call("CeedQFunctionContextGetDataRead", self.pointer, MEM_HOST, pointer)
            copy = bytes(ffi.buffer(pointer[0], self._bytes))
            self._call("CeedQFunctionContextRestoreDataRead", self.pointer, pointer)
        return np.frombuffer(copy, self._dtype).reshape(self._shape).copy()

    @contextlib.contextmanager
    def data(self, *shape: int, memtype: int = MEM_HOST) -> Iterator[np.ndarray]:
        """The data to read and change in a ``with`` block, in the type in which it was set; written back at its end."""
        host(memtype)
        values = self._read()
        shaped = values.reshape(shape) if shape else values
        ffi = self.ceed.library.ffi
        pointer = ffi.new("void **")
        with self.ceed.lock:
            self._check_ready()
            self._call("CeedQFunctionContextGetData", self.pointer, MEM_HOST, pointer)  # locks it for libCEED, too
            self._out = True
        try:
            yield shaped
        finally:
            with self.ceed.lock:
                ffi.memmove(pointer[0], values.tobytes(), self._bytes)
                self._call("CeedQFunctionContextRestoreData", self.pointer, pointer)
                self._out = False

    def _write(self, values: np.ndarray) -> None:
        ffi = self.ceed.library.ffi
        with self.ceed.lock:
            pointer = ffi.new("void **")
            self._call("CeedQFunctionContextGetData", self.pointer, MEM_HOST, pointer)
            ffi.memmove(pointer[0], values.tobytes(), self._bytes)
            self._call("CeedQFunctionContextRestoreData", self.pointer, pointer)


def _native(dtype: np.dtype) -> bool:
    if dtype.fields is not None:
        return all(_native(field[0]) for field in dtype.fields.values())
    return dtype.isnative if dtype.subdtype is None else _native(dtype.subdtype[0])


# -- named fields ------------------------------------------------------------------------------------------------------


def _mapping(fields: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(fields) and not isinstance(fields, type):
        return {field.name: getattr(fields, field.name) for field in dataclasses.fields(fields)}
    if isinstance(fields, Mapping):
        return dict(fields)
    raise TypeError(f"fields: expected a mapping or an instance of a dataclass, got {type(fields).__name__}")


def _record(fields: Any) -> np.ndarray:
    """The fields as a structured scalar that lies in memory as a C struct does."""
    values = _mapping(fields)
    if not values:
        raise ValueError("fields: there are none")
    dtypes = []
    for name, value in values.items():
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
            raise ValueError(f"fields: {name!r} is not the name of a C variable")
        array = plain_array(f"field {name!r}", value)
        base: np.dtype
        if array.dtype.kind == "b":
            base = np.dtype(np.bool_)
        elif array.dtype.kind in "iu":
            base = np.dtype(np.int32)
        elif array.dtype == np.float64:
            base = np.dtype(np.float64)
        else:
            raise TypeError(f"field {name!r}: expected float64, integers or bool, got {array.dtype} ({value!r})")
        if not array.size:
            raise ValueError(f"field {name!r}: an empty array")
        dtypes.append((name, base, array.shape))
    record = np.zeros((), np.dtype(dtypes, align=True))
    for name, base, shape in dtypes:
        record[name] = field_value(name, values[name], base, shape)
    return record


def field_value(name: str, value: Any, base: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """`value` as an array for a field; TypeError, ValueError."""
    array = plain_array(f"field {name!r}", value)
    if array.shape != shape:
        raise ValueError(f"field {name!r}: expected shape {shape}, got {array.shape}")
    if base == np.int32:
        return integers(f"field {name!r}", array, array.size, -INT_MAX - 1, INT_MAX + 1).reshape(shape)
    # A Python int is fine where a float is wanted; an array or a scalar of another type is not.
    if base == np.float64 and array.dtype.kind in "iu" and isinstance(value, int):
        return array.astype(np.float64)
    if array.dtype != base:
        raise TypeError(f"field {name!r}: expected {base}, got {array.dtype}")
    return array


def _plain(value: Any) -> Any:
    return value.item() if np.ndim(value) == 0 else value
