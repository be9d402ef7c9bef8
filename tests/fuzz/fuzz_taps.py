"""Random programs with taps: compiled, and by three interpreters in Python.

    python tests/fuzz/fuzz_taps.py --programs 10000
    python tests/fuzz/fuzz_taps.py --start 1234 --programs 1 --show

A program that differs is made small and printed with its seed. `tests/test_taps_fuzz.py` runs a fixed sample.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX starts; compiling is most of the time, and the programs are small
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tap_oracles import Event, Recorder, define, interpret, plain, unrolled, untapped
from tap_programs import Program, random_program

import ceedtap as ct

Key = tuple[Any, ...]


# -- comparing -------------------------------------------------------------------------------------------------------


def close(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and np.allclose(x, y, 1e-8, 1e-8, equal_nan=True) for x, y in zip(a, b, strict=True)
    )


def exact_key(event: Event) -> Key:
    """What must be the same in two events besides their values."""
    marks = tuple((name, tuple(sorted(parameters.items()))) for name, parameters in event.transforms)
    return event.label, marks, event.device, tuple((v.shape, str(v.dtype)) for v in event.values)


def source_key(event: Event) -> Key:
    return event.label, event.derivatives


def grouped(events: Sequence[Event], key: Callable[[Event], Key]) -> dict[Key, list[Event]]:
    groups: dict[Key, list[Event]] = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return groups


def differences(
    got: Sequence[Event],
    want: Sequence[Event],
    key: Callable[[Event], Key],
    values: Callable[[Event], Sequence[np.ndarray]],
    fewer: Callable[[Event], bool] = lambda _: False,
    more: Callable[[Event], bool] = lambda _: False,
) -> list[str]:
    """What two sets of events do not have in common; there may be `fewer` of the wanted ones, and `more` others."""
    found = []
    groups = grouped(got, key), grouped(want, key)
    for each in sorted({*groups[0], *groups[1]}, key=str):
        extra, missing = list(groups[0][each]), []
        for event in groups[1][each]:
            mine = values(event)
            match = next((i for i, other in enumerate(extra) if close(values(other), mine)), None)
            if match is not None:
                del extra[match]
            elif not fewer(event):
                missing.append(event)
        found += [f"came, not expected: {event}" for event in extra if not more(event)]
        found += [f"expected, did not come: {event}" for event in missing]
    return found


def first_difference(got: Sequence[Event], want: Sequence[Event], key: Callable[[Event], Any], values: Any) -> str:
    """Where two sequences of the same events differ, or nothing."""
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        if key(a) != key(b) or not close(values(a), values(b)):
            return f"event {number}: {a}, expected: {b}"
    return ""


def same(oracle: str, result: Any, want: Any) -> list[str]:
    """Whether the result is that of an oracle: taps change none."""
    return [] if np.allclose(result, want, 1e-8, 1e-8, equal_nan=True) else [f"{oracle} result: {result}, not {want}"]


def raw(event: Event) -> Sequence[np.ndarray]:
    return event.values


def by_device(events: Sequence[Event]) -> dict[int, list[Event]]:
    groups: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        groups[event.device].append(event)
    return groups


# -- one program -----------------------------------------------------------------------------------------------------


class NoProgram(Exception):
    """What was generated is no program: JAX refuses it without taps as well."""


def argument(program: Program) -> np.ndarray:
    return 0.3 + 0.2 * np.arange(np.prod(program.shape, dtype=int)).reshape(program.shape) % 1.0


def check(program: Program) -> list[str]:
    """What is wrong with the events of a program, one line each; the first word is the kind of the fault."""
    x = jax.numpy.asarray(argument(program))
    recorder = Recorder()
    tapped = define(program.source, tap=recorder.tap)
    try:
        traced = jax.jit(tapped).trace(x)
        with ct.outfeed_receiver(60):
            result = np.asarray(jax.block_until_ready(traced.lower().compile()(x)))
    except Exception as error:
        try:
            jax.make_jaxpr(define(program.source, tap=untapped))(x)
        except Exception as same:
            raise NoProgram(f"{type(same).__name__}: {same}") from same
        return [
            f"exception: {type(error).__name__}: {str(error).splitlines()[0]}",
            *traceback.format_exc().splitlines(),
        ]
    got = recorder.events
    if program.devices == 0:
        for event in got:
            event.device = 0
    try:
        found = compare(program, traced.jaxpr, x, got, result)
        if not found and program.step_by_step:
            recorder.events = []
            with ct.outfeed_receiver(60):
                tapped(x)
            found = [f"step by step: {line}" for line in stepped(program, recorder.events, got)]
        return found
    except Exception as error:
        return [f"oracle: {type(error).__name__}: {error}", *traceback.format_exc().splitlines()]


def compare(program: Program, jaxpr: Any, x: Any, got: list[Event], result: Any) -> list[str]:
    found = []
    events, outs = interpret(jaxpr, [x])
    found += same("jaxpr", result, outs[0])

    found += [f"jaxpr: {line}" for line in differences(got, events, exact_key, raw, lambda e: not is_exact(program, e))]
    if not found:
        found += orders(program, got, events)

    def exact(events: Sequence[Event]) -> list[Event]:
        return [event for event in events if is_exact(program, event)]

    if not program.ghosts and not program.collective:
        seen, want = plain(program.source, x)
        found += same("plain", result, want)
        mine, primals = (
            [e for e in exact(es) if not e.derivatives and not program.taps[e.label].in_rule] for es in (got, seen)
        )
        lines = differences(mine, primals, source_key, Event.collapsed)
        found += [f"plain: {line}" for line in lines]
        if not lines and not found:
            # Conditions of order that hold for primal values whatever became of the program.
            a, b = (by_device([e for e in es if program.taps[e.label].ordered]) for es in (mine, primals))
            for device in a:
                if line := first_difference(a[device], b[device], lambda e: e.label, Event.collapsed):
                    found.append(f"plain order: {line}")

        def is_zero(event: Event) -> bool:
            derivative = event.derivatives or program.taps[event.label].in_rule
            return bool(derivative) and all(np.all(np.abs(value) < 1e-12) for value in event.values)

        seen, want = unrolled(program.source, x)
        found += same("unrolled", result, want)
        both = [[e for e in exact(es) if not is_zero(e)] for es in (got, seen)]
        # A loop has the derivatives of all steps where it has those of one: cotangents of what depends on nothing.
        lines = differences(*both, source_key, Event.collapsed, more=lambda e: "transpose" in e.derivatives)
        found += [f"unrolled: {line}" for line in lines]
    return found


def is_exact(program: Program, event: Event) -> bool:
    """Whether the event must come: neither XLA nor JAX may leave it out, or compute it twice."""
    return program.taps[event.label].stateful


def stepped(program: Program, got: list[Event], compiled: list[Event]) -> list[str]:
    """What is wrong with the events where nothing is compiled as a whole: they are the same."""
    for event in got:
        event.device = 0
    both = [[e for e in es if is_exact(program, e)] for es in (got, compiled)]
    return differences(*both, exact_key, raw)


def orders(program: Program, got: list[Event], events: list[Event]) -> list[str]:
    """What is wrong with the order: of ordered taps on each device, and of each equation's events in its loops."""
    found = []
    got_on, want_on = by_device(got), by_device(events)
    for device, want in want_on.items():
        ordered = [[e for e in es if program.taps[e.label].ordered] for es in (got_on[device], want)]
        if line := first_difference(*ordered, exact_key, raw):
            found.append(f"order: {line}")
        groups = grouped(got_on[device], exact_key), grouped(want, exact_key)
        for key, group in groups[1].items():
            steps = groups[0][key]
            alone = len({e.site for e in group}) == 1 and len(steps) == len(group)
            if alone and (line := first_difference(steps, group, exact_key, raw)):
                found.append(f"steps: {line}")
    return found


