"""Meshes: boxes, arrays, files of several formats, refinement, and the errors of bad ones."""

import concurrent.futures
import copy
import math
import multiprocessing
import pickle
import re
import runpy
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import meshing
import numpy as np
import pytest

from ceedtap import lattice
from ceedtap.mesh import Mesh, MeshError, box, read

meshio = pytest.importorskip("meshio")

DATA = Path(__file__).parent.parent / "examples" / "data"
steady = hypothesis.settings(derandomize=True, deadline=None, max_examples=25)
CELL_TYPES = ["quad", "quad8", "quad9", "hexahedron", "hexahedron20", "hexahedron27"]


def bend(x):
    """A smooth map of the unit square or cube that bends every edge."""
    y = x.copy()
    y[:, 0] += 0.1 * x[:, 1] ** 2
    y[:, 1] += 0.08 * np.sin(2 * x[:, 0]) - (0.05 * x[:, 2] ** 2 if x.shape[1] == 3 else 0)
    if x.shape[1] == 3:
        y[:, 2] += 0.1 * x[:, 0] * x[:, 1]
    return y


def sample(cell_type, seed=0):
    """A scrambled curved mesh whose geometry the cell type can hold exactly."""
    order = 1 if cell_type in ("quad", "hexahedron") else 2
    shape = (3, 2) if cell_type.startswith("quad") else (2, 3, 2)
    mesh = meshing.scramble(box(*shape, order=order, warp=bend), seed)
    if cell_type in ("quad8", "hexahedron20"):
        # Put face and cell middles where the serendipity functions have them: weights -1/4, 1/2 on a face and
        # -1/4, 1/4 in a cell, from the tables of the elements.
        points = mesh.points.copy()
        position = lattice.lexicographic(3, mesh.dim) - 1
        for node in np.flatnonzero(np.count_nonzero(position == 0, axis=1) >= 2):
            free = position[node] == 0
            near = np.all(position[:, ~free] == position[node][~free], axis=1)
            zeros = np.count_nonzero(position[:, free] == 0, axis=1)
            corners, middles = np.flatnonzero(near & (zeros == 0)), np.flatnonzero(near & (zeros == 1))
            weight = 1 / 2 if free.sum() == 2 else 1 / 4
            points[mesh.cells[:, node]] = weight * points[mesh.cells[:, middles]].sum(axis=1) - points[
                mesh.cells[:, corners]
            ].sum(axis=1) * (1 / 4)
        mesh = Mesh(points, mesh.cells, mesh.order, mesh.boundary, mesh.regions)
    return mesh


def facet_centres(mesh, name):
    """Sorted centres of the facets of a boundary set, to compare sets of differently numbered meshes."""
    centres = mesh.points[meshing.facet_corners(mesh, mesh.boundary[name])].mean(axis=1)
    return np.array(sorted(np.round(centres, 10).tolist()))


def meshio_mesh(mesh, cell_type, groups=True, three_columns=True):
    """The mesh as meshio holds it after reading a gmsh file: facets with physical tags and names."""
    points = mesh.points
    if mesh.dim == 2 and three_columns:
        points = np.column_stack([points, np.full(len(points), 0.0)])
    cells = [(cell_type, meshing.file_cells(mesh, meshing.VTK[cell_type]))]
    tags, field_data = [np.full(mesh.num_cells, 1)], {"body": np.array([1, mesh.dim])}
    if groups:
        for tag, (name, rows) in enumerate(mesh.boundary.items(), start=2):
            if name == "all":
                continue
            cells.append(("line" if mesh.dim == 2 else "quad", meshing.facet_corners(mesh, rows)))
            tags.append(np.full(len(rows), tag))
            field_data[name] = np.array([tag, mesh.dim - 1])
    data = {"gmsh:physical": tags, "gmsh:geometrical": tags}
    return meshio.Mesh(points, cells, cell_data=data, field_data=field_data)


# --- boxes


def test_box_numbers_points_and_cells_lexicographically():
    mesh = box(2, 1, 2, lower=(0, 0, -1), upper=(2, 1, 1))
    assert mesh.points.tolist()[:4] == [[0, 0, -1], [1, 0, -1], [2, 0, -1], [0, 1, -1]]
    assert mesh.cells.tolist()[1] == [1, 2, 4, 5, 7, 8, 10, 11]
    assert mesh.cells.tolist()[2] == [6, 7, 9, 10, 12, 13, 15, 16]
    assert mesh.points.dtype == np.float64
    assert mesh.cells.dtype == np.int64


@pytest.mark.parametrize("order", [1, 2])
def test_box_sides_have_their_names(order):
    mesh = box(2, 3, 4, lower=-1, upper=(1, 2, 3), order=order)
    sides = {"left": (0, -1), "right": (0, 1), "front": (1, -1), "back": (1, 2), "bottom": (2, -1), "top": (2, 3)}
    assert set(mesh.boundary) == {*sides, "all"}
    for name, (axis, value) in sides.items():
        assert np.all(mesh.points[meshing.facet_corners(mesh, mesh.boundary[name])][..., axis] == value)
    sizes = {"left": 12, "right": 12, "front": 8, "back": 8, "bottom": 6, "top": 6, "all": 52}
    assert {name: len(rows) for name, rows in mesh.boundary.items()} == sizes
    assert set(box(1, 1, order=order).boundary) == {"left", "right", "bottom", "top", "all"}


