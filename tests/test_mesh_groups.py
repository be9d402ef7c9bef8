"""Groups of cells and points in mesh files: real files of gmsh, and the formats that meshio reads."""

import contextlib
import re
import tempfile
import warnings
from pathlib import Path

import jax.numpy as jnp
import meshing
import numpy as np
import pytest

import ceedtap as ct
from ceedtap.mesh import MeshError, box, read

meshio = pytest.importorskip("meshio")

MESHES = Path(__file__).parent / "data" / "meshes"


def area(mesh, name):
    """The vectorial area of a set of facets."""
    X = ct.Space(ct.Ceed("/cpu/self"), mesh, mesh.order).geometry.boundary(name)
    make = ct.operator(inputs={"x": X.grad, "w": X.weight}, outputs={"q": ct.quadrature(mesh.dim)})
    return np.asarray(make(lambda x, w: w * ct.normal(x))(mesh.points).sum((0, 1)))


def middles(mesh, cells):
    return mesh.points[mesh.corners[cells]].mean(axis=1)


def elements_of_version_2(path):
    """Groups of elements by (dimension of gmsh's type, number of the group), and points: of a file in text."""
    lines = path.read_text().splitlines()
    at = lines.index("$Nodes") + 1
    points = {int(n): list(map(float, rest)) for n, *rest in map(str.split, lines[at + 1 : at + 1 + int(lines[at])])}
    at = lines.index("$Elements") + 1
    groups = {}
    for line in lines[at + 1 : at + 1 + int(lines[at])]:
        _, kind, tags, *numbers = map(int, line.split())
        dim = {15: 0, 1: 1, 3: 2, 5: 3}[kind]
        groups.setdefault((dim, numbers[0]), []).append([points[n] for n in numbers[tags:]])
    return {key: np.array(value) for key, value in groups.items()}


# -- files of gmsh -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["plate", "plate_all", "plate_all_binary", "plate_22", "plate_order2"])
def test_plates_of_gmsh(file):
    """Two groups of an entity, a group without a name, a reversed one, entities in none: whatever the version is."""
    mesh = read(MESHES / f"{file}.msh")
    assert mesh.order == (2 if file == "plate_order2" else 1)
    sizes = {"walls": 4, "7": 2, "crack": 2, "crack reversed": 2, "all": 12}
    assert {name: len(rows) for name, rows in mesh.boundary.items()} == sizes
    assert {name: len(ids) for name, ids in mesh.regions.items()} == {"left half": 4, "all of it": 8, "3": 4}
    assert np.all(middles(mesh, mesh.regions["left half"])[:, 0] < 1)
    assert np.all(middles(mesh, mesh.regions["3"])[:, 0] > 1)
    pin = ct.Space(ct.Ceed("/cpu/self"), mesh, 2)
    np.testing.assert_allclose(pin.nodes[pin.boundary_nodes("pin")], [[2, 1]])
    np.testing.assert_allclose(area(mesh, "7"), [0, -1], atol=1e-12)
    np.testing.assert_allclose(area(mesh, "walls"), [-1, -1], atol=1e-12)
    # The line goes upwards, its normal is to the right.
    np.testing.assert_allclose(area(mesh, "crack"), [1, 0], atol=1e-12)
    np.testing.assert_allclose(area(mesh, "crack reversed"), [-1, 0], atol=1e-12)


def right_hand_rule(facets):
    return np.cross(facets[:, 1] - facets[:, 0], facets[:, 2] - facets[:, 1]).sum(axis=0)


@pytest.mark.parametrize("file", ["block", "block_all_binary", "block_22"])
def test_blocks_of_gmsh(file):
    mesh = read(MESHES / f"{file}.msh")
    sizes = {"walls": 8, "crack": 4, "crack reversed": 4, "all": 40}
    assert {name: len(rows) for name, rows in mesh.boundary.items()} == sizes
    assert {name: len(ids) for name, ids in mesh.regions.items()} == {"right half": 8, "all of it": 16}
    assert np.all(middles(mesh, mesh.regions["right half"])[:, 0] > 1)
    known = elements_of_version_2(MESHES / "block_22.msh")
    np.testing.assert_allclose(area(mesh, "crack"), right_hand_rule(known[2, 3]), atol=1e-9)
    np.testing.assert_allclose(area(mesh, "crack reversed"), right_hand_rule(known[2, 4]), atol=1e-9)
    assert abs(area(mesh, "crack")[0]) == pytest.approx(1)


