"""The defects of the `libceed` package that ceedtap must not have: one class for each group.

What crashed or corrupted there runs in a process of its own here.
"""

import gc
import os

import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS, Mass1D, array_of, check_python, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedError, CeedUnsupportedError, load

CTYPES_CALLBACK = """
import ctypes
pointers = ctypes.POINTER(ctypes.POINTER(ctypes.c_double))
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, pointers, pointers)
def f(ctx, q, inputs, outputs):
    for i in range(q):
        outputs[0][i] = inputs[0][i] * inputs[1][i]
    return 0
"""


def test_01_star_import():
    check_python("""
        from ceedtap.ceed import *
        assert Ceed and BASIS_NONE and EVAL_NONE == 0
        import ceedtap
        for name in dir(ceedtap):
            getattr(ceedtap, name)
    """)


def test_02_backend_that_is_not_there():
    """An exception, not the end of the process."""
    check_python("""
        from ceedtap import ceed as ct
        from ceedtap.ceed_ffi import CeedError
        for resource in ("/gpu/cuda", "/gpu/hip/gen", "/nope"):
            try:
                ct.Ceed(resource)
            except CeedError as error:
                assert resource in str(error)
            else:
                raise AssertionError
        assert ct.Ceed("/cpu/self").Vector(1).get_length() == 1
    """)


class Test03SetArray:
    def test_float32(self, one):
        with pytest.raises(TypeError, match="float32"):
            one.Vector(4).set_array(np.zeros(4, np.float32))

    def test_short(self, one):
        with pytest.raises(ValueError, match="expected 4 values, got 3"):
            one.Vector(4).set_array(np.zeros(3), cmode=ct.USE_POINTER)

    def test_strides(self, one):
        assert array_of(vector_of(one, np.arange(8.0)[::2])).tolist() == [0, 2, 4, 6]
        with pytest.raises(ValueError, match="contiguous"):
            one.Vector(4).set_array(np.arange(8.0)[::2], cmode=ct.USE_POINTER)

    def test_byte_order(self, one):
        with pytest.raises(TypeError, match="byte order"):
            one.Vector(4).set_array(np.zeros(4, ">f8"))


class Test04ReadOnlyMemory:
    def test_numpy(self, one):
        a = np.arange(4.0)
        a.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            one.Vector(4).set_array(a, cmode=ct.USE_POINTER)

    def test_jax(self, one):
        x = jnp.arange(4.0)
        for share in (
            lambda: one.Vector(4).set_array(np.asarray(x), cmode=ct.USE_POINTER),
            lambda: ct.Vector.from_dlpack(one, x).scale(10),
            lambda: ct.Vector.from_dlpack(one, np.asarray(x)).scale(10),
        ):
            with pytest.raises((ValueError, CeedAccessError), match="read-only"):
                share()
        assert x.tolist() == [0, 1, 2, 3]


def test_05_integer_types(ceed):
    """Offsets, strides and orientations of any integer type."""
    for dtype in (np.int64, np.uint8, np.int32, ">i4"):
        offsets = np.array([0, 1, 1, 2, 2, 3], dtype)
        r = ceed.ElemRestriction(3, 2, 1, 1, 4, offsets)
        v = ceed.Vector(6)
        r.apply(vector_of(ceed, [10.0, 11, 12, 13]), v)
        assert array_of(v)[np.argsort(layout(r))].tolist() == [10, 11, 11, 12, 12, 13]
        assert ceed.StridedElemRestriction(3, 2, 1, 6, np.array([1, 2, 2], dtype)).strides == (1, 2, 2)
    with pytest.raises(ValueError, match="offsets: entry 0 is 4294967296"):
        ceed.ElemRestriction(1, 1, 1, 1, 4, np.array([2**32]))
    with pytest.raises(TypeError, match="orients: expected bool"):
        ceed.OrientedElemRestriction(3, 2, 1, 1, 4, [0, 1, 1, 2, 2, 3], np.zeros(6, np.int32))