@steady
@hypothesis.given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    order=st.sampled_from([1, 2]),
    lengths=st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3),
)
def test_box_has_the_volume_and_counts_of_a_box(counts, order, lengths):
    dim = len(counts)
    mesh = box(*counts, order=order, lower=[-x for x in lengths[:dim]], upper=lengths[:dim])
    assert meshing.volume(mesh) == pytest.approx(math.prod(2 * x for x in lengths[:dim]), rel=1e-12)
    assert mesh.num_cells == math.prod(counts)
    assert mesh.num_points == math.prod(order * n + 1 for n in counts)
    assert len(mesh.boundary_facets) == sum(2 * math.prod(counts) // n for n in counts)
    sides = [tuple(row) for name, rows in mesh.boundary.items() if name != "all" for row in rows.tolist()]
    assert sorted(sides) == [tuple(row) for row in mesh.boundary_facets.tolist()]


def test_second_order_box_follows_its_warp():
    def circle(x):
        radius, angle = 1 + x[:, 0], np.pi / 2 * x[:, 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)

    exact = np.pi / 4 * (2**2 - 1**2)
    errors = [abs(meshing.volume(box(n, n, order=order, warp=circle)) - exact) for order in (1, 2) for n in (4, 8)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.1)
    assert math.log2(errors[2] / errors[3]) == pytest.approx(4, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 1), {}, "nx: expected a positive integer, got 0"),
        ((1, 2.0), {}, "ny: expected a positive integer, got 2.0"),
        ((1, 1, -3), {}, "nz: expected a positive integer, got -3"),
        ((1, True), {}, "ny: expected a positive integer, got True"),
        ((1, 1), {"order": 3}, "order 1 or 2, not 3"),
        ((1, 1), {"lower": (0, 0, 0)}, "lower: expected one number or 2"),
        ((1, 1), {"upper": "high"}, "upper: expected one number or 2"),
        ((1, 1), {"lower": 1, "upper": (2, 1)}, r"lower \[1.0, 1.0\] is not below upper \[2.0, 1.0\]"),
        ((1, 1), {"lower": float("nan")}, "is not below"),
        ((1, 1), {"warp": lambda x: x[:, 0]}, r"warp: expected an array of shape \(4, 2\) from it, got \(4,\)"),
        ((1, 1), {"warp": lambda x: x / 0 if x[0, 0] else x * np.nan}, "not finite at points 0, 1, 2, 3"),
        ((2, 1), {"warp": lambda x: x * [-1, 1]}, "not positive in cell 0: -0.125, cell 1: -0.125 .left-handed"),
        ((2, 2), {"warp": lambda x: x * [1, 0]}, "Jacobian determinant not positive in cell 0: 0, cell 1: 0"),
    ],
)
def test_box_refuses_bad_arguments(arguments, options, message):
    with pytest.raises(MeshError, match=message):
        box(*arguments, **options)


# --- arrays and the constructor


def test_from_arrays_drops_unused_points_and_a_constant_third_coordinate():
    points = [[9, 9, 7], [0, 0, 7], [1, 0, 7], [5, 5, 7], [1, 1, 7], [0, 1, 7]]
    mesh = Mesh.from_arrays(points, [[1, 2, 4, 5]], "quad", {"floor": [[2, 1]], "none": []}, {"part": [0]})
    assert mesh.points.tolist() == [[0, 0], [1, 0], [1, 1], [0, 1]]
    assert mesh.cells.tolist() == [[0, 1, 3, 2]]
    assert mesh.boundary["floor"].tolist() == [[0, 2]]
    assert mesh.boundary["none"].shape == (0, 2)
    assert mesh.regions["part"].tolist() == [0]


