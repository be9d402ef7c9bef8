"""Pictures of fields, and pictures that follow a running program: `field`, `live`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ceedtap.live_plot import Live
from ceedtap.pieces import Pieces, cut, elements_of

if TYPE_CHECKING:
    from ceedtap.elements import LagrangeElements
    from ceedtap.lattice import FloatArray
    from ceedtap.mesh import Mesh

__all__ = ["Live", "field", "live"]

_LIGHT = np.array([-0.4, -0.5, 0.77])
#: Lines between elements are drawn by themselves up to this number of elements.
_LINES_UP_TO = 4000


def field(
    on: LagrangeElements | Mesh,
    values: npt.ArrayLike,
    displacement: npt.ArrayLike | None = None,
    *,
    ax: Any = None,
    label: str = "",
    cmap: str = "viridis",
    vmin: float | None = None,
    vmax: float | None = None,
    lines: bool | None = None,
    colorbar: bool = True,
    backend: Literal["matplotlib", "pyvista"] | None = None,
) -> Any:
    """Draws a field: filled in two dimensions, on the surface in three.

    A field of a higher degree, and curved geometry, are drawn as what they are: elements are cut into pieces. Values at
    quadrature points, and values of elements, are drawn as constant around their points. Values that are not finite
    leave a hole.

    Args:
        on: a :class:`ceedtap.Space`, the trace of one on a boundary, or a mesh, whose points are the nodes then.
        values: an array of shape (num_nodes,), or (num_nodes, components), of which the length is drawn; (elements,),
            one value for each; or (elements, points), values at the quadrature points.
        displacement: (num_nodes, dim), by which the geometry is moved.
        ax: matplotlib's Axes to draw in, with ``projection="3d"`` for three dimensions; None: those of a new figure.
        label: of the colour bar.
        cmap: name of matplotlib's colour map.
        vmin, vmax: the values at the ends of the colour map; by default the smallest and the largest.
        lines: whether to draw the edges of the elements; by default where they are not too many.
        colorbar: whether to draw one.
        backend: None is matplotlib in two dimensions and where `ax` is given; in three dimensions pyvista if it is
            installed, else matplotlib.

    Returns:
        matplotlib's Axes, or pyvista's Plotter, whose method `show` opens the picture.

    Raises:
        ValueError: the arrays have other shapes; the message lists those that fit.
        ImportError: neither package is installed.

    >>> import ceedtap as ct
    >>> V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(3, 2), degree=2)
    >>> ax = ct.plot.field(V, V.interpolate(lambda x: x[:, 0] * x[:, 1]), label="x y", backend="matplotlib")
    >>> ax.figure.savefig("picture.png")  # doctest: +SKIP
    """
    if backend not in (None, "matplotlib", "pyvista"):
        raise ValueError(f"backend is None, 'matplotlib' or 'pyvista', got {backend!r}")
    if ax is not None and backend == "pyvista":
        raise ValueError("ax= is for matplotlib; pyvista draws in a window of its own")
    in_space = cut(on, values, displacement)
    space_dim = in_space.points.shape[-1]
    if backend is None and ax is None and space_dim == 3 and _has_pyvista():
        backend = "pyvista"
    pieces = in_space if in_space.dim < 3 else cut(on, values, displacement, surface=True)
    if lines is None:
        lines = len(pieces.points) <= _LINES_UP_TO
    low, high = _limits(pieces.values if backend != "pyvista" else in_space.values, vmin, vmax)
    if backend == "pyvista":
        return _draw_pyvista(in_space, pieces if lines else None, label, cmap, (low, high), colorbar)
    ax = _axes(ax, space_dim)
    drawn = (_draw_plane if space_dim == 2 else _draw_surface)(ax, pieces, lines, cmap=cmap, clim=(low, high))
    if colorbar:
        bar = ax.figure.colorbar(drawn, ax=ax, label=label, shrink=0.8, pad=0.03 if space_dim == 2 else 0.1)
        bar.outline.set_visible(False)
    return ax


def live(
    on: LagrangeElements | Mesh | None = None,
    *,
    label: str | list[str] = "",
    log: bool = False,
    interval: float = 0.5,
    path: str | None = None,
    every: int = 1,
    **options: Any,
) -> Live:
    """A picture that follows a running program; a consumer for :func:`ceedtap.id_tap`.

    In a notebook it appears in the cell that runs, and is drawn anew at most every `interval` seconds, and once more
    when everything has arrived (:func:`ceedtap.barrier_wait`, the end of :func:`ceedtap.outfeed_receiver`). Elsewhere
    it is written to `path`, if that is given; ``figure`` has it in any case. The program does not wait for it, and
    pictures take no more than a fifth of the receiver's time.

    Args:
        on: a space or mesh: the latest values are drawn as by :func:`field`; a second tapped value is the displacement.
            None: a history of numbers. Tap a number, or several for a line each, or two values, place and numbers:
            ``ct.id_tap(view, k, residual)``.
        label: of the colour bar; of the numbers, or of each line.
        log: a logarithmic axis for the numbers.
        interval: seconds.
        path: of a file, such as ``"live.png"``, that is replaced whenever the picture is drawn.
        every: only every n-th event is sent.
        options: of :func:`field`: `cmap`, `vmin`, `vmax`, `lines`, `colorbar`.

    Raises:
        TypeError: options that do not fit to what is drawn.
        ImportError: matplotlib is not installed.

    Derivatives are not drawn. Of a batch, every lane of a number is a line; fields of a batch are refused.

    >>> import ceedtap as ct, jax
    >>> view = ct.plot.live(label="x", log=True)
    >>> with ct.outfeed_receiver():
    ...     _ = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda k, x: ct.id_tap(view, k, x / 2)[1], x))(1.0)
    >>> view.figure.savefig("history.png")  # doctest: +SKIP
    """
    if on is None and options:
        raise TypeError(f"{', '.join(options)}: only for fields; pass a space or mesh")
    if unknown := set(options) - {"cmap", "vmin", "vmax", "lines", "colorbar"}:
        raise TypeError(f"unknown options {', '.join(sorted(unknown))}")
    if on is not None and log:
        raise TypeError("log= is for histories of numbers, without a space or mesh")
    if not interval > 0:
        raise ValueError(f"interval: expected a positive number of seconds, got {interval!r}")
    _need_matplotlib(2)
    draw_field: Callable[..., Any] | None = None
    dim = 2
    if on is not None:
        dim = elements_of(on).points.shape[1]

        def draw_field(ax: Any, values: Any, displacement: Any = None) -> None:
            field(on, values, displacement, ax=ax, label=label if isinstance(label, str) else "", **options)

    return Live(draw_field, dim, label, log, interval, path, every)


def _limits(values: FloatArray, vmin: float | None, vmax: float | None) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    low = float(finite.min()) if finite.size else 0.0
    high = float(finite.max()) if finite.size else 1.0
    return low if vmin is None else vmin, high if vmax is None else vmax


def _need_matplotlib(dim: int) -> Any:
    try:
        import matplotlib
    except ImportError as error:
        more = ", or pyvista: pip install 'ceedtap[plot3d]'" if dim == 3 else ""
        raise ImportError(f"pictures need matplotlib: pip install 'ceedtap[plot]'{more}") from error
    return matplotlib


def _axes(ax: Any, dim: int) -> Any:
    mpl = _need_matplotlib(dim)
    if ax is None:
        from matplotlib import pyplot

        with mpl.rc_context({"figure.constrained_layout.use": True}):
            figure = pyplot.figure()
        ax = figure.add_subplot(projection="3d" if dim == 3 else None)
    if hasattr(ax, "get_zlim") != (dim == 3):
        need = 'with projection="3d"' if dim == 3 else "in the plane"
        raise ValueError(f"ax: a field in {dim} dimensions needs Axes {need}, got {type(ax).__name__}")
    return ax


def _draw_plane(ax: Any, pieces: Pieces, lines: bool, cmap: str, clim: tuple[float, float]) -> Any:
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.tri import Triangulation

    points = pieces.points
    corners: Any = pieces.corners(points).reshape(-1, 2**pieces.dim, 2)
    outlines: Any = pieces.outlines() if lines and pieces.dim == 2 else None
    drawn: Any
    if pieces.dim == 1:
        drawn = LineCollection(corners, array=pieces.piece_values.ravel(), cmap=cmap, linewidths=4, capstyle="butt")
        ax.add_collection(drawn)
    elif pieces.by_piece or not np.isfinite(pieces.piece_values).any():
        drawn = PolyCollection(corners, array=pieces.piece_values.ravel(), cmap=cmap, edgecolors="face", linewidths=0.8)
        ax.add_collection(drawn)
    else:
        quads = pieces.corners(np.arange(points[..., 0].size).reshape(points.shape[:2])).reshape(-1, 4)
        triangles = np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])
        values = np.ma.masked_invalid(pieces.values.ravel())
        bad = np.ma.getmaskarray(values)[triangles].any(axis=1)
        grid = Triangulation(points[..., 0].ravel(), points[..., 1].ravel(), triangles[~bad])
        # In files for print the colours between corners are pixels; no other form is drawn alike everywhere.
        drawn = ax.tripcolor(grid, values.filled(0.0), shading="gouraud", cmap=cmap, rasterized=True)
    drawn.set_clim(*clim)
    if outlines is not None:
        ax.add_collection(LineCollection(outlines, colors="black", alpha=0.35, linewidths=0.5))
    ax.autoscale_view()
    ax.set_aspect("equal")
    ax.spines[["top", "right"]].set_visible(False)
    return drawn


def _draw_surface(ax: Any, pieces: Pieces, lines: bool, cmap: str, clim: tuple[float, float]) -> Any:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from mpl_toolkits.mplot3d.art3d import Line3DCollection, Poly3DCollection

    colours = ScalarMappable(Normalize(*clim), colormaps[cmap])
    corners = pieces.corners(pieces.points).reshape(-1, 2**pieces.dim, 3)
    values = pieces.piece_values.ravel()
    corners, values = corners[np.isfinite(values)], values[np.isfinite(values)]
    face = colours.to_rgba(values)
    if pieces.dim == 1:
        ax.add_collection3d(Line3DCollection(corners, colors=face, linewidths=3))
    else:
        normals = np.cross(corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1])
        normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-300)
        face[:, :3] *= (0.7 + 0.3 * np.clip(normals @ _LIGHT, 0, 1))[:, None]
        edges = face
        if lines:
            # Lines are thin triangles among the others, so that those in front hide them.
            outlines = pieces.outlines()
            rim = np.stack([outlines[:, :-1], outlines[:, 1:], outlines[:, 1:], outlines[:, :-1]], axis=2)
            corners = np.concatenate([corners, rim.reshape(-1, 4, 3)])
            count = len(corners) - len(face)
            edges = np.concatenate([face, np.tile([0, 0, 0, 0.5], (count, 1))])
            face = np.concatenate([face, np.zeros((count, 4))])
        ax.add_collection3d(Poly3DCollection(corners, facecolors=face, edgecolors=edges, linewidths=0.4))
    low, high = pieces.points.min(axis=(0, 1)), pieces.points.max(axis=(0, 1))
    room = np.maximum(high - low, 0.1 * (high - low).max())
    for axis, middle, length in zip("xyz", (low + high) / 2, room, strict=True):
        ax.set(**{f"{axis}lim": (middle - length / 2, middle + length / 2)})
    ax.set(xlabel="x", ylabel="y", zlabel="z")
    ax.set_box_aspect(room)
    return colours


def _has_pyvista() -> bool:
    try:
        import pyvista  # noqa: F401
    except ImportError:
        return False
    return True


def _draw_pyvista(
    pieces: Pieces, edges: Pieces | None, label: str, cmap: str, clim: tuple[float, float], colorbar: bool
) -> Any:
    try:
        import pyvista
    except ImportError as error:
        raise ImportError("backend 'pyvista' needs that package: pip install 'ceedtap[plot3d]'") from error
    points = _in_space(pieces.points)
    quads = pieces.corners(np.arange(points[..., 0].size).reshape(points.shape[:2])).reshape(-1, 2**pieces.dim)
    kind = (pyvista.CellType.LINE, pyvista.CellType.QUAD, pyvista.CellType.HEXAHEDRON)[pieces.dim - 1]
    known = np.isfinite(pieces.piece_values).ravel()
    grid = pyvista.UnstructuredGrid({kind: quads[known]}, points.reshape(-1, 3))
    name = label or "values"
    if pieces.by_piece:
        grid.cell_data[name] = pieces.values.ravel()[known]
    else:
        grid.point_data[name] = pieces.values.ravel()
    plotter = pyvista.Plotter()
    plotter.add_mesh(grid, scalars=name, cmap=cmap, clim=clim, show_scalar_bar=colorbar, line_width=5)
    if edges is not None and edges.dim == 2:
        outlines = _in_space(edges.outlines())
        segments = np.stack([outlines[:, :-1], outlines[:, 1:]], axis=2).reshape(-1, 3)
        plotter.add_mesh(pyvista.line_segments_from_points(segments), color="#404040", line_width=1)
    if pieces.points.shape[-1] == 2:
        plotter.view_xy()
    return plotter


def _in_space(points: FloatArray) -> FloatArray:
    """With a third coordinate."""
    return np.pad(points, [(0, 0), (0, 0), (0, 3 - points.shape[-1])])
