"""Less common functions of libCEED's C interface; what the library at hand lacks is an error that says so."""

import re
from pathlib import Path

import numpy as np
import pytest
from ceed_helpers import Mass1D, array_of, lagrange, lobatto, vector_of

import ceedtap
from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedError, CeedIncompatibleError, CeedUnsupportedError, load

NEW = load().has("CeedGetGitVersion")
needs_new = pytest.mark.skipif(not NEW, reason="needs libCEED 1.0")


class TestVector:
    @needs_new
    @pytest.mark.parametrize("where", [(0, -1, 1), (1, 8, 3), (2, 2, 1), (0, 9, 4)])
    def test_strided(self, ceed, where):
        start, stop, step = where
        cut = slice(start, None if stop == -1 else stop, step)
        x, y = np.arange(1.0, 10.0), np.arange(-12.0, 0.0)
        a, b = vector_of(ceed, x), vector_of(ceed, y)
        a.copy_strided(start, stop, step, b)
        y[:9][cut] = x[cut]
        np.testing.assert_array_equal(array_of(b), y)
        a.set_value_strided(start, stop, step, 0.5)
        x[cut] = 0.5
        np.testing.assert_array_equal(array_of(a), x)

    @needs_new
    def test_filter(self, ceed):
        a = vector_of(ceed, [1e-9, -2.0, -1e-3, 3.0])
        assert a.filter(1e-3) is a
        assert array_of(a).tolist() == [0, -2, 0, 3]

    @needs_new
    def test_operators_see_strided_changes(self, ceed):
        mass = Mass1D(ceed)
        u, v = vector_of(ceed, np.ones(mass.lsize)), ceed.Vector(mass.lsize)
        mass.op.apply(u, v)
        before = array_of(v)
        mass.qdata.set_value_strided(0, -1, 1, 0.0)
        mass.op.apply(u, v)
        assert before.any()
        assert not array_of(v).any()
        vector_of(ceed, np.reshape(mass.data, -1)).copy_strided(0, -1, 1, mass.qdata)
        mass.op.apply(u, v)
        np.testing.assert_array_equal(array_of(v), before)

    def test_ranges(self, one):
        a, b = vector_of(one, np.ones(4)), vector_of(one, np.ones(3))
        for where in ((-1, 2, 1), (0, 5, 1), (3, 2, 1), (0, 2, 0), (0, 2, -1), (5, -1, 1)):
            with pytest.raises(ValueError, match=r"start|stop|step"):
                a.set_value_strided(*where, 1.0)
            with pytest.raises(ValueError, match=r"start|stop|step"):
                a.view_range(*where)
        with pytest.raises(ValueError, match="stop"):
            a.copy_strided(0, 4, 1, b)  # the other one has three
        with pytest.raises(TypeError, match="expected a Vector"):
            a.copy_strided(0, 1, 1, np.ones(4))
        if not NEW:
            for call in (
                lambda: a.copy_strided(0, 1, 1, b),
                lambda: a.set_value_strided(0, 1, 1, 1.0),
                lambda: a.filter(1),
            ):
                with pytest.raises(CeedUnsupportedError, match=r"from version 1\.0"):
                    call()

    def test_view(self, ceed):
        values = [0.125, -2.0, 3e10]
        vector = vector_of(ceed, values)
        assert [float(word) for word in vector.view().split()[-3:]] == values
        assert "  0.125000\n" in vector.view("%f")
        assert vector.view("[%+.1e]%%").count("]%\n") == 3
        assert [float(w) for w in re.findall(r"^  ([-\d.e+]+)$", vector.view_range(0, -1, 2), re.M)] == values[::2]
        with pytest.raises(CeedAccessError, match="no data"):
            ceed.Vector(3).view()

    @pytest.mark.parametrize("fmt", ["", "%s", "%n", "%d", "%f %f", "x", "%", "%*f", "%.*f", "%hhf", "%100000f", "%1$f",
                                     "a\0%f", "%f%", "%f" + "x" * 200, "%lf", None, 3, b"%f"])  # fmt: skip
    def test_formats_that_c_would_follow_anywhere(self, one, fmt):
        with pytest.raises((ValueError, TypeError), match="fp_fmt"):
            vector_of(one, [1.0]).view(fmt)

    def test_chains(self, ceed):
        a, b = vector_of(ceed, [1.0, 2.0]), vector_of(ceed, [3.0, 5.0])
        assert a.scale(2.0).axpy(1.0, b).axpby(1.0, 2.0, b).reciprocal().pointwise_mult(a, b) is a
        x = 1 / (2 * (2 * np.array([1.0, 2.0]) + [3, 5]) + [3, 5]) * [3, 5]
        np.testing.assert_allclose(array_of(a), x, rtol=1e-14)