def test_mesh_is_immutable_and_keeps_no_alias():
    points, cells = box(1, 1).points.copy(), box(1, 1).cells.copy()
    mesh = Mesh(points, cells, 1)
    points[0] = 5
    assert mesh.points[0].tolist() == [0, 0]
    for array in (mesh.points, mesh.cells, mesh.corners, mesh.boundary["all"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(AttributeError):
        mesh.order = 2
    with pytest.raises(TypeError):
        mesh.boundary["new"] = cells


SQUARE = [[0.0, 0], [1, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0, 1.0], [[0, 1, 2, 3]], 1), r"points: expected shape \(num_points, 2\) or \(num_points, 3\), got \(2,\)"),
        ((SQUARE, [[0, 1, 2, 3]], 3), "order: the geometry is of order 1 or 2, not 3"),
        ((SQUARE, [[0, 1, 2]], 1), r"order 1 in 2 dimensions needs shape \(num_cells >= 1, 4\), got \(1, 3\)"),
        ((SQUARE, np.zeros((0, 4), int), 1), r"got \(0, 4\)"),
        ((SQUARE, [[0.0, 1, 2, 3]], 1), "cells: expected integers, got float64"),
        ((SQUARE, [[0, 1, 2, 4]], 1), r"cells: indices 0..4 are not in 0..3, the range of points"),
        ((SQUARE, [[0, 1, 2, -1]], 1), r"cells: indices -1..2 are not in 0..3"),
        (([*SQUARE, [2, 2]], [[0, 1, 2, 3]], 1), "1 points belong to no cell: 4"),
        (([[0, 0], [1, 0], [0, np.inf], [1, 1]], [[0, 1, 2, 3]], 1), r"not finite at points 2: \[0.0, inf\]"),
        ((SQUARE, [[0, 1, 2, 3]], 1, {"a": [[0, 4]]}), r"boundary set 'a': indices 4..4 are not in 0..3"),
        ((SQUARE, [[0, 1, 2, 3]], 1, {"a": [[1, 0]]}), r"boundary set 'a': indices 1..1 are not in 0..0"),
        ((SQUARE, [[0, 1, 2, 3]], 1, {"a": [[0, 0, 1]]}), r"boundary set 'a': expected 2 columns, got shape \(1, 3\)"),
        ((SQUARE, [[0, 1, 2, 3]], 1, {}, {"r": [1]}), "region 'r': indices 1..1 are not in 0..0, the range of cells"),
    ],
)
def test_constructor_refuses_malformed_arrays(arguments, message):
    with pytest.raises(MeshError, match=message):
        Mesh(*arguments)


CYCLE = [[0.0, 0], [1, 0], [1, 1], [0, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CYCLE, [[0, 1, 2]], "triangle"), "cell_type: expected one of quad, quad8, .*, got 'triangle'"),
        ((["a"], [[0]], "quad"), "points: no array of numbers"),
        (([1.0], [[0, 1, 2, 3]], "quad"), r"points: expected shape .* got \(1,\)"),
        ((CYCLE, [[0, 1, 2]], "quad"), r"cells: quad needs shape \(num_cells >= 1, 4\), got \(1, 3\)"),
        ((CYCLE, [[0, 1, 2, 9]], "quad"), r"cells: indices 0..9 are not in 0..3"),
        ((CYCLE, [list(range(8))] * 2, "hexahedron"), r"indices 0..7 are not in 0..3"),
        (([*CYCLE, *CYCLE], [list(range(8))], "hexahedron"), "hexahedra need three coordinates"),
        (
            ([[0, 0, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]], [[0, 1, 2, 3]], "quad"),
            "in space .z from 0 to 1.: surface meshes",
        ),
        (
            ([*CYCLE, [3, 3]], [[0, 1, 2, 3]], "quad", {"a": [[0, 1], [0, 2]]}),
            "boundary set 'a': facets 1 belong to no cell",
        ),
        (([*CYCLE, [3, 3]], [[0, 1, 2, 3]], "quad", {"a": [[0, 4]]}), "boundary set 'a': facets 0 belong to no cell"),
        ((CYCLE, [[0, 1, 2, 3]], "quad", {"a": [[0, 1, 2, 3]]}), r"'a': expected shape .*got \(1, 4\)"),
        ((CYCLE, [[0, 1, 2, 3]], "quad", {"a": [[0, 7]]}), r"boundary set 'a': indices 0..7 are not in 0..3"),
        (([[0, 0], [1, 0], [np.nan, 1], [0, 1], [np.nan, 0]], [[0, 1, 2, 3]], "quad"), "not finite at points 2:"),
        ((CYCLE, [[0, 3, 2, 1]], "quad"), "cell 0: -0.25"),
        ((CYCLE, [[0, 1, 2, 2]], "quad"), "Jacobian determinant not positive in cell 0: 0"),
        ((CYCLE, [[0, 1, 3, 2]], "quad"), "cell 0: -"),
        ((CYCLE, [[0, 1, 2, 3], [0, 1, 2, 3]], "quad"), "the same cell is there more than once: cells 0, 1"),
    ],
)
def test_from_arrays_refuses_bad_meshes(arguments, message):
    with pytest.raises(MeshError, match=message):
        Mesh.from_arrays(*arguments)


def test_error_names_points_in_the_callers_numbers():
    points = [[9, 9], [0, 0], [1, 0], [np.nan, 1], [0, 1]]
    with pytest.raises(MeshError, match="not finite at points 3:"):
        Mesh.from_arrays(points, [[1, 2, 3, 4]], "quad")


def test_error_names_the_inverted_cells_only():
    mesh = box(3, 3, 3)
    points = mesh.points.copy()
    centre = np.flatnonzero(np.all(np.isclose(points, [1 / 3, 1 / 3, 1 / 3]), axis=1))
    points[centre] = [0.9, 0.9, 0.9]
    broken = Mesh(points, mesh.cells, 1)
    with pytest.raises(MeshError, match=r"Jacobian determinant not positive in cell \d+: -") as caught:
        broken.check()
    assert "inverted or collapsed" in str(caught.value)
    sharing = set(np.flatnonzero(np.any(mesh.cells == centre, axis=1)).tolist())
    named = {int(number) for number in re.findall(r"cell (\d+):", str(caught.value))}
    assert named
    assert named <= sharing


