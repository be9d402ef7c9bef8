"""Small linear systems: backward errors of a few units in the last place, infinities and nan where JAX has them, and
what the user gave as a solver is what solves them."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import check, compiled, eager
from jax import lax

import ceedtap as ct


@pytest.fixture(params=[1, 2, 3, 4])
def matrices(request):
    n = request.param
    rng = np.random.default_rng(n)
    return jnp.asarray(3 * np.eye(n) + rng.standard_normal((20, n, n)) / 2)


def close(a, b):
    return np.allclose(a, b, rtol=1e-12, atol=1e-13)


def test_inverse(matrices):
    assert close(ct.pointwise(jnp.linalg.inv)(matrices), np.linalg.inv(matrices))


def test_solve(matrices):
    n = matrices.shape[-1]
    vectors = jnp.asarray(np.random.default_rng(0).standard_normal((20, n)))
    several = jnp.asarray(np.random.default_rng(1).standard_normal((20, n, 2)))
    solve = ct.pointwise(jnp.linalg.solve)
    assert close(solve(matrices, vectors), np.linalg.solve(matrices, vectors[..., None])[..., 0])
    assert close(solve(matrices, several), np.linalg.solve(matrices, several))


def test_derivatives(matrices):
    def function(a):
        return jnp.sum(jnp.sin(jnp.linalg.inv(a)))

    def total(f):
        return lambda a: f(a).sum()

    ours, theirs = ct.pointwise(function), jax.vmap(function)
    assert close(jax.grad(total(ours))(matrices), jax.grad(total(theirs))(matrices))
    direction = jnp.cos(matrices)

    def second(f):
        return jax.jvp(jax.grad(total(f)), (matrices,), (direction,))[1]

    assert close(second(ours), second(theirs))


def test_the_matrix_may_be_a_product(matrices):
    def function(a, b):
        return jnp.linalg.solve(a @ a.T + 2 * jnp.eye(len(a)), b)

    vectors = jnp.asarray(np.random.default_rng(0).standard_normal(matrices.shape[:2]))
    assert close(ct.pointwise(function)(matrices, vectors), jax.vmap(function)(matrices, vectors))


def test_another_function_that_is_called_det():
    @jax.jit
    def det(a):
        return jnp.linalg.det(2 * a) + jnp.linalg.inv(a)[0, 0]

    check(lambda a: det(a), np.random.default_rng(0).standard_normal((9, 3, 3)))
    check(lambda a: jax.jit(det)(a), np.random.default_rng(0).standard_normal((9, 2, 2)))


def test_a_system_that_is_not_a_matrix_of_small_vectors():
    def function(b):
        def matvec(x):  # couples the lanes
            return 2 * x + 0.5 * x[::-1]

        def solve(matvec, b):
            return (2 * b - 0.5 * b[::-1]) / (4 - 0.25)

        return jax.lax.custom_linear_solve(matvec, b, solve, symmetric=True)

    b = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2, 3)))
    assert close(ct.pointwise(function)(b), jax.vmap(function)(b))


# -- errors ------------------------------------------------------------------------------------------------------------

ULP = np.finfo(float).eps


def difficult(n):
    """Matrices of all condition numbers up to 1e12, with rows and columns of different sizes, and nearly singular."""
    rng = np.random.default_rng(n)
    out = []
    for k in range(13):
        for _ in range(12):
            b, (u, _), (v, _) = rng.standard_normal(n), *(np.linalg.qr(rng.standard_normal((n, n))) for _ in "uv")
            out.append(np.eye(n) + 10.0**k * np.outer(b, b))
            out.append((u * 10.0 ** -np.linspace(0, k, n)) @ v)
            out.append((u * 10.0 ** -np.linspace(0, k, n)) @ v * 10.0 ** rng.integers(-100, 100))
            out.append(rng.standard_normal((n, n)) * 10.0 ** rng.integers(-k, k + 1, (n, 1)))
            out.append(rng.standard_normal((n, n)) * 10.0 ** rng.integers(-k, k + 1, n))
            out.append(np.round(3 * rng.standard_normal((n, n))) + 10.0**-k * np.eye(n))
    a = np.array(out)
    return a[np.linalg.cond(a) < 1e13]


def backward_errors(a, x, b):
    """Of A x = b in units in the last place: how much the matrix has to change for x to be exact, with more digits."""
    a, x, b = (np.asarray(m, np.longdouble) for m in (a, x, b))
    residual = np.abs(np.einsum("...ij,...jk->...ik", a, x) - b).max(-2)
    size = np.abs(a).sum(-1).max(-1)[..., None] * np.abs(x).max(-2) + np.abs(b).max(-2)
    return np.asarray(residual / size / ULP, float)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_backward_errors(n):
    a = difficult(n)
    rng = np.random.default_rng(0)
    vector, several = rng.standard_normal((len(a), n)), rng.standard_normal((len(a), n, 2))

    def function(a, v, b):
        return jnp.linalg.inv(a), jnp.linalg.solve(a, v), jnp.linalg.solve(a, b), jnp.linalg.solve(a.T, v)

    inverse, one, two, transposed = compiled(function, (n, n), (n,), (n, 2))(a, vector, several)
    assert backward_errors(a, inverse, np.broadcast_to(np.eye(n), a.shape)).max() <= 16
    assert backward_errors(a, one[..., None], vector[..., None]).max() <= 16
    assert backward_errors(a, two, several).max() <= 16
    assert backward_errors(a.transpose(0, 2, 1), transposed[..., None], vector[..., None]).max() <= 16


@pytest.mark.parametrize("n", [2, 3, 6])
def test_errors_of_derivatives(n):
    """Those of the systems that derivatives are: a few ulp, times the condition number for each solution."""
    mpmath = pytest.importorskip("mpmath")
    a = difficult(n)
    condition = np.linalg.cond(a)
    a, condition = a[condition < 1e7][::9], condition[condition < 1e7][::9]
    da = np.random.default_rng(1).standard_normal(a.shape) * np.abs(a).max((1, 2), keepdims=True)
    forwards = compiled(lambda a, d: jax.jvp(jnp.linalg.inv, (a,), (d,))[1], (n, n), (n, n))(a, da)[0]
    backwards = compiled(lambda a, d: jax.vjp(jnp.linalg.inv, a)[1](d)[0], (n, n), (n, n))(a, da)[0]
    with mpmath.workdps(60):
        for matrix, direction, c, f, b in zip(a, da, condition, forwards, backwards, strict=True):
            inverse, d = mpmath.matrix(matrix.tolist()) ** -1, mpmath.matrix(direction.tolist())
            for got, want in ((f, -inverse * d * inverse), (b, -inverse.T * d * inverse.T)):
                exact = np.array(want.tolist(), float)
                assert np.abs(got - exact).max() <= 32 * n * c * ULP * np.abs(exact).max() * max(1.0, c / 1e3)


def test_rank_one_updates():
    """The inverse of I + kappa b b' is known: errors of condition number times ulp, at every kappa."""
    rng = np.random.default_rng(0)
    for kappa in 10.0 ** np.arange(13):
        b = rng.standard_normal((50, 3))
        a = np.eye(3) + kappa * b[:, :, None] * b[:, None]
        (inverse,) = compiled(jnp.linalg.inv, (3, 3))(a)
        exact = np.linalg.inv(a)
        assert np.abs(inverse - exact).max() <= 30 * ULP * np.linalg.cond(a).max()