class TestRestriction:
    def test_copies_without_signs_and_orientations(self, ceed):
        rng = np.random.default_rng(0)
        offsets = np.array([[0, 1, 2], [2, 3, 4]])
        u = rng.random(5)
        signs = np.array([[True, False, True], [False, True, False]])
        oriented = ceed.OrientedElemRestriction(2, 3, 1, 1, 5, offsets, signs)
        wanted = u[offsets]
        v = ceed.Vector(6)
        for restriction, rows in (
            (oriented, np.where(signs, -wanted, wanted)),
            (oriented.create_unsigned_copy(), wanted),
            (oriented.create_unoriented_copy(), wanted),
        ):
            restriction.apply(vector_of(ceed, u), v)
            np.testing.assert_array_equal(array_of(v).reshape(2, 3), rows)
        matrix = np.array([[2, -1, 0], [3, 1, -2], [0, -1, 1]])
        rows = np.zeros((3, 3), int)  # factors of the node before, of the node and of the node after it
        for i in range(3):
            for j in (-1, 0, 1):
                if 0 <= i + j < 3:
                    rows[i, j + 1] = matrix[i, i + j]
        curl = ceed.CurlOrientedElemRestriction(2, 3, 1, 1, 5, offsets, np.stack([rows, rows]))
        for restriction, factors in (
            (curl, matrix),
            (curl.create_unsigned_copy(), abs(matrix)),
            (curl.create_unoriented_copy(), np.eye(3)),
        ):
            restriction.apply(vector_of(ceed, u), v)
            np.testing.assert_allclose(array_of(v).reshape(2, 3), wanted @ factors.T, atol=1e-14)

    def test_copies_outlive_the_original(self, ceed):
        import gc

        copy = ceed.OrientedElemRestriction(1, 2, 1, 1, 2, [0, 1], [True, True]).create_unsigned_copy()
        gc.collect()
        v = ceed.Vector(2)
        copy.apply(vector_of(ceed, [1.0, 2.0]), v)
        assert array_of(v).tolist() == [1, 2]
        assert "without signs" in repr(copy)
        assert copy.get_multiplicity().norm(ct.NORM_1) == 2

    def test_layouts(self, one):
        with pytest.raises(CeedUnsupportedError, match="only a restriction that is given by strides"):
            one.ElemRestriction(1, 2, 1, 1, 2, [0, 1]).get_l_layout()
        assert one.StridedElemRestriction(2, 2, 1, 4, [1, 4, 2]).get_l_layout() == (1, 4, 2)

    @needs_new
    def test_points_of_one_element(self, ceed):
        points, data = [[0, 2], [3], [1, 4, 5]], np.arange(12.0)
        restriction = ceed.AtPointsElemRestriction(3, 2, 12, points)
        for element, rows in enumerate(points):
            v = ceed.Vector(2 * len(rows))
            restriction.apply_at_points_in_element(element, vector_of(ceed, data), v)
            wanted = data.reshape(6, 2)[rows].T.reshape(-1)
            np.testing.assert_array_equal(array_of(v), wanted)
            back = vector_of(ceed, np.ones(12))
            restriction.apply_at_points_in_element(element, v, back, ct.TRANSPOSE)
            sums = np.ones((6, 2))
            sums[rows] += data.reshape(6, 2)[rows]
            np.testing.assert_array_equal(array_of(back), sums.reshape(-1))
        with pytest.raises(ValueError, match="elem"):
            restriction.apply_at_points_in_element(3, vector_of(ceed, data), ceed.Vector(2))
        with pytest.raises(ValueError, match="needs a vector of 4 entries"):
            restriction.apply_at_points_in_element(0, vector_of(ceed, data), ceed.Vector(2))