def test_inversion_by_a_second_order_node_alone_is_found():
    mesh = box(2, 1, order=2)
    points = mesh.points.copy()
    middle = np.flatnonzero(np.all(points == [0.25, 0.0], axis=1))
    points[middle] = [0.49, 0.0]  # beyond the quarter of the edge the quadratic map folds over at the corner
    with pytest.raises(MeshError, match="cell 0: -"):
        Mesh(points, mesh.cells, 2).check()


def test_flat_cells_of_boundary_layers_are_accepted():
    assert box(2, 2, 2, upper=(1, 1, 1e-8)).num_cells == 8
    sheared = box(2, 2, warp=lambda x: np.stack([x[:, 0] + 100 * x[:, 1], 1e-3 * x[:, 1]], axis=1))
    assert meshing.volume(sheared) == pytest.approx(1e-3)


def test_facets_of_three_cells_are_refused():
    points = [[0, 0], [1, 0], [1, 1], [0, 1], [0.5, -1], [1.5, -1], [2, -1], [3, -1]]
    cells = [[0, 1, 2, 3], [4, 5, 1, 0], [6, 7, 1, 0]]
    with pytest.raises(MeshError, match="a facet belongs to more than two cells: 0, 1, 2 are involved"):
        Mesh.from_arrays(points, cells, "quad")


def test_neighbours_with_different_second_order_nodes_are_refused():
    mesh = box(2, 1, order=2)
    shared = int(mesh.cells[0, 5])
    points = np.concatenate([mesh.points, mesh.points[[shared]]])
    cells = mesh.cells.copy()
    cells[1, 3] = mesh.num_points
    with pytest.raises(MeshError, match=r"neighbours disagree on the second-order nodes they share: cells [01]"):
        Mesh(points, cells, 2).check()


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2)])
def test_reflected_cells_are_refused_and_reoriented_on_request(shape, order):
    plain = box(*shape, order=order, warp=bend)
    mesh = meshing.scramble(plain, seed=6, reflect=True)
    left = np.flatnonzero(mesh._determinants[1] < 0)
    assert 0 < len(left) < mesh.num_cells
    with pytest.raises(MeshError, match=rf"cell {left[0]}: -.*Mesh.reoriented"):
        mesh.check()
    turned = mesh.reoriented()
    assert meshing.volume(turned) == pytest.approx(meshing.volume(plain), rel=1e-13)
    untouched = np.setdiff1d(np.arange(mesh.num_cells), left)
    np.testing.assert_array_equal(turned.cells[untouched], mesh.cells[untouched])
    for name in plain.boundary:
        np.testing.assert_allclose(facet_centres(turned, name), facet_centres(plain, name), atol=1e-9)
    np.testing.assert_array_equal(turned.reoriented().cells, turned.cells)


def test_orient_turns_a_file_seen_from_below():
    points = [[0, 0], [0, 1], [1, 1], [1, 0]]
    with pytest.raises(MeshError, match="orient=True"):
        Mesh.from_arrays(points, [[0, 1, 2, 3]], "quad")
    mesh = Mesh.from_arrays(points, [[0, 1, 2, 3]], "quad", {"left": [[0, 1]]}, orient=True)
    assert meshing.volume(mesh) == pytest.approx(1)
    np.testing.assert_array_equal(facet_centres(mesh, "left"), [[0, 0.5]])


def test_facets_selects_sets():
    mesh = box(2, 2)
    assert len(mesh.facets()) == 8
    assert len(mesh.facets(["left", "top"])) == 4
    with pytest.raises(KeyError, match="no boundary set 'lid'; it has"):
        mesh.facets("lid")


def test_a_set_called_all_of_the_caller_is_kept():
    mesh = Mesh.from_arrays(CYCLE, [[0, 1, 2, 3]], "quad", {"all": [[0, 1]]})
    assert len(mesh.boundary["all"]) == 1
    assert len(mesh.boundary_facets) == len(mesh.facets()) == 4


# --- refinement


@pytest.mark.parametrize("cell_type", CELL_TYPES)
def test_refinement_keeps_geometry_sets_and_regions(cell_type):
    mesh = sample(cell_type, seed=7)
    mesh = Mesh(mesh.points, mesh.cells, mesh.order, mesh.boundary, {"some": [1, 2]})
    fine = mesh.refine().check()
    assert fine.num_cells == 2**mesh.dim * mesh.num_cells
    assert meshing.volume(fine) == pytest.approx(meshing.volume(mesh), rel=1e-13)
    for name, rows in mesh.boundary.items():
        assert len(fine.boundary[name]) == 2 ** (mesh.dim - 1) * len(rows)
    topological = {tuple(row) for row in fine.boundary_facets.tolist()}
    assert {tuple(row) for row in fine.boundary["all"].tolist()} == topological
    np.testing.assert_array_equal(fine.regions["some"], np.arange(2**mesh.dim, 3 * 2**mesh.dim))
    # Child k of a cell is its part k: the child's centre is the parent's map at the quarter points.
    x = np.array([-0.5, 0.5])
    np.testing.assert_allclose(
        fine.map(np.zeros(1)).reshape(mesh.num_cells, 2**mesh.dim, mesh.dim), mesh.map(x), atol=1e-13
    )


