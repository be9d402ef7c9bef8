"""Rules of :mod:`ceedtap.codegen` for functions with many elements: loops over arrays in place of a line for each.

A function of a few thousand lines, or fewer, is written out: its loop over points is vectorised, and nothing is as
fast. A compiler takes longer than in proportion for more. So what is longer is translated again with these rules, which
write as many lines for an array of a thousand elements as for one of ten. Sums have the terms in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ceedtap import jax_compat
from ceedtap.codegen import Builder, Complex, Elements, NoLanes, Scalar, looped, number, translate
from ceedtap.codegen_arrays import from_parts, real_parts
from ceedtap.codegen_linalg import batched
from ceedtap.codegen_rules import apply, choose, convert, multiply_add, real
from ceedtap.codegen_sums import _REDUCTIONS, MIN_PRODUCTS_LANES

# Fewer elements are written out here too.
MIN_ELEMENTS = 8
# Steps of a loop with so many operations of numbers in all are written out.
MAX_OPERATIONS = 200

_MOVES = {
    "broadcast_in_dim", "concatenate", "copy", "gather", "iota", "pad", "reshape", "rev", "slice", "squeeze",
    "stop_gradient", "transpose", "split",
}  # fmt: skip


def scalar_operations(jaxpr: Any) -> int:
    """How many operations of numbers a jaxpr has, loops of a known length turn by turn."""
    total = 0
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, jax_compat.sub_jaxprs(eqn)
        sizes = [math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape")]
        if inner:
            total += eqn.params.get("length", 1) * sum(map(scalar_operations, inner))
        elif name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            total += math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        elif name not in _MOVES:
            total += max(sizes, default=0)
    return total


def _index(builder: Builder, *terms: tuple[Scalar, int] | int) -> Scalar:
    """The sum of indices times strides and of numbers."""
    words = [t[0].text if t[1] == 1 else f"{t[0].text} * {t[1]}" for t in terms if not isinstance(t, int) and t[1]]
    rest = sum(t for t in terms if isinstance(t, int))
    text = " + ".join(words + [str(rest)] * bool(rest or not words))
    if not words:
        return number(rest, np.int32)
    return builder.value(f"({text})", np.int32, [t[0] for t in terms if not isinstance(t, int)])


def _load(builder: Builder, array: tuple[str, int], dtype: Any, *terms: tuple[Scalar, int] | int) -> Scalar:
    at = _index(builder, array[1], *terms)
    return builder.load(array[0], at.text, dtype, [at])


def _written(builder: Builder, size: int, dtype: Any) -> str:
    """An array that is read while it is written to."""
    name = builder.empty_array(size, dtype)
    if builder.lanes:
        builder.varying.add(name)
    return name


def _state(builder: Builder, elements: Sequence[Scalar], dtype: Any) -> str:
    """The same with elements to begin with."""
    name = builder.array(elements, dtype)
    if builder.lanes:
        builder.varying.add(name)
    return name


def _copy(builder: Builder, to: str, first: Sequence[tuple[Scalar, int] | int], source: str, at: int, size: int,
          dtype: Any) -> None:  # fmt: skip
    """to[first + j] = source[at + j]"""
    with builder.count(size) as j:
        builder.store(to, _index(builder, *first, (j, 1)), _load(builder, (source, at), dtype, (j, 1)))


# -- sums --------------------------------------------------------------------------------------------------------------


@looped(*_REDUCTIONS)
def _reduce(builder: Builder, eqn: Any, x: Elements, *, axes: Any, **_: Any) -> list[Elements] | None:
    name, _start = _REDUCTIONS[eqn.primitive.name]
    kept = [d for d in range(x.ndim) if d not in axes]
    shape = [x.shape[d] for d in kept]
    size = math.prod(shape)
    if x.size < 4 * MIN_ELEMENTS or x.size == size:
        return None
    parts = real_parts(x.transpose([*kept, *axes]))
    if len(parts) > 1 and name != "add":
        return None
    count = x.size // size
    read = []
    for part in parts:
        dtype = part[0].dtype
        source = builder.table(part, dtype)
        out = _written(builder, size, dtype)
        with builder.count(size) as o:
            builder.store(out, o, _load(builder, source, dtype, (o, count)))
            with builder.count(count, start=1) as r:
                so_far = _load(builder, (out, 0), dtype, (o, 1))
                builder.store(out, o, real(builder, name, so_far, _load(builder, source, dtype, (o, count), (r, 1))))
        read.append(list(builder.elements_of(out, [size], dtype)))
    return [from_parts(read, shape)]


@looped("dot_general")
def _dot_general(
    builder: Builder, eqn: Any, a: Elements, b: Elements, *, dimension_numbers: Any, **_: Any
) -> list[Elements] | None:
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    free_a = [d for d in range(a.ndim) if d not in contract_a and d not in batch_a]
    free_b = [d for d in range(b.ndim) if d not in contract_b and d not in batch_b]
    aval = eqn.outvars[0].aval
    depth = math.prod(a.shape[d] for d in contract_a)
    num = math.prod(a.shape[d] for d in batch_a)
    left = a.transpose([*batch_a, *free_a, *contract_a]).reshape(num, -1 if depth and num else 0, depth)
    right = b.transpose([*batch_b, *contract_b, *free_b]).reshape(num, depth, -1 if depth and num else 0)
    products = left.size * right.shape[2]
    if products < 4 * MIN_ELEMENTS:
        return None
    dtype = np.dtype(aval.dtype)
    if builder.lanes and dtype == np.float64 and num == 1 and products >= MIN_PRODUCTS_LANES:
        return None  # in registers
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    lefts, rights = ([np.array(p, object).reshape(x.shape) for p in real_parts(x)] for x in (left, right))
    if any(e.dtype != part for x in (*lefts, *rights) for e in x.reshape(-1)):
        return None
    out = {(i, j): _product(builder, x, y, part) for i, x in enumerate(lefts) for j, y in enumerate(rights)}
    if len(out) == 1:
        return [out[0, 0].reshape(aval.shape)]
    if (1, 0) in out and (0, 1) in out:
        re, im = _both(builder, "sub", out[0, 0], out[1, 1]), _both(builder, "add", out[0, 1], out[1, 0])
    else:
        re, im = out[0, 0], out[(1, 0) if (1, 0) in out else (0, 1)]
    return [from_parts([list(re), list(im)], aval.shape)]


def _both(builder: Builder, name: str, a: Elements, b: Elements) -> Elements:
    (source, at), (other, begin), dtype = (
        builder.table(list(a), a[0].dtype),
        builder.table(list(b), b[0].dtype),
        a[0].dtype,
    )
    out = builder.empty_array(a.size, dtype)
    with builder.count(a.size) as j:
        result = real(builder, name, _load(builder, (source, at), dtype, (j, 1)),
                      _load(builder, (other, begin), dtype, (j, 1)))  # fmt: skip
        builder.store(out, j, result)
    return builder.elements_of(out, [a.size], dtype)


def _product(builder: Builder, left: Elements, right: Elements, dtype: np.dtype) -> Elements:
    """out[n, i, j] = sum over k of left[n, i, k] * right[n, k, j]; the innermost loop runs over results."""
    (num, rows, depth), width = left.shape, right.shape[2]
    a, b = builder.table(list(left.reshape(-1)), dtype), builder.table(list(right.reshape(-1)), dtype)
    out = _written(builder, num * rows * width, dtype)
    with builder.loop_nest([(num, ()), (rows, ())]) as (n, i):
        with builder.count(width) as j:
            builder.store(out, _index(builder, (n, rows * width), (i, width), (j, 1)), number(0, dtype))
        with builder.count(depth) as k:
            factor = _load(builder, a, dtype, (n, rows * depth), (i, depth), (k, 1))
            with builder.count(width) as j:
                at = _index(builder, (n, rows * width), (i, width), (j, 1))
                weight = _load(builder, b, dtype, (n, depth * width), (k, width), (j, 1))
                builder.store(out, at, multiply_add(builder, factor, weight, builder.load(out, at.text, dtype, [at])))
    return builder.elements_of(out, [num * rows * width], dtype)


# -- branches and loops ------------------------------------------------------------------------------------------------


def _kept(builder: Builder, values: Sequence[Elements], avals: Sequence[Any]) -> tuple[list[Any], list[Elements]]:
    """Arrays that a loop changes: for each value its real parts (array, type), and its elements."""
    arrays, views = [], []
    for value, aval in zip(values, avals, strict=True):
        parts = (
            [(_state(builder, part, part[0].dtype), part[0].dtype) for part in real_parts(value)] if value.size else []
        )
        arrays.append(parts)
        read = [list(builder.elements_of(name, [value.size], dtype)) for name, dtype in parts]
        views.append(from_parts(read, aval.shape) if value.size else value)
    return arrays, views


def _set(builder: Builder, arrays: Sequence[Any], values: Sequence[Elements]) -> None:
    """Sets arrays to values that may consist of what is in them: all are read before any is written to."""
    mine = {name for parts in arrays for name, _ in parts}
    moves = []
    for parts, value in zip(arrays, values, strict=True):
        for (name, dtype), part in zip(parts, real_parts(value) if value.size else [], strict=True):
            if all(e.place == (name, k) for k, e in enumerate(part)):
                continue
            source, at = builder.table(part, dtype)
            if source in mine:
                source, at = builder.array(part, dtype), 0
            moves.append((name, source, at, len(part), dtype))
    for name, source, at, size, dtype in moves:
        _copy(builder, name, (), source, at, size, dtype)


@looped("scan")
def _scan(
    builder: Builder, eqn: Any, *operands: Elements, jaxpr: Any, length: int, reverse: bool, **_: Any
) -> list[Elements] | None:
    if length < 2 or length * scalar_operations(jaxpr.jaxpr) <= MAX_OPERATIONS:
        return None
    num_consts, num_carry = jax_compat.scan_counts(eqn)
    consts, start, xs = (
        operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    )  # fmt: skip
    avals = [v.aval for v in eqn.outvars]
    arrays, carry = _kept(builder, start, avals[:num_carry])
    sources = [[(builder.table(p, p[0].dtype), p[0].dtype) for p in real_parts(x)] if x.size else [] for x in xs]
    stored = []
    for aval in avals[num_carry:]:
        dtype, size = np.dtype(aval.dtype), math.prod(aval.shape)
        types = [np.dtype(f"f{dtype.itemsize // 2}")] * 2 if dtype.kind == "c" else [dtype]
        stored.append([(_written(builder, size, t), t) for t in types] if size else [])
    with builder.count(*((0, length - 1, -1) if reverse else (length,))) as step:
        inner = []
        for x, parts in zip(xs, sources, strict=True):
            shape = x.shape[1:]
            read = [_slice(builder, source, dtype, step, math.prod(shape)) for source, dtype in parts]
            inner.append(from_parts(read, shape) if x.size else np.empty(shape, object))
        results = translate(builder, jaxpr.jaxpr, jaxpr.consts, [*consts, *carry, *inner])
        for written, value in zip(stored, results[num_carry:], strict=True):
            for (name, dtype), part in zip(written, real_parts(value) if written else [], strict=True):
                source, at = builder.table(part, dtype)
                _copy(builder, name, [(step, len(part))], source, at, len(part), dtype)
        _set(builder, arrays, results[:num_carry])
    ys = []
    for written, aval in zip(stored, avals[num_carry:], strict=True):
        read = [list(builder.elements_of(name, [math.prod(aval.shape)], dtype)) for name, dtype in written]
        ys.append(from_parts(read, aval.shape) if read else np.empty(aval.shape, object))
    return [*carry, *ys]


def _slice(builder: Builder, source: tuple[str, int], dtype: Any, step: Scalar, size: int) -> list[Scalar]:
    """What belongs to a step."""
    if size < MIN_ELEMENTS:
        return [_load(builder, source, dtype, (step, size), k) for k in range(size)]
    name = builder.empty_array(size, dtype)
    with builder.count(size) as j:
        builder.store(name, j, _load(builder, source, dtype, (step, size), (j, 1)))
    return list(builder.elements_of(name, [size], dtype))


@looped("while")
def _while(
    builder: Builder, eqn: Any, *operands: Elements, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int,
    body_jaxpr: Any, **_: Any,
) -> list[Elements] | None:  # fmt: skip
    start = operands[cond_nconsts + body_nconsts :]
    if cond_jaxpr.out_avals[0].shape or sum(s.size for s in start) < 2 * MIN_ELEMENTS:
        return None
    if builder.lanes:
        raise NoLanes
    arrays, carry = _kept(builder, start, [v.aval for v in eqn.outvars])
    consts = operands[:cond_nconsts], operands[cond_nconsts : cond_nconsts + body_nconsts]
    with builder.nest("for (;;)"):
        (go,) = translate(builder, cond_jaxpr.jaxpr, cond_jaxpr.consts, [*consts[0], *carry])
        builder.exit_unless(go[()])
        _set(builder, arrays, translate(builder, body_jaxpr.jaxpr, body_jaxpr.consts, [*consts[1], *carry]))
    return carry


@looped("cond")
def _cond(
    builder: Builder, eqn: Any, which: Elements, *operands: Elements, branches: Any, **_: Any
) -> list[Elements] | None:
    index = which[()]
    avals = [v.aval for v in eqn.outvars]
    work = sum(scalar_operations(b.jaxpr) for b in branches)
    if (
        index.is_constant
        or builder.lanes
        or work <= MAX_OPERATIONS
        or sum(math.prod(a.shape) for a in avals) < MIN_ELEMENTS
    ):
        return None
    arrays = []
    for aval in avals:
        dtype, size = np.dtype(aval.dtype), math.prod(aval.shape)
        types = [np.dtype(f"f{dtype.itemsize // 2}")] * 2 if dtype.kind == "c" else [dtype]
        arrays.append([(builder.empty_array(size, t), t) for t in types] if size else [])
    for i, branch in enumerate(branches):
        test = f" ({index.text} <= {i})" if i < len(branches) - 1 else ""
        with builder.nest((("if" if i == 0 else "else if") if test else "else") + test, [index]):
            _set(builder, arrays, translate(builder, branch.jaxpr, branch.consts, operands))
    out = []
    for parts, aval in zip(arrays, avals, strict=True):
        read = [list(builder.elements_of(name, [math.prod(aval.shape)], dtype)) for name, dtype in parts]
        out.append(from_parts(read, aval.shape) if read else np.empty(aval.shape, object))
    return out


# -- triangular factors ------------------------------------------------------------------------------------------------


def _real_matrix(a: Elements, least: int) -> bool:
    return a.size >= least and not any(isinstance(e, Complex) for e in a.reshape(-1))


@looped("lu")
def _lu(builder: Builder, eqn: Any, a: Elements, **_: Any) -> list[Elements] | None:
    if not _real_matrix(a, 2 * MIN_ELEMENTS):
        return None
    return batched(eqn, lambda x: _lu_one(builder, x), [a], [2])


def _lu_one(builder: Builder, matrix: Elements) -> list[Elements]:
    """Partial pivoting: in each column, of the largest elements the first one."""
    (m, n), dtype, whole = matrix.shape, matrix[0, 0].dtype, np.dtype(np.int32)
    steps = min(m, n)
    a = _state(builder, list(matrix.reshape(-1)), dtype)
    permutation = _state(builder, [number(i, whole) for i in range(m)], whole)
    pivots, at, best = (_written(builder, size, t) for size, t in ((steps, whole), (1, whole), (1, dtype)))
    zero = number(0, whole)

    def swap(array: str, t: Any, one: Sequence[Any], other: Sequence[Any]) -> None:
        i, j = _index(builder, *one), _index(builder, *other)
        x, y = builder.load(array, i.text, t, [i]), builder.load(array, j.text, t, [j])
        builder.store(array, i, y)
        builder.store(array, j, x)

    with builder.count(steps) as k:
        builder.store(at, zero, k)
        builder.store(best, zero, real(builder, "abs", _load(builder, (a, 0), dtype, (k, n + 1))))
        with builder.count(m, f"{k.text} + 1", uses=[k]) as i:
            size = real(builder, "abs", _load(builder, (a, 0), dtype, (i, n), (k, 1)))
            better = real(builder, "gt", size, _load(builder, (best, 0), dtype))
            builder.store(at, zero, choose(builder, better, i, _load(builder, (at, 0), whole)))
            builder.store(best, zero, choose(builder, better, size, _load(builder, (best, 0), dtype)))
        row = _load(builder, (at, 0), whole)
        builder.store(pivots, k, row)
        swap(permutation, whole, [(k, 1)], [(row, 1)])
        with builder.count(n) as j:
            swap(a, dtype, [(k, n), (j, 1)], [(row, n), (j, 1)])
        pivot = _load(builder, (a, 0), dtype, (k, n + 1))
        # As where it is written out, and in LAPACK.
        normal = real(builder, "ge", real(builder, "abs", pivot), number(np.finfo(dtype).tiny, dtype))
        one = number(1, dtype)
        scale = choose(builder, normal, real(builder, "div", one, pivot), one)
        with builder.count(m, f"{k.text} + 1", uses=[k]) as i:
            place = _index(builder, (i, n), (k, 1))
            factor = real(builder, "mul", builder.load(a, place.text, dtype, [place]), scale)
            builder.store(a, place, factor)
            with builder.count(n, f"{k.text} + 1", uses=[k]) as j:
                here = _index(builder, (i, n), (j, 1))
                other = _load(builder, (a, 0), dtype, (k, n), (j, 1))
                old = builder.load(a, here.text, dtype, [here])
                builder.store(a, here, multiply_add(builder, factor, other, old, minus=True))
    return [builder.elements_of(a, (m, n), dtype), builder.elements_of(pivots, [steps], whole),
            builder.elements_of(permutation, [m], whole)]  # fmt: skip


@looped("lu_pivots_to_permutation")
def _lu_pivots_to_permutation(
    builder: Builder, eqn: Any, pivots: Elements, *, permutation_size: int
) -> list[Elements] | None:
    if permutation_size < MIN_ELEMENTS // 2:
        return None
    dtype = eqn.outvars[0].aval.dtype

    def one(swaps: Elements) -> list[Elements]:
        out = _state(builder, [number(i, dtype) for i in range(permutation_size)], dtype)
        given = builder.table(list(swaps), swaps[0].dtype)
        with builder.count(swaps.size) as i:
            other = _load(builder, given, swaps[0].dtype, (i, 1))
            j = _index(builder, (convert(builder, other, np.int32), 1))
            mine, theirs = _load(builder, (out, 0), dtype, (i, 1)), _load(builder, (out, 0), dtype, (j, 1))
            builder.store(out, i, theirs)
            builder.store(out, j, mine)
        return [builder.elements_of(out, [permutation_size], dtype)]

    return batched(eqn, one, [pivots], [1])


@looped("triangular_solve")
def _triangular_solve(
    builder: Builder, eqn: Any, a: Elements, b: Elements, *, left_side: bool, lower: bool, transpose_a: bool,
    unit_diagonal: bool, **_: Any,
) -> list[Elements] | None:  # fmt: skip
    if not (_real_matrix(a, 2 * MIN_ELEMENTS) and _real_matrix(b, 1)):
        return None

    def one(matrix: Elements, right: Elements) -> list[Elements]:
        forward = lower != transpose_a
        t, x = (matrix.T if transpose_a else matrix), right
        if not left_side:  # x t = b is t' x' = b'
            t, forward, x = t.T, not forward, x.T
        x = _substituted(builder, t, x, forward, unit_diagonal)
        return [x if left_side else x.T]

    return batched(eqn, one, [a, b], [2, 2])


def _substituted(builder: Builder, t: Elements, b: Elements, forward: bool, unit_diagonal: bool) -> Elements:
    (n, width), dtype = b.shape, b[0, 0].dtype
    factor, x = builder.table(list(t.reshape(-1)), dtype), _state(builder, list(b.reshape(-1)), dtype)
    with builder.count(*((n,) if forward else (0, n - 1, -1))) as i:
        end, first = (i.text, "0") if forward else (str(n), f"{i.text} + 1")
        with builder.count(end, first, uses=[i]) as k:
            f = _load(builder, factor, dtype, (i, n), (k, 1))
            with builder.count(width) as j:
                here = _index(builder, (i, width), (j, 1))
                other = _load(builder, (x, 0), dtype, (k, width), (j, 1))
                old = builder.load(x, here.text, dtype, [here])
                builder.store(x, here, multiply_add(builder, f, other, old, minus=True))
        if not unit_diagonal:
            inverse = real(builder, "div", number(1, dtype), _load(builder, factor, dtype, (i, n + 1)))
            with builder.count(width) as j:
                here = _index(builder, (i, width), (j, 1))
                builder.store(x, here, real(builder, "mul", builder.load(x, here.text, dtype, [here]), inverse))
    return builder.elements_of(x, (n, width), dtype)


@looped("cholesky")
def _cholesky(builder: Builder, eqn: Any, a: Elements, **_: Any) -> list[Elements] | None:
    if not _real_matrix(a, 2 * MIN_ELEMENTS):
        return None
    return batched(eqn, lambda x: [_cholesky_one(builder, x)], [a], [2])


def _cholesky_one(builder: Builder, matrix: Elements) -> Elements:
    """The lower factor; all nan, as in JAX, if the matrix is not positive definite."""
    n, dtype = len(matrix), matrix[0, 0].dtype
    above = number(0, dtype)
    a = _state(builder, [matrix[i, j] if j <= i else above for i in range(n) for j in range(n)], dtype)
    ok = _state(builder, [number(1, dtype)], dtype)  # nan at the end if it is not
    zero = number(0, np.int32)
    with builder.count(n) as j:
        with builder.count(n, j.text, uses=[j]) as i, builder.count(j.text, uses=[j]) as k:
            here = _index(builder, (i, n), (j, 1))
            left, right = (_load(builder, (a, 0), dtype, (row, n), (k, 1)) for row in (i, j))
            old = builder.load(a, here.text, dtype, [here])
            builder.store(a, here, multiply_add(builder, left, right, old, minus=True))
        diagonal = _load(builder, (a, 0), dtype, (j, n + 1))
        positive = real(builder, "gt", diagonal, number(0, dtype))
        builder.store(ok, zero, choose(builder, positive, _load(builder, (ok, 0), dtype), number(np.nan, dtype)))
        root = real(builder, "sqrt", diagonal)
        builder.store(a, _index(builder, (j, n + 1)), root)
        inverse = real(builder, "div", number(1, dtype), root)
        with builder.count(n, f"{j.text} + 1", uses=[j]) as i:
            here = _index(builder, (i, n), (j, 1))
            builder.store(a, here, real(builder, "mul", builder.load(a, here.text, dtype, [here]), inverse))
    good = apply(builder, "eq", _load(builder, (ok, 0), dtype), number(1, dtype))
    with builder.count(n) as i, builder.count(f"{i.text} + 1", uses=[i]) as j:
        here = _index(builder, (i, n), (j, 1))
        builder.store(a, here, choose(builder, good, builder.load(a, here.text, dtype, [here]), number(np.nan, dtype)))
    return builder.elements_of(a, (n, n), dtype)
