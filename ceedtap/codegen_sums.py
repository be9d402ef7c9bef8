"""Rules of :mod:`ceedtap.codegen` for reductions, contractions and sorting."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.codegen import (
    Builder,
    Elements,
    NoLanes,
    Scalar,
    WantsLanes,
    consecutive,
    constant,
    elements,
    number,
    rule,
)
from ceedtap.codegen_control import via_jax
from ceedtap.codegen_lanes import is_varying, product
from ceedtap.codegen_permutation import Permutation, permutation_of, remember
from ceedtap.codegen_rules import MIN_LOOPED, Element, apply, choose, convert, load_at, multiply_add, real

# Contractions of more products, or with MIN_LOOPED or more terms or results in a row, become loops.
MAX_PRODUCTS = 512
# The same where several points are computed at once, and from how many on they had better be.
MAX_PRODUCTS_LANES = 48
MIN_PRODUCTS_LANES = 256
# So many sums at once, in registers.
BLOCK = 64
# Products that are added to each of them at once.
TERMS = 8
# Partial sums of a long inner product: a vector of the widest registers.
LANES = 8

# -- reductions --------------------------------------------------------------------------------------------------------


def _reduced(builder: Builder, name: str, values: Sequence[Element], start: Element) -> Element:
    """Combined in order. What the compiler may not reorder stays in the order in which it is written."""
    # 0 + x is 0 for -0; a single element is only moved.
    result: Element | None = start if name == "add" and len(values) > 1 else None
    for value in values:
        result = value if result is None else apply(builder, name, result, value)
    return start if result is None else result


_REDUCTIONS = {"reduce_sum": ("add", 0), "reduce_prod": ("mul", 1), "reduce_max": ("max", -np.inf),
               "reduce_min": ("min", np.inf), "reduce_and": ("and", True), "reduce_or": ("or", False),
               "reduce_xor": ("xor", 0)}  # fmt: skip


@rule(*_REDUCTIONS)
def _reduce(builder: Builder, eqn: Any, x: Elements, *, axes: Any, **_: Any) -> list[Elements]:
    name, start = _REDUCTIONS[eqn.primitive.name]
    dtype = eqn.outvars[0].aval.dtype
    if x.size == 0 and dtype.kind in "iu" and isinstance(start, float):
        start = np.iinfo(dtype).min if start < 0 else np.iinfo(dtype).max
    kept = [d for d in range(x.ndim) if d not in axes]
    moved = x.transpose([*kept, *axes]).reshape(*(x.shape[d] for d in kept), -1)
    out = np.empty([x.shape[d] for d in kept], object)
    for index in np.ndindex(out.shape):
        out[index] = _reduced(builder, name, list(moved[index]), constant(start if x.size == 0 else 0, dtype))
    return [out]


@rule("argmax", "argmin")
def _arg(builder: Builder, eqn: Any, x: Elements, *, axes: Any, index_dtype: Any) -> list[Elements]:
    compare = "gt" if eqn.primitive.name == "argmax" else "lt"
    (axis,) = axes
    moved = np.moveaxis(x, axis, -1)
    out = np.empty(moved.shape[:-1], object)
    for index in np.ndindex(out.shape):
        best, at = moved[index][0], number(0, index_dtype)
        for i, value in enumerate(moved[index][1:], 1):
            better = real(builder, compare, value, best)
            if value.dtype.kind == "f":  # the first nan wins
                is_nan = real(builder, "ne", value, value)
                was_nan = real(builder, "ne", best, best)
                better = real(builder, "and", real(builder, "or", better, is_nan), real(builder, "not", was_nan))
            at = choose(builder, better, number(i, index_dtype), at)
            best = choose(builder, better, value, best)
        out[index] = at
    return [out]


_CUMULATIVE = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}


@rule(*_CUMULATIVE)
def _cumulative(builder: Builder, eqn: Any, x: Elements, *, axis: int, reverse: bool) -> list[Elements]:
    moved = np.moveaxis(x, axis, -1).copy()
    order = range(moved.shape[-1] - 1, -1, -1) if reverse else range(moved.shape[-1])
    for index in np.ndindex(moved.shape[:-1]):
        so_far = None
        for i in order:
            value = moved[(*index, i)]
            so_far = value if so_far is None else apply(builder, _CUMULATIVE[eqn.primitive.name], so_far, value)
            moved[(*index, i)] = so_far
    return [np.moveaxis(moved, -1, axis)]


@rule("cumlogsumexp")
def _cumlogsumexp(builder: Builder, eqn: Any, x: Elements, *, axis: int, reverse: bool) -> list[Elements]:
    def function(x: Any) -> Any:
        return jax.lax.associative_scan(jnp.logaddexp, x, axis=axis, reverse=reverse)

    return via_jax(builder, function, [x], [eqn.invars[0].aval])


@rule("dot_general")
def _dot_general(
    builder: Builder, eqn: Any, a: Elements, b: Elements, *, dimension_numbers: Any, **_: Any
) -> list[Elements]:
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    free_a = [d for d in range(a.ndim) if d not in contract_a and d not in batch_a]
    free_b = [d for d in range(b.ndim) if d not in contract_b and d not in batch_b]
    dtype = eqn.outvars[0].aval.dtype
    k = math.prod(a.shape[d] for d in contract_a)
    left = a.transpose([*batch_a, *free_a, *contract_a]).reshape(
        math.prod(a.shape[d] for d in batch_a), math.prod(a.shape[d] for d in free_a), k
    )
    right = b.transpose([*batch_b, *free_b, *contract_b]).reshape(
        left.shape[0], math.prod(b.shape[d] for d in free_b), k
    )
    if builder.lanes is None and left.shape[1] * right.size >= MIN_PRODUCTS_LANES and dtype == np.float64:
        raise WantsLanes
    most = MAX_PRODUCTS_LANES if builder.lanes else MAX_PRODUCTS
    large = left.shape[1] * right.size > most or max(left.shape[1], right.shape[1], k) >= MIN_LOOPED
    if large and k and dtype.kind != "c":
        return [_contraction_loops(builder, left, right, dtype).reshape(eqn.outvars[0].aval.shape)]
    out = np.empty((left.shape[0], left.shape[1], right.shape[1]), object)
    for n, i, j in np.ndindex(out.shape):
        out[n, i, j] = _inner(builder, left[n, i], right[n, j], dtype)
    return [out.reshape(eqn.outvars[0].aval.shape)]


def _contraction_loops(builder: Builder, left: Elements, right: Elements, dtype: np.dtype) -> Elements:
    """out[n, i, j] = sum over k of left[n, i, k] * right[n, j, k], in loops whose innermost one runs over outputs."""
    if left.shape[1] > right.shape[1]:
        return _contraction_loops(builder, right, left, dtype).transpose(0, 2, 1)
    num, rows, depth = left.shape
    width = right.shape[1]
    out = np.empty((num, rows, width), object)
    for n in range(num):
        a = [e if e.dtype == dtype else convert(builder, e, dtype) for e in left[n].reshape(-1)]
        b = [e if e.dtype == dtype else convert(builder, e, dtype) for e in right[n].reshape(-1)]
        if builder.lanes and any(is_varying(builder, e) for e in (*a, *b)):
            out[n] = _product_in_lanes(builder, a, np.array(b, object).reshape(width, depth), rows, dtype)
            continue
        x = (*builder.table(a, dtype), dtype)
        if width < 2 * LANES and depth >= 4 * LANES:
            w = (*builder.table(b, dtype), dtype)
            out[n] = [[_long_inner(builder, x, w, i, j, depth) for j in range(width)] for i in range(rows)]
            continue
        w = (*_transposed_table(builder, np.array(b, object).reshape(width, depth), dtype), dtype)
        for i in range(rows):
            for start in range(0, width, BLOCK):
                block = min(BLOCK, width - start)
                sums = builder.empty_array(block, dtype)
                with builder.count(block) as j:
                    builder.store(sums, j, number(0, dtype))
                whole = depth - depth % TERMS
                if whole:
                    with builder.count(whole, step=TERMS) as k:
                        _add_products(builder, sums, x, w, (i * depth, start), (width, block), k.text, TERMS)
                if depth - whole:
                    _add_products(builder, sums, x, w, (i * depth, start), (width, block), str(whole), depth - whole)
                out[n, i, start : start + block] = builder.elements_of(sums, [block], dtype)
    return out


def _product_in_lanes(builder: Builder, a: list[Scalar], b: Elements, rows: int, dtype: np.dtype) -> Elements:
    if dtype != np.float64:
        raise NoLanes
    width, depth = b.shape
    if all(e.is_constant for e in b.reshape(-1)):
        w, strides = builder.table(list(b.T.reshape(-1)), dtype), (1, width)
    else:
        w, strides = builder.table(list(b.reshape(-1)), dtype), (depth, 1)
    array = builder.empty_array(rows * width, dtype)
    product(builder, array, builder.table(a, dtype), w, (rows, width, depth), strides)
    return builder.elements_of(array, (rows, width), dtype)


def _add_products(
    builder: Builder, sums: str, x: Any, w: Any, starts: tuple[int, int], sizes: tuple[int, int], k: str, terms: int
) -> None:
    """sums[j] += x[k] * w[k, j] + x[k + 1] * w[k + 1, j] ...: a sum is read and written once for all of them."""
    (x_start, w_start), (width, block) = starts, sizes
    factors = [load_at(builder, x, x_start + u, k) for u in range(terms)]
    with builder.count(block) as j:
        total = builder.load(sums, j.text, x[2], [j])
        for u, factor in enumerate(factors):
            weight = load_at(builder, w, w_start + u * width, f"{k} * {width}", j)
            total = multiply_add(builder, factor, weight, total)
        builder.store(sums, j, total)


def _long_inner(builder: Builder, x: Any, w: Any, i: int, j: int, depth: int) -> Scalar:
    """A sum of many products, as partial sums that the compiler can compute at once."""
    dtype = x[2]
    sums = builder.empty_array(LANES, dtype)
    with builder.count(LANES) as lane:
        builder.store(sums, lane, number(0, dtype))
    whole = depth - depth % LANES
    with builder.count(whole, step=LANES) as k, builder.count(LANES) as lane:
        factors = load_at(builder, x, i * depth, k, lane), load_at(builder, w, j * depth, k, lane)
        old = builder.load(sums, lane.text, dtype, [lane])
        builder.store(sums, lane, multiply_add(builder, *factors, old))
    parts = list(builder.elements_of(sums, [LANES], dtype))
    for rest in range(whole, depth):
        last = load_at(builder, x, i * depth + rest), load_at(builder, w, j * depth + rest)
        parts.append(real(builder, "mul", *last))
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [real(builder, "add", *pair) for pair in pairs] + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


def _transposed_table(builder: Builder, matrix: Elements, dtype: np.dtype) -> tuple[str, int]:
    """The transpose as an array for reading; transposed in a loop if the matrix lies in an array as it is."""
    run = consecutive(list(matrix.reshape(-1)))
    if run is None or 1 in matrix.shape:
        return builder.table(list(matrix.T.reshape(-1)), dtype)
    rows, columns = matrix.shape
    out = builder.empty_array(matrix.size, dtype)
    with builder.count(rows) as i, builder.count(columns) as j:
        at = builder.value(f"{j.text} * {rows} + {i.text}", np.int32, [i, j])
        builder.store(out, at, load_at(builder, (*run, dtype), 0, f"{i.text} * {columns}", j))
    return out, 0


def _inner(builder: Builder, a: Elements, b: Elements, dtype: Any) -> Element:
    def cast(x: Element) -> Element:
        return convert(builder, x, dtype) if isinstance(x, Scalar) and np.dtype(dtype).kind != "c" else x

    total: Element | None = None
    for x, y in zip(a, b, strict=True):
        total = multiply_add(builder, cast(x), cast(y), total)
    return constant(0, dtype) if total is None else total


@rule("conv_general_dilated")
def _convolution(builder: Builder, eqn: Any, x: Elements, kernel: Elements, **params: Any) -> list[Elements]:
    """Every output is a sum of products; JAX's derivative of the convolution of zeros says which."""
    dtype = eqn.outvars[0].aval.dtype
    with jax_compat.concrete():
        count = np.asarray(eqn.primitive.bind(jnp.zeros(x.shape), jnp.zeros(kernel.shape), **params)).shape
        out = np.full(math.prod(count), None, object)
        for i in range(x.size):
            unit = jnp.zeros(x.size).at[i].set(1.0).reshape(x.shape)
            marks = jnp.asarray(np.arange(1.0, kernel.size + 1).reshape(kernel.shape))
            which = np.asarray(eqn.primitive.bind(unit, marks, **params)).reshape(-1).round().astype(int)
            for o in np.nonzero(which)[0]:
                product = apply(builder, "mul", x.flat[i], kernel.flat[which[o] - 1])
                out[o] = product if out[o] is None else apply(builder, "add", out[o], product)
    out[[e is None for e in out]] = number(0, dtype)
    return [out.reshape(count)]


