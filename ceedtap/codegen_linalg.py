"""Rules of :mod:`ceedtap.codegen` for the linear algebra of small matrices.

The factorisations are written out element by element, with choices instead of jumps, so that the loop over points
vectorises. Only the rotations of large matrices are in a loop, which ends when they have converged.

Eigenvectors and singular vectors have signs of their own, as they may by definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ceedtap.codegen import Builder, Complex, Elements, Scalar, TranslationError, constant, number, rule
from ceedtap.codegen_rules import Element, apply, choose

# Up to this size the sweeps of rotations are written out.
MAX_UNROLLED = 3
UNROLLED_SWEEPS = 6
MAX_SWEEPS = 15


class Value:
    """An element with Python's operators, which write C."""

    __slots__ = ("builder", "element")

    def __init__(self, builder: Builder, element: Element) -> None:
        self.builder = builder
        self.element = element

    def _with(self, name: str, *others: Value | float) -> Value:
        return Value(self.builder, apply(self.builder, name, self.element, *(self._like(o).element for o in others)))

    def _like(self, other: Value | float) -> Value:
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
        return self._like(other) / self

    def __neg__(self) -> Value:
        return self._with("neg")

    def __abs__(self) -> Value:
        return self._with("abs")

    def __gt__(self, other: Value | float) -> Value:
        return self._with("gt", other)

    def __and__(self, other: Value) -> Value:
        return self._with("and", other)

    def __or__(self, other: Value) -> Value:
        return self._with("or", other)

    def equals(self, other: Value | float) -> Value:
        return self._with("eq", other)

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
    chosen = choose(yes.builder, condition.element, yes.element, yes._like(no).element)
    return Value(yes.builder, chosen)


def _matrix(builder: Builder, x: Elements) -> Matrix:
    return [[Value(builder, e) for e in row] for row in x]


def _elements(matrix: Sequence[Sequence[Value]], shape: Sequence[int]) -> Elements:
    out = np.empty(tuple(shape), object)
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            out[i, j] = value.element
    return out


def _vector(values: Sequence[Value | Scalar]) -> Elements:
    out = np.empty(len(values), object)
    for i, value in enumerate(values):
        out[i] = value.element if isinstance(value, Value) else value
    return out


def _identity(like: Value, n: int, columns: int | None = None) -> Matrix:
    columns = n if columns is None else columns
    return [[like._like(float(i == j)) for j in range(columns)] for i in range(n)]


def _transposed(a: Matrix) -> Matrix:
    return [list(row) for row in zip(*a, strict=True)]


def _dot(a: Sequence[Value], b: Sequence[Value]) -> Value:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + x * y
    return total


