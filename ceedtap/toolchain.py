"""C source -> shared object, with a cache by content; QFunctions from C source.

A result is looked up by the source, the compiler, the flags and the processor, and is good only as long as the headers
that it was made of are unchanged. Files come into the cache by renaming, so that concurrent and interrupted builds do
no harm.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ceedtap import cpu
from ceedtap.cache import cache_dir, digest, write
from ceedtap.ceed_ffi import Library
from ceedtap.guard import Guard

__all__ = [
    "CompileError",
    "CompiledQFunction",
    "Compiler",
    "CompilerNotFound",
    "compile_qfunction",
    "compile_shared",
    "find_compiler",
    "try_places",
]

# Strict floating point: no -ffast-math, results must not depend on where the compiler finds it convenient. Nor is
# anything contracted: x * x - y * y would not be 0 for equal numbers; what is to be fused says so. The two -fno- flags
# change no result: they say that nobody looks at errno and at the exception flags. With them the choices that stand for
# branches are computed on both sides, so that loops vectorise.
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11", "-Werror=implicit-function-declaration",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip


class CompileError(RuntimeError):
    """C source that does not compile or link; the text is the compiler's, with the user's file and lines.

    Attributes:
        message: what the compiler said.
        command: the command line, a list.
    """

    def __init__(self, message: str, command: Sequence[str] = ()) -> None:
        self.message = message
        self.command = list(command)
        super().__init__(message)


class CompilerNotFound(CompileError):
    """There is no C compiler, or none that works here, or nowhere to keep and load what it makes."""


@dataclass(frozen=True)
class Compiler:
    """A C compiler.

    Attributes:
        command: how it is called, for example ``("/usr/bin/gcc",)``.
        identity: changes when the compiler does.
    """

    command: tuple[str, ...]
    identity: str


def find_compiler() -> Compiler:
    """The C compiler: ``$CC``, else cc, gcc or clang, else the one in the `ziglang` package.

    Raises:
        CompilerNotFound: there is none, or ``$CC`` is none.
    """
    return _find_compiler(os.environ.get("CC", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=16)
def _find_compiler(cc: str, path: str) -> Compiler:
    try:
        words = shlex.split(cc)
    except ValueError as error:
        raise CompilerNotFound(f"CC={cc}: {error}; unset CC or set it to a C compiler") from None
    if words:
        found = shutil.which(words[0], path=path)
        if not found:
            raise CompilerNotFound(f"CC={cc}: there is no program {words[0]!r}; unset CC or set it to a C compiler")
        return _compiler((found, *words[1:]), found)
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name, path=path):
            return _compiler((found,), found)
    spec = importlib.util.find_spec("ziglang")
    if spec and spec.origin:
        return _compiler((sys.executable, "-m", "ziglang", "cc"), str(Path(spec.origin).with_name("zig")))
    raise CompilerNotFound(
        "no C compiler: looked for $CC, cc, gcc, clang and the Python package ziglang. Install gcc or clang with your "
        "system's package manager, or run `pip install ziglang`"
    )


def _compiler(command: tuple[str, ...], program: str) -> Compiler:
    program = os.path.realpath(program)
    # Not `--version`: starting the compiler takes longer than everything else about a cached build.
    stat = os.stat(program)
    return Compiler(command, f"{' '.join(command)} {program} {stat.st_size} {stat.st_mtime_ns}")


# -- where objects are kept --------------------------------------------------------------------------------------------

T = TypeVar("T")

# Directories that compiled code cannot be made in or loaded from, and why; found out when something fails there.
_unusable: dict[tuple[Path, Compiler], str] = {}


@functools.cache
def _temporary_dir() -> Path:
    return Path(tempfile.mkdtemp(prefix="ceedtap-"))


def _places() -> Iterator[tuple[str, Callable[[], Path]]]:
    """Where results are kept: the user's cache, or where that cannot be, a directory of this process."""
    yield "cache", lambda: cache_dir() / "objects"
    yield "temporary directory", _temporary_dir


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _somewhere(compiler: Compiler, make: Callable[[Path], T]) -> T:
    """What `make` makes in a directory where compiled code can be kept and loaded from.

    Raises:
        CompilerNotFound: there is no such directory, or the compiler does not work anywhere.
        CompileError: as `make` raises it; the compiler and the directory are good.
    """
    reasons: dict[str, str] = {}
    for kind, find in _places():
        place = None
        try:
            place = find()
            if (place, compiler) not in _unusable:
                place.mkdir(parents=True, exist_ok=True, mode=0o700)
                made = make(place)
                if reasons:
                    _warn(
                        f"compiled functions are kept in {place}, for this process only: {_listed(reasons)}. Set "
                        "XDG_CACHE_HOME to a directory that can be written to and that programs may be loaded from"
                    )
                return made
        except (CompileError, OSError) as error:
            # No room is no fault of the source, although something as small as the trial may find some.
            fault = _one_line(error) if isinstance(error, OSError) or _no_room(error) else _fault(place, compiler)
            if not fault:
                raise
            if place is None:
                reasons[kind] = f"there is no {kind}: {fault}"
                continue
            _unusable[place, compiler] = fault
        reasons[kind] = f"{place} cannot be used: {_unusable[place, compiler]}"
    raise CompilerNotFound(
        f"nothing can be compiled and loaded with {' '.join(compiler.command)}: {_listed(reasons)}. Set CC to a C "
        "compiler that works, or XDG_CACHE_HOME or TMPDIR to a directory for files that programs are loaded from"
    )


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(reasons.values())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _no_room(error: Exception) -> bool:
    return any(text in str(error) for text in map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))


