"""Pictures of fields: what is drawn where, in which colour; pictures that follow a program."""

import io
import sys

import jax
import jax.numpy as jnp
import meshing
import numpy as np
import pytest

import ceedtap as ct
from ceedtap import demo
from ceedtap.pieces import cut

pyplot = pytest.importorskip("matplotlib.pyplot")
image_module = pytest.importorskip("PIL.Image")
from matplotlib import colormaps  # noqa: E402

DATA = demo._MESH_FILE.parent


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def ceed():
    return ct.Ceed("/cpu/self")


def warp(x):
    return x + 0.05 * np.sin(3 * x[:, ::-1])


# -- pieces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_nodal_fields_are_the_polynomials_that_they_are(ceed, degree):
    V = ct.Space(ceed, ct.mesh.box(3, 2), degree)

    def f(x):
        return (1 + x[..., 0]) ** degree * (2 - x[..., 1]) ** degree

    pieces = cut(V, V.interpolate(f))
    assert pieces.n > degree
    np.testing.assert_allclose(pieces.values, f(pieces.points), rtol=1e-12)


@pytest.mark.parametrize("mesh", [ct.mesh.box(2, 3, order=2, warp=warp), ct.mesh.box(2, 1, 2, order=2, warp=warp)])
@pytest.mark.parametrize("surface", [False, True])
def test_curved_geometry_is_curved(ceed, mesh, surface):
    """The coordinates are fields of the space, so they must be what the points say."""
    V = ct.Space(ceed, mesh, 4)
    pieces = cut(V, V.nodes[:, 1], surface=surface)
    np.testing.assert_allclose(pieces.values, pieces.points[..., 1], atol=1e-13)
    on_mesh = cut(mesh, mesh.points[:, 1], surface=surface)
    np.testing.assert_allclose(on_mesh.values, on_mesh.points[..., 1], atol=1e-13)


def test_facets_of_the_surface_face_outwards():
    """Their normals, integrated against x: three times the volume (Gauss)."""
    mesh = ct.mesh.read(DATA / "pipe_elbow.msh")
    pieces = cut(mesh, mesh.points[:, 0], surface=True)
    assert len(pieces.points) == len(mesh.boundary_facets)
    corners = pieces.corners(pieces.points)
    normals = np.cross(corners[:, :, 2] - corners[:, :, 0], corners[:, :, 3] - corners[:, :, 1]) / 2
    assert np.sum(normals * corners.mean(axis=2)) == pytest.approx(3 * meshing.volume(mesh), rel=0.01)


@pytest.mark.parametrize("qmode", [ct.GAUSS, ct.GAUSS_LOBATTO])
def test_values_at_quadrature_points_lie_around_their_points(ceed, qmode):
    """Each point of the rule lies in the piece that has its value."""
    mesh = ct.mesh.box(2, 3, upper=(2, 6))
    V = ct.Space(ceed, mesh, 2, quadrature=3, qmode=qmode)
    line = np.polynomial.legendre.leggauss(3)[0] if qmode == ct.GAUSS else np.array([-1.0, 0.0, 1.0])
    first = mesh.points[mesh.cells[:, 0]]
    sides = mesh.points[mesh.cells[:, -1]] - first
    reference = np.stack(np.meshgrid(line, line), -1).reshape(-1, 2)  # x fastest
    places = first[:, None] + sides[:, None] * (reference + 1) / 2
    pieces = cut(V, np.arange(places[..., 0].size).reshape(places.shape[:2]))
    assert pieces.by_piece
    corners = pieces.corners(pieces.points)
    for number, place in enumerate(places.reshape(-1, 2)):
        (own,) = np.nonzero((pieces.values == number).ravel())
        box = corners.reshape(-1, 4, 2)[own]
        assert np.all(box.min(axis=(0, 1)) <= place + 1e-12)
        assert np.all(box.max(axis=(0, 1)) >= place - 1e-12)
    if qmode == ct.GAUSS:  # which is what a mesh without a space assumes
        np.testing.assert_allclose(cut(mesh, pieces.values[:, :9]).points, pieces.points)


