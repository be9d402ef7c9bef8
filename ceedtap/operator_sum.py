"""Sums of operators, such as one on the cells and one on the boundary: one composite operator of libCEED."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ceedtap.apply import apply
from ceedtap.ceed import Ceed
from ceedtap.point_function import Slot
from ceedtap.point_operator import PointOperator
from ceedtap.sum_application import SumApplication, Term


class OperatorSum(PointOperator):
    """The sum of operators, made by ``a + b``: an operator again, whose parts run in one call of libCEED.

    Fields of the same name are one array. The parameters are a dict: the name of each part that has some -> its own.

    Attributes:
        parts: the operators, none of them a sum.
        inputs, outputs: as of :class:`PointOperator`.

    Raises:
        ValueError: the operators do not fit together; the message says which names and shapes do not.
    """

    def __init__(self, parts: Sequence[PointOperator]) -> None:
        self.parts = tuple(parts)
        applications = [part._application for part in parts]
        first = applications[0]
        name = " + ".join(application.name for application in applications)
        names: dict[str, tuple[int, tuple[int, ...], str]] = {}  # fields: number, shape, where it was met first
        self._templates: dict[str, Any] = {}
        in_shapes: list[tuple[int, ...]] = []
        terms = []
        for part, application in zip(parts, applications, strict=True):
            if part.ceed.lock is not parts[0].ceed.lock:
                raise ValueError(
                    f"{first.name} and {application.name} belong to different Ceeds; `.on(ceed)` moves one"
                )
            ours, theirs = ({s.name: s.shape for s in a.function.outputs} for a in (first, application))
            if ours != theirs:
                raise ValueError(
                    f"the parts of a sum have the same outputs: {first.name} has {_listed(ours)}, {application.name} "
                    f"has {_listed(theirs)}"
                )
            numbers = []
            for slot in application.free:
                number, shape, where = names.get(slot.name, (len(in_shapes), slot.shape, application.name))
                if slot.kind == "parameters":
                    number = len(in_shapes)
                    self._add_template(application.name, part._template)
                elif shape != slot.shape:
                    raise ValueError(
                        f"the field {slot.name} has the shape {shape} in {where} and {slot.shape} in "
                        f"{application.name}; a sum has one array for each name, so give one of them another"
                    )
                else:
                    names[slot.name] = number, shape, where
                if number == len(in_shapes):
                    in_shapes.append(slot.shape)
                numbers.append(number)
            order = [slot.name for slot in application.function.outputs]
            outputs = tuple(list(ours).index(n) for n in order)
            terms.append(Term(application, tuple(numbers), outputs))
        self._application = application = SumApplication(
            name, terms, in_shapes, [slot.shape for slot in first.function.outputs]
        )
        self.inputs = tuple(names)
        self.outputs = parts[0].outputs
        self._call = jax.jit(lambda *arrays: apply(application, *arrays), inline=True)

    @property
    def _out_slots(self) -> Sequence[Slot]:
        return self.parts[0]._out_slots

    def _add_template(self, name: str, template: Any) -> None:
        """Parts of one name share their parameters, which must be alike."""
        other = self._templates.setdefault(name, template)
        kinds = [(jax.tree.structure(t), [jnp.shape(leaf) for leaf in jax.tree.leaves(t)]) for t in (template, other)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"two parts of a sum are called {name} and have different parameters; give one another name by "
                "operator(name=...)"
            )

    def _ordered(self, arrays: Sequence[Any], named: Mapping[str, Any], params: Any) -> list[Any]:
        values = self._arguments(arrays, named)
        given = self._given(params)
        ordered: list[Any] = [None] * len(self._application.in_shapes)
        for part, term in zip(self.parts, self._application.terms, strict=True):
            fields = {name: values[name] for name in part.inputs}
            own = given.get(term.application.name) if part._takes_parameters else None
            for i, x in zip(term.inputs, part._ordered((), fields, own), strict=True):
                ordered[i] = x
        return ordered

    def _given(self, params: Any) -> Mapping[str, Any]:
        """The parameters by part, checked."""
        given = {} if params is None else params
        if not isinstance(given, Mapping) or set(given) != set(self._templates):
            wanted = f"a dict of those of {', '.join(self._templates)}" if self._templates else "none"
            got = sorted(given) if isinstance(given, Mapping) else type(given).__name__
            raise TypeError(f"the parameters of {self._application.name} are {wanted}, got {got}")
        return given

    def _parts(self) -> tuple[PointOperator, ...]:
        return self.parts

    @property
    def _takes_parameters(self) -> bool:
        return bool(self._templates)

    def bind(self, *, params: Any = None, **fields: Any) -> OperatorSum:
        """The sum with some fields fixed in all the parts that have them, and, by a dict, parameters of some parts.

        Raises:
            TypeError: no such field or part, or values that are only known when a program runs.
            ValueError: another shape.
        """
        given = {} if params is None else params
        if not isinstance(given, Mapping):
            raise TypeError(f"params: expected a dict of those of {', '.join(self._templates)}, got {given!r}")
        if unknown := [name for name in given if name not in self._templates]:
            raise TypeError(f"{self._application.name} has no parameters of {', '.join(map(repr, unknown))}")
        if unknown := [name for name in fields if name not in self.inputs]:
            raise TypeError(f"{self._application.name} has no field {unknown[0]}; it has {', '.join(self.inputs)}")
        parts = []
        for part in self.parts:
            own = {name: value for name, value in fields.items() if name in part.inputs}
            name = part._application.name
            parts.append(part.bind(params=given.get(name) if part._takes_parameters else None, **own))
        return OperatorSum(parts)

    def gradient(self, wrt: str) -> PointOperator:
        """The gradient of a sum of energies, as :meth:`PointOperator.gradient`: the sum of those of the parts that have
        the field."""
        found = [part.gradient(wrt) for part in self.parts if wrt in part.inputs]
        if not found:
            raise ValueError(f"{self._application.name} has a gradient by {', '.join(self.inputs)}, got {wrt!r}")
        return found[0] if len(found) == 1 else OperatorSum(found)

    @property
    def ceed(self) -> Ceed:
        """The Ceed that all parts are on."""
        return self.parts[0].ceed

    def on(self, ceed: Ceed) -> OperatorSum:
        """The same sum on another Ceed, as :meth:`PointOperator.on`."""
        return OperatorSum([part.on(ceed) for part in self.parts])

    @property
    def source(self) -> str:
        """The C sources of the QFunctions, one after the other."""
        return "\n".join(part.source for part in self.parts)

    def __repr__(self) -> str:
        name = self._application.name
        return f"<OperatorSum {name}: ({', '.join(self.inputs)}) -> {', '.join(self.outputs)}>"


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
