"""Operators that are applied to tapped values on the host."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct

MESH = ct.mesh.box(3, 2, 2)


def run(function, *args):
    with ct.outfeed_receiver(timeout_sec=120):
        return jax.block_until_ready(function(*args))


@pytest.fixture
def V():
    return ct.Space(ct.Ceed("/cpu/self"), MESH, degree=2)


def mass_of(V):
    X = V.geometry

    @ct.operator(inputs={"u": V.value, "x": X.grad, "w": X.weight}, outputs={"v": V.value})
    def mass(u, x, w):
        return w * jnp.linalg.det(x) * u

    return mass.bind(x=MESH.points)


class Results:
    def __init__(self):
        self.seen = []

    def __call__(self, value, step):
        self.seen.append((step, value))


def test_results_come_in_order_with_their_number(V):
    mass, results = mass_of(V), Results()
    drive = ct.drive(mass, results)
    f = jax.jit(lambda u: jax.lax.scan(lambda u, _: (ct.id_tap(drive, u) / 2, None), u, None, length=20)[0])
    u = jnp.asarray(V.nodes[:, 0])
    run(f, u)
    assert [step for step, _ in results.seen] == list(range(20))
    for step, value in results.seen:
        np.testing.assert_allclose(value.sum(), 0.5 / 2**step, rtol=1e-13)  # the integral of x over the unit cube
        assert isinstance(value, np.ndarray)
    assert drive.steps == 20


def test_on_a_ceed_of_its_own(V):
    mass = mass_of(V)
    drive = ct.drive(mass, print)
    assert drive.op.ceed is not mass.ceed
    assert drive.op.ceed.get_resource() == mass.ceed.get_resource()
    other = ct.Ceed("/cpu/self/ref/serial")
    assert ct.drive(mass, print, ceed=other).op.ceed is other


def test_while_the_program_applies_operators(V):
    """The drive's operator is applied on the receiver thread while the program holds the lock of its own Ceed."""
    mass, threads = mass_of(V), set()

    def note(value):
        threads.add(threading.current_thread().name)

    drive = ct.drive(mass, note)
    f = jax.jit(lambda u: jax.lax.fori_loop(0, 50, lambda i, u: mass(ct.id_tap(drive, u)) * 100, u))
    run(f, jnp.ones(V.num_nodes))
    assert threads == {"ceedtap-receiver"}
    assert drive.steps == 50


def test_chain(V):
    results = Results()
    mass = mass_of(V)
    total = ct.drive(lambda v: v.sum(), results)
    chain = ct.drive(mass, ct.drive(mass, total))
    run(jax.jit(lambda u: ct.id_tap(chain, u)), jnp.ones(V.num_nodes))
    expected = mass(mass(jnp.ones(V.num_nodes))).sum()
    ((step, value),) = results.seen
    assert step == 0
    np.testing.assert_allclose(value, expected, rtol=1e-13)


def test_several_arguments_names_and_results(V):
    seen = []

    @ct.operator(inputs={"a": V.value, "b": V.value}, outputs={"p": V.value, "q": V.value})
    def f(a, b):
        return a * b, a + b

    drive = ct.drive(f, lambda p, q: seen.append((p, q)))
    a, b = 2 * jnp.ones(V.num_nodes), 3 * jnp.ones(V.num_nodes)
    run(jax.jit(lambda a, b: ct.id_tap(drive, a, b)), a, b)
    run(jax.jit(lambda a, b: ct.id_tap(drive, {"b": b, "a": a})), a, b)
    for p, q in seen:
        np.testing.assert_allclose(p / q, 6 / 5, rtol=1e-12)
    assert len(seen) == 2


