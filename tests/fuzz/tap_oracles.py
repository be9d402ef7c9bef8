"""Which events a program with taps must have, found in three ways without compiling it.

* :func:`interpret` evaluates the jaxpr that JAX made of a program, equation by equation: loops are loops of Python,
  shards are threads. It knows what JAX made of the program, and not whether that is right.
* :func:`unrolled` runs the source with loops and branches of Python, without `jit` and `checkpoint`; the derivatives
  and `vmap` are JAX's. It knows all events, except for derivatives that are zero because nothing depends on them.
* :func:`plain` runs the source without any transformation of JAX where there are taps: lanes and shards are loops, and
  derivatives are taken elsewhere. It knows the events of primal values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

import ceedtap as ct
from ceedtap import jax_compat, primitive


@dataclass
class Event:
    """What a consumer got, or should get.

    Attributes:
        label: of the tap.
        values: the leaves of what was tapped.
        transforms: as a consumer gets it.
        device: number of the device; -1 if unknown.
        site: the equations that lead to the tap, from the outside to the inside.
    """

    label: int
    values: list[np.ndarray]
    transforms: tuple[tuple[str, dict[str, Any]], ...] = ()
    device: int = 0
    site: tuple[int, ...] = ()

    @property
    def derivatives(self) -> tuple[str, ...]:
        """The names in `transforms` without those of `vmap`."""
        return tuple(name for name, _ in self.transforms if name != "batch")

    def collapsed(self) -> list[np.ndarray]:
        """The values with the lanes of the outermost `vmap` in front, and without axes of lanes that are all the same:
        JAX may or may not know that they are."""
        result = []
        for leaf, value in enumerate(self.values):
            axes = 0
            for name, parameters in reversed(self.transforms):
                if name == "batch" and parameters["batch_dims"][leaf] is not None:
                    value = np.moveaxis(value, axes + parameters["batch_dims"][leaf], axes)
                    axes += 1
            for axis in reversed(range(axes)):
                first = value.take([0], axis)
                if np.allclose(value, first, 1e-9, 1e-9):
                    value = value.take(0, axis)
            result.append(value)
        return result

    def __str__(self) -> str:
        names = ", ".join(f"{n}{p['batch_dims']}" if p else n for n, p in self.transforms)
        values = "; ".join(str(np.round(value.astype(float), 6).tolist()) for value in self.values)
        return f"tap {self.label}: {values}" + (f" ({names})" if names else "") + f" on {self.device}"


# -- the compiled program --------------------------------------------------------------------------------------------


def mesh(devices: int) -> jax.sharding.Mesh:
    """A mesh with one axis, `i`."""
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("i",))


def namespace(**others: Any) -> dict[str, Any]:
    """What the source of a program needs."""
    return {"jax": jax, "lax": lax, "jnp": jnp, "np": np, "P": PartitionSpec, "mesh": mesh, **others}


def define(source: str, **others: Any) -> Callable[[Any], Any]:
    """The function `program` of a source."""
    names = namespace(**others)
    exec(compile(source, "<program>", "exec"), names)
    program: Callable[[Any], Any] = names["program"]
    return program


def untapped(_: int, *args: Any, result: Any = None, **__: Any) -> Any:
    """In place of `tap`: a program without taps."""
    return result if result is not None else args[0] if len(args) == 1 else args


class Recorder:
    """Keeps the events of a program; `tap` is what the program uses."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def tap(self, label: int, *args: Any, **options: Any) -> Any:
        return ct.id_tap(self.record, *args, label=label, tap_with_device=True, **options)

    def record(self, *args: Any, label: int, device: Any, transforms: Any = ()) -> None:
        values = [np.array(leaf) for leaf in jax.tree.leaves(args)]
        self.events.append(Event(label, values, transforms, -1 if device is None else device.id))


# -- the jaxpr, equation by equation ---------------------------------------------------------------------------------


_TAPS = {primitive.tap_p, primitive.through_p}


