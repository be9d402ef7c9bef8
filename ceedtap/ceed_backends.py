"""Which backends of a libCEED work on this processor, and the choice of one.

A libCEED that was compiled for another processor ends the process as soon as it comes to an instruction that is not
there. The official wheel is such a library: the avx backends use AVX-512VL where they work on single elements. So the
backends of a library are tried once, in processes of their own (:mod:`ceedtap.ceed_trial`), and what came out is kept
in the user's cache, for this library and this kind of processor.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ceedtap import ceed_trial, cpu
from ceedtap.cache import cache_dir, digest, write
from ceedtap.ceed_ffi import CeedUnsupportedError, Library
from ceedtap.guard import Guard

__all__ = ["Backends", "backends", "check_backend", "choose"]

#: On CPUs, the one that libCEED prefers first.
CPU_BACKENDS = tuple(
    f"/cpu/self/{name}"
    for name in (
        *("xsmm/blocked", "xsmm/serial", "avx/blocked", "avx/serial", "opt/blocked", "opt/serial"),
        *("ref/serial", "ref/blocked", "memcheck/serial", "memcheck/blocked"),
    )
)

# Signals that come from the code itself: with others, the next try may end differently.
_OF_THE_CODE = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}


@dataclass(frozen=True)
class Backends:
    """The CPU backends that a library has.

    Attributes:
        faults: why a backend does not work here, by its name, the fastest first; empty text for those that do.
        how: how that was found out.
    """

    faults: dict[str, str]
    how: str

    @property
    def working(self) -> list[str]:
        """Those that work here, the fastest first."""
        return [name for name, fault in self.faults.items() if not fault]


_known: weakref.WeakKeyDictionary[Library, Backends] = weakref.WeakKeyDictionary()
_guard = Guard()


def backends(library: Library) -> Backends:
    """The CPU backends of a library; tried at the first call if the cache does not know them.

    >>> from ceedtap.ceed_backends import backends
    >>> from ceedtap.ceed_ffi import load
    >>> "/cpu/self/opt/blocked" in backends(load()).working
    True
    """
    with _guard:
        if library not in _known:
            _known[library] = _find_out(library)
        return _known[library]


def choose(library: Library, resource: str) -> str:
    """The resource to start libCEED with when `resource` is asked for.

    Returns:
        the same, unless libCEED would choose a backend for it that does not work on this processor: then the fastest
        one of those meant by it that does.

    Raises:
        CeedUnsupportedError: none of them works here; with the reason and with what does.
    """
    if not isinstance(resource, str):
        return resource  # its type is reported where libCEED is started
    stem, colon, arguments = resource.partition(":")
    meant = [name for name in CPU_BACKENDS if len(stem) > 1 and name.startswith(stem)]
    if not meant:
        return resource  # a GPU's, or libCEED says that there is no such thing
    known = backends(library)
    present = [name for name in meant if name in known.faults]
    if not present or not known.faults[present[0]]:
        return resource
    for name in present:
        # Only "/cpu/self" and "/cpu/self/avx" and their like stand for several backends.
        if name.startswith(f"{stem}/") and stem != "/cpu" and not known.faults[name]:
            return name + colon + arguments
    raise CeedUnsupportedError(f"{resource!r}: {_explain(library, known, present)}")


def check_backend(library: Library, resource: str) -> None:
    """Refuses a backend that other code has started already.

    Raises:
        CeedUnsupportedError: it does not work on this processor.
    """
    known = backends(library)
    if known.faults.get(resource):
        raise CeedUnsupportedError(f"{resource!r}: {_explain(library, known, [resource])}")


def _explain(library: Library, known: Backends, names: Sequence[str]) -> str:
    reasons = "; ".join(f"{name} {known.faults[name]}" for name in names)
    if known.working:
        advice = f"Use {known.working[0]!r}, or '/cpu/self' for the fastest backend that works here"
    else:
        advice = (
            "No backend of this library works here: build libCEED on this machine, or run `ceedtap install-libceed`"
        )
    return f"{reasons} ({library!r}; {known.how}). {advice}"


def _find_out(library: Library) -> Backends:
    names = [name for name in CPU_BACKENDS if name in library.resources]
    kept = _kept(library, names)
    statuses = None
    if kept is not None:
        with contextlib.suppress(OSError, ValueError):
            statuses = _checked(json.loads(kept.read_bytes()), names)
    if statuses is None:
        try:
            statuses = _tried(library, names)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return _by_flags(names, error)
        if kept is not None and all(status >= 0 or -status in _OF_THE_CODE for status in statuses.values()):
            with contextlib.suppress(OSError):  # tried again by the next process
                write(kept, json.dumps(statuses).encode())
    faults = {name: _fault(status) for name, status in statuses.items() if status != ceed_trial.ABSENT}
    return Backends(faults, "tried in processes of their own")


def _kept(library: Library, names: Sequence[str]) -> Path | None:
    """The file that keeps the result; None where that is not possible."""
    try:
        program = Path(ceed_trial.__file__).read_bytes()
        key = digest(Path(library.path).read_bytes(), cpu.identity(), program, *names)
        return cache_dir() / "backends" / f"{key[:32]}.json"
    except OSError:
        return None


def _tried(library: Library, names: Sequence[str]) -> dict[str, int]:
    if not sys.executable:
        raise OSError("the Python that runs this program has no executable file")
    done = subprocess.run(
        # Isolated, and without site-packages: fast, and nothing of the user's is run.
        [sys.executable, "-I", "-S", ceed_trial.__file__, str(ceed_trial.LIMIT_SEC), library.path, *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=(len(names) + 1) * ceed_trial.LIMIT_SEC,
    )
    return _checked(json.loads(done.stdout), names)


def _checked(statuses: object, names: Sequence[str]) -> dict[str, int]:
    if not isinstance(statuses, dict) or list(statuses) != list(names):
        raise ValueError("the trial of the backends ended without a result")
    if not all(isinstance(status, int) and status != ceed_trial.FAILED for status in statuses.values()):
        raise ValueError("the trial of the backends failed")
    return statuses


def _fault(status: int) -> str:
    if status == ceed_trial.WORKS:
        return ""
    if status == ceed_trial.NO_LIBRARY:
        return "does not load in a process of its own"
    if status == -signal.SIGALRM:
        return f"had not done a small piece of work after {ceed_trial.LIMIT_SEC} s"
    if status >= 0:
        return f"ends the process with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    fault = f"ends the process with {name}"
    if status == -signal.SIGILL:
        fault += ": it was compiled for another processor"
        lacking = _lacking()
        if lacking:
            fault += f", and this one lacks {lacking}"
    return fault


def _lacking() -> str:
    """The instruction sets of x86 that libraries are compiled for and that this processor does not have."""
    flags = cpu.flags()
    wanted = {"avx": "AVX", "fma": "FMA", "avx2": "AVX2", "avx512f": "AVX-512F", "avx512vl": "AVX-512VL"}
    return ", ".join(name for flag, name in wanted.items() if flag not in flags) if "sse2" in flags else ""


def _by_flags(names: Sequence[str], error: Exception) -> Backends:
    """Without a trial: what libraries are known to need, of the backends that every library has."""
    flags = cpu.flags()
    lacks = "which this processor lacks" if flags else "and the system does not tell whether this processor has it"
    faults = {}
    for name in names:
        if name.startswith("/cpu/self/avx/") and "avx512vl" not in flags:
            faults[name] = f"may need AVX-512VL, {lacks}"
        elif name.startswith(("/cpu/self/avx/", "/cpu/self/opt/", "/cpu/self/ref/")):
            faults[name] = ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return Backends(
        faults, f"by the processor's flags, since they could not be tried in a process of their own: {reason}"
    )
