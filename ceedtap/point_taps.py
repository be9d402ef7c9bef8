"""Taps in functions of one quadrature point.

Compiled QFunctions cannot emit events. So what such a function taps becomes a further output of it, data at the
quadrature points, and the program that applies the operator taps those arrays. The derivatives of a point function tap
tangents and cotangents by the rules of the tap primitives; theirs become outputs in the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.consumer import Consumer
from ceedtap.fields import from_scalars
from ceedtap.named_tap import Tap
from ceedtap.primitive import batch_mark, id_tap, split, tap_p, through_p
from ceedtap.routes import Binding

_TAPS = {tap_p, through_p}
_DEBUGGING = {jax_compat.debug_print_p, jax_compat.debug_callback_p}


@dataclass(frozen=True, eq=False)
class _PointBinding(Binding):
    """A consumer that knows which operator it hears of."""


_bindings: weakref.WeakKeyDictionary[Binding, dict[str, _PointBinding]] = weakref.WeakKeyDictionary()


def _labelled(binding: Binding, operator: str) -> Binding:
    if isinstance(binding, _PointBinding):
        return binding
    if any(key is not None for key in binding.keys):
        raise TypeError(f"the operator {operator} taps random keys; a QFunction has none")
    known = _bindings.setdefault(binding, {})
    if operator not in known:
        kwargs = {"where": "qfunction", "operator": operator, **binding.kwargs}
        parts = (binding.treedef, binding.keys, binding.with_device, binding.with_shard, binding.labels)
        known[operator] = _PointBinding(binding.consumer, kwargs, *parts)
    return known[operator]


# -- jaxprs with taps --------------------------------------------------------------------------------------------------


def has_taps(closed: Any) -> bool:
    return jax_compat.contains(closed, _TAPS)


def _rewritten(closed: Any, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Callable[..., list[Any]]:
    """The function of a jaxpr with other parameters of its taps; None leaves a tap out."""

    def tap(*operands: Any, **params: Any) -> list[Any]:
        changed = change(params)
        return [] if changed is None else list(tap_p.bind(*operands, **changed))

    def through(*operands: Any, emits: bool, **params: Any) -> list[Any]:
        # Data dependence ends at the QFunction: what its result needs is tapped as everything else is.
        if emits:
            tap(*operands, emits=True, **params)
        changed = change({**params, "emits": False})
        if changed is None:
            return split(operands, params["binding"], params["conditions"])[0]
        return list(through_p.bind(*operands, **{**changed, "emits": False}))

    return jax_compat.interpreter(closed, {tap_p: tap, through_p: through}, differentiable=True)


def with_debugging(closed: Any, operator: str) -> Any:
    """The jaxpr with taps in place of :func:`jax.debug.print` and :func:`jax.debug.callback`.

    Raises:
        NotImplementedError: one of them is ordered, or in a branch or a loop.
    """
    if not jax_compat.contains(closed, _DEBUGGING):
        return closed

    def tapped(name: str) -> Callable[..., list[Any]]:
        def tap(*operands: Any, **params: Any) -> list[Any]:
            if jax_compat.is_ordered_debugging(params):
                raise NotImplementedError(
                    f"jax.debug.{name}(ordered=True) in the operator {operator}: what a point function prints leaves "
                    "when the operator has been applied. Leave ordered away, or use ceedtap.id_print, whose events "
                    "have numbers"
                )
            host = params["callback"] if name == "callback" else partial(jax_compat.debug_print_p.impl, **params)
            count = len(operands)

            def consumer(*values: Any, **labels: Any) -> None:
                host(*values[:count])

            consumer.__name__ = f"debug_{name}"
            # JAX's own functions have nothing to say to derivatives either.
            id_tap(consumer, *(operands or [jnp.zeros(())]), tangents=False)
            return []

        return tap

    rules = {jax_compat.debug_print_p: tapped("print"), jax_compat.debug_callback_p: tapped("callback")}
    return _traced(jax_compat.interpreter(closed, rules, differentiable=True), closed, operator)


def label(closed: Any, operator: str) -> Any:
    """The jaxpr whose consumers are told the operator's name."""
    function = _rewritten(closed, lambda params: {**params, "binding": _labelled(params["binding"], operator)})
    return _traced(function, closed, operator)


def differentiable(closed: Any) -> Callable[..., list[Any]]:
    """The function without its own events, whose derivatives have theirs."""
    if not has_taps(closed):
        return jax_compat.jaxpr_function(closed)
    return _rewritten(closed, lambda params: {**params, "emits": False})


def silent(closed: Any) -> Callable[..., list[Any]]:
    """The function without taps."""
    return _rewritten(closed, lambda params: None)


def batched(closed: Any) -> Callable[..., list[Any]]:
    """The function whose derivatives are taken of a batch: of arrays with the lanes in the first axis."""

    def mark(params: dict[str, Any]) -> dict[str, Any]:
        binding = params["binding"]
        labels = (0,) * binding.num_labels
        mark = batch_mark((0,) * (len(binding.keys) - len(labels)), labels)
        return {**params, "transforms": (*params["transforms"], mark)}

    return _rewritten(closed, mark)


