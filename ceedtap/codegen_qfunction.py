"""A libCEED QFunction in C from the jaxpr of a function of one quadrature point."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ceedtap import codegen, codegen_lanes, codegen_math, codegen_names
from ceedtap import codegen_rules as codegen_rules  # registers the rules
from ceedtap.codegen import Builder, Elements, TranslationError

#: So many values in a row are written by a loop.
MIN_LOOP = 16


# How functions with loops in place of lines are compiled, by the number of lines: a compiler's time grows faster than
# that, and what the higher levels do is done in such a function by its loops.
_FLAGS = ((2500, "-O2"), (6000, "-O1 -ftree-loop-vectorize"), (math.inf, "-Og"))


@dataclass(frozen=True)
class Argument:
    """Where an input of a point function comes from.

    Attributes:
        name: of the C variable.
        context: index of its first value in the QFunction's context, which is the same at all points; None: it is the
            next input field.
    """

    name: str
    context: int | None = None


def qfunction(
    name: str, closed: Any, inputs: Sequence[Argument], outputs: Sequence[str], *, precise: bool = False
) -> str:
    """The C source of a QFunction.

    Args:
        name: of the C function.
        closed: a closed jaxpr.
        inputs: where its inputs come from.
        outputs: names of its outputs, which are the output fields.
        precise: use the functions of the scalar math library, whose loops do not vectorise.

    Returns:
        the text of a file that every backend of libCEED compiles. Element `row`, in C order, of a field at point `i` is
        ``in[f][row * Q + i]``.

    Raises:
        TranslationError: something in the function has no translation.
    """
    pointers = codegen_names.c_names([*(argument.name for argument in inputs), *outputs])
    inputs = [replace(argument, name=pointer) for argument, pointer in zip(inputs, pointers, strict=False)]
    outputs = pointers[len(inputs) :]
    prefix = "t"
    while any(re.fullmatch(rf"{prefix}\d+", pointer) for pointer in pointers):
        prefix += "_"

    def attempt(lanes: bool | None, most: int | None = codegen.MAX_LINES) -> str:
        write = _with_lanes if lanes else _one_point
        builder = Builder(prefix=prefix, precise=precise, lanes=lanes, taken=pointers, most=most)
        return write(builder, name, closed, inputs, outputs)

    try:
        try:
            return attempt(None)
        except codegen.WantsLanes:
            pass
        try:
            return attempt(True)
        except codegen.NoLanes:
            return attempt(False)
    except codegen.TooLong:
        pass
    try:
        return attempt(True, None)
    except codegen.NoLanes:
        return attempt(False, None)


def _one_point(builder: Builder, name: str, closed: Any, inputs: Sequence[Argument], outputs: Sequence[str]) -> str:
    """One point at a time, in a loop that the compiler vectorises."""
    operands = [
        _read(builder, argument, var.aval.shape) for argument, var in zip(inputs, closed.jaxpr.invars, strict=True)
    ]
    results = codegen.translate(builder, closed.jaxpr, closed.consts, operands)
    writes: list[str] = []
    needed: list[codegen.Scalar] = []
    for output, result in zip(outputs, results, strict=True):
        values = _real(builder, output, result)
        needed += values
        writes += _write(output, values)
    _give_names(builder, inputs, operands, outputs, results)
    body = builder.text(needed, "    ") + builder.names.apply("".join(writes))
    # Points are independent of each other; a call of log or exp keeps the compiler from seeing that by itself.
    return _file(builder, name, inputs, outputs, "CeedPragmaSIMD for (CeedInt i = 0; i < Q; i++)", body)


def _give_names(
    builder: Builder, inputs: Sequence[Argument], operands: Sequence[Elements], outputs: Sequence[str],
    results: Sequence[Elements],
) -> None:  # fmt: skip
    """What has no name from the user's source is named after the input or output that it is."""
    names = [*(argument.name for argument in inputs), *outputs]
    for name, value in zip(names, [*operands, *results], strict=True):
        builder.give(f"{name}_i" if value.ndim == 0 else name, value)


def _real(builder: Builder, output: str, result: Elements) -> list[codegen.Scalar]:
    """The values of an output."""
    if any(isinstance(element, codegen.Complex) for element in result.reshape(-1)):
        raise TranslationError(f"the output {output} is complex; the fields of libCEED are real")
    return [codegen_rules.convert(builder, element, builder.scalar) for element in result.reshape(-1)]


