"""The examples run, and their numbers are right."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_embed_and_grad():
    lines = run("embed_and_grad.py").splitlines()
    assert [line.split()[0] for line in lines] == ["energy", "slope"]
    for line in lines:
        computed, exact = map(float, re.findall(r"-?\d+\.\d+", line))
        assert abs(computed - exact) < 1e-6


def test_tap():
    lines = run("tap.py").splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"iteration {k}" for k in range(4)]
    assert "x = 1.414216" in lines[-1]
