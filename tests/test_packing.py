"""Operators of more fields than libCEED has room for: as plain JAX, and as if there was room."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct

COUNT = 7  # scalar unknowns of the turbulence model, besides velocity and pressure


@functools.cache
def model():
    """Reynolds-averaged flow with many unknowns and much data: 26 fields, in two spaces and at the points."""
    ceed, mesh = (
        ct.Ceed("/cpu/self/opt/blocked"),
        ct.mesh.box(3, 2, warp=lambda x: x + 0.05 * np.sin(np.pi * x[:, ::-1])),
    )
    V = ct.Space(ceed, mesh, degree=2, components=2, quadrature=3)
    Q = ct.Space(ceed, mesh, degree=1, quadrature=3)
    scalars = {f"k{i}": (Q.value, Q.grad) if i < 2 else Q.value for i in range(COUNT)}
    data = {"wall": ct.quadrature(), "history": ct.quadrature(2, 2), "material": ct.quadrature(dtype=int)}

    @ct.operator(
        inputs={"u": (V.value, V.grad), "p": Q.value, **scalars, "x": V.geometry.grad, **data, "w": V.weight},
        outputs={
            "r": (V.value, V.grad),
            "c": Q.value,
            **{f"s{i}": Q.value for i in range(3)},
            "rate": ct.quadrature(),
            "new": ct.quadrature(2, 2),
            "number": ct.quadrature(dtype=int),
        },
        params={"nu": 1.0, "c": jnp.ones(2)},
    )
    def rans(u, p, x, wall, history, material, w, params, **k):
        value, slope = u
        K, dV = jnp.linalg.inv(x), w * jnp.linalg.det(x)
        slope = K @ slope
        viscosity = params["nu"] * jnp.array([1.0, 2.0])[material] + k["k0"][0] ** 2 / (1 + k["k1"][0] ** 2)
        stress = viscosity * (slope + slope.T) - p * jnp.eye(2) + params["c"][0] * history
        rate = jnp.sum(slope * stress)
        sources = [dV * (rate * k[f"k{i + 2}"] + params["c"][1] * wall * k[f"k{i + 4}"] * p) for i in range(3)]
        return {
            "r": (dV * slope.T @ value, dV * K.T @ stress), "c": dV * (jnp.trace(slope) + k["k0"][1] @ k["k1"][1]),
            "s0": sources[0], "s1": sources[1], "s2": sources[2], "rate": rate, "new": jnp.tanh(stress) + history,
            "number": material + 1,
        }  # fmt: skip

    rng = np.random.default_rng(0)
    points = V.num_elements, V.num_quadrature_points
    arrays = {
        "u": rng.standard_normal(V.shape), "p": rng.standard_normal(Q.shape),
        **{name: rng.standard_normal(Q.shape) for name in scalars}, "x": np.array(mesh.points),
        "wall": rng.uniform(size=points), "history": rng.standard_normal((*points, 2, 2)),
        "material": rng.integers(0, 2, points),
    }  # fmt: skip
    return rans, {name: jnp.asarray(x) for name, x in arrays.items()}, {"nu": 1.3, "c": jnp.array([0.2, 0.7])}


def close(ours, plain):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11 * max(1, np.abs(b).max(initial=0)))


def real(arrays):
    return {name: x for name, x in arrays.items() if x.dtype == jnp.float64}


def loss(f, arrays):
    def of(changed, params):
        outs = f(**{**arrays, **changed}, params=params)
        return sum(jnp.sum(out**2) for out in outs if out.dtype == jnp.float64)

    return of


def test_values():
    op, arrays, params = model()
    assert op._application.function.num_fields == 26
    expected = op.reference(**arrays, params=params)
    close(op(**arrays, params=params), expected)
    close(jax.jit(lambda arrays: op(**arrays, params=params))(arrays), expected)


def test_derivatives():
    op, arrays, params = model()
    changed = real(arrays)
    directions = jax.tree.map(jnp.cos, changed)

    def derivatives(f):
        of = loss(f, arrays)
        first = jax.jit(jax.grad(of, (0, 1)))(changed, params)
        along = jax.jit(lambda d: jax.jvp(lambda c: f(**{**arrays, **c}, params=params), (changed,), (d,)))(directions)
        return first, [out for out in jax.tree.leaves(along) if out.dtype == jnp.float64]

    close(derivatives(op), derivatives(op.reference))


def test_second_derivatives():
    op, arrays, params = model()
    direction = {"u": jnp.cos(arrays["u"]), "history": jnp.sin(arrays["history"])}

    def product(f):
        of = loss(f, arrays)
        given = {name: arrays[name] for name in direction}
        return jax.jit(lambda: jax.jvp(lambda c: jax.grad(of, (0, 1))(c, params), (given,), (direction,))[1])()

    close(product(op), product(op.reference))


def test_batches():
    op, arrays, params = model()
    many = {name: jnp.stack([arrays[name], 2 * arrays[name]]) for name in ("u", "k0", "history")}

    def lanes(f):
        run = lambda changed, params: f(**{**arrays, **changed}, params=params)  # noqa: E731
        grads = jax.vmap(jax.grad(loss(f, arrays), (0, 1)), (0, None))(many, params)
        return jax.vmap(run, (0, None))(many, params), grads

    close(lanes(op), lanes(op.reference))


@pytest.mark.parametrize("names", [("x",), ("x", "wall", "material"), ("history", "k0", "u", "p")], ids=str)
def test_bound_fields(names):
    op, arrays, params = model()
    rest = {name: x for name, x in arrays.items() if name not in names}
    bound = op.bind(**{name: arrays[name] for name in names})
    close(bound(**rest, params=params), op.reference(**arrays, params=params))
    changed = real(rest)
    close(
        jax.jit(jax.grad(loss(bound, rest)))(changed, params),
        jax.jit(jax.grad(loss(op.reference, arrays)))(changed, params),
    )


@pytest.mark.parametrize("wrt", ["u", "k2", "history"])
def test_linearization(wrt):
    op, arrays, params = model()
    linearized = op.linearize(**arrays, wrt=wrt, params=params)
    du = jnp.cos(arrays[wrt])
    along = jax.jvp(lambda x: op.reference(**{**arrays, wrt: x}, params=params), (arrays[wrt],), (du,))[1]
    kept = [i for i, out in enumerate(along) if out.dtype == jnp.float64]
    close([linearized(du)[i] for i in kept], [along[i] for i in kept])
    output = {"u": "r", "k2": "s0", "history": "new"}[wrt]
    matrix = linearized.assemble(output)
    close(matrix @ du.ravel(), along[op.outputs.index(output)].ravel())


def test_sums_of_operators():
    Q = model()[0]._application.function.inputs[1].fields[0].space
    small = ct.operator(inputs={"p": Q.value, "w": Q.weight}, outputs={"c": Q.value}, name="small")(
        lambda p, w: w * p**3
    )
    fields = {f"a{i}": Q.value for i in range(18)}
    large = ct.operator(inputs={**fields, "w": Q.weight}, outputs={"c": Q.value}, name="large", params=1.0)(
        lambda w, params, **a: w * params * sum(jnp.sin(i * value) * a["a0"] for i, value in enumerate(a.values()))
    )
    total = small + large
    rng = np.random.default_rng(1)
    values = {name: jnp.asarray(rng.standard_normal(Q.shape)) for name in ("p", *fields)}
    params = {"large": 1.5}
    close(total(**values, params=params), total.reference(**values, params=params))
    both = [jax.jit(jax.grad(lambda v, p, f=f: jnp.sum(jnp.cos(f(**v, params=p))), (0, 1)))(values, params)
            for f in (total, total.reference)]  # fmt: skip
    close(*both)


def test_taps():
    """All that is tapped, by derivatives as well, where the fields of the derivative have no room."""
    events = []

    def consumer(x, what, transforms=(), **_):
        events.append((what, tuple(name for name, _ in transforms), np.array(x)))

    Q = ct.Space(ct.Ceed("/cpu/self/opt/serial"), ct.mesh.box(2, 2), degree=1)
    fields = {f"a{i}": Q.value for i in range(14)}

    @ct.operator(inputs={**fields, "w": Q.weight}, outputs={"v": Q.value}, name="tapping")
    def tapping(w, **a):
        return w * sum(ct.id_tap(consumer, value, what=name) ** 2 for name, value in a.items())

    values = {name: (i + 1) * jnp.ones(Q.shape) for i, name in enumerate(fields)}
    with ct.outfeed_receiver():
        gradient = jax.jit(jax.grad(lambda values: tapping(**values).sum()))(values)
    weights = jax.grad(lambda values: tapping.reference(**values).sum())(values)
    close(gradient, weights)
    for i, name in enumerate(fields):
        (value,) = (x for what, transforms, x in events if (what, transforms) == (name, ()))
        assert np.allclose(value, i + 1)
        assert sum(what == name and transforms == ("jvp", "transpose") for what, transforms, _ in events) == 1
    assert len(events) == 2 * len(fields)


def test_in_shard_map():
    op, arrays, params = model()
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    def total(f, u, params):
        def part(u, params):
            return jax.lax.psum(sum(jnp.sum(out**2) for out in f(**{**arrays, "u": u[0]}, params=params)[:6]), "d")

        return jax.shard_map(part, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())(u, params)

    u = jnp.stack([arrays["u"], 2 * arrays["u"]])
    ours = jax.jit(jax.value_and_grad(functools.partial(total, op), (0, 1)))(u, params)
    plain = jax.value_and_grad(
        lambda u, p: sum(jnp.sum(out**2) for row in u for out in op.reference(**{**arrays, "u": row}, params=p)[:6]),
        (0, 1),
    )(u, params)
    close(ours, plain)
