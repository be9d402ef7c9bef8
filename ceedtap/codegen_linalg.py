"""Rules of :mod:`ceedtap.codegen` for the linear algebra of small matrices: triangular factors.

The factorisations are written out element by element, with choices instead of jumps, so that the loop over points
vectorises. Orthogonal factors and eigenvalues are in ``codegen_spectral``, which shares the tools here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ceedtap.codegen import Builder, Complex, Elements, Scalar, TranslationError, constant, number, rule
from ceedtap.codegen_permutation import Exchange, Permutation, remember
from ceedtap.codegen_rules import Element, apply, choose, multiply_add


class Value:
    """An element with Python's operators, which write C."""

    __slots__ = ("builder", "element")

    def __init__(self, builder: Builder, element: Element) -> None:
        self.builder = builder
        self.element = element

    def _with(self, name: str, *others: Value | float) -> Value:
        return Value(self.builder, apply(self.builder, name, self.element, *(self.like(o).element for o in others)))

    def like(self, other: Value | float) -> Value:
        if isinstance(other, Value):
            return other
        if isinstance(self.element, Complex):
            return Value(self.builder, constant(other, f"c{2 * self.element.re.dtype.itemsize}"))
        return Value(self.builder, number(other, self.element.dtype))

    def __add__(self, other: Value | float) -> Value:
        return self._with("add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._with("sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._with("mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._with("div", other)

    def __rtruediv__(self, other: float) -> Value:
        return self.like(other) / self

    def plus_product(self, x: Value, y: Value) -> Value:
        """self + x * y, in one rounding where processors can."""
        return Value(self.builder, multiply_add(self.builder, x.element, y.element, self.element))

    def less_product(self, x: Value, y: Value) -> Value:
        """self - x * y, in one rounding where processors can."""
        return Value(self.builder, multiply_add(self.builder, x.element, y.element, self.element, minus=True))

    def __neg__(self) -> Value:
        return self._with("neg")

    def __abs__(self) -> Value:
        return self._with("abs")

    def __gt__(self, other: Value | float) -> Value:
        return self._with("gt", other)

    def at_least(self, other: Value | float) -> Value:
        return self._with("ge", other)

    def __and__(self, other: Value) -> Value:
        return self._with("and", other)

    def __or__(self, other: Value) -> Value:
        return self._with("or", other)

    def equals(self, other: Value | float) -> Value:
        return self._with("eq", other)

    @property
    def dtype(self) -> np.dtype:
        return self.element.re.dtype if isinstance(self.element, Complex) else self.element.dtype

    def sqrt(self) -> Value:
        return self._with("sqrt")

    def conj(self) -> Value:
        return self._with("conj") if isinstance(self.element, Complex) else self

    def real(self) -> Value:
        return self._with("real") if isinstance(self.element, Complex) else self

    def maximum(self, other: Value | float) -> Value:
        return self._with("max", other)


Matrix = list[list[Value]]


def where(condition: Value, yes: Value, no: Value | float) -> Value:
    assert isinstance(condition.element, Scalar)
    chosen = choose(yes.builder, condition.element, yes.element, yes.like(no).element)
    return Value(yes.builder, chosen)


def matrix_of(builder: Builder, x: Elements) -> Matrix:
    return [[Value(builder, e) for e in row] for row in x]


def elements_of(matrix: Sequence[Sequence[Value]], shape: Sequence[int]) -> Elements:
    out = np.empty(tuple(shape), object)
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            out[i, j] = value.element
    return out


def vector_of(values: Sequence[Value | Scalar]) -> Elements:
    out = np.empty(len(values), object)
    for i, value in enumerate(values):
        out[i] = value.element if isinstance(value, Value) else value
    return out


def identity(like: Value, n: int, columns: int | None = None) -> Matrix:
    columns = n if columns is None else columns
    return [[like.like(float(i == j)) for j in range(columns)] for i in range(n)]


def transposed(a: Matrix) -> Matrix:
    return [list(row) for row in zip(*a, strict=True)]


def dot(a: Sequence[Value], b: Sequence[Value]) -> Value:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total.plus_product(x, y)
    return total


def batched(
    eqn: Any, function: Callable[..., Sequence[Elements]], operands: Sequence[Elements], core: Sequence[int]
) -> list[Elements]:
    """Applies a function of one problem to all; `core` has the number of dimensions of one problem's operands."""
    lead = operands[0].shape[: operands[0].ndim - core[0]]
    out = [np.empty(v.aval.shape, object) for v in eqn.outvars]
    for index in np.ndindex(*lead):
        results = function(*(x[index] for x in operands))
        for array, result in zip(out, results, strict=True):
            array[index] = result if result.ndim else result[()]
    return out


def refuse_complex(operand: Elements) -> None:
    if operand.size and isinstance(operand.flat[0], Complex):
        raise TranslationError("has no translation to C for complex matrices")


# -- triangular factors ------------------------------------------------------------------------------------------------


@rule("lu")
def _lu(builder: Builder, eqn: Any, a: Elements, **_: Any) -> list[Elements]:
    return batched(eqn, lambda x: _lu_one(builder, x)[:3], [a], [2])


def _lu_one(builder: Builder, a: Elements) -> tuple[Elements, Elements, Elements, Permutation]:
    """Partial pivoting: in each column, of the largest elements the first one.

    The factors below a pivot are products with its reciprocal, as in LAPACK. They stay what they are where it would be
    infinite: they are zeros then, or nan. That keeps infinities and nan where LAPACK has them.
    """
    rows = matrix_of(builder, a)
    m, n = a.shape
    numbers: list[Element] = [number(i, np.int32) for i in range(m)]
    pivots: list[Scalar] = []
    exchanges = []
    for k in range(min(m, n)):
        exchange, pivot_number, best = _exchange(builder, [row[k] for row in rows], k)
        columns = [exchange.apply(builder, [x.element for x in column]) for column in transposed(rows)]
        rows = [[Value(builder, e) for e in row] for row in zip(*columns, strict=True)]
        numbers = exchange.apply(builder, numbers)
        pivots.append(pivot_number)
        exchanges.append(exchange)
        row = rows[k]
        if k + 1 < m:
            inverse = 1.0 / row[k]
            scale = where(best.at_least(_SMALLEST[best.dtype]), inverse, inverse.like(1.0))
        for i in range(k + 1, m):
            factor = rows[i][k] * scale
            rest = [rows[i][j].less_product(factor, row[j]) for j in range(k + 1, n)]
            rows[i] = [*rows[i][:k], factor, *rest]
    permutation = Permutation(tuple(exchanges))
    remember(builder, numbers, permutation)
    return elements_of(rows, a.shape), vector_of(pivots), vector_of(numbers), permutation


# Normal numbers, whose reciprocals are finite.
_SMALLEST = {dtype: float(np.finfo(dtype).tiny) for dtype in (np.dtype(np.float64), np.dtype(np.float32))}


def _exchange(builder: Builder, column: Sequence[Value], k: int) -> tuple[Exchange, Scalar, Value]:
    """Which row comes to position k, its number, and the size of its element."""
    best = abs(column[k])
    at = best.like(float(k))  # not an integer: choices of one type vectorise best
    pivot_number = number(k, np.int32)
    better: list[Scalar] = []
    for i in range(k + 1, len(column)):
        size = abs(column[i])
        larger = size > best
        best, at = where(larger, size, best), where(larger, at.like(float(i)), at)
        better.append(larger.element)
        pivot_number = choose(builder, larger.element, number(i, np.int32), pivot_number)
    here = [at.equals(float(i)).element for i in range(k + 1, len(column) - 1)]
    return Exchange(k, tuple(better), (*here, *better[-1:])), pivot_number, best


@rule("lu_pivots_to_permutation")
def _lu_pivots_to_permutation(builder: Builder, eqn: Any, pivots: Elements, *, permutation_size: int) -> list[Elements]:
    dtype = eqn.outvars[0].aval.dtype

    def one(swaps: Elements) -> list[Elements]:
        permutation = [number(i, dtype) for i in range(permutation_size)]
        for i, other in enumerate(swaps):
            mine, theirs = permutation[i], permutation[i]
            for j in range(permutation_size):
                here = apply(builder, "eq", other, number(j, other.dtype))
                assert isinstance(here, Scalar)
                theirs = choose(builder, here, permutation[j], theirs)
                permutation[j] = choose(builder, here, mine, permutation[j])
            permutation[i] = theirs
        return [vector_of(permutation)]

    return batched(eqn, one, [pivots], [1])


@rule("cholesky")
def _cholesky(builder: Builder, eqn: Any, a: Elements, **_: Any) -> list[Elements]:
    return batched(eqn, lambda x: [elements_of(_cholesky_one(matrix_of(builder, x)), x.shape)], [a], [2])


def _cholesky_one(a: Matrix) -> Matrix:
    """The lower factor; all nan, as in JAX, if the matrix is not positive definite."""
    n = len(a)
    factor = [[x.like(0.0) for x in row] for row in a]
    ok: Value | None = None
    for j in range(n):
        rest = a[j][j].real()
        for k in range(j):
            if isinstance(factor[j][k].element, Complex):
                rest = rest - (factor[j][k] * factor[j][k].conj()).real()
            else:
                rest = rest.less_product(factor[j][k], factor[j][k])
        positive = rest > 0.0
        ok = positive if ok is None else ok & positive
        diagonal = rest.sqrt()
        inverse = 1.0 / diagonal
        factor[j][j] = _as_like(diagonal, a[j][j])
        scale = _as_like(inverse, a[j][j])
        for i in range(j + 1, n):
            x = a[i][j]
            for k in range(j):
                x = x.less_product(factor[i][k], factor[j][k].conj())
            factor[i][j] = x * scale
    assert ok is not None
    return [[where(ok, x, float("nan")) if j <= i else x for j, x in enumerate(row)] for i, row in enumerate(factor)]


def _as_like(x: Value, like: Value) -> Value:
    if isinstance(like.element, Complex):
        assert isinstance(x.element, Scalar)
        return Value(x.builder, Complex(x.element, number(0, x.element.dtype)))
    return x


@rule("cholesky_update")
def _cholesky_update(builder: Builder, eqn: Any, r: Elements, w: Elements) -> list[Elements]:
    def one(upper: Elements, vector: Elements) -> list[Elements]:
        u, v = matrix_of(builder, upper), [Value(builder, e) for e in vector]
        n = len(v)
        columns = transposed([[x if j >= i else x.like(0.0) for j, x in enumerate(row)] for i, row in enumerate(u)])
        updated = [[dot(columns[i], columns[j]) + v[i] * v[j] for j in range(n)] for i in range(n)]
        return [elements_of(transposed(_cholesky_one(updated)), upper.shape)]

    return batched(eqn, one, [r, w], [2, 1])


@rule("triangular_solve")
def _triangular_solve(
    builder: Builder, eqn: Any, a: Elements, b: Elements, *, left_side: bool, lower: bool, transpose_a: bool,
    conjugate_a: bool, unit_diagonal: bool, **_: Any,
) -> list[Elements]:  # fmt: skip
    def one(matrix: Elements, right: Elements) -> list[Elements]:
        t, x = matrix_of(builder, matrix), matrix_of(builder, right)
        if conjugate_a:
            t = [[e.conj() for e in row] for row in t]
        forward = lower
        if transpose_a:
            t, forward = transposed(t), not forward
        if not left_side:  # x t = b is t' x' = b'
            t, forward, x = transposed(t), not forward, transposed(x)
        x = _substituted(t, x, forward, unit_diagonal)
        return [elements_of(x if left_side else transposed(x), right.shape)]

    return batched(eqn, one, [a, b], [2, 2])


def _substituted(t: Matrix, b: Matrix, forward: bool, unit_diagonal: bool) -> Matrix:
    n = len(t)
    x = [list(row) for row in b]
    for i in range(n) if forward else range(n - 1, -1, -1):
        for k in range(i) if forward else range(i + 1, n):
            x[i] = [y.less_product(t[i][k], z) for y, z in zip(x[i], x[k], strict=True)]
        if unit_diagonal:
            continue
        inverse = 1.0 / t[i][i]  # as in LAPACK, and there already if `t` is a factor
        x[i] = [y * inverse for y in x[i]]
    return x


@rule("tridiagonal_solve")
def _tridiagonal_solve(
    builder: Builder, eqn: Any, dl: Elements, d: Elements, du: Elements, b: Elements, **_: Any
) -> list[Elements]:
    def one(below: Elements, diagonal: Elements, above: Elements, right: Elements) -> list[Elements]:
        n = diagonal.size
        zero = number(0, diagonal[0].dtype)
        dense = np.full((n, n), zero, object)
        for i in range(n):
            dense[i, i] = diagonal[i]
            if i:
                dense[i, i - 1], dense[i - 1, i] = below[i], above[i - 1]
        factors, _, _, permutation = _lu_one(builder, dense)
        permuted = transposed(
            [[Value(builder, e) for e in permutation.apply(builder, list(column))] for column in right.T]
        )
        lu = matrix_of(builder, factors)
        return [elements_of(_substituted(lu, _substituted(lu, permuted, True, True), False, False), right.shape)]

    return batched(eqn, one, [dl, d, du, b], [1, 1, 1, 2])


@rule("symmetric_product")
def _symmetric_product(
    builder: Builder, eqn: Any, a: Elements, c: Elements, *, alpha: Any, beta: Any, **_: Any
) -> list:
    def one(left: Elements, added: Elements) -> list[Elements]:
        x, y = matrix_of(builder, left), matrix_of(builder, added)
        product = [[dot(p, q) * float(alpha) for q in x] for p in x]
        total = [[u + v * float(beta) for u, v in zip(p, q, strict=True)] for p, q in zip(product, y, strict=True)]
        return [elements_of(total, added.shape)]

    return batched(eqn, one, [a, c], [2, 2])
