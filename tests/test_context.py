"""Contexts with named fields, alone and through operators."""

import dataclasses

import numpy as np
import pytest
from ceed_helpers import Mass1D, array_of, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedIncompleteError, load

SCALED = """
CEED_QFUNCTION(scaled)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const Data *data = (const Data *)ctx;
  for (CeedInt i = 0; i < Q; i++) {
    CeedScalar factor = data->time + data->g[1] * data->order;
    if (data->flip) factor = -factor;
    out[0][i] = factor * in[0][i] * in[1][i];
  }
  return 0;
}
"""
FIELDS = {"flip": False, "time": 2.0, "order": 3, "g": np.array([0.0, 10.0])}


def scaled_mass(ceed, fields=FIELDS, seed=0):
    context = ceed.QFunctionContext(fields)
    mode, none = ct.EVAL_INTERP, ct.EVAL_NONE
    qf = ct.QFunction.from_source(
        ceed,
        "#include <stdbool.h>\n" + context.c_struct("Data") + SCALED,
        "scaled",
        [("u", 1, mode), ("qdata", 1, none)],
        [("v", 1, mode)],
        context=context,
    )
    return Mass1D(ceed, qfunction=qf, seed=seed), context


def applied(ceed, op, lsize):
    v = ceed.Vector(lsize)
    op.apply(vector_of(ceed, np.ones(lsize)), v)
    return array_of(v)


