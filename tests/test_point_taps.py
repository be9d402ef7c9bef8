"""Taps inside functions of one quadrature point."""

import gc
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS

import ceedtap as ct
from ceedtap.apply import OPERATORS

MESH = ct.mesh.box(3, 3, 1, upper=(3.0, 1.5, 1.0))  # 9 elements: no multiple of 8


class Keeper:
    """A consumer that keeps what it gets."""

    def __init__(self):
        self.events = []

    def __call__(self, *values, **labels):
        self.events.append((values, labels))

    @property
    def values(self):
        return [values[0] for values, _ in self.events]

    @property
    def marks(self):
        return [tuple(name for name, _ in labels.get("transforms", ())) for _, labels in self.events]

    def of(self, *marks):
        (value,) = [value for value, names in zip(self.values, self.marks, strict=True) if names == marks]
        return value


def run(function, *args):
    with ct.outfeed_receiver(timeout_sec=120):
        return jax.block_until_ready(function(*args))


def space(backend="/cpu/self", degree=2, components=1):
    return ct.Space(ct.Ceed(backend), MESH, degree=degree, components=components)


def tapped_gradient(V, consumer, **options):
    """Diffusion with a coefficient that depends on the solution, which taps the physical gradient."""
    X = V.geometry

    @ct.operator(inputs={"u": V.grad, "x": X.grad, "w": X.weight}, outputs={"v": V.grad})
    def flow(u, x, w):
        K = jnp.linalg.inv(x.T)
        g = ct.id_tap(consumer, K.T @ u, **options)
        return w * jnp.linalg.det(x) * K @ g * (1 + g @ g)

    return flow


def points_of(V):
    """Physical coordinates of the quadrature points, from NumPy's Gauss rule: (elements, points, 3)."""
    one = (np.polynomial.legendre.leggauss(V.quadrature)[0] + 1) / 2
    local = np.stack(np.meshgrid(one, one, one, indexing="ij"), -1).reshape(-1, 3)[:, ::-1]  # the first is fastest
    corners = MESH.points[MESH.cells]
    lower, upper = corners.min(1), corners.max(1)
    return lower[:, None] + local * (upper - lower)[:, None]


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_scalar_vector_and_tensor_at_every_point(backend):
    V = space(backend)
    X = V.geometry
    keeper = Keeper()

    @ct.operator(inputs={"u": (V.value, V.grad), "x": (X.value, X.grad), "w": X.weight}, outputs={"v": V.value})
    def f(u, x, w):
        value, du = u
        ct.id_tap(keeper, {"value": value, "place": x[0], "gradient": jnp.outer(du, x[0])})
        return w * value

    u = jnp.asarray(V.nodes[:, 0] ** 2 + V.nodes[:, 1])
    run(jax.jit(f), u, MESH.points)
    (((tapped,), labels),) = keeper.events
    assert labels == {"where": "qfunction", "operator": "f"}
    place = points_of(V)
    np.testing.assert_allclose(tapped["place"], place, atol=1e-13)
    np.testing.assert_allclose(tapped["value"], place[..., 0] ** 2 + place[..., 1], atol=1e-13)
    gradient = np.stack([place[..., 0], np.full(place.shape[:-1], 0.25), 0 * place[..., 0]], -1)
    expected = (
        gradient[..., :, None] * place[..., None, :]
    )  # by the coordinates of cells of 2 x 2 x 2, that are 1 x 0.5 x 1
    np.testing.assert_allclose(tapped["gradient"], expected, atol=1e-12)


def test_types_come_back_as_they_were():
    V = space()
    keeper = Keeper()

    @ct.operator(inputs={"u": V.value, "w": V.weight}, outputs={"v": V.value})
    def f(u, w):
        ct.id_tap(keeper, u > 1, jnp.int32(3 * u), jnp.float32(u), u + 2j * u, jnp.uint8(7))
        return w * u

    u = jnp.asarray(V.nodes[:, 0])
    run(f, u)
    (flag, whole, single, pair, constant), _ = keeper.events[0]
    x = points_of(V)[..., 0]
    assert [a.dtype for a in (flag, whole, single, pair, constant)] == [bool, np.int32, np.float32, complex, np.uint8]
    np.testing.assert_array_equal(flag, x > 1)
    np.testing.assert_array_equal(whole, (3 * x).astype(int))
    np.testing.assert_allclose(single, x, rtol=1e-6)
    np.testing.assert_allclose(pair, (1 + 2j) * x, rtol=1e-13)
    np.testing.assert_array_equal(constant, np.full(x.shape, 7))


