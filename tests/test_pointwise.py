"""Compiled point functions over plain arrays."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap.native import lib

rng = np.random.default_rng(0)


def energy(F):
    J = jnp.linalg.det(F)
    return jnp.sum(F * F) / 2 - jnp.log(J) + jnp.log(J) ** 2


def gradients(n):
    return jnp.asarray(np.eye(3) + 0.1 * rng.standard_normal((n, 3, 3)))


@pytest.mark.parametrize("n", [0, 1, 7, 128, 129, 1000])
def test_equals_vmap(n):
    F = gradients(n)
    f = ct.pointwise(jax.grad(energy))
    expected = jax.vmap(jax.grad(energy))(F)
    assert np.allclose(f(F), expected, rtol=1e-12, atol=1e-13)
    assert np.allclose(jax.jit(f)(F), expected, rtol=1e-12, atol=1e-13)


def test_several_arguments_and_a_pytree():
    def function(a, b, c):
        return {"sum": a + b[0], "outer": jnp.outer(b, c)}

    a, b, c = (jnp.asarray(rng.standard_normal((9, *shape))) for shape in ((), (2,), (3,)))
    out = ct.pointwise(function)(a, b, c)
    assert np.array_equal(out["sum"], a + b[:, 0])
    assert np.array_equal(out["outer"], b[:, :, None] * c[:, None, :])


def test_derivatives():
    F = gradients(20)
    ours, theirs = ct.pointwise(energy), jax.vmap(energy)
    assert np.allclose(jax.grad(lambda F: ours(F).sum())(F), jax.grad(lambda F: theirs(F).sum())(F), rtol=1e-12)
    dF = jnp.cos(F)
    for f, g in ((ours, theirs), (ct.pointwise(jax.grad(energy)), jax.vmap(jax.grad(energy)))):
        assert np.allclose(jax.jvp(f, (F,), (dF,))[1], jax.jvp(g, (F,), (dF,))[1], rtol=1e-11)

    def nested(f):
        return jax.jvp(jax.grad(lambda F: jnp.sum(f(F) ** 2)), (F,), (dF,))[1]

    assert np.allclose(nested(ours), nested(theirs), rtol=1e-11)


def test_vmap_and_scan():
    f = ct.pointwise(lambda x, y: x * jnp.sin(y))
    x, y = jnp.asarray(rng.standard_normal((4, 6))), jnp.asarray(rng.standard_normal(6))
    assert np.allclose(jax.vmap(f, (0, None))(x, y), x * jnp.sin(y), rtol=1e-15)
    steps = jax.jit(lambda y: jax.lax.scan(lambda c, _: (f(c, c), None), y, None, length=5)[0])(y)
    expected = y
    for _ in range(5):
        expected = expected * jnp.sin(expected)
    assert np.allclose(steps, expected, rtol=1e-13)


def test_the_cotangent_of_what_serves_all_lanes_is_summed():
    f = ct.pointwise(lambda x, y: x * y**2)
    x, y = jnp.asarray(rng.standard_normal((4, 6))), jnp.asarray(rng.standard_normal(6))
    gradient = jax.grad(lambda y: jax.vmap(f, (0, None))(x, y).sum())(y)
    assert np.allclose(gradient, (2 * x * y).sum(0), rtol=1e-13)


# -- as vmap: shared arguments, pytrees, keywords, all types -----------------------------------------------------------

REALS = ["float64", "float32"]
COMPLEX = ["complex128", "complex64"]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def values(dtype, shape=(6,)):
    """Values over the whole range of integers, and of moderate size else."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        edge = np.array([limits.min, limits.min + 1, 0, 1, limits.max - 1, limits.max], dtype)
        return np.resize(edge, shape)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    x = rng.uniform(0.5, 2, shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


def same_as_vmap(function, *args, in_axes=0, rtol=0.0, **kwargs):
    ours, theirs = ct.pointwise(function, in_axes), jax.vmap(function, in_axes)
    for wrap in (lambda f: f, jax.jit):
        result, expected = wrap(ours)(*args, **kwargs), wrap(theirs)(*args, **kwargs)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [*REALS, *COMPLEX, *INTEGERS, "bool"])
