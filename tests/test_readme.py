"""The examples of the README run, and give what they should."""

import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def outputs(block: str) -> list[float]:
    """The numbers that a block of code prints."""
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [float(word) for word in re.findall(r"-?\d+\.\d+", done.stdout)]


def neo_hookean() -> tuple[float, float]:
    """What the block about physics prints, on the unit cube by plain JAX: energies are integrals over cells that are
    cubes, of a displacement that is quadratic in them."""
    jax.config.update("jax_enable_x64", True)
    n, side = 4, 0.25
    nodes, weights = np.polynomial.legendre.leggauss(4)
    values, slopes = lagrange((nodes + 1) / 2), lagrange_slopes((nodes + 1) / 2) / side
    line = np.arange(2 * n + 1) / (2 * n)
    grid = np.stack(np.meshgrid(line, line, line, indexing="ij"), -1)
    u = jnp.asarray(0.1 * np.sin(grid[..., ::-1]))
    picks = 2 * np.arange(n)[:, None] + np.arange(3)

    def gradients(u):
        local = u[
            picks[:, None, None, :, None, None], picks[None, :, None, None, :, None], picks[None, None, :, None, None]
        ]
        tables = ((slopes, values, values), (values, slopes, values), (values, values, slopes))
        return jnp.stack([jnp.einsum("ai,bj,ck,xyzijkm->xyzabcm", *t, local) for t in tables], -1)

    def total(u, mu):
        F = jnp.eye(3) + gradients(u)
        J = jnp.linalg.det(F)
        density = mu / 2 * (jnp.sum(F * F, (-2, -1)) - 3) - mu * jnp.log(J) + jnp.log(J) ** 2
        w = weights * side / 2
        return jnp.einsum("xyzabc,a,b,c->", density, w, w, w)

    product = jax.jvp(jax.grad(total), (u, 1.0), (u, 0.0))[1]
    return float(jax.grad(total, 1)(u, 1.0)), float(jnp.vdot(u, product))


def lagrange(x: np.ndarray) -> np.ndarray:
    """Quadratic polynomials of the nodes 0, 1/2, 1 at x."""
    return np.stack([(1 - x) * (1 - 2 * x), 4 * x * (1 - x), x * (2 * x - 1)], 1)


def lagrange_slopes(x: np.ndarray) -> np.ndarray:
    return np.stack([4 * x - 3, 4 - 8 * x, 4 * x - 1], 1)


def test_blocks():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    operator, physics, tap = blocks
    # The integral of sin(k x)^2 over the unit cube, and its derivative, at k = 2.
    norm2, slope = outputs(operator)
    assert math.isclose(norm2, 1 / 2 - math.sin(4) / 8, rel_tol=1e-7)
    assert math.isclose(slope, math.sin(4) / 16 - math.cos(4) / 4, rel_tol=1e-6)
    dmu, product = outputs(physics)
    expected = neo_hookean()
    assert math.isclose(dmu, expected[0], rel_tol=1e-9)
    assert math.isclose(product, expected[1], rel_tol=1e-9)
    assert math.isclose(outputs(tap)[-1], math.sqrt(2), rel_tol=1e-6)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
