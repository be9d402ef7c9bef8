"""Conditional taps: `when`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct


def collect(run, *args):
    """The events of a program."""
    events = []

    def keep(x, transforms=()):
        events.append((np.asarray(x).tolist(), tuple(name for name, _ in transforms)))

    with ct.outfeed_receiver():
        jax.block_until_ready(run(keep)(*args))
    return events


@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"stateful": False}], ids=str)
class TestCondition:
    def test_of_an_event(self, compile, options):
        program = lambda keep: compile(lambda x: ct.id_tap(keep, x, when=x > 2, **options) + 1)  # noqa: E731
        assert collect(program, 1.0) == []
        assert collect(program, 3.0) == [(3.0, ())]

    def test_of_an_array_is_whether_any_is_true(self, compile, options):
        program = lambda keep: compile(lambda x: ct.id_tap(keep, x, when=x > 2, **options) + 1)  # noqa: E731
        x = np.zeros(1000)
        for place in (None, 0, 1, 500, 999):
            marked = x.copy()
            if place is not None:
                marked[place] = 3.0
            assert len(collect(program, marked)) == (place is not None)
        assert collect(program, np.zeros(0)) == []

    def test_goes_for_derivatives_as_well(self, compile, options):
        def program(keep):
            return compile(jax.value_and_grad(lambda x: 5 * ct.id_tap(keep, x * x, when=x > 2, **options)))

        assert collect(program, 1.0) == []
        assert collect(program, 3.0) == [(9.0, ()), (5.0, ("jvp", "transpose"))]

    def test_tangents(self, compile, options):
        def program(keep):
            def f(x, t):
                return jax.jvp(lambda x: ct.id_tap(keep, x * x, when=x > 2, **options), (x,), (t,))

            return compile(f)

        assert collect(program, 1.0, 1.0) == []
        assert sorted(collect(program, 3.0, 1.0)) == [(6.0, ("jvp",)), (9.0, ())]


@pytest.mark.parametrize("stateful", [True, False])
def test_of_a_batch_is_whether_any_lane_has_it(stateful):
    program = lambda keep: jax.jit(jax.vmap(lambda x: ct.id_tap(keep, x, when=x > 2, stateful=stateful) + 1))  # noqa: E731
    assert collect(program, jnp.array([1.0, 2.0])) == []
    assert collect(program, jnp.array([1.0, 3.0])) == [([1.0, 3.0], ("batch",))]


def test_in_a_loop():
    def loop(keep):
        return jax.jit(
            lambda: jax.lax.fori_loop(0, 7, lambda i, c: c + ct.id_tap(keep, 1.0 * i, when=i % 3 == 0), jnp.zeros(()))
        )

    assert [value for value, _ in collect(loop)] == [0.0, 3.0, 6.0]


def test_scan_and_grad():
    def program(keep):
        def step(x, i):
            return ct.id_tap(keep, x * 2, when=i == 1), None

        return jax.jit(jax.grad(lambda x: jax.lax.scan(step, x, jnp.arange(3))[0]))

    assert collect(program, 1.0) == [(4.0, ()), (2.0, ("jvp", "transpose"))]


def test_several_values_and_an_independent_condition_in_lanes():
    events = []

    def keep(a, b, transforms):
        events.append((a.shape, b.shape, transforms))

    f = jax.vmap(lambda x, flag: ct.id_tap(keep, 1.0, x, when=flag))
    with ct.outfeed_receiver():
        jax.jit(f)(jnp.ones((2, 3)), jnp.array([False, True]))
    assert events == [((), (2, 3), (("batch", {"batch_dims": (None, 0)}),))]


def test_on_shards_each_decides_for_itself():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    events = []
    f = jax.shard_map(
        lambda x: ct.id_tap(lambda x: events.append(x.tolist()), x, when=x > 2),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("i"),
        out_specs=jax.sharding.PartitionSpec("i"),
    )
    with ct.outfeed_receiver():
        jax.jit(f)(jnp.arange(8.0))
    assert sorted(events) == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


def test_in_a_partitioned_program():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    for limit, happens in ((100, False), (2, True)):
        events = []
        f = jax.jit(lambda x, limit=limit, events=events: ct.id_tap(events.append, x, when=jnp.any(x > limit)) * 2)
        with ct.outfeed_receiver():
            f(x)
        assert bool(events) == happens


@pytest.mark.parametrize("condition", [1, 2.0, np.ones(3), "yes"], ids=repr)
def test_condition_is_boolean(condition):
    with pytest.raises(TypeError, match=r"when|valid"):
        ct.id_tap(print, 1.0, when=condition)
