"""Make ``plate_with_hole.msh``: a quarter of a square plate with a circular hole, second-order quadrilaterals.

The plate is [0, SIDE]**2 without the disc of radius ``HOLE`` around the origin; the exact area is

    A = SIDE**2 - pi * HOLE**2 / 4

Run it with the Python package ``gmsh`` installed: ``python make_plate_with_hole.py [size [file]]``.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

SIDE = 2.0  # length of the quarter's sides
HOLE = 0.5  # radius of the hole
SIZE = 0.4  # target size of the quadrilaterals

AREA = SIDE**2 - math.pi * HOLE**2 / 4


def make(path: str | Path, size: float = SIZE) -> None:
    """Write the mesh in MSH 4.1 (text) with the groups plate, hole, left, right, bottom and top."""
    import gmsh

    gmsh.initialize(interruptible=False)
    try:
        gmsh.option.setNumber("General.Terminal", 0)
        gmsh.model.add("plate_with_hole")
        occ = gmsh.model.occ
        square = occ.addRectangle(0, 0, 0, SIDE, SIDE)
        disc = occ.addDisk(0, 0, 0, HOLE, HOLE)
        plate = [tag for _, tag in occ.cut([(2, square)], [(2, disc)])[0]]
        occ.synchronize()
        edges: dict[str, list[int]] = {"hole": [], "left": [], "right": [], "bottom": [], "top": []}
        for _, tag in gmsh.model.getBoundary([(2, tag) for tag in plate], oriented=False):
            x, y, _ = occ.getCenterOfMass(1, tag)
            distances = {"left": x, "right": SIDE - x, "bottom": y, "top": SIDE - y}
            nearest = min(distances, key=lambda side: distances[side])
            edges[nearest if distances[nearest] < 1e-6 else "hole"].append(tag)
        gmsh.model.addPhysicalGroup(2, plate, name="plate")
        for name, tags in edges.items():
            gmsh.model.addPhysicalGroup(1, tags, name=name)
        gmsh.option.setNumber("Mesh.MeshSizeMin", size)
        gmsh.option.setNumber("Mesh.MeshSizeMax", size)
        gmsh.option.setNumber("Mesh.Algorithm", 8)  # Frontal-Delaunay for quadrilaterals
        gmsh.option.setNumber("Mesh.RecombinationAlgorithm", 3)  # blossom, full-quad: no triangle is left over
        for tag in plate:
            gmsh.model.mesh.setRecombine(2, tag)
            for _, curve in gmsh.model.getBoundary([(2, tag)], oriented=False):
                # The recombination starts from twice the size, where quadrilaterals need an even number of edges too.
                gmsh.model.mesh.setTransfiniteCurve(curve, 4 * math.ceil(occ.getMass(1, curve) / size / 4) + 1)
        gmsh.model.mesh.generate(2)
        triangles = gmsh.model.mesh.getElementsByType(2)[0]
        if len(triangles):
            raise RuntimeError(f"gmsh left {len(triangles)} triangles at size {size}; choose another size")
        gmsh.model.mesh.setOrder(2)
        gmsh.option.setNumber("Mesh.MshFileVersion", 4.1)
        gmsh.option.setNumber("Mesh.Binary", 0)
        gmsh.write(str(path))
    finally:
        gmsh.finalize()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    make(
        arguments[1] if len(arguments) > 1 else Path(__file__).with_name("plate_with_hole.msh"),
        float(arguments[0]) if arguments else SIZE,
    )
