"""Vectors: data in and out, access, algebra."""

import gc
import weakref

import numpy as np
import pytest
from ceed_helpers import array_of, check_python, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedIncompatibleError, CeedUnsupportedError


@pytest.fixture(scope="module")
def ceed():
    return ct.Ceed("/cpu/self")


class TestSetArray:
    def test_round_trip(self, ceed):
        values = np.array([1.5, -2.0, np.pi])
        vector = ceed.Vector(3)
        vector.set_array(values)
        values[:] = 0
        np.testing.assert_array_equal(array_of(vector), [1.5, -2.0, np.pi])
        assert len(vector) == vector.get_length() == 3
        assert repr(vector) == "<Vector 3 float64>"

    def test_python_numbers(self, ceed):
        vector = ceed.Vector(3)
        vector.set_array([1, 2.5, True])
        np.testing.assert_array_equal(array_of(vector), [1.0, 2.5, 1.0])

    def test_any_shape_and_strides(self, ceed):
        values = np.arange(24.0).reshape(4, 6)
        vector = ceed.Vector(8)
        vector.set_array(values[::2, 1:5])
        np.testing.assert_array_equal(array_of(vector), [1, 2, 3, 4, 13, 14, 15, 16])
        vector.set_array(values[:4, :2].T)
        np.testing.assert_array_equal(array_of(vector), [0, 6, 12, 18, 1, 7, 13, 19])
        vector.set_array(np.arange(8.0)[::-1])
        np.testing.assert_array_equal(array_of(vector), np.arange(8.0)[::-1])

    def test_jax_array(self, ceed):
        import jax

        with jax.enable_x64(True):
            x = jax.numpy.arange(4.0)
        vector = ceed.Vector(4)
        vector.set_array(x)
        vector.scale(10)
        np.testing.assert_array_equal(array_of(vector), [0, 10, 20, 30])
        np.testing.assert_array_equal(x, [0, 1, 2, 3])

    @pytest.mark.parametrize("dtype", [np.float32, np.int64, np.complex128, np.bool_, np.float16, object])
    def test_other_types(self, ceed, dtype):
        vector = vector_of(ceed, [7.0, 8.0])
        with pytest.raises(TypeError, match=r"array: libCEED computes in float64 here.*\.astype\(numpy\.float64\)"):
            vector.set_array(np.zeros(2, dtype))
        np.testing.assert_array_equal(array_of(vector), [7, 8])

    def test_foreign_byte_order(self, ceed):
        with pytest.raises(TypeError, match="float64 in foreign byte order"):
            ceed.Vector(2).set_array(np.zeros(2, ">f8"))

    def test_masked(self, ceed):
        with pytest.raises(TypeError, match="masked"):
            ceed.Vector(2).set_array(np.ma.masked_invalid([1.0, np.nan]))

    @pytest.mark.parametrize("size", [0, 2, 4])
    def test_other_lengths(self, ceed, size):
        with pytest.raises(ValueError, match=f"array: expected 3 values, got {size}"):
            ceed.Vector(3).set_array(np.zeros(size))

    def test_text_and_none(self, ceed):
        for value in ("abc", None, [None, None, None], {}):
            with pytest.raises((TypeError, ValueError)):
                ceed.Vector(3).set_array(value)

    def test_memory_is_aligned(self, ceed):
        for n in (1, 3, 1000):
            vector = vector_of(ceed, np.zeros(n))
            assert vector.get_array_read().ctypes.data % 64 == 0

    def test_own_pointer_and_device(self, ceed):
        with pytest.raises(ValueError, match="OWN_POINTER"):
            ceed.Vector(2).set_array(np.zeros(2), cmode=ct.OWN_POINTER)
        with pytest.raises(CeedUnsupportedError, match="MEM_HOST"):
            ceed.Vector(2).set_array(np.zeros(2), memtype=ct.MEM_DEVICE)
        with pytest.raises(ValueError, match="cmode: expected one of COPY_VALUES = 0"):
            ceed.Vector(2).set_array(np.zeros(2), cmode=3)


