"""From the first tap to the end of the process, and what lies between: fork, Ctrl-C, threads, memory, other processes.

Each test runs a program of its own.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

PRELUDE = """
import os, sys, threading, time, warnings
import jax, jax.numpy as jnp, numpy as np
import ceedtap as ct
warnings.filterwarnings("ignore", "os.fork")
warnings.filterwarnings("ignore", "This process .* is multi-threaded")

def loop(func, n, **options):
    def body(i, c):
        return ct.id_tap(func, i, result=c, **options)
    return jax.jit(lambda: jax.lax.fori_loop(0, n, body, 0))
"""


#: The tests of memory and of accounting use a part of these numbers unless CEEDTAP_TEST_FULL is set.
PART = 1 if os.environ.get("CEEDTAP_TEST_FULL") else 10
EVENTS = 1_000_000 // PART
LAMBDAS = {"eager": 10_000 // PART, "jit": 10_000 // PART // (1 if PART == 1 else 3)}


def start(code, *arguments, devices=1):
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def finish(process, timeout=40):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its children, which have the pipes as well
        pytest.fail(f"hangs: {process.communicate()}")
    return process.returncode, out.strip(), err


def run(code, *arguments, timeout=40, devices=1):
    status, out, err = finish(start(code, *arguments, devices=devices), timeout)
    assert status == 0, err
    return out


# -- fork ------------------------------------------------------------------------------------------------------------


def test_a_forked_child_taps_anew_and_leaves_the_events_of_the_parent_alone():
    out = run(
        """
        seen, ready = [], jnp.arange(3)
        def slow(x):
            time.sleep(0.001)
            seen.append(int(x))
        loop(slow, 500)()
        time.sleep(0.05)
        child = os.fork()
        if child == 0:
            before, mine = len(seen), []
            ct.id_tap(mine.append, ready)
            ct.barrier_wait(10)
            stats = ct.outfeed.stats()
            assert len(seen) == before < 500, seen
            assert [list(x) for x in mine] == [[0, 1, 2]]
            assert (stats["emitted"], stats["consumed"], stats["dropped"]) == (1, 1, 0)
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        ct.barrier_wait()
        print(seen == list(range(500)))
        """
    )
    assert out.split() == ["5", "True"]


def test_processes_of_multiprocessing_that_are_forked():
    out = run(
        """
        import multiprocessing
        ready = jnp.arange(4)
        def work(k):
            got = []
            with ct.outfeed_receiver():
                for _ in range(100):
                    ct.id_tap(lambda x: got.append(int(x.sum())), ready)
            return sum(got) + k
        loop(lambda i: time.sleep(0.0001), 1000)()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(work, range(4)))
        ct.barrier_wait()
        """
    )
    assert out == "[600, 601, 602, 603]"


def test_fork_while_threads_tap():
    out = run(
        """
        ready, stop = jnp.arange(4), threading.Event()
        ct.id_tap(lambda x: None, ready)  # imports what it needs: the lock of an import does not survive a fork
        ct.barrier_wait()
        def work():
            while not stop.is_set():
                ct.id_tap(lambda x: None, ready)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        codes = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                ct.id_tap(lambda x: None, ready)
                ct.barrier_wait(10)
                os._exit(0)
            codes.append(os.waitpid(child, 0)[1])
        stop.set()
        for thread in threads:
            thread.join()
        ct.barrier_wait()
        print(codes == [0] * 20)
        """
    )
    assert out == "True"


# -- interrupts and exits --------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
@pytest.mark.parametrize("consumer", ["time.sleep(0.01)", "threading.Event().wait()"], ids=["slow", "hung"])
def test_ctrl_c_while_a_program_taps(consumer):
    process = start(
        f"""
        import ceedtap.outfeed
        ceedtap.outfeed.EXIT_PATIENCE_SEC = 0.5
        def consume(x):
            {consumer}
        f = loop(consume, 300)
        print("ready", flush=True)
        try:
            f()
            ct.barrier_wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            os._exit(4) if "--hard" in sys.argv else sys.exit(4)
        """
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process, 60)
    assert (status, out) == (4, "interrupted"), err
    assert "Fatal" not in err
    if "Event" in consumer:
        assert "not consumed" in err


def test_programs_that_still_run_at_exit_deliver_their_events():
    # Daemon threads that call JAX at exit abort the process, with taps and without; these are no daemons.
    code = """
        count = 0
        def consume(i):
            global count
            count += 1
            if count == 80_000:
                print("all", flush=True)
        f = loop(consume, 20_000)
        f()
        threads = [threading.Thread(target=f) for _ in range(3)]
        for thread in threads:
            thread.start()
        sys.exit(6)
        """
    for _ in range(3):
        status, out, err = finish(start(code))
        assert (status, out) == (6, "all"), err
        assert "Fatal" not in err


@pytest.mark.parametrize("ending", ["sys.exit(3)", "os._exit(3)", "raise SystemExit(3)"])
def test_the_exit_status_survives_a_busy_consumer(ending):
    status, _, err = finish(start(f"loop(lambda i: time.sleep(0.002), 300)()\n{ending}"))
    assert status == 3, err


def test_a_consumer_that_exits_is_an_error_of_the_consumer():
    out = run(
        """
        def leave(i):
            sys.exit(9)
        try:
            with ct.outfeed_receiver():
                loop(leave, 3)()
        except ct.CallbackException as error:
            print(len(error.exceptions), type(error.exceptions[0].__cause__).__name__)
        """
    )
    assert out == "3 SystemExit"


def test_exceptions_in_nested_receivers_come_out_of_the_receiver_whose_body_tapped():
    out = run(
        """
        def bad(i):
            raise ValueError("inner")
        seen = []
        with ct.outfeed_receiver():
            try:
                with ct.outfeed_receiver():
                    loop(bad, 2)()
            except ct.CallbackException as error:
                print(len(error.exceptions))
            loop(lambda i: seen.append(int(i)), 3)()
        print(seen)
        """
    )
    assert out.split("\n") == ["2", "[0, 1, 2]"]


def test_a_consumer_that_taps_from_compiled_and_from_eager_code():
    out = run(
        """
        seen = []
        inner = loop(lambda i: seen.append(int(i)), 3)
        def outer(i):
            inner().block_until_ready()
            ct.id_tap(lambda x: seen.append(-int(x)), i + 1)
        loop(outer, 2)()
        ct.barrier_wait()
        ct.barrier_wait()  # what consumers tapped while the first one waited
        print(sorted(seen))
        """
    )
    assert out == "[-2, -1, 0, 0, 1, 1, 2, 2]"


# -- memory and accounting -------------------------------------------------------------------------------------------

RSS = """
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
"""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
def test_memory_is_flat_over_many_events():
    out = run(
        RSS
        + """
