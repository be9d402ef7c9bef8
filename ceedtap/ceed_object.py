"""What libCEED's objects have in common: a handle with a life, and the checks of what users pass."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ceedtap.ceed_constants import REQUEST_IMMEDIATE, CopyMode, MemType
from ceedtap.ceed_ffi import CeedError, CeedIncompatibleError, CeedUnsupportedError, call
from ceedtap.plain_arrays import check_plain, plain_array
from ceedtap.unique import Unique

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed

INT_MAX = 2**31 - 1  # of a CeedInt


class CeedObject(Unique):
    """An object of a Ceed: owns one reference of libCEED's object and gives it back when it is collected.

    Attributes:
        ceed: the :class:`ceedtap.Ceed` that it belongs to.
        pointer: libCEED's handle, a cffi pointer.
    """

    ceed: Ceed
    _kind: str

    def _own(
        self, ceed: Ceed, kind: str, create: Callable[..., Any], release: Callable[[Any], object] | None = None
    ) -> None:
        """Takes the object that `create` makes.

        Args:
            kind: name of the C type, for example ``"CeedVector"``.
            create: called with a pointer to the new handle, under the lock.
            release: called with the handle, under the lock, before the object is destroyed.
        """
        ffi, lib = ceed.library.ffi, ceed.library.lib
        box = ffi.new(kind + " *")
        with ceed.lock:
            create(box)
            # Some errors inside libCEED have neither a return code nor a message.
            if box[0] == ffi.NULL:
                raise CeedError(
                    f"libCEED returned no object of kind {kind}: the arguments are outside what it can do", code=-1
                )
            self.ceed = ceed
            self._kind = kind
            self._box = box
            destroy, reset, root = getattr(lib, kind + "Destroy"), lib.CeedResetErrorMessage, ceed.pointer

            def end() -> None:
                if release is not None:
                    release(box[0])
                if destroy(box):  # it stays, locked by an operator that failed; its message is nobody's
                    reset(root, ffi.new("const char **"))

            # Not at exit: the system takes the memory back, and half of the interpreter is gone by then.
            weakref.finalize(self, _destroy, ceed, end).atexit = False

    @property
    def pointer(self) -> Any:
        """libCEED's handle."""
        return self._box[0]

    @property
    def address(self) -> int:
        """Address of libCEED's object, for other code in this process; valid as long as this object lives."""
        return int(self.ceed.library.ffi.cast("uintptr_t", self._box[0]))

    def view(self) -> str:
        """What libCEED says about the object."""
        return captured(self.ceed, lambda stream: self._call(self._kind + "View", self.pointer, stream))

    def _call(self, function: str, *args: Any) -> None:
        call(self.ceed, function, *args)

    def _check_same_ceed(self, name: str, other: CeedObject) -> None:
        check_same_ceed(name, other, self.ceed)


def check_same_ceed(name: str, other: CeedObject, ceed: Ceed) -> None:
    """That `other` was made from `ceed`; CeedIncompatibleError."""
    if other.ceed.lock is not ceed.lock:
        mine, its = repr(ceed), repr(other.ceed)
        text = f"belongs to {its}, not to {mine}" if its != mine else f"belongs to another Ceed, both are {mine}"
        raise CeedIncompatibleError(f"{name}: {other!r} {text}; make all objects of a computation from one Ceed")


def _destroy(ceed: Ceed, end: Callable[[], None]) -> None:
    # `ceed` is an argument so that it lives until all its objects are gone.
    ceed.lock.destroy_later(end)


def captured(ceed: Ceed, write: Callable[[Any], object]) -> str:
    """The text that `write` prints to the C stream that it is called with."""
    ffi, lib = ceed.library.ffi, ceed.library.lib
    buffer, size = ffi.new("char **"), ffi.new("size_t *")
    stream = lib.open_memstream(buffer, size)
    if stream == ffi.NULL:
        raise MemoryError("ceedtap: no memory for a C stream")
    try:
        write(stream)
    finally:
        lib.fclose(stream)
        text = ffi.buffer(buffer[0], size[0])[:].decode(errors="replace")
        lib.free(buffer[0])
    return text


# -- checks ------------------------------------------------------------------------------------------------------------


