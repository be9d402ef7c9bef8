"""Operators against matrices, and everything that may go wrong with them."""

import gc
import threading

import numpy as np
import pytest
from ceed_helpers import Mass1D, array_of, check_python, lagrange, lobatto, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import (
    CeedAccessError,
    CeedError,
    CeedIncompatibleError,
    CeedIncompleteError,
    CeedUnsupportedError,
    load,
)

FAILING = """
CEED_QFUNCTION(failing)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  for (CeedInt i = 0; i < Q; i++) {
    if (in[0][i] < 0) return 3;
    out[0][i] = in[0][i] * in[1][i];
  }
  return 0;
}
"""
TAPPED = """
CEED_QFUNCTION(tapped)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  for (CeedInt i = 0; i < Q; i++) out[0][i] = out[1][i] = in[0][i] * in[1][i];
  return 0;
}
"""


class TestMass:
    def test_apply(self, ceed):
        mass = Mass1D(ceed)
        x = np.random.default_rng(0).random(mass.lsize)
        u, v = vector_of(ceed, x), ceed.Vector(mass.lsize)
        for _ in range(2):
            mass.op.apply(u, v)
            np.testing.assert_allclose(array_of(v), mass.matrix @ x, rtol=1e-13)
        mass.op.apply_add(u, v)
        np.testing.assert_allclose(array_of(v), 2 * mass.matrix @ x, rtol=1e-13)

    def test_changed_quadrature_data(self, ceed):
        """Backends cache passive inputs: every way to change them is seen."""
        mass = Mass1D(ceed)
        x = np.random.default_rng(0).random(mass.lsize)
        u, v = vector_of(ceed, x), ceed.Vector(mass.lsize)
        mass.op.apply(u, v)

        def in_place():
            with mass.qdata.array() as q:
                q *= 2

        shared = 2 * mass.data.ravel()
        for factor, change in (
            (2, lambda: mass.qdata.set_array(2 * mass.data)),
            (4, in_place),
            (12, lambda: mass.qdata.scale(3)),
            (2, lambda: mass.qdata.set_array(shared, cmode=ct.USE_POINTER)),
            (1, lambda: (shared.__imul__(0.5), mass.qdata.set_array(shared, cmode=ct.USE_POINTER))),
        ):
            change()
            mass.op.apply(u, v)
            np.testing.assert_allclose(array_of(v), factor * mass.matrix @ x, rtol=1e-13)

    def test_diagonal(self, ceed):
        mass = Mass1D(ceed)
        d = ceed.Vector(mass.lsize)
        mass.op.linear_assemble_diagonal(d)
        np.testing.assert_allclose(array_of(d), np.diag(mass.matrix), rtol=1e-13)
        mass.op.linear_assemble_add_diagonal(d)
        np.testing.assert_allclose(array_of(d), 2 * np.diag(mass.matrix), rtol=1e-13)

    def test_what_it_knows(self, one):
        mass = Mass1D(one)
        assert mass.op.active_lengths == (mass.lsize, mass.lsize)
        assert list(mass.op.fields) == ["u", "qdata", "v"]
        field = mass.op.fields["qdata"]
        assert field == ("qdata", mass.strided, ct.BASIS_NONE, mass.qdata, ct.EVAL_NONE, True)
        assert mass.op.name == ""
        mass.op.name = "mass"
        assert repr(mass.op) == "<Operator 'mass' MassApply fields u, qdata, v>"
        assert mass.op.poisoned == ""
        mass.op.check()

    def test_parts_may_go(self, ceed):
        """The operator keeps what it is made of."""
        mass = Mass1D(ceed)
        x, op, matrix = np.ones(mass.lsize), mass.op, mass.matrix
        del mass
        gc.collect()
        u, v = vector_of(ceed, x), ceed.Vector(x.size)
        op.apply(u, v)
        np.testing.assert_allclose(array_of(v), matrix @ x, rtol=1e-13)

    def test_threads(self, one):
        """One operator from two threads: every result is right."""
        mass, errors = Mass1D(one), []
        d = one.Vector(mass.lsize)

        def work(seed):
            try:
                x = np.random.default_rng(seed).random(mass.lsize)
                u, v = vector_of(one, x), one.Vector(mass.lsize)
                for _ in range(300):
                    mass.op.apply(u, v)
                    np.testing.assert_allclose(array_of(v), mass.matrix @ x, rtol=1e-13)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        mass.op.linear_assemble_diagonal(d)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_poisson_build_and_apply(ceed, dim):
    """The gallery's Poisson operator on one affine element, x -> A x, against its matrix."""
    P, Q = 3, 4
    rng = np.random.default_rng(dim)
    affine = np.eye(dim) + 0.2 * rng.random((dim, dim))
    points, weights = np.polynomial.legendre.leggauss(Q)
    grids = np.meshgrid(*[lobatto(2)] * dim, indexing="ij")
    corners = np.stack([grid.ravel() for grid in grids[::-1]])  # first coordinate fastest
    coordinates = affine @ corners

    nsym, nq, nu = dim * (dim + 1) // 2, Q**dim, P**dim
    rx = ceed.ElemRestriction(1, 2**dim, dim, 2**dim, dim * 2**dim, np.arange(2**dim))
    ru = ceed.ElemRestriction(1, nu, 1, 1, nu, np.arange(nu))
    rq = ceed.StridedElemRestriction(1, nq, nsym, nsym * nq, ct.STRIDES_BACKEND)
    bx = ceed.BasisTensorH1Lagrange(dim, dim, 2, Q, ct.GAUSS)
    bu = ceed.BasisTensorH1Lagrange(dim, 1, P, Q, ct.GAUSS)
    qdata = ceed.Vector(nsym * nq)
    build = ceed.Operator(ceed.QFunctionByName(f"Poisson{dim}DBuild"))
    build.set_field("dx", rx, bx, ct.VECTOR_ACTIVE)
    build.set_field("weights", ct.ELEMRESTRICTION_NONE, bx, ct.VECTOR_NONE)
    build.set_field("qdata", rq, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
    build.apply(vector_of(ceed, coordinates), qdata)
    op = ceed.Operator(ceed.QFunctionByName(f"Poisson{dim}DApply"))
    op.set_field("du", ru, bu, ct.VECTOR_ACTIVE)
    op.set_field("qdata", rq, ct.BASIS_NONE, qdata)
    op.set_field("dv", ru, bu, ct.VECTOR_ACTIVE)
    x = rng.random(nu)
    v = ceed.Vector(nu)
    op.apply(vector_of(ceed, x), v)

    values, derivatives = lagrange(lobatto(P), points)
    grads = []
    for d in range(dim):
        grad = np.ones((1, 1))
        for i in range(dim):
            grad = np.kron(derivatives if i == d else values, grad)
        grads.append(grad)
    w = np.ones(1)
    for _ in range(dim):
        w = np.kron(weights, w)
    inverse = np.linalg.inv(affine)
    metric = np.linalg.det(affine) * inverse @ inverse.T
    matrix = sum(metric[i, j] * grads[i].T @ np.diag(w) @ grads[j] for i in range(dim) for j in range(dim))
    np.testing.assert_allclose(array_of(v), matrix @ x, atol=1e-12)


class TestPassive:
    def test_passive_output(self, ceed):
        """A second output at the quadrature points: overwritten by apply."""
        qf = ct.QFunction.from_source(
            ceed,
            TAPPED,
            "tapped",
            [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)],
            [("v", 1, ct.EVAL_INTERP), ("tap", 1, ct.EVAL_NONE)],
        )
        mass = Mass1D(ceed, qfunction=qf)
        tap = ceed.Vector(4 * mass.n)
        mass.op.set_field("tap", mass.strided, ct.BASIS_NONE, tap)
        x = np.random.default_rng(0).random(mass.lsize)
        v = ceed.Vector(mass.lsize)
        values = lagrange(lobatto(3), mass.points)[0]
        for factor in (1, 2):
            mass.op.apply(vector_of(ceed, factor * x), v)
            np.testing.assert_allclose(array_of(v), factor * mass.matrix @ x, rtol=1e-13)
            want = factor * (x[mass.offsets] @ values.T) * mass.data
            np.testing.assert_allclose(array_of(tap).reshape(mass.n, 4), want, rtol=1e-13)

    def test_all_passive(self, ceed):
        """No active field at all."""
        mass = Mass1D(ceed)
        x = np.random.default_rng(0).random(mass.lsize)
        u, v = vector_of(ceed, x), ceed.Vector(mass.lsize)
        op = ceed.Operator(ceed.QFunctionByName("MassApply"))
        op.set_field("u", mass.restriction, mass.basis, u)
        op.set_field("qdata", mass.strided, ct.BASIS_NONE, mass.qdata)
        op.set_field("v", mass.restriction, mass.basis, v)
        assert op.active_lengths == (0, 0)
        for factor in (1, 2):
            u.set_array(factor * x)
            op.apply(ct.VECTOR_NONE, ct.VECTOR_NONE)
            np.testing.assert_allclose(array_of(v), factor * mass.matrix @ x, rtol=1e-13)
        with pytest.raises(ValueError, match=r"u: .* has no active input; pass VECTOR_NONE"):
            op.apply(u, ct.VECTOR_NONE)
        with pytest.raises(ValueError, match=r"v: .* has no active output; pass VECTOR_NONE"):
            op.apply(ct.VECTOR_NONE, v)

    def test_identity(self, ceed):
        """Backends short-cut it in a way that is right for active vectors only."""
        r = ceed.StridedElemRestriction(2, 4, 1, 8, [1, 4, 4])
        u, v = vector_of(ceed, np.arange(8.0)), ceed.Vector(8)
        for vectors in ((ct.VECTOR_ACTIVE, ct.VECTOR_ACTIVE), (u, v)):
            op = ceed.Operator(ceed.IdentityQFunction(1, ct.EVAL_NONE, ct.EVAL_NONE))
            op.set_field("input", r, ct.BASIS_NONE, vectors[0])
            op.set_field("output", r, ct.BASIS_NONE, vectors[1])
            if vectors[0] is u:
                with pytest.raises(CeedUnsupportedError, match="only to active vectors"):
                    op.apply(ct.VECTOR_NONE, ct.VECTOR_NONE)
            else:
                op.apply(u, v)
                np.testing.assert_array_equal(array_of(v), np.arange(8.0))


