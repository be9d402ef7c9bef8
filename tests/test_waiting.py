"""What waits for what: programs without effects, failed orders, signals, and the end of the process."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from test_lifecycle import finish, run, start

import ceedtap as ct


def heavy(x):
    """Runs for a while, and so beside the thread that starts it."""
    return jax.lax.fori_loop(0, 400, lambda _, c: jnp.sin(c) @ jnp.ones_like(c) * 1e-3 + c, x)


def slow_program(consumer):
    program = jax.jit(lambda x: ct.id_tap(consumer, heavy(x)[0, 0], stateful=False) * 2)
    x = jnp.ones((100, 100))
    program(x).block_until_ready()
    ct.barrier_wait()
    return lambda: program(x)


# -- programs without effects ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
def test_barriers_wait_for_programs_without_effects(held, tmp_path):
    seen, tap = [], ct.Tap("waited")
    program = slow_program(tap)
    kept = []

    def go():
        result = program()
        if held:
            kept.append(result)

    with ct.outfeed_receiver(60), tap.attached(seen.append):
        go()
    assert len(seen) == 1
    with tap.attached(seen.append):
        go()
        ct.barrier_wait()
        assert len(seen) == 2
    with ct.record(tmp_path / "run.ctap"):
        go()
    with ct.open(tmp_path / "run.ctap") as recording:
        assert len(recording["waited"]) == 1


def test_a_barrier_waits_for_a_program_of_another_thread_whose_result_is_held():
    seen = []
    program = slow_program(seen.append)
    seen.clear()
    kept = []
    thread = threading.Thread(target=lambda: kept.append(program()))
    thread.start()
    thread.join()
    ct.barrier_wait()
    assert len(seen) == 1


def test_the_process_waits_for_programs_without_effects():
    out = run(
        """
        def heavy(x):
            return jax.lax.fori_loop(0, 2000, lambda _, c: jnp.sin(c) @ jnp.ones_like(c) * 1e-3 + c, x)
        f = jax.jit(lambda x: ct.id_tap(lambda v: print("event"), heavy(x)[0, 0], stateful=False))
        f(jnp.ones((100, 100)))
        """
    )
    assert out == "event"


def test_a_barrier_in_a_host_function_does_not_wait_for_the_program_that_waits_for_it():
    out = run(
        """
        ct.id_tap(lambda x: None, jax.jit(lambda x: ct.id_tap(lambda x: None, x, stateful=False))(1.0))
        def host(x):
            ct.barrier_wait()
            return x + 1
        later = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, c: jnp.sin(c) @ c, x)[0, 0])(jnp.eye(100))
        f = jax.jit(lambda x: ct.call(host, x, result_shape=x))
        print(float(f(later)) - float(later))
        """
    )
    assert out == "1.0"


# -- failed orders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 4])
def test_an_ordered_call_that_fails_does_not_poison_later_programs(devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("i",))
    spec = PartitionSpec("i")

    def host(x):
        if x[0] == 2.0:
            raise ValueError("two")
        return x

    def shard(x):
        return ct.call(host, x, result_shape=jax.ShapeDtypeStruct((4 // devices,), x.dtype), ordered=True)

    f = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec))
    g = jax.jit(lambda x: ct.call(lambda x: x + 1, x, result_shape=x, ordered=True))
    seen = []
    h = jax.jit(lambda x: ct.id_tap(lambda v: seen.append(float(v)), x, ordered=True))
    bad = jnp.roll(jnp.arange(4.0), -2) if devices == 1 else jnp.arange(4.0)
    for k in range(3):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="two"):
            f(bad).block_until_ready()
        assert g(float(k)) == k + 1
        assert np.array_equal(f(jnp.arange(4.0) + 10), np.arange(4.0) + 10)
        h(float(k))
    ct.barrier_wait()
    assert seen == [0.0, 1.0, 2.0]


def test_a_time_out_of_an_ordered_tap_does_not_poison_later_programs():
    out = run(
        """
        from jax.sharding import Mesh, PartitionSpec as P
        ct.outfeed.configure(budget_bytes=100, block_timeout_sec=0.3)
        stop, seen = threading.Event(), []
        mesh = Mesh(np.array(jax.devices()), ("i",))
        body = lambda x: jax.lax.fori_loop(0, 9, lambda i, c: ct.id_tap(lambda v: stop.wait(), c, ordered=True), x)
        f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
        try:
            f(jnp.zeros(400)).block_until_ready()
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            print("time-out" in str(error))
        stop.set()
        ct.barrier_wait()
        ct.outfeed.configure()
        g = jax.jit(lambda x: ct.id_tap(lambda v: seen.append(float(v)), x, ordered=True))
        for k in range(3):
            g(float(k))
        ct.barrier_wait()
        print(seen)
        """,
        devices=2,
    )
    assert out == "True\n[0.0, 1.0, 2.0]"


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 4000], ids=["on the main thread", "beside it"])
def test_ctrl_c_while_a_tap_waits_for_room(size):
    process = start(
        f"""
        import signal
        ct.outfeed.configure(budget_bytes=100)
        import ceedtap.outfeed
        ceedtap.outfeed.EXIT_PATIENCE_SEC = 0.3
        hang = threading.Event()
        f = jax.jit(lambda x: jax.lax.fori_loop(0, 99, lambda i, c: ct.id_tap(lambda v: hang.wait(), c + 1), x))
        def interrupt():
            while "has not returned" not in ceedtap.outfeed.OUTFEED.backlog():
                time.sleep(0.05)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            f(jnp.zeros({size})).block_until_ready()
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print(jax.jit(lambda x: x + 1)(1), flush=True)
        """
    )
    status, out, err = finish(process, timeout=60)
    assert (status, out) == (0, "interrupted\n2"), err
    assert "the process ends although" in err


def test_a_handler_that_does_not_raise_interrupts_nothing():
    out = run(
        """
        import signal
        ct.outfeed.configure(budget_bytes=100)
        got, seen = [], []
        signal.signal(signal.SIGINT, lambda *_: got.append(1))
        def slow(v):
            seen.append(1)
            time.sleep(0.1)
        f = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda i, c: ct.id_tap(slow, c + 1), x))
        threading.Thread(target=lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
        f(jnp.zeros(4000)).block_until_ready()
        ct.barrier_wait()
        print(len(seen), len(got), signal.getsignal(signal.SIGINT) is not None)
        """
    )
    assert out == "20 1 True"


# -- the end of the process ------------------------------------------------------------------------------------------


def test_functions_that_were_registered_for_the_exit_first_may_tap():
    code = """
    import atexit
    def late():
        f(3.0)
        ct.id_tap(lambda x: print("late", x), 1.0)
        with ct.outfeed_receiver():
            f(4.0)
    atexit.register(late)
    f = jax.jit(lambda x: ct.id_tap(lambda v: print("event", v), x * 2))
    f(1.0)
    """
    assert run(code).split("\n") == ["event 2.0", "event 6.0", "late 1.0", "event 8.0"]


def test_references_that_outlive_the_modules_are_silent():
    code = """
    import gc
    class Cycle:
        def __init__(self, f):
            self.f, self.me = f, self
    gc.disable()
    f = jax.jit(lambda x: ct.call(lambda x: x, ct.id_tap(lambda x: None, x), result_shape=x))
    f(1.0)
    Cycle(f)
    sys.kept = Cycle(f)
    """
    status, _, err = finish(start(code))
    assert (status, err) == (0, "")


# -- host functions --------------------------------------------------------------------------------------------------


def test_host_functions_know_the_device():
    mesh, seen = Mesh(np.array(jax.devices()[:4]), ("i",)), {}

    def host(x, what, device):
        seen.setdefault(what, {})[device.id] = x.tolist()
        return x

    def body(x):
        return ct.call(host, x, result_shape=x, call_with_device=True, what="jit")

    spec = PartitionSpec("i")
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.arange(4.0)).block_until_ready()
    ct.call(host, jax.device_put(5.0, jax.devices()[2]), result_shape=1.0, call_with_device=True, what="eager")
    assert seen == {"jit": {k: [float(k)] for k in range(4)}, "eager": {2: 5.0}}
