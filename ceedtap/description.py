"""What a compiled program says of its taps: enough for a process that has the program and never traced it.

Programs come from elsewhere as exports (`jax.export`) and from JAX's persistent cache. The description is a constant in
the program. A consumer is found again by the name of its :class:`ceedtap.Tap`, or as the function of that name in its
module.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import jax

from ceedtap.consumer import TAPS, Consumer, model_id
from ceedtap.native import ffi
from ceedtap.recording_definition import Definition, definition, pack, structure, unpack
from ceedtap.routes import Binding, Route
from ceedtap.shards import Parts


@dataclass(frozen=True)
class Description:
    """A route, in bytes.

    Attributes:
        definition: what its frames are.
        header: of its frames.
        like: the id of the route that was made when the program was traced, or this one's.
        module, function: where its consumer is, if it is a function.
    """

    definition: Definition
    header: bytes
    like: int
    module: str
    function: str

    @classmethod
    def of(cls, route: Route) -> Description:
        """The description of a route."""
        func = getattr(route.binding.consumer.func, "__func__", route.binding.consumer.func)
        module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
        is_tap = TAPS.get(route.binding.consumer.name) is route.binding.consumer
        place = ("", "") if is_tap else (str(module), str(name))
        return cls(definition(route), route.header_bytes, route.header.consumer_id, *place)

    @classmethod
    def of_native(cls, native: Any) -> Description:
        """The description that a program has given to a ``ct_consumer``."""
        return cls.decode(bytes(ffi.buffer(native.description, native.description_size)))

    def encode(self) -> bytes:
        """As msgpack."""
        return pack({**self.__dict__, "definition": self.definition.encode()})

    @classmethod
    def decode(cls, data: bytes) -> Description:
        """
        Raises:
            ValueError: no description.
        """
        try:
            content = unpack(data)
            content["definition"] = Definition.decode(content["definition"])
            return cls(**content)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no description of a tap: {error}") from error

    def with_parts(self, parts: Parts, header: bytes) -> Description:
        """The description of the same tap in the parts of a program that runs on several devices."""
        return replace(self, definition=replace(self.definition, parts=parts), header=header)

    @property
    def models(self) -> list[int]:
        """The ids of consumers whose settings the frames' consumer starts with, in a process that has one of them."""
        return [] if self.function else [model_id(self.definition.consumer)]

    def find(self) -> Binding | None:
        """The consumer, if this process has it."""
        consumer = self._consumer()
        if consumer is None:
            return None
        told = self.definition
        treedef = jax.tree.structure(structure(told.tree, range(len(told.keys))))
        return Binding(consumer, told.labels, treedef, told.keys, told.with_device, told.with_shard, told.traced_labels)

    def _consumer(self) -> Consumer | None:
        if not self.function:
            return TAPS.get(self.definition.consumer)
        found: Any = sys.modules.get(self.module)
        for name in self.function.split("."):
            found = getattr(found, name, None)
        if found is None or self.definition.omitted:
            return None
        return found if isinstance(found, Consumer) else Consumer(found)

    def advice(self) -> str:
        """What is missing, in words."""
        if not self.function:
            return f"define it: ceedtap.Tap({self.definition.consumer!r})"
        if self.definition.omitted:
            names = ", ".join(self.definition.omitted)
            return f"its keyword arguments {names} cannot be kept in a program; use a ceedtap.Tap"
        return f"import {self.module}, which must have {self.function}, or use a ceedtap.Tap"