def test_batches_are_one_event_and_derivatives_none(V):
    mass, results = mass_of(V), Results()
    drive = ct.drive(mass, results)
    u = jnp.stack([jnp.ones(V.num_nodes), 2 * jnp.ones(V.num_nodes)])
    run(jax.jit(jax.vmap(jax.grad(lambda u: (ct.id_tap(drive, u) ** 2).sum()))), u)
    ((step, value),) = results.seen
    assert (step, value.shape) == (0, (2, V.num_nodes))
    np.testing.assert_allclose(value.sum(1), [1, 2], rtol=1e-13)


def test_of_quadrature_taps(V):
    """What a QFunction taps is integrated by another operator."""
    X = V.geometry
    results = Results()

    @ct.operator(inputs={"q": ct.quadrature(), "x": X.grad, "w": X.weight}, outputs={"v": V.value})
    def integrate(q, x, w):
        return q * w * jnp.linalg.det(x)

    drive = ct.drive(integrate.bind(x=MESH.points), ct.drive(lambda v: v.sum(), results))

    @ct.operator(inputs={"u": V.value}, outputs={"v": V.value})
    def f(u):
        return ct.id_tap(drive, u**2)

    run(jax.jit(f), jnp.asarray(V.nodes[:, 0]))
    np.testing.assert_allclose(results.seen[0][1], 1 / 3, rtol=1e-13)


def test_libceed_operators(V):
    results = Results()
    ceed = V.ceed
    op = ceed.Operator(ceed.QFunctionByName("MassApply"))
    weights = ceed.Vector(MESH.num_cells * V.num_quadrature_points)
    weights.set_value(1.0)
    op.set_field("u", V.restriction, V.basis, ct.VECTOR_ACTIVE)
    op.set_field("qdata", V.quadrature_restriction(), ct.BASIS_NONE, weights)
    op.set_field("v", V.restriction, V.basis, ct.VECTOR_ACTIVE)
    drive = ct.drive(op, results)
    run(jax.jit(lambda u: ct.id_tap(drive, u)), jnp.ones(V.num_nodes))
    np.testing.assert_allclose(results.seen[0][1].sum(), MESH.num_cells * V.num_quadrature_points, rtol=1e-12)


def test_slow_drives_hold_the_program_or_lose_events(V):
    """Back-pressure is that of consumers."""
    slow = ct.drive(lambda u: u, lambda u: threading.Event().wait(0.01), policy="drop_newest", every=2)
    assert (slow.policy, slow.every) == ("drop_newest", 2)


def test_what_fails_is_raised_and_the_stream_goes_on(V):
    results = Results()

    def fail_once(value, step):
        if step == 1:
            raise ArithmeticError("the second")
        results(value, step)

    drive = ct.drive(mass_of(V), fail_once)
    f = jax.jit(lambda u: jax.lax.scan(lambda u, _: (ct.id_tap(drive, u), None), u, None, length=3)[0])
    with pytest.raises(ct.CallbackException) as caught:
        run(f, jnp.ones(V.num_nodes))
    assert [str(error) for error in caught.value.exceptions] == ["the second"]
    assert [step for step, _ in results.seen] == [0, 2]


def test_boundary_operators_move_as_well():
    V = ct.Space(ct.Ceed("/cpu/self"), MESH, degree=1)
    B = V.boundary("left")
    op = ct.operator(inputs={"u": B.value, "w": B.weight}, outputs={"v": B.value})(lambda u, w: u * w)
    moved = op.on(ct.Ceed("/cpu/self/ref/serial"))
    np.testing.assert_allclose(moved(jnp.ones(V.num_nodes)), op(jnp.ones(V.num_nodes)), rtol=1e-14)


class TestErrors:
    def test_no_callback(self, V):
        with pytest.raises(TypeError, match="called with the results, got NoneType"):
            ct.drive(mass_of(V), None)

    def test_no_operator(self):
        with pytest.raises(TypeError, match="an operator or a function, got int"):
            ct.drive(3, print)

    def test_ceed_of_what_does_not_move(self, V):
        with pytest.raises(TypeError, match="ceed= is for operators made by"):
            ct.drive(lambda u: u, print, ceed=V.ceed)
