"""The page on physics and the examples of point functions run, and give the right numbers."""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "physics.md").read_text(encoding="utf-8")


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(line):
    return [float(word) for word in re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", line)]


def without_numbers(text):
    """C whose variables have no numbers; these may change with every change of the translator."""
    return re.sub(r"\bt\d+\b", "t", re.sub(r"heat_[0-9a-f]{12}", "heat", text))


def test_the_page_on_physics(tmp_path):
    page = tmp_path / "page.py"
    page.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), encoding="utf-8")
    source, end, rest = run(page).partition("  return 0;\n}\n")
    solved, slope, difference, strain, boundary, outflow = rest.strip().splitlines()
    maximum, first, last = numbers(solved)
    # The series of the torsion function at the middle of the square.
    torsion = sum(
        16 / math.pi**4 * math.sin(m * math.pi / 2) * math.sin(n * math.pi / 2) / (m * n * (m**2 + n**2))
        for m in range(1, 400, 2)
        for n in range(1, 400, 2)
    )
    assert abs(maximum + 0.5 * maximum**3 / 3 - 10 * torsion) < 5e-5
    assert last < 1e-11 < first
    by_adjoint, by_differences = numbers(slope)
    assert by_adjoint < 0
    assert abs(by_adjoint - by_differences) < 1e-7
    assert numbers(difference)[0] < 1e-14
    exact, rounded = numbers(strain)
    assert 0 < abs(exact - rounded) < 1e-8 * exact
    assert numbers(boundary)[0] < 1e-12
    assert abs(numbers(outflow)[0] - 3.75) < 1e-6
    # The C on the page is what the translator writes.
    (shown,) = re.findall(r"```c\n(.*?)```", PAGE, re.DOTALL)
    for part in re.split(r"^ *\.\.\.\n", shown, flags=re.MULTILINE):
        assert without_numbers(part) in without_numbers(source + end), part


def test_neo_hookean():
    *iterations, last = run(ROOT / "examples" / "neo_hookean.py").splitlines()
    norms = [numbers(line)[1] for line in iterations]
    assert len(norms) == 5
    assert all(b < 30 * a**2 for a, b in itertools.pairwise(norms[:-1]))  # quadratic convergence
    assert norms[-1] < 1e-12
    pull, balance, plain = numbers(last)
    assert abs(balance) < 1e-12
    assert plain < 1e-12  # the residual of plain JAX
    # The linear bar: Young's modulus, area and strain give 0.3; the block is softer where it gets thinner.
    assert 0.2 < pull < 0.3
