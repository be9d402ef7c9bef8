"""Bases against polynomials."""

import numpy as np
import pytest
from ceed_helpers import array_of, lagrange, lobatto, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedUnsupportedError, load


def kron(*matrices):
    """Tensor product with the first direction fastest, as libCEED numbers nodes and points."""
    result = np.ones((1, 1))
    for matrix in matrices:
        result = np.kron(matrix, result)
    return result


def directions(values, derivatives, dim):
    """The gradient's matrices: one direction's derivative, the others' values."""
    return [kron(*(derivatives if i == d else values for i in range(dim))) for d in range(dim)]


class TestQuadrature:
    @pytest.mark.parametrize("n", [1, 2, 5, 12])
    def test_gauss(self, one, n):
        for got, want in zip(one.gauss_quadrature(n), np.polynomial.legendre.leggauss(n), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-15)

    @pytest.mark.parametrize("n", [2, 3, 7])
    def test_lobatto(self, one, n):
        points, weights = one.lobatto_quadrature(n)
        np.testing.assert_allclose(points, lobatto(n), atol=1e-14)
        for degree in range(2 * n - 2):  # exact to degree 2n - 3
            np.testing.assert_allclose(weights @ points**degree, (1 + (-1) ** degree) / (degree + 1), atol=1e-14)

    def test_sizes(self, one):
        with pytest.raises(ValueError, match="q: expected an integer in"):
            one.lobatto_quadrature(1)
        with pytest.raises(ValueError, match="q: expected an integer in"):
            one.gauss_quadrature(0)


class TestLagrange:
    @pytest.mark.parametrize(("P", "Q"), [(2, 2), (3, 4), (5, 3), (8, 9)])
    def test_matrices(self, one, P, Q):
        basis = one.BasisTensorH1Lagrange(1, 1, P, Q, ct.GAUSS)
        points, weights = np.polynomial.legendre.leggauss(Q)
        values, derivatives = lagrange(lobatto(P), points)
        np.testing.assert_allclose(basis.get_interp_1d(), values, atol=1e-12)
        np.testing.assert_allclose(basis.get_grad_1d(), derivatives, atol=1e-11)
        np.testing.assert_allclose(basis.get_q_ref_1d(), points, atol=1e-14)
        np.testing.assert_allclose(basis.get_q_weight_1d(), weights, atol=1e-14)
        assert (basis.get_num_nodes(), basis.get_num_quadrature_points()) == (P, Q)

    @pytest.mark.parametrize("dim", [1, 2, 3])
    @pytest.mark.parametrize("ncomp", [1, 2])
    def test_apply(self, ceed, dim, ncomp):
        P, Q = 3, 4
        basis = ceed.BasisTensorH1Lagrange(dim, ncomp, P, Q, ct.GAUSS)
        points, weights = np.polynomial.legendre.leggauss(Q)
        values, derivatives = lagrange(lobatto(P), points)
        interp, grad = kron(*[values] * dim), np.stack(directions(values, derivatives, dim))
        np.testing.assert_allclose(basis.get_interp(), interp, atol=1e-13)
        np.testing.assert_allclose(basis.get_grad(), grad, atol=1e-13)

        rng = np.random.default_rng(0)
        x, q, g = rng.random((ncomp, P**dim)), rng.random((ncomp, Q**dim)), rng.random((dim, ncomp, Q**dim))
        for mode, data, want, back in (
            (ct.EVAL_INTERP, q, x @ interp.T, q @ interp),
            (ct.EVAL_GRAD, g, np.einsum("dqp,cp->dcq", grad, x), np.einsum("dqp,dcq->cp", grad, g)),
        ):
            out = ceed.Vector(want.size)
            basis.apply(1, mode, vector_of(ceed, x), out)
            np.testing.assert_allclose(array_of(out).reshape(want.shape), want, atol=1e-13)
            out = vector_of(ceed, np.full(x.size, np.pi))
            basis.T.apply(1, mode, vector_of(ceed, data), out)
            np.testing.assert_allclose(array_of(out).reshape(x.shape), back, atol=1e-12)

        w = ceed.Vector(Q**dim)
        basis.apply(1, ct.EVAL_WEIGHT, ct.VECTOR_NONE, w)
        np.testing.assert_allclose(array_of(w), kron(*[weights[:, None]] * dim)[:, 0], atol=1e-14)

    def test_lobatto_points(self, one):
        basis = one.BasisTensorH1Lagrange(1, 1, 4, 4, ct.GAUSS_LOBATTO)
        np.testing.assert_allclose(basis.get_interp_1d(), np.eye(4), atol=1e-14)

    def test_matrices_outlive_the_basis(self, one):
        basis = one.BasisTensorH1Lagrange(1, 1, 4, 4, ct.GAUSS_LOBATTO)
        interp = basis.get_interp_1d()
        del basis
        interp[0, 0] = 1
        np.testing.assert_allclose(interp, np.eye(4), atol=1e-14)

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ((0, 1, 2, 2, 0), "dim"),
            ((4, 1, 2, 2, 0), "dim"),
            ((1, 0, 2, 2, 0), "ncomp"),
            ((1, 1, 1, 2, 0), "P"),
            ((1, 1, 10**6, 2, 0), "P"),
            ((1, 1, 2, 0, 0), "Q"),
            ((1, 1, 2, 1, 1), "Q"),
            ((1, 1, 2, 2, 2), "qmode"),
            ((1, 1, 2, 2, "gauss"), "qmode"),
            ((1.0, 1, 2, 2, 0), "dim"),
            ((3, 1, 1000, 1000, 0), "too large"),
            ((3, 10**6, 900, 2, 0), "too large"),
        ],
    )
    def test_sizes(self, one, arguments, name):
        with pytest.raises((TypeError, ValueError), match=name):
            one.BasisTensorH1Lagrange(*arguments)


