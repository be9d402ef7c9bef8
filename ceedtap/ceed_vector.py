"""Vectors of libCEED on memory that Python owns."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from ceedtap import dlpack
from ceedtap.ceed_constants import COPY_VALUES, MEM_HOST, NORM_2, USE_POINTER, NormType
from ceedtap.ceed_ffi import CeedAccessError
from ceedtap.ceed_memory import Lent, VectorMemory
from ceedtap.ceed_object import aligned_zeros, captured, copy_mode, enum, host, integer, number, scalars, text

if TYPE_CHECKING:
    import jax

    from ceedtap.ceed import Ceed


class Vector(VectorMemory):
    """A vector of libCEED scalars; made by :meth:`ceedtap.Ceed.Vector`.

    The memory is Python's: 64-byte aligned, made when data first goes in, or the user's own array with ``USE_POINTER``.
    libCEED never owns or frees it, so that arrays that were given out stay valid memory even when the vector is gone.

    Args:
        ceed: the Ceed.
        size: number of entries.

    Raises:
        TypeError, ValueError: `size` is no integer or negative.
        MemoryError: when data first goes in.

    >>> import ceedtap as ct, numpy as np
    >>> x = ct.Ceed("/cpu/self/ref/serial").Vector(4)
    >>> x.set_array(np.array([1.0, 2.0, 3.0, 4.0]))
    >>> with x.array(2, 2) as a:
    ...     a[0] *= 10
    >>> x.norm(ct.NORM_1)
    37.0
    """

    _instead = "copy its data, to_numpy(copy=True), or have another vector do copy_from"

    def __init__(self, ceed: Ceed, size: int) -> None:
        self._start(integer("size", size, 0, 2**60))
        self._own_vector(ceed, functools.partial(ceed._call, "CeedVectorCreate", ceed.pointer, self._length))

    def __repr__(self) -> str:
        return f"<Vector {self._length} {self.ceed.library.scalar_dtype}>"

    def __len__(self) -> int:
        return self._length

    def get_length(self) -> int:
        """Number of entries."""
        return self._length

    @property
    def state(self) -> int:
        """libCEED's counter of writes; odd while an array for writing is out."""
        state = self.ceed.library.ffi.new("uint64_t *")
        self._call("CeedVectorGetState", self.pointer, state)
        return int(state[0])

    # -- arrays --------------------------------------------------------------------------------------------------------

    def set_array(self, array: npt.ArrayLike, memtype: int = MEM_HOST, cmode: int = COPY_VALUES) -> None:
        """Sets the data.

        Args:
            array: values of libCEED's scalar type, as many as the vector has entries, in C order. Sequences of Python
                numbers are converted, arrays of another type are not.
            memtype: MEM_HOST.
            cmode: COPY_VALUES, or USE_POINTER to share memory with the array from now on. That array must be contiguous
                and writable; it is kept alive. Call `set_array` again when you have changed it, and `sync_array` before
                you read it.

        Raises:
            TypeError: another element type, for example float32 in a double precision libCEED.
            ValueError: another number of values, or an array that cannot be shared.
            CeedAccessError: an array view is out.
        """
        host(memtype)
        mode = copy_mode(cmode)
        values = scalars("array", array, self._length, self.ceed)
        if mode is USE_POINTER:
            self._share(array, values)
            return
        with self.ceed.lock:
            self._check_free("set_array")
            memory = self._access.memory
            if memory is None or self._shared:
                memory = aligned_zeros(self._length, self.ceed.library.scalar_dtype)
            np.copyto(memory, values)
            self._attach(memory)
            self._shared, self._read_only, self._producer = False, "", None

    def _share(self, array: npt.ArrayLike, values: np.ndarray) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array: USE_POINTER shares memory with a numpy array, got {type(array).__name__}; copy it")
        if not array.flags.c_contiguous:
            raise ValueError(
                "array: USE_POINTER needs a C-contiguous array; use numpy.ascontiguousarray or COPY_VALUES"
            )
        if not array.flags.writeable:
            raise ValueError("array: USE_POINTER lets libCEED write into a read-only array; use COPY_VALUES or a copy")
        if values.ctypes.data % values.itemsize:
            raise ValueError("array: USE_POINTER needs an aligned array; use COPY_VALUES or a copy")
        with self.ceed.lock:
            self._check_free("set_array")
            self._attach(values)
            self._shared, self._read_only, self._producer = True, "", None

    def take_array(self, memtype: int = MEM_HOST) -> np.ndarray:
        """Takes back the array that was shared with USE_POINTER; the vector has no data then.

        Returns:
            the values, shape (size,), in the memory of the array that was shared.

        Raises:
            CeedAccessError: no array is shared, or a view is out.
        """
        host(memtype)
        with self.ceed.lock:
            self._check_free("take_array")
            memory = self._access.memory
            if memory is None or not self._shared:
                raise CeedAccessError(f"take_array: {self!r} shares no array")
            self._call("CeedVectorTakeArray", self.pointer, MEM_HOST, self.ceed.library.ffi.new("CeedScalar **"))
            self._access.memory, self._access.span = None, (0, 0)
            self._shared, self._read_only, self._producer = False, "", None
            return memory

    def get_array(self, memtype: int = MEM_HOST) -> np.ndarray:
        """The data, shape (size,), to read and write; locks the vector until :meth:`restore_array`.

        Raises:
            CeedAccessError: the vector has no data, or another view is out.
        """
        return self._get_array((), memtype)

    def _get_array(self, shape: tuple[int, ...], memtype: int) -> np.ndarray:
        host(memtype)
        with self.ceed.lock:
            self._check_output("get_array")
            self._check_input("get_array")
            return self._lend("CeedVectorGetArray", shape)

    def get_array_write(self, memtype: int = MEM_HOST) -> np.ndarray:
        """An array of shape (size,) to write all entries of; locks the vector until :meth:`restore_array`.

        Raises:
            CeedAccessError: another view is out.
        """
        return self._get_array_write((), memtype)

    def _get_array_write(self, shape: tuple[int, ...], memtype: int) -> np.ndarray:
        host(memtype)
        with self.ceed.lock:
            self._check_output("get_array_write")
            self._prepare_output()
            return self._lend("CeedVectorGetArrayWrite", shape)

    def get_array_read(self, memtype: int = MEM_HOST) -> np.ndarray:
        """The data, shape (size,), read-only; the vector cannot be written to until :meth:`restore_array_read`.

        Several may be out. After it is restored the array shows what its memory has then.

        Raises:
            CeedAccessError: the vector has no data, or an array for writing is out.
        """
        return self._get_array_read((), memtype)

    def _get_array_read(self, shape: tuple[int, ...], memtype: int) -> np.ndarray:
        host(memtype)
        with self.ceed.lock:
            self._check_input("get_array_read")
            return self._lend_for_reading(shape)

    def restore_array(self) -> None:
        """Gives back the array for writing, which is read-only from now on.

        Where a part of it, a buffer or another alias that can still write is around, that one keeps the memory, and the
        vector goes on in other memory.

        Raises:
            CeedAccessError: none is out.
        """
        with self.ceed.lock:
            if self._access.writer is None:
                raise CeedAccessError(f"restore_array: no array for writing of {self!r} is out")
            self._end_writing()

    def restore_array_read(self) -> None:
        """Gives back one array for reading.

        Raises:
            CeedAccessError: none is out.
        """
        with self.ceed.lock:
            if not self._access.readers:
                raise CeedAccessError(f"restore_array_read: no array for reading of {self!r} is out")
            self._call("CeedVectorRestoreArrayRead", self.pointer, self.ceed.library.ffi.new("const CeedScalar **"))
            self._access.readers -= 1

    def array(self, *shape: int, memtype: int = MEM_HOST) -> Lent:
        """:meth:`get_array` in a ``with`` block, in the given shape, restored however the block ends."""
        return Lent(functools.partial(self._get_array, shape, memtype), self.restore_array)

    def array_write(self, *shape: int, memtype: int = MEM_HOST) -> Lent:
        """:meth:`get_array_write` in a ``with`` block, in the given shape, restored however the block ends."""
        return Lent(functools.partial(self._get_array_write, shape, memtype), self.restore_array)

    def array_read(self, *shape: int, memtype: int = MEM_HOST) -> Lent:
        """:meth:`get_array_read` in a ``with`` block, in the given shape, restored however the block ends."""
        return Lent(functools.partial(self._get_array_read, shape, memtype), self.restore_array_read)

    # -- other libraries' arrays ---------------------------------------------------------------------------------------

    def to_numpy(self, *shape: int, copy: bool = False) -> np.ndarray:
        """The data as a numpy array, by default read-only and in the vector's own memory.

        As long as such an array, or anything made of its memory, is alive the vector can be read but not written to.

        Args:
            shape: by default (size,).
            copy: an array of its own, which may be written to and locks nothing.

        Raises:
            CeedAccessError: the vector has no data, or an array for writing is out.
        """
        if copy:
            with self.ceed.lock, self.array_read() as values:  # the lock: nobody else finds the vector in use
                array = values.copy()
        else:
            array = dlpack.lend(self, write=False)
        return array.reshape(shape) if shape else array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """For ``numpy.asarray(vector)``: as :meth:`to_numpy`."""
        array = self.to_numpy(copy=bool(copy))
        if dtype is None or np.dtype(dtype) == array.dtype:
            return array
        if copy is False:
            raise ValueError(f"{self!r} as {np.dtype(dtype)} is a copy, and copy=False")
        return array.astype(dtype)

    def to_jax(self, *shape: int, copy: bool | None = None) -> jax.Array:
        """The data as a JAX array, in the vector's own memory.

        As long as such an array, or anything that shares its memory, is alive the vector can be read but not written
        to, so that the array stays as immutable as JAX takes it to be.

        Args:
            shape: by default (size,).
            copy: True: in memory of its own. False: sharing memory or an error. None: a copy where JAX cannot share,
                which is when the vector itself shares an array of the user's that is not 64-byte aligned.

        Raises:
            TypeError: libCEED computes in float64, and JAX has 64-bit numbers switched off.
            BufferError: it cannot be shared, and `copy` is False.
            CeedAccessError: the vector has no data, or an array for writing is out.

        >>> import ceedtap as ct, jax
        >>> jax.config.update("jax_enable_x64", True)
        >>> x = ct.Ceed("/cpu/self").Vector(3)
        >>> x.set_value(2)
        >>> y = x.to_jax()
        >>> y.unsafe_buffer_pointer() == x.to_numpy().ctypes.data
        True
        >>> x.set_value(3)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ceedtap.ceed_ffi.CeedExportedError: set_value: <Vector 3 float64> is exported for reading, ...
        """
        return dlpack.to_jax(self, shape, copy)

    def exported(self, *shape: int, write: bool = False) -> dlpack.Export:
        """The vector in a shape, or for writing, for ``from_dlpack`` of another library.

        Args:
            shape: by default (size,).
            write: the consumer may write to the memory; nothing else can use the vector until its array is gone.

        Raises:
            ValueError: a shape with another number of entries.

        >>> import ceedtap as ct, numpy as np
        >>> x = ct.Ceed("/cpu/self").Vector(4)
        >>> x.set_value(1)
        >>> a = np.from_dlpack(x.exported(2, 2, write=True))
        >>> a[0] = 5
        >>> del a
        >>> x.norm(ct.NORM_1)
        12.0
        """
        return dlpack.Export(self, shape, write)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """For ``from_dlpack`` of other libraries, for reading; see :meth:`exported` for writing, :meth:`to_jax`.

        Args:
            stream: None: there are none in the host's memory.
            max_version: what the consumer knows. Before DLPack 1.0 nothing says that an array is for reading only.
            dl_device: None or (1, 0).
            copy: True: memory of its own, which locks nothing. False and None: the vector's memory.

        Raises:
            BufferError: what is asked for cannot be done.
            CeedAccessError: the vector has no data, or an array for writing is out.
        """
        return dlpack.capsule(self, False, (), stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """``(1, 0)``: the data is in the host's memory."""
        return dlpack.CPU

    @classmethod
    def wrap(cls, obj: Any, ceed: Ceed | None = None, *, own: bool = False) -> Vector:
        """A vector that other code made.

        Its memory stays its owner's: arrays of it are copies, written back when they are restored.

        Args:
            obj: a vector of the `libceed` package, or the address of a ``struct CeedVector_private``.
            ceed: the Ceed that an address belongs to. An address cannot be checked: it must be that of a living object
                of the same libCEED.
            own: take over the caller's reference, which is destroyed with this object; else a reference of its own.

        Raises:
            TypeError, ValueError: an object of another kind.
            CeedIncompatibleError: it was made by another libCEED than ceedtap's, or belongs to another Ceed.
        """
        from ceedtap import ceed_foreign

        return ceed_foreign.WrappedVector(ceed_foreign.find(obj, ceed, "CeedVector", own), obj)

    @classmethod
    def from_dlpack(cls, ceed: Ceed, source: Any, *, copy: bool | None = None) -> Vector:
        """A vector in the memory of another library's array, which it keeps alive.

        The memory of JAX arrays, and of others that are read-only, is only read: such a vector can be an input and a
        passive field, and an error says so when it is used as an output. It gets memory of its own, and can be written
        to, with `set_array`.

        Args:
            ceed: the Ceed.
            source: an object with ``__dlpack__``, for example a JAX, numpy or PyTorch array, in the host's memory, of
                libCEED's scalar type, of any shape with at least one dimension, in C order. Or a PyCapsule.
            copy: True: in memory of its own; any strides and alignment will do.

        Raises:
            TypeError: another element type; nothing is converted. Or no such object.
            BufferError: on a device, strided or not aligned.
            ValueError: an array without dimensions, or a capsule that was used already.

        >>> import ceedtap as ct, jax.numpy as jnp, numpy as np
        >>> x = ct.Vector.from_dlpack(ct.Ceed("/cpu/self"), np.array([1.0, 2.0]))
        >>> x.scale(3).to_numpy()
        array([3., 6.])
        """
        values, reason = dlpack.take(source, ceed.library.scalar_dtype, copy)
        self = cls(ceed, values.size)
        with ceed.lock:
            if copy:
                memory = aligned_zeros(values.size, ceed.library.scalar_dtype)
                memory[:] = values
                self._attach(memory)
            else:
                self._attach(values)
                self._shared, self._read_only, self._producer = True, reason, source
        return self

    # -- algebra -------------------------------------------------------------------------------------------------------

    def _check_operand(self, name: str, other: Any, function: str) -> None:
        if not isinstance(other, Vector):
            raise TypeError(f"{name}: expected a Vector, got {type(other).__name__}")
        self._check_same_ceed(name, other)
        if len(other) != len(self):
            raise ValueError(f"{name}: expected a vector of {len(self)} entries, got {len(other)}")
        other._check_input(f"{function}: {name}")
        if other is self and function.startswith("axp"):
            raise ValueError(f"{name}: the vector itself; use scale")

    def copy_from(self, vec_source: Vector) -> None:
        """Copies the entries of a vector of the same length."""
        with self.ceed.lock:
            self._check_operand("vec_source", vec_source, "copy_from")
            if vec_source is not self:
                with vec_source.array_read() as values:
                    self.set_array(values)

    def set_value(self, value: float) -> None:
        """Sets all entries to one value."""
        value = number("value", value)
        with self.ceed.lock:
            self._check_output("set_value")
            self._prepare_output()
            self._call("CeedVectorSetValue", self.pointer, value)

    def _range(self, start: int, stop: int, step: int, length: int) -> tuple[int, int, int]:
        first = integer("start", start, 0, length)
        last = length if stop == -1 else integer("stop", stop, first, length)
        return first, last, integer("step", step, 1)

    def copy_strided(self, start: int, stop: int, step: int, vec_copy: Vector) -> None:
        """Copies the entries ``start:stop:step`` to the same places of another vector, which may be longer or shorter.

        Args:
            start, stop, step: as in a slice; `stop` may be -1: up to the end of the shorter vector.
            vec_copy: where to; its other entries stay as they are.

        Raises:
            CeedUnsupportedError: libCEED is older than 1.0.
            TypeError, ValueError: a range outside of one of the vectors, or no vector.
            CeedAccessError: a vector has no data or is locked.
        """
        if not isinstance(vec_copy, Vector):
            raise TypeError(f"vec_copy: expected a Vector, got {type(vec_copy).__name__}")
        self._check_same_ceed("vec_copy", vec_copy)
        where = self._range(start, stop, step, min(len(self), len(vec_copy)))
        with self.ceed.lock:
            if vec_copy is self or self._overlaps(vec_copy):
                raise ValueError("vec_copy: the vectors share memory")
            self._check_input("copy_strided")
            vec_copy._check_output("copy_strided: vec_copy")
            vec_copy._check_input("copy_strided: vec_copy")
            self._call("CeedVectorCopyStrided", self.pointer, *where, vec_copy.pointer)

    def set_value_strided(self, start: int, stop: int, step: int, value: float) -> None:
        """Sets the entries ``start:stop:step`` to one value.

        Args:
            start, stop, step: as in a slice; `stop` may be -1: up to the end.
            value: the number.

        Raises:
            CeedUnsupportedError: libCEED is older than 1.0.
            TypeError, ValueError: a range outside of the vector, or no number.
            CeedAccessError: the vector has no data or is locked.
        """
        where = *self._range(start, stop, step, len(self)), number("value", value)
        with self.ceed.lock:
            self._check_output("set_value_strided")
            self._check_input("set_value_strided")
            self._compute("CeedVectorSetValueStrided", *where)

    def filter(self, threshold: float) -> Self:
        """Sets the entries that are not larger than `threshold`, in absolute value, to zero.

        Raises:
            CeedUnsupportedError: libCEED is older than 1.0.
        """
        return self._update("filter", "CeedVectorFilter", number("threshold", threshold))

    def view(self, fp_fmt: str = "%g") -> str:
        """What libCEED says about the vector: all its entries.

        Args:
            fp_fmt: C's format of a number, such as ``"%12.8f"``.

        Raises:
            TypeError, ValueError: no such format.
            CeedAccessError: the vector has no data, or an array for writing is out.
        """
        return self._view("CeedVectorView", (), fp_fmt)

    def view_range(self, start: int, stop: int, step: int, fp_fmt: str = "%g") -> str:
        """The entries ``start:stop:step``, as :meth:`view` has them.

        Args:
            start, stop, step: as in a slice; `stop` may be -1: up to the end.
            fp_fmt: as there.
        """
        return self._view("CeedVectorViewRange", self._range(start, stop, step, len(self)), fp_fmt)

    def _view(self, function: str, where: tuple[int, ...], fp_fmt: str) -> str:
        fmt = text("fp_fmt", fp_fmt)
        # C reads what its format asks for: anything but one number would be a read of memory that is not there.
        if len(fmt) > 100 or not re.fullmatch(r"([^%]|%%)*%[-+ #0]*\d{0,2}(\.\d{0,2})?[eEfFgGaA]([^%]|%%)*", fp_fmt):
            raise ValueError(f"fp_fmt: expected C's format of one number, such as '%12.8f', got {fp_fmt!r}")
        with self.ceed.lock:
            self._check_input("view")
            return captured(self.ceed, lambda stream: self._call(function, self.pointer, *where, fmt, stream))

    def sync_array(self, memtype: int = MEM_HOST) -> None:
        """Brings the data to the host's memory."""
        host(memtype)
        with self.ceed.lock:
            self._check_input("sync_array")
            self._call("CeedVectorSyncArray", self.pointer, MEM_HOST)

    def norm(self, normtype: int = NORM_2) -> float:
        """The norm: NORM_1, NORM_2 or NORM_MAX."""
        kind = enum("normtype", normtype, NormType)
        value = self.ceed.library.ffi.new("CeedScalar *")
        with self.ceed.lock:
            self._check_input("norm")
            self._call("CeedVectorNorm", self.pointer, kind, value)
        return float(value[0])

    def reciprocal(self) -> Self:
        """Replaces the entries by their reciprocals, except zeros; returns the vector."""
        return self._update("reciprocal", "CeedVectorReciprocal")

    def scale(self, alpha: float) -> Self:
        """Multiplies all entries by `alpha`; returns the vector."""
        return self._update("scale", "CeedVectorScale", number("alpha", alpha))

    def axpy(self, alpha: float, x: Vector) -> Self:
        """Adds ``alpha * x``; `x` is another vector of the same length. Returns the vector."""
        return self._update("axpy", "CeedVectorAXPY", number("alpha", alpha), x)

    def axpby(self, alpha: float, beta: float, x: Vector) -> Self:
        """Replaces itself by ``alpha * x + beta * self``; `x` is another vector of the same length. Returns itself."""
        alpha, beta = number("alpha", alpha), number("beta", beta)
        # Not CeedVectorAXPBY: that of libCEED 0.12 computes alpha * x + (1 + beta) * self.
        with self.ceed.lock:
            self._check_operand("x", x, "axpby")
            self._update("axpby", "CeedVectorScale", beta)
            return self._update("axpby", "CeedVectorAXPY", alpha, x)

    def _update(self, name: str, function: str, *args: Any) -> Self:
        with self.ceed.lock:
            self._check_output(name)
            self._check_input(name)
            for x in args:
                if not isinstance(x, float):
                    self._check_operand("x", x, name)
            self._compute(function, *(x.pointer if isinstance(x, Vector) else x for x in args))
        return self

    def _compute(self, function: str, *args: Any) -> None:
        """Has libCEED change the data, and operators see it.

        Backends with a function of their own for it (those on GPUs, memcheck) do not move the state, and an operator
        would go on with what it has cached. Lending the array moves it, and copies nothing where the backend computes.
        """
        state = self.state
        self._call(function, self.pointer, *args)
        if self.state == state:
            ffi = self.ceed.library.ffi
            array = ffi.new("CeedScalar **")
            self._call("CeedVectorGetArray", self.pointer, self.ceed.get_preferred_memtype(), array)
            self._call("CeedVectorRestoreArray", self.pointer, array)

    def pointwise_mult(self, x: Vector, y: Vector) -> Self:
        """Replaces itself by the entry-wise product of two vectors, which may be itself; returns the vector."""
        with self.ceed.lock:
            self._check_output("pointwise_mult")
            self._check_operand("x", x, "pointwise_mult")
            self._check_operand("y", y, "pointwise_mult")
            self._prepare_output()
            self._compute("CeedVectorPointwiseMult", x.pointer, y.pointer)
        return self
