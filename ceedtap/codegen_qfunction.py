"""A libCEED QFunction in C from the jaxpr of a function of one quadrature point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ceedtap import codegen
from ceedtap import codegen_rules as codegen_rules  # registers the rules
from ceedtap.codegen import Builder, Elements, TranslationError


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
    builder = Builder()
    scalar = builder.scalar
    operands = [
        _read(builder, argument, var.aval.shape) for argument, var in zip(inputs, closed.jaxpr.invars, strict=True)
    ]
    results = codegen.translate(builder, closed.jaxpr, closed.consts, operands)
    writes, needed = [], []
    for output, result in zip(outputs, results, strict=True):
        for row, element in enumerate(result.reshape(-1)):
            if isinstance(element, codegen.Complex):
                raise TranslationError(f"the output {output} is complex; the fields of libCEED are real")
            value = codegen_rules.convert(builder, element, scalar)
            needed.append(value)
            writes.append(f"    {output}[{_at(row)}] = {value.text};\n")
    body = builder.text(needed, "    ")
    helpers = "".join(f"{helper}\n" for helper in builder.helpers.values())
    return (
        f"{codegen._preamble(builder.math, precise)}{helpers}"
        f"CEED_QFUNCTION({name})(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {{\n"
        f"{_pointers(inputs, outputs)}"
        # Points are independent of each other; a call of log or exp keeps the compiler from seeing that by itself.
        f"  CeedPragmaSIMD for (CeedInt i = 0; i < Q; i++) {{\n{body}{''.join(writes)}  }}\n  return 0;\n}}\n"
    )


def _at(row: int) -> str:
    return f"{row} * Q + i" if row else "i"


def _read(builder: Builder, argument: Argument, shape: tuple[int, ...]) -> Elements:
    values = np.empty(shape, object)
    for row, index in enumerate(np.ndindex(shape)):
        at = _at(row) if argument.context is None else str(row)
        values[index] = builder.value(f"{argument.name}[{at}]", builder.scalar, [])
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