def _batched(
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


def _refuse_complex(operand: Elements) -> None:
    if operand.size and isinstance(operand.flat[0], Complex):
        raise TranslationError("has no translation to C for complex matrices")


# -- triangular factors ------------------------------------------------------------------------------------------------


@rule("lu")
def _lu(builder: Builder, eqn: Any, a: Elements, **_: Any) -> list[Elements]:
    return _batched(eqn, lambda x: _lu_one(builder, x), [a], [2])


def _lu_one(builder: Builder, a: Elements) -> list[Elements]:
    """Partial pivoting: in each column, of the largest elements the first one."""
    rows = _matrix(builder, a)
    m, n = a.shape
    index = [number(i, np.int32) for i in range(m)]
    permutation: list[Scalar] = list(index)
    pivots: list[Scalar] = []
    for k in range(min(m, n)):
        at, best = index[k], abs(rows[k][k])
        row, source = rows[k], permutation[k]
        for i in range(k + 1, m):
            size = abs(rows[i][k])
            better = size > best
            assert isinstance(better.element, Scalar)
            best = where(better, size, best)
            at = _chosen(builder, better.element, index[i], at)
            row = [where(better, x, y) for x, y in zip(rows[i], row, strict=True)]
            source = _chosen(builder, better.element, permutation[i], source)
        for i in range(k + 1, m):
            here = apply(builder, "eq", at, index[i])
            assert isinstance(here, Scalar)
            moved = Value(builder, here)
            rows[i] = [where(moved, x, y) for x, y in zip(rows[k], rows[i], strict=True)]
            permutation[i] = _chosen(builder, here, permutation[k], permutation[i])
        rows[k], permutation[k] = row, source
        pivots.append(at)
        # Without a pivot the column is zero already, and stays so.
        pivot = where(row[k].equals(0.0), row[k]._like(1.0), row[k])
        inverse = 1.0 / pivot
        for i in range(k + 1, m):
            factor = rows[i][k] * inverse
            rest = [rows[i][j] - factor * row[j] for j in range(k + 1, n)]
            rows[i] = [*rows[i][:k], factor, *rest]
    return [_elements(rows, a.shape), _vector(pivots), _vector(permutation)]


def _chosen(builder: Builder, condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
    result = choose(builder, condition, yes, no)
    assert isinstance(result, Scalar)
    return result


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
                theirs = _chosen(builder, here, permutation[j], theirs)
                permutation[j] = _chosen(builder, here, mine, permutation[j])
            permutation[i] = theirs
        return [_vector(permutation)]

    return _batched(eqn, one, [pivots], [1])


@rule("cholesky")
def _cholesky(builder: Builder, eqn: Any, a: Elements, **_: Any) -> list[Elements]:
    return _batched(eqn, lambda x: [_elements(_cholesky_one(_matrix(builder, x)), x.shape)], [a], [2])


def _cholesky_one(a: Matrix) -> Matrix:
    """The lower factor; all nan, as in JAX, if the matrix is not positive definite."""
    n = len(a)
    factor = [[x._like(0.0) for x in row] for row in a]
    ok: Value | None = None
    for j in range(n):
        rest = a[j][j].real()
        for k in range(j):
            rest = rest - (factor[j][k] * factor[j][k].conj()).real()
        positive = rest > 0.0
        ok = positive if ok is None else ok & positive
        diagonal = rest.sqrt()
        inverse = 1.0 / diagonal
        factor[j][j] = _as_like(diagonal, a[j][j])
        scale = _as_like(inverse, a[j][j])
        for i in range(j + 1, n):
            x = a[i][j]
            for k in range(j):
                x = x - factor[i][k] * factor[j][k].conj()
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
        u, v = _matrix(builder, upper), [Value(builder, e) for e in vector]
        n = len(v)
        columns = _transposed([[x if j >= i else x._like(0.0) for j, x in enumerate(row)] for i, row in enumerate(u)])
        updated = [[_dot(columns[i], columns[j]) + v[i] * v[j] for j in range(n)] for i in range(n)]
        return [_elements(_transposed(_cholesky_one(updated)), upper.shape)]

    return _batched(eqn, one, [r, w], [2, 1])


@rule("triangular_solve")
def _triangular_solve(
    builder: Builder, eqn: Any, a: Elements, b: Elements, *, left_side: bool, lower: bool, transpose_a: bool,
    conjugate_a: bool, unit_diagonal: bool, **_: Any,
) -> list[Elements]:  # fmt: skip
    def one(matrix: Elements, right: Elements) -> list[Elements]:
        t, x = _matrix(builder, matrix), _matrix(builder, right)
        if conjugate_a:
            t = [[e.conj() for e in row] for row in t]
        forward = lower
        if transpose_a:
            t, forward = _transposed(t), not forward
        if not left_side:  # x t = b is t' x' = b'
            t, forward, x = _transposed(t), not forward, _transposed(x)
        x = _substituted(t, x, forward, unit_diagonal)
        return [_elements(x if left_side else _transposed(x), right.shape)]

    return _batched(eqn, one, [a, b], [2, 2])


def _substituted(t: Matrix, b: Matrix, forward: bool, unit_diagonal: bool) -> Matrix:
    n = len(t)
    x = [list(row) for row in b]
    for i in range(n) if forward else range(n - 1, -1, -1):
        for k in range(i) if forward else range(i + 1, n):
            x[i] = [y - t[i][k] * z for y, z in zip(x[i], x[k], strict=True)]
        if unit_diagonal:
            continue
        if len(x[i]) == 1:
            x[i] = [x[i][0] / t[i][i]]
        elif x[i]:
            inverse = 1.0 / t[i][i]
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
        factors, _, permutation = _lu_one(builder, dense)
        columns = _matrix(builder, right)
        permuted = []
        for i in range(n):
            row = columns[0]
            for j in range(1, n):
                here = Value(builder, apply(builder, "eq", permutation[i], number(j, np.int32)))
                row = [where(here, x, y) for x, y in zip(columns[j], row, strict=True)]
            permuted.append(row)
        lu = _matrix(builder, factors)
        return [_elements(_substituted(lu, _substituted(lu, permuted, True, True), False, False), right.shape)]

    return _batched(eqn, one, [dl, d, du, b], [1, 1, 1, 2])


@rule("symmetric_product")
def _symmetric_product(
    builder: Builder, eqn: Any, a: Elements, c: Elements, *, alpha: Any, beta: Any, **_: Any
) -> list:
    def one(left: Elements, added: Elements) -> list[Elements]:
        x, y = _matrix(builder, left), _matrix(builder, added)
        product = [[_dot(p, q) * float(alpha) for q in x] for p in x]
        total = [[u + v * float(beta) for u, v in zip(p, q, strict=True)] for p, q in zip(product, y, strict=True)]
        return [_elements(total, added.shape)]

    return _batched(eqn, one, [a, c], [2, 2])


# -- orthogonal factors ------------------------------------------------------------------------------------------------


@rule("qr")
def _qr(builder: Builder, eqn: Any, a: Elements, *, full_matrices: bool, pivoting: bool = False, **_: Any) -> list:
    if pivoting:
        raise TranslationError("has no translation to C with pivoting")
    _refuse_complex(a)
    m, n = a.shape[-2:]
    columns = m if full_matrices else min(m, n)

    def one(matrix: Elements) -> list[Elements]:
        reflected, taus = _reflections(_matrix(builder, matrix))
        q = _product(reflected, taus, m, columns)
        zero = q[0][0]._like(0.0)
        r = [[reflected[i][j] if j >= i else zero for j in range(n)] for i in range(columns)]
        return [_elements(q, (m, columns)), _elements(r, (columns, n))]

    return _batched(eqn, one, [a], [2])


@rule("geqrf")
def _geqrf(builder: Builder, eqn: Any, a: Elements, **_: Any) -> list[Elements]:
    _refuse_complex(a)

    def one(matrix: Elements) -> list[Elements]:
        reflected, taus = _reflections(_matrix(builder, matrix))
        return [_elements(reflected, matrix.shape), _vector(taus)]

    return _batched(eqn, one, [a], [2])


@rule("householder_product")
def _householder_product(builder: Builder, eqn: Any, a: Elements, taus: Elements) -> list[Elements]:
    _refuse_complex(a)

    def one(reflected: Elements, factors: Elements) -> list[Elements]:
        values = [Value(builder, e) for e in factors]
        return [_elements(_product(_matrix(builder, reflected), values, *reflected.shape), reflected.shape)]

    return _batched(eqn, one, [a, taus], [2, 1])


@rule("ormqr")
def _ormqr(
    builder: Builder, eqn: Any, a: Elements, taus: Elements, c: Elements, *, left: bool, transpose: bool
) -> list:
    _refuse_complex(a)

    def one(reflected: Elements, factors: Elements, matrix: Elements) -> list[Elements]:
        m = reflected.shape[0]
        q = _product(_matrix(builder, reflected), [Value(builder, e) for e in factors], m, m)
        q = _transposed(q) if transpose else q
        x = _matrix(builder, matrix)
        x = [[_dot(row, column) for column in _transposed(x if left else q)] for row in (q if left else x)]
        return [_elements(x, matrix.shape)]

    return _batched(eqn, one, [a, taus, c], [2, 1, 2])


def _reflections(a: Matrix) -> tuple[Matrix, list[Value]]:
    """Householder's reflections, their vectors below the diagonal, with the signs of LAPACK."""
    a = [list(row) for row in a]
    m, n = len(a), len(a[0])
    taus = []
    for k in range(min(m, n)):
        alpha = a[k][k]
        if k == m - 1:
            taus.append(alpha._like(0.0))
            continue
        below = [a[i][k] for i in range(k + 1, m)]
        squares = _dot(below, below)
        done = squares.equals(0.0)
        length = (alpha * alpha + squares).sqrt()
        beta = where(done, alpha, where(alpha > 0.0, -length, length))
        # Where nothing is to be done, 0 / 1 keeps nan out.
        tau = (beta - alpha) / where(done, beta._like(1.0), beta)
        scale = 1.0 / where(done, beta._like(1.0), alpha - beta)
        vector = [x * scale for x in below]
        for j in range(k + 1, n):
            inner = tau * (a[k][j] + _dot(vector, [a[i][j] for i in range(k + 1, m)]))
            a[k][j] = a[k][j] - inner
            for i, v in zip(range(k + 1, m), vector, strict=True):
                a[i][j] = a[i][j] - inner * v
        a[k][k] = beta
        for i, v in zip(range(k + 1, m), vector, strict=True):
            a[i][k] = v
        taus.append(tau)
    return a, taus


def _product(a: Matrix, taus: Sequence[Value], rows: int, columns: int) -> Matrix:
    """The first columns of the product of the reflections."""
    q = _identity(taus[0], rows, columns)
    for k in reversed(range(min(len(taus), columns))):
        vector = [taus[0]._like(1.0), *(a[i][k] for i in range(k + 1, rows))]
        for j in range(k, columns):
            inner = taus[k] * _dot(vector, [q[i][j] for i in range(k, rows)])
            for i, v in zip(range(k, rows), vector, strict=True):
                q[i][j] = q[i][j] - inner * v
    return q


# -- eigenvalues and singular values -----------------------------------------------------------------------------------


def _sweeps(builder: Builder, n: int, state: Matrix, sweep: Callable[[Matrix], tuple[Matrix, Value]]) -> Matrix:
    """Repeats `sweep`, which returns the new state and whether the old one had converged."""
    if n <= MAX_UNROLLED:
        for _ in range(1 if n == 2 else UNROLLED_SWEEPS):
            state, _converged = sweep(state)
        return state
    variables = [[Value(builder, builder.variable(x.element, x.element.dtype)) for x in row] for row in state]
    with builder.count(MAX_SWEEPS):
        new, converged = sweep(variables)
        assert isinstance(converged.element, Scalar)
        for row, values in zip(variables, new, strict=True):
            for variable, value in zip(row, values, strict=True):
                builder.set(variable.element, value.element)
        builder.exit_if(converged.element)
    return variables


def _angle(difference: Value, coupling: Value) -> tuple[Value, Value, Value]:
    """Tangent, cosine and sine of Jacobi's rotation."""
    none = coupling.equals(0.0)
    theta = difference / (coupling + coupling)
    large = abs(theta) + (theta * theta + 1.0).sqrt()
    t = where(none, coupling._like(0.0), 1.0 / where(theta > 0.0, large, -large))
    # theta = 0 is a quarter turn either way
    c = 1.0 / (t * t + 1.0).sqrt()
    return t, c, t * c


@rule("eigh")
def _eigh(
    builder: Builder, eqn: Any, a: Elements, *, lower: bool = True, subset_by_index: Any = None, **_: Any
) -> list[Elements]:
    _refuse_complex(a)
    if subset_by_index not in (None, (0, a.shape[-1])):
        raise TranslationError("has no translation to C for some of the eigenvalues only")

    def one(matrix: Elements) -> list[Elements]:
        values, vectors = _eigh_one(builder, _matrix(builder, matrix), lower)
        return [_elements(vectors, matrix.shape), _vector(values)]

    return _batched(eqn, one, [a], [2])


def _eigh_one(builder: Builder, a: Matrix, lower: bool) -> tuple[list[Value], Matrix]:
    """Jacobi's cyclic method. The state is a triangle of the matrix, and the vectors, one a row."""
    n = len(a)
    triangle = [a[i][j] if lower else a[j][i] for i in range(n) for j in range(i + 1)]

    def at(i: int, j: int) -> int:
        return max(i, j) * (max(i, j) + 1) // 2 + min(i, j)

    def sweep(state: Matrix) -> tuple[Matrix, Value]:
        s, v = list(state[0]), [list(row) for row in state[1:]]
        off = abs(s[at(1, 0)])
        for i in range(2, n):
            for j in range(i):
                off = off.maximum(abs(s[at(i, j)]))
        size = abs(s[0])
        for i in range(1, n):
            size = size.maximum(abs(s[at(i, i)]))
        converged = (size * 1e-15 > off) | off.equals(0.0)
        for p in range(n - 1):
            for q in range(p + 1, n):
                coupling = s[at(p, q)]
                t, c, sine = _angle(s[at(q, q)] - s[at(p, p)], coupling)
                tau = sine / (c + 1.0)
                s[at(p, p)] = s[at(p, p)] - t * coupling
                s[at(q, q)] = s[at(q, q)] + t * coupling
                s[at(p, q)] = coupling._like(0.0)
                for r in range(n):
                    if r not in (p, q):
                        x, y = s[at(r, p)], s[at(r, q)]
                        s[at(r, p)], s[at(r, q)] = x - sine * (y + tau * x), y + sine * (x - tau * y)
                    x, y = v[p][r], v[q][r]
                    v[p][r], v[q][r] = x - sine * (y + tau * x), y + sine * (x - tau * y)
        return [s, *v], converged

    state = [triangle, *_identity(a[0][0], n)]
    if n > 1:
        state = _sweeps(builder, n, state, sweep)
    values, vectors = _sorted([state[0][at(i, i)] for i in range(n)], state[1:], descending=False)
    return values, _transposed(vectors)


def _sorted(keys: list[Value], rows: Matrix, *, descending: bool) -> tuple[list[Value], Matrix]:
    keys, rows = list(keys), [list(row) for row in rows]
    for last in range(len(keys) - 1, 0, -1):
        for i in range(last):
            swap = keys[i + 1] > keys[i] if descending else keys[i] > keys[i + 1]
            keys[i], keys[i + 1] = where(swap, keys[i + 1], keys[i]), where(swap, keys[i], keys[i + 1])
            a, b = rows[i], rows[i + 1]
            rows[i] = [where(swap, y, x) for x, y in zip(a, b, strict=True)]
            rows[i + 1] = [where(swap, x, y) for x, y in zip(a, b, strict=True)]
    return keys, rows


@rule("svd")
def _svd(
    builder: Builder, eqn: Any, a: Elements, *, full_matrices: bool, compute_uv: bool, subset_by_index: Any = None,
    **_: Any,
) -> list[Elements]:  # fmt: skip
    _refuse_complex(a)
    m, n = a.shape[-2:]
    if subset_by_index not in (None, (0, min(m, n))):
        raise TranslationError("has no translation to C for some of the singular values only")

    def one(matrix: Elements) -> list[Elements]:
        x = _matrix(builder, matrix)
        tall = m >= n
        s, u, v = _svd_one(builder, x if tall else _transposed(x), full_matrices, compute_uv)
        if not compute_uv:
            return [_vector(s)]
        if not tall:
            u, v = v, u
        return [_vector(s), _elements(u, (m, len(u[0]))), _elements(_transposed(v), (len(v[0]), n))]

    return _batched(eqn, one, [a], [2])


def _svd_one(builder: Builder, a: Matrix, full: bool, vectors: bool) -> tuple[list[Value], Matrix, Matrix]:
    """Hestenes' one-sided rotations of the columns of a tall matrix.

    The left vectors come from a QR factorisation of the rotated columns, which are orthogonal: so they are orthonormal
    even where singular values are zero, and can be completed to a basis.
    """
    m, n = len(a), len(a[0])
    size = abs(a[0][0])
    for row in a:
        for x in row:
            size = size.maximum(abs(x))
    size = where(size.equals(0.0), size._like(1.0), size)  # keeps the squares in range
    inverse = 1.0 / size
    columns = [[x * inverse for x in column] for column in _transposed(a)]

    def sweep(state: Matrix) -> tuple[Matrix, Value]:
        w = [list(row) for row in state]
        converged: Value | None = None
        for p in range(n - 1):
            for q in range(p + 1, n):
                alpha, beta = _dot(w[p][:m], w[p][:m]), _dot(w[q][:m], w[q][:m])
                gamma = _dot(w[p][:m], w[q][:m])
                good = (alpha * beta * 1e-31 > gamma * gamma) | gamma.equals(0.0)
                converged = good if converged is None else converged & good
                _t, c, s = _angle(beta - alpha, gamma)
                for r in range(len(w[p])):
                    x, y = w[p][r], w[q][r]
                    w[p][r], w[q][r] = c * x - s * y, s * x + c * y
        assert converged is not None
        return w, converged

    state = [[*column, *unit] for column, unit in zip(columns, _identity(a[0][0], n), strict=True)]
    if n > 1:
        state = _sweeps(builder, n, state, sweep)
    norms = [_dot(row[:m], row[:m]) for row in state]
    _squares, state = _sorted(norms, state, descending=True)
    if not vectors:
        return [_dot(row[:m], row[:m]).sqrt() * size for row in state], [], []
    reflected, taus = _reflections(_transposed([row[:m] for row in state]))
    q = _product(reflected, taus, m, m if full else n)
    flipped = [reflected[k][k] * -1.0 > 0.0 for k in range(n)]
    s = [abs(reflected[k][k]) * size for k in range(n)]
    u = [[where(flipped[j], -x, x) if j < n else x for j, x in enumerate(row)] for row in q]
    return s, u, _transposed([row[m:] for row in state])
