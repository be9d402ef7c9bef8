"""Taps in compiled programs on CPUs: as the call of the native handler, on one device and on several.

A program is spread over devices in one of two ways. Inside of `jax.shard_map` it is written for one device, and so is
its tap. Elsewhere XLA's partitioner decides who has which part of an array, after JAX has handed the program over, and
it refuses operations with side effects that it does not know. So there the tap is a custom call with a rule: XLA asks
:func:`partition` for the code of one part, which calls the handler with that part. The rule has nothing but the text
that the custom call carries, which is the same in every process, as JAX's persistent cache needs it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ceedtap import jax_compat
from ceedtap.arguments import specs as specs_of
from ceedtap.description import Description
from ceedtap.outfeed import CUSTOM_CALLS, OUTFEED
from ceedtap.protocol import ArraySpec, Header, encode_header
from ceedtap.recording_definition import pack, unpack
from ceedtap.routes import Binding, RouteReference, Transforms
from ceedtap.shards import Parts, Replicas, count_replicas

TARGET, PARTITIONED_TARGET = CUSTOM_CALLS


def emit(
    ctx: jax_compat.LoweringRuleContext,
    operands: Sequence[Any],
    binding: Binding,
    transforms: Transforms,
    conditions: int,
    replicas: Replicas,
    ordered_effect: jax_compat.Effect | None,
) -> RouteReference:
    """Emits a tap of the first operands; the last ones are `conditions`. Returns what must live until XLA has made an
    executable of the program."""
    count = len(operands) - conditions
    specs = specs_of(ctx.avals_in[:count], binding.keys)
    axes, num_parts = jax_compat.mesh_axes(ctx), jax_compat.num_parts(ctx)
    if ordered_effect is not None:
        jax_compat.prepare_order(ctx, f"the tap of {binding.name}")
    if jax_compat.is_partitioned(ctx):
        reference = OUTFEED.route(binding, transforms, specs)
        rule = {
            "tap": Description.of(reference.route).encode(),
            "conditions": conditions,
            "replicas": replicas,
            "axes": axes,
            "manual": jax_compat.manual_axes(ctx),
            "num_parts": num_parts,
        }
        avals = ctx.avals_in[count:]
        held = [jax_compat.lower_any(ctx, operand, aval) for operand, aval in zip(operands[count:], avals, strict=True)]
        jax_compat.emit_partitioned_call(
            ctx, PARTITIONED_TARGET, pack(rule), [*operands[:count], *held], ordered_effect
        )
        return reference
    reference = OUTFEED.route(binding, transforms, specs, None if num_parts == 1 else Parts(axes))
    attributes: dict[str, Any] = {"conditions": np.int32(conditions), "numbered": np.int32(num_parts > 1)}
    attributes["header"] = np.frombuffer(reference.route.header_bytes, np.uint32)
    if ctx.module_context.lowering_parameters.for_export:
        description = Description.of(reference.route)
        attributes["description"] = np.frombuffer(description.encode(), np.uint8)
        attributes["like"] = halves(description.models)
    avals = list(ctx.avals_in)
    if num_parts > 1:
        number, aval = jax_compat.part_number()
        operands = [*operands[:count], number, *operands[count:]]
        avals.insert(count, aval)
    jax_compat.emit_ffi_call(ctx, TARGET, operands, ordered_effect, avals_in=avals, **attributes)
    return reference


# -- the rule: the code of a part --------------------------------------------------------------------------------------


def partition(operands: Sequence[jax_compat.PartedOperand], text: bytes) -> str:
    """The MLIR module that each part of the program runs for a tap whose custom call carries `text`."""
    rule = unpack(text)
    tap = Description.decode(rule["tap"])
    conditions, num_parts = rule["conditions"], rule["num_parts"]
    tapped = operands[1 : len(operands) - conditions]
    axes = tuple(map(tuple, rule["axes"]))
    members = _members(axes, rule["manual"], num_parts)
    places = [_coordinates(operand.sharding, len(operand.shape), members) for operand in tapped]
    starts = tuple(
        tuple(
            tuple(number * size for number, size in zip(place[part], operand.part_shape, strict=True))
            for operand, place in zip(tapped, places, strict=True)
        )
        for part in range(num_parts)
    )
    shapes = [
        tuple(
            tuple(max(0, min(n, whole - first)) for n, whole, first in zip(op.part_shape, op.shape, begin, strict=True))
            for op, begin in zip(tapped, starts[part], strict=True)
        )
        for part in range(num_parts)
    ]
    # Along the manual axes of a `shard_map` the devices run programs of their own, which have no replicas. There, the
    # places in the whole array are not known.
    own = [tuple(Parts(axes).coordinates(part)[name] for name in rule["manual"]) for part in range(num_parts)]
    replicas = count_replicas(list(zip(starts, own, strict=True)))
    parts = Parts(axes, None if rule["manual"] else starts, replicas)
    lines = _Lines(operands)
    for shape in dict.fromkeys(shapes):
        # Parts at the end of an array that cannot be divided evenly are smaller; what XLA fills them up with is cut
        # off.
        if any(math.prod(s) == 0 and math.prod(op.shape) for s, op in zip(shape, tapped, strict=True)):
            continue
        emits = [mine == shape and (rule["replicas"] == "all" or not r)
                 for mine, r in zip(shapes, replicas, strict=True)]  # fmt: skip
        if not any(emits):
            continue
        keys = tap.definition.keys
        specs = tuple(ArraySpec(s, op.dtype, key) for s, op, key in zip(shape, tapped, keys, strict=True))
        digest = hashlib.blake2b(repr((tap.like, parts, specs)).encode(), digest_size=8).digest()
        header = encode_header(Header(int.from_bytes(digest, "big") or 1, specs))
        lines.call(tap.with_parts(parts, header), conditions, specs, emits)
    return lines.module()


def _members(axes: Sequence[tuple[str, int]], manual: Sequence[str], num_parts: int) -> list[int]:
    """The number of each part among those with the same place along the manual axes, in the order of the mesh."""
    if not manual:
        return list(range(num_parts))
    sizes = [size for name, size in axes if name not in manual]
    places = (Parts(tuple(axes)).coordinates(part) for part in range(num_parts))
    others = ([place[name] for name, _ in axes if name not in manual] for place in places)
    return [int(np.ravel_multi_index(other, sizes)) if sizes else 0 for other in others]


def _coordinates(sharding: Any, rank: int, members: Sequence[int]) -> list[tuple[int, ...]]:
    """For each part, the number of its piece along every axis of an array. Where an array is spread along axes that are
    not manual, XLA describes that for the members of one group."""
    num_parts = len(members)
    if sharding.is_replicated() or sharding.is_manual():
        return [(0,) * rank] * num_parts
    devices = sharding.tile_assignment_devices()
    coordinates: list[tuple[int, ...]] = [()] * len(devices)
    places = itertools.product(*map(range, sharding.tile_assignment_dimensions()))
    for place, part in zip(places, devices, strict=True):
        coordinates[part] = place[:rank]  # the rest is where the same piece is
    return coordinates if len(devices) == num_parts else [coordinates[member] for member in members]


class _Lines:
    """The lines of the module. Its function has a token and the operands' parts as arguments, and returns a token."""

    def __init__(self, operands: Sequence[jax_compat.PartedOperand]) -> None:
        self._operands = operands
        self._types = [_type(operand.element, operand.part_shape) for operand in operands]
        self._lines: list[str] = []
        self._token = "%a0"

    def _add(self, text: str) -> str:
        name = f"%v{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        return name

    def call(self, tap: Description, conditions: int, specs: Sequence[ArraySpec], emits: Sequence[bool]) -> None:
        """Calls the handler with arrays of these shapes, the first parts of the operands, in the parts that emit."""
        part = self._add("stablehlo.partition_id : tensor<ui32>")
        names, types = [self._token], [_TOKEN]
        for i, spec in enumerate(specs, start=1):
            operand, name, type_ = self._operands[i], f"%a{i}", _type(self._operands[i].element, spec.shape)
            if spec.shape != operand.part_shape:
                ranges = ", ".join(f"0:{size}" for size in spec.shape)
                name = self._add(f"stablehlo.slice {name} [{ranges}] : ({self._types[i]}) -> {type_}")
            names.append(name)
            types.append(type_)
        names += [part, *(f"%a{i}" for i in range(1 + len(specs), len(self._operands)))]
        types += ["tensor<ui32>", *self._types[1 + len(specs) :]]
        if not all(emits):
            count = len(emits)
            table = self._add(f"stablehlo.constant dense<{str(list(emits)).lower()}> : tensor<{count}xi1>")
            kind = f"(tensor<{count}xi1>, tensor<ui32>) -> tensor<1xi1>"
            names.append(self._add(f"stablehlo.dynamic_slice {table}, {part}, sizes = [1] : {kind}"))
            types.append("tensor<1xi1>")
            conditions += 1
        attributes = {
            "conditions": f"{conditions} : i32",
            "numbered": "1 : i32",
            "header": _words(np.frombuffer(tap.header, np.uint32)),
            "description": _words(np.frombuffer(tap.encode(), np.uint8)),
            "like": _words(halves([tap.like, *tap.models])),
        }
        config = ", ".join(f"{name} = {value}" for name, value in attributes.items())
        layouts = ", ".join(map(_layout, types))
        self._token = self._add(
            f"stablehlo.custom_call @{TARGET}({', '.join(names)}) {{api_version = 4 : i32, has_side_effect = true, "
            f"backend_config = {{{config}}}, operand_layouts = [{layouts}], result_layouts = [{_layout(_TOKEN)}]}} : "
            f"({', '.join(types)}) -> {_TOKEN}"
        )

    def module(self) -> str:
        """The whole text."""
        arguments = ", ".join(f"%a{i}: {type_}" for i, type_ in enumerate(self._types))
        body = "\n".join([*self._lines, f"return {self._token} : {_TOKEN}"])
        return f"module {{\nfunc.func public @main({arguments}) -> {_TOKEN} {{\n{body}\n}}\n}}"


_TOKEN = "!stablehlo.token"


def _type(element: str, shape: Sequence[int]) -> str:
    if element == "token":
        return _TOKEN
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def _layout(type_: str) -> str:
    """The layout in which the last axis is contiguous."""
    rank = 0 if type_.startswith("!") else type_.count("x") - type_.count("complex")
    return f"dense<{list(reversed(range(rank)))}> : tensor<{rank}xindex>"


def halves(ids: Sequence[int]) -> np.ndarray:
    """Numbers of 64 bits, each as two words."""
    return np.array([word for number in ids for word in (number >> 32, number & 0xFFFFFFFF)], np.uint32)


def _words(words: np.ndarray) -> str:
    return f"dense<{words.tolist()}> : tensor<{words.size}xui{8 * words.itemsize}>"


jax_compat.register_partitioner(PARTITIONED_TARGET, partition)
