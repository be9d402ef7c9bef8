"""Taps under every transformation, against the tables of docs/transformations.md."""

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ceedtap as ct

DOCUMENT = Path(__file__).parent.parent / "docs" / "transformations.md"

# -- the tables ------------------------------------------------------------------------------------------------------


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_tables():
    """The rows of all tables: program -> column -> cell."""
    rows = {}
    columns = None
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            columns = None
        elif columns is None:
            first, *columns = [name.replace("`", "") for name in cells(line)]
        elif first != "program":
            continue
        elif not line.startswith("|---"):
            program, *events = cells(line)
            program = program.replace("`", "")
            assert program not in rows, f"{program} has two rows"
            rows[program] = dict(zip(columns, events, strict=True))
    return rows


def read_event(text):
    value, marks = re.fullmatch(r"(.*?)(?: \((.*)\))?", text).groups()
    return canonical(json.loads(value)), tuple(marks.split(", ")) if marks else ()


def read_cell(text):
    """The events, and whether there may be fewer."""
    fewer = text.startswith("at most: ")
    text = text.removeprefix("at most: ")
    return [] if text == "none" else [read_event(event) for event in text.split("; ")], fewer


def canonical(value):
    """Something hashable that equal arrays share."""
    return str(np.asarray(value, float).tolist())


ROWS = read_tables()
COLUMNS = {
    ("used", "stateful"): "result used",
    ("unused", "stateful"): "unused or result=",
    ("result", "stateful"): "unused or result=",
    ("used", "stateless"): "stateful=False, used",
    ("unused", "stateless"): "stateful=False, unused",
}

# -- taps ------------------------------------------------------------------------------------------------------------


class Recorder:
    """A consumer that keeps events as the tables show them."""

    def __init__(self):
        self.events = []

    def __call__(self, x, transforms=()):
        value, axes = np.asarray(x), 0
        for name, parameters in reversed(transforms):  # the outermost first
            if name == "batch":
                (dim,) = parameters["batch_dims"]
                value = np.moveaxis(value, axes + dim, axes)
                axes += 1
            else:
                assert parameters == {}
        self.events.append((canonical(value), tuple(name for name, _ in transforms)))


def make_tap(recorder, use, **options):
    if use == "used":
        return lambda x: ct.id_tap(recorder, x, **options)
    if use == "result":
        return lambda x: ct.id_tap(recorder, x, result=x, **options)

    def unused(x):
        ct.id_tap(recorder, x, **options)
        return x

    return unused


# -- programs: each takes a tap and returns a function without arguments ---------------------------------------------

PROGRAMS = {}


def program(name):
    def register(make):
        PROGRAMS[name] = make
        return make

    return register


def square(tap):
    def g(x):
        y = tap(x * x)
        return y * y

    return g


def simple(name, run):
    """A program that runs something with the function `g` of the document."""
    PROGRAMS[name] = lambda tap: lambda: run(square(tap))


def twice(linear):
    return linear(1.0), linear(2.0)


def total(f):
    return lambda x: jnp.sum(f(x))


PAIR = np.array([1.0, 2.0])
ONES = np.ones(2)

simple("g(3)", lambda g: g(3.0))
simple("jit(g)(3)", lambda g: jax.jit(g)(3.0))
simple("jit(jit(g))(3)", lambda g: jax.jit(jax.jit(g))(3.0))
simple("jvp(g) at 3, tangent 1", lambda g: jax.jvp(g, (3.0,), (1.0,)))
simple("linearize(g) at 3", lambda g: jax.linearize(g, 3.0)[0])
simple("linearize(g), its linear function at 1 and 2", lambda g: twice(jax.linearize(g, 3.0)[1]))
simple("vjp(g) at 3", lambda g: jax.vjp(g, 3.0)[0])
simple("vjp(g), its linear function at 1 and 2", lambda g: twice(jax.vjp(g, 3.0)[1]))
simple("grad(g)(3)", lambda g: jax.grad(g)(3.0))
simple("grad(jit(g))(3)", lambda g: jax.grad(jax.jit(g))(3.0))
simple("grad(grad(g))(3)", lambda g: jax.grad(jax.grad(g))(3.0))
simple("jvp(grad(g)) at 3", lambda g: jax.jvp(jax.grad(g), (3.0,), (1.0,)))
simple("grad(jvp(g))(3)", lambda g: jax.grad(lambda x: jax.jvp(g, (x,), (1.0,))[1])(3.0))
simple("jacfwd(g)([1, 2])", lambda g: jax.jacfwd(g)(PAIR))
simple("jacrev(g)([1, 2])", lambda g: jax.jacrev(g)(PAIR))
simple("hessian(sum(g))([1, 2])", lambda g: jax.hessian(total(g))(PAIR))