class TestComposite:
    def test_sum(self, ceed):
        a, b = Mass1D(ceed, seed=1), Mass1D(ceed, seed=2)
        op = ceed.CompositeOperator()
        with pytest.raises(CeedIncompleteError, match="add_sub"):
            op.check()
        op.add_sub(a.op)
        op.add_sub(b.op)
        x = np.random.default_rng(0).random(a.lsize)
        v = ceed.Vector(a.lsize)
        op.apply(vector_of(ceed, x), v)
        np.testing.assert_allclose(array_of(v), (a.matrix + b.matrix) @ x, rtol=1e-13)
        op.linear_assemble_diagonal(v)
        np.testing.assert_allclose(array_of(v), np.diag(a.matrix + b.matrix), rtol=1e-13)
        assert op.active_lengths == (a.lsize, a.lsize)

    def test_refusals(self, one):
        op, a = one.CompositeOperator(), Mass1D(one)
        with pytest.raises(CeedIncompleteError, match="lacks the fields u, qdata, v"):
            op.add_sub(one.Operator(one.QFunctionByName("MassApply")))
        with pytest.raises(TypeError, match="subop: expected an Operator"):
            op.add_sub(op)
        op.add_sub(a.op)
        with pytest.raises(ValueError, match=r"active lengths \(9, 9\), but the others have \(23, 23\)"):
            op.add_sub(Mass1D(one, n=4).op)
        with pytest.raises(CeedIncompatibleError, match="one Ceed"):
            op.add_sub(Mass1D(ct.Ceed("/cpu/self")).op)
        op.check()
        with pytest.raises(CeedAccessError, match="cannot be changed any more"):
            op.add_sub(a.op)


