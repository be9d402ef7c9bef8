"""Operators as matrices: against probing with unit vectors, Galerkin products and dense inverses."""

import jax
import numpy as np
import pytest
from ceed_helpers import Mass1D, array_of, lagrange, lobatto, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedUnsupportedError

# Two components that are coupled without symmetry, by values and by gradients.
COUPLED = """
CEED_QFUNCTION(coupled)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const CeedScalar *u = in[0], *du = in[1], *w = in[2], *a = in[3];
  for (CeedInt i = 0; i < Q; i++) {
    for (CeedInt c = 0; c < NCOMP; c++) {
      CeedScalar sum = 0;
      for (CeedInt k = 0; k < NCOMP; k++)
        sum += a[(c * NCOMP + k) * Q + i] * u[k * Q + i] + (c + 2 * k) * du[k * Q + i];
      out[0][c * Q + i] = w[i] * sum;
      for (CeedInt d = 0; d < DIM; d++)
        out[1][(d * NCOMP + c) * Q + i] = w[i] * (du[(d * NCOMP + c) * Q + i] + (d + 1) * u[c * Q + i]);
    }
  }
  return 0;
}
"""


def probe(op):
    """The matrix of an operator, column by column."""
    n_in, n_out = op.active_lengths
    matrix = np.zeros((n_out, n_in))
    v = op.ceed.Vector(n_out)
    for j in range(n_in):
        op.apply(vector_of(op.ceed, np.eye(n_in)[j]), v)
        matrix[:, j] = array_of(v)
    return matrix


class Coupled:
    """An operator on `n` elements in a row, of degree `degree`, with `ncomp` components, in `dim` dimensions."""

    def __init__(self, ceed, dim=2, ncomp=2, degree=2, n=3, seed=0):
        rng = np.random.default_rng(seed)
        self.ceed, self.dim, self.ncomp, self.n, self.Q = ceed, dim, ncomp, n, degree + 2
        self.restriction = self.restriction_of(degree)
        self.basis = self.basis_of(degree)
        self.lsize = self.restriction.lsize
        nq = self.Q**dim
        self.a = vector_of(ceed, rng.random(ncomp * ncomp * n * nq))
        points = ceed.StridedElemRestriction(n, nq, ncomp * ncomp, len(self.a), [1, nq, nq * ncomp * ncomp])
        qf = ct.QFunction.from_source(
            ceed,
            f"#define DIM {dim}\n#define NCOMP {ncomp}\n" + COUPLED,
            "coupled",
            [
                ("u", ncomp, ct.EVAL_INTERP),
                ("du", dim * ncomp, ct.EVAL_GRAD),
                ("w", 1, ct.EVAL_WEIGHT),
                ("a", ncomp * ncomp, ct.EVAL_NONE),
            ],
            [("v", ncomp, ct.EVAL_INTERP), ("dv", dim * ncomp, ct.EVAL_GRAD)],
        )
        self.op = ceed.Operator(qf)
        for name in ("u", "du", "v", "dv"):
            self.op.set_field(name, self.restriction, self.basis, ct.VECTOR_ACTIVE)
        self.op.set_field("w", ct.ELEMRESTRICTION_NONE, self.basis, ct.VECTOR_NONE)
        self.op.set_field("a", points, ct.BASIS_NONE, self.a)

    def restriction_of(self, degree):
        """Neighbouring elements share a face of nodes; the components lie next to each other."""
        P = degree + 1
        nodes = P ** (self.dim - 1) * (degree * self.n + 1)
        local = np.arange(P**self.dim).reshape([P] * self.dim)  # first direction fastest: the last axis
        slices = np.moveaxis(local, -1, 0).reshape(P, -1)
        offsets = np.zeros((self.n, P**self.dim), int)
        for e in range(self.n):
            for i in range(P):
                offsets[e, slices[i]] = (degree * e + i) * P ** (self.dim - 1) + np.arange(P ** (self.dim - 1))
        ncomp = self.ncomp
        return self.ceed.ElemRestriction(self.n, P**self.dim, ncomp, 1, ncomp * nodes, ncomp * offsets)

    def basis_of(self, degree):
        return self.ceed.BasisTensorH1Lagrange(self.dim, self.ncomp, degree + 1, self.Q, ct.GAUSS)


