"""Functions with many elements: loops in C in place of a line for each, and tables as data. Sizes, not seconds."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import check, source_of
from jax import lax

import ceedtap as ct
from ceedtap import codegen
from ceedtap.codegen_layout import nest
from ceedtap.codegen_loops import scalar_operations

RANDOM = np.random.default_rng(0)
DIRECTIONS = RANDOM.standard_normal((100, 3))
DIRECTIONS /= np.linalg.norm(DIRECTIONS, axis=1)[:, None]
TABLE = RANDOM.standard_normal((400, 400))


def fibres(F):
    C = F.T @ F
    stretch = jnp.einsum("ni,ij,nj->n", DIRECTIONS, C, DIRECTIONS)
    fibre = jnp.maximum(stretch - 1, 0)
    return jnp.sum(jnp.exp(2 * fibre**2) - 1) / 100 + 0.5 * jnp.trace(C) - jnp.log(jnp.linalg.det(F))


def stress(H):
    return jax.grad(fibres)(jnp.eye(3) + 0.1 * H)


def steps(A):
    return lax.scan(lambda c, _: (jnp.tanh(c @ A) * 0.5 + c * 0.1, None), A, None, length=10)[0]


def written_out(A):
    c = A
    for _ in range(10):
        c = jnp.tanh(c @ A) * 0.5 + c * 0.1
    return c


def table(x):
    at = x[:2] * 390
    i = jnp.clip(jnp.floor(at).astype(int), 0, 398)
    f = at - i
    values = jnp.asarray(TABLE)
    low = values[i[0], i[1]] * (1 - f[0]) + values[i[0] + 1, i[1]] * f[0]
    high = values[i[0], i[1] + 1] * (1 - f[0]) + values[i[0] + 1, i[1] + 1] * f[0]
    return low * (1 - f[1]) + high * f[1]


def factor(A):
    return jax.scipy.linalg.lu_factor(A + 24 * jnp.eye(24))[0]


def solve(A):
    return jnp.linalg.solve(A + 12 * jnp.eye(12), jnp.arange(12.0))


def positive(A):
    return jnp.linalg.cholesky(A @ A.T + 12 * jnp.eye(12))


def network(x):
    random = np.random.default_rng(1)
    for n, m in ((6, 120), (120, 120), (120, 6)):
        x = jnp.tanh(random.standard_normal((m, n)) / np.sqrt(n) @ x)
    return x


def spectrum(x):
    return jnp.abs(jnp.fft.fft(x * jnp.arange(1.0, 49.0))) ** 2


def branches(A):
    return lax.cond(A[0, 0] > 0.25, lambda A: A @ A @ A @ A, lambda A: jnp.sin(A @ A), A)


def iterated(A):
    def body(state):
        n, X = state
        return n + 1, 0.5 * X @ (3 * jnp.eye(12) - X @ X)

    S = jnp.eye(12) + 0.02 * (A + A.T)
    return lax.while_loop(lambda s: jnp.abs(s[1] @ s[1] - jnp.eye(12)).max() > 1e-3, body, (0, S))[1]


LAWS = {
    "100 fibre directions": (stress, (3, 3)), "expm": (jax.scipy.linalg.expm, (6, 6)), "10 steps": (steps, (16, 16)),
    "10 steps written out": (written_out, (16, 16)), "table": (table, (3,)), "LU": (factor, (24, 24)),
    "solve": (solve, (12, 12)), "Cholesky": (positive, (12, 12)), "network": (network, (6,)),
    "spectrum": (spectrum, (48,)), "branches": (branches, (12, 12)),
}  # fmt: skip


def variants(function, shape):
    """Value, jvp and vjp, with arguments."""
    x = 0.5 * np.random.default_rng(2).random((9, *shape))
    out = jax.eval_shape(function, x[0])
    dx, g = (np.random.default_rng(3).random((9, *s)) for s in (shape, out.shape))
    yield function, (x,)
    yield lambda x, dx: jax.jvp(function, (x,), (dx,))[1], (x, dx)
    yield lambda x, g: jax.vjp(function, x)[1](g)[0], (x, g)


@pytest.mark.parametrize("law", LAWS)
def test_few_lines_for_many_elements(law):
    """Whatever the sizes of the arrays are, the file stays one that a compiler takes in seconds."""
    for function, args in variants(*LAWS[law]):
        source = source_of(function, *(a.shape[1:] for a in args))
        code = re.sub(r'^ *"(\\\d{3})+"$', "", source, flags=re.MULTILINE)
        assert len(re.findall(r"\S.*\n", code)) < 4500


@pytest.mark.parametrize(
    "law", ["100 fibre directions", "10 steps", "table", "solve", "Cholesky", "network", "branches"]
)
def test_long_functions_have_the_values_of_jax(law):
    for function, args in variants(*LAWS[law]):
        check(function, *args, rtol=1e-12)


def test_a_loop_whose_length_depends_on_the_point():
    check(iterated, np.random.default_rng(4).random((5, 12, 12)), rtol=1e-12)


@pytest.fixture
def always_loops(monkeypatch):
    monkeypatch.setattr(codegen, "MAX_LINES", 0)


MIXED = {
    "layouts": lambda a, b: (a.T * b[:, None] + b[::-1], jnp.stack([a, a.T])[:, ::2], jnp.concatenate([a, a.T])[2:]),
    "repeated": lambda a, b: (jnp.tile(a, (2, 3)) * 2, jnp.repeat(b, 3) - 1, jnp.broadcast_to(b, (3, 6)) * b[0]),
    "permuted": lambda a, b: (a.reshape(-1)[jnp.array([7, 1, 30, 2, 9, 9, 11, 4, 0])] * 2, jnp.roll(a, 5) + a),
    "set": lambda a, b: (a.at[1].set(b) * 2, a.at[:, 2].add(1.0) - a, a.at[jnp.int32(3 * b[0])].set(b) + 1),
    "sums": lambda a, b: (a.sum(0), a.max(1), a.min(), a.prod(), (a > 0.2).sum(), (a > 0).all(0), a.mean()),
    "products": lambda a, b: (a @ a, a @ b, b @ a, jnp.outer(b, b), jnp.einsum("ij,kl,jk->il", a, a, a)),
    "batches": lambda a, b: (jnp.einsum("nij,njk->nik", a.reshape(4, 3, 3), a.T.reshape(4, 3, 3)),),
    "complex": lambda a, b: (jnp.abs((a + 1j * a.T) @ (a - 2j)), ((a + 1j) * b).imag.sum(0), jnp.fft.fft(b).real),
    "integers": lambda a, b: (jnp.int32(9 * a) @ jnp.int32(9 * a.T), jnp.cumsum(jnp.int64(9 * b)), jnp.int8(a * 9)),
    "scans": lambda a, b: lax.scan(lambda c, x: ((c[1], c[0] + a @ x), (c[0][:2], x.sum(), c[1])), (b, 2 * b), a),
    "backwards": lambda a, b: lax.scan(lambda c, x: (c * x + a[0], c[::-1]), b, a, reverse=True),
    "scan in scan": lambda a, b: lax.scan(
        lambda c, x: (lax.scan(lambda d, y: (d * 0.5 + c * y, d), c, x)[0], c @ a), b, a
    ),
    "swap": lambda a, b: lax.fori_loop(0, 7, lambda i, s: (s[1], s[0] + i, s[2].T), (a, a.T, a))[::-1],
    "singular": lambda a, b: jax.scipy.linalg.lu_factor(jnp.outer(b, b) * (a > 9)),
    "not positive": lambda a, b: (jnp.linalg.cholesky(-a @ a.T), jnp.linalg.cholesky(a @ a.T + jnp.eye(6))),
    "triangular": lambda a, b: [
        jax.scipy.linalg.solve_triangular(a + 6 * jnp.eye(6), b, lower=low, trans=t, unit_diagonal=u)
        for low in (False, True) for t in (0, 1) for u in (False, True)
    ],
    "solve": lambda a, b: (jnp.linalg.solve(a + jnp.eye(6), b), jnp.linalg.inv(a + jnp.eye(6)), jnp.linalg.det(a)),
    "choice": lambda a, b: lax.switch(
        jnp.int32(3 * b[0]), [lambda: a @ a, lambda: jnp.sin(a) @ a, lambda: a.at[0].set(b) @ a @ a.T]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_every_layout(always_loops, name):
    """As in JAX, whatever the elements of arrays are: of one array or several, in order or not, constant or not."""
    a, b = np.random.default_rng(5).random((11, 6, 6)), np.random.default_rng(6).random((11, 6))
    check(MIXED[name], a, b, rtol=1e-12)


@pytest.mark.parametrize("name", ["layouts", "sums", "scans", "scan in scan", "solve", "choice", "swap"])
def test_derivatives_of_every_layout(always_loops, name):
    def function(a, b):
        return sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(MIXED[name](a, b)) if x.dtype == float)

    a, b = np.random.default_rng(5).random((5, 6, 6)), np.random.default_rng(6).random((5, 6))
    check(jax.grad(function, (0, 1)), a, b, rtol=1e-11)


def test_a_large_table_is_data():
    """A million numbers, as their bytes: neither lines nor decimals."""
    source = source_of(table, (3,))
    assert source.count("\n") < TABLE.nbytes / 32 + 300
    assert not re.search(r"\d\.\d{9}.*, .*\d\.\d{9}", source)
    table_at = ct.pointwise(table)
    x = jnp.asarray(np.random.default_rng(7).random((20, 3)))
    np.testing.assert_allclose(table_at(x), jax.vmap(table)(x), rtol=1e-13)
    np.testing.assert_allclose(
        jax.grad(lambda x: table_at(x).sum())(x), jax.vmap(jax.grad(table))(x), rtol=1e-12, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64, np.uint8, np.uint32])
def test_tables_of_every_type(dtype):
    values = (200 * np.random.default_rng(8).random(50_000)).astype(dtype)

    def pick(x):
        i = jnp.int32(x * 49_999)
        known = jnp.asarray(values)
        return jnp.float64(known[i]) + lax.dynamic_slice(known[::2], (i // 4,), (3,)).sum() + known[3]

    check(pick, np.random.default_rng(9).random(17), rtol=1e-6 if dtype == np.float32 else 1e-15)


def test_scalar_operations_are_counted():
    x = jax.ShapeDtypeStruct((16, 16), np.float64)
    assert scalar_operations(jax.make_jaxpr(lambda a: a @ a)(x).jaxpr) == 16**3
    assert scalar_operations(jax.make_jaxpr(lambda a: jnp.sin(a).T)(x).jaxpr) == 256
    assert scalar_operations(jax.make_jaxpr(steps)(x).jaxpr) >= 10 * 16**3


def test_positions_as_loops():
    for shape, axes in (((4, 5), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((7,), (0,)), ((3, 1, 2), (1, 2, 0))):
        at = np.arange(np.prod(shape)).reshape(shape).transpose(axes).reshape(-1)
        loops = nest([at, np.arange(at.size)])
        found = at[0] + sum(
            np.reshape(np.arange(turns) * strides[0], [-1] + [1] * (len(loops) - 1 - n))
            for n, (turns, strides) in enumerate(loops)
        )
        np.testing.assert_array_equal(np.reshape(found, -1), at)
    assert nest([[0, 1, 2, 4]]) is None
    assert nest([[5]]) == []


def test_optimisation_is_less_for_longer_functions():
    """What is written out is compiled as ever; the word stands in the file, which other compilers do not read."""
    assert source_of(lambda x: jnp.sin(x) @ x, (3,)).startswith("#pragma once\n")
    assert source_of(solve, (12, 12)).startswith("/* compile with -O2 */\n")
