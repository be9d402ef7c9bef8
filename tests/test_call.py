"""Host functions whose results go back into the program: values, counts, derivatives, errors, and no hang."""

import gc
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ceedtap as ct
from ceedtap.native import lib
from ceedtap.protocol import DTYPES

JIT_AND_EAGER = pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["jit", "eager"])
ERRORS = (jax.errors.JaxRuntimeError, ValueError, ct.CallError)


class Counted:
    """A host function that counts its calls and keeps its arguments."""

    def __init__(self, func):
        self.func = func
        self.args = []

    def __call__(self, *args):
        self.args.append([np.array(arg) for arg in args])
        return self.func(*args)


def in_time(func, seconds=20):
    """The result of `func`, which must return in time."""
    outcome = []

    def work():
        try:
            outcome.append((func(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def run_python(code, timeout=60):
    code = (
        "import ceedtap as ct, jax, jax.numpy as jnp, numpy as np, os, signal, sys, threading, time\n"
        + textwrap.dedent(code)
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False)


# -- values ----------------------------------------------------------------------------------------------------------


@JIT_AND_EAGER
def test_value(how):
    f = how(lambda x: ct.call(np.sin, x * 2, result_shape=x) + 1)
    assert f(1.5) == np.sin(3.0) + 1
    assert np.array_equal(f(jnp.arange(4.0)), np.sin(2 * np.arange(4.0)) + 1)


@JIT_AND_EAGER
def test_pytrees_and_kwargs(how):
    def host(tree, y, *, scale):
        assert type(tree["a"]) is np.ndarray
        return {"sum": tree["a"].sum() * scale, "rest": (tree["b"], [y + 1]), "n": 3}

    shape = {"sum": 0.0, "rest": (jax.ShapeDtypeStruct((2,), np.int32), [jnp.zeros(3)]), "n": 0}
    f = how(lambda t, y: ct.call(host, t, y, result_shape=shape, scale=2.0))
    out = f({"a": jnp.arange(3.0), "b": jnp.array([5, 6], np.int32)}, jnp.ones(3))
    assert out["sum"] == 6.0
    assert out["rest"][0].tolist() == [5, 6]
    assert out["rest"][1][0].tolist() == [2, 2, 2]
    assert out["n"] == 3


@JIT_AND_EAGER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 5)])
def test_types_and_shapes(dtype, shape, how):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3 - (0 if "u" in str(dtype) else 1)
    x = jnp.asarray(values.astype(dtype))
    got = Counted(lambda a: a)
    out = how(lambda x: ct.call(got, x, result_shape=x))(x)
    assert out.dtype == got.args[0][0].dtype == dtype
    assert out.shape == got.args[0][0].shape == shape
    assert np.asarray(out).tobytes() == got.args[0][0].tobytes() == np.asarray(x).tobytes()


@JIT_AND_EAGER
def test_keys(how):
    def host(keys):
        return np.asarray(jax.random.key_data(keys))

    keys = jax.random.split(jax.random.key(3), 4)
    data = jax.random.key_data(keys)
    assert np.array_equal(how(lambda k: ct.call(host, k, result_shape=data))(keys), data)


@JIT_AND_EAGER
def test_no_arguments_and_no_results(how):
    count = Counted(lambda: None)
    assert how(lambda: ct.call(count, result_shape=None))() is None
    assert how(lambda: ct.call(lambda: 7, result_shape=0))() == 7
    if how is jax.jit:
        jax.effects_barrier()
    assert len(count.args) == 1


@JIT_AND_EAGER
def test_arrays_are_the_functions_own(how):
    kept = []

    def host(x):
        kept.append(x)
        x += 1
        return x

    f = how(lambda x: ct.call(host, x, result_shape=x))
    x = jnp.zeros(100_000)
    outs = [f(x) for _ in range(5)]
    kept[0][:] = -1
    assert float(x.sum()) == 0
    assert all((out == 1).all() for out in outs)