@rule("sort")
def _sort(builder: Builder, eqn: Any, *operands: Elements, dimension: int, num_keys: int, **_: Any) -> list[Elements]:
    """An insertion network: stable, without jumps; nan sorts last."""
    if (inverse := _inverse_permutation(builder, operands, num_keys)) is not None:
        return inverse
    moved = [np.moveaxis(x, dimension, -1).copy() for x in operands]
    n = moved[0].shape[-1]
    for index in np.ndindex(moved[0].shape[:-1]):
        rows = [x[index] for x in moved]
        for last in range(n - 1, 0, -1):
            for i in range(last):
                swap = _comes_before(builder, [r[i + 1] for r in rows[:num_keys]], [r[i] for r in rows[:num_keys]])
                for row in rows:
                    a, b = row[i], row[i + 1]
                    row[i], row[i + 1] = choose(builder, swap, b, a), choose(builder, swap, a, b)
    return [np.moveaxis(x, -1, dimension) for x in moved]


def _inverse_permutation(builder: Builder, operands: Sequence[Elements], num_keys: int) -> list[Elements] | None:
    """The rows of a pivoting sorted by their numbers, with their positions: what takes a permutation back."""
    if len(operands) != 2 or num_keys != 1 or operands[0].ndim != 1:
        return None
    n = len(operands[0])
    permutation = permutation_of(builder, operands[0])
    if permutation is None or any(not e.is_constant or e.value != i for i, e in enumerate(operands[1])):
        return None
    back = Permutation(permutation.exchanges, not permutation.inverse)
    positions = back.apply(builder, list(operands[1]))
    remember(builder, positions, back)
    return [elements(range(n), operands[0][0].dtype), np.array(positions, object)]


