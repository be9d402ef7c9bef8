"""``ceedtap doctor``: what was found, what is missing, and the command that fixes it.

Each check runs in a worker process of its own making: a broken library may raise, hang or kill the process that loads
it, and the doctor has to say so and go on. This file imports nothing of ceedtap before a check asks for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

OK, NOTE, PROBLEM = "ok", "note", "problem"

#: Backends of GPUs that are tried.
GPU_BACKENDS = ("/gpu/cuda/gen", "/gpu/hip/gen", "/gpu/sycl/gen")
#: All that a worker process may take, in seconds.
TIMEOUT_SEC = 180.0

_REINSTALL = "pip install --force-reinstall --no-deps ceedtap   (in a clone: pip install -e .)"
_JAX = 'pip install --upgrade "jax>=0.10.2"'


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        name: what was looked at.
        status: ``"ok"``, ``"note"`` (optional, or worth knowing) or ``"problem"`` (the main job cannot run).
        detail: what was found.
        fix: the command or the step that changes it; empty when there is nothing to change.
    """

    name: str
    status: str
    detail: str
    fix: str = ""


# -- checks: each a generator of findings, run in a worker process ---------------------------------------------------


def _check_python() -> Iterator[Finding]:
    yield Finding("Python", OK, f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})")


def _check_ceedtap() -> Iterator[Finding]:
    import ceedtap

    if error := getattr(ceedtap, "_import_error", None):  # the stand-in that the worker made
        yield Finding("ceedtap", PROBLEM, f"import ceedtap fails: {error}", "first fix what is marked below")
    else:
        yield Finding("ceedtap", OK, f"{ceedtap.__version__} ({os.path.dirname(ceedtap.__file__)})")


def _check_jax() -> Iterator[Finding]:
    try:
        import jax
        import jaxlib
    except ImportError as error:
        yield Finding("JAX", PROBLEM, _text(error), _JAX)
        return
    yield Finding("JAX", OK, f"{jax.__version__}, jaxlib {jaxlib.__version__}")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield Finding("JAX devices", PROBLEM, _text(error), "JAX_PLATFORMS=cpu ceedtap doctor")
        return
    kinds = ", ".join(f"{device.platform}:{device.id}" for device in devices[:8])
    more = f" and {len(devices) - 8} more" if len(devices) > 8 else ""
    yield Finding("JAX devices", OK, f"{len(devices)} ({kinds}{more})")
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        yield Finding("JAX float64", OK, "on")
    else:
        fix = 'jax.config.update("jax_enable_x64", True) in the program, or export JAX_ENABLE_X64=1'
        yield Finding("JAX float64", NOTE, "off by default; a libCEED in double precision needs it", fix)


def _check_native() -> Iterator[Finding]:
    try:
        native = importlib.import_module("ceedtap.native._native")
    except ImportError as error:
        yield Finding("native part", PROBLEM, _text(error), _REINSTALL)
        return
    yield Finding("native part", OK, os.path.basename(native.__file__ or "loaded"))
    try:
        from ceedtap import jax_compat
    except Exception as error:
        yield Finding("JAX interface", PROBLEM, _text(error), 'pip install "jax>=0.10.2,<0.13"')
        return
    broken = jax_compat.broken()
    if broken:
        yield Finding("JAX interface", PROBLEM, f"lacks {', '.join(broken)}", 'pip install "jax>=0.10.2,<0.13"')
    else:
        yield Finding("JAX interface", OK, "all that ceedtap needs of JAX is there")


def _check_libceed() -> Iterator[Finding]:
    from ceedtap import ceed_ffi

    fix = _libceed_fix()
    try:
        library = ceed_ffi.load()
    except Exception as error:
        yield Finding("libCEED", PROBLEM, _text(error), fix)
        return
    yield Finding("libCEED", OK, f"{library.version}, {library.scalar_dtype}, {library.path} (from {library.origin})")
    from ceedtap.ceed_backends import backends

    known = backends(library)
    works = known.working
    for resource in GPU_BACKENDS:
        with contextlib.suppress(Exception):
            _open_ceed(resource)
            works.append(resource)
    if works:
        yield Finding("libCEED backends", OK, f"{', '.join(works)} ({known.how})")
    else:
        yield Finding("libCEED backends", PROBLEM, f"none works on this processor ({known.how})", fix)
    for resource, fault in known.faults.items():
        if fault:
            fix = f'use "{works[0]}", which "/cpu/self" stands for here' if works else ""
            yield Finding("libCEED backend", NOTE, f"{resource} {fault}", fix)


def _open_ceed(resource: str) -> Any:
    from ceedtap.ceed import Ceed

    return Ceed(resource)


def _libceed_fix() -> str:
    for name in ("CEEDTAP_LIBCEED", "CEED_DIR"):
        if os.environ.get(name):
            return f"unset {name}   (it is {os.environ[name]!r}), then: ceedtap install-libceed"
    return "ceedtap install-libceed"


