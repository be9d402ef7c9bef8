"""A fixed sample of the random programs of tests/fuzz/fuzz_taps.py; and that its oracles notice what is wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))
spec = importlib.util.spec_from_file_location("fuzz_taps", Path(__file__).parent / "fuzz/fuzz_taps.py")
assert spec is not None
assert spec.loader is not None
fuzz_taps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz_taps)
