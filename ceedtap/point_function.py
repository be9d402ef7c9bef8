"""Functions of one quadrature point, written in JAX: their derivatives, and their C source.

A point function maps *slots* to slots. A slot stands for one array of the JAX program (a field of a space, data at the
quadrature points, parameters) and for what is made of it at a point: one value for each evaluation mode. What the
function taps (point_taps.py) has slots of its own, after the outputs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import codegen_names, jax_compat, point_taps
from ceedtap.ceed_constants import EvalMode
from ceedtap.codegen_qfunction import Argument, qfunction
from ceedtap.fields import Field, from_scalars

Kind = Literal["space", "quadrature", "parameters", "weight"]
Mask = tuple[bool, ...]


@dataclass(frozen=True)
class Slot:
    """One array of the JAX program, and its values at a point.

    Attributes:
        name: for messages and for the C variables.
        kind: of array.
        fields: one for each value at a point.
        shape: of the array in the program, batches apart.
        as_tuple: the user's function takes the values as a tuple.
    """

    name: str
    kind: Kind
    fields: tuple[Field, ...]
    shape: tuple[int, ...]
    as_tuple: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype | None:
        """Of the array, if it has integers or booleans."""
        return self.fields[0].dtype

    def field_names(self) -> list[str]:
        """Names of libCEED's fields, one for each value."""
        if len(self.fields) == 1:
            return [self.name]
        return [f"{self.name}_{f.eval_mode.name.lower()}" for f in self.fields]


