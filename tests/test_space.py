"""Continuous spaces: numbering across entities of any orientation, reference values, convergence rates."""

import json
import math
import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import meshing
import numpy as np
import pytest
import scipy.sparse.linalg

from ceedtap import ceed as cc
from ceedtap import lattice
from ceedtap.mesh import Mesh, MeshError, box, read
from ceedtap.space import Space

DATA = Path(__file__).parent.parent / "examples" / "data"
REFERENCE = json.loads((Path(__file__).parent / "reference" / "poisson_mass_warped_cube.json").read_text())
steady = hypothesis.settings(derandomize=True, deadline=None, max_examples=20)


@pytest.fixture(scope="module")
def ceed():
    return cc.Ceed("/cpu/self")


def warp(x):
    return x + 0.05 * np.prod(np.sin(np.pi * x), axis=1)[:, None]


def gallery_form(space, field):
    """v'Mu or v'Ku, as an apply with libCEED's gallery: field 'u' is the mass, 'du' the stiffness."""
    ceed, mesh, geometry = space.ceed, space.mesh, space.geometry
    build, act, size = {
        ("u", 2): ("Mass2DBuild", "MassApply", 1),
        ("u", 3): ("Mass3DBuild", "MassApply", 1),
        ("du", 2): ("Poisson2DBuild", "Poisson2DApply", 3),
        ("du", 3): ("Poisson3DBuild", "Poisson3DApply", 6),
    }[field, mesh.dim]
    per_point = space.quadrature_restriction(size)
    qdata = ceed.Vector(mesh.num_cells * space.num_quadrature_points * size)
    qdata.set_value(0.0)
    setup = ceed.Operator(ceed.QFunctionByName(build))
    setup.set_field("dx", geometry.restriction, geometry.basis, cc.VECTOR_ACTIVE)
    setup.set_field("weights", cc.ELEMRESTRICTION_NONE, geometry.basis, cc.VECTOR_NONE)
    setup.set_field("qdata", per_point, cc.BASIS_NONE, cc.VECTOR_ACTIVE)
    setup.apply(vector(ceed, mesh.points), qdata)
    operator = ceed.Operator(ceed.QFunctionByName(act))
    operator.set_field(field, space.restriction, space.basis, cc.VECTOR_ACTIVE)
    operator.set_field("qdata", per_point, cc.BASIS_NONE, qdata)
    operator.set_field(field.replace("u", "v"), space.restriction, space.basis, cc.VECTOR_ACTIVE)

    def apply(u):
        out = ceed.Vector(space.lsize)
        out.set_value(0.0)
        operator.apply(vector(ceed, u), out)
        return to_numpy(out)

    return apply


def vector(ceed, values):
    out = ceed.Vector(values.size)
    out.set_array(np.array(values, dtype=np.float64).ravel(), cmode=cc.COPY_VALUES)
    return out


def to_numpy(vector):
    with vector.array_read() as values:
        return np.array(values)


# --- one-dimensional tables


def test_lobatto_points_are_the_roots_known_in_closed_form():
    np.testing.assert_allclose(lattice.lobatto_points(4), [-1, -(5**-0.5), 5**-0.5, 1], rtol=1e-15)
    inner = math.sqrt(3 / 7)
    np.testing.assert_allclose(lattice.lobatto_points(5), [-1, -inner, 0, inner, 1], rtol=1e-15, atol=0)
    outer, inner = math.sqrt((7 + 2 * math.sqrt(7)) / 21), math.sqrt((7 - 2 * math.sqrt(7)) / 21)
    np.testing.assert_allclose(lattice.lobatto_points(6), [-1, -outer, -inner, inner, outer, 1], rtol=1e-15)


@pytest.mark.parametrize("n", [2, 3, 6, 9, 13, 21])
def test_lobatto_points_integrate_polynomials_of_degree_2n_minus_3(n):
    x = lattice.lobatto_points(n)
    weights = 2 / (n * (n - 1) * np.polynomial.legendre.Legendre.basis(n - 1)(x) ** 2)
    for power in range(2 * n - 2):
        assert np.sum(weights * x**power) == pytest.approx(2 / (power + 1) if power % 2 == 0 else 0, abs=2e-14)