CASES = [(1, 1), (2, 1), (2, 2), (3, 2)]


class TestAgainstProbing:
    @pytest.mark.parametrize(("dim", "ncomp"), CASES)
    def test_sparse(self, ceed, dim, ncomp):
        """Scalar and vector fields, not symmetric, in the right orientation."""
        case = Coupled(ceed, dim, ncomp, degree=1 if dim == 3 else 2)
        want = probe(case.op)
        assert not np.allclose(want, want.T)
        scale = np.abs(want).max()
        np.testing.assert_allclose(case.op.to_scipy().toarray(), want, atol=1e-13 * scale)
        rows, columns = case.op.linear_assemble_symbolic()
        assert rows.dtype == columns.dtype == np.int32
        values = ceed.Vector(rows.size)
        values.set_value(0)
        case.op.linear_assemble(values)
        dense = np.zeros_like(want)
        np.add.at(dense, (rows, columns), array_of(values))
        np.testing.assert_allclose(dense, want, atol=1e-13 * scale)

    @pytest.mark.parametrize(("dim", "ncomp"), CASES)
    def test_diagonals(self, ceed, dim, ncomp):
        case = Coupled(ceed, dim, ncomp, degree=1 if dim == 3 else 2)
        want = probe(case.op)
        scale = np.abs(want).max()
        d, blocks = ceed.Vector(case.lsize), ceed.Vector(ncomp * case.lsize)
        case.op.linear_assemble_diagonal(d)
        np.testing.assert_allclose(array_of(d), np.diag(want), atol=1e-13 * scale)
        case.op.linear_assemble_point_block_diagonal(blocks)
        nodes = case.lsize // ncomp
        point = want.reshape(nodes, ncomp, nodes, ncomp)
        point = point[np.arange(nodes), :, np.arange(nodes), :]
        np.testing.assert_allclose(array_of(blocks).reshape(point.shape), point, atol=1e-13 * scale)
        case.op.linear_assemble_add_point_block_diagonal(blocks)
        np.testing.assert_allclose(array_of(blocks).reshape(point.shape), 2 * point, atol=2e-13 * scale)

    def test_formats(self, one):
        case = Coupled(one)
        want = probe(case.op)
        for name in ("csr", "csc", "coo", "lil"):
            matrix = case.op.to_scipy(name)
            assert matrix.format == name
            np.testing.assert_allclose(matrix.toarray(), want, atol=1e-12)
        bcoo = case.op.to_bcoo()
        assert bcoo.dtype == np.float64
        x = np.random.default_rng(0).random(case.lsize)
        np.testing.assert_allclose(jax.jit(lambda m, x: m @ x)(bcoo, x), want @ x, rtol=1e-12)

    def test_composite(self, ceed):
        a, b = Coupled(ceed, seed=1), Coupled(ceed, seed=2)
        op = ceed.CompositeOperator()
        op.add_sub(a.op)
        op.add_sub(b.op)
        want = probe(op)
        np.testing.assert_allclose(op.to_scipy().toarray(), want, atol=1e-12)
        d = ceed.Vector(2 * a.lsize)
        op.linear_assemble_point_block_diagonal(d)
        np.testing.assert_allclose(array_of(d)[::4], np.diag(want)[::2], atol=1e-12)
        np.testing.assert_array_equal(array_of(op.get_multiplicity()), 2)
        np.testing.assert_array_equal(array_of(op.get_multiplicity([0])), 1)
        with pytest.raises(CeedUnsupportedError, match="sub_operators"):
            op.linear_assemble_qfunction()
        assert op.sub_operators == (a.op, b.op)

    def test_rectangular(self, one):
        """A derivative: from degree 2 to the quadrature points of a basis of degree 1."""
        r_in = one.ElemRestriction(2, 3, 1, 1, 5, np.arange(3) + 2 * np.arange(2)[:, None])
        r_out = one.ElemRestriction(2, 2, 1, 1, 3, np.arange(2) + np.arange(2)[:, None])
        b_in, b_out = (one.BasisTensorH1Lagrange(1, 1, P, 3, ct.GAUSS) for P in (3, 2))
        op = one.Operator(one.IdentityQFunction(1, ct.EVAL_GRAD, ct.EVAL_INTERP))
        op.set_field("input", r_in, b_in, ct.VECTOR_ACTIVE)
        op.set_field("output", r_out, b_out, ct.VECTOR_ACTIVE)
        want = probe(op)
        assert want.shape == (3, 5)
        with pytest.raises(ValueError, match=r"has no square matrix: its active lengths are \(5, 3\)"):
            op.linear_assemble_diagonal(one.Vector(5))

    def test_after_an_apply(self, ceed):
        """Assembly does not see what an apply left in the operator (libCEED issue 1947)."""
        case = Coupled(ceed)
        want = case.op.to_scipy().toarray()
        u, d = vector_of(ceed, np.random.default_rng(0).random(case.lsize)), ceed.Vector(case.lsize)
        for assembled in (
            lambda: case.op.to_scipy().toarray(),
            lambda: (case.op.linear_assemble_diagonal(d), np.diag(array_of(d)) + want - np.diag(np.diag(want)))[1],
        ):
            case.op.apply(u, d)
            np.testing.assert_allclose(assembled(), want, atol=1e-13)
        np.testing.assert_allclose(probe(case.op), want, atol=1e-12)

    def test_passive_outputs_stay(self, ceed):
        """Assembly leaves the vectors of passive outputs as they are."""
        qf = ct.QFunction.from_source(
            ceed,
            "CEED_QFUNCTION(f)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {\n"
            "  for (CeedInt i = 0; i < Q; i++) out[0][i] = out[1][i] = in[0][i] * in[1][i];\n  return 0;\n}",
            "f",
            [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)],
            [("v", 1, ct.EVAL_INTERP), ("tap", 1, ct.EVAL_NONE)],
        )
        mass = Mass1D(ceed, qfunction=qf)
        tap = ceed.Vector(4 * mass.n)
        mass.op.set_field("tap", mass.strided, ct.BASIS_NONE, tap)
        d = ceed.Vector(mass.lsize)
        mass.op.apply(vector_of(ceed, np.ones(mass.lsize)), d)
        before = array_of(tap)
        mass.op.linear_assemble_diagonal(d)
        np.testing.assert_allclose(array_of(d), np.diag(mass.matrix), rtol=1e-13)
        np.testing.assert_array_equal(array_of(tap), before)