# -- infinities and nan ------------------------------------------------------------------------------------------------


def rounds(a):
    """Whether elimination with pivots has a factor that is no binary number: whether a pivot is 0 is chance then."""
    rows = [[Fraction(x) for x in row] for row in a]
    for k in range(len(rows)):
        at = max(range(k, len(rows)), key=lambda i: abs(rows[i][k]))
        rows[k], rows[at] = rows[at], rows[k]
        for i in range(k + 1, len(rows)):
            factor = rows[i][k] / rows[k][k] if rows[k][k] else Fraction(0)
            if factor.denominator & (factor.denominator - 1):
                return True
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    return False


def singular(n):
    """Exactly singular ones, whose elimination rounds nothing; and the largest and smallest numbers."""
    rng = np.random.default_rng(n)
    out = [np.zeros((n, n)), np.ones((n, n)), np.eye(n) * 1e308, np.eye(n) * 1e-310, np.eye(n)[::-1] * 1e308]
    for _ in range(60):
        a = rng.integers(-2, 3, (n, n)) * 1.0
        if n > 1:
            i, j = rng.choice(n, 2, replace=False)
            which = rng.integers(4)
            a[i] = [a[j], 0 * a[j], 2 * a[j], a[j]][which]
            if which == 3:
                a[:, j] = a[:, i]
        out += [np.sign(a) * 4.0, a * (np.arange(n)[:, None] != rng.integers(n)), np.diag(a.diagonal()), np.tril(a)]
    for _ in range(20):
        out.append(np.diag(10.0 ** rng.integers(-300, 300, n)))
    return np.array([a for a in out if not rounds(a)])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_singular_and_huge_matrices(n):
    a = singular(n)
    b = np.random.default_rng(0).integers(-3, 4, (len(a), n)) * 1.0

    def function(a, b):
        return jnp.linalg.inv(a), jnp.linalg.solve(a, b), jnp.linalg.det(a), *jnp.linalg.slogdet(a)

    got = compiled(function, (n, n), (n,))(a, b, flush=True)
    for g, w in zip(got, eager(function, a, b), strict=True):
        np.testing.assert_array_equal(np.isnan(g), np.isnan(w))
        np.testing.assert_array_equal(np.isinf(g), np.isinf(w))


