"""The C boundary to libCEED: find, open and declare the library, start it safely, errors, the lock of a Ceed tree.

libCEED is opened at run time with cffi. One set of declarations (``ceed_cdef.h``) serves version 0.12 and every newer
one; what a library can do is asked symbol by symbol, since libCEED's version number stayed at 0.12.0 for years.
Nothing here is expensive at import: the library is opened by the first call of :func:`load`.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import importlib.util
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import cffi
import numpy as np

from ceedtap.cache import cache_dir
from ceedtap.guard import Guard
from ceedtap.native import ffi as native_ffi
from ceedtap.native import lib as native
from ceedtap.unique import Unique

__all__ = [
    "CeedAccessError",
    "CeedDimensionError",
    "CeedError",
    "CeedExportedError",
    "CeedIncompatibleError",
    "CeedIncompleteError",
    "CeedLock",
    "CeedUnsupportedError",
    "LibCEEDNotFound",
    "Library",
    "call",
    "check",
    "initialize",
    "library_name",
    "load",
    "lock_of",
    "root_of",
]

# -- errors ------------------------------------------------------------------------------------------------------------


class CeedError(RuntimeError):
    """libCEED reported an error, or would have: some conditions are recognised before the call.

    Attributes:
        code: libCEED's error code (``CeedErrorType``): 1 minor, 2 dimension, 3 incomplete, 4 incompatible, 5 access,
            -1 major, -2 backend, -3 unsupported. Backends turn positive codes into -2.
        message: libCEED's text; may be empty.
        function: the C function that failed; empty when the condition was recognised before the call.
    """

    code = 1

    def __init__(self, message: str, *, code: int | None = None, function: str = "") -> None:
        self.code = type(self).code if code is None else code
        self.message = message
        self.function = function
        where = f"{function} failed with code {self.code}: " if function else ""
        super().__init__(where + (message or "(libCEED gave no message)"))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (type(self), self.message, self.code, self.function)

    @staticmethod
    def from_code(code: int, message: str, function: str) -> CeedError:
        """The error of the class that belongs to `code`."""
        return _ERROR_CLASSES.get(code, CeedError)(message, code=code, function=function)


def _rebuild_error(cls: type[CeedError], message: str, code: int, function: str) -> CeedError:
    return cls(message, code=code, function=function)


class CeedDimensionError(CeedError):
    """Sizes that do not fit."""

    code = 2


class CeedIncompleteError(CeedError):
    """An object that is not completely set up, for example an operator with a missing field."""

    code = 3


class CeedIncompatibleError(CeedError):
    """Objects that do not belong together."""

    code = 4


class CeedAccessError(CeedError):
    """Data that is not there, or locked by an array view that is still out."""

    code = 5


class CeedExportedError(CeedAccessError, BufferError):
    """A vector whose memory other libraries' arrays share at the moment; also a BufferError."""


class CeedUnsupportedError(CeedError):
    """Something that this backend or this library cannot do."""

    code = -3


_ERROR_CLASSES: dict[int, type[CeedError]] = {
    2: CeedDimensionError,
    3: CeedIncompleteError,
    4: CeedIncompatibleError,
    5: CeedAccessError,
    -3: CeedUnsupportedError,
}


class LibCEEDNotFound(ImportError):
    """No libCEED could be opened; the message lists where it was looked for and what to do."""


# -- the lock of a Ceed tree -------------------------------------------------------------------------------------------

_locks: weakref.WeakValueDictionary[int, CeedLock] = weakref.WeakValueDictionary()
_locks_guard = Guard()


