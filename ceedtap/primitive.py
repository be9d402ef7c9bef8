"""The tap primitives and their rules; `id_tap` and `id_print`.

A tap is two equations in a program.

* `tap_p` emits an event. It has no outputs and a JAX effect; that makes it exact in every transformation. If it
  returned what it taps, JAX could drop, duplicate or save the event together with the value. Without `emits` it stands
  for an event that is emitted elsewhere (point_taps.py): only its derivatives are events.
* `through_p` is the identity on the tapped values and costs nothing in compiled code. It is there to be differentiated:
  its transpose emits the cotangents. With `emits` it emits by itself, has no effect, and is subject to data dependence
  like any other value: the flavour of ``stateful=False``.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat, partitioned
from ceedtap.arguments import Interned, specs, take_apart
from ceedtap.consumer import Consumer
from ceedtap.outfeed import OUTFEED
from ceedtap.routes import Binding, Transforms
from ceedtap.shards import Replicas, events_of

# -- primitives ------------------------------------------------------------------------------------------------------

tap_p = jax_compat.Primitive("tap")
tap_p.multiple_results = True
through_p = jax_compat.Primitive("tap_through")
through_p.multiple_results = True
jax_compat.keep_in_loops(through_p)


class TapEffect(jax_compat.Effect):
    """Keeps taps in a program whose results do not depend on them."""

    def __str__(self) -> str:
        return type(self).__name__

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


class OrderedTapEffect(TapEffect):
    """Besides, keeps them in the order of the program."""


jax_compat.allow_effect(TapEffect)
jax_compat.allow_effect(OrderedTapEffect, ordered=True)
_effects = {False: TapEffect(), True: OrderedTapEffect()}

# -- public functions ------------------------------------------------------------------------------------------------

_MISSING = object()


def _make_binding(func: Callable[..., Any], kwargs: dict[str, Any], *parts: Any) -> Binding:
    return Binding(func if isinstance(func, Consumer) else Consumer(func), kwargs, *parts)


_binding = Interned(_make_binding)


def id_tap(
    func: Callable[..., Any],
    *args: Any,
    result: Any = _MISSING,
    when: Any = None,
    tap_with_device: bool = False,
    tap_with_shard: bool = False,
    ordered: bool = False,
    stateful: bool = True,
    tangents: bool = True,
    replicas: Replicas = "first",
    **kwargs: Any,
) -> Any:
    """Calls ``func(*args, **kwargs)`` on the host with the values that `args` have when the program runs.

    Args:
        func: a function or a :class:`ceedtap.Consumer`, called on the receiver thread with NumPy arrays in place of
            the leaves of `args` (typed JAX keys in place of keys). What it returns is not used; what it raises is
            raised by :func:`ceedtap.barrier_wait` or at the end of :func:`ceedtap.outfeed_receiver`.
        args: one or more pytrees of arrays.
        result: what to return in place of `args`.
        when: a boolean, or an array of them, that the program computes: an event, of derivatives too, leaves only where
            it is true, or any of them; under `jax.vmap`, where it is true in any lane.
        tap_with_device: `func` also gets ``device=``, the `jax.Device` that ran the program.
        tap_with_shard: `func` also gets ``shard=``, a :class:`ceedtap.Shard`: which part of the arrays the event has.
        ordered: events arrive in the order of the program. Otherwise events that do not depend on each other may
            overtake each other.
        stateful: False selects data dependence. The tap has no JAX effect, which keeps JAX's fast dispatch of jitted
            functions (5 us in place of 50 us a call), and is dropped where its result is not used. The result must be
            used in place of `args`.
        tangents: whether derivatives are tapped as well.
        replicas: where a program is spread over devices by JAX (arrays with a `jax.sharding.NamedSharding`), each
            device's part of the arrays is an event. Several devices may have the same part: ``"first"``, one of them
            taps it; ``"all"``, each of them does.
        kwargs: passed on to `func`. JAX arrays among them are labels of the event: `func` gets the values that they
            have when the program runs, as NumPy arrays; they have no derivatives.

    Returns:
        `result` when given; else `args`, as it is when there is just one.

    Where the program was transformed, `func` also gets ``transforms=``, a tuple of pairs (name, parameters), the
    outermost transformation last:

    * `jax.vmap`: one event with the batched arrays and ``("batch", {"batch_dims": (0, None)})``, one axis or None for
      each leaf; where labels are batched as well, with ``"label_dims"`` for theirs.
    * `jax.jvp`: a second event with the tangents and ``("jvp", {})``.
    * `jax.grad`, `jax.vjp`: a second event with the cotangents and ``("jvp", {}), ("transpose", {})``, if the result is
      used.

    >>> import ceedtap as ct, jax
    >>> def show(x, what, transforms=()):
    ...     print(what, x, *[name for name, _ in transforms])
    >>> with ct.outfeed_receiver():
    ...     _ = jax.grad(lambda x: ct.id_tap(show, x * x, what="square:") * 2)(3.0)
    square: 9.0
    square: 2.0 jvp transpose
    """
    if not callable(func):
        raise TypeError(f"id_tap needs a function that gets the values, got {type(func).__name__}")
    if not args:
        raise TypeError("id_tap needs at least one value to tap: id_tap(func, x)")
    if ordered and not stateful:
        raise ValueError("ordered=True needs stateful=True: the order is kept by a JAX effect")
    if result is not _MISSING and not stateful:
        raise ValueError("result= needs stateful=True: without an effect, a tap whose result is not used is dropped")
    if replicas not in ("first", "all"):
        raise ValueError(f"replicas is 'first' or 'all', got {replicas!r}")
    labels = {name: kwargs.pop(name) for name in list(kwargs) if _has_arrays(kwargs[name])}
    taken = take_apart((*args, *labels.values()), "id_tap")
    with_device = tap_with_device or (isinstance(func, Consumer) and func.wants_device)
    binding = _binding(func, kwargs, taken.treedef, taken.keys, with_device, tap_with_shard, tuple(labels))

    condition = [] if when is None else [_as_condition(when)]
    operands = [*taken.arrays, *condition]
    options: dict[str, Any] = {
        "binding": binding,
        "transforms": (),
        "ordered": ordered,
        "conditions": len(condition),
        "replicas": replicas,
    }
    tapped = split(operands, binding, len(condition))[0]
    if stateful:
        tap_p.bind(*operands, derivatives=tangents, emits=True, **options)
        if result is not _MISSING:
            return result
        # Only what is being traced can have derivatives; everything else is returned as it came.
        if not tangents or not any(isinstance(array, jax.core.Tracer) for array in tapped):
            return args[0] if len(args) == 1 else args
    outs = through_p.bind(*operands, derivatives=tangents, emits=not stateful, **options)
    outs = [leaf if key else out for leaf, out, key in zip(taken.leaves, outs, taken.keys, strict=False)]
    args = jax.tree.unflatten(jax.tree.structure(args), outs)
    return args[0] if len(args) == 1 else args


def _has_arrays(label: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(label))


def _as_condition(when: Any) -> Any:
    condition = jnp.asarray(when)
    if condition.dtype != np.bool_:
        raise TypeError(f"when= is a boolean or an array of them, such as x > 0, got {condition.dtype}")
    return condition


_print_lock = threading.Lock()


def print_values(*args: Any, what: Any, threshold: int | None, output_stream: TextIO | None, **kwargs: Any) -> None:
    """Prints pytrees of arrays with labels."""
    labels = {"what": what, **kwargs}
    lines = [" ".join(f"{name}: {value}" for name, value in labels.items() if value is not None)]
    for arg in args:
        if isinstance(arg, np.ndarray):
            lines.append(np.array2string(arg, threshold=threshold))
        else:
            text = [np.array2string(leaf, threshold=threshold) for leaf in jax.tree.leaves(arg)]
            lines.append(str(jax.tree.unflatten(jax.tree.structure(arg), text)).replace("'", ""))
    with _print_lock:  # one write, so that lines of several printers do not mix
        stream = output_stream if output_stream is not None else sys.stdout
        stream.write("\n".join(line for line in lines if line) + "\n")
        stream.flush()


def _after_fork() -> None:
    """In the child of a fork: a lock that no thread of the parent holds."""
    global _print_lock
    _print_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def id_print(
    x: Any,
    *,
    result: Any = _MISSING,
    what: str | None = None,
    threshold: int | None = None,
    output_stream: TextIO | None = None,
    **kwargs: Any,
) -> Any:
    """Prints a pytree of arrays when the program runs, and returns it.

    Args:
        x: the pytree.
        result: what to return in place of `x`.
        what: a label.
        threshold: number of elements from which an array is abbreviated (as in `numpy.array2string`).
        output_stream: where to print; None is `sys.stdout` at the time of printing.
        kwargs: more labels.

    >>> import ceedtap as ct, jax, jax.numpy as jnp
    >>> with ct.outfeed_receiver():
    ...     _ = jax.jit(lambda x: ct.id_print(x + 1, what="x + 1"))(jnp.arange(3))
    what: x + 1
    [1 2 3]
    """
    return id_tap(print_values, x, result=x if result is _MISSING else result, what=what, threshold=threshold,
                  output_stream=output_stream, **kwargs)  # fmt: skip


# -- lowering and evaluation -----------------------------------------------------------------------------------------


def _thaw(transforms: Any) -> Transforms:
    """Parameters of a primitive must be hashable, so the dicts of `transforms` travel as tuples of pairs."""
    return tuple((name, dict(params)) for name, params in transforms)


def split(args: Sequence[Any], binding: Binding, conditions: int) -> tuple[list[Any], list[Any], list[Any]]:
    """What is tapped, the labels, and the conditions. Each condition must have a value that is not zero."""
    end = len(args) - conditions
    start = end - binding.num_labels
    return list(args[:start]), list(args[start:end]), list(args[end:])


def _callback_lowering(
    ctx: jax_compat.LoweringRuleContext,
    *operands: Any,
    binding: Binding,
    transforms: Any,
    ordered: bool,
    conditions: int,
    **_: Any,
) -> list[Any]:
    """Where there is no native handler, on other platforms than CPU."""

    def emit(*args: Any) -> tuple[()]:
        # The shapes of shards are known only now, and JAX does not tell which device called.
        _emit(args, binding, transforms, conditions)
        return ()

    jax_compat.emit_python_effect(ctx, emit, operands, _effects[True] if ordered else None)
    return []


_exported: list[Any] = []


def _tap_lowering(
    ctx: jax_compat.LoweringRuleContext,
    *operands: Any,
    binding: Binding,
    transforms: Any,
    ordered: bool,
    conditions: int,
    replicas: Replicas,
    **_: Any,
) -> list[Any]:
    if not jax_compat.is_for_cpu(ctx):
        return _callback_lowering(ctx, *operands, binding=binding, transforms=transforms, ordered=ordered,
                                  conditions=conditions)  # fmt: skip
    effect = _effects[True] if ordered else None
    reference = partitioned.emit(ctx, operands, binding, _thaw(transforms), conditions, replicas, effect)
    # The route must live until XLA has instantiated the call; from then on the executable holds it. An exported program
    # is bytes, which can hold nothing, so its routes live as long as the process.
    if ctx.module_context.lowering_parameters.for_export:
        _exported.append(reference)
    else:
        jax_compat.add_keepalive(ctx, reference)
    return []


def _through_lowering(ctx: jax_compat.LoweringRuleContext, *operands: Any, emits: bool, **params: Any) -> Any:
    if emits:
        OUTFEED.untracked = True
        # The devices of one program are not in the order in which a thread has given them work; see `wait_for_results`.
        if jax_compat.num_parts(ctx) > 1 and not ctx.module_context.lowering_parameters.for_export:
            jax_compat.dispatch_synchronously(ctx)
        _tap_lowering(ctx, *operands, **params)
    return split(operands, params["binding"], params["conditions"])[0]


jax_compat.lower_in_place(tap_p, _tap_lowering)
jax_compat.lower_in_place(through_p, _through_lowering)


def _emit(args: Sequence[Any], binding: Binding, transforms: Any, conditions: int, device: int = -1) -> None:
    arrays = list(map(np.asarray, args))
    count = len(arrays) - conditions
    if all(map(np.any, arrays[count:])):
        reference = OUTFEED.route(binding, _thaw(transforms), specs(arrays[:count], binding.keys))
        OUTFEED.emit(reference, arrays[:count], device)


@tap_p.def_impl
def _tap_impl(
    *args: Any, binding: Binding, transforms: Any, conditions: int, replicas: Replicas, **_: Any
) -> list[Any]:
    """Outside of compiled code an event goes straight to the queue: nothing to compile, nothing to cache."""
    args = tuple(map(jax_compat.as_operand, args))
    count = len(args) - conditions
    if not all(map(np.any, args[count:])):
        return []
    for event in events_of(args[:count], replicas):
        reference = OUTFEED.route(binding, _thaw(transforms), specs(event.arrays, binding.keys), event.parts)
        OUTFEED.emit(reference, event.arrays, event.device, event.part)
    return []


@through_p.def_impl
def _through_impl(*args: Any, emits: bool, **params: Any) -> list[Any]:
    if emits:
        _tap_impl(*args, **params)
    return split(args, params["binding"], params["conditions"])[0]


# -- abstract evaluation ---------------------------------------------------------------------------------------------


@tap_p.def_effectful_abstract_eval
def _tap_abstract_eval(*avals: Any, ordered: bool, **_: Any) -> tuple[list[Any], set[Any]]:
    return [], {_effects[ordered]}


@through_p.def_abstract_eval
def _through_abstract_eval(*avals: Any, binding: Binding, conditions: int, **_: Any) -> list[Any]:
    return split(avals, binding, conditions)[0]


# -- batching --------------------------------------------------------------------------------------------------------


def batch_mark(tapped: Sequence[int | None], labels: Sequence[int | None]) -> Any:
    """What `transforms` says of a batch: the axes of the lanes."""
    dims = (("batch_dims", tuple(tapped)),)
    return "batch", dims if all(dim is None for dim in labels) else (*dims, ("label_dims", tuple(labels)))


def _batching(primitive: Any, args: Any, dims: Any, *, transforms: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    """One event with the batched arrays, however long the batch is."""
    tapped, labels, _ = split(dims, params["binding"], params["conditions"])
    outs = primitive.bind(*args, transforms=(*transforms, batch_mark(tapped, labels)), **params)
    return outs, tapped[: len(outs)]


for _primitive in (tap_p, through_p):
    jax_compat.primitive_batchers[_primitive] = functools.partial(_batching, _primitive)

# -- derivatives -----------------------------------------------------------------------------------------------------

_JVP = ("jvp", ())
_TRANSPOSE = ("transpose", ())


def _is_float0(tangent: Any) -> bool:
    """Whether it is the tangent of an integer, which has no values."""
    aval: Any = tangent.aval if isinstance(tangent, jax_compat.Zero) else jax.typeof(tangent)
    return bool(aval.dtype == jax.dtypes.float0)


def _instantiate(primal: Any, tangent: Any) -> Any:
    """A tangent as an array of the primal's type: symbolic zeros and the tangents of integers become zeros."""
    if isinstance(tangent, jax_compat.Zero) or _is_float0(tangent):
        return jax_compat.zeros(primal if isinstance(primal, jax_compat.AbstractValue) else jax.typeof(primal))
    return jax_compat.as_operand(tangent)


