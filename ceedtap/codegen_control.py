"""Rules of :mod:`ceedtap.codegen` for functions in functions, branches and loops."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ceedtap import jax_compat
from ceedtap.codegen import (
    Builder,
    Complex,
    Elements,
    Scalar,
    TranslationError,
    number,
    rule,
    translate,
)
from ceedtap.codegen_arrays import flat_index, from_parts, real_parts
from ceedtap.codegen_rules import choose, elementwise, real, select

# Loops of at most so many equations in all are written out.
MAX_UNROLLED = 400
# Branches of at most so many equations are all computed, and the result is chosen: no jump, so loops vectorise.
MAX_CHOSEN = 60

# -- functions in functions --------------------------------------------------------------------------------------------


def via_jax(
    builder: Builder, function: Callable[..., Any], operands: Sequence[Elements], avals: Sequence[Any]
) -> list[Elements]:
    """Translates a JAX function in place of a primitive."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    with jax_compat.concrete():
        closed = jax.make_jaxpr(function)(*shapes)
    return translate(builder, closed.jaxpr, closed.consts, operands)


@rule("jit", "closed_call", "remat2", "remat_opt", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call",
      "custom_lin", "call", "composite", "linear_call")  # fmt: skip
def _nested(builder: Builder, eqn: Any, *operands: Elements, **params: Any) -> list[Elements]:
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    if inner is None:
        raise TranslationError("has no translation to C")
    consts = getattr(inner, "consts", ())
    jaxpr = getattr(inner, "jaxpr", inner)
    return translate(builder, jaxpr, consts, operands)


@rule("custom_linear_solve")
def _custom_linear_solve(builder: Builder, eqn: Any, *operands: Elements, const_lengths: Any, jaxprs: Any) -> list:
    ends = np.cumsum([const_lengths.matvec, const_lengths.vecmat, const_lengths.solve, const_lengths.transpose_solve])
    # What the user gave is run, whatever it makes of the matrix. Derivatives are systems of the same kind already.
    inputs = [*operands[ends[1] : ends[2]], *operands[ends[3] :]]
    return translate(builder, jaxprs.solve.jaxpr, jaxprs.solve.consts, inputs)


def _num_equations(jaxpr: Any) -> int:
    return sum(1 + sum(_num_equations(sub) for sub in jax_compat.sub_jaxprs(eqn)) for eqn in jaxpr.eqns)


@rule("cond")
def _cond(builder: Builder, eqn: Any, which: Elements, *operands: Elements, branches: Any, **_: Any) -> list[Elements]:
    index = which[()]
    if index.is_constant:
        chosen = branches[min(max(int(index.value), 0), len(branches) - 1)]
        return translate(builder, chosen.jaxpr, chosen.consts, operands)
    cheap = all(_num_equations(b.jaxpr) <= MAX_CHOSEN and not _has_loop(b.jaxpr) for b in branches)
    if cheap:
        results = [translate(builder, b.jaxpr, b.consts, operands) for b in branches]
        # A condition of two branches is converted from a truth value, which is all that is needed of it.
        return [
            elementwise(builder, lambda b, *x: select(b, index, *x), *options) if options[0].size else options[0]
            for options in zip(*results, strict=True)
        ]
    avals = [v.aval for v in eqn.outvars]
    out = [_variables(builder, None, aval) for aval in avals]
    for i, branch in enumerate(branches):
        head = "if" if i == 0 else "else if"
        test = f" ({index.text} <= {i})" if i < len(branches) - 1 else ""
        with builder.nest((head if test else "else") + test, [index]):
            for variables, values in zip(out, translate(builder, branch.jaxpr, branch.consts, operands), strict=True):
                _assign(builder, variables, values)
    return out


def _has_loop(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in ("while", "scan") or any(map(_has_loop, jax_compat.sub_jaxprs(eqn))) for eqn in jaxpr.eqns
    )


def _variables(builder: Builder, initial: Elements | None, aval: Any) -> Elements:
    out = np.empty(aval.shape, object)
    dtype = np.dtype(aval.dtype)
    for index in np.ndindex(aval.shape):
        start = None if initial is None else initial[index]
        if dtype.kind == "c":
            part = f"f{dtype.itemsize // 2}"
            parts = (None, None) if start is None else (start.re, start.im)
            out[index] = Complex(*(builder.variable(p, part) for p in parts))
        else:
            out[index] = builder.variable(start, dtype)
    return out


def _assign(builder: Builder, variables: Elements, values: Elements) -> None:
    for variable, value in zip(variables.reshape(-1), values.reshape(-1), strict=True):
        if isinstance(variable, Complex):
            builder.set(variable.re, value.re)
            builder.set(variable.im, value.im)
        else:
            builder.set(variable, value)


def _held(builder: Builder, values: Elements, variables: set[str]) -> Elements:
    """Values that do not change when the variables are set: those that are variables themselves are copied."""

    def hold(x: Scalar) -> Scalar:
        if x.text not in variables:
            return x
        return builder.variable(x, x.dtype)

    out = values.copy()
    for index in np.ndindex(values.shape):
        e = values[index]
        out[index] = Complex(hold(e.re), hold(e.im)) if isinstance(e, Complex) else hold(e)
    return out