def test_one_value_tapped_twice_is_one_field():
    V = space()
    keeper = Keeper()

    @ct.operator(inputs={"u": V.value}, outputs={"v": V.value})
    def f(u):
        y = jnp.exp(u)
        ct.id_tap(keeper, (y, y), what="first")
        ct.id_tap(keeper, y, what="second")
        return y

    run(f, jnp.zeros(V.num_nodes))
    assert [labels["what"] for _, labels in keeper.events] == ["first", "second"]
    assert re.findall("tap\\d", f.source) == ["tap0", "tap0"]  # declared and written


# -- transformations -------------------------------------------------------------------------------------------------


@pytest.fixture
def problem():
    V = space()
    keeper = Keeper()
    flow = tapped_gradient(V, keeper)
    silent = tapped_gradient(V, Keeper(), when=jnp.bool_(False))
    u = jnp.asarray(np.random.default_rng(0).normal(size=V.shape))
    du = jnp.asarray(np.random.default_rng(1).normal(size=V.shape))
    K = np.array([2.0, 4.0, 2.0])  # from cells of 1 x 0.5 x 1 to cells of 2 x 2 x 2
    basis = V.basis.get_grad()

    def gradient(u):
        return np.einsum("dqp,...ep->...eqd", basis, np.asarray(u)[..., V.element_nodes]) * K

    weight = np.asarray(ct.operator(inputs={"w": V.weight}, outputs={"q": ct.quadrature()})(lambda w: w)()) / 16
    return V, keeper, flow, silent, u, du, gradient, weight


def energy(flow):
    return lambda u: (flow(u, MESH.points) ** 2).sum() / 2


