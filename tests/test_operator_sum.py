"""Sums of operators on different elements: against the sum in JAX, and against plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS
from test_boundary_space import warp
from test_point_operator import calls, close
from test_point_taps import Keeper, run

import ceedtap as ct


class Heater:
    """Nonlinear conduction in the cells, radiation on one side, a flux with a parameter on another one."""

    def __init__(self, resource, dim=2):
        mesh = ct.mesh.box(3, 2, order=2, warp=warp) if dim == 2 else ct.mesh.box(2, 1, 2, warp=warp)
        self.V = V = ct.Space(ct.Ceed(resource), mesh, degree=2, quadrature=3)
        X = V.geometry
        left, right = V.boundary("left"), V.boundary(["right", "top"])
        self.x = jnp.asarray(mesh.points)
        outputs = {"r": (V.value, V.grad)}

        @ct.operator(
            inputs={"T": (V.value, V.grad), "x": X.grad, "w": X.weight}, outputs=outputs, params={"b": 0.5, "k": [1.0]}
        )
        def cells(T, x, w, params):
            K, dV = jnp.linalg.inv(x), w * jnp.linalg.det(x)
            return dV * T[0] ** 3, dV * params["k"][0] * (1 + params["b"] * T[0] ** 2) * (K.T @ (K @ T[1]))

        @ct.operator(
            inputs={"x": left.geometry.grad, "w": left.weight, "outside": left.value, "T": left.value},
            outputs={"r": left.value},
        )
        def radiation(x, w, outside, T):
            return w * jnp.linalg.norm(ct.normal(x)) * (T**4 - outside**4)

        @ct.operator(
            inputs={"q": ct.quadrature(), "T": right.value, "x": right.geometry.grad, "w": right.weight},
            outputs={"r": right.value},
            params=jnp.ones(2),
        )
        def film(q, T, x, w, params):
            return w * jnp.linalg.norm(ct.normal(x)) * (params[0] * jnp.tanh(T) - params[1] * q)

        self.parts = cells, radiation, film
        self.total = cells + radiation + film
        self.params = {"cells": {"b": 0.3, "k": [1.5]}, "film": jnp.array([0.7, 2.0])}
        random = np.random.default_rng(0)
        self.T, self.outside = (jnp.asarray(0.5 + 0.1 * random.standard_normal(V.shape)) for _ in range(2))
        self.q = jnp.asarray(random.standard_normal((right.num_elements, right.num_quadrature_points)))

    @property
    def args(self):
        return self.T, self.x, self.outside, self.q

    def by_hand(self, T, x, outside, q, params):
        """The sum in JAX, of the parts in plain JAX."""
        cells, radiation, film = (part.reference for part in self.parts)
        return cells(T, x, params=params["cells"]) + radiation(x, outside, T) + film(q, T, x, params=params["film"])


@functools.cache
def heater(resource="/cpu/self", dim=2):
    return Heater(resource, dim)


# -- values and derivatives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resource", BACKENDS)
def test_values_and_gradients(resource):
    h = heater(resource)
    assert h.total.inputs == ("T", "x", "outside", "q")
    assert h.total.outputs == ("r",)
    want = h.by_hand(*h.args, h.params)
    for _ in range(2):  # what was there before is overwritten
        assert close(h.total(*h.args, params=h.params), want)
    assert close(h.total(q=h.q, outside=h.outside, x=h.x, T=h.T, params=h.params), want)
    assert close(h.total.reference(*h.args, params=h.params), want)

    def value(f):
        return lambda params, *args: jnp.sin(f(args, params)).sum()

    mine = value(lambda args, params: h.total(*args, params=params))
    plain = value(lambda args, params: h.by_hand(*args, params))
    gradients = [jax.jit(jax.grad(f, (0, 1, 2, 3, 4)))(h.params, *h.args) for f in (mine, plain)]
    assert close(*gradients, 1e-12)


def test_three_dimensions_and_second_derivatives():
    h = heater(dim=3)
    functions = [lambda a, p: h.total(*a, params=p), lambda a, p: h.by_hand(*a, p)]
    tangents = jax.tree.map(jnp.cos, (h.args, h.params))
    results = []
    for f in functions:
        gradient = jax.grad(lambda a, p, f=f: jnp.sin(f(a, p)).sum(), (0, 1))
        results.append(
            jax.jit(lambda g=gradient: jax.jvp(g, (h.args, jax.tree.map(jnp.asarray, h.params)), tangents))()
        )
    assert close(*results, 1e-11)


def test_one_call():
    h = heater()
    value = lambda T: h.total(T, *h.args[1:], params=h.params)  # noqa: E731
    assert calls(value, h.T) == 1
    assert calls(lambda T: jax.jvp(value, (T,), (T,))[1], h.T) == 1
    assert calls(jax.grad(lambda T: jnp.vdot(T, value(T))), h.T) == 2  # the value and the transposed tangent
    assert calls(jax.vmap(value), jnp.stack([h.T] * 5)) == 1


def test_batches():
    h = heater()
    Ts = jnp.stack([h.T, 2 * h.T, h.T**2])
    films = jnp.array([[0.1, 0.2], [1.0, 2.0], [3.0, 0.0]])

    def lanes(f):
        return lambda T, film: f(T, *h.args[1:], {**h.params, "film": film})

    batched = jax.vmap(lanes(lambda *a: h.total(*a[:-1], params=a[-1])))
    want = jnp.stack([lanes(h.by_hand)(T, film) for T, film in zip(Ts, films, strict=True)])
    assert close(jax.jit(batched)(Ts, films), want)
    sums = [
        jax.grad(lambda film, f=f: jnp.sin(jax.vmap(f, (0, None))(Ts, film)).sum())(films[0])
        for f in (lanes(lambda *a: h.total(*a[:-1], params=a[-1])), lanes(h.by_hand))
    ]
    assert close(*sums, 1e-12)


def test_a_direction_that_only_one_part_has():
    h = heater()
    by_q = [
        jax.jvp(lambda q, f=f: f(*h.args[:3], q), (h.q,), (jnp.cos(h.q),))[1]
        for f in (lambda *a: h.total(*a, params=h.params), lambda *a: h.by_hand(*a, h.params))
    ]
    assert close(*by_q)
    gradient = jax.grad(lambda q: jnp.vdot(h.T, h.total(*h.args[:3], q, params=h.params)))
    assert close(gradient(h.q), jax.grad(lambda q: jnp.vdot(h.T, h.by_hand(*h.args[:3], q, h.params)))(h.q))


def test_a_part_that_forgets_an_input():
    V = heater().V
    parts = [
        ct.operator(inputs={"u": V.value, "c": V.value, "w": V.weight}, outputs={"v": V.value}, name=name)(f)
        for name, f in (("a", lambda u, c, w: w * u**2), ("b", lambda u, c, w: w * (1 + c)))
    ]
    total = sum(parts)
    u, c = jnp.cos(heater().T), heater().T

    def by_hand(u, c):
        return parts[0].reference(u, c) + parts[1].reference(u, c)

    for wrt in (0, 1):
        assert close(*(jax.jacfwd(f, wrt)(u, c) for f in (total, by_hand)))
        assert close(*(jax.jacrev(f, wrt)(u, c) for f in (total, by_hand)))
    newton = total.linearize(u, c, wrt="u")
    assert close(newton.assemble().todense(), jax.jacfwd(by_hand)(u, c))
    constant = parts[1].linearize(u, c, wrt="u", stored=False)
    assert not constant(u).any()
    assert not constant.T(u).any()


def test_several_outputs_and_unused_ones():
    h = heater()
    V, X = h.V, h.V.geometry
    inputs = {"T": V.value, "x": X.grad, "w": X.weight}
    outputs = {"r": V.value, "heat": ct.quadrature()}
    one = ct.operator(inputs=inputs, outputs=outputs, name="one")(lambda T, x, w: (w * T, w * T**2))
    other = ct.operator(inputs={**inputs, "k": V.value}, outputs=dict(reversed(outputs.items())), name="other")(
        lambda T, x, w, k: {"r": w * k * jnp.sin(T), "heat": w * T * k}
    )
    total = one + other
    k = jnp.cos(h.T)
    want = [a + b for a, b in zip(one.reference(h.T, h.x), other.reference(h.T, h.x, k)[::-1], strict=True)]
    assert close(total(h.T, h.x, k), tuple(want))
    assert close(jax.jit(lambda T: total(T, h.x, k)[1])(h.T), want[1])
    gradient = jax.jit(jax.grad(lambda k: jnp.sin(total(h.T, h.x, k)[1]).sum()))
    assert close(gradient(k), jax.grad(lambda k: jnp.sin(total.reference(h.T, h.x, k)[1]).sum())(k))


def test_derivatives_with_more_fields_than_there_is_room_for():
    """Each part becomes several, whose contexts have the same parameters."""
    V = heater().V
    inputs = {f"a{i}": V.value for i in range(12)}

    def make(name, g):
        return ct.operator(inputs={**inputs, "w": V.weight}, outputs={"v": V.value}, name=name, params=1.5)(
            lambda w, params, **a: w * sum(g(params * i * value) * a["a0"] for i, value in enumerate(a.values()))
        )

    f = make("one", jnp.sin) + make("two", jnp.cos)
    arrays = [jnp.asarray(np.random.default_rng(i).standard_normal(V.shape)) for i in range(12)]
    params = {"one": 0.5, "two": 0.7}
    functions = [functools.partial(g, params=params) for g in (f, f.reference)]
    assert close(*(jax.jvp(g, arrays, arrays[::-1]) for g in functions))
    assert calls(lambda *a: jax.jvp(functions[0], a, a)[1], *arrays) == 1
    gradients = [
        jax.grad(lambda p, *a, g=g: jnp.tanh(g(*a, params=p)).sum(), range(13))(params, *arrays)
        for g in (f, f.reference)
    ]
    assert close(*gradients, 1e-12)
    newton = f.linearize(*arrays, wrt="a0", params=params, stored=False)
    direction = jnp.cos(arrays[1])
    want = jax.jvp(lambda a: f.reference(a, *arrays[1:], params=params), (arrays[0],), (direction,))[1]
    assert close(newton(direction), want)


# -- linearisation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False, None])
@pytest.mark.parametrize("resource", ["/cpu/self/ref/serial", "/cpu/self"])
def test_linearisation(resource, stored):
    h = heater(resource)
    matrix = jax.jacfwd(lambda T: h.by_hand(T, *h.args[1:], h.params))(h.T)
    newton = h.total.linearize(*h.args, wrt="T", params=h.params, stored=stored)
    scale, d = jnp.abs(matrix).max(), jnp.cos(h.T)
    for got, want in (
        (newton(d), matrix @ d),
        (newton.T(d), matrix.T @ d),
        (newton.T.T(d), matrix @ d),
        (jax.linear_transpose(newton, d)(d)[0], matrix.T @ d),
        (jax.vmap(newton)(jnp.stack([d, 2 * d]))[1], 2 * matrix @ d),
        (newton.diagonal(), jnp.diag(matrix)),
        (newton.T.diagonal(), jnp.diag(matrix)),
        (newton.assemble().todense(), matrix),
        (newton.T.assemble().todense(), matrix.T),
    ):
        assert np.allclose(got, want, rtol=0, atol=1e-12 * scale)
    assert newton.stored is (stored is not False)
    assert len(newton.jacobian) == 3
    assert calls(lambda d: h.total.linearize(*h.args, wrt="T", params=h.params, stored=False)(d), d) == 1


def test_linearisation_by_what_one_part_has():
    h = heater()
    by_q = h.total.linearize(*h.args, wrt="q", params=h.params)
    want = jax.jvp(lambda q: h.by_hand(*h.args[:3], q, h.params), (h.q,), (jnp.cos(h.q),))[1]
    assert close(by_q(jnp.cos(h.q)), want)
    assert by_q.jacobian.ndim == 4
    assert np.isclose(jnp.vdot(by_q.T(h.T), jnp.cos(h.q)), jnp.vdot(want, h.T), rtol=1e-12)
    with pytest.raises(ValueError, match="not square"):
        by_q.diagonal()
    assert close((by_q.assemble() @ jnp.cos(h.q).ravel()).reshape(want.shape), want)
    with pytest.raises(ValueError, match=r"cells \+ radiation \+ film can be linearised in T, x, outside, q, got 'w'"):
        h.total.linearize(*h.args, wrt="w", params=h.params)
    with pytest.raises(ValueError, match="direction of q has the shape"):
        by_q(h.T)
    with pytest.raises(ValueError, match="has 1 outputs, so the transpose takes as many"):
        by_q.T((h.T, h.T))


def test_newtons_method():
    """A slab that conducts and is cooled on both sides: -T'' = 2, T' = T on the left and -T' = T on the right."""
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=2)
    X, S = V.geometry, V.boundary(["left", "right"])

    @ct.operator(inputs={"T": V.grad, "x": X.grad, "w": X.weight}, outputs={"r": (V.value, V.grad)})
    def conduction(T, x, w):
        K, dV = jnp.linalg.inv(x), w * jnp.linalg.det(x)
        return -2 * dV, dV * K.T @ (K @ T)

    @ct.operator(inputs={"T": S.value, "x": S.geometry.grad, "w": S.weight}, outputs={"r": S.value})
    def cooling(T, x, w):
        return w * jnp.linalg.norm(ct.normal(x)) * T

    total = (conduction + cooling).bind(x=V.mesh.points)
    T = jnp.zeros(V.shape)
    T -= jnp.linalg.solve(total.linearize(T, wrt="T").assemble().todense(), total(T))
    x = V.nodes[:, 0]
    assert np.allclose(T, 1 + x - x**2, rtol=1e-12)


# -- taps --------------------------------------------------------------------------------------------------------------


def tapping(cells_tap, film_tap):
    """A sum of three parts, two of which tap at their points."""
    V = heater().V
    side = V.boundary("top")

    def make(name, space, function):
        return ct.operator(inputs={"u": space.value, "w": space.weight}, outputs={"v": space.value}, name=name)(
            function
        )

    return (
        make("cells", V, lambda u, w: w * jnp.sin(ct.id_tap(cells_tap, u**2)))
        + make("other", V, lambda u, w: w * u)
        + make("film", side, lambda u, w: w * ct.id_tap(film_tap, 2 * u))
    )


def plain(u):
    total = tapping(lambda *_, **__: None, lambda *_, **__: None)
    return sum(part.reference(u) for part in total.parts)


def points(u):
    """The values at the points of the cells and of the top side."""
    V = heater().V
    side = V.boundary("top")
    return [jnp.einsum("qp,ep->eq", s.basis.get_interp(), u[s.element_nodes]) for s in (V, side)]


def test_parts_that_tap():
    cells, film = Keeper(), Keeper()
    total, u = tapping(cells, film), heater().T
    assert close(run(jax.jit(total), u), plain(u))
    inside, top = points(u)
    assert close(cells.values, [np.asarray(inside**2)])
    assert close(film.values, [np.asarray(2 * top)])
    assert film.events[0][1]["operator"] == "film"
    assert close(run(total.reference, u), plain(u))
    assert len(film.events) == 1
    gradient = run(jax.jit(jax.grad(lambda u: jnp.vdot(u, total(u)))), u)
    assert close(gradient, jax.grad(lambda u: jnp.vdot(u, plain(u)))(u))
    assert close(film.of("jvp", "transpose").sum(), jnp.sum(points_weights() * points(u)[1]))
    newton = total.linearize(u, wrt="u")  # which does not tap
    assert close(run(newton, u), jax.jvp(plain, (u,), (u,))[1])
    assert [len(keeper.events) for keeper in (cells, film)] == [3, 3]


def points_weights():
    """Weights at the points of a side."""
    return np.polynomial.legendre.leggauss(3)[1][None, :]


def test_nobody_listens_to_parts():
    one, two, keeper = ct.Tap("one"), ct.Tap("two"), Keeper()
    total, u = tapping(one, two), heater().T
    program = jax.jit(jax.vmap(total))
    us = jnp.stack([u, 2 * u])
    quiet = run(program, us)
    assert close(quiet, jax.vmap(plain)(us))
    with two.attached(keeper):
        assert close(run(program, us), quiet, 0)
    assert close(keeper.values, [np.asarray(2 * jnp.stack([points(u)[1] for u in us]))])
    mixed, u = tapping(one, keeper), heater().T
    run(jax.jit(mixed), u)
    assert close(keeper.values[-1], np.asarray(2 * points(u)[1]))
    with one.attached(keeper):
        run(jax.jit(mixed), u)
    assert len(keeper.events) == 4


def test_taps_of_unused_outputs():
    V, keeper, tap, u = heater().V, Keeper(), ct.Tap("other"), heater().T
    outputs = {"v": V.value, "e": ct.quadrature()}

    def make(name, consumer):
        return ct.operator(inputs={"u": V.value, "w": V.weight}, outputs=outputs, name=name)(
            lambda u, w: (w * u, w * ct.id_tap(consumer, u) ** 2)
        )

    total = make("one", keeper) + make("two", tap)
    assert close(run(jax.jit(lambda u: total(u)[1]), u), total.reference(u)[1])
    run(jax.jit(lambda u: (total(u), 0)[1]), u)
    assert close(keeper.values, [np.asarray(points(u)[0])] * 2)


# -- parameters, bound fields, errors ----------------------------------------------------------------------------------


def test_bound_fields_and_parameters():
    h = heater()
    want = h.by_hand(*h.args, h.params)
    bound = h.total.bind(x=h.x, q=h.q)
    assert bound.inputs == ("T", "outside")
    assert close(bound(h.T, h.outside, params=h.params), want)
    everything = bound.bind(params=h.params)
    assert close(everything(h.T, h.outside), want)
    assert close(everything.reference(h.T, h.outside), want)
    film = h.total.bind(params={"film": h.params["film"]})
    assert close(film(*h.args, params={"cells": h.params["cells"]}), want)
    gradients = [
        jax.grad(lambda T, f=f: jnp.sin(f(T)).sum())(h.T)
        for f in (lambda T: everything(T, h.outside), lambda T: h.by_hand(T, *h.args[1:], h.params))
    ]
    assert close(*gradients, 1e-12)
    with pytest.raises(TypeError, match=r"parameters of cells .* are none"):
        everything(h.T, h.outside, params=h.params)


def test_parts_of_one_name_share_their_parameters():
    h = heater()
    film = h.parts[2]
    twice = film.bind(q=h.q) + film.bind(q=jnp.zeros_like(h.q))
    p = jnp.array([0.3, 0.4])
    want = film.reference(h.q, h.T, h.x, params=p) + film.reference(0 * h.q, h.T, h.x, params=p)
    assert close(twice(h.T, h.x, params={"film": p}), want)
    gradient = jax.grad(lambda p: twice(h.T, h.x, params={"film": p}).sum())(p)
    assert close(gradient, jax.grad(lambda p: twice.reference(h.T, h.x, params={"film": p}).sum())(p))


def test_sums_of_sums():
    h = heater()
    cells, radiation, film = h.parts
    for total in (cells + (radiation + film), sum(h.parts), (cells + radiation) + (film + radiation)):
        assert isinstance(total, ct.OperatorSum)
        assert isinstance(total, ct.PointOperator)
    assert [part.name for part in (cells + (radiation + film)).parts] == ["cells", "radiation", "film"]
    assert repr(h.total) == "<OperatorSum cells + radiation + film: (T, x, outside, q) -> r>"
    assert h.total.source.count("CEED_QFUNCTION(") == 3


def test_another_ceed_and_what_watches():
    h = heater()
    ceed = ct.Ceed("/cpu/self/ref/serial")
    moved = h.total.on(ceed)
    assert moved.ceed is ceed
    assert close(moved(*h.args, params=h.params), h.by_hand(*h.args, h.params))
    with pytest.raises(TypeError, match="of a sum, watch the terms"):
        ct.watch(h.total)
    seen = []
    watched = h.parts[0] + ct.watch(h.parts[1], lambda T: T > 0.4, then=seen.append)
    run(lambda: watched(h.T, h.x, h.outside, params={"cells": h.params["cells"]}))
    (offenders,) = seen
    x = offenders.coordinates
    assert 0 < len(x) <= 6
    assert np.all(np.min(np.linalg.norm(x[:, None] - h.V.nodes[h.V.boundary_nodes("left")], axis=-1), axis=1) < 0.3)


def test_errors():
    h = heater()
    V, (cells, _, film) = h.V, h.parts

    def make(inputs, outputs=None, name="other", **options):
        outputs = outputs or {"r": V.value}
        function = lambda u=0.0, T=0.0, params=0.0: dict.fromkeys(outputs, 0.0 * (u + T))  # noqa: E731
        return ct.operator(inputs=inputs, outputs=outputs, name=name, **options)(function)

    with pytest.raises(TypeError, match="unsupported operand"):
        cells + 1
    with pytest.raises(TypeError, match="unsupported operand"):
        1 + cells
    with pytest.raises(ValueError, match=r"same outputs: cells has r \(35,\), other has v \(35,\)"):
        cells + make({"u": V.value}, {"v": V.value})
    with pytest.raises(ValueError, match=r"same outputs: cells has r \(35,\), other has r \(12,\)"):
        cells + make({"u": V.value}, {"r": ct.Space(V.ceed, V.mesh, 1, V.quadrature).value})
    with pytest.raises(
        ValueError, match=r"field T has the shape \(35,\) in cells and \(6, 9\) in other; a sum has one"
    ):
        cells + make({"T": ct.quadrature(), "u": V.value})
    with pytest.raises(ValueError, match="cells and other belong to different Ceeds"):
        space = ct.Space(ct.Ceed("/cpu/self"), V.mesh, 2)
        cells + make({"u": space.value}, {"r": space.value})
    with pytest.raises(ValueError, match="two parts of a sum are called cells and have different parameters"):
        cells + make({"u": V.value}, name="cells", params=1.0)
    with pytest.raises(TypeError, match=r"are a dict of those of cells, film, got \[\]"):
        h.total(*h.args)
    with pytest.raises(TypeError, match=r"are a dict of those of cells, film, got list"):
        h.total(*h.args, params=[1.0])
    with pytest.raises(TypeError, match="parameters of film are like"):
        h.total(*h.args, params={**h.params, "film": [1.0]})
    with pytest.raises(TypeError, match="missing a required argument: 'q'"):
        h.total(*h.args[:3], params=h.params)
    with pytest.raises(ValueError, match="field q of film has the shape"):
        h.total(*h.args[:3], h.T, params=h.params)
    with pytest.raises(TypeError, match="no field y"):
        h.total.bind(y=h.T)
    with pytest.raises(TypeError, match="no parameters of 'radiation'"):
        h.total.bind(params={"radiation": 1.0})
    with pytest.raises(TypeError, match="params: expected a dict of those of cells, film"):
        h.total.bind(params=1.0)
    with pytest.raises(TypeError, match=r"radiation has no parameters, got 1\.0"):
        h.parts[1](h.x, h.outside, h.T, params=1.0)
    with pytest.raises(TypeError, match="has no parameters but those that are bound"):
        film.bind(params=jnp.ones(2))(h.q, h.T, h.x, params=jnp.ones(2))
    with pytest.raises(TypeError, match="parameters of film can be bound to known values only"):
        jax.jit(lambda p: film.bind(params=p)(h.q, h.T, h.x))(jnp.ones(2))