simple("vmap(g)([1, 2])", lambda g: jax.vmap(g)(PAIR))
simple("jit(vmap(g))([1, 2])", lambda g: jax.jit(jax.vmap(g))(PAIR))
simple("vmap(jit(g))([1, 2])", lambda g: jax.vmap(jax.jit(g))(PAIR))
simple("vmap(vmap(g))([[1, 2], [3, 4]])", lambda g: jax.vmap(jax.vmap(g))(np.array([[1.0, 2.0], [3.0, 4.0]])))
simple("vmap of a tap of 9, the same in all lanes", lambda g: jax.vmap(lambda x: x + g(3.0))(PAIR))
simple("vmap(jvp(g)) at [1, 2]", lambda g: jax.vmap(lambda x, t: jax.jvp(g, (x,), (t,)))(PAIR, ONES))
simple("jvp(vmap(g)) at [1, 2]", lambda g: jax.jvp(jax.vmap(g), (PAIR,), (ONES,)))
simple(
    "vmap(linearize(g)), its linear function at 1", lambda g: jax.vmap(lambda x: jax.linearize(g, x)[1](x / x))(PAIR)
)
simple("linearize(vmap(g)), its linear function at [1, 1]", lambda g: jax.linearize(jax.vmap(g), PAIR)[1](ONES))
simple("vmap(vjp(g)), its linear function at 1", lambda g: jax.vmap(lambda x: jax.vjp(g, x)[1](x / x))(PAIR))
simple("vmap(grad(g))([1, 2])", lambda g: jax.vmap(jax.grad(g))(PAIR))
simple("grad(sum(vmap(g)))([1, 2])", lambda g: jax.grad(total(jax.vmap(g)))(PAIR))
simple("vmap(grad(grad(g)))([1, 2])", lambda g: jax.vmap(jax.grad(jax.grad(g)))(PAIR))
simple("vmap(jacfwd(g))([1, 2])", lambda g: jax.vmap(jax.jacfwd(g))(PAIR))
simple("vmap(jacrev(g))([1, 2])", lambda g: jax.vmap(jax.jacrev(g))(PAIR))
simple("vmap(hessian(g))([1, 2])", lambda g: jax.vmap(jax.hessian(g))(PAIR))
simple("jacfwd(vmap(g))([1, 2])", lambda g: jax.jacfwd(jax.vmap(g))(PAIR))
simple("jacrev(vmap(g))([1, 2])", lambda g: jax.jacrev(jax.vmap(g))(PAIR))


def powers(tap, unroll=1):
    return lambda x: lax.scan(lambda c, _: (tap(c * x), None), jnp.ones_like(x), None, 3, unroll=unroll)[0]


def powers_by_fori(tap):
    return lambda x: lax.fori_loop(0, 3, lambda _, c: tap(c * x), jnp.ones_like(x))


def powers_by_while(tap):
    return lambda x: lax.while_loop(lambda c: c < 8, lambda c: tap(c * x), jnp.ones_like(x))


def powers_by_while_tapped_predicate(tap):
    return lambda x: lax.while_loop(lambda c: tap(c) < 8, lambda c: c * x, jnp.ones_like(x))


def sum_of_squares(tap):
    return lambda x: lax.scan(lambda c, _: (c + tap(x * x), None), 0.0, None, 3)[0]


def branches(tap):
    return lambda p, x: lax.cond(p, lambda x: tap(x * x), lambda x: tap(-x), x)


