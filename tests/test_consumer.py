"""Policies, sampling, errors and named taps."""

import logging
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import ceedtap as ct


@pytest.fixture(autouse=True)
def default_limits():
    yield
    ct.outfeed.configure()


def loop(consumer, n, size=1000):
    """A compiled loop that taps n events of `size` doubles, whose first element counts from 0."""
    return jax.jit(
        lambda: jax.lax.fori_loop(0, n, lambda i, c: ct.id_tap(consumer, jnp.full(size, i, float), result=c), 0)
    )


class Gate:
    """A consumer that does not return before it may."""

    def __init__(self):
        self.open = threading.Event()
        self.seen = []

    def __call__(self, x):
        self.open.wait(30)
        self.seen.append(int(x[0]))


def counts(consumer):
    (entry,) = [e for e in ct.outfeed.stats()["consumers"] if e["name"] == consumer.name]
    return entry["offered"], entry["devices"][0]


def test_drop_newest_keeps_the_first_events():
    gate = Gate()
    consumer = ct.Consumer(gate, policy="drop_newest", name="newest")
    ct.outfeed.configure(budget_bytes=100_000)
    f = loop(consumer, 100)
    f().block_until_ready()  # does not wait for the consumer
    gate.open.set()
    ct.barrier_wait()
    offered, c = counts(consumer)
    assert offered == c["emitted"] == 100
    assert c["consumed"] + c["dropped"] == 100
    assert gate.seen == list(range(c["consumed"]))
    assert 5 < c["consumed"] < 20


def test_drop_oldest_keeps_the_last_events():
    gate = Gate()
    consumer = ct.Consumer(gate, policy="drop_oldest", name="oldest")
    ct.outfeed.configure(budget_bytes=4_000_000)
    f = loop(consumer, 2000)
    f().block_until_ready()
    gate.open.set()
    ct.barrier_wait()
    _, c = counts(consumer)
    assert c["consumed"] + c["dropped"] == 2000
    assert c["dropped"] > 0
    assert gate.seen[-1] == 1999
    assert gate.seen == sorted(gate.seen)
    assert len(gate.seen) == c["consumed"]


def test_block_loses_nothing():
    seen = []
    consumer = ct.Consumer(lambda x: (time.sleep(0.0005), seen.append(int(x[0]))), name="block")
    ct.outfeed.configure(budget_bytes=50_000)
    f = loop(consumer, 300)
    f()
    ct.barrier_wait()
    assert seen == list(range(300))
    assert counts(consumer)[1] == {"emitted": 300, "consumed": 300, "dropped": 0, "queued_bytes": 0}


def test_a_blocked_program_fails_after_the_time_out_and_names_the_consumer():
    gate = Gate()
    consumer = ct.Consumer(gate, name="the gate")
    ct.outfeed.configure(budget_bytes=20_000, block_timeout_sec=0.3)
    f = loop(consumer, 100)
    with pytest.raises(Exception, match=r"consumer the gate has not returned.*outfeed.configure"):
        f().block_until_ready()
    gate.open.set()
    ct.barrier_wait()
    f = loop(consumer, 3)
    f().block_until_ready()  # the process goes on
    ct.barrier_wait()


def test_a_consumer_that_fills_the_queue_itself_does_not_deadlock():
    seen = []
    inner = loop(lambda x: seen.append(int(x[0])), 200)
    ct.outfeed.configure(budget_bytes=20_000, block_timeout_sec=5)
    with ct.outfeed_receiver():
        jax.jit(lambda x: ct.id_tap(lambda x: inner(), x))(1.0)
        ct.barrier_wait()
    assert seen == list(range(200))


@pytest.mark.parametrize(("every", "expected"), [(1, 10), (3, 4), (10, 1), (100, 1)])
def test_every(every, expected):
    seen = []
    consumer = ct.Consumer(lambda x: seen.append(int(x[0])), every=every)
    with ct.outfeed_receiver():
        loop(consumer, 10)()
    assert seen == list(range(0, 10, every))
    assert len(seen) == expected


def test_every_seventh_event_fails():
    n = 1000
    seen = []

    def consumer(i):
        if i % 7 == 3:
            raise ValueError(int(i))
        seen.append(int(i))

    f = jax.jit(lambda: jax.lax.fori_loop(0, n, lambda i, c: ct.id_tap(consumer, i, result=c), 0))
    with pytest.raises(ct.CallbackException) as caught, ct.outfeed_receiver():
        f()
    assert seen == [i for i in range(n) if i % 7 != 3]
    kept = caught.value.exceptions
    assert [e.args[0] for e in kept] == list(range(3, n, 7))[: len(kept)]
    assert f"{len(range(3, n, 7))} exceptions" in str(caught.value)


