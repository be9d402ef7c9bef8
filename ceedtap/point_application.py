"""Point functions on the elements of a mesh, as what programs apply: the libCEED side, and the derivatives."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat, point_taps
from ceedtap.apply import Application, Connection, Mask, Switch, apply_p, lower_in_jax
from ceedtap.ceed import (
    USE_POINTER,
    VECTOR_ACTIVE,
    VECTOR_NONE,
    QFunction,
    QFunctionContext,
    Vector,
)
from ceedtap.ceed import Operator as CeedOperator
from ceedtap.ceed_qfunction import MAX_FIELDS
from ceedtap.domain import Domain
from ceedtap.packing import Packing, pack
from ceedtap.point_function import PointFunction, Slot


@dataclass
class Ends:
    """What the fields of a libCEED operator are connected to.

    Attributes:
        inputs: by name of the slot, a vector or the part of `memory` that holds parameters.
        outputs: the vectors of the results.
        memory: of the QFunction's context.
    """

    inputs: dict[str, Vector | np.ndarray]
    outputs: list[Vector]
    memory: np.ndarray


class PointApplication(Application):
    """A point function on the elements of a mesh. Slots for weights are no inputs."""

    def __init__(self, function: PointFunction, domain: Domain, bound: Mapping[str, np.ndarray]) -> None:
        self.function = function
        self.domain = domain
        self.bound = {slot.name: bound[slot.name] for slot in function.inputs if slot.name in bound}
        self.free = [slot for slot in function.inputs if slot.kind != "weight" and slot.name not in self.bound]
        self.name = function.name
        self.in_shapes = tuple(slot.shape for slot in self.free)
        # When nobody listens to any of the taps they are not computed; one more output says whether they were.
        self.optional = bool(function.taps) and all(tap.optional for tap in function.taps)
        shapes = [slot.shape for slot in function.results]
        self.out_shapes = (*shapes, ()) if self.optional else tuple(shapes)
        self.num_tapped = len(self.out_shapes) - len(function.outputs)
        self.linear = frozenset(i for i, slot in enumerate(self.free) if slot.name in function.linear)
        self.dtype = function.dtype

    # -- libCEED -------------------------------------------------------------------------------------------------

    def qfunction(self, memory: np.ndarray) -> QFunction:
        """The compiled QFunction, with this memory as its context."""
        function, ceed = self.function, self.domain.ceed
        source, name = function.source
        fields = [slot for slot in function.inputs if slot.kind != "parameters"]
        inputs, outputs = function.eval_modes(fields), function.eval_modes(function.results)
        if len(fields) == len(function.inputs):
            return QFunction.from_source(ceed, source, name, inputs=inputs, outputs=outputs)
        context = QFunctionContext(ceed)
        context.set_data(memory, cmode=USE_POINTER)
        qf = QFunction.from_source(ceed, source, name, inputs=inputs, outputs=outputs, context=context)
        qf.set_context_writable(False)
        return qf

    def new_ends(self) -> Ends:
        """New vectors for all inputs and outputs, and memory for the parameters."""
        function, ceed = self.function, self.domain.ceed
        parameters = [slot for slot in function.inputs if slot.kind == "parameters"]
        memory = np.zeros(max(sum(slot.size for slot in parameters), 1), self.dtype)
        inputs: dict[str, Vector | np.ndarray] = {
            slot.name: ceed.Vector(slot.size) for slot in function.inputs if slot.kind not in ("parameters", "weight")
        }
        offset = 0
        for slot in parameters:
            inputs[slot.name] = memory[offset : offset + slot.size]
            offset += slot.size
        for name, value in self.bound.items():
            end = inputs[name]
            if isinstance(end, Vector):
                end.set_array(np.ascontiguousarray(value).reshape(-1))
            else:
                end[:] = value.reshape(-1)
        return Ends(inputs, [ceed.Vector(slot.size) for slot in function.results], memory)

    def call(self, ctx: jax_compat.LoweringRuleContext, *operands: Any) -> Any:
        return super().call(ctx, *operands) if self.fits else lower_in_jax(ctx, self._packed, self, operands)

    @property
    def fits(self) -> bool:
        """Whether libCEED has room for all the fields of one operator."""
        return self.function.num_fields <= MAX_FIELDS

    def _packed(self, *inputs: Any) -> list[Any]:
        """The results by way of an operator of fewer fields."""

        def make() -> tuple[Packing, PointApplication]:
            packing = pack(self.function, self.domain, self.bound)
            return packing, PointApplication(packing.function, self.domain, packing.bound)

        packing, application = self.derived("packed", make)
        arrays = packing.inputs({slot.name: x for slot, x in zip(self.free, inputs, strict=True)})
        results = packing.outputs(apply_p.bind(*arrays, op=application))
        return [*results, jnp.ones((), self.dtype)] if self.optional else results

    def build(self, active: str | None = None, ends: Ends | None = None) -> tuple[CeedOperator, Ends]:
        """A libCEED operator whose fields have vectors of their own, or these, except for the active input and the
        outputs that go with it."""
        function = self.function
        ends = ends or self.new_ends()
        op = self.domain.ceed.Operator(self.qfunction(ends.memory))
        op.name = function.name
        for slot in function.inputs:
            if slot.kind != "parameters":
                vector: Any = VECTOR_ACTIVE if slot.name == active else ends.inputs.get(slot.name, VECTOR_NONE)
                self._set_fields(op, slot, vector)
        for slot, output in zip(function.results, ends.outputs, strict=False):
            self._set_fields(op, slot, VECTOR_ACTIVE if active is not None else output)
        op.check()
        return op, ends

    def _set_fields(self, op: CeedOperator, slot: Slot, vector: Any) -> None:
        for name, field in zip(slot.field_names(), slot.fields, strict=True):
            op.set_field(name, *self.domain.place(slot, field), vector)
            if slot in self.function.results and isinstance(vector, Vector):
                # Outputs that contribute to one vector: libCEED adds them up. `set_field` refuses a vector that another
                # output has, so the next one gets a handle of its own on the same vector.
                vector = vector.alias()

    def connect(self) -> Connection:
        op, ends = self.build()
        inputs = [ends.inputs[slot.name] for slot in self.free]
        if not self.optional:
            return Connection(op, inputs, ends.outputs, (None, None))
        idle, _ = self.silent().build(ends=ends)
        switches = [Switch(tap.params["binding"].consumer) for tap in self.function.taps]
        return Connection(op, inputs, [*ends.outputs, None], (None, None), idle, switches)

    # -- plain JAX -----------------------------------------------------------------------------------------------

    def evaluate(self, *inputs: Any) -> list[Any]:
        given = {slot.name: x for slot, x in zip(self.free, inputs, strict=True)} | dict(self.bound)
        values, axes = [], []
        for slot in self.function.inputs:
            for field in slot.fields:
                x = given.get(slot.name)
                values.append(x if slot.kind == "parameters" else self.domain.at_points(field, x))
                axes.append(None if slot.kind == "parameters" else 0)
        per_point = jax.vmap(jax.vmap(jax_compat.jaxpr_function(self.function.jaxpr), axes), axes)
        results = iter(per_point(*values))
        out = []
        for slot in self.function.results:
            parts = [(field, next(results)) for field in slot.fields]
            if slot.kind == "parameters":
                out.append(parts[0][1].sum((0, 1)))
            else:
                out.append(functools.reduce(jnp.add, [self.domain.from_points(f, v) for f, v in parts]))
        return [*out, jnp.ones((), self.dtype)] if self.optional else out

    def emit(self, tapped: Sequence[Any], inputs: Sequence[Any]) -> None:
        point_taps.emit(
            self.function.taps, tapped, {slot.name: x for slot, x in zip(self.free, inputs, strict=True)},
            conditions=[tapped[-1]] if self.optional else [], linear=bool(self.function.linear),
        )  # fmt: skip

    # -- derivatives ---------------------------------------------------------------------------------------------

    def jvp(self, mask: Mask) -> tuple[PointApplication, Mask]:
        moved = {slot.name for slot, wanted in zip(self.free, mask, strict=True) if wanted}
        derivative = self.function.jvp(tuple(slot.name in moved for slot in self.function.inputs))
        return self._pruned(derivative)

    def derivatives(self, mask: Mask) -> list[tuple[Application, Mask, Mask]]:
        # Rather several operators than what cannot be one; but all taps belong to one event.
        if not self.fits or self.function.taps or self.jvp(mask)[0].fits:
            return super().derivatives(mask)
        terms: list[tuple[Application, Mask, Mask]] = []
        count = len(self.function.outputs)
        for number in range(count):
            has = tuple(i == number for i in range(count))
            one = self.with_function(self.function.select(has))
            for group in one._groups(mask):
                derivative, takes = one.jvp(group)
                moved = iter(takes[len(mask) :])
                which = [chosen and next(moved) for wanted, chosen in zip(mask, group, strict=True) if wanted]
                if any(which):
                    terms.append((derivative, (*takes[: len(mask)], *which), has))
        return terms

    def _groups(self, mask: Mask) -> list[Mask]:
        """The inputs of a mask in groups, such that there is room for derivatives by each."""
        groups: list[list[bool]] = []
        room = 0
        for i, (slot, wanted) in enumerate(zip(self.free, mask, strict=True)):
            if not wanted:
                continue
            if not groups or len(slot.fields) > room:
                groups.append([False] * len(mask))
                room = MAX_FIELDS - self.function.num_fields
            groups[-1][i] = True
            room -= len(slot.fields)
        return [tuple(group) for group in groups]

    def transpose(self, mask: Mask) -> tuple[Application, Mask]:
        wanted = {slot.name for slot, undefined in zip(self.free, mask, strict=True) if undefined}
        if not wanted <= self.function.linear:
            raise TypeError(f"{self!r} is not linear in {', '.join(sorted(wanted - self.function.linear))}")
        transposed = self.function.transpose(tuple(slot.name in wanted for slot in self.function.inputs))
        return self._pruned(transposed)

    def with_results(self, mask: Mask) -> PointApplication:
        return self.with_function(self.function.select(mask))

    def silent(self) -> PointApplication:
        return self.with_function(self.function.silent())

    def batched(self) -> PointApplication:
        return self.with_function(self.function.batched())

    def _pruned(self, function: PointFunction) -> tuple[PointApplication, Mask]:
        pruned = function.pruned()
        kept = {slot.name for slot in pruned.inputs}
        takes = tuple(
            slot.name in kept for slot in function.inputs if slot.kind != "weight" and slot.name not in self.bound
        )
        return self.with_function(pruned), takes

    def with_function(self, function: PointFunction) -> PointApplication:
        """The application of another function, on the same elements and with the same bound values."""
        if function is self.function:
            return self
        application: PointApplication = self.derived(
            function, lambda: PointApplication(function, self.domain, self.bound)
        )
        return application