def _fault(place: Path | None, compiler: Compiler) -> str:
    """Why nothing can be compiled in a directory and loaded from it; empty when a trial goes well."""
    try:
        assert place is not None
        with _building(place) as build:
            result = _build("int ceedtap_trial(void) { return 42; }\n", compiler, list(FLAGS), build, None)
            if ctypes.CDLL(result).ceedtap_trial() != 42:
                return "a compiled function gives wrong results"
    except (CompileError, OSError) as error:
        return _one_line(error)
    return ""


def try_places(compiler: Compiler) -> dict[str, tuple[Path | None, str]]:
    """Compiles, loads and runs a small function wherever compiled code may be kept.

    Returns:
        the directory and why it cannot be used (empty when it can), by its kind: the one that is preferred is first.
    """
    found: dict[str, tuple[Path | None, str]] = {}
    for kind, find in _places():
        place = None
        try:
            place = find()
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            found[kind] = place, _fault(place, compiler)
        except OSError as error:
            found[kind] = place, _one_line(error)
    return found


_loaded: dict[str, Any] = {}
_loaded_guard = Guard()


def _load(path: Path) -> Any:
    """The library in a file.

    Raises:
        CompileError: it does not load, for example because a function is nowhere defined.
    """
    # Never unloaded: operators, and programs compiled with them, may call the code at any later time.
    with _loaded_guard:
        if str(path) not in _loaded:
            try:
                _loaded[str(path)] = ctypes.CDLL(str(path))
            except OSError as error:
                raise CompileError(str(error)) from None
        return _loaded[str(path)]


def _file_digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "missing"


def compile_shared(
    source: str, *, include_dirs: Sequence[str] = (), flags: Sequence[str] = (), compiler: Compiler | None = None
) -> Path:
    """Compiles C source to a shared object, or finds it in the cache.

    Args:
        source: a whole translation unit. Use ``#line`` to have errors name the user's file.
        include_dirs: directories for ``#include``.
        flags: further flags, after the usual ones.
        compiler: by default :func:`find_compiler`.

    Returns:
        the file; it stays where it is.

    Raises:
        CompileError: with the compiler's messages, or those of the loader.
        CompilerNotFound: there is no compiler, or none that works here.

    >>> import ctypes
    >>> from ceedtap.toolchain import compile_shared
    >>> ctypes.CDLL(str(compile_shared("int answer(void) { return 42; }"))).answer()
    42
    """
    compiler = compiler or find_compiler()
    options = [*FLAGS, *flags, *(f"-I{directory}" for directory in include_dirs)]
    return _somewhere(compiler, functools.partial(_compile, source, compiler, options))


