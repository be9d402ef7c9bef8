"""Publishing and following: what arrives, what is lost, and that the producer does not notice."""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap import cli, live_table, publication_names, publishing
from ceedtap.outfeed import OUTFEED

FULL = bool(os.environ.get("CEEDTAP_TEST_FULL"))


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path_factory, monkeypatch):
    directory = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory / "ceedtap"


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.002)


def loop(tap, n, size=3):
    return jax.jit(lambda: jax.lax.fori_loop(0, n, lambda i, c: ct.id_tap(tap, jnp.full(size, i, float), result=c), 0))


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SLEEPER = "import ceedtap as ct, time\np = ct.publish('run')\nprint('ready', flush=True)\ntime.sleep(60)"
READER = "import ceedtap as ct\nwith ct.follow('run') as f:\n    print('ready', flush=True)\n    for e in f: pass"


def command(*args, **options):
    return subprocess.run(
        [sys.executable, "-m", "ceedtap", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


# -- what arrives ----------------------------------------------------------------------------------------------------


def test_events_arrive_as_they_are_tapped():
    tap, seen = ct.Tap("u"), []
    with ct.publish("run") as publisher:
        with ct.follow("run") as follower:
            until(lambda: publisher.num_followers)
            loop(tap, 50, 5)()
            with tap.attached(lambda u, what=None, transforms=(): seen.append(u)):
                jax.vmap(lambda x: ct.id_tap(tap, {"x": x}, what="batched"))(jnp.arange(3))
            events = [next(follower) for _ in range(51)]
        until(lambda: not publisher.num_followers)
    for i, event in enumerate(events[:50]):
        assert (event.tap, event.device, event.transforms) == ("u", 0, ())
        np.testing.assert_array_equal(event.value, np.full(5, i))
    assert events[50].tap == "batched"
    assert events[50].labels == {"what": "batched"}
    assert events[50].transforms == (("batch", {"batch_dims": (0,)}),)
    np.testing.assert_array_equal(events[50].value["x"], [0, 1, 2])
    assert [e.seq for e in events] == list(range(events[0].seq, events[0].seq + 51))
    assert follower.pid == os.getpid()


def test_nothing_leaves_a_program_while_nobody_follows():
    tap = ct.Tap("quiet")
    f = loop(tap, 10)
    with ct.publish("run") as publisher:
        f()
        ct.barrier_wait()
        assert OUTFEED._tees == ()
        before = ct.outfeed.stats()["emitted"]
        with ct.follow("run"):
            until(lambda: publisher.num_followers)
            f()
            ct.barrier_wait()
        until(lambda: not publisher.num_followers)
        f()
        ct.barrier_wait()
        assert ct.outfeed.stats()["emitted"] == before + 10
        assert OUTFEED._tees == ()


def test_several_followers_and_chosen_taps():
    a, b = ct.Tap("a"), ct.Tap("b")
    with ct.publish("run", taps=["b"]) as publisher, ct.follow("run") as first, ct.follow("run") as second:
        until(lambda: publisher.num_followers == 2)
        for i in range(3):
            ct.id_tap(a, i)
            ct.id_tap(b, 10 * i)
        publisher.close()
        for follower in (first, second):
            assert [(e.tap, int(e.value)) for e in follower] == [("b", 0), ("b", 10), ("b", 20)]
            assert follower.ended


def test_large_frames():
    tap = ct.Tap("large")
    f = jax.jit(lambda i: ct.id_tap(tap, jnp.full(1_000_000, i, float)))
    with ct.publish("run") as publisher, ct.follow("run") as follower:
        until(lambda: publisher.num_followers)
        got = []
        thread = threading.Thread(target=lambda: got.extend(next(follower) for _ in range(5)))
        thread.start()
        for i in range(5):
            f(i)
            until(lambda i=i: len(got) > i or not thread.is_alive())
        thread.join()
    assert [(e.value.min(), e.value.max(), e.value.size) for e in got] == [(i, i, 1_000_000) for i in range(5)]


def test_a_publication_goes_along_with_a_recording(tmp_path):
    tap = ct.Tap("t")
    with ct.record(tmp_path / "run.ctap"), ct.publish("run") as publisher, ct.follow("run") as follower:
        until(lambda: publisher.num_followers)
        loop(tap, 20)()
        assert [int(next(follower).value[0]) for _ in range(20)] == list(range(20))
    with ct.open(tmp_path / "run.ctap") as run:
        assert len(run["t"]) == 20


# -- slow followers --------------------------------------------------------------------------------------------------


def test_a_follower_that_reads_nothing_loses_events_which_are_counted(monkeypatch):
    monkeypatch.setattr(publishing, "BACKLOG_BYTES", 100_000)
    tap, seen = ct.Tap("t"), []
    f = loop(tap, 100, 1000)
    with ct.publish("run") as publisher, ct.follow("run") as slow, tap.attached(lambda x: seen.append(int(x[0]))):
        until(lambda: publisher.num_followers)
        for _ in range(30):
            f()
            ct.barrier_wait()
            time.sleep(0.01)
        assert seen == [*range(100)] * 30
        got, lost = 0, 0
        end = time.monotonic() + 30
        while got + lost < 3000:  # the news of what is lost comes within half a second
            assert time.monotonic() < end
            got += len(slow.receive(0.1))
            lost = slow.lost["t"]
        assert got + lost == 3000
        assert lost > 1000


def test_what_is_too_much_for_a_tick_is_not_copied(monkeypatch):
    monkeypatch.setattr(publishing, "TICK_EVENTS", 10)
    tap = ct.Tap("t")
    with ct.publish("run") as publisher, ct.follow("run") as follower:
        until(lambda: publisher.num_followers)
        loop(tap, 5000)()
        publisher.close()
        got = list(follower)
    assert 10 <= len(got) < 5000
    assert len(got) + follower.lost["t"] == 5000


def test_a_tap_that_only_a_follower_wants_never_blocks_its_program():
    """The receiver is stuck in a consumer and the queue is full; a recording would make the program wait."""
    release, stuck, tap = threading.Event(), ct.Tap("stuck"), ct.Tap("t")
    ct.outfeed.configure(budget_bytes=20_000, block_timeout_sec=60)
    try:
        with ct.publish("run") as publisher, ct.follow("run"), stuck.attached(lambda x: release.wait(60)):
            until(lambda: publisher.num_followers)
            ct.id_tap(stuck, 1)
            done = threading.Thread(target=loop(tap, 100, 1000))
            done.start()
            done.join(30)
            assert not done.is_alive()
            release.set()
            ct.barrier_wait()
    finally:
        release.set()
        ct.outfeed.configure()


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "a b", 3])
def test_bad_names(name):
    with pytest.raises(ValueError, match="a name has up to 64"):
        ct.publish(name)
    with pytest.raises(ValueError, match="a name has up to 64"):
        ct.follow(name)


