"""What makes two taps or host functions the same: types and bits of all that they are made of."""

import collections
import dataclasses
import datetime
import enum
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap.arguments import Interned, exact


@dataclasses.dataclass(frozen=True)
class Setting:
    power: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    x: object
    power: object = dataclasses.field(metadata={"static": True})


class Color(enum.IntEnum):
    ONE = 1


Pair = collections.namedtuple("Pair", "a b")
ONES = [True, 1, 1.0, 1 + 0j, np.int32(1), np.int64(1), np.float32(1), np.float64(1), np.bool_(True), Color.ONE]
ZEROS = [0.0, -0.0, 0, False, np.float32(0), np.float32(-0.0), np.float64(0), np.float64(-0.0), 0j, complex(0, -0.0)]
NANS = [float("nan"), -float("nan"), np.float32("nan")]
WRAPS = [
    lambda v: v,
    lambda v: (v,),
    lambda v: ((v, "a"), None),
    lambda v: frozenset([v]),
    lambda v: Pair(v, 0),
    lambda v: Setting(v),
    lambda v: (Setting((v,)), "a"),
]
TREES = [lambda v: {v: 0.0}, lambda v: [({v: 0.0}, None)], lambda v: Node(0.0, v), lambda v: Node(0.0, (v, Setting(v)))]


def alike(a, b):
    """Whether nobody can tell two numbers apart."""
    return type(a) is type(b) and np.array(a).tobytes() == np.array(b).tobytes()


@pytest.mark.parametrize("values", [ONES, ZEROS, NANS], ids=["ones", "zeros", "nans"])
def test_keys_tell_types_and_bits_apart(values):
    for wrap in WRAPS:
        for a, b in itertools.product(values, repeat=2):
            assert (exact(wrap(a)) == exact(wrap(b))) == alike(a, b), (wrap(a), wrap(b))
            if alike(a, b):
                assert hash(exact(wrap(a))) == hash(exact(wrap(b)))
    for wrap in TREES:
        for a, b in itertools.product(values, repeat=2):
            ours = exact(jax.tree.structure(wrap(a))) == exact(jax.tree.structure(wrap(b)))
            assert ours == alike(a, b), (wrap(a), wrap(b))


def test_keys_of_other_things():
    class Events:
        def __init__(self):
            self.heard = []

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

        def hear(self, x):
            self.heard.append(x)

    a, b = Events(), Events()
    assert exact(a) == exact(a) != exact(b)
    assert exact(a.hear) == exact(a.hear) != exact(b.hear)
    assert exact(a.heard.append) == exact(a.heard.append) != exact(b.heard.append)
    part = functools.partial(a.hear)
    assert exact(part) == exact(part) != exact(functools.partial(a.hear))
    day = datetime.date(2000, 1, 1)
    assert exact(day) == exact(day)
    assert exact("a") != exact(b"a")
    assert exact((1, (2,))) != exact((1, 2))
    assert exact(Pair(1, 2)) != exact((1, 2))
    assert exact(float) == exact(float) != exact(int)


@pytest.mark.parametrize("value", [[1], {"a": 1}, np.ones(2), {1}, ([1],), Setting([1])], ids=repr)
def test_what_may_change_has_no_key(value):
    with pytest.raises(TypeError):
        exact(value)
    made = Interned(lambda func, kwargs: object())
    assert made(print, {"a": value}) is not made(print, {"a": value})


def test_the_same_things_are_found():
    made = Interned(lambda func, kwargs, *parts: Setting(0))
    first = made(print, {"a": (1, "b"), "c": None}, (None, "key"))
    assert made(print, {"c": None, "a": (1, "b")}, (None, "key")) is first
    assert made(print, {"a": (True, "b"), "c": None}, (None, "key")) is not first


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("values", [ONES, ZEROS], ids=["ones", "zeros"])
def test_host_functions_get_their_own_keyword_values(values, jit):
    got = []

    def host(x, *, power):
        got.append(power)
        return x

    for value in values:
        f = lambda x: ct.call(host, x, result_shape=x, power=value)  # noqa: B023, E731
        (jax.jit(f) if jit else f)(jnp.ones(2)).block_until_ready()
    assert list(map(alike, got, values)) == [True] * len(values)


def test_powers_of_host_functions():
    def host(x, *, power):
        return x * x * 4 if power is True else x * 1.0 * power

    f = lambda power: float(ct.call(host, jnp.float64(2), result_shape=jnp.float64(0), power=power))  # noqa: E731
    assert [f(1), f(True), f(np.float32(3)), f(3)] == [2.0, 16.0, 6.0, 6.0]


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("values", [ONES, ZEROS], ids=["ones", "zeros"])
def test_taps_get_their_own_keyword_values_and_trees(values, jit):
    got, keys = [], []

    def consumer(tree, *, power):
        got.append(power)
        keys.extend(tree)

    with ct.outfeed_receiver():
        for value in values:
            f = lambda x: ct.id_tap(consumer, {value: x}, power=value)  # noqa: B023, E731
            f = (lambda x, f=f: jax.jit(lambda x: f(x)[next(iter(f(x)))])(x)) if jit else f
            f(jnp.ones(2))
            ct.barrier_wait()
    repeat = 2 if jit else 1
    expected = [v for v in values for _ in range(repeat)]
    assert [alike(*pair) for pair in zip(got, expected, strict=True)] == [True] * len(expected)
    assert [alike(*pair) for pair in zip(keys, expected, strict=True)] == [True] * len(expected)


def test_functions_that_say_they_are_equal():
    """A dataclass with `__call__` is a function, too."""
    got = []

    @dataclasses.dataclass(frozen=True)
    class Scale:
        by: object

        def __call__(self, x):
            got.append(type(self.by))
            return x

    for value in (1, True, 1.0):
        jax.jit(lambda x, f=Scale(value): ct.call(f, x, result_shape=x))(jnp.ones(1)).block_until_ready()
    assert got == [int, bool, float]