def test_nodes_of_the_space_are_those_of_libceeds_basis(ceed):
    # Interpolation at Gauss-Lobatto points with as many points as nodes is the identity only for the same nodes.
    for degree in (1, 2, 5, 8):
        space = Space(ceed, box(1, 1), degree, degree + 1, qmode=cc.GAUSS_LOBATTO)
        u = np.random.default_rng(degree).standard_normal(space.num_nodes)
        source = ceed.Vector(space.lsize)
        source.set_array(u[space.element_nodes[0]].copy(), cmode=cc.COPY_VALUES)
        target = ceed.Vector(space.num_quadrature_points)
        target.set_value(0.0)
        space.basis.apply(1, cc.EVAL_INTERP, source, target)
        np.testing.assert_allclose(to_numpy(target), u[space.element_nodes[0]], atol=1e-13)


@steady
@hypothesis.given(n=st.integers(2, 9), seed=st.integers(0, 10**6))
def test_lagrange_tables_reproduce_polynomials(n, seed):
    rng = np.random.default_rng(seed)
    polynomial = np.polynomial.Polynomial(rng.standard_normal(n))
    nodes, x = lattice.lobatto_points(n), rng.uniform(-1, 1, 7)
    values, derivatives = lattice.lagrange(nodes, x)
    np.testing.assert_allclose(values @ polynomial(nodes), polynomial(x), atol=1e-12)
    np.testing.assert_allclose(derivatives @ polynomial(nodes), polynomial.deriv()(x), atol=1e-11)


# --- numbering


def shared_node_coordinates(space):
    """Coordinates of every cell's nodes by the cell's own geometry, (num_cells, nodes, dim)."""
    return space.mesh.map(lattice.lobatto_points(space.degree + 1))


def assert_conforming(space, expected_nodes):
    """Cells agree on the places of shared nodes, no two nodes are in one place, and there are as many as must be."""
    own = shared_node_coordinates(space)
    np.testing.assert_allclose(space.nodes[space.element_nodes], own, atol=1e-13)
    assert space.num_nodes == expected_nodes
    used = np.unique(space.element_nodes)
    assert used[0] == 0
    assert len(used) == used[-1] + 1 == expected_nodes
    distinct = np.unique(np.round(space.nodes, 9) + 0.0, axis=0)
    assert len(distinct) == expected_nodes


@pytest.mark.parametrize("degree", range(1, 9))
def test_square_of_randomly_rotated_cells_is_conforming(ceed, degree):
    mesh = meshing.scramble(box(4, 3, warp=warp), seed=degree)
    assert_conforming(Space(ceed, mesh, degree), (4 * degree + 1) * (3 * degree + 1))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("degree", range(1, 7))
def test_cube_of_randomly_rotated_cells_is_conforming(ceed, degree, order):
    mesh = meshing.scramble(box(3, 4, 2, order=order, warp=warp), seed=10 * degree + order)
    expected = (3 * degree + 1) * (4 * degree + 1) * (2 * degree + 1)
    assert_conforming(Space(ceed, mesh, degree), expected)


def test_random_rotations_bring_all_eight_face_orientations_together():
    mesh = meshing.scramble(box(4, 4, 4), seed=1)
    local = np.stack([lattice.entity_nodes(code, 2, True) for code in lattice.facets(3)])
    key, orientation = lattice.canonical(mesh.corners[:, local])
    _, index = lattice.unique_rows(key.reshape(-1, 3))
    order = np.argsort(index, kind="stable")
    same = index[order][1:] == index[order][:-1]
    first, second = orientation.ravel()[order][:-1][same], orientation.ravel()[order][1:][same]
    assert len(first) == 3 * 3 * 4 * 4
    # The table of one orientation after the inverse of another: which of the 8 symmetries relates the two frames.
    table = lattice.orientation_table(2, 2)
    relative = {tuple(table[a][np.argsort(table[b])]) for a, b in zip(first, second, strict=True)}
    assert len(relative) == 8


