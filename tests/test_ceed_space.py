"""Point functions on spaces of libCEED's own restrictions and bases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct


def triangles(n):
    """The unit square cut into 2 n^2 triangles, inner points moved: points and corners, anticlockwise."""
    line = np.linspace(0, 1, n + 1)
    points = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    inner = ((points > 0) & (points < 1)).all(1)
    points[inner] += np.random.default_rng(0).uniform(-0.2, 0.2, (inner.sum(), 2)) / n
    first = (np.arange(n)[:, None] * (n + 1) + np.arange(n)).ravel()
    a, b, c, d = first, first + n + 1, first + 1, first + n + 2
    return points, np.concatenate([np.stack([a, b, c], 1), np.stack([d, c, b], 1)])


#: A rule that is exact for quadratic polynomials on the triangle (0, 0), (1, 0), (0, 1).
RULE = np.array([[1 / 6, 1 / 6], [2 / 3, 1 / 6], [1 / 6, 2 / 3]])
WEIGHTS = np.full(3, 1 / 6)


def linear_basis(ceed, components):
    values = np.stack([1 - RULE.sum(1), RULE[:, 0], RULE[:, 1]], 1)
    slopes = np.broadcast_to(np.array([[-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0]])[:, None], (2, 3, 3))
    return ceed.BasisH1(ct.TRIANGLE, components, 3, 3, values, slopes.ravel(), RULE.T.ravel(), WEIGHTS)


class TestTriangles:
    """Linear triangles: coordinates with the components apart, to be no special case."""

    N = 3

    def spaces(self, ceed):
        points, corners = triangles(self.N)
        V = ct.CeedSpace(ceed.ElemRestriction(len(corners), 3, 1, 1, len(points), corners), linear_basis(ceed, 1))
        X = ct.CeedSpace(
            ceed.ElemRestriction(len(corners), 3, 2, len(points), 2 * len(points), corners), linear_basis(ceed, 2)
        )
        return points, corners, V, X

    def diffusion(self, V, X):
        @ct.operator(inputs={"u": V.grad, "x": X.grad, "w": V.weight}, outputs={"v": V.grad})
        def diffusion(u, x, w):
            K = jnp.linalg.inv(x.T)
            return w * jnp.linalg.det(x) * K @ K.T @ u

        return diffusion

    def matrix(self, points, corners):
        """The stiffness matrix by the formula for linear triangles."""
        A = np.zeros((len(points), len(points)))
        for rows in corners:
            p = points[rows]
            edges = np.stack([p[2] - p[1], p[0] - p[2], p[1] - p[0]])
            area = (edges[2, 0] * -edges[1, 1] + edges[2, 1] * edges[1, 0]) / 2
            A[np.ix_(rows, rows)] += edges @ edges.T / (4 * area)
        return A

    def test_action_matrix_and_diagonal(self, ceed):
        points, corners, V, X = self.spaces(ceed)
        op, A = self.diffusion(V, X), self.matrix(points, corners)
        x = jnp.asarray(points.T.ravel())
        u = jnp.asarray(np.random.default_rng(1).normal(size=len(points)))
        np.testing.assert_allclose(jax.jit(op)(u, x), A @ u, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(op.reference(u, x), A @ u, rtol=1e-12, atol=1e-12)
        tangent = op.linearize(u, x, wrt="u")
        np.testing.assert_allclose(tangent.assemble().todense(), A, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(tangent.diagonal(), np.diag(A), rtol=1e-12)

    def test_shape_derivative_of_the_area(self, ceed):
        points, _, _, X = self.spaces(ceed)
        area = ct.operator(inputs={"x": X.grad, "w": X.weight}, outputs={"a": ct.quadrature()})(
            lambda x, w: w * jnp.linalg.det(x)
        )
        x = jnp.asarray(points.T.ravel())
        np.testing.assert_allclose(area(x).sum(), 1.0, rtol=1e-13)
        gradient = np.asarray(jax.grad(lambda x: area(x).sum())(x)).reshape(2, -1)
        inner = ((points > 0) & (points < 1)).all(1)
        np.testing.assert_allclose(gradient[:, inner], 0, atol=1e-13)  # moving inner points changes no area
        np.testing.assert_allclose((gradient * points.T).sum(), 2.0, rtol=1e-13)  # d/ds of s^2 at s = 1

    def test_taps_and_watch(self, ceed):
        points, _, V, X = self.spaces(ceed)
        seen, tapped = [], []

        @ct.operator(inputs={"u": V.value, "x": X.value}, outputs={"v": V.value})
        def f(u, x):
            ct.id_tap(lambda x, **labels: tapped.append(x), x)
            return u

        watched = ct.watch(f, lambda x: x[0] > 0.9, show=lambda x: {"x": x}, then=seen.append)
        with ct.outfeed_receiver():
            watched(jnp.zeros(len(points)), jnp.asarray(points.T.ravel()))
        assert (seen[0].values["x"][:, 0] > 0.9).all()
        assert len(seen[0]) == (tapped[0][..., 0] > 0.9).sum()
        assert seen[0].coordinates.shape == (len(seen[0]), 0)
        assert str(seen[0]).startswith(f"f: element {seen[0].elements[0]} point {seen[0].points[0]}: x = [")


class TestRaviartThomas:
    """Lowest order: a vector field by its fluxes through edges, whose signs differ between neighbours."""

    def space(self, ceed):
        points, corners = triangles(3)
        edges, numbers, signs = {}, [], []
        for rows in corners:
            for i in range(3):
                a, b = rows[(i + 1) % 3], rows[(i + 2) % 3]
                numbers.append(edges.setdefault((min(a, b), max(a, b)), len(edges)))
                signs.append(a > b)  # flipped
        functions = RULE[:, None] - np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # (points, edges, 2)
        basis = ceed.BasisHdiv(
            ct.TRIANGLE, 1, 3, 3, np.moveaxis(functions, 2, 0).ravel(), np.full(9, 2.0), RULE.T.ravel(), WEIGHTS
        )
        restriction = ceed.OrientedElemRestriction(len(corners), 3, 1, 1, len(edges), numbers, signs)
        X = ct.CeedSpace(
            ceed.ElemRestriction(len(corners), 3, 2, 1, 2 * len(points), 2 * corners), linear_basis(ceed, 2)
        )
        return points, np.array(list(edges)), ct.CeedSpace(restriction, basis), X

    def fluxes(self, points, edges, field):
        """Of a linear field through the edges: by the midpoint, exactly."""
        a, b = points[edges[:, 0]], points[edges[:, 1]]
        along = b - a
        return (field((a + b) / 2) * np.stack([along[:, 1], -along[:, 0]], 1)).sum(1)

    def test_values_and_divergence(self, ceed):
        points, edges, U, X = self.space(ceed)
        assert (U.value.shape, U.div.shape) == ((2,), ())
        with pytest.raises(AttributeError, match=r"is in H\(div\): it has no EVAL_GRAD"):
            U.grad  # noqa: B018

        @ct.operator(
            inputs={"u": (U.value, U.div), "x": (X.value, X.grad), "w": U.weight},
            outputs={"error": ct.quadrature(), "divergence": ct.quadrature()},
        )
        def check(u, x, w):
            J = x[1].T
            value = J @ u[0] / jnp.linalg.det(J)  # the contravariant Piola transformation
            return jnp.sum((value - jnp.array([1.0, 2.0]) - 3 * x[0]) ** 2), u[1] / jnp.linalg.det(J)

        u = jnp.asarray(self.fluxes(points, edges, lambda x: np.array([1.0, 2.0]) + 3 * x))
        for evaluate in (jax.jit(check), check.reference):
            error, divergence = evaluate(u, jnp.asarray(points.ravel()))
            np.testing.assert_allclose(error, 0, atol=1e-24)
            np.testing.assert_allclose(divergence, 6, rtol=1e-12)

    def test_mass_matrix(self, ceed):
        points, edges, U, X = self.space(ceed)

        @ct.operator(inputs={"u": U.value, "x": X.grad, "w": U.weight}, outputs={"v": U.value})
        def mass(u, x, w):
            return w / jnp.linalg.det(x) * x @ x.T @ u

        x = jnp.asarray(points.ravel())
        u = self.fluxes(points, edges, lambda x: np.array([1.0, 2.0]) + 0 * x)
        np.testing.assert_allclose(u @ mass(jnp.asarray(u), x), 5.0, rtol=1e-12)  # the square's area is 1
        tangent = mass.linearize(jnp.asarray(u), x, wrt="u")
        matrix = np.asarray(tangent.assemble().todense())
        np.testing.assert_allclose(matrix @ u, mass(jnp.asarray(u), x), rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(tangent.diagonal(), np.diag(matrix), rtol=1e-12)
        gradient = jax.grad(lambda u: u @ mass(u, x))(jnp.asarray(u))
        np.testing.assert_allclose(gradient, 2 * matrix @ u, rtol=1e-11, atol=1e-12)


class TestCurl:
    """Elements whose degrees of freedom are mixed: libCEED does that, plain JAX does not know."""

    def test_calls(self, ceed):
        rng = np.random.default_rng(0)
        interp, curl = rng.normal(size=(2, 3, 3)), rng.normal(size=(3, 3))
        offsets, factors = np.array([[0, 1, 2], [2, 3, 4]]), rng.integers(-2, 3, (2, 3, 3))
        basis = ceed.BasisHcurl(ct.TRIANGLE, 1, 3, 3, interp.ravel(), curl.ravel(), RULE.T.ravel(), WEIGHTS)
        U = ct.CeedSpace(ceed.CurlOrientedElemRestriction(2, 3, 1, 1, 5, offsets, factors), basis)

        @ct.operator(inputs={"u": (U.value, U.curl)}, outputs={"a": ct.quadrature(2), "b": ct.quadrature()})
        def f(u):
            return u[0], u[1]

        u = rng.normal(size=5)
        padded = np.pad(u[offsets], ((0, 0), (1, 1)))
        before, itself, after = (padded[:, i : i + 3] for i in range(3))
        factors[:, 0, 0] = factors[:, 2, 2] = 0
        local = factors[..., 0] * before + factors[..., 1] * itself + factors[..., 2] * after
        a, b = jax.jit(f)(jnp.asarray(u))
        np.testing.assert_allclose(a, np.einsum("dqp,ep->eqd", interp, local), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(b, local @ curl.T, rtol=1e-12, atol=1e-12)
        with pytest.raises(NotImplementedError, match="mixes degrees of freedom"):
            f.reference(jnp.asarray(u))


def test_lines(ceed):
    n = 5
    offsets = np.arange(n)[:, None] * 2 + np.arange(3)
    V = ct.CeedSpace(
        ceed.ElemRestriction(n, 3, 1, 1, 2 * n + 1, offsets), ceed.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
    )
    op = ct.operator(inputs={"u": V.grad, "w": V.weight}, outputs={"v": V.grad})(lambda u, w: n * w * u)
    x = np.linspace(0, n, 2 * n + 1)
    np.testing.assert_allclose(x @ op(jnp.asarray(x)), n * n / 2, rtol=1e-13)  # du/dxi = 1/2 over n intervals of 2


def test_beside_a_space_with_a_mesh(ceed):
    """The same elements in another layout: components apart."""
    mesh = ct.mesh.box(3, 2)
    V = ct.Space(ceed, mesh, degree=2, components=2)
    apart = ceed.ElemRestriction(mesh.num_cells, 9, 2, V.num_nodes, V.lsize, V.element_nodes)
    W = ct.CeedSpace(apart, V.basis)
    X = V.geometry

    def make(S):
        @ct.operator(inputs={"u": S.grad, "x": X.grad, "w": X.weight}, outputs={"v": S.grad})
        def f(u, x, w):
            return w * jnp.linalg.det(x) * jnp.sin(u)

        return f

    u = jnp.asarray(np.random.default_rng(0).normal(size=V.shape))
    expected = make(V)(u, mesh.points)
    np.testing.assert_allclose(make(W)(u.T.ravel(), mesh.points), expected.T.ravel(), rtol=1e-13, atol=1e-13)


class TestErrors:
    def test_sizes(self, one):
        basis = one.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
        with pytest.raises(ValueError, match="has 2 nodes and 1 components, the basis 3 and 1"):
            ct.CeedSpace(one.ElemRestriction(2, 2, 1, 1, 3, [[0, 1], [1, 2]]), basis)

    def test_kinds(self, one):
        basis = one.BasisTensorH1Lagrange(1, 1, 2, 2, ct.GAUSS)
        blocked = one.BlockedElemRestriction(2, 2, 8, 1, 1, 3, [[0, 1], [1, 2]])
        for restriction in (blocked, None):
            with pytest.raises(TypeError, match="restriction: expected one with offsets or strides"):
                ct.CeedSpace(restriction, basis)
        with pytest.raises(TypeError, match="basis: expected"):
            ct.CeedSpace(one.ElemRestriction(2, 2, 1, 1, 3, [[0, 1], [1, 2]]), None)

    def test_other_ceed(self, one):
        basis = ct.Ceed("/cpu/self").BasisTensorH1Lagrange(1, 1, 2, 2, ct.GAUSS)
        with pytest.raises(ValueError, match="the basis on another Ceed"):
            ct.CeedSpace(one.ElemRestriction(2, 2, 1, 1, 3, [[0, 1], [1, 2]]), basis)

    def test_other_elements(self, one):
        basis = one.BasisTensorH1Lagrange(1, 1, 2, 2, ct.GAUSS)
        two = ct.CeedSpace(one.ElemRestriction(2, 2, 1, 1, 3, [[0, 1], [1, 2]]), basis)
        three = ct.CeedSpace(one.ElemRestriction(3, 2, 1, 1, 4, [[0, 1], [1, 2], [2, 3]]), basis)
        more = ct.CeedSpace(two.restriction, one.BasisTensorH1Lagrange(1, 1, 2, 3, ct.GAUSS))
        for other, text in (
            (three, "share their elements: u is on 2 elements"),
            (more, "one number of quadrature points: u has 2"),
        ):
            with pytest.raises(ValueError, match=text):
                ct.operator(inputs={"u": two.value, "q": other.value}, outputs={"v": two.value})(lambda u, q: u)

    def test_moving(self, one):
        basis = one.BasisTensorH1Lagrange(1, 1, 2, 2, ct.GAUSS)
        V = ct.CeedSpace(one.ElemRestriction(2, 2, 1, 1, 3, [[0, 1], [1, 2]]), basis)
        op = ct.operator(inputs={"u": V.value}, outputs={"v": V.value})(lambda u: u)
        with pytest.raises(TypeError, match="stays on its Ceed"):
            op.on(ct.Ceed("/cpu/self"))
        assert ct.drive(op, print).op is op