def test_results_in_another_memory_layout():
    f = jax.jit(lambda x: ct.call(lambda x: x.T, x.T, result_shape=x))
    x = jnp.arange(6.0).reshape(2, 3)
    assert np.array_equal(f(x), x)


# -- counts under transformations ------------------------------------------------------------------------------------


@JIT_AND_EAGER
def test_an_unused_result_is_computed_once(how):
    host = Counted(lambda x: x)

    def f(x):
        ct.call(host, x, result_shape=x)
        return x

    how(f)(1.0)
    jax.effects_barrier()
    assert len(host.args) == 1


def test_equal_calls_are_not_merged():
    host = Counted(lambda x: x)
    assert jax.jit(lambda x: ct.call(host, x, result_shape=x) + ct.call(host, x, result_shape=x))(2.0) == 4
    assert len(host.args) == 2


def test_scan_while_and_cond():
    host = Counted(lambda x: x + 1)

    def step(x):
        return ct.call(host, x, result_shape=x)

    assert jax.jit(lambda x: jax.lax.scan(lambda c, _: (step(c), None), x, None, 10)[0])(0) == 10
    assert [int(args[0]) for args in host.args] == list(range(10))
    assert jax.jit(lambda x: jax.lax.while_loop(lambda c: step(c) < 5, step, x))(0) == 4
    assert len(host.args) == 10 + 5 + 4
    f = jax.jit(lambda p, x: jax.lax.cond(p, step, lambda x: x, x))
    assert [int(f(p, 1)) for p in (True, False)] == [2, 1]
    assert len(host.args) == 20


def test_a_loop_body_with_an_invariant_call():
    host = Counted(lambda x: x)
    jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda i, c: c + ct.call(host, x, result_shape=x), 0.0))(1.0)
    assert len(host.args) == 7