def test_orientation_tables_are_the_symmetry_groups():
    for m in (2, 3, 4):
        assert len({tuple(row) for row in lattice.orientation_table(2, m)}) == 8
        assert len({tuple(row) for row in lattice.orientation_table(1, m)}) == 2
        for row in [*lattice.orientation_table(2, m), *lattice.orientation_table(1, m)]:
            assert sorted(row) == list(range(len(row)))


@steady
@hypothesis.given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    degree=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_any_rotation_of_cells_leaves_as_many_nodes_and_the_same_places(shape, degree, seed):
    plain = box(*shape, warp=warp)
    mesh = meshing.scramble(plain, seed)
    x = lattice.lobatto_points(degree + 1)
    total, numbers = lattice.number_nodes(mesh.corners, degree)
    assert total == math.prod(degree * n + 1 for n in shape)
    nodes = np.full((total, 3), np.nan)
    nodes[numbers] = mesh.map(x)
    np.testing.assert_allclose(nodes[numbers], mesh.map(x), atol=1e-13)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
def test_number_of_nodes_on_an_unstructured_file_mesh_follows_eulers_count(ceed, degree):
    mesh = read(DATA / "pipe_elbow.msh")
    corners = mesh.corners
    vertices = len(np.unique(corners))
    pairs = corners[:, np.stack([lattice.entity_nodes(c, 2, True) for c in lattice.entities(3, 1)])]
    edges = len(np.unique(np.sort(pairs.reshape(-1, 2), axis=1), axis=0))
    quads = corners[:, np.stack([lattice.entity_nodes(c, 2, True) for c in lattice.entities(3, 2)])]
    faces = len(np.unique(np.sort(quads.reshape(-1, 4), axis=1), axis=0))
    assert (
        vertices - edges + faces - mesh.num_cells == 0
    )  # a pipe is a thickened circle times intervals: Euler number 0
    m = degree - 1
    space = Space(ceed, mesh, degree)
    assert_conforming(space, vertices + edges * m + faces * m**2 + mesh.num_cells * m**3)


@pytest.mark.parametrize("num_vertices", [10, 10**7, 10**12])
def test_unique_rows_packs_or_sorts_with_the_same_result(num_vertices):
    rng = np.random.default_rng(0)
    few = rng.integers(0, num_vertices, size=(20, 4))
    rows = few[rng.integers(0, 20, size=500)]
    count, index = lattice.unique_rows(rows)
    distinct, expected = np.unique(rows, axis=0, return_inverse=True)
    assert count == len(distinct)
    pairs = {(a, b) for a, b in zip(index.tolist(), expected.ravel().tolist(), strict=True)}
    assert len(pairs) == count


def test_numbering_of_50000_cells_of_degree_3_takes_seconds():
    mesh = box(37, 37, 37)
    start = time.perf_counter()
    total, _ = lattice.number_nodes(mesh.corners, 3)
    assert total == 112**3
    assert time.perf_counter() - start < 10  # 0.3 s on one core; the bar leaves room for busy machines


def test_nodes_are_numbered_in_the_order_of_first_touch(ceed):
    numbers = Space(ceed, box(3, 2, 2), 3).element_nodes.ravel()
    _, first = np.unique(numbers, return_index=True)
    assert np.all(np.diff(first) > 0)


def test_space_of_the_geometrys_degree_has_the_points_of_the_mesh(ceed):
    for order in (1, 2):
        mesh = meshing.scramble(box(2, 3, 2, order=order, warp=warp), seed=3)
        space = Space(ceed, mesh, order, components=3)
        assert space.shape == mesh.points.shape
        np.testing.assert_array_equal(space.nodes, mesh.points)
        np.testing.assert_array_equal(space.interpolate(lambda x: x), mesh.points)
        assert space.geometry.lsize == mesh.points.size


