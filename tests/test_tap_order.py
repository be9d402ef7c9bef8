"""The order of events, and that nothing that is tapped leaves its loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ceedtap as ct


def events_of(make, *args, repeat=1):
    events = []
    f = make(lambda *values, **labels: events.append(tuple(np.asarray(v).tolist() for v in values)))
    with ct.outfeed_receiver(60):
        for _ in range(repeat):
            jax.block_until_ready(f(*args))
    return events


def work(x):
    """Takes a while."""
    return lax.fori_loop(0, 200, lambda _, c: jnp.sin(c) @ jnp.cos(c), x)


# -- unrolled loops and straight code ---------------------------------------------------------------------------------

LOOPS = {
    "fori_loop": lambda body, x, unroll: lax.fori_loop(0, 8, body, x, unroll=unroll),
    "scan": lambda body, x, unroll: lax.scan(lambda c, k: (body(k, c), None), x, jnp.arange(8), unroll=unroll)[0],
}


@pytest.mark.parametrize("unroll", [2, 3, 8, True])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("depends", [True, False])
def test_events_of_unrolled_loops_come_in_the_order_of_the_steps(loop, unroll, depends):
    if loop is LOOPS["fori_loop"] and unroll == 3:
        unroll = 4

    def make(tap):
        def body(k, c):
            heavy = work(c) if depends else work(jnp.eye(20) * (9 - k))  # the later, the sooner it could be done
            ct.id_tap(tap, k, heavy[0, 0])
            return c + 1

        return jax.jit(lambda x: loop(body, x, unroll))

    assert [k for k, _ in events_of(make, jnp.zeros((20, 20)), repeat=3)] == list(range(8)) * 3


@pytest.mark.parametrize("devices", [1, 4])
def test_taps_of_one_piece_of_code_come_in_its_order(devices):
    def make(tap):
        def f(x):
            ct.id_tap(tap, 0, work(work(x))[0, 0])
            for k in range(1, 6):
                ct.id_tap(tap, k, x[0, 0])
            y = ct.id_tap(tap, 6, work(x)[0, 0])[1]
            return ct.id_tap(tap, 7, y)

        return jax.jit(f)

    mesh = Mesh(np.array(jax.devices()[:devices]), ("i",))
    x = jax.device_put(jnp.eye(40), NamedSharding(mesh, PartitionSpec()))
    assert [k for k, _ in events_of(make, x, repeat=5)] == list(range(8)) * 5


def test_derivatives_of_unrolled_loops_too():
    events = []

    def total(x):
        consumer = lambda v, transforms=(): events.append((len(transforms), float(v)))  # noqa: E731
        return lax.fori_loop(0, 4, lambda k, c: ct.id_tap(consumer, c * (k + 1.0)), x, unroll=4)

    with ct.outfeed_receiver(60):
        jax.jit(jax.value_and_grad(total))(1.0)
    assert [value for marks, value in events if not marks] == [1.0, 2.0, 6.0, 24.0]
    assert [value for marks, value in events if marks] == [1.0, 4.0, 12.0, 24.0]  # backwards


# -- loops under rematerialisation ------------------------------------------------------------------------------------

REMATERIALISED = {
    "scan": lambda body, x: lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0],
    "fori_loop": lambda body, x: lax.fori_loop(0, 3, lambda _, c: body(c), x),
    "map": lambda body, x: jnp.sum(lax.map(lambda k: body(x), jnp.arange(3.0))),
    "scan in scan": lambda body, x: lax.scan(
        lambda c, _: (lax.scan(lambda c, _: (body(c), None), c, None, length=3)[0], None), x, None, length=1
    )[0],
}
OPERANDS = {"constant": lambda x: 3.0, "of the loop's constants": lambda x: x * x, "integer": lambda x: 3}
POLICIES = {
    "": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.parametrize("loop", REMATERIALISED.values(), ids=REMATERIALISED)
@pytest.mark.parametrize("operand", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("ordered", [False, True])
def test_what_does_not_vary_in_a_loop_is_tapped_in_every_step(loop, operand, policy, ordered):
    def make(tap, outer=jax.jit):
        def f(x):
            def body(c):
                ct.id_tap(tap, operand(x), ordered=ordered, tangents=False)
                return c * x

            return loop(body, x)

        return outer(jax.grad(jax.checkpoint(f, policy=policy)))

    value = operand(2.0)
    assert events_of(make, 2.0) == [(value,)] * 3
    assert events_of(lambda tap: make(tap, lambda f: f), 2.0) == [(value,)] * 3


def test_the_derivative_of_such_a_loop_is_right():
    def f(x, tap):
        return lax.scan(lambda c, _: (c * jnp.sin(tap(x * x)) * tap(x), None), x, None, length=4)[0]

    quiet = jax.grad(lambda x: f(x, lambda v: v))
    for wrap in (jax.checkpoint, lambda g: g):
        loud = jax.jit(jax.grad(wrap(lambda x: f(x, lambda v: ct.id_tap(lambda *_, **__: None, v)))))
        np.testing.assert_allclose(loud(1.3), quiet(1.3), rtol=1e-14)