def test_surfaces_show_the_nearest_quadrature_points_of_their_cells(ceed):
    V = ct.Space(ceed, ct.mesh.box(1, 1, 1), 1, quadrature=2)
    layers = np.stack(np.meshgrid([0, 1], [10, 11], [20, 21], indexing="ij"), -1).transpose(2, 1, 0, 3).reshape(-1, 3)
    for axis, low in enumerate((0, 10, 20)):
        pieces = cut(V, layers[None, :, axis].astype(float), surface=True)
        middles = pieces.corners(pieces.points).mean(axis=2)[..., axis]
        np.testing.assert_array_equal(pieces.values - low, middles > 0.5)


def test_values_of_elements_and_vectors(ceed):
    mesh = ct.mesh.box(2, 1)
    V = ct.Space(ceed, mesh, 2)
    pieces = cut(V, [5, 7])
    assert [set(row) for row in pieces.values] == [{5.0}, {7.0}]
    length = cut(V, np.stack([3 * V.nodes[:, 0], 4 * V.nodes[:, 0]], axis=1))
    np.testing.assert_allclose(length.values, 5 * length.points[..., 0], atol=1e-13)


def test_displacements_move_the_points(ceed):
    V = ct.Space(ceed, ct.mesh.box(2, 2), 2)
    moved = cut(V, V.nodes[:, 0], jnp.asarray(V.nodes) ** 2)
    before = cut(V, V.nodes[:, 0])
    np.testing.assert_allclose(moved.points, before.points + before.points**2, atol=1e-13)
    data = np.zeros((4, V.num_quadrature_points))
    assert cut(V, data, V.nodes).points.max() == pytest.approx(2)


@pytest.mark.parametrize("shape", [(24,), (26,), (4, 15), (25, 2, 2), (), (25, 0)])
def test_wrong_shapes_are_told(ceed, shape):
    V = ct.Space(ceed, ct.mesh.box(2, 2), 2)
    with pytest.raises(ValueError, match=r"\(25,\) or \(25, components\).*\(4,\).*\(4, 16\).*got \(") as caught:
        ct.plot.field(V, np.zeros(shape))
    assert str(caught.value).endswith(f"got {shape}")


def test_other_wrong_arguments_are_told(ceed):
    mesh = ct.mesh.box(2, 2)
    u = mesh.points[:, 0]
    with pytest.raises(TypeError, match=r"expected a Space.*got ndarray"):
        ct.plot.field(u, u)
    with pytest.raises(ValueError, match=r"displacement: expected \(nodes, dim\) = \(9, 2\), got \(9,\)"):
        ct.plot.field(mesh, u, u)
    with pytest.raises(TypeError, match="real numbers"):
        ct.plot.field(mesh, 1j * u)
    with pytest.raises(TypeError, match="real numbers"):
        ct.plot.field(mesh, ["a"] * 9)
    with pytest.raises(ValueError, match="backend is"):
        ct.plot.field(mesh, u, backend="plotly")
    with pytest.raises(ValueError, match="ax= is for matplotlib"):
        ct.plot.field(mesh, u, backend="pyvista", ax=pyplot.figure().add_subplot())
    with pytest.raises(ValueError, match="got Axes3D"):
        ct.plot.field(mesh, u, ax=pyplot.figure().add_subplot(projection="3d"))
    solid = ct.mesh.box(1, 1, 1)
    with pytest.raises(ValueError, match='projection="3d"'):
        ct.plot.field(solid, solid.points[:, 0], ax=pyplot.figure().add_subplot())


# -- pictures ----------------------------------------------------------------------------------------------------------


def picture(figure):
    file = io.BytesIO()
    figure.savefig(file, dpi=50)
    with image_module.open(file) as image:
        return np.asarray(image.convert("RGB"))


def colours_at(ax, places):
    """The pixels at some places of a drawing of the unit square without anything else."""
    ax.figure.set_size_inches(4, 4)
    ax.set_position((0, 0, 1, 1))
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_axis_off()
    pixels = picture(ax.figure)
    n = len(pixels)
    return np.array([pixels[int((1 - y) * n), int(x * n)] for x, y in places])


