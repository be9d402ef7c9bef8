"""Times that point functions take to build, from JAX to machine code: twenty laws, their jvp and their vjp.

Run: python benchmarks/bench_build_times.py. Seconds of the processor, of this process and of the compiler.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from pairs import report

jax.config.update("jax_enable_x64", True)
BAR = 3.0
RANDOM = np.random.default_rng(0)
DIRECTIONS = RANDOM.standard_normal((100, 3)) / 1.7
TABLE = RANDOM.standard_normal((1000, 1000))
AMPLITUDES, WAVES = RANDOM.standard_normal(60), RANDOM.standard_normal((60, 3))
SLIP = RANDOM.standard_normal((12, 3, 3)) / 3
TIMES = 10.0 ** np.arange(-4, 6)


def neo_hookean(F):
    J = jnp.linalg.det(F)
    return 0.5 * jnp.sum(F * F) - jnp.log(J) + 0.5 * jnp.log(J) ** 2


def fibres(F):
    stretch = jnp.einsum("ni,ij,nj->n", DIRECTIONS, F.T @ F, DIRECTIONS)
    return jnp.sum(jnp.exp(2 * jnp.maximum(stretch - 1, 0) ** 2) - 1) / 100 + neo_hookean(F)


def ogden(F):
    stretches = jnp.linalg.svd(F, compute_uv=False)
    return sum(mu / a * (jnp.sum(stretches**a) - 3) for mu, a in ((0.6, 1.3), (0.01, 5.0), (-0.01, -2.0)))


def plastic(H):
    strain = 0.5 * (H + H.T)
    deviator = strain - jnp.trace(strain) / 3 * jnp.eye(3)
    size = jnp.sqrt(jnp.sum(deviator**2) + 1e-16)
    flow = lax.fori_loop(
        0, 20, lambda _, g: g - (size - g - 0.1 - 0.1 * g**0.8) / (-1 - 0.08 * (g + 1e-9) ** -0.2), 0.5
    )
    return 2 * (1 - flow / size) * deviator + jnp.trace(strain) * jnp.eye(3)


def crystal(F):
    def step(P, _):
        stress = F @ F.T - jnp.eye(3) + P
        rates = jnp.einsum("nij,ij->n", SLIP, stress)
        return P - 0.01 * jnp.einsum("n,nij->ij", jnp.sign(rates) * jnp.abs(rates) ** 3, SLIP), None

    return lax.scan(step, jnp.zeros((3, 3)), None, length=15)[0]


def table(x):
    i = jnp.clip(jnp.floor(900 * x[:2]).astype(int), 0, 998)
    f, values = 900 * x[:2] - i, jnp.asarray(TABLE)
    low = values[i[0], i[1]] * (1 - f[0]) + values[i[0] + 1, i[1]] * f[0]
    return low * (1 - f[1]) + (values[i[0], i[1] + 1] * (1 - f[0]) + values[i[0] + 1, i[1] + 1] * f[0]) * f[1]


def waves(x):
    total = 0.0
    for amplitude, wave in zip(AMPLITUDES, WAVES, strict=True):
        total = total + amplitude * jnp.cos(wave @ x)
    return total


def network(x):
    for n, m in ((6, 64), (64, 64), (64, 6)):
        x = jnp.tanh(np.random.default_rng(n).standard_normal((m, n)) / np.sqrt(n) @ x)
    return x


def steps(A):
    return lax.scan(lambda c, _: (jnp.tanh(c @ A) * 0.5 + c * 0.1, None), A, None, length=10)[0]


def written_out(A):
    c = A
    for _ in range(10):
        c = jnp.tanh(c @ A) * 0.5 + c * 0.1
    return c


def riemann(states):
    (rl, ul, pl), (rr, ur, pr) = states
    cl, cr = jnp.sqrt(1.4 * pl / rl), jnp.sqrt(1.4 * pr / rr)
    sl, sr = jnp.minimum(ul - cl, ur - cr), jnp.maximum(ul + cl, ur + cr)
    fl = jnp.stack([rl * ul, rl * ul**2 + pl, ul * (3.5 * pl + 0.5 * rl * ul**2)])
    fr = jnp.stack([rr * ur, rr * ur**2 + pr, ur * (3.5 * pr + 0.5 * rr * ur**2)])
    return jnp.where(sl > 0, fl, jnp.where(sr < 0, fr, (sr * fl - sl * fr) / (sr - sl)))


def newton(x):
    def step(y):
        return y - jnp.linalg.solve(jnp.eye(3) + jnp.diag(0.3 * y**2), y + 0.1 * y**3 - x)

    return step(step(step(x)))


LAWS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "neo-Hookean": (jax.grad(neo_hookean), (3, 3)), "100 fibre directions": (jax.grad(fibres), (3, 3)),
    "Ogden": (ogden, (3, 3)), "plasticity": (plastic, (3, 3)), "crystal plasticity": (crystal, (3, 3)),
    "viscoelasticity": (lambda x: jnp.sum(jnp.exp(-x[:, None] / TIMES) * x[:, None], 1), (6,)),
    "table of 1000 x 1000": (table, (3,)), "60 modes": (lambda x: AMPLITUDES @ jnp.cos(WAVES @ x), (3,)),
    "60 modes written out": (waves, (3,)), "network": (network, (6,)), "expm 3 x 3": (jax.scipy.linalg.expm, (3, 3)),
    "expm 6 x 6": (jax.scipy.linalg.expm, (6, 6)), "10 steps 16 x 16": (steps, (16, 16)),
    "10 steps written out": (written_out, (16, 16)),
    "LU 24 x 24": (lambda A: jax.scipy.linalg.lu_factor(A + 24 * jnp.eye(24))[0], (24, 24)),
    "solve 12 x 12": (lambda A: jnp.linalg.solve(A + 12 * jnp.eye(12), jnp.arange(12.0)), (12, 12)),
    "Cholesky 12 x 12": (lambda A: jnp.linalg.cholesky(A @ A.T + jnp.eye(12)), (12, 12)),
    "eigh 3 x 3": (lambda A: jnp.linalg.eigh(A + A.T)[0], (3, 3)), "Riemann solver": (riemann, (2, 3)),
    "Newton in a point": (newton, (3,)),
}  # fmt: skip


def variants(function: Callable[..., Any], shape: tuple[int, ...]) -> Iterator[tuple[str, Callable[..., Any], list]]:
    x = jax.ShapeDtypeStruct((1, *shape), np.float64)
    out = jax.eval_shape(function, jax.ShapeDtypeStruct(shape, np.float64))
    g = jax.ShapeDtypeStruct((1, *out.shape), np.float64)
    yield "value", lambda f: lambda x: f(x), [x]
    yield "jvp", lambda f: lambda x, t: jax.jvp(f, (x,), (t,))[1], [x, x]
    yield "vjp", lambda f: lambda x, g: jax.vjp(f, x)[1](g)[0], [x, g]


def seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # nothing is built yet
    import ceedtap as ct

    ct.pointwise(lambda x: x)(jnp.ones(1))
    held = []
    for name, (function, shape) in LAWS.items():
        for kind, transform, args in variants(function, shape):
            start = seconds()
            jax.jit(transform(ct.pointwise(function))).lower(*args)
            held.append(report(f"{name}, {kind}", seconds() - start, "s", BAR))
    print(f"{sum(held)} of {len(held)} within {BAR} s")


if __name__ == "__main__":
    main()
