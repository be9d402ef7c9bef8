"""Makes the mesh files of gmsh that the tests read: ``python make_meshes.py`` (needs ``pip install gmsh``).

A plate of two squares and a block of two cubes, with a plane in the middle that is in two groups, once the other way
around. Entities are in two groups, in one without a name, or in none.
"""

import contextlib
from pathlib import Path

HERE = Path(__file__).parent / "meshes"


def plate(gmsh):
    """Two squares side by side, of 2 x 2 cells each; x from 0 to 2, y from 0 to 1."""
    geo = gmsh.model.geo
    p = [geo.addPoint(x, y, 0) for x, y in ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))]
    lines = [geo.addLine(p[i], p[(i + 1) % 6]) for i in range(6)]
    middle = geo.addLine(p[1], p[4])  # upwards: its right side is x > 1
    left = geo.addPlaneSurface([geo.addCurveLoop([lines[0], middle, lines[4], lines[5]])])
    right = geo.addPlaneSurface([geo.addCurveLoop([lines[1], lines[2], lines[3], -middle])])
    geo.synchronize()
    group = gmsh.model.addPhysicalGroup
    group(2, [left], 1, "left half")
    group(2, [left, right], 2, "all of it")
    group(2, [right], 3)
    group(1, [middle], 4, "crack")
    group(1, [-middle], 5, "crack reversed")
    group(1, [lines[5], lines[0]], 6, "walls")
    group(1, [lines[0]], 7)
    group(0, [p[3]], 8, "pin")


def block(gmsh):
    """Two cubes side by side, of 2 x 2 x 2 cells each; x from 0 to 2, y and z from 0 to 1."""
    geo = gmsh.model.geo
    p = [geo.addPoint(0, y, z) for y, z in ((0, 0), (1, 0), (1, 1), (0, 1))]
    left = geo.addPlaneSurface([geo.addCurveLoop([geo.addLine(p[i], p[(i + 1) % 4]) for i in range(4)])])
    first = geo.extrude([(2, left)], 1, 0, 0, [2], recombine=True)
    second = geo.extrude([first[0]], 1, 0, 0, [2], recombine=True)
    geo.synchronize()
    group = gmsh.model.addPhysicalGroup
    group(3, [first[1][1], second[1][1]], 1, "all of it")
    group(3, [second[1][1]], 2, "right half")
    group(2, [first[0][1]], 3, "crack")
    group(2, [-first[0][1]], 4, "crack reversed")
    group(2, [second[0][1], first[2][1]], 5, "walls")


def write(model, name, **options):
    import gmsh

    gmsh.initialize()
    gmsh.option.setNumber("General.Terminal", 0)
    for option, value in options.items():
        gmsh.option.setNumber(f"Mesh.{option}", value)
    model(gmsh)
    for _, tag in gmsh.model.getEntities(1):
        gmsh.model.mesh.setTransfiniteCurve(tag, 3)
    for dim, tag in gmsh.model.getEntities(2):
        gmsh.model.mesh.setTransfiniteSurface(tag)
        gmsh.model.mesh.setRecombine(dim, tag)
    gmsh.model.mesh.generate(3 if model is block else 2)
    with contextlib.chdir(HERE):  # some formats have the name of the file in them: no path of a machine
        gmsh.write(name)
    gmsh.finalize()


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for model in (plate, block):
        name = model.__name__
        write(model, f"{name}.msh")
        write(model, f"{name}_all_binary.msh", SaveAll=1, Binary=1)
        write(model, f"{name}_22.msh", MshFileVersion=2.2)
    write(plate, "plate_all.msh", SaveAll=1)
    write(plate, "plate_order2.msh", ElementOrder=2, SaveAll=1)
    write(plate, "plate.su2")
    write(plate, "plate.inp")