class _Shards:
    """What the threads of shards share: values that they exchange."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=60)
        self.slots: list[Any] = [None] * count

    def sum(self, shard: int, value: Any) -> Any:
        self.slots[shard] = value
        self.barrier.wait()
        total = sum(self.slots[1:], self.slots[0])
        self.barrier.wait()
        return total


class _Interpreter:
    """Evaluates jaxprs on one device."""

    def __init__(self, device: int = 0, shards: _Shards | None = None) -> None:
        self.device = device
        self.shards = shards
        self.events: list[Event] = []
        self.site: tuple[int, ...] = ()

    def closed(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        return self.run(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), args)

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return jnp.asarray(atom.val, atom.aval.dtype) if jax_compat.is_literal(atom) else values[atom]

        outer = self.site
        for number, eqn in enumerate(jaxpr.eqns):
            self.site = (*outer, number)
            outs = self.equation(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, outs, strict=True))
        self.site = outer
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, args: list[Any]) -> list[Any]:
        rule = getattr(self, f"_{eqn.primitive.name}", None)
        if rule is not None:
            return rule(eqn, args)
        if any(jax_compat.contains(inner, _TAPS) for inner in jax_compat.sub_jaxprs(eqn)):
            raise NotImplementedError(f"a tap in `{eqn.primitive.name}`")
        # A shard here is an array on one device, so what the program says of shardings is left out.
        params = {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
        return list(outs) if eqn.primitive.multiple_results else [outs]

    # taps

    def _tap(self, eqn: Any, args: list[Any]) -> list[Any]:
        params = eqn.params
        count = len(args) - params["conditions"]  # the conditions come last
        if params["emits"] and all(np.any(np.asarray(condition)) for condition in args[count:]):
            transforms = tuple((name, dict(pairs)) for name, pairs in params["transforms"])
            label = params["binding"].kwargs["label"]
            self.events.append(Event(label, list(map(np.asarray, args[:count])), transforms, self.device, self.site))
        return []

    def _tap_through(self, eqn: Any, args: list[Any]) -> list[Any]:
        self._tap(eqn, args)
        return args[: len(eqn.outvars)]

    # functions

    def _jit(self, eqn: Any, args: list[Any]) -> list[Any]:
        return self.closed(eqn.params["jaxpr"], args)

    _pjit = _remat2 = _checkpoint = _jit

    def _closed_call(self, eqn: Any, args: list[Any]) -> list[Any]:
        return self.closed(eqn.params["call_jaxpr"], args)

    _core_call = _eval_jaxpr = _custom_jvp_call = _custom_vjp_call = _closed_call

    # control flow

    def _scan(self, eqn: Any, args: list[Any]) -> list[Any]:
        params = eqn.params
        num_consts, num_carry = jax_compat.scan_counts(eqn)
        consts, carry, xs = args[:num_consts], args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]
        steps = range(params["length"])
        slices = []
        for step in reversed(steps) if params["reverse"] else steps:
            outs = self.closed(params["jaxpr"], [*consts, *carry, *(x[step] for x in xs)])
            carry = outs[:num_carry]
            slices.append(outs[num_carry:])
        if params["reverse"]:
            slices.reverse()
        avals = [var.aval for var in eqn.outvars[num_carry:]]
        stacked = [
            jnp.stack([s[k] for s in slices]) if slices else jnp.zeros(aval.shape, aval.dtype)
            for k, aval in enumerate(avals)
        ]
        return [*carry, *stacked]

    def _while(self, eqn: Any, args: list[Any]) -> list[Any]:
        params = eqn.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond_consts, body_consts, carry = args[:first], args[first:second], args[second:]

        def goes_on() -> Any:
            (flag,) = self.closed(params["cond_jaxpr"], [*cond_consts, *carry])
            return np.asarray(flag)

        while np.any(flags := goes_on()):
            outer = self.site
            if flags.ndim:  # lanes: computed again in the body, to select those that go on
                self.site = (*outer, -1)
                flags = goes_on()
            self.site = outer
            new = self.closed(params["body_jaxpr"], [*body_consts, *carry])
            if flags.ndim:
                new = [
                    jnp.where(flags.reshape(flags.shape + (1,) * (n.ndim - flags.ndim)), n, old)
                    for n, old in zip(map(jnp.asarray, new), carry, strict=True)
                ]
            carry = new
        return carry

    def _cond(self, eqn: Any, args: list[Any]) -> list[Any]:
        branches = eqn.params["branches"]
        branch = min(max(int(args[0]), 0), len(branches) - 1)
        outer = self.site
        self.site = (*outer, branch)
        outs = self.closed(branches[branch], args[1:])
        self.site = outer
        return outs

    # devices

    def _shard_map(self, eqn: Any, args: list[Any]) -> list[Any]:
        params = eqn.params
        count = params["mesh"].size
        shards = _Shards(count)
        interpreters = [_Interpreter(i, shards) for i in range(count)]
        outs: list[Any] = [None] * count
        pieces = [
            np.split(np.asarray(arg), count, _axis(spec)) if _axis(spec) is not None else [arg] * count
            for arg, spec in zip(args, params["in_specs"], strict=True)
        ]

        def run(shard: int) -> None:
            try:
                interpreters[shard].site = self.site
                outs[shard] = interpreters[shard].closed(params["jaxpr"], [jnp.asarray(p[shard]) for p in pieces])
            except BaseException:
                shards.barrier.abort()
                raise

        _in_threads(run, count)
        for other in interpreters:
            self.events += other.events
        return [
            jnp.concatenate([o[k] for o in outs], _axis(spec)) if _axis(spec) is not None else outs[0][k]
            for k, spec in enumerate(params["out_specs"])
        ]

    def _psum(self, eqn: Any, args: list[Any]) -> list[Any]:
        assert self.shards is not None
        return [self.shards.sum(self.device, arg) for arg in args]

    _psum_invariant = _psum

    def _pvary(self, eqn: Any, args: list[Any]) -> list[Any]:
        return args

    _reshard = _pvary


def _axis(spec: Any) -> int | None:
    """Which axis of an array is split over the devices."""
    return next((axis for axis, name in enumerate(spec) if name), None)


def _in_threads(run: Callable[[int], None], count: int) -> None:
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])


def interpret(closed: Any, args: Sequence[Any]) -> tuple[list[Event], list[Any]]:
    """The events of a closed jaxpr in its order, device after device; and its results."""
    interpreter = _Interpreter()
    outs = interpreter.closed(closed, args)
    return interpreter.events, outs


# -- the source with loops and branches of Python --------------------------------------------------------------------


def _same(f: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return f


def _scan(f: Callable[..., Any], carry: Any, xs: Any, *, reverse: bool = False, **_: Any) -> tuple[Any, Any]:
    indices = range(len(xs))
    ys = []
    shape = jnp.shape(carry)
    for index in reversed(indices) if reverse else indices:
        carry, y = f(carry, xs[index])
        ys.append(y)
    return carry, jnp.stack(ys[::-1] if reverse else ys) if ys else jnp.zeros((0, *shape))


def _fori_loop(start: int, stop: int, f: Callable[..., Any], x: Any, **_: Any) -> Any:
    for i in range(start, stop):
        x = f(jnp.asarray(i), x)
    return x


def _while_loop(predicate: Callable[..., Any], f: Callable[..., Any], carry: Any) -> Any:
    carry = (jnp.asarray(carry[0]), carry[1])
    while bool(predicate(lax.stop_gradient(carry))):  # JAX has no derivatives of predicates
        carry = f(carry)
    return carry


def _cond(predicate: Any, f: Callable[..., Any], g: Callable[..., Any], x: Any) -> Any:
    return f(x) if bool(predicate) else g(x)


def _switch(index: Any, branches: Sequence[Callable[..., Any]], x: Any) -> Any:
    return branches[min(max(int(index), 0), len(branches) - 1)](x)


def _map(vmap: Callable[..., Any]) -> Callable[..., Any]:
    def mapped(f: Callable[..., Any], xs: Any, batch_size: int | None = None) -> Any:
        if batch_size is None:
            return jnp.stack([f(x) for x in xs])
        return jnp.concatenate([vmap(f)(xs[i : i + batch_size]) for i in range(0, len(xs), batch_size)])

    return mapped


def _split(f: Callable[..., Any], *, mesh: Any, **_: Any) -> Callable[..., Any]:
    return lambda x: jnp.concatenate([f(part) for part in jnp.split(x, mesh.size)])


def unrolled(source: str, x: Any) -> tuple[list[Event], Any]:
    """The events, in any order, and the result, with JAX's own derivatives and `vmap` of each single operation."""
    own_jax = {
        "jit": _same, "checkpoint": _same, "shard_map": _split, "grad": jax.grad, "jvp": jax.jvp, "vjp": jax.vjp,
        "value_and_grad": jax.value_and_grad, "linearize": jax.linearize, "vmap": jax.vmap,
        "custom_jvp": jax.custom_jvp, "custom_vjp": jax.custom_vjp, "checkpoint_policies": jax.checkpoint_policies,
    }  # fmt: skip
    own_lax = {"scan": _scan, "fori_loop": _fori_loop, "while_loop": _while_loop, "cond": _cond, "switch": _switch}
    recorder = Recorder()
    program = define(
        source, jax=SimpleNamespace(**own_jax), lax=SimpleNamespace(**own_lax, map=_map(jax.vmap)), tap=recorder.tap
    )
    with ct.outfeed_receiver(60):
        result = program(x)
    return recorder.events, result


