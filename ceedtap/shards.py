"""Parts of arrays on several devices: which part an event has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import jax

Replicas = Literal["first", "all"]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """Which part of the tapped arrays an event has; see `tap_with_shard` of :func:`ceedtap.id_tap`.

    Attributes:
        device: the device that has it; None where JAX does not tell.
        coordinates: of the device in the mesh of the program, by the name of the axis; empty without a mesh.
        index: for each array, where the part is in the whole array, a tuple of slices; None inside of
            `jax.shard_map`, where the program itself sees parts only.
        replica: 0 for the first of the devices that have the same part, then 1, 2, ...

    >>> import ceedtap as ct, jax, jax.numpy as jnp
    >>> def show(x, shard):
    ...     print(x, shard.index[0], shard.coordinates)
    >>> with ct.outfeed_receiver():
    ...     _ = ct.id_tap(show, jnp.arange(3), tap_with_shard=True)
    [0 1 2] (slice(0, 3, None),) {}
    """

    device: jax.Device | None
    coordinates: dict[str, int]
    index: tuple[Index, ...] | None
    replica: int


@dataclass(frozen=True)
class Parts:
    """The parts of a program that runs on several devices, and what of the tapped arrays each has.

    Attributes:
        axes: names and sizes of the axes of the mesh, whose devices in order are the parts; () when there is none.
        starts: for each part and array, without labels, where its part begins; None when that is not known.
        replicas: for each part, how many before it have the same of all arrays; () when each is on its own.
    """

    axes: tuple[tuple[str, int], ...]
    starts: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    replicas: tuple[int, ...] = ()

    def coordinates(self, part: int) -> dict[str, int]:
        """Of the device of a part, in the mesh."""
        place = np.unravel_index(part, [size for _, size in self.axes]) if self.axes else ()
        return {name: int(number) for (name, _), number in zip(self.axes, place, strict=True)}

    def shard(self, part: int, shapes: Sequence[tuple[int, ...]], device: jax.Device | None) -> Shard:
        """What an event of a part with arrays of these shapes has."""
        if self.starts is None:
            return Shard(device, self.coordinates(part), None, self.replicas[part] if self.replicas else 0)
        index = tuple(
            tuple(slice(start, start + size) for start, size in zip(first, shape, strict=True))
            for first, shape in zip(self.starts[part], shapes, strict=False)  # labels come after the arrays
        )
        return Shard(device, self.coordinates(part), index, self.replicas[part])


def whole(shapes: Sequence[tuple[int, ...]], device: jax.Device | None) -> Shard:
    """What an event has of a program that runs on one device: everything."""
    return Shard(device, {}, tuple(tuple(slice(0, size) for size in shape) for shape in shapes), 0)


def count_replicas(keys: Sequence[Any]) -> tuple[int, ...]:
    """For each key, how often it came before."""
    seen: dict[Any, int] = {}
    counts = []
    for key in keys:
        counts.append(seen.get(key, 0))
        seen[key] = counts[-1] + 1
    return tuple(counts)


@dataclass(frozen=True)
class Event:
    """An event of arrays outside of compiled code: a part of them, on one device; -1 where that is not known."""

    arrays: list[np.ndarray]
    device: int = -1
    part: int = -1
    parts: Parts | None = None


def events_of(arrays: Sequence[Any], replicas: Replicas) -> list[Event]:
    """The parts of the arrays that this process has, one event for each."""
    import jax

    shardings = [array.sharding for array in arrays if isinstance(array, jax.Array)]
    device_sets: set[frozenset[jax.Device]] = {frozenset(sharding.device_set) for sharding in shardings}
    spread = [sharding for sharding in shardings if len(sharding.device_set) > 1]
    if not spread or len({devices for devices in device_sets if len(devices) > 1}) > 1:
        devices: set[jax.Device] = set().union(*device_sets)
        return [Event(list(map(np.asarray, arrays)), devices.pop().id if len(devices) == 1 else -1)]
    mesh = next((s.mesh for s in spread if isinstance(s, jax.sharding.NamedSharding)), None)
    order = list(spread[0].devices_indices_map((1,) * 0) if mesh is None else mesh.devices.flat)
    places, pieces = zip(*(_places(array, order) for array in arrays), strict=True)
    starts = tuple(tuple(place[part] for place in places) for part in range(len(order)))
    axes = () if mesh is None else tuple((str(name), int(size)) for name, size in mesh.shape.items())
    parts = Parts(axes, starts, count_replicas(starts))
    return [
        Event([piece[device] for piece in pieces], device.id, part, parts)
        for part, device in enumerate(order)
        if all(device in piece for piece in pieces) and (replicas == "all" or not parts.replicas[part])
    ]


def _places(array: Any, order: Sequence[jax.Device]) -> tuple[list[tuple[int, ...]], dict[jax.Device, np.ndarray]]:
    """Where the part of each device begins, and the parts that are here."""
    if not hasattr(array, "sharding") or len(array.sharding.device_set) == 1:
        whole = np.asarray(array)
        return [(0,) * whole.ndim] * len(order), dict.fromkeys(order, whole)
    indices = array.sharding.devices_indices_map(array.shape)
    starts = [tuple(int(s.start or 0) for s in indices[device]) for device in order]
    return starts, {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