class TestGivenMatrices:
    def test_tensor(self, ceed):
        """Monomials, which are no Lagrange basis."""
        points, weights = np.polynomial.legendre.leggauss(4)
        values = points[:, None] ** np.arange(3)
        derivatives = np.stack([0 * points, 1 + 0 * points, 2 * points], axis=1)
        basis = ceed.BasisTensorH1(2, 1, 3, 4, values, derivatives, points, weights)
        x = np.random.default_rng(0).random(9)
        for mode, want in (
            (ct.EVAL_INTERP, kron(values, values) @ x),
            (ct.EVAL_GRAD, np.stack(directions(values, derivatives, 2)) @ x),
        ):
            out = ceed.Vector(want.size)
            basis.apply(1, mode, vector_of(ceed, x), out)
            np.testing.assert_allclose(array_of(out), want.ravel(), atol=1e-14)

    def test_triangle(self, ceed):
        """Linear functions on a triangle, at three points."""
        points = np.array([[1, 4, 1], [1, 1, 4]]) / 6
        interp = np.stack([1 - points.sum(0), *points], axis=1)
        grad = np.array([[-1.0, 1, 0], [-1, 0, 1]])[:, None, :].repeat(3, axis=1)
        basis = ceed.BasisH1(ct.TRIANGLE, 2, 3, 3, interp, grad, points, np.full(3, 1 / 6))
        assert (basis.dim, basis.get_num_nodes(), basis.get_num_quadrature_points()) == (2, 3, 3)
        np.testing.assert_array_equal(basis.get_interp(), interp)
        x = np.random.default_rng(0).random((2, 3))
        for mode, want in ((ct.EVAL_INTERP, x @ interp.T), (ct.EVAL_GRAD, np.einsum("dqp,cp->dcq", grad, x))):
            out = ceed.Vector(want.size)
            basis.apply(1, mode, vector_of(ceed, x), out)
            np.testing.assert_allclose(array_of(out), want.ravel(), atol=1e-14)
        w = ceed.Vector(3)
        basis.apply(1, ct.EVAL_WEIGHT, ct.VECTOR_NONE, w)
        np.testing.assert_allclose(array_of(w), 1 / 6)

    def test_strided_arrays(self, one):
        values = np.arange(12.0).reshape(3, 4).T  # (Q, P) = (4, 3), not contiguous
        basis = one.BasisTensorH1(1, 1, 3, 4, values, values, np.arange(8.0)[::2], np.ones(4))
        np.testing.assert_array_equal(basis.get_interp_1d(), values)
        np.testing.assert_array_equal(basis.get_q_ref_1d(), [0, 2, 4, 6])

    def test_wrong_arrays(self, one):
        good = [np.zeros(6), np.zeros(6), np.zeros(3), np.zeros(3)]
        for i, name in enumerate(("interp1d", "grad1d", "qref1d", "qweight1d")):
            for bad, error in ((good[i].astype(np.float32), TypeError), (good[i][:-1], ValueError)):
                with pytest.raises(error, match=f"^{name}: "):
                    one.BasisTensorH1(1, 1, 2, 3, *good[:i], bad, *good[i + 1 :])
        with pytest.raises(ValueError, match="grad: expected 12 values, got 6"):
            one.BasisH1(ct.TRIANGLE, 1, 2, 3, np.zeros(6), np.zeros(6), np.zeros(6), np.zeros(3))
        with pytest.raises(ValueError, match="topo: expected one of LINE"):
            one.BasisH1(77, 1, 2, 3, np.zeros(6), np.zeros(6), np.zeros(6), np.zeros(3))