class TestTransformations:
    def test_jvp(self, problem):
        _, keeper, flow, _, u, du, gradient, _ = problem
        run(jax.jit(lambda u, du: jax.jvp(lambda u: flow(u, MESH.points), (u,), (du,))), u, du)
        assert sorted(keeper.marks) == [(), ("jvp",)]
        np.testing.assert_allclose(keeper.of(), gradient(u), atol=1e-11)
        np.testing.assert_allclose(keeper.of("jvp"), gradient(du), atol=1e-11)

    @pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
    def test_cotangent(self, problem, compile):
        _, keeper, flow, _, u, du, gradient, weight = problem
        run(compile(lambda u, c: jax.vjp(lambda u: flow(u, MESH.points), u)[1](c)), u, du)
        assert sorted(keeper.marks) == [(), ("jvp", "transpose")]
        g = gradient(u)
        c = gradient(du) * weight[..., None]  # of the test function; K is in it, the determinant in the weight
        # The derivative of c . g (1 + g . g) by g.
        expected = c * (1 + (g * g).sum(-1, keepdims=True)) + 2 * g * (c * g).sum(-1, keepdims=True)
        np.testing.assert_allclose(keeper.of("jvp", "transpose"), expected, rtol=1e-10, atol=1e-10)

    def test_results_are_those_without_taps(self, problem):
        _, _, flow, silent, u, du, *_ = problem
        for transform in (lambda f: f, jax.grad, lambda f: lambda u: jax.jvp(jax.grad(f), (u,), (du,))[1]):
            tapped, plain = (run(jax.jit(transform(energy(f))), u) for f in (flow, silent))
            np.testing.assert_allclose(tapped, plain, rtol=1e-12)

    def test_vmap_is_one_event(self, problem):
        _, keeper, flow, _, u, du, gradient, _ = problem
        run(jax.jit(jax.vmap(lambda u: flow(u, MESH.points))), jnp.stack([u, du]))
        assert keeper.marks == [("batch",)]
        assert keeper.events[0][1]["transforms"] == (("batch", {"batch_dims": (0,)}),)
        np.testing.assert_allclose(keeper.values[0], gradient(np.stack([u, du])), atol=1e-11)

    @pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
    def test_marks_in_the_order_of_the_transformations(self, problem, compile):
        _, keeper, flow, _, u, du, *_ = problem
        batch = jnp.stack([u, du])
        run(compile(jax.vmap(jax.grad(energy(flow)))), batch)
        assert sorted(keeper.marks) == [("batch",), ("jvp", "transpose", "batch")]
        keeper.events.clear()
        run(compile(jax.grad(lambda b: jax.vmap(energy(flow))(b).sum())), batch)
        assert sorted(keeper.marks) == [("batch",), ("batch", "jvp", "transpose")]

    def test_second_derivatives_as_taps_outside_have_them(self, problem):
        """The events of a Hessian-vector product are those of a tap in a plain JAX program."""
        _, keeper, flow, _, u, du, *_ = problem
        other = Keeper()

        def plain(u):
            return (jnp.sin(ct.id_tap(other, u * u)) ** 2).sum() / 2

        for function in (energy(flow), plain):
            run(jax.jit(lambda u, du, f=function: jax.jvp(jax.grad(f), (u,), (du,))), u, du)
        assert sorted(keeper.marks) == sorted(other.marks)

    def test_scan_and_loops(self, problem):
        _, keeper, flow, _, u, _, gradient, _ = problem
        step = lambda u, _: (u + 0.1 * flow(u, MESH.points), None)  # noqa: E731
        run(jax.jit(lambda u: jax.lax.scan(step, u, None, length=5)[0]), u)
        assert keeper.marks == [()] * 5
        np.testing.assert_allclose(keeper.values[0], gradient(u), atol=1e-11)
        keeper.events.clear()
        run(jax.jit(jax.grad(lambda u: jax.lax.scan(step, u, None, length=3)[0].sum())), u)
        assert sorted(keeper.marks) == [()] * 3 + [("jvp", "transpose")] * 3

    def test_checkpoint(self, problem):
        _, keeper, flow, _, u, *_ = problem
        run(jax.jit(jax.grad(jax.checkpoint(energy(flow)))), u)
        assert sorted(keeper.marks) == [(), ("jvp", "transpose")]

    def test_linearisation_does_not_tap(self, problem):
        _, keeper, flow, _, u, du, *_ = problem
        for stored in (True, False):
            run(jax.jit(lambda u, du, s=stored: flow.linearize(u, MESH.points, wrt="u", stored=s)(du)), u, du)
        flow.reference(u, MESH.points)
        ct.barrier_wait()
        assert keeper.events == []

    def test_without_tangents(self):
        V, keeper = space(), Keeper()
        flow = tapped_gradient(V, keeper, tangents=False)
        run(jax.jit(jax.grad(energy(flow))), jnp.ones(V.num_nodes))
        assert keeper.marks == [()]


def test_in_a_function_in_the_function():
    V = space()
    keeper = Keeper()

    @jax.jit
    def inner(u):
        return ct.id_tap(keeper, 2 * u)

    @jax.custom_jvp
    def rule(u):
        return ct.id_tap(keeper, 3 * u)

    @rule.defjvp
    def rule_jvp(primals, tangents):
        return 3 * primals[0], 3 * tangents[0]

    @ct.operator(inputs={"u": V.value}, outputs={"v": V.value})
    def f(u):
        return jax.checkpoint(inner)(u) + rule(u)

    run(jax.jit(jax.grad(lambda u: f(u).sum())), jnp.ones(V.num_nodes))
    values = sorted((marks, float(value[0, 0])) for marks, value in zip(keeper.marks, keeper.values, strict=True))
    assert values[:2] == [((), 2.0), ((), 3.0)]
    assert [marks for marks, _ in values[2:]] == [("jvp", "transpose")]  # of `inner`; the rule of `rule` taps nothing


