"""Bases against polynomials."""

import numpy as np
import pytest
from ceed_helpers import BACKENDS, array_of, lagrange, lobatto, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError


@pytest.fixture(params=BACKENDS)
def ceed(request):
    return ct.Ceed(request.param)


@pytest.fixture(scope="module")
def one():
    return ct.Ceed("/cpu/self")


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