# -- the source without transformations ------------------------------------------------------------------------------


@dataclass
class _Seen:
    """A tap that was reached, and whether its condition held."""

    event: Event
    held: bool


class _Plain:
    """JAX's functions, as they are seen by taps of primal values.

    A derivative evaluates its function once, with what is tapped recorded, and takes the derivative besides, with
    nothing recorded.
    """

    def __init__(self) -> None:
        self.seen: list[_Seen] = []
        self.recording = True
        self.device = 0

    @contextmanager
    def silently(self) -> Iterator[None]:
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def tap(self, label: int, *args: Any, result: Any = None, when: Any = True, **_: Any) -> Any:
        if self.recording:
            values = [np.asarray(leaf) for leaf in jax.tree.leaves(args)]
            self.seen.append(_Seen(Event(label, values, device=self.device), bool(np.any(when))))
        return untapped(label, *args, result=result)

    def once(self, f: Callable[..., Any], *args: Any) -> Any:
        return f(*args) if self.recording else None

    def grad(self, f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: self.value_and_grad(f)(x)[1]

    def value_and_grad(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any) -> Any:
            self.once(f, x)
            with self.silently():
                return jax.value_and_grad(f)(x)

        return run

    def jvp(self, f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
        self.once(f, *primals)
        with self.silently():
            return jax.jvp(f, tuple(map(jnp.asarray, primals)), tuple(map(jnp.asarray, tangents)))

    def vjp(self, f: Callable[..., Any], x: Any) -> Any:
        self.once(f, x)
        with self.silently():
            return jax.vjp(f, x)

    def linearize(self, f: Callable[..., Any], x: Any) -> Any:
        self.once(f, x)
        with self.silently():
            return jax.linearize(f, x)

    def vmap(self, f: Callable[..., Any], in_axes: Any = 0, out_axes: int = 0) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            size = next(jnp.shape(arg)[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)
            outer, lanes, outs = self.seen, [], []
            for lane in range(size):
                self.seen = []
                parts = [
                    jnp.asarray(arg) if axis is None else jnp.take(arg, lane, axis)
                    for arg, axis in zip(args, axes, strict=True)
                ]
                outs.append(f(*parts))
                lanes.append(self.seen)
            self.seen = outer + [_in_one(events) for events in zip(*lanes, strict=True)]
            return jnp.stack(outs, out_axes)

        return run

    def custom_jvp(self, f: Callable[..., Any]) -> Any:
        return _Custom(self, jax.custom_jvp(f), f)

    def custom_vjp(self, f: Callable[..., Any]) -> Any:
        return _Custom(self, jax.custom_vjp(f), f)

    def shard_map(self, f: Callable[..., Any], *, mesh: Any, **_: Any) -> Callable[..., Any]:
        def run(x: Any) -> Any:
            outs = []
            for self.device, part in enumerate(jnp.split(x, mesh.size)):
                outs.append(f(part))
            self.device = 0
            return jnp.concatenate(outs)

        return run


class _Custom:
    """A function with a rule for its derivative; its events are those of the function, the rule calls it."""

    def __init__(self, plain: _Plain, custom: Any, f: Callable[..., Any]) -> None:
        self.plain, self.custom, self.f = plain, custom, f

    def defjvp(self, rule: Any) -> None:
        self.custom.defjvp(rule)

    def defvjp(self, *rules: Any) -> None:
        self.custom.defvjp(*rules)

    def __call__(self, x: Any) -> Any:
        return self.f(x) if self.plain.recording else self.custom(x)


def _in_one(lanes: Sequence[_Seen]) -> _Seen:
    """The event of all lanes of a `vmap`, the lanes in front; a condition holds if it does in any."""
    first = lanes[0].event
    values = [np.stack(leaves) for leaves in zip(*(lane.event.values for lane in lanes), strict=True)]
    dims = {"batch_dims": (0,) * len(values)}
    # Inner lanes come after this axis, and `transforms` begins with the innermost.
    event = Event(first.label, values, (*first.transforms, ("batch", dims)), first.device)
    return _Seen(event, any(lane.held for lane in lanes))


def plain(source: str, x: Any) -> tuple[list[Event], Any]:
    """The events of primal values, in the order of the source; and the result."""
    own = _Plain()
    own_jax = {
        name: getattr(own, name)
        for name in (
            "grad",
            "value_and_grad",
            "jvp",
            "vjp",
            "linearize",
            "vmap",
            "custom_jvp",
            "custom_vjp",
            "shard_map",
        )
    }
    own_jax |= {"jit": _same, "checkpoint": _same, "checkpoint_policies": jax.checkpoint_policies}
    own_lax = {"scan": _scan, "fori_loop": _fori_loop, "while_loop": _while_loop, "cond": _cond, "switch": _switch}
    program = define(
        source, jax=SimpleNamespace(**own_jax), lax=SimpleNamespace(**own_lax, map=_map(own.vmap)), tap=own.tap
    )
    result = program(x)
    return [seen.event for seen in own.seen if seen.held], result
