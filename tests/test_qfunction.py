"""QFunctions of the gallery and from C source, and their contexts."""

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest
from ceed_helpers import array_of, check_python, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedError, CeedIncompatibleError, CeedIncompleteError, load
from ceedtap.toolchain import CompileError

AXPY = """
typedef struct { CeedScalar a; int32_t n; } Data;
CEED_QFUNCTION(axpy)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const Data *data = (const Data *)ctx;
  for (CeedInt i = 0; i < Q; i++)
    for (CeedInt c = 0; c < 2; c++) out[0][c * Q + i] = data->a * in[0][c * Q + i] + data->n * in[1][i];
  return 0;
}
"""
DATA = np.dtype([("a", np.float64), ("n", np.int32)], align=True)


def axpy(ceed, context=None):
    return ct.QFunction.from_source(
        ceed,
        AXPY,
        "axpy",
        [("x", 2, ct.EVAL_INTERP), ("y", 1, ct.EVAL_NONE)],
        [("z", 2, ct.EVAL_GRAD)],
        context=context,
    )


class TestGallery:
    def test_apply(self, ceed):
        qf = ceed.QFunctionByName("MassApply")
        assert {name: tuple(field) for name, field in qf.fields.items()} == {
            "u": ("u", 1, ct.EVAL_INTERP, True),
            "qdata": ("qdata", 1, ct.EVAL_NONE, True),
            "v": ("v", 1, ct.EVAL_INTERP, False),
        }
        rng = np.random.default_rng(0)
        u, q = rng.random((2, 16))
        v = ceed.Vector(16)
        qf.apply(16, [vector_of(ceed, u), vector_of(ceed, q)], [v])
        np.testing.assert_array_equal(array_of(v), u * q)

    @pytest.mark.parametrize(
        "name",
        ["Mass1DBuild", "Mass3DBuild", "Poisson2DApply", "Poisson3DBuild", "Vector3MassApply", "Scale", "Identity"],
    )
    def test_names(self, one, name):
        assert one.QFunctionByName(name).name == name

    @pytest.mark.parametrize("name", ["Nope", "MassAppl", "MassApplyX", "massapply", "M", "x" * 3000])
    def test_unknown(self, one, name):
        with pytest.raises(CeedError, match="gallery"):
            one.QFunctionByName(name)

    def test_no_name(self, one):
        for name in ("", "a\0b", None, b"MassApply"):
            with pytest.raises((TypeError, ValueError), match="name: expected a string"):
                one.QFunctionByName(name)

    def test_identity(self, ceed):
        qf = ceed.IdentityQFunction(3, ct.EVAL_INTERP, ct.EVAL_NONE)
        assert qf.fields["input"].eval_mode is ct.EVAL_INTERP
        assert qf.fields["output"] == ("output", 3, ct.EVAL_NONE, False)
        x, y = np.random.default_rng(0).random(24), ceed.Vector(24)
        qf.apply(8, [vector_of(ceed, x)], [y])
        np.testing.assert_array_equal(array_of(y), x)
        with pytest.raises(ValueError, match="size"):
            ceed.IdentityQFunction(0, ct.EVAL_NONE, ct.EVAL_NONE)


