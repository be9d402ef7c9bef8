"""The receiving side: draining, errors, back-pressure, the end of the process."""

import gc
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap.native import lib
from ceedtap.outfeed import OUTFEED


def run_python(code, timeout=120):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(autouse=True)
def default_limits():
    yield
    ct.outfeed.configure()


def test_barrier_waits_for_a_slow_consumer():
    seen = []

    def slow(x):
        time.sleep(0.02)
        seen.append(int(x))

    f = jax.jit(lambda: jax.lax.fori_loop(0, 20, lambda i, c: (ct.id_tap(slow, i), c)[1], 0))
    f()
    ct.barrier_wait()
    assert seen == list(range(20))


def test_producers_wait_when_the_queue_is_full():
    seen = []

    def slow(x):
        time.sleep(0.001)
        seen.append(int(x[0]))

    f = jax.jit(lambda: jax.lax.fori_loop(0, 300, lambda i, c: (ct.id_tap(slow, jnp.full(1000, i)), c)[1], 0))
    ct.outfeed.configure(budget_bytes=50_000)
    f()
    ct.barrier_wait()
    assert seen == list(range(300))


def test_a_payload_larger_than_the_budget_passes():
    seen = []
    ct.outfeed.configure(budget_bytes=1000)
    f = jax.jit(lambda x: ct.id_tap(lambda a: seen.append(a.sum()), x))
    for i in range(3):
        f(jnp.full(10_000, i))
    ct.barrier_wait()
    assert seen == [0, 10_000, 20_000]


def test_errors_of_consumers_are_raised_together_and_the_rest_arrives():
    seen = []

    def consumer(i):
        if i % 7 == 0:
            raise ValueError(f"event {i}")
        seen.append(int(i))

    f = jax.jit(lambda: jax.lax.fori_loop(0, 50, lambda i, c: (ct.id_tap(consumer, i), c)[1], 0))
    with pytest.raises(ct.CallbackException) as caught, ct.outfeed_receiver():
        f()
    assert seen == [i for i in range(50) if i % 7]
    assert [str(e) for e in caught.value.exceptions] == [f"event {i}" for i in range(0, 50, 7)]
    assert all(type(e) is ValueError for e in caught.value.exceptions)
    assert "consumer" in caught.value.exceptions[0].__notes__[0]
    ct.barrier_wait()  # raised once


def test_many_errors_are_counted_but_not_all_kept():
    def consumer(i):
        raise ValueError

    f = jax.jit(lambda: jax.lax.fori_loop(0, 1000, lambda i, c: (ct.id_tap(consumer, i), c)[1], 0))
    f()
    with pytest.raises(ct.CallbackException, match="1000 exceptions, the first 100"):
        ct.barrier_wait()


def test_a_consumer_that_exits_does_not_end_the_stream():
    seen = []
    with pytest.raises(ct.CallbackException, match="1 exception"), ct.outfeed_receiver():
        ct.id_tap(lambda x: sys.exit(3), 1)
        ct.id_tap(seen.append, 2)
    assert seen == [2]


def test_timeout_names_the_consumer():
    release = threading.Event()

    def stuck_consumer(x):
        release.wait(30)

    ct.id_tap(stuck_consumer, 1)
    with pytest.raises(TimeoutError, match="stuck_consumer"):
        ct.barrier_wait(timeout=0.3)
    release.set()
    ct.barrier_wait()


def test_the_exception_of_the_body_goes_on_with_a_note():
    def consumer(x):
        raise ValueError("in the consumer")

    with pytest.raises(KeyError) as caught, ct.outfeed_receiver():
        ct.id_tap(consumer, 1)
        raise KeyError("in the body")
    assert "CallbackException" in caught.value.__notes__[0]


def test_receivers_nest():
    seen = []
    with ct.outfeed_receiver():
        ct.id_tap(seen.append, 1)
        with ct.outfeed_receiver():
            ct.id_tap(seen.append, 2)
        assert seen == [1, 2]
        ct.id_tap(seen.append, 3)
    assert seen == [1, 2, 3]


