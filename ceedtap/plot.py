"""The files that ``ceedtap demo`` writes: a mesh file for ParaView and a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ceedtap import lattice
from ceedtap.space import Space

if TYPE_CHECKING:
    from ceedtap.demo import Result

_VIEW = (np.radians(-55), np.radians(24))  # azimuth and elevation of the viewer
_PIECES = 30_000  # all facets of a picture together are drawn in about as many


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

    mesh = result.space.mesh
    facets = mesh.num_cells if mesh.dim == 2 else len(mesh.boundary_facets)
    pieces = int(np.clip(round((_PIECES / facets) ** 0.5), 1, 24))
    points, values = facet_samples(result.space, result.solution, pieces)
    colours = ScalarMappable(Normalize(values.min(), values.max()), colormaps["viridis"])
    corners = _quads(points)  # (facets, quads, 4, dim)
    outlines = points[:, _outline(pieces + 1)]
    shade = np.ones(corners.shape[:2])
    order = np.arange(len(points))
    if result.space.dim == 3:
        axes = _view_axes()
        corners, outlines = corners @ axes.T, outlines @ axes.T
        normals = np.cross(corners[:, :, 2] - corners[:, :, 0], corners[:, :, 3] - corners[:, :, 1])
        normals = normals / np.maximum(np.linalg.norm(normals, axis=-1, keepdims=True), 1e-300)
        normals *= _outward(result.space)[:, None, None]
        light = np.array([-0.35, 0.45, 0.82])
        shade = 0.62 + 0.38 * np.clip(normals @ light, 0, 1)
        order = np.argsort(corners[..., 2].mean(axis=(1, 2)))
        order = order[normals[order, :, 2].max(axis=1) > 0]
    face = colours.to_rgba(_quads(values[..., None])[..., 0].mean(axis=-1))
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


def facet_samples(space: Space, u: np.ndarray, pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (facets, (pieces + 1)**2, dim) and values of `u` on a lattice on each facet of the surface.

    In two dimensions the cells themselves take the place of the facets.
    """
    x = lattice.equispaced_points(pieces + 1)
    degree, order = space.degree + 1, space.mesh.order + 1
    if space.dim == 2:
        nodes, geometry = space.element_nodes, space.mesh.cells
    else:
        rows = space.mesh.boundary_facets
        codes = lattice.facets(3)

        def on_facets(cells: np.ndarray, n: int) -> np.ndarray:
            local = np.stack([lattice.entity_nodes(code, n, True) for code in codes])
            return np.asarray(cells[rows[:, :1], local[rows[:, 1]]])

        nodes, geometry = on_facets(space.element_nodes, degree), on_facets(space.mesh.cells, order)
    values, _ = lattice.lagrange(lattice.lobatto_points(degree), x)
    places, _ = lattice.lagrange(lattice.equispaced_points(order), x)
    return lattice.tensor([places] * 2) @ space.mesh.points[geometry], u[nodes] @ lattice.tensor([values] * 2).T


def _quads(samples: np.ndarray) -> np.ndarray:
    """Samples (facets, n**2, k) on lattices -> corners (facets, (n - 1)**2, 4, k) of the pieces between them."""
    n = round(samples.shape[1] ** 0.5)
    first = (np.arange(n - 1)[:, None] * n + np.arange(n - 1)).reshape(-1, 1)
    return np.asarray(samples[:, first + np.array([0, 1, n + 1, n])])


def _outline(n: int) -> np.ndarray:
    """Positions of the rim of a lattice with n**2 points, in a cycle."""
    index = np.arange(n * n).reshape(n, n)
    return np.concatenate([index[0], index[1:, -1], index[-1, -2::-1], index[-2:0:-1, 0]])


def _outward(space: Space) -> np.ndarray:
    """For each facet of the surface: 1 when its two directions and the outward normal are right-handed, else -1."""
    # The facets about y have the directions x and z, which are left-handed.
    signs = np.array([-1, 1, 1, -1, -1, 1])
    return np.asarray(signs[space.mesh.boundary_facets[:, 1]])


def _view_axes() -> np.ndarray:
    """Rows: right, up and towards the viewer."""
    azimuth, elevation = _VIEW
    towards = np.array([np.cos(elevation) * np.cos(azimuth), np.cos(elevation) * np.sin(azimuth), np.sin(elevation)])
    right = np.array([-np.sin(azimuth), np.cos(azimuth), 0.0])
    return np.stack([right, np.cross(towards, right), towards])
