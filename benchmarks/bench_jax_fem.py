"""The neo-Hookean residual and tangent on 27000 hexahedra (89373 unknowns), beside jax-fem, on one core.

jax-fem is no dependency: `pip install jax-fem` and what it imports (pyfiglet, gmsh, meshio, fenics-basix).
It has no product with the tangent: here it is `jax.jvp` of its residual. What it has are the element matrices, which it
computes in batches outside of compiled code.

taskset -c 0 python benchmarks/bench_jax_fem.py
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
from pairs import compare, report, seconds

import ceedtap as ct

CELLS, PAIRS = 30, 5
#: Calls in a row, as solvers make them: the other program leaves nothing of ours in the processor's caches.
REPEAT = 10
MU, LAM = 1 / 2.6, 0.3 / (1.3 * 0.4)


def energy(F: Any) -> Any:
    J = jnp.linalg.det(F)
    return MU / 2 * (jnp.sum(F * F) - 3) - MU * jnp.log(J) + LAM / 2 * jnp.log(J) ** 2


def ours(mesh: Any) -> ct.PointOperator:
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=1, quadrature=2, components=3)
    X = V.geometry

    @ct.operator(inputs={"u": V.grad, "x": X.grad, "w": X.weight}, outputs={"v": V.grad})
    def residual(u: Any, x: Any, w: Any) -> Any:
        K = jnp.linalg.inv(x)  # d reference / d physical
        P = jax.grad(energy)(jnp.eye(3) + (K @ u).T)
        return w * jnp.linalg.det(x) * K.T @ P.T

    return residual


def theirs(mesh: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        from jax_fem import logger
        from jax_fem.generate_mesh import Mesh
        from jax_fem.problem import Problem

    logger.setLevel("ERROR")

    class NeoHookean(Problem):
        def get_tensor_map(self) -> Callable[[Any], Any]:
            return lambda u_grad: jax.grad(energy)(u_grad + jnp.eye(3))

    corners = [0, 1, 3, 2, 4, 5, 7, 6]  # in the order of VTK
    return NeoHookean(Mesh(mesh.points, mesh.cells[:, corners], "HEX8"), vec=3, dim=3, ele_type="HEX8")


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    mesh = ct.mesh.box(CELLS, CELLS, CELLS)
    try:
        problem = theirs(mesh)
    except ImportError as error:
        print(f"skipped: jax-fem is not installed ({error})")
        return
    points = jnp.asarray(mesh.points)
    x = np.asarray(mesh.points)
    u = jnp.asarray(0.1 * np.sin(x[:, [1, 2, 0]]))
    du = jnp.asarray(np.random.default_rng(0).normal(size=u.shape))
    op = ours(mesh)
    residual = jax.jit(lambda u: op(u, points))
    tangent = jax.jit(lambda u, du: jax.jvp(lambda u: op(u, points), (u,), (du,))[1])
    their_residual = jax.jit(lambda u: problem.compute_residual([u])[0])
    their_tangent = jax.jit(lambda u, du: jax.jvp(their_residual, (u,), (du,))[1])
    for a, b in ((residual(u), their_residual(u)), (tangent(u, du), their_tangent(u, du))):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * float(jnp.abs(b).max()))

    def time(function: Callable[..., Any], *args: Any) -> Callable[[], float]:
        return lambda: seconds(lambda: jax.block_until_ready(function(*args)), REPEAT) * 1e3

    for name, a, b, args, bar in (
        ("residual", residual, their_residual, (u,), 12),
        ("tangent product", tangent, their_tangent, (u, du), 30),
    ):
        mine, other, ratio = compare(time(b, *args), time(a, *args), PAIRS)
        report(f"{name}: jax-fem {mine:.1f} ms, ceedtap {other:.1f} ms", ratio, "x", bar, at_least=True)

    entries = jax.jit(lambda u: op.linearize(u, points, wrt="u").assemble().data)

    def newton_update(u: Any) -> Any:
        return problem.newton_update([u])[0]

    matrices = [
        min(seconds(lambda f=f: jax.block_until_ready(f(u))) for _ in range(2)) for f in (newton_update, entries)
    ]
    report(
        f"element matrices: jax-fem {matrices[0]:.2f} s, ceedtap {matrices[1]:.2f} s", matrices[0] / matrices[1], "x"
    )


if __name__ == "__main__":
    main()
