"""Arrays that share memory with vectors, both ways, without copies.

An array that is given out owns one access to the vector, as libCEED counts them, and keeps the vector alive. Both end
when the last array that was made of it dies, in whatever library and thread that is. The capsules, their structs and
their deleters are numpy's: its deleter is C code that takes the GIL, and does nothing once the interpreter is gone.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from ceedtap.ceed_constants import MEM_HOST
from ceedtap.ceed_memory import Loan
from ceedtap.ceed_object import aligned_zeros
from ceedtap.plain_arrays import check_plain

if TYPE_CHECKING:
    import jax

    from ceedtap.ceed_vector import Vector

CPU = (1, 0)  # kDLCPU


def lend(vector: Vector, write: bool, read_only: bool | None = None) -> np.ndarray:
    """An array on the vector's memory, shape (size,), which holds an access until its last alias is gone.

    Args:
        vector: it cannot be written to meanwhile, nor read when `write` is True.
        write: for reading and writing, else for reading only.
        read_only: what numpy says about the array, by default that it is when it is not for writing.
    """
    read_only = not write if read_only is None else read_only
    kind = "" if write else "Read"
    ffi = vector.ceed.library.ffi
    with vector.ceed.lock:
        if write:
            vector._check_output("an array for writing")
        vector._check_input("an array")
        vector._only_ours()
        memory = vector._access.memory
        assert memory is not None
        pointer = ffi.new("CeedScalar **" if write else "const CeedScalar **")
        vector._call(f"CeedVectorGetArray{kind}", vector.pointer, MEM_HOST, pointer)
        if memory.size and vector._address(pointer[0]) != memory.ctypes.data:  # the memcheck backends lend other memory
            values = vector._at(pointer[0]).copy()
            vector._call(f"CeedVectorRestoreArray{kind}", vector.pointer, pointer)
            if write:
                raise BufferError(f"{vector!r}: this backend does not share its memory; use array_write()")
            values.flags.writeable = not read_only
            return values
        loan = Loan(memory, read_only)
        weakref.finalize(loan, _give_back, vector, kind).atexit = False
        if write:
            vector._access.lent_for_writing = True
        else:
            vector._access.lent += 1
    return np.asarray(loan)


def _give_back(vector: Vector, kind: str) -> None:
    vector.ceed.lock.destroy_later(functools.partial(_restore, vector, kind))


def _restore(vector: Vector, kind: str) -> None:
    ffi, lib = vector.ceed.library.ffi, vector.ceed.library.lib
    if kind:
        vector._access.lent -= 1
        lib.CeedVectorRestoreArrayRead(vector.pointer, ffi.new("const CeedScalar **"))
    else:
        vector._access.lent_for_writing = False
        lib.CeedVectorRestoreArray(vector.pointer, ffi.new("CeedScalar **"))


def capsule(
    vector: Vector,
    write: bool,
    shape: tuple[int, ...],
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """The PyCapsule of ``__dlpack__``; see :meth:`ceedtap.Vector.__dlpack__`."""
    if stream is not None:
        raise BufferError(f"stream: {vector!r} is in the host's memory, where there are no streams; got {stream!r}")
    if dl_device is not None and tuple(dl_device) != CPU:
        raise BufferError(f"dl_device: {vector!r} is in the host's memory {CPU}, not on {tuple(dl_device)}")
    versioned = max_version is not None and max_version[0] >= 1
    options: dict[str, Any] = {"max_version": tuple(max_version)} if versioned and max_version else {}
    if copy:
        options["copy"] = True
    elif not write and not versioned:
        raise BufferError(
            f"{vector!r}: a consumer that does not know DLPack 1.0 could write into an array for reading; use "
            "to_jax(), to_numpy(), copy=True, or exported(write=True)"
        )
    with vector.ceed.lock:  # a copy is made under it: nobody else finds the vector in use
        array = lend(vector, write)
        result = (array.reshape(shape) if shape else array).__dlpack__(**options)
        del array
        return result


class Export:
    """A vector in a shape, for ``from_dlpack`` of other libraries; made by :meth:`ceedtap.Vector.exported`."""

    def __init__(self, vector: Vector, shape: tuple[int, ...], write: bool) -> None:
        if shape and (int(np.prod(shape, dtype=np.int64)) != len(vector) or min(shape) < 0):
            raise ValueError(f"shape: {shape} does not hold the {len(vector)} entries of {vector!r}")
        self._vector, self._shape, self._write = vector, shape, write

    def __repr__(self) -> str:
        use = "writing" if self._write else "reading"
        return f"<{self._vector!r} for {use}, shape {self._shape or (len(self._vector),)}>"

    def __dlpack__(self, **options: Any) -> Any:
        return capsule(self._vector, self._write, self._shape, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


class _ForJAX:
    """Hands JAX the unversioned capsule that it asks for. It cannot say read-only, but JAX never writes."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **_: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