# -- what the user gave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_solver_of_the_user_is_run(n):
    """A pseudo-inverse, and one that is not exact."""

    def pseudo(a, b):
        return lax.custom_linear_solve(lambda x: a @ x, b, lambda _, b: jnp.linalg.pinv(a) @ b, symmetric=True)

    def inexact(a, b):
        def solve(matvec, b):
            x = b
            for _ in range(3):
                x = x + 0.1 * (b - matvec(x))
            return x

        return lax.custom_linear_solve(lambda x: a @ x, b, solve, solve, symmetric=True)

    rng = np.random.default_rng(n)
    root = rng.standard_normal((9, n, n))
    a, b = root @ root.transpose(0, 2, 1), rng.standard_normal((9, n))
    a[:4, 0] = a[:4, :, 0] = 0
    check(pseudo, a, b, rtol=1e-11)
    check(inexact, a, b)
    check(lambda a, b: jax.grad(lambda b: jnp.sum(jnp.sin(inexact(a, b))))(b), a, b)


@pytest.mark.parametrize("loop", ["for", "while"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_second_derivatives_of_roots_in_branches(n, loop):
    """The tangent of a root is a system that the user solves, here with a derivative of the derivative."""

    def root(p):
        def residual(x):
            return 2.0 * x + 0.3 * jnp.roll(x, 1) + x**3 * p[0] - p

        def newton(f, x):
            step = lambda x: x - jnp.linalg.solve(jax.jacfwd(f)(x), f(x))  # noqa: E731
            if loop == "for":
                return lax.fori_loop(0, 9, lambda i, x: step(x), x)
            return lax.while_loop(lambda x: jnp.max(jnp.abs(f(x))) > 1e-10, step, x)

        def tangent(g, y):
            return jnp.linalg.solve(jax.jacfwd(g)(y), y)

        return lax.custom_root(residual, jnp.zeros(n), newton, tangent)

    def total(p):
        return jnp.sum(jnp.sin(lax.cond(jnp.sum(p) > 0.7 * n, root, lambda p: p * p, p)))

    p = 1 + np.random.default_rng(0).uniform(0, 1, (4, n))
    p[0] = 0.1
    check(lambda p: (jax.hessian(total)(p), jax.jvp(jax.grad(total), (p,), (p,))[1]), p, rtol=1e-11)
