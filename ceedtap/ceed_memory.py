"""The memory of a vector: who has it, who may read and write it now, and the arrays of it that are out."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ceedtap.ceed_constants import MEM_HOST, USE_POINTER
from ceedtap.ceed_ffi import CeedAccessError, CeedExportedError
from ceedtap.ceed_object import CeedObject, aligned_zeros

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed


class Loan:
    """Memory as an array, for numpy: the base of arrays that are given out.

    An array of it cannot be made writable when it is not, and what is made of the array keeps the loan alive.
    """

    def __init__(self, memory: np.ndarray, read_only: bool) -> None:
        self.memory = memory
        self.__array_interface__ = {**memory.__array_interface__, "data": (memory.ctypes.data, read_only), "version": 3}


class Writer:
    """An array for writing that is out, and what was made of it.

    Attributes:
        array: what was given out.
    """

    def __init__(self, memory: np.ndarray, shape: tuple[int, ...]) -> None:
        self._base = np.asarray(Loan(memory, False))  # slices, reshaped arrays and other views refer to this one
        self.array = self._base.reshape(shape) if shape else self._base[:]
        self._counts = self._references()

    def _references(self) -> tuple[int, int]:
        return sys.getrefcount(self._base), sys.getrefcount(self.array)

    def end(self) -> bool:
        """Makes the array read-only; whether something was made of it that can still write.

        A view has a reference to the base. A buffer or another library's array has one to the array itself, as the
        variable has that it was given to: from the second one on there is something else.
        """
        counts = self._references()
        self.array.flags.writeable = self._base.flags.writeable = False
        return counts[0] > self._counts[0] or counts[1] > self._counts[1] + 1


class Access:
    """The memory of a vector and the views of it that are out; its destruction needs both, so they outlive it."""

    def __init__(self) -> None:
        self.memory: np.ndarray | None = None
        self.span = (0, 0)  # addresses of the memory: begin, end
        self.readers = 0
        self.writer: Writer | None = None
        self.lent = 0  # arrays for reading that end by themselves, and whether there is one for writing; see dlpack.py
        self.lent_for_writing = False
        # Arrays that were for writing, and that somebody still has: whether a variable or a buffer cannot be told.
        self.ended: list[weakref.ref[np.ndarray]] = []


class Lent:
    """An array of a vector in a ``with`` block; given back however the block ends."""

    def __init__(self, lend: Callable[[], np.ndarray], restore: Callable[[], None]) -> None:
        self._lend, self._restore = lend, restore

    def __enter__(self) -> np.ndarray:
        return self._lend()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()


class VectorMemory(CeedObject):
    """What a vector is without its public methods."""

    def _start(self, length: int) -> None:
        self._length = length
        self._access = Access()
        self._shared = False  # the memory is the user's
        self._elsewhere: Any = None  # what libCEED has lent for writing, where that is not the vector's memory
        self._stuck = ""  # why libCEED has it locked for good
        self._read_only = ""  # why nothing may be written to its memory
        self._users: list[weakref.ref[Any]] = []  # operators in compiled programs, where its place is fixed
        self._producer: object = None  # whose memory it is, when it came by DLPack

    def _own_vector(self, ceed: Ceed, create: Callable[[Any], object]) -> None:
        access, ffi, lib = self._access, ceed.library.ffi, ceed.library.lib

        def release(vec: Any) -> None:
            # A vector with views out cannot be destroyed.
            for _ in range(access.readers):
                lib.CeedVectorRestoreArrayRead(vec, ffi.new("CeedScalar **"))
            if access.writer is not None:
                lib.CeedVectorRestoreArray(vec, ffi.new("CeedScalar **"))
            access.memory = access.writer = None

        self._own(ceed, "CeedVector", create, release)

    @classmethod
    def _adopt(cls, ceed: Ceed, handle: Any) -> Self:
        """Takes over a vector that libCEED made and nobody else uses, into memory of Python. Under the lock."""
        self = cls.__new__(cls)
        length = ceed.library.ffi.new("CeedSize *")
        ceed._call("CeedVectorGetLength", handle[0], length)
        self._start(int(length[0]))

        def create(box: Any) -> None:
            box[0] = handle[0]

        self._own_vector(ceed, create)
        memory = aligned_zeros(self._length, ceed.library.scalar_dtype)
        lent = ceed.library.ffi.new("const CeedScalar **")
        self._call("CeedVectorGetArrayRead", self.pointer, MEM_HOST, lent)
        memory[:] = self._at(lent[0])
        self._call("CeedVectorRestoreArrayRead", self.pointer, lent)
        self._attach(memory)
        return self

    @staticmethod
    def values_of(ceed: Ceed, pointer: Any) -> np.ndarray:
        """A copy of the values of a vector of libCEED's own. Under the lock."""
        ffi, dtype = ceed.library.ffi, ceed.library.scalar_dtype
        length, array = ffi.new("CeedSize *"), ffi.new("const CeedScalar **")
        ceed._call("CeedVectorGetLength", pointer, length)
        ceed._call("CeedVectorGetArrayRead", pointer, MEM_HOST, array)
        data = bytes(ffi.buffer(ffi.cast("char *", array[0]), length[0] * dtype.itemsize))
        ceed._call("CeedVectorRestoreArrayRead", pointer, array)
        return np.frombuffer(data, dtype)

    def alias(self) -> Self:
        """The same vector as another Python object, for the outputs of an operator that libCEED adds up in it."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _original=self)  # which destroys libCEED's object when nobody has it
        return other

    # -- access --------------------------------------------------------------------------------------------------------

    def _check_input(self, name: str) -> None:
        """That libCEED can read it now; under the lock."""
        access = self._access
        if access.writer is not None:
            raise CeedAccessError(f"{name}: {self!r} is locked by an array for writing; call restore_array first")
        if access.lent_for_writing:
            raise CeedExportedError(
                f"{name}: {self!r} is exported for writing, by DLPack; delete the arrays that were made of it first"
            )
        if self._stuck:
            raise CeedAccessError(f"{name}: {self!r} cannot be used any more, libCEED left it locked: {self._stuck}")
        if access.memory is None:
            raise CeedAccessError(f"{name}: {self!r} has no data; use set_value or set_array first")

    def _check_free(self, name: str) -> None:
        """That its data can be replaced now; under the lock."""
        access = self._access
        for user in self._users:
            op = user()
            if op is not None:
                op._settle()
        if access.readers:
            raise CeedAccessError(
                f"{name}: {self!r} is locked by {access.readers} array(s) for reading; call restore_array_read first"
            )
        if access.lent:
            raise CeedExportedError(
                f"{name}: {self!r} is exported for reading, by DLPack, to_numpy, to_jax or numpy.asarray; delete the "
                f"{access.lent} array(s) that were made of it first"
            )
        if access.writer is not None or access.lent_for_writing or self._stuck:
            self._check_input(name)

    def _check_output(self, name: str) -> None:
        """That libCEED can write to it now; under the lock."""
        self._check_free(name)
        if self._read_only:
            raise CeedAccessError(f"{name}: nothing can write to {self!r}, {self._read_only}")

    def _prepare_output(self) -> None:
        """Gives it memory; after all checks, before libCEED writes to it; under the lock."""
        if self._access.memory is None:
            self._attach(aligned_zeros(self._length, self.ceed.library.scalar_dtype))

    def _attach(self, memory: np.ndarray) -> None:
        """Points libCEED at memory; also tells it that the memory has new content."""
        ffi = self.ceed.library.ffi
        address = ffi.cast("CeedScalar *", memory.ctypes.data)
        self._call("CeedVectorSetArray", self.pointer, MEM_HOST, USE_POINTER, address)
        self._access.memory = memory
        start = memory.ctypes.data
        self._access.span = start, start + memory.nbytes

    def _span(self) -> tuple[int, int]:
        """Addresses where its data begins and ends."""
        return self._access.span

    def _overlaps(self, other: VectorMemory) -> bool:
        a, b = self._span(), other._span()
        return a[0] < b[1] and b[0] < a[1]

    def _after_failure(self, reason: str) -> None:
        """Takes back the locks that a failed operator left, or remembers that it could not; under the lock.

        With no view out every lock is libCEED's own. The operator is poisoned, so that nothing uses them any more.
        """
        access = self._access
        if access.memory is None or access.readers or access.lent or access.writer is not None:
            return
        ffi, lib = self.ceed.library.ffi, self.ceed.library.lib
        array = ffi.new("CeedScalar **")
        for _ in range(100):
            if not lib.CeedVectorGetArray(self.pointer, MEM_HOST, array):
                lib.CeedVectorRestoreArray(self.pointer, array)
                break
            if lib.CeedVectorRestoreArrayRead(self.pointer, array) and lib.CeedVectorRestoreArray(self.pointer, array):
                self._stuck = reason
                break
        lib.CeedResetErrorMessage(self.ceed.pointer, ffi.new("const char **"))

    # -- arrays that are out -------------------------------------------------------------------------------------------

    def _lend(self, function: str, shape: tuple[int, ...]) -> np.ndarray:
        """An array for writing; after all checks, under the lock."""
        access = self._access
        memory = access.memory
        assert memory is not None
        writer = Writer(memory, shape)  # ValueError: not that shape
        lent = self.ceed.library.ffi.new("CeedScalar **")
        self._call(function, self.pointer, MEM_HOST, lent)
        self._elsewhere = None
        if memory.size and self._address(lent[0]) != memory.ctypes.data:
            # The memcheck backends lend memory that they free afterwards; here it is copied from and, in the end, to.
            self._elsewhere = lent[0]
            memory[:] = self._at(lent[0])
        access.writer = writer
        return writer.array

    def _lend_for_reading(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array for reading; after all checks, under the lock."""
        memory = self._access.memory
        assert memory is not None
        if shape:
            memory = memory.reshape(shape)  # ValueError: not that shape
        lent = self.ceed.library.ffi.new("const CeedScalar **")
        self._call("CeedVectorGetArrayRead", self.pointer, MEM_HOST, lent)
        self._access.readers += 1
        if memory.size and self._address(lent[0]) != memory.ctypes.data:  # see _lend
            memory = self._at(lent[0]).reshape(memory.shape).copy()
        # Through a read-only buffer: numpy lets nobody make this array writable.
        return np.asarray(memory.data.toreadonly())

    def _end_writing(self) -> None:
        """Gives the array for writing back; under the lock."""
        access, memory = self._access, self._access.memory
        assert access.writer is not None
        assert memory is not None
        kept = access.writer.end()
        if self._elsewhere is not None:
            self._at(self._elsewhere)[:] = memory
        self._call("CeedVectorRestoreArray", self.pointer, self.ceed.library.ffi.new("CeedScalar **"))
        access.ended.append(weakref.ref(access.writer.array))
        access.writer = None
        if kept:
            self._move()
        else:
            access.ended = [array for array in access.ended if array() is not None]

    def _move(self) -> None:
        """Leaves the memory to those who can still write to it; the data goes to other memory. Under the lock.

        Memory that the vector shares with an array of the user's stays: writing to it is the user's business.
        """
        access = self._access
        access.ended = []
        if not self._shared and access.memory is not None:
            memory = aligned_zeros(self._length, self.ceed.library.scalar_dtype)
            memory[:] = access.memory
            self._attach(memory)

    def _only_ours(self) -> None:
        """Sees to it that nobody can write to the memory any more, before others rely on that. Under the lock."""
        if any(array() is not None for array in self._access.ended):
            self._move()

    def _address(self, pointer: Any) -> int:
        return int(self.ceed.library.ffi.cast("uintptr_t", pointer))

    def _at(self, pointer: Any) -> np.ndarray:
        dtype, ffi = self.ceed.library.scalar_dtype, self.ceed.library.ffi
        return np.asarray(ffi.buffer(ffi.cast("char *", pointer), self._length * dtype.itemsize)).view(dtype)
