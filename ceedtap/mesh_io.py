"""Meshes from plain arrays and from files: node orders, serendipity cells, physical groups."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ceedtap import gmsh_file, lattice, mesh_groups
from ceedtap.lattice import FloatArray, IntArray
from ceedtap.mesh import Mesh, MeshError, _check_finite, _check_indices, _integers, _some, gradients
from ceedtap.mesh_groups import FileGroups
from ceedtap.plain_arrays import check_plain, plain_array

# Corners in file order (VTK, gmsh, Abaqus, Exodus, ... agree): low / high side per direction.
_CORNERS = {
    2: np.array([[0, 0], [1, 0], [1, 1], [0, 1]]),
    3: np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]]),
}
# Cell type -> (dimension, number of nodes).
_CELLS = {
    "quad": (2, 4),
    "quad8": (2, 8),
    "quad9": (2, 9),
    "hexahedron": (3, 8),
    "hexahedron20": (3, 20),
    "hexahedron27": (3, 27),
}
_LINES = ("line", "line3")


def from_arrays(
    points: npt.ArrayLike,
    cells: npt.ArrayLike,
    cell_type: str,
    sets: Sequence[tuple[str, npt.ArrayLike]],
    regions: Mapping[str, npt.ArrayLike],
    *,
    orient: bool,
    point_sets: Mapping[str, IntArray] | None = None,
    lost: list[str] | None = None,
) -> Mesh:
    """See :meth:`ceedtap.mesh.Mesh.from_arrays`; ``sets`` may hold a name once for each kind of entity.

    Of ``point_sets``, name -> points, what cannot be kept is told in ``lost``.
    """
    if cell_type not in _CELLS:
        raise MeshError(f"cell_type: expected one of {', '.join(_CELLS)}, got {cell_type!r}")
    dim, num_nodes = _CELLS[cell_type]
    check_plain("points", points)
    try:
        x = np.array(points, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MeshError(f"points: no array of numbers: {error}") from None
    if x.ndim != 2 or x.shape[1] not in (2, 3):
        raise MeshError(f"points: expected shape (num_points, 2) or (num_points, 3), got {x.shape}")
    nodes = _integers(cells, "cells")
    if nodes.ndim != 2 or nodes.shape[1] != num_nodes or len(nodes) == 0:
        raise MeshError(f"cells: {cell_type} needs shape (num_cells >= 1, {num_nodes}), got {nodes.shape}")
    _check_indices(nodes, len(x), "cells", "points")

    used, compact = np.unique(nodes, return_inverse=True)
    nodes = compact.reshape(nodes.shape).astype(np.int64)
    number = np.full(len(x), -1, dtype=np.int64)
    number[used] = np.arange(len(used))
    x = x[used]
    _check_finite(x, used)
    x = _drop_constant(x, dim)

    n = 2 if num_nodes == 2**dim else 3
    x, lexicographic = _lexicographic(x, nodes, dim)
    strides = n ** np.arange(dim)
    corners = lexicographic[:, lattice.lexicographic(2, dim) @ ((n - 1) * strides)]
    # Those that nobody turns are refused later.
    left_handed = _left_handed(x, lexicographic, n - 1) if orient else np.zeros(len(nodes), dtype=np.bool_)
    boundary: dict[str, IntArray] = {}
    ridges: dict[str, IntArray] = {}
    for name, entities in sets:
        free, points_of = _entity_rows(name, entities, number, dim)
        found = _find_entities(corners, free, points_of, left_handed)
        strays = np.flatnonzero(found[:, 0] < 0)
        if strays.size:
            kind = "facets" if free == dim - 1 else "entities"
            raise MeshError(f"boundary set {name!r}: {kind} {_some(strays)} belong to no cell")
        target = boundary if free == dim - 1 else ridges
        target[name] = np.concatenate([target[name], found]) if name in target else found
    for name, members in (point_sets or {}).items():
        chosen = np.ones(len(x), dtype=np.bool_)  # what serendipity cells lack is as the nodes around it
        chosen[: len(used)] = np.isin(used, members)
        facets, entities, covered = mesh_groups.of_nodes(lexicographic, corners, n - 1, chosen)
        boundary[name] = np.concatenate([boundary[name], facets]) if name in boundary else facets
        ridges[name] = np.concatenate([ridges[name], entities]) if name in ridges else entities
        if lost is not None and (count := np.count_nonzero((chosen & ~covered)[: len(used)])):
            lost.append(f"{count} points of {name!r} in the middle of edges or cells")
    cell_sets = {name: plain_array(f"region {name!r}", ids) for name, ids in regions.items()}
    mesh = Mesh(x, lexicographic, n - 1, boundary, cell_sets, ridges)
    return mesh.reoriented() if orient else mesh.check()


def read(path: str | os.PathLike[str], *, orient: bool) -> Mesh:
    """See :func:`ceedtap.mesh.read`."""
    try:
        import meshio
    except ImportError as error:
        raise ImportError("reading mesh files needs meshio: pip install ceedtap[mesh]") from error
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise MeshError(f"{name}: no such file")
    said, copy = io.StringIO(), name
    try:
        # meshio prints its reasons and leaves by sys.exit when no reader takes the file.
        with (
            gmsh_file.without_groups(name) as (copy, gmsh),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            data = meshio.read(copy, _file_format(name))
    except (Exception, SystemExit) as error:
        reasons = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
        if not isinstance(error, SystemExit):
            reasons.append(str(error) or type(error).__name__)
        why = " ".join(reasons).replace(copy, name)
        raise MeshError(f"{name}: not a mesh file that meshio can read: {why}") from error
    try:
        groups = FileGroups(data, name, gmsh)
        mesh = _from_meshio(data, groups, orient)
    except MeshError as error:
        raise MeshError(f"{name}: {error}") from error.__cause__
    if groups.lost:
        what = "; ".join(groups.lost)
        warnings.warn(f"{name}: what is not understood as groups of cells or points is left out: {what}", stacklevel=3)
    return mesh


def _file_format(path: str) -> str | None:
    """The format of a file whose ending two formats have in common; None: its ending says it."""
    if os.path.splitext(path)[1].lower() != ".inp":
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        first = next((line.split() for line in file if line.strip() and not line.startswith("#")), [])
    counts = len(first) == 5 and all(word.isdigit() for word in first)  # of nodes, cells and data
    return "avsucd" if counts else "abaqus"


def _from_meshio(data: Any, groups: FileGroups, orient: bool) -> Mesh:
    counts: dict[str, int] = {}
    for block in data.cells:
        if len(block.data):
            counts[block.type] = counts.get(block.type, 0) + len(block.data)
    listing = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    known = {*_CELLS, *_LINES, "vertex"}
    foreign = {name: count for name, count in counts.items() if name not in known}
    if foreign:
        names = ", ".join(f"{count} {name}" for name, count in foreign.items())
        raise MeshError(
            f"cells that are neither quadrilaterals nor hexahedra of first or second order: {names} "
            f"(all cells of the file: {listing})"
        )
    dim = max((_CELLS[name][0] for name in counts if name in _CELLS), default=0)
    if dim == 0:
        raise MeshError(f"no quadrilaterals or hexahedra in it; its cells: {listing}")
    types = [name for name in counts if name in _CELLS and _CELLS[name][0] == dim]
    if len(types) > 1:
        raise MeshError(f"cells of different types cannot be mixed in one mesh: {listing}")
    cell_type = types[0]

    cells: list[IntArray] = []
    tags: list[IntArray] = []
    num_cells = 0
    regions: dict[str, list[IntArray]] = {}
    sets: dict[tuple[str, int], list[IntArray]] = {}
    physical = data.cell_data.get("gmsh:physical", [])
    for index, block in enumerate(data.cells):
        entries = np.asarray(block.data, dtype=np.int64)
        if block.type == cell_type:
            for name, members, _ in groups.of_block(index, dim):
                regions.setdefault(name, []).append(num_cells + members)
            cells.append(entries)
            if len(physical) == len(data.cells):
                tags.append(np.asarray(physical[index]))
            num_cells += len(entries)
            continue
        free = 2 if block.type in _CELLS else 1 if block.type in _LINES else 0
        for name, members, is_reversed in groups.of_block(index, free):
            corners = entries[members, : 2**free]
            sets.setdefault((name, free), []).append(corners[:, ::-1] if is_reversed else corners)
    every = np.concatenate(cells)
    if tags:
        first, which = gmsh_file.distinct_cells(every, np.concatenate(tags))
        every = every[first]
        regions = {name: [which[np.concatenate(parts)]] for name, parts in regions.items()}
    return from_arrays(
        data.points,
        every,
        cell_type,
        [(name, np.concatenate(parts)) for (name, _), parts in sets.items()],
        {name: np.unique(np.concatenate(parts)) for name, parts in regions.items()},
        orient=orient,
        point_sets=groups.of_points(),
        lost=groups.lost,
    )


def _drop_constant(x: FloatArray, dim: int) -> FloatArray:
    """Coordinates in as many columns as the cells have dimensions."""
    if x.shape[1] == dim:
        return x
    if dim == 3:
        raise MeshError("hexahedra need three coordinates, the points have two")
    extent = np.ptp(x, axis=0)
    if extent[2] > 1e-12 * max(extent.max(), float(np.abs(x[:, 2]).max())):
        raise MeshError(
            f"quadrilaterals in space (z from {x[:, 2].min():.6g} to {x[:, 2].max():.6g}): surface meshes are not "
            "supported, a two-dimensional mesh lies in a plane of constant z"
        )
    return np.ascontiguousarray(x[:, :2])


def _lexicographic(x: FloatArray, nodes: IntArray, dim: int) -> tuple[FloatArray, IntArray]:
    """Points and cells in lexicographic order; serendipity cells are completed, which adds points."""
    corner_codes = _CORNERS[dim]
    first = len(corner_codes)
    n = 2 if nodes.shape[1] == first else 3
    strides = n ** np.arange(dim)
    if n == 2:
        out = np.empty_like(nodes)
        out[:, corner_codes @ strides] = nodes
        return x, out
    out = np.full((len(nodes), n**dim), -1, dtype=np.int64)
    out[:, 2 * corner_codes @ strides] = nodes[:, :first]
    out[:, _middle_positions(x, nodes, dim)] = nodes[:, first:]
    missing = np.flatnonzero(out[0] < 0)
    if not missing.size:
        return x, out
    # The serendipity map lies in the full second-order space, so its values at the missing nodes give the same shape.
    known = np.flatnonzero(out[0] >= 0)
    reference = np.asarray(lattice.lexicographic(3, dim) - 1, dtype=np.float64)
    weights = _serendipity(reference[known], reference[missing])
    values = weights @ x[out[:, known]]
    total, numbers = lattice.number_nodes(out[:, 2 * lattice.lexicographic(2, dim) @ strides], 2)
    added = np.full(total, -1, dtype=np.int64)
    new = np.unique(numbers[:, missing])
    added[new] = len(x) + np.arange(len(new))
    out[:, missing] = added[numbers[:, missing]]
    extended = np.concatenate([x, np.empty((len(new), dim))])
    extended[out[:, missing]] = values
    return extended, out


def _middle_positions(x: FloatArray, nodes: IntArray, dim: int) -> IntArray:
    """The lattice position of each second-order node of a cell type, from where these nodes lie.

    Formats agree on the order of corners but not on that of mid-side nodes (those of VTK, gmsh and Exodus differ for
    hexahedra, and readers translate some of them only). The middle of an edge, face or cell is nearer to its own
    middle of the corners than to others on all but absurdly bent cells, so the mean over all cells decides.
    """
    codes = _CORNERS[dim]
    first = len(codes)
    position = lattice.lexicographic(3, dim)
    middles = np.count_nonzero(position == 1, axis=1)
    wanted = np.flatnonzero(middles >= 1)
    if nodes.shape[1] - first < len(wanted):
        wanted = np.flatnonzero(middles == 1)
    weights = np.prod(np.where(codes[None], position[wanted][:, None] / 2, 1 - position[wanted][:, None] / 2), axis=-1)
    corners = x[nodes[:, :first]]
    expected = weights @ corners
    actual = x[nodes[:, first:]]
    size = np.linalg.norm(np.ptp(corners, axis=1), axis=-1)
    size[size == 0] = np.inf  # collapsed cells have no say here; the Jacobian check names them
    distance = np.zeros((actual.shape[1], len(wanted)))
    for slot in range(actual.shape[1]):
        gap = np.linalg.norm(actual[:, slot, None] - expected, axis=-1) / size[:, None]
        distance[slot] = np.mean(gap**2, axis=0)
    best = np.argmin(distance, axis=1)
    if len(np.unique(best)) != len(wanted):
        raise MeshError(
            "the second-order nodes do not lie near the middles of edges, faces and cells in any fixed order: "
            f"nodes {_some(first + np.arange(len(best)))} of the cells are nearest to the middles {best.tolist()}"
        )
    return wanted[best]


def _serendipity(nodes: FloatArray, at: FloatArray) -> FloatArray:
    """Values (len(at), len(nodes)) of the 8- and 20-node serendipity functions; nodes and points on [-1, 1]**dim."""
    dim = nodes.shape[1]
    out = np.empty((len(at), len(nodes)))
    for column, node in enumerate(nodes):
        on_axis = node == 0
        linear = np.prod(np.where(on_axis, 1.0, 1 + at * node), axis=1)
        if on_axis.any():
            out[:, column] = linear * np.prod(np.where(on_axis, 1 - at**2, 1.0), axis=1) / 2 ** (dim - 1)
        else:
            out[:, column] = linear * (at @ node - (dim - 1)) / 2**dim
    return out


def _entity_rows(name: str, entities: npt.ArrayLike, number: IntArray, dim: int) -> tuple[int, IntArray]:
    """Dimension and (n, 2**dimension) corner points of the entities of a set; points that no cell uses are -1."""
    array = plain_array(f"boundary set {name!r}", entities)
    if array.size == 0:
        return dim - 1, np.zeros((0, 2 ** (dim - 1)), dtype=np.int64)
    ids = _integers(array, f"boundary set {name!r}")
    widths = {1: 0, 2: 1, 3: 1} if dim == 2 else {1: 0, 2: 1, 3: 1, 4: 2, 8: 2, 9: 2}
    if ids.ndim != 2 or ids.shape[1] not in widths:
        raise MeshError(f"boundary set {name!r}: expected shape (n, one of {list(widths)}), got {ids.shape}")
    _check_indices(ids, len(number), f"boundary set {name!r}", "points")
    free = widths[ids.shape[1]]
    return free, number[ids[:, : 2**free]]


def _find_entities(corners: IntArray, free: int, wanted: IntArray, left_handed: npt.NDArray[np.bool_]) -> IntArray:
    """(n, 2) rows of (cell, local facet or ridge) of entities by their cyclic corners; -1 where no cell has it.

    Of the cells that share a facet that one is named out of which the facet's normal points, else the first one.
    """
    dim = corners.shape[1].bit_length() - 1
    facets = free == dim - 1
    codes = lattice.facets(dim) if facets else lattice.ridges(dim)
    members = [place for place, code in enumerate(codes) if code.count(lattice.FREE) == free]
    if facets:
        local = lattice.facet_nodes(dim, 2)
    else:
        local = np.stack([lattice.entity_nodes(codes[place], 2, True) for place in members])
    keys, turns = lattice.canonical(corners[:, local])
    num_keys, width = keys.shape[0] * keys.shape[1], keys.shape[2]
    if free == 2:
        wanted = wanted[:, [0, 1, 3, 2]]
    known = np.flatnonzero(np.all(wanted >= 0, axis=1))
    own, own_turns = lattice.canonical(wanted[known])
    count, index = lattice.unique_rows(np.concatenate([keys.reshape(-1, width), own]))
    first, last = np.full(count, -1, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    first[index[:num_keys][::-1]] = np.arange(num_keys)[::-1]
    last[index[:num_keys]] = np.arange(num_keys)
    place = np.full(len(wanted), -1, dtype=np.int64)
    place[known] = first[index[num_keys:]]
    if facets:
        mirrored = (_is_mirrored(turns, free) ^ left_handed[:, None]).ravel()
        inward = (place[known] >= 0) & (mirrored[place[known]] != _is_mirrored(own_turns, free))
        place[known] = np.where(inward, last[index[num_keys:]], place[known])
    found = np.array(members)[place % len(members)]
    return np.where(place[:, None] < 0, -1, np.stack([place // len(members), found], axis=1))


def _is_mirrored(turns: IntArray, free: int) -> npt.NDArray[np.bool_]:
    """Whether an orientation of :func:`lattice.canonical` turns an edge, or a face as seen from one side, over."""
    if free == 1:
        return turns == 1
    return np.isin(turns, [1, 2, 4, 7])  # one direction reversed, or both exchanged, but not both


def _left_handed(x: FloatArray, cells: IntArray, order: int) -> npt.NDArray[np.bool_]:
    """(num_cells,) whether the Jacobian determinant in the middle of a cell is negative."""
    table = gradients(order, x.shape[1], np.zeros(1))
    jacobians = np.concatenate([t @ x[cells] for t in table], axis=1)
    return np.asarray(np.linalg.det(jacobians) < 0)