def test_types_are_kept(dtype):
    x = values(dtype)
    rtol = 4 * np.finfo(dtype).eps if np.dtype(dtype).kind in "fc" else 0
    same_as_vmap(lambda x: {"same": x, "equal": x == x, "neither": ~(x != x)}, x)
    if dtype != "bool":
        same_as_vmap(lambda x, y: (x + y, x * y, x + 2, y * 3), x, x[::-1], rtol=rtol)
        same_as_vmap(lambda x, k: x * k, x, 2, in_axes=(0, None), rtol=rtol)  # a Python number takes the other's type
    if np.dtype(dtype).kind != "c":
        same_as_vmap(lambda x, y: jnp.where(x > y, x, y), x, x[::-1])
    if np.dtype(dtype).kind == "f":
        same_as_vmap(lambda x, k: (x * k, jnp.sqrt(x) / x), x, 0.1, in_axes=(0, None), rtol=rtol)


def test_single_precision_is_that_of_jax():
    """Not double precision, rounded at the end: 1 + 1e-9 is 1."""
    same_as_vmap(lambda x: (x + jnp.float32(1e-9) - x, jnp.float32(16777216.0) + x), np.ones(3, np.float32))


def test_integers_and_booleans_among_real_numbers():
    def function(strain, material, active, params):
        modulus = params["E"][material]
        stress = jnp.where(active, modulus * strain, 0.0)
        return {"stress": stress, "yields": stress > params["limit"], "twice": 2 * material}

    strain, material = rng.standard_normal((7, 3)), rng.integers(0, 3, 7).astype(np.int32)
    params = {"E": jnp.array([1.0, 10.0, 100.0]), "limit": 2.0, "nothing": None}
    same_as_vmap(function, strain, material, material > 0, params, in_axes=(0, 0, 0, None), rtol=1e-15)
    lanes = jax.tree.map(lambda x: jnp.array([x] * 7), params)
    same_as_vmap(function, strain, material, active=material > 0, params=lanes, rtol=1e-15)


@pytest.mark.parametrize(
    "in_axes",
    [0, (0, 0), [0, None], (1, 0), (-1, None), (None, 0), ({"a": 0, "b": None}, None), ({"a": 1, "b": 0}, 0)],
    ids=str,
)
def test_in_axes(in_axes):
    arrays = {"a": rng.standard_normal((4, 4)), "b": rng.standard_normal((4, 4))}
    same_as_vmap(lambda t, x: (t["a"] @ t["b"] if t["b"].ndim < 2 else t["b"] @ t["a"].T, x),
                 arrays, rng.standard_normal((4, 2)), in_axes=in_axes, rtol=1e-13)  # fmt: skip


