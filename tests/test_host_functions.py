"""Functions that would be called and never run are refused wherever functions of the user's are called."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ceedtap as ct

DATA = Path(__file__).parent / "data"


async def coroutine(*args, **kwargs):
    raise AssertionError("nobody runs it")


def generator(*args, **kwargs):
    yield


async def asynchronous_generator(*args, **kwargs):
    yield


class Called:
    """An object whose `__call__` is a coroutine function, and one that has it as a method."""

    async def __call__(self, *args, **kwargs):
        raise AssertionError("nobody runs it")

    async def method(self, *args, **kwargs):
        raise AssertionError("nobody runs it")

    @classmethod
    async def of_class(cls, *args, **kwargs):
        raise AssertionError("nobody runs it")


class Yielding:
    def __call__(self, *args, **kwargs):
        yield


SEEN_THROUGH = {
    "coroutine": coroutine,
    "generator": generator,
    "asynchronous generator": asynchronous_generator,
    "lambda that yields": lambda *args, **kwargs: (yield),
    "object": Called(),
    "object that yields": Yielding(),
    "method": Called().method,
    "class method": Called.of_class,
    "partial": functools.partial(coroutine, what=1),
    "partial of a partial of an object": functools.partial(functools.partial(Called()), what=1),
    "partial of a method": functools.partial(Called().method, what=1),
}
# What nobody can see before the call.
SEEN_LATER = {
    "lambda": lambda *args, **kwargs: coroutine(),
    "lambda of a generator": lambda *args, **kwargs: (x for x in args),
    "static method": staticmethod(coroutine),
    "lambda of an asynchronous generator": lambda *args, **kwargs: asynchronous_generator(),
}


def square():
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(1, 1), degree=1)
    return ct.operator(inputs={"u": V.value}, outputs={"v": V.value})(lambda u: jnp.sqrt(u))


ONE = jnp.float32(1)
PLACES = {
    "id_tap": lambda f: ct.id_tap(f, ONE),
    "Consumer": lambda f: ct.id_tap(ct.Consumer(f), ONE),
    "attach": lambda f: ct.Tap("t").attach(f),
    "drive": lambda f: ct.drive(f, print),
    "drive then": lambda f: ct.drive(lambda x: x, f),
    "call": lambda f: ct.call(f, ONE, result_shape=ONE),
    "call jvp": lambda f: ct.call(lambda x: x, ONE, result_shape=ONE, jvp=f),
    "call vjp": lambda f: ct.call(lambda x: x, ONE, result_shape=ONE, vjp=(f, lambda r, g: (g,))),
    "watch": lambda f: ct.watch(square(), then=f),
    "replay": lambda f: ct.replay(DATA / "recording.ctap", f),
    "PythonQFunction": lambda f: ct.Ceed("/cpu/self").PythonQFunction(f),
}


@pytest.mark.parametrize("function", SEEN_THROUGH.values(), ids=SEEN_THROUGH)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_functions_that_never_run_are_refused(place, function):
    with pytest.raises(TypeError, match=r"must run at once, but .* so its calls would never run; use a plain function"):
        place(function)


def use(place, function):
    """Lets a function be called, once."""
    with ct.outfeed_receiver():
        if place == "attach":
            tap = ct.Tap("t")
            with tap.attached(function):
                ct.id_tap(tap, ONE)
        elif place in ("drive", "drive then"):
            ct.id_tap(PLACES[place](function), ONE)
        elif place == "watch":
            jax.jit(PLACES[place](function))(-jnp.ones(4))
        else:
            PLACES[place](function)


@pytest.mark.parametrize("function", SEEN_LATER.values(), ids=SEEN_LATER)
@pytest.mark.parametrize("place", ["id_tap", "Consumer", "attach", "drive", "drive then", "watch", "replay"])
def test_calls_that_have_not_run_are_exceptions(place, function):
    with pytest.raises(ct.CallbackException) as caught:
        use(place, function)
    assert all("what is in it would never run" in str(error) for error in caught.value.exceptions)
    assert all(type(error) is TypeError for error in caught.value.exceptions)


@pytest.mark.parametrize("function", SEEN_LATER.values(), ids=SEEN_LATER)
def test_calls_of_programs_that_have_not_run_fail(function):
    with pytest.raises(ct.CallError) as caught:
        ct.call(function, ONE, result_shape=ONE)
    assert "what is in it would never run" in str(ct.original_exception(caught.value))
    with pytest.raises(jax.errors.JaxRuntimeError, match="what is in it would never run"):
        jax.jit(lambda x: ct.call(function, x, result_shape=x))(ONE).block_until_ready()


def test_what_starts_other_work_is_no_such_function():
    """A consumer may put its work into a loop or pool; what it returns then has been started."""
    from concurrent.futures import ThreadPoolExecutor

    seen = []
    with ThreadPoolExecutor() as pool, ct.outfeed_receiver():
        ct.id_tap(lambda x: pool.submit(seen.append, int(x)), 1)
        ct.id_tap(seen.append, ONE)
    assert sorted(map(int, seen)) == [1, 1]