class TestSetFieldRefuses:
    @pytest.fixture
    def parts(self, one):
        mass = Mass1D(one)
        mass.op = one.Operator(one.QFunctionByName("MassApply"))
        return mass

    def check(self, mass, error, message, name, *args):
        before = mass.op.fields
        with pytest.raises(error, match=message):
            mass.op.set_field(name, *args)
        assert mass.op.fields == before

    def test_names(self, parts):
        good = (parts.restriction, parts.basis, ct.VECTOR_ACTIVE)
        self.check(parts, ValueError, "has no field 'w'; its fields are u, qdata, v", "w", *good)
        self.check(parts, TypeError, "fieldname: expected a string", None, *good)
        parts.op.set_field("u", *good)
        self.check(parts, ValueError, "'u' is set already", "u", *good)

    def test_kinds(self, parts):
        r, b, active = parts.restriction, parts.basis, ct.VECTOR_ACTIVE
        q = parts.qdata
        self.check(parts, TypeError, "restriction: expected ElemRestriction or ELEMRESTRICTION_NONE", "u", b, b, active)
        self.check(parts, TypeError, "basis: expected Basis or BASIS_NONE", "u", r, r, active)
        self.check(parts, TypeError, "basis: expected Basis or BASIS_NONE", "u", r, ct.VECTOR_NONE, active)
        self.check(parts, TypeError, "vector: expected Vector or VECTOR_ACTIVE or VECTOR_NONE", "u", r, b, None)
        self.check(parts, ValueError, "basis: expected something other than BASIS_NONE", "u", r, ct.BASIS_NONE, active)
        self.check(parts, ValueError, "vector: expected something other than", "u", r, b, ct.VECTOR_NONE)
        self.check(parts, ValueError, "restriction: expected something", "u", ct.ELEMRESTRICTION_NONE, b, active)
        self.check(parts, ValueError, "basis: expected BASIS_NONE", "qdata", parts.strided, b, q)

    def test_sizes(self, parts):
        ceed, r, b, active = parts.ceed, parts.restriction, parts.basis, ct.VECTOR_ACTIVE
        n, lsize = parts.n, parts.lsize
        pairs = ceed.ElemRestriction(n, 2, 1, 1, lsize, parts.offsets[:, :2])
        two = ceed.ElemRestriction(n, 3, 2, lsize, 2 * lsize, parts.offsets)
        basis_two = ceed.BasisTensorH1Lagrange(1, 2, 3, 4, ct.GAUSS)
        self.check(parts, ValueError, "elemsize is not num_nodes", "u", pairs, b, active)
        self.check(parts, ValueError, "components differ", "u", two, b, active)
        self.check(parts, ValueError, "gives 2 values per quadrature point", "u", two, basis_two, active)
        self.check(parts, ValueError, "must have lsize = 23 entries", "u", r, b, ceed.Vector(24))
        self.check(parts, ValueError, "has 2 components", "qdata", two, ct.BASIS_NONE, active)
        parts.op.set_field("u", r, b, active)
        other = ceed.StridedElemRestriction(n, 5, 1, 5 * n, [1, 5, 5])
        five = ceed.Vector(5 * n)
        self.check(parts, ValueError, "5 quadrature points, but field 'u' has 4", "qdata", other, ct.BASIS_NONE, five)
        more = ceed.StridedElemRestriction(n + 1, 4, 1, 4 * n + 4, [1, 4, 4])
        self.check(parts, ValueError, "12 elements, but field 'u' has 11", "qdata", more, ct.BASIS_NONE, active)
        strided = parts.strided
        self.check(
            parts, ValueError, "lsize = 44, but the active field 'u' has 23", "qdata", strided, ct.BASIS_NONE, active
        )
        fine = ceed.BasisTensorH1Lagrange(1, 1, 3, 5, ct.GAUSS)
        self.check(parts, ValueError, "5 quadrature points, but field 'u' has 4", "v", r, fine, active)

    def test_other_ceed(self, parts):
        other = Mass1D(ct.Ceed("/cpu/self"))
        r, b, active = parts.restriction, parts.basis, ct.VECTOR_ACTIVE
        for args in ((other.restriction, b, active), (r, other.basis, active), (r, b, ct.Ceed("/cpu/self").Vector(23))):
            self.check(parts, CeedIncompatibleError, "one Ceed", "u", *args)
        with pytest.raises(CeedIncompatibleError, match="belongs to"):
            parts.ceed.Operator(other.op.qfunction)
        with pytest.raises(TypeError, match="qf: expected a QFunction"):
            parts.ceed.Operator(None)

    def test_input_is_output(self, parts):
        w = vector_of(parts.ceed, np.ones(parts.lsize))
        parts.op.set_field("u", parts.restriction, parts.basis, w)
        self.check(parts, ValueError, "also that of field 'u'", "v", parts.restriction, parts.basis, w)

    def test_after_use(self, one):
        mass = Mass1D(one)
        mass.op.check()
        with pytest.raises(CeedAccessError, match="cannot be changed any more"):
            mass.op.set_field("u", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)

    def test_weight(self, one):
        op = one.Operator(one.QFunctionByName("Mass1DBuild"))
        basis = one.BasisTensorH1Lagrange(1, 1, 2, 3, ct.GAUSS)
        r = one.ElemRestriction(1, 2, 1, 1, 2, [0, 1])
        for args in ((r, basis, ct.VECTOR_NONE), (ct.ELEMRESTRICTION_NONE, basis, one.Vector(2))):
            with pytest.raises(ValueError, match=r"field 'weights' \(EVAL_WEIGHT, size 1\): "):
                op.set_field("weights", *args)