class CeedLock(Unique):
    """The lock of a Ceed and of everything made from it: a context manager, recursive.

    libCEED's objects are not thread-safe, reference counts included, so every call into a Ceed tree is made under its
    lock: Python's here, and an embedded operator's in native code by :attr:`pointer`. Waiting releases the GIL.

    Objects that are garbage collected, in whatever thread, queue their destruction (:meth:`destroy_later`); it happens
    under the lock at a moment when no call is half done.
    """

    def __init__(self) -> None:
        pointer = native.ct_lock_new()
        if pointer == native_ffi.NULL:
            raise MemoryError("ceedtap: no memory for the lock of a Ceed")
        self._pointer = native_ffi.gc(pointer, native.ct_lock_unref)
        self._depth = 0  # of Python's `with` blocks in the owning thread; touched by the owner only
        self._pending: collections.deque[Callable[[], object]] = collections.deque()

    @property
    def pointer(self) -> Any:
        """The ``ct_lock *``; who keeps it beyond the life of this object takes a reference with ``ct_lock_ref``."""
        return self._pointer

    def __enter__(self) -> CeedLock:
        # Ctrl-C while waiting raises as soon as the native call is back, with the lock held: `taken` then says so. One
        # C call both acquires and notes it, since an exception cannot come between.
        taken: list[int] = []
        try:
            taken.extend(filter(None, map(native.ct_lock_acquire, (self._pointer,))))
            if not taken:
                raise CeedAccessError(native_ffi.string(native.ct_lock_lost).decode())
            if not self._depth and self._pending:
                self._drain()
            self._depth += 1
        except BaseException:
            if taken:
                native.ct_lock_release(self._pointer)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        try:
            if not self._depth and self._pending:
                self._drain()
        finally:
            native.ct_lock_release(self._pointer)
        # A finalizer of another thread may have found the lock taken after the look at the queue.
        if self._pending:
            self.collect()

    @contextlib.contextmanager
    def inside_call(self) -> Iterator[None]:
        """For Python code that libCEED calls back in the middle of a call of its own.

        That call may hold the lock from native code, where Python's depth is not counted. Without a mark of its own the
        callback's garbage would be destroyed while libCEED computes.
        """
        native.ct_lock_acquire(self._pointer)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            native.ct_lock_release(self._pointer)

    @property
    def depth(self) -> int:
        """How many Python blocks of the owning thread are inside; for the owner."""
        return self._depth

    def destroy_later(self, action: Callable[[], object]) -> None:
        """Has `action` called under the lock: now if nobody is inside, else when the last one leaves."""
        self._pending.append(action)
        self.collect()

    def collect(self) -> None:
        """Does the queued destructions unless somebody, this thread included, is inside the lock."""
        if native.ct_lock_try_acquire(self._pointer):
            try:
                if not self._depth:
                    self._drain()
            finally:
                native.ct_lock_release(self._pointer)

    def _drain(self) -> None:
        self._depth += 1  # garbage that is collected meanwhile is only queued
        try:
            while self._pending:
                self._pending.popleft()()
        finally:
            self._depth -= 1


def lock_of(pointer: Any, ffi: Any) -> CeedLock:
    """The lock of the Ceed tree whose root has this handle; one per tree, whoever made the Ceed."""
    address = int(ffi.cast("uintptr_t", pointer))
    with _locks_guard:
        lock = _locks.get(address)
        if lock is None:
            lock = _locks[address] = CeedLock()
        return lock


# What ceedtap can use and libCEED 0.12.0 does not export, with the first release that does. Everything else that
# ceed_cdef.h declares is in 0.12.0.
_SINCE_1_0 = frozenset(
    (
        "CeedAddJitDefine",
        "CeedBasisApplyAdd",
        "CeedBasisApplyAddAtPoints",
        "CeedElemRestrictionGetEVectorSize",
        "CeedElemRestrictionGetLLayout",
        "CeedGetBuildConfiguration",
        "CeedGetGitVersion",
        "CeedOperatorApplyAddActive",
        "CeedOperatorAssemblyDataStrip",
        "CeedOperatorAtPointsGetPoints",
        "CeedOperatorAtPointsSetPoints",
        "CeedOperatorCompositeAddSub",
        "CeedOperatorCompositeGetMultiplicity",
        "CeedOperatorCompositeGetNumSub",
        "CeedOperatorCompositeGetSubList",
        "CeedOperatorCompositeIsSequential",
        "CeedOperatorCompositeSetSequential",
        "CeedOperatorCreateAtPoints",
        "CeedOperatorCreateComposite",
        "CeedOperatorGetContextBooleanRead",
        "CeedOperatorIsAtPoints",
        "CeedOperatorLinearAssembleGetNumEntries",
        "CeedOperatorRestoreContextBooleanRead",
        "CeedOperatorSetContextBoolean",
        "CeedOperatorViewTerse",
        "CeedQFunctionContextRegisterBoolean",
        "CeedVectorCopyStrided",
        "CeedVectorFilter",
        "CeedVectorSetValueStrided",
    )
)


