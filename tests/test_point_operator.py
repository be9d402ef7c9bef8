"""Operators made of point functions: their interface, and how they behave in JAX's transformations."""

import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS

import ceedtap as ct
from ceedtap import apply, toolchain

# -- operators of the tests --------------------------------------------------------------------------------------------


class Square:
    """A warped square of 5 x 2 elements, and a nonlinear operator on it with all kinds of fields."""

    def __init__(self, resource="/cpu/self/ref/serial", degree=1):
        def warp(x):
            return x + 0.05 * np.sin(3 * x[:, ::-1])

        self.ceed = ct.Ceed(resource)
        self.mesh = ct.mesh.box(5, 2, warp=warp)
        self.V = ct.Space(self.ceed, self.mesh, degree, quadrature=degree + 1)
        self.X = self.V.geometry
        self.x = jnp.asarray(self.mesh.points)
        self.traced = 0
        self.params = {"k": 0.7, "b": jnp.array([1.0, -0.5])}

    def fields(self, seed=0, n=1):
        random = np.random.default_rng(seed)
        u, c = (jnp.asarray(random.standard_normal((*((n,) if n > 1 else ()), *self.V.shape))) for _ in range(2))
        return u, c

    @functools.cached_property
    def operator(self):
        V, X = self.V, self.X

        @ct.operator(
            inputs={"u": (V.value, V.grad), "c": V.value, "x": X.grad, "w": X.weight},
            outputs={"v": (V.value, V.grad), "e": ct.quadrature()},
            params=self.params,
        )
        def reaction(u, c, x, w, params):
            self.traced += 1
            value, slope = u
            K, dV = jnp.linalg.inv(x), w * jnp.linalg.det(x)
            g = K @ slope
            flux = params["k"] * (1 + c**2) * g
            return {"e": dV * value**2, "v": (dV * (params["b"] @ g + jnp.sin(value)), dV * K.T @ flux)}

        return reaction


@pytest.fixture(scope="module")
def square():
    return Square()


@pytest.fixture(scope="module")
def mass(square):
    @ct.operator(inputs={"u": square.V.value, "x": square.X.grad, "w": square.X.weight}, outputs={"v": square.V.value})
    def mass(u, x, w):
        return w * jnp.linalg.det(x) * u

    return mass


def product(square, function, outputs=None):
    """An operator of two scalar fields a and b without a geometry."""
    V = square.V
    inputs = {"a": V.value, "b": V.value, "w": V.weight}
    return ct.operator(inputs=inputs, outputs=outputs or {"v": V.value}, name="product")(function)


def close(a, b, tolerance=1e-13):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        assert float(jnp.abs(x - y).max()) <= tolerance * max(float(jnp.abs(y).max()), 1e-30)
    return True


def calls(function, *args):
    """Calls of the native handler in a compiled program."""
    return jax.jit(function).lower(*args).as_text().count("@ceedtap_operator(")


# -- calls -------------------------------------------------------------------------------------------------------------


def test_positions_and_names(square):
    f, (u, c) = square.operator, square.fields()
    assert f.inputs == ("u", "c", "x")
    assert f.outputs == ("v", "e")
    v, e = f(u, c, square.x, params=square.params)
    assert v.shape == square.V.shape
    assert e.shape == (10, 4)
    assert close(f(u, x=square.x, c=c, params=square.params), (v, e), 0)
    assert close(jax.jit(lambda *args: f(*args, params=square.params))(u, c, square.x), (v, e), 0)
    assert close(f.reference(u, c, square.x, params=square.params), (v, e))
    assert "reaction(u, c, x) -> v, e" in repr(f)
    assert "CEED_QFUNCTION(reaction" in f.source


def test_numpy_arrays_are_taken(square, mass):
    u = np.asarray(square.fields()[0])
    assert close(mass(u, square.mesh.points), mass(jnp.asarray(u), square.x), 0)


