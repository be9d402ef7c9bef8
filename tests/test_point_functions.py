"""Values and derivatives of many point functions on libCEED's backends, against the same in plain JAX."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS, FASTEST
from point_functions import CASES, from_energy, neo_hookean_energy

import ceedtap as ct

THOROUGH = ("/cpu/self/ref/serial", FASTEST)
OTHERS = [backend for backend in BACKENDS if backend not in THOROUGH]
# Every function on two backends, and on one of the others in turn.
PAIRS = [(name, backend) for i, name in enumerate(CASES) for backend in (*THOROUGH, OTHERS[i % len(OTHERS)])]


# The programs run once and for a moment, so it is not worth while to optimise them.
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def like(tree, seed):
    """Random numbers in the shape of a pytree, of the size of its values."""
    random = np.random.default_rng(seed)

    def make(leaf):
        leaf = jnp.asarray(leaf, float)
        return jnp.asarray(random.standard_normal(leaf.shape) * (0.1 + jnp.abs(leaf).mean()))

    return jax.tree.map(make, tree)


def all_derivatives(f, values, directions, weights):
    """Value, jvp, vjp and jvp of the vjp."""

    def pulled(values):
        return jax.vjp(f, values)[1](weights)[0]

    value, tangent = jax.jvp(f, (values,), (directions,))
    gradient, change = jax.jvp(pulled, (values,), (directions,))
    return {"value": value, "jvp": tangent, "vjp": gradient, "jvp of vjp": change}


@functools.cache
def expected(name):
    """Inputs, directions, weights and the derivatives in plain JAX."""
    operator, values = CASES[name].build(ct.Ceed("/cpu/self/ref/serial"))

    def f(values):
        return operator.reference(**values)

    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), values)
    outputs = jax.tree.map(lambda shape: jnp.ones(shape.shape), jax.eval_shape(f, values))
    directions, weights = like(values, 1), like(outputs, 2)
    return values, directions, weights, jit(functools.partial(all_derivatives, f))(values, directions, weights)


def difference(a, b):
    """Between two pytrees: the largest difference of a leaf, relative to its largest entry."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-300)) for x, y in pairs)


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_equals_plain_jax(name, backend):
    values, directions, weights, want = expected(name)
    operator, _ = CASES[name].build(ct.Ceed(backend))
    got = jit(functools.partial(all_derivatives, lambda values: operator(**values)))(values, directions, weights)
    for what, tree in want.items():
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree)), what
        assert difference(got[what], tree) <= 1e-12, what
    assert_transposed(directions, got["jvp"], got["vjp"], weights)


def assert_transposed(directions, tangent, gradient, weights):
    """The dot test: <weights, J directions> = <J' weights, directions>."""

    def dot(a, b, absolute=False):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return sum(float(jnp.sum(jnp.abs(x * y) if absolute else x * y)) for x, y in pairs)

    size = max(dot(weights, tangent, True), dot(gradient, directions, True))
    assert abs(dot(weights, tangent) - dot(gradient, directions)) <= 1e-13 * size


@pytest.mark.parametrize("name", ["neo_hookean", "navier_stokes", "j2_plasticity", "learned_law_8"])
def test_central_differences(name):
    operator, values = CASES[name].build(ct.Ceed("/cpu/self"))
    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), values)
    directions = like(values, 3)

    @jax.jit
    def value(step):
        return operator(**jax.tree.map(lambda x, d: x + step * d, values, directions))

    step = 1e-5 if name != "j2_plasticity" else 1e-8  # points may not change between elastic and plastic
    difference_quotient = jax.tree.map(lambda a, b: (a - b) / (2 * step), value(step), value(-step))
    _, tangent = jax.jvp(value, (0.0,), (1.0,))
    assert difference(difference_quotient, tangent) <= (1e-6 if name != "j2_plasticity" else 1e-4)


# -- values of other codes ---------------------------------------------------------------------------------------------


def reference(name):
    return json.loads((Path(__file__).parent / "reference" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("degree", [1, 2])
def test_mass_and_stiffness_of_other_codes(degree):
    def warp(x):
        return x + 0.05 * np.prod(np.sin(np.pi * x), axis=1)[:, None]

    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(8, 8, 8, warp=warp), degree, quadrature=degree + 2)
    X, u, x = V.geometry, jnp.sin(V.nodes @ np.array([1.0, 2.0, 3.0])), V.mesh.points
    geometry = {"x": X.grad, "w": X.weight}

    @ct.operator(inputs={"u": V.value, **geometry}, outputs={"v": V.value})
    def mass(u, x, w):
        return w * jnp.linalg.det(x) * u

    @ct.operator(inputs={"u": V.grad, **geometry}, outputs={"v": V.grad})
    def stiffness(u, x, w):
        K = jnp.linalg.inv(x)
        return w * jnp.linalg.det(x) * K.T @ (K @ u)

    values = reference("poisson_mass_warped_cube")["values"][str(degree)]
    assert np.isclose(u @ mass(u, x), values["uMu"], rtol=1e-12, atol=0)
    assert np.isclose(u @ stiffness(u, x), values["uKu"], rtol=1e-12, atol=0)
    assert np.isclose(mass(jnp.ones(V.shape), x).sum(), 1.0, rtol=1e-12, atol=0)


def test_neo_hookean_force_of_another_code():
    """The derivative of the energy density, and the derivative of the total energy."""
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(4, 4, 4), 1, quadrature=2, components=3)
    X, x = V.geometry, jnp.asarray(V.mesh.points)
    m = {"mu": 1 / 2.6, "lam": 0.3 / (1.3 * 0.4)}
    inputs = {"u": V.grad, "x": X.grad, "w": X.weight}
    force = ct.operator(inputs=inputs, outputs={"v": V.grad}, params=m, name="force")(from_energy(neo_hookean_energy))

    @ct.operator(inputs=inputs, outputs={"e": ct.quadrature()}, params=m)
    def energy(u, x, w, params):
        F = jnp.eye(3) + (jnp.linalg.inv(x) @ u).T
        return w * jnp.linalg.det(x) * neo_hookean_energy(F, params)

    u = 0.1 * jnp.sin(jnp.roll(x, -1, axis=1))
    values = reference("neo_hookean_cube")["values"]
    for r in (force(u, x, params=m), jax.jit(jax.grad(lambda u: energy(u, x, params=m).sum()))(u)):
        assert r.size == values["ndof"]
        assert np.isclose(jnp.vdot(u, r), values["u_dot_r"], rtol=1e-12, atol=0)
        assert np.isclose(jnp.linalg.norm(r), values["norm_r"], rtol=1e-12, atol=0)
