"""Routes from taps in programs to consumers, as programs and frames refer to them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from ceedtap import protocol
from ceedtap.consumer import Consumer
from ceedtap.host_functions import check_result
from ceedtap.native import ffi, lib
from ceedtap.shards import Parts, Shard, whole

Transforms = tuple[tuple[str, dict[str, Any]], ...]
POLICIES = {"block": lib.CT_BLOCK, "drop_newest": lib.CT_DROP_NEWEST, "drop_oldest": lib.CT_DROP_OLDEST}


@dataclass(frozen=True, eq=False)
class Binding:
    """A consumer with the arguments of one tap in a program.

    Attributes:
        consumer: called on the receiver thread.
        kwargs: keyword arguments of every call.
        treedef: structure of the tapped positional arguments.
        keys: for each leaf, the name of the random number generator when it holds keys.
        with_device: whether the consumer also gets ``device=``.
        with_shard: whether the consumer also gets ``shard=``.
        labels: names of the last of the tapped arguments, which are keyword arguments of the consumer.
    """

    consumer: Consumer
    kwargs: dict[str, Any]
    treedef: Any
    keys: tuple[str | None, ...]
    with_device: bool = False
    with_shard: bool = False
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        what = self.kwargs.get("what")
        return f"{self.consumer.name}[{what}]" if isinstance(what, str) else self.consumer.name

    @property
    def num_labels(self) -> int:
        """Leaves of the labels; they come last."""
        if not self.labels:
            return 0
        children = self.treedef.children()
        return sum(child.num_leaves for child in children[len(children) - len(self.labels) :])

    def deliver(self, leaves: list[Any], transforms: Transforms, device: int, shard: Shard | None) -> None:
        for i, key in enumerate(self.keys):
            if key is not None:
                leaves[i] = jax.random.wrap_key_data(leaves[i], impl=key)
        args = jax.tree.unflatten(self.treedef, leaves)
        kwargs = self.kwargs
        if self.labels:
            count = len(args) - len(self.labels)
            kwargs = {**kwargs, **dict(zip(self.labels, args[count:], strict=True))}
            args = args[:count]
        if transforms:
            kwargs = {**kwargs, "transforms": transforms}
        if self.with_device:
            kwargs = {**kwargs, "device": local_devices().get(device)}
        if shard is not None:
            kwargs = {**kwargs, "shard": shard}
        result = self.consumer.func(*args, **kwargs)  # once more on the stack would cost more than all the rest here
        if result is not None:
            check_result(result, self.consumer.func, "a consumer")


@functools.cache
def local_devices() -> dict[int, jax.Device]:
    """The devices of this process by their local number."""
    return {device.id: device for device in jax.local_devices()}


class Tee(Protocol):
    """Gets the bytes of frames on their way to consumers: recordings and publications are such.

    A tap whose events it wants sends them even where no consumer listens.
    """

    #: Events that nobody else wants may be dropped when the queue is full, whatever the consumer's policy.
    lossy: bool

    def wants(self, route: Route) -> bool:
        """Asked once for each route."""

    def take(self, route: Route, frame: Any) -> None:
        """Gets the buffer of a frame, on the receiver thread; it must not be changed, nor used later."""


class Owner(Protocol):
    """Who has the routes."""

    #: Under it nobody frees the native part of a route. In the child of a fork it is another one.
    lock: Any


class Route:
    """The way from a tap in compiled programs to a consumer. Programs refer to it by the id in the frame's header."""

    tees: tuple[Tee, ...] = ()
    _last_counts: tuple[int, dict[int, dict[str, int]]] = (0, {})

    def __init__(
        self, binding: Binding, transforms: Transforms, header: protocol.Header, parts: Parts | None = None
    ) -> None:
        self.binding = binding
        self.transforms = transforms
        self.header = header
        self.parts = parts
        self.header_bytes = protocol.encode_header(header)
        self.decode = protocol.array_decoder(header)
        self.native = ffi.NULL  # ct_consumer, while the registry has it
        self.handle = ffi.new_handle(self)

    def connect(self, native: Any, owner: Owner, tees: Sequence[Tee]) -> None:
        """Lets events come."""
        self.native = native
        self._owner = owner
        self.binding.consumer.routes.add(self)
        self.choose(tees)

    def choose(self, tees: Sequence[Tee]) -> None:
        self.tees = tuple(tee for tee in tees if tee.wants(self))
        consumer = self.binding.consumer
        for user in list(consumer.routes):  # operators compute what is tapped in them if anybody wants it
            user.enable(consumer.enabled)

    def shard(self, device: int, part: int) -> Shard:
        """What of the tapped arrays an event has."""
        count = len(self.header.specs) - self.binding.num_labels
        shapes = [spec.shape for spec in self.header.specs[:count]]
        where = local_devices().get(device)
        if self.parts is None or part < 0:
            return whole(shapes, where)
        return self.parts.shard(part, shapes, where)

    def enable(self, enabled: bool) -> None:
        consumer = self.binding.consumer
        kept = enabled or not all(tee.lossy for tee in self.tees)
        policy = POLICIES[consumer.policy if kept else "drop_newest"]
        name = self.binding.name.encode()[:120]
        with self._owner.lock:
            if self.native:
                lib.ct_consumer_configure(self.native, self.handle, name, policy, consumer.every)
                lib.ct_consumer_enable(self.native, enabled or bool(self.tees))

    def mute(self) -> None:
        """Keeps the events in the programs until the next :meth:`enable`, unless somebody wants all of them."""
        with self._owner.lock:
            if self.native and not self.binding.consumer.enabled and all(tee.lossy for tee in self.tees):
                lib.ct_consumer_enable(self.native, False)

    def counts(self) -> tuple[int, dict[int, dict[str, int]]]:
        """Events that programs had for the consumer, and, by device, what became of those that left."""
        offered, counts = ffi.new("uint64_t *"), ffi.new("ct_counts[]", lib.CT_MAX_DEVICES + 1)
        with self._owner.lock:
            if not self.native:
                return self._last_counts
            lib.ct_consumer_get_counts(self.native, offered, counts)
        slots = {slot if slot < lib.CT_MAX_DEVICES else -1: counts[slot] for slot in range(lib.CT_MAX_DEVICES + 1)}
        return offered[0], {device: fields(of) for device, of in slots.items() if of.emitted}

    def free(self) -> None:
        """Frees the native part, when no program has it any more and the last event has been consumed."""
        if any(tee.lossy for tee in self.tees):
            self._last_counts = self.counts()
        native, self.native = self.native, ffi.NULL
        lib.ct_consumer_free(native)


class RouteReference:
    """Python's share in a route; compiled programs hold theirs in the native registry."""

    # At the end of the process the names of this module may be gone before its objects are.
    _forget = staticmethod(functools.partial(lib.ct_registry_unref, lib.ct_consumers()))

    def __init__(self, route: Route) -> None:
        self.route = route

    def __del__(self) -> None:
        self._forget(self.route.header.consumer_id)


def fields(struct: Any) -> dict[str, int]:
    """A struct of numbers as a dict."""
    return {name: getattr(struct, name) for name, _ in ffi.typeof(struct).fields}