def integer(name: str, value: Any, minimum: int = 0, maximum: int = INT_MAX) -> int:
    """`value` as an int in ``[minimum, maximum]``; TypeError, ValueError."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if not minimum <= value <= maximum:
        raise ValueError(f"{name}: expected an integer in [{minimum}, {maximum}], got {value}")
    return int(value)


def number(name: str, value: Any) -> float:
    """`value` as a float; TypeError."""
    check_plain(name, value)
    if isinstance(value, (str, bytes)) or np.ndim(value):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    return float(value)


_Enum = TypeVar("_Enum", bound=IntEnum)


def enum(name: str, value: Any, kind: type[_Enum]) -> _Enum:
    """`value` as a member of `kind`; also its number. TypeError, ValueError."""
    try:
        return kind(operator.index(value))
    except (TypeError, ValueError):
        members = ", ".join(f"{member.name} = {member.value}" for member in kind)
        error = ValueError if isinstance(value, int) else TypeError
        raise error(f"{name}: expected one of {members}, got {value!r}") from None


def text(name: str, value: Any) -> bytes:
    """`value` as a C string; TypeError, ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {type(value).__name__}")
    if not value or "\0" in value:
        raise ValueError(f"{name}: expected a string without zero characters, not empty, got {value!r}")
    return value.encode()


def host(memtype: Any) -> None:
    """Refuses memory on a device."""
    if enum("memtype", memtype, MemType) is not MemType.HOST:
        raise CeedUnsupportedError("memtype: arrays on a device do not come through numpy; use MEM_HOST")


def copy_mode(cmode: Any) -> CopyMode:
    """Refuses to give memory away."""
    mode = enum("cmode", cmode, CopyMode)
    if mode is CopyMode.OWN_POINTER:
        raise ValueError(
            "cmode: OWN_POINTER lets libCEED free the memory, which Python's memory is not for; use COPY_VALUES, or "
            "USE_POINTER to share it"
        )
    return mode


def immediate(request: Any) -> None:
    """Refuses requests: no libCEED implements them."""
    if request is not REQUEST_IMMEDIATE:
        raise CeedUnsupportedError(f"request: libCEED knows REQUEST_IMMEDIATE only, got {request!r}")


def scalars(name: str, value: npt.ArrayLike, size: int, ceed: Ceed) -> np.ndarray:
    """`value` as a contiguous array of `size` CeedScalars, flattened in C order; not a copy where none is needed.

    Python numbers become scalars of libCEED's precision, but an array of another type is refused, not converted.

    Raises:
        TypeError: another element type.
        ValueError: another number of elements.
    """
    dtype = ceed.library.scalar_dtype
    array = plain_array(name, value)
    if not hasattr(value, "dtype") and not hasattr(value, "__array__") and array.dtype.kind in "iuf":
        array = array.astype(dtype)
    if array.dtype != dtype or not array.dtype.isnative:
        raise TypeError(
            f"{name}: libCEED computes in {dtype} here, got an array of {_dtype_name(array.dtype)}; convert it with "
            f".astype(numpy.{dtype})"
        )
    if array.size != size:
        raise ValueError(f"{name}: expected {size} values, got {array.size} (shape {array.shape})")
    return np.ascontiguousarray(array).reshape(-1)


def _dtype_name(dtype: np.dtype) -> str:
    return str(dtype) if dtype.isnative else f"{dtype.newbyteorder('=')} in foreign byte order"


def integers(name: str, value: npt.ArrayLike | Any, size: int, low: int, high: int) -> np.ndarray:
    """`value` as a private, contiguous array of `size` int32, all in ``[low, high)``.

    Raises:
        TypeError: no integers.
        ValueError: another number of elements, or one out of range.
    """
    array = plain_array(name, value)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: expected integers, got an array of {array.dtype}")
    if array.size != size:
        raise ValueError(f"{name}: expected {size} values, got {array.size} (shape {array.shape})")
    flat = array.reshape(-1)
    bad = (flat < low) | (flat >= high)  # in the array's own type, which may hold more than 32 bits
    if bad.any():
        where = int(bad.argmax())
        raise ValueError(f"{name}: entry {where} is {flat[where]}, outside [{low}, {high - 1}]")
    return np.array(flat, dtype=np.int32, order="C")


def aligned_zeros(size: int, dtype: np.dtype) -> np.ndarray:
    """Zeros at an address that is a multiple of 64, as XLA wants to use memory without a copy."""
    raw = np.zeros(size * dtype.itemsize + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * dtype.itemsize].view(dtype)