def _check_processor() -> Iterator[Finding]:
    """The instruction sets that libraries and compiled code make a difference between."""
    from ceedtap import cpu

    flags = cpu.flags()
    sets = {"avx2": "AVX2", "fma": "FMA", "avx512f": "AVX-512F", "avx512vl": "AVX-512VL", "asimd": "NEON", "sve": "SVE"}
    names = [name for flag, name in sets.items() if flag in flags]
    lacks = [name for flag, name in sets.items() if flag not in flags] if "sse2" in flags else []
    lacks = [name for name in lacks if name not in ("NEON", "SVE")]
    detail = ", ".join([platform.machine(), *names]) + (f"; without {', '.join(lacks)}" if lacks else "")
    yield Finding("processor", OK, detail if flags else f"{platform.machine()}; the system does not tell its features")


def _check_compiler() -> Iterator[Finding]:
    """Compiles, loads and runs a function, in each directory that compiled code may be kept in."""
    from ceedtap import toolchain

    fix = "install gcc or clang (apt install gcc), or: pip install ziglang"
    slower = "point functions run in plain JAX, which is slower; there are no QFunctions from C source"
    if os.environ.get("CC", "").strip():
        fix = f"unset CC   (it is {os.environ['CC']!r}), or: {fix}"
    try:
        compiler = toolchain.find_compiler()
        places = toolchain.try_places(compiler)
    except Exception as error:
        yield Finding("C compiler", NOTE, f"{_text(error)} ({slower})", fix)
        return
    faults = {kind: fault for kind, (_, fault) in places.items() if fault}
    if len(faults) < len(places):
        yield Finding("C compiler", OK, f"{_compiler_version(compiler.command)}; a compiled function runs")
    else:
        yield Finding("C compiler", NOTE, f"{'; '.join(dict.fromkeys(faults.values()))} ({slower})", fix)
    cache, fault = places["cache"]
    if not fault:
        yield Finding("cache", OK, str(cache))
    elif len(faults) < len(places):
        fix = "export XDG_CACHE_HOME=DIRECTORY, one that can be written to and that programs may be loaded from"
        detail = f"{cache or 'none'} cannot be used: {fault} (every process compiles anew)"
        yield Finding("cache", NOTE, detail, fix)


def _compiler_version(command: Sequence[str]) -> str:
    name = " ".join(command)
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{name} ({_text(error)})"
    return f"{name}: {said.splitlines()[0].strip()}" if said.strip() else name


def _check_optional() -> Iterator[Finding]:
    packages = {
        "meshio": ("mesh files, demo.vtu", "pip install 'ceedtap[mesh]'"),
        "matplotlib": ("pictures, demo.png", "pip install 'ceedtap[plot]'"),
        "scipy": ("sparse matrices, tests", "pip install scipy"),
    }
    for name, (use, fix) in packages.items():
        try:
            version = importlib.metadata.version(name)
            importlib.import_module(name)
        except Exception as error:
            missing = isinstance(error, (ModuleNotFoundError, importlib.metadata.PackageNotFoundError))
            yield Finding(f"{name} (optional)", NOTE, f"{'not installed' if missing else _text(error)}: {use}", fix)
        else:
            yield Finding(f"{name} (optional)", OK, version)


def _check_run() -> Iterator[Finding]:
    """The main job in small: a libCEED operator inside a compiled program, and a tap of what it computes."""
    try:
        import jax

        jax.config.update("jax_enable_x64", True)
        import jax.numpy as jnp
        import numpy as np

        from ceedtap import ceed, operators, outfeed, primitive

        # The mass of [0, 1], four elements of two nodes: in the precision of this libCEED.
        one = ceed.Ceed("/cpu/self")
        nodes = one.ElemRestriction(4, 2, 1, 1, 5, np.arange(4)[:, None] + np.arange(2))
        basis = one.BasisTensorH1Lagrange(1, 1, 2, 2, ceed.GAUSS)
        weights = one.Vector(8)
        weights.set_value(1 / 8)
        mass_operator = one.Operator(one.QFunctionByName("MassApply"))
        mass_operator.set_field("u", nodes, basis, ceed.VECTOR_ACTIVE)
        points = one.StridedElemRestriction(4, 2, 1, 8, [1, 2, 2])
        mass_operator.set_field("qdata", points, ceed.BASIS_NONE, weights)
        mass_operator.set_field("v", nodes, basis, ceed.VECTOR_ACTIVE)
        mass = operators.embed(mass_operator, symmetric=True)
        seen: list[Any] = []

        @jax.jit
        def length(u: Any) -> Any:
            return primitive.id_tap(seen.append, u @ mass(u))

        with outfeed.outfeed_receiver():
            value = float(length(jnp.ones(5, one.library.scalar_dtype)))
        if not np.isclose(value, 1.0) or [float(x) for x in seen] != [value]:
            raise RuntimeError(f"the length of the interval from 0 to 1 came out as {value}, tapped as {seen}")
    except Exception as error:
        yield Finding("trial run", PROBLEM, _text(error), "first fix what is marked above")
        return
    yield Finding("trial run", OK, "an embedded operator ran in a compiled program, its tap was delivered")


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": _check_python,
    "ceedtap": _check_ceedtap,
    "JAX": _check_jax,
    "native part": _check_native,
    "processor": _check_processor,
    "libCEED": _check_libceed,
    "C compiler": _check_compiler,
    "trial run": _check_run,
    "optional packages": _check_optional,
}


