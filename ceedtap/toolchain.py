"""C source -> shared object, with a cache by content; QFunctions from C source.

A result is looked up by the source, the compiler, the flags and the processor, and is good only as long as the headers
that it was made of are unchanged. Files come into the cache by renaming, so that concurrent and interrupted builds do
no harm.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """There is no C compiler."""


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
    if words := shlex.split(cc):
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


@functools.cache
def _fallback_dir() -> Path:
    return Path(tempfile.mkdtemp(prefix="ceedtap-"))


def _objects_dir() -> Path:
    """Where results are kept: the user's cache, or where it cannot be written to, a directory of this process."""
    directory = cache_dir() / "objects"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(directory, os.W_OK | os.X_OK):
            return directory
    except OSError:
        pass
    return _fallback_dir()


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
        CompileError: with the compiler's messages.

    >>> import ctypes
    >>> from ceedtap.toolchain import compile_shared
    >>> ctypes.CDLL(str(compile_shared("int answer(void) { return 42; }"))).answer()
    42
    """
    compiler = compiler or find_compiler()
    options = [*FLAGS, *flags, *(f"-I{directory}" for directory in include_dirs)]
    key = digest(source, compiler.identity, json.dumps(options), cpu.identity())[:32]
    directory = _objects_dir()
    manifest = directory / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(manifest.read_bytes())
        path = directory / known["object"]
        if _file_digest(str(path)) == known["digest"] and all(
            _file_digest(header) == known_digest for header, known_digest in known["headers"].items()
        ):
            return path
    with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as build:
        unit, result, dependencies = (os.path.join(build, name) for name in ("unit.c", "unit.so", "unit.d"))
        Path(unit).write_text(source, encoding="utf-8")
        tail = ["-MMD", "-MF", dependencies, "-MT", "unit", "-o", result, unit, "-lm"]
        _run(
            [*compiler.command, *options, *tail], [*compiler.command, *(o for o in options if "-march" not in o), *tail]
        )
        headers = {name: _file_digest(name) for name in _headers(Path(dependencies)) if name != unit}
        content = _file_digest(result)
        # Named by content: a program that has an older one loaded keeps it.
        path = directory / f"{key}-{content[:16]}.so"
        os.replace(result, path)
    write(manifest, json.dumps({"object": path.name, "digest": content, "headers": headers}).encode())
    return path


def _run(command: list[str], without_march: list[str]) -> None:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    for attempt in (command, without_march):
        try:
            result = subprocess.run(
                attempt, capture_output=True, text=True, errors="replace", env=environment, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise CompileError(f"cannot run {attempt[0]}: {error}", attempt) from None
        if result.returncode == 0:
            return
        # Some compilers do not know the processor that they run on.
        if "march" not in result.stderr:
            break
    output = (result.stderr or result.stdout).strip() or f"{attempt[0]} ended with status {result.returncode}"
    raise CompileError(output, attempt)


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


def _include_dir(library: Library) -> str:
    if library.include_dir:
        return library.include_dir
    single = library.scalar_dtype.itemsize == 4
    types = _TYPES_H.replace("@SCALAR@", "float" if single else "double").replace(
        "@EPSILON@", "6e-8" if single else "1e-16"
    )
    directory = _objects_dir() / f"include-{digest(types)[:16]}"
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
    """

    name: str
    address: int
    source: str
    handle: Any


_loaded: dict[str, Any] = {}
_loaded_guard = Guard()


def _load(path: Path) -> Any:
    # Never unloaded: operators, and programs compiled with them, may call the code at any later time.
    with _loaded_guard:
        if str(path) not in _loaded:
            _loaded[str(path)] = ctypes.CDLL(str(path))
        return _loaded[str(path)]


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
    include_dirs = [_include_dir(library)]
    if isinstance(source, str):
        if "\0" in source:
            raise ValueError("source: a zero character in C text")
        text, label = source, f"<QFunction {name}>"
        kept = "#pragma once\n#include <ceed/types.h>\n" + source
        path = _objects_dir() / f"{digest(kept)[:32]}.h"
        if not path.is_file():
            write(path, kept.encode())
    else:
        path = Path(source).resolve()
        text, label = path.read_text(encoding="utf-8"), str(path)
        include_dirs.insert(0, str(path.parent))
    unit = (
        "#include <ceed/types.h>\n"
        "#undef CEED_QFUNCTION\n"
        "#define CEED_QFUNCTION(name) int name\n"  # the header makes it static
        # A function of another type would crash when it is called; this makes it an error of the compiler.
        f"int {name}(void *, const CeedInt, const CeedScalar *const *, CeedScalar *const *);\n"
        f"#line 1 {json.dumps(label)}\n{text}\n"
    )
    shared = compile_shared(unit, include_dirs=include_dirs)
    try:
        handle = _load(shared)
        function = getattr(handle, name)
    except OSError as error:
        raise CompileError(f"{label}: {error}") from None
    except AttributeError:
        raise CompileError(f"{label}: there is no CEED_QFUNCTION({name}) in the source") from None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return CompiledQFunction(name, address, f"{path}:{name}", handle)