def test_one_name_twice():
    with ct.publish("run"):
        with pytest.raises(ConnectionError, match=f"published already, by process {os.getpid()}"):
            ct.publish("run")
        with ct.publish("other"):
            pass
    with ct.publish("run"):
        pass


def test_nobody_publishes(runtime_directory):
    with ct.publish("there"), pytest.raises(ConnectionError, match=r"nobody publishes 'run'.*: there"):
        ct.follow("run")
    assert list(runtime_directory.iterdir()) == []


def test_sockets_are_private(runtime_directory):
    with ct.publish("run"):
        assert (runtime_directory / "run.sock").stat().st_mode & 0o777 == 0o600
        assert runtime_directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_write_to_is_refused(runtime_directory):
    runtime_directory.mkdir()
    runtime_directory.chmod(0o777)
    with pytest.raises(PermissionError, match="only this user can write"):
        ct.publish("run")


def test_a_name_whose_process_was_killed_is_free_again(runtime_directory):
    with start(
        "import ceedtap as ct, time\np = ct.publish('run')\nprint('ready', flush=True)\ntime.sleep(60)"
    ) as process:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(ConnectionError, match=f"by process {process.pid}"):
            ct.publish("run")
        with ct.follow("run") as follower:
            process.kill()
            assert list(follower) == []
            assert not follower.ended
    assert (runtime_directory / "run.sock").exists()
    with pytest.raises(ConnectionError, match="nobody publishes"):
        ct.follow("run")
    with ct.publish("run") as publisher, ct.follow("run"):
        until(lambda: publisher.num_followers)


def test_waiting_for_a_publication():
    got = []
    thread = threading.Thread(target=lambda: got.append(ct.follow("late", timeout_sec=30)))
    thread.start()
    time.sleep(0.05)
    with ct.publish("late") as publisher:
        thread.join()
        until(lambda: publisher.num_followers)
    assert list(got[0]) == []
    assert got[0].ended
    got[0].close()