def _text(error: BaseException) -> str:
    """An exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# -- worker: runs checks, writes one JSON object a line --------------------------------------------------------------


def work(names: Sequence[str], stream: TextIO) -> None:
    """Runs the checks `names`; every line on `stream` is ``["start", name]``, ``["finding", {...}]`` or ``["end"]``."""

    def send(*message: Any) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    for name in names:
        send("start", name)
        try:
            for finding in CHECKS[name]():
                send("finding", asdict(finding))
        except Exception as error:
            send("finding", asdict(Finding(name, PROBLEM, _text(error), _REINSTALL)))
    send("end")


_WORKER = """
import os, sys, types
here, out, names = sys.argv[1], os.fdopen(int(sys.argv[2]), "w"), sys.argv[3:]
sys.path.insert(0, os.path.dirname(here))
try:
    from ceedtap import doctor
except BaseException as error:  # what the package imports is broken; a stand-in lets the rest be looked at
    for name in [name for name in sys.modules if name.partition(".")[0] == "ceedtap"]:
        del sys.modules[name]
    package = sys.modules["ceedtap"] = types.ModuleType("ceedtap")
    package.__path__ = [here]
    package._import_error = f"{type(error).__name__}: {error}"
    from ceedtap import doctor
doctor.work(names, out)
"""

# -- the doctor itself -----------------------------------------------------------------------------------------------


def findings(names: Sequence[str] = tuple(CHECKS)) -> Iterator[Finding]:
    """Runs the checks and yields what they find, as it is found; never raises on account of what is broken."""
    todo = list(names)
    while todo:
        current = todo[0]
        with _output() as output:
            for kind, *rest in _messages(todo, output):
                if kind == "start":
                    current = rest[0]
                    todo.remove(current)
                elif kind == "finding":
                    yield Finding(**rest[0])
                elif kind == "died":
                    output.seek(0)
                    said = [line.strip() for line in output if line.strip()]
                    detail = f"the process that ran this check {rest[0]}" + (f": {said[-1]}" if said else "")
                    fix = _libceed_fix() if current in ("libCEED", "trial run") else _REINSTALL
                    yield Finding(current, PROBLEM, detail, fix)
                    with contextlib.suppress(ValueError):
                        todo.remove(current)


def _output() -> TextIO:
    """Where a worker's output goes; without a temporary directory it is lost."""
    try:
        return tempfile.TemporaryFile("w+", errors="replace")
    except OSError:
        return open(os.devnull, "w+", errors="replace")


def _messages(names: Sequence[str], output: TextIO) -> Iterator[tuple[Any, ...]]:
    """What a worker that runs the checks `names` sends, and ``("died", how)`` when it does not come to its end."""
    receiving, sending = os.pipe()
    here = os.path.dirname(os.path.abspath(__file__))
    with open(receiving) as stream:
        try:
            worker = subprocess.Popen(
                [sys.executable, "-c", _WORKER, here, str(sending), *names],
                pass_fds=(sending,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        finally:
            os.close(sending)
        timer = threading.Timer(TIMEOUT_SEC, worker.kill)
        timer.daemon = True
        timer.start()
        try:
            ended = False
            for line in stream:
                message = tuple(json.loads(line))
                ended = message[0] == "end"
                if not ended:
                    yield message
            code = worker.wait()
            if not ended:
                yield "died", _how(code, timer)
        finally:
            timer.cancel()
            worker.kill()
            worker.wait()


def _how(code: int, timer: threading.Timer) -> str:
    if code == -signal.SIGKILL and timer.finished.is_set():
        return f"had not ended after {TIMEOUT_SEC:.0f} s"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


_SIGNS = {OK: ("ok", "32"), NOTE: ("note", "33"), PROBLEM: ("PROBLEM", "1;31")}


def main(stream: TextIO | None = None) -> int:
    """Prints the table of checks to `stream` (default: standard output); 1 when the main job cannot run, else 0."""
    stream = sys.stdout if stream is None else stream
    colour = stream.isatty() and "NO_COLOR" not in os.environ

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if colour else text

    problems = 0
    for finding in findings():
        sign, code = _SIGNS[finding.status]
        print(f"{paint(f'{sign:<8}', code)} {finding.name:<22} {finding.detail}", file=stream)
        if finding.fix:
            print(f"{'':<31} {paint('fix:', '1')} {finding.fix}", file=stream)
        problems += finding.status == PROBLEM
        stream.flush()
    if problems:
        count = "1 problem" if problems == 1 else f"{problems} problems"
        print(paint(f"\n{count}: ceedtap cannot do its work here yet.", "1;31"), file=stream)
        return 1
    print(paint("\nAll that ceedtap needs is there. Try: ceedtap demo", "32"), file=stream)
    return 0
