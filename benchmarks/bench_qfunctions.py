"""Point functions written in JAX against the same by hand in C, and against plain JAX: on one core, in turn.

Run: python benchmarks/bench_qfunctions.py
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pairs import compare, report, seconds

import ceedtap as ct

jax.config.update("jax_enable_x64", True)
PAIRS = 31
NOISE = 0.02  # of a median of pairs
MU, LAM = 1 / 2.6, 0.3 / (1.3 * 0.4)

# -- C by hand ---------------------------------------------------------------------------------------------------------

MASS = """
CEED_QFUNCTION(mass_c)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const CeedScalar *u = in[0], *dV = in[1];
  CeedScalar *v = out[0];
  CeedPragmaSIMD for (CeedInt i = 0; i < Q; i++) v[i] = dV[i] * u[i];
  return 0;
}
"""

DIFFUSION = """
CEED_QFUNCTION(diffusion_c)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const CeedScalar *u = in[0], *d = in[1];
  CeedScalar *v = out[0];
  CeedPragmaSIMD for (CeedInt i = 0; i < Q; i++) {
    const CeedScalar u0 = u[i], u1 = u[Q + i], u2 = u[2 * Q + i];
    const CeedScalar d00 = d[i], d01 = d[Q + i], d02 = d[2 * Q + i];
    const CeedScalar d11 = d[3 * Q + i], d12 = d[4 * Q + i], d22 = d[5 * Q + i];
    v[i]         = d00 * u0 + d01 * u1 + d02 * u2;
    v[Q + i]     = d01 * u0 + d11 * u1 + d12 * u2;
    v[2 * Q + i] = d02 * u0 + d12 * u1 + d22 * u2;
  }
  return 0;
}
"""

# Tensors are kept as arrays of 9; the logarithm is a series without calls, so that the loop over points vectorises.
TENSORS = """
static inline CeedScalar inverse9(const CeedScalar *A, CeedScalar *B) {
  B[0] = A[4] * A[8] - A[5] * A[7];
  B[1] = A[2] * A[7] - A[1] * A[8];
  B[2] = A[1] * A[5] - A[2] * A[4];
  B[3] = A[5] * A[6] - A[3] * A[8];
  B[4] = A[0] * A[8] - A[2] * A[6];
  B[5] = A[2] * A[3] - A[0] * A[5];
  B[6] = A[3] * A[7] - A[4] * A[6];
  B[7] = A[1] * A[6] - A[0] * A[7];
  B[8] = A[0] * A[4] - A[1] * A[3];
  const CeedScalar det = A[0] * B[0] + A[1] * B[3] + A[2] * B[6], r = 1. / det;
  for (int k = 0; k < 9; k++) B[k] *= r;
  return det;
}
static inline void product9(const CeedScalar *A, const CeedScalar *B, CeedScalar *C) { /* C = A B */
  for (int r = 0; r < 3; r++)
    for (int c = 0; c < 3; c++) C[3 * r + c] = A[3 * r] * B[c] + A[3 * r + 1] * B[3 + c] + A[3 * r + 2] * B[6 + c];
}
static inline void product9_tn(const CeedScalar *A, const CeedScalar *B, CeedScalar *C) { /* C = A' B */
  for (int r = 0; r < 3; r++)
    for (int c = 0; c < 3; c++) C[3 * r + c] = A[r] * B[c] + A[3 + r] * B[3 + c] + A[6 + r] * B[6 + c];
}
static inline CeedScalar logarithm(CeedScalar J) { /* for J between about 0.35 and 2.8 */
  CeedScalar s = 0;
  s = J < 0.7071067811865476 ? -0.34657359027997264 : s;
  s = J > 1.4142135623730951 ? 0.34657359027997264 : s;
  J = J < 0.7071067811865476 ? J * 1.4142135623730951 : J > 1.4142135623730951 ? J * 0.7071067811865476 : J;
  const CeedScalar y = (J - 1.) / (J + 1.), z = y * y;
  return s + 2. * y * (1. + z * (1. / 3 + z * (1. / 5 + z * (1. / 7 + z * (1. / 9 + z * (1. / 11 +
         z * (1. / 13 + z * (1. / 15 + z * (1. / 17 + z / 19)))))))));
}
static const CeedScalar mu = %(mu).17g, lam = %(lam).17g;
"""

RECOMPUTED = """
    CeedScalar X[9], K[9];
    for (int k = 0; k < 9; k++) X[k] = x[k * Q + i];
    const CeedScalar dV = w[i] * inverse9(X, K);