def _file(builder: Builder, name: str, inputs: Sequence[Argument], outputs: Sequence[str], loop: str, body: str) -> str:
    helpers = "".join(f"{helper}\n" for helper in builder.helpers.values())
    flags = next(flags for most, flags in _FLAGS if body.count("\n") <= most)
    first = f"/* compile with {flags} */\n" if builder.loops else ""
    return (
        f"{first}{codegen.preamble(builder.math, builder.precise)}{helpers}{''.join(builder.data.values())}"
        f"CEED_QFUNCTION({name})(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {{\n"
        f"{_pointers(inputs, outputs)}  {loop} {{\n{body}  }}\n  return 0;\n}}\n"
    )


def _with_lanes(builder: Builder, name: str, closed: Any, inputs: Sequence[Argument], outputs: Sequence[str]) -> str:
    """Several points at once."""
    builder.helper("CEEDTAP_FMA", codegen_math.FMA)
    builder.helper("CEEDTAP_LANES", codegen_lanes.SUPPORT)
    operands = []
    for argument, var in zip(inputs, closed.jaxpr.invars, strict=True):
        if argument.context is not None:
            operands.append(_read(builder, argument, var.aval.shape))
            continue
        size = math.prod(var.aval.shape)
        array = builder.empty_array(size, builder.scalar)
        builder.raw(f"ceedtap_read({array}, {argument.name}, {size}, Q, i);", [array], ())
        builder.varying.add(array)
        operands.append(builder.elements_of(array, var.aval.shape, builder.scalar))
    results = codegen.translate(builder, closed.jaxpr, closed.consts, operands)
    writes, needed = "", []
    for output, result in zip(outputs, results, strict=True):
        values = _real(builder, output, result)
        array, start = builder.table(values, builder.scalar)
        if array not in builder.varying:
            array, start = builder.array(values, builder.scalar), 0
            builder.varying.add(array)
        begin = f"{array} + {start} * CEEDTAP_LANES" if start else array
        writes += f"    ceedtap_write({output}, {begin}, {len(values)}, Q, i);\n"
        needed.append(codegen.Scalar(array, builder.scalar))

    def rewrite(lines: codegen.Lines) -> codegen.Lines:
        return codegen_lanes.with_lanes(lines, builder.varying, builder.name)

    _give_names(builder, inputs, operands, outputs, results)
    body = builder.text(needed, "    ", rewrite) + builder.names.apply(writes)
    return _file(builder, name, inputs, outputs, "for (CeedInt i = 0; i < Q; i += CEEDTAP_LANES)", body)


def _write(output: str, values: Sequence[codegen.Scalar]) -> Iterator[str]:
    """The lines that write an output; a loop where many values lie in a row, which compilers take better."""
    row = 0
    while row < len(values):
        stop, place = row + 1, values[row].place
        while place and stop < len(values) and values[stop].place == (place[0], place[1] + stop - row):
            stop += 1
        if stop - row < MIN_LOOP:
            stop = row + 1
            yield f"    {output}[{_at(row)}] = {values[row].text};\n"
        else:
            assert place is not None
            target, source = f"{output}[({row} + k) * Q + i]", f"{place[0]}[{place[1]} + k]"
            yield f"    for (CeedInt k = 0; k < {stop - row}; k++) {target} = {source};\n"
        row = stop


def _at(row: int) -> str:
    return f"{row} * Q + i" if row else "i"


def _read(builder: Builder, argument: Argument, shape: tuple[int, ...]) -> Elements:
    values = np.empty(shape, object)
    if builder.loops and argument.context is None and values.size >= MIN_LOOP:
        array = builder.empty_array(values.size, builder.scalar)
        with builder.count(values.size) as row_:
            source = codegen.Scalar(f"{argument.name}[{row_.text} * Q + i]", builder.scalar)
            builder.store(array, row_, source)
        return builder.elements_of(array, shape, builder.scalar)
    for row, index in enumerate(np.ndindex(shape)):
        if argument.context is None:
            values[index] = builder.value(f"{argument.name}[{_at(row)}]", builder.scalar, [])
        else:
            # The same at all points: read where it is used, and loops over many of them run over the context itself.
            text = f"{argument.name}[{row}]"
            values[index] = codegen.Scalar(text, builder.scalar, place=(argument.name, row))
    return values


def _pointers(inputs: Sequence[Argument], outputs: Sequence[str]) -> str:
    lines, number = [], 0
    for argument in inputs:
        if argument.context is None:
            lines.append(f"  const CeedScalar *__restrict__ {argument.name} = in[{number}];\n")
            number += 1
        else:
            lines.append(
                f"  const CeedScalar *__restrict__ {argument.name} = (const CeedScalar *)ctx + {argument.context};\n"
            )
    lines += [f"  CeedScalar *__restrict__ {output} = out[{number}];\n" for number, output in enumerate(outputs)]
    return "".join(lines)
