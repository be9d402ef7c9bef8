"""What meshio leaves out of gmsh's own files: all physical groups of an entity, and their orientations.

meshio keeps one group of each entity, loses those that are reversed, and refuses files in which some entities are in no
group ("save all"). Here the sections with the groups are read, and the others are left to meshio.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ceedtap import lattice
from ceedtap.lattice import IntArray


@dataclass(frozen=True)
class Groups:
    """The physical groups of a file.

    Attributes:
        names: (dimension, number) -> name of a group, where it has one.
        entities: (dimension, number) -> numbers of the groups of a geometrical entity, negative where it is reversed.
    """

    names: dict[tuple[int, int], str]
    entities: dict[tuple[int, int], list[int]]

    def of_block(self, dim: int, entity: int) -> list[tuple[str, bool]]:
        """The groups of the cells of an entity, and whether they are the other way around in each."""
        numbers = self.entities.get((dim, entity), [])
        return [(self.names.get((dim, abs(number)), str(abs(number))), number < 0) for number in numbers]


@contextlib.contextmanager
def without_groups(path: str) -> Iterator[tuple[str, Groups | None]]:
    """The path of a copy with nodes and elements only, and the groups.

    Of a file that is not of version 4.1, or has no groups, the path itself and None.
    """
    with open(path, "rb") as file:
        start = file.read(64)
        head = re.match(rb"\s*\$MeshFormat\s+4\.1\s+([01])\s+([48])\s", start)
        data = start + file.read() if head else b""
    groups = None
    if head:
        with contextlib.suppress(ValueError, IndexError, struct.error):  # a damaged file, of which meshio says more
            groups = _groups(data, head[1] == b"0", int(head[2]))
    if groups is None:
        yield path, None
        return
    nodes, end = data.index(b"$Nodes"), data.rindex(b"$EndElements")
    form = data[data.index(b"$MeshFormat") : data.index(b"$EndMeshFormat")] + b"$EndMeshFormat\n"
    try:
        fd, copy = tempfile.mkstemp(suffix=".msh")
    except OSError:  # no place for a copy: what meshio makes of the file itself is better than nothing
        yield path, None
        return
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(form + data[nodes:end] + b"$EndElements\n")
        yield copy, groups
    finally:
        os.unlink(copy)


def distinct_cells(cells: IntArray, tags: IntArray) -> tuple[IntArray, IntArray]:
    """Of cells that are there once for each of their groups, as in version 2: the first ones, and which each cell is.

    Where a cell is there twice in the same group all of them stay.
    """
    every = np.arange(len(cells))
    count, which = lattice.unique_rows(cells)
    pairs, _ = lattice.unique_rows(np.stack([which, np.unique(tags, return_inverse=True)[1].reshape(-1)], axis=1))
    if count == len(cells) or pairs < len(cells):
        return every, every
    first = np.empty(count, dtype=np.int64)
    first[which[::-1]] = every[::-1]
    rank = np.empty(count, dtype=np.int64)
    rank[np.argsort(first)] = np.arange(count)
    return np.sort(first), rank[which]


def _groups(data: bytes, is_text: bool, size: int) -> Groups | None:
    section = re.search(rb"\n\$Entities[^\S\n]*\n", data)
    if section is None:
        return None
    names = {}
    if listed := re.search(rb"\n\$PhysicalNames\s+\d+\s+(.*?)\n\$EndPhysicalNames", data, re.DOTALL):
        for line in listed[1].decode(errors="replace").splitlines():
            dim, number, name = line.split(maxsplit=2)
            names[int(dim), int(number)] = name.strip().removeprefix('"').removesuffix('"')
    if is_text:
        end = data.index(b"\n$EndEntities", section.end())
        numbers: Any = _Text(data[section.end() : end].split())
    else:
        numbers = _Binary(data, section.end(), size)
    entities = {}
    for dim, count in enumerate(numbers.sizes(4)):
        for _ in range(count):
            (tag,) = numbers.integers(1)
            numbers.skip_reals(3 if dim == 0 else 6)
            entities[dim, tag] = numbers.integers(numbers.sizes(1)[0])
            if dim > 0:
                numbers.integers(numbers.sizes(1)[0])  # what bounds it
    return Groups(names, entities)


class _Text:
    """The numbers of a section in text."""

    def __init__(self, words: list[bytes]) -> None:
        self._words = words
        self._at = 0

    def integers(self, count: int) -> list[int]:
        words = self._words[self._at : self._at + count]
        if len(words) < count:
            raise IndexError
        self._at += count
        return [int(word) for word in words]

    sizes = integers

    def skip_reals(self, count: int) -> None:
        self._at += count


class _Binary:
    """The numbers of a section in binary."""

    def __init__(self, data: bytes, at: int, size: int) -> None:
        self._data = data
        self._at = at
        self._size = {4: "I", 8: "Q"}[size]

    def _take(self, count: int, kind: str) -> list[int]:
        form = f"<{count}{kind}"
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return list(values)

    def integers(self, count: int) -> list[int]:
        return self._take(count, "i")

    def sizes(self, count: int) -> list[int]:
        return self._take(count, self._size)

    def skip_reals(self, count: int) -> None:
        self._at += 8 * count