def _since(symbol: str) -> str:
    return "libCEED has from version 1.0 on" if symbol in _SINCE_1_0 else "no libCEED known to ceedtap has"


# -- the library -------------------------------------------------------------------------------------------------------

# Resources that libCEED versions register. An error about anything else comes before there is a Ceed to keep it.
_RESOURCES = (
    *(
        f"/cpu/self/{kind}/{block}"
        for kind in ("ref", "opt", "avx", "xsmm", "memcheck")
        for block in ("serial", "blocked")
    ),
    *(f"/gpu/{kind}/{name}" for kind in ("cuda", "hip", "sycl") for name in ("ref", "shared", "gen")),
    *(f"/gpu/{kind}/magma{det}" for kind in ("cuda", "hip") for det in ("", "/det")),
    *("/cpu/self/occa", "/cpu/openmp/occa", "/gpu/cuda/occa", "/gpu/hip/occa", "/gpu/dpcpp/occa", "/gpu/opencl/occa"),
)


class Library(Unique):
    """An opened libCEED.

    Attributes:
        path: the file; the bare name when the system's loader found it and does not tell.
        origin: where it came from, for people: ``"the libceed package 0.12.0"``.
        version: ``"0.12.0"``. Of little use: development versions of years report the same. Ask :meth:`has`.
        scalar_dtype: numpy's float64 or float32, what a ``CeedScalar`` is in this build.
        include_dir: the directory that contains ``ceed/types.h``; None where the headers are not beside the library.
        ffi, lib: cffi's objects.
    """

    _instead = "use it in any thread, or open it again: ceedtap.ceed_ffi.Library(library.path)"

    def __init__(self, path: str | os.PathLike[str], origin: str | None = None) -> None:
        path = os.fspath(path)
        probe = cffi.FFI()
        probe.cdef("int CeedGetVersion(int *, int *, int *, bool *); int CeedGetScalarType(int *);")
        probed = probe.dlopen(path)
        try:
            functions = probed.CeedGetVersion, probed.CeedGetScalarType
        except AttributeError as error:
            raise OSError(f"{path} is no libCEED, or one older than 0.10: {error}") from None
        numbers, release, scalar = probe.new("int[3]"), probe.new("bool *"), probe.new("int *")
        functions[0](numbers, numbers + 1, numbers + 2, release)
        functions[1](scalar)
        if scalar[0] not in (0, 1):
            raise OSError(f"{path}: unknown CeedScalarType {scalar[0]}; ceedtap knows single and double precision")
        self.version = ".".join(map(str, numbers))
        self.scalar_dtype = np.dtype(np.float64 if scalar[0] else np.float32)
        self.ffi = cffi.FFI()
        declarations = (Path(__file__).parent / "ceed_cdef.h").read_text(encoding="utf-8")
        self.ffi.cdef(f"typedef {'double' if scalar[0] else 'float'} CeedScalar;\n{declarations}")
        self.lib = self.ffi.dlopen(path)
        self.request_immediate = self.lib.CEED_REQUEST_IMMEDIATE
        self.path = path if os.path.isfile(path) else self._mapped_file() or path
        self.origin = origin or self.path
        self.include_dir = self._find_include_dir()
        self._resources: tuple[str, ...] | None = None
        # Errors without a Ceed abort the process unless this is `return`; os.environ changes C's environment as well.
        os.environ["CEED_ERROR_HANDLER"] = "return"
        # libCEED registers its backends and its gallery at first use, which two threads may come to together.
        for function in ("CeedRegisterAll", "CeedQFunctionRegisterAll"):
            if self.has(function):
                getattr(self.lib, function)()

    def __repr__(self) -> str:
        return f"<libCEED {self.version} {self.scalar_dtype} from {self.origin}>"

    def has(self, symbol: str) -> bool:
        """Whether this library exports a function or variable that ``ceed_cdef.h`` declares."""
        try:
            getattr(self.lib, symbol)
        except (AttributeError, KeyError):  # cffi: a missing function, a missing variable
            return False
        return True

    def address(self, symbol: str) -> int:
        """Address of a function."""
        return int(self.ffi.cast("uintptr_t", getattr(self.lib, symbol)))

    def first(self, *symbols: str) -> str:
        """The first of several names of one function that this library has."""
        for symbol in symbols:
            if self.has(symbol):
                return symbol
        raise CeedUnsupportedError(
            f"{self!r} has no function {' or '.join(symbols)}, which {_since(symbols[0])}. Point CEEDTAP_LIBCEED at a "
            "library that has it"
        )

    @property
    def getters_own(self) -> bool:
        """Whether functions that return objects return a reference that the caller must destroy (after 0.12)."""
        return self.has("CeedGetGitVersion")

    @property
    def resources(self) -> tuple[str, ...]:
        """Backends that the library knows by name, compiled in or not. libCEED's own listing crashes, so the names are
        looked up in the file."""
        if self._resources is None:
            try:
                with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    found = tuple(name for name in _RESOURCES if data.find(name.encode() + b"\0") >= 0)
            except (OSError, ValueError):
                found = ()
            self._resources = found or tuple(name for name in _RESOURCES if "occa" not in name)
        return self._resources

    def _mapped_file(self) -> str | None:
        address = self.address("CeedInit")
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        for line in lines:
            fields = line.split(maxsplit=5)
            start, end = (int(number, 16) for number in fields[0].split("-"))
            if start <= address < end and len(fields) == 6:
                return fields[5]
        return None

    def _find_include_dir(self) -> str | None:
        directory = Path(self.path).resolve().parent.parent / "include"
        return str(directory) if (directory / "ceed" / "types.h").is_file() else None


