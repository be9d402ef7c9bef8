"""Taps in programs that run on several devices, and where the native handler cannot be used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ceedtap as ct
from ceedtap import jax_compat

P = PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("x",))


def shards(events):
    return sorted(tuple(e.ravel().tolist()) for e in events)


EXPECTED = [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0), (6.0, 7.0)]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_shard_map_gives_one_event_per_shard(mesh, ordered, used):
    events = []

    def body(x):
        y = ct.id_tap(lambda v: events.append(v), x, ordered=ordered)
        return y if used else x

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    with ct.outfeed_receiver():
        jax.block_until_ready(f(jnp.arange(8.0)))
    assert shards(events) == EXPECTED


def test_shard_map_tells_the_device(mesh):
    events = {}

    def consumer(x, device):
        events[device.id] = x.tolist()

    def body(x):
        return ct.id_tap(consumer, x, tap_with_device=True)

    with ct.outfeed_receiver():
        jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(jnp.arange(8.0))
    assert events == {i: list(EXPECTED[i]) for i in range(4)}


def test_a_loop_in_shard_map(mesh):
    events = []

    def body(x):
        return jax.lax.fori_loop(0, 5, lambda i, c: ct.id_tap(events.append, c + 1), x)

    with ct.outfeed_receiver():
        jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(jnp.zeros(4))
    assert sorted(float(e[0]) for e in events) == sorted([1.0, 2.0, 3.0, 4.0, 5.0] * 4)


@pytest.mark.parametrize("used", [False, True])
def test_a_partitioned_program_gives_one_event_per_shard(mesh, used):
    events = []
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))

    @jax.jit
    def f(x):
        y = ct.id_tap(events.append, x)
        return (y if used else x) * 2

    with ct.outfeed_receiver():
        result = f(x)
    assert np.array_equal(result, np.arange(8.0) * 2)
    assert shards(events) == EXPECTED


def test_a_loop_in_a_partitioned_program(mesh):
    events = []
    x = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("x")))
    f = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: ct.id_tap(events.append, c + 1), x))
    with ct.outfeed_receiver():
        f(x).block_until_ready()
    assert sorted(e.tolist() for e in events) == sorted([[i, i] for i in (1.0, 2.0, 3.0)] * 4)


def test_the_gradient_of_a_partitioned_program(mesh):
    events = []
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))
    consumer = lambda v, transforms=(): events.append((len(transforms), v.tolist()))  # noqa: E731
    with ct.outfeed_receiver():
        g = jax.jit(jax.grad(lambda x: jnp.sum(ct.id_tap(consumer, x) ** 2)))(x)
    assert np.array_equal(g, 2 * np.arange(8.0))
    assert sorted(v for n, v in events if n == 0) == [list(e) for e in EXPECTED]
    assert sorted(v for n, v in events if n == 2) == [[2 * a for a in e] for e in EXPECTED]


@pytest.fixture
def python_callbacks_only(monkeypatch):
    """What other platforms than CPU use, made to be used here."""

    def use():
        monkeypatch.setattr(jax_compat, "is_for_cpu", lambda ctx: False)
        jax.clear_caches()

    yield use
    jax.clear_caches()


@pytest.mark.parametrize("ordered", [False, True])
def test_the_python_callback_gives_the_same_events(python_callbacks_only, ordered):
    def run():
        events = []

        def consumer(value, transforms=()):
            events.append((float(value), transforms))

        def body(c, x):
            return ct.id_tap(consumer, c * x, ordered=ordered), None

        f = jax.jit(jax.grad(lambda c: jax.lax.scan(body, c, jnp.arange(1.0, 4.0))[0]))
        with ct.outfeed_receiver():
            f(2.0)
        return events

    native = run()
    python_callbacks_only()
    assert run() == native
    assert len(native) == 6