def test_what_the_sections_of_groups_hold_does_not_depend_on_line_ends_and_spaces(tmp_path):
    text = (MESHES / "plate_all.msh").read_text()
    (tmp_path / "a.msh").write_bytes(text.replace("\n", "\r\n").encode())
    (tmp_path / "b.msh").write_text(
        "\n" + text.replace("left half", '  größte " Hälfte ').replace("$Entities", "$Entities ")
    )
    assert len(read(tmp_path / "a.msh").boundary["crack"]) == 2
    assert len(read(tmp_path / "b.msh").regions['  größte " Hälfte ']) == 4


@pytest.mark.parametrize("file", ["plate_all.msh", "plate_all_binary.msh"])
def test_damaged_files_of_gmsh_are_errors(file, tmp_path, monkeypatch):
    """Cut anywhere, or with a byte of the groups changed: an error that names the file, and no file is left over."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    data = (MESHES / file).read_bytes()
    path = tmp_path / "cut.msh"
    rng = np.random.default_rng(0)
    for cut in range(20, len(data) - 20, 61):
        path.write_bytes(data[:cut])
        with pytest.raises(MeshError, match=r"cut\.msh"):
            read(path)
    for _ in range(60):
        changed = bytearray(data)
        begin, end = data.index(b"$Entities"), data.index(b"$EndEntities")
        changed[rng.integers(begin, end)] = rng.integers(256)
        path.write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(MeshError):  # and nothing else
                read(path)
    assert not list((tmp_path / "temporary").iterdir())


def test_the_same_cell_twice_in_one_group_is_an_error(tmp_path):
    lines = (MESHES / "plate_22.msh").read_text().splitlines()
    at = lines.index("$Elements") + 1
    quads = [line for line in lines if line.split()[1:2] == ["3"] and len(line.split()) == 9]
    lines[at] = str(int(lines[at]) + 1)
    lines.insert(at + int(lines[at]), quads[0])
    (tmp_path / "twice.msh").write_text("\n".join(lines) + "\n")
    with pytest.raises(MeshError, match=r"twice\.msh: .*more than"):
        read(tmp_path / "twice.msh")


def test_markers_of_su2_have_their_names():
    mesh = read(MESHES / "plate.su2")
    assert set(mesh.boundary) == {"crack", "crack_reversed", "walls", "PhysicalLine7", "all"}
    np.testing.assert_allclose(area(mesh, "crack"), [1, 0], atol=1e-12)
    np.testing.assert_allclose(area(mesh, "walls"), [-1, -1], atol=1e-12)
    assert not mesh.regions


def test_numbers_and_names_of_markers_of_su2(tmp_path):
    text = (MESHES / "plate.su2").read_text().replace("crack_reversed", "12").replace("PhysicalLine7", "  back side")
    (tmp_path / "m.su2").write_text(text)
    assert set(read(tmp_path / "m.su2").boundary) == {"crack", "12", "walls", "back side", "all"}


# -- formats that meshio reads and writes ------------------------------------------------------------------------------


def with_numbers(dim, key, names=False):
    """A mesh with the sides "left" (number 4) and "top" (5), and two materials (1 and 2), for meshio."""
    mesh = meshing.scramble(box(*[2] * dim), 1)
    cell, facet = ("quad", "line") if dim == 2 else ("hexahedron", "quad")
    left, top = (meshing.facet_corners(mesh, mesh.boundary[name]) for name in ("left", "top"))
    cells = [(cell, meshing.file_cells(mesh, meshing.VTK[cell])), (facet, np.concatenate([left, top]))]
    numbers = [np.arange(mesh.num_cells) % 2 + 1, np.repeat([4, 5], [len(left), len(top)])]
    field_data = {"odd": [2, dim], "left": [4, dim - 1], "top": [5, dim - 1]} if names else {}
    return mesh, meshio.Mesh(mesh.points, cells, cell_data={key: numbers}, field_data=field_data)


FORMATS = [
    ("avsucd:material", ".inp", {"file_format": "avsucd"}, False),
    ("nastran:ref", ".bdf", {}, False),
    ("netgen:index", ".vol", {}, True),
    ("medit:ref", ".mesh", {}, False),
    ("avsucd:material", ".avs", {}, False),
    ("gmsh:physical", ".xdmf", {"data_format": "XML"}, False),
    ("gmsh:physical", ".vtu", {}, False),
    ("medit:ref", ".vtk", {}, False),
    ("cell_tags", ".xdmf", {"data_format": "XML"}, False),
    ("netgen:index", ".vtu", {}, False),
]


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize(("key", "suffix", "options", "names"), FORMATS)
def test_numbers_of_groups(key, suffix, options, names, dim, tmp_path, capfd):
    mesh, data = with_numbers(dim, key, names)
    path = tmp_path / f"m{suffix}"
    if suffix in (".bdf", ".inp", ".avs"):
        data.points = np.pad(data.points, [(0, 0), (0, 3 - dim)])
    data.write(path, **options)
    capfd.readouterr()
    again = read(path)
    assert capfd.readouterr() == ("", "")
    left, top = ("left", "top") if names else ("4", "5")
    assert set(again.boundary) == {left, top, "all"}
    for name, own in ((left, "left"), (top, "top")):
        np.testing.assert_allclose(area(again, name), area(mesh, own), atol=1e-12)
    np.testing.assert_array_equal(again.regions["odd" if names else "2"], np.arange(1, mesh.num_cells, 2))
    np.testing.assert_array_equal(again.regions["1"], np.arange(0, mesh.num_cells, 2))


def rows(*arrays):
    """Lines of numbers."""
    return "\n".join(" ".join(map(str, row)) for array in arrays for row in np.asarray(array).tolist())


def test_markers_of_su2_in_three_dimensions(tmp_path):
    mesh, data = with_numbers(3, "x")
    (_, cells), (_, facets) = ((block.type, block.data) for block in data.cells)
    text = f"NDIME= 3\nNELEM= {len(cells)}\n{rows(np.insert(cells, 0, 12, axis=1))}\n"
    text += f"NPOIN= {mesh.num_points}\n{rows(mesh.points)}\nNMARK= 2\n"
    for name, part in (("the left", facets[:4]), ("top", facets[4:])):
        text += f"MARKER_TAG= {name}\nMARKER_ELEMS= 4\n{rows(np.insert(part, 0, 9, axis=1))}\n"
    (tmp_path / "m.su2").write_text(text)
    again = read(tmp_path / "m.su2")
    assert set(again.boundary) == {"the left", "top", "all"}
    for name, own in (("the left", "left"), ("top", "top")):
        np.testing.assert_allclose(area(again, name), area(mesh, own), atol=1e-12)


def test_surfaces_of_ugrid(tmp_path):
    mesh, data = with_numbers(3, "x")
    (_, cells), (_, facets) = ((block.type, block.data) for block in data.cells)
    text = f"{mesh.num_points} 0 {len(facets)} 0 0 0 {len(cells)}\n{rows(mesh.points, facets + 1)}\n"
    text += f"{rows([[4]] * 4, [[5]] * 4, cells + 1)}\n"
    (tmp_path / "m.ugrid").write_text(text)
    again = read(tmp_path / "m.ugrid")
    assert set(again.boundary) == {"4", "5", "all"}
    np.testing.assert_allclose(area(again, "5"), area(mesh, "top"), atol=1e-12)


def test_materials_with_the_number_0_of_avs_are_a_group(tmp_path):
    _, data = with_numbers(2, "avsucd:material")
    data.cell_data["avsucd:material"][0] -= 1
    data.points = np.pad(data.points, [(0, 0), (0, 1)])
    data.write(tmp_path / "m.inp", file_format="avsucd")
    assert {name: len(ids) for name, ids in read(tmp_path / "m.inp").regions.items()} == {"0": 2, "1": 2}


ABAQUS = """*HEADING
*NODE
{nodes}
*ELEMENT, TYPE={type}, ELSET=BODY
{cells}
*ELSET, ELSET=SOME
1, 3
*NSET, NSET=SIDE
{side}
*NSET, NSET=SEAM
{seam}
*NSET, NSET=PIN
{pin}
*NSET, NSET=NOTHING
"""


@pytest.mark.parametrize("cell_type", ["quad", "quad8", "hexahedron", "hexahedron20"])
def test_sets_of_abaqus(cell_type, tmp_path):
    """Sets of nodes are the facets on the boundary, edges and corners all of whose nodes they have."""
    dim, order = (2 if cell_type.startswith("quad") else 3), (1 if cell_type in ("quad", "hexahedron") else 2)
    mesh = meshing.scramble(box(*[2] * dim, order=order), 3)
    cells = meshing.file_cells(mesh, meshing.VTK[cell_type])
    x = mesh.points
    in_file = np.isin(np.arange(len(x)), cells)
    side = np.flatnonzero((np.abs(x[:, 0]) < 1e-12) & in_file)
    seam = np.flatnonzero((np.abs(x[:, 0] - 1) < 1e-12) & (np.abs(x[:, 1] - 1) < 1e-12) & in_file)
    pin = np.flatnonzero(np.abs(x - 0.5).max(axis=1) < 1e-12)  # in the middle of the mesh

    def listed(numbers):
        return "\n".join(f"{n + 1}," for n in numbers)

    three = np.pad(x, [(0, 0), (0, 3 - dim)])
    text = ABAQUS.format(
        nodes="\n".join(f"{n + 1}, {p[0]!r}, {p[1]!r}, {p[2]!r}" for n, p in enumerate(three.tolist())),
        type={"quad": "CPS4", "quad8": "S8R", "hexahedron": "C3D8", "hexahedron20": "C3D20"}[cell_type],
        cells="\n".join(f"{n + 1}, " + ", ".join(map(str, cell + 1)) for n, cell in enumerate(cells)),
        side=listed(side), seam=listed(seam), pin=listed(pin),
    )  # fmt: skip
    (tmp_path / "m.inp").write_text(text)
    again = read(tmp_path / "m.inp")
    np.testing.assert_array_equal(again.regions["SOME"], [0, 2])
    assert len(again.regions["BODY"]) == mesh.num_cells
    np.testing.assert_allclose(area(again, "SIDE"), np.eye(dim)[0] * -1, atol=1e-12)
    assert len(again.ridges["SIDE"]) == 0
    assert len(again.boundary["PIN"]) == len(again.boundary["SEAM"]) == len(again.boundary["NOTHING"]) == 0
    assert len(again.ridges["PIN"]) == 1
    V = ct.Space(ct.Ceed("/cpu/self"), again, 3)
    np.testing.assert_allclose(V.nodes[V.boundary_nodes("PIN")], [[0.5] * dim])
    np.testing.assert_array_equal(V.boundary_nodes("SIDE"), np.flatnonzero(np.abs(V.nodes[:, 0]) < 1e-12))
    on_seam = np.flatnonzero(np.abs(V.nodes[:, :2] - 1).max(axis=1) < 1e-12)
    np.testing.assert_array_equal(V.boundary_nodes("SEAM"), on_seam)
    assert len(on_seam) == (1 if dim == 2 else 7)


def test_groups_of_points_of_med(tmp_path):
    pytest.importorskip("h5py")
    mesh = box(2, 1)
    data = meshio.Mesh(mesh.points, [("quad", meshing.file_cells(mesh, meshing.VTK["quad"]))])
    data.point_data["point_tags"] = np.array([1, 0, 2, 1, 0, 2])
    data.point_tags = {1: ["inlet", "both"], 2: ["outlet", "both"]}
    data.write(tmp_path / "m.med")
    again = read(tmp_path / "m.med")
    for name in ("inlet", "outlet"):
        np.testing.assert_allclose(area(again, name), [-1 if name == "inlet" else 1, 0], atol=1e-12)
    assert len(again.boundary["both"]) == 2


# -- what is not understood --------------------------------------------------------------------------------------------


def test_one_warning_says_what_is_not_understood(tmp_path):
    mesh = box(2, 2)
    data = meshio.Mesh(
        mesh.points,
        [("quad", meshing.file_cells(mesh, meshing.VTK["quad"]))],
        cell_data={"part": [np.array([1, 1, 2, 2])], "stress": [np.ones(4)], "one": [np.ones(4, int)]},
        point_data={"label": np.arange(9), "u": np.linspace(0, 1, 9)},
    )
    data.write(tmp_path / "m.vtu")
    with pytest.warns(UserWarning, match="not understood") as caught:
        again = read(tmp_path / "m.vtu")
    (warning,) = caught
    assert re.fullmatch(
        r".*m\.vtu: what is not understood .*: cell data 'part'; point data 'label'", str(warning.message)
    )
    assert warning.filename == __file__
    assert not again.regions


def test_surfaces_and_lone_middles_of_abaqus_are_told(tmp_path):
    mesh = box(1, 1, order=2)
    cells = meshing.file_cells(mesh, meshing.VTK["quad8"])
    nodes = "\n".join(f"{n + 1}, {a}, {b}, 0.0" for n, (a, b) in enumerate(mesh.points.tolist()))
    text = f"*NODE\n{nodes}\n*ELEMENT, TYPE=S8R\n1, {', '.join(map(str, cells[0] + 1))}\n"
    text += "*NSET, NSET=HALF\n1, 2\n*SURFACE, TYPE=ELEMENT, NAME=Top\nBODY, S3\n*SURFACE, TYPE=NODE, NAME=N\nHALF\n"
    (tmp_path / "m.inp").write_text(text)
    with pytest.warns(UserWarning, match=r"surfaces of elements 'TOP'; 1 points of 'HALF' in the middle of edges"):
        again = read(tmp_path / "m.inp")
    assert len(again.ridges["HALF"]) == 1


@pytest.mark.parametrize("wrong", [[[np.array([0, 9])]], [[["a"]]], [[np.array([[0, 1]])]]])
def test_cell_sets_that_are_none_are_told(wrong, monkeypatch, tmp_path):
    """As those that meshio makes of sets of sets."""
    mesh = box(2, 2)
    data = meshio.Mesh(mesh.points, [("quad", meshing.file_cells(mesh, meshing.VTK["quad"]))])
    data.cell_sets = {"odd": wrong[0], "good": [np.array([1])]}
    (tmp_path / "m.vtu").touch()
    monkeypatch.setattr(meshio, "read", lambda path, file_format: data)
    with pytest.warns(UserWarning, match=r"left out: cell set 'odd'$"):
        again = read(tmp_path / "m.vtu")
    assert {name: ids.tolist() for name, ids in again.regions.items()} == {"good": [1]}


def test_the_two_orientations_of_a_plane_at_every_point():
    mesh = read(MESHES / "block_all_binary.msh")
    X = ct.Space(ct.Ceed("/cpu/self"), mesh, 1).geometry
    for name, sign in (("crack", 1), ("crack reversed", -1)):
        trace = X.boundary(name)
        make = ct.operator(inputs={"i": trace.inside.value, "x": trace.grad}, outputs={"q": ct.quadrature(3)})
        n = make(lambda i, x: ct.normal(x) / jnp.linalg.norm(ct.normal(x)))(mesh.points, mesh.points)
        first = np.asarray(n).reshape(-1, 3)
        np.testing.assert_allclose(first, np.broadcast_to(sign * area(mesh, "crack"), first.shape), atol=1e-9)