def library_name() -> str:
    """File name of libCEED on this system."""
    return "libceed.dylib" if sys.platform == "darwin" else "libceed.so"


def _package() -> tuple[Path, str] | None:
    """The library of the installed `libceed` package, found without importing it."""
    try:
        spec = importlib.util.find_spec("libceed")
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations if spec else None) or ():
        path = Path(place) / "lib" / library_name()
        if path.is_file():
            try:
                version = " " + importlib.metadata.version("libceed")
            except importlib.metadata.PackageNotFoundError:
                version = ""
            return path, f"the libceed package{version}"
    return None


def _candidates() -> Iterator[tuple[str, str, bool]]:
    """What to open, in order: (path, origin, whether it was asked for by name)."""
    name = library_name()
    if file := os.environ.get("CEEDTAP_LIBCEED"):
        yield file, f"CEEDTAP_LIBCEED={file}", True
    if prefix := os.environ.get("CEED_DIR"):
        for lib in ("lib", "lib64"):
            yield str(Path(prefix) / lib / name), f"CEED_DIR={prefix}", False
    if package := _package():
        yield str(package[0]), package[1], False
    with contextlib.suppress(OSError):  # there is no cache directory
        for path in sorted((cache_dir() / "libceed").glob(f"*/lib/{name}"), reverse=True):
            yield str(path), f"libceed {path.parent.parent.name} installed by `ceedtap install-libceed`", False
    for variable in ("CONDA_PREFIX", "sys.prefix"):
        if prefix := sys.prefix if variable == "sys.prefix" else os.environ.get(variable):
            yield str(Path(prefix) / "lib" / name), f"the environment {prefix}", False
    yield name, "the system's loader", False


def find() -> Library:
    """Opens the first libCEED of the search order; see :func:`load`."""
    tried = []
    for path, origin, asked_for in _candidates():
        if os.path.dirname(path) and not os.path.isfile(path):
            problem = "no such file"
        else:
            try:
                return Library(path, origin)
            except OSError as error:
                problem = str(error)
        if asked_for:
            raise LibCEEDNotFound(
                f"{origin}: {problem}. Point CEEDTAP_LIBCEED at a libCEED shared library or unset it."
            )
        tried.append(f"  {path} ({origin}): {problem}")
    if not _package():
        tried.insert(0, "  the Python package libceed: not installed")
    raise LibCEEDNotFound(
        "no libCEED found. Run `ceedtap install-libceed`, or set CEEDTAP_LIBCEED to the file of the shared library, or "
        "CEED_DIR to the prefix it is installed in. Looked for:\n" + "\n".join(tried)
    )


_library: Library | None = None
_library_guard = Guard()


def load() -> Library:
    """The libCEED of this process, opened by the first call.

    Search order: the file ``$CEEDTAP_LIBCEED``; the prefix ``$CEED_DIR``; the installed `libceed` package; the user's
    cache (``ceedtap install-libceed``); the conda or virtual environment; the system's loader.

    Raises:
        LibCEEDNotFound: none could be opened. A later call looks again.

    >>> from ceedtap.ceed_ffi import load
    >>> library = load()
    >>> library.scalar_dtype, library.has("CeedOperatorApply")
    (dtype('float64'), True)
    """
    global _library
    with _library_guard:
        if _library is None:
            _library = find()
        return _library


