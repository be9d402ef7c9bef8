"""Groups in mesh files: what meshio makes of the names and numbers of many formats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ceedtap import lattice
from ceedtap.gmsh_file import Groups
from ceedtap.lattice import IntArray

#: Integer cell data that carry the group of a cell, by the formats' own names in meshio, and whether 0 is no group.
_NUMBERS = {
    "gmsh:physical": True,
    "medit:ref": True,
    "cell_tags": True,
    "ugrid:ref": True,
    "su2:tag": True,
    "nastran:ref": False,
    "netgen:index": False,
    "avsucd:material": False,
}
#: What says nothing about groups.
_NO_GROUPS = {"gmsh:geometrical", "gmsh:dim_tags", "point_tags", "vtkGhostType", "GLOBAL_ID", "cell_ids", "point_ids"}

Group = tuple[str, IntArray, bool]


class FileGroups:
    """The groups of cells and points in a mesh that meshio has read.

    Attributes:
        lost: what is in the file and cannot be understood, in words.
    """

    def __init__(self, data: Any, path: str, gmsh: Groups | None) -> None:
        self._data = data
        self._gmsh = gmsh
        self._names = {
            (int(value[0]), int(value[1])): name for name, value in data.field_data.items() if np.shape(value) == (2,)
        }
        ending = os.path.splitext(path)[1].lower()
        self._markers = _su2_markers(path) if "su2:tag" in data.cell_data else {}
        self.lost: list[str] = []
        for key, parts in data.cell_data.items():
            if key in _NUMBERS and len(parts) != len(data.cells):
                self.lost.append(f"cell data {key!r}, which not all cells have")
            elif key not in _NUMBERS and key not in _NO_GROUPS and _are_numbers(parts):
                self.lost.append(f"cell data {key!r}")
        for key, values in data.point_data.items():
            if key not in _NO_GROUPS and _are_numbers([values]):
                self.lost.append(f"point data {key!r}")
        if ending == ".inp" and (surfaces := _abaqus_surfaces(path)):
            self.lost.append(f"surfaces of elements {', '.join(map(repr, surfaces))}")

    def of_block(self, index: int, dim: int) -> Iterator[Group]:
        """Name, positions within the block, and whether the cells are the other way around, of all groups of a block of
        cells."""
        block = self._data.cells[index]
        if self._gmsh is not None:
            everything = np.arange(len(block.data))
            entity = int(self._data.cell_data["gmsh:geometrical"][index][0]) if len(block.data) else 0
            for name, is_reversed in self._gmsh.of_block(dim, entity):
                yield name, everything, is_reversed
            return
        groups: dict[str, IntArray] = {}
        for name, members in self._data.cell_sets.items():
            part = members[index] if index < len(members) else None
            if name.startswith("gmsh:") or part is None or not len(part):
                continue
            array = np.asarray(part)
            if array.dtype.kind in "iu" and array.ndim == 1 and array.max() < len(block.data):
                groups[name] = array.astype(np.int64)
            elif (what := f"cell set {name!r}") not in self.lost:
                self.lost.append(what)
        families = getattr(self._data, "cell_tags", None) or {}
        for key, zero_is_none in _NUMBERS.items():
            parts = self._data.cell_data.get(key, [])
            if len(parts) != len(self._data.cells):
                continue
            tags = np.asarray(parts[index]).astype(np.int64).ravel()
            for tag in np.unique(tags).tolist():
                if tag == 0 and zero_is_none:
                    continue
                members = np.flatnonzero(tags == tag)
                for name in self._named(key, tag, dim, families):
                    groups[name] = np.union1d(groups[name], members) if name in groups else members
        for name, members in groups.items():
            yield name, members, False

    def _named(self, key: str, tag: int, dim: int, families: dict[int, list[str]]) -> list[str]:
        if key == "cell_tags":
            return families.get(tag) or [str(tag)]
        if key == "su2:tag":
            return [self._markers.get(tag, str(tag))]
        return [self._names.get((tag, dim), str(tag))]

    def of_points(self) -> dict[str, IntArray]:
        """Name -> numbers of the points of groups of points."""
        found = {name: np.unique(np.asarray(ids, dtype=np.int64)) for name, ids in self._data.point_sets.items()}
        tags = self._data.point_data.get("point_tags")
        for tag, names in (getattr(self._data, "point_tags", None) or {}).items():
            for name in names if tags is not None else ():
                members = np.flatnonzero(np.asarray(tags) == tag)
                found[name] = np.union1d(found[name], members) if name in found else members
        return found


def of_nodes(
    cells: IntArray, corners: IntArray, order: int, chosen: npt.NDArray[np.bool_]
) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    """What a set of nodes stands for: facets on the boundary, else edges, else corners, all of whose nodes it has.

    Args:
        cells, corners: lexicographic points of the cells.
        order: of the geometry.
        chosen: for each point whether it is in the set.

    Returns:
        (n, 2) rows of (cell, local facet), and of (cell, local ridge), and for each point whether these have it.
    """
    dim = corners.shape[1].bit_length() - 1
    local = np.stack([lattice.entity_nodes(code, 2, True) for code in lattice.facets(dim)])
    keys = lattice.canonical(corners[:, local])[0]
    _, numbers = lattice.unique_rows(keys.reshape(-1, keys.shape[-1]))
    on_boundary = (np.bincount(numbers)[numbers] == 1).reshape(len(cells), -1)
    covered = np.zeros_like(chosen)
    found = []
    for free in range(dim - 1, -1, -1):
        codes = lattice.facets(dim) if free == dim - 1 else lattice.ridges(dim)
        rows, points = [], []
        for number, code in enumerate(codes):
            if code.count(lattice.FREE) == free:
                nodes = cells[:, lattice.entity_nodes(code, order + 1, True)]
                here = on_boundary[:, number] if free == dim - 1 else ~covered[nodes].all(axis=1)
                where = np.flatnonzero(here & chosen[nodes].all(axis=1))
                rows.append(np.stack([where, np.full_like(where, number)], axis=1))
                points.append(np.sort(nodes[where], axis=1))
        every = np.concatenate(points)
        _, first = np.unique(every, axis=0, return_index=True)
        found.append(np.concatenate(rows)[np.sort(first)])
        covered[every] = True
    return found[0], np.concatenate(found[1:]), covered


def _are_numbers(parts: Any) -> bool:
    """Whether they may be numbers of groups: integers, one for each, that are not all the same."""
    arrays = [np.asarray(part) for part in parts if part is not None]
    if not arrays or any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays):
        return False
    return len(np.unique(np.concatenate(arrays))) > 1


def _su2_markers(path: str) -> dict[int, str]:
    """The names of boundary markers, by the numbers that meshio gives them: a number's own, else the next one."""
    names, number = {}, 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition("=")
            if key.strip() == "MARKER_TAG":
                name = value.strip()
                try:
                    number = int(name)
                except ValueError:
                    number += 1
                names[number] = name
    return names


def _abaqus_surfaces(path: str) -> list[str]:
    """The names of surfaces that are made of sides of elements."""
    found = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.lstrip().upper().startswith("*SURFACE,"):
                options = dict(part.upper().strip().partition("=")[::2] for part in line.split(",")[1:])
                if options.get("TYPE", "ELEMENT") == "ELEMENT":
                    found.append(options.get("NAME", "").strip())
    return found