def _compile(source: str, compiler: Compiler, options: list[str], directory: Path) -> Path:
    """Compiles in a directory, or finds there, an object that loads."""
    key = digest(source, compiler.identity, json.dumps(options), cpu.identity())[:32]
    manifest = directory / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, CompileError):
        known = json.loads(manifest.read_bytes())
        path = directory / known["object"]
        if _file_digest(str(path)) == known["digest"] and all(
            _file_digest(header) == known_digest for header, known_digest in known["headers"].items()
        ):
            _load(path)
            return path
    with _building(directory) as build:
        result = _build(source, compiler, options, build, lambda: _fault(directory, compiler))
        unit, dependencies = os.path.join(build, "unit.c"), os.path.join(build, "unit.d")
        headers = {name: _file_digest(name) for name in _headers(Path(dependencies)) if name != unit}
        content = _file_digest(result)
        # Named by content: a program that has an older one loaded keeps it.
        path = directory / f"{key}-{content[:16]}.so"
        os.replace(result, path)
    _load(path)
    with contextlib.suppress(OSError):  # compiled again the next time
        write(manifest, json.dumps({"object": path.name, "digest": content, "headers": headers}).encode())
    return path


def _building(directory: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=directory, prefix="build-", ignore_cleanup_errors=True)


def _build(source: str, compiler: Compiler, options: list[str], build: str, fault: Callable[[], str] | None) -> str:
    """Compiles in a directory of its own; what is made is ``unit.so`` there.

    Args:
        fault: asked when the compiler takes long: why it does not work at all. None: then it has failed.
    """
    unit, result, dependencies = (os.path.join(build, name) for name in ("unit.c", "unit.so", "unit.d"))
    Path(unit).write_text(source, encoding="utf-8")
    tail = ["-MMD", "-MF", dependencies, "-MT", "unit", "-o", result, unit, "-lm"]
    command = [*compiler.command, *options, *tail]
    without_march = [*compiler.command, *(o for o in options if "-march" not in o), *tail]
    # The compiler's own temporary files may find no other place.
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "TMPDIR": build}
    for attempt in (command, without_march):
        status, output = _run(attempt, environment, fault)
        if status == 0 and os.path.isfile(result):
            return result
        # Some compilers do not know the processor that they run on.
        if "march" not in output:
            break
    raise CompileError(output or f"{attempt[0]} ended with status {status} and made nothing", attempt)


# Seconds after which a compiler is suspected to hang, and those that a source may take.
SUSPICIOUS_SEC, LIMIT_SEC = 20.0, 600.0