def test_something_else_on_the_socket(runtime_directory):
    publication_names.directory()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(runtime_directory / "odd.sock"))
        server.listen()
        with ct.follow("odd") as follower:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 10)
                with pytest.raises(ConnectionError, match="does not send frames"):
                    next(follower)


def test_a_fork_leaves_the_publication_to_the_parent():
    code = """
        import warnings; warnings.simplefilter("ignore")
        import os, sys, time, jax, jax.numpy as jnp, ceedtap as ct
        ready, tap = jnp.ones(3), ct.Tap("t")
        publisher = ct.publish("forking")
        with ct.follow("forking") as follower:
            while not publisher.num_followers:
                time.sleep(0.001)
            pid = os.fork()
            if pid == 0:
                ct.id_tap(tap, ready)
                ct.barrier_wait(10)
                publisher.close()
                with ct.publish("child"):
                    pass
                os._exit(5)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ct.outfeed.stats()["emitted"])
            ct.id_tap(tap, 2 * ready)
            print(next(follower).value)
        publisher.close()
        with ct.publish("forking"):
            pass
    """
    with start(code) as process:
        out, err = process.communicate(timeout=60)
    assert (out.split("\n")[:2], err) == (["5 0", "[2. 2. 2.]"], "")


def test_a_process_that_ends_without_closing(runtime_directory):
    code = """
        import time, jax.numpy as jnp, ceedtap as ct
        publisher = ct.publish("run")
        print("ready", flush=True)
        while not publisher.num_followers:
            time.sleep(0.001)
        ct.id_tap(ct.Tap("t"), 1.5)
    """
    with start(code) as process:
        process.stdout.readline()
        with ct.follow("run") as follower:
            assert [float(e.value) for e in follower] == [1.5]
            assert follower.ended
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    assert list(runtime_directory.iterdir()) == []


# -- the producer does not notice --------------------------------------------------------------------------------------

PRODUCER = """
    import hashlib, sys, time
    import jax, jax.numpy as jnp, ceedtap as ct
    jax.config.update("jax_enable_x64", True)
    tap, busy = ct.Tap("u"), ct.Tap("busy")
    count = 0
    def consumer(x):
        global count
        count += 1
    busy.attach(consumer)

    @jax.jit
    def step(i, u):
        u = jnp.sin(u + i) + 1e-3 * jnp.roll(u, 1)
        ct.id_tap(tap, {"step": i, "u": u})
        return ct.id_tap(busy, u)

    steps = int(sys.argv[2])
    with ct.publish(sys.argv[1]):
        print("ready", flush=True)
        u = jnp.linspace(0, 1, 2000)
        digest = hashlib.sha256()
        sys.stdin.readline()
        for i in range(steps):
            u = step(i, u)
            digest.update(u.tobytes())
            time.sleep(0.0005)
        ct.barrier_wait()
        print(digest.hexdigest(), count, flush=True)
"""


def expected(steps):
    """What the producer computes, without ceedtap."""
    step = jax.jit(lambda i, u: jnp.sin(u + i) + 1e-3 * jnp.roll(u, 1))
    u, digest = jnp.linspace(0, 1, 2000), hashlib.sha256()
    for i in range(steps):
        u = step(i, u)
        digest.update(u.tobytes())
    return digest.hexdigest()