@pytest.mark.parametrize("kind", ["nodes", "points", "elements"])
def test_colours_are_those_of_the_values(ceed, kind):
    V = ct.Space(ceed, ct.mesh.box(4, 4), 2, quadrature=1)
    middles = (np.arange(4) + 0.5) / 4
    by_element = np.tile(middles, 4)
    values = {"nodes": V.nodes[:, 0], "points": by_element[:, None], "elements": by_element}[kind]
    ax = pyplot.figure().add_subplot()
    assert ct.plot.field(V, values, ax=ax, vmin=0, vmax=1, lines=False, colorbar=False) is ax
    found = colours_at(ax, [(x, y) for x in middles for y in (0.1, 0.6)])
    expected = 255 * np.array([colormaps["viridis"](x)[:3] for x in middles for _ in range(2)])
    assert np.abs(found - expected).max() < 6


def test_what_is_not_finite_is_a_hole(ceed):
    mesh = ct.mesh.box(2, 1)
    for values in ([np.nan, 1.0, 1.0, np.nan, 1.0, 1.0], [np.inf, 1.0]):
        ax = pyplot.figure().add_subplot()
        ct.plot.field(mesh, values, ax=ax, lines=False, colorbar=False)
        left, right = colours_at(ax, [(0.25, 0.5), (0.75, 0.5)])
        assert tuple(left) == (255, 255, 255)
        assert tuple(right) != (255, 255, 255)
    ct.plot.field(mesh, np.full(6, np.nan))


def test_axes_come_back_with_a_colour_bar(ceed):
    V = ct.Space(ceed, ct.mesh.box(2, 2), 2)
    ax = ct.plot.field(V, V.nodes[:, 0] - 3, label="shift", cmap="magma")
    (bar,) = [other for other in ax.figure.axes if other is not ax]
    assert bar.get_ylabel() == "shift"
    assert bar.get_ylim() == (-3.0, -2.0)
    ct.plot.field(V.boundary("left"), V.nodes[:, 1])


@pytest.mark.parametrize("on", ["space", "boundary", "mesh"])
def test_surfaces(ceed, on):
    mesh = ct.mesh.read(DATA / "pipe_elbow.msh")
    V = ct.Space(ceed, mesh, 2)
    where = {"space": V, "boundary": V.boundary("inlet"), "mesh": mesh}[on]
    values = mesh.points[:, 0] if on == "mesh" else V.nodes[:, 0]
    ax = ct.plot.field(where, values, backend="matplotlib", lines=on != "mesh")
    low, high = ax.get_xlim()
    assert high > low
    assert len(np.unique(picture(ax.figure).reshape(-1, 3), axis=0)) > 100


def test_without_the_packages(ceed, monkeypatch):
    mesh = ct.mesh.box(1, 1, 1)
    monkeypatch.setitem(sys.modules, "pyvista", None)
    assert hasattr(ct.plot.field(mesh, mesh.points[:, 0]), "get_zlim")
    with pytest.raises(ImportError, match=r"pip install 'ceedtap\[plot3d\]'"):
        ct.plot.field(mesh, mesh.points[:, 0], backend="pyvista")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'ceedtap\[plot\]'.*plot3d"):
        ct.plot.field(mesh, mesh.points[:, 0])
    with pytest.raises(ImportError, match=r"pip install 'ceedtap\[plot\]'$"):
        ct.plot.field(ct.mesh.box(1, 1), [0.0])
    with pytest.raises(ImportError, match=r"pip install 'ceedtap\[plot\]'$"):
        ct.plot.live()


def test_pyvista(ceed):
    pyvista = pytest.importorskip("pyvista")
    V = ct.Space(ceed, ct.mesh.box(2, 2, 2), 2)
    plotter = ct.plot.field(V, V.nodes[:, 0], label="x")
    assert isinstance(plotter, pyvista.Plotter)
    grid = plotter.meshes[0]
    np.testing.assert_allclose(grid["x"], grid.points[:, 0], atol=1e-13)
    assert grid.volume == pytest.approx(1)
    plotter.close()


# -- pictures that follow a program ------------------------------------------------------------------------------------


def follow(view, values, *args):
    def step(i, x):
        return ct.id_tap(view, *args, values[i], result=x)

    with ct.outfeed_receiver():
        jax.jit(lambda: jax.lax.fori_loop(0, len(values), step, 0))()


def lines_of(view):
    return [line.get_xydata().tolist() for line in view.figure.axes[0].lines]


