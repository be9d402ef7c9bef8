"""Traces of spaces on the boundary: areas, fluxes, loads, and operators on facets like those on cells."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS, FASTEST
from meshing import scramble
from test_point_operator import close

import ceedtap as ct
from ceedtap.ceed import GAUSS_LOBATTO


def warp(x):
    """A smooth map without symmetries."""
    return x + 0.07 * np.sin(2.5 * x[:, ::-1] + x[:, :1])


def boxes(order):
    return [ct.mesh.box(3, 2, order=order, warp=warp), ct.mesh.box(2, 3, 2, order=order, warp=warp)]


MESHES = [*boxes(1), *boxes(2), *(scramble(mesh, 3) for mesh in boxes(2))]


@pytest.fixture(params=MESHES, ids=["2d", "3d", "2d-order2", "3d-order2", "2d-scrambled", "3d-scrambled"])
def mesh(request):
    return request.param


def integrate(space, density):
    """The integral of a function of (position, area vector per weight) over the elements of a trace."""

    @ct.operator(inputs={"x": (space.value, space.grad), "w": space.weight}, outputs={"q": ct.quadrature()})
    def integrand(x, w):
        return w * density(x[0], ct.normal(x[1]))

    return float(integrand(space.mesh.points).sum())


# -- geometry ----------------------------------------------------------------------------------------------------------


def test_shapes():
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 3, 4), degree=2, quadrature=3, components=2)
    side = V.boundary("left")
    assert (side.dim, side.num_elements, side.num_quadrature_points) == (2, 12, 9)
    assert side.shape == V.shape
    assert side.value.shape == (2,)
    assert side.grad.shape == (2, 2)
    assert side.geometry.grad.shape == (2, 3)
    assert side.element_nodes.shape == (12, 9)
    assert np.array_equal(np.unique(side.element_nodes), V.boundary_nodes("left"))
    both = V.boundary(["left", "all", "left"])
    assert both.num_elements == V.boundary().num_elements == 2 * (12 + 8 + 6)  # every facet once
    assert side.space is V
    assert side.quadrature_restriction(2).nelem == 12
    assert repr(side).startswith("<the boundary 'left' of Space(")


def test_the_sides_of_a_turned_box():
    """Areas and outward normals of all six sides, known by name."""
    size, angle = np.array([2.0, 3.0, 5.0]), 0.3
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    mesh = scramble(ct.mesh.box(2, 1, 2, upper=size, warp=lambda x: x @ turn.T), 1)
    X = ct.Space(ct.Ceed("/cpu/self"), mesh, 2).geometry
    names = ["left", "right", "front", "back", "bottom", "top"]
    for number, name in enumerate(names):
        direction, side = divmod(number, 2)
        area = size.prod() / size[direction]
        outward = (2 * side - 1) * turn[:, direction]
        vector = [integrate(X.boundary(name), lambda _, n, i=i: n[i]) for i in range(3)]
        assert np.allclose(vector, area * outward, rtol=1e-13, atol=1e-13)


def test_the_perimeter_of_a_polygon():
    mesh = ct.mesh.box(4, 3, warp=warp)
    X = ct.Space(ct.Ceed("/cpu/self"), mesh, 1).geometry
    for name, at in (("bottom", range(5)), ("right", range(4, 20, 5))):
        corners = mesh.points[list(at)]
        length = np.linalg.norm(np.diff(corners, axis=0), axis=1).sum()
        assert np.isclose(integrate(X.boundary(name), lambda _, n: jnp.linalg.norm(n)), length, rtol=1e-14)


def test_flux_of_a_linear_field(mesh):
    """The divergence theorem, exact for any mesh: the flux of Ax + b is the trace of A times the volume."""
    X = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=2, quadrature=4).geometry
    A = np.random.default_rng(0).standard_normal((mesh.dim, mesh.dim))
    b = np.arange(1.0, mesh.dim + 1)
    flux = integrate(X.boundary(), lambda x, n: (A @ x + b) @ n)
    cells = ct.operator(inputs={"x": X.grad, "w": X.weight}, outputs={"q": ct.quadrature()}, name="volume")(
        lambda x, w: w * jnp.linalg.det(x)
    )
    volume = float(cells(mesh.points).sum())
    assert np.isclose(flux, np.trace(A) * volume, rtol=1e-13)
    assert np.allclose([integrate(X.boundary(), lambda _, n, i=i: n[i]) for i in range(mesh.dim)], 0, atol=1e-14)


def test_other_points():
    mesh = ct.mesh.box(2, 2, order=2, warp=warp)
    X = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=2, quadrature=5, qmode=GAUSS_LOBATTO).geometry
    Y = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=2, quadrature=4).geometry
    values = [integrate(Z.boundary("top"), lambda x, n: x[0] * n[1]) for Z in (X, Y)]
    assert np.isclose(*values, rtol=1e-13)


# -- loads -------------------------------------------------------------------------------------------------------------


def load(space, traction):
    """A load of constant traction per area: one output value for each node and component."""
    X = space.geometry

    @ct.operator(inputs={"x": X.grad, "w": X.weight}, outputs={"v": space.value})
    def neumann(x, w):
        return w * jnp.linalg.norm(ct.normal(x)) * jnp.asarray(traction)

    return neumann(space.mesh.points)


def test_neumann_load():
    """Simpson's weights, on one side only."""
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2, upper=(3.0, 1.0)), degree=2)
    values = load(V.boundary("right"), 4.0)
    nodes = V.boundary_nodes("right")
    order = nodes[np.argsort(V.nodes[nodes, 1])]
    assert np.allclose(values[order], 4.0 * 0.5 * np.array([1, 4, 2, 4, 1]) / 6, rtol=1e-14)
    assert not np.any(np.delete(values, nodes))