def failing(x):
    raise ValueError("as expected")


def test_on_error_log(caplog):
    with caplog.at_level(logging.ERROR, "ceedtap"), ct.outfeed_receiver():
        ct.id_tap(ct.Consumer(failing, on_error="log"), 1)
    (record,) = caplog.records
    assert "failing" in record.message
    assert str(record.exc_info[1]) == "as expected"


def test_on_error_disable():
    calls = []

    def bad(x):
        calls.append(x)
        raise ValueError("once")

    consumer = ct.Consumer(bad, on_error="disable")
    with pytest.raises(ct.CallbackException, match="1 exception"), ct.outfeed_receiver():
        loop(consumer, 50)()
    assert len(calls) == 1
    assert not consumer.enabled
    consumer.enable(True)
    with pytest.raises(ct.CallbackException), ct.outfeed_receiver():
        loop(consumer, 5)()
    assert len(calls) == 2


def test_a_named_tap_without_tracing_again():
    traces = 0
    tap = ct.Tap("flux")

    @jax.jit
    def f(x):
        nonlocal traces
        traces += 1
        return ct.id_tap(tap, x)

    a, b = [], []
    f(0)
    with ct.outfeed_receiver():
        consumer = tap.attach(lambda x: a.append(int(x)))
        f(1)
        ct.barrier_wait()
        with tap.attached(lambda x: b.append(int(x))):
            f(2)
            ct.barrier_wait()
        f(3)
        ct.barrier_wait()
        tap.detach(consumer)
        f(4)
    assert (a, b, traces) == ([1, 2, 3], [2], 1)
    with pytest.raises(ValueError, match="not attached to the tap flux"):
        tap.detach(consumer)


def test_a_failing_consumer_of_a_named_tap_leaves_the_others_alone():
    seen = []
    tap = ct.Tap("shared")
    tap.attach(failing)
    tap.attach(lambda x: seen.append(int(x)))
    quiet = tap.attach(ct.Consumer(failing, on_error="disable"))
    with pytest.raises(ct.CallbackException) as caught, ct.outfeed_receiver():
        for i in range(3):
            ct.id_tap(tap, i)
    assert seen == [0, 1, 2]
    assert len(caught.value.exceptions) == 4
    assert all(type(e) is ValueError for e in caught.value.exceptions)
    assert not quiet.enabled


def test_the_device_is_told():
    got = []
    f = jax.jit(lambda x: ct.id_tap(lambda x, device: got.append((int(x), device)), x, tap_with_device=True))
    with ct.outfeed_receiver():
        for i, device in enumerate(jax.devices()):
            f(jax.device_put(i, device)).block_until_ready()
    assert got == list(enumerate(jax.devices()))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"policy": "drop"}, "'drop_newest'"), ({"on_error": "ignore"}, "'disable'"), ({"every": 0}, "positive")],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ct.Consumer(print, **options)


def test_bad_limits():
    with pytest.raises(ValueError, match="not negative"):
        ct.outfeed.configure(budget_bytes=-1)
    with pytest.raises(TypeError, match="needs a function"):
        ct.Consumer(3)


def test_the_end_of_attached_waits_for_what_was_tapped():
    tap, seen = ct.Tap("late"), []

    def slow(x):
        time.sleep(0.02)
        seen.append(int(x))

    f = jax.jit(lambda n: jax.lax.fori_loop(0, n, lambda i, c: ct.id_tap(tap, i, result=c), 0))
    with tap.attached(slow):
        f(5)
    assert seen == [0, 1, 2, 3, 4]
    f(5)
    ct.barrier_wait()
    assert len(seen) == 5
    with pytest.raises(KeyError), tap.attached(slow):
        f(2)
        raise KeyError
    assert seen[5:] == [0, 1]


def test_attached_in_a_consumer_does_not_wait_for_itself():
    inner, seen = ct.Tap("inner"), []

    def outer(x):
        with inner.attached(seen.append):
            ct.id_tap(inner, x)

    with ct.outfeed_receiver():
        ct.id_tap(outer, 1)
    ct.barrier_wait()


@pytest.mark.parametrize("consumer", [lambda x: None, [].append], ids=["function", "builtin"])
def test_consumers_that_do_not_take_transforms_are_told_how(consumer):
    with pytest.raises(ct.CallbackException) as caught, ct.outfeed_receiver():
        jax.vmap(lambda x: ct.id_tap(consumer, x))(jnp.ones(2))
    (error,) = caught.value.exceptions
    assert any("consumers get transforms= for batches and derivatives" in note for note in error.__notes__)