# --- fields, restrictions, boundary


def test_restriction_gathers_components_of_element_nodes(ceed):
    space = Space(ceed, meshing.scramble(box(2, 2, 1), seed=2), 2, components=3)
    u = np.arange(space.lsize, dtype=float)
    out = ceed.Vector(space.mesh.num_cells * 27 * 3)
    out.set_value(0.0)
    space.restriction.apply(vector(ceed, u), out)
    # E-layout of libCEED's CPU backends: element, component, node.
    expected = u.reshape(-1, 3)[space.element_nodes].transpose(0, 2, 1)
    np.testing.assert_array_equal(to_numpy(out).reshape(expected.shape), expected)


def test_quadrature_restriction_is_element_component_point(ceed):
    space = Space(ceed, box(2, 2), 1, 3)
    size = 4 * 9 * 2
    out = ceed.Vector(size)
    out.set_value(0.0)
    space.quadrature_restriction(2).apply(vector(ceed, np.arange(float(size))), out)
    np.testing.assert_array_equal(to_numpy(out), np.arange(float(size)))
    assert space.quadrature_restriction(2) is space.quadrature_restriction(2)
    with pytest.raises(ValueError, match="components: expected a positive integer, got 0"):
        space.quadrature_restriction(0)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_boundary_nodes_lie_on_the_named_sides_and_are_all_of_them(ceed, degree):
    mesh = meshing.scramble(box(2, 3, 2, upper=(1, 2, 3)), seed=degree)
    space = Space(ceed, mesh, degree)
    x = space.nodes
    sides = {"left": (0, 0), "right": (0, 1), "front": (1, 0), "back": (1, 2), "bottom": (2, 0), "top": (2, 3)}
    for name, (axis, value) in sides.items():
        np.testing.assert_array_equal(space.boundary_nodes(name), np.flatnonzero(np.abs(x[:, axis] - value) < 1e-12))
    outside = np.any((np.abs(x) < 1e-12) | (np.abs(x - [1, 2, 3]) < 1e-12), axis=1)
    np.testing.assert_array_equal(space.boundary_nodes(), np.flatnonzero(outside))
    np.testing.assert_array_equal(space.boundary_nodes("all"), np.flatnonzero(outside))
    both = np.union1d(space.boundary_nodes("left"), space.boundary_nodes("top"))
    np.testing.assert_array_equal(space.boundary_nodes(["left", "top"]), both)
    assert space.boundary_nodes([]).size == 0
    with pytest.raises(KeyError, match=r"no boundary set 'lid'; it has .*'back'.*'top'"):
        space.boundary_nodes("lid")


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_named_corners_and_edges_have_their_nodes(ceed, degree, reflect):
    plain = box(2, 2, 2)
    shipped = Mesh.from_arrays(
        plain.points,
        meshing.file_cells(plain, meshing.VTK["hexahedron"]),
        "hexahedron",
        {
            "pin": [[26]],
            "edge": [[0, 1], [1, 2]],
            "both": [[18, 9]],
            "top": meshing.facet_corners(plain, plain.boundary["top"]),
        },
    )
    assert {name: len(rows) for name, rows in shipped.ridges.items()} == {"pin": 1, "edge": 2, "both": 1}
    for mesh in (shipped, meshing.scramble(shipped, seed=degree, reflect=reflect).reoriented(), shipped.refine()):
        space = Space(ceed, mesh, degree)
        x = space.nodes
        edge = (np.abs(x[:, 1]) < 1e-12) & (np.abs(x[:, 2]) < 1e-12)
        np.testing.assert_allclose(x[space.boundary_nodes("pin")], [[1, 1, 1]])
        np.testing.assert_array_equal(space.boundary_nodes("edge"), np.flatnonzero(edge))
        np.testing.assert_array_equal(
            space.boundary_nodes(["pin", "edge"]), np.union1d(space.boundary_nodes("pin"), np.flatnonzero(edge))
        )
        half = (np.abs(x[:, 0]) < 1e-12) & (np.abs(x[:, 1]) < 1e-12) & (x[:, 2] > 0.5 - 1e-12)
        np.testing.assert_array_equal(space.boundary_nodes("both"), np.flatnonzero(half))
    with pytest.raises(KeyError, match=r"it has .*'top'.* and the ridge sets .*'pin'"):
        space.boundary_nodes("lid")