def test_force_and_moment():
    """A traction on the top of a box: its resultant, and its moment about the origin, by the centroid."""
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 3, 2, upper=(2, 3, 1)), degree=2, components=3)
    traction = np.array([0.5, -1.0, 2.0])
    force = load(V.boundary("top"), traction)
    assert np.allclose(force.sum(0), 6 * traction, rtol=1e-13)
    moment = np.cross(V.nodes, force).sum(0)
    assert np.allclose(moment, 6 * np.cross([1, 1.5, 1], traction), rtol=1e-13)
    pressure = ct.Space(V.ceed, V.mesh, degree=1, components=3).geometry.boundary()
    turning = [integrate(pressure, lambda x, n, i=i: jnp.cross(x, n)[i]) for i in range(3)]
    assert np.allclose(turning, 0, atol=1e-12)  # a uniform pressure does not turn a body


def test_robin_matrix():
    """The mass matrix of a line of first-degree elements."""
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(3, 2, upper=(3.0, 2.0)), degree=1)
    side = V.boundary("bottom")

    @ct.operator(inputs={"u": side.value, "x": side.geometry.grad, "w": side.weight}, outputs={"v": side.value})
    def robin(u, x, w):
        return w * jnp.linalg.norm(x) * u

    matrix = robin.linearize(jnp.ones(V.shape), V.mesh.points, wrt="u").assemble().todense()
    expected = np.zeros((12, 12))
    for i in range(3):
        expected[i : i + 2, i : i + 2] += np.array([[2, 1], [1, 2]]) / 6
    assert np.allclose(matrix, expected, atol=1e-15)


# -- operators ---------------------------------------------------------------------------------------------------------


@functools.cache
def contact(resource, dim):
    """A nonlinear law on a part of the boundary that uses every kind of field."""
    mesh = ct.mesh.box(3, 2, order=2, warp=warp) if dim == 2 else ct.mesh.box(2, 2, 1, order=2, warp=warp)
    V = ct.Space(ct.Ceed(resource), mesh, degree=3, quadrature=4, components=2)
    side = V.boundary(["right", "top"])
    X = side.geometry

    @ct.operator(
        inputs={"u": (side.value, side.grad), "c": ct.quadrature(2), "x": (X.value, X.grad), "w": side.weight},
        outputs={"v": (side.value, side.grad), "e": ct.quadrature()},
        params={"k": 1.5},
    )
    def law(u, c, x, w, params):
        value, slope = u
        position, tangents = x
        n = ct.normal(tangents)
        area = w * jnp.linalg.norm(n)
        stretch = jnp.linalg.inv(tangents @ tangents.T) @ slope
        gap = params["k"] * jnp.tanh(value @ c) + position @ n
        return {"v": (area * gap * c, area * params["k"] * jnp.cos(gap) * stretch), "e": area * gap**2}

    random = np.random.default_rng(0)
    u = jnp.asarray(0.1 * random.standard_normal(V.shape))
    c = jnp.asarray(random.standard_normal((side.num_elements, side.num_quadrature_points, 2)))
    return law, (u, c, jnp.asarray(mesh.points))


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("resource", BACKENDS)
def test_values_and_derivatives(resource, dim):
    law, args = contact(resource, dim)
    params = {"k": 0.7}
    assert close(law(*args, params=params), law.reference(*args, params=params))

    def total(f):
        def value(u, c, x, k):
            v, e = f(u, c, x, params={"k": k})
            return jnp.sin(v).sum() + e.sum()

        return value

    gradient = jax.jit(jax.grad(total(law), (0, 1, 2, 3)))
    assert close(gradient(*args, 0.7), jax.jit(jax.grad(total(law.reference), (0, 1, 2, 3)))(*args, 0.7), 1e-12)
    if resource not in ("/cpu/self/ref/serial", FASTEST):
        return
    direction = tuple(jnp.cos(a) for a in (*args, jnp.asarray(0.7)))
    second = [
        jax.jit(lambda *a, f=f: jax.jvp(jax.grad(total(f), (0, 2)), a, direction)[1])(*args, 0.7)
        for f in (law, law.reference)
    ]
    assert close(*second, 1e-11)