program("scan, 3 steps")(lambda tap: lambda: powers(tap)(2.0))
program("jvp(scan)")(lambda tap: lambda: jax.jvp(powers(tap), (2.0,), (1.0,)))
program("grad(scan)")(lambda tap: lambda: jax.grad(powers(tap))(2.0))
program("scan, 3 steps, unroll=3")(lambda tap: lambda: powers(tap, 3)(2.0))
program("grad(scan), 3 steps, unroll=2")(lambda tap: lambda: jax.grad(powers(tap, 2))(2.0))
program("scan, tap of x * x, the same in all steps")(lambda tap: lambda: sum_of_squares(tap)(2.0))
program("grad(scan), tap of x * x, the same in all steps")(lambda tap: lambda: jax.grad(sum_of_squares(tap))(2.0))
program("vmap(scan), x = [1, 2]")(lambda tap: lambda: jax.vmap(powers(tap))(PAIR))
program("scan of vmap(g) over [[1, 2], [3, 4]]")(
    lambda tap: lambda: lax.scan(lambda c, x: (c + jax.vmap(square(tap))(x), None), ONES, 2 * ONES + [[-1, 0], [1, 2]])
)
program("fori_loop, 3 steps")(lambda tap: lambda: powers_by_fori(tap)(2.0))
program("grad(fori_loop)")(lambda tap: lambda: jax.grad(powers_by_fori(tap))(2.0))
program("while_loop while the carry is below 8")(lambda tap: lambda: powers_by_while(tap)(2.0))
program("while_loop, tap in the predicate")(lambda tap: lambda: powers_by_while_tapped_predicate(tap)(2.0))
program("jvp(while_loop)")(lambda tap: lambda: jax.jvp(powers_by_while(tap), (2.0,), (1.0,)))
program("jvp(while_loop), tap in the predicate")(
    lambda tap: lambda: jax.jvp(powers_by_while_tapped_predicate(tap), (lax.optimization_barrier(2.0),), (1.0,))
)
program("linearize(while_loop), its linear function at 1 and 2")(
    lambda tap: lambda: twice(jax.linearize(powers_by_while(tap), 2.0)[1])
)
program("cond(True), taps in both branches")(lambda tap: lambda: branches(tap)(True, 3.0))
program("cond(False), taps in both branches")(lambda tap: lambda: branches(tap)(False, 3.0))
program("grad(cond(True))")(lambda tap: lambda: jax.grad(branches(tap), 1)(True, 3.0))
program("switch(1), taps in three branches")(
    lambda tap: lambda: lax.switch(1, [lambda x, k=k: tap(k * x) for k in (1, 2, 3)], 3.0)
)
program("map(g) over [1, 2, 3]")(lambda tap: lambda: lax.map(square(tap), np.array([1.0, 2.0, 3.0])))
program("map(g) over [1, 2, 3], batch_size=2")(
    lambda tap: lambda: lax.map(square(tap), np.array([1.0, 2.0, 3.0]), batch_size=2)
)
program("associative_scan(add) over [1, 2, 3, 4]")(
    lambda tap: lambda: lax.associative_scan(lambda a, b: tap(a + b), np.array([1.0, 2.0, 3.0, 4.0]))
)

program("vmap(cond), the predicate is True in all lanes together, x = [1, 2]")(
    lambda tap: lambda: jax.vmap(branches(tap), (None, 0))(True, PAIR)
)
program("vmap(cond), the predicate differs between lanes, x = [1, 2]")(
    lambda tap: lambda: jax.vmap(branches(tap))(np.array([True, False]), PAIR)
)
program("vmap(while_loop) from 0 by 1, lanes end at [1, 3]")(
    lambda tap: lambda: jax.vmap(lambda n: lax.while_loop(lambda c: c < n, lambda c: tap(c + 1), 0))(np.array([1, 3]))
)
program("vmap(while_loop), tap in the predicate")(
    lambda tap: lambda: jax.vmap(lambda n: lax.while_loop(lambda c: tap(c) < n, lambda c: c + 1, 0))(np.array([1, 3]))
)

POLICIES = {
    name: {
        "save_any_names_but_these": lambda make: make("y"),
        "save_anything_except_these_names": lambda make: make("y"),
        "save_only_these_names": lambda make: make("y"),
        "save_from_both_policies": lambda make: make(
            jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names("y")
        ),
        "save_and_offload_only_these_names": lambda make: make(
            names_which_can_be_saved=["y"], names_which_can_be_offloaded=[],
            offload_src="device", offload_dst="pinned_host",
        ),
        "offload_dot_with_no_batch_dims": lambda make: make("device", "pinned_host"),
    }.get(name, lambda policy: policy)(getattr(jax.checkpoint_policies, name))
    for name in dir(jax.checkpoint_policies)
    if not name.startswith("_")
}  # fmt: skip