def layout(restriction):
    node, _, element = restriction.get_layout()
    return np.argsort(
        (np.arange(restriction.elemsize) * node + np.arange(restriction.nelem)[:, None] * element).ravel()
    )


def test_06_exception_in_a_with_block(one):
    vector = vector_of(one, [1.0, 2.0])
    for access in (vector.array, vector.array_read, vector.array_write):
        with pytest.raises(ZeroDivisionError), access():
            _ = 1 / 0
        vector.set_value(3)


class Test07ViewsAfterTheVector:
    def test_use_after_free(self):
        check_python("""
            import gc
            import numpy as np
            from ceedtap import ceed as ct
            for take in ("get_array", "get_array_read", "to_numpy"):
                ceed = ct.Ceed("/cpu/self")
                v = ceed.Vector(1000)
                v.set_value(1.5)
                view = getattr(v, take)()
                del v, ceed
                gc.collect()
                trash = [np.full(1000, 9.9) for _ in range(100)]
                assert np.all(view == 1.5)
        """)

    def test_no_writing_after_restore(self, one):
        vector = vector_of(one, [1.0, 2.0])
        view = vector.get_array()
        vector.restore_array()
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 5

    def test_operators_see_writes(self, ceed):
        mass = Mass1D(ceed)
        u, v = vector_of(ceed, np.ones(mass.lsize)), ceed.Vector(mass.lsize)
        mass.op.apply(u, v)
        with mass.qdata.array() as q:
            q *= 2
        mass.op.apply(u, v)
        np.testing.assert_allclose(array_of(v), 2 * mass.matrix @ np.ones(mass.lsize), rtol=1e-13)


def test_08_dropped_with_a_view_out():
    """Nothing leaks."""
    check_python("""
        import gc, resource
        from ceedtap import ceed as ct
        ceed = ct.Ceed("/cpu/self")
        def work(n):
            for i in range(n):
                v = ceed.Vector(100_000)
                v.set_value(0)
                view = (v.get_array, v.get_array_read, v.to_numpy, v.get_array_write)[i % 4]()
                del v, view
            gc.collect()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = work(100)
        assert work(1000) - before < 20_000
    """)


class Test09Contexts:
    def test_data(self, one):
        context = one.QFunctionContext()
        context.set_data(np.array([1, 2, 3], np.int32))
        assert repr(context) == "<QFunctionContext 12 bytes>"
        for _ in range(2):
            with context.data() as values:
                assert values.dtype == np.int32
                values += 1
        assert context.get_data().tolist() == [3, 4, 5]

    def test_device(self, one):
        with pytest.raises(CeedUnsupportedError, match="MEM_HOST"):
            one.QFunctionContext().set_data(np.zeros(3), ct.MEM_DEVICE)


class Test10ErrorCodes:
    def test_null_handles(self):
        check_python("""
            import numpy as np
            from ceed_helpers import Mass1D, vector_of
            from ceedtap import ceed as ct
            from ceedtap.ceed_ffi import CeedError
            ceed = ct.Ceed("/cpu/self")
            mass = Mass1D(ceed)
            incomplete = ceed.Operator(ceed.QFunctionByName("MassApply"))
            coarse = ceed.ElemRestriction(mass.n, 2, 1, 1, mass.n + 1, np.arange(2) + np.arange(mass.n)[:, None])
            basis = ceed.BasisTensorH1Lagrange(1, 1, 2, 4, ct.GAUSS)
            ones = vector_of(ceed, np.ones(mass.lsize))
            matrix = np.zeros((3, 2))
            for call in (
                lambda: incomplete.multigrid_create(ones, coarse, basis),
                lambda: incomplete.multigrid_create_tensor_h1(ones, coarse, basis, matrix),
                lambda: incomplete.multigrid_create_h1(ones, coarse, basis, matrix),
                lambda: incomplete.create_fdm_element_inverse(),
                lambda: incomplete.linear_assemble_symbolic(),
                lambda: ceed.BasisH1(ct.TRIANGLE, 1, 0, 1, [], [], [], []),
                lambda: ceed.BasisHdiv(ct.LINE, 1, 1, 1, [1.0], [1.0], [1.0], [1.0]),
                lambda: ceed.BasisTensorH1Lagrange(1, 1, 1, 1, ct.GAUSS),
                lambda: ceed.IdentityQFunction(0, ct.EVAL_NONE, ct.EVAL_NONE),
            ):
                try:
                    call()
                except (CeedError, ValueError, TypeError) as error:
                    assert str(error)
                else:
                    raise AssertionError
        """)

    def test_arrays_of_bases(self, one):
        basis = one.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
        arrays = basis.get_interp_1d(), basis.get_grad_1d(), basis.get_q_ref_1d(), basis.get_q_weight_1d()
        copies = [a.copy() for a in arrays]
        del basis
        gc.collect()
        for array, copy in zip(arrays, copies, strict=True):
            assert array.dtype == one.library.scalar_dtype
            np.testing.assert_array_equal(array, copy)