def _traced(function: Callable[..., Any], closed: Any, operator: str) -> Any:
    try:
        return jax.make_jaxpr(function)(*closed.in_avals)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"a tap in the operator {operator} {error}. There, points differ in what they do. Return the value from "
            "the branch or the loop and tap it outside, or tap it with when=..."
        ) from None


# -- what is tapped, as outputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PointTap:
    """A tap of a point function, as the program sees it that applies the operator.

    Attributes:
        params: of the tap primitive.
        values: for each leaf, the number of the output that it is, and its type.
        conditions: the numbers of the outputs that say at which points there is an event.
    """

    params: dict[str, Any]
    values: tuple[tuple[int, np.dtype], ...]
    conditions: tuple[int, ...]
    _bindings: dict[tuple[str, ...], Binding] = field(default_factory=dict)

    @property
    def optional(self) -> bool:
        """Whether its events may not be wanted while the program runs."""
        return isinstance(self.params["binding"].consumer, Tap)

    def with_inputs(self, inputs: dict[str, Any]) -> tuple[Binding, list[Any]]:
        """The consumer for the tapped values and the inputs of the operator, and the latter's arrays."""
        binding = self.params["binding"]
        leaves, _ = jax.tree.flatten(inputs)
        names = tuple(inputs)
        if names not in self._bindings:
            args = jax.tree.unflatten(binding.treedef, [0] * len(binding.keys))
            treedef = jax.tree.structure((*args, inputs))
            self._bindings[names] = replace(binding, treedef=treedef, keys=(*binding.keys, *[None] * len(leaves)))
        return self._bindings[names], leaves


@dataclass(frozen=True)
class Collected:
    """A point function with what it taps as further outputs.

    Attributes:
        closed: its jaxpr, without taps.
        taps: what it tapped.
        shapes: of the further outputs.
    """

    closed: Any
    taps: tuple[PointTap, ...]
    shapes: tuple[tuple[int, ...], ...]


def collect(closed: Any, operator: str, dtype: np.dtype) -> Collected:
    """Makes outputs of what a point function taps.

    Raises:
        NotImplementedError: there is a tap in a branch or a loop.
    """
    taps: list[PointTap] = []
    outputs: list[Any] = []
    known: dict[int, tuple[int, Any]] = {}  # by identity; the value is kept, so that no other gets its identity

    def output(value: Any) -> int:
        if id(value) not in known:
            known[id(value)] = len(outputs), value
            outputs.append(_as_field(value, dtype))
        return known[id(value)][0]

    def tap(*operands: Any, emits: bool, **params: Any) -> list[Any]:
        if not emits:
            return []
        operands = tuple(map(jax_compat.as_operand, operands))
        tapped, labels, held = split(operands, params["binding"], params["conditions"])
        values = tuple((output(value), np.dtype(value.dtype)) for value in [*tapped, *labels])
        taps.append(PointTap(params, values, tuple(map(output, held))))
        return []

    def through(*operands: Any, binding: Binding, conditions: int, **_: Any) -> list[Any]:
        return split(operands, binding, conditions)[0]

    evaluate = jax_compat.interpreter(closed, {tap_p: tap, through_p: through}, differentiable=False)

    def with_outputs(*values: Any) -> list[Any]:
        results = [*evaluate(*values), *outputs]
        # Values of the trace do not outlive it.
        known.clear()
        outputs.clear()
        return results

    pure = _traced(with_outputs, closed, operator)
    return Collected(pure, tuple(taps), tuple(out.shape for out in pure.out_avals[len(closed.out_avals) :]))


def _as_field(value: Any, dtype: np.dtype) -> Any:
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.stack([value.real, value.imag], axis=-1)
    return jnp.asarray(value, dtype)


def _from_field(array: Any, dtype: np.dtype) -> Any:
    if np.issubdtype(dtype, np.complexfloating):
        return jax.lax.complex(array[..., 0], array[..., 1]).astype(dtype)
    return from_scalars(array, dtype)


class InputsWanted(Consumer):
    """A consumer that, tapped in a point function, gets the inputs of the operator as well, a dict by name."""


def emit(
    taps: Sequence[PointTap],
    outputs: Sequence[Any],
    inputs: dict[str, Any],
    *,
    conditions: Sequence[Any] = (),
    linear: bool = False,
) -> None:
    """Taps the outputs of an operator.

    Args:
        taps: of its point function.
        outputs: the arrays that they number.
        inputs: of the operator.
        conditions: of all of them.
        linear: the operator is a derivative. JAX may transpose what is done with its outputs, so nothing is done that
            is not linear: the tangents of integers, which are zero, stay in the type of the fields.
    """
    for tap in taps:
        values = [
            outputs[number] if linear and not np.issubdtype(dtype, np.inexact) else _from_field(outputs[number], dtype)
            for number, dtype in tap.values
        ]
        params = {**tap.params, "derivatives": False, "emits": True}
        if isinstance(params["binding"].consumer, InputsWanted):
            params["binding"], leaves = tap.with_inputs(inputs)
            values += leaves
        held = [*(outputs[number] for number in tap.conditions), *conditions]
        tap_p.bind(*values, *held, **{**params, "conditions": len(held)})