def check_x64(dtype: np.dtype) -> None:
    """Refuses to hand double precision to a JAX that has 64-bit numbers switched off; TypeError."""
    import jax

    if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        raise TypeError(
            "libCEED computes in float64 here, and JAX has 64-bit numbers switched off and would make float32 of it; "
            "use jax.config.update('jax_enable_x64', True)"
        )


def to_jax(vector: Vector, shape: tuple[int, ...], copy: bool | None) -> jax.Array:
    """See :meth:`ceedtap.Vector.to_jax`."""
    from jax import dlpack

    check_x64(vector.ceed.library.scalar_dtype)
    with vector.ceed.lock:  # a copy is made under it: nobody else finds the vector in use
        array = lend(vector, write=False, read_only=False)
        if array.size and array.ctypes.data % 64 and not copy:
            if copy is False:
                raise BufferError(
                    f"{vector!r}: JAX shares memory that is 64-byte aligned; this array of the user's is not"
                )
            copy = True
        if copy:
            # Not by JAX, which copies later and holds on to what it copies from.
            private = aligned_zeros(array.size, array.dtype)
            private[:] = array
            array = private
    return dlpack.from_dlpack(_ForJAX(array.reshape(shape) if shape else array))


def take(source: Any, dtype: np.dtype, copy: bool | None) -> tuple[np.ndarray, str]:
    """An array of shape (size,) on the memory of a DLPack producer, and why it may not be written to, or nothing.

    See :meth:`ceedtap.Vector.from_dlpack`.
    """
    if type(source).__name__ == "PyCapsule":
        source = _Capsule(source)
    if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
        raise TypeError(f"source: {type(source).__name__} has no __dlpack__ and __dlpack_device__")
    what = f"{type(source).__module__}.{type(source).__name__}"
    check_plain("source", source)
    device = tuple(source.__dlpack_device__())
    if device[0] != CPU[0]:
        raise BufferError(
            f"source: the {what} is on DLPack device {device}, libCEED's vectors are in the host's memory, device "
            f"{CPU}; copy it there first"
        )
    try:
        array = np.from_dlpack(source)
    except RuntimeError as error:  # numpy's for element types that it does not know
        raise TypeError(f"source: the {what} cannot be taken, libCEED computes in {dtype}: {error}") from error
    if array.dtype != dtype:
        raise TypeError(
            f"source: the {what} holds {array.dtype}, libCEED computes in {dtype} here; nothing is converted silently"
        )
    if array.ndim == 0:
        raise ValueError(f"source: the {what} is a scalar, without a dimension; use .reshape(1)")
    if copy:
        return np.array(array, order="C").reshape(-1), ""
    if not array.flags.c_contiguous:
        raise BufferError(f"source: the {what} has strides {array.strides} for shape {array.shape}; use copy=True")
    if array.ctypes.data % array.itemsize:
        raise BufferError(f"source: the {what} is not aligned; use copy=True")
    reason = ""
    if not array.flags.writeable or what.startswith(("jax", "jaxlib")):
        reason = f"its memory is that of a {what}, which is read-only"
    return array.reshape(-1), reason


class _Capsule:
    """A bare capsule as a producer, good for one consumer."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU  # numpy looks at the device in the capsule