def test_a_consumer_may_run_jax_and_tap():
    seen = []

    def outer(x):
        inner = jax.jit(lambda x: ct.id_tap(lambda y: seen.append(("inner", float(y))), x * 10))
        seen.append(("outer", float(inner(x))))

    with ct.outfeed_receiver():
        jax.jit(lambda x: ct.id_tap(outer, x))(1.0)
        ct.barrier_wait()  # the inner tap is emitted while this waits; the end of the scope waits for it
    assert seen == [("outer", 10.0), ("inner", 10.0)]


def test_barrier_wait_in_a_consumer_is_an_error_and_no_deadlock():
    with pytest.raises(ct.CallbackException) as caught, ct.outfeed_receiver():
        ct.id_tap(lambda x: ct.barrier_wait(), 1)
    assert "itself" in str(caught.value.exceptions[0])


def test_threads():
    seen = {i: [] for i in range(4)}
    fs = [jax.jit(lambda x, i=i: ct.id_tap(seen[i].append, x)) for i in range(4)]

    def work(i):
        for k in range(500):
            fs[i](k).block_until_ready()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ct.barrier_wait()
    assert all(np.array_equal(values, np.arange(500)) for values in seen.values())


def test_devices():
    devices = jax.devices()
    seen = []
    f = jax.jit(lambda x: ct.id_tap(seen.append, x))
    with ct.outfeed_receiver():
        for i, device in enumerate(devices):
            f(jax.device_put(float(i), device))
    assert sorted(map(float, seen)) == list(range(len(devices)))


def test_consumers_die_with_their_programs():
    before = lib.ct_registry_size(lib.ct_consumers())
    for i in range(50):
        jax.jit(lambda x, i=i: ct.id_tap(lambda y: None, x + i))(1.0)
        ct.id_tap(lambda y: None, 1.0)
    ct.barrier_wait()
    gc.collect()
    ct.id_tap(lambda y: None, 0)  # the receiver reaps when something comes
    ct.barrier_wait()
    OUTFEED._reap()
    assert lib.ct_registry_size(lib.ct_consumers()) <= before + 2


def test_a_program_outlives_the_function_that_it_was_made_from():
    seen = []
    compiled = jax.jit(lambda x: ct.id_tap(lambda y: seen.append(float(y)), x)).lower(1.0).compile()
    jax.clear_caches()
    gc.collect()
    compiled(2.0)
    ct.barrier_wait()
    assert seen == [2.0]


def test_exit_right_after_many_taps_to_a_slow_consumer():
    done = run_python(
        """
        import jax, time, ceedtap as ct
        count = 0
        def slow(i):
            global count
            count += 1
            if count % 1000 == 0:
                time.sleep(0.005)
            if count == 100_000:
                print("last", int(i))
        jax.jit(lambda: jax.lax.fori_loop(0, 100_000, lambda i, c: (ct.id_tap(slow, i), c)[1], 0))()
        """
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "last 99999", "")


def test_exit_with_a_hung_consumer_says_what_is_lost():
    done = run_python(
        """
        import sys, threading, ceedtap as ct, ceedtap.outfeed
        ceedtap.outfeed.EXIT_PATIENCE_SEC = 0.5
        def hung(x):
            threading.Event().wait()
        for i in range(3):
            ct.id_tap(hung, i)
        sys.exit(7)
        """
    )
    assert done.returncode == 7
    assert "3 tapped events are not consumed" in done.stderr
    assert "hung" in done.stderr


def test_exit_with_errors_that_nobody_asked_for():
    done = run_python(
        """
        import ceedtap as ct
        def bad(x):
            raise ValueError("from the consumer")
        ct.id_tap(bad, 1)
        """
    )
    assert done.returncode == 0
    assert "from the consumer" in done.stderr


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise SystemExit(3)", "os._exit(3)"])
def test_exit_status_is_kept(ending):
    done = run_python(f"import os, sys, ceedtap as ct\nct.id_tap(lambda x: None, 1)\n{ending}")
    assert done.returncode == 3


def test_import_is_quick_and_starts_no_thread():
    done = run_python("import threading, ceedtap; print(threading.active_count())")
    assert done.stdout.strip() == "1"
