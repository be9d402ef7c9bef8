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


# -- blocks, and gradients of energies ---------------------------------------------------------------------------------


@functools.cache
def stokes():
    """Taylor-Hood elements of a flow whose viscosity depends on the pressure, with its stress as data at the points."""
    ceed, mesh = ct.Ceed("/cpu/self"), ct.mesh.box(3, 2, warp=warped)
    V = ct.Space(ceed, mesh, degree=2, components=2, quadrature=3)
    Q = ct.Space(ceed, mesh, degree=1, quadrature=3)

    @ct.operator(
        inputs={"u": (V.value, V.grad), "p": Q.value, "x": V.geometry.grad, "s0": ct.quadrature(2), "w": V.weight},
        outputs={"v": (V.value, V.grad), "q": Q.value, "s": ct.quadrature(2)},
        params=1.5,
    )
    def flow(u, p, x, s0, w, params):
        value, slope = u
        K, dV = jnp.linalg.inv(x), w * jnp.linalg.det(x)
        slope = K @ slope
        stress = params * (1 + p**2) * (slope + slope.T) - p * jnp.eye(2)
        return (dV * slope.T @ value, dV * K.T @ stress), dV * jnp.trace(slope) * (1 + p), s0 * p + stress[0]

    rng = np.random.default_rng(0)
    arrays = {
        "u": rng.standard_normal(V.shape), "p": rng.standard_normal(Q.shape), "x": mesh.points,
        "s0": rng.standard_normal((V.num_elements, V.num_quadrature_points, 2)),
    }  # fmt: skip
    return flow, {name: jnp.asarray(x) for name, x in arrays.items()}


def block(op, arrays, wrt, number, **options):
    """A block of the matrix, by plain JAX."""
    f = lambda x: op.reference(**{**arrays, wrt: x}, **options)[number]  # noqa: E731
    return jax.jacfwd(f)(arrays[wrt]).reshape(-1, arrays[wrt].size)


@pytest.mark.parametrize("stored", [None, True, False])
@pytest.mark.parametrize("wrt", ["u", "p", "x", "s0"])
def test_blocks_by_the_names_of_output_and_input(wrt, stored):
    flow, arrays = stokes()
    linearized = flow.linearize(**arrays, wrt=wrt, params=1.5, stored=stored)
    for number, name in enumerate(flow.outputs):
        expected = block(flow, arrays, wrt, number, params=1.5)
        matrix = jax.jit(lambda n=name: linearized.assemble(n))()
        assert matrix.shape == expected.shape
        close = functools.partial(np.allclose, rtol=0, atol=1e-13 * max(1, jnp.abs(expected).max()))
        assert close(matrix.todense(), expected)
        assert close(linearized.T.assemble(name).todense(), expected.T)
        if (wrt, name) in {("u", "v"), ("p", "q"), ("s0", "s")}:
            diagonal = linearized.diagonal(name)
            assert diagonal.shape == arrays[wrt].shape
            assert close(diagonal.ravel(), jnp.diag(expected))
            assert close(linearized.assemble().todense(), expected)  # the only one that is like the field
            assert close(linearized.diagonal().ravel(), jnp.diag(expected))
        else:
            with pytest.raises(ValueError, match=f"the matrix of {name} of flow with respect to {wrt} is not square"):
                linearized.diagonal(name)


def test_blocks_in_a_compiled_program_and_their_derivatives():
    flow, arrays = stokes()
    probe = jnp.asarray(np.random.default_rng(1).standard_normal(arrays["p"].size))

    def coupled(u, op):
        if op is None:
            return jnp.sum((block(flow, {**arrays, "u": u}, "p", 0, params=1.5) @ probe) ** 2)
        matrix = flow.linearize(**{**arrays, "u": u}, wrt="p", params=1.5).assemble("v")
        rows, columns = matrix.indices.T
        return jnp.sum(jnp.zeros(matrix.shape[0]).at[rows].add(matrix.data * probe[columns]) ** 2)

    ours, plain = (jax.jit(jax.grad(lambda u, op=op: coupled(u, op)))(arrays["u"]) for op in (flow, None))
    assert np.allclose(ours, plain, rtol=0, atol=1e-12 * jnp.abs(plain).max())