def test_a_history_of_numbers():
    view = ct.plot.live(label=["a", "b"], log=True)
    assert lines_of(view) == []
    follow(view, jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert lines_of(view) == [[[0, 1], [1, 3], [2, 5]], [[0, 2], [1, 4], [2, 6]]]
    assert view.figure.axes[0].get_yscale() == "log"
    assert view.events == 3
    assert view.figure is view.figure


def test_rare_events_know_their_number():
    view = ct.plot.live(every=10)
    follow(view, jnp.arange(25.0))
    assert lines_of(view) == [[[0, 0], [10, 10], [20, 20]]]


def test_a_history_with_places_has_a_gap_between_runs():
    view = ct.plot.live()
    for _ in range(2):
        with ct.outfeed_receiver():
            jax.jit(lambda: jax.lax.fori_loop(5, 7, lambda k, x: ct.id_tap(view, k, 2.0 * k, result=x), 0))()
    (line,) = lines_of(view)
    assert [place for place, _ in line] == [5, 6, 5, 5, 6]
    np.testing.assert_array_equal([y for _, y in line], [10, 12, np.nan, 10, 12])


def test_long_histories_are_thinned(monkeypatch):
    monkeypatch.setattr("ceedtap.live_plot._MOST_EVENTS", 50)
    view = ct.plot.live()
    follow(view, jnp.arange(1000.0))
    (line,) = lines_of(view)
    places = [place for place, _ in line]
    assert line == [[x, x] for x in places]
    assert 20 < len(line) <= 51
    assert set(np.diff(places)) == {32.0}


def test_lanes_are_lines_and_derivatives_are_not_drawn():
    view = ct.plot.live()
    with ct.outfeed_receiver():
        jax.vmap(jax.grad(lambda x: ct.id_tap(view, x) ** 2))(jnp.array([1.0, 2.0]))
    assert lines_of(view) == [[[0, 1]], [[0, 2]]]


def test_a_field_is_drawn_as_it_is_last(ceed):
    V = ct.Space(ceed, ct.mesh.box(2, 2), 1)
    view = ct.plot.live(V, label="u", cmap="magma")
    with ct.outfeed_receiver():
        jax.jit(lambda u: jax.lax.fori_loop(1, 4, lambda k, u: ct.id_tap(view, u * k, result=u), u))(jnp.arange(9.0))
    _, bar = view.figure.axes
    assert bar.get_ylim() == (0, 24)
    assert bar.get_ylabel() == "u"
    with ct.outfeed_receiver():
        ct.id_tap(view, jnp.arange(9.0), jnp.ones((9, 2)))
    assert view.figure.axes[0].get_xlim()[1] > 1.9


def test_files_are_replaced(tmp_path):
    view = ct.plot.live(path=str(tmp_path / "live.png"), interval=1000)
    follow(view, jnp.arange(3.0))  # drawn at the first event and at the end
    first = (tmp_path / "live.png").read_bytes()
    with image_module.open(io.BytesIO(first)) as image:
        assert image.size == (640, 320)
    ct.barrier_wait()  # nothing new, nothing drawn
    assert (tmp_path / "live.png").read_bytes() == first
    follow(view, jnp.arange(4.0))
    assert (tmp_path / "live.png").read_bytes() != first
    assert [file.name for file in tmp_path.iterdir()] == ["live.png"]


def test_drawing_is_rare(monkeypatch):
    shown = []
    monkeypatch.setattr("ceedtap.live_plot._replace", lambda path, content: shown.append(path))
    view = ct.plot.live(path="x.png", interval=1000)
    follow(view, jnp.arange(500.0))
    assert shown == ["x.png", "x.png"]


def test_errors_of_live_pictures(ceed):
    V = ct.Space(ceed, ct.mesh.box(1, 1), 1)
    for arguments, message in (
        ({"cmap": "magma"}, "cmap: only for fields"),
        ({"on": V, "ax": None}, "unknown options ax"),
        ({"on": V, "log": True}, "log= is for histories"),
        ({"on": 3}, "expected a Space"),
    ):
        with pytest.raises(TypeError, match=message):
            ct.plot.live(**arguments)
    with pytest.raises(ValueError, match="interval"):
        ct.plot.live(interval=0)
    view = ct.plot.live()
    with pytest.raises(ct.CallbackException) as caught, ct.outfeed_receiver():
        ct.id_tap(view, jnp.zeros(100))
    assert "ceedtap.plot.live(space)" in str(caught.value.exceptions[0])
    with ct.outfeed_receiver():  # said once
        ct.id_tap(view, jnp.zeros(100))