def named_square(tap):
    from jax.ad_checkpoint import checkpoint_name

    return square(lambda y: tap(checkpoint_name(y, "y")))


def with_policies(name, run):
    """One program for each policy; the row is the same for all."""
    for policy_name, policy in POLICIES.items():
        row = f"{name}, every policy"
        PROGRAMS[f"{row}: {policy_name}"] = lambda tap, policy=policy: (
            lambda: run(partial(jax.checkpoint, policy=policy), tap)
        )


with_policies("checkpoint(g)(3)", lambda checkpoint, tap: checkpoint(named_square(tap))(3.0))
with_policies("jvp(checkpoint(g))", lambda checkpoint, tap: jax.jvp(checkpoint(named_square(tap)), (3.0,), (1.0,)))
with_policies("grad(checkpoint(g))(3)", lambda checkpoint, tap: jax.grad(checkpoint(named_square(tap)))(3.0))
program("linearize(checkpoint(g)) whose result is dropped, its linear function at 1 and 2")(
    lambda tap: lambda: twice(jax.linearize(lambda x: (jax.checkpoint(square(tap))(x), x)[1], 3.0)[1])
)
with_policies("grad(checkpoint(scan))", lambda checkpoint, tap: jax.grad(checkpoint(powers(tap)))(2.0))


def custom_jvp(tap_result=lambda x: x, tap_primal=lambda x: x, tap_tangent=lambda x: x):
    @jax.custom_jvp
    def f(x):
        return tap_result(x * x)

    @f.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return tap_primal(x * x), tap_tangent(2 * x * t)

    return f


def custom_vjp(tap):
    @jax.custom_vjp
    def f(x):
        return tap(x * x)

    f.defvjp(lambda x: (tap(x * x), x), lambda x, ct: (tap(2 * x * ct),))
    return f


program("custom_jvp, called")(lambda tap: lambda: custom_jvp(tap_result=tap)(3.0))
program("jvp(custom_jvp), the rule taps its primal result")(
    lambda tap: lambda: jax.jvp(custom_jvp(tap_primal=tap), (3.0,), (1.0,))
)
program("jvp(custom_jvp), the rule taps its tangent")(
    lambda tap: lambda: jax.jvp(custom_jvp(tap_tangent=tap), (3.0,), (1.0,))
)
program("grad(custom_jvp), the rule taps its tangent")(lambda tap: lambda: jax.grad(custom_jvp(tap_tangent=tap))(3.0))
program("custom_vjp, called")(lambda tap: lambda: custom_vjp(tap)(3.0))
program("grad(custom_vjp), taps in both rules")(lambda tap: lambda: jax.grad(custom_vjp(tap))(3.0))
program("vmap(grad(custom_vjp)), x = [1, 2]")(lambda tap: lambda: jax.vmap(jax.grad(custom_vjp(tap)))(PAIR))
program("custom_linear_solve(2 x = 6), tap of the solution")(
    lambda tap: lambda: lax.custom_linear_solve(lambda x: 2 * x, 6.0, lambda _, b: tap(b / 2))
)


def closed_call(f):
    def call(x):
        closed_call_p = jax.extend.core.primitives.closed_call_p
        params = closed_call_p.get_bind_params({"call_jaxpr": jax.make_jaxpr(f)(x)})
        (out,) = closed_call_p.bind(x, **params)
        return out

    return call


program("closed_call(g)(3)")(lambda tap: lambda: closed_call(square(tap))(3.0))
program("grad(closed_call(g))(3)")(lambda tap: lambda: jax.grad(closed_call(square(tap)))(3.0))


FLAT = Mesh(np.array(jax.devices()[:4]), ("i",))
SQUARE = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))


def sharded(f):
    return jax.shard_map(f, mesh=FLAT, in_specs=P("i"), out_specs=P("i"))


FOUR = np.array([1.0, 2.0, 3.0, 4.0])
program("shard_map(g) over 4 devices, [1, 2, 3, 4]")(lambda tap: lambda: jax.jit(sharded(square(tap)))(FOUR))
program("grad(shard_map(g)) over 4 devices")(lambda tap: lambda: jax.jit(jax.grad(total(sharded(square(tap)))))(FOUR))