class TestBasis:
    @needs_new
    def test_apply_add(self, ceed):
        basis = ceed.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
        values = lagrange(lobatto(3), np.polynomial.legendre.leggauss(4)[0])[0]
        u = np.random.default_rng(0).random(4)
        v = vector_of(ceed, np.ones(3))
        basis.apply_add(1, ct.EVAL_INTERP, vector_of(ceed, u), v)
        np.testing.assert_allclose(array_of(v), 1 + u @ values, rtol=1e-13)
        with pytest.raises(ValueError, match="TRANSPOSE only"):
            basis.apply_add(1, ct.EVAL_INTERP, v, vector_of(ceed, u), ct.NOTRANSPOSE)
        with pytest.raises(CeedAccessError, match="no data"):
            basis.apply_add(1, ct.EVAL_INTERP, vector_of(ceed, u), ceed.Vector(3))

    @needs_new
    def test_apply_add_at_points(self, ceed):
        basis = ceed.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
        x, u = np.array([-0.3, 0.2, 0.9]), np.array([1.0, 2.0, 3.0])
        v = vector_of(ceed, np.ones(3))
        basis.apply_add_at_points([3], ct.EVAL_INTERP, vector_of(ceed, x), vector_of(ceed, u), v)
        np.testing.assert_allclose(array_of(v), 1 + u @ lagrange(lobatto(3), x)[0], rtol=1e-12)

    @needs_new
    def test_points_of_one_element_at_a_time(self, ceed):
        basis = ceed.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
        x, u, v = vector_of(ceed, np.zeros(4)), vector_of(ceed, np.ones(6)), ceed.Vector(4)
        with pytest.raises(CeedUnsupportedError, match="one element at a time"):
            basis.apply_at_points([2, 2], ct.EVAL_INTERP, x, u, v)

    def test_quadrature_of_any_basis(self, one):
        x, w = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]), np.array([0.2, 0.3, 0.5])
        basis = one.BasisH1(ct.TRIANGLE, 1, 2, 3, np.ones((3, 2)), np.ones((2, 3, 2)), x, w)
        np.testing.assert_array_equal(basis.get_q_ref(), x)
        np.testing.assert_array_equal(basis.get_q_weights(), w)
        points, weights = np.polynomial.legendre.leggauss(3)
        for dim in (1, 2, 3):
            tensor = one.BasisTensorH1Lagrange(dim, 1, 2, 3, ct.GAUSS)
            ref, weight = tensor.get_q_ref(), tensor.get_q_weights()
            for i in range(3**dim):
                digits = [i // 3**d % 3 for d in range(dim)]  # the first direction is the fastest
                np.testing.assert_allclose(ref[:, i], points[digits], atol=1e-14)
                assert weight[i] == pytest.approx(np.prod(weights[digits]), rel=1e-13)
            v = one.Vector(3**dim)
            tensor.apply(1, ct.EVAL_WEIGHT, ct.VECTOR_NONE, v)
            np.testing.assert_allclose(weight, array_of(v), rtol=1e-13)

    def test_lacking(self, one):
        if not NEW:
            basis, v = one.BasisTensorH1Lagrange(1, 1, 3, 3, ct.GAUSS), vector_of(one, np.ones(3))
            with pytest.raises(CeedUnsupportedError, match=r"from version 1\.0"):
                basis.apply_add(1, ct.EVAL_INTERP, v, v)


class TestContext:
    def test_take_data(self, one):
        context, data = one.QFunctionContext(), np.array([1.0, 2.0])
        context.set_data(data)
        with pytest.raises(CeedAccessError, match="shares no array"):
            context.take_data()
        context.set_data(data, cmode=ct.USE_POINTER)
        assert context.take_data() is data
        with pytest.raises(CeedError, match="no data"):
            context.get_data()
        context.set_data(data)
        assert context.get_data().tolist() == [1, 2]

    def test_restore_data(self, one):
        context = one.QFunctionContext()
        context.set_data(np.array([1.0, 2.0]))
        with pytest.raises(CeedAccessError, match="use get_data first"):
            context.restore_data()
        values = context.get_data()
        values[0] = 7.0
        repr(context)
        context.restore_data()
        assert context.get_data().tolist() == [7, 2]
        context.restore_data()
        with pytest.raises(CeedAccessError, match="use get_data first"):
            context.restore_data()
        context.get_data()
        context.set_data(np.array([1.0, 2.0, 3.0]))
        with pytest.raises(CeedIncompatibleError, match="other data was set"):
            context.restore_data()


class TestOperator:
    def test_flops(self, one):
        mass = Mass1D(one)
        estimate = mass.op.get_flops_estimate()
        qf = one.PythonQFunction(
            lambda *_: None, [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)], [("v", 1, ct.EVAL_INTERP)]
        )
        qf.set_user_flops_estimate(101)
        other = Mass1D(one, qfunction=qf)
        # The gallery's mass needs one operation per point.
        assert other.op.get_flops_estimate() - estimate == 100 * 4 * mass.n
        composite = one.CompositeOperator()
        composite.add_sub(mass.op)
        composite.add_sub(other.op)
        assert composite.get_flops_estimate() == 2 * estimate + 400 * mass.n
        with pytest.raises(ValueError, match="flops"):
            qf.set_user_flops_estimate(-1)

    @needs_new
    def test_apply_add_active(self, ceed):
        mass = Mass1D(ceed)
        u, v = np.linspace(0, 1, mass.lsize), vector_of(ceed, np.ones(mass.lsize))
        mass.op.apply_add_active(vector_of(ceed, u), v)
        np.testing.assert_allclose(array_of(v), 1 + mass.matrix @ u, rtol=1e-13)
        with pytest.raises(CeedAccessError, match="no data"):
            mass.op.apply_add_active(vector_of(ceed, u), ceed.Vector(mass.lsize))

    @needs_new
    def test_sequential_and_terse(self, one):
        composite = one.CompositeOperator()
        composite.add_sub(Mass1D(one).op)
        assert not composite.is_sequential()
        composite.set_sequential(True)
        assert composite.is_sequential()
        assert composite.view().startswith(composite.view_terse()[:20])
        assert 0 < len(composite.view_terse()) < len(composite.view())

    def test_parts_by_name(self, one):
        composite, mass = one.CompositeOperator(), Mass1D(one)
        mass.op.name = "inertia"
        composite.add_sub(mass.op)
        assert composite.get_sub_by_name("inertia") is mass.op
        assert mass.op.get_name() == "inertia"
        with pytest.raises(KeyError, match="inertia"):
            composite.get_sub_by_name("drag")

    def test_build_or_update(self, ceed):
        mass = Mass1D(ceed)
        vector, restriction = mass.op.linear_assemble_qfunction_build_or_update()
        np.testing.assert_allclose(array_of(vector), np.reshape(mass.data, -1), rtol=1e-14)
        mass.qdata.set_array(3.0 * mass.data)
        again = mass.op.linear_assemble_qfunction_build_or_update(vector, restriction)
        assert again == (vector, restriction)
        np.testing.assert_allclose(array_of(vector), 3.0 * np.reshape(mass.data, -1), rtol=1e-14)
        for args in ((vector, None), (None, restriction), (ceed.Vector(len(vector)), restriction)):
            with pytest.raises(ValueError, match="assembled, rstr"):
                mass.op.linear_assemble_qfunction_build_or_update(*args)

    def test_point_blocks(self, ceed):
        rng = np.random.default_rng(0)
        size, rows = 2, ceed.StridedElemRestriction(3, 1, 2, 6, [2, 1, 2])
        data = rng.random((3, 4))
        source = """
        CEED_QFUNCTION(blocks)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
          for (CeedInt i = 0; i < Q; i++)
            for (CeedInt r = 0; r < 2; r++)
              out[0][r * Q + i] = in[1][2 * r * Q + i] * in[0][i] + in[1][(2 * r + 1) * Q + i] * in[0][Q + i];
          return 0;
        }"""
        fields = [("u", 2, ct.EVAL_INTERP), ("m", 4, ct.EVAL_NONE)], [("v", 2, ct.EVAL_INTERP)]
        op = ceed.Operator(ct.QFunction.from_source(ceed, source, "blocks", *fields))
        basis = ceed.BasisH1(ct.LINE, 2, 1, 1, [1.0], [0.0], [0.0], [1.0])
        nodes = ceed.ElemRestriction(3, 1, 2, 1, 6, [0, 2, 4])
        op.set_field("u", nodes, basis, ct.VECTOR_ACTIVE)
        op.set_field("m", ceed.StridedElemRestriction(3, 1, 4, 12, [1, 1, 4]), ct.BASIS_NONE, vector_of(ceed, data))
        op.set_field("v", nodes, basis, ct.VECTOR_ACTIVE)
        d = ceed.Vector(size * 6)
        op.linear_assemble_point_block_diagonal(d)
        i, j = op.linear_assemble_point_block_diagonal_symbolic()
        matrix = np.zeros((6, 6))
        matrix[i, j] = array_of(d)
        wanted = np.zeros((6, 6))
        for n in range(3):
            wanted[2 * n : 2 * n + 2, 2 * n : 2 * n + 2] = data[n].reshape(2, 2)
        np.testing.assert_allclose(matrix, wanted, atol=1e-14)
        assert rows.lsize == 6
        assert op.linear_assemble_get_num_entries() == op.linear_assemble_symbolic()[0].size


