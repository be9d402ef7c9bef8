"""Operators, point functions and host functions on several devices: as plain JAX, to the last digits.

In a `jax.shard_map` JAX knows which values differ between devices. The gradient by a value that all devices share is
the sum over them; loops and results are refused or accepted by that. Each case here is a function of a vector that
differs and a number that is shared, written with ceedtap and, from the mathematics, in plain JAX.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import check_python
from jax.sharding import NamedSharding, PartitionSpec

import ceedtap as ct

P = PartitionSpec
DEVICES = 4
N = 9

# -- the mathematics: bilinear elements on four cells of the unit square, three Gauss points a direction -------------

POINTS, WEIGHTS = np.polynomial.legendre.leggauss(3)
CORNERS = np.array([[-1, -1], [1, -1], [-1, 1], [1, 1]])
CELLS = np.array([[0, 1, 3, 4], [1, 2, 4, 5], [3, 4, 6, 7], [4, 5, 7, 8]])
EDGES = np.array([[0, 1], [1, 2], [6, 7], [7, 8], [0, 3], [3, 6], [2, 5], [5, 8]])


def shapes():
    """Values (9, 4) and derivatives (9, 4, 2) of the nodal functions at the points, x fastest; and the weights."""
    values, derivatives, weights = [], [], []
    for (y, wy), (x, wx) in itertools.product(zip(POINTS, WEIGHTS, strict=True), repeat=2):
        a, b = 1 + CORNERS[:, 0] * x, 1 + CORNERS[:, 1] * y
        values.append(a * b / 4)
        derivatives.append(np.stack([CORNERS[:, 0] * b, CORNERS[:, 1] * a], axis=1) / 4)
        weights.append(wx * wy)
    return np.array(values), np.array(derivatives), np.array(weights)


B, D, W = shapes()
EDGE = np.stack([(1 - POINTS) / 2, (1 + POINTS) / 2], axis=1)
COORDINATES = np.array([[x, y] for y in (0, 0.5, 1) for x in (0, 0.5, 1)])


def determinants(x):
    jacobian = jnp.einsum("qai,eaj->eqij", D, x[CELLS])
    return W * (jacobian[..., 0, 0] * jacobian[..., 1, 1] - jacobian[..., 0, 1] * jacobian[..., 1, 0])


def at_points(u):
    return jnp.einsum("qa,ea->eq", B, u[CELLS])


def integrated(f):
    """The vector of the integrals of f over the cells against the nodal functions."""
    return jnp.zeros(N).at[CELLS].add(jnp.einsum("qa,eq->ea", B, f))


# -- the cases -------------------------------------------------------------------------------------------------------

V = ct.Space(ct.Ceed("/cpu/self/opt/serial"), ct.mesh.box(2, 2), degree=1)
X = V.geometry
DATA = np.linspace(0.5, 1.5, 4 * 9).reshape(4, 9)


@ct.operator(
    inputs={"u": V.value, "x": X.grad, "q": ct.quadrature(), "w": V.weight}, outputs={"v": V.value}, params={"k": 1.0}
)
def reaction(u, x, q, w, params):
    return w * jnp.linalg.det(x) * q * jnp.sin(params["k"] * u)


def plain_reaction(u, k, x=COORDINATES):
    return integrated(determinants(x) * DATA * jnp.sin(k * at_points(u)))


@ct.operator(
    inputs={"u": V.value, "x": X.grad, "w": V.weight},
    outputs={"v": V.value, "s": ct.quadrature(2), "unused": ct.quadrature()},
    params=jnp.ones(1),
)
def history(u, x, w, params):
    u = ct.id_tap(lambda *_, **__: None, params[0] * u, when=u > 0)
    return w * jnp.linalg.det(x) * u**3, jnp.stack([u, u * u]), 1.0 * w


def plain_history(u, k):
    s = k * at_points(u)
    return jnp.concatenate([integrated(determinants(COORDINATES) * s**3), jnp.stack([s, s * s], axis=-1).ravel()])


S = V.boundary()


@ct.operator(inputs={"u": S.value, "k": S.value, "w": S.weight}, outputs={"v": S.value})
def film(u, k, w):
    return w * k * u**2


@ct.operator(inputs={"u": V.value, "w": V.weight}, outputs={"v": V.value}, params=jnp.ones(()))
def mass(u, w, params):
    return w * params * u


def plain_film(u, k):
    local = WEIGHTS * k * (u[EDGES] @ EDGE.T) ** 2
    return jnp.zeros(N).at[EDGES].add(local @ EDGE)


def plain_mass(u, k):
    return integrated(W * k * at_points(u))


def of_point(u, k):
    return jnp.sin(k * u) + jnp.where(u > 0, u, 2 * k)


def host_sine(x):
    return np.sin(x)


def sine(x):
    """The sine of a host function, and its derivatives."""

    def jvp(primals, tangents):
        return sine(*primals), jnp.cos(primals[0]) * tangents[0]

    return ct.call(host_sine, x, result_shape=x, jvp=jvp)


def product(x, y):
    """A host function of two values, one of which may be shared."""

    def forward(x, y):
        return ct.call(np.multiply, x, y, result_shape=x), (x, y)

    def both(x, y):
        return ct.call(np.multiply, x, y, result_shape=x, vjp=(forward, lambda r, g: (g * r[1], g * r[0])))

    return both(x, y)


MASS_1D = np.array([[2.0, 1.0], [1.0, 2.0]]) / 3


@functools.cache
def embedded():
    """The mass matrix of the line [-1, 1]."""
    ceed = V.ceed
    nodes = ceed.ElemRestriction(1, 2, 1, 1, 2, np.arange(2))
    op = ceed.Operator(ceed.QFunctionByName("MassApply"))
    weights = ceed.Vector(2)
    weights.set_value(1.0)
    basis = ceed.BasisTensorH1Lagrange(1, 1, 2, 2, ct.GAUSS)
    op.set_field("u", nodes, basis, ct.VECTOR_ACTIVE)
    op.set_field("qdata", ceed.StridedElemRestriction(1, 2, 1, 2, [1, 2, 2]), ct.BASIS_NONE, weights)
    op.set_field("v", nodes, basis, ct.VECTOR_ACTIVE)
    return ct.embed(op, symmetric=True)


def nothing(*_, **__):
    pass


def tapped(u, k):
    a, _ = ct.id_tap(nothing, u * k, k * k, when=u.sum() > k)
    return jnp.sin(a)  # the other one has no cotangent


bound = reaction.bind(x=COORDINATES, q=DATA)
known = reaction.bind(x=COORDINATES, q=DATA, params={"k": 1.5})
reaction_of = functools.partial(reaction, x=COORDINATES, q=DATA)


def newton(stored, transposed=False):
    def product_with_itself(u, k):
        jacobian = reaction.linearize(u, COORDINATES, DATA, wrt="u", params={"k": k}, stored=stored)
        return (jacobian.T if transposed else jacobian)(u * u)

    return product_with_itself


def plain_newton(u, k):
    return jax.jvp(lambda u: plain_reaction(u, k), (u,), (u * u,))[1]


def matrix(u, k):
    jacobian = reaction.linearize(u, COORDINATES, DATA, wrt="u", params={"k": k})
    entries = jacobian.assemble()
    rows, columns = entries.indices.T
    return jnp.concatenate([jacobian.diagonal(), jnp.zeros(N).at[rows].add(entries.data * u[columns])])


def plain_matrix(u, k):
    jacobian = jax.jacfwd(lambda u: plain_reaction(u, k))(u)
    return jnp.concatenate([jnp.diagonal(jacobian), jacobian @ u])


CASES = {
    "operator": (lambda u, k: reaction_of(u, params={"k": k}), plain_reaction),
    "shared field": (lambda u, k: reaction_of(u=k * COORDINATES[:, 0], params={"k": u[0]}),
                     lambda u, k: plain_reaction(k * COORDINATES[:, 0], u[0])),
    "coordinates": (
        lambda u, k: reaction(u, COORDINATES + 0.1 * k * COORDINATES**2, DATA, params={"k": 2.0}),
        lambda u, k: plain_reaction(u, 2.0, COORDINATES + 0.1 * k * COORDINATES**2),
    ),
    "bound": (lambda u, k: bound(u, params={"k": k}), plain_reaction),
    "all bound but one": (lambda u, k: k * known(u), lambda u, k: k * plain_reaction(u, 1.5)),
    "history with taps": (
        lambda u, k: jnp.concatenate([v.ravel() for v in history(u, COORDINATES, params=k[None])[:2]]), plain_history,
    ),
    "boundary": (lambda u, k: film(u, k * jnp.ones(N)), plain_film),
    "sum": (
        lambda u, k: (mass + film)(u, k * jnp.ones(N), params={"mass": k}),
        lambda u, k: plain_mass(u, k) + plain_film(u, k),
    ),
    "linearized, stored": (newton(True), plain_newton),
    "linearized, computed": (newton(False), plain_newton),
    "linearized, transposed": (newton(True, transposed=True), plain_newton),
    "matrix": (matrix, plain_matrix),
    "pointwise": (lambda u, k: ct.pointwise(of_point)(u, k * jnp.ones(N)), lambda u, k: of_point(u, k)),
    "embedded": (lambda u, k: embedded()(jnp.stack([k, u[0]])), lambda u, k: MASS_1D @ jnp.stack([k, u[0]])),
    "embedded, shared": (lambda u, k: u[:2] * embedded()(jnp.stack([k, k * k])),
                         lambda u, k: u[:2] * (MASS_1D @ jnp.stack([k, k * k]))),
    "host function": (lambda u, k: sine(k * u) + sine(k), lambda u, k: jnp.sin(k * u) + jnp.sin(k)),
    "tap": (tapped, lambda u, k: jnp.sin(u * k)),
    "tap by data dependence": (lambda u, k: jnp.sin(ct.id_tap(nothing, u * k, stateful=False)),
                               lambda u, k: jnp.sin(u * k)),
}  # fmt: skip
#: One or two for each kind of thing that has rules of its own.
KINDS = ["history with taps", "sum", "pointwise", "embedded", "host function", "tap"]
U = np.random.default_rng(0).uniform(-1, 1, (DEVICES, N))
K = 1.3


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=KINDS)
def kind(request):
    return CASES[request.param]


def close(ours, plain):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * max(1, np.abs(b).max(initial=0)))


@functools.cache
def devices():
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def mapped(f, **options):
    """``f(u, k)`` on each device with its row of u."""
    return jax.shard_map(
        lambda u, k: f(u[0], k)[None], mesh=devices(), in_specs=(P("d"), P()), out_specs=P("d"), **options
    )


def loop_scan(f):
    def step(k, c, _):
        y = f(c, k)
        c = c + 0.1 * jnp.resize(y, N)
        return c, y

    return lambda u, k: jax.lax.scan(functools.partial(step, k), u, None, length=3)[1].ravel()


def loop_fori(f):
    return lambda u, k: jax.lax.fori_loop(0, 3, lambda _, c: c + 0.1 * jnp.resize(f(c, k), N), u)


def loop_while(f):
    def body(k, carry):
        i, c = carry
        return i + 1, c + 0.1 * jnp.resize(f(c, k), N)

    # As many steps as the value on the device says.
    return lambda u, k: jax.lax.while_loop(
        lambda carry: carry[0] < 2 + (carry[1][0] > 0), functools.partial(body, k), (0, u)
    )[1]


def branch(f):
    return lambda u, k: jax.lax.cond(u[0] > 0, lambda u: f(u, k), lambda u: -2 * f(u, k), u)


PROGRAMS = {"straight": lambda f: f, "scan": loop_scan, "fori": loop_fori, "while": loop_while, "cond": branch}


def one_after_the_other(f):
    """What `mapped` gives, without it."""
    return lambda u, k: jnp.stack([f(row, k) for row in jnp.asarray(u)])


def loss_of(f):
    return lambda u, k: jnp.sum(jnp.cos(f(u, k)))


def check(ours, plain):
    """Values, eager too, and gradients by what differs and by what is shared."""
    expected = jax.jit(one_after_the_other(plain))(U, K)
    close(mapped(ours)(U, K), expected)
    close(jax.jit(mapped(ours))(U, K), expected)
    expected = jax.jit(jax.grad(loss_of(one_after_the_other(plain)), (0, 1)))(U, K)
    close(jax.jit(jax.grad(loss_of(mapped(plain)), (0, 1)))(U, K), expected)
    close(jax.jit(jax.grad(loss_of(mapped(ours)), (0, 1)))(U, K), expected)


def test_values_and_gradients(case):
    check(*case)


@pytest.mark.parametrize("program", ["scan", "fori", "cond"])
def test_values_and_gradients_of_programs(kind, program):
    check(*map(PROGRAMS[program], kind))


def test_while(kind):
    """Without gradients, which JAX has none of."""

    def run(f):
        f = mapped(loop_while(f))
        return f(U, K), jax.jit(lambda u, k: jax.jvp(f, (u, k), (0.1 * u, k)))(U, jnp.float64(K))

    close(*map(run, kind))


def test_gradients_of_a_sum_over_the_devices(kind):
    def gradients(f, wrap=lambda f: f):
        def total(u, k):
            return jax.lax.psum(jnp.sum(f(u[0], k) ** 2), "d")

        loss = jax.shard_map(total, mesh=devices(), in_specs=(P("d"), P()), out_specs=P())
        return jax.value_and_grad(wrap(loss), (0, 1))(U, K)

    plain = gradients(kind[1])
    for wrap in (jax.jit, jax.checkpoint):
        close(gradients(kind[0], wrap), plain)


def test_gradients_taken_inside(kind):
    """There, what is shared is cast by JAX, and its gradient is summed over the devices."""

    def gradients(f):
        def inside(u, k):
            du, dk = jax.grad(lambda u, k: jnp.sum(jnp.cos(f(u, k))), (0, 1))(u[0], k)
            return du[None], dk

        return jax.jit(jax.shard_map(inside, mesh=devices(), in_specs=(P("d"), P()), out_specs=(P("d"), P())))(U, K)

    close(*map(gradients, kind))


def test_directional_derivatives(kind):
    def derivatives(f):
        f = mapped(loop_scan(f))
        u, k = jnp.asarray(U), jnp.float64(K)
        both = jax.jit(lambda s: jax.jvp(f, (u, k), (jnp.ones_like(u), s)))(jnp.float64(2))
        return both, jax.jvp(lambda u: f(u, k), (u,), (u * u,)), jax.jvp(lambda k: f(u, k), (k,), (2 * k,))

    close(*map(derivatives, kind))


def test_second_derivatives(kind):
    def derivatives(f):
        loss = loss_of(mapped(f))
        outer = lambda u, k: jnp.vdot(jax.grad(loss)(u, k), jnp.asarray(U)) + jax.grad(loss, 1)(u, k)  # noqa: E731
        return jax.jit(jax.grad(outer, (0, 1)))(U, K), jax.jit(jax.jacfwd(jax.grad(loss, 1), 1))(U, K)

    close(*map(derivatives, kind))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_batches(kind, inside):
    ks = np.array([0.7, 1.3, 2.0])

    def run(f):
        lanes = jax.vmap(f, (None, 0)), jax.vmap(jax.vmap(f, (None, 0)), (0, None))
        us = np.stack([U, 2 * U], axis=1)
        if inside:
            values = [mapped(lanes[0])(U, ks), mapped(lanes[1])(us, ks)]
            grads = jax.grad(lambda u, k: jnp.sum(jnp.cos(mapped(lanes[1])(u, k))), (0, 1))(us, ks)
        else:
            values = [jax.vmap(mapped(f), (None, 0))(U, ks)]
            grads = jax.grad(lambda u, k: jnp.sum(jnp.cos(jax.vmap(mapped(f), (None, 0))(u, k))), (0, 1))(U, ks)
        return values, grads

    close(*map(run, kind))


def refusal(f):
    try:
        f()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("program", ["straight", "scan", "fori", "while"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_same_programs_are_refused(kind, program, shared):
    """Results that differ, where one is wanted for all; and loops that start shared and go on differing."""
    k0, u0 = jnp.float64(K), jnp.asarray(U[0])

    def of(f):
        loop = PROGRAMS[program]
        if shared:  # nothing differs, or only what the loop carries
            return lambda u, k: loop(f)(u0, k)
        return lambda u, k: loop(lambda c, k: f(u * c, k))(u0, k)

    def outcomes(f):
        shared_out = jax.shard_map(lambda u, k: of(f)(u[0], k), mesh=devices(), in_specs=(P("d"), P()), out_specs=P())
        return refusal(lambda: shared_out(U, k0)), refusal(lambda: mapped(of(f))(U, k0))

    ours, plain = map(outcomes, kind)
    assert ours == plain
    if not shared and program == "straight":
        assert plain[0] is not None


def test_without_checks(kind):
    def run(f):
        f = mapped(f, check_vma=False)
        return jax.jit(f)(U, K), jax.grad(lambda u, k: jnp.sum(jnp.cos(f(u, k))), (0, 1))(U, K)

    close(*map(run, kind))


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "host function"])  # JAX has no callbacks there
def test_meshes_of_two_axes_one_left_to_jax(kind):
    mesh = jax.make_mesh((2, 2), ("d", "auto"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def run(f):
        part = jax.shard_map(
            lambda u, k: jax.vmap(f, (0, None))(u, k), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"),
            axis_names={"d"},
        )  # fmt: skip
        u = jax.device_put(U, NamedSharding(mesh, P(("d", "auto"))))
        grads = jax.jit(jax.grad(lambda u, k: jnp.sum(jnp.cos(part(u, k))), (0, 1)))(u, K)
        return jax.jit(part)(u, K), grads

    close(*map(run, CASES[kind]))


def test_values_that_differ_along_two_axes(kind):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def run(f):
        part = jax.shard_map(
            lambda u, k: f(u[0], k[0])[None, None], mesh=mesh, in_specs=(P("a"), P("b")), out_specs=P("a", "b")
        )
        ks = np.array([K, 0.5])
        grads = jax.jit(jax.grad(lambda u, k: jnp.sum(jnp.cos(part(u, k))), (0, 1)))(U[:2], ks)
        return jax.jit(part)(U[:2], ks), grads

    close(*map(run, kind))


def test_pmap(kind):
    def run(f):
        f = jax.pmap(f, axis_name="d", in_axes=(0, None))
        return f(U, K), jax.grad(lambda u, k: jnp.sum(jnp.cos(f(u, k))), (0, 1))(U, K)

    close(*map(run, kind))


def test_programs_that_jax_partitions(kind):
    """Operators run on whole arrays, on every device."""
    u = jax.device_put(U, NamedSharding(devices(), P("d")))
    k = jax.device_put(K, NamedSharding(devices(), P()))

    def run(f):
        looped, f = (jax.vmap(g, (0, None)) for g in (loop_scan(f), f))
        return jax.jit(f)(u, k), jax.jit(jax.grad(loss_of(f), (0, 1)))(u, k), jax.jit(looped)(u, k)

    close(*map(run, kind))


def test_a_vector_that_is_split_over_the_devices():
    """One vector, a part of it on each device: it is gathered, and the operator runs in full on every one."""
    u = np.random.default_rng(1).uniform(-1, 1, N)
    data = jax.device_put(DATA, NamedSharding(devices(), P("d")))
    f = jax.jit(lambda u, q, k: reaction(u, COORDINATES, q, params={"k": k}))
    close(f(u, data, K), plain_reaction(u, K))
    ours = jax.jit(jax.grad(lambda q: jnp.sum(f(u, q, K) ** 2)))(data)
    expected = jax.grad(lambda q: jnp.sum(integrated(determinants(COORDINATES) * q * jnp.sin(K * at_points(u))) ** 2))(
        DATA
    )
    close(ours, expected)


def test_what_is_made_on_a_mesh_serves_everywhere():
    """Point functions and their derivatives are made once, and know nothing of the program that needed them first."""

    @ct.operator(inputs={"u": V.value, "w": V.weight}, outputs={"v": V.value}, params=jnp.ones(()))
    def fresh(u, w, params):
        return w * jnp.stack([jnp.sin(params * u)] * 2).sum()

    def run(f):
        grads = jax.grad(lambda u, k: jnp.sum(jnp.cos(mapped(f)(u, k))), (0, 1))(U, K)
        alone = jax.grad(lambda u, k: jnp.sum(jnp.cos(f(u, k))), (0, 1))(jnp.asarray(U[0]), K)
        batch = jax.vmap(f, (0, None))(U, K)
        return grads, alone, batch

    close(run(lambda u, k: fresh(u, params=k)), run(lambda u, k: integrated(W * 2 * jnp.sin(k * at_points(u)))))


def test_operators_defined_inside():
    def ours(u, k):
        op = ct.operator(inputs={"u": V.value, "w": V.weight}, outputs={"v": V.value}, params=1.0)(
            lambda u, w, params: w * params * u**2
        )
        return op(u, params=k)

    def run(f):
        return jax.grad(lambda u, k: jnp.sum(jnp.cos(mapped(f)(u, k))), (0, 1))(U, K)

    close(run(ours), run(lambda u, k: integrated(W * k * at_points(u) ** 2)))


def test_without_a_compiler():
    """What stands in for compiled code obeys the same rules."""
    out = check_python(
        """
        import warnings
        import jax, numpy as np
        jax.config.update("jax_enable_x64", True)
        warnings.simplefilter("ignore")
        import test_operator_sharding as t
        for name in ("operator", "history with taps", "sum", "pointwise"):
            for program in ("straight", "scan"):
                def run(f):
                    loss = lambda u, k: t.jnp.sum(t.jnp.cos(t.mapped(t.PROGRAMS[program](f))(u, k)))
                    return t.mapped(f)(t.U, t.K), jax.jit(jax.grad(loss, (0, 1)))(t.U, t.K)
                t.close(*map(run, t.CASES[name]))
        print("ok")
        """,
        CC="/nonexistent/cc",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert out == "ok\n"