class TestApplyRefuses:
    def test_vectors(self, ceed):
        """Each is refused before libCEED is called, so that the operator works afterwards."""
        mass = Mass1D(ceed)
        n = mass.lsize
        u, v = vector_of(ceed, np.ones(n)), ceed.Vector(n)
        strange = vector_of(ct.Ceed("/cpu/self"), np.ones(n))
        for arguments, error, message in (
            ((vector_of(ceed, np.ones(n - 1)), v), ValueError, r"u: .* needs a vector of 23 entries here, got 22"),
            ((vector_of(ceed, np.ones(n + 1)), v), ValueError, r"u: .* needs a vector of 23 entries here, got 24"),
            ((u, ceed.Vector(n - 1)), ValueError, r"v: .* needs a vector of 23 entries here, got 22"),
            ((u, ceed.Vector(n + 1)), ValueError, r"v: .* needs a vector of 23 entries here, got 24"),
            ((u, u), ValueError, "u and v share memory"),
            ((ceed.Vector(n), v), CeedAccessError, r"u: .* has no data"),
            ((np.ones(n), v), TypeError, "u: expected a Vector"),
            ((u, None), TypeError, "v: expected a Vector"),
            ((ct.VECTOR_NONE, v), TypeError, "u: expected a Vector, got VECTOR_NONE"),
            ((strange, v), CeedIncompatibleError, "u: .* one Ceed"),
        ):
            with pytest.raises(error, match=message):
                mass.op.apply(*arguments)
        with u.array(), pytest.raises(CeedAccessError, match=r"u: .* locked by an array for writing"):
            mass.op.apply(u, v)
        v.set_value(0)
        with v.array_read(), pytest.raises(CeedAccessError, match=r"v: .* locked by 1 array"):
            mass.op.apply(u, v)
        with mass.qdata.array(), pytest.raises(CeedAccessError, match=r"the passive input field 'qdata': .* locked"):
            mass.op.apply(u, v)
        with u.array_read(), mass.qdata.array_read():
            mass.op.apply(u, v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ np.ones(n), rtol=1e-13)

    def test_passive_field_without_data(self, ceed):
        mass = Mass1D(ceed)
        op = ceed.Operator(ceed.QFunctionByName("MassApply"))
        op.set_field("u", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        op.set_field("qdata", mass.strided, ct.BASIS_NONE, ceed.Vector(4 * mass.n))
        op.set_field("v", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        with pytest.raises(CeedAccessError, match=r"the passive input field 'qdata': .* has no data"):
            op.apply(vector_of(ceed, np.ones(mass.lsize)), ceed.Vector(mass.lsize))

    def test_add_to_nothing(self, one):
        mass = Mass1D(one)
        with pytest.raises(CeedAccessError, match=r"v: .* has no data"):
            mass.op.apply_add(vector_of(one, np.ones(mass.lsize)), one.Vector(mass.lsize))

    def test_output_is_a_field(self, one):
        r = one.StridedElemRestriction(2, 4, 1, 8, [1, 4, 4])
        q = vector_of(one, np.ones(8))
        op = one.Operator(one.QFunctionByName("MassApply"))
        b = one.BasisTensorH1Lagrange(1, 1, 4, 4, ct.GAUSS)
        op.set_field("u", r, b, ct.VECTOR_ACTIVE)
        op.set_field("qdata", r, ct.BASIS_NONE, q)
        op.set_field("v", r, b, ct.VECTOR_ACTIVE)
        with pytest.raises(ValueError, match="the passive input field 'qdata' and v share memory"):
            op.apply(vector_of(one, np.ones(8)), q)
        memory = np.ones(12)
        q.set_array(memory[:8], cmode=ct.USE_POINTER)
        overlapping = one.Vector(8)
        overlapping.set_array(memory[4:], cmode=ct.USE_POINTER)
        with pytest.raises(ValueError, match="the passive input field 'qdata' and v share memory"):
            op.apply(vector_of(one, np.ones(8)), overlapping)
        with pytest.raises(ValueError, match="the passive input field 'qdata' and d share memory"):
            op.linear_assemble_diagonal(q)

    def test_missing_fields(self, ceed):
        mass = Mass1D(ceed)
        op = ceed.Operator(ceed.QFunctionByName("MassApply"))
        op.set_field("u", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        for use in (op.check, lambda: op.apply(ceed.Vector(23), ceed.Vector(23))):
            with pytest.raises(CeedIncompleteError, match="lacks the fields qdata, v; use set_field") as info:
                use()
            assert info.value.code == 3
        op.set_field("qdata", mass.strided, ct.BASIS_NONE, mass.qdata)
        with pytest.raises(CeedIncompleteError, match="lacks the field v; use set_field"):
            op.check()

    def test_rectangular(self, one):
        r = one.ElemRestriction(1, 2, 1, 1, 2, [0, 1])
        wide = one.ElemRestriction(1, 2, 1, 1, 5, [0, 1])
        op = one.Operator(one.IdentityQFunction(1, ct.EVAL_NONE, ct.EVAL_NONE))
        op.set_field("input", r, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
        op.set_field("output", wide, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
        assert op.active_lengths == (2, 5)
        with pytest.raises(ValueError, match=r"no square matrix: its active lengths are \(2, 5\)"):
            op.linear_assemble_diagonal(one.Vector(2))


class TestPoison:
    def test_failing_qfunction(self, ceed):
        qf = ct.QFunction.from_source(
            ceed,
            FAILING,
            "failing",
            [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)],
            [("v", 1, ct.EVAL_INTERP)],
        )
        mass = Mass1D(ceed, qfunction=qf)
        n = mass.lsize
        u, v = vector_of(ceed, np.ones(n)), ceed.Vector(n)
        mass.op.apply(u, v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ np.ones(n), rtol=1e-13)
        u.set_value(-1)
        with pytest.raises(CeedError, match="CeedOperatorApply failed with code"):
            mass.op.apply(u, v)
        assert mass.op.poisoned.startswith("CeedOperatorApply failed with code")
        u.set_value(1)  # the vectors are usable again
        for use in (lambda: mass.op.apply(u, v), mass.op.check, lambda: mass.op.linear_assemble_diagonal(v)):
            with pytest.raises(
                CeedAccessError, match=r"cannot be used any more.*Poisoned by: CeedOperatorApply failed"
            ):
                use()
        good = Mass1D(ceed)
        good.qdata.copy_from(mass.qdata)
        good.op.apply(u, v)
        np.testing.assert_allclose(array_of(v), good.matrix @ np.ones(n), rtol=1e-13)
        for vector in (u, v, mass.qdata):
            vector.scale(2)

    def test_process_ends_well(self):
        check_python("""
            import gc
            from ceed_helpers import BACKENDS
            from test_operator_ceed import *
            for resource in BACKENDS:
                ceed = ct.Ceed(resource)
                fields = [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)]
                qf = ct.QFunction.from_source(ceed, FAILING, "failing", fields, [("v", 1, ct.EVAL_INTERP)])
                mass = Mass1D(ceed, qfunction=qf)
                u, v = vector_of(ceed, -np.ones(mass.lsize)), ceed.Vector(mass.lsize)
                try:
                    mass.op.apply(u, v)
                except CeedError:
                    pass
                else:
                    raise AssertionError
                del mass, u, v, ceed, qf
                gc.collect()
        """)


class TestWrap:
    def test_address(self, ceed):
        mass = Mass1D(ceed)
        n, op = mass.lsize, mass.op
        address = int(ceed.library.ffi.cast("uintptr_t", op.pointer))
        wrapped = ct.Operator.wrap(address, ceed)
        assert wrapped.ceed is ceed
        assert wrapped.fields == {}
        assert wrapped.active_lengths == (n, n)
        del op, mass.op
        gc.collect()
        u, v = vector_of(ceed, np.ones(n)), ceed.Vector(n)
        wrapped.apply(u, v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ np.ones(n), rtol=1e-13)
        with pytest.raises(ValueError, match="needs a vector of 23"):
            wrapped.apply(u, ceed.Vector(5))
        with pytest.raises(CeedAccessError, match="set up by its owner"):
            wrapped.set_field("u", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)

    def test_refusals(self, one):
        mass = Mass1D(one)
        address = int(one.library.ffi.cast("uintptr_t", mass.op.pointer))
        with pytest.raises(TypeError, match="with the Ceed that it belongs to"):
            ct.Operator.wrap(address)
        with pytest.raises(CeedIncompatibleError, match="does not belong to"):
            ct.Operator.wrap(address, ct.Ceed("/cpu/self"))
        for value in (0, -5):
            with pytest.raises(ValueError, match="no address"):
                ct.Operator.wrap(value, one)
        for value in (None, "op", object(), one, True):
            with pytest.raises(TypeError, match="obj: "):
                ct.Operator.wrap(value)
        with pytest.raises(TypeError, match="own; use it as it is"):
            ct.Operator.wrap(mass.op)

    @pytest.mark.skipif("package" not in load().origin, reason="needs the libceed package")
    def test_package(self):
        """An operator of the libceed package: errors come back, both sides work, in any order of destruction."""
        check_python("""
            import gc
            import libceed
            import numpy as np
            from ceed_helpers import BACKENDS, array_of, vector_of
            from ceedtap import ceed as ct
            from ceedtap.ceed_ffi import CeedError
            for resource in BACKENDS:
                for order in (0, 1):
                    theirs = libceed.Ceed(resource)
                    r = theirs.StridedElemRestriction(2, 4, 1, 8, np.array([1, 4, 4], np.int32))
                    q = theirs.Vector(8)
                    data = np.arange(8.0)
                    q.set_array(data, cmode=libceed.COPY_VALUES)
                    basis = theirs.BasisTensorH1Lagrange(1, 1, 4, 4, libceed.GAUSS_LOBATTO)
                    op = theirs.Operator(theirs.QFunctionByName("MassApply"))
                    op.set_field("u", r, basis, libceed.VECTOR_ACTIVE)
                    op.set_field("qdata", r, libceed.BASIS_NONE if hasattr(libceed, "BASIS_NONE") else
                                 libceed.ceed_constants.BASIS_NONE, q)
                    op.set_field("v", r, basis, libceed.VECTOR_ACTIVE)
                    wrapped = ct.Operator.wrap(op)
                    again = ct.Operator.wrap(op)
                    assert wrapped.ceed.lock is again.ceed.lock
                    assert wrapped.ceed.get_resource() == resource
                    assert wrapped.active_lengths == (8, 8), wrapped.active_lengths
                    u, v = vector_of(wrapped.ceed, np.ones(8)), wrapped.ceed.Vector(8)
                    wrapped.apply(u, v)
                    np.testing.assert_allclose(array_of(v), data, atol=1e-12)
                    del again
                    if order:
                        del wrapped
                        gc.collect()
                        a, b = theirs.Vector(8), theirs.Vector(8)
                        a.set_value(2); b.set_value(0)
                        op.apply(a, b)
                        with b.array_read() as values:
                            np.testing.assert_allclose(values, 2 * data, atol=1e-12)
                    else:
                        del theirs, r, q, basis, op
                        gc.collect()
                        wrapped.apply(u, v)
                        np.testing.assert_allclose(array_of(v), data, atol=1e-12)
                    for wrong in (a if order else u,):
                        try:
                            ct.Operator.wrap(wrong)
                        except TypeError as error:
                            assert "obj: expected an operator" in str(error)
                        else:
                            raise AssertionError
            # An incomplete one is an error, not the end of the process.
            theirs = libceed.Ceed(BACKENDS[-1])
            op = ct.Operator.wrap(theirs.Operator(theirs.QFunctionByName("MassApply")))
            try:
                op.check()
            except CeedError as error:
                assert error.message, error
            else:
                raise AssertionError
        """)

    @pytest.mark.skipif("package" not in load().origin, reason="needs the libceed package")
    def test_other_library(self, tmp_path):
        """An operator that lives in another copy of libCEED than the one ceedtap opened."""
        check_python(
            """
            import os, shutil, sys
            copy = os.environ["CEEDTAP_LIBCEED"]
            import libceed
            theirs = libceed.Ceed("/cpu/self")
            op = theirs.Operator(theirs.QFunctionByName("MassApply"))
            from ceedtap import ceed as ct
            from ceedtap.ceed_ffi import CeedIncompatibleError
            try:
                ct.Operator.wrap(op)
            except CeedIncompatibleError as error:
                assert "another libCEED" in str(error) and copy in str(error)
            else:
                raise AssertionError
            """,
            CEEDTAP_LIBCEED=self._copy(tmp_path),
        )

    @staticmethod
    def _copy(tmp_path):
        import shutil

        return shutil.copy(load().path, tmp_path / "copy.so")


def test_more_fields_than_libceed_has_room_for():
    ceed = ct.Ceed("/cpu/self")
    names = [f"f{i}" for i in range(17)]
    reads = "".join(f"  out[0][i] += in[{i}][i];\n" for i in range(16))
    source = (
        "CEED_QFUNCTION(sum)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {\n"
        f"  for (CeedInt i = 0; i < Q; i++) {{ out[0][i] = 0;\n{reads}  }}\n  return 0;\n}}\n"
    )
    none = ct.EVAL_NONE
    inputs, outputs = [(name, 1, none) for name in names[:16]], [(names[16], 1, none)]
    op = ceed.Operator(ct.QFunction.from_source(ceed, source, "sum", inputs=inputs, outputs=outputs))
    points = ceed.StridedElemRestriction(2, 3, 1, 6, [1, 3, 3])
    for name in names[:16]:
        op.set_field(name, points, ct.BASIS_NONE, ceed.Vector(6))
    with pytest.raises(ValueError, match="at most 16 fields"):
        op.set_field(names[16], points, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
    del op  # destroying it does not crash
