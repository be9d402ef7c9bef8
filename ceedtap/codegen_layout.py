"""Where elements lie in arrays: positions as strides times indices, for loops over them, and constants as bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# So many loops in one another at most; what needs more has a table of positions.
MAX_NEST = 4
# Constants of at least so many bytes are written as the bytes that they are: a compiler reads numbers slowly.
MIN_BYTES = 1 << 15


def nest(sequences: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]] | None:
    """Loops in whose order each of these sequences of positions is its first position plus strides times indices.

    Returns:
        for each loop, the outermost first, the number of its turns and the stride in each sequence; None: there are no
        such loops.

    >>> nest([[0, 1, 2, 3], [0, 0, 1, 1]])
    [(2, [2, 1]), (2, [1, 0])]
    """
    at = np.asarray(sequences, np.int64)
    loops: list[tuple[int, list[int]]] = []
    while at.shape[1] > 1:
        steps = np.diff(at, axis=1)
        differs = (steps != steps[:, :1]).any(0)
        turns = int(differs.argmax()) + 1 if differs.any() else at.shape[1]
        if at.shape[1] % turns or len(loops) == MAX_NEST:
            return None
        blocks = at.reshape(len(at), -1, turns)
        if (blocks - blocks[:, :, :1] != blocks[:, :1] - blocks[:, :1, :1]).any():
            return None
        loops.append((turns, [int(s) for s in steps[:, 0]]))
        at = blocks[:, :, 0]
    return loops[::-1]


def index(start: int, strides: Sequence[int], indices: Sequence[str]) -> str:
    """The position in C.

    >>> index(3, [6, 1, 0], ["i", "j", "k"])
    'i * 6 + j + 3'
    """
    terms = [i if s == 1 else f"{i} * {s}" for s, i in zip(strides, indices, strict=True) if s]
    return " + ".join(terms + [str(start)] * bool(start or not terms))


_ESCAPES = np.frombuffer("".join(f"\\{byte:03o}" for byte in range(256)).encode(), np.uint32)
_BYTES_IN_A_LINE = 32


def data(values: np.ndarray, ctype: str) -> tuple[str, str]:
    """Constants as a C object in a file: its name, and its definition. `values` of it is an array of `ctype`.

    Numbers as text take a compiler thirty times as long as the string of their bytes.
    """
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    name = f"ceedtap_data_{hashlib.sha256(raw.tobytes() + ctype.encode()).hexdigest()[:16]}"
    padded = np.concatenate([raw, np.zeros(-raw.size % _BYTES_IN_A_LINE, np.uint8)])
    lines = _ESCAPES[padded].reshape(-1, _BYTES_IN_A_LINE).view(f"S{4 * _BYTES_IN_A_LINE}").reshape(-1)
    string = b'"\n  "'.join(lines.tolist()).decode()
    return name, (
        f"#ifndef HAVE_{name}\n#define HAVE_{name}\n"
        "#if defined(__CUDACC__) || defined(__HIPCC__)\n__device__ const\n#else\nstatic const\n#endif\n"
        f"union {{\n  char bytes[{padded.size + 1}];\n  {ctype} values[{values.size}];\n}} {name} = {{\n"
        f'  "{string}"\n}};\n#endif\n'
    )


def groups(elements: Sequence[Any]) -> tuple[dict[str, list[int]], list[int], list[int]]:
    """The numbers of the elements that lie in each array, those of the constants, and those of all others."""
    arrays: dict[str, list[int]] = {}
    constants: list[int] = []
    others: list[int] = []
    for number, element in enumerate(elements):
        if element.is_constant:
            constants.append(number)
        elif element.place:
            arrays.setdefault(element.place[0], []).append(number)
        else:
            others.append(number)
    return arrays, constants, others