class TestFromSource:
    def test_text(self, ceed):
        context = ceed.QFunctionContext()
        context.set_data(np.array((2.5, 3), DATA))
        qf = axpy(ceed, context)
        assert repr(qf) == "<QFunction axpy (x, y) -> (z)>"
        x, y = np.random.default_rng(0).random((2, 16)), np.arange(16.0)
        z = ceed.Vector(32)
        qf.apply(16, [vector_of(ceed, x), vector_of(ceed, y)], [z])
        np.testing.assert_allclose(array_of(z).reshape(2, 16), 2.5 * x + 3 * y, rtol=1e-15)

    def test_file(self, one, tmp_path):
        (tmp_path / "factor.h").write_text("#define FACTOR 4\n")
        file = tmp_path / "scale it.h"
        file.write_text(
            '#include <ceed/types.h>\n#include <math.h>\n#include "factor.h"\n'
            "CEED_QFUNCTION_HELPER CeedScalar twice(CeedScalar x) { return 2 * x; }\n"
            "CEED_QFUNCTION(f)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {\n"
            "  CeedPragmaSIMD for (CeedInt i = 0; i < Q; i++) out[0][i] = FACTOR * twice(fabs(in[0][i]));\n"
            "  return 0;\n}\n"
        )
        results = []
        for make in (
            lambda: ct.QFunction.from_source(one, file, "f"),
            lambda: one.QFunction(1, None, f"{file}:f"),
        ):
            qf = make()
            assert qf.source == f"{file}:f"
            qf.add_input("u", 1, ct.EVAL_NONE)
            qf.add_output("v", 1, ct.EVAL_NONE)
            v = one.Vector(3)
            qf.apply(3, [vector_of(one, [1.0, -2.0, 3.0])], [v])
            results.append(array_of(v).tolist())
        assert results == [[8, 16, 24]] * 2

    def test_changed_header(self, one, tmp_path):
        """What a file includes is part of what is looked up in the cache."""
        file = tmp_path / "f.h"
        file.write_text(
            '#include "factor.h"\n'
            "CEED_QFUNCTION(f)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {\n"
            "  for (CeedInt i = 0; i < Q; i++) out[0][i] = FACTOR;\n  return 0;\n}\n"
        )
        results = []
        for factor in (3, 5, 3):
            (tmp_path / "factor.h").write_text(f"#define FACTOR {factor}\n")
            qf = ct.QFunction.from_source(one, file, "f", outputs=[("v", 1, ct.EVAL_NONE)])
            v = one.Vector(1)
            qf.apply(1, [], [v])
            results.append(array_of(v)[0])
        assert results == [3, 5, 3]

    def test_source_is_kept_for_gpus(self, one):
        path, _, name = axpy(one).source.rpartition(":")
        text = Path(path).read_text()
        assert name == "axpy"
        assert text.endswith(AXPY)
        assert text.startswith("#pragma once\n#include <ceed/types.h>\n")

    def test_errors_name_the_line(self, one, tmp_path):
        with pytest.raises(CompileError, match=r"<QFunction axpy>:7:.*missing_variable"):
            ct.QFunction.from_source(one, AXPY.replace("return 0", "return missing_variable"), "axpy")
        file = tmp_path / "broken.h"
        file.write_text("\n\nint f(int x) { return y; }\n")
        with pytest.raises(CompileError, match=r"broken\.h:3:"):
            ct.QFunction.from_source(one, file, "f")

    def test_wrong_function(self, one):
        with pytest.raises(CompileError, match=r"there is no CEED_QFUNCTION\(other\) in the source"):
            ct.QFunction.from_source(one, AXPY, "other")
        with pytest.raises(CompileError, match="conflicting types"):
            ct.QFunction.from_source(one, "int f(double x) { return 0; }", "f")
        with pytest.raises(CompileError, match="implicit"):
            ct.QFunction.from_source(one, AXPY.replace("return 0", "return nowhere(Q)"), "axpy")
        with pytest.raises(CompileError, match="nowhere"):
            ct.QFunction.from_source(one, "int nowhere(int);" + AXPY.replace("return 0", "return nowhere(Q)"), "axpy")
        for name in ("a b", "", "x;y", "1x", None):
            with pytest.raises(ValueError, match="not the name of a C function"):
                ct.QFunction.from_source(one, AXPY, name)

    def test_missing_file(self, one, tmp_path):
        with pytest.raises(FileNotFoundError):
            ct.QFunction.from_source(one, tmp_path / "absent.h", "f")
        with pytest.raises(FileNotFoundError, match="there is no file"):
            one.QFunction(1, None, f"{tmp_path}/absent.h:f")
        for source in ("nocolon", ":f", "file:", ""):
            with pytest.raises(ValueError, match="source: "):
                one.QFunction(1, None, source)