class TestCeed:
    def test_backends(self, one):
        names = one.registry_get_list()
        assert one.get_resource() in names
        assert {"/cpu/self/ref/serial", "/cpu/self/opt/blocked"} <= {*names}
        for name in names:
            assert name in one.library.resources

    def test_sources(self, one, tmp_path):
        one.add_jit_source_root(tmp_path)
        with pytest.raises(NotADirectoryError):
            one.add_jit_source_root(tmp_path / "nowhere")
        if NEW:
            one.add_jit_define("N=3")
        else:
            with pytest.raises(CeedUnsupportedError, match=r"from version 1\.0"):
                one.add_jit_define("N=3")
        with pytest.raises(TypeError, match="jit_define"):
            one.add_jit_define(3)

    def test_constants(self, one):
        assert ceedtap.EPSILON == ct.EPSILON
        assert 0 < ct.EPSILON < 1e-6
        assert one.scalar_type() in ct.scalar_types.values()
        assert ct.scalar_types == {ct.SCALAR_FP32: "float32", ct.SCALAR_FP64: "float64"}

    def test_two_ceeds_of_one_backend(self):
        """Messages tell them apart."""
        a, b = ct.Ceed("/cpu/self/ref/serial"), ct.Ceed("/cpu/self/ref/serial")
        for call in (
            lambda: vector_of(a, [1.0]).axpy(1.0, vector_of(b, [1.0])),
            lambda: a.Operator(b.QFunctionByName("MassApply")),
        ):
            with pytest.raises(
                CeedIncompatibleError, match="belongs to another Ceed, both are <Ceed /cpu/self/ref/serial>"
            ):
                call()
        with pytest.raises(CeedIncompatibleError, match="belongs to <Ceed /cpu/self/ref/blocked>, not to <Ceed"):
            vector_of(a, [1.0]).axpy(1.0, vector_of(ct.Ceed("/cpu/self/ref/blocked"), [1.0]))


