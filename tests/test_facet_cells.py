"""Facets inside of meshes: their normals, and the cells on both sides, on meshes of any numbering."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import meshing
import numpy as np
import pytest
from ceed_helpers import BACKENDS
from test_point_operator import close

import ceedtap as ct
from ceedtap import plot


def bend(x):
    """A smooth map that leaves the plane x = 0 in place."""
    return x + 0.06 * x[:, :1] * np.sin(2.5 * x[:, ::-1] + x[:, :1])


def sheet(dim, order, seed, warp=None, reflect=False):
    """A box in which files have the middle plane as a set of facets with random orientations.

    Returns:
        The mesh, of randomly numbered and turned cells, with the sets "middle", "plus" and "minus": all of the plane's
        facets, those whose own normal is +x, and those whose is -x; and the number of the facets of "plus".
    """
    rng = np.random.default_rng(seed)
    shape = (4, 3) if dim == 2 else (2, 2, 3)
    plain = ct.mesh.box(*shape, lower=-1, upper=1, order=order, warp=warp)
    mesh = meshing.scramble(plain, seed, reflect)
    on_plane = np.argwhere(
        np.all(np.abs(mesh.points[mesh.corners][:, [list(f) for f in facet_corner_places(dim)], 0]) < 1e-12, axis=2)
    )
    corners = meshing.facet_corners(mesh, on_plane[rng.permutation(len(on_plane))])
    _, first = np.unique(np.sort(corners, axis=1), axis=0, return_index=True)
    corners = corners[first]
    for row in range(len(corners)):  # any corner first, either way around
        corners[row] = np.roll(corners[row], rng.integers(4))[:: rng.choice([-1, 1])]
    p = mesh.points[corners]
    if dim == 2:  # to the right of the line
        normal = np.stack([p[:, 1, 1] - p[:, 0, 1], p[:, 0, 0] - p[:, 1, 0]], axis=1)
    else:
        normal = np.cross(p[:, 1] - p[:, 0], p[:, 2] - p[:, 1])
    plus = normal[:, 0] > 0
    names = {(2, 1): "quad", (2, 2): "quad9", (3, 1): "hexahedron", (3, 2): "hexahedron27"}
    name = names[dim, order]
    sets = {"middle": corners, "plus": corners[plus], "minus": corners[~plus]}
    sets |= {side: meshing.facet_corners(mesh, mesh.boundary[side]) for side in ("left", "right")}
    cells = meshing.file_cells(mesh, meshing.VTK[name])
    return ct.mesh.Mesh.from_arrays(mesh.points, cells, name, sets, orient=reflect), int(plus.sum())


def facet_corner_places(dim):
    """Positions of the corners of the facets of a square or cube: x, y, z low and high."""
    places = np.array([[i >> d & 1 for d in range(dim)] for i in range(2**dim)])
    return [np.flatnonzero(places[:, d] == side) for d in range(dim) for side in (0, 1)]


SHEETS = [(dim, order, reflect) for dim in (2, 3) for order in (1, 2) for reflect in (False, True)]


@pytest.fixture(params=SHEETS, ids=lambda p: f"{p[0]}d order {p[1]}{' reflected' if p[2] else ''}")
def curved(request):
    dim, order, reflect = request.param
    return sheet(dim, order, 4 * dim + order, bend, reflect)


def integral(space, density, *fields):
    """The integral of a function of (position, derivatives of the position, ...) over the facets."""
    X = space.geometry
    inputs = {"x": (X.value, X.grad), **{f"f{i}": field for i, (field, _) in enumerate(fields)}, "w": X.weight}

    @ct.operator(inputs=inputs, outputs={"q": ct.quadrature()})
    def integrand(**values):
        others = [values[f"f{i}"] for i in range(len(fields))]
        return values["w"] * density(*values["x"], *others)

    return float(integrand(space.mesh.points, *(value for _, value in fields)).sum())


# -- orientation -------------------------------------------------------------------------------------------------------


def test_normals_are_those_of_the_file(curved):
    """Whatever the numbers and directions of the cells are; those of the outer boundary point outwards as ever."""
    mesh, num_plus = curved
    for refined in (mesh, mesh.refine()):
        X = ct.Space(ct.Ceed("/cpu/self"), refined, 2).geometry
        area = 2.0 ** (mesh.dim - 1) / (3 if mesh.dim == 2 else 6)  # of a facet, as there are in the file
        count = len(mesh.boundary["middle"])
        assert count == (3 if mesh.dim == 2 else 6)
        for name, wanted in (
            ("plus", num_plus * area),
            ("minus", -(count - num_plus) * area),
            ("middle", (2 * num_plus - count) * area),
        ):
            if len(mesh.boundary[name]):
                flux = integral(X.boundary(name), lambda x, t: ct.normal(t)[0])
                assert flux == pytest.approx(wanted, abs=1e-12)
                size = integral(X.boundary(name), lambda x, t: jnp.linalg.norm(ct.normal(t)))
                assert size == pytest.approx(len(mesh.boundary[name]) * area, rel=1e-12)
        assert integral(X.boundary("left"), lambda x, t: ct.normal(t)[0]) < 0
        assert integral(X.boundary("right"), lambda x, t: ct.normal(t)[0]) > 0


def test_facets_named_from_both_sides_count_once():
    """In the first set that names them: sets of opposite orientations may be asked for together."""
    mesh, _ = sheet(3, 1, 5)
    rows = mesh.boundary["middle"]
    both = ct.mesh.Mesh(
        mesh.points, mesh.cells, 1, {"a": rows, "b": mesh.other_side(rows), "both": [*rows, *mesh.other_side(rows)]}
    )
    X = ct.Space(ct.Ceed("/cpu/self"), both, 1).geometry
    flux = {key: integral(X.boundary(key), lambda x, t: ct.normal(t)[0]) for key in ("a", "b", ("a", "b"), ("b", "a"))}
    assert flux["a"] == pytest.approx(-flux["b"], rel=1e-13)
    assert flux["a", "b"] == pytest.approx(flux["a"], rel=1e-13)
    assert flux["b", "a"] == pytest.approx(flux["b"], rel=1e-13)
    assert X.boundary("both").num_elements == len(rows)


def test_other_side(curved):
    mesh, _ = curved
    other = mesh.other_side(mesh.boundary["middle"])
    assert np.all(other[:, 0] != mesh.boundary["middle"][:, 0])
    np.testing.assert_array_equal(mesh.other_side(other), mesh.boundary["middle"])
    for rows, theirs in ((mesh.boundary["middle"], other), (other, mesh.boundary["middle"])):
        ours = meshing.facet_corners(mesh, rows)
        np.testing.assert_array_equal(np.sort(ours, axis=1), np.sort(meshing.facet_corners(mesh, theirs), axis=1))
    assert np.all(mesh.other_side(mesh.boundary_facets) == -1)
    assert mesh.other_side([]).shape == (0, 2)
    with pytest.raises(ct.mesh.MeshError, match=r"indices 0..99 are not in"):
        mesh.other_side([[99, 0], [0, 0]])


# -- values and gradients ----------------------------------------------------------------------------------------------


def test_shapes():
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 3, 4), degree=2, quadrature=3, components=2)
    side = V.boundary("left")
    cells = side.inside
    assert (cells.dim, cells.num_elements, cells.num_quadrature_points) == (3, 12, 9)
    assert (cells.shape, cells.value.shape, cells.grad.shape) == (V.shape, (2,), (3, 2))
    assert cells.geometry.grad.shape == (3, 3)
    assert cells.element_nodes.shape == (12, 27)
    np.testing.assert_array_equal(cells.element_nodes[:, -9:], side.element_nodes)
    np.testing.assert_array_equal(np.sort(cells.element_nodes), np.sort(V.element_nodes[side.facets[:, 0]]))
    np.testing.assert_array_equal(cells.weights, side.weights)
    assert cells.weights.sum() == pytest.approx(4)
    assert cells.quadrature_restriction(2).nelem == 12
    assert cells.space is V
    assert repr(cells).startswith("<the cells inside of the boundary 'left' of Space(")


def test_both_sides_see_the_points_and_tangents_of_the_trace(curved):
    mesh, _ = curved
    X = ct.Space(ct.Ceed("/cpu/self"), mesh, 1).geometry
    trace = X.boundary("middle")

    @ct.operator(
        inputs={
            "x": (trace.value, trace.grad), "i": (trace.inside.value, trace.inside.grad),
            "o": (trace.outside.value, trace.outside.grad), "w": (trace.inside.weight),
        },
        outputs={"q": ct.quadrature(3), "det": ct.quadrature(2)},
    )  # fmt: skip
    def compare(x, i, o, w):
        n = ct.normal(x[1])
        gaps = [jnp.abs(x[0] - i[0]).max() + jnp.abs(x[0] - o[0]).max()]
        gaps += [jnp.abs(x[1] - side[1][:-1]).max() for side in (i, o)]
        return jnp.stack(gaps), jnp.stack([n @ side[1][-1] for side in (i, o)])

    gaps, along = compare(mesh.points, mesh.points, mesh.points)
    assert np.abs(gaps).max() < 1e-13
    assert np.all(along > 0)  # the last direction goes with the normal, on both sides


@pytest.mark.parametrize("name", [None, "middle", "left"])
def test_gradients_of_linear_functions_are_exact(curved, name):
    mesh, _ = curved
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, mesh.order, quadrature=3)
    slope = np.arange(1.0, mesh.dim + 1)
    u = V.interpolate(lambda x: x @ slope)
    for cells in (V.boundary(name).inside, *([V.boundary(name).outside] if name == "middle" else [])):
        wrong = integral(cells, lambda x, j, g: jnp.abs(jnp.linalg.solve(j, g) - slope).max(), (cells.grad, u))
        assert wrong < 1e-12


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("degree", [3, 4])
def test_gradients_of_polynomials_are_exact_on_both_sides(dim, degree):
    mesh, _ = sheet(dim, 1, degree)
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, degree)

    def f(x):
        return x[0] ** 3 * x[1] + x[1] ** 2 + x[-1] ** 3

    u = V.interpolate(lambda x: jax.vmap(f)(x))
    for cells in (V.boundary("middle").inside, V.boundary("middle").outside, V.boundary().inside):
        wrong = integral(
            cells, lambda x, j, g, v: jnp.abs(jnp.linalg.solve(j, g) - jax.grad(f)(x)).max() + abs(v - f(x)),
            (cells.grad, u), (cells.value, u),
        )  # fmt: skip
        assert wrong < 1e-11


@pytest.mark.parametrize("dim", [2, 3])
def test_the_jump_of_a_kink(dim):
    """The derivative of |x| y^2 along the normal jumps from -y^2 to y^2, whichever way the normal points."""
    mesh, _ = sheet(dim, 1, 7 + dim)
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, 2)
    u = V.interpolate(lambda x: np.abs(x[:, 0]) * x[:, 1] ** 2)
    trace = V.boundary("middle")
    X = trace.geometry

    @ct.operator(
        inputs={
            "i": trace.inside.grad,
            "o": trace.outside.grad,
            "xi": X.inside.grad,
            "xo": X.outside.grad,
            "w": X.weight,
        },
        outputs={"q": ct.quadrature(2)},
    )
    def jump(i, o, xi, xo, w):
        n = ct.normal(xi[:-1])
        inside, outside = n @ jnp.linalg.solve(xi, i), n @ jnp.linalg.solve(xo, o)
        return w * jnp.stack([outside - inside, outside + inside])

    difference, total = jump(u, u, mesh.points, mesh.points).sum((0, 1))
    assert difference == pytest.approx(2 * (2 / 3) * 2 ** (dim - 2), rel=1e-12)
    assert abs(total) < 1e-12


@functools.cache
def law(resource, dim, side):
    """A nonlinear law with whole gradients and values on facets."""
    mesh, _ = sheet(dim, 2, dim, bend)
    V = ct.Space(ct.Ceed(resource), mesh, degree=2, quadrature=3, components=2)
    trace = V.boundary("middle" if side == "outside" else None)
    cells = getattr(trace, side)
    X = cells.geometry

    @ct.operator(
        inputs={"u": (cells.value, cells.grad), "x": X.grad, "t": trace.geometry.grad, "w": cells.weight},
        outputs={"v": (cells.value, cells.grad)},
    )
    def slip(u, x, t, w):
        value, slope = u
        n = ct.normal(x[:-1])
        normal_slope = n @ jnp.linalg.solve(x, slope)
        traction = 1.5 * jnp.tanh(normal_slope) + value * (t**2).sum()
        return w * traction, w * jnp.outer(jnp.linalg.solve(x.T, n), jnp.sin(value))

    random = np.random.default_rng(0)
    u = jnp.asarray(0.1 * random.standard_normal(V.shape))
    return slip, (u, jnp.asarray(mesh.points), jnp.asarray(mesh.points))


@pytest.mark.parametrize("side", ["inside", "outside"])
@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("resource", BACKENDS)
def test_values_and_derivatives(resource, dim, side):
    f, args = law(resource, dim, side)
    assert close(f(*args), f.reference(*args))

    def total(g):
        return lambda *a: jnp.sin(g(*a)).sum()

    gradients = [jax.jit(jax.grad(total(g), (0, 1, 2)))(*args) for g in (f, f.reference)]
    assert close(*gradients, 1e-12)
    if resource == "/cpu/self/ref/serial" and dim == 2 and side == "inside":
        newton = f.linearize(*args, wrt="u")
        matrix = jax.jacfwd(lambda flat: f.reference(flat.reshape(args[0].shape), *args[1:]).ravel())(args[0].ravel())
        v = jnp.cos(args[0])
        assert np.allclose(newton(v).ravel(), matrix @ v.ravel(), atol=1e-12)
        assert np.allclose(newton.assemble().todense(), matrix, atol=1e-12)
        assert np.allclose(newton.diagonal().ravel(), jnp.diag(matrix), atol=1e-12)


# -- Nitsche's method --------------------------------------------------------------------------------------------------


def error(n, degree, dim):
    """-div grad u = f, with the values on the boundary imposed weakly: the largest error in the nodes."""

    def exact(x):
        return jnp.sin(2 * x[0]) * jnp.exp(x[-1])

    mesh = ct.mesh.box(*[n] * dim, order=2, warp=lambda x: x + 0.06 * np.sin(2 * x[:, ::-1]))
    mesh = meshing.scramble(mesh, n)
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, degree)
    S, T = V.geometry, V.boundary().inside
    X = T.geometry

    @ct.operator(
        inputs={"u": V.grad, "x": (S.value, S.grad), "w": S.weight}, outputs={"v": (V.value, V.grad)}, name="cells"
    )
    def cells(u, x, w):
        position, jacobian = x
        K, dV = jnp.linalg.inv(jacobian), w * jnp.linalg.det(jacobian)
        return -dV * 3 * exact(position), dV * K.T @ (K @ u)  # div grad u = -3 u

    @ct.operator(
        inputs={"u": (T.value, T.grad), "x": (X.value, X.grad), "w": T.weight}, outputs={"v": (T.value, T.grad)}
    )
    def nitsche(u, x, w):
        value, slope = u
        position, jacobian = x
        K, area = jnp.linalg.inv(jacobian), ct.normal(jacobian[:-1])
        gap, size = value - exact(position), jnp.linalg.norm(area)
        penalty = 4 * (degree + 1) ** 2 * n
        return w * (penalty * size * gap - area @ (K @ slope)), -w * gap * (K.T @ area)

    zero, x = jnp.zeros(V.shape), mesh.points
    total = cells + nitsche
    matrix = total.linearize(zero, x, wrt="u").assemble().todense()
    assert np.allclose(matrix, matrix.T, atol=1e-11)
    solution = np.linalg.solve(matrix, -total(zero, x))
    return np.abs(solution - jax.vmap(exact)(V.nodes)).max()


@pytest.mark.parametrize(("dim", "degree", "n"), [(2, 1, 4), (2, 3, 3), (3, 2, 2)])
def test_nitsches_method_converges(dim, degree, n):
    coarse, fine = error(n, degree, dim), error(2 * n, degree, dim)
    assert np.log2(coarse / fine) > degree + 0.7


# -- errors and lifetimes ----------------------------------------------------------------------------------------------


def test_errors():
    mesh, _ = sheet(3, 1, 2)
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, 1)
    with pytest.raises(
        ValueError, match=r"32 of 32 facets of the boundary have no cell outside, .*: \[cell, local facet\] \[\d"
    ):
        V.boundary().outside  # noqa: B018
    mixed = V.boundary(["middle", "left"])
    with pytest.raises(ValueError, match="6 of 12 facets of the boundary"):
        mixed.outside  # noqa: B018
    make = ct.operator(inputs={"u": V.value, "g": mixed.inside.grad}, outputs={"v": V.value})
    with pytest.raises(ValueError, match="u is on the cells, g is on the cells inside of the boundary"):
        make(lambda u, g: u)
    make = ct.operator(inputs={"u": V.boundary("left").inside.grad}, outputs={"v": V.boundary("right").inside.value})
    with pytest.raises(ValueError, match="share their elements: u is on the cells inside of the boundary 'left'"):
        make(lambda u: u)
    make = ct.operator(
        inputs={"u": (V.boundary("left").value, V.boundary("left").inside.grad)},
        outputs={"v": V.boundary("left").value},
    )
    with pytest.raises(ValueError, match="evaluations of one array, so they belong to one space"):
        make(lambda u: u[0])
    pytest.importorskip("matplotlib")
    with pytest.raises(TypeError, match=r"drawn on the facets, V.boundary\(...\), not on <the cells inside"):
        plot.field(mixed.inside, np.zeros(V.shape))


def test_one_object_for_all_fields_which_waits_for_no_garbage_collector():
    mesh, _ = sheet(2, 1, 2)
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, 1)
    cells = V.boundary("middle").inside
    assert cells is V.boundary("middle").inside
    assert cells is not V.boundary("middle").outside
    assert cells.geometry is not cells
    other = cells.on(ct.Ceed("/cpu/self/ref/serial"))
    assert other.ceed is not V.ceed
    np.testing.assert_array_equal(other.element_nodes, cells.element_nodes)
    assert cells.on(V.ceed) is cells
    cells.restriction, cells.basis, cells.geometry.basis  # noqa: B018
    gone = weakref.ref(cells)
    gc.disable()
    try:
        del cells
        assert gone() is None
    finally:
        gc.enable()


def test_operators_on_facets_are_driven_and_watched():
    """Beside a program, on a Ceed of its own; where something goes wrong, the point is named."""
    mesh, _ = sheet(2, 1, 2)
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, 1)
    cells = V.boundary("left").inside
    X = cells.geometry

    @ct.operator(inputs={"u": cells.value, "x": X.grad, "w": X.weight}, outputs={"q": ct.quadrature()})
    def root(u, x, w):
        return w * jnp.sqrt(u) * jnp.linalg.norm(ct.normal(x[:-1]))

    seen, offenders = [], []
    with ct.outfeed_receiver():
        ct.id_tap(ct.drive(root, lambda q: seen.append(q.sum())), {"u": 4 * jnp.ones(V.shape), "x": mesh.points})
        jax.jit(ct.watch(root, then=offenders.append))(-jnp.ones(V.shape), mesh.points)
    assert seen == [pytest.approx(4)]  # twice the length
    (found,) = offenders
    np.testing.assert_allclose(found.coordinates[:, 0], -1)
