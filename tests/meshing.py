"""Tools of the mesh tests, independent of libCEED: renumbered meshes, file node orders, NumPy finite elements."""

import itertools

import numpy as np
import scipy.sparse

from ceedtap import lattice
from ceedtap.mesh import Mesh, gradients


def symmetries(dim, determinant=1):
    """The signed permutation matrices of a determinant: 4 rotations of the square, 24 of the cube, or reflections."""
    found = []
    for axes in itertools.permutations(range(dim)):
        for signs in itertools.product((1, -1), repeat=dim):
            matrix = np.zeros((dim, dim), dtype=int)
            matrix[range(dim), axes] = signs
            if round(np.linalg.det(matrix)) == determinant:
                found.append(matrix)
    return found


def renumber_cells(mesh, choice):
    """The cells of a mesh after giving cell ``c`` the local frame ``choice[c]`` (signed permutation matrices)."""
    n = mesh.order + 1
    centred = 2 * lattice.lexicographic(n, mesh.dim) - mesh.order
    strides = n ** np.arange(mesh.dim)
    cells = np.empty_like(mesh.cells)
    kinds = []
    for codes in (lattice.facets(mesh.dim), lattice.ridges(mesh.dim)):
        centres = np.array([[{0: -1, 1: 1, 2: 0}[c] for c in code] for code in codes])
        kinds.append((centres, np.empty((mesh.num_cells, len(codes)), dtype=int)))
    for c, frame in enumerate(choice):
        cells[c] = mesh.cells[c, ((centred @ frame.T + mesh.order) // 2) @ strides]
        for centres, new_number in kinds:
            for new, old in enumerate(centres @ frame.T):  # the old centre of each new facet or ridge
                new_number[c, np.flatnonzero((centres == old).all(axis=1))[0]] = new
    boundary, ridges = (
        {name: np.stack([rows[:, 0], new_number[rows[:, 0], rows[:, 1]]], axis=1) for name, rows in sets.items()}
        for sets, (_, new_number) in zip((mesh.boundary, mesh.ridges), kinds, strict=True)
    )
    return Mesh(mesh.points, cells, mesh.order, boundary, mesh.regions, ridges)


def scramble(mesh, seed, reflect=False):
    """The same mesh with permuted points and cells and a random rotation (or reflection too) of every cell's frame."""
    rng = np.random.default_rng(seed)
    frames = symmetries(mesh.dim) + (symmetries(mesh.dim, -1) if reflect else [])
    mesh = renumber_cells(mesh, [frames[i] for i in rng.integers(len(frames), size=mesh.num_cells)])
    point = rng.permutation(mesh.num_points)
    cell = rng.permutation(mesh.num_cells)  # old number at each new place
    place = np.argsort(cell)
    points = np.empty_like(mesh.points)
    points[point] = mesh.points
    boundary, ridges = (
        {name: np.stack([place[r[:, 0]], r[:, 1]], axis=1) for name, r in sets.items()}
        for sets in (mesh.boundary, mesh.ridges)
    )
    regions = {name: place[ids] for name, ids in mesh.regions.items()}
    return Mesh(points, point[mesh.cells][cell], mesh.order, boundary, regions, ridges)


# Reference positions (0, 1, 2 per direction) of VTK's nodes, from the figures of the VTK user's guide.
VTK = {
    "quad": [(0, 0), (2, 0), (2, 2), (0, 2)],
    "hexahedron": [(0, 0, 0), (2, 0, 0), (2, 2, 0), (0, 2, 0), (0, 0, 2), (2, 0, 2), (2, 2, 2), (0, 2, 2)],
}
VTK["quad8"] = [*VTK["quad"], (1, 0), (2, 1), (1, 2), (0, 1)]
VTK["quad9"] = [*VTK["quad8"], (1, 1)]
VTK["hexahedron20"] = [
    *VTK["hexahedron"],
    *[(1, 0, 0), (2, 1, 0), (1, 2, 0), (0, 1, 0), (1, 0, 2), (2, 1, 2), (1, 2, 2), (0, 1, 2)],
    *[(0, 0, 1), (2, 0, 1), (2, 2, 1), (0, 2, 1)],
]
VTK["hexahedron27"] = [
    *VTK["hexahedron20"],
    *[(0, 1, 1), (2, 1, 1), (1, 0, 1), (1, 2, 1), (1, 1, 0), (1, 1, 2), (1, 1, 1)],
]
# Gmsh's own order of the 27-node hexahedron, from the figures of its reference manual.
GMSH27 = [
    *VTK["hexahedron"],
    *[(1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 1, 0), (2, 0, 1), (1, 2, 0)],
    *[(2, 2, 1), (0, 2, 1), (1, 0, 2), (0, 1, 2), (2, 1, 2), (1, 2, 2)],
    *[(1, 1, 0), (1, 0, 1), (0, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)],
]


def file_cells(mesh, positions):
    """The cells of a mesh in the node order given by reference positions; 2-node directions use 0 and 2."""
    n = mesh.order + 1
    index = np.asarray(positions) * mesh.order // 2 @ n ** np.arange(mesh.dim)
    return mesh.cells[:, index]


def facet_corners(mesh, rows):
    """The corner points of facets in the cyclic order of files."""
    local = np.stack([lattice.entity_nodes(code, 2, True) for code in lattice.facets(mesh.dim)])
    corners = np.take_along_axis(mesh.corners[rows[:, 0]], local[rows[:, 1]], axis=1)
    return corners if mesh.dim == 2 else corners[:, [0, 1, 3, 2]]


def jacobians(mesh, x):
    """(num_cells, len(x)**dim, dim, dim) derivatives dx_i / dX_j at a lattice of reference points."""
    return np.stack([table @ mesh.points[mesh.cells] for table in gradients(mesh.order, mesh.dim, x)], axis=-1)


def volume(mesh, points=4):
    """Volume (area) by Gauss quadrature, exact for these geometries."""
    x, w = np.polynomial.legendre.leggauss(points)
    return float((np.linalg.det(jacobians(mesh, x)) @ lattice.tensor([w[:, None]] * mesh.dim)[:, 0]).sum())


class Elements:
    """Mass, stiffness, load and errors of a scalar space by plain NumPy."""

    def __init__(self, space):
        mesh, dim = space.mesh, space.mesh.dim
        x, w = np.polynomial.legendre.leggauss(space.quadrature)
        value, slope = lattice.lagrange(lattice.lobatto_points(space.degree + 1), x)
        self.space = space
        self.values = lattice.tensor([value] * dim)
        self.slopes = np.stack(
            [lattice.tensor([slope if d == e else value for e in range(dim)]) for d in range(dim)]
        )  # (dim, points, nodes)
        jacobian = jacobians(mesh, x)
        self.weights = np.linalg.det(jacobian) * lattice.tensor([w[:, None]] * dim)[:, 0]
        self.inverse = np.linalg.inv(jacobian)
        self.points = mesh.map(x)

    def assemble(self, local):
        nodes = self.space.element_nodes
        shape = local.shape
        rows = np.broadcast_to(nodes[:, :, None], shape).ravel()
        columns = np.broadcast_to(nodes[:, None, :], shape).ravel()
        size = (self.space.num_nodes,) * 2
        return scipy.sparse.csr_matrix((local.ravel(), (rows, columns)), shape=size)

    def mass(self):
        return self.assemble(np.einsum("cq,qi,qj->cij", self.weights, self.values, self.values, optimize=True))

    def stiffness(self):
        metric = np.einsum("cq,cqde,cqfe->cqdf", self.weights, self.inverse, self.inverse, optimize=True)
        return self.assemble(np.einsum("cqdf,dqi,fqj->cij", metric, self.slopes, self.slopes, optimize=True))

    def load(self, f):
        local = (self.weights * f(self.points)) @ self.values
        return np.bincount(self.space.element_nodes.ravel(), local.ravel(), self.space.num_nodes)

    def errors(self, u, exact, gradient):
        """L2 norm and H1 seminorm of u - exact."""
        local = u[self.space.element_nodes]
        value = local @ self.values.T - exact(self.points)
        slope = np.einsum("dqi,ci,cqde->cqe", self.slopes, local, self.inverse, optimize=True) - gradient(self.points)
        return np.sqrt(np.sum(self.weights * value**2)), np.sqrt(np.sum(self.weights[..., None] * slope**2))