def test_pointwise():
    keeper = Keeper()
    f = ct.pointwise(lambda x: 2 * ct.id_tap(keeper, x * x, what="square"))
    x = jnp.arange(5.0)
    run(jax.jit(jax.grad(lambda x: f(x).sum())), x)
    np.testing.assert_array_equal(keeper.of(), x * x)
    np.testing.assert_array_equal(keeper.of("jvp", "transpose"), 2 * np.ones(5))


def test_print(capsys):
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(1, 1), degree=1, quadrature=1)

    @ct.operator(inputs={"u": V.value}, outputs={"v": V.value})
    def f(u):
        return ct.id_print(u, what="u")

    run(f, jnp.ones(4))
    assert capsys.readouterr().out == "what: u where: qfunction operator: f\n[[1.]]\n"


# -- conditions and optional taps ------------------------------------------------------------------------------------


def test_condition_at_the_points():
    V = space()
    keeper = Keeper()

    @ct.operator(inputs={"u": V.value}, outputs={"v": V.value})
    def f(u):
        return ct.id_tap(keeper, (u, u > 0.5), when=u > 0.5)[0]

    f = jax.jit(f)
    u = np.zeros(V.num_nodes)
    run(f, jnp.asarray(u))
    assert keeper.events == []
    u[V.element_nodes[5, 13]] = 1.0  # the node in the middle of an element
    run(f, jnp.asarray(u))
    ((((_, mask),), _),) = keeper.events
    assert mask.any(1).tolist() == [i == 5 for i in range(9)]


class TestOptional:
    """A `Tap` that nobody listens to costs nothing: the operator is applied without it."""

    def test_attached_while_a_program_exists(self):
        V = space()
        tap, keeper = ct.Tap("gradient"), Keeper()
        flow = tapped_gradient(V, tap)
        other = tapped_gradient(V, lambda *args, **labels: None)
        f, plain = jax.jit(flow), jax.jit(other)
        u = jnp.asarray(V.nodes[:, 0] ** 2)
        for listening in (False, True, False, True):
            if listening:
                with tap.attached(keeper):
                    result = run(f, u, MESH.points)
            else:
                result = run(f, u, MESH.points)
            np.testing.assert_array_equal(result, run(plain, u, MESH.points))
        assert len(keeper.events) == 2
        np.testing.assert_allclose(keeper.values[0][..., 0], 2 * points_of(V)[..., 0], atol=1e-12)

    def test_derivatives_and_batches(self):
        V = space()
        tap, keeper = ct.Tap("gradient"), Keeper()
        flow = tapped_gradient(V, tap)
        f = jax.jit(jax.vmap(jax.grad(energy(flow))))
        u = jnp.stack([jnp.asarray(V.nodes[:, 0] ** 2)] * 2)
        quiet = run(f, u)
        with tap.attached(keeper):
            loud = run(f, u)
        np.testing.assert_allclose(quiet, loud, rtol=1e-12)
        assert sorted(keeper.marks) == [("batch",), ("jvp", "transpose", "batch")]

    def test_nothing_is_computed(self):
        """What would fail when it is computed is not: the tapped value takes for ever."""
        V = space(degree=1)
        tap = ct.Tap("slow")

        @ct.operator(inputs={"u": V.value}, outputs={"v": V.value})
        def f(u):
            ct.id_tap(tap, jax.lax.while_loop(lambda x: x >= 0, lambda x: x + 1, u))
            return u

        run(jax.jit(f), jnp.ones(V.num_nodes))  # returns

    def test_with_parameters_and_bound_fields(self):
        V = space()
        tap, keeper = ct.Tap("value"), Keeper()

        @ct.operator(inputs={"u": V.value, "q": V.value}, outputs={"v": V.value}, params={"a": 1.0})
        def f(u, q, params):
            return ct.id_tap(tap, params["a"] * u * q)

        bound = f.bind(q=2 * jnp.ones(V.num_nodes))
        g = jax.jit(lambda u, a: bound(u, params={"a": a}))
        quiet = run(g, jnp.ones(V.num_nodes), 3.0)
        with tap.attached(keeper):
            np.testing.assert_array_equal(run(g, jnp.ones(V.num_nodes), 3.0), quiet)
        np.testing.assert_allclose(keeper.values[0], 6.0, rtol=1e-13)

    def test_recorded_while_nothing_is_attached(self, tmp_path):
        V = space()
        tap = ct.Tap("gradient")
        f = jax.jit(tapped_gradient(V, tap))
        u = jnp.asarray(V.nodes[:, 0] ** 2)
        run(f, u, MESH.points)
        with ct.record(tmp_path / "run.ctap"):
            run(f, u, MESH.points)
        run(f, u, MESH.points)
        recorded = ct.open(tmp_path / "run.ctap")["gradient"]
        assert recorded.shape == (1, 9, V.num_quadrature_points, 3)
        assert recorded.labels["operator"] == "flow"
        np.testing.assert_allclose(recorded[0][..., 0], 2 * points_of(V)[..., 0], atol=1e-12)

    def test_in_plain_jax(self, monkeypatch):
        from ceedtap import point_application
        from ceedtap.toolchain import CompilerNotFound

        def refuse(self):
            raise CompilerNotFound("there is none")

        monkeypatch.setattr(point_application.PointApplication, "connect", refuse)
        V = space()
        tap, keeper = ct.Tap("gradient"), Keeper()
        f = jax.jit(tapped_gradient(V, tap))
        u = jnp.asarray(V.nodes[:, 0] ** 2)
        with pytest.warns(UserWarning, match="plain JAX"):
            run(f, u, MESH.points)
        assert not keeper.events
        with tap.attached(keeper):
            run(f, u, MESH.points)
        np.testing.assert_allclose(keeper.values[0][..., 0], 2 * points_of(V)[..., 0], atol=1e-12)


