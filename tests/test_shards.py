"""Taps of arrays that XLA spreads over devices: which parts arrive, with what they say of themselves."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import check_python
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ceedtap as ct

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
FLAVOURS = [{}, {"ordered": True}, {"stateful": False}]
flavours = pytest.mark.parametrize("flavour", FLAVOURS, ids=["default", "ordered", "stateless"])


def place(array, *spec):
    return jax.device_put(jnp.asarray(array), NamedSharding(MESH, P(*spec)))


class Parts:
    """A consumer that keeps what it gets."""

    def __init__(self):
        self.events = []

    def __call__(self, *arrays, shard, **labels):
        self.events.append((arrays, shard, labels))

    def assembled(self, shape, number=0):
        """The whole array, and how often each element came."""
        whole, count = np.full(shape, np.nan), np.zeros(shape, int)
        for arrays, shard, _ in self.events:
            whole[shard.index[number]] = arrays[number]
            count[shard.index[number]] += 1
        return whole, count


def run(f, *args):
    with ct.outfeed_receiver(60):
        return jax.block_until_ready(jax.jit(f)(*args))


def tap(parts, x, **options):
    return ct.id_tap(parts, x, tap_with_shard=True, **options)


@flavours
@pytest.mark.parametrize("spec", [("a",), ("b",), ("a", "b"), (("a", "b"),), (None, "a"), ()], ids=str)
@pytest.mark.parametrize("replicas", ["first", "all"])
def test_every_part_arrives_once_or_from_every_device_that_has_it(flavour, spec, replicas):
    parts, x = Parts(), np.arange(32.0).reshape(8, 4)
    y = run(lambda x: tap(parts, x + 1, replicas=replicas, **flavour) * 2, place(x, *spec))
    assert np.array_equal(y, 2 * (x + 1))
    whole, count = parts.assembled(x.shape)
    assert np.array_equal(whole, x + 1)
    used = {name for axes in spec for name in (axes if isinstance(axes, tuple) else (axes,))} - {None}
    copies = 2 ** len({"a", "b"} - used)
    assert np.all(count == (copies if replicas == "all" else 1))
    expected = range(copies) if replicas == "all" else [0]
    assert {shard.replica for _, shard, _ in parts.events} == set(expected)
    for (part,), shard, _ in parts.events:
        assert shard.device == MESH.devices[shard.coordinates["a"], shard.coordinates["b"]]
        on_device = next(s for s in place(x + 1, *spec).addressable_shards if s.device == shard.device)
        assert np.array_equal(part, on_device.data)


@flavours
@pytest.mark.parametrize("size", [5, 6, 7])
def test_parts_that_are_not_even_have_no_padding(flavour, size):
    parts, x = Parts(), np.arange(8.0)
    run(lambda x: tap(parts, x[8 - size :] - x[:size], **flavour).sum(), place(x, ("a", "b")))
    whole, count = parts.assembled((size,))
    assert np.array_equal(whole, x[8 - size :] - x[:size])
    assert np.all(count == 1)


@flavours
def test_arrays_of_one_tap_may_be_spread_differently(flavour):
    parts, x, y = Parts(), np.arange(8.0), np.arange(4.0)

    def f(x, y):
        x, y, _ = tap_three(x, y)
        return x.sum() + y.sum()

    def tap_three(x, y):
        return ct.id_tap(parts, x, y, 7, tap_with_shard=True, **flavour)

    run(f, place(x, "a"), place(y, "b"))
    assert len(parts.events) == 4  # every pair of parts is on one device
    for number, whole in ((0, x), (1, y)):
        assembled, count = parts.assembled(whole.shape, number)
        assert np.array_equal(assembled, whole)
        assert np.all(count == 2)
    assert all(arrays[2] == 7 and shard.index[2] == () for arrays, shard, _ in parts.events)


@flavours
def test_a_condition_is_one_for_all_parts(flavour):
    parts, x = Parts(), np.arange(8.0)
    f = jax.jit(lambda x, bound: tap(parts, x, when=x > bound, **flavour).sum())
    with ct.outfeed_receiver(60):
        f(place(x, "a"), 6.0)
    whole, _ = parts.assembled(x.shape)
    assert np.array_equal(whole, x)
    parts.events.clear()
    with ct.outfeed_receiver(60):
        f(place(x, "a"), 7.0)
        run(lambda x: tap(parts, x.sum(), when=x > 6, **flavour), place(x, "a"))
    assert [arrays[0] for arrays, _, _ in parts.events] == [28.0]


@flavours
def test_loops_keep_the_order_on_each_device(flavour):
    parts = Parts()

    def body(k, c):
        return ct.id_tap(parts, c + 1, step=k, tap_with_shard=True, **flavour)

    run(lambda x: jax.lax.fori_loop(0, 20, body, x), place(np.zeros(8), "a"))
    for row in (0, 1):
        mine = [(int(labels["step"]), float(a[0])) for (a,), s, labels in parts.events if s.coordinates["a"] == row]
        assert mine == [(k, k + 1.0) for k in range(20)]


@flavours
def test_a_shard_map_over_some_axes(flavour):
    parts, x = Parts(), np.arange(8.0)
    inner = jax.shard_map(
        lambda x: tap(parts, x * 2, **flavour), mesh=MESH, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
    )
    if flavour.get("ordered") and jax.__version_info__ < (0, 12):
        with pytest.raises(NotImplementedError, match=r"ordered=True in a `jax.shard_map` over some axes"):
            run(inner, place(x, "a"))
        return
    assert np.array_equal(run(inner, place(x, "a")), x * 2)
    rows = sorted((shard.coordinates["a"], shard.coordinates["b"], a.tolist()) for (a,), shard, _ in parts.events)
    assert rows == [(0, 0, [0.0, 2.0, 4.0, 6.0]), (1, 0, [8.0, 10.0, 12.0, 14.0])]
    assert all(shard.index is None for _, shard, _ in parts.events)


@pytest.mark.parametrize("jit", [False, True])
def test_shard_map_and_pmap_tell_the_place(jit):
    parts, x = Parts(), np.arange(8.0)
    f = jax.shard_map(lambda x: tap(parts, x), mesh=MESH, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
    with ct.outfeed_receiver(60):
        (jax.jit(f) if jit else f)(x)
        jax.pmap(lambda x: tap(parts, x))(np.arange(4.0))
    places = {
        (s.coordinates["a"], s.coordinates["b"]): a.tolist() for (a,), s, _ in parts.events if "a" in s.coordinates
    }
    assert places == {(i, j): [4.0 * i + 2 * j, 4.0 * i + 2 * j + 1] for i in (0, 1) for j in (0, 1)}
    assert sorted(float(a) for (a,), s, _ in parts.events if "a" not in s.coordinates) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("replicas", ["first", "all"])
def test_outside_of_compiled_code_parts_are_the_same(replicas):
    x = np.arange(32.0).reshape(8, 4)
    found = []
    for wrap in (lambda f: f, jax.jit):
        parts = Parts()
        with ct.outfeed_receiver(60):
            wrap(lambda x, parts=parts: tap(parts, x, replicas=replicas))(place(x, "b"))
        key = lambda e: (str(e[1].index), e[1].replica)  # noqa: E731
        found.append([(s, a.tolist()) for (a,), s, _ in sorted(parts.events, key=key)])
    assert found[0] == found[1]
    assert len(found[0]) == (4 if replicas == "all" else 2)


def test_a_program_on_one_device_has_everything():
    parts = Parts()
    run(lambda x: tap(parts, x), np.arange(3.0))
    (((a,), shard, _),) = parts.events
    assert shard == ct.Shard(jax.devices()[0], {}, ((slice(0, 3),),), 0)
    assert a.tolist() == [0, 1, 2]


@flavours
def test_every_and_named_taps_decide_before_anything_leaves(flavour):
    seen, flux = [], ct.Tap("parts")
    rare = ct.Consumer(lambda k: seen.append(int(k)), every=5)

    def body(k, c):
        ct.id_tap(rare, k, **({} if flavour == {"stateful": False} else flavour))
        return ct.id_tap(flux, c + 1, **flavour)

    f = jax.jit(lambda x: jax.lax.fori_loop(0, 20, body, x))
    with ct.outfeed_receiver(60):
        f(place(0.0))
    assert seen == [0, 5, 10, 15]
    offered = [c for c in ct.outfeed.stats()["consumers"] if c["name"] == "parts"]
    assert all(not c["devices"] for c in offered)  # nobody listens
    events = []
    with flux.attached(lambda x: events.append(float(x))):
        f(place(0.0))
    assert events == [k + 1.0 for k in range(20)]


@flavours
def test_recordings_and_replays_know_the_parts(flavour, tmp_path):
    parts, x = Parts(), np.arange(8.0)
    f = jax.jit(lambda x: ct.id_tap(parts, x * 3, what="u", tap_with_shard=True, **flavour))
    with ct.record(tmp_path / "run.ctap"):
        f(place(x, "a")).block_until_ready()
    whole = np.zeros(8)
    with ct.open(tmp_path / "run.ctap") as recording:
        for event in recording.events():
            assert event.shard.replica == 0
            whole[event.shard.index[0]] = event.value
    assert np.array_equal(whole, x * 3)
    again = Parts()
    ct.replay(tmp_path / "run.ctap", {"u": again})
    assert [(s, a.tolist()) for (a,), s, _ in again.events] == [(s, a.tolist()) for (a,), s, _ in parts.events]


def test_many_types_and_shapes():
    parts = Parts()
    arrays = [
        np.arange(8).astype(dtype).reshape(4, 2)
        for dtype in ("int8", "uint16", "int64", "float32", "complex128", "bool", "bfloat16", "float16")
    ]

    def f(*arrays):
        taken = ct.id_tap(parts, *arrays, jnp.zeros((0, 3)), tap_with_shard=True)
        return taken[0]

    run(f, *(place(a, "a") for a in arrays))
    assert len(parts.events) == 2
    for number, array in enumerate(arrays):
        for got, shard, _ in parts.events:
            assert got[number].dtype == array.dtype
            assert np.array_equal(got[number], array[shard.index[number]])


def test_keys_on_several_devices():
    seen = []
    keys = jax.device_put(jax.random.split(jax.random.key(3), 4), NamedSharding(MESH, P(("a", "b"))))
    run(lambda k: ct.id_tap(lambda k: seen.append(jax.random.key_data(k).tolist()), k), keys)
    assert sorted(seen) == sorted([words.tolist()] for words in np.asarray(jax.random.key_data(keys)))


def test_programs_of_several_threads():
    parts = [Parts() for _ in range(4)]
    functions = [jax.jit(lambda x, p=p: tap(p, x + 1)) for p in parts]

    def work(f):
        for _ in range(5):
            f(place(np.arange(8.0), "a")).block_until_ready()

    threads = [threading.Thread(target=work, args=(f,)) for f in functions]
    with ct.outfeed_receiver(60):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(p.events) for p in parts] == [10] * 4


def test_replicas_is_checked():
    with pytest.raises(ValueError, match="replicas is 'first' or 'all', got 'none'"):
        ct.id_tap(print, 1, replicas="none")


@pytest.mark.parametrize("names", [("d", "a", "b"), ("b", "d", "a")], ids="".join)
def test_arrays_that_jax_splits_further_inside_of_shard_map(names):
    """One axis of the mesh is manual, the others are JAX's: as the shards of the array, replicas once or all."""
    out = check_python(
        f"""
        import jax, numpy as np
        import ceedtap as ct
        from jax.sharding import NamedSharding, PartitionSpec as P

        mesh = jax.make_mesh((2, 2, 2), {names}, axis_types=(jax.sharding.AxisType.Auto,) * 3)
        x = np.arange(64, dtype=np.float32).reshape(2, 4, 8)

        def sort(arrays):
            return sorted((a.shape, a.ravel().tolist()) for a in arrays)

        for replicas in ("first", "all"):
            for axes in (("a", "b"), ("b", "a"), (("b", "a"),), (None, "b"), ("a",), ()):
                got = []
                body = lambda v: ct.id_tap(lambda w: got.append(w.copy()), v * 1, replicas=replicas)
                f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names={{"d"}}))
                y = jax.device_put(x, NamedSharding(mesh, P("d", *axes)))
                with ct.outfeed_receiver():
                    f(y).block_until_ready()
                shards = [s for s in y.addressable_shards if replicas == "all" or s.replica_id == 0]
                assert sort(got) == sort(np.asarray(s.data) for s in shards), (axes, replicas)
        print("ok")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    assert out == "ok\n"
