"""Newton's matrix of point operators: products, diagonal, entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct


def warped(x):
    return x + 0.05 * np.sin(np.pi * x[:, ::-1])


BACKENDS = ["/cpu/self/ref/serial", "/cpu/self"]


@functools.cache
def elasticity(resource):
    """A compressible neo-Hookean solid; the derivative is symmetric."""
    mesh = ct.mesh.box(3, 2, 1, warp=warped)
    space = ct.Space(ct.Ceed(resource), mesh, degree=2, components=3)

    def energy(F):
        J = jnp.linalg.det(F)
        return jnp.sum(F * F) / 2 - jnp.log(J) + jnp.log(J) ** 2

    @ct.operator(
        inputs={"u": space.grad, "x": space.geometry.grad, "w": space.weight}, outputs={"v": space.grad}, params=1.5
    )
    def residual(u, x, w, params):
        K = jnp.linalg.inv(x)
        stress = params * jax.grad(energy)(jnp.eye(3) + (K @ u).T)
        return w * jnp.linalg.det(x) * K.T @ stress.T

    return space, residual, "u"


@functools.cache
def advection(resource):
    """Nonlinear advection and diffusion of a scalar, with values and gradients; the derivative is not symmetric."""
    mesh = ct.mesh.box(3, 2, 1, warp=warped)
    space = ct.Space(ct.Ceed(resource), mesh, degree=3)

    @ct.operator(
        inputs={"c": (space.value, space.grad), "x": space.geometry.grad, "w": space.weight},
        outputs={"r": (space.value, space.grad)},
        params=1.5,
    )
    def transport(c, x, w, params):
        value, gradient = c
        K = jnp.linalg.inv(x)
        flux = K @ gradient
        scale = w * jnp.linalg.det(x)
        return scale * (value**2 * flux[0] + params * jnp.sin(value)), scale * (1 + value**2) * (K.T @ flux)

    return space, transport, "c"


@pytest.fixture(params=BACKENDS)
def resource(request):
    return request.param


@pytest.fixture(params=[elasticity, advection], ids=["elasticity", "advection"])
def problem(request, resource):
    space, op, name = request.param(resource)
    rng = np.random.default_rng(0)
    u = jnp.asarray(0.02 * rng.standard_normal(space.shape))
    return space, op, name, u, jnp.asarray(space.mesh.points), jnp.asarray(rng.standard_normal(space.shape))


def dense(op, u, x):
    """The matrix, by plain JAX."""
    return jax.jacfwd(lambda flat: op.reference(flat.reshape(u.shape), x, params=1.5).ravel())(u.ravel())


@pytest.mark.parametrize("stored", [True, False])
def test_products_diagonal_and_entries(problem, stored):
    _, op, name, u, x, du = problem
    matrix = dense(op, u, x)
    scale = jnp.abs(matrix).max()
    newton = op.linearize(u, x, wrt=name, params=1.5, stored=stored)
    assert newton.stored is stored
    assert np.allclose(newton(du).ravel(), matrix @ du.ravel(), rtol=0, atol=1e-12 * scale)
    assert np.allclose(newton.diagonal().ravel(), jnp.diag(matrix), rtol=0, atol=1e-13 * scale)
    assembled = newton.assemble()
    assert np.allclose(assembled.todense(), matrix, rtol=0, atol=1e-13 * scale)
    assert np.allclose((assembled.T @ du.ravel()), matrix.T @ du.ravel(), rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("stored", [True, False])
def test_inside_compiled_programs_and_transposed(problem, stored):
    _, op, name, u, x, du = problem
    matrix = dense(op, u, x)
    scale = jnp.abs(matrix).max()

    @jax.jit
    def both(u, x, du):
        newton = op.linearize(u, x, wrt=name, params=1.5, stored=stored)
        return newton(du), jax.linear_transpose(newton, du)(du)[0]

    product, transposed = both(u, x, du)
    assert np.allclose(product.ravel(), matrix @ du.ravel(), rtol=0, atol=1e-12 * scale)
    assert np.allclose(transposed.ravel(), matrix.T @ du.ravel(), rtol=0, atol=1e-12 * scale)


def test_a_product_in_a_loop_with_stored_jacobians(problem):
    """What a Newton-Krylov solver does: many products with one matrix."""
    _, op, name, u, x, du = problem

    @jax.jit
    def power(u, x, du):
        newton = op.linearize(u, x, wrt=name, params=1.5, stored=True)
        newton.jacobian  # noqa: B018  before the loop
        return jax.lax.fori_loop(0, 3, lambda _, v: newton(v) / 10, du)

    matrix = dense(op, u, x) / 10
    expected = matrix @ (matrix @ (matrix @ du.ravel()))
    assert np.allclose(power(u, x, du).ravel(), expected, rtol=1e-11, atol=1e-11 * jnp.abs(expected).max())


def test_the_choice_goes_by_size():
    for (space, op, name), stored in ((elasticity("/cpu/self"), False), (advection("/cpu/self"), True)):
        u = jnp.zeros(space.shape)
        assert op.linearize(u, space.mesh.points, wrt=name, params=1.5).stored is stored


def test_what_cannot_be_linearised(resource):
    space, op, _ = elasticity(resource)
    u, x = jnp.zeros(space.shape), space.mesh.points
    for name in ("nothing", "params", "w"):
        with pytest.raises(ValueError, match="can be linearised in u, x"):
            op.linearize(u, x, wrt=name, params=1.5)
    shape_derivative = op.linearize(u, x, wrt="x", params=1.5)
    assert shape_derivative(jnp.ones_like(x)).shape == space.shape  # a translation changes nothing
    assert np.allclose(shape_derivative(jnp.ones_like(x)), 0, atol=1e-13)
    with pytest.raises(ValueError, match="not square"):
        shape_derivative.diagonal()