def _directions(primals: Any, tangents: Any, binding: Binding, conditions: int) -> list[Any]:
    """The operands of a tap of the tangents."""
    arrays, labels, held = split(primals, binding, conditions)
    return [*map(_instantiate, arrays, tangents[: len(arrays)]), *labels, *held]


def _tap_jvp(
    primals: Any, tangents: Any, *, transforms: Any, emits: bool, **params: Any
) -> tuple[list[Any], list[Any]]:
    primals = list(map(jax_compat.as_operand, primals))
    if emits:
        tap_p.bind(*primals, transforms=transforms, emits=True, **params)
    if params["derivatives"]:
        directions = _directions(primals, tangents, params["binding"], params["conditions"])
        tap_p.bind(*directions, transforms=(*transforms, _JVP), emits=True, **params)
    return [], []


def _tap_transpose(_: Any, *args: Any, **params: Any) -> list[Any]:
    """A tap of tangents has no cotangents; those are what `through_p` is for."""
    return [None] * len(args)


def _through_jvp(primals: Any, tangents: Any, *, transforms: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    primals = list(map(jax_compat.as_operand, primals))
    outs = through_p.bind(*primals, transforms=transforms, **params)
    tangents = tangents[: len(outs)]
    if not params["derivatives"]:
        return outs, list(tangents)
    directions = _directions(primals, tangents, params["binding"], params["conditions"])
    out_tangents = through_p.bind(*directions, transforms=(*transforms, _JVP), **params)
    return outs, [t if _is_float0(t) else out for t, out in zip(tangents, out_tangents, strict=True)]


def _through_transpose(cotangents: Any, *args: Any, transforms: Any, emits: bool, **params: Any) -> list[Any]:
    arrays, labels, held = split(args, params["binding"], params["conditions"])
    linear = [jax_compat.is_undefined_primal(arg) for arg in arrays]
    avals = [arg.aval if is_linear else jax.typeof(arg) for arg, is_linear in zip(arrays, linear, strict=True)]
    filled = [*map(_instantiate, avals, cotangents), *map(jax_compat.as_operand, [*labels, *held])]
    params = dict(params, transforms=(*transforms, _TRANSPOSE))
    if not emits:
        tap_p.bind(*filled, emits=True, **params)
    outs = through_p.bind(*filled, emits=emits, **params)
    rest = [None] * (len(labels) + len(held))
    return [out if is_linear else None for out, is_linear in zip(outs, linear, strict=True)] + rest


jax_compat.primitive_jvps[tap_p] = _tap_jvp
jax_compat.primitive_transposes[tap_p] = _tap_transpose
jax_compat.primitive_jvps[through_p] = _through_jvp
jax_compat.primitive_transposes[through_p] = _through_transpose
