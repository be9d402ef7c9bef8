"""Taps in compiled programs: counts, values and order."""

import io

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest

import ceedtap as ct
from ceedtap.protocol import DTYPES


class Recorder:
    """A consumer that keeps what it gets."""

    def __init__(self):
        self.values = []
        self.transforms = []

    def __call__(self, x, transforms=()):
        self.values.append(np.array(x))
        self.transforms.append(transforms)


def run(f, *args):
    """The result of f and the events that it emitted."""
    recorder = Recorder()
    with ct.outfeed_receiver():
        result = f(recorder)(*args)
        jax.block_until_ready(result)
    return result, recorder


def test_eager():
    result, events = run(lambda r: lambda x: ct.id_tap(r, x * 2), 3.0)
    assert result == 6.0
    assert events.values == [6.0]
    assert events.transforms == [()]


def test_jit_whether_the_result_is_used_or_not():
    _, events = run(lambda r: jax.jit(lambda x: ct.id_tap(r, x * 2)), 3.0)
    assert events.values == [6.0]

    def unused(r):
        def f(x):
            ct.id_tap(r, x * 2)
            return x

        return jax.jit(f)

    _, events = run(unused, 3.0)
    assert events.values == [6.0]


def test_a_compiled_function_taps_at_every_call():
    recorder = Recorder()
    f = jax.jit(lambda x: ct.id_tap(recorder, x))
    with ct.outfeed_receiver():
        for i in range(100):
            f(float(i))
    assert recorder.values == list(range(100))


def test_scan():
    def make(r):
        def body(c, x):
            c = ct.id_tap(r, c + x)
            return c, None

        return jax.jit(lambda xs: jax.lax.scan(body, 0.0, xs)[0])

    result, events = run(make, jnp.arange(10.0))
    assert result == 45
    assert np.array_equal(events.values, np.cumsum(np.arange(10.0)))


def test_fori_loop_without_using_the_carry():
    def make(r):
        return jax.jit(lambda n: jax.lax.fori_loop(0, n, lambda i, c: (ct.id_tap(r, i), c)[1], 0))

    _, events = run(make, 7)
    assert events.values == list(range(7))


def test_while_loop_in_body_and_predicate():
    body_events, predicate_events = Recorder(), Recorder()

    @jax.jit
    def f(n):
        def predicate(i):
            return ct.id_tap(predicate_events, i) < n

        return jax.lax.while_loop(predicate, lambda i: ct.id_tap(body_events, i + 1), 0)

    with ct.outfeed_receiver():
        assert f(5) == 5
    assert body_events.values == [1, 2, 3, 4, 5]
    assert predicate_events.values == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("taken", [True, False])
def test_cond_taps_the_taken_branch_only(taken):
    yes, no = Recorder(), Recorder()
    f = jax.jit(lambda p, x: jax.lax.cond(p, lambda x: ct.id_tap(yes, x), lambda x: ct.id_tap(no, -x), x))
    with ct.outfeed_receiver():
        f(taken, 2.0)
    assert (yes.values, no.values) == (([2.0], []) if taken else ([], [-2.0]))


def test_switch():
    recorders = [Recorder() for _ in range(3)]
    branches = [lambda x, r=r: ct.id_tap(r, x) for r in recorders]
    f = jax.jit(lambda i, x: jax.lax.switch(i, branches, x))
    with ct.outfeed_receiver():
        for i in (0, 2, 2, 1):
            f(i, float(i))
    assert [r.values for r in recorders] == [[0.0], [1.0], [2.0, 2.0]]


def test_nested_loops_and_cond():
    def make(r):
        def inner(i, c):
            return jax.lax.cond(i % 2 == 0, lambda c: ct.id_tap(r, c + 1), lambda c: c + 1, c)

        return jax.jit(lambda: jax.lax.fori_loop(0, 3, lambda _, c: jax.lax.fori_loop(0, 4, inner, c), 0))

    _, events = run(make)
    assert events.values == [1, 3, 5, 7, 9, 11]