def test_blocks_of_a_sum_and_of_fields_that_some_parts_have():
    flow, arrays = stokes()
    V, Q = flow._application.function.inputs[0].fields[0].space, flow._application.function.inputs[1].fields[0].space
    S, T = V.boundary("left"), Q.boundary("left")

    @ct.operator(inputs={"u": V.value, "p": Q.value, "w": V.weight}, outputs={"v": V.value, "q": Q.value})
    def cells(u, p, w):
        return w * u * p, w * u[0] * p**2

    @ct.operator(inputs={"p": T.value, "w": T.weight}, outputs={"q": T.value, "v": S.value})
    def traction(p, w):
        return {"q": w * p**3, "v": w * jnp.stack([p * p, p])}

    total = cells + traction
    values = {name: arrays[name] for name in ("u", "p")}
    for wrt in values:
        linearized = total.linearize(**values, wrt=wrt)
        for number, name in enumerate(total.outputs):
            expected = block(total, values, wrt, number)
            assert np.allclose(linearized.assemble(name).todense(), expected, rtol=0, atol=1e-13)
    assert np.allclose(
        total.linearize(**values, wrt="p").diagonal("q"), jnp.diag(block(total, values, "p", 1)), rtol=0, atol=1e-13
    )


def test_which_block_is_asked_for():
    flow, arrays = stokes()
    linearized = flow.linearize(**arrays, wrt="x", params=1.5)
    for call in (linearized.assemble, linearized.diagonal):
        with pytest.raises(ValueError, match="flow has the outputs v, q, s; say which one: several or none of them"):
            call()
        with pytest.raises(ValueError, match="flow has the outputs v, q, s; got 'u'"):
            call("u")


def test_a_linearization_outlives_the_programs_that_use_it():
    flow, arrays = stokes()
    for stored in (True, False):
        linearized = flow.linearize(**arrays, wrt="p", params=1.5, stored=stored)
        expected = block(flow, arrays, "p", 1, params=1.5)
        du = jnp.cos(arrays["p"])
        for _ in range(2):
            assert np.allclose(jax.jit(lambda: linearized.assemble("q"))().todense(), expected)  # noqa: B023
            assert np.allclose(jax.jit(linearized)(du)[1], expected @ du)
            assert np.allclose(jax.lax.fori_loop(0, 1, lambda _, x: linearized(x)[1], du), expected @ du)  # noqa: B023
            assert np.allclose(linearized(du)[1], expected @ du)


def test_a_force_with_history():
    """Damage that only grows: the matrix is that of the force."""
    space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2, warp=warped), degree=2)

    @ct.operator(
        inputs={"u": space.grad, "kappa": ct.quadrature(), "x": space.geometry.grad, "w": space.weight},
        outputs={"r": space.grad, "kappa_new": ct.quadrature()},
    )
    def damage(u, kappa, x, w):
        K = jnp.linalg.inv(x)
        strain = K @ u
        kappa = jnp.maximum(kappa, strain @ strain)
        return w * jnp.linalg.det(x) * jnp.exp(-kappa) * K.T @ strain, kappa

    rng = np.random.default_rng(0)
    arrays = {
        "u": jnp.asarray(rng.standard_normal(space.shape)), "x": jnp.asarray(space.mesh.points),
        "kappa": jnp.asarray(rng.uniform(0, 2, (space.num_elements, space.num_quadrature_points))),
    }  # fmt: skip
    expected = block(damage, arrays, "u", 0)
    newton = damage.linearize(**arrays, wrt="u")
    assert np.allclose(newton.assemble().todense(), expected, rtol=0, atol=1e-13 * jnp.abs(expected).max())
    assert np.allclose(newton.diagonal(), jnp.diag(expected), rtol=0, atol=1e-13 * jnp.abs(expected).max())


@functools.cache
def solid():
    space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 1, 1, warp=warped), degree=2, components=3)

    def density(F):
        J = jnp.linalg.det(F)
        return jnp.sum(F * F) / 2 - jnp.log(J) + jnp.log(J) ** 2

    @ct.operator(
        inputs={"u": (space.value, space.grad), "x": space.geometry.grad, "a": ct.quadrature(), "w": space.weight},
        outputs={"energy": ct.quadrature()},
        params={"mu": 1.0},
    )
    def stored(u, x, a, w, params):
        value, slope = u
        F = jnp.eye(3) + (jnp.linalg.inv(x) @ slope).T
        return w * jnp.linalg.det(x) * (params["mu"] * a**2 * density(F) + value @ value)

    rng = np.random.default_rng(0)
    arrays = {
        "u": jnp.asarray(0.02 * rng.standard_normal(space.shape)), "x": jnp.asarray(space.mesh.points),
        "a": jnp.asarray(rng.uniform(1, 2, (space.num_elements, space.num_quadrature_points))),
    }  # fmt: skip
    return space, stored, arrays


