"""What libCEED takes, in the order that it takes: loads in sums, H1 multigrid on tensor bases, contexts first."""

import numpy as np
import pytest
from ceed_helpers import Mass1D, array_of, check_python, lagrange, lobatto, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedError, CeedIncompleteError, CeedUnsupportedError

SOURCE = """
CEED_QFUNCTION(load)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  for (CeedInt i = 0; i < Q; i++) out[0][i] = 3.0 * in[0][i];
  return 0;
}
typedef struct { double factor; } Factor;
CEED_QFUNCTION(scaled)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  for (CeedInt i = 0; i < Q; i++) out[0][i] = ((const Factor *)ctx)->factor * in[1][i] * in[0][i];
  return 0;
}
"""


def load_of(mass):
    """An operator without an active input, and what it adds: 3 times the integrals of the basis functions."""
    ceed = mass.ceed
    qf = ct.QFunction.from_source(ceed, SOURCE, "load", [("qdata", 1, ct.EVAL_NONE)], [("v", 1, ct.EVAL_INTERP)])
    op = ceed.Operator(qf)
    op.set_field("qdata", mass.strided, ct.BASIS_NONE, mass.qdata)
    op.set_field("v", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
    return op, 3.0 * mass.matrix @ np.ones(mass.lsize)


@pytest.mark.parametrize("first", ["mass", "load", "loads only"])
def test_a_load_in_a_sum(ceed, first):
    mass = Mass1D(ceed)
    load, added = load_of(mass)
    assert load.active_lengths == (0, mass.lsize)
    composite = ceed.CompositeOperator()
    parts = {"mass": [mass.op, load], "load": [load, mass.op], "loads only": [load, load_of(mass)[0]]}[first]
    for part in parts:
        composite.add_sub(part)
    u, v = np.random.default_rng(0).random(mass.lsize), ceed.Vector(mass.lsize)
    if first == "loads only":
        assert composite.active_lengths == (0, mass.lsize)
        composite.apply(ct.VECTOR_NONE, v)
        np.testing.assert_allclose(array_of(v), 2 * added, rtol=1e-13)
        return
    assert composite.active_lengths == (mass.lsize, mass.lsize)
    composite.apply(vector_of(ceed, u), v)
    np.testing.assert_allclose(array_of(v), mass.matrix @ u + added, rtol=1e-13)
    composite.apply_add(vector_of(ceed, u), v)
    np.testing.assert_allclose(array_of(v), 2 * (mass.matrix @ u + added), rtol=1e-13)
    np.testing.assert_array_equal(array_of(composite.get_multiplicity()), np.ones(mass.lsize))
    with pytest.raises(ValueError, match=r"pass VECTOR_NONE|expected a Vector"):
        load.apply(vector_of(ceed, u), v)
    with pytest.raises(ValueError, match="active lengths"):
        composite.get_multiplicity() and ceed.CompositeOperator().add_sub(mass.op)
        other = ceed.CompositeOperator()
        other.add_sub(load)
        other.add_sub(Mass1D(ceed, n=3).op)


def test_a_sum_with_a_load_has_no_matrix():
    check_python("""
        import jax
        jax.config.update("jax_enable_x64", True)
        from ceed_helpers import *
        from test_order_of_calls import load_of
        from ceedtap.ceed_ffi import CeedUnsupportedError
        for resource in BACKENDS:
            mass = Mass1D(ct.Ceed(resource))
            composite = mass.ceed.CompositeOperator()
            composite.add_sub(load_of(mass)[0])
            composite.add_sub(mass.op)
            d = mass.ceed.Vector(mass.lsize)
            for assemble in (composite.to_scipy, composite.linear_assemble_symbolic, composite.to_bcoo,
                             lambda: composite.linear_assemble_diagonal(d), composite.linear_assemble_get_num_entries):
                try:
                    assemble()
                except CeedUnsupportedError as error:
                    assert "has no active input or no active output" in str(error), error
                else:
                    raise AssertionError("accepted")
            composite.apply(vector_of(mass.ceed, np.ones(mass.lsize)), d)
    """)


@pytest.mark.parametrize("dim", [1, 2])
def test_h1_multigrid_on_tensor_bases(ceed, dim):
    """One element; the interpolation in all directions at once. The coarse operator is Galerkin's."""

    def basis(nodes):
        return ceed.BasisTensorH1Lagrange(dim, 1, nodes, 4, ct.GAUSS)

    def rows(nodes):
        return ceed.ElemRestriction(1, nodes**dim, 1, 1, nodes**dim, np.arange(nodes**dim))

    op = ceed.Operator(ceed.QFunctionByName("MassApply"))
    weights = ceed.Vector(4**dim)
    basis(3).apply(1, ct.EVAL_WEIGHT, ct.VECTOR_NONE, weights)
    op.set_field("u", rows(3), basis(3), ct.VECTOR_ACTIVE)
    op.set_field("qdata", ceed.StridedElemRestriction(1, 4**dim, 1, 4**dim, [1, 1, 4**dim]), ct.BASIS_NONE, weights)
    op.set_field("v", rows(3), basis(3), ct.VECTOR_ACTIVE)
    one_way = lagrange(lobatto(2), lobatto(3))[0]
    matrix = one_way if dim == 1 else np.kron(one_way, one_way)
    ones = vector_of(ceed, np.ones(3**dim))
    coarse, prolong, restrict = op.multigrid_create_h1(ones, rows(2), basis(2), matrix)

    def probe(operator):
        n, m = operator.active_lengths
        v, columns = ceed.Vector(m), []
        for unit in np.eye(n):
            operator.apply(vector_of(ceed, unit), v)
            columns.append(array_of(v))
        return np.stack(columns, axis=1)

    np.testing.assert_allclose(probe(prolong), matrix, atol=1e-13)
    np.testing.assert_allclose(probe(restrict), matrix.T, atol=1e-13)
    np.testing.assert_allclose(probe(coarse), matrix.T @ probe(op) @ matrix, atol=1e-13)


class TestContextFirst:
    def build(self, ceed):
        mass = Mass1D(ceed)
        context = ceed.QFunctionContext({"factor": 2.0})
        inputs = [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)]
        qf = ct.QFunction.from_source(ceed, SOURCE, "scaled", inputs, [("v", 1, ct.EVAL_INTERP)], context=context)
        return mass, ceed.Operator(qf)

    def fields(self, mass, op):
        op.set_field("u", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        op.set_field("qdata", mass.strided, ct.BASIS_NONE, mass.qdata)
        op.set_field("v", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)

    def test_before_fields(self, ceed):
        mass, op = self.build(ceed)
        op.set_context("factor", 5.0)
        assert op.get_context("factor") == 5
        with pytest.raises(CeedIncompleteError, match="lacks the fields"):
            op.check()
        self.fields(mass, op)
        v = ceed.Vector(mass.lsize)
        op.apply(vector_of(ceed, np.ones(mass.lsize)), v)
        np.testing.assert_allclose(array_of(v), 5 * mass.matrix @ np.ones(mass.lsize), rtol=1e-13)

    def test_between(self, ceed):
        mass, op = self.build(ceed)
        op.set_field("u", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        with pytest.raises(KeyError, match="no part"):
            op.set_context("nothing", 5.0)
        op.set_context("factor", 3.0)
        op.set_field("qdata", mass.strided, ct.BASIS_NONE, mass.qdata)
        op.set_field("v", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        v = ceed.Vector(mass.lsize)
        op.apply(vector_of(ceed, np.ones(mass.lsize)), v)
        np.testing.assert_allclose(array_of(v), 3 * mass.matrix @ np.ones(mass.lsize), rtol=1e-13)

    def test_an_empty_sum(self, one):
        with pytest.raises((KeyError, CeedError)):
            one.CompositeOperator().get_context("factor")


def test_what_is_still_refused(one):
    mass = Mass1D(one)
    with pytest.raises(CeedUnsupportedError, match="multigrid_create_h1"):
        triangle = one.BasisH1(ct.LINE, 1, 3, 4, np.ones(12), np.ones(12), np.ones(4), np.ones(4))
        op = one.Operator(one.QFunctionByName("MassApply"))
        op.set_field("u", mass.restriction, triangle, ct.VECTOR_ACTIVE)
        op.set_field("qdata", mass.strided, ct.BASIS_NONE, mass.qdata)
        op.set_field("v", mass.restriction, triangle, ct.VECTOR_ACTIVE)
        op.multigrid_create_tensor_h1(vector_of(one, np.ones(mass.lsize)), mass.restriction, triangle, np.ones((3, 3)))
