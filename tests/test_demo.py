"""The demo's solver: rates of convergence, taps against an independent solver, the files it writes, what it says."""

import io
import sys

import jax
import jax.numpy as jnp
import meshing
import numpy as np
import pytest
import scipy.sparse.linalg

import ceedtap as ct
from ceedtap import demo, demo_files
from ceedtap.mesh import box, read
from ceedtap.space import Space

DATA = demo._MESH_FILE.parent
ELBOW, PLATE = DATA / "pipe_elbow.msh", DATA / "plate_with_hole.msh"


def warp(x):
    """Moves points of the unit square or cube, the boundary included."""
    bump = 0.05 * np.prod(np.sin(np.pi * x), axis=1, keepdims=True)
    return x + bump + 0.04 * np.sin(2 * x[:, ::-1])


def rate(coarse, fine):
    return np.log2(coarse / fine)


# -- convergence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("degree", "cells"), [(1, 8), (2, 4), (3, 3), (4, 2)])
def test_rates_on_the_warped_box(degree, cells):
    """L2 error of order degree + 1, H1 error of order degree."""
    coarse, fine = (
        demo.solve(box(n, n, n, warp=warp), degree, rtol=1e-11, exact=lambda x: jnp.sin(x[0] + 2 * x[1] + 3 * x[2]))
        for n in (cells, 2 * cells)
    )
    assert coarse.converged
    assert fine.converged
    assert rate(coarse.l2_error, fine.l2_error) > degree + 1 - 0.25
    assert rate(coarse.h1_error, fine.h1_error) > degree - 0.25
    assert fine.l2_error < 0.02 * fine.l2_norm
    assert fine.h1_error < 0.1 * fine.h1_norm


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_rates_in_the_plane_with_curved_cells(degree):
    coarse, fine = (demo.solve(box(n, n, order=2, warp=warp), degree, rtol=1e-11) for n in (6, 12))
    assert rate(coarse.l2_error, fine.l2_error) > degree + 1 - 0.25
    assert rate(coarse.h1_error, fine.h1_error) > degree - 0.25


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("reflect", [False, True])
def test_numbering_of_the_elements_does_not_matter(degree, reflect):
    """Rotated, reflected and shuffled cells: the same space, so the same discrete solution."""
    mesh = box(3, 4, 3, order=2, warp=warp)
    plain = demo.solve(mesh, degree, rtol=1e-12)
    scrambled = demo.solve(meshing.scramble(mesh, seed=degree, reflect=reflect).reoriented(), degree, rtol=1e-12)
    assert scrambled.space.lsize == plain.space.lsize
    np.testing.assert_allclose(scrambled.l2_error, plain.l2_error, rtol=1e-8)
    np.testing.assert_allclose(scrambled.h1_error, plain.h1_error, rtol=1e-8)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("path", [ELBOW, PLATE], ids=lambda path: path.stem)
def test_shipped_meshes_converge_under_refinement(path, degree):
    mesh = read(path)
    coarse, fine = demo.solve(mesh, degree), demo.solve(mesh.refine(), degree)
    assert rate(coarse.l2_error, fine.l2_error) > degree + 1 - 0.35
    assert rate(coarse.h1_error, fine.h1_error) > degree - 0.35


@pytest.mark.parametrize("mesh", [box(3, 2, order=2, warp=warp), box(2, 3, 2, warp=warp)], ids=["2d", "3d"])
def test_linear_solutions_are_exact(mesh):
    result = demo.solve(mesh, 2, exact=lambda x: 1 + x @ jnp.arange(1.0, mesh.dim + 1), rtol=1e-13)
    assert result.l2_error < 1e-11
    assert result.h1_error < 1e-10


def test_nothing_to_solve_takes_no_iteration():
    result = demo.solve(box(2, 2), 2, exact=lambda x: 0.0 * x[0])
    assert result.converged
    assert result.iterations == 0
    assert result.l2_error == 0


# -- against independent codes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """A solved problem and its discretisation by NumPy and SciPy."""
    mesh = read(PLATE)
    space = Space(ct.Ceed("/cpu/self"), mesh, 3)
    return demo.solve(mesh, 3, name="plate"), meshing.Elements(space)


