"""Recordings: what is written comes back, from every kind of tap; scopes, threads, forks and ends of processes."""

import collections
import contextlib
import io
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap.outfeed import OUTFEED

Pair = collections.namedtuple("Pair", "left right")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ctap"


def run_python(code, *args):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def loop(tap, n, size=3):
    """A compiled loop that taps ``[i, i, ...]`` for i = 0 ... n - 1."""
    return jax.jit(lambda: jax.lax.fori_loop(0, n, lambda i, c: ct.id_tap(tap, jnp.full(size, i, float), result=c), 0))


# -- what comes back -----------------------------------------------------------------------------------------------


def test_a_named_tap_that_nobody_listens_to(path):
    tap = ct.Tap("flux")
    f = loop(tap, 100)
    f()
    with ct.record(path) as recorder:
        f()
    f()
    ct.barrier_wait()
    assert recorder.events == 100
    with ct.open(path) as run:
        assert list(run) == ["flux"]
        series = run["flux"]
        assert series.shape == (100, 3)
        assert series.dtype == np.float64
        assert series.nbytes == 100 * 24
        np.testing.assert_array_equal(series, np.arange(100.0)[:, None] + np.zeros(3))
        np.testing.assert_array_equal(series.steps, np.arange(100))
        np.testing.assert_array_equal(series[7], [7, 7, 7])
        np.testing.assert_array_equal(series[10:13][-1], [12, 12, 12])
        np.testing.assert_array_equal(np.asarray(series[np.array([5, 2])])[:, 0], [5, 2])
        assert series.transforms == [()] * 100
        assert np.all(np.diff(series.times) >= np.timedelta64(0, "ns"))
        assert set(series.devices) == {0}
        assert len(set(series.run_ids)) == 1
        assert (run.ended, run.damage) == (True, None)


def test_everything_is_recorded_and_consumers_get_it_too(path):
    seen = []
    with ct.record(path):
        ct.id_tap(seen.append, 1.5)
        ct.id_tap(lambda x, what: None, jnp.arange(3), what="labelled")
        ct.id_print(np.float32(2), what="printed", output_stream=io.StringIO())
    assert seen == [1.5]
    with ct.open(path) as run:
        assert list(run) == [ct.Consumer(seen.append).name, "labelled", "printed"]
        np.testing.assert_array_equal(run["labelled"][0], [0, 1, 2])
        assert run["printed"].dtype == np.float32


def test_chosen_taps_and_the_recordings_own(path):
    a, b = ct.Tap("a"), ct.Tap("b")
    recorder = ct.record(path, taps=["b"])
    own, rare = recorder.tap("own"), recorder.tap("rare", every=2)
    for i in range(4):
        ct.id_tap(a, i)
        ct.id_tap(b, 10 * i)
        ct.id_tap(own, 100 * i)
    f = loop(rare, 5)
    f()
    recorder.close()
    recorder.close()
    f()
    ct.barrier_wait()
    with ct.open(path) as run:
        assert set(run) == {"b", "own", "rare"}
        assert [int(x) for x in run["b"]] == [0, 10, 20, 30]
        assert [int(x) for x in run["own"]] == [0, 100, 200, 300]
        np.testing.assert_array_equal(run["rare"], np.array([0.0, 2, 4])[:, None] + np.zeros(3))


def test_shapes_that_differ(path):
    tap = ct.Tap("t")
    with ct.record(path):
        loop(tap, 2, 3)()
        loop(tap, 2, 5)()
    with ct.open(path) as run:
        assert [x.shape for x in run["t"]] == [(3,), (3,), (5,), (5,)]
        with pytest.raises(ValueError, match=r"shapes of t differ: \(3,\), \(5,\); select"):
            _ = run["t"].shape
        np.testing.assert_array_equal(run["t"][2:], [[0] * 5, [1] * 5])