@pytest.mark.parametrize("nest", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_vmap_loop(nest):
    host = Counted(lambda x, y: x + y)
    f = nest(jax.vmap(lambda x, y: ct.call(host, x, y, result_shape=x), in_axes=(1, None)))
    assert np.array_equal(f(jnp.arange(6.0).reshape(2, 3), 1.0), np.arange(6.0).reshape(2, 3).T + 1)
    assert [args[0].tolist() for args in host.args] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("nest", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_vmap_batched(nest):
    host = Counted(lambda x, y: x + y[:, None])
    f = nest(jax.vmap(lambda x, y: ct.call(host, x, y, result_shape=x, vmap="batched"), in_axes=(1, None)))
    assert np.array_equal(f(jnp.arange(6.0).reshape(2, 3), 1.0), np.arange(6.0).reshape(2, 3).T + 1)
    assert [args[0].shape for args in host.args] == [(3, 2)]
    twice = Counted(lambda x: x)
    nest(jax.vmap(jax.vmap(lambda x: ct.call(twice, x, result_shape=0.0, vmap="batched"))))(jnp.ones((2, 3)))
    assert [args[0].shape for args in twice.args] == [(2, 3)]


def test_a_batched_result_without_the_axis_is_an_error():
    f = jax.vmap(lambda x: ct.call(np.sum, x, result_shape=0.0, vmap="batched"))
    with pytest.raises(ct.CallError, match=r"must return float64\[3\], it returned float64\[\]"):
        f(jnp.ones((3, 2)))


def sine(x):
    def jvp(primals, tangents):
        return sine(primals[0]), ct.call(np.cos, primals[0], result_shape=x) * tangents[0]

    return ct.call(np.sin, x, result_shape=x, jvp=jvp)


@JIT_AND_EAGER
def test_jvp(how):
    assert how(sine)(0.3) == np.sin(0.3)
    assert np.allclose(how(partial(jax.jvp, sine))((0.3,), (2.0,)), (np.sin(0.3), 2 * np.cos(0.3)))
    assert how(jax.grad(sine))(0.3) == np.cos(0.3)
    assert np.allclose(how(jax.vmap(jax.grad(sine)))(jnp.arange(3.0)), np.cos(np.arange(3.0)))
    f = jax.grad(lambda x: jax.lax.scan(lambda c, _: (sine(c), None), x, None, 2)[0])
    assert np.allclose(how(f)(0.3), np.cos(0.3) * np.cos(np.sin(0.3)))
    assert np.allclose(how(jax.grad(jax.checkpoint(lambda x: sine(sine(x)))))(0.3), np.cos(0.3) * np.cos(np.sin(0.3)))


@JIT_AND_EAGER
def test_vjp(how):
    forward_calls, backward_calls = Counted(np.sin), Counted(lambda x, g: np.cos(x) * g)

    def forward(x, y):
        return (ct.call(forward_calls, x, result_shape=x) * y), (x, y)

    def backward(residuals, cotangent):
        x, y = residuals
        return ct.call(backward_calls, x, cotangent * y, result_shape=x), jnp.sin(x) * cotangent

    def f(x, y):
        return ct.call(lambda x, y: np.sin(x) * y, x, y, result_shape=x, vjp=(forward, backward))

    assert how(f)(0.3, 2.0) == np.sin(0.3) * 2
    assert np.allclose(how(jax.grad(f, (0, 1)))(0.3, 2.0), (2 * np.cos(0.3), np.sin(0.3)))
    assert (len(forward_calls.args), len(backward_calls.args)) == (1, 1)


@JIT_AND_EAGER
def test_without_a_rule_differentiation_is_an_error_that_says_what_to_do(how):
    f = lambda x: ct.call(np.sin, x, result_shape=x)  # noqa: E731
    with pytest.raises(TypeError, match=r"jvp=f\(primals, tangents\) or vjp=.*stop_gradient"):
        how(jax.grad(f))(1.0)
    assert how(jax.grad(lambda x: f(jax.lax.stop_gradient(x)) * x))(1.0) == np.sin(1.0)
    assert how(jax.grad(lambda x: x * ct.call(lambda n: n, 3, result_shape=0)))(1.0) == 3


def test_ordered_calls_and_taps_follow_the_program():
    seen = []

    def host(i, what):
        time.sleep(0.002)
        seen.append((what, int(i)))

    @jax.jit
    def f():
        for i in range(10):
            ct.call(partial(host, what="a"), i, result_shape=None, ordered=True)
            ct.call(lambda i: seen.append(("b", int(i))), i, result_shape=None, ordered=True)

    f()
    f()
    jax.effects_barrier()
    assert seen == [(what, i) for i in range(10) for what in "ab"] * 2


# -- wrong results and errors ----------------------------------------------------------------------------------------

WRONG = [
    (lambda x: x.astype(np.float32), 0.0, r"must return float64\[\], it returned float32\[\]"),
    (lambda x: np.zeros(3), np.zeros(2), r"must return float64\[2\], it returned float64\[3\]"),
    (lambda x: 1.5, 0, "must return int64.., it returned the Python number 1.5"),
    (lambda x: 300, jax.ShapeDtypeStruct((), np.int8), "must return int8.., it returned the Python number 300"),
    (lambda x: "text", 0.0, "it returned a str"),
    (lambda x: (x, x), 0.0, "must return a PyTreeDef.*it returned a PyTreeDef"),
    (lambda x: [1.0, 2.0], np.zeros(2), "must return a PyTreeDef"),
    (lambda x: None, 0.0, "must return a PyTreeDef"),
    (lambda x: {"a": x, "b": 1 > 0}, {"a": 0.0, "b": 0}, r"must return int64\[\] at \['b'\], it returned .*True"),
]


@JIT_AND_EAGER
@pytest.mark.parametrize(("host", "shape", "message"), WRONG)
def test_wrong_results(host, shape, message, how):
    f = how(lambda x: ct.call(host, x, result_shape=shape))
    with pytest.raises(ERRORS, match=message) as caught:
        jax.block_until_ready(in_time(lambda: f(1.0)))
    assert isinstance(ct.original_exception(caught.value), ct.CallError)


class OwnError(Exception):
    pass


@JIT_AND_EAGER
def test_exceptions_come_to_the_caller(how):
    raised = OwnError("what happened")

    def host(x):
        raise raised.with_traceback(None)

    f = how(lambda x: ct.call(host, x, result_shape=x))
    for _ in range(5):
        with pytest.raises(ERRORS, match=r"host` raised .*OwnError: what happened") as caught:
            jax.block_until_ready(in_time(lambda: f(1.0)))
        assert ct.original_exception(caught.value) is raised
    if how is jax.jit:
        assert "in host" in str(caught.value)
        assert "raise raised.with_traceback(None)" in str(caught.value)
        assert "call.py" not in str(caught.value).replace("test_call.py", "")
    else:
        assert caught.value.__cause__ is raised


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), OwnError("nul \0 and \ud800")])
def test_whatever_is_raised(error):
    def host(x):
        raise error

    f = jax.jit(lambda x: ct.call(host, x, result_shape=x))
    with pytest.raises(ERRORS) as caught:
        jax.block_until_ready(in_time(lambda: f(1.0)))
    assert ct.original_exception(caught.value) is error