def test_tuples_and_dicts_of_outputs_are_the_same(square):
    V = square.V
    outputs = {"p": V.value, "q": V.value}
    u, c = square.fields()
    one = product(square, lambda a, b, w: (w * a, w * b), outputs)(u, c)
    other = product(square, lambda a, b, w: {"q": w * b, "p": w * a}, outputs)(u, c)
    assert close(one, other, 0)
    assert not np.allclose(one[0], one[1])


def test_parameters_are_any_pytree(square):
    V, X = square.V, square.X
    layers = [{"W": np.full((2, 1), 0.5), "b": np.zeros(2)}, (2.0, 3)]

    @ct.operator(inputs={"u": V.value, "w": X.weight}, outputs={"v": V.value}, params=layers)
    def f(u, w, params):
        first, (scale, shift) = params
        return w * (jnp.tanh(first["W"] @ u[None] + first["b"]).sum() * scale + shift)

    u, _ = square.fields()
    assert close(f(u, params=layers), f.reference(u, params=layers))
    gradient = jax.grad(lambda p: f(u, params=p).sum())([{"W": np.ones((2, 1)), "b": np.zeros(2)}, (2.0, 3.0)])
    reference = jax.grad(lambda p: f.reference(u, params=p).sum())(
        [{"W": np.ones((2, 1)), "b": np.zeros(2)}, (2.0, 3.0)]
    )
    assert close(gradient, reference)


def test_new_values_of_parameters_cost_nothing(monkeypatch):
    square = Square()
    compiled = []
    compile_ = toolchain._compile
    monkeypatch.setattr(toolchain, "_compile", lambda *a: compiled.append(1) or compile_(*a))
    f, (u, c) = square.operator, square.fields()
    assert square.traced == 1
    traces = []

    @jax.jit
    def program(u, params):
        traces.append(1)
        return jax.value_and_grad(lambda p: f(u, c, square.x, params=p)[0].sum())(params)

    results = [program(u, {"k": k, "b": jnp.array([k, 1.0])})[0] for k in (0.1, 0.2, 0.3)]
    assert len(set(map(float, results))) == 3
    assert (square.traced, len(traces)) == (1, 1)
    f(u, c, square.x, params=square.params)
    builds = len(compiled)
    assert builds > 0
    for k in (0.4, 0.5):
        program(u, {"k": k, "b": jnp.array([k, 1.0])})
        f(u, c, square.x, params={"k": k, "b": jnp.zeros(2)})
    assert (square.traced, len(traces), len(compiled)) == (1, 1, builds)


def test_bound_fields(square):
    f, (u, c) = square.operator, square.fields()
    bound = f.bind(x=square.x, c=c)
    assert bound.inputs == ("u",)
    want = f(u, c, square.x, params=square.params)
    assert close(bound(u, params=square.params), want, 0)
    assert close(f.bind(c=c).bind(x=square.x)(u, params=square.params), want, 0)
    assert close(bound.reference(u, params=square.params), want)

    def value(f, *rest):
        return lambda u, p: jnp.tanh(f(u, *rest, params=p)[0]).sum()

    assert close(
        jax.jit(jax.grad(value(bound), (0, 1)))(u, square.params),
        jax.jit(jax.grad(value(f, c, square.x), (0, 1)))(u, square.params),
    )


def test_changing_the_array_that_was_bound_changes_nothing(square, mass):
    points = np.array(square.mesh.points)
    u, _ = square.fields()
    bound = mass.bind(x=points)
    before = np.array(bound(u))
    points[:] = 0
    assert np.array_equal(bound(u), before)


def test_binding_inside_of_a_program(square, mass):
    u, _ = square.fields()
    assert close(jax.jit(lambda u: mass.bind(x=square.mesh.points)(u))(u), mass(u, square.x))
    with pytest.raises(TypeError, match="field x of mass can be bound to known values only"):
        jax.jit(lambda x: mass.bind(x=x)(u))(square.x)


# -- transformations ---------------------------------------------------------------------------------------------------


