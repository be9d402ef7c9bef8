"""Random programs with taps: Python source in JAX's own words, from a seed.

A program is a function of one array. It applies transformations and control flow to functions that it defines, which do
the same. Every statement of it has a position, a path of numbers, and draws from a generator of its own, so a statement
can be left out and the rest stays as it is: that is how a failing program becomes small.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

Path = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a statement stands.

    Attributes:
        path: its position in the program.
        indent: spaces before it.
        current: the variable that it goes on from.
        shape: the shape of that variable, of what the function gets and returns.
        floats: variables that can be seen from here, with their shapes.
        ints: loop counters that can be seen from here.
        depth: how many functions deeper it may go.
        reverse: inside of a reverse derivative, which has no while loops.
        forward: inside of a forward derivative, which has no `custom_vjp`.
        lanes: inside of a `vmap`.
        taps: whether there may be taps.
        constants: the variables from outside of the innermost loop.
        plan: the transformations that come next.
    """

    path: Path
    indent: int
    current: str
    shape: tuple[int, ...]
    floats: tuple[tuple[str, tuple[int, ...]], ...]
    ints: tuple[str, ...] = ()
    depth: int = 3
    reverse: bool = False
    forward: bool = False
    lanes: bool = False
    taps: bool = True
    constants: tuple[tuple[str, tuple[int, ...]], ...] = ()
    plan: tuple[str, ...] = ()


@dataclass
class Tap:
    """What is known of a tap."""

    ordered: bool = False
    stateful: bool = True
    in_rule: bool = False


@dataclass
class Program:
    """A program.

    Attributes:
        source: defines `program`, in terms of `jax`, `lax`, `jnp`, `P`, `mesh` and ``tap(label, ...)``.
        shape: of its argument.
        taps: by label.
        ghosts: whether lanes of a `vmap` may disagree about a branch or a loop.
        devices: over how many devices it is mapped by `shard_map`, or 0.
        collective: whether shards communicate.
        step_by_step: whether it is to run without `jit` around it as well.
        paths: the positions of its statements.
    """

    source: str
    shape: tuple[int, ...]
    taps: dict[int, Tap]
    ghosts: bool
    devices: int
    collective: bool
    step_by_step: bool
    paths: list[Path]


POLICIES = ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
UNARY = ("jnp.sin({})", "jnp.cos({})", "jnp.tanh({})", "0.5 * {} + 0.25", "0.7 * {0} * {0}", "jnp.arctan({})")


