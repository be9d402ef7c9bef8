"""Arguments on their way to the host: pytrees of arrays, numbers and typed keys, as the arrays of a frame."""

from __future__ import annotations

import dataclasses
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinMethodType, MethodType
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


class _Same:
    """An object as part of a key: equal to itself only."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def exact(value: Any) -> Any:
    """A key that is equal for values that nobody can tell apart, and for no others.

    In Python ``1 == True == 1.0 == np.float32(1)`` and ``0.0 == -0.0``, also as parts of other values. What this
    function does not know is equal to itself only.

    Raises:
        TypeError: the value may change.

    >>> exact(1) == exact(1), exact(1) == exact(True), exact((0.0, "a")) == exact((-0.0, "a"))
    (True, False, False)
    """
    kind = type(value)
    if value is None or kind in (str, bytes, bool, int):
        return kind, value
    if kind in (float, complex):
        return kind, struct.pack("=dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return kind, str(value.dtype), value.tobytes()
    if isinstance(value, tuple):
        return kind, tuple(map(exact, value))
    if kind is frozenset:
        return kind, frozenset(map(exact, value))
    if kind is jax.tree_util.PyTreeDef:
        return kind, _exact_node(value.node_data()), tuple(map(exact, value.children()))
    if kind is MethodType:
        return kind, _Same(value.__self__), exact(value.__func__)
    if kind is BuiltinMethodType:
        return kind, value
    hash(value)
    if dataclasses.is_dataclass(value) and "__eq__" in vars(kind):
        return kind, tuple(exact(getattr(value, f.name)) for f in dataclasses.fields(value))
    return _Same(value)


def _exact_node(data: Any) -> Any:
    """What the nodes of a pytree are made of besides children; the keys of a dict come as a list."""
    if data is None:
        return None
    kind, static = data
    return _Same(kind), exact(tuple(static) if isinstance(static, list) else static)


class Interned(Generic[T]):
    """Objects by what they are made of: the same object for the same parts while it lives, so that JAX, which compares
    such objects by identity, finds programs with them in its caches."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._known: weakref.WeakValueDictionary[Any, T] = weakref.WeakValueDictionary()

    def __call__(self, func: Callable[..., Any], kwargs: dict[str, Any], *parts: Any) -> T:
        try:
            key = exact((func, tuple(sorted(kwargs.items())), *parts))
        except TypeError:  # what may change: an object of its own
            return self._make(func, kwargs, *parts)
        known = self._known.get(key)
        if known is None:
            # Two threads may both come here: then there are two objects, which is right, only slower.
            known = self._known[key] = self._make(func, kwargs, *parts)
        return known