"""
STORED = """
    CeedScalar K[9];
    for (int k = 0; k < 9; k++) K[k] = x[k * Q + i];
    const CeedScalar dV = w[i];
"""
# The gradient is kept transposed, H[c, i] = du_i / dx_c; so are F, its inverse, and the stress.
KINEMATICS = """
    CeedScalar G[9], F[9], B[9];
    for (int k = 0; k < 9; k++) G[k] = u[k * Q + i];
    product9(K, G, F);
    F[0] += 1.;
    F[4] += 1.;
    F[8] += 1.;
    const CeedScalar c = lam * logarithm(inverse9(F, B)) - mu;
"""

RESIDUAL = """
CEED_QFUNCTION(residual_%(name)s)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const CeedScalar *u = in[0], *x = in[1], *w = in[2];
  CeedScalar *v = out[0];
  CeedPragmaSIMD for (CeedInt i = 0; i < Q; i++) { %(geometry)s %(kinematics)s
    CeedScalar P[9], V[9];
    for (int r = 0; r < 3; r++)
      for (int s = 0; s < 3; s++) P[3 * r + s] = dV * (mu * F[3 * r + s] + c * B[3 * s + r]);
    product9_tn(K, P, V);
    for (int k = 0; k < 9; k++) v[k * Q + i] = V[k];
  }
  return 0;
}
"""

TANGENT = """
CEED_QFUNCTION(tangent_%(name)s)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const CeedScalar *u = in[0], *x = in[1], *w = in[2], *du = in[3];
  CeedScalar *v = out[0];
  CeedPragmaSIMD for (CeedInt i = 0; i < Q; i++) { %(geometry)s %(kinematics)s
    CeedScalar D[9], H[9], T[9], S[9], P[9], V[9];
    for (int k = 0; k < 9; k++) D[k] = du[k * Q + i];
    product9(K, D, H);
    product9(B, H, T); /* F^-1 dF, and with another F^-1 */
    product9(T, B, S);
    const CeedScalar t = lam * (T[0] + T[4] + T[8]);
    for (int r = 0; r < 3; r++)
      for (int s = 0; s < 3; s++)
        P[3 * r + s] = dV * (mu * H[3 * r + s] - c * S[3 * s + r] + t * B[3 * s + r]);
    product9_tn(K, P, V);
    for (int k = 0; k < 9; k++) v[k * Q + i] = V[k];
  }
  return 0;
}
"""


def neo_hookean_source(template: str, name: str) -> str:
    geometry = STORED if name == "stored" else RECOMPUTED
    return TENSORS % {"mu": MU, "lam": LAM} + template % {
        "name": name,
        "geometry": geometry,
        "kinematics": KINEMATICS,
    }


# -- the same in JAX ---------------------------------------------------------------------------------------------------


def energy(F: jax.Array) -> jax.Array:
    lnJ = jnp.log(jnp.linalg.det(F))
    return MU / 2 * (jnp.sum(F * F) - 3) - MU * lnJ + LAM / 2 * lnJ**2


def force(u: jax.Array, K: jax.Array, dV: jax.Array) -> jax.Array:
    """The factor of the reference derivatives of the test function."""
    return dV * K.T @ jax.grad(energy)(jnp.eye(3) + (K @ u).T).T


class Cube:
    def __init__(self, n: int, degree: int, components: int, resource: str) -> None:
        self.space = ct.Space(ct.Ceed(resource), ct.mesh.box(n, n, n), degree, degree + 1, components)
        self.geometry = self.space.geometry
        self.points = jnp.asarray(self.space.mesh.points)
        self.u = jnp.asarray(0.1 / n * np.random.default_rng(0).standard_normal(self.space.shape))
        self.du = jnp.asarray(np.random.default_rng(1).standard_normal(self.space.shape))

    def data(self, function: Callable[..., Any], *shape: int) -> jax.Array:
        """Data at the quadrature points from the Jacobian and the weight."""
        X = self.geometry
        op = ct.operator(inputs={"x": X.grad, "w": X.weight}, outputs={"q": ct.quadrature(*shape)}, name="data")(
            function
        )
        return op(self.points)


# -- comparisons -------------------------------------------------------------------------------------------------------


class Applied:
    """A libCEED operator with one active input, whose other fields have their values."""

    def __init__(self, application: Any, active: str, values: Mapping[str, Any], active_value: Any) -> None:
        op, ends = application.build(active)
        for name, end in ends.inputs.items():
            if name in values:
                end.set_array(np.asarray(values[name]).reshape(-1))
        self._start(op, active_value, len(ends.outputs[0]))

    def _start(self, op: Any, active_value: Any, size: int) -> None:
        self.op, ceed = op, op.ceed
        self.a, self.b = ceed.Vector(np.size(active_value)), ceed.Vector(size)
        self.a.set_array(np.asarray(active_value).reshape(-1))

    def __call__(self) -> None:
        self.op.apply(self.a, self.b)

    def result(self) -> np.ndarray:
        self()
        with self.b.array_read() as values:
            return np.array(values)

    def by_hand(self, source: str, name: str) -> Applied:
        """The same operator with another function, in C, which takes its fields in the same order."""
        mine, fields = self.op, self.op.fields
        inputs = [(f.name, f.size, f.eval_mode) for f in mine.qfunction.fields.values() if f.is_input]
        outputs = [(f.name, f.size, f.eval_mode) for f in mine.qfunction.fields.values() if not f.is_input]
        op = mine.ceed.Operator(ct.QFunction.from_source(mine.ceed, source, name, inputs=inputs, outputs=outputs))
        for name, *_ in (*inputs, *outputs):
            field = fields[name]
            op.set_field(name, field.restriction, field.basis, field.vector)
        other = object.__new__(Applied)
        with self.a.array_read() as values:
            other._start(op, np.array(values), len(self.b))
        return other


def against_c(title: str, jax_side: Applied, source: str, name: str) -> bool:
    c_side = jax_side.by_hand(source, name)
    a, b = jax_side.result(), c_side.result()
    assert np.abs(a - b).max() <= 1e-12 * np.abs(b).max(), f"{title}: results differ by {np.abs(a - b).max():.1e}"
    ours, hand, ratio = compare(lambda: seconds(jax_side, 2), lambda: seconds(c_side, 2), PAIRS)
    print(f"{title}: {1e3 * ours:.3f} ms, by hand {1e3 * hand:.3f} ms")
    return report(f"{title}: from JAX / by hand in C", ratio, "", 1 + NOISE)


def linear_functions(resource: str) -> bool:
    ok = True
    for degree, n in ((1, 30), (3, 12)):
        cube = Cube(n, degree, 1, resource)
        V = cube.space
        dV = cube.data(lambda x, w: w * jnp.linalg.det(x))
        mass = ct.operator(inputs={"u": V.value, "dV": ct.quadrature()}, outputs={"v": V.value}, name="mass")(
            lambda u, dV: dV * u
        )
        side = Applied(mass._application, "u", {"dV": dV}, cube.u)
        ok &= against_c(f"mass, p={degree}", side, MASS, "mass_c")

        def metric(x: jax.Array, w: jax.Array) -> jax.Array:
            K = jnp.linalg.inv(x)
            return (w * jnp.linalg.det(x) * K.T @ K)[jnp.triu_indices(3)]

        def flux(u: jax.Array, d: jax.Array) -> jax.Array:
            return jnp.array([[d[0], d[1], d[2]], [d[1], d[3], d[4]], [d[2], d[4], d[5]]]) @ u

        d = cube.data(metric, 6)
        diffusion = ct.operator(inputs={"u": V.grad, "d": ct.quadrature(6)}, outputs={"v": V.grad}, name="diffusion")(
            flux
        )
        side = Applied(diffusion._application, "u", {"d": d}, cube.u)
        ok &= against_c(f"diffusion, p={degree}", side, DIFFUSION, "diffusion_c")
    return ok


def neo_hookean_operators(cube: Cube) -> dict[str, tuple[Any, dict[str, jax.Array]]]:
    V, X = cube.space, cube.geometry

    @ct.operator(inputs={"u": V.grad, "x": X.grad, "w": X.weight}, outputs={"v": V.grad})
    def recomputed(u: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return force(u, jnp.linalg.inv(x), w * jnp.linalg.det(x))

    @ct.operator(inputs={"u": V.grad, "x": ct.quadrature(3, 3), "w": ct.quadrature()}, outputs={"v": V.grad})
    def stored(u: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return force(u, x, w)

    K = cube.data(lambda x, w: jnp.linalg.inv(x), 3, 3)
    dV = cube.data(lambda x, w: w * jnp.linalg.det(x))
    return {"recomputed": (recomputed, {"x": cube.points}), "stored": (stored, {"x": K, "w": dV})}


def hand_written(cube: Cube) -> bool:
    ok = True
    for name, (op, values) in neo_hookean_operators(cube).items():
        application = op._application
        side = Applied(application, "u", values, cube.u)
        ok &= against_c(
            f"neo-Hookean residual, geometry {name}", side, neo_hookean_source(RESIDUAL, name), f"residual_{name}"
        )
        tangent, _ = application.jvp((True, *(False,) * (len(values))))
        side = Applied(tangent, "du", {**values, "u": cube.u}, cube.du)
        ok &= against_c(
            f"neo-Hookean tangent, geometry {name}", side, neo_hookean_source(TANGENT, name), f"tangent_{name}"
        )
    return ok


def blocked(cube: Cube, block: int = 60) -> Callable[[Any], Any]:
    """The residual in plain JAX as one would tune it for a CPU: blocks of elements, the element as the last axis."""
    basis, cells = cube.space.basis, np.asarray(cube.space.element_nodes)
    gradients = jnp.asarray(basis.get_grad())
    X = jnp.einsum("dqp,epc->eqdc", gradients, cube.points[cells])
    weights = functools.reduce(np.multiply.outer, [np.ones(2)] * 3).reshape(-1)

    def split(data: jax.Array) -> jax.Array:
        return jnp.moveaxis(data.reshape(-1, block, *data.shape[1:]), 1, -1)

    K, dV = split(jnp.linalg.inv(X)), split(jnp.linalg.det(X) * weights)
    points = jax.vmap(jax.vmap(force, (1, 0, 0), 1), (-1, -1, -1), -1)

    def of_block(inputs: Any) -> Any:
        u, K, dV = inputs
        return jnp.einsum("dqp,dqce->pce", gradients, points(jnp.einsum("dqp,pce->dqce", gradients, u), K, dV))

    def residual(u: jax.Array) -> jax.Array:
        local = jax.lax.map(of_block, (split(u[cells]), K, dV))
        return jnp.zeros_like(u).at[cells].add(jnp.moveaxis(local, -1, 1).reshape(u[cells].shape))

    return residual


def programs(cube: Cube) -> bool:
    """Compiled programs that apply the operator, against plain JAX."""
    op, values = neo_hookean_operators(cube)["recomputed"]
    bound = op.bind(x=values["x"])

    def both(residual: Callable[[Any], Any]) -> tuple[Callable[[], float], ...]:
        tangent = jax.jit(lambda u, du: jax.jvp(residual, (u,), (du,))[1])
        residual = jax.jit(residual)
        return (
            lambda: seconds(lambda: residual(cube.u).block_until_ready()),
            lambda: seconds(lambda: tangent(cube.u, cube.du).block_until_ready()),
        )

    ok, ours = True, both(bound)
    naive, tuned = bound.reference, blocked(cube)
    for other in (naive, tuned):
        assert np.allclose(other(cube.u), bound(cube.u), rtol=1e-11, atol=1e-14)
    for title, other, bars in (("naive plain JAX", naive, (None, None)), ("blocked plain JAX", tuned, (1.0, 1.0))):
        for what, a, b, bar in zip(("residual", "tangent"), ours, both(other), bars, strict=True):
            mine, theirs, ratio = compare(b, a, 5)
            print(f"neo-Hookean {what}, 27000 hex8: {1e3 * theirs:.2f} ms, {title} {1e3 * mine:.1f} ms")
            ok &= report(f"neo-Hookean {what}: {title} / ceedtap", ratio, "", bar, at_least=True)
    return ok


def network(x: jax.Array) -> jax.Array:
    """A constitutive law that has been learned: three numbers in, six out, two layers of 64 between."""
    sizes, rng = (3, 64, 64, 6), np.random.default_rng(0)
    for inputs, outputs in itertools.pairwise(sizes):
        weight = jnp.asarray(rng.standard_normal((outputs, inputs)) / np.sqrt(inputs))
        x = weight @ (x if inputs == 3 else jnp.tanh(x)) + jnp.asarray(rng.standard_normal(outputs) / 10)
    return x


def on_arrays(cube: Cube) -> bool:
    """`pointwise` against `jit(vmap(f))`, and the network as an operator against plain JAX."""
    rng, ok = np.random.default_rng(0), True
    # As many points as the cache holds; with more, memory is what is measured.
    F = jnp.asarray(np.eye(3) + 0.1 * rng.standard_normal((20000, 3, 3)))
    x, y = (jnp.asarray(rng.standard_normal((20000, n))) for n in (3, 6))

    def vjp(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.vjp(network, x)[1](y)[0]

    def tangent(F: jax.Array, dF: jax.Array) -> jax.Array:
        return jax.jvp(jax.grad(energy), (F,), (dF,))[1]

    for title, function, arguments, bar in (
        ("neo-Hookean stress", jax.grad(energy), (F,), 5.0),
        ("neo-Hookean tangent", tangent, (F, jnp.cos(F)), None),
        ("network 3x64x64x6", network, (x,), 1.0),
        ("vjp of the network", vjp, (x, y), 1.0),
    ):
        ok &= against_jax(title, ct.pointwise(function), jax.vmap(function), arguments, "jit(vmap)", bar)

    V = cube.space
    op = ct.operator(inputs={"u": V.grad, "w": V.weight}, outputs={"v": V.grad}, name="learned")(
        lambda u, w: w * u @ jnp.diag(network(u[:, 0])[:3])
    )
    gradient = [jax.grad(lambda u, f=f: jnp.sum(f(u) ** 2)) for f in (op, op.reference)]
    ok &= against_jax("operator with the network", op, op.reference, (cube.u,), "plain JAX", 1.0)
    return ok & against_jax("gradient of that operator", *gradient, (cube.u,), "plain JAX", 1.0)


def against_jax(
    title: str,
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    arguments: tuple[Any, ...],
    other: str,
    bar: float | None,
) -> bool:
    f, g = jax.jit(ours), jax.jit(theirs)
    a, b = f(*arguments), g(*arguments)
    assert np.allclose(a, b, rtol=1e-9, atol=1e-11 * float(jnp.abs(b).max())), title
    slow, fast, ratio = compare(
        lambda: seconds(lambda: g(*arguments).block_until_ready()),
        lambda: seconds(lambda: f(*arguments).block_until_ready()),
        9,
    )
    print(f"{title}: {1e3 * fast:.2f} ms, {other} {1e3 * slow:.2f} ms")
    return report(f"{title}: {other} / ceedtap", ratio, "", bar, at_least=True)


def builds() -> bool:
    """Times of builds: nothing in the cache, and everything."""
    ceed = ct.Ceed("/cpu/self")
    space = ct.Space(ceed, ct.mesh.box(2, 2, 2), 1, 2, components=3)
    X = space.geometry
    op = ct.operator(inputs={"u": space.grad, "x": X.grad, "w": X.weight}, outputs={"v": space.grad}, name="force")(
        lambda u, x, w: force(u, jnp.linalg.inv(x), w * jnp.linalg.det(x))
    )
    function = op._application.function
    jax.block_until_ready(op(jnp.zeros(space.shape), space.mesh.points))  # the translator is loaded
    del function.source
    start = time.perf_counter()
    source, name = function.source
    translation = time.perf_counter() - start
    fresh = f"{source}/* {time.time_ns()} */\n"
    inputs, outputs = function.eval_modes(function.inputs), function.eval_modes(function.outputs)
    make = functools.partial(ct.QFunction.from_source, ceed, fresh, name, inputs=inputs, outputs=outputs)
    cold = seconds(make)
    warm = min(seconds(make) for _ in range(20))
    ok = report("neo-Hookean residual: translation to C", 1e3 * translation, "ms")
    ok &= report("neo-Hookean residual: cold build", cold, "s", 1.0)
    return ok & report("neo-Hookean residual: cached build", 1e3 * warm, "ms", 5.0)


def main() -> int:
    if hasattr(os, "sched_setaffinity"):  # before XLA starts its threads
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    resource = os.environ.get("CEED_RESOURCE", "/cpu/self")
    ok = builds()
    ok &= linear_functions(resource)
    cube = Cube(30, 1, 3, resource)
    ok &= hand_written(cube)
    ok &= programs(cube)
    ok &= on_arrays(cube)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
