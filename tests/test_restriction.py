"""Element restrictions against numpy's indexing."""

import numpy as np
import pytest
from ceed_helpers import BACKENDS, array_of, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedIncompatibleError, CeedUnsupportedError


@pytest.fixture(params=BACKENDS)
def ceed(request):
    return ct.Ceed(request.param)


@pytest.fixture(scope="module")
def one():
    return ct.Ceed("/cpu/self")


def e_view(restriction, vector):
    """E-vector as an array (element, component, node), whatever the backend's layout."""
    strides = [8 * s for s in restriction.get_layout()]
    shape = (restriction.nelem, restriction.ncomp, restriction.elemsize)
    return np.lib.stride_tricks.as_strided(array_of(vector), shape, [strides[2], strides[1], strides[0]])


class TestOffsets:
    @pytest.mark.parametrize(("ncomp", "compstride"), [(1, 1), (3, 1), (3, 40)])
    def test_apply_and_transpose(self, ceed, ncomp, compstride):
        rng = np.random.default_rng(1)
        nelem, elemsize, lsize = 10, 4, 130
        offsets = rng.integers(0, 40, (nelem, elemsize))
        index = offsets[:, None, :] + compstride * np.arange(ncomp)[:, None]
        r = ceed.ElemRestriction(nelem, elemsize, ncomp, compstride, lsize, offsets)
        x = rng.random(lsize)
        lvec, evec = vector_of(ceed, x), ceed.Vector(r.esize)
        r.apply(lvec, evec)
        np.testing.assert_array_equal(e_view(r, evec), x[index])

        want = x.copy()
        np.add.at(want, index, x[index])
        r.T.apply(evec, lvec)
        np.testing.assert_allclose(array_of(lvec), want, rtol=1e-14)

        multiplicity = np.bincount(index.ravel(), minlength=lsize)
        np.testing.assert_array_equal(array_of(r.get_multiplicity()), multiplicity)

    @pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64, ">i4", ">i8"])
    def test_integer_types(self, one, dtype):
        offsets = np.array([[0, 1], [1, 2], [2, 3]], dtype)
        for layout in (offsets, np.asfortranarray(offsets), np.repeat(offsets, 2, 0)[::2]):
            r = one.ElemRestriction(3, 2, 1, 1, 4, layout)
            evec = one.Vector(6)
            r.apply(vector_of(one, [10.0, 11.0, 12.0, 13.0]), evec)
            np.testing.assert_array_equal(e_view(r, evec)[:, 0], [[10, 11], [11, 12], [12, 13]])

    def test_offsets_are_copied(self, one):
        for mode in (ct.COPY_VALUES, ct.USE_POINTER):
            offsets = np.array([0, 1], np.int32)
            r = one.ElemRestriction(1, 2, 1, 1, 2, offsets, cmode=mode)
            offsets[:] = 10**9
            evec = one.Vector(2)
            r.apply(vector_of(one, [3.0, 4.0]), evec)
            np.testing.assert_array_equal(array_of(evec), [3, 4])

    @pytest.mark.parametrize("bad", [-1, 4, 2**31, 2**32, 2**32 + 1, -(2**31)])
    def test_outside(self, one, bad):
        with pytest.raises(ValueError, match=rf"offsets: entry 2 is {bad}, outside \[0, 3\].*lsize = 4"):
            one.ElemRestriction(2, 2, 1, 1, 4, np.array([0, 1, bad, 3]))

    def test_component_outside(self, one):
        with pytest.raises(ValueError, match=r"entry 1 is 4, outside \[0, 3\].*compstride = 4, lsize = 12"):
            one.ElemRestriction(1, 2, 3, 4, 12, [0, 4])
        with pytest.raises(ValueError, match="more than lsize = 8"):
            one.ElemRestriction(1, 2, 3, 4, 8, [0, 1])

    @pytest.mark.parametrize("offsets", [np.zeros(4), [0.0, 1.0, 2.0, 3.0], ["a"] * 4, np.zeros(4, bool), [None] * 4])
    def test_no_integers(self, one, offsets):
        with pytest.raises(TypeError, match="offsets: expected integers"):
            one.ElemRestriction(2, 2, 1, 1, 4, offsets)

    @pytest.mark.parametrize("n", [0, 3, 5])
    def test_wrong_number(self, one, n):
        with pytest.raises(ValueError, match=f"offsets: expected 4 values, got {n}"):
            one.ElemRestriction(2, 2, 1, 1, 4, np.zeros(n, int))

    @pytest.mark.parametrize(
        "sizes",
        [(-1, 2, 1, 1, 4), (2, 0, 1, 1, 4), (2, 2, 0, 1, 4), (2, 2, 2, 0, 4), (2, 2, 1, 1, -4), (2.0, 2, 1, 1, 4)],
    )
    def test_sizes(self, one, sizes):
        with pytest.raises((TypeError, ValueError), match="expected an integer"):
            one.ElemRestriction(*sizes, np.zeros(4, int))
        with pytest.raises(ValueError, match="32-bit"):
            one.ElemRestriction(2**20, 2**12, 1, 1, 4, [0])

    def test_modes(self, one):
        with pytest.raises(ValueError, match="OWN_POINTER"):
            one.ElemRestriction(1, 2, 1, 1, 2, [0, 1], cmode=ct.OWN_POINTER)
        with pytest.raises(CeedUnsupportedError, match="device"):
            one.ElemRestriction(1, 2, 1, 1, 2, [0, 1], memtype=ct.MEM_DEVICE)