def test_11_callbacks_live():
    check_python(
        CTYPES_CALLBACK
        + """
import gc
import numpy as np
from ceed_helpers import Mass1D, vector_of
from ceedtap import ceed as ct
ceed = ct.Ceed("/cpu/self")
qf = ceed.QFunction(1, f, "")
qf.add_input("u", 1, ct.EVAL_INTERP)
qf.add_input("qdata", 1, ct.EVAL_NONE)
qf.add_output("v", 1, ct.EVAL_INTERP)
mass = Mass1D(ceed, qfunction=qf)
del f, qf
gc.collect()
trash = [bytes(100) for _ in range(10000)]
v = ceed.Vector(mass.lsize)
op = mass.op
mass.op.apply(vector_of(ceed, np.ones(mass.lsize)), v)
np.testing.assert_allclose(v, mass.matrix @ np.ones(mass.lsize), rtol=1e-13)
"""
    )


def test_12_own_pointer(one):
    for call in (
        lambda: one.Vector(3).set_array(np.zeros(3), cmode=ct.OWN_POINTER),
        lambda: one.QFunctionContext().set_data(np.zeros(3), cmode=ct.OWN_POINTER),
        lambda: one.ElemRestriction(1, 2, 1, 1, 2, [0, 1], cmode=ct.OWN_POINTER),
    ):
        with pytest.raises(ValueError, match="OWN_POINTER"):
            call()


class Test13Apply:
    def test_aliasing(self, ceed):
        mass = Mass1D(ceed)
        u = vector_of(ceed, np.ones(mass.lsize))
        shared = np.ones(mass.lsize)
        a, b = ceed.Vector(mass.lsize), ceed.Vector(mass.lsize)
        a.set_array(shared, cmode=ct.USE_POINTER)
        b.set_array(shared, cmode=ct.USE_POINTER)
        for x, y in ((u, u), (a, b)):
            with pytest.raises(ValueError, match="u and v share memory"):
                mass.op.apply(x, y)
        mass.op.apply(u, a)
        np.testing.assert_allclose(array_of(a), mass.matrix @ np.ones(mass.lsize), rtol=1e-13)

    def test_lengths(self, ceed):
        mass = Mass1D(ceed)
        good = vector_of(ceed, np.ones(mass.lsize))
        for n in (0, 1, mass.lsize - 1, mass.lsize + 1):
            with pytest.raises(ValueError, match="needs a vector of 23 entries"):
                mass.op.apply(good, vector_of(ceed, np.ones(n)))
            with pytest.raises(ValueError, match="needs a vector of 23 entries"):
                mass.op.apply(vector_of(ceed, np.ones(n)), ceed.Vector(mass.lsize))
        v = ceed.Vector(mass.lsize)
        mass.op.apply(good, v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ np.ones(mass.lsize), rtol=1e-13)


