"""Sums of point operators as one application: a composite operator of libCEED, and its derivatives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.apply import Application, Connection, Mask, Switch, apply_p, lower_in_jax
from ceedtap.ceed import CompositeOperator, Operator, Vector
from ceedtap.point_function import Slot

if TYPE_CHECKING:
    from ceedtap.point_application import PointApplication


@dataclass(frozen=True)
class Term:
    """A part of a sum.

    Attributes:
        application: the part.
        inputs, outputs: which inputs and outputs of the sum are its own, in its order. What it taps comes after those.
    """

    application: PointApplication
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def terms_of(application: Application) -> tuple[Term, ...]:
    """The terms of a sum; a single application is its own."""
    if isinstance(application, SumApplication):
        return application.terms
    single: Any = application
    return (Term(single, tuple(range(len(application.in_shapes))), tuple(range(application.num_results))),)


def derivative_terms(terms: Sequence[Term], mask: Mask) -> list[Term]:
    """The derivative of a sum: its inputs are those of the sum, and one more for each of the mask."""
    tangents = dict(zip(np.flatnonzero(mask).tolist(), range(len(mask), len(mask) + sum(mask)), strict=True))
    found = []
    for term in terms:
        own = tuple(mask[i] for i in term.inputs)
        if not any(own):
            continue
        everything = [*term.inputs, *(tangents[i] for i in term.inputs if mask[i])]
        for derivative, takes, has in term.application.derivatives(own):
            inputs = _chosen(everything, takes)
            if any(i >= len(mask) for i in inputs):  # else nothing moves
                single: Any = derivative
                found.append(Term(single, inputs, _chosen(term.outputs, has)))
    return found


def make_sum(name: str, terms: Sequence[Term], num_inputs: int, num_outputs: int) -> tuple[Application, Mask, Mask]:
    """The sum of one or more terms. The masks say which inputs and outputs there are terms for; it has only those."""
    used = [{i for term in terms for i in numbers(term)} for numbers in (lambda t: t.inputs, lambda t: t.outputs)]
    takes, has = (tuple(i in u for i in range(n)) for u, n in zip(used, (num_inputs, num_outputs), strict=True))
    new_in, new_out = ({old: new for new, old in enumerate(sorted(u))} for u in used)
    renumbered = [
        Term(t.application, tuple(new_in[i] for i in t.inputs), tuple(new_out[i] for i in t.outputs)) for t in terms
    ]
    (first, *rest) = renumbered
    if not rest and first == terms_of(first.application)[0]:
        return first.application, takes, has
    in_shapes: dict[int, tuple[int, ...]] = {}
    out_shapes: dict[int, tuple[int, ...]] = {}
    for term in renumbered:
        in_shapes.update(zip(term.inputs, term.application.in_shapes, strict=True))
        out_shapes.update(zip(term.outputs, term.application.out_shapes, strict=False))
    shapes = ([shapes[i] for i in range(len(shapes))] for shapes in (in_shapes, out_shapes))
    return SumApplication(name, renumbered, *shapes), takes, has


class SumApplication(Application):
    """A sum of applications of point functions, on any elements. Several may have an input, or add to an output."""

    def __init__(
        self,
        name: str,
        terms: Sequence[Term],
        in_shapes: Sequence[tuple[int, ...]],
        result_shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self.name = name
        self.terms = tuple(terms)
        self.in_shapes = tuple(in_shapes)
        tapping = [term.application for term in terms if term.application.num_tapped]
        # As of a single application: one more output says whether what is tapped was computed.
        self.optional = bool(tapping) and all(application.optional for application in tapping)
        tapped = [slot.shape for application in tapping for slot in _tapped(application)]
        self.out_shapes = (*result_shapes, *tapped, *[()] * self.optional)
        self.num_tapped = len(self.out_shapes) - len(result_shapes)
        self.dtype = self.terms[0].application.dtype
        # Where a term has no linear input it is constant in those of the others, and the sum is linear in none.
        linear = [{term.inputs[i] for i in term.application.linear} for term in self.terms]
        others = {i for term, own in zip(self.terms, linear, strict=True) for i in set(term.inputs) - own}
        self.linear = frozenset(set().union(*linear) - others) if all(linear) else frozenset()

    # -- libCEED -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _operands(self) -> list[int]:
        """Which input each operand of the call is: parameters once for each context that has them."""
        contexts = [
            i
            for term in self.terms
            for slot, i in zip(term.application.free, term.inputs, strict=True)
            if slot.kind == "parameters"
        ]
        return [i for i in range(len(self.in_shapes)) for _ in range(max(contexts.count(i), 1))]

    def connect(self) -> Connection:
        ceed = self.terms[0].application.domain.ceed
        contexts: dict[int, list[Vector | np.ndarray]] = {i: [] for i in self._operands}
        # Outputs that are gone may have been all that had an input.
        vectors = [ceed.Vector(math.prod(shape)) for shape in self.in_shapes]
        outputs = [ceed.Vector(math.prod(shape)) for shape in self.out_shapes[: self.num_results]]
        tapped: list[Vector] = []
        parts, idle = [], []
        for term in self.terms:
            application = term.application
            ends = application.new_ends()
            for slot, i in zip(application.free, term.inputs, strict=True):
                if slot.kind == "parameters":
                    contexts[i].append(ends.inputs[slot.name])
                else:
                    ends.inputs[slot.name] = vectors[i]
            tapped += ends.outputs[len(term.outputs) :]
            ends.outputs[: len(term.outputs)] = [outputs[i] for i in term.outputs]
            parts.append(application.build(ends=ends)[0])
            if self.optional:
                idle.append(application.silent().build(ends=ends)[0] if application.num_tapped else parts[-1])
        inputs = [end for i, vector in enumerate(vectors) for end in contexts[i] or [vector]]
        composite = self._composite(parts)
        if not self.optional:
            return Connection(composite, inputs, [*outputs, *tapped], (None, None))
        taps = [tap for term in self.terms for tap in term.application.function.taps]
        switches = [Switch(tap.params["binding"].consumer) for tap in taps]
        return Connection(composite, inputs, [*outputs, *tapped, None], (None, None), self._composite(idle), switches)

    def _composite(self, parts: Sequence[Operator]) -> CompositeOperator:
        composite = parts[0].ceed.CompositeOperator()
        composite.name = self.name
        for part in parts:
            composite.add_sub(part)
        composite.check()
        return composite

    def call(self, ctx: jax_compat.LoweringRuleContext, *operands: Any) -> Any:
        if not all(term.application.fits for term in self.terms):
            one_by_one = functools.partial(self._summed, lambda op, *inputs: apply_p.bind(*inputs, op=op))
            return lower_in_jax(ctx, one_by_one, self, operands)
        repeated = ctx.replace(avals_in=[ctx.avals_in[i] for i in self._operands])
        return super().call(repeated, *(operands[i] for i in self._operands))

    # -- plain JAX -----------------------------------------------------------------------------------------------

    def evaluate(self, *inputs: Any) -> list[Any]:
        return self._summed(lambda op, *own: op.evaluate(*own), *inputs)

    def _summed(self, run: Callable[..., list[Any]], *inputs: Any) -> list[Any]:
        """The results, where ``run(application, *inputs)`` gives those of a part."""
        results: list[Any] = [None] * self.num_results
        tapped: list[Any] = []
        for term in self.terms:
            outs = run(term.application, *(inputs[i] for i in term.inputs))
            for i, x in zip(term.outputs, outs, strict=False):
                results[i] = x if results[i] is None else jnp.add(results[i], x)
            tapped += outs[len(term.outputs) : len(term.application.function.results)]
        return [*results, *tapped, *[jnp.ones((), self.dtype)] * self.optional]

    # -- taps ----------------------------------------------------------------------------------------------------

    def emit(self, tapped: Sequence[Any], inputs: Sequence[Any]) -> None:
        start = 0
        for term in self.terms:
            application = term.application
            stop = start + len(_tapped(application))
            if application.num_tapped:
                flag = [tapped[-1] if self.optional else jnp.ones((), self.dtype)] * application.optional
                application.emit([*tapped[start:stop], *flag], [inputs[i] for i in term.inputs])
            start = stop

    def silent(self) -> SumApplication:
        return self._changed("silent", lambda application: application.silent())

    def batched(self) -> SumApplication:
        return self._changed("batched", lambda application: application.batched())

    def _changed(self, key: str, change: Callable[[PointApplication], PointApplication]) -> SumApplication:
        if not self.num_tapped:
            return self
        terms = [replace(term, application=change(term.application)) for term in self.terms]
        shapes = self.out_shapes[: self.num_results]
        result: SumApplication = self.derived(key, lambda: SumApplication(self.name, terms, self.in_shapes, shapes))
        return result

    # -- derivatives ---------------------------------------------------------------------------------------------

    def derivatives(self, mask: Mask) -> list[tuple[Application, Mask, Mask]]:
        def make() -> list[tuple[Application, Mask, Mask]]:
            terms = derivative_terms(self.terms, mask)
            count = len(mask) + sum(mask)
            return [make_sum(f"{self.name}_jvp", terms, count, self.num_results)] if terms else []

        result: list[tuple[Application, Mask, Mask]] = self.derived(("jvp", mask), make)
        return result

    def transpose(self, mask: Mask) -> tuple[Application, Mask]:
        def make() -> tuple[Application, Mask]:
            known = [i for i in range(len(mask)) if i not in self.linear]
            wanted = np.flatnonzero(mask).tolist()
            terms = []
            for term in self.terms:
                own = tuple(mask[i] for i in term.inputs)
                if not any(own):
                    continue
                transposed, takes = term.application.transpose(own)
                everything = [known.index(i) for i in term.inputs if i not in self.linear]
                everything += [len(known) + i for i in term.outputs]
                single: Any = transposed
                outputs = tuple(wanted.index(i) for i in _chosen(term.inputs, own))
                terms.append(Term(single, _chosen(everything, takes), outputs))
            count = len(known) + self.num_results
            return make_sum(f"{self.name}_transpose", terms, count, len(wanted))[:2]

        result: tuple[Application, Mask] = self.derived(("transpose", mask), make)
        return result

    def with_results(self, mask: Mask) -> SumApplication:
        def make() -> SumApplication:
            new = {old: i for i, old in enumerate(np.flatnonzero(mask).tolist())}
            terms = []
            for term in self.terms:
                own = tuple(mask[i] for i in term.outputs)
                if any(own) or term.application.num_tapped:
                    application = term.application if all(own) else term.application.with_results(own)
                    outputs = tuple(new[i] for i in _chosen(term.outputs, own))
                    terms.append(Term(application, term.inputs, outputs))
            return SumApplication(self.name, terms, self.in_shapes, _chosen(self.out_shapes[: self.num_results], mask))

        result: SumApplication = self.derived(("results", mask), make)
        return result


def _tapped(application: PointApplication) -> tuple[Slot, ...]:
    """What an application taps."""
    return application.function.results[len(application.function.outputs) :]


def _chosen(values: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(value for value, wanted in zip(values, mask, strict=True) if wanted)