def _comes_before(builder: Builder, a: Sequence[Scalar], b: Sequence[Scalar]) -> Scalar:
    """Whether a sorts strictly before b, by the first key that differs."""
    op = functools.partial(real, builder)
    result: Scalar = number(False, bool)
    for x, y in reversed(list(zip(a, b, strict=True))):
        less = op("lt", x, y)
        equal = op("eq", x, y)
        if x.dtype.kind == "f":
            x_nan, y_nan = op("ne", x, x), op("ne", y, y)
            less = op("or", less, op("and", op("not", x_nan), y_nan))
            equal = op("or", equal, op("and", x_nan, y_nan))
        result = op("or", less, op("and", equal, result))
    return result


@rule("top_k")
def _top_k(builder: Builder, eqn: Any, x: Elements, *, k: int, axis: int = -1, **_: Any) -> list[Elements]:
    """Sorted by what has the opposite order: the complement of an integer, and of a float what its bits say, in which
    -0 < 0, and nan is first, or last with a minus sign."""

    def function(x: Any) -> Any:
        keys = x
        if jnp.issubdtype(x.dtype, jnp.floating):
            whole = np.dtype(f"i{x.dtype.itemsize}")
            bits = jax.lax.bitcast_convert_type(x, whole)
            keys = jnp.where(bits < 0, bits ^ np.iinfo(whole).max, bits)
        positions = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim)
        _, values, where = jax.lax.sort((~keys, x, positions), dimension=axis % x.ndim, num_keys=1)
        cut = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=min(k, n), axis=axis % x.ndim)
        return cut(values), cut(where)

    n = x.shape[axis]

    return via_jax(builder, function, [x], [eqn.invars[0].aval])