def test_vmap_is_one_call(square):
    f = square.operator
    us, cs = square.fields(1, 64)
    one = functools.partial(f, x=square.x, params=square.params)
    want = jax.lax.map(lambda uc: one(*uc), (us, cs))
    assert close(jax.jit(jax.vmap(one))(us, cs), want, 0)
    assert calls(jax.vmap(one), us, cs) == 1
    nested = jax.vmap(jax.vmap(one))(us.reshape(4, 16, -1), cs.reshape(4, 16, -1))
    assert close(nested, jax.tree.map(lambda y: y.reshape(4, 16, *y.shape[1:]), want), 0)
    params = {"k": jnp.linspace(0.1, 1, 64), "b": jnp.ones((64, 2))}
    batched = jax.vmap(lambda u, p: f(u, cs[0], square.x, params=p))(us, params)
    assert close(batched, jax.lax.map(lambda up: f(up[0], cs[0], square.x, params=up[1]), (us, params)), 0)


def test_nested_vmap_of_partly_batched_inputs(square):
    """Cotangents of what serves all lanes are summed."""
    f = square.operator
    us, cs = square.fields(2, 6)
    us, cs = us.reshape(2, 3, -1), cs[:3]

    def total(f):
        def value(u, c, x, p):
            v, e = f(u, c, x, params=p)
            return jnp.tanh(v).sum() + e.sum()

        inner = jax.vmap(value, (0, 0, None, None))
        outer = jax.vmap(inner, (0, None, None, None))
        return lambda *args: outer(*args).sum()

    args = (us, cs, square.x, square.params)
    for inputs in ((1,), (0, 1, 2, 3)):
        assert close(
            jax.jit(jax.grad(total(f), inputs))(*args), jax.jit(jax.grad(total(f.reference), inputs))(*args), 1e-12
        )
    direction = jax.tree.map(lambda leaf: 0.1 * jnp.ones_like(jnp.asarray(leaf)), args)
    args = jax.tree.map(jnp.asarray, args)
    derivative = [
        jax.jit(lambda f=f: jax.jvp(jax.grad(total(f), (0, 1, 2, 3)), args, direction)[1])() for f in (f, f.reference)
    ]
    assert close(*derivative, 1e-12)


def test_derivatives_that_forget_a_batched_input(square):
    """The derivative of a + b by b is the same for all a."""
    f = product(square, lambda a, b, w: w * (a**2 + b))
    a = jnp.ones((3, *square.V.shape))
    b = jnp.ones(square.V.shape)
    batched = jax.vmap(f, (0, None))
    _, tangent = jax.jvp(lambda b: batched(a, b), (b,), (b,))
    assert close(tangent, jax.vmap(f.reference, (0, None))(0 * a, b))
    _, tangent = jax.jvp(lambda a: batched(a, b), (a,), (a,))
    assert tangent.shape == a.shape
    assert close(jax.grad(lambda b: batched(a, b).sum())(b), 3 * jax.grad(lambda b: f(a[0], b).sum())(b))
    ignorant = product(square, lambda a, b, w: w * a)
    batched = jax.vmap(ignorant, (None, 0))
    by_b, by_a = jax.grad(lambda b, a: batched(b, a).sum(), (0, 1))(b, a)
    assert close(by_b, 3 * jax.grad(lambda b: ignorant(b, b).sum())(b))
    assert by_a.shape == a.shape
    assert not by_a.any()


