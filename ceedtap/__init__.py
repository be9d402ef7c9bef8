"""ceedtap: libCEED operators inside JAX programs, and taps that stream arrays out of them."""

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The public names are listed in __init__.pyi, for type checkers and for this: a name is imported when it is first used.
# So `ceedtap doctor` starts where JAX, libCEED or the native part is broken.
_HOME = {
    name: (module, original)
    for module, original, name in re.findall(
        r"^from (\S+) import (\w+) as (\w+)$", Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"), re.M
    )
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ceedtap' has no attribute {name!r}")
    module, original = _HOME[name]
    if module == __name__:
        return importlib.import_module(f"{__name__}.{original}")
    value = globals()[name] = getattr(importlib.import_module(module), original)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
