"""Rules of :mod:`ceedtap.codegen` for small matrices: orthogonal factors, symmetric eigenvalues, singular values.

Written out as in ``codegen_linalg``. Only the rotations of large matrices are in a loop, which ends when they have
converged. Eigenvectors and singular vectors have signs of their own, as they may by definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ceedtap.codegen import Builder, Elements, Scalar, TranslationError, rule
from ceedtap.codegen_linalg import (
    Matrix,
    Value,
    batched,
    dot,
    elements_of,
    identity,
    matrix_of,
    refuse_complex,
    transposed,
    vector_of,
    where,
)

# Up to this size the sweeps of rotations are written out.
MAX_UNROLLED = 3
UNROLLED_SWEEPS = 6
MAX_SWEEPS = 15


def _size(a: Matrix) -> Value:
    """The largest absolute value; nan counts as nothing, and stays where it is."""
    size = abs(a[0][0])
    for row in a:
        for x in map(abs, row):
            size = where(x > size, x, size)
    return size


def _in_range(a: Matrix) -> tuple[Matrix, Value]:
    """The matrix times a power of two that keeps the squares of its numbers in range, and the inverse power.

    Most matrices need none, and are as they are then.
    """
    size = _size(a)
    far = float(np.finfo(size.dtype).maxexp // 3)
    one, large, small = size.like(1.0), size > 2.0**far, size.like(2.0**-far) > size
    down, up = size.like(2.0 ** (-2 * far)), size.like(2.0 ** (2 * far))
    scale, back = where(large, down, where(small, up, one)), where(large, up, where(small, down, one))
    return [[x * scale for x in row] for row in a], back


# -- orthogonal factors ------------------------------------------------------------------------------------------------


@rule("qr")
def _qr(builder: Builder, eqn: Any, a: Elements, *, full_matrices: bool, pivoting: bool = False, **_: Any) -> list:
    if pivoting:
        raise TranslationError("has no translation to C with pivoting")
    refuse_complex(a)
    m, n = a.shape[-2:]
    columns = m if full_matrices else min(m, n)

    def one(matrix: Elements) -> list[Elements]:
        reflected, taus = _reflections(matrix_of(builder, matrix))
        q = _product(reflected, taus, m, columns)
        zero = q[0][0].like(0.0)
        r = [[reflected[i][j] if j >= i else zero for j in range(n)] for i in range(columns)]
        return [elements_of(q, (m, columns)), elements_of(r, (columns, n))]

    return batched(eqn, one, [a], [2])


@rule("geqrf")
def _geqrf(builder: Builder, eqn: Any, a: Elements, **_: Any) -> list[Elements]:
    refuse_complex(a)

    def one(matrix: Elements) -> list[Elements]:
        reflected, taus = _reflections(matrix_of(builder, matrix))
        return [elements_of(reflected, matrix.shape), vector_of(taus)]

    return batched(eqn, one, [a], [2])


@rule("householder_product")
def _householder_product(builder: Builder, eqn: Any, a: Elements, taus: Elements) -> list[Elements]:
    refuse_complex(a)

    def one(reflected: Elements, factors: Elements) -> list[Elements]:
        values = [Value(builder, e) for e in factors]
        return [elements_of(_product(matrix_of(builder, reflected), values, *reflected.shape), reflected.shape)]

    return batched(eqn, one, [a, taus], [2, 1])


@rule("ormqr")
def _ormqr(
    builder: Builder, eqn: Any, a: Elements, taus: Elements, c: Elements, *, left: bool, transpose: bool
) -> list:
    refuse_complex(a)

    def one(reflected: Elements, factors: Elements, matrix: Elements) -> list[Elements]:
        m = reflected.shape[0]
        q = _product(matrix_of(builder, reflected), [Value(builder, e) for e in factors], m, m)
        q = transposed(q) if transpose else q
        x = matrix_of(builder, matrix)
        x = [[dot(row, column) for column in transposed(x if left else q)] for row in (q if left else x)]
        return [elements_of(x, matrix.shape)]

    return batched(eqn, one, [a, taus, c], [2, 1, 2])


def _reflections(a: Matrix) -> tuple[Matrix, list[Value]]:
    """Householder's reflections, their vectors below the diagonal, with the signs of LAPACK."""
    a, back = _in_range(a)
    m, n = len(a), len(a[0])
    taus = []
    for k in range(min(m, n)):
        alpha = a[k][k]
        if k == m - 1:
            taus.append(alpha.like(0.0))
            continue
        below = [a[i][k] for i in range(k + 1, m)]
        squares = dot(below, below)
        done = squares.equals(0.0)
        length = (alpha * alpha + squares).sqrt()
        beta = where(done, alpha, where(alpha > 0.0, -length, length))
        # Where nothing is to be done, 0 / 1 keeps nan out.
        tau = (beta - alpha) / where(done, beta.like(1.0), beta)
        scale = 1.0 / where(done, beta.like(1.0), alpha - beta)
        vector = [x * scale for x in below]
        for j in range(k + 1, n):
            inner = tau * (a[k][j] + dot(vector, [a[i][j] for i in range(k + 1, m)]))
            a[k][j] = a[k][j] - inner
            for i, v in zip(range(k + 1, m), vector, strict=True):
                a[i][j] = a[i][j] - inner * v
        a[k][k] = beta
        for i, v in zip(range(k + 1, m), vector, strict=True):
            a[i][k] = v
        taus.append(tau)
    return [[x * back if j >= i else x for j, x in enumerate(row)] for i, row in enumerate(a)], taus