# -- many ------------------------------------------------------------------------------------------------------------


def kinds(found: Sequence[str]) -> str:
    """What stays the same while a failing program becomes smaller."""
    first = found[0] if found else ""
    return first if first.startswith(("exception", "oracle")) else first.split(":")[0]


def checked(seed: int, skipped: Collection[Any] = (), inlined: Collection[Any] = ()) -> list[str]:
    program = random_program(seed, skipped, inlined)
    if not program.taps:
        return []
    try:
        return check(program)
    except NoProgram:
        return []


def shrink(seed: int, kind: str) -> tuple[set[Any], set[Any]]:
    """The statements that a program can do without, and those that can do without their transformation."""
    sets: tuple[set[Any], set[Any]] = set(), set()
    source = random_program(seed).source
    for chosen in sets:
        for path in random_program(seed).paths:
            chosen.add(path)
            smaller = random_program(seed, *sets).source
            if smaller != source and kinds(checked(seed, *sets)) == kind:
                source = smaller
            else:
                chosen.remove(path)
    return sets


def report(seed: int, found: list[str], small: bool = True) -> str:
    sets = shrink(seed, kinds(found)) if small else ((), ())
    found = checked(seed, *sets) or [*found, "(not every time)"]
    return "\n".join([f"seed {seed}", random_program(seed, *sets).source, *found, ""])


def run(seeds: Sequence[int], small: bool = True) -> tuple[list[str], Counter[str]]:
    """The reports of the programs that differ, the first few made small; and how many there were of each kind."""
    failed, counts = [], Counter[str]()
    for seed in seeds:
        program = random_program(seed)
        if not program.taps:
            counts["no taps"] += 1
            continue
        try:
            found = check(program)
        except NoProgram:
            counts["no program"] += 1
            continue
        counts["programs"] += 1
        counts["ghost lanes"] += program.ghosts
        counts["on devices"] += program.devices > 0
        if found:
            failed.append(report(seed, found, small and len(failed) < 3))
            print(failed[-1], flush=True)
    return failed, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--batch", type=int, default=100, help="programs between two lines of progress")
    parser.add_argument("--show", action="store_true", help="print every program")
    parser.add_argument("--whole", action="store_true", help="print what differs as it is, not made small")
    options = parser.parse_args()
    failed: list[str] = []
    counts = Counter[str]()
    end = options.start + options.programs
    begin = time.perf_counter()
    for start in range(options.start, end, options.batch):
        seeds = range(start, min(start + options.batch, end))
        if options.show:
            print(*(f"seed {seed}\n{random_program(seed).source}" for seed in seeds), sep="\n", flush=True)
        found, numbers = run(seeds, not options.whole)
        failed += found
        counts += numbers
        text = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        print(f"seeds to {seeds[-1]}, {time.perf_counter() - begin:.0f} s: {text}; {len(failed)} differ", flush=True)
        if (seeds[-1] + 1) // 500 != start // 500:  # seldom: the operations of interpreters are compiled as well
            jax.clear_caches()
    sys.exit(bool(failed))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("error")
    main()