def test_programs_let_go_of_consumers_and_operators():
    V = space(degree=1)
    jax.clear_caches()
    gc.collect()
    OPERATORS.reap()
    before = len(OPERATORS)
    tap = ct.Tap("gradient")
    f = jax.jit(tapped_gradient(V, tap))
    run(f, jnp.ones(V.num_nodes), MESH.points)
    assert len(OPERATORS) == before + 1
    assert len(tap.routes) >= 1
    del f
    jax.clear_caches()
    gc.collect()
    OPERATORS.reap()
    assert len(OPERATORS) == before


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cond", "scan", "while"])
def test_in_branches_and_loops_is_refused(kind):
    V = space()

    def tapped(u):
        return ct.id_tap(print, u)

    def f(u):
        if kind == "cond":
            return jax.lax.cond(u > 0, tapped, lambda u: u, u)
        if kind == "scan":
            return jax.lax.scan(lambda c, _: (tapped(c), None), u, None, length=3)[0]
        return jax.lax.while_loop(lambda u: u < 1, tapped, u)

    with pytest.raises(
        NotImplementedError, match=r"the operator f in a branch or a loop.*test_point_taps.*tap it outside"
    ):
        ct.operator(inputs={"u": V.value}, outputs={"v": V.value})(f)


def test_keys_are_refused():
    V = space()

    def f(u):
        ct.id_tap(print, jax.random.key(0))
        return u

    with pytest.raises(TypeError, match="the operator f taps random keys"):
        ct.operator(inputs={"u": V.value}, outputs={"v": V.value})(f)


def test_more_tapped_arrays_than_libceed_has_fields():
    """What is tapped is packed as other data at the quadrature points are."""
    V, seen = space(), {}

    def hear(value, number, **labels):
        seen[number] = value.copy()

    def f(u):
        for i in range(16):
            ct.id_tap(hear, u + i, number=i)
        return u

    op = ct.operator(inputs={"u": V.value}, outputs={"v": V.value})(f)
    with ct.outfeed_receiver():
        op(jnp.ones(V.num_nodes))
    assert sorted(seen) == list(range(16))
    for i, value in seen.items():
        np.testing.assert_allclose(value, 1.0 + i, rtol=1e-13)


def test_consumer_that_raises_does_not_disturb():
    V = space()

    def fail(value, **labels):
        raise ArithmeticError("no")

    flow = tapped_gradient(V, fail)
    with pytest.raises(ct.CallbackException) as caught, ct.outfeed_receiver():
        result = flow(jnp.asarray(V.nodes[:, 0]), MESH.points)
    assert isinstance(caught.value.exceptions[0], ArithmeticError)
    assert np.isfinite(result).all()