class TestUsePointer:
    def test_shares_memory(self, ceed):
        values = np.array([1.0, 2.0])
        vector = ceed.Vector(2)
        vector.set_array(values, cmode=ct.USE_POINTER)
        vector.scale(3)
        np.testing.assert_array_equal(values, [3, 6])
        vector.set_value(5)
        np.testing.assert_array_equal(values, [5, 5])
        np.testing.assert_array_equal(vector.take_array(), [5, 5])
        with pytest.raises(CeedAccessError, match="has no data"):
            vector.get_array()
        with pytest.raises(CeedAccessError, match="shares no array"):
            vector.take_array()

    def test_copy_ends_sharing(self, ceed):
        values = np.array([1.0, 2.0])
        vector = ceed.Vector(2)
        vector.set_array(values, cmode=ct.USE_POINTER)
        vector.set_array(np.array([7.0, 8.0]))
        np.testing.assert_array_equal(values, [1, 2])
        np.testing.assert_array_equal(array_of(vector), [7, 8])

    def test_keeps_the_array(self, ceed):
        class Array(np.ndarray):
            pass

        values = np.array([1.0, 2.0]).view(Array)
        alive = weakref.ref(values)
        vector = ceed.Vector(2)
        vector.set_array(values, cmode=ct.USE_POINTER)
        del values
        gc.collect()
        assert vector.norm(ct.NORM_1) == 3
        del vector
        gc.collect()
        assert alive() is None

    def test_refusals(self, ceed):
        vector = ceed.Vector(2)
        frozen = np.zeros(2)
        frozen.flags.writeable = False
        unaligned = np.zeros(17, np.uint8)[1:].view(np.float64)
        with pytest.raises(ValueError, match="read-only"):
            vector.set_array(frozen, cmode=ct.USE_POINTER)
        with pytest.raises(ValueError, match="contiguous"):
            vector.set_array(np.zeros(4)[::2], cmode=ct.USE_POINTER)
        with pytest.raises(ValueError, match="aligned"):
            vector.set_array(unaligned, cmode=ct.USE_POINTER)
        with pytest.raises(TypeError, match="numpy array, got list"):
            vector.set_array([1.0, 2.0], cmode=ct.USE_POINTER)

    def test_jax_array_is_refused(self, ceed):
        import jax

        with jax.enable_x64(True):
            x = jax.numpy.arange(4.0)
        for value in (x, np.asarray(x)):
            with pytest.raises((TypeError, ValueError)):
                ceed.Vector(4).set_array(value, cmode=ct.USE_POINTER)


class TestViews:
    def test_write_and_read(self, ceed):
        vector = ceed.Vector(4)
        with vector.array_write(2, 2) as a:
            assert a.shape == (2, 2)
            a[:] = [[1, 2], [3, 4]]
        with vector.array() as a:
            a += 1
        with vector.array_read(4) as a, vector.array_read() as b:
            np.testing.assert_array_equal(a, [2, 3, 4, 5])
            np.testing.assert_array_equal(b, a)

    def test_state_moves(self, ceed):
        vector = vector_of(ceed, [1.0, 2.0])
        states = [vector.state]
        with vector.array():
            assert vector.state % 2 == 1
        states.append(vector.state)
        vector.set_array([1.0, 2.0])
        states.append(vector.state)
        vector.set_value(2)
        states.append(vector.state)
        for change in (
            lambda: vector.scale(2),
            vector.reciprocal,
            lambda: vector.axpy(1, vector_of(ceed, [1.0, 2.0])),
            lambda: vector.axpby(1, 2, vector_of(ceed, [1.0, 2.0])),
            lambda: vector.pointwise_mult(vector, vector),
            lambda: vector.copy_from(vector_of(ceed, [1.0, 2.0])),
        ):
            change()
            states.append(vector.state)
        assert states == sorted(set(states))
        assert len(states) == 10

    def test_read_only(self, ceed):
        vector = vector_of(ceed, [1.0, 2.0])
        view = vector.get_array_read()
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        vector.restore_array_read()

    def test_read_only_after_restore(self, ceed):
        vector = vector_of(ceed, [1.0, 2.0])
        view = vector.get_array()
        vector.restore_array()
        with vector.array(2, 1) as shaped:
            pass
        for stale in (view, shaped):
            with pytest.raises(ValueError, match="read-only"):
                stale[0] = 9

    def test_locks(self, ceed):
        vector = vector_of(ceed, [1.0, 2.0])
        vector.get_array()
        for use in (vector.get_array, vector.get_array_read, vector.norm, lambda: vector.set_value(1)):
            with pytest.raises(CeedAccessError, match="locked by an array for writing; call restore_array"):
                use()
        vector.restore_array()
        vector.get_array_read()
        vector.get_array_read()
        for use in (vector.get_array, lambda: vector.set_array([1.0, 2.0]), lambda: vector.scale(2)):
            with pytest.raises(CeedAccessError, match=r"locked by 2 array\(s\) for reading; call restore_array_read"):
                use()
        vector.restore_array_read()
        vector.restore_array_read()
        for use in (vector.restore_array, vector.restore_array_read):
            with pytest.raises(CeedAccessError, match="is out"):
                use()
        vector.scale(2)
        np.testing.assert_array_equal(array_of(vector), [2, 4])

    @pytest.mark.parametrize("method", ["array", "array_read", "array_write"])
    def test_exception_inside(self, ceed, method):
        vector = vector_of(ceed, [1.0, 2.0])
        with pytest.raises(ZeroDivisionError), getattr(vector, method)():
            _ = 1 / 0
        with pytest.raises(ValueError, match="reshape"), getattr(vector, method)(3, 5):
            pass
        vector.set_value(1)

    def test_no_data(self, ceed):
        vector = ceed.Vector(3)
        for use in (vector.get_array, vector.get_array_read, vector.norm, vector.reciprocal, vector.sync_array):
            with pytest.raises(CeedAccessError, match="has no data; use set_value or set_array"):
                use()

    def test_view_outlives_vector(self, ceed):
        vector = vector_of(ceed, [1.5, 2.5])
        view = vector.get_array_read()
        del vector
        gc.collect()
        other = [vector_of(ceed, [9.0, 9.0]) for _ in range(100)]
        np.testing.assert_array_equal(view, [1.5, 2.5])
        assert len(other) == 100

    def test_dropped_with_views_out(self):
        """The library's objects are freed all the same: their number in the process does not grow."""
        check_python("""
            import gc, resource
            from ceedtap import ceed as ct
            ceed = ct.Ceed("/cpu/self/ref/serial")
            def peak():
                return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for i in range(300):
                v = ceed.Vector(100_000)
                v.set_value(1)
                v.get_array() if i % 2 else (v.get_array_read(), v.get_array_read())
                if i == 50:
                    gc.collect(); before = peak()
            assert peak() - before < 20_000, (before, peak())
        """)


