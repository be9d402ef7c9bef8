"""Rules of :mod:`ceedtap.codegen` for random numbers from keys that come in as data: the bits are those of JAX.

A key is an element of an array (:class:`ceedtap.codegen.Key`) as a number is. What is made of it, JAX itself says: its
functions of the two numbers that a key of the default kind consists of end in the cipher Threefry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ceedtap import jax_compat
from ceedtap.codegen import Builder, Elements, Key, TranslationError, elements, rule
from ceedtap.codegen_control import via_jax
from ceedtap.codegen_rules import convert

# Twenty rounds of additions, rotations and exclusive or; a key schedule of three words, the third one from the others.
_THREEFRY = """\
#define CEEDTAP_ROUND(r) (x0 += x1, x1 = (x1 << r) | (x1 >> (32 - r)), x1 ^= x0)
CEED_QFUNCTION_HELPER unsigned long long ceedtap_threefry(unsigned int k0, unsigned int k1, unsigned int x0,
                                                          unsigned int x1) {
  const unsigned int k2 = k0 ^ k1 ^ 0x1bd11bdaU;
  x0 += k0, x1 += k1;
  CEEDTAP_ROUND(13), CEEDTAP_ROUND(15), CEEDTAP_ROUND(26), CEEDTAP_ROUND(6);
  x0 += k1, x1 += k2 + 1U;
  CEEDTAP_ROUND(17), CEEDTAP_ROUND(29), CEEDTAP_ROUND(16), CEEDTAP_ROUND(24);
  x0 += k2, x1 += k0 + 2U;
  CEEDTAP_ROUND(13), CEEDTAP_ROUND(15), CEEDTAP_ROUND(26), CEEDTAP_ROUND(6);
  x0 += k0, x1 += k1 + 3U;
  CEEDTAP_ROUND(17), CEEDTAP_ROUND(29), CEEDTAP_ROUND(16), CEEDTAP_ROUND(24);
  x0 += k1, x1 += k2 + 4U;
  CEEDTAP_ROUND(13), CEEDTAP_ROUND(15), CEEDTAP_ROUND(26), CEEDTAP_ROUND(6);
  x0 += k2, x1 += k0 + 5U;
  return ((unsigned long long)x0 << 32) | x1;
}
#undef CEEDTAP_ROUND
"""
_WORD = np.dtype(np.uint32)


@rule("threefry2x32")
def _threefry2x32(builder: Builder, eqn: Any, *operands: Elements) -> list[Elements]:
    builder.helper("ceedtap_threefry", _THREEFRY)
    shape = eqn.outvars[0].aval.shape
    spread: list[Elements] = [np.broadcast_to(x, shape) for x in operands]
    high, low = np.empty(shape, object), np.empty(shape, object)
    for index in np.ndindex(shape):
        words = [x[index] for x in spread]
        both = builder.value(f"ceedtap_threefry({', '.join(w.text for w in words)})", np.uint64, words)
        high[index] = builder.value(f"(unsigned int)({both.text} >> 32)", _WORD, [both])
        low[index] = convert(builder, both, _WORD)
    return [high, low]


@rule("iota_2x32_shape")
def _iota_2x32_shape(builder: Builder, eqn: Any, *, shape: tuple[int, ...]) -> list[Elements]:
    numbers = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    return [elements(numbers >> np.uint64(32), _WORD), elements(numbers & np.uint64(0xFFFFFFFF), _WORD)]


# -- keys --------------------------------------------------------------------------------------------------------------


def _numbers(keys: Elements) -> Elements:
    out = np.empty((*keys.shape, 2), object)
    for index in np.ndindex(keys.shape):
        out[index] = keys[index].parts
    return out


def _keys(numbers: Elements) -> Elements:
    out = np.empty(numbers.shape[:-1], object)
    for index in np.ndindex(out.shape):
        out[index] = Key(tuple(numbers[index]))
    return out


@rule("random_wrap")
def _wrap(builder: Builder, eqn: Any, numbers: Elements, *, impl: Any) -> list[Elements]:
    if impl.key_shape != (2,):
        raise TranslationError(f"has no translation to C for keys of the kind {impl.name}; those of threefry2x32 have")
    return [_keys(numbers)]


@rule("random_unwrap")
def _unwrap(builder: Builder, eqn: Any, keys: Elements) -> list[Elements]:
    return [_numbers(keys)]


@rule("random_clone")
def _clone(builder: Builder, eqn: Any, keys: Elements) -> list[Elements]:
    return [keys]


def _of_numbers(
    builder: Builder, eqn: Any, function: Callable[..., Any], keys: Elements, *more: Elements
) -> list[Elements]:
    """A function of the numbers of a key, for every key."""
    results = np.empty(keys.shape, object)
    for index in np.ndindex(keys.shape):
        given = [np.array(keys[index].parts, object)]
        given += [np.array(x[index], object).reshape(()) for x in more]
        avals = [jax.ShapeDtypeStruct((2,), _WORD), *(jax.ShapeDtypeStruct((), v.aval.dtype) for v in eqn.invars[1:])]
        (results[index],) = via_jax(builder, function, given, avals)
    return [results]


def _stacked(results: Elements) -> Elements:
    first = results.reshape(-1)[0]
    out = np.empty((*results.shape, *first.shape), object)
    for index in np.ndindex(results.shape):
        out[index] = results[index] if first.ndim else results[index][()]
    return out


@rule("random_bits")
def _bits(builder: Builder, eqn: Any, keys: Elements, *, bit_width: int, shape: tuple[int, ...]) -> list[Elements]:
    impl = jax_compat.key_functions(eqn.invars[0].aval.dtype)
    (out,) = _of_numbers(builder, eqn, lambda k: impl.random_bits(k, bit_width, shape), keys)
    return [_stacked(out)]


@rule("random_split")
def _split(builder: Builder, eqn: Any, keys: Elements, *, shape: tuple[int, ...]) -> list[Elements]:
    impl = jax_compat.key_functions(eqn.invars[0].aval.dtype)
    (out,) = _of_numbers(builder, eqn, lambda k: impl.split(k, shape), keys)
    return [_keys(_stacked(out))]


@rule("random_fold_in")
def _fold_in(builder: Builder, eqn: Any, keys: Elements, data: Elements) -> list[Elements]:
    impl = jax_compat.key_functions(eqn.invars[0].aval.dtype)
    keys, data = np.broadcast_arrays(keys, data)
    (out,) = _of_numbers(builder, eqn, impl.fold_in, keys, data)
    return [_keys(_stacked(out))]


@rule("random_seed")
def _seed(builder: Builder, eqn: Any, seeds: Elements, *, impl: Any) -> list[Elements]:
    out = np.empty(seeds.shape, object)
    aval = jax.ShapeDtypeStruct((), eqn.invars[0].aval.dtype)
    for index in np.ndindex(seeds.shape):
        (out[index],) = via_jax(builder, impl.seed, [np.array(seeds[index], object)], [aval])
    return [_keys(_stacked(out))]