program("shard_map(g) over 4 devices, the same in all")(
    lambda tap: (
        lambda: jax.jit(jax.shard_map(square(tap), mesh=FLAT, in_specs=P(), out_specs=P(), check_vma=False))(
            np.array([3.0])
        )
    )
)


def steps(tap):
    """Two steps from 1 that multiply by x + 1 and 3; the products are tapped."""
    return lambda x: lax.scan(lambda c, k: (tap(c * k),) * 2, jnp.ones_like(x), jnp.stack([x + 1, 0 * x + 3]))[0]


program("shard_map(scan) over 4 devices, 2 steps")(lambda tap: lambda: jax.jit(sharded(steps(tap)))(FOUR))
program("pmap(g) over 4 devices")(lambda tap: lambda: jax.pmap(square(tap))(FOUR))
program("grad(pmap(g)) over 4 devices")(lambda tap: lambda: jax.grad(total(jax.pmap(square(tap))))(FOUR))


def spread(f, *spec, mesh=FLAT):
    """A program that XLA splits: it starts with an array on four devices."""
    place = NamedSharding(mesh, P(*spec))
    return jax.jit(lambda x: f(lax.with_sharding_constraint(x, place)))


program("jit(g) of an array on 4 devices, [1, 2, 3, 4]")(lambda tap: lambda: spread(square(tap), "i")(FOUR))
program("jit(g) of an array on 2 devices with a copy of each half")(
    lambda tap: lambda: spread(square(tap), "a", mesh=SQUARE)(FOUR)
)
program("jit(g) of 3 on each of 4 devices")(lambda tap: lambda: spread(square(tap))(3.0))
program("jit(grad(g)) of an array on 4 devices")(lambda tap: lambda: spread(jax.grad(total(square(tap))), "i")(FOUR))
program("jit(vmap(g)) of an array on 4 devices")(lambda tap: lambda: spread(jax.vmap(square(tap)), "i")(FOUR))
program("jit(scan) of an array on 4 devices, 2 steps")(lambda tap: lambda: spread(steps(tap), "i")(FOUR))
program("jit(cond(True)) of an array on 4 devices")(
    lambda tap: lambda: spread(lambda x: lax.cond(x.sum() > 0, square(tap), lambda x: x, x), "i")(FOUR)
)
program("jit of a tap of the sum of an array on 4 devices")(
    lambda tap: lambda: spread(lambda x: tap(x.sum()), "i")(FOUR)
)

# -- tests -----------------------------------------------------------------------------------------------------------


def is_first_policy(name):
    """Rows for every policy have a dozen programs: not all are run in every way."""
    return ", every policy" not in name or name.endswith("nothing_saveable")


def program(name, *others):
    return pytest.param(name, *others, id=", ".join([name, *("jitted" if c else "as it is" for c in others)]))


def row_of(name):
    return ROWS[name.split(": ")[0]]


def events_of(make, use, compiled, **options):
    recorder = Recorder()
    run = make(make_tap(recorder, use, **options))
    with ct.outfeed_receiver(60):
        jax.block_until_ready((jax.jit(run) if compiled else run)())
    return recorder.events


def test_every_row_has_a_program_and_every_program_a_row():
    assert {name.split(": ")[0] for name in PROGRAMS} == set(ROWS)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        program(name, compiled)
        for name in PROGRAMS
        for compiled in (False, True)
        if not compiled or is_first_policy(name)
    ],
)
def test_events_are_those_of_the_table(name, compiled):
    row = row_of(name)
    for (use, state), column in COLUMNS.items():
        expected, fewer = read_cell(row["result used"] if row[column] == "=" else row[column])
        got = Counter(events_of(PROGRAMS[name], use, compiled, stateful=state == "stateful"))
        if fewer:
            assert got <= Counter(expected), (use, state)
        else:
            assert got == Counter(expected), (use, state)