# -- jax.debug -------------------------------------------------------------------------------------------------------


def test_debug_print_and_callback_are_taps(capfd):
    """With the values at all points; derivatives print what the function does, once."""
    V = space(degree=1)
    seen = []

    def hear(value, name, *, twice):
        seen.append((np.asarray(value), name, np.asarray(twice)))

    @ct.operator(inputs={"u": V.value, "w": V.weight}, outputs={"v": V.value})
    def f(u, w):
        jax.debug.print("u = {} {what}", u, what=2 * u)
        jax.debug.callback(hear, u, "name", twice=2 * u)
        jax.debug.print("hello")
        return w * u**3

    u = jnp.asarray(V.nodes[:, 0])
    expected = f.reference(u)
    np.testing.assert_allclose(run(jax.jit(f), u), expected, rtol=1e-13, atol=1e-15)
    assert len(seen) == 1
    value, name, twice = seen[0]
    assert name == "name"
    assert value.shape == points_of(V).shape[:2]
    np.testing.assert_allclose(value, points_of(V)[..., 0], atol=1e-13)
    np.testing.assert_array_equal(twice, 2 * value)
    out = capfd.readouterr().out
    assert out.count("u = [[") == 1
    assert out.count("hello") == 1
    got = run(jax.jit(lambda u: jax.jvp(f, (u,), (u,))[1]), u)
    np.testing.assert_allclose(got, 3 * expected, rtol=1e-12, atol=1e-14)
    assert len(seen) == 2
    run(jax.grad(lambda u: f(u).sum()), u)
    assert len(seen) == 3


def test_debug_print_in_functions_of_arrays(capfd):
    square = ct.pointwise(lambda x: (jax.debug.print("x = {}", x), x * x)[1])
    assert run(square, jnp.arange(3.0)).tolist() == [0, 1, 4]
    assert capfd.readouterr().out.count("x = [0. 1. 2.]") == 1


@pytest.mark.parametrize("what", ["print", "callback"])
def test_ordered_debugging_is_refused(what):
    def law(x):
        if what == "print":
            jax.debug.print("{}", x, ordered=True)
        else:
            jax.debug.callback(lambda x: None, x, ordered=True)
        return x

    with pytest.raises(NotImplementedError, match=rf"jax.debug.{what}\(ordered=True\) in the operator law: .*id_print"):
        ct.pointwise(law)(jnp.ones(3))


def test_debug_print_in_a_branch_is_refused():
    def law(x):
        return jax.lax.cond(x > 0, lambda: (jax.debug.print("{}", x), x)[1], lambda: -x)

    with pytest.raises(NotImplementedError, match=r"operator law in a branch or a loop: `cond` at .*test_point_taps"):
        ct.pointwise(law)(jnp.ones(3))


# -- leaks -----------------------------------------------------------------------------------------------------------


def test_no_trace_outlives_its_end():
    """Under JAX's check of leaked tracers: taps, watches and prints in point functions, and their derivatives."""
    V = space(degree=1)

    @ct.operator(inputs={"u": V.value, "w": V.weight}, outputs={"v": V.value})
    def f(u, w):
        u = ct.id_print(u, what="u", output_stream=io.StringIO())
        ct.id_tap(lambda *a, **k: None, u * w, when=u > 0)
        jax.debug.callback(lambda x: None, u)
        return w * u**3

    u = jnp.asarray(V.nodes[:, 0])
    gc.disable()  # a cycle of references would hide behind it
    try:
        with jax.checking_leaks():
            watched = ct.watch(f, then=lambda offenders: None)
            for operator in (f, watched):
                run(jax.jit(operator), u)
                run(jax.jit(lambda u, g=operator: jax.jvp(g, (u,), (u,))), u)
                # Not jax.grad: JAX's transposition of any effect, its own callbacks too, keeps a cycle.
                run(jax.jit(jax.vmap(operator)), jnp.stack([u, u]))
    finally:
        gc.enable()