class TestPointers:
    def test_ctypes(self, one):
        """A ctypes callback, which is kept alive."""
        doubles = ctypes.POINTER(ctypes.POINTER(ctypes.c_double))
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, doubles, doubles)

        def f(ctx, q, inputs, outputs):
            for i in range(q):
                outputs[0][i] = 10 * inputs[0][i]
            return 0

        qf = one.QFunction(1, kind(f), "")
        qf.add_input("u", 1, ct.EVAL_NONE)
        qf.add_output("v", 1, ct.EVAL_NONE)
        del f
        gc.collect()
        v = one.Vector(4)
        qf.apply(4, [vector_of(one, [1.0, 2.0, 3.0, 4.0])], [v])
        np.testing.assert_array_equal(array_of(v), [10, 20, 30, 40])

    def test_address(self, one):
        address = axpy(one)._keep.address
        for f in (address, one.library.ffi.cast("void *", address), ctypes.c_void_p(address)):
            assert one.QFunction(1, f, "").fields == {}

    def test_refusals(self, one):
        for f in (0, 7, ctypes.c_void_p(0), one.library.ffi.NULL, "f", 1.5, len):
            with pytest.raises((TypeError, ValueError), match="f: "):
                one.QFunction(1, f, "")
        with pytest.raises(ValueError, match="vlength"):
            one.QFunction(0, 1, "")


