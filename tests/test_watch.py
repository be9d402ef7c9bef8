"""Watched operators: where something goes wrong inside."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS

import ceedtap as ct

MESH = ct.mesh.box(3, 3, 1, upper=(3.0, 1.5, 1.0))


def run(function, *args):
    with ct.outfeed_receiver(timeout_sec=120):
        return jax.block_until_ready(function(*args))


def elasticity(V):
    X = V.geometry

    @ct.operator(inputs={"u": V.grad, "x": (X.value, X.grad), "w": X.weight}, outputs={"v": V.grad}, params={"mu": 1.0})
    def solid(u, x, w, params):
        K = jnp.linalg.inv(x[1].T)
        F = jnp.eye(3) + u.T @ K
        P = params["mu"] * (F - jnp.linalg.inv(F).T) + jnp.log(jnp.linalg.det(F)) * jnp.linalg.inv(F).T
        return w * jnp.linalg.det(x[1]) * (P @ K.T).T

    return solid


def determinant(u, x):
    return jnp.linalg.det(jnp.eye(3) + u.T @ jnp.linalg.inv(x[1].T))


@pytest.fixture(params=BACKENDS)
def solid(request):
    V = ct.Space(ct.Ceed(request.param), MESH, degree=1, components=3)
    return V, elasticity(V)


def test_turned_over_elements_are_named(solid):
    V, op = solid
    seen = []
    show = lambda u, x: {"det F": determinant(u, x)}  # noqa: E731
    watched = ct.watch(op, lambda u, x: determinant(u, x) < 0, show=show, nan=False, then=seen.append)
    f = jax.jit(lambda u, x: watched(u, x, params={"mu": 2.0}))
    x = jnp.asarray(MESH.points)
    quiet = run(f, jnp.zeros(V.shape), x)
    assert seen == []
    np.testing.assert_array_equal(quiet, op(jnp.zeros(V.shape), x, params={"mu": 2.0}))
    # Everything right of x = 2 is mirrored there: the last elements of each row have det F = -1.
    u = np.zeros(V.shape)
    u[:, 0] = np.where(MESH.points[:, 0] > 2.5, -2 * (MESH.points[:, 0] - 2), 0)
    run(f, jnp.asarray(u), x)
    (offenders,) = seen
    turned = [i for i in range(9) if MESH.points[MESH.cells[i], 0].min() > 1.5]
    assert len(turned) == 3
    assert len(offenders) == 3 * V.num_quadrature_points
    assert sorted(set(offenders.elements.tolist())) == turned
    np.testing.assert_allclose(offenders.values["det F"], -1.0, rtol=1e-13)
    assert offenders.finite.all()
    assert ((offenders.coordinates > [2, 0, 0]) & (offenders.coordinates < [3, 1.5, 1])).all()
    line = str(offenders).splitlines()[0]
    assert line.startswith(f"solid: element {turned[0]} point 0 at (2.")
    assert line.endswith("): det F = -1.")
    assert str(offenders).endswith(f"and {len(offenders) - 5} more points")


def test_places_and_values_are_those_of_a_direct_evaluation():
    V = ct.Space(ct.Ceed("/cpu/self"), MESH, degree=2)
    X = V.geometry
    seen = []

    @ct.operator(inputs={"u": (V.value, V.grad), "x": X.value, "q": ct.quadrature(2)}, outputs={"v": V.value})
    def f(u, x, q):
        return u[0] + q[0]

    q = np.random.default_rng(0).normal(size=(9, V.num_quadrature_points, 2))
    watched = ct.watch(f, lambda x: x[0] > 2.6, then=seen.append)
    run(watched, jnp.asarray(V.nodes[:, 0] * V.nodes[:, 1]), MESH.points, jnp.asarray(q))
    (offenders,) = seen
    x = offenders.coordinates
    assert (x[:, 0] > 2.6).all()
    np.testing.assert_allclose(offenders.values["x"], x, rtol=1e-13)
    np.testing.assert_allclose(offenders.values["u_interp"], x[:, 0] * x[:, 1], rtol=1e-12)
    np.testing.assert_allclose(offenders.values["u_grad"][:, 0], x[:, 1] * 0.5, rtol=1e-11)
    np.testing.assert_array_equal(offenders.values["q"], q[offenders.elements, offenders.points])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite(bad, caplog):
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(4, 1), degree=1, quadrature=1)

    @ct.operator(inputs={"u": V.value}, outputs={"v": V.value})
    def f(u):
        return 2 * u

    u = np.zeros(V.num_nodes)
    u[V.boundary_nodes("left")] = bad
    with caplog.at_level(logging.WARNING, "ceedtap"):
        run(jax.jit(ct.watch(f)), jnp.asarray(u))
    assert [record.getMessage() for record in caplog.records] == [
        f"f: element 0 point 0 at (0.125, 0.5): not finite: u = {bad}"
    ]


def test_every_step_that_fails_and_only_those():
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 1), degree=1, quadrature=1)
    seen = []

    @ct.operator(inputs={"u": V.value}, outputs={"v": V.value})
    def f(u):
        return u

    watched = ct.watch(f, lambda u: u > 2.5, then=seen.append)
    run(jax.jit(lambda u: jax.lax.scan(lambda u, _: (u + 1, watched(u)), u, None, length=5)), jnp.zeros(V.num_nodes))
    np.testing.assert_allclose([offenders.values["u"][0] for offenders in seen], [3.0, 4.0], rtol=1e-14)


@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_lanes_of_batches(compile):
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 1), degree=1, quadrature=1)
    seen = []

    @ct.operator(inputs={"u": V.value, "a": V.value}, outputs={"v": V.value}, params={"b": 1.0})
    def f(u, a, params):
        return u * a * params["b"]

    watched = ct.watch(f, lambda u: u > 0, show=lambda u, a, params: {"product": u * a * params["b"]}, then=seen.append)
    u = np.zeros((3, 4, V.num_nodes))
    u[1, 2, 0] = u[2, 0, -1] = 4.0
    a = np.ones(V.num_nodes) * 2
    b = np.array([1.0, 10.0, 100.0])
    inner = jax.vmap(lambda u, a, b: watched(u, a, params={"b": b}), (1, None, None))
    run(compile(jax.vmap(inner, (0, None, 0))), jnp.asarray(np.swapaxes(u, 1, 2)), jnp.asarray(a), jnp.asarray(b))
    (offenders,) = seen
    assert offenders.lanes.tolist() == [[1, 2], [2, 0]]
    assert offenders.elements.tolist() == [0, 1]
    np.testing.assert_allclose(offenders.values["product"], [2 * 10.0, 2 * 100.0])
    assert str(offenders).startswith("f: lane 1, 2 element 0 point 0 at (0.25, 0.5): product = 20.")


def test_derivatives_are_those_of_the_operator():
    V = ct.Space(ct.Ceed("/cpu/self"), MESH, degree=1, components=3)
    op = elasticity(V)
    watched = ct.watch(op, lambda u: u[0, 0] > 100)
    u = jnp.asarray(0.01 * np.random.default_rng(0).normal(size=V.shape))
    x, params = jnp.asarray(MESH.points), {"mu": 2.0}
    gradients = [
        run(jax.jit(jax.grad(lambda u, x, mu, f=f: (f(u, x, params={"mu": mu}) ** 2).sum(), (0, 1, 2))), u, x, 2.0)
        for f in (op, watched)
    ]
    for ours, plain in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-12, atol=1e-12)
    du = jnp.ones(V.shape)
    for stored in (True, False):
        a, b = (f.linearize(u, x, params=params, wrt="u", stored=stored)(du) for f in (op, watched))
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_bound_fields_and_taps_of_the_operator_itself():
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 1), degree=1, quadrature=1)
    seen, tapped = [], []

    @ct.operator(inputs={"u": V.value, "a": V.value}, outputs={"v": V.value})
    def f(u, a):
        return ct.id_tap(lambda v, **labels: tapped.append(v.tolist()), u * a)

    watched = ct.watch(f.bind(a=3 * jnp.ones(V.num_nodes)), lambda a: a > 2, then=seen.append)
    run(watched, jnp.ones(V.num_nodes))
    np.testing.assert_allclose(seen[0].values["a"], [3.0, 3.0], rtol=1e-14)
    np.testing.assert_allclose(tapped, [[[3.0], [3.0]]], rtol=1e-14)


def test_what_then_raises_is_raised_at_the_barrier():
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(1, 1), degree=1)

    def stop(offenders):
        raise FloatingPointError(str(offenders))

    watched = ct.watch(ct.operator(inputs={"u": V.value}, outputs={"v": V.value})(lambda u: u), then=stop)
    with pytest.raises(ct.CallbackException) as caught:
        run(watched, jnp.full(4, np.nan))
    assert isinstance(caught.value.exceptions[0], FloatingPointError)


class TestErrors:
    @pytest.fixture
    def op(self):
        V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(1, 1), degree=1)
        return ct.operator(inputs={"u": V.grad, "w": V.weight}, outputs={"v": V.grad}, name="f")(lambda u, w: w * u)

    def test_no_operator(self):
        with pytest.raises(TypeError, match="operator, got function"):
            ct.watch(lambda u: u)

    def test_unknown_input(self, op):
        with pytest.raises(TypeError, match="where= takes inputs of the operator by name, u, w; got q"):
            ct.watch(op, lambda u, q: q > 0)

    def test_no_boolean(self, op):
        with pytest.raises(TypeError, match=r"where= of the watched f returns one boolean, got bool of shape \(2,\)"):
            ct.watch(op, lambda u: u > 0)
        with pytest.raises(TypeError, match="returns one boolean, got float64"):
            ct.watch(op, lambda u: u[0])