class TestApplyRefuses:
    def test_lengths_and_modes(self, one):
        basis = one.BasisTensorH1Lagrange(2, 1, 2, 3, ct.GAUSS)
        nodes, points, grads = vector_of(one, np.zeros(4)), vector_of(one, np.zeros(9)), one.Vector(18)
        with pytest.raises(ValueError, match=r"u: .*needs a vector of 4 entries here, got 9"):
            basis.apply(1, ct.EVAL_INTERP, points, points)
        with pytest.raises(ValueError, match=r"v: .*needs a vector of 18 entries here, got 9"):
            basis.apply(1, ct.EVAL_GRAD, nodes, points)
        with pytest.raises(ValueError, match=r"u: .*needs a vector of 8 entries here, got 4"):
            basis.apply(2, ct.EVAL_GRAD, nodes, grads)
        with pytest.raises(ValueError, match="EVAL_CURL"):
            basis.apply(1, ct.EVAL_CURL, nodes, points)
        with pytest.raises(ValueError, match="EVAL_WEIGHT takes no input"):
            basis.apply(1, ct.EVAL_WEIGHT, nodes, points)
        with pytest.raises(TypeError, match="u: expected a Vector, got VECTOR_NONE"):
            basis.apply(1, ct.EVAL_INTERP, ct.VECTOR_NONE, points)
        with pytest.raises(ValueError, match="nelem"):
            basis.apply(0, ct.EVAL_INTERP, nodes, points)
        with pytest.raises(CeedAccessError, match=r"u: .* has no data"):
            basis.apply(1, ct.EVAL_INTERP, one.Vector(4), points)