def test_a_thousand_explicit_steps(square, mass):
    """The heat equation on an insulated square keeps its heat."""
    V, X = square.V, square.X

    @ct.operator(inputs={"u": V.grad, "x": X.grad, "w": X.weight}, outputs={"v": V.grad})
    def stiffness(u, x, w):
        K = jnp.linalg.inv(x)
        return w * jnp.linalg.det(x) * K.T @ (K @ u)

    lumped = mass(jnp.ones(V.shape), square.x)

    @functools.partial(jax.jit, static_argnums=2)
    def march(u, x, f):
        def step(u, _):
            return u - 1e-3 * f(u, x) / lumped, jnp.vdot(lumped, u)

        return jax.lax.scan(step, u, None, length=1000)

    u = jnp.sin(3 * square.x[:, 0])
    last, heat = march(u, square.x, stiffness)
    assert close(last, march(u, square.x, stiffness.reference)[0], 1e-12)
    assert np.allclose(heat, heat[0], rtol=1e-12)
    assert np.ptp(last) < 0.01 * np.ptp(u)

    def final(f):
        return lambda x: march(u, x, f)[0][0]

    assert close(jax.grad(final(stiffness))(square.x), jax.grad(final(stiffness.reference))(square.x), 1e-10)


def test_checkpoint(square):
    f, (u, c) = square.operator, square.fields()

    def value(u):
        for _ in range(3):
            u = u + 0.1 * f(u, c, square.x, params=square.params)[0]
        return (u**2).sum()

    assert close(jax.jit(jax.grad(jax.checkpoint(value)))(u), jax.jit(jax.grad(value))(u))


def test_custom_linear_solve(square, mass):
    """The derivative of M(x)^-1 b by the coordinates, against a dense matrix."""
    b, _ = square.fields()

    def solve(x):
        def cg(matvec, b):
            return jax.scipy.sparse.linalg.cg(matvec, b, tol=1e-14)[0]

        return jax.lax.custom_linear_solve(lambda u: mass(u, x), b, cg, symmetric=True)

    def dense(x):
        return jnp.linalg.solve(jax.jacfwd(lambda u: mass.reference(u, x))(b), b)

    assert close(jax.jit(solve)(square.x), dense(square.x), 1e-11)
    gradient = jax.jit(jax.grad(lambda x: (solve(x) ** 2).sum()))(square.x)
    assert close(gradient, jax.grad(lambda x: (dense(x) ** 2).sum())(square.x), 1e-10)


def test_hessian_of_an_energy(square):
    f, (u, c) = square.operator, square.fields()
    hessians = [
        jax.jit(jax.hessian(lambda u, f=f: jnp.sin(f(u, c, square.x, params=square.params)[1]).sum()))(u)
        for f in (f, f.reference)
    ]
    assert close(*hessians, 1e-12)
    assert close(hessians[0], hessians[0].T)


def test_three_orders(square):
    f = product(square, lambda a, b, w: w * jnp.exp(a) * b**3)
    a, b = square.fields()

    def third(f):
        return jax.grad(jax.grad(jax.grad(lambda s: f(a + s, b * (1 + s)).sum())))(0.3)

    assert close(third(f), third(f.reference))
    assert close(jax.jacfwd(jax.jacrev(f, 1), 0)(a, b), jax.jacfwd(jax.jacrev(f.reference, 1), 0)(a, b), 1e-12)


def test_linear_transpose(square, mass):
    u, v = square.fields()
    _, linear = jax.linearize(lambda u: mass(u, square.x), u)
    (row,) = jax.linear_transpose(linear, u)(v)
    assert close(row, mass(v, square.x))
    assert close(jnp.vdot(v, linear(u)), jnp.vdot(row, u))