class TestAlgebra:
    def test_norms(self, ceed):
        vector = vector_of(ceed, [3.0, -4.0, 0.0])
        assert vector.norm() == vector.norm(ct.NORM_2) == 5
        assert vector.norm(ct.NORM_1) == 7
        assert vector.norm(ct.NORM_MAX) == 4
        with pytest.raises(ValueError, match="normtype"):
            vector.norm(7)

    def test_updates(self, ceed):
        x, y = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.25, -1.0])
        a, b = vector_of(ceed, x), vector_of(ceed, y)
        a.axpy(2.0, b)
        np.testing.assert_array_equal(array_of(a), x + 2 * y)
        a.axpby(3.0, 0.5, b)
        np.testing.assert_array_equal(array_of(a), 3 * y + 0.5 * (x + 2 * y))
        b.reciprocal()
        np.testing.assert_array_equal(array_of(b), 1 / y)
        c = ceed.Vector(3)
        c.pointwise_mult(b, b)
        np.testing.assert_array_equal(array_of(c), 1 / y**2)
        c.copy_from(b)
        np.testing.assert_array_equal(array_of(c), 1 / y)
        c.pointwise_mult(c, b)
        np.testing.assert_array_equal(array_of(c), 1 / y**2)

    def test_refusals(self, ceed):
        a = vector_of(ceed, [1.0, 2.0])
        with pytest.raises(ValueError, match="x: expected a vector of 2 entries, got 3"):
            a.axpy(1.0, vector_of(ceed, [1.0, 2.0, 3.0]))
        with pytest.raises(ValueError, match="x: the vector itself; use scale"):
            a.axpy(1.0, a)
        with pytest.raises(CeedIncompatibleError, match="one Ceed"):
            a.axpy(1.0, vector_of(ct.Ceed("/cpu/self"), [1.0, 2.0]))
        with pytest.raises(CeedAccessError, match="has no data"):
            a.axpy(1.0, ceed.Vector(2))
        with pytest.raises(TypeError, match="x: expected a Vector"):
            a.axpy(1.0, np.zeros(2))
        for value in ("2", np.ones(1), None):
            with pytest.raises(TypeError):
                a.scale(value)
        np.testing.assert_array_equal(array_of(a), [1, 2])


@pytest.mark.parametrize("size", [-1, 1.5, "3", True, None, 2**62])
def test_sizes(ceed, size):
    with pytest.raises((TypeError, ValueError), match="size: expected an integer"):
        ceed.Vector(size)


def test_empty(ceed):
    vector = ceed.Vector(0)
    vector.set_array([])
    assert array_of(vector).shape == (0,)


def test_too_large_for_memory(ceed):
    with pytest.raises(MemoryError):
        ceed.Vector(2**50).set_value(1)