def test_interpolate_takes_functions_and_constants(ceed):
    scalar, vectors = Space(ceed, box(2, 2), 2), Space(ceed, box(2, 2), 2, components=2)
    x = scalar.nodes
    np.testing.assert_array_equal(scalar.interpolate(lambda x: x[:, 0] * x[:, 1]), x[:, 0] * x[:, 1])
    np.testing.assert_array_equal(scalar.interpolate(lambda x: x[:, :1]), x[:, 0])
    np.testing.assert_array_equal(scalar.interpolate(2.0), np.full(25, 2.0))
    np.testing.assert_array_equal(vectors.interpolate(lambda x: 2 * x), 2 * x)
    np.testing.assert_array_equal(vectors.interpolate([1.0, 2.0]), np.tile([1.0, 2.0], (25, 1)))
    with pytest.raises(ValueError, match=r"f: expected values of shape \(25,\), got \(25, 2\)"):
        scalar.interpolate(lambda x: x)
    with pytest.raises(ValueError, match=r"expected values of shape \(25, 2\), got \(25,\)"):
        vectors.interpolate(lambda x: x[:, 0])


def test_linear_cells_cover_the_mesh(ceed):
    for mesh in (box(2, 1, warp=warp), meshing.scramble(box(2, 1, 2, warp=warp), seed=1)):
        space = Space(ceed, mesh, 3)
        name = "quad" if mesh.dim == 2 else "hexahedron"
        cells = space.linear_cells()
        assert cells.shape == (mesh.num_cells * 3**mesh.dim, 2**mesh.dim)
        assert meshing.volume(Mesh.from_arrays(space.nodes, cells, name)) == pytest.approx(
            meshing.volume(mesh), rel=1e-2
        )


def test_bad_arguments_are_named(ceed):
    mesh = box(1, 1)
    for arguments, message in [
        ({"degree": 0}, "degree: expected a positive integer, got 0"),
        ({"degree": 1.5}, "degree: expected a positive integer, got 1.5"),
        ({"degree": 1, "quadrature": 0}, "quadrature: expected a positive integer, got 0"),
        ({"degree": 1, "components": -2}, "components: expected a positive integer, got -2"),
    ]:
        with pytest.raises(ValueError, match=message):
            Space(ceed, mesh, **arguments)
    with pytest.raises(TypeError, match=r"mesh: expected a ceedtap.mesh.Mesh, got tuple"):
        Space(ceed, (mesh.points, mesh.cells), 1)
    with pytest.raises(ValueError, match=r"32-bit indices end at 2147483647"):
        Space(ceed, mesh, 2, components=10**9)
    inverted = Mesh(mesh.points, mesh.cells[:, [1, 0, 3, 2]], 1)
    with pytest.raises(MeshError, match=r"cell 0: -0.25"):
        Space(ceed, inverted, 1)


def test_repr_and_defaults(ceed):
    space = Space(ceed, box(2, 2), 3)
    assert (space.quadrature, space.num_quadrature_points, space.lsize, space.shape, space.dim) == (5, 25, 49, (49,), 2)
    assert repr(space).startswith("Space(degree=3, quadrature=5, components=1, num_nodes=49, mesh=Mesh(dim=2, order=1,")


# --- values of other codes, and of mathematics


def renumbered(mesh, how, seed):
    """The mesh with its box numbering, with randomly rotated cells, or with reflected ones that are turned back."""
    if how == "plain":
        return mesh
    if how == "rotated":
        return meshing.scramble(mesh, seed)
    reflected = meshing.scramble(mesh, seed, reflect=True)
    with pytest.raises(MeshError, match="left-handed"):
        reflected.check()
    return reflected.reoriented()