class TestQFunctionMatrix:
    @pytest.mark.parametrize(("dim", "ncomp"), [(1, 1), (2, 2)])
    def test_components(self, ceed, dim, ncomp):
        """Component ``input * n_out + output``, against the coefficients of the C code."""
        case = Coupled(ceed, dim, ncomp)
        assembled, restriction = case.op.linear_assemble_qfunction()
        n = ncomp + dim * ncomp
        assert restriction.ncomp == n * n
        evec = ceed.Vector(restriction.esize)
        restriction.apply(assembled, evec)
        layout = restriction.get_layout()
        q, c, e = np.ogrid[: case.Q**dim, : n * n, : case.n]
        got = array_of(evec)[q * layout[0] + c * layout[1] + e * layout[2]].reshape(-1, n, n, case.n)
        a = array_of(case.a).reshape(case.n, ncomp, ncomp, -1)
        w = np.ones(1)
        for _ in range(dim):
            w = np.kron(np.polynomial.legendre.leggauss(case.Q)[1], w)
        want = np.zeros_like(got)
        for o in range(ncomp):
            for i in range(ncomp):
                want[:, i, o] = (a[:, o, i] * w).T
                want[:, ncomp + i, o] = ((o + 2 * i) * w)[:, None]
            for d in range(dim):
                want[:, ncomp + d * ncomp + o, ncomp + d * ncomp + o] = w[:, None]
                want[:, o, ncomp + d * ncomp + o] = ((d + 1) * w)[:, None]
        np.testing.assert_allclose(got, want, atol=1e-14)

    def test_result_is_independent(self, ceed):
        mass = Mass1D(ceed)
        vector, restriction = mass.op.linear_assemble_qfunction()
        evec = ceed.Vector(restriction.esize)
        restriction.apply(vector, evec)
        np.testing.assert_allclose(np.sort(array_of(evec)), np.sort(mass.data.ravel()), rtol=1e-14)
        del mass
        vector.scale(2)
        assert vector.to_numpy().ctypes.data % 64 == 0