n = int(sys.argv[1])
f = loop(lambda i: None, n // 10)
f()
ct.barrier_wait()
before = rss()
for _ in range(9):
    f().block_until_ready()
    ct.barrier_wait()
print(ct.outfeed.stats()["consumed"], rss() - before)
""",
        EVENTS,
    )
    consumed, grown = out.split()
    assert int(consumed) == EVENTS
    assert float(grown) < 20


@linux
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_memory_and_registry_are_bounded_for_many_lambdas(how):
    out = run(
        RSS
        + """
from ceedtap.native import lib
how, n = sys.argv[1], int(sys.argv[2])
ready = jnp.arange(3.0)
def tap(k):
    func = lambda x: k
    if how == "eager":
        ct.id_tap(func, ready)
    else:
        jax.jit(lambda x: ct.id_tap(func, x))(ready)
def some(first, last):
    for k in range(first, last):
        tap(k)
        if k % 100 == 99:
            ct.barrier_wait()
            jax.clear_caches()
    ct.barrier_wait()
some(0, n // 3)
before = rss()
some(n // 3, n)
ct.id_tap(print, ready.sum() * 0)
ct.barrier_wait()
print(lib.ct_registry_size(lib.ct_consumers()), rss() - before)
""",
        how,
        LAMBDAS[how],
        timeout=900,
    )
    registered, grown = out.split("\n")[-1].split()
    assert int(registered) < 250
    assert float(grown) < 60


@pytest.mark.parametrize("policy", ["block", "drop_newest", "drop_oldest"])
def test_events_of_four_threads_and_four_devices_are_accounted_for(policy):
    out = run(
        """
        policy, n = sys.argv[1], int(sys.argv[2])
        seen = [0] * 4
        def count(x, k):
            seen[k] += 1
        consumers = [ct.Consumer(count, policy=policy, name=f"consumer {k}") for k in range(4)]
        ct.outfeed.configure(budget_bytes=200_000)
        def work(k):
            device, per_call = jax.devices()[k], n // 40
            def body(i, c):
                return ct.id_tap(consumers[k], i, result=c, k=k)
            f = jax.jit(lambda c: jax.lax.fori_loop(0, per_call, body, c))
            programs[k] = f
            start = jax.device_put(0, device)
            for _ in range(10):
                f(start).block_until_ready()
        programs = {}
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ct.barrier_wait()
        stats = ct.outfeed.stats()
        for entry in stats["consumers"]:
            k = int(entry["name"][-1])
            (device, counts), = entry["devices"].items()
            assert device == k, entry
            assert entry["offered"] == counts["emitted"] == n // 4, entry
            assert counts["consumed"] + counts["dropped"] == n // 4, entry
            assert counts["consumed"] == seen[k], entry
            assert policy != "block" or counts["dropped"] == 0, entry
        print(len(stats["consumers"]), stats["emitted"], stats["consumed"] + stats["dropped"])
        """,
        policy,
        EVENTS,
        timeout=600,
        devices=4,
    )
    assert out == f"4 {EVENTS} {EVENTS}"


# -- other processes -------------------------------------------------------------------------------------------------

CACHED = """
from jax import monitoring
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits, seen = [], []
monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
def consumer(x, what):
    seen.append(float(x))
ordered = sys.argv[2] == "ordered"
print(jax.jit(lambda x: ct.id_tap(consumer, 2 * x, what="twice", ordered=ordered))(1.0))
ct.barrier_wait()
print(len(hits), seen)
"""


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_the_persistent_cache_of_jax_serves_programs_with_taps(tmp_path, order):
    assert run(CACHED, tmp_path, order).split("\n") == ["2.0", "0 [2.0]"]
    assert run(CACHED, tmp_path, order).split("\n") == ["2.0", "1 [2.0]"]


EXPORTED = """
import ceedtap.primitive  # its effects must be known before a program with them is read
from jax import export
seen = []
def consumer(x, what):
    seen.append(float(x))
options = {"unordered": {}, "ordered": {"ordered": True}, "stateless": {"stateful": False}}[sys.argv[2]]
f = jax.jit(lambda x: ct.id_tap(consumer, 2 * x, what="twice", **options))
if sys.argv[3] == "write":
    checks = [export.DisabledSafetyCheck.custom_call("ceedtap_tap")]
    exported = export.export(f, disabled_checks=checks)(jax.ShapeDtypeStruct((), jnp.float32))
    with open(sys.argv[1], "wb") as file:
        file.write(exported.serialize())
else:
    if sys.argv[3] == "listen":
        f(jnp.float32(3))
    with open(sys.argv[1], "rb") as file:
        exported = export.deserialize(file.read())
    print(exported.call(jnp.float32(1)))
    try:
        ct.barrier_wait(10)
    except ct.CallbackException as error:
        print(error.exceptions[0])
    print(seen)
"""


@pytest.mark.skipif(
    not importlib.util.find_spec("flatbuffers"), reason="jax.export needs flatbuffers to write a program"
)
@pytest.mark.parametrize("flavour", ["unordered", "ordered", "stateless"])
def test_an_exported_program_taps_in_another_process(tmp_path, flavour):
    path = tmp_path / "program.bin"
    run(EXPORTED, path, flavour, "write")
    assert run(EXPORTED, path, flavour, "listen").split("\n") == ["2.0", "[6.0, 2.0]"]


def test_an_exported_program_finds_a_function_by_its_name(tmp_path):
    path = tmp_path / "program.bin"
    run(EXPORTED, path, "unordered", "write")
    assert run(EXPORTED, path, "unordered", "do not listen").split("\n") == ["2.0", "[2.0]"]


@pytest.mark.skipif(
    not importlib.util.find_spec("flatbuffers"), reason="jax.export needs flatbuffers to write a program"
)
def test_events_of_an_exported_program_that_nobody_asked_for_are_an_error_and_no_hang(tmp_path):
    path = tmp_path / "program.bin"
    run(EXPORTED, path, "unordered", "write")
    code = EXPORTED.replace("    print(exported", "    del consumer\n    print(exported", 1)
    result, message, seen = run(code, path, "unordered", "do not listen").split("\n")
    assert (result, seen) == ("2.0", "[]")
    assert "consumer" in message
    assert "import __main__" in message


@pytest.mark.skipif(
    not importlib.util.find_spec("flatbuffers"), reason="jax.export needs flatbuffers to write a program"
)
@pytest.mark.parametrize("kind", ["loop", "ordered", "several platforms", "four devices"])
def test_a_tap_of_an_exported_program_is_found_by_its_name(tmp_path, kind):
    code = """
    from jax import export
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    flux = ct.Tap("flux")
    kind, path = sys.argv[1:3]
    x = jnp.arange(4.0)
    if kind == "four devices":
        x = jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()), "i"), PartitionSpec("i")))
    def f(x):
        if kind == "loop":
            return jax.lax.fori_loop(0, 2, lambda i, c: ct.id_tap(flux, {"u": c + 1}, step=i, what="w")["u"], x)
        return ct.id_tap(flux, x, ordered=kind == "ordered") * 2
    """
    write = """
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in ct.outfeed.CUSTOM_CALLS]
    platforms = {"platforms": ("cpu", "cuda")} if kind == "several platforms" else {}
    data = export.export(jax.jit(f), disabled_checks=checks, **platforms)(x).serialize()
    open(path, "wb").write(data)
    """
    read = """
    program = jax.jit(export.deserialize(bytearray(open(path, "rb").read())).call)
    program(x)  # nobody listens: no error
    seen = []
    def listen(x, **labels):
        seen.append((x["u"].tolist() if kind == "loop" else x.tolist(), {k: str(v) for k, v in labels.items()}))
    with flux.attached(listen):
        program(x)
    print(sorted(seen, key=str))
    """
    run(code + write, kind, tmp_path / "program.bin", devices=4)
    out = run(code + read, kind, tmp_path / "program.bin", devices=4)
    expected = {
        "loop": [([k + 1.0, k + 2.0, k + 3.0, k + 4.0], {"what": "w", "step": str(k)}) for k in range(2)],
        "four devices": [([k], {}) for k in (0.0, 1.0, 2.0, 3.0)],
    }
    assert out == str(expected.get(kind, [([0.0, 1.0, 2.0, 3.0], {})]))


@pytest.mark.parametrize("flavour", ["", "ordered=True"])
def test_programs_on_several_devices_in_the_persistent_cache(tmp_path, flavour):
    code = f"""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
    x = jax.device_put(jnp.arange(8.0), NamedSharding(Mesh(np.array(jax.devices()), "i"), PartitionSpec("i")))
    flux, seen, rare = ct.Tap("flux"), [], []
    consumer = ct.Consumer(lambda k: rare.append(int(k)), every=3)
    def body(k, c):
        ct.id_tap(consumer, k, {flavour})
        return ct.id_tap(flux, c + 1, {flavour})
    f = jax.jit(lambda x: jax.lax.fori_loop(0, 6, body, x))
    hits.clear()
    with ct.outfeed_receiver():
        f(x).block_until_ready()
    with flux.attached(lambda x: seen.append(x.tolist())):
        f(x)
    print(bool(hits), rare, sorted(seen)[:3], len(seen))
    """
    first, second = (run(code, tmp_path, devices=4, timeout=90) for _ in range(2))
    expected = "[0, 3, 0, 3] [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]] 24"
    assert (first, second) == (f"False {expected}", f"True {expected}")


@pytest.mark.skipif(
    not importlib.util.find_spec("flatbuffers"), reason="jax.export needs flatbuffers to write a program"
)
def test_what_cannot_be_exported_says_so():
    out = run(
        """
        from jax import export
        checks = [export.DisabledSafetyCheck.custom_call(n) for n in (*ct.outfeed.CUSTOM_CALLS, "ceedtap_call")]
        shape = jax.ShapeDtypeStruct(export.symbolic_shape("n"), jnp.float32)
        for f, x in (
            (lambda x: ct.id_tap(print, x), shape),
            (lambda x: ct.call(lambda x: x, x, result_shape=x), jax.ShapeDtypeStruct((), jnp.float32)),
        ):
            try:
                export.export(jax.jit(f), disabled_checks=checks)(x)
            except NotImplementedError as error:
                print(error)
        """
    )
    first, second = out.split("\n")
    assert "got the symbolic shape (n,); export the program for fixed shapes" in first
    assert "cannot be exported" in second
    assert "Tap the value" in second