def _run(command: list[str], environment: dict[str, str], fault: Callable[[], str] | None) -> tuple[int, str]:
    """The status of a compiler and what it said; killed, with all that it has started, when it hangs."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CompileError(f"cannot run {command[0]}: {error}", command) from None
    try:
        limit = SUSPICIOUS_SEC
        try:
            said = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            if fault is None or fault():
                raise
            limit = LIMIT_SEC
            said = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise CompileError(f"{command[0]} had not ended after {limit:g} s", command) from None
    except BaseException:
        _kill(process)
        raise
    return process.returncode, (said[1] or said[0]).strip() or (
        f"{command[0]} ended with status {process.returncode}" if process.returncode else ""
    )


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _headers(dependencies: Path) -> list[str]:
    """The files in a make rule ``unit: a.c b.h``, spaces escaped."""
    text = dependencies.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ").partition(":")[2]
    return [name.replace("\\ ", " ") for name in re.findall(r"(?:\\ |\S)+", text)]


# -- QFunctions --------------------------------------------------------------------------------------------------------

# What a QFunction needs of libCEED's headers, for libraries that come without them.
_TYPES_H = """\
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
typedef int32_t CeedInt;
typedef ptrdiff_t CeedSize;
typedef signed char CeedInt8;
typedef @SCALAR@ CeedScalar;
#define CEED_EPSILON @EPSILON@
#define CEED_QFUNCTION_ATTR
#define CEED_QFUNCTION(name) int name
#define CEED_QFUNCTION_HELPER static inline
#define CEED_Q_VLA Q
#define CeedPragmaSIMD _Pragma("GCC ivdep")
"""


def _include_dir(library: Library, place: Path) -> str:
    if library.include_dir:
        return library.include_dir
    single = library.scalar_dtype.itemsize == 4
    types = _TYPES_H.replace("@SCALAR@", "float" if single else "double").replace(
        "@EPSILON@", "6e-8" if single else "1e-16"
    )
    directory = place / f"include-{digest(types)[:16]}"
    for name, text in {
        "ceed/types.h": types,
        "ceed/ceed.h": "#include <ceed/types.h>\n",
        "ceed.h": "#include <ceed/types.h>\n",
    }.items():
        if not (directory / name).is_file():
            write(directory / name, text.encode())
    return str(directory)


@dataclass(frozen=True)
class CompiledQFunction:
    """A QFunction in machine code.

    Attributes:
        name: of the function.
        address: of its code; valid while `handle` lives.
        source: ``"/path/file.h:name"``, which the GPU backends compile from.
        handle: the loaded shared object.
        take_status: returns what the last call that failed in this thread returned, once, and 0 otherwise.
    """

    name: str
    address: int
    source: str
    handle: Any
    take_status: Any


_STATUS = "ceedtap_status"


def compile_qfunction(library: Library, source: str | os.PathLike[str], name: str) -> CompiledQFunction:
    """Compiles a QFunction in C for the CPU, and keeps its source for the backends that compile it themselves.

    Args:
        library: the libCEED that will call it, whose headers are used.
        source: C text, or the path of a file. ``CEED_QFUNCTION(name)(void *ctx, const CeedInt Q, const CeedScalar
            *const *in, CeedScalar *const *out)`` must be in it; ``ceed/types.h`` is included before it.
        name: the function.

    Raises:
        CompileError: it does not compile, has another signature, or there is no such function.
        OSError: the file cannot be read.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"name: {name!r} is not the name of a C function")
    kept = ""
    if isinstance(source, str):
        if "\0" in source:
            raise ValueError("source: a zero character in C text")
        text, label = source, f"<QFunction {name}>"
        kept = "#pragma once\n#include <ceed/types.h>\n" + source
    else:
        path = Path(source).resolve()
        text, label = path.read_text(encoding="utf-8"), str(path)
    unit = (
        "#include <ceed/types.h>\n"
        "#undef CEED_QFUNCTION\n"
        "#define CEED_QFUNCTION(name) int name\n"  # the header makes it static
        # A function of another type would crash when it is called; this makes it an error of the compiler.
        # Not inlined below: it would be compiled twice.
        "__attribute__((noinline)) int "
        f"{name}(void *, const CeedInt, const CeedScalar *const *, CeedScalar *const *);\n"
        f"#line 1 {json.dumps(label)}\n{text}\n"
        # libCEED's backends turn what a QFunction returns into a code of their own.
        f"static _Thread_local int {_STATUS};\n"
        f"int {_STATUS}_take(void) {{ int status = {_STATUS}; {_STATUS} = 0; return status; }}\n"
        f"int {_STATUS}_call(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {{\n"
        f"  int status = {name}(ctx, Q, in, out);\n"
        f"  if (status) {_STATUS} = status;\n"
        "  return status;\n}\n"
    )
    compiler = find_compiler()
    # Generated code knows what it is worth.
    found = re.match(r"/\* compile with (-O\w[-\w ]*) \*/", text)
    level = found[1].split() if found else []

    def make(directory: Path) -> tuple[Path, Path]:
        if kept:
            file = directory / f"{digest(kept)[:32]}.h"
            if not file.is_file():
                write(file, kept.encode())
        else:
            file = path
        beside = [] if kept else [str(path.parent)]
        include = [f"-I{name}" for name in (*beside, _include_dir(library, directory))]
        return file, _compile(unit, compiler, [*FLAGS, *level, *include], directory)

    try:
        file, shared = _somewhere(compiler, make)
    except CompilerNotFound:
        raise
    except CompileError as error:
        if not error.command and f"undefined symbol: {name}" in error.message:
            raise CompileError(f"{label}: there is no CEED_QFUNCTION({name}) in the source") from None
        undefined = "" if error.command else f"{label}: "  # the loader's message does not name the source
        raise CompileError(undefined + error.message, error.command) from None
    handle = _load(shared)
    function, take_status = getattr(handle, f"{_STATUS}_call"), getattr(handle, f"{_STATUS}_take")
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return CompiledQFunction(name, address, f"{file}:{name}", handle, take_status)