class TestRefusals:
    def test_vectors(self, one):
        mass = Mass1D(one)
        with pytest.raises(ValueError, match="needs a vector of 23 entries"):
            mass.op.linear_assemble_point_block_diagonal(one.Vector(22))
        n = mass.op.linear_assemble_symbolic()[0].size
        with pytest.raises(ValueError, match=f"needs a vector of {n} entries"):
            mass.op.linear_assemble(one.Vector(n - 1))
        with mass.qdata.array(), pytest.raises(CeedAccessError, match="qdata"):
            mass.op.to_scipy()

    def test_unknown_fields(self, one):
        mass = Mass1D(one)
        wrapped = ct.Operator.wrap(mass.op.address, one)
        np.testing.assert_allclose(wrapped.to_scipy().toarray(), mass.matrix, atol=1e-14)
        with pytest.raises(CeedUnsupportedError, match="not known for this operator"):
            wrapped.linear_assemble_point_block_diagonal(one.Vector(mass.lsize))
        with pytest.raises(CeedUnsupportedError, match="whose fields are known"):
            wrapped.create_fdm_element_inverse()

    def test_no_matrix(self, one):
        mass = Mass1D(one)
        op = one.Operator(one.QFunctionByName("MassApply"))
        op.set_field("u", mass.restriction, mass.basis, vector_of(one, np.zeros(mass.lsize)))
        op.set_field("qdata", mass.strided, ct.BASIS_NONE, mass.qdata)
        op.set_field("v", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        with pytest.raises(ValueError, match="has no matrix"):
            op.to_scipy()

    def test_x64(self, one):
        jax.config.update("jax_enable_x64", False)
        try:
            with pytest.raises(TypeError, match="float64 here, and JAX has 64-bit numbers switched off"):
                Mass1D(one).op.to_bcoo()
        finally:
            jax.config.update("jax_enable_x64", True)

    def test_strip(self, one):
        mass = Mass1D(one)
        if one.library.has("CeedOperatorAssemblyDataStrip"):
            mass.op.to_scipy()
            mass.op.assembly_data_strip()
            np.testing.assert_allclose(mass.op.to_scipy().toarray(), mass.matrix, atol=1e-14)
        else:
            with pytest.raises(CeedUnsupportedError, match=r"AssemblyDataStrip, which libCEED has from version 1\.0"):
                mass.op.assembly_data_strip()


class TestMultigrid:
    @pytest.mark.parametrize("form", ["plain", "tensor"])
    @pytest.mark.parametrize(("dim", "ncomp"), [(1, 1), (2, 2), (3, 1)])
    def test_galerkin(self, ceed, form, dim, ncomp):
        fine = Coupled(ceed, dim, ncomp, degree=2, n=2)
        restriction, basis = fine.restriction_of(1), fine.basis_of(1)
        ones = vector_of(ceed, np.ones(fine.lsize))
        if form == "plain":
            levels = fine.op.multigrid_create(ones, restriction, basis)
        else:
            matrix = lagrange(lobatto(2), lobatto(3))[0]
            levels = fine.op.multigrid_create_tensor_h1(ones, restriction, basis, matrix)
        coarse, prolong, restrict = (probe(op) for op in levels)
        np.testing.assert_allclose(restrict, prolong.T, atol=1e-13)
        np.testing.assert_allclose(prolong.sum(axis=1), 1, atol=1e-12)  # constants stay what they are
        A = probe(fine.op)
        np.testing.assert_allclose(prolong.T @ A @ prolong, coarse, atol=1e-11 * np.abs(A).max())
        d = ceed.Vector(restriction.lsize)
        levels[0].linear_assemble_diagonal(d)
        np.testing.assert_allclose(array_of(d), np.diag(coarse), atol=1e-11 * np.abs(A).max())
        assert "coarse level of" in repr(levels[0])

    def test_three_levels(self, ceed):
        fine = Coupled(ceed, 1, 1, degree=4)
        ones = vector_of(ceed, np.ones(fine.lsize))
        middle = fine.op.multigrid_create(ones, fine.restriction_of(2), fine.basis_of(2))
        ones = vector_of(ceed, np.ones(middle[0].active_lengths[0]))
        coarse = middle[0].multigrid_create(ones, fine.restriction_of(1), fine.basis_of(1))
        P = probe(middle[1]) @ probe(coarse[1])
        np.testing.assert_allclose(P.T @ probe(fine.op) @ P, probe(coarse[0]), atol=1e-11)

    def test_h1(self, ceed):
        """Bases without tensor structure: degree 2 and 1 on a triangle."""
        points, weights = np.array([[1, 1], [4, 1], [1, 4]]) / 6, np.ones(3) / 6

        def basis(ncomp, functions):
            interp = np.array([[f(*p) for f in functions] for p in points])
            h = 1e-6
            grad = np.array(
                [
                    [[(f(*(p + h * e)) - f(*(p - h * e))) / (2 * h) for f in functions] for p in points]
                    for e in np.eye(2)
                ]
            )
            return ceed.BasisH1(ct.TRIANGLE, ncomp, len(functions), 3, interp, grad, points.T, weights)

        linear = [lambda x, y: 1 - x - y, lambda x, y: x, lambda x, y: y]
        corners = [(0, 0), (1, 0), (0, 1), (0.5, 0), (0.5, 0.5), (0, 0.5)]
        quadratic = [lambda x, y, f=f: f(x, y) * (2 * f(x, y) - 1) for f in linear]
        quadratic += [lambda x, y, i=i: 4 * linear[i](x, y) * linear[(i + 1) % 3](x, y) for i in range(3)]
        fine, coarse = basis(1, quadratic), basis(1, linear)
        r_fine = ceed.ElemRestriction(2, 6, 1, 1, 9, [[0, 1, 2, 3, 4, 5], [2, 1, 6, 4, 7, 8]])
        r_coarse = ceed.ElemRestriction(2, 3, 1, 1, 4, [[0, 1, 2], [2, 1, 3]])
        rq = ceed.StridedElemRestriction(2, 3, 1, 6, [1, 3, 3])
        op = ceed.Operator(ceed.QFunctionByName("MassApply"))
        op.set_field("u", r_fine, fine, ct.VECTOR_ACTIVE)
        op.set_field("qdata", rq, ct.BASIS_NONE, vector_of(ceed, np.arange(1.0, 7)))
        op.set_field("v", r_fine, fine, ct.VECTOR_ACTIVE)
        matrix = np.array([[f(*p) for f in linear] for p in corners])
        ones = vector_of(ceed, np.ones(9))
        coarse_op, prolong, _ = (probe(o) for o in op.multigrid_create_h1(ones, r_coarse, coarse, matrix))
        np.testing.assert_allclose(prolong.T @ probe(op) @ prolong, coarse_op, atol=1e-12)
        with pytest.raises(CeedUnsupportedError, match="use multigrid_create_h1"):
            op.multigrid_create_tensor_h1(ones, r_coarse, coarse, matrix)
        with pytest.raises(CeedUnsupportedError, match="needs a tensor basis"):
            op.create_fdm_element_inverse()

    def test_refusals(self, one):
        fine = Coupled(one, 2, 2)
        ones, r, b = vector_of(one, np.ones(fine.lsize)), fine.restriction_of(1), fine.basis_of(1)
        other = Coupled(one, 2, 1)
        for args, error, message in (
            ((one.Vector(3), r, b), ValueError, "needs a vector of"),
            ((one.Vector(fine.lsize), r, b), CeedAccessError, "p_mult_fine: .* no data"),
            ((None, r, b), TypeError, "p_mult_fine: expected a Vector"),
            ((ones, b, b), TypeError, "rstr_coarse"),
            ((ones, r, r), TypeError, "basis_coarse"),
            ((ones, other.restriction_of(1), b), ValueError, "other elements or components"),
            ((ones, r, other.basis_of(1)), ValueError, "another ncomp"),
            ((ones, fine.restriction_of(2), b), ValueError, "does not fit"),
            ((ones, r, one.BasisTensorH1Lagrange(2, 2, 2, 3, ct.GAUSS)), ValueError, "another num_quadrature_points"),
        ):
            with pytest.raises(error, match=message):
                fine.op.multigrid_create(*args)
        with pytest.raises(ValueError, match="interp_C_to_F: expected 6 values, got 4"):
            fine.op.multigrid_create_tensor_h1(ones, r, b, np.zeros((2, 2)))
        with pytest.raises(ValueError, match=r"interp_C_to_F: expected 36 values, got 4"):
            fine.op.multigrid_create_h1(ones, r, b, np.zeros((2, 2)))
        fine.op.multigrid_create(ones, r, b)  # and nothing of it has hurt


class TestFDM:
    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_mass(self, ceed, dim):
        """One affine element with constant coefficients: the exact inverse."""
        P, Q = 3, 4
        nodes = P**dim
        r = ceed.ElemRestriction(1, nodes, 1, 1, nodes, np.arange(nodes))
        basis = ceed.BasisTensorH1Lagrange(dim, 1, P, Q, ct.GAUSS)
        rq = ceed.StridedElemRestriction(1, Q**dim, 1, Q**dim, [1, Q**dim, Q**dim])
        weights = ceed.Vector(Q**dim)
        basis.apply(1, ct.EVAL_WEIGHT, ct.VECTOR_NONE, weights)
        weights.scale(1.7)
        op = ceed.Operator(ceed.QFunctionByName("MassApply"))
        op.set_field("u", r, basis, ct.VECTOR_ACTIVE)
        op.set_field("qdata", rq, ct.BASIS_NONE, weights)
        op.set_field("v", r, basis, ct.VECTOR_ACTIVE)
        inverse = op.create_fdm_element_inverse()
        np.testing.assert_allclose(probe(inverse) @ probe(op), np.eye(nodes), atol=1e-10)

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_mass_and_stiffness(self, ceed, dim):
        """Helmholtz: u + grad u, on the reference element."""
        P, Q = 3, 4
        nodes = P**dim
        r = ceed.ElemRestriction(1, nodes, 1, 1, nodes, np.arange(nodes))
        basis = ceed.BasisTensorH1Lagrange(dim, 1, P, Q, ct.GAUSS)
        qf = ct.QFunction.from_source(
            ceed,
            f"#define DIM {dim}\n"
            "CEED_QFUNCTION(f)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {\n"
            "  for (CeedInt i = 0; i < Q; i++) {\n    out[0][i] = in[2][i] * in[0][i];\n"
            "    for (CeedInt d = 0; d < DIM; d++) out[1][d * Q + i] = in[2][i] * in[1][d * Q + i];\n  }\n"
            "  return 0;\n}",
            "f",
            [("u", 1, ct.EVAL_INTERP), ("du", dim, ct.EVAL_GRAD), ("w", 1, ct.EVAL_WEIGHT)],
            [("v", 1, ct.EVAL_INTERP), ("dv", dim, ct.EVAL_GRAD)],
        )
        op = ceed.Operator(qf)
        for name in ("u", "du", "v", "dv"):
            op.set_field(name, r, basis, ct.VECTOR_ACTIVE)
        op.set_field("w", ct.ELEMRESTRICTION_NONE, basis, ct.VECTOR_NONE)
        A, B = probe(op), probe(op.create_fdm_element_inverse())
        # The shift that libCEED makes is of the order of 1e-4.
        np.testing.assert_allclose(B @ A, np.eye(nodes), atol=3e-4)