def test_unused_outputs_are_not_computed(square):
    f, (u, c) = square.operator, square.fields()
    text = str(jax.make_jaxpr(lambda u: f(u, c, square.x, params=square.params)[1])(u))
    pruned = jax.jit(lambda u: f(u, c, square.x, params=square.params)[1])
    lowered = pruned.lower(u).as_text()
    assert "ceed_operator_apply" in text
    (line,) = [line for line in lowered.splitlines() if "@ceedtap_operator(" in line]
    assert line.count("tensor<10x4xf64>") == 1
    assert f"-> tensor<{square.V.num_nodes}xf64>" not in line
    assert close(pruned(u), f(u, c, square.x, params=square.params)[1], 0)
    assert calls(lambda u: (f(u, c, square.x, params=square.params), u)[1], u) == 0


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_shape_derivative_of_an_area(square):
    """By Gauss, the derivative of the area in the direction d is the flux of d through the boundary; inside it is 0."""
    one = ct.operator(inputs={"x": square.X.grad, "w": square.X.weight}, outputs={"a": ct.quadrature()}, name="area")(
        lambda x, w: w * jnp.linalg.det(x)
    )
    gradient = jax.jit(jax.grad(lambda x: one(x).sum()))(square.x)
    # The shoelace formula of the boundary polygon: half the rotated difference of the neighbours.
    rows, columns = 3, 6
    ring = [*range(columns), *(columns * r - 1 for r in range(2, rows + 1))]
    ring += [*range(columns * rows - 2, columns * (rows - 1) - 1, -1), *(columns * r for r in range(rows - 2, 0, -1))]
    polygon = np.asarray(square.x)[ring]
    difference = np.roll(polygon, -1, 0) - np.roll(polygon, 1, 0)
    want = np.zeros_like(square.x)
    want[ring] = np.stack([difference[:, 1], -difference[:, 0]], 1) / 2
    assert np.allclose(gradient, want, atol=1e-15)
    area = np.sum(polygon[:, 0] * np.roll(polygon[:, 1], -1) - polygon[:, 1] * np.roll(polygon[:, 0], -1)) / 2
    assert np.isclose(one(square.x).sum(), area, rtol=1e-14)


def test_volume_of_a_stretched_box():
    space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2, 3), 1, quadrature=2).geometry
    volume = ct.operator(inputs={"x": space.grad, "w": space.weight}, outputs={"v": ct.quadrature()}, name="volume")(
        lambda x, w: w * jnp.linalg.det(x)
    )
    points = jnp.asarray(space.mesh.points)
    size = jnp.array([1.5, 2.0, 0.5])
    value, slope = jax.jit(jax.value_and_grad(lambda s: volume(points * s).sum()))(size)
    assert np.isclose(value, 1.5, rtol=1e-14)
    assert np.allclose(slope, 1.5 / size, rtol=1e-13)


def test_gradients_by_coefficients_and_parameters(square):
    f, (u, c) = square.operator, square.fields()

    def value(f):
        return lambda c, p: jnp.tanh(f(u, c, square.x, params=p)[0]).sum()

    got = jax.jit(jax.grad(value(f), (0, 1)))(c, square.params)
    assert close(got, jax.grad(value(f.reference), (0, 1))(c, square.params))
    step, d = 1e-5, jnp.cos(c)
    central = (value(f)(c + step * d, square.params) - value(f)(c - step * d, square.params)) / (2 * step)
    assert np.isclose(central, jnp.vdot(got[0], d), rtol=1e-8)


@pytest.mark.parametrize("resource", BACKENDS)
def test_gradients_by_many_parameters(resource):
    """Sums over all points; libCEED's kernels differ by the remainder of the number of parameters by 4 and 8."""
    square = Square(resource, degree=2)
    u, c = square.fields()
    for n in (1, 2, 5, 6, 13, 64):
        f = ct.operator(
            inputs={"u": square.V.value, "c": square.V.value, "w": square.V.weight},
            outputs={"v": square.V.value},
            params=jnp.ones(n),
            name="series",
        )(lambda u, c, w, params: w * jnp.sin(params * u).sum() * c)
        params = jnp.linspace(0.1, 1, n)
        gradients = [jax.jit(jax.grad(lambda p, g=g: g(u, c, params=p).sum())) for g in (f, f.reference)]
        assert close(gradients[0](params), gradients[1](params), 1e-12)
        assert close(gradients[0](params), gradients[1](params), 1e-12)


def test_integers_at_the_points_are_constants(square):
    f = product(square, lambda a, b, w: w * jnp.where(a > 0, 1, 2))
    a, b = square.fields()
    assert f(a, b).dtype == jnp.float64
    assert not jax.grad(lambda a: f(a, b).sum())(a).any()


