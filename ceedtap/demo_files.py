"""The files that ``ceedtap demo`` writes: a mesh file for ParaView and a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ceedtap.pieces import cut

if TYPE_CHECKING:
    from ceedtap.demo import Result

_VIEW = (np.radians(-55), np.radians(24))  # azimuth and elevation of the viewer


def write_vtu(path: str | os.PathLike[str], result: Result) -> None:
    """Writes solution, exact solution and error at the nodes, on cells split at the nodes into first-order ones.

    Raises:
        ImportError: meshio is not installed.
    """
    import meshio

    points = result.space.nodes
    points = np.pad(points, [(0, 0), (0, 3 - points.shape[1])])  # VTK's points have three coordinates
    cell_type = "hexahedron" if result.space.dim == 3 else "quad"
    data = {"solution": result.solution, "exact": result.exact, "error": result.solution - result.exact}
    meshio.Mesh(points, [(cell_type, result.space.linear_cells())], point_data=data).write(path, file_format="vtu")


def draw(path: str | os.PathLike[str], results: list[Result]) -> None:
    """Draws the convergence history and every solution on the surface of its mesh.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 + 4.6 * len(results), 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1 + len(results), width_ratios=[1.15] + [1.0] * len(results))
    colours = ["#3b6fb6", "#d1603d", "#4f8f4f", "#8a5ea8"]
    history = axes[0]
    for result, colour in zip(results, colours, strict=False):
        label = f"{result.name}, {result.space.lsize} unknowns"
        history.semilogy(np.maximum(result.residuals, 1e-300), color=colour, lw=1.6, label=label)
        history.plot(result.iterations, max(result.residuals[-1], 1e-300), "o", color=colour, ms=4)
    history.set(title="Residual of every iteration, as tapped", xlabel="iteration", ylabel="relative residual norm")
    history.set_xlim(left=0)
    history.grid(which="major", color="0.9")
    history.set_axisbelow(True)
    history.spines[["top", "right"]].set_visible(False)
    history.legend(frameon=False, loc="upper right")
    for axis, result in zip(axes[1:], results, strict=True):
        surface = _draw_surface(axis, result)
        figure.colorbar(surface, ax=axis, shrink=0.75, aspect=30, pad=0.02).outline.set_visible(False)
        error = result.l2_error / result.l2_norm
        axis.set_title(f"{result.name}, degree {result.space.degree}: relative error {error:.1e}")
    figure.savefig(path, facecolor="white")


def _draw_surface(axis: Any, result: Result) -> Any:
    """Facets that face the viewer, the farthest first; returns what the colour bar belongs to."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize

    pieces = cut(result.space, result.solution, surface=True)
    colours = ScalarMappable(Normalize(pieces.values.min(), pieces.values.max()), colormaps["viridis"])
    corners, outlines = pieces.corners(pieces.points), pieces.outlines()
    shade = np.ones(corners.shape[:2])
    order = np.arange(len(corners))
    if result.space.dim == 3:
        axes = _view_axes()
        corners, outlines = corners @ axes.T, outlines @ axes.T
        normals = np.cross(corners[:, :, 2] - corners[:, :, 0], corners[:, :, 3] - corners[:, :, 1])
        normals = normals / np.maximum(np.linalg.norm(normals, axis=-1, keepdims=True), 1e-300)
        light = np.array([-0.35, 0.45, 0.82])
        shade = 0.62 + 0.38 * np.clip(normals @ light, 0, 1)
        order = np.argsort(corners[..., 2].mean(axis=(1, 2)))
        order = order[normals[order, :, 2].max(axis=1) > 0]
    face = colours.to_rgba(pieces.piece_values)
    face[..., :3] *= shade[..., None]
    polygons: list[np.ndarray] = []
    fill: list[Any] = []
    line: list[Any] = []
    for facet in order:
        polygons += [*corners[facet, :, :, :2], outlines[facet, :, :2]]
        fill += [*face[facet], (0, 0, 0, 0)]
        line += [*face[facet], (0, 0, 0, 0.45)]
    axis.add_collection(PolyCollection(polygons, facecolors=fill, edgecolors=line, linewidths=0.3))
    axis.autoscale_view()
    axis.set_aspect("equal")
    axis.set_axis_off()
    return colours


def _view_axes() -> np.ndarray:
    """Rows: right, up and towards the viewer."""
    azimuth, elevation = _VIEW
    towards = np.array([np.cos(elevation) * np.cos(azimuth), np.cos(elevation) * np.sin(azimuth), np.sin(elevation)])
    right = np.array([-np.sin(azimuth), np.cos(azimuth), 0.0])
    return np.stack([right, np.cross(towards, right), towards])