#: What the header declares and is not called by name: why.
LEFT_OUT = {
    "memory and life, which Python's objects see to": r"(Reference)?Copy$|Destroy|Object|ReturnCeed|SetDataDestroy",
    "getters of what Python's objects remember": r"Get(Ceed|Name|NumSub|SubList|SubByName|Field|Fields|FieldByName|"
    r"Vector|"
    r"Basis|ElemRestriction|Data|Size|EvalMode|AllFieldLabels|NumPoints|NumPointsInElement|MaxPointsInElement|"
    r"MinPointsInElement|MinMaxPointsInElement|CreateVector)$|CreateVector$|IsComposite|Fields$",
    "indentation of what View prints": "NumViewTabs",
    "error handlers and requests, which ceedtap sets": r"Error(Impl|Abort|Exit|Return)|RequestWait",
    "other compilers' sources, streams of backends that have none on the host": "Rust|IsClang|SetStream",
    "counted from the places": "LinearAssembleGetNumEntries",
}


def test_the_whole_interface():
    """Every function that the library's header declares is declared here too, or it is said why not."""
    include = load().include_dir
    if include is None:
        pytest.skip("this libCEED comes without headers")
    header = (Path(include) / "ceed" / "ceed.h").read_text(encoding="utf-8")
    functions = set(re.findall(r"^CEED_EXTERN int\s+(Ceed\w+)\(", header, re.M))
    assert len(functions) > 150
    ours = set(
        re.findall(r"\b(Ceed\w+)[(\[]", (Path(ceedtap.__file__).parent / "ceed_cdef.h").read_text(encoding="utf-8"))
    )
    patterns = re.compile("|".join(LEFT_OUT.values()))
    assert sorted(name for name in functions - ours if not patterns.search(name)) == []