def _update(builder: Builder, carry: Sequence[Elements], new: Sequence[Elements]) -> None:
    """Sets the variables of a loop to their next values, all at once."""
    names = {s.text for c in carry for e in c.reshape(-1) for s in ((e.re, e.im) if isinstance(e, Complex) else (e,))}
    held = [_held(builder, values, names) for values in new]
    for variables, values in zip(carry, held, strict=True):
        _assign(builder, variables, values)


@rule("while")
def _while(
    builder: Builder, eqn: Any, *operands: Elements, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int,
    body_jaxpr: Any, **_: Any,
) -> list[Elements]:  # fmt: skip
    cond_consts = operands[:cond_nconsts]
    body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
    start = operands[cond_nconsts + body_nconsts :]
    carry = [_variables(builder, s, v.aval) for s, v in zip(start, eqn.outvars, strict=True)]
    with builder.nest("for (;;)"):
        (go,) = translate(builder, cond_jaxpr.jaxpr, cond_jaxpr.consts, [*cond_consts, *carry])
        # Of a batch of loops, one goes on while any does; what has ended keeps its state.
        any_goes = functools.reduce(functools.partial(real, builder, "or"), go.reshape(-1), number(False, bool))
        builder.exit_unless(any_goes)
        new = translate(builder, body_jaxpr.jaxpr, body_jaxpr.consts, [*body_consts, *carry])
        if go.ndim:
            new = [_where_going(builder, go, values, state) for values, state in zip(new, carry, strict=True)]
        _update(builder, carry, new)
    return carry


def _where_going(builder: Builder, go: Elements, new: Elements, old: Elements) -> Elements:
    """The batch is in front."""
    out = np.empty(new.shape, object)
    for index in np.ndindex(new.shape):
        out[index] = choose(builder, go[index[: go.ndim]], new[index], old[index])
    return out


@rule("scan")
def _scan(
    builder: Builder, eqn: Any, *operands: Elements, jaxpr: Any, length: int, reverse: bool, **params: Any
) -> list:
    num_consts, num_carry = jax_compat.scan_counts(eqn)
    consts, start, xs = (
        operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    )  # fmt: skip
    order = range(length - 1, -1, -1) if reverse else range(length)
    y_avals = [v.aval for v in eqn.outvars[num_carry:]]
    if length * max(_num_equations(jaxpr.jaxpr), 1) <= MAX_UNROLLED:
        carry = list(start)
        ys = [np.empty(aval.shape, object) for aval in y_avals]
        for i in order:
            results = translate(
                builder, jaxpr.jaxpr, jaxpr.consts, [*consts, *carry, *(x[i : i + 1].reshape(x.shape[1:]) for x in xs)]
            )
            carry = results[:num_carry]
            for y, value in zip(ys, results[num_carry:], strict=True):
                y[i] = value if value.ndim else value[()]
        return [*carry, *ys]

    sources = [[(*builder.table(part, part[0].dtype), part[0].dtype) for part in real_parts(x)] if x.size else []
              for x in xs]  # fmt: skip
    carry = [_variables(builder, s, v.aval) for s, v in zip(start, eqn.outvars, strict=False)]
    stored = [_result_arrays(builder, aval) for aval in y_avals]
    step = builder.variable(number(order[0] if length else 0, np.int32), np.int32)
    with builder.nest(f"for (; {step.text} {'>= 0' if reverse else f'< {length}'};)", [step]):
        inner = []
        for x, source in zip(xs, sources, strict=True):
            size, shape = math.prod(x.shape[1:]), x.shape[1:]
            loaded = [
                [builder.load(a, f"{step.text} * {size} + {begin + k}", dtype, [step]) for k in range(size)]
                for a, begin, dtype in source
            ]
            inner.append(from_parts(loaded, shape) if size else np.empty(shape, object))
        results = translate(builder, jaxpr.jaxpr, jaxpr.consts, [*consts, *carry, *inner])
        for parts, value in zip(stored, results[num_carry:], strict=True):
            for (a, _), part in zip(parts, real_parts(value), strict=False):
                for k, scalar in enumerate(part):
                    at = flat_index(builder, [(len(part), step)], k)
                    builder.store(a, at, scalar)
        _update(builder, carry, results[:num_carry])
        one = number(-1 if reverse else 1, np.int32)
        builder.set(step, builder.value(f"{step.text} + {one.text}", np.int32, [step]))
    ys = []
    for parts, aval in zip(stored, y_avals, strict=True):
        read = [list(builder.elements_of(a, [math.prod(aval.shape)], dtype)) for a, dtype in parts]
        ys.append(from_parts(read, aval.shape))
    return [*carry, *ys]


def _result_arrays(builder: Builder, aval: Any) -> list[tuple[str, np.dtype]]:
    dtype = np.dtype(aval.dtype)
    parts = [np.dtype(f"f{dtype.itemsize // 2}")] * 2 if dtype.kind == "c" else [dtype]
    size = math.prod(aval.shape)
    return [(builder.empty_array(size, part), part) for part in parts]
