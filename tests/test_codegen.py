"""Every family of primitives: translated to C, and evaluated by JAX at many points."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import check, compiled, source_of
from jax import lax

from ceedtap.codegen import TranslationError


def points(*shapes, num=13, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((num, *shape)) for shape in shapes]


def psi(f):
    j = jnp.linalg.det(f)
    return 0.5 * (jnp.sum(f * f) - 3) - jnp.log(j) + 0.5 * jnp.log(j) ** 2


def neo_hookean(g, w):
    return w * jax.grad(psi)(jnp.eye(3) + 0.1 * g)


ELEMENTWISE = {
    "axpy": lambda x, y: 2 * x + y,
    "division": lambda x, y: (x / y, 1 / x, x / 3.0),
    "powers": lambda x, y: (x**3, x**-2, x**7, x**0, jnp.abs(x) ** y, jnp.abs(x) ** 2.5),
    "exponentials": lambda x, y: (jnp.exp(x), jnp.exp2(x), jnp.expm1(x), jnp.log(jnp.abs(x)), jnp.log1p(jnp.abs(x))),
    "roots": lambda x, y: (jnp.sqrt(jnp.abs(x)), jnp.cbrt(x), lax.rsqrt(jnp.abs(x)), jnp.hypot(x, y), jnp.square(x)),
    "trigonometry": lambda x, y: (jnp.sin(x), jnp.cos(x), jnp.tan(x), jnp.arctan2(x, y), jnp.arctan(x)),
    "inverse": lambda x, y: (jnp.arcsin(jnp.tanh(x)), jnp.arccos(jnp.tanh(y)), jnp.arctanh(jnp.sin(x)) / 8),
    "hyperbolic": lambda x, y: (jnp.sinh(x), jnp.cosh(x), jnp.tanh(x), jnp.arcsinh(x), jnp.arccosh(1 + x * x)),
    "error functions": lambda x, y: (lax.erf(x), lax.erfc(x), lax.erf_inv(jnp.tanh(x)), jax.scipy.special.gammaln(x)),
    "rounding": lambda x, y: (jnp.floor(5 * x), jnp.ceil(5 * x), jnp.round(5 * x), lax.round(2 * x), jnp.trunc(5 * x)),
    "sign": lambda x, y: (jnp.sign(x), jnp.abs(x), -x, jnp.copysign(x, y), jnp.heaviside(x, y)),
    "extremes": lambda x, y: (jnp.maximum(x, y), jnp.minimum(x, y), jnp.clip(x, -0.5, 0.5), lax.clamp(-1.0, x, y + 9)),
    "remainders": lambda x, y: (jnp.mod(x, y), jnp.fmod(x, y), jnp.floor_divide(x, y), jnp.remainder(-x, y)),
    "logarithms of sums": lambda x, y: (jnp.logaddexp(x, y), jax.nn.softplus(x), jax.nn.sigmoid(x), jax.nn.gelu(y)),
    "activations": lambda x, y: (jax.nn.relu(x), jax.nn.silu(x), jax.nn.elu(x), jax.nn.softmax(x), jax.nn.celu(y)),
    "choice": lambda x, y: (jnp.where(x > y, x, jnp.exp(x)), lax.select_n(jnp.int32(jnp.abs(x)) % 3, x, y, x * y)),
    "comparisons": lambda x, y: (x > y, x >= y, x < y, x <= y, x == y, x != y, (x > 0) & (y > 0) | ~(x < y) ^ (x > 1)),
    "finite": lambda x, y: (jnp.isfinite(x), jnp.isnan(x), jnp.isinf(x)),
    "next": lambda x, y: (jnp.nextafter(x, y), lax.reduce_precision(x, 8, 23), lax.reduce_precision(x, 11, 52)),
    "single precision": lambda x, y: jnp.sin(x.astype(jnp.float32)) * y.astype(jnp.float32) + jnp.float32(0.1),
    "bits": lambda x, y: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int64) & ~0xFF, jnp.float64),
    "sinc": lambda x, y: (jnp.sinc(x), jnp.deg2rad(x), jnp.log10(jnp.abs(x)), jnp.log2(jnp.abs(y))),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name):
    check(ELEMENTWISE[name], *points((3,), (3,)), rtol=2e-7 if name == "single precision" else 4e-15)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_at_special_values(name):
    """Infinities, nan and zeros of both signs: the same as in JAX."""
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.5]
    x, y = (a.reshape(-1) for a in np.meshgrid(special, special))
    function = ELEMENTWISE[name]
    if name in ("bits", "choice", "activations"):
        pytest.skip("nan as an integer, nan with other bits, a softmax of nothing")
    check(function, x, y, rtol=1e-6)


STRUCTURE = {
    "gather": lambda x, i: x[jnp.array([2, 0, 1])] + x[2::-1],
    "gather out of bounds": lambda x, i: x.at[jnp.array([0, 7, -1])].get(mode="fill", fill_value=9.0),
    "index": lambda x, i: x[jnp.clip(jnp.int32(jnp.abs(i) * 3), 0, 5)],
    "index with fill": lambda x, i: x.at[jnp.int32(i * 3)].get(mode="fill", fill_value=7.0),
    "index clipped": lambda x, i: x.at[jnp.int32(i * 9)].get(mode="clip"),
    "indices": lambda x, i: x.reshape(2, 3)[jnp.int32(jnp.abs(i)) % 2, jnp.argsort(x[:3])],
    "set": lambda x, i: x.at[jnp.int32(jnp.abs(i) * 2)].set(5.0),
    "add at": lambda x, i: x.at[jnp.int32(jnp.abs(i) * 2)].add(5.0),
    "multiply at": lambda x, i: (x.at[jnp.int32(i)].multiply(3.0), x.at[jnp.int32(i)].min(0.1), x.at[2].max(i)),
    "scatter": lambda x, i: x.at[jnp.array([0, 2, 2])].add(x[:3]),
    "dynamic slice": lambda x, i: lax.dynamic_slice(x, (jnp.int32(i * 4),), (2,)),
    "dynamic update": lambda x, i: lax.dynamic_update_slice(x, x[:2] * 2, (jnp.int32(i * 4),)),
    "matrix slice": lambda x, i: lax.dynamic_slice(x.reshape(2, 3), (jnp.int32(i), jnp.int32(i * 2)), (1, 2)),
    "shapes": lambda x, i: (x.reshape(2, 3).T, jnp.flip(x), jnp.roll(x, 2), jnp.tile(x[:2], 3), jnp.repeat(x[:2], 2)),
    "stacking": lambda x, i: (jnp.stack([x, -x]), jnp.concatenate([x[:2], x[3:]]), jnp.split(x, 3), jnp.pad(x, (1, 2))),
    "pad inside": lambda x, i: lax.pad(x, 3.0, [(1, -2, 1)]),
    "pad by less than nothing": lambda x, i: (
        lax.pad(x, 3.0, [(-1, -1, 2)]),
        lax.pad(x[:1], 2.0, [(-1, 2, 1)]),
        lax.pad(x[:0], 1.0, [(1, 1, 1)]),
        lax.pad(jnp.outer(x, x), x[0], [(-2, 1, 0), (1, -1, 3)]),
    ),
    "strides and directions": lambda x, i: (
        lax.slice(jnp.outer(x, x), (1, 0), (4, 3), (2, 1)),
        lax.rev(jnp.outer(x, x[:3]), (0,)),
        x[::-2],
        lax.broadcast_in_dim(x[:3], (2, 3, 2), (1,)),
        lax.broadcast_in_dim(x[:1], (3, 2), (1,)),
        x[None, :, None][0],
    ),
    "triangles": lambda x, i: (jnp.tril(jnp.outer(x, x)), jnp.diag(x[:3]), jnp.trace(jnp.outer(x, x))),
    "iota": lambda x, i: x * jnp.arange(6) + lax.broadcasted_iota(jnp.float64, (6,), 0),
    "meshgrid": lambda x, i: jnp.meshgrid(x[:2], x[2:4]),
    "take along": lambda x, i: jnp.take_along_axis(x, jnp.argsort(x), 0),
    "one hot": lambda x, i: jax.nn.one_hot(jnp.int32(jnp.abs(i)), 4),
    "one of few": lambda x, i: (
        x[:3][jnp.int32(i * 4)],
        x.reshape(3, 2)[jnp.int32(i * 2), jnp.int32(i * 3)],
        x.reshape(2, 3)[jnp.int32(i)],
        lax.dynamic_slice(x.reshape(3, 2), (jnp.int32(i * 4), jnp.int32(i)), (2, 1)),
        x[:3].at[jnp.int32(i * 4)].set(5.0),
        x.reshape(2, 3).at[jnp.int32(i * 2)].add(x[:3], mode="clip"),
        jnp.take(x[:4], jnp.int32(i * 9), mode="fill"),
        jnp.take(x[:4], jnp.int32(i * 9), mode="wrap"),
        x.reshape(3, 2).at[jnp.array([jnp.int32(i), 1]), jnp.array([1, jnp.int32(i)])].multiply(2.0),
    ),
    "remainders": lambda x, i: (
        [lax.rem(jnp.int64(9 * x), jnp.int64(n)) for n in (2, 4, 8, 3)]
        + [lax.rem(jnp.int8(x * 200), jnp.int8(n)) for n in (2, 4, 8, 3)]
        + [jnp.int64(9 * x) % 2, jnp.int32(x * 1e12) % 4]
    ),
    "small integers": lambda x, i: (
        (jnp.sum(x > 0) * 3 - 7) / 2,
        jnp.float64(jnp.where(i > 0, jnp.int64(2) ** 40, -5)) + x,
        jnp.float64(jnp.int64(x > 0) * 2**31),
        jnp.float32(jnp.int64(x > 0) * -(2**31)),
        jnp.float64(jnp.int8(x > 0) - 2),
        jnp.float64(jnp.uint8(x > 0) - 2),
        jnp.float64(jnp.int8(jnp.int32(x > 0) * 300)),
    ),
    "large table": lambda x, i: jnp.asarray(np.sin(np.arange(50.0)))[jnp.int32(jnp.abs(i) * 20)],
    "searchsorted": lambda x, i: jnp.searchsorted(jnp.array([-1.0, 0.0, 0.5, 2.0]), i),
    "interp": lambda x, i: jnp.interp(i, jnp.array([-1.0, 0.0, 2.0]), x[:3]),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name):
    check(STRUCTURE[name], *points((6,), (), num=31))


SUMS = {
    "einsum": (lambda a, b: jnp.einsum("ijk,kl->lij", a, b), (2, 3, 4), (4, 2)),
    "batched product": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 4), (2, 4, 2)),
    "large product": (lambda a, b: a @ b, (9, 9), (9, 9)),
    "wide product": (lambda a, b: a @ b, (2, 40), (40,)),
    "tall product": (lambda a, b: (b @ a, a.T @ b), (40, 3), (40,)),
    "outer": (lambda a, b: jnp.outer(a, b) * 2 + 1, (40,), (3,)),
    "integer product": (lambda a, b: jnp.int32(a * 9) @ jnp.int32(b * 9), (40, 40), (40,)),
    "tensordot": (lambda a, b: jnp.tensordot(a, b, 2), (3, 3, 3, 3), (3, 3)),
    "kron": (lambda a, b: jnp.kron(a, b), (2, 2), (2, 2)),
    "cross": (lambda a, b: (jnp.cross(a, b), jnp.vdot(a, b), jnp.linalg.norm(a)), (3,), (3,)),
    "reductions": (lambda a, b: (a.sum(0), a.max(), a.min(1), a.prod(1), a.std(), jnp.median(b)), (3, 4), (5,)),
    "logical": (lambda a, b: (jnp.any(a > 1), jnp.all(a < 2), jnp.count_nonzero(a > 0), (a > 0).sum(1)), (3, 4), ()),
    "arg": (lambda a, b: (jnp.argmax(a), jnp.argmin(a, 1), jnp.argmax(a, 0)), (3, 4), ()),
    "logsumexp": (lambda a, b: jax.nn.logsumexp(a, 1), (3, 4), ()),
    "cumulative": (lambda a, b: (jnp.cumsum(a), jnp.cumprod(a), lax.cummax(a), lax.cummin(a, reverse=True)), (6,), ()),
    "cumulative logs": (lambda a, b: (lax.cumlogsumexp(a), jnp.diff(a)), (6,), ()),
    "sort": (lambda a, b: (jnp.sort(a), jnp.argsort(a), -jnp.sort(-a), jnp.sort(jnp.round(a))), (6,), ()),
    "sort pairs": (lambda a, b: lax.sort((jnp.round(a), b), num_keys=1), (6,), (6,)),
    "top k": (lambda a, b: lax.top_k(a, 3), (6,), ()),
    "convolution": (lambda a, b: jnp.convolve(a, b, mode="same"), (7,), (3,)),
    "polynomial": (lambda a, b: jnp.polyval(b, a), (2,), (4,)),
    "windows": (
        lambda a, b: (
            lax.reduce_window(a, -jnp.inf, lax.max, (2, 2), (1, 2), "SAME"),
            lax.reduce_window(a, 0.0, lax.add, (2, 2), (2, 1), "VALID"),
        ),
        (4, 4),
        (),
    ),
    "derivative of windows": (lambda a, b: jax.grad(pooled)(a), (6,), ()),
    "reduce": (lambda a, b: lax.reduce(a, 1.0, lambda x, y: x * y + 1, (1,)), (3, 2), ()),
    "fft": (lambda a, b: spectra(a, b), (6,), (3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums(name):
    function, *shapes = SUMS[name]
    check(function, *points(*shapes), rtol=1e-14)


def decay(x, y):
    return lax.fori_loop(0, 999, lambda i, c: c * 0.99 + y, x)


def cube_root(a):
    return lax.while_loop(lambda r: abs(r * r * r - a) > 1e-10, lambda r: r - (r**3 - a) / (3 * r * r), 1.0 + a)


def chain(x, y):
    return lax.scan(lambda c, a: (jnp.sin(c * 0.5 + a * x), c), y, jnp.arange(300.0))[0]


def root(a):
    def solve(f, z):
        return lax.fori_loop(0, 60, lambda i, z: z - f(z) / (3 * z * z + 1), z)

    return lax.custom_root(lambda z: z**3 + z - a, 0.0, solve, lambda g, b: b / g(1.0))


def pooled(a):
    return jnp.sum(jnp.sin(lax.reduce_window(a, -jnp.inf, lax.max, (2,), (2,), "VALID")))


def spectra(a, b):
    return jnp.abs(jnp.fft.fft(a)), jnp.fft.irfft(jnp.fft.rfft(a) * 2), jnp.fft.fft2(b).imag, jnp.fft.rfft2(b).real


CONTROL = {
    "cond": lambda x, y: lax.cond(x > 0, lambda x: x * 2, lambda x: -x, x),
    "cond with loops": lambda x, y: lax.cond(x > 0, lambda x: decay(x, y), jnp.sin, x),
    "switch": lambda x, y: lax.switch(jnp.int32(x * 2), [lambda x: x, lambda x: x * x, lambda x: -x], x),
    "while": lambda x, y: lax.while_loop(lambda c: c[0] ** 2 < 50, lambda c: (c[0] * 1.5 + 0.1, c[1] + 1), (abs(x), 0)),
    "newton": lambda x, y: cube_root(jnp.abs(x)),
    "fori": lambda x, y: lax.fori_loop(0, 1000, lambda i, c: jnp.sin(c) + x, x),
    "fori short": lambda x, y: lax.fori_loop(0, 3, lambda i, c: c * x + i, x),
    "swap": lambda x, y: lax.fori_loop(0, 1001, lambda i, c: (c[1], c[0] * 0.999), (x, y)),
    "dynamic bound": lambda x, y: lax.fori_loop(0, jnp.int32(abs(x) * 5), lambda i, c: c * 1.1 + i, y),
    "scan": lambda x, y: lax.scan(lambda c, a: (c * 0.5 + a, c * a), x, jnp.arange(500.0) * y),
    "reverse scan": lambda x, y: lax.scan(lambda c, a: (c * 0.5 + a, c * a), x, jnp.arange(300.0), reverse=True),
    "short scan": lambda x, y: lax.scan(lambda c, a: (c * 0.5 + a, c * a), x, jnp.arange(5.0)),
    "map": lambda x, y: lax.map(lambda a: jnp.sin(a * x), jnp.arange(4.0)),
    "vmap": lambda x, y: jax.vmap(lambda a: jnp.where(a > x, a, y))(jnp.arange(3.0)),
    "associative scan": lambda x, y: lax.associative_scan(jnp.multiply, jnp.arange(1.0, 5.0) * x),
    "gradient of a scan": lambda x, y: jax.grad(chain)(x, y),
    "second derivative": lambda x, y: jax.hessian(lambda v: jnp.sin(v[0] * v[1]) * v[1])(jnp.stack([x, y])),
    "checkpoint": lambda x, y: jax.grad(jax.checkpoint(lambda z: jnp.sin(jnp.exp(z * y))))(x),
    "jit": lambda x, y: jax.jit(lambda a, b: jax.jit(jnp.sin)(a) * b)(x, y),
    "custom_root": lambda x, y: jax.grad(root)(x),
    "named": lambda x, y: jax.named_call(jnp.sin, name="wave")(x) + lax.stop_gradient(y),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTROL)
def test_control_flow(name):
    check(CONTROL[name], *points((), (), num=31), rtol=1e-12)


def test_custom_derivatives():
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda p, t: (f(*p), 2 * jnp.cos(p[0]) * t[0]))

    @jax.custom_vjp
    def g(x):
        return jnp.cos(x)

    g.defvjp(lambda x: (g(x), x), lambda x, t: (3 * jnp.sin(x) * t,))
    check(lambda x: (f(x), jax.grad(f)(x), g(x), jax.grad(g)(x)), *points(()))


def test_inner_function_with_constants():
    table = jnp.asarray(np.random.default_rng(0).standard_normal((3, 3)))
    check(lambda x: table @ x + jax.jit(lambda y: y @ table)(x), *points((3,)))


def test_neo_hookean_and_its_derivatives():
    g, dg, w = points((3, 3), (3, 3), ())
    check(neo_hookean, g, w, rtol=1e-13)
    check(lambda g, dg, w: jax.jvp(lambda g: neo_hookean(g, w), (g,), (dg,))[1], g, dg, w, rtol=1e-13)
    check(lambda g, dg, w: jax.vjp(lambda g: neo_hookean(g, w), g)[1](dg)[0], g, dg, w, rtol=1e-13)


COMPLEX = {
    "arithmetic": lambda z, w: (z * w, z / w, z - w, -z, jnp.conj(z), z * 2.0, 1 / z, z == w, z**3),
    "functions": lambda z, w: (jnp.exp(z), jnp.log(z), jnp.sqrt(z), jnp.sin(z), jnp.cosh(z), jnp.tanh(z), z**w),
    "parts": lambda z, w: (jnp.abs(z), jnp.angle(z), jnp.sign(z)),
    "products": lambda z, w: jnp.array([[z, w], [w, z]]) @ jnp.array([z, w]),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex(name):
    def function(x, y):
        leaves = jax.tree.leaves(COMPLEX[name](lax.complex(x, y), lax.complex(y, x + 1)))
        return [part for z in leaves for part in (jnp.real(z), jnp.imag(z * 1.0))]

    check(function, *points((), ()), rtol=1e-13)


# -- integers ----------------------------------------------------------------------------------------------------------

INTEGERS = [jnp.int8, jnp.int16, jnp.int32, jnp.int64, jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(dtype):
    """They wrap around; division by zero and of the smallest number by -1, and shifts too far, are as in XLA."""
    info = jnp.iinfo(dtype)

    def function(x, y):
        a, b = x.astype(dtype), y.astype(dtype)
        edge = jnp.where(x > 1e3, jnp.array(info.max, dtype), jnp.where(x < -1e3, jnp.array(info.min, dtype), a))
        shift = b % 10
        results = [edge + b, edge - b, edge * b, edge * edge, lax.div(edge, b), lax.rem(edge, b), -edge, abs(edge)]
        results += [edge & b, edge | b, edge ^ b, ~edge, jnp.maximum(edge, b), jnp.sign(edge), edge < b, edge == b]
        results += [lax.shift_left(edge, shift), lax.shift_right_logical(edge, shift)]
        results += [lax.shift_right_arithmetic(edge, shift), lax.population_count(edge), lax.clz(edge), edge**3]
        # As numbers that double precision holds exactly.
        return [
            p for r in results for p in ((r.astype(jnp.int64) >> 32) * 1.0, (r.astype(jnp.int64) & 0xFFFFFFFF) * 1.0)
        ]

    x = np.array([2000.0, -2000.0, 0.0, 1.0, 7.0, 100.0, -5.0 if info.min else 5.0] * 5)
    y = np.repeat([0.0, -1.0 if info.min else 1.0, 3.0, 77.0, -3.0 if info.min else 9.0], 7)
    check(function, x, y, rtol=0)


def test_conversions():
    def function(x):
        return [x.astype(d) for d in (bool, *INTEGERS, jnp.float32)] + [x.astype(jnp.int32).astype(jnp.uint8) * 1.0]

    inside = np.array([0.0, -0.0, 0.5, -0.5, 1.5, 100.9, -100.9])
    check(lambda x: [x.astype(d) for d in (bool, jnp.int8, jnp.int64, jnp.float32)], inside, rtol=0)
    x = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 3e9, -3e9, 300.0])
    check(lambda x: [x.astype(d) for d in (bool, jnp.int32, jnp.int64)], x, rtol=0)
    compiled(function, ())(x)


# -- errors ------------------------------------------------------------------------------------------------------------

REFUSED = {
    "pure_callback": lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), np.float64), x),
    "debug_callback": lambda x: (jax.debug.callback(print, x), x)[1],
    "axis_index": lambda x: x,
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_primitive_and_the_line(name):
    if name == "axis_index":
        function = jax.vmap(lambda x: lax.psum(x, "i"), axis_name="i", axis_size=2, in_axes=None)
        mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec()
        function = jax.shard_map(lambda x: lax.psum(x, "d"), mesh=mesh, in_specs=spec, out_specs=spec)
        with pytest.raises(TranslationError, match="`shard_map` has no translation to C: it communicates"):
            source_of(lambda x: function(x), ())
        return
    function = REFUSED[name]
    line = inspect.getsourcelines(function)[1]
    with pytest.raises(TranslationError) as caught:
        source_of(function, ())
    message = str(caught.value)
    assert f"the JAX primitive `{name}`" in message
    assert "has no translation to C: " in message
    assert f"{__file__}:{line}" in message


def test_an_unknown_type_is_an_error():
    with pytest.raises(TranslationError, match="float16"):
        source_of(lambda x: x.astype(jnp.float16) * 2, ())


# -- the C code --------------------------------------------------------------------------------------------------------


def lines(source, operator):
    return [s for s in source.splitlines() if f" {operator} " in s and s.lstrip().startswith("const double")]


def test_equal_lines_are_written_once():
    source = source_of(lambda x, y: (x * 0.5 + 0.5 * x, x + y, y + x), (), ())
    assert len([s for s in lines(source, "*") if "0.5" in s]) == 1
    assert source.count("u0[i]") == 1


def test_what_is_not_used_is_left_out():
    source = source_of(lambda x, y: jnp.stack([jnp.exp(x), y[2]])[1], (), (3,))
    assert "exp" not in source
    assert "u0[i]" not in source
    assert "u1[1 * Q + i]" not in source


def test_comments_are_lines_of_the_function():
    assert "/* return w * jax.grad(psi)(jnp.eye(3) + 0.1 * g) */" in source_of(neo_hookean, (3, 3), ())


def test_large_layers_are_loops():
    rng = np.random.default_rng(0)
    w = [jnp.asarray(rng.standard_normal(s) / 8) for s in ((64, 3), (64, 64), (6, 64))]

    def mlp(x):
        for layer in w[:-1]:
            x = jnp.tanh(layer @ x)
        return w[-1] @ x

    (x,) = points((3,))
    run = check(mlp, x)
    assert len([s for s in run.source.splitlines() if "=" in s]) < 250
    check(jax.jacobian(mlp), x)
    check(lambda x: jax.grad(lambda y: jnp.sum(mlp(y) ** 2))(x), x)
    check(lambda x, v: jax.vjp(lambda u: u @ jnp.sin(x), w[1][:12, :40])[1](v)[0], *points((40,), (12,), num=3))