# -- solvers of other libraries ----------------------------------------------------------------------------------------


def cubic(square):
    """The residual of u^3 + u = 2, whose solution is 1."""
    V, X = square.V, square.X

    @ct.operator(inputs={"u": V.value, "x": X.grad, "w": X.weight}, outputs={"v": V.value})
    def residual(u, x, w):
        return w * jnp.linalg.det(x) * (u**3 + u - 2)

    return residual


def test_lineax_cg(square, mass):
    lx = pytest.importorskip("lineax", reason="lineax is not installed")
    b, _ = square.fields()
    operator = lx.FunctionLinearOperator(
        lambda u: mass(u, square.x), jax.eval_shape(lambda: b), lx.positive_semidefinite_tag
    )
    solution = jax.jit(lambda b: lx.linear_solve(operator, b, lx.CG(rtol=1e-12, atol=1e-12)).value)(b)
    assert close(mass(solution, square.x), b, 1e-9)


def test_optimistix_newton(square):
    optx = pytest.importorskip("optimistix", reason="optimistix is not installed")
    lx = pytest.importorskip("lineax", reason="lineax is not installed")
    residual = cubic(square)
    solver = optx.Newton(rtol=1e-10, atol=1e-10, linear_solver=lx.GMRES(rtol=1e-10, atol=1e-10))

    @jax.jit
    def solve(x):
        return optx.root_find(lambda u, x: residual(u, x), solver, 0.5 * jnp.ones(square.V.shape), x).value

    assert np.allclose(solve(square.x), 1.0, atol=1e-8)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_of_calls(square):
    f, (u, c) = square.operator, square.fields()
    p = square.params
    with pytest.raises(TypeError, match=r"reaction\(u, c, x\): missing a required argument: 'x'"):
        f(u, c, params=p)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        f(u, c, square.x, y=u, params=p)
    with pytest.raises(TypeError, match="too many positional"):
        f(u, c, square.x, u, params=p)
    n = square.V.num_nodes
    with pytest.raises(ValueError, match=rf"field u of reaction has the shape \({n},\), got \({n - 1},\)"):
        f(u[1:], c, square.x, params=p)
    with pytest.raises(ValueError, match="vmap"):
        f(jnp.stack([u, u]), c, square.x, params=p)
    with pytest.raises(TypeError, match="field c of reaction is float32"):
        f(u, c.astype(jnp.float32), square.x, params=p)
    with pytest.raises(TypeError, match="int64"):
        f(u, jnp.zeros(n, int), square.x, params=p)
    with pytest.raises(TypeError, match="parameters of reaction"):
        f(u, c, square.x)
    with pytest.raises(TypeError, match="parameters of reaction"):
        f(u, c, square.x, params={"k": 1.0})
    with pytest.raises(ValueError, match=r"parameter of reaction has the shape \(2,\), got \(3,\)"):
        f(u, c, square.x, params={"k": 1.0, "b": jnp.zeros(3)})
    with pytest.raises(TypeError, match="reaction has no field y; it has u, c, x"):
        f.bind(y=u)
    with pytest.raises(ValueError, match=r"shape \(18, 2\)"):
        f.bind(x=square.x[1:])