def test_derivatives_by_shared_arguments_and_beside_integers():
    def function(x, n, p):
        return p["a"] * jnp.sin(x) ** 2 + n * p["b"][0] * x, n

    x, n, p = rng.standard_normal(9), np.arange(9), {"a": jnp.float64(2.0), "b": jnp.ones(1)}
    ours, theirs = ct.pointwise(function, (0, 0, None)), jax.vmap(function, (0, 0, None))

    def gradients(f):
        loss = lambda x, p: jnp.sum(f(x, n, p)[0] ** 2)  # noqa: E731
        hessian = jax.jacfwd(jax.grad(loss, 1), 1)(x, p)
        lanes = jax.vmap(lambda x: jax.grad(loss, 1)(x, p))(np.stack([x, 2 * x]))
        return jax.value_and_grad(loss, (0, 1))(x, p), hessian, lanes, jax.jvp(lambda p: f(x, n, p)[0], (p,), (p,))

    for a, b in zip(*(jax.tree.leaves(gradients(f)) for f in (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_complex_derivatives():
    def loss(f):
        return lambda z: jnp.sum(jnp.abs(f(z)) ** 2)

    z = values("complex128")
    function = lambda z: z * z + jnp.exp(1j * z)  # noqa: E731
    ours, theirs = (jax.grad(loss(f))(z) for f in (ct.pointwise(function), jax.vmap(function)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_trees_that_are_equal_and_differ():
    """A dict by 1 and one by True are equal to Python; the function sees its own."""
    f = ct.pointwise(lambda tree: tree[1] * (2 if next(iter(tree)) is True else 1))
    x = np.ones(3)
    assert [float(f({key: x})[0]) for key in (1, True, 1)] == [1.0, 2.0, 1.0]


def test_bad_arguments():
    f = ct.pointwise(lambda x, y: x + y)
    with pytest.raises(TypeError, match=r"know float64, .* an argument of <lambda> is bfloat16; convert it"):
        f(jnp.zeros(3), jnp.zeros(3, jnp.bfloat16))
    with pytest.raises(TypeError, match="<lambda> takes arrays and numbers, got str"):
        f(jnp.zeros(3), "a")
    with pytest.raises(TypeError, match="an argument of <lambda> is key<fry>"):
        f(jnp.zeros(3), jax.random.split(jax.random.key(0), 3))
    with pytest.raises(TypeError, match="a result of <lambda> is float16"):
        ct.pointwise(lambda x: x.astype(jnp.float16))(jnp.zeros(3))
    with pytest.raises(ValueError, match="one number of points"):
        f(jnp.zeros(3), jnp.zeros(4))
    with pytest.raises(ValueError, match="an axis 0 over one number of points, got the shape \\(\\)"):
        f(jnp.zeros(3), jnp.zeros(()))
    with pytest.raises(ValueError, match="in_axes=\\(0, 0, 0\\) does not fit the 2 arguments of <lambda>"):
        ct.pointwise(lambda x, y: x + y, (0, 0, 0))(jnp.zeros(3), jnp.zeros(3))
    with pytest.raises(TypeError, match=r"in_axes are integers and None, as for jax.vmap, got 'a'"):
        ct.pointwise(lambda x: x, "a")(jnp.zeros(3))
    with pytest.raises(ValueError, match="one number of points"):
        ct.pointwise(lambda x: x, None)(jnp.zeros(3))
    with pytest.raises(TypeError, match="refers to a value that a program computes; pass it as an argument"):
        jax.jit(lambda k: ct.pointwise(lambda x: x * k)(jnp.zeros(3)))(2.0)


def test_functions_die_with_their_programs():
    def collect():
        jax.clear_caches()
        for _ in range(3):
            gc.collect()

    collect()
    before = lib.ct_registry_size(lib.ct_pointwise_functions())
    f = ct.pointwise(lambda x: 3 * x)
    compiled = jax.jit(f).lower(jnp.zeros(4)).compile()
    del f
    collect()
    assert np.array_equal(compiled(jnp.ones(4)), 3 * np.ones(4))
    del compiled
    collect()
    ct.pointwise(lambda x: 4 * x)(jnp.ones(2))  # entering one lets go of others
    collect()
    assert lib.ct_registry_size(lib.ct_pointwise_functions()) <= before + 1


def test_many_outputs_that_lie_in_a_row():
    a, b = (jnp.asarray(rng.standard_normal((5, 40))) for _ in range(2))
    outer = ct.pointwise(lambda a, b: jnp.concatenate([a[:3], jnp.outer(a, b).ravel(), b[::-1]]))
    expected = jax.vmap(lambda a, b: jnp.concatenate([a[:3], jnp.outer(a, b).ravel(), b[::-1]]))(a, b)
    assert np.array_equal(outer(a, b), expected)
