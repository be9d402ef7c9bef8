"""Eigenvalues of small matrices that are not symmetric, and what is made of Schur's form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from codegen_helpers import compiled, source_of

from ceedtap.codegen import TranslationError


def parts(function):
    """Real and imaginary parts of what a function returns."""
    return lambda *a: [p(x) for x in jax.tree.leaves(function(*a)) for p in (jnp.real, jnp.imag)]


def evaluate(function, *args):
    """The complex results of a translated function of real arrays."""
    values = compiled(parts(function), *(a.shape[1:] for a in args))(*args)
    return [re + 1j * im for re, im in zip(values[::2], values[1::2], strict=True)]


def matrices(n):
    rng = np.random.default_rng(n)
    rotation = np.eye(n)[np.r_[1:n, 0]]  # eigenvalues on the unit circle: no shift of itself
    nilpotent = np.diag(np.ones(n - 1), 1)
    special = [np.zeros((n, n)), np.eye(n), rotation, np.ones((n, n)), nilpotent, nilpotent.T, np.triu(np.ones((n, n)))]
    scaled = [rng.standard_normal((n, n)) * 10.0 ** rng.integers(-140, 140) for _ in range(40)]
    graded = [rng.standard_normal((n, n)) * 10.0 ** rng.integers(-6, 6, n)[:, None] for _ in range(40)]
    return np.array([*special, *scaled, *graded, *rng.standard_normal((40, n, n))])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_schur(n):
    a = matrices(n)
    t, z = evaluate(lambda a: jsl.schur(a, output="complex"), a)
    size = np.abs(a).max((1, 2), keepdims=True) + 1e-300
    np.testing.assert_allclose(z.conj().swapaxes(1, 2) @ z, np.broadcast_to(np.eye(n), a.shape), atol=1e-14)
    assert np.all(np.tril(t, -1) == 0)
    assert np.abs(z @ (t / size) @ z.conj().swapaxes(1, 2) - a / size).max() < 3e-14


@pytest.mark.parametrize("n", [2, 3, 6])
def test_schur_of_complex_matrices(n):
    a, b = matrices(n)[-40:], matrices(n)[-80:-40]
    t, z = evaluate(lambda a, b: jsl.schur(a + 1j * b), a, b)
    want = a + 1j * b
    error = np.abs(z @ t @ z.conj().swapaxes(1, 2) - want).max((1, 2)) / np.abs(want).max((1, 2))
    assert error.max() < 3e-14


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_sqrtm(n):
    rng = np.random.default_rng(n)
    a = np.array([rng.standard_normal((n, n)) for _ in range(20)])
    a = np.concatenate([a, np.eye(n) + 0.2 * a, a @ a.swapaxes(1, 2)])
    (root,) = evaluate(jsl.sqrtm, a)
    want = np.array([np.asarray(jsl.sqrtm(jnp.asarray(m))) for m in a])
    # For negative eigenvalues either sign is right.
    unique = [np.abs(np.angle(np.linalg.eigvals(m))).max() < 3 for m in a]
    np.testing.assert_allclose(root[unique], want[unique], rtol=0, atol=1e-9 * np.abs(want).max())
    assert np.abs(root @ root - a).max() < 1e-12 * np.abs(a).max() * n


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_eig(n):
    a = matrices(n)[-80:]
    values, vectors = evaluate(jnp.linalg.eig, a)
    size = np.abs(a).max((1, 2))
    residual = np.abs(a @ vectors - vectors * values[:, None, :]).max((1, 2)) / size
    assert residual.max() < 1e-13
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(values.sum(1).real, np.trace(a, axis1=1, axis2=2), atol=1e-12 * size.max())
    for got, matrix in zip(values[-20:], a[-20:], strict=True):
        want = np.linalg.eigvals(matrix)
        distance = np.abs(got[:, None] - want[None])
        assert max(distance.min(0).max(), distance.min(1).max()) < 1e-11


def test_derivative_of_eigenvalues():
    """The sum of their exponentials is the trace of the exponential."""

    def function(a):
        return jnp.sum(jnp.exp(jnp.linalg.eigvals(a))).real

    a = np.random.default_rng(0).standard_normal((9, 3, 3))
    (got,) = compiled(jax.grad(function), (3, 3))(a)
    want = np.array([np.asarray(jsl.expm(m)).T for m in a])
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_batches_and_nan():
    a = np.random.default_rng(0).standard_normal((4, 2, 3, 3))
    (values,) = evaluate(jnp.linalg.eigvals, a)
    np.testing.assert_allclose(values.sum(-1).real, np.trace(a, axis1=2, axis2=3), atol=1e-13)
    a[1, 0, 0, 1] = np.nan
    (values,) = evaluate(jnp.linalg.eigvals, a)
    assert np.isnan(values[1, 0]).all()
    assert np.isfinite(values[[0, 2, 3]]).all()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda a: jsl.schur(a)[0], "real form"),
        (lambda a: jax.lax.linalg.eig(a)[1].real, "left eigenvectors"),
        (lambda a: jnp.linalg.eigvals(jnp.kron(a, jnp.eye(5))).real, "more than 12 rows"),
    ],
)
def test_refusals(function, reason):
    with pytest.raises(TranslationError, match=reason):
        source_of(function, (3, 3))
