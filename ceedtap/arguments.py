"""Arguments on their way to the host: pytrees of arrays, numbers and typed keys, as the arrays of a frame."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.protocol import ArraySpec, Header, encode_header

T = TypeVar("T")


@dataclass(frozen=True)
class Arguments:
    """Positional arguments, taken apart.

    Attributes:
        leaves: the leaves, as JAX arrays.
        arrays: the same, with the words of keys in place of keys.
        treedef: structure of the arguments.
        keys: for each leaf, the name of the random number generator when it holds keys.
    """

    leaves: list[Any]
    arrays: list[Any]
    treedef: Any
    keys: tuple[str | None, ...]


def take_apart(args: Any, function: str) -> Arguments:
    """Takes positional arguments of `function` apart.

    Raises:
        TypeError: a leaf is no array and no number, or it is a reference, or a tangent that has no values.
        ProtocolError: what no frame can hold.
    """
    leaves, treedef = jax.tree.flatten(args)
    leaves = [_as_array(leaf, function) for leaf in leaves]
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    keys = tuple(str(jax.random.key_impl(leaf)) if k else None for leaf, k in zip(leaves, is_key, strict=True))
    arrays = [jax.random.key_data(leaf) if k else leaf for leaf, k in zip(leaves, is_key, strict=True)]
    encode_header(Header(0, specs(arrays, keys)))
    return Arguments(leaves, arrays, treedef, keys)


def _as_array(leaf: Any, function: str) -> Any:
    if jax_compat.is_ref(leaf):
        raise TypeError(f"{function} takes values, got {jax.typeof(leaf)}; pass what the reference holds, ref[...]")
    if getattr(leaf, "dtype", None) == jax.dtypes.float0:
        raise TypeError(f"{function} got the tangent of integers or Booleans, which has no values; leave it out")
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"{function} takes arrays and numbers, got {type(leaf).__name__}; pass what the function needs besides "
            "them by keyword"
        ) from error


def specs(avals: Any, keys: Sequence[str | None]) -> tuple[ArraySpec, ...]:
    """Shapes and types of the arrays of a frame.

    Raises:
        NotImplementedError: a shape is symbolic.
    """
    return tuple(
        ArraySpec(_fixed(aval.shape), np.dtype(aval.dtype), key) for aval, key in zip(avals, keys, strict=True)
    )


def _fixed(shape: Any) -> tuple[int, ...]:
    if not all(isinstance(d, int | np.integer) for d in shape):
        raise NotImplementedError(
            f"values for the host have shapes that are known when the program is made, got the symbolic shape {shape}; "
            "export the program for fixed shapes, or without taps and calls"
        )
    return tuple(int(d) for d in shape)


class Interned(Generic[T]):
    """Objects by what they are made of: the same object for the same parts while it lives, so that JAX, which compares
    such objects by identity, finds programs with them in its caches."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._known: weakref.WeakValueDictionary[Any, T] = weakref.WeakValueDictionary()

    def __call__(self, func: Callable[..., Any], kwargs: dict[str, Any], *parts: Any) -> T:
        key = (func, tuple(sorted(kwargs.items())), *parts)
        try:
            known = self._known.get(key)
        except TypeError:  # an unhashable function or keyword argument: an object of its own
            return self._make(func, kwargs, *parts)
        if known is None:
            # Two threads may both come here: then there are two objects, which is right, only slower.
            known = self._known[key] = self._make(func, kwargs, *parts)
        return known