class TestCollocated:
    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_gauss_lobatto(self, ceed, dim):
        """As many Gauss-Lobatto points as nodes: they are the nodes."""
        basis = ceed.BasisTensorH1Lagrange(dim, 2, 4, 4, ct.GAUSS_LOBATTO)
        np.testing.assert_allclose(basis.get_interp_1d(), np.eye(4), atol=1e-14)
        x = np.random.default_rng(0).random(3 * 2 * 4**dim)
        u, v = vector_of(ceed, x), ceed.Vector(x.size)
        basis.apply(3, ct.EVAL_INTERP, u, v)
        np.testing.assert_allclose(array_of(v), x, atol=1e-13)

    def test_without_a_basis(self, ceed):
        """EVAL_NONE with BASIS_NONE: quadrature at the nodes. A lumped mass matrix."""
        _, weights = ceed.lobatto_quadrature(4)
        r = ceed.ElemRestriction(2, 4, 1, 1, 7, np.arange(4) + 3 * np.arange(2)[:, None])
        points = ceed.StridedElemRestriction(2, 4, 1, 8, [1, 4, 4])
        scale = ct.QFunction.from_source(
            ceed,
            "CEED_QFUNCTION(f)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {\n"
            "  for (CeedInt i = 0; i < Q; i++) out[0][i] = in[0][i] * in[1][i];\n  return 0;\n}",
            "f",
            [("u", 1, ct.EVAL_NONE), ("w", 1, ct.EVAL_NONE)],
            [("v", 1, ct.EVAL_NONE)],
        )
        op = ceed.Operator(scale)
        op.set_field("u", r, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
        op.set_field("w", points, ct.BASIS_NONE, vector_of(ceed, np.tile(weights, 2)))
        op.set_field("v", r, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
        v = ceed.Vector(7)
        op.apply(vector_of(ceed, np.ones(7)), v)
        want = np.concatenate([weights[:3], [2 * weights[3]], weights[1:]])
        np.testing.assert_allclose(array_of(v), want, rtol=1e-14)


def vector_basis(kind, dim):
    """The lowest order H(div) or H(curl) element on a triangle or tetrahedron, by its polynomials, at two points."""
    points = np.array([[0.2, 0.3, 0.1], [0.5, 0.25, 0.2]])[:, :dim]
    x = points.T
    zero, one = np.zeros(2), np.ones(2)
    if kind == "Hdiv":  # Raviart-Thomas: x, and the unit vectors
        functions = [x, *([one if i == d else zero for i in range(dim)] for d in range(dim))]
        derivative = np.array([dim * one, *[zero] * dim])[None]
    elif dim == 2:  # Nedelec: the rotation, and the unit vectors
        functions = [[-x[1], x[0]], [one, zero], [zero, one]]
        derivative = np.array([2 * one, zero, zero])[None]
    else:
        functions = [[zero, -x[2], x[1]], [x[2], zero, -x[0]], [-x[1], x[0], zero]]
        functions += [[one if i == d else zero for i in range(3)] for d in range(3)]
        derivative = np.array([[2 * one if i == d else zero for i in range(3)] for d in range(3)] + [[zero] * 3] * 3)
        derivative = derivative.transpose(1, 0, 2)
    interp = np.array(functions).transpose(1, 2, 0)  # direction, point, function
    return np.ascontiguousarray(interp), np.ascontiguousarray(derivative.transpose(0, 2, 1)), x, np.array([0.2, 0.3])


class TestVectorBases:
    @pytest.mark.parametrize("kind", ["Hdiv", "Hcurl"])
    @pytest.mark.parametrize(("topo", "dim"), [(ct.TRIANGLE, 2), (ct.TET, 3)])
    @pytest.mark.parametrize("ncomp", [1, 2])
    def test_apply(self, ceed, kind, topo, dim, ncomp):
        interp, derivative, qref, qweight = vector_basis(kind, dim)
        nodes = interp.shape[2]
        make, mode = getattr(ceed, f"Basis{kind}"), ct.EVAL_DIV if kind == "Hdiv" else ct.EVAL_CURL
        basis = make(topo, ncomp, nodes, 2, interp, derivative, qref, qweight)
        assert (basis.dim, basis.get_num_nodes(), basis.get_num_quadrature_points()) == (dim, nodes, 2)
        np.testing.assert_array_equal(basis.get_interp(), interp)
        got = basis.get_div() if kind == "Hdiv" else basis.get_curl()
        np.testing.assert_array_equal(got, derivative if len(derivative) > 1 else derivative[0])
        rng = np.random.default_rng(dim)
        for emode, matrix in ((ct.EVAL_INTERP, interp), (mode, derivative)):
            x, y = rng.random((ncomp, nodes)), rng.random((matrix.shape[0], ncomp, 2))
            v, w = ceed.Vector(y.size), ceed.Vector(x.size)
            basis.apply(1, emode, vector_of(ceed, x), v)
            np.testing.assert_allclose(array_of(v).reshape(y.shape), np.einsum("dqn,cn->dcq", matrix, x), atol=1e-14)
            basis.T.apply(1, emode, vector_of(ceed, y), w)
            np.testing.assert_allclose(array_of(w).reshape(x.shape), np.einsum("dqn,dcq->cn", matrix, y), atol=1e-14)
        weights = ceed.Vector(2)
        basis.apply(1, ct.EVAL_WEIGHT, ct.VECTOR_NONE, weights)
        np.testing.assert_array_equal(array_of(weights), qweight)

    def test_refusals(self, one):
        interp, div, qref, qweight = vector_basis("Hdiv", 2)
        with pytest.raises(ValueError, match="two or three dimensions, not LINE"):
            one.BasisHdiv(ct.LINE, 1, 3, 2, interp[:1], div, qref[:1], qweight)
        with pytest.raises(ValueError, match="div: expected 6 values, got 12"):
            one.BasisHdiv(ct.TRIANGLE, 1, 3, 2, interp, interp, qref, qweight)
        with pytest.raises(TypeError, match="interp: libCEED computes in float64"):
            one.BasisHdiv(ct.TRIANGLE, 1, 3, 2, interp.astype(np.float32), div, qref, qweight)
        basis = one.BasisHdiv(ct.TRIANGLE, 1, 3, 2, interp, div, qref, qweight)
        for mode in (ct.EVAL_GRAD, ct.EVAL_CURL, ct.EVAL_NONE):
            with pytest.raises(ValueError, match=r"emode: an H\(div\) basis has .*EVAL_DIV"):
                basis.apply(1, mode, one.Vector(3), one.Vector(2))
        with pytest.raises(CeedUnsupportedError, match="has no EVAL_GRAD"):
            basis.get_grad()
        with pytest.raises(CeedUnsupportedError, match="has no EVAL_CURL"):
            basis.get_curl()

    def test_operator(self, ceed):
        """An H(div) mass and div-div operator on two triangles that share an edge, with its sign flipped in one."""
        interp, div, qref, qweight = vector_basis("Hdiv", 2)
        offsets, orients = [[0, 1, 2], [2, 3, 4]], [[False] * 3, [True, False, False]]
        r = ceed.OrientedElemRestriction(2, 3, 1, 1, 5, offsets, orients)
        basis = ceed.BasisHdiv(ct.TRIANGLE, 1, 3, 2, interp, div, qref, qweight)
        qf = ct.QFunction.from_source(
            ceed,
            "CEED_QFUNCTION(f)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {\n"
            "  for (CeedInt i = 0; i < Q; i++) {\n"
            "    for (CeedInt d = 0; d < 2; d++) out[0][d * Q + i] = in[2][i] * in[0][d * Q + i];\n"
            "    out[1][i] = in[2][i] * in[1][i];\n  }\n  return 0;\n}",
            "f",
            [("u", 2, ct.EVAL_INTERP), ("div u", 1, ct.EVAL_DIV), ("w", 1, ct.EVAL_WEIGHT)],
            [("v", 2, ct.EVAL_INTERP), ("div v", 1, ct.EVAL_DIV)],
        )
        op = ceed.Operator(qf)
        for name in ("u", "div u", "v", "div v"):
            op.set_field(name, r, basis, ct.VECTOR_ACTIVE)
        op.set_field("w", ct.ELEMRESTRICTION_NONE, basis, ct.VECTOR_NONE)
        element = np.einsum("dqi,q,dqj->ij", interp, qweight, interp) + np.einsum(
            "qi,q,qj->ij", div[0], qweight, div[0]
        )
        want = np.zeros((5, 5))
        for nodes, flips in zip(offsets, orients, strict=True):
            sign = np.where(flips, -1, 1)
            want[np.ix_(nodes, nodes)] += sign[:, None] * element * sign
        for j in range(5):
            v = ceed.Vector(5)
            op.apply(vector_of(ceed, np.eye(5)[j]), v)
            np.testing.assert_allclose(array_of(v), want[:, j], atol=1e-14)
        np.testing.assert_allclose(op.to_scipy().toarray(), want, atol=1e-14)


class TestProjection:
    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_interpolation(self, ceed, dim):
        """From degree 2 to degree 4: exact."""
        coarse, fine = (ceed.BasisTensorH1Lagrange(dim, 1, P, 6, ct.GAUSS) for P in (3, 5))
        projection = coarse.create_projection(fine)
        assert (projection.get_num_nodes(), projection.get_num_quadrature_points()) == (3**dim, 5**dim)
        x = np.random.default_rng(0).random(3**dim)
        v = ceed.Vector(5**dim)
        projection.apply(1, ct.EVAL_INTERP, vector_of(ceed, x), v)
        matrix = kron(*[lagrange(lobatto(3), lobatto(5))[0]] * dim)
        np.testing.assert_allclose(array_of(v), matrix @ x, atol=1e-12)
        assert "projection" in repr(projection)

    def test_refusals(self, one):
        basis = one.BasisTensorH1Lagrange(2, 1, 3, 4, ct.GAUSS)
        for args, name in (((2, 1, 3, 5), "num_quadrature_points"), ((2, 2, 3, 4), "ncomp"), ((1, 1, 3, 16), "dim")):
            with pytest.raises(ValueError, match=f"has another {name}"):
                basis.create_projection(one.BasisTensorH1Lagrange(*args, ct.GAUSS))
        with pytest.raises(TypeError, match="expected a Basis"):
            basis.create_projection(None)


class TestAtPoints:
    @pytest.mark.skipif(not load().has("CeedOperatorCreateAtPoints"), reason="needs libCEED 1.0")
    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_apply(self, ceed, dim):
        basis = ceed.BasisTensorH1Lagrange(dim, 2, 3, 4, ct.GAUSS)
        rng = np.random.default_rng(dim)
        x = rng.uniform(-1, 1, (dim, 5))
        values, derivatives = zip(*(lagrange(lobatto(3), x[d]) for d in range(dim)), strict=True)
        a = rng.random((2, 3**dim))

        def at(matrices):
            return np.stack([kron(*(m[i : i + 1] for m in matrices))[0] for i in range(5)])

        v = ceed.Vector(10)
        basis.apply_at_points([5], ct.EVAL_INTERP, vector_of(ceed, x), vector_of(ceed, a), v)
        np.testing.assert_allclose(array_of(v).reshape(2, 5), a @ at(values).T, atol=1e-13)
        w = ceed.Vector(10 * dim)
        basis.apply_at_points([5], ct.EVAL_GRAD, vector_of(ceed, x), vector_of(ceed, a), w)
        for d in range(dim):
            matrix = at([derivatives[i] if i == d else values[i] for i in range(dim)])
            np.testing.assert_allclose(array_of(w).reshape(dim, 2, 5)[d], a @ matrix.T, atol=1e-12)
        b = rng.random((2, 5))
        u = ceed.Vector(a.size)
        basis.apply_at_points([5], ct.EVAL_INTERP, vector_of(ceed, x), vector_of(ceed, b), u, ct.TRANSPOSE)
        np.testing.assert_allclose(array_of(u).reshape(2, -1), b @ at(values), atol=1e-13)

    def test_refusals(self, one):
        basis = one.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
        x, u, v = (vector_of(one, np.zeros(n)) for n in (2, 3, 2))
        if not one.library.has("CeedOperatorCreateAtPoints"):
            with pytest.raises(CeedUnsupportedError, match=r"libCEED has from version 1\.0"):
                basis.apply_at_points([2], ct.EVAL_INTERP, x, u, v)
            return
        for args, message in (
            (([2], ct.EVAL_WEIGHT, x, u, v), "not EVAL_WEIGHT"),
            (([3], ct.EVAL_INTERP, x, u, v), "needs a vector of 3 entries here, got 2"),
            (([], ct.EVAL_INTERP, x, u, v), "there are no elements"),
            (([2], ct.EVAL_INTERP, x, v, v), "needs a vector of 3 entries"),
        ):
            with pytest.raises(ValueError, match=message):
                basis.apply_at_points(*args)