def reference_system(result, reference):
    """Matrix, right-hand side and lift of the boundary values, from NumPy alone."""
    space = result.space
    exact = demo.ripples(space.mesh)
    f = -np.trace(np.asarray(jax.vmap(jax.hessian(exact))(jnp.asarray(space.nodes))), axis1=1, axis2=2)
    free = np.ones(space.lsize)
    free[space.boundary_nodes()] = 0
    given = (1 - free) * result.exact
    matrix = reference.stiffness()
    b = free * (reference.mass() @ f - matrix @ given)
    return matrix, b, free, given


def test_residuals_are_those_of_a_numpy_solver(small):
    result, reference = small
    matrix, b, free, _ = reference_system(result, reference)
    diagonal = matrix.diagonal()
    history = [1.0]
    r, x = b.copy(), np.zeros_like(b)
    z = r / diagonal
    p = z.copy()
    while history[-1] > 1e-10:
        ap = free * (matrix @ p)
        alpha = (r @ z) / (p @ ap)
        x += alpha * p
        before = r @ z
        r -= alpha * ap
        z = r / diagonal
        p = z + (r @ z) / before * p
        history.append(np.linalg.norm(r) / np.linalg.norm(b))
    assert abs(result.iterations - (len(history) - 1)) <= 1
    n = min(len(history), len(result.residuals)) // 2  # later on rounding errors have grown
    np.testing.assert_allclose(result.residuals[:n], history[:n], rtol=1e-6)
    np.testing.assert_allclose(
        np.log(result.residuals[n:-2]), np.log(history[n : len(result.residuals) - 2]), rtol=0.05
    )


def test_solution_is_that_of_a_direct_solver(small):
    result, reference = small
    matrix, b, free, given = reference_system(result, reference)
    inside = np.flatnonzero(free)
    expected = given.copy()
    expected[inside] += scipy.sparse.linalg.spsolve(matrix[np.ix_(inside, inside)].tocsc(), b[inside])
    np.testing.assert_allclose(result.solution, expected, atol=1e-8)


def test_diagonal_is_that_of_the_matrix(small):
    result, reference = small
    stiffness, mass = demo.discretise(result.space)
    np.testing.assert_allclose(
        demo.diagonal(stiffness, result.space.lsize), reference.stiffness().diagonal(), rtol=1e-12
    )
    np.testing.assert_allclose(demo.diagonal(mass, result.space.lsize), reference.mass().diagonal(), rtol=1e-12)


def test_error_norms_are_those_of_a_finer_rule(small):
    """Errors of an arbitrary field, by a quadrature of degree 13 elsewhere."""
    result, _ = small
    space = result.space
    fine = meshing.Elements(Space(space.ceed, space.mesh, space.degree, quadrature=12))
    u = np.cos(np.arange(space.lsize))
    l2, h1 = demo.error_norms(space, u, lambda x: jnp.sin(x[0]) * x[1])
    expected = fine.errors(
        u,
        lambda x: np.sin(x[..., 0]) * x[..., 1],
        lambda x: np.stack([np.cos(x[..., 0]) * x[..., 1], np.sin(x[..., 0])], axis=-1),
    )
    np.testing.assert_allclose((l2, h1), expected, rtol=1e-6)


# -- taps ------------------------------------------------------------------------------------------------------------


def test_every_iteration_is_watched_once_and_in_order():
    seen = []
    result = demo.solve(box(3, 3), 3, watch=lambda k, residual: seen.append((k, residual)))
    assert [k for k, _ in seen] == list(range(result.iterations + 1))
    assert [residual for _, residual in seen] == result.residuals.tolist()
    assert result.residuals[0] == pytest.approx(1)


def test_failing_watch_is_reported():
    def fail(k, residual):
        raise ValueError("no paper")

    with pytest.raises(ct.CallbackException) as caught:
        demo.solve(box(2, 2), 1, watch=fail)
    assert "no paper" in str(caught.value.exceptions[0])


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


def test_progress_on_a_terminal_is_one_line():
    stream = Terminal()
    line = demo.ProgressLine("box", 1e-10, stream)
    for k in range(3):
        line(k, 10.0 ** (-5 * k))
    line.finish()
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    last = text.rsplit("\r", 1)[1]
    assert "iteration    2" in last
    assert "1.00e-10" in last
    assert "\u2588" * 20 in last