def test_batches_bound_fields_and_linearisations():
    law, (u, c, x) = contact("/cpu/self", 3)
    params = {"k": 0.7}
    us = jnp.stack([u, 2 * u, jnp.sin(u)])
    bound = law.bind(c=c, x=x)
    want = [law.reference(one, c, x, params=params) for one in us]
    assert close(jax.vmap(lambda u: bound(u, params=params))(us), jax.tree.map(lambda *a: jnp.stack(a), *want))
    V = law._application.function.outputs[0].fields[0].space
    force = ct.operator(
        inputs={"u": (V.value, V.grad), "x": V.geometry.grad, "w": V.weight}, outputs={"v": (V.value, V.grad)}
    )(lambda u, x, w: (w * jnp.linalg.norm(ct.normal(x)) * jnp.sin(u[0]) * u[1].sum(), w * jnp.tanh(u[1])))
    matrix = jax.jacfwd(lambda flat: force.reference(flat.reshape(u.shape), x).ravel())(u.ravel())
    for stored in (True, False):
        newton = force.linearize(u, x, wrt="u", stored=stored)
        assert np.allclose(newton(jnp.cos(u)).ravel(), matrix @ jnp.cos(u).ravel(), atol=1e-13)
        assert np.allclose(newton.diagonal().ravel(), jnp.diag(matrix), atol=1e-14)
        assert np.allclose(newton.assemble().todense(), matrix, atol=1e-14)


# -- boundary value problems -------------------------------------------------------------------------------------------


def error(n, degree):
    """-div grad u + u = f with Neumann data all around: the largest error in the nodes, on a curved domain."""

    def exact(x):
        return jnp.sin(2 * x[0]) * jnp.exp(x[1])

    mesh = ct.mesh.box(n, n, order=2, warp=lambda x: x + 0.1 * np.sin(2 * x[:, ::-1]))
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, degree)
    X, S = V.geometry, V.geometry.boundary()

    @ct.operator(
        inputs={"u": (V.value, V.grad), "x": (X.value, X.grad), "w": X.weight}, outputs={"v": (V.value, V.grad)}
    )
    def cells(u, x, w):
        position, jacobian = x
        K, dV = jnp.linalg.inv(jacobian), w * jnp.linalg.det(jacobian)
        source = 4 * exact(position)  # -div grad u + u, since div grad u = -3 u
        return dV * (u[0] - source), dV * K.T @ (K @ u[1])

    @ct.operator(inputs={"x": (S.value, S.grad), "w": S.weight}, outputs={"v": V.boundary().value})
    def facets(x, w):
        position, tangents = x
        return -w * jax.grad(exact)(position) @ ct.normal(tangents)

    zero, x = jnp.zeros(V.shape), mesh.points
    matrix = cells.linearize(zero, x, wrt="u").assemble().todense()
    solution = np.linalg.solve(matrix, -(cells(zero, x) + facets(x)))
    return np.abs(solution - jax.vmap(exact)(V.nodes)).max()


@pytest.mark.parametrize("degree", [1, 2])
def test_a_neumann_problem_converges(degree):
    coarse, fine = error(5, degree), error(10, degree)
    assert np.log2(coarse / fine) > degree + 0.8
    assert fine < 10.0 ** -(degree + 1)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors():
    mesh = ct.mesh.Mesh.from_arrays(
        [[0, 0], [1, 0], [1, 1], [0, 1]], [[0, 1, 2, 3]], "quad", {"floor": [[0, 1]], "corner": [[0]], "none": []}
    )
    V = ct.Space(ct.Ceed("/cpu/self"), mesh, 1)
    with pytest.raises(KeyError, match="no boundary set 'inflow'; it has"):
        V.boundary("inflow")
    with pytest.raises(KeyError, match="no boundary set 'corner'"):
        V.boundary("corner")
    with pytest.raises(ValueError, match=r"the boundary \(\) of the mesh has no facets"):
        V.boundary([])
    with pytest.raises(ValueError, match="the boundary 'none' of the mesh has no facets"):
        V.boundary("none")
    floor = V.boundary("floor")
    make = ct.operator(inputs={"u": floor.value, "x": V.geometry.grad}, outputs={"v": floor.value})
    with pytest.raises(ValueError, match="share their elements: u is on the boundary 'floor', x is on the cells"):
        make(lambda u, x: u)
    make = ct.operator(inputs={"u": V.value}, outputs={"v": V.boundary().value})
    with pytest.raises(ValueError, match="u is on the cells, v is on the boundary"):
        make(lambda u: u)
    for shape in ((2, 2), (1, 3), (2,)):
        with pytest.raises(ValueError, match=r"tangents: expected the shape \(1, 2\) or \(2, 3\)"):
            ct.normal(jnp.zeros(shape))


def test_one_trace_for_all_fields():
    """So that a tuple of evaluations is of one space, and sets with the same facets go together."""
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), 1)
    inputs = {"u": (V.boundary("left").value, V.boundary("left").grad), "x": V.geometry.boundary(["left"]).grad}
    same = ct.operator(inputs=inputs, outputs={"v": V.boundary("left").value})(lambda u, x: u[0] * x[0, 1] + u[1][0])
    assert same(jnp.ones(V.shape), V.mesh.points).shape == V.shape
    all_of_it = ct.operator(inputs={"u": V.boundary().value}, outputs={"v": V.boundary("all").value})(lambda u: u)
    assert all_of_it(jnp.ones(V.shape)).shape == V.shape