# -- calls -------------------------------------------------------------------------------------------------------------


def check(rc: int, function: str, ceed: Any, library: Library) -> None:
    """Raises the error that `function` reported; called under the lock.

    Args:
        rc: what the function returned.
        ceed: handle of the Ceed that keeps the message.
    """
    if rc:
        raise CeedError.from_code(rc, error_message(ceed, library), function)


def error_message(ceed: Any, library: Library) -> str:
    """Takes the message out of a Ceed; called under its lock. Empty when there is none."""
    if ceed == library.ffi.NULL:
        return ""
    text = library.ffi.new("const char **")
    if library.lib.CeedGetErrorMessage(ceed, text) or text[0] == library.ffi.NULL:
        return ""
    message: str = library.ffi.string(text[0]).decode(errors="replace").strip()
    library.lib.CeedResetErrorMessage(ceed, text)
    return "" if message.lower().startswith("no error message") else message


def call(ceed: Any, function: str, *args: Any) -> None:
    """Calls a function of libCEED under the lock of `ceed` (a :class:`ceedtap.Ceed`) and raises what it reports."""
    library: Library = ceed.library
    with ceed.lock:
        try:
            implementation = getattr(library.lib, function)
        except AttributeError:
            library.first(function)  # raises
            raise
        rc = implementation(*args)
        if rc:
            check(rc, function, ceed.pointer, library)


_init_guard = Guard()


def initialize(library: Library, resource: str) -> Any:
    """Makes a Ceed; returns its handle, with errors kept in it from now on.

    libCEED reports an error about an unknown resource before there is a Ceed, one about a backend that is not compiled
    in afterwards, and each aborts the process under the other's setting. So the setting goes by what is to be expected.

    Raises:
        TypeError, ValueError: `resource` is no text, or has a zero character.
        CeedError: there is no such resource, or it does not work here.
    """
    if not isinstance(resource, str):
        raise TypeError(f"resource: expected a string such as '/cpu/self', got {type(resource).__name__}")
    if "\0" in resource:
        raise ValueError(f"resource: a zero character in {resource!r}")
    stem = resource.split(":", 1)[0]
    # "help" makes libCEED print a list to the terminal; the message has it. Long texts overrun what libCEED keeps.
    if resource.startswith("help") or len(os.fsencode(resource)) > 1000:
        raise _unknown_resource(resource, library)
    expected = len(stem) > 1 and any(name.startswith(stem) for name in library.resources)
    ffi, handle = library.ffi, library.ffi.new("Ceed *")
    with _init_guard:
        if expected:
            os.environ["CEED_ERROR_HANDLER"] = "store"
        try:
            rc = library.lib.CeedInit(os.fsencode(resource), handle)
        finally:
            os.environ["CEED_ERROR_HANDLER"] = "return"
        if rc or handle[0] == ffi.NULL:
            message = error_message(handle[0], library)
            if handle[0] != ffi.NULL:
                library.lib.CeedDestroy(handle)
            if message:
                raise CeedError.from_code(rc, f"{resource!r}: {message}", "CeedInit")
            raise _unknown_resource(resource, library)
    library.lib.CeedSetErrorHandler(handle[0], library.ffi.addressof(library.lib, "CeedErrorStore"))
    return handle[0]


def _unknown_resource(resource: str, library: Library) -> CeedError:
    names = ", ".join(library.resources)
    shown = repr(resource if len(resource) <= 100 else resource[:100] + "...")
    return CeedError(
        f"there is no backend {shown}; {library!r} knows, compiled in or not, {names}", code=-1, function="CeedInit"
    )


def root_of(library: Library, ceed: Any) -> Any:
    """The root of the tree that a Ceed belongs to, borrowed: backends delegate to Ceeds of their own."""
    root = library.ffi.new("Ceed *")
    rc = library.lib.CeedGetParent(ceed, root)
    if rc or root[0] == library.ffi.NULL:
        return ceed
    handle = root[0]
    if library.getters_own:
        library.lib.CeedDestroy(root)
    return handle
