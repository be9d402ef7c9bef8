"""Progress bars of loops in compiled programs."""

import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap import progress_bar


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


class Clock:
    """Time that goes on by a second at each look."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress_bar.time, "monotonic", self)

    def __call__(self):
        self.now += 1.0
        return self.now


def counts(text):
    """The numbers of steps in the lines or drawings."""
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+)/(\d+)", text)]


def run(bar, n, start=0):
    with ct.outfeed_receiver():
        return jax.jit(lambda: jax.lax.fori_loop(start, n, lambda i, x: x + ct.id_tap(bar, i), 0))()


def test_lines_at_each_quarter():
    out = io.StringIO()
    assert run(ct.progress(100, "steps", output_stream=out), 100) == 4950
    assert counts(out.getvalue()) == [(1, 100), (25, 100), (50, 100), (75, 100), (100, 100)]
    lines = out.getvalue().splitlines()
    assert [line.split()[:2] for line in lines] == [["steps", f"{p}%"] for p in (1, 25, 50, 75, 100)]
    assert out.getvalue().isascii()


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_short_loops(n):
    out = io.StringIO()
    run(ct.progress(n, output_stream=out), n)
    found = counts(out.getvalue())
    assert found[0] == (1, n)
    assert found[-1] == (n, n)
    assert len(set(found)) == len(found) <= 5


def test_a_terminal_has_one_line():
    out = Terminal()
    run(ct.progress(5000, "steps", output_stream=out), 5000)
    text = out.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    *_, last = text.split("\r")
    assert counts(last) == [(5000, 5000)]
    assert "\u2588" * 20 in last
    assert "ETA" not in last
    assert len(counts(text)) < 200  # not one for each step


def test_rate_and_remaining_time(monkeypatch):
    """A step each second, and the first one is where the clock starts."""
    out = io.StringIO()
    bar = ct.progress(8, output_stream=out)
    Clock(monkeypatch)
    for i in range(8):
        bar(np.int64(i))
    assert [re.sub(r"^\s*\d+% ", "", line) for line in out.getvalue().splitlines()] == [
        "1/8",
        "2/8 1/s ETA 0:06",
        "4/8 1/s ETA 0:04",
        "6/8 1/s ETA 0:02",
        "8/8 1/s in 7.0 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (0.2, "0:01"), (61, "1:01"), (3599.5, "1:00:00"), (90061, "25:01:01")]
)
def test_clock(seconds, text):
    assert progress_bar._clock(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(12345.6, "12,346/s"), (2.345, "2.35/s"), (0.02, "50 s each")])
def test_speed(rate, text):
    assert progress_bar._speed(rate) == text


def test_events_without_a_number_count():
    out = io.StringIO()
    bar = ct.progress(4, output_stream=out)
    f = jax.jit(lambda x: jax.lax.scan(lambda x, _: (ct.id_tap(bar, x) / 2, None), x, None, length=4))
    for _ in range(2):
        with ct.outfeed_receiver():
            f(1.0)
    assert counts(out.getvalue()) == 2 * [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_loop_that_ends_early_ends_its_line_and_begins_again():
    for stream, breaks in ((Terminal(), 2), (io.StringIO(), None)):
        bar = ct.progress(100, output_stream=stream)
        f = jax.jit(lambda x, bar=bar: jax.lax.while_loop(lambda x: x < 10, lambda x: ct.id_tap(bar, x) + 1, x))
        for _ in range(2):
            with ct.outfeed_receiver():
                f(0)
        found = counts(stream.getvalue())
        assert found.count((1, 100)) == 2
        assert found[-1] == (10, 100)
        assert stream.getvalue().endswith("\n")
        assert breaks in (None, stream.getvalue().count("\n"))


def test_an_error_in_the_program_ends_the_line():
    out = Terminal()
    bar = ct.progress(10, output_stream=out)

    def fail(x):
        raise ValueError("no")

    def step(i, x):
        x = ct.id_tap(bar, i, result=x)
        return jax.lax.cond(i == 4, lambda x: ct.call(fail, x, result_shape=x), lambda x: x, x)

    with pytest.raises(Exception, match="no"), ct.outfeed_receiver():
        jax.jit(lambda x: jax.lax.fori_loop(0, 10, step, x))(1.0).block_until_ready()
    ct.barrier_wait()
    text = out.getvalue()
    assert counts(text)[-1][0] <= 6
    assert text.endswith("\n")


def test_calls_from_a_loop_in_python_count_on():
    out = io.StringIO()
    bar = ct.progress(8, output_stream=out)
    f = jax.jit(lambda i, x: ct.id_tap(bar, i, result=x))
    for i in range(8):
        f(i, 0.0)
    ct.barrier_wait()
    assert counts(out.getvalue()) == [(1, 8), (2, 8), (4, 8), (6, 8), (8, 8)]


def test_without_jit():
    out = io.StringIO()
    bar = ct.progress(4, output_stream=out)
    for i in range(4):
        assert ct.id_tap(bar, i) == i
    ct.barrier_wait()
    assert counts(out.getvalue()) == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_attached_to_a_named_tap():
    out = io.StringIO()
    tap, bar = ct.Tap("step"), ct.progress(4, output_stream=out)
    f = jax.jit(lambda: jax.lax.fori_loop(0, 4, lambda i, x: ct.id_tap(tap, i, result=x), 0))
    f()
    with ct.outfeed_receiver(), tap.attached(bar):
        f()
        ct.barrier_wait()
    assert counts(out.getvalue()) == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("first", [True, False])
def test_nested_loops_share_a_line(first):
    out = Terminal()
    outer, inner = ct.progress(3, "outer", output_stream=out), ct.progress(4, "inner", output_stream=out)

    def body(k, x):
        if first:
            k = ct.id_tap(outer, k)
        x = jax.lax.fori_loop(0, 4, lambda i, x: ct.id_tap(inner, i, result=x) + k, x)
        return x if first else ct.id_tap(outer, k, result=x)

    with ct.outfeed_receiver():
        jax.jit(lambda: jax.lax.scan(lambda x, k: (body(k, x), None), 0, jnp.arange(3)))()
    text = out.getvalue()
    if first:  # else events of different bars do not wait for each other
        assert text.count("\n") == 1
        assert counts(text.split("\r")[-1]) == [(3, 3), (4, 4)]
    assert text.endswith("\n")
    assert {(3, 3), (4, 4)} <= set(counts(text))


def test_nested_loops_in_a_file_do_not_repeat_themselves():
    out = io.StringIO()
    outer, inner = ct.progress(3, "outer", output_stream=out), ct.progress(4, "inner", output_stream=out)
    for k in range(3):
        outer(np.int64(k))
        for i in range(4):
            inner(np.int64(i))
    text = out.getvalue()
    assert counts(text) == [(1, 3), (1, 4), (2, 4), (3, 4), (4, 4), (2, 3), (3, 3)]


def test_vmap_is_one_step_for_all_lanes():
    out = io.StringIO()
    bar = ct.progress(6, output_stream=out)
    seen = []

    def see(i, transforms):
        seen.append(i)

    def f(end):
        return jax.lax.while_loop(lambda i: i < end, lambda i: ct.id_tap(see, ct.id_tap(bar, i)) + 1, 0)

    with ct.outfeed_receiver():
        jax.jit(jax.vmap(f))(jnp.array([2, 6]))
    assert len(seen) == 6
    assert counts(out.getvalue()) == [(1, 6), (2, 6), (3, 6), (5, 6), (6, 6)]


def test_derivatives_do_not_count():
    out = io.StringIO()
    bar = ct.progress(4, output_stream=out)
    with ct.outfeed_receiver():
        jax.jit(jax.grad(lambda x: jax.lax.scan(lambda x, _: (ct.id_tap(bar, x) * x, None), x, None, length=4)[0]))(1.0)
    assert counts(out.getvalue()) == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_of_several_devices_the_slowest_counts():
    out = io.StringIO()
    bar = ct.progress(8, output_stream=out)
    a, b = jax.devices()[:2]
    done = []
    for i, device in [(0, a), (1, a), (2, b), (1, b), (5, a), (7, a), (3, b), (7, b), (0, b), (0, a), (1, a)]:
        if (i, device) != (1, b):
            bar(np.int64(i), device=device)
            done.append(bar.done)
    assert done == [1, 2, 2, 3, 3, 4, 8, 1, 1, 1]
    mesh = jax.make_mesh((4,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    again = ct.progress(4, output_stream=(second := io.StringIO()))
    f = jax.shard_map(
        lambda x: jax.lax.fori_loop(0, 4, lambda i, x: ct.id_tap(again, i, result=x), x),
        mesh=mesh, in_specs=spec, out_specs=spec,
    )  # fmt: skip
    with ct.outfeed_receiver():
        jax.jit(f)(jax.device_put(np.arange(4.0), jax.sharding.NamedSharding(mesh, spec)))
    assert counts(second.getvalue())[-1] == (4, 4)


@pytest.mark.parametrize("every", [3, 10, 1000])
def test_every(every):
    out = io.StringIO()
    bar = ct.progress(100, every=every, output_stream=out)
    for _ in range(2):
        before = ct.outfeed.stats()["emitted"]
        run(bar, 100)
        assert ct.outfeed.stats()["emitted"] - before <= 100 // every + 1
    assert counts(out.getvalue())[-1] == (100, 100)


def test_the_stream_is_that_of_the_time_of_drawing(capsys):
    run(ct.progress(2, "later"), 2)
    assert counts(capsys.readouterr().err) == [(1, 2), (2, 2)]


LOOPS = {
    "up": range(40),
    "from 1": range(1, 41),
    "longer than was said": range(5000),
    "longer, from 1": range(1, 5001),
    "resumed": range(17, 40),
    "resumed at the last step": range(39, 40),
    "down": range(39, -1, -1),
    "down to 1": range(40, 0, -1),
    "down, resumed": range(25, -1, -1),
    "every second": range(0, 40, 2),
    "from a large number": range(1000, 1040),
    "from a large number, longer": range(1000, 6000),
    "from a large number down": range(1039, 999, -1),
    "below zero": range(-40, 0),
    "below zero, down": range(-1, -41, -1),
    "far below zero, longer": range(-9000, -4000),
    "over zero": range(-20, 20),
    "over zero, longer": range(-20, 5000),
    "down, longer": range(39, -5000, -1),
}


def drawn(bar, loops):
    for numbers in loops:
        for i in numbers:
            bar(np.int64(i))
    bar.settle()


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_whatever_the_numbers_are_there_are_few_lines_that_end_at_all_steps(loop):
    out = io.StringIO()
    drawn(ct.progress(40, output_stream=out), [loop])
    found = counts(out.getvalue())
    assert len(found) <= 6
    assert found == sorted(set(found))  # it only grows
    assert found[-1] == ((39, 40) if loop == LOOPS["every second"] else (40, 40))
    # Of a loop that does not start at 0 the second step tells which way it goes.
    resumed = 40 - len(loop) if len(loop) < 40 and loop != LOOPS["every second"] else loop[0] == 1
    assert found[0] == (min(40, resumed + (1 if loop[0] == 0 else 2)), 40)
    terminal = Terminal()
    drawn(ct.progress(40, output_stream=terminal), [loop])
    assert terminal.getvalue().count("\n") == 1
    assert counts(terminal.getvalue())[-1] == found[-1]


@pytest.mark.parametrize("loop", [loop for loop in LOOPS.values() if len(loop) > 1])
def test_loops_of_any_numbers_inside_of_another_one_begin_again(loop):
    out = io.StringIO()
    outer, inner = ct.progress(10, "outer", output_stream=out), ct.progress(40, "inner", output_stream=out)
    for k in range(10):
        outer(np.int64(k))
        for i in loop:
            inner(np.int64(i))
            assert 1 <= inner.done <= 40
        assert inner.done >= 39
    outer.settle()
    inner.settle()
    assert len(out.getvalue().splitlines()) < 16


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("first", [39, 40, 25])
def test_a_compiled_loop_that_runs_downwards(first, every):
    out = io.StringIO()
    bar = ct.progress(40, every=every, output_stream=out)
    end = first // 40  # a loop from 40 ends at 1
    f = jax.jit(lambda: jax.lax.while_loop(lambda i: i >= end, lambda i: ct.id_tap(bar, i) - 1, first))
    for _ in range(2):
        with ct.outfeed_receiver():
            assert f() == end - 1
    found = counts(out.getvalue())
    half = found.index((40, 40)) + 1
    for part in (found[:half], found[half:]):
        assert part == sorted(set(part))
        assert len(part) <= 5
        assert part[-1] == (40, 40)
        # The second event; that of the second run depends on where the first one left off.
        assert abs(part[0][0] - (15 if first == 25 else 1) - every) < every
    assert every > 1 or found[:half] == found[half:]


def test_a_loop_that_goes_on_after_a_break_has_the_rate_of_what_came_then(monkeypatch):
    out = io.StringIO()
    bar = ct.progress(8, output_stream=out)
    clock = Clock(monkeypatch)
    drawn(bar, [range(4)])
    clock.now += 1000.0
    drawn(bar, [range(4, 8)])
    assert re.sub(r"^\s*\d+% ", "", out.getvalue().splitlines()[-1]) == "8/8 1/s in 3.0 s"


def test_numbers_in_no_order_do_not_fill_the_screen():
    out = io.StringIO()
    bar = ct.progress(40, output_stream=out)
    drawn(bar, [np.random.default_rng(0).integers(0, 40, 3000)])
    assert len(out.getvalue().splitlines()) < 300


def test_a_stream_that_is_closed_is_told_once():
    out = io.StringIO()
    bar = ct.progress(3, output_stream=out)
    out.close()
    with pytest.raises(ct.CallbackException) as caught:
        run(bar, 3)
    assert len(caught.value.exceptions) == 1
    run(bar, 3)


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "3"])
def test_wrong_numbers(n):
    with pytest.raises(ValueError, match="positive number of steps"):
        ct.progress(n)
    with pytest.raises(TypeError, match="label"):
        ct.progress(1, 3)
    with pytest.raises(ValueError, match="every"):
        ct.progress(1, every=0)
