"""The examples of the README run, and give what they should."""

import math
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def outputs(block: str) -> list[float]:
    """The numbers that a block of code prints."""
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [float(word) for word in re.findall(r"-?\d+\.\d+", done.stdout)]


def test_blocks():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    operator, tap = blocks
    # The integral of sin(k x)^2 over the unit cube, and its derivative, at k = 2.
    norm2, slope = outputs(operator)
    assert math.isclose(norm2, 1 / 2 - math.sin(4) / 8, rel_tol=1e-7)
    assert math.isclose(slope, math.sin(4) / 16 - math.cos(4) / 4, rel_tol=1e-6)
    assert math.isclose(outputs(tap)[-1], math.sqrt(2), rel_tol=1e-6)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
