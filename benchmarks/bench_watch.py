"""What looking inside an operator costs: taps in point functions, attached and not, and `watch`.

The neo-Hookean residual on 27000 hexahedra (89373 unknowns), applied in a jitted loop, beside the same without.

python benchmarks/bench_watch.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pairs import compare, report, seconds

import ceedtap as ct

STEPS = 10


def residual(V: ct.Space, look: Callable[[Any], Any]) -> ct.PointOperator:
    """The operator; `look` gets the determinant of the deformation gradient at every point."""
    X = V.geometry

    @ct.operator(inputs={"u": V.grad, "x": X.grad, "w": X.weight}, outputs={"v": V.grad})
    def solid(u: Any, x: Any, w: Any) -> Any:
        K = jnp.linalg.inv(x.T)
        F = jnp.eye(3) + u.T @ K
        J = jnp.linalg.det(F)
        look(J)
        P = F - jnp.linalg.inv(F).T * (1 - 2 * jnp.log(J))
        return w * jnp.linalg.det(x) * (P @ K.T).T

    return solid


def loop(op: ct.PointOperator, x: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda u: jax.lax.fori_loop(0, STEPS, lambda i, u: u + 1e-6 * op(u, x), u))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--cells", type=int, default=30, help="cells in each direction")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    mesh = ct.mesh.box(args.cells, args.cells, args.cells)
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=1, quadrature=2, components=3)
    x = jnp.asarray(mesh.points)
    u = jnp.asarray(0.01 * np.random.default_rng(0).normal(size=V.shape) / args.cells)
    tap = ct.Tap("det F")
    plain = residual(V, lambda J: None)
    bare = loop(plain, x)
    tapped = loop(residual(V, lambda J: ct.id_tap(tap, J, tangents=False)), x)
    watched = loop(ct.watch(plain, lambda u: u[0, 0] > 1e3), x)

    def time(function: Callable[[Any], Any]) -> Callable[[], float]:
        def run() -> None:
            jax.block_until_ready(function(u))
            ct.barrier_wait()

        return lambda: seconds(run) / STEPS * 1e3

    for name, function, bar in (("a tap that nothing is attached to", tapped, 1.03), ("watch", watched, None)):
        ours, theirs, ratio = compare(time(function), time(bare), args.pairs)
        report(f"{name}: {ours:.2f} / {theirs:.2f} ms", ratio, "x", bar)
    with tap.attached(lambda J, **labels: None):
        ours, theirs, ratio = compare(time(tapped), time(bare), args.pairs)
    report(f"the tap with a consumer: {ours:.2f} / {theirs:.2f} ms", ratio, "x")


if __name__ == "__main__":
    main()
