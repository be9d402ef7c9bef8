"""The processor that this program runs on: what compiled code depends on."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

__all__ = ["flags", "identity"]

#: Where Linux says what the processor is; the tests put other processors in its place.
CPUINFO = Path("/proc/cpuinfo")

# What `-march=native` goes by, in the words of x86, ARM, POWER, RISC-V and s390.
_KEYS = frozenset(
    (
        *("vendor_id", "cpu family", "model", "flags"),
        *("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part"),
        *("cpu", "isa", "features"),
    )
)


@functools.cache
def _first_processor(path: Path) -> dict[str, str]:
    try:
        # Not all of the file: the kernel takes long over hundreds of processors.
        with path.open(encoding="utf-8", errors="replace") as file:
            found: dict[str, str] = {}
            for line in file:
                key, _, value = line.partition(":")
                if not line.strip() and found:
                    break
                if key.strip() in _KEYS:
                    found[key.strip()] = value.strip()
            return found
    except OSError:
        return {}


def identity() -> str:
    """Text that differs between two processors that code for one of them might not run on the other of.

    Where the system does not tell what the processor is, the name of the machine stands for it.
    """
    known = _first_processor(CPUINFO)
    if known:
        return "\n".join((platform.machine(), *(f"{key}: {value}" for key, value in sorted(known.items()))))
    return f"{platform.machine()} {platform.processor()} of {platform.node()}"


def flags() -> frozenset[str]:
    """The instruction sets by Linux's names, such as ``avx512vl``; empty where the system does not tell."""
    known = _first_processor(CPUINFO)
    return frozenset((known.get("flags") or known.get("Features") or "").split())