class TestFields:
    def test_refusals(self, one):
        qf = axpy(one)
        for name, size, mode, message in (
            ("x", 1, ct.EVAL_NONE, "has a field 'x' already"),
            ("z", 1, ct.EVAL_NONE, "has a field 'z' already"),
            ("w", 2, ct.EVAL_WEIGHT, "EVAL_WEIGHT is for inputs of size 1"),
            ("q", 0, ct.EVAL_NONE, "size: expected"),
            ("q", 1.5, ct.EVAL_NONE, "size: expected"),
            ("q", 1, 3, "emode: expected one of NONE"),
            ("", 1, ct.EVAL_NONE, "fieldname: expected"),
            (None, 1, ct.EVAL_NONE, "fieldname: expected"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                qf.add_input(name, size, mode)
        with pytest.raises(ValueError, match="EVAL_WEIGHT is for inputs"):
            qf.add_output("w", 1, ct.EVAL_WEIGHT)
        assert list(qf.fields) == ["x", "y", "z"]

    def test_too_many(self, one):
        qf = axpy(one)
        for i in range(14):
            qf.add_input(f"more{i}", 1, ct.EVAL_NONE)
        with pytest.raises(ValueError, match="room for 16"):
            qf.add_input("one too many", 1, ct.EVAL_NONE)


class TestApplyRefuses:
    def test_vectors(self, one):
        qf = one.QFunctionByName("MassApply")
        u, v = vector_of(one, np.zeros(8)), one.Vector(8)
        for inputs, outputs, message in (
            ([u], [v], "inputs: .* has 2, got 1"),
            ([u, u], [], "outputs: .* has 1, got 0"),
            ([u, u], [u], "outputs: every output needs a vector of its own"),
            ([u, one.Vector(7)], [v], "inputs 'qdata': .*needs a vector of 8 entries here, got 7"),
            ([u, None], [v], "inputs 'qdata': expected a Vector"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                qf.apply(8, inputs, outputs)
        with pytest.raises(CeedAccessError, match="no data"):
            qf.apply(8, [u, one.Vector(8)], [v])

    def test_failure_poisons(self, ceed):
        source = AXPY.replace("return 0", "return 7")
        context = ceed.QFunctionContext()
        context.set_data(np.array((2.5, 3), DATA))
        qf = ct.QFunction.from_source(
            ceed, source, "axpy", [("x", 2, ct.EVAL_NONE), ("y", 1, ct.EVAL_NONE)], [("z", 2, ct.EVAL_NONE)], 1, context
        )
        x, y, z = vector_of(ceed, np.ones(16)), vector_of(ceed, np.ones(8)), ceed.Vector(16)
        with pytest.raises(CeedError, match="CeedQFunctionApply failed"):
            qf.apply(8, [x, y], [z])
        with pytest.raises(CeedAccessError, match="Poisoned by: CeedQFunctionApply failed"):
            qf.apply(8, [x, y], [z])
        for vector in (x, y, z):  # the vectors can be used
            vector.set_value(3)
            vector.scale(2)
            assert array_of(vector)[0] == 6


class TestContext:
    @pytest.mark.parametrize(
        "data",
        [
            np.array([1.5, 2.5]),
            np.array([[1, 2], [3, 4]], np.int32),
            np.array((2.5, 3), DATA),
            np.array([(2.5, 3), (1, 2)], DATA),
            np.float32(1.5),
            np.arange(6.0).reshape(2, 3).T,
            np.array([1, 2, 3], np.int8),
        ],
    )
    def test_arrays(self, one, data):
        context = one.QFunctionContext()
        context.set_data(data)
        got = context.get_data()
        assert got.dtype == data.dtype
        np.testing.assert_array_equal(got, data)

    def test_buffers(self, one):
        class Struct(ctypes.Structure):
            _fields_ = [("x", ctypes.c_double), ("i", ctypes.c_int)]

        context = one.QFunctionContext()
        for data in (b"abcde", bytearray(b"xyz"), memoryview(b"12"), Struct(1.5, 3)):
            context.set_data(data)
            assert context.get_data().tobytes() == bytes(data)
            assert repr(context) == f"<QFunctionContext {len(bytes(data))} bytes>"

    def test_copy_and_share(self, one):
        values = np.array([1.0, 2.0])
        context = one.QFunctionContext()
        context.set_data(values)
        values[0] = 9
        np.testing.assert_array_equal(context.get_data(), [1, 2])
        context.set_data(values, cmode=ct.USE_POINTER)
        values[0] = 7
        np.testing.assert_array_equal(context.get_data(), [7, 2])
        del values
        gc.collect()
        np.testing.assert_array_equal(context.get_data(), [7, 2])

    def test_change_in_place(self, one):
        context = one.QFunctionContext()
        context.set_data(np.arange(4.0))
        with context.data(2, 2) as values:
            values[1] = [7, 8]
            with pytest.raises(CeedAccessError, match="with data"):
                context.set_data(b"123")
        np.testing.assert_array_equal(context.get_data(), [0, 1, 7, 8])
        with pytest.raises(ZeroDivisionError), context.data():
            _ = 1 / 0
        context.set_data(b"123")

    def test_refusals(self, one):
        context = one.QFunctionContext()
        big = np.array((1, 2), [("a", ">f8"), ("b", "i4")])
        for data in (None, "text", 1.5, [1.0], {}, np.array([None]), np.zeros(2, ">f8"), big):
            with pytest.raises(TypeError, match="data: "):
                context.set_data(data)
        for data in (b"", np.zeros(0)):
            with pytest.raises(ValueError, match="data: empty"):
                context.set_data(data)
        with pytest.raises(ValueError, match="USE_POINTER"):
            context.set_data(b"123", cmode=ct.USE_POINTER)
        with pytest.raises(ValueError, match="OWN_POINTER"):
            context.set_data(np.zeros(2), cmode=ct.OWN_POINTER)
        with pytest.raises(CeedIncompleteError, match="no data"):
            context.get_data()

    def test_set_context(self, one):
        qf = axpy(one)
        with pytest.raises(TypeError, match="QFunctionContext"):
            qf.set_context(b"123")
        with pytest.raises(CeedIncompatibleError, match="one Ceed"):
            qf.set_context(ct.Ceed("/cpu/self").QFunctionContext())
        qf.set_context(one.QFunctionContext())
        x, y = vector_of(one, np.zeros(2)), vector_of(one, np.zeros(1))
        with pytest.raises(CeedIncompleteError, match="has no data; use set_data"):
            qf.apply(1, [x, y], [one.Vector(2)])

    def test_dropped_in_any_order(self):
        check_python("""
            import gc
            import numpy as np
            from test_qfunction import AXPY, DATA, axpy, ct, vector_of
            for i in range(20):
                ceed = ct.Ceed("/cpu/self")
                context = ceed.QFunctionContext()
                context.set_data(np.array((2.5, 3), DATA), cmode=ct.USE_POINTER if i % 2 else ct.COPY_VALUES)
                qf = axpy(ceed, context)
                qf.set_context_writable(False)
                del context
                gc.collect()
                z = ceed.Vector(8)
                qf.apply(4, [vector_of(ceed, np.ones(8)), vector_of(ceed, np.ones(4))], [z])
                del ceed
                gc.collect()
                assert z.norm(ct.NORM_MAX) == 5.5
        """)


class TestOpenGallery:
    """QFunctions of the gallery that leave their fields to the user."""

    def scale(self, ceed, name="Scale", size=3, scale=None):
        qf = ceed.QFunctionByName(name)
        qf.add_input("input", size, ct.EVAL_NONE)
        qf.add_input("scale", size if scale is None else scale, ct.EVAL_NONE)
        qf.add_output("output", size, ct.EVAL_NONE)
        return qf

    def test_scale(self, ceed):
        rng = np.random.default_rng(0)
        x, factors = rng.random((3, 8)), rng.random((3, 8))
        v = ceed.Vector(24)
        qf = self.scale(ceed)
        qf.apply(8, [vector_of(ceed, x), vector_of(ceed, factors)], [v])
        np.testing.assert_array_equal(array_of(v).reshape(3, 8), x * factors)
        op = ceed.Operator(self.scale(ceed))
        rows = ceed.StridedElemRestriction(2, 4, 3, 24, [1, 4, 12])
        op.set_field("input", rows, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
        op.set_field("scale", rows, ct.BASIS_NONE, vector_of(ceed, factors))
        op.set_field("output", rows, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
        op.apply(vector_of(ceed, x), v)
        np.testing.assert_array_equal(array_of(v), (x * factors).reshape(-1))

    def test_a_context_of_the_users(self, one):
        qf = self.scale(one)
        context = one.QFunctionContext()
        qf.set_context(context)  # libCEED's order of calls: its data comes later
        u = [vector_of(one, np.ones(6)), vector_of(one, np.full(6, 2.0))]
        v = one.Vector(6)
        with pytest.raises(CeedError, match="no data"):
            qf.apply(2, u, [v])
        for wrong in (np.array([4], np.int32), np.array([3.0]), np.array([3, 3], np.int32)):
            context.set_data(wrong)
            with pytest.raises(CeedError, match="from its context as one int32"):
                qf.apply(2, u, [v])
        context.set_data(np.array([3], np.int32))
        qf.apply(2, u, [v])
        assert array_of(v).tolist() == [2] * 6

    def test_what_its_code_would_read_without_asking(self, one):
        for name in ("Scale",):
            bare = one.QFunctionByName(name)
            with pytest.raises(CeedError, match="needs 2 input"):
                bare.apply(1, [], [])
            for sizes in ((3, 2, 3), (3, 3, 2)):
                qf = one.QFunctionByName(name)
                qf.add_input("input", sizes[0], ct.EVAL_NONE)
                qf.add_input("scale", sizes[1], ct.EVAL_NONE)
                qf.add_output("output", sizes[2], ct.EVAL_NONE)
                with pytest.raises(CeedError, match="needs fields of sizes"):
                    qf.apply(1, [vector_of(one, np.ones(n)) for n in sizes[:2]], [one.Vector(sizes[2])])

    def test_the_others_are_closed(self, one):
        with pytest.raises(CeedError, match="come from libCEED's gallery"):
            one.QFunctionByName("MassApply").add_input("more", 1, ct.EVAL_NONE)
        with pytest.raises(CeedError, match="no use for a context"):
            one.QFunctionByName("MassApply").set_context(one.QFunctionContext({"a": 1.0}))
        with pytest.raises(CeedError, match="use IdentityQFunction"):
            one.QFunctionByName("Identity").add_input("input", 1, ct.EVAL_NONE)

    @pytest.mark.skipif(not load().has("CeedGetGitVersion"), reason="needs libCEED 1.0")
    def test_to_and_by_scalars(self, ceed):
        x, factor = np.arange(6.0).reshape(3, 2), np.array([2.0, 10.0])
        qf = ceed.QFunctionByName("Identity to scalar")
        qf.add_input("input", 3, ct.EVAL_NONE)
        qf.add_output("output", 1, ct.EVAL_NONE)
        v = ceed.Vector(2)
        qf.apply(2, [vector_of(ceed, x)], [v])
        assert array_of(v).tolist() == [0, 1]
        w = ceed.Vector(6)
        self.scale(ceed, "Scale (scalar)", scale=1).apply(2, [vector_of(ceed, x), vector_of(ceed, factor)], [w])
        np.testing.assert_array_equal(array_of(w).reshape(3, 2), x * factor)


class TestReturnCodes:
    """What a QFunction returns is said, whatever code libCEED's backends make of it."""

    SOURCE = """
    CEED_QFUNCTION(picky)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
      for (CeedInt i = 0; i < Q; i++) {
        out[0][i] = in[0][i];
        if (in[0][i] > 1e3) return (int)in[0][i];
      }
      return 0;
    }"""

    def build(self, ceed):
        qf = ct.QFunction.from_source(ceed, self.SOURCE, "picky", [("u", 1, ct.EVAL_NONE)], [("v", 1, ct.EVAL_NONE)])
        op = ceed.Operator(qf)
        rows = ceed.StridedElemRestriction(2, 2, 1, 4, [1, 2, 2])
        op.set_field("u", rows, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
        op.set_field("v", rows, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
        return qf, op

    @pytest.mark.parametrize("code", [5001, 70000])
    def test_in_an_apply(self, ceed, code):
        qf, op = self.build(ceed)
        v = ceed.Vector(4)
        op.apply(vector_of(ceed, np.ones(4)), v)
        with pytest.raises(CeedError, match=f"the QFunction 'picky' returned {code}"):
            op.apply(vector_of(ceed, np.full(4, float(code))), v)
        assert f"returned {code}" in op.poisoned
        qf, _ = self.build(ceed)
        with pytest.raises(CeedError, match=f"the QFunction 'picky' returned {code}"):
            qf.apply(1, [vector_of(ceed, [float(code)])], [ceed.Vector(1)])

    def test_in_a_sum(self, ceed):
        _, op = self.build(ceed)
        composite = ceed.CompositeOperator()
        composite.add_sub(self.build(ceed)[1])
        composite.add_sub(op)
        with pytest.raises(CeedError, match="the QFunction 'picky' returned 2000"):
            composite.apply(vector_of(ceed, np.full(4, 2000.0)), ceed.Vector(4))

    def test_in_a_program(self, ceed):
        import jax
        import jax.numpy as jnp

        from ceedtap import embed

        _, op = self.build(ceed)
        f = jax.jit(embed(op))
        with jax.enable_x64(True):
            assert f(jnp.ones(4)).tolist() == [1, 1, 1, 1]
            with pytest.raises(Exception, match=r"picky.* returned 3000"):
                f(jnp.full(4, 3000.0)).block_until_ready()
        assert "returned 3000" in op.poisoned