def test_14_other_libraries(one):
    """JAX arrays come in, without numba; what goes out says that it is read-only."""
    x = jnp.arange(4.0)
    vector = ct.Vector.from_dlpack(one, x)
    assert array_of(vector).tolist() == [0, 1, 2, 3]
    assert not np.from_dlpack(vector).flags.writeable
    assert isinstance(np.asarray(vector).shape, tuple)
    assert vector.to_jax().shape == (4,)
    with pytest.raises(CeedUnsupportedError, match="device"):
        vector.get_array(ct.MEM_DEVICE)


class Test15Errors:
    def test_codes_and_text(self, one):
        with pytest.raises(CeedError) as info:
            one.QFunctionByName("Nope")
        assert info.value.code == -3
        assert "Nope" in info.value.message

    def test_many_fields(self, one):
        """All sixteen inputs arrive; a seventeenth is an error."""
        seen = []
        inputs = [(f"u{i}", 1, ct.EVAL_NONE) for i in range(16)]
        qf = one.PythonQFunction(
            lambda ctx, q, ins, outs: seen.append([a[0, 0] for a in ins]), inputs, [("v", 1, ct.EVAL_NONE)]
        )
        qf.apply(1, [vector_of(one, [float(i)]) for i in range(16)], [one.Vector(1)])
        assert seen == [list(range(16))]
        with pytest.raises(ValueError, match="has 16, got 17"):
            qf.apply(1, [vector_of(one, [0.0])] * 17, [one.Vector(1)])
        with pytest.raises(ValueError, match="room for 16"):
            qf.add_input("one more", 1, ct.EVAL_NONE)


def test_16_works_on_this_python():
    """On Pythons that the package has no wheel for the same library is found and used."""
    assert os.path.isfile(load().path)


def test_threads_with_their_own_ceeds():
    check_python("""
        import threading
        import numpy as np
        from ceed_helpers import Mass1D, array_of, vector_of
        from ceedtap import ceed as ct
        errors = []
        def work(seed):
            try:
                ceed = ct.Ceed("/cpu/self")
                mass = Mass1D(ceed, seed=seed)
                u, v = vector_of(ceed, np.ones(mass.lsize)), ceed.Vector(mass.lsize)
                for _ in range(300):
                    mass.op.apply(u, v)
                    np.testing.assert_allclose(array_of(v), mass.matrix @ np.ones(mass.lsize), rtol=1e-13)
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        assert not errors, errors
    """)


@pytest.mark.parametrize(
    ("dim", "components", "nodes", "bad"),
    [(1, 5, 2, True), (1, 6, 2, True), (1, 7, 2, False), (3, 3, 2, True), (2, 1, 3, False), (2, 2, 3, True)],
)
def test_rows_that_the_avx_kernel_would_write_past(dim, components, nodes, bad):
    """One quadrature point: refused on the backend with the defect, right on the others."""
    for resource in BACKENDS:
        ceed = ct.Ceed(resource)
        basis = ceed.BasisTensorH1Lagrange(dim, components, nodes, 1, ct.GAUSS)
        u, v = ceed.Vector(components * nodes**dim), ceed.Vector(components)
        u.set_value(1.0)
        if bad and resource == "/cpu/self/avx/serial":
            with pytest.raises(CeedUnsupportedError, match="use /cpu/self/avx/blocked"):
                basis.apply(1, ct.EVAL_INTERP, u, v)
            restriction = ceed.ElemRestriction(1, nodes**dim, components, 1, len(u), components * np.arange(nodes**dim))
            op = ceed.Operator(ceed.IdentityQFunction(components, ct.EVAL_INTERP, ct.EVAL_INTERP))
            with pytest.raises(CeedUnsupportedError, match="writes past the end of an array"):
                op.set_field("input", restriction, basis, ct.VECTOR_ACTIVE)
        else:
            basis.apply(1, ct.EVAL_INTERP, u, v)
            np.testing.assert_allclose(v.to_numpy(), 1.0, rtol=1e-13)