def test_refined_box_is_the_finer_box():
    fine, direct = box(2, 1, 2).refine(), box(4, 2, 4)
    assert fine.num_points == direct.num_points
    for name in direct.boundary:
        np.testing.assert_allclose(facet_centres(fine, name), facet_centres(direct, name), atol=1e-12)


# --- node orders of files


@pytest.mark.parametrize("cell_type", CELL_TYPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_node_order_of_every_cell_type(cell_type, seed):
    mesh = sample(cell_type, seed)
    points = mesh.points
    again = Mesh.from_arrays(points, meshing.file_cells(mesh, meshing.VTK[cell_type]), cell_type)
    # Compare places, not numbers: unused points go and serendipity cells get new points.
    np.testing.assert_allclose(again.points[again.cells], mesh.points[mesh.cells], atol=1e-14)
    assert again.num_points == mesh.num_points


@pytest.mark.parametrize("cell_type", CELL_TYPES[3:])
def test_second_order_nodes_are_at_the_middles_of_affine_cells(cell_type):
    shear = np.array([[1, 0.3, 0.1], [0, 1.2, -0.2], [0.1, 0, 0.9]])
    mesh = box(2, 2, 2, order=1 if cell_type == "hexahedron" else 2, warp=lambda x: x @ shear)
    again = Mesh.from_arrays(mesh.points, meshing.file_cells(mesh, meshing.VTK[cell_type]), cell_type)
    steps = (lattice.lexicographic(again.order + 1, 3) / again.order) @ (shear / 2)
    local = again.points[again.cells]
    np.testing.assert_allclose(local - local[:, :1], np.broadcast_to(steps, local.shape), atol=1e-14)


@pytest.mark.parametrize("cell_type", ["quad8", "quad9", "hexahedron20", "hexahedron27"])
def test_other_orders_of_second_order_nodes_are_recognised(cell_type):
    mesh = sample(cell_type, seed=3)
    corners = 4 if mesh.dim == 2 else 8
    order = meshing.VTK[cell_type]
    rng = np.random.default_rng(3)
    for _ in range(3):
        other = [*order[:corners], *(order[corners + i] for i in rng.permutation(len(order) - corners))]
        again = Mesh.from_arrays(mesh.points, meshing.file_cells(mesh, other), cell_type)
        np.testing.assert_allclose(again.points[again.cells], mesh.points[mesh.cells], atol=1e-14)


def test_gmshs_own_order_of_27_nodes():
    mesh = sample("hexahedron27")
    again = Mesh.from_arrays(mesh.points, meshing.file_cells(mesh, meshing.GMSH27), "hexahedron27")
    np.testing.assert_allclose(again.points[again.cells], mesh.points[mesh.cells], atol=1e-14)


def test_second_order_nodes_without_an_order_are_an_error():
    mesh = box(2, 2, order=2)
    cells = meshing.file_cells(mesh, meshing.VTK["quad9"]).copy()
    cells[:, 5] = cells[:, 4]
    with pytest.raises(MeshError, match="second-order nodes do not lie near the middles"):
        Mesh.from_arrays(mesh.points, cells, "quad9")


# --- files

FORMATS = [
    (suffix, options, cell_type)
    for suffix, options, types in [
        (".msh", {"file_format": "gmsh"}, CELL_TYPES),
        (".msh", {"file_format": "gmsh", "binary": False}, CELL_TYPES),
        (".msh", {"file_format": "gmsh22"}, CELL_TYPES),
        (".vtu", {}, CELL_TYPES),
        (".vtk", {}, CELL_TYPES),
        (".mesh", {}, ["quad", "hexahedron"]),
        (".inp", {}, ["quad", "hexahedron", "hexahedron20"]),
        (".xdmf", {"data_format": "XML"}, CELL_TYPES),
    ]
    for cell_type in types
]


@pytest.mark.parametrize(("suffix", "options", "cell_type"), FORMATS)
def test_written_files_are_read_back(tmp_path, suffix, options, cell_type):
    mesh = sample(cell_type, seed=5)
    if suffix == ".xdmf":
        pytest.importorskip("h5py")
    grouped = suffix == ".vtu" or options.get("file_format") == "gmsh22"  # meshio's writer of 4.1 leaves groups out
    data = meshio_mesh(mesh, cell_type, groups=grouped)
    if not grouped or suffix == ".vtu":
        data.field_data = {}
    if not grouped:
        data.cell_data = {}
    path = tmp_path / f"part{suffix}"
    data.write(path, **options)
    again = read(path)
    np.testing.assert_allclose(again.points[again.cells], mesh.points[mesh.cells], atol=1e-12)
    assert again.order == mesh.order
    if grouped and suffix == ".msh":
        assert set(again.boundary) == set(mesh.boundary)
        for name in mesh.boundary:
            np.testing.assert_allclose(facet_centres(again, name), facet_centres(mesh, name), atol=1e-9)
        np.testing.assert_array_equal(again.regions["body"], np.arange(mesh.num_cells))
    elif grouped:  # keeps the numbers of groups, not their names
        names = {str(tag): name for tag, name in enumerate(mesh.boundary, start=2) if name != "all"}
        assert set(again.boundary) == {*names, "all"}
        for tag, name in names.items():
            np.testing.assert_allclose(facet_centres(again, tag), facet_centres(mesh, name), atol=1e-9)


def test_named_cell_sets_become_boundary_sets_and_regions(tmp_path):
    mesh = box(2, 1)
    lines = meshing.facet_corners(mesh, mesh.boundary["left"])
    data = meshio.Mesh(
        mesh.points,
        [("line", lines), ("quad", meshing.file_cells(mesh, meshing.VTK["quad"]))],
        cell_sets={"inflow": [np.array([0]), np.array([], int)], "half": [np.array([], int), np.array([1])]},
    )
    from ceedtap.mesh_groups import FileGroups
    from ceedtap.mesh_io import _from_meshio

    again = _from_meshio(data, FileGroups(data, "", None), False)
    np.testing.assert_array_equal(facet_centres(again, "inflow"), facet_centres(mesh, "left"))
    assert again.regions["half"].tolist() == [1]
    assert set(again.boundary) == {"inflow", "all"}


def test_groups_of_points_and_lines_become_ridges(tmp_path):
    mesh = box(1, 1, 2)
    data = meshio.Mesh(
        mesh.points,
        [
            ("vertex", [[0], [11]]),
            ("line", [[0, 4], [4, 8]]),
            ("quad", [[0, 1, 3, 2]]),
            ("hexahedron", meshing.file_cells(mesh, meshing.VTK["hexahedron"])),
        ],
        cell_data={"gmsh:physical": [np.array([0, 5]), np.array([5, 6]), np.array([5]), np.array([5, 5])]},
        field_data={"corner": np.array([5, 0]), "seam": np.array([6, 1]), "floor": np.array([5, 2])},
    )
    data.cell_data["gmsh:geometrical"] = data.cell_data["gmsh:physical"]
    data.write(tmp_path / "m.msh", file_format="gmsh22")
    again = read(tmp_path / "m.msh")
    # Tag 5 of the lines and of the cells has no name; group 0 is no group.
    assert {name: len(rows) for name, rows in again.ridges.items()} == {"corner": 1, "5": 1, "seam": 1}
    assert {name: len(rows) for name, rows in again.boundary.items()} == {"floor": 1, "all": 10}
    assert again.regions["5"].tolist() == [0, 1]
    ((cell, corner),) = again.ridges["corner"] - [0, 12]
    assert again.points[again.corners[cell, corner]].tolist() == [1, 1, 1]


def test_several_blocks_of_a_type_are_one_mesh(tmp_path):
    mesh = box(2, 2, order=2)
    cells = meshing.file_cells(mesh, meshing.VTK["quad9"])
    meshio.Mesh(mesh.points, [("quad9", cells[:1]), ("vertex", [[0]]), ("quad9", cells[1:])]).write(tmp_path / "m.vtu")
    np.testing.assert_array_equal(read(tmp_path / "m.vtu").cells, mesh.cells)


def write(path, points, cells):
    meshio.Mesh(np.asarray(points, dtype=float), cells).write(path)
    return path


CUBE = box(1, 1, 1).points
HEX = meshing.file_cells(box(1, 1, 1), meshing.VTK["hexahedron"])


@pytest.mark.parametrize(
    ("points", "cells", "message"),
    [
        (
            CUBE,
            [("tetra", [[0, 1, 2, 4], [1, 2, 3, 7]])],
            r"neither quadrilaterals nor hexahedra .*: 2 tetra \(all cells",
        ),
        (
            CUBE,
            [("hexahedron", HEX), ("tetra", [[0, 1, 2, 4]])],
            r": 1 tetra \(all cells of the file: 1 hexahedron, 1 tetra",
        ),
        (
            CUBE,
            [("hexahedron", HEX), ("wedge", [[0, 1, 2, 4, 5, 6]] * 3), ("pyramid", [[0, 1, 2, 3, 4]])],
            "3 wedge, 1 pyramid",
        ),
        (CUBE, [("hexahedron", HEX), ("triangle", [[0, 1, 2]])], "1 triangle"),
        (CUBE, [("line", [[0, 1]])], "no quadrilaterals or hexahedra in it; its cells: 1 line"),
        (CUBE * [1, 1, 0], [("quad", [[0, 1, 3, 2]]), ("triangle6", [[0, 1, 2, 3, 4, 5]])], "1 triangle6"),
        (CUBE, [("quad", [[0, 1, 7, 6]])], "surface meshes are not supported"),
        (
            CUBE,
            [("hexahedron", HEX), ("hexahedron20", [[*HEX[0], *HEX[0], 0, 1, 2, 3]])],
            "cannot be mixed in one mesh",
        ),
        (np.where(CUBE == 1, [1, 1, np.nan], CUBE), [("hexahedron", HEX)], "not finite at points 4, 5, 6, 7"),
        (CUBE * [1, 1, -1], [("hexahedron", HEX)], "cell 0: -0.125"),
    ],
)
def test_unusable_files_are_errors_that_say_why(tmp_path, points, cells, message):
    path = write(tmp_path / "bad.vtk", points, cells)
    with pytest.raises(MeshError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_stray_facets_are_an_error(tmp_path):
    data = meshio_mesh(box(2, 1), "quad")
    data.cells[1].data[0] = [0, 4]
    data.write(tmp_path / "stray.msh", file_format="gmsh22")
    with pytest.raises(MeshError, match="boundary set 'left': facets 0 belong to no cell"):
        read(tmp_path / "stray.msh")


def test_what_is_no_mesh_file_is_an_error_and_nothing_is_printed(tmp_path, capfd):
    (tmp_path / "text.msh").write_text("this is no mesh\n")
    (tmp_path / "text.vtu").write_text("<html></html>")
    (tmp_path / "binary.vtk").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "cut.msh").write_bytes((DATA / "pipe_elbow.msh").read_bytes()[:20000])
    (tmp_path / "empty.msh").touch()
    (tmp_path / "notes.txt").write_text("x")
    for name in ("text.msh", "text.vtu", "binary.vtk", "cut.msh", "empty.msh", "notes.txt"):
        with pytest.raises(MeshError, match=name):
            read(tmp_path / name)
    with pytest.raises(MeshError, match=r"gone.msh: no such file"):
        read(tmp_path / "gone.msh")
    with pytest.raises(MeshError, match="no such file"):
        read(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_absent_meshio_is_an_error_that_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "meshio", None)
    with pytest.raises(ImportError, match=r"pip install ceedtap\[mesh\]"):
        read(DATA / "pipe_elbow.msh")


# --- the shipped files


@pytest.fixture(scope="module")
def elbow_script():
    return runpy.run_path(str(DATA / "make_pipe_elbow.py"))


@pytest.fixture(scope="module")
def plate_script():
    return runpy.run_path(str(DATA / "make_plate_with_hole.py"))


# A parabola through both ends and the middle of a circular arc of angle t cuts off 2/3 chord * sagitta, the arc
# (t - sin t) / 2 * radius**2: the sector loses t**4 / 480 of its area, to leading order. This predicts the volume
# error of each mesh to a few per cent.


def elbow_error(mesh):
    """Leading term of the relative volume error of an elbow, of the order h**4, from its numbers of cells."""
    layers = len(mesh.regions["elbow"]) // len(mesh.boundary["inlet"])
    arcs = {name: 2 * math.pi * layers / len(mesh.boundary[name]) for name in ("outer wall", "inner wall")}
    section = (0.6**2 * arcs["inner wall"] ** 4 - 1.0**2 * arcs["outer wall"] ** 4) / (1.0**2 - 0.6**2)
    return (section - (math.pi / 2 / layers) ** 4) / 480


def plate_error(mesh):
    """The same of the area of a plate."""
    arc = math.pi / 2 / len(mesh.boundary["hole"])
    return math.pi / 4 * 0.5**2 * arc**4 / 480 / (2.0**2 - math.pi / 4 * 0.5**2)


def test_pipe_elbow_has_its_groups_and_nearly_the_volume_of_pappus(elbow_script):
    mesh = read(DATA / "pipe_elbow.msh")
    assert (mesh.dim, mesh.order) == (3, 2)
    assert set(mesh.boundary) == {"inlet", "outlet", "outer wall", "inner wall", "all"}
    assert len(mesh.regions["elbow"]) == mesh.num_cells
    parts = [tuple(row) for name, rows in mesh.boundary.items() if name != "all" for row in rows.tolist()]
    assert sorted(parts) == [tuple(row) for row in mesh.boundary_facets.tolist()]
    exact = math.pi / 2 * 2.5 * math.pi * (1.0**2 - 0.6**2)
    assert exact == pytest.approx(elbow_script["VOLUME"], rel=1e-15)
    assert meshing.volume(mesh) / exact - 1 == pytest.approx(elbow_error(mesh), rel=0.05)
    ends = meshing.facet_corners(mesh, mesh.boundary["inlet"])
    assert np.abs(mesh.points[ends][..., 1]).max() < 1e-9
    wall = mesh.points[meshing.facet_corners(mesh, mesh.boundary["outer wall"])].reshape(-1, 3)
    distance = np.hypot(np.hypot(wall[:, 0], wall[:, 1]) - elbow_script["BEND"], wall[:, 2])
    np.testing.assert_allclose(distance, elbow_script["OUTER"], atol=1e-6)
    assert (DATA / "pipe_elbow.msh").stat().st_size < 2**20


def test_plate_with_hole_has_its_groups_and_nearly_the_exact_area(plate_script):
    mesh = read(DATA / "plate_with_hole.msh")
    assert set(mesh.boundary) == {"hole", "left", "right", "bottom", "top", "all"}
    assert plate_script["AREA"] == pytest.approx(2.0**2 - math.pi / 4 * 0.5**2, rel=1e-15)
    assert meshing.volume(mesh) / plate_script["AREA"] - 1 == pytest.approx(plate_error(mesh), rel=0.05)
    rim = mesh.points[meshing.facet_corners(mesh, mesh.boundary["hole"])].reshape(-1, 2)
    np.testing.assert_allclose(np.hypot(*rim.T), plate_script["HOLE"], atol=1e-9)


def test_meshes_of_the_scripts_converge_to_the_exact_volumes_with_fourth_order(tmp_path, elbow_script, plate_script):
    pytest.importorskip("gmsh")
    for size, layers in ((0.4, 5), (0.2, 10), (0.1, 20)):
        elbow_script["make"](tmp_path / "elbow.msh", size, layers)
        mesh = read(tmp_path / "elbow.msh")
        error = meshing.volume(mesh) / elbow_script["VOLUME"] - 1
        # The error is a difference of parts of up to (pi / 2 / layers)**4 / 480, which are predicted to some per cent.
        assert error == pytest.approx(elbow_error(mesh), abs=0.1 * (math.pi / 2 / layers) ** 4 / 480)
    for size in (0.4, 0.2, 0.1):
        plate_script["make"](tmp_path / "plate.msh", size)
        mesh = read(tmp_path / "plate.msh")
        assert meshing.volume(mesh) / plate_script["AREA"] - 1 == pytest.approx(plate_error(mesh), rel=0.05)


def test_repr_says_what_there_is():
    assert repr(box(2, 1)) == (
        "Mesh(dim=2, order=1, num_cells=2, num_points=6, "
        "boundary={'left': 1, 'right': 1, 'bottom': 2, 'top': 2, 'all': 6})"
    )
    assert "regions={'elbow': 400}" in repr(read(DATA / "pipe_elbow.msh"))


# --- copies


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh))}