def test_followers_that_come_go_and_die_change_nothing():
    attachments, kills = (100, 20) if FULL else (15, 3)
    steps = 40_000 if FULL else 3000
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PRODUCER), "run", str(steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        seen = 0
        for k in range(attachments):
            with ct.follow("run") as follower:
                received = follower.receive(5)
                seen += bool(received)
                for one in received or []:
                    assert one.definition.tap in ("u", "busy")
                if k % 5 == 0:
                    time.sleep(0.05)  # detached with much on its way
        killed = 0
        for k in range(kills):
            if process.poll() is not None:
                break
            with start(READER) as victim:
                victim.stdout.readline()
                time.sleep(0.02 * (k % 3))
                victim.send_signal(signal.SIGSTOP if k % 2 else signal.SIGKILL)  # stopped: takes nothing any more
                time.sleep(0.05)
                victim.kill()
                killed += 1
        digest, count = process.stdout.readline().split()
    assert process.returncode == 0
    assert seen >= attachments - 2
    assert killed == kills or FULL
    assert (digest, int(count)) == (expected(steps), steps)


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_table_in_plain_text():
    code = """
        import sys, time, jax.numpy as jnp, ceedtap as ct
        flux, step = ct.Tap("flux"), ct.Tap("two")
        with ct.publish("table") as publisher:
            print("ready", flush=True)
            while not publisher.num_followers:
                time.sleep(0.001)
            for i in range(10):
                ct.id_tap(flux, jnp.full((2, 3), 2.0))
                ct.id_tap(step, {"step": i, "r": 10.0**-i}, what="residual")
            time.sleep(1.0)
    """
    with start(code) as process:
        process.stdout.readline()
        done = command("follow", "table", "--plain", "--interval", "0.3")
    assert (done.returncode, done.stderr) == (0, "")
    blocks = done.stdout.strip().split("\n\n")
    assert len(blocks) >= 2
    head, flux, residual, summary = blocks[-1].splitlines()
    assert head.split()[:4] == ["tap", "arrays", "events", "events/s"]
    assert re.match(r"flux +float32\[2, 3\] +10 +[\d.]+ +[\d.]+ +0 +4.89898 +\S+ +\[2 2 2 2 \.\.\.\]", flux)  # sqrt(24)
    assert re.match(r"residual +float32\[\], int32\[\] +10 .* 1e-09 .*r=1e-09 step=9", residual)
    assert f"process {process.pid}, which has ended" in summary


def test_one_table_and_chosen_taps(capsys):
    tap, other = ct.Tap("flux"), ct.Tap("other")
    with ct.publish("once") as publisher:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ceedtap",
                "follow",
                "once",
                "--once",
                "--tap",
                "flux",
                "--norm",
                "max",
                "--interval",
                "1",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            until(lambda: publisher.num_followers)
            for i in range(4):
                ct.id_tap(tap, -float(i))
                ct.id_tap(other, i)
            out, _ = process.communicate(timeout=60)
        until(lambda: not publisher.num_followers)
    head, line, _ = out.strip().splitlines()
    assert head.startswith("tap")
    assert re.match(r"flux +float64\[\] +4 .* 3 +\S+ +-3", line)
    assert process.returncode == 0


def test_the_live_table(monkeypatch):
    pytest.importorskip("rich")
    tap = ct.Tap("flux [red]")
    with ct.publish("live") as publisher:
        process = subprocess.Popen(
            [sys.executable, "-m", "ceedtap", "follow", "live", "--interval", "0.2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "150"},
        )
        with process:
            until(lambda: publisher.num_followers)
            for i in range(3):
                ct.id_tap(tap, float(i))
            publisher.close()
            out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "flux [red]" in out
    assert "float64[]" in out


def test_a_producer_that_is_killed_is_told():
    with start(
        "import ceedtap as ct, time\np = ct.publish('run')\nprint('ready', flush=True)\ntime.sleep(60)"
    ) as process:
        process.stdout.readline()
        with subprocess.Popen(
            [sys.executable, "-m", "ceedtap", "follow", "run", "--plain"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as follower:
            follower.stdout.readline()
            process.kill()
            _, err = follower.communicate(timeout=60)
    assert follower.returncode == 1
    assert err == f"ceedtap follow: process {process.pid}, which published 'run', has gone\n"


def test_wrong_calls_of_follow(monkeypatch, capsys):
    nice = os.nice(0)
    assert cli.main(["follow", "nobody", "--once"]) == 1
    assert os.nice(0) == nice  # only a process of its own steps back
    assert "nobody publishes 'nobody'" in capsys.readouterr().err
    assert cli.main(["follow", "a/b", "--once"]) == 1
    assert "a name has up to 64" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert cli.main(["follow", "nobody"]) == 1
    assert "pip install ceedtap[follow]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([3.0], "▅"),
        ([np.nan], "x"),
        ([1, 1], "▅▅"),
        ([0, 7], "▁█"),
        ([-1e9, 0, 1e9], "▁▅█"),
        ([np.inf, 1], "x▅"),
    ],
)
def test_sparklines(values, expected):
    assert live_table.sparkline(values) == expected


def test_norms():
    x = np.array([3.0, -4.0])
    assert {name: norm(x) for name, norm in live_table.NORMS.items()} == {"l2": 5, "max": 4, "mean": -0.5, "l1": 7}
    assert np.isnan(live_table.NORMS["mean"](np.zeros(0)))


def test_follow_needs_no_jax():
    """The command starts at once, and does not take the memory of a JAX process."""
    code = "import sys, ceedtap.live_table\nprint('jax' in sys.modules, 'ceedtap.outfeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path("/"))
    assert (done.stdout.split(), done.stderr) == (["False", "False"], "")
