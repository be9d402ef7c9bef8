"""Small linear systems are solved without pivots, also in derivatives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import check, source_of

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


def test_nothing_is_chosen_at_the_points():
    mesh = ct.mesh.box(1, 1, 1)
    space = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=1)

    @ct.operator(inputs={"x": space.geometry.grad}, outputs={"y": ct.quadrature(3, 3)})
    def inverse(x):
        return jnp.linalg.inv(x)

    assert "?" not in inverse.source
    assert "fabs" not in inverse.source


def test_inverse_and_determinant_share_their_cofactors():
    for n in (2, 3):
        shared = source_of(lambda a: (jnp.linalg.inv(a), jnp.linalg.det(a)), (n, n))
        inverse = source_of(jnp.linalg.inv, (n, n))
        body, alone = (s.split("CEED_QFUNCTION")[1] for s in (shared, inverse))
        assert len(re.findall(r" = \w+ \* \w+;", body)) == len(re.findall(r" = \w+ \* \w+;", alone))
        assert body.count(" / ") == 1
    a = np.random.default_rng(0).standard_normal((9, 2, 3, 3))
    check(lambda a: (jnp.linalg.det(a), jnp.linalg.inv(a)), a)
    check(lambda a: jnp.linalg.det(a), a * 10.0 ** np.arange(-90, 90, 20)[:, None, None, None])


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