class TestFields:
    def test_dict(self, one):
        context = one.QFunctionContext(FIELDS)
        assert context.fields == ("flip", "time", "order", "g")
        assert (context["flip"], context["time"], context["order"]) == (False, 2.0, 3)
        assert [type(context[name]) for name in ("flip", "time", "order")] == [bool, float, int]
        np.testing.assert_array_equal(context["g"], [0, 10])
        context["time"] = 5
        context["order"] = np.int64(-7)
        context.update(g=[1.0, 2.0], flip=True)
        assert (context["time"], context["order"], context["flip"]) == (5.0, -7, True)
        np.testing.assert_array_equal(context["g"], [1, 2])
        assert repr(context) == "<QFunctionContext flip=True, time=5.0, order=-7, g=array([1., 2.])>"

    def test_dataclass(self, one):
        @dataclasses.dataclass
        class Material:
            young: float = 1.5
            kind: int = 2
            tensor: np.ndarray = dataclasses.field(default_factory=lambda: np.arange(4.0).reshape(2, 2))

        context = one.QFunctionContext(Material())
        assert (context["young"], context["kind"], context["tensor"].shape) == (1.5, 2, (2, 2))
        context.update(Material(young=3.0))
        assert context["young"] == 3.0
        assert "double tensor[2][2];" in context.c_struct("M")
        with pytest.raises(TypeError, match="instance of a dataclass"):
            one.QFunctionContext(Material)

    def test_refusals(self, one):
        for fields, message in (
            ({}, "there are none"),
            (3, "expected a mapping"),
            ({"a b": 1}, "not the name of a C variable"),
            ({"x": "text"}, "field 'x': expected float64"),
            ({"x": np.float32(1)}, "field 'x': expected float64, integers or bool, got float32"),
            ({"x": 1j}, "field 'x'"),
            ({"x": None}, "field 'x'"),
            ({"x": 2**31}, "outside"),
            ({"x": []}, "empty array"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                one.QFunctionContext(fields)
        context = one.QFunctionContext(FIELDS)
        for name, value, message in (
            ("time", "now", "field 'time': expected float64"),
            ("time", np.float32(1), "expected float64, got float32"),
            ("time", [1.0], r"expected shape \(\), got \(1,\)"),
            ("order", 1.5, "expected integers"),
            ("order", 2**40, "outside"),
            ("g", np.zeros(3), r"expected shape \(2,\)"),
            ("flip", 1, "expected bool"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                context[name] = value
            with pytest.raises((TypeError, ValueError), match=message):
                context.update({"time": 9.0, name: value})
        assert context["time"] == 2.0  # nothing of it was set
        with pytest.raises(KeyError, match="the fields of this context are flip, time, order, g"):
            context["nope"] = 1
        with pytest.raises(KeyError, match="are not named"):
            one.QFunctionContext()["x"]
        with pytest.raises(CeedIncompleteError, match="no named fields"):
            one.QFunctionContext().c_struct("X")
        with pytest.raises(TypeError, match="has named fields; use update"):
            context.set_data(np.zeros(3))

    def test_unchanged_values_are_not_written(self, one):
        mass, context = scaled_mass(one)
        mass.op.set_qfunction_assembly_reuse(True)
        v = one.Vector(mass.lsize)
        mass.op.linear_assemble_diagonal(v)
        context["time"] = 2.0
        mass.op.set_context("time", 2.0)
        mass.op.linear_assemble_diagonal(v)
        np.testing.assert_allclose(array_of(v), 32 * np.diag(mass.matrix), rtol=1e-13)


class TestOperator:
    def test_by_name(self, ceed):
        mass, context = scaled_mass(ceed)
        want = mass.matrix @ np.ones(mass.lsize)
        assert mass.op.context_fields == ("flip", "time", "order", "g")
        np.testing.assert_allclose(applied(ceed, mass.op, mass.lsize), 32 * want, rtol=1e-13)
        mass.op.set_context("time", 7)
        mass.op.set_context("order", 1)
        mass.op.set_context("g", [5.0, 2.0])
        assert (mass.op.get_context("time"), context["time"]) == (7.0, 7.0)
        np.testing.assert_array_equal(mass.op.get_context("g"), [5, 2])
        np.testing.assert_allclose(applied(ceed, mass.op, mass.lsize), 9 * want, rtol=1e-13)
        context["flip"] = True
        np.testing.assert_allclose(applied(ceed, mass.op, mass.lsize), -9 * want, rtol=1e-13)

    def test_bool(self, one):
        mass, _ = scaled_mass(one)
        if one.library.has("CeedOperatorSetContextBoolean"):
            mass.op.set_context("flip", True)
            assert mass.op.get_context("flip") is True
        else:
            with pytest.raises(KeyError, match="'flip': no part of"):
                mass.op.get_context("flip")

    def test_whole_tree(self, ceed):
        (a, x), (b, y), c = scaled_mass(ceed, seed=1), scaled_mass(ceed, {**FIELDS, "time": 0.5}, seed=2), Mass1D(ceed)
        op = ceed.CompositeOperator()
        for part in (a, b, c):
            op.add_sub(part.op)
        op.set_context("time", 1.0)
        assert (x["time"], y["time"], op.get_context("time")) == (1.0, 1.0, 1.0)
        want = (31 * a.matrix + 31 * b.matrix + c.matrix) @ np.ones(a.lsize)
        np.testing.assert_allclose(applied(ceed, op, a.lsize), want, rtol=1e-13)

    def test_assembled_data_goes_stale(self, ceed):
        mass, _ = scaled_mass(ceed)
        mass.op.set_qfunction_assembly_reuse(True)
        d = ceed.Vector(mass.lsize)
        for time in (2.0, 4.0):
            mass.op.set_context("time", time)
            mass.op.linear_assemble_diagonal(d)
            np.testing.assert_allclose(array_of(d), (time + 30) * np.diag(mass.matrix), rtol=1e-13)

    def test_refusals(self, one):
        mass, _ = scaled_mass(one)
        for name, value, error, message in (
            ("nope", 1.0, KeyError, "'nope': no part of .* there are flip, time, order, g"),
            ("time", "x", TypeError, "field 'time': expected float64"),
            ("time", [1.0, 2.0], ValueError, r"expected shape \(1,\), got \(2,\)"),
            ("order", 1.5, TypeError, "expected integers"),
            ("g", 1.0, ValueError, r"expected shape \(2,\)"),
            (3, 1.0, TypeError, "name: expected a string"),
        ):
            with pytest.raises(error, match=message):
                mass.op.set_context(name, value)
        with pytest.raises(KeyError, match="none that are known"):
            Mass1D(one).op.get_context("time")

    @pytest.mark.skipif(load().scalar_dtype != np.float64, reason="a C struct of doubles")
    def test_wrapped(self, one):
        """An operator whose contexts are not known here: libCEED knows the fields."""
        mass, context = scaled_mass(one)
        mass.op.check()
        wrapped = ct.Operator.wrap(mass.op.address, one)
        assert wrapped.context_fields == ()
        wrapped.set_context("time", 8.0)
        assert (wrapped.get_context("order"), context["time"]) == (3, 8.0)