class TestStrided:
    @pytest.mark.parametrize("strides", [(1, 4, 12), (3, 1, 12), (30, 10, 1)])
    def test_apply_and_transpose(self, ceed, strides):
        nelem, elemsize, ncomp, lsize = 10, 4, 3, 120
        n, c, e = np.meshgrid(range(elemsize), range(ncomp), range(nelem), indexing="ij")
        index = (strides[0] * n + strides[1] * c + strides[2] * e).transpose(2, 1, 0)
        r = ceed.StridedElemRestriction(nelem, elemsize, ncomp, lsize, strides)
        x = np.random.default_rng(0).random(lsize)
        lvec, evec = vector_of(ceed, x), ceed.Vector(120)
        r.apply(lvec, evec)
        np.testing.assert_array_equal(e_view(r, evec), x[index])
        r.apply(evec, lvec, ct.TRANSPOSE)
        np.testing.assert_allclose(array_of(lvec), 2 * x, rtol=1e-14)

    def test_backend_strides(self, ceed):
        r = ceed.StridedElemRestriction(3, 2, 1, 6, ct.STRIDES_BACKEND)
        lvec, evec, back = vector_of(ceed, np.arange(6.0)), ceed.Vector(6), ceed.Vector(6)
        back.set_value(0)
        r.apply(lvec, evec)
        r.T.apply(evec, back)
        np.testing.assert_array_equal(array_of(back), np.arange(6.0))

    @pytest.mark.parametrize("strides", [[1, 4], [1, 4, 8, 9], [1, 4, 9], [-1, 4, 8], [1, 2**31, 8], []])
    def test_bad_strides(self, one, strides):
        with pytest.raises((TypeError, ValueError), match="strides"):
            one.StridedElemRestriction(10, 4, 2, 80, strides)

    def test_short_vector(self, one):
        with pytest.raises(ValueError, match="lead to entry 79 of an L-vector of 79"):
            one.StridedElemRestriction(10, 4, 2, 79, [1, 4, 8])
        with pytest.raises(ValueError, match="lead to entry 79 of an L-vector of 79"):
            one.StridedElemRestriction(10, 4, 2, 79, ct.STRIDES_BACKEND)


class TestApplyRefuses:
    @pytest.fixture
    def r(self, one):
        return one.ElemRestriction(2, 2, 1, 1, 3, [0, 1, 1, 2])

    def test_lengths(self, one, r):
        with pytest.raises(ValueError, match=r"u: .*needs a vector of 3 entries here, got 4"):
            r.apply(one.Vector(4), one.Vector(4))
        with pytest.raises(ValueError, match=r"v: .*needs a vector of 4 entries here, got 3"):
            r.apply(one.Vector(3), one.Vector(3))
        with pytest.raises(ValueError, match=r"u: .*needs a vector of 4 entries here, got 3"):
            r.apply(one.Vector(3), one.Vector(4), ct.TRANSPOSE)

    def test_kinds(self, one, r):
        with pytest.raises(TypeError, match="u: expected a Vector"):
            r.apply(np.zeros(3), one.Vector(4))
        with pytest.raises(TypeError, match="v: expected a Vector, got VECTOR_NONE"):
            r.apply(vector_of(one, np.zeros(3)), ct.VECTOR_NONE)
        with pytest.raises(CeedIncompatibleError, match="one Ceed"):
            r.apply(ct.Ceed("/cpu/self").Vector(3), one.Vector(4))
        with pytest.raises(ValueError, match="tmode"):
            r.apply(one.Vector(3), one.Vector(4), 7)
        with pytest.raises(CeedUnsupportedError, match="REQUEST_IMMEDIATE"):
            r.apply(one.Vector(3), one.Vector(4), request=None)

    def test_data(self, one, r):
        with pytest.raises(CeedAccessError, match=r"u: .*has no data"):
            r.apply(one.Vector(3), one.Vector(4))
        with pytest.raises(CeedAccessError, match=r"v: .*has no data"):
            r.apply(vector_of(one, np.ones(4)), one.Vector(3), ct.TRANSPOSE)
        v = vector_of(one, np.zeros(4))
        with v.array_read(), pytest.raises(CeedAccessError, match=r"v: .*locked by 1 array"):
            r.apply(vector_of(one, np.zeros(3)), v)

    def test_shared_memory(self, one):
        r = one.ElemRestriction(1, 2, 1, 1, 2, [0, 1])
        u = vector_of(one, [1.0, 2.0])
        with pytest.raises(ValueError, match="share memory"):
            r.apply(u, u)
        memory = np.zeros(3)
        u, v = one.Vector(2), one.Vector(2)
        u.set_array(memory[:2], cmode=ct.USE_POINTER)
        v.set_array(memory[1:], cmode=ct.USE_POINTER)
        with pytest.raises(ValueError, match="share memory"):
            r.apply(u, v)

    def test_create_vector(self, r):
        lvec, evec = r.create_vector()
        assert (len(lvec), len(evec)) == (3, 4)
        assert r.create_vector(createEvec=False)[1] is None
        assert r.transpose().T is r
        assert repr(r.T) == "<transpose of <ElemRestriction nelem=2 elemsize=2 ncomp=1 lsize=3>>"