def test_vmap_gives_one_event():
    _, events = run(lambda r: jax.jit(jax.vmap(lambda x, y: ct.id_tap(r, x + y), (0, None))), jnp.arange(4.0), 1.0)
    assert len(events.values) == 1
    assert np.array_equal(events.values[0], np.arange(4.0) + 1)
    assert events.transforms == [(("batch", {"batch_dims": (0,)}),)]


def test_nested_vmap_appends():
    f = lambda r: jax.vmap(jax.vmap(lambda x: ct.id_tap(r, x), in_axes=1), in_axes=0)  # noqa: E731
    _, events = run(f, jnp.ones((2, 3, 4)))
    assert [name for name, _ in events.transforms[0]] == ["batch", "batch"]
    assert events.values[0].shape == (2, 3, 4)


def test_gradients_are_those_without_the_tap():
    result, events = run(lambda r: jax.grad(lambda x: jnp.sin(ct.id_tap(r, x * x))), 1.3)
    assert result == jax.grad(lambda x: jnp.sin(x * x))(1.3)
    assert np.allclose(events.values, [1.3 * 1.3, np.cos(1.3 * 1.3)], rtol=1e-15)
    assert events.transforms == [(), (("jvp", {}), ("transpose", {}))]


def test_without_derivatives():
    f = lambda r: jax.grad(lambda x: jnp.sin(ct.id_tap(r, x * x, tangents=False)))  # noqa: E731
    _, events = run(f, 1.3)
    assert events.values == [1.3 * 1.3]


def test_grad_of_scan_keeps_all_events():
    def make(r):
        return jax.jit(jax.grad(lambda x: jax.lax.scan(lambda c, _: (ct.id_tap(r, c * x), None), x, None, 5)[0]))

    result, events = run(make, 1.1)
    assert result == pytest.approx(6 * 1.1**5)
    primals = [v for v, t in zip(events.values, events.transforms, strict=True) if t == ()]
    cotangents = [v for v, t in zip(events.values, events.transforms, strict=True) if t]
    assert np.allclose(primals, 1.1 ** np.arange(2, 7))
    assert np.allclose(cotangents, 1.1 ** np.arange(5))


def test_pytrees_kwargs_and_result():
    got = []

    def consumer(tree, number, *, what):
        got.append((tree, number, what))

    tree = {"a": jnp.arange(3), "b": (jnp.ones((2, 2)), 4)}
    with ct.outfeed_receiver():
        assert ct.id_tap(consumer, tree, 5, what="flux")[0] is tree
        assert ct.id_tap(consumer, tree, 5, what="flux", result="r") == "r"
        jax.jit(lambda t: ct.id_tap(consumer, t, 5, what="flux"))(tree)
    assert len(got) == 3
    for out, number, what in got:
        assert what == "flux"
        assert number == 5
        assert np.array_equal(out["a"], [0, 1, 2])
        assert np.array_equal(out["b"][0], np.ones((2, 2)))
        assert out["b"][1] == 4


@pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_types_and_shapes(dtype, shape, how):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3 - (0 if "u" in str(dtype) else 1)
    x = jnp.asarray(values.astype(dtype))
    _, events = run(lambda r: how(lambda x: ct.id_tap(r, x)), x)
    assert events.values[0].dtype == dtype
    assert events.values[0].shape == shape
    assert events.values[0].tobytes() == np.asarray(x).tobytes()


@pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys(impl, how):
    got = []
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    with ct.outfeed_receiver():
        assert how(lambda k: ct.id_tap(got.append, k))(keys).dtype == keys.dtype
        jax.vmap(how(lambda k: ct.id_tap(lambda x, transforms: got.append(x), k)))(keys)
    for out in got:
        assert out.dtype == keys.dtype
        assert out.shape == (4,)
        assert np.array_equal(jax.random.key_data(out), jax.random.key_data(keys))


