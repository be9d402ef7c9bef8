"""Make ``pipe_elbow.msh``: a quarter-turn pipe elbow of second-order hexahedra.

The cross-section is an annulus around the circle of radius ``BEND``; it is meshed with unstructured quadrilaterals and
revolved about the z axis by ``ANGLE``. By the theorem of Pappus the exact volume is

    V = ANGLE * BEND * pi * (OUTER**2 - INNER**2)

Run it with the Python package ``gmsh`` installed: ``python make_pipe_elbow.py [size [layers [file]]]``.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

INNER = 0.6  # inner radius of the pipe
OUTER = 1.0  # outer radius of the pipe
BEND = 2.5  # radius of the pipe's centre line
ANGLE = math.pi / 2  # angle of the bend
SIZE = 0.27  # target size of the quadrilaterals
LAYERS = 10  # cells along the bend

VOLUME = ANGLE * BEND * math.pi * (OUTER**2 - INNER**2)


def make(path: str | Path, size: float = SIZE, layers: int = LAYERS) -> None:
    """Write the mesh in MSH 4.1 (text) with the groups elbow, inlet, outlet, outer wall and inner wall."""
    import gmsh

    gmsh.initialize(interruptible=False)
    try:
        gmsh.option.setNumber("General.Terminal", 0)
        gmsh.model.add("pipe_elbow")
        occ, model_mesh = gmsh.model.occ, gmsh.model.mesh
        centre = (BEND, 0.0, 0.0)
        axes = {"zAxis": (0.0, 1.0, 0.0), "xAxis": (1.0, 0.0, 0.0)}
        outer = occ.addDisk(*centre, OUTER, OUTER, **axes)
        inner = occ.addDisk(*centre, INNER, INNER, **axes)
        section = occ.cut([(2, outer)], [(2, inner)])[0]
        swept = occ.revolve(section, 0, 0, 0, 0, 0, 1, ANGLE, numElements=[layers], recombine=True)
        occ.synchronize()
        volumes = [tag for dim, tag in swept if dim == 3]
        inlet = [tag for _, tag in section]
        faces: dict[str, list[int]] = {"inlet": inlet, "outlet": [], "outer wall": [], "inner wall": []}
        for _, tag in gmsh.model.getBoundary([(3, tag) for tag in volumes], oriented=False):
            if tag in inlet:
                continue
            x, *_ = gmsh.model.occ.getCenterOfMass(2, tag)
            area = occ.getMass(2, tag)
            wall = {name: ANGLE * BEND * 2 * math.pi * r for name, r in (("outer wall", OUTER), ("inner wall", INNER))}
            name = "outlet" if abs(x) < 1e-6 else min(wall, key=lambda known: abs(wall[known] - area))
            faces[name].append(tag)
        gmsh.model.addPhysicalGroup(3, volumes, name="elbow")
        for name, tags in faces.items():
            gmsh.model.addPhysicalGroup(2, tags, name=name)
        gmsh.option.setNumber("Mesh.MeshSizeMin", size)
        gmsh.option.setNumber("Mesh.MeshSizeMax", size)
        gmsh.option.setNumber("Mesh.Algorithm", 8)  # Frontal-Delaunay for quadrilaterals
        gmsh.option.setNumber("Mesh.RecombinationAlgorithm", 3)  # blossom, full-quad: no triangle is left over
        for tag in inlet:
            model_mesh.setRecombine(2, tag)
            for _, curve in gmsh.model.getBoundary([(2, tag)], oriented=False):
                # The recombination starts from twice the size, where quadrilaterals need an even number of edges too.
                model_mesh.setTransfiniteCurve(curve, 4 * math.ceil(occ.getMass(1, curve) / size / 4) + 1)
        model_mesh.generate(3)
        triangles = gmsh.model.mesh.getElementsByType(2)[0]
        if len(triangles):
            raise RuntimeError(f"gmsh left {len(triangles)} triangles at size {size}; choose another size")
        model_mesh.setOrder(2)
        gmsh.option.setNumber("Mesh.MshFileVersion", 4.1)
        gmsh.option.setNumber("Mesh.Binary", 0)
        gmsh.write(str(path))
    finally:
        gmsh.finalize()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    make(
        arguments[2] if len(arguments) > 2 else Path(__file__).with_name("pipe_elbow.msh"),
        float(arguments[0]) if arguments else SIZE,
        int(arguments[1]) if len(arguments) > 1 else LAYERS,
    )
