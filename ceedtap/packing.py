"""Point functions of more fields than libCEED has room for: several arrays are seen as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.ceed_constants import EvalMode
from ceedtap.ceed_qfunction import MAX_FIELDS
from ceedtap.domain import Domain
from ceedtap.fields import Field
from ceedtap.point_function import PointFunction, Slot, fresh


@dataclass(frozen=True)
class Packing:
    """A point function with some of its arrays packed into one at the quadrature points.

    Attributes:
        function: of the packed arrays; it has no taps, what was tapped are outputs.
        bound: values of its bound inputs, by name.
        inputs: makes its inputs out of those of the original, by name.
        outputs: makes all results of the original out of its own.
    """

    function: PointFunction
    bound: dict[str, np.ndarray]
    inputs: Callable[[Mapping[str, Any]], list[Any]]
    outputs: Callable[[Sequence[Any]], list[Any]]


def pack(function: PointFunction, domain: Domain, bound: Mapping[str, np.ndarray]) -> Packing:
    """Packs data at the quadrature points, and if that is not enough, arrays of spaces: JAX then evaluates those at the
    points, in place of libCEED."""
    groups = _groups(function, bound)
    packed = [{slot.name for slot in group} for group in groups]
    free, known, results = groups
    kept_inputs = [slot for slot in function.inputs if slot.name not in packed[0] | packed[1]]
    kept_results = [slot for slot in function.results if slot.name not in packed[2]]
    taken = {slot.name for slot in (*function.inputs, *function.results)}
    names = [fresh(f"packed{i}", taken) for i in range(3)]
    slots = [_slot(name, group, domain) for name, group in zip(names, groups, strict=True)]
    inputs = (*kept_inputs, *(slot for slot, group in zip(slots[:2], groups[:2], strict=True) if group))
    outputs = (*kept_results, *(slots[2:] if results else ()))
    evaluate = jax_compat.jaxpr_function(function.jaxpr)

    def at_point(*values: Any) -> list[Any]:
        given = iter(values)
        parts = {slot.name: [next(given) for _ in slot.fields] for slot in kept_inputs}
        for group in (free, known):
            parts.update(_split(next(given), group) if group else {})
        flat = iter(evaluate(*(value for slot in function.inputs for value in parts[slot.name])))
        made = {slot.name: [next(flat) for _ in slot.fields] for slot in function.results}
        kept = [value for slot in kept_results for value in made[slot.name]]
        joined = [jnp.ravel(value) for slot in results for value in made[slot.name]]
        return [*kept, jnp.concatenate(joined)] if joined else kept

    def joined(group: Sequence[Slot], arrays: Mapping[str, Any]) -> Any:
        points = domain.num_elem, domain.num_points
        values = [domain.at_points(f, jnp.asarray(arrays[slot.name])) for slot in group for f in slot.fields]
        return jnp.concatenate([value.reshape(*points, -1) for value in values], axis=-1)

    def pack_inputs(arrays: Mapping[str, Any]) -> list[Any]:
        kept = [arrays[slot.name] for slot in kept_inputs if slot.name in arrays]
        return [*kept, joined(free, arrays)] if free else kept

    def unpack_outputs(arrays: Sequence[Any]) -> list[Any]:
        made = {slot.name: x for slot, x in zip(kept_results, arrays, strict=False)}
        if results:
            parts = _split(arrays[len(kept_results)], results, (domain.num_elem, domain.num_points))
            for slot in results:
                values = [domain.from_points(f, v) for f, v in zip(slot.fields, parts[slot.name], strict=True)]
                made[slot.name] = sum(values[1:], values[0])
        return [made[slot.name] for slot in function.results]

    new_bound = {name: value for name, value in bound.items() if name not in packed[1]}
    if known:
        with jax_compat.apart():
            new_bound[slots[1].name] = np.array(joined(known, bound))
    new = PointFunction(function.name, inputs, outputs, at_point, function.dtype, points=function.points)
    return Packing(new, new_bound, pack_inputs, unpack_outputs)


def _groups(function: PointFunction, bound: Mapping[str, Any]) -> list[list[Slot]]:
    """What is packed: of the inputs that change, of those that are bound, and of the results."""
    slots = [*function.inputs, *function.results]
    chosen = [slot for slot in slots if slot.kind == "quadrature"]
    # Next, what is the least to do: few values at a point.
    others = sorted((slot for slot in slots if slot.kind == "space"), key=lambda slot: sum(f.size for f in slot.fields))

    def groups() -> list[list[Slot]]:
        inputs = [slot for slot in function.inputs if slot in chosen]
        return [
            [slot for slot in inputs if slot.name not in bound],
            [slot for slot in inputs if slot.name in bound],
            [slot for slot in function.results if slot in chosen],
        ]

    def count() -> int:
        return function.num_fields - sum(len(slot.fields) for slot in chosen) + sum(map(bool, groups()))

    while count() > MAX_FIELDS and others:
        chosen.append(others.pop(0))
    return groups()


def _slot(name: str, group: Sequence[Slot], domain: Domain) -> Slot:
    size = sum(f.size for slot in group for f in slot.fields)
    field = Field(None, EvalMode.NONE, (size,))
    return Slot(name, "quadrature", (field,), (domain.num_elem, domain.num_points, size))


def _split(values: Any, group: Sequence[Slot], points: tuple[int, ...] = ()) -> dict[str, list[Any]]:
    """The values of the slots of a group, out of what they are packed into."""
    parts: dict[str, list[Any]] = {}
    start = 0
    for slot in group:
        parts[slot.name] = []
        for field in slot.fields:
            part = values[..., start : start + field.size]
            parts[slot.name].append(part.reshape(*points, *field.shape))
            start += field.size
    return parts
