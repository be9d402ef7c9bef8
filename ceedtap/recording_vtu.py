"""Recorded fields as VTU files with a PVD file, which ParaView opens as a series in time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

import numpy as np

from ceedtap import lattice, recording_names

if TYPE_CHECKING:
    from ceedtap.recording import Series


def write(series: Series, path: str, mesh: Any) -> None:
    """Writes ``NAME.pvd`` and, for each event, ``NAME/NUMBER.vtu``; see :meth:`ceedtap.recording.Series.export`."""
    try:
        import meshio
    except ImportError as error:
        raise ImportError("export to .pvd needs meshio: pip install ceedtap[mesh]") from error
    if mesh is None:
        raise ValueError("export to .pvd needs mesh=, the ceedtap.mesh.Mesh or ceedtap.Space of the fields")
    nodes, cell_nodes, order, num_cells = _parts(mesh)
    dim = nodes.shape[1]
    cells = [("hexahedron" if dim == 3 else "quad", lattice.linear_cells(cell_nodes, order, dim))]
    points = np.pad(nodes, [(0, 0), (0, 3 - dim)])  # VTK's points have three coordinates
    name = Path(path).with_suffix("").name
    directory = Path(path).with_suffix("")
    directory.mkdir(exist_ok=True)
    own = recording_names.distinct(recording_names.of_leaf(leaf, series.tap) for leaf in series.leaves)
    names = dict(zip(series.leaves, recording_names.in_files(own, ()).values(), strict=True))
    entries = []
    for number, (step, event) in enumerate(zip(series.steps.tolist(), series.events(), strict=True)):
        arrays = {names[leaf]: _plain(series[leaf][number]) for leaf in series.leaves}
        at_points = {key: a for key, a in arrays.items() if a.ndim in (1, 2) and len(a) == len(points)}
        in_cells = {key: a for key, a in arrays.items() if a.ndim in (1, 2) and len(a) == num_cells}
        if not at_points and not in_cells:
            shapes = ", ".join(f"{key}: {a.shape}" for key, a in arrays.items())
            raise ValueError(
                f"export to .pvd: no array has a row for each of the {len(points)} nodes or {num_cells} cells of the "
                f"mesh; there are {shapes}"
            )
        pieces = len(cells[0][1]) // num_cells  # first-order cells of one cell
        cell_data = {key: [np.repeat(a, pieces, axis=0)] for key, a in in_cells.items() if key not in at_points}
        file = f"{number:06d}.vtu"
        meshio.Mesh(points, cells, point_data=at_points, cell_data=cell_data).write(directory / file)
        label = f"part={quoteattr(str(max(0, event.device)))} file={quoteattr(f'{name}/{file}')}"
        entries.append(f'    <DataSet timestep="{step}" {label}/>\n')
    Path(path).write_text(
        '<?xml version="1.0"?>\n<VTKFile type="Collection" version="0.1" byte_order="LittleEndian">\n  <Collection>\n'
        + "".join(entries)
        + "  </Collection>\n</VTKFile>\n",
        encoding="utf-8",
    )


def _parts(mesh: Any) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Coordinates of the nodes, the nodes of every cell, their degree, and the number of cells."""
    from ceedtap.mesh import Mesh

    if isinstance(mesh, Mesh):
        return mesh.points, mesh.cells, mesh.order, mesh.num_cells
    from ceedtap.space import Space

    if isinstance(mesh, Space):
        return mesh.nodes, mesh.element_nodes, mesh.degree, mesh.mesh.num_cells
    raise TypeError(f"export: mesh is a ceedtap.mesh.Mesh or a ceedtap.Space, got {type(mesh).__name__}")


def _plain(array: np.ndarray) -> np.ndarray:
    """Of a type that VTK knows."""
    if array.dtype.kind == "c":
        raise ValueError("export to .pvd: VTK has no complex numbers; record their real and imaginary parts")
    if array.dtype.kind not in "iuf" or array.dtype == np.float16:
        return array.astype(np.int8 if array.dtype == np.bool_ else np.float32)
    return array