@pytest.mark.parametrize("name", [program(name) for name in PROGRAMS if is_first_policy(name)])
def test_order_is_that_of_the_table(name):
    row = row_of(name)
    if row["ordered=True"] == "refused":
        with pytest.raises(NotImplementedError, match="predicate"):
            events_of(PROGRAMS[name], "used", compiled=True, ordered=True)
        return
    for use, column in (("used", "result used"), ("unused", "unused or result="), ("result", "unused or result=")):
        expected, _ = read_cell(row["result used"] if row[column] == "=" else row[column])
        got = events_of(PROGRAMS[name], use, compiled=True, ordered=True)
        if row["ordered=True"] == "any":
            got, expected = sorted(got), sorted(expected)
        elif row["ordered=True"] != "yes":
            expected, _ = read_cell(row["ordered=True"])
        assert got == expected, use


# -- without ordered=True, each tap's events in a loop have an order all the same -------------------------------------


def leaf_of_scan(tap, unroll):
    """The tap is a leaf of each step: nothing waits for it."""

    def step(c, _):
        tap(jnp.sum(c * c))
        return 0.5 * c, None

    return lambda x: jnp.sum(lax.scan(step, x, None, 4, unroll=unroll)[0])


def leaf_of_fori(tap, unroll):
    def step(_, c):
        tap(jnp.sum(c * c))
        return 0.5 * c

    return lambda x: jnp.sum(lax.fori_loop(0, 4, step, x, unroll=unroll))


def leaf_in_jit(tap, unroll):
    return leaf_of_scan(jax.jit(tap), unroll)


def leaf_in_loop(tap, unroll):
    return leaf_of_scan(lambda x: lax.scan(lambda c, _: (tap(c), None), x, None, 1)[0], unroll)


def leaf_in_branch(tap, unroll):
    return leaf_of_scan(lambda x: lax.cond(x > 0, tap, lambda x: x, x), unroll)


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, lambda f: jax.grad(jax.checkpoint(f))])
@pytest.mark.parametrize("loop", [leaf_of_scan, leaf_of_fori, leaf_in_jit, leaf_in_loop, leaf_in_branch])
@pytest.mark.parametrize("unroll", [1, 2, 3, True])
def test_steps_come_in_order_unrolled_or_not(transform, loop, unroll):
    recorder = Recorder()
    run = jax.jit(transform(loop(make_tap(recorder, "unused"), unroll)))
    for _ in range(3):
        recorder.events.clear()
        with ct.outfeed_receiver(60):
            run(np.full(8, 2.0))
        assert [value for value, _ in recorder.events] == [canonical(32.0 / 4**step) for step in range(4)]


# -- odeint chooses its steps, so the events are counted against an independent counter ------------------------------


@pytest.mark.parametrize("differentiate", [False, True], ids=["odeint", "grad(odeint)"])
def test_odeint_taps_every_evaluation_of_the_right_hand_side(differentiate):
    from jax.experimental.ode import odeint

    recorder, counted = Recorder(), []

    def solve(y0):
        def rhs(y, t):
            out = ct.id_tap(recorder, -y * t)
            jax.debug.callback(lambda _: counted.append(1), out)
            return out

        return odeint(rhs, y0, np.array([0.0, 1.0, 2.0]))[-1]

    with ct.outfeed_receiver(60):
        jax.block_until_ready(jax.grad(solve)(1.0) if differentiate else solve(1.0))
        jax.effects_barrier()
    marks = Counter(marks for _, marks in recorder.events)
    assert marks[()] == len(counted) > 10
    assert set(marks) == ({(), ("jvp", "transpose")} if differentiate else {()})
    assert marks[("jvp", "transpose")] < marks[()]


# -- the size of programs --------------------------------------------------------------------------------------------


def test_4096_lanes_are_one_event_and_a_program_of_the_same_size():
    recorder = Recorder()

    def lane(x):
        return lax.fori_loop(0, 3, lambda _, c: ct.id_tap(recorder, jnp.sin(c * x)), x)

    sizes, texts = [], []
    for lanes in (2, 4096):
        f = jax.jit(jax.vmap(jax.value_and_grad(lane)))
        x = jnp.linspace(0, 1, lanes)
        sizes.append(len(str(jax.make_jaxpr(f)(x)).splitlines()))
        texts.append(len(f.lower(x).as_text().splitlines()))
        recorder.events.clear()
        with ct.outfeed_receiver(60):
            jax.block_until_ready(f(x))
        assert Counter(marks for _, marks in recorder.events) == {("batch",): 3, ("jvp", "transpose", "batch"): 3}
    assert sizes[0] == sizes[1]
    assert texts[0] == texts[1]