@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
def test_copies_are_the_same_mesh(how):
    shipped = read(DATA / "pipe_elbow.msh")
    named = Mesh(shipped.points, shipped.cells, 2, shipped.boundary, shipped.regions, {"pin": [[0, 13]]})
    for mesh in (box(2, 2), named, meshing.scramble(named, 2).refine()):
        mesh.check()
        copied = how(mesh)
        assert copied == mesh
        assert hash(copied) == hash(mesh)
        assert len({mesh, copied}) == 1
        for name in ("points", "cells", "corners", "facet_numbers"):
            np.testing.assert_array_equal(getattr(copied, name), getattr(mesh, name))
        assert [dict(sets).keys() for sets in copied._sets()] == [dict(sets).keys() for sets in mesh._sets()]
        with pytest.raises(ValueError, match="read-only"):
            copied.points[0] = 1
        with pytest.raises(TypeError):
            copied.boundary["new"] = copied.cells
        copied.check()


def test_meshes_differ_in_every_part():
    mesh = Mesh(box(2, 1).points, box(2, 1).cells, 1, {"a": [[0, 0]]}, {"r": [1]}, {"p": [[0, 0]]})
    moved, turned = mesh.points.copy(), mesh.cells.copy()
    moved[0] += 1e-16
    moved[1] += 1e-15
    turned[[0, 1]] = turned[[1, 0]]
    sets = mesh.boundary, mesh.regions, mesh.ridges
    others = [
        Mesh(moved, mesh.cells, 1, *sets),
        Mesh(mesh.points, turned, 1, *sets),
        Mesh(mesh.points, mesh.cells, 1, {"a": [[0, 1]]}, *sets[1:]),
        Mesh(mesh.points, mesh.cells, 1, {"b": [[0, 0]]}, *sets[1:]),
        Mesh(mesh.points, mesh.cells, 1, sets[0], {"r": [0]}, sets[2]),
        Mesh(mesh.points, mesh.cells, 1, *sets[:2]),
        box(2, 1),
        box(1, 1),
        box(1, 1, order=2),
        box(1, 1, 1),
        "mesh",
    ]
    assert all(mesh != other for other in others)
    assert mesh == Mesh(mesh.points, mesh.cells, 1, *sets)


def test_spaces_on_equal_meshes_go_together():
    """As one made of the same file, or of what another process sent."""
    import ceedtap as ct

    ceed, mesh = ct.Ceed("/cpu/self"), read(DATA / "plate_with_hole.msh")
    V, X = ct.Space(ceed, mesh, 2), ct.Space(ceed, pickle.loads(pickle.dumps(mesh)), 2).geometry
    inputs = {"u": V.value, "x": X.grad, "w": V.weight}
    mass = ct.operator(inputs=inputs, outputs={"v": V.value})(
        lambda u, x, w: w * u * (x[0, 0] * x[1, 1] - x[0, 1] * x[1, 0])
    )
    assert mass(np.ones(V.shape), mesh.points).sum() == pytest.approx(meshing.volume(mesh), rel=1e-13)
    other = ct.Space(ceed, mesh.refine(), 2)
    with pytest.raises(ValueError, match="share one mesh"):
        ct.operator(inputs={"u": V.value, "x": other.value}, outputs={"v": V.value})(lambda u, x: u * x)


def test_a_spawned_process_gets_the_mesh():
    mesh = meshing.scramble(box(2, 3, order=2, warp=bend), 1)
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(Mesh.refine, mesh).result(120) == mesh.refine()
