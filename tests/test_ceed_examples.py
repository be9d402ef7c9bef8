"""libCEED's three examples, in all dimensions, on all backends, and as programs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ceed_helpers import BACKENDS

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = {"ex1_volume": "volume", "ex2_surface": "surface", "ex3_vector_mass": "volume"}


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("resource", BACKENDS)
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_answers(name, dim, resource):
    module = load(name)
    computed = getattr(module, NAMES[name])(dim, resource)
    # The geometry is a polynomial of degree 4 on elements of size 1/4.
    np.testing.assert_allclose(computed, module.exact(dim), rtol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_program(name):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, EXAMPLES / f"{name}.py", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd="/", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", done.stdout)]
    half = len(numbers) // 2
    np.testing.assert_allclose(numbers[:half], numbers[half:], rtol=2e-6)