def test_progress_in_a_file_is_plain():
    stream = io.StringIO()
    line = demo.ProgressLine("box", 1e-10, stream)
    for k in range(101):
        line(k, 10.0 ** (-k / 10))
    line.finish()
    lines = stream.getvalue().splitlines()
    assert 5 <= len(lines) <= 8
    assert "iteration  100" in lines[-1]
    assert all(text.isascii() and "\r" not in text for text in lines)


@pytest.mark.parametrize("residual", [np.nan, np.inf, 0.0, 1e300])
def test_progress_takes_any_residual(residual):
    for stream in (io.StringIO(), Terminal()):
        line = demo.ProgressLine("box", 1e-10, stream)
        line(0, 1.0)
        line(1, residual)
        line.finish()
        assert "iteration    1" in stream.getvalue()


# -- files and the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PLATE, ELBOW], ids=lambda path: path.stem)
def test_vtu_reads_back(path, tmp_path):
    meshio = pytest.importorskip("meshio")
    result = demo.solve(read(path), 2)
    demo_files.write_vtu(tmp_path / "demo.vtu", result)
    mesh = meshio.read(tmp_path / "demo.vtu")
    space = result.space
    assert mesh.points.shape == (space.num_nodes, 3)
    np.testing.assert_array_equal(mesh.points[:, : space.dim], space.nodes)
    (block,) = mesh.cells
    assert block.type == ("quad" if space.dim == 2 else "hexahedron")
    assert len(block.data) == space.mesh.num_cells * 2**space.dim
    np.testing.assert_array_equal(mesh.point_data["solution"], result.solution)
    np.testing.assert_array_equal(mesh.point_data["exact"], result.exact)
    np.testing.assert_array_equal(mesh.point_data["error"], result.solution - result.exact)
    corners = mesh.points[block.data]  # the pieces are right-handed and not empty
    edges = [corners[:, k] - corners[:, 0] for k in ((1, 3) if space.dim == 2 else (1, 3, 4))]
    if space.dim == 2:
        edges.append(np.broadcast_to([0.0, 0.0, 1.0], edges[0].shape))
    assert np.all(np.linalg.det(np.stack(edges, axis=1)) > 0)


def test_picture_shows_something(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    results = [demo.solve(box(2, 2, 3, warp=warp), 2, name="box"), demo.solve(read(PLATE), 2, name="plate")]
    demo_files.draw(tmp_path / "demo.png", results)
    with image_module.open(tmp_path / "demo.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1000
    thirds = np.array_split((pixels != 255).any(axis=2), 3, axis=1)
    assert [third.mean() > low for third, low in zip(thirds, (0.02, 0.1, 0.1), strict=True)] == [True] * 3


def test_command_prints_and_writes(tmp_path, capsys):
    assert demo.main(str(PLATE), 2, str(tmp_path / "new" / "folder")) == 0
    out = capsys.readouterr().out
    for words in ("plate with hole", "error in L2", "iterations", "libCEED 0", "/cpu/self/", "JAX", "demo.vtu written"):
        assert words in out
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["demo.png", "demo.vtu"]


def test_command_goes_on_without_plotting_packages(tmp_path, capsys, monkeypatch):
    mesh = box(3, 3)
    monkeypatch.setattr(demo, "_problems", lambda mesh_file: iter([("square", mesh)]))
    for name in ("meshio", "matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert demo.main(None, 2, str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "pip install 'ceedtap[mesh]'" in out
    assert "pip install 'ceedtap[plot]'" in out
    assert list(tmp_path.iterdir()) == []


def test_command_without_meshio_leaves_the_file_out(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "meshio", None)
    assert [name for name, _ in demo._problems(None)] == ["twisted box"]
    assert "pip install 'ceedtap[mesh]'" in capsys.readouterr().out


def test_command_says_when_it_did_not_converge(tmp_path, capsys):
    assert demo.main(str(PLATE), 2, str(tmp_path), max_iterations=3) == 1
    captured = capsys.readouterr()
    assert "not converged" in captured.err
    assert "3 iterations" in captured.err