def test_errors_of_definitions(square):
    V, X = square.V, square.X
    inputs, outputs = {"u": V.value, "w": X.weight}, {"v": V.value}

    def make(function=lambda **_: 0.0, inputs=inputs, outputs=outputs, **options):
        return ct.operator(inputs=inputs, outputs=outputs, name="f", **options)(function)

    other = ct.Space(square.ceed, ct.mesh.box(5, 2), 1, quadrature=2)
    with pytest.raises(ValueError, match=r"share one mesh: u has .* o has"):
        make(inputs={**inputs, "o": other.value})
    with pytest.raises(ValueError, match="share one quadrature: u has 2, o has 4"):
        make(inputs={**inputs, "o": ct.Space(square.ceed, square.mesh, 1, quadrature=4).value})
    with pytest.raises(ValueError, match="share one ceed"):
        make(inputs={**inputs, "o": ct.Space(ct.Ceed("/cpu/self/ref/serial"), square.mesh, 1, quadrature=2).value})
    with pytest.raises(ValueError, match="both have u"):
        make(outputs={"u": V.value})
    with pytest.raises(ValueError, match="no outputs"):
        make(outputs={})
    with pytest.raises(ValueError, match="weights are inputs"):
        make(outputs={"v": X.weight})
    with pytest.raises(ValueError, match="at least one field of a space"):
        make(inputs={"q": ct.quadrature()}, outputs={"v": ct.quadrature()})
    with pytest.raises(ValueError, match="belong to one space"):
        make(inputs={"u": (V.value, X.grad)})
    with pytest.raises(TypeError, match=r"u: expected a field such as V\.value"):
        make(inputs={"u": V})
    with pytest.raises(ValueError, match=r"output v of f has the shape \(\), got \(2,\)"):
        make(lambda u, w: jnp.zeros(2))
    with pytest.raises(ValueError, match="tuple or dict of 2 outputs"):
        make(lambda u, w: u, outputs={"v": V.value, "q": V.value})
    with pytest.raises(ValueError, match=r"returned the outputs \['y'\], it has \['v'\]"):
        make(lambda u, w: {"y": u})
    with pytest.raises(ValueError, match="output v of f has 2 parts, got 1"):
        make(lambda u, w: (u,), outputs={"v": (V.value, V.grad)})
    with pytest.raises(TypeError, match="real, got complex"):
        make(lambda u, w: u * 1j)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        make(lambda u: u)
    with pytest.raises(ValueError, match="positive integers"):
        ct.quadrature(0)


def test_derivatives_with_more_fields_than_there_is_room_for(square):
    """They become sums of operators."""
    V, X = square.V, square.X
    inputs = {f"a{i}": V.value for i in range(12)}
    f = ct.operator(inputs={**inputs, "w": X.weight}, outputs={"v": V.value}, name="products")(
        lambda w, **a: w * sum(jnp.sin(i * value) * a["a0"] for i, value in enumerate(a.values()))
    )
    arrays = [jnp.asarray(np.random.default_rng(i).standard_normal(V.shape)) for i in range(12)]
    directions = arrays[::-1]
    pairs = [jax.jvp(g, arrays, directions) for g in (f, f.reference)]
    assert close(*pairs)
    gradients = [jax.grad(lambda *a, g=g: jnp.tanh(g(*a)).sum(), range(12))(*arrays) for g in (f, f.reference)]
    assert close(*gradients)


# -- lifetime and threads ----------------------------------------------------------------------------------------------


def collect():
    jax.clear_caches()
    for _ in range(3):
        gc.collect()
    apply.OPERATORS.reap()


def test_operators_die_with_their_programs():
    collect()
    before = len(apply.OPERATORS)
    u, c = Square().fields()

    def make():
        square = Square()
        f = square.operator
        program = jax.jit(jax.grad(lambda u: f(u, c, square.x, params=square.params)[0].sum()))
        return program.lower(u).compile(), weakref.ref(square.ceed)

    compiled, alive = make()
    want = np.array(compiled(u))
    collect()
    assert alive() is not None  # the compiled program holds it
    assert np.array_equal(compiled(u), want)
    del compiled
    collect()
    assert len(apply.OPERATORS) == before
    assert alive() is None


def test_two_threads(square):
    f = square.operator
    u, c = square.fields()
    programs = [jax.jit(lambda u, s=s: f(u, c, square.x, params={"k": s, "b": jnp.ones(2)})[0]) for s in (1.0, 2.0)]
    expected = [np.array(program(u)) for program in programs]
    wrong = []

    def work(i):
        for _ in range(500):
            if not np.array_equal(programs[i](u), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