@pytest.mark.parametrize("how", ["plain", "rotated", "reflected"])
@pytest.mark.parametrize("degree", [1, 2])
def test_mass_and_stiffness_forms_of_independent_codes(ceed, degree, how):
    mesh = renumbered(box(8, 8, 8, warp=warp), how, seed=degree)
    space = Space(ceed, mesh, degree)
    known = REFERENCE["values"][str(degree)]
    u = space.interpolate(lambda x: np.sin(x @ [1.0, 2.0, 3.0]))
    mass, stiffness = gallery_form(space, "u"), gallery_form(space, "du")
    assert space.num_nodes == known["ndof"]
    assert u @ mass(u) == pytest.approx(known["uMu"], rel=REFERENCE["rtol"])
    assert u @ stiffness(u) == pytest.approx(known["uKu"], rel=REFERENCE["rtol"])
    one = np.ones(space.num_nodes)
    assert one @ mass(one) == pytest.approx(REFERENCE["volume"], rel=REFERENCE["rtol"])
    assert np.abs(stiffness(one)).max() < 1e-12


@pytest.mark.parametrize("name", ["pipe_elbow", "plate_with_hole"])
def test_libceed_equals_numpy_elements_on_the_shipped_files(ceed, name):
    space = Space(ceed, read(DATA / f"{name}.msh"), 3)
    elements = meshing.Elements(space)
    u = np.random.default_rng(5).standard_normal(space.num_nodes)
    for field, matrix in (("u", elements.mass()), ("du", elements.stiffness())):
        expected = matrix @ u
        np.testing.assert_allclose(gallery_form(space, field)(u), expected, atol=1e-12 * np.abs(expected).max())


def solve(space):
    """L2 and H1 errors of Poisson's equation with the solution sin(x + 2y (+ 3z)) and its values on the boundary."""
    wave = np.array([1.0, 2.0, 3.0])[: space.dim]
    elements = meshing.Elements(space)
    matrix, load = elements.stiffness(), elements.load(lambda x: wave @ wave * np.sin(x @ wave))
    u = space.interpolate(lambda x: np.sin(x @ wave))
    fixed = np.zeros(space.num_nodes, dtype=bool)
    fixed[space.boundary_nodes()] = True
    u[~fixed] = 0.0
    if not fixed.all():
        inner = matrix[~fixed][:, ~fixed]
        right = (load - matrix @ u)[~fixed]
        jacobi = scipy.sparse.diags(1 / inner.diagonal())
        solution, code = scipy.sparse.linalg.cg(inner, right, rtol=1e-12, maxiter=2000, M=jacobi)
        assert code == 0
        u[~fixed] = solution
    return elements.errors(u, lambda x: np.sin(x @ wave), lambda x: np.cos(x @ wave)[..., None] * wave)


@pytest.mark.parametrize("how", ["plain", "rotated", "reflected"])
@pytest.mark.parametrize(("degree", "coarse"), [(1, 5), (2, 3), (3, 3), (4, 2)])
def test_poisson_converges_with_the_rates_of_theory(ceed, degree, coarse, how):
    errors = []
    for n in (coarse, 2 * coarse):
        errors.append(solve(Space(ceed, renumbered(box(n, n, n, warp=warp), how, seed=n), degree)))
    rates = np.log2(np.array(errors[0]) / np.array(errors[1]))
    assert rates[0] > degree + 1 - 0.25
    assert rates[1] > degree - 0.25


@pytest.mark.parametrize("name", ["pipe_elbow", "plate_with_hole"])
def test_poisson_converges_under_refinement_of_the_shipped_files(ceed, name):
    mesh = read(DATA / f"{name}.msh")
    errors = np.array([solve(Space(ceed, m, 2)) for m in (mesh, mesh.refine())])
    rates = np.log2(errors[0] / errors[1])
    assert rates[0] > 2.7
    assert rates[1] > 1.8