@dataclass
class _Writer:
    seed: int
    skipped: Collection[Path]
    inlined: Collection[Path]
    lines: list[str] = field(default_factory=list)
    taps: dict[int, Tap] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    names: int = 0
    ghosts: bool = False
    collective: bool = False
    budget: int = 4
    flavour: str = "mixed"

    def rng(self, path: Path) -> random.Random:
        return random.Random(f"{self.seed}/{path}")

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def write(self, place: Place, line: str) -> None:
        self.lines.append(" " * place.indent + line)

    def assign(self, place: Place, expression: str, prefix: str = "x") -> str:
        name = self.name(prefix)
        self.write(place, f"{name} = {expression}")
        return name

    # -- functions ---------------------------------------------------------------------------------------------------

    def function(
        self, outer: Place, *, shape: tuple[int, ...] | None = None, before: tuple[str, ...] = (),
        after: tuple[str, ...] = (), closed: bool = False, loop: bool = False, branch: int = 0, result: str = "{}",
        **changes: bool,
    ) -> str:  # fmt: skip
        """Defines a function of a value, with integers before it and numbers after it; returns its name.

        A `closed` one sees nothing of what is around it. `result` is what it returns, made of its last value.
        """
        name = self.name("f")
        shape = outer.shape if shape is None else shape
        x = self.name("x")
        ints = tuple(self.name("i") for _ in before)
        numbers = tuple(self.name("s") for _ in after)
        self.write(outer, f"def {name}({', '.join([*ints, x, *numbers])}):")
        floats = () if closed else outer.floats
        place = replace(
            outer, path=(*outer.path, branch), indent=outer.indent + 4, current=x, shape=shape,
            floats=(*floats, *((s, ()) for s in numbers), (x, shape)), ints=(*(() if closed else outer.ints), *ints),
            depth=outer.depth - 1, constants=() if closed else outer.floats if loop else outer.constants, **changes,
        )  # fmt: skip
        last = self.body(place)
        self.write(place, f"return {result.format(last)}")
        return name

    def body(self, place: Place) -> str:
        """The statements of a function; returns the variable with its result."""
        rng = self.rng(place.path)
        count = rng.choice((1, 2, 2, 3))
        for number in range(count):
            here = replace(place, path=(*place.path, number))
            self.paths.append(here.path)
            if here.path in self.skipped:
                continue
            last = number == count - 1
            current = self.statement(here if last else replace(here, plan=()), self.rng(here.path), last)
            place = replace(place, current=current, floats=(*place.floats, (current, place.shape)))
        return place.current

    def statement(self, place: Place, rng: random.Random, last: bool) -> str:
        if place.plan:
            kinds = [kind for kind in self.constructs(place) if kind.__name__ == place.plan[0]]
            place = replace(place, plan=place.plan[1:])
            return (kinds or [self.jit])[0](place, rng)
        deeper = place.depth > 0 and self.budget > 0
        if deeper and rng.random() < (0.75 if last else 0.35):
            self.budget -= 1
            return rng.choice(self.constructs(place))(place, rng)
        if place.taps and rng.random() < 0.65:
            return self.tap(place, rng)
        return self.assign(place, self.arithmetic(place, rng))

    # -- values ------------------------------------------------------------------------------------------------------

    def other(self, place: Place, rng: random.Random, shape: tuple[int, ...]) -> str:
        """A variable that can be seen, made to be of a shape that goes with `shape`."""
        constant = place.constants and rng.random() < 0.6
        name, its = rng.choice(place.constants if constant else place.floats)
        return name if its in ((), shape) else f"jnp.sum({name})"

    def arithmetic(self, place: Place, rng: random.Random) -> str:
        x = place.current
        kind = rng.randrange(3)
        if kind == 0:
            return rng.choice(UNARY).format(x)
        if kind == 1 and place.ints:
            return f"{x} * (1 + 0.1 * {rng.choice(place.ints)})"
        return rng.choice(("{} * jnp.cos({})", "0.5 * {} + 0.3 * {}", "{} - 0.2 * {}")).format(
            x, self.other(place, rng, place.shape)
        )

    def tangent(self, place: Place, rng: random.Random, x: str) -> str:
        return rng.choice((f"jnp.ones_like({x})", f"jnp.cos({x})", f"jnp.full_like({x}, 0.5)"))

    # -- taps --------------------------------------------------------------------------------------------------------

    def tap(self, place: Place, rng: random.Random) -> str:
        label = len(self.taps)
        tap = self.taps[label] = Tap()
        x = place.current
        kind = rng.randrange(11)
        other = self.other(place, rng, place.shape)
        used = f"{x} + 0.1 * {{}}"  # how the tapped value is used
        if kind < 4:
            operand, used = x, "{}"
        elif kind == 4:
            operand = other
        elif kind == 5:
            operand = rng.choice(UNARY).format(other)
        elif kind == 6:
            operand = rng.choice(("2.5", "3", "jnp.float64(1.5)", "jnp.int32(7)", "True", "np.arange(2.0)"))
            used = f"{x} + 0.01 * jnp.sum({{}})"
        elif kind == 7 and place.ints:
            operand = rng.choice(place.ints)
        elif kind == 8:
            operand, used = f"{x}, {other}", "{0}[0] + 0.1 * {0}[1]"
        elif kind == 9:
            number = rng.choice((*place.ints, "4", "1.5"))
            operand, used = f"{{'a': {x}, 'n': {number}}}", "{0}['a'] + 0.1 * {0}['n']"
        else:
            operand, used = f"{x} * {other}", f"0.5 * {{}} + 0.1 * {x}"
        options = ""
        if rng.random() < 0.2:
            conditions = [f"jnp.sum({other}) > 0.3", "True", "False", f"{x} > 0.2"]
            conditions += [f"{i} != 1" for i in place.ints] * 2
            options += f", when={rng.choice(conditions)}"
        if rng.random() < 0.1:
            options += ", tangents=False"
        tap.ordered = self.flavour == "ordered" or (self.flavour == "mixed" and rng.random() < 0.4)
        if tap.ordered:
            options += ", ordered=True"
        use = rng.choice(("used", "used", "unused", "result"))
        if use != "result" and not tap.ordered and rng.random() < 0.1:
            options += ", stateful=False"
            tap.stateful = False
        call = f"tap({label}, {operand}{options})"
        if use == "unused":
            self.write(place, call)
            return x
        if use == "result":
            return self.assign(place, f"tap({label}, {operand}{options}, result={x})")
        t = self.assign(place, call, "t")
        return t if used == "{}" else self.assign(place, used.format(t))

    # -- transformations and control flow ----------------------------------------------------------------------------

    def constructs(self, place: Place) -> list[Callable[[Place, random.Random], str]]:
        kinds = [
            self.jit, self.jit, self.grad, self.grad, self.value_and_grad, self.jvp, self.vjp, self.linearize,
            self.vmap, self.vmap, self.vmap_of_elements, self.checkpoint, self.checkpoint, self.scan, self.scan,
            self.scan, self.fori, self.fori, self.cond, self.cond, self.switch, self.map, self.custom_jvp,
        ]  # fmt: skip
        if not place.reverse:
            kinds += [self.while_loop, self.while_loop]
        if not place.forward:
            kinds += [self.custom_vjp]
        return kinds

    def is_inlined(self, place: Place) -> bool:
        return place.path in self.inlined

    def jit(self, place: Place, rng: random.Random) -> str:
        f = self.function(place)
        return self.assign(place, f"{f if self.is_inlined(place) else f'jax.jit({f})'}({place.current})")

    def grad(self, place: Place, rng: random.Random) -> str:
        f = self.function(place, reverse=True, result="jnp.sum({})")
        if self.is_inlined(place):
            return self.assign(place, f"{f}({place.current}) + 0 * {place.current}")
        return self.assign(place, f"jax.grad({f})({place.current})")

    def value_and_grad(self, place: Place, rng: random.Random) -> str:
        f = self.function(place, reverse=True, result="jnp.sum({})")
        if self.is_inlined(place):
            return self.assign(place, f"{f}({place.current}) + 0 * {place.current}")
        v, g = self.name("v"), self.name("g")
        self.write(place, f"{v}, {g} = jax.value_and_grad({f})({place.current})")
        return self.assign(place, f"{g} + 0.1 * {v}")

    def jvp(self, place: Place, rng: random.Random) -> str:
        f = self.function(place, forward=True)
        x = place.current
        if self.is_inlined(place):
            return self.assign(place, f"{f}({x})")
        v, t = self.name("v"), self.name("d")
        primal, tangent = x, self.tangent(place, rng, x)
        if place.shape == () and rng.random() < 0.3:
            primal, tangent = rng.choice((("0.75", "1.0"), ("0.75", "0.5")))
        self.write(place, f"{v}, {t} = jax.jvp({f}, ({primal},), ({tangent},))")
        return self.assign(place, f"0.5 * {v} + 0.3 * {t} + 0.1 * {x}")

    def vjp(self, place: Place, rng: random.Random) -> str:
        f = self.function(place, reverse=True)
        x = place.current
        if self.is_inlined(place):
            return self.assign(place, f"{f}({x})")
        v, pull = self.name("v"), self.name("pull")
        self.write(place, f"{v}, {pull} = jax.vjp({f}, {x})")
        y = self.assign(place, f"{pull}({self.tangent(place, rng, v)})[0]")
        if rng.random() < 0.3:
            y = self.assign(place, f"{y} + 0.2 * {pull}(0.5 * {v})[0]")
        return self.assign(place, f"{y} + 0.1 * {v}") if rng.random() < 0.5 else y

    def linearize(self, place: Place, rng: random.Random) -> str:
        f = self.function(place, forward=True)
        x = place.current
        if self.is_inlined(place):
            return self.assign(place, f"{f}({x})")
        v, linear = self.name("v"), self.name("linear")
        self.write(place, f"{v}, {linear} = jax.linearize({f}, {x})")
        y = self.assign(place, f"{v} + 0.2 * {linear}({self.tangent(place, rng, x)})")
        return self.assign(place, f"{y} + 0.2 * {linear}(0.5 * {x})") if rng.random() < 0.3 else y

    def checkpoint(self, place: Place, rng: random.Random) -> str:
        f = self.function(place)
        policy = rng.choice(("", "", *(f", policy=jax.checkpoint_policies.{name}" for name in POLICIES)))
        if rng.random() < 0.2:
            policy += ", prevent_cse=False"
        return self.assign(place, f"{f if self.is_inlined(place) else f'jax.checkpoint({f}{policy})'}({place.current})")

    def stacked(self, place: Place, rng: random.Random, axis: int = 0) -> str:
        x = place.current
        items = rng.choice((f"{x}, 0.5 * {x}", f"{x}, 0.5 * {x}, {x} - 0.3", f"{x}"))
        return f"jnp.stack([{items}], axis={axis})"

    def vmap(self, place: Place, rng: random.Random) -> str:
        x, axis, out = place.current, 0, 0
        if place.shape:
            axis, out = rng.randrange(2), rng.randrange(2)
        two = rng.random() < 0.4
        f = self.function(place, lanes=True, after=("s",) if two else ())
        if self.is_inlined(place):
            return self.assign(place, f"{f}({x}{', 0.5' if two else ''})")
        mapped = self.stacked(place, rng, axis)
        second, second_axis = rng.choice((("0.5", None), ("jnp.float64(0.25)", None), (f"jnp.sum({x})", None)))
        arguments = f"{mapped}, {second}" if two else mapped
        axes = f"({axis}, {second_axis})" if two else f"{axis}"
        return self.assign(place, f"jnp.sum(jax.vmap({f}, in_axes={axes}, out_axes={out})({arguments}), axis={out})")

    def vmap_of_elements(self, place: Place, rng: random.Random) -> str:
        if not place.shape:
            return self.vmap(place, rng)
        f = self.function(place, shape=(), lanes=True)
        if self.is_inlined(place):
            return self.assign(place, f"{f}(jnp.sum({place.current})) + 0 * {place.current}")
        return self.assign(place, f"jax.vmap({f})({place.current})")

    def map(self, place: Place, rng: random.Random) -> str:
        batch = rng.choice((None, None, 1, 2))
        f = self.function(place, lanes=place.lanes or batch is not None, loop=True)
        if self.is_inlined(place):
            return self.assign(place, f"{f}({place.current})")
        options = "" if batch is None else f", batch_size={batch}"
        return self.assign(place, f"jnp.sum(lax.map({f}, {self.stacked(place, rng)}{options}), axis=0)")

    def scan(self, place: Place, rng: random.Random) -> str:
        x = place.current
        f = self.function(place, after=("s",), result="{0}, 0.1 * {0}", loop=True)
        if self.is_inlined(place):
            return self.assign(place, f"{f}({x}, 1.0)[0]")
        length = rng.choice((1, 2, 3, 3, 4, 0))
        c, ys = self.name("c"), self.name("ys")
        xs = rng.choice((f"0.5 * jnp.arange({length}.0)", f"jnp.full({length}, 0.3)"))
        unroll = rng.choice(("", "", ", unroll=2", ", unroll=3", ", unroll=True"))
        unroll += rng.choice(("", "", ", reverse=True"))
        self.write(place, f"{c}, {ys} = lax.scan({f}, {x}, {xs}{unroll})")
        return self.assign(place, f"{c} + jnp.sum({ys}, axis=0)") if rng.random() < 0.3 else c

    def fori(self, place: Place, rng: random.Random) -> str:
        f = self.function(place, before=("i",), loop=True)
        if self.is_inlined(place):
            return self.assign(place, f"{f}(0, {place.current})")
        start = rng.choice((0, 0, 1))
        unroll = rng.choice(("", "", "", ", unroll=2"))
        return self.assign(
            place, f"lax.fori_loop({start}, {start + rng.choice((1, 2, 3, 3, 0))}, {f}, {place.current}{unroll})"
        )

    def while_loop(self, place: Place, rng: random.Random) -> str:
        x, f = place.current, self.function(place, before=("i",), loop=True)
        if self.is_inlined(place):
            return self.assign(place, f"{f}(0, {x})")
        steps = rng.choice((0, 1, 2, 3))
        predicate = f"c[0] < {steps}"
        if rng.random() < 0.3:
            predicate = f"(c[0] < {steps}) & (jnp.sum(c[1]) < 2.0)"
            self.ghosts |= place.lanes
        elif place.taps and rng.random() < 0.5:
            # XLA drops unordered effects of predicates where it removes constants from the loop.
            label = len(self.taps)
            self.taps[label] = Tap(ordered=True)
            value, index = rng.choice((("c[0]", ""), ("c", "[0]")))
            predicate = f"tap({label}, {value}, ordered=True){index} < {steps}"
        return self.assign(
            place, f"lax.while_loop(lambda c: {predicate}, lambda c: (c[0] + 1, {f}(c[0], c[1])), (0, {x}))[1]"
        )

    def predicate(self, place: Place, rng: random.Random) -> str:
        kinds = ["True", "False", f"jnp.sum({self.other(place, rng, place.shape)}) > 0.4"]
        kinds += [f"{i} % 2 == 0" for i in place.ints] * 3
        predicate = rng.choice(kinds)
        self.ghosts |= place.lanes and ">" in predicate
        return predicate

    def cond(self, place: Place, rng: random.Random) -> str:
        f = self.function(place)
        g = self.function(place, branch=1)
        if self.is_inlined(place):
            return self.assign(place, f"{f}({place.current})")
        return self.assign(place, f"lax.cond({self.predicate(place, rng)}, {f}, {g}, {place.current})")

    def switch(self, place: Place, rng: random.Random) -> str:
        f = self.function(place)
        g = self.function(place, branch=1)
        if self.is_inlined(place):
            return self.assign(place, f"{f}({place.current})")
        index = rng.choice(("0", "2", *(f"{i} % 3" for i in place.ints)))
        return self.assign(place, f"lax.switch({index}, [{f}, {g}, jnp.sin], {place.current})")

    def rule_tap(self, place: Place, rng: random.Random, value: str) -> str:
        if not place.taps or rng.random() < 0.5:
            return value
        label = len(self.taps)
        self.taps[label] = Tap(in_rule=True, ordered=self.flavour == "ordered")
        return f"tap({label}, {value}{', ordered=True' if self.flavour == 'ordered' else ''})"

    def custom_jvp(self, place: Place, rng: random.Random) -> str:
        f = self.function(place, closed=True)
        if self.is_inlined(place):
            return self.assign(place, f"{f}({place.current})")
        g = self.assign(place, f"jax.custom_jvp({f})", "g")
        tangent = self.rule_tap(place, rng, "jnp.cos(p[0]) * t[0]")
        self.write(place, f"{g}.defjvp(lambda p, t: ({f}(p[0]), {tangent}))")
        return self.assign(place, f"{g}({place.current})")

    def custom_vjp(self, place: Place, rng: random.Random) -> str:
        f = self.function(place, closed=True)
        if self.is_inlined(place):
            return self.assign(place, f"{f}({place.current})")
        g = self.assign(place, f"jax.custom_vjp({f})", "g")
        cotangent = self.rule_tap(place, rng, "jnp.cos(r) * ct")
        self.write(place, f"{g}.defvjp(lambda x: ({f}(x), x), lambda r, ct: ({cotangent},))")
        return self.assign(place, f"{g}({place.current})")

    # -- devices -----------------------------------------------------------------------------------------------------

    def shards(self, place: Place, rng: random.Random, devices: int) -> str:
        """`shard_map` of a function with everything, in a transformation."""
        inner = replace(place, shape=(3,), taps=True)
        outer = rng.choice(("plain", "plain", "grad", "value_and_grad", "jvp", "vjp", "vmap", "checkpoint"))
        changes = {"reverse": outer in ("grad", "value_and_grad", "vjp"), "forward": outer == "jvp"}
        changes["lanes"] = outer == "vmap"
        if rng.random() < 0.2:
            self.collective = True
            result = "{0} + 0.1 * lax.psum({0}, 'i')"
        else:
            result = "{}"
        f = self.function(inner, closed=True, result=result, **changes)
        g = self.assign(place, f"jax.shard_map({f}, mesh=mesh({devices}), in_specs=P('i'), out_specs=P('i'))", "mapped")
        x = place.current
        return self.assign(place, {
            "plain": f"{g}({x})",
            "grad": f"jax.grad(lambda x: jnp.sum({g}(x)))({x})",
            "value_and_grad": f"jax.value_and_grad(lambda x: jnp.sum({g}(x)))({x})[1]",
            "jvp": f"jax.jvp({g}, ({x},), (jnp.cos({x}),))[1]",
            "vjp": f"jax.vjp({g}, {x})[1](jnp.cos({x}))[0]",
            "vmap": f"jnp.sum(jax.vmap({g})(jnp.stack([{x}, 0.5 * {x}])), axis=0)",
            "checkpoint": f"jax.checkpoint({g})({x})",
        }[outer if not self.is_inlined(place) else "plain"])  # fmt: skip


