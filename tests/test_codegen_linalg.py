"""Linear algebra of small matrices: translated to C, and as JAX computes it with LAPACK."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from codegen_helpers import check, compiled, source_of
from jax import lax

from ceedtap.codegen import TranslationError


def matrices(n, num=7, seed=0):
    return np.random.default_rng(seed).standard_normal((num, n, n))


def positive(a):
    return a @ a.T + jnp.eye(a.shape[0])


def spectrum(a):
    """What does not depend on the signs of the vectors."""
    w, v = jnp.linalg.eigh(a)
    return w, (v * jnp.exp(0.1 * w)) @ v.T, v.T @ v + 1


def singular(a, full=False):
    u, s, vt = jnp.linalg.svd(a, full_matrices=full)
    k = s.shape[0]
    return s, (u[:, :k] * jnp.sqrt(s)) @ vt[:k], u.T @ u + 1, vt @ vt.T + 1


FUNCTIONS = {
    "det": jnp.linalg.det,
    "slogdet": jnp.linalg.slogdet,
    "inv": jnp.linalg.inv,
    "solve vector": lambda a: jnp.linalg.solve(a, a[0]),
    "solve matrix": lambda a: jnp.linalg.solve(a, a.T),
    "cholesky": lambda a: jnp.linalg.cholesky(positive(a)),
    "qr": jnp.linalg.qr,
    "qr complete": lambda a: jnp.linalg.qr(a[:, :2], mode="complete"),
    "qr r": lambda a: jnp.linalg.qr(a, mode="r"),
    "eigh": spectrum,
    "eigh upper": lambda a: jnp.linalg.eigh(a, UPLO="U", symmetrize_input=False)[0],
    "eigvalsh": jnp.linalg.eigvalsh,
    "svd": singular,
    "svd tall": lambda a: singular(a[:, :2]),
    "svd wide": lambda a: singular(a[:2]),
    "svd full": lambda a: singular(a[:, :2], full=True),
    "svd wide full": lambda a: singular(a[:2], full=True),
    "singular values": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "pinv": jnp.linalg.pinv,
    "pinv of lower rank": lambda a: jnp.linalg.pinv(a.at[1].set(a[0])),
    "matrix_power": lambda a: (jnp.linalg.matrix_power(a, 5), jnp.linalg.matrix_power(a, -2)),
    "expm": jsl.expm,
    "expm of a large matrix": lambda a: jsl.expm(9 * a),
    "lu": lambda a: (*jsl.lu(a), *jsl.lu_factor(a)),
    "lu_solve": lambda a: jsl.lu_solve(jsl.lu_factor(a), a[0]),
    "cho_solve": lambda a: jsl.cho_solve(jsl.cho_factor(positive(a)), a),
    "norms": lambda a: (jnp.linalg.norm(a, 2), jnp.linalg.norm(a, "nuc"), jnp.linalg.cond(a)),
    "rank": lambda a: jnp.linalg.matrix_rank(a.at[1].set(a[0])),
    "lstsq": lambda a: jnp.linalg.lstsq(a[:, :2], a[0])[0],
    "tridiagonal": lambda a: lax.linalg.tridiagonal_solve(a[0], a[1], a[-1], a),
    "triangular": lambda a: (
        jsl.solve_triangular(positive(a), a, lower=True, trans=1),
        jsl.solve_triangular(positive(a), a[0], lower=False, unit_diagonal=True),
    ),
    "polar": jsl.polar,
    "batched": lambda a: (
        jnp.linalg.inv(jnp.stack([a, a.T])),
        jnp.linalg.eigvalsh(jnp.stack([positive(a), positive(a.T)])),
        jnp.linalg.cholesky(jnp.stack([positive(a), positive(a.T)])),
        jnp.linalg.qr(jnp.stack([a, a.T]))[1],
    ),
    "complex": lambda a: (jnp.real(jnp.linalg.inv(a + 1j * a.T)), jnp.abs(jnp.linalg.solve(a + 1j * a.T, a[0] + 0j))),
    "symmetric product": lambda a: lax.linalg.symmetric_product(a, a, alpha=2.0, beta=0.5, symmetrize_output=True),
}


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name, n):
    check(FUNCTIONS[name], matrices(n), rtol=1e-11 if name in ("norms", "complex") else 1e-12)


def test_one_by_one():
    for name in ("inv", "eigh", "singular values", "cholesky", "qr", "solve vector"):
        check(FUNCTIONS[name], matrices(1))


DIFFERENTIABLE = {
    "det": jnp.linalg.det,
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "inv": jnp.linalg.inv,
    "solve": lambda a: jnp.linalg.solve(a, a[0]),
    "cholesky": lambda a: jnp.linalg.cholesky(positive(a)),
    "qr": jnp.linalg.qr,
    "eigh": lambda a: spectrum(positive(a))[:2],
    "eigvalsh": lambda a: jnp.linalg.eigvalsh(positive(a)),
    "svd": lambda a: singular(a)[:2],
    "pinv": jnp.linalg.pinv,
    "expm": jsl.expm,
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_derivatives(name):
    """First and second ones, forwards and backwards, which JAX takes before the translation."""
    function = DIFFERENTIABLE[name]

    def total(a):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(a)))

    def derivatives(a, da):
        gradient, second = jax.jvp(jax.grad(total), (a,), (da,))
        return jax.jvp(function, (a,), (da,))[1], gradient, second

    check(derivatives, matrices(3), matrices(3, seed=1), rtol=3e-11)


def test_derivative_of_six_by_six():
    check(jax.grad(lambda a: jnp.sum(jnp.sin(jnp.linalg.inv(a)))), matrices(6), rtol=1e-11)
    check(jax.grad(lambda a: jnp.sum(jnp.log(jnp.linalg.eigvalsh(positive(a))))), matrices(6), rtol=1e-11)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_eigenvalues_of_all_sizes(n):
    """Repeated ones, zeros, and matrices whose squares would overflow or vanish."""
    rng = np.random.default_rng(0)
    cases = []
    for k in range(200):
        q, _ = np.linalg.qr(rng.standard_normal((n, n)))
        w = rng.standard_normal(n) * 10.0 ** rng.integers(-8, 8, n) if k % 2 else np.round(rng.standard_normal(n))
        cases.append((q * w) @ q.T * 10.0 ** rng.integers(-150, 150))
    cases += [np.zeros((n, n)), np.eye(n), np.ones((n, n)), np.diag(np.arange(n) * 1.0)]
    a = np.array(cases)
    a = (a + a.transpose(0, 2, 1)) / 2
    w, v = compiled(jnp.linalg.eigh, (n, n))(a)
    scale = np.abs(a).max((1, 2)) + 1e-320
    assert np.all(np.diff(w) >= 0)
    np.testing.assert_allclose(v.transpose(0, 2, 1) @ v, np.broadcast_to(np.eye(n), a.shape), atol=1e-14)
    residual = np.abs(a / scale[:, None, None] @ v - v * (w / scale[:, None])[:, None]).max()
    assert residual < 1e-14 * n


@pytest.mark.parametrize(("m", "n"), [(2, 2), (3, 3), (5, 3), (3, 5), (6, 6)])
def test_singular_values_of_all_sizes(m, n):
    rng = np.random.default_rng(0)
    k = min(m, n)
    cases = [np.zeros((m, n)), np.eye(m, n), np.ones((m, n))]
    for i in range(200):
        s = 10.0 ** rng.integers(-8, 8, k) if i % 2 else np.round(rng.uniform(0, 2, k))
        left, right = (np.linalg.qr(rng.standard_normal((d, d)))[0] for d in (m, n))
        cases.append((left[:, :k] * s) @ right[:k] * 10.0 ** rng.integers(-150, 150))
    a = np.array(cases)
    u, s, vt = compiled(lambda x: jnp.linalg.svd(x, full_matrices=True), (m, n))(a)
    scale = np.abs(a).max((1, 2))[:, None] + 1e-320
    assert np.all(np.diff(s) <= 1e-15 * scale)
    assert np.all(s >= 0)
    for q in (u, vt):
        np.testing.assert_allclose(q @ q.transpose(0, 2, 1), np.broadcast_to(np.eye(q.shape[1]), q.shape), atol=1e-14)
    back = (u[:, :, :k] * (s / scale)[:, None]) @ vt[:, :k]
    assert np.abs(back - a / scale[:, :, None]).max() < 2e-14
    np.testing.assert_allclose(s / scale, np.linalg.svd(a / scale[:, :, None], compute_uv=False), atol=1e-14 * k)


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e200, 1e300, 1e307, 4e307])
def test_huge_and_tiny_matrices(size):
    """No square is too large or vanishes: the factors are those of a matrix of usual size, scaled."""
    a = matrices(3)
    a = (a + a.transpose(0, 2, 1)) / np.abs(a).max((1, 2), keepdims=True) / 8

    def function(a):
        q, r = jnp.linalg.qr(a)
        w, v = jnp.linalg.eigh(a)
        values = jnp.sort(jnp.abs(jnp.linalg.eigvals(a)))
        return q @ r, jnp.abs(r), jnp.linalg.svd(a, compute_uv=False), w, (v * w) @ v.T, values

    w = np.linalg.eigvalsh(a)
    r = np.abs(np.linalg.qr(a)[1])
    want = a, r, np.linalg.svd(a, compute_uv=False), w, a, np.sort(np.abs(w))
    for g, x in zip(compiled(function, (3, 3))(a * size, flush=True), want, strict=True):
        np.testing.assert_allclose(g / size, x, atol=1e-14)
    zeros = compiled(lambda a: (jnp.linalg.svd(a)[1], jnp.linalg.qr(a)[1]), (3, 3))(np.zeros((2, 3, 3)))
    assert not any(z.any() for z in zeros)


def test_singular_matrices():
    """As LAPACK through JAX: a zero pivot, and a matrix that is not positive definite."""
    a = matrices(3)
    a[:, :, 1] = 0
    check(lambda x: (jnp.linalg.det(x), *jnp.linalg.slogdet(x), jsl.lu_factor(x)[0]), a, rtol=1e-13)
    check(jnp.linalg.cholesky, matrices(3))
    check(lambda x: jnp.linalg.eigvalsh(x), np.full((2, 3, 3), np.nan))


def test_inverse_leaves_no_jump_and_no_array():
    source = source_of(lambda a: (jnp.linalg.inv(a), jnp.linalg.eigh(a)[0], jnp.linalg.svd(a)[1]), (3, 3))
    assert source.count("for (") == 1
    assert "[3]" not in source


@pytest.mark.parametrize("function", [jsl.hessenberg])
def test_factors_that_are_refused(function):
    with pytest.raises(TranslationError, match="not symmetric"):
        source_of(lambda a: jax.tree.map(jnp.abs, function(a)), (3, 3))


def test_refusals():
    with pytest.raises(TranslationError, match="complex matrices"):
        source_of(lambda a: jnp.linalg.eigvalsh(a + 1j * a), (3, 3))
