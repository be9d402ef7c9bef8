"""Definitions: what the frames of a tap in a program are, as msgpack. Nothing here needs JAX to read one."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from ceedtap import recording_names
from ceedtap.shards import Parts, Shard

if TYPE_CHECKING:
    from ceedtap.routes import Binding, Route, Transforms

_TUPLE, _SLICE = 1, 2  # extension types of msgpack


def pack(content: Any) -> bytes:
    """msgpack, in which tuples and slices are told from lists.

    >>> unpack(pack({"dims": (0, [1, None])}))
    {'dims': (0, [1, None])}
    """
    return msgpack.packb(content, default=_extend, strict_types=True)


def _extend(value: Any) -> Any:
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if isinstance(value, slice):
        return msgpack.ExtType(_SLICE, pack([value.start, value.stop, value.step]))
    if isinstance(value, np.generic):
        return value.item()
    for kind in (int, float, str):  # enumerations
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"msgpack has no {type(value).__name__}")


def unpack(data: bytes | memoryview) -> Any:
    return msgpack.unpackb(data, ext_hook=_extension, strict_map_key=False)


def _extension(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(unpack(data))
    if code == _SLICE:
        return slice(*unpack(data))
    raise ValueError(f"extension type {code} of msgpack")


def _packable(value: Any) -> bool:
    try:
        pack(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


@dataclass(frozen=True)
class Definition:
    """What the frames of a route are.

    Attributes:
        route: the consumer id in its frames.
        tap: name of the tap.
        labels: the keyword arguments of the tap.
        omitted: keyword arguments that cannot be recorded, as text.
        tree: the structure of the values; see `_encode_tree`.
        leaves: names of the arrays.
        keys: for each array, the name of the random number generator when it holds keys.
        transforms: as a consumer gets them.
        with_device: whether a consumer gets ``device=``.
        consumer: name of the consumer.
        with_shard: whether a consumer gets ``shard=``.
        traced_labels: names of the last arguments, which are keyword arguments of a consumer.
        parts: of the program, if it runs on several devices.
    """

    route: int
    tap: str
    labels: dict[str, Any]
    omitted: dict[str, str]
    tree: Any
    leaves: tuple[str, ...]
    keys: tuple[str | None, ...]
    transforms: Transforms
    with_device: bool
    consumer: str = ""
    with_shard: bool = False
    traced_labels: tuple[str, ...] = ()
    parts: Parts | None = None

    def encode(self) -> bytes:
        """As msgpack."""
        content = {**self.__dict__, "transforms": [[name, dict(params)] for name, params in self.transforms]}
        if self.parts is not None:
            content["parts"] = (self.parts.axes, self.parts.starts, self.parts.replicas)
        return pack(content)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Definition:
        """
        Raises:
            ValueError: no definition.
        """
        try:
            content = unpack(data)
            content["transforms"] = tuple((name, params) for name, params in content["transforms"])
            if content.get("parts") is not None:
                content["parts"] = Parts(*content["parts"])
            return cls(**content)
        except Exception as error:  # msgpack raises many unrelated types
            raise ValueError(f"no definition of a tap: {error}") from error

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a consumer, from the arrays of a frame: those by position, and the labels."""
        if any(key is not None for key in self.keys):
            import jax

            leaves = [
                leaf if key is None else jax.random.wrap_key_data(jax.numpy.asarray(leaf), impl=key)
                for leaf, key in zip(leaves, self.keys, strict=True)
            ]
        args = structure(self.tree, leaves)
        count = len(args) - len(self.traced_labels)
        return args[:count], {**self.labels, **dict(zip(self.traced_labels, args[count:], strict=True))}

    def shard(self, part: int, leaves: Sequence[Any]) -> Shard | None:
        """What of the tapped arrays an event has whose program ran on several devices."""
        if self.parts is None or part < 0:
            return None
        return self.parts.shard(part, [leaf.shape for leaf in leaves], None)


def structure(tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The tapped arguments with these leaves."""
    return tuple(_decode_tree(tree, leaves))


def tap_name(binding: Binding) -> str:
    """What a tap is called in recordings: its label `what`, else the name of the consumer."""
    what = binding.kwargs.get("what")
    return what if isinstance(what, str) else binding.consumer.name


def definition(route: Route) -> Definition:
    """The definition of a route."""
    binding = route.binding
    labels = {name: value for name, value in binding.kwargs.items() if _packable(value)}
    omitted = {name: repr(value) for name, value in binding.kwargs.items() if name not in labels}
    transforms = tuple(
        (name, {key: value if _packable(value) else repr(value) for key, value in params.items()})
        for name, params in route.transforms
    )
    tree, leaves = _encode_tree(binding.treedef, binding.labels)
    return Definition(
        route.header.consumer_id, tap_name(binding), labels, omitted, tree, leaves, binding.keys, transforms,
        binding.with_device, binding.consumer.name, binding.with_shard, binding.labels, route.parts,
    )  # fmt: skip


# -- structures of values ----------------------------------------------------------------------------------------------


def _encode_tree(treedef: Any, labels: tuple[str, ...] = ()) -> tuple[Any, tuple[str, ...]]:
    """A structure for msgpack, and the names of its leaves.

    A leaf is its number, None is nil, and a node is ``[kind, ...]``: ``["list" | "tuple", children]``, ``["dict", keys,
    children]``, ``["namedtuple", name, fields, children]``, or ``["object", name, names, children]`` for classes that
    are registered with JAX, which come back as dictionaries.
    """
    import jax

    marked = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(marked)[0]]
    # The names of an only argument's leaves do not start with its position; a lone array has the empty name.
    count = len(treedef.children()) - len(labels)
    starts: list[list[Any]] = [[] if count == 1 else [position] for position in range(count)] + [[n] for n in labels]
    names = recording_names.distinct(
        ".".join(str(name) for name in [*starts[_entry(path[0])], *map(_entry, path[1:])]) for path in paths
    )
    return _encode_node(treedef, paths, iter(range(len(paths))), 0), tuple(names)


def _entry(key: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _encode_node(node: Any, paths: list[Any], numbers: Any, depth: int) -> Any:
    kind_and_data = node.node_data()
    if kind_and_data is None:
        return next(numbers)
    kind, data = kind_and_data
    if kind is type(None):
        return None
    names, children, start = [], [], 0
    for i, child in enumerate(node.children()):
        mine = paths[start : start + child.num_leaves]
        start += child.num_leaves
        names.append(_entry(mine[0][depth]) if mine and len(mine[0]) > depth else i)
        children.append(_encode_node(child, mine, numbers, depth + 1))
    if kind in (list, tuple):
        return [kind.__name__, children]
    if issubclass(kind, dict):
        keys = data if issubclass(kind, collections.OrderedDict) or kind is dict else data[-1]
        return ["dict", [key if _packable(key) else repr(key) for key in keys], children]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return ["namedtuple", kind.__name__, list(kind._fields), children]
    return ["object", kind.__name__, [str(name) for name in names], children]


@functools.cache
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields, rename=True)


def _decode_tree(tree: Any, leaves: Sequence[Any]) -> Any:
    if tree is None:
        return None
    if isinstance(tree, int):
        return leaves[tree]
    kind, *names, encoded = tree
    children = [_decode_tree(child, leaves) for child in encoded]
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "namedtuple":
        return _namedtuple(names[0], tuple(names[1]))(*children)
    return dict(zip(names[-1], children, strict=True))