def _plan(rng: random.Random) -> tuple[str, ...]:
    """A derivative of a loop, and more: what is hard."""
    derivatives = ("grad", "grad", "value_and_grad", "jvp", "vjp", "linearize")
    others = ("checkpoint", "checkpoint", "jit", "vmap", "cond", "custom_jvp", "custom_vjp", "fori", "scan")
    loops = ("scan", "scan", "fori", "map", "while_loop")
    plan = [rng.choice(derivatives), *rng.choices(others, k=rng.randrange(3)), rng.choice(loops)]
    if rng.random() < 0.3:
        plan.insert(rng.randrange(len(plan) + 1), rng.choice(derivatives + others))
    return tuple(plan)


def random_program(seed: int, skipped: Collection[Path] = (), inlined: Collection[Path] = ()) -> Program:
    """The program of a seed, without the statements at some positions, and others without their transformation."""
    writer = _Writer(seed, skipped, inlined)
    rng = writer.rng(())
    writer.budget = rng.choice((1, 2, 2, 3, 3, 4, 5))
    writer.flavour = rng.choice(("unordered", "ordered", "mixed"))
    shape = rng.choice(((), (3,)))
    devices = rng.choice((1, 2, 4)) if rng.random() < 0.15 else 0
    step_by_step = not devices and rng.random() < 0.15
    if devices:
        shape = (3 * devices,)
    writer.lines.append("def program(x):")
    place = Place((0,), 4, "x", shape, (("x", shape),), depth=4, plan=_plan(rng) if rng.random() < 0.6 else ())
    if devices:
        writer.paths.append(place.path)
        result = writer.shards(place, rng, devices)
    else:
        result = writer.body(place)
    writer.write(place, f"return {result}")
    return Program(
        "\n".join(writer.lines) + "\n", shape, writer.taps, writer.ghosts, devices, writer.collective, step_by_step,
        writer.paths,
    )  # fmt: skip