def test_a_consumer_that_disabled_itself_is_recorded_on(path):
    def bad(x):
        raise ValueError("once")

    consumer = ct.Consumer(bad, on_error="disable", name="bad")
    with pytest.raises(ct.CallbackException, match="1 exception"), ct.outfeed_receiver(), ct.record(path):
        loop(consumer, 20)()
    with ct.open(path) as run:
        assert len(run["bad"]) == 20


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, content):
        self.content = content

    def tree_flatten(self):
        return (self.content,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


STRUCTURES = [
    ((1,), ("",)),
    (({"u": 1, "step": 2},), ("step", "u")),
    ((1, (2, [3, None])), ("0", "1.0", "1.1.0")),
    ((Pair(1, {"x": 2}),), ("left", "right.x")),
    (({3: 1, 1: 2},), ("1", "3")),
    ((collections.OrderedDict(z=1, a=2),), ("z", "a")),
]


@pytest.mark.parametrize(("args", "leaves"), STRUCTURES, ids=repr)
def test_structures(args, leaves, path):
    seen = []
    with ct.record(path):
        jax.jit(lambda: ct.id_tap(lambda *args: seen.append(args), *args))()
    with ct.open(path) as run:
        (name,) = run
        (event,) = run.events()
        assert event.args == seen[0] == args
        assert run[name].leaves == leaves
        if isinstance(args[0], Pair):
            assert event.value.right == {"x": 2}
        if len(leaves) > 1:
            assert run[name][leaves[1]].shape == (1,)
            with pytest.raises(ValueError, match=r"has \d arrays .*choose one"):
                _ = run[name].shape
            with pytest.raises(KeyError, match="no array 'nonsense'"):
                run[name]["nonsense"]


def test_objects_come_back_as_dictionaries(path):
    with ct.record(path):
        ct.id_tap(ct.Tap("box"), Box({"x": 1}))
    with ct.open(path) as run:
        assert list(run["box"]) == [{"0": {"x": 1}}]


def test_every_type_and_keys(path):
    arrays = {t: jnp.ones((2, 3), t) for t in ("bool", "int8", "uint64", "float16", "bfloat16", "complex128", "int4")}
    key = jax.random.key(7)
    tap = ct.Tap("types")
    with ct.record(path):
        jax.jit(lambda: ct.id_tap(tap, {**arrays, "key": key, "empty": jnp.zeros((0, 4))}))()
    with ct.open(path) as run:
        (got,) = run["types"]
        assert {name: got[name].dtype for name in arrays} == {name: a.dtype for name, a in arrays.items()}
        assert all(np.all(got[name] == 1) for name in arrays)
        assert got["key"] == key
        assert got["empty"].shape == (0, 4)


def test_labels(path):
    got = []
    labels = {"name": "x", "pair": (1, [2.5, None]), "cut": slice(1, None), "many": {"a": True}}
    with ct.record(path):
        ct.id_tap(lambda x, **kwargs: got.append(kwargs), 1, **labels, stream=sys.stdout)
    with ct.open(path) as run:
        (name,) = run
        assert run[name].labels == labels
        (event,) = run.events()
        assert event.labels == labels
        assert type(event.labels["pair"]) is tuple


def test_one_id_with_other_labels_later(path):
    """An eager tap's route is gone when the next one comes; both have the same id."""
    with ct.record(path):
        for i in range(3):
            ct.id_tap(ct.Consumer(lambda x, step: None, name="f"), 10 * i, step=i)
            ct.barrier_wait()
    with ct.open(path) as run:
        assert [(e.labels["step"], int(e.value)) for e in run.events()] == [(0, 0), (1, 10), (2, 20)]
        assert run["f"].steps.tolist() == [0, 1, 2]


def test_transforms(path):
    tap = ct.Tap("y")
    got = []
    tap.attach(lambda y, transforms=(): got.append((np.asarray(y), transforms)))

    def g(x):
        y = ct.id_tap(tap, x * x)
        return jnp.sum(y * y)

    with ct.record(path):
        jax.grad(g)(3.0)
        jax.vmap(g)(jnp.arange(3.0))
    with ct.open(path) as run:
        y = run["y"]
        assert [float(v) for v in y.select(transforms=())] == [9.0]
        assert [float(v) for v in y.select(transforms=("jvp", "transpose"))] == [18.0]
        np.testing.assert_array_equal(y.select(transforms="batch"), [[0, 1, 4]])
        assert y.transforms == [transforms for _, transforms in got]
        replayed = []
        assert ct.replay(path, {"y": lambda y, transforms=(): replayed.append((np.asarray(y), transforms))}) == 3
    for (value, transforms), (again, same) in zip(got, replayed, strict=True):
        np.testing.assert_array_equal(value, again)
        assert same == transforms


def test_steps_and_devices(path):
    tap = ct.Tap("u")
    f = jax.jit(lambda x: jax.lax.fori_loop(0, 6, lambda i, u: ct.id_tap(tap, {"step": 5 * i, "u": u})["u"] + 1, x))
    with ct.record(path):
        for device in jax.devices()[:2]:
            f(jax.device_put(100.0 * device.id, device)).block_until_ready()
    with ct.open(path) as run:
        u = run["u"]["u"]
        assert u.steps.tolist() == [0, 5, 10, 15, 20, 25] * 2
        assert u.select(device=1, steps=15).shape == (1,)
        assert np.asarray(u.select(device=1, steps=slice(10, 20))).tolist() == [102, 103]
        assert np.asarray(u.select(steps=slice(20, None))).tolist() == [4, 5, 104, 105]
        assert len(u.select(device=7)) == 0
        with pytest.raises(ValueError, match="every n-th"):
            u.select(steps=slice(0, 5, 2))


def test_sharded_programs(path):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    tap = ct.Tap("shard")
    f = jax.jit(jax.shard_map(lambda x: ct.id_tap(tap, x) * 2, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    with ct.record(path):
        f(jnp.arange(8.0))
    with ct.open(path) as run:
        assert sorted(x.tolist() for x in run["shard"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_a_consumer_changes_is_not_what_is_recorded(path):
    def change(x):
        x *= 0

    with ct.record(path):
        jax.jit(lambda: ct.id_tap(change, jnp.ones(5)))()
        jax.jit(lambda: ct.id_tap(change, jnp.ones(50_000)))()
    with ct.open(path) as run:
        assert [x.sum() for x in run[ct.Consumer(change).name]] == [5, 50_000]
    with pytest.raises(ct.CallbackException, match="consumers raised"):  # what it gets is read-only
        ct.barrier_wait()


def test_large_and_small_frames_with_many_indices(path, monkeypatch):
    from ceedtap import recording_writer

    monkeypatch.setattr(recording_writer, "INDEX_FRAMES", 7)
    small, large = ct.Tap("small"), ct.Tap("large")
    with ct.record(path):
        f = jax.jit(lambda i: (ct.id_tap(small, i), ct.id_tap(large, jnp.full(60_000, i, float)))[0])
        for i in range(30):
            f(i)
    with ct.open(path) as run:
        assert [int(x) for x in run["small"]] == list(range(30))
        np.testing.assert_array_equal(np.asarray(run["large"])[:, ::20_000], np.arange(30.0)[:, None] + np.zeros(3))
        assert run.damage is None


# -- scopes ----------------------------------------------------------------------------------------------------------


def test_nested_recordings(tmp_path):
    tap = ct.Tap("t")
    f = loop(tap, 10)
    with ct.record(tmp_path / "outer.ctap") as outer:
        f()
        with ct.record(tmp_path / "inner.ctap") as inner:
            f()
        f()
    assert (outer.events, inner.events) == (30, 10)
    with ct.open(tmp_path / "inner.ctap") as run:
        assert len(run["t"]) == 10


def test_events_from_before_the_recording_are_not_in_it(path):
    release = threading.Event()
    tap = ct.Tap("t")
    tap.attach(lambda x: release.wait(30))
    f = loop(tap, 10)
    f()
    recorder = ct.record(path)
    release.set()
    with recorder:
        f()
    with ct.open(path) as run:
        assert len(run["t"]) == 10


def test_an_error_in_the_middle(path):
    tap = ct.Tap("t")
    with pytest.raises(KeyError, match="in the body"), ct.record(path):
        loop(tap, 5)()
        raise KeyError("in the body")
    with ct.open(path) as run:
        assert (run.ended, len(run["t"])) == (True, 5)


def test_a_recording_replaces_a_file_and_leaves_its_readers_alone(path):
    tap = ct.Tap("t")
    with ct.record(path):
        loop(tap, 5)()
    old = ct.open(path)
    with ct.record(path) as recorder:
        with pytest.raises(ct.RecordingError, match="another recording"):
            ct.record(path)
        loop(tap, 3)()
        assert recorder.events <= 3
    with ct.open(path) as new:
        assert (len(old["t"]), len(new["t"])) == (5, 3)
        np.testing.assert_array_equal(old["t"][4], [4, 4, 4])
    old.close()
    with pytest.raises(ct.RecordingError, match="has been closed"):
        old["t"][0]


def test_arrays_outlive_the_recording(path):
    with ct.record(path):
        ct.id_tap(ct.Tap("t"), jnp.arange(5))
    with ct.open(path) as run:
        array = run["t"][0]
    np.testing.assert_array_equal(array, np.arange(5))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_threads(path):
    taps = [ct.Tap(f"t{i}") for i in range(4)]
    fs = [loop(tap, 200) for tap in taps]
    with ct.record(path):
        threads = [threading.Thread(target=f) for f in fs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with ct.open(path) as run:
        for tap in taps:
            np.testing.assert_array_equal(np.asarray(run[tap.name])[:, 0], np.arange(200))


def test_nothing_is_left_of_a_recording(path):
    tap = ct.Tap("t")
    f = loop(tap, 5)
    f()
    with ct.record(path):
        f()
    assert OUTFEED._tees == ()
    assert all(route.tees == () for route in OUTFEED._routes.values())
    before = ct.outfeed.stats()["emitted"]
    f()
    ct.barrier_wait()
    assert ct.outfeed.stats()["emitted"] == before


# -- ends of processes ---------------------------------------------------------------------------------------------

PRODUCER = """
    import os, sys, jax, jax.numpy as jnp, ceedtap as ct
    tap = ct.Tap("t")
    f = jax.jit(lambda: jax.lax.fori_loop(0, 1000, lambda i, c: ct.id_tap(tap, jnp.full(5, i), result=c), 0))
"""


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "del recorder"])
def test_a_process_that_ends_without_closing(ending, path):
    done = run_python(f"{PRODUCER}\n    recorder = ct.record(sys.argv[1])\n    f()\n    {ending}", path)
    assert (done.returncode, done.stderr) == (0, "")
    with ct.open(path) as run:
        assert (run.ended, len(run["t"])) == (True, 1000)


def test_a_fork_leaves_the_recording_to_the_parent(path):
    code = """
    ready = jnp.ones(5)
    with ct.record(sys.argv[1]) as recorder:
        f()
        pid = os.fork()
        if pid == 0:
            ct.id_tap(tap, ready)
            with ct.record(sys.argv[1] + ".child"):
                ct.id_tap(tap, ready)
            recorder.close()
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        f()
    """
    done = run_python("import warnings; warnings.simplefilter('ignore')\n" + textwrap.dedent(PRODUCER + code), path)
    assert (done.returncode, done.stderr) == (0, "")
    with ct.open(path) as run, ct.open(f"{path}.child") as child:
        assert (run.ended, run.damage, len(run["t"])) == (True, None, 2000)
        assert [x.tolist() for x in child["t"]] == [[1] * 5]


# -- errors ----------------------------------------------------------------------------------------------------------


def test_paths_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        ct.record(tmp_path / "missing" / "run.ctap")
    with pytest.raises(IsADirectoryError):
        ct.record(tmp_path)
    with pytest.raises(ct.RecordingError, match="No space left"):
        ct.record("/dev/full")
    with pytest.raises(TypeError, match="taps are names, got int"):
        ct.record(tmp_path / "x", taps=[3])


@contextlib.contextmanager
def file_size_limit(size):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [300, 40_000])
def test_a_full_disk_in_the_middle(size, path):
    """The limit on the size of files stands for a full disk."""
    tap = ct.Tap("t")
    f = loop(tap, 100, size)
    seen = []
    with file_size_limit(1_000_000):
        recorder = ct.record(path)
        with tap.attached(lambda x: seen.append(x[0])):
            for _ in range(8):
                f()
            with pytest.raises(ct.CallbackException) as caught:
                ct.barrier_wait()
        (error,) = caught.value.exceptions
        assert "File too large" in str(error)
        assert str(path) in str(error)
        with pytest.raises(ct.RecordingError, match="File too large"):
            recorder.close()
    assert seen == [*range(100)] * 8  # the consumer got everything
    with ct.open(path) as run:
        values = np.asarray(run["t"])[:, 0]
        assert 0 < len(values) < 800
        np.testing.assert_array_equal(values, np.arange(len(values)) % 100)
        assert (run.ended, run.damage) == (False, None)
    ct.barrier_wait()


def test_a_full_disk_is_told_once(path):
    f = loop(ct.Tap("t"), 500, 1000)
    with file_size_limit(100_000), pytest.raises(ct.RecordingError, match="File too large"), ct.record(path):
        f()
    ct.barrier_wait()


def test_names_that_are_not_there(path):
    with ct.record(path):
        ct.id_tap(ct.Tap("t"), 1)
    with ct.open(path) as run, pytest.raises(KeyError, match="its taps: 't'"):
        run["u"]
    with pytest.raises(KeyError, match="has no tap 'u'; its taps: 't'"):
        ct.replay(path, {"u": print})
    with pytest.raises(FileNotFoundError):
        ct.open(path.with_suffix(".nothing"))


def test_an_empty_recording(path):
    with ct.record(path):
        pass
    with ct.open(path) as run:
        assert (list(run), list(run.events()), run.damage, run.ended) == ([], [], None, True)
    assert ct.replay(path) == 0


# -- replay ----------------------------------------------------------------------------------------------------------


def test_replay_gives_what_the_live_consumer_got(path):
    live, again, all_of_it = [], [], []

    def consumer(store):
        return lambda k, u, device, what: store.append((int(k), np.array(u["a"]), device, what))

    f = jax.jit(lambda k: ct.id_tap(consumer(live), k, {"a": k * jnp.ones(3)}, what="u", tap_with_device=True))
    other = ct.Tap("other")
    with ct.record(path):
        for k, device in enumerate(jax.devices()):
            f(jax.device_put(k, device))
            ct.id_tap(other, -k)
    assert ct.replay(path, {"u": consumer(again)}) == 4
    assert repr(again) == repr(live)
    assert ct.replay(path, lambda *args, **kwargs: all_of_it.append(args[0])) == 8
    assert [int(k) for k in all_of_it] == [0, 0, 1, -1, 2, -2, 3, -3]


def test_replay_into_a_tap_and_with_errors(path):
    with ct.record(path):
        loop(ct.Tap("t"), 10)()
    tap, seen = ct.Tap("elsewhere"), []

    def bad(x):
        if x[0] % 2:
            raise ValueError(f"event {x[0]:g}")
        seen.append(int(x[0]))

    with tap.attached(bad), pytest.raises(ct.CallbackException, match="5 exceptions") as caught:
        ct.replay(path, {"t": tap})
    assert [str(e) for e in caught.value.exceptions] == [f"event {i}" for i in (1, 3, 5, 7, 9)]
    assert seen == [0, 2, 4, 6, 8]
    assert ct.replay(path, {"t": tap}) == 0  # nothing is attached


def test_consumers_of_a_replay_cannot_change_the_arrays_of_others(path):
    with ct.record(path):
        loop(ct.Tap("t"), 4)()

    def change(x):
        x += 1

    before = path.read_bytes()
    with pytest.raises(ct.CallbackException, match="4 exceptions") as caught:
        ct.replay(path, {"t": change})
    assert all("read-only" in str(error) for error in caught.value.exceptions)
    assert path.read_bytes() == before


def test_replay_prints(path, capsys):
    with ct.record(path):
        ct.id_print(jnp.arange(3), what="x", step=3, output_stream=io.StringIO())
        ct.id_tap(ct.Tap("t"), 2.5)
    ct.replay(path)
    assert capsys.readouterr().out == "what: x step: 3\n[0 1 2]\nwhat: t\n2.5\n"


def test_replay_at_the_recorded_pace(path, monkeypatch):
    """The clock is ours, so that nothing depends on how busy the machine is."""
    from ceedtap import recording_replay

    with ct.record(path):
        loop(ct.Tap("t"), 5)()
    now = [1000.0]
    monkeypatch.setattr(recording_replay.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(recording_replay.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    with ct.open(path) as run:
        times = (run["t"].times - run["t"].times[0]) / np.timedelta64(1, "s")
    for speed in (1.0, 4.0):
        at, start = [], now[0]
        ct.replay(path, {"t": lambda x, at=at, start=start: at.append(now[0] - start)}, speed=speed)
        np.testing.assert_allclose(at, times / speed, atol=1e-6)
    for speed in (0, -1):
        with pytest.raises(ValueError, match="positive"):
            ct.replay(path, speed=speed)