@dataclass(eq=False)
class PointFunction:
    """A function of one quadrature point.

    Attributes:
        name: of the C function.
        inputs, outputs: slots.
        function: maps the values of the input slots at a point, in sequence, to those of the output slots.
        linear: names of input slots in which, all together, the function is linear.
        dtype: of all fields.
        points: shape of the arrays of quadrature data, before the values at a point.
    """

    name: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    function: Callable[..., Sequence[Any]]
    dtype: np.dtype
    linear: frozenset[str] = frozenset()
    points: tuple[int, ...] = ()
    _cache: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def traced(self) -> Any:
        """The function as a closed jaxpr in which everything is needed, with its taps."""
        arguments = [jax.ShapeDtypeStruct(f.shape, self.dtype) for slot in self.inputs for f in slot.fields]
        with jax_compat.apart():
            closed = jax_compat.without_dead_code(jax.make_jaxpr(self.function)(*arguments))
            if any(isinstance(value, jax.core.Tracer) for value in closed.consts):
                raise TypeError(
                    f"{self.name} refers to a value that a program computes; pass it as an argument or a parameter"
                )
            closed = point_taps.with_debugging(closed, self.name)
            return point_taps.label(closed, self.name) if point_taps.has_taps(closed) else closed

    @cached_property
    def _has_taps(self) -> bool:
        return point_taps.has_taps(self.traced)

    @cached_property
    def _collected(self) -> point_taps.Collected:
        if not self._has_taps:
            return point_taps.Collected(self.traced, (), ())
        with jax_compat.apart():
            collected = point_taps.collect(self.traced, self.name, self.dtype)
        return replace(collected, closed=jax_compat.without_dead_code(collected.closed))

    @property
    def jaxpr(self) -> Any:
        """The function as a closed jaxpr without taps: from the values of the inputs to those of :attr:`results`."""
        return self._collected.closed

    @property
    def taps(self) -> tuple[point_taps.PointTap, ...]:
        """What the function taps. The outputs that a tap numbers come after the function's own."""
        return self._collected.taps

    @cached_property
    def results(self) -> tuple[Slot, ...]:
        """The outputs, and after them what the function taps."""
        taken = {slot.name for slot in (*self.inputs, *self.outputs)}
        tapped = [
            Slot(fresh(f"tap{i}", taken), "quadrature", (Field(None, EvalMode.NONE, shape),), (*self.points, *shape))
            for i, shape in enumerate(self._collected.shapes)
        ]
        return (*self.outputs, *tapped)

    def named(self, values: Sequence[Any], unravel: Callable[[Any], Any] | None) -> dict[str, Any]:
        """The values of the inputs by name, as the user's function takes them; `unravel` makes the parameters."""
        given, named = iter(values), {}
        for slot in self.inputs:
            parts = tuple(from_scalars(next(given), field.dtype) for field in slot.fields)
            if slot.kind == "parameters" and unravel is not None:
                named[slot.name] = unravel(parts[0])
            else:
                named[slot.name] = parts if slot.as_tuple else parts[0]
        return named

    # -- derivatives ---------------------------------------------------------------------------------------------

    def jvp(self, mask: Mask) -> PointFunction:
        """The derivative in the direction of further inputs, one for each slot of the mask; linear in those."""

        def make() -> PointFunction:
            chosen = [slot for slot, wanted in zip(self.inputs, mask, strict=True) if wanted]
            taken = {slot.name for slot in self.inputs}
            tangents = tuple(replace(slot, name=fresh(f"d{slot.name}", taken)) for slot in chosen)
            outputs = tuple(replace(slot, name=fresh(f"d{slot.name}", taken)) for slot in self.outputs)
            wanted_values = [w for slot, w in zip(self.inputs, mask, strict=True) for _ in slot.fields]
            evaluate = point_taps.differentiable(self.traced)
            count = len(wanted_values)

            def function(*values: Any) -> Sequence[Any]:
                primals, given = list(values[:count]), iter(values[count:])
                directions = [next(given) if wanted else None for wanted in wanted_values]

                def of_chosen(*moved: Any) -> Any:
                    moving = iter(moved)
                    return evaluate(*[next(moving) if w else p for p, w in zip(primals, wanted_values, strict=True)])

                moved = [p for p, w in zip(primals, wanted_values, strict=True) if w]
                return jax.jvp(of_chosen, moved, [d for d in directions if d is not None])[1]

            return PointFunction(
                f"{self.name}_jvp", (*self.inputs, *tangents), outputs, function, self.dtype,
                frozenset(slot.name for slot in tangents), self.points,
            )  # fmt: skip

        return self.derived(("jvp", mask), make)

    def transpose(self, mask: Mask) -> PointFunction:
        """For a function that is linear in the slots of the mask: from the other slots in which it is not linear, and
        one more for each output, to the slots of the mask."""

        def make() -> PointFunction:
            chosen = [slot for slot, wanted in zip(self.inputs, mask, strict=True) if wanted]
            kept = [slot for slot in self.inputs if slot.name not in self.linear]
            taken = {slot.name for slot in kept}
            cotangents = tuple(replace(slot, name=fresh(f"{slot.name}_bar", taken)) for slot in self.outputs)
            outputs = tuple(replace(slot, name=fresh(f"{slot.name}_bar", taken)) for slot in chosen)
            evaluate = point_taps.differentiable(self.traced)
            count = sum(len(slot.fields) for slot in kept)

            def function(*values: Any) -> Sequence[Any]:
                known = iter(values[:count])
                constant = {slot.name: [next(known) for _ in slot.fields] for slot in kept}

                def linear(*moved: Any) -> Any:
                    moving, arguments = iter(moved), []
                    for slot, wanted in zip(self.inputs, mask, strict=True):
                        if slot.name in constant:
                            arguments += constant[slot.name]
                        elif wanted:
                            arguments += [next(moving) for _ in slot.fields]
                        else:
                            arguments += [jnp.zeros(f.shape, self.dtype) for f in slot.fields]
                    return evaluate(*arguments)

                shapes = [jax.ShapeDtypeStruct(f.shape, self.dtype) for slot in chosen for f in slot.fields]
                return jax.linear_transpose(linear, *shapes)(list(values[count:]))

            return PointFunction(
                f"{self.name}_transpose", (*kept, *cotangents), outputs, function, self.dtype,
                frozenset(slot.name for slot in cotangents), self.points,
            )  # fmt: skip

        return self.derived(("transpose", mask), make)

    def gradient(self, number: int) -> PointFunction:
        """The derivatives of the only output, a number, by the values of an input slot."""

        def make() -> PointFunction:
            slot = self.inputs[number]
            start = sum(len(s.fields) for s in self.inputs[:number])
            evaluate = jax_compat.jaxpr_function(self.traced)

            def function(*values: Any) -> Sequence[Any]:
                def energy(*parts: Any) -> Any:
                    return evaluate(*values[:start], *parts, *values[start + len(parts) :])[0]

                parts = values[start : start + len(slot.fields)]
                return jax.grad(energy, range(len(parts)))(*parts)

            output = replace(slot, name=fresh(f"grad_{slot.name}", {s.name for s in self.inputs}), as_tuple=False)
            return replace(self, outputs=(output,), function=function, linear=frozenset(), _cache={})

        return self.derived(("gradient", number), make)

    def select(self, mask: Mask) -> PointFunction:
        """The function without some of its outputs; it taps what it did."""

        def make() -> PointFunction:
            wanted = [w for slot, w in zip(self.outputs, mask, strict=True) for _ in slot.fields]
            evaluate = jax_compat.jaxpr_function(self.traced)

            def function(*values: Any) -> Sequence[Any]:
                return [out for out, w in zip(evaluate(*values), wanted, strict=True) if w]

            outputs = tuple(slot for slot, w in zip(self.outputs, mask, strict=True) if w)
            return replace(self, outputs=outputs, function=function, _cache={})

        return self.derived(("select", mask), make)

    def silent(self) -> PointFunction:
        """The function without taps."""
        return self._rewritten("silent", point_taps.silent)

    def batched(self) -> PointFunction:
        """The function with taps whose derivatives are those of a batch."""
        return self._rewritten("batched", point_taps.batched)

    def _rewritten(self, key: str, rewrite: Callable[[Any], Callable[..., list[Any]]]) -> PointFunction:
        if not self._has_taps:
            return self
        return self.derived(key, lambda: replace(self, function=rewrite(self.traced), _cache={}))

    def derived(self, key: Any, make: Callable[[], PointFunction]) -> PointFunction:
        """A function made from this one, once: derivatives meet again and again while programs are traced."""
        if key not in self._cache:
            self._cache[key] = make()
        result: PointFunction = self._cache[key]
        return result

    @cached_property
    def used(self) -> Mask:
        """Which input slots the function depends on."""
        used = jax_compat.used_inputs(self.jaxpr)
        ends = np.cumsum([len(slot.fields) for slot in self.inputs])
        return tuple(any(used[end - len(slot.fields) : end]) for slot, end in zip(self.inputs, ends, strict=True))

    def pruned(self) -> PointFunction:
        """The function of the inputs that it depends on."""

        def make() -> PointFunction:
            if all(self.used):
                return self
            evaluate = jax_compat.jaxpr_function(self.traced)
            inputs = tuple(slot for slot, used in zip(self.inputs, self.used, strict=True) if used)

            def function(*values: Any) -> Sequence[Any]:
                given, arguments = iter(values), []
                for slot, used in zip(self.inputs, self.used, strict=True):
                    arguments += [next(given) if used else jnp.zeros(f.shape, self.dtype) for f in slot.fields]
                return evaluate(*arguments)

            linear = self.linear & {slot.name for slot in inputs}
            return replace(self, inputs=inputs, function=function, linear=linear, _cache={})

        return self.derived("pruned", make)

    @property
    def num_fields(self) -> int:
        """Fields of the QFunction, inputs and outputs."""
        return sum(len(slot.fields) for slot in self.inputs if slot.kind != "parameters") + sum(
            len(slot.fields) for slot in self.results
        )

    # -- C -------------------------------------------------------------------------------------------------------

    @cached_property
    def source(self) -> tuple[str, str]:
        """C source text and the name of the function in it, which depends on the text."""
        inputs, offset = [], 0
        for slot in self.inputs:
            if slot.kind == "parameters":
                inputs.append(Argument(slot.name, offset))
                offset += slot.size
            else:
                inputs += [Argument(n) for n in slot.field_names()]
        outputs = [n for slot in self.results for n in slot.field_names()]
        with jax_compat.apart():
            text = qfunction("@NAME@", self.jaxpr, inputs, outputs)
        unique = f"{codegen_names.function_name(self.name)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        return text.replace("@NAME@", unique), unique

    def eval_modes(self, slots: Sequence[Slot]) -> list[tuple[str, int, EvalMode]]:
        """libCEED's fields of these slots: name, size and mode. Outputs that are summed over all points (the kind
        `parameters`) have a basis, whose function is 1."""
        return [
            (name, f.size, EvalMode.INTERP if slot.kind == "parameters" else f.eval_mode)
            for slot in slots
            for name, f in zip(slot.field_names(), slot.fields, strict=True)
        ]


def fresh(name: str, taken: set[str]) -> str:
    """A name that is not taken; it is afterwards."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