def test_an_exception_with_a_cause_and_a_long_traceback():
    def host(n):
        if n:
            host(n - 1)
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("x" * 100_000) from error

    f = jax.jit(lambda x: ct.call(lambda x: host(200), x, result_shape=x))
    with pytest.raises(ERRORS, match="ValueError") as caught:
        in_time(lambda: f(1.0)).block_until_ready()
    assert isinstance(ct.original_exception(caught.value).__cause__, KeyError)


def test_few_exceptions_are_kept():
    def host(x):
        raise OwnError(str(x))

    f = jax.jit(lambda x: ct.call(host, x, result_shape=x))
    errors = []
    for i in range(30):
        with pytest.raises(ERRORS) as caught:
            f(float(i)).block_until_ready()
        errors.append(caught.value)
    assert ct.original_exception(errors[0]) is None
    assert str(ct.original_exception(errors[-1])) == "29.0"
    assert ct.original_exception(ValueError("of somebody else")) is None


def test_an_error_ends_a_loop_and_the_next_run_works():
    host = Counted(lambda x: 1 // (int(x) - 3))

    @jax.jit
    def f(start):
        return jax.lax.fori_loop(start, start + 10, lambda i, c: c + ct.call(host, i, result_shape=0), 0)

    with pytest.raises(ERRORS, match="ZeroDivision"):
        f(0).block_until_ready()
    assert len(host.args) == 4
    host.func = lambda x: 1
    assert f(0) == 10


def test_an_error_of_an_ordered_call():
    def host(x):
        if x < 0:
            raise OwnError("negative")
        return x

    f = jax.jit(lambda x: ct.call(host, x, result_shape=x, ordered=True))
    with pytest.raises(ERRORS, match="negative"):
        f(-1.0).block_until_ready()
    assert f(1.0) == 1


@JIT_AND_EAGER
def test_timeout(how):
    release = threading.Event()

    def sleepy(x):
        release.wait(20)
        return x

    f = how(lambda x: ct.call(sleepy, x, result_shape=x, timeout=0.2))
    start = time.monotonic()
    with pytest.raises(ERRORS, match=r"sleepy` .*not returned within the time-out of 0\.2 s"):
        jax.block_until_ready(in_time(lambda: f(1.0)))
    assert time.monotonic() - start < 5
    release.set()
    assert f(2.0) == 2


def test_late_results_are_thrown_away():
    def late(x):
        time.sleep(0.5)
        return x + 1

    f = jax.jit(lambda x: ct.call(late, x, result_shape=x, timeout=0.01) * 2)
    on_time = jax.jit(lambda x: ct.call(lambda x: x, x, result_shape=x, timeout=30))
    for _ in range(4):
        with pytest.raises(ERRORS, match="time-out"):
            f(jnp.ones(1000)).block_until_ready()
        y = on_time(jnp.full(1000, 3.0))
    time.sleep(1)
    assert (y == 3).all()


def test_time_outs_just_about_when_the_function_returns():
    f = jax.jit(lambda x: ct.call(lambda x: time.sleep(0.005) or x, x, result_shape=x, timeout=0.005))
    outcomes = set()
    for _ in range(100):
        try:
            outcomes.add(float(f(1.0)))
        except ERRORS:
            outcomes.add("late")
    assert outcomes <= {1.0, "late"}


def test_bad_arguments():
    with pytest.raises(TypeError, match="needs a function"):
        ct.call(3, 1.0, result_shape=0.0)
    with pytest.raises(TypeError, match="by keyword"):
        ct.call(print, "text", result_shape=None)
    with pytest.raises(TypeError, match="result_shape is made of"):
        ct.call(print, 1.0, result_shape="text")
    with pytest.raises(TypeError, match="key_data"):
        ct.call(print, 1.0, result_shape=jax.random.key(0))
    with pytest.raises(ValueError, match="'loop' or 'batched'"):
        ct.call(print, 1.0, result_shape=None, vmap="sequential")
    with pytest.raises(ValueError, match="timeout"):
        ct.call(print, 1.0, result_shape=None, timeout=0)
    with pytest.raises(ValueError, match="one of jvp= and vjp="):
        ct.call(print, 1.0, result_shape=None, jvp=print, vjp=(print, print))


# -- no hang ---------------------------------------------------------------------------------------------------------


def heavy(size=300):
    """A program that XLA does not run on the thread that starts it."""
    return jax.jit(lambda x: (x @ x) / size), jnp.ones((size, size))


def nested(depth, leaf):
    def host(x):
        return np.asarray(nested(depth - 1, leaf)(x)) if depth else leaf(x)

    return jax.jit(lambda x: ct.call(host, (x @ x) / x.shape[0], result_shape=x))


@pytest.mark.parametrize("size", [1, 300])
def test_calls_in_calls(size):
    x = np.ones((size, size))
    assert np.array_equal(in_time(lambda: np.asarray(nested(12, lambda x: x)(x))), x)


def test_host_functions_that_run_jax_with_taps():
    seen = []
    program, x = heavy()

    def host(x):
        y = program(x)
        for _ in range(3):
            y = program(y)
        jax.jit(lambda y: ct.id_tap(lambda v: seen.append(v[0, 0]), y))(y)
        return np.asarray(y)

    f = jax.jit(lambda x: ct.call(host, program(x), result_shape=x) * 2)
    with ct.outfeed_receiver(60):
        assert in_time(lambda: float(f(program(x))[0, 0])) == 2
    assert seen == [1]


def test_from_a_consumer_of_a_tap():
    seen = []
    f = jax.jit(lambda x: ct.call(lambda x: x + 1, x, result_shape=x))

    def consumer(x):
        seen.append(float(f(x)))
        seen.append(float(ct.call(lambda x: x + 2, x, result_shape=0.0)))

    with ct.outfeed_receiver(60):
        jax.jit(lambda x: ct.id_tap(consumer, x))(1.0)
    assert seen == [2, 3]


def test_calls_do_not_wait_for_slow_consumers():
    release = threading.Event()
    f = jax.jit(lambda x: ct.call(lambda x: x, ct.id_tap(lambda x: release.wait(30), x), result_shape=x))
    assert in_time(lambda: float(f(1.0)), 10) == 1
    release.set()
    ct.barrier_wait()


def test_threads():
    program, x = heavy(200)
    f = jax.jit(lambda x, i: ct.call(lambda x, i: np.asarray(program(x)) * i, program(x), i, result_shape=x))

    def work(i):
        return [float(f(x, float(i))[0, 0]) for _ in range(20)]

    outs = {}
    threads = [threading.Thread(target=lambda i=i: outs.update({i: work(i)}), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outs == {i: [i] * 20 for i in range(4)}


def test_host_functions_that_wait_for_each_other():
    barrier = threading.Barrier(4)
    f = jax.jit(lambda x: ct.call(lambda x: (barrier.wait(20) if x >= 0 else 0, x)[1], x, result_shape=x))
    f(-1.0)  # JAX lets one thread at a time call a function for the first time
    outs = []
    threads = [threading.Thread(target=lambda i=i: outs.append(float(f(float(i)))), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outs) == [0, 1, 2, 3]


def test_devices():
    f = jax.jit(lambda x: ct.call(lambda x: x + 1, x, result_shape=x))
    for i, device in enumerate(jax.devices()):
        out = f(jax.device_put(float(i), device))
        assert out == i + 1
        assert out.devices() == {device}
        assert ct.call(lambda x: x, jax.device_put(1.0, device), result_shape=0.0).devices() == {device}


@pytest.mark.parametrize("ordered", [False, True])
def test_shard_map(ordered):
    n = len(jax.devices())
    mesh = jax.make_mesh((n,), ("i",))
    shapes = []

    def host(x):
        shapes.append(x.shape)
        return x + 1

    def body(x):
        return ct.call(host, x, result_shape=x, ordered=ordered)

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")))
    x = jax.device_put(jnp.arange(2.0 * n), NamedSharding(mesh, PartitionSpec("i")))
    assert np.array_equal(in_time(lambda: np.asarray(f(x))), np.arange(2.0 * n) + 1)
    assert shapes == [(2,)] * n


def test_heavy_programs_for_all_devices_at_a_time():
    n = len(jax.devices())
    mesh = jax.make_mesh((n,), ("i",))
    program, x = heavy()

    def body(x):
        def step(c, _):
            return ct.call(
                lambda c: np.asarray(nested(2, lambda y: np.asarray(program(y)))(c)), c, result_shape=c
            ), None

        return jax.lax.scan(step, x, None, 3)[0]

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")))
    x = jax.device_put(jnp.ones((n * len(x), len(x))), NamedSharding(mesh, PartitionSpec("i")))
    assert np.array_equal(in_time(lambda: np.asarray(f(x))), x)


@JIT_AND_EAGER
@pytest.mark.parametrize("ordered", [False, True])
def test_arrays_that_jax_has_split_over_devices(how, ordered):
    n = len(jax.devices())
    mesh = jax.make_mesh((n,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(2.0 * n), NamedSharding(mesh, PartitionSpec("i")))
    f = how(lambda x: ct.call(lambda x: x + 1, x, result_shape=x, ordered=ordered) * 2)
    if ordered and how is jax.jit:
        with pytest.raises(NotImplementedError, match="splits the program"):
            f(x)
        return
    assert np.array_equal(in_time(lambda: np.asarray(f(x))), 2 * np.arange(2.0 * n) + 2)


def test_many_calls_of_a_loop():
    f = jax.jit(lambda: jax.lax.fori_loop(0, 20_000, lambda i, c: c + ct.call(lambda i: i, i, result_shape=0), 0))
    assert in_time(lambda: int(f())) == sum(range(20_000))
    assert sum(thread.name == "ceedtap-call" for thread in threading.enumerate()) < 20


def test_functions_die_with_their_programs():
    jax.clear_caches()
    gc.collect()
    for i in range(50):
        jax.jit(lambda x, i=i: ct.call(lambda x: x + i, x, result_shape=x))(1.0).block_until_ready()
        ct.call(lambda x: x, 1.0, result_shape=0.0)
        jax.clear_caches()
    gc.collect()
    jax.jit(lambda x: ct.call(lambda x: x, x, result_shape=x))(1.0)  # reaps
    assert lib.ct_registry_size(lib.ct_functions()) < 10


def test_a_program_outlives_the_function_that_it_was_made_from():
    compiled = jax.jit(lambda x: ct.call(lambda x: x + 1, x, result_shape=x)).lower(1.0).compile()
    jax.clear_caches()
    gc.collect()
    assert compiled(2.0) == 3


def test_the_same_function_is_compiled_once():
    def host(x):
        return x

    @jax.jit
    def f(x):
        return ct.call(host, x, result_shape=x)

    f(1.0)
    jaxprs = {str(jax.make_jaxpr(f)(1.0)) for _ in range(2)}
    assert len(jaxprs) == 1
    assert f._cache_size() == 1


# -- the end of the process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait", ["time.sleep(60)", "threading.Event().wait()", "[time.sleep(0.01) for _ in range(6000)]"]
)
@pytest.mark.parametrize("heavy", [False, True])
def test_ctrl_c_while_a_call_hangs(wait, heavy):
    done = run_python(
        f"""
        import ceedtap.outfeed
        ceedtap.outfeed.EXIT_PATIENCE_SEC = 0.5
        def host(x):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            {wait}
            return x
        x = jnp.ones((300, 300)) if {heavy} else 1.0
        f = jax.jit(lambda x: ct.call(host, (x @ x if {heavy} else x), result_shape=x))
        start = time.monotonic()
        try:
            jax.block_until_ready(f(x))
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - start < 10)
        print(float(jax.jit(lambda x: ct.call(lambda x: x, x, result_shape=x))(2.0)))
        sys.exit(5)
        """
    )
    assert (done.returncode, done.stdout) == (5, "interrupted True\n2.0\n"), done.stderr


def test_a_signal_handler_that_does_not_raise_interrupts_nothing():
    done = run_python(
        """
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.current_thread().name))
        def host(x):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.5)
            return x + len(seen)
        print(float(jax.jit(lambda x: ct.call(host, x, result_shape=x))(2.0)), seen)
        """
    )
    assert (done.returncode, done.stdout) == (0, "3.0 ['MainThread']\n"), done.stderr


@pytest.mark.parametrize(
    "host", ["time.sleep(60)", "[time.sleep(0.001) for _ in range(60000)]", "threading.Event().wait()"]
)
@pytest.mark.parametrize("ending", ["sys.exit(7)", "os._exit(7)", "raise SystemExit(7)"])
def test_exit_while_a_call_hangs(host, ending):
    done = run_python(
        f"""
        import ceedtap.outfeed
        ceedtap.outfeed.EXIT_PATIENCE_SEC = 0.5
        def hung(x):
            {host}
            return x
        f = jax.jit(lambda x: ct.call(hung, x, result_shape=x))
        threading.Thread(target=f, args=(1.0,), daemon=True).start()
        time.sleep(1)
        {ending}
        """
    )
    assert done.returncode == 7, done.stderr
    if "os._exit" not in ending:
        assert (
            done.stderr.splitlines()[-1] == "ceedtap: the process ends although host function `hung` has not returned"
        )


def test_exit_waits_for_calls_that_end():
    done = run_python(
        """
        def host(x):
            time.sleep(0.5)
            print("called", flush=True)
            return x
        x = jnp.ones((400, 400))
        for _ in range(10):
            x = (x @ x) / 400
        jax.jit(lambda x: ct.call(host, x, result_shape=x))(x)
        sys.exit(4)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (4, "called\n", "")


def test_many_processes_that_end_while_they_call():
    for delay in np.linspace(0, 0.2, 5):
        done = run_python(
            f"""
            called = threading.Event()
            def host(i):
                called.set()
                return i
            body = lambda i, c: c + ct.call(host, i, result_shape=0)
            f = jax.jit(lambda: jax.lax.fori_loop(0, 10**6, body, 0))
            import ceedtap.outfeed
            ceedtap.outfeed.EXIT_PATIENCE_SEC = 0.1
            def work():
                try:
                    f()
                except Exception:
                    pass
            threading.Thread(target=work, daemon=True).start()
            called.wait()  # a thread that the end finds inside of JAX's compiler brings the process down
            time.sleep({delay})
            sys.exit(9)
            """
        )
        assert done.returncode == 9, done.stderr


def test_a_fork_that_exits():
    done = run_python(
        """
        import warnings
        warnings.simplefilter("ignore")
        f = jax.jit(lambda x: ct.call(lambda x: x, x, result_shape=x))
        f(1.0)
        pid = os.fork()
        if pid == 0:
            os._exit(3)  # JAX itself does not survive sys.exit here
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), float(f(2.0)))
        """
    )
    assert (done.returncode, done.stdout) == (0, "3 2.0\n"), done.stderr