@pytest.mark.parametrize("wrt", ["u", "x", "a"])
def test_the_gradient_of_an_energy_is_an_operator(wrt):
    _, energy, arrays = solid()
    params = {"mu": 1.3}
    total = lambda x, mu=1.3: energy.reference(**{**arrays, wrt: x}, params={"mu": mu}).sum()  # noqa: E731
    force = energy.gradient(wrt)
    assert (force.inputs, force.outputs, force.name) == (energy.inputs, (f"grad_{wrt}",), "stored")
    expected = jax.grad(total)(arrays[wrt])
    close = lambda a, b: np.allclose(a, b, rtol=0, atol=1e-12 * jnp.abs(b).max())  # noqa: E731
    assert close(force(**arrays, params=params), expected)
    assert close(force.reference(**arrays, params=params), expected)
    by_mu = jax.jacfwd(lambda mu: jax.grad(total)(arrays[wrt], mu))(1.3)
    assert close(jax.jvp(lambda p: force(**arrays, params=p), (params,), ({"mu": 1.0},))[1], by_mu)
    hessian = jax.jacfwd(jax.grad(lambda flat: total(flat.reshape(arrays[wrt].shape))))(arrays[wrt].ravel())
    newton = force.linearize(**arrays, wrt=wrt, params=params)
    assert close(newton.assemble().todense(), hessian)
    assert close(newton.diagonal().ravel(), jnp.diag(hessian))


def test_the_gradient_of_a_bound_energy_and_of_a_sum():
    space, energy, arrays = solid()
    params = {"mu": 1.3}
    bound = energy.bind(x=arrays["x"], a=arrays["a"], params=params)
    expected = jax.grad(lambda u: energy.reference(u, arrays["x"], arrays["a"], params=params).sum())(arrays["u"])
    close = lambda a, b: np.allclose(a, b, rtol=0, atol=1e-12 * jnp.abs(b).max())  # noqa: E731
    assert close(bound.gradient("u")(arrays["u"]), expected)
    with pytest.raises(ValueError, match="stored has a gradient by u, got 'x'"):
        bound.gradient("x")

    @ct.operator(
        inputs={"w": space.weight, "b": ct.quadrature(), "u": space.value}, outputs={"energy": ct.quadrature()}
    )
    def load(w, b, u):
        return w * b * u[0]

    total = (bound + load).gradient("u")
    by_load = jax.grad(lambda u: load.reference(arrays["a"], u).sum())(arrays["u"])
    assert total.inputs == ("u", "b")
    assert close(total(arrays["u"], arrays["a"]), expected + by_load)
    alone = (bound + load).gradient("b")
    assert close(
        alone(b=arrays["a"], u=arrays["u"]), jax.grad(lambda b: load.reference(b, arrays["u"]).sum())(arrays["a"])
    )


def test_the_gradient_of_an_energy_taps_what_the_energy_taps():
    space = ct.Space(ct.Ceed("/cpu/self/opt/serial"), ct.mesh.box(2, 2), degree=1)
    events = []

    def consumer(x, transforms=(), **_):
        events.append((tuple(name for name, _ in transforms), x))

    @ct.operator(inputs={"u": space.value, "w": space.weight}, outputs={"e": ct.quadrature()})
    def energy(u, w):
        return w * ct.id_tap(consumer, u) ** 3

    u = jnp.arange(9.0)
    with ct.outfeed_receiver():
        force = energy.gradient("u")(u)
    assert np.allclose(force, jax.grad(lambda u: energy.reference(u).sum())(u))
    assert sorted(name for name, _ in events) == [(), ("jvp", "transpose")]


def test_what_is_no_energy():
    _, energy, _ = solid()
    _, elastic, _ = elasticity("/cpu/self")
    for op in (elastic, stokes()[0], energy.gradient("u")):
        with pytest.raises(ValueError, match="is no energy: that has one output, a number at each quadrature point"):
            op.gradient("u")
    for name in ("nothing", "w", "params"):
        with pytest.raises(ValueError, match="stored has a gradient by u, x, a, got"):
            energy.gradient(name)
