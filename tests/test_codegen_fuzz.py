"""A fixed sample of the random functions of tests/fuzz/fuzz_codegen.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("fuzz_codegen", Path(__file__).parent / "fuzz/fuzz_codegen.py")
assert spec is not None
assert spec.loader is not None
fuzz_codegen = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz_codegen)


def test_random_functions_of_exact_operations():
    assert fuzz_codegen.run_exact(list(range(60))) == []


def test_random_functions():
    assert fuzz_codegen.run(list(range(60))) == []