def test_ten_thousand_arrays_in_one_event():
    got = []
    xs = [jnp.float64(i) for i in range(10_000)]
    with ct.outfeed_receiver(60):
        ct.id_tap(got.append, xs)
        jax.jit(lambda x: ct.id_tap(got.append, [x + i for i in range(1000)]))(0)
    assert got == [list(range(10_000)), list(range(1000))]


def test_values_in_another_memory_layout_arrive_in_c_order():
    x = jnp.arange(6.0).reshape(2, 3)
    _, events = run(lambda r: jax.jit(lambda x: ct.id_tap(r, x.T)), x)
    assert np.array_equal(events.values[0], np.arange(6.0).reshape(2, 3).T)


def test_large_arrays_stay_valid_after_the_stream_went_on():
    kept = []
    f = jax.jit(lambda i: ct.id_tap(kept.append, jnp.full(100_000, i)))
    with ct.outfeed_receiver(60):
        for i in range(50):
            f(float(i))
    assert all((array == i).all() for i, array in enumerate(kept))


def test_a_hundred_thousand_events_in_order():
    count = 0
    last = -1
    in_order = True

    def consumer(i):
        nonlocal count, last, in_order
        count += 1
        in_order &= int(i) == last + 1
        last = int(i)

    f = jax.jit(lambda: jax.lax.fori_loop(0, 100_000, lambda i, c: (ct.id_tap(consumer, i), c)[1], 0))
    with ct.outfeed_receiver(120):
        f()
    assert (count, last, in_order) == (100_000, 99_999, True)


def test_id_print():
    out = io.StringIO()
    with ct.outfeed_receiver():
        x = jnp.arange(3)
        assert ct.id_print(x, what="x", output_stream=out) is x
        jax.jit(lambda x: ct.id_print({"a": x}, output_stream=out, step=3))(x)
        ct.id_print(jnp.arange(2000), output_stream=out, threshold=5)
    assert out.getvalue() == "what: x\n[0 1 2]\nstep: 3\n{a: [0 1 2]}\n[   0    1    2 ... 1997 1998 1999]\n"


def test_bad_arguments():
    with pytest.raises(TypeError, match="needs a function"):
        ct.id_tap(jnp.ones(3), jnp.ones(3))
    with pytest.raises(TypeError, match="at least one value"):
        ct.id_tap(print)
    with pytest.raises(TypeError, match="by keyword"):
        ct.id_tap(print, "text")


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.jit(jax.grad(lambda b: f(b).sum()))], ids=["jit", "grad"])
@pytest.mark.parametrize("emit", ["tap", "call"])
def test_order_in_primitives_that_hide_effects(wrap, emit):
    """The solvers of lineax are such: JAX has no token there, and says so by a bare KeyError."""
    events = []

    def matrix(x):
        if emit == "tap":
            return 2 * ct.id_tap(lambda x, **_: events.append(x), x, ordered=True)
        return ct.call(lambda x: 2 * x, x, result_shape=x, ordered=True, jvp=lambda x, dx: (matrix(*x), 2 * dx[0]))

    operator = lineax.FunctionLinearOperator(
        matrix, jax.ShapeDtypeStruct((3,), jnp.float64), lineax.positive_semidefinite_tag
    )
    with pytest.raises(NotImplementedError, match=r"such as lineax.linear_solve: .* Leave out ordered=True"):
        wrap(lambda b: lineax.linear_solve(operator, b, lineax.CG(1e-8, 1e-8)).value)(jnp.ones(3))
    solve = lambda b: jax.scipy.sparse.linalg.cg(matrix, b)[0]  # noqa: E731
    if emit == "tap":
        with ct.outfeed_receiver():
            assert np.allclose(wrap(solve)(jnp.ones(3)), 0.5)
        assert events