def _product(a: Matrix, taus: Sequence[Value], rows: int, columns: int) -> Matrix:
    """The first columns of the product of the reflections."""
    q = identity(taus[0], rows, columns)
    for k in reversed(range(min(len(taus), columns))):
        vector = [taus[0].like(1.0), *(a[i][k] for i in range(k + 1, rows))]
        for j in range(k, columns):
            inner = taus[k] * dot(vector, [q[i][j] for i in range(k, rows)])
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
    t = where(none, coupling.like(0.0), 1.0 / where(theta > 0.0, large, -large))
    # theta = 0 is a quarter turn either way
    c = 1.0 / (t * t + 1.0).sqrt()
    return t, c, t * c


@rule("eigh")
def _eigh(
    builder: Builder, eqn: Any, a: Elements, *, lower: bool = True, subset_by_index: Any = None, **_: Any
) -> list[Elements]:
    refuse_complex(a)
    if subset_by_index not in (None, (0, a.shape[-1])):
        raise TranslationError("has no translation to C for some of the eigenvalues only")

    def one(matrix: Elements) -> list[Elements]:
        values, vectors = _eigh_one(builder, matrix_of(builder, matrix), lower)
        return [elements_of(vectors, matrix.shape), vector_of(values)]

    return batched(eqn, one, [a], [2])


def _eigh_one(builder: Builder, a: Matrix, lower: bool) -> tuple[list[Value], Matrix]:
    """Jacobi's cyclic method. The state is a triangle of the matrix, and the vectors, one a row."""
    n = len(a)
    a = a if lower else transposed(a)
    rows, back = _in_range([[a[max(i, j)][min(i, j)] for j in range(n)] for i in range(n)])
    triangle = [rows[i][j] for i in range(n) for j in range(i + 1)]

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
                s[at(p, q)] = coupling.like(0.0)
                for r in range(n):
                    if r not in (p, q):
                        x, y = s[at(r, p)], s[at(r, q)]
                        s[at(r, p)], s[at(r, q)] = x - sine * (y + tau * x), y + sine * (x - tau * y)
                    x, y = v[p][r], v[q][r]
                    v[p][r], v[q][r] = x - sine * (y + tau * x), y + sine * (x - tau * y)
        return [s, *v], converged

    state = [triangle, *identity(rows[0][0], n)]
    if n > 1:
        state = _sweeps(builder, n, state, sweep)
    values, vectors = _sorted([state[0][at(i, i)] for i in range(n)], state[1:], descending=False)
    return [x * back for x in values], transposed(vectors)


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
    refuse_complex(a)
    m, n = a.shape[-2:]
    if subset_by_index not in (None, (0, min(m, n))):
        raise TranslationError("has no translation to C for some of the singular values only")

    def one(matrix: Elements) -> list[Elements]:
        x = matrix_of(builder, matrix)
        tall = m >= n
        s, u, v = _svd_one(builder, x if tall else transposed(x), full_matrices, compute_uv)
        if not compute_uv:
            return [vector_of(s)]
        if not tall:
            u, v = v, u
        return [vector_of(s), elements_of(u, (m, len(u[0]))), elements_of(transposed(v), (len(v[0]), n))]

    return batched(eqn, one, [a], [2])


def _svd_one(builder: Builder, a: Matrix, full: bool, vectors: bool) -> tuple[list[Value], Matrix, Matrix]:
    """Hestenes' one-sided rotations of the columns of a tall matrix.

    The left vectors come from a QR factorisation of the rotated columns, which are orthogonal: so they are orthonormal
    even where singular values are zero, and can be completed to a basis.
    """
    m, n = len(a), len(a[0])
    a, back = _in_range(a)
    size = _size(a)
    size = where(size.equals(0.0), size.like(1.0), size)  # keeps the squares of squares in range
    inverse = 1.0 / size
    size = size * back
    columns = [[x * inverse for x in column] for column in transposed(a)]

    def sweep(state: Matrix) -> tuple[Matrix, Value]:
        w = [list(row) for row in state]
        converged: Value | None = None
        for p in range(n - 1):
            for q in range(p + 1, n):
                alpha, beta = dot(w[p][:m], w[p][:m]), dot(w[q][:m], w[q][:m])
                gamma = dot(w[p][:m], w[q][:m])
                good = (alpha * beta * 1e-31 > gamma * gamma) | gamma.equals(0.0)
                converged = good if converged is None else converged & good
                _t, c, s = _angle(beta - alpha, gamma)
                for r in range(len(w[p])):
                    x, y = w[p][r], w[q][r]
                    w[p][r], w[q][r] = c * x - s * y, s * x + c * y
        assert converged is not None
        return w, converged

    state = [[*column, *unit] for column, unit in zip(columns, identity(a[0][0], n), strict=True)]
    if n > 1:
        state = _sweeps(builder, n, state, sweep)
    norms = [dot(row[:m], row[:m]) for row in state]
    _squares, state = _sorted(norms, state, descending=True)
    if not vectors:
        return [dot(row[:m], row[:m]).sqrt() * size for row in state], [], []
    reflected, taus = _reflections(transposed([row[:m] for row in state]))
    q = _product(reflected, taus, m, m if full else n)
    flipped = [reflected[k][k] * -1.0 > 0.0 for k in range(n)]
    s = [abs(reflected[k][k]) * size for k in range(n)]
    u = [[where(flipped[j], -x, x) if j < n else x for j, x in enumerate(row)] for row in q]
    return s, u, transposed([row[m:] for row in state])
