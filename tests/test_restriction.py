"""Element restrictions against numpy's indexing."""

import numpy as np
import pytest
from ceed_helpers import array_of, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedIncompatibleError, CeedUnsupportedError, load


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


def restriction_matrix(restriction):
    """The matrix of a restriction, by unit vectors, and that of its transpose."""
    forward = np.zeros((restriction.esize, restriction.lsize))
    backward = np.zeros((restriction.lsize, restriction.esize))
    u, v = restriction.create_vector()
    for matrix, apply, x, y in ((forward, restriction.apply, u, v), (backward, restriction.T.apply, v, u)):
        for j in range(matrix.shape[1]):
            x.set_array(np.eye(matrix.shape[1])[j])
            y.set_value(0)
            apply(x, y)
            matrix[:, j] = array_of(y)
    np.testing.assert_array_equal(backward, forward.T)
    return forward


def expected_matrix(nelem, elemsize, ncomp, compstride, lsize, offsets, factors, layout, esize):
    """Entry (node, component, element) of the E-vector by the rows of a tridiagonal matrix per element."""
    matrix = np.zeros((esize, lsize))
    for e in range(nelem):
        for n in range(elemsize):
            for c in range(ncomp):
                row = matrix[n * layout[0] + c * layout[1] + e * layout[2]]
                for shift in (-1, 0, 1):
                    if 0 <= n + shift < elemsize:
                        row[offsets[e][n + shift] + c * compstride] += factors[e, n, shift + 1]
    return matrix


NELEM, ELEMSIZE = 5, 3
OFFSETS = np.arange(ELEMSIZE) + (ELEMSIZE - 1) * np.arange(NELEM)[:, None]
NODES = OFFSETS.max() + 1


class TestOriented:
    @pytest.mark.parametrize(("ncomp", "interlaced"), [(1, False), (2, False), (2, True)])
    def test_signs(self, ceed, ncomp, interlaced):
        rng = np.random.default_rng(ncomp)
        orients = rng.random((NELEM, ELEMSIZE)) < 0.5
        compstride, offsets = (1, ncomp * OFFSETS) if interlaced else (NODES, OFFSETS)
        sizes = (NELEM, ELEMSIZE, ncomp, compstride, ncomp * NODES)
        r = ceed.OrientedElemRestriction(*sizes, offsets, orients)
        factors = np.zeros((NELEM, ELEMSIZE, 3))
        factors[:, :, 1] = np.where(orients, -1, 1)
        want = expected_matrix(*sizes, offsets, factors, r.get_layout(), r.esize)
        np.testing.assert_array_equal(restriction_matrix(r), want)
        assert r.get_e_layout() == r.get_layout()
        assert repr(r).startswith("<OrientedElemRestriction nelem=5")

    @pytest.mark.parametrize("ncomp", [1, 2])
    def test_tridiagonal(self, ceed, ncomp):
        factors = np.random.default_rng(ncomp).integers(-2, 3, (NELEM, ELEMSIZE, 3))
        sizes = (NELEM, ELEMSIZE, ncomp, NODES, ncomp * NODES)
        r = ceed.CurlOrientedElemRestriction(*sizes, OFFSETS, factors)
        want = expected_matrix(*sizes, OFFSETS, factors, r.get_layout(), r.esize)
        np.testing.assert_array_equal(restriction_matrix(r), want)

    def test_refusals(self, one):
        sizes = (NELEM, ELEMSIZE, 1, 1, NODES)
        with pytest.raises(TypeError, match="orients: expected bool values"):
            one.OrientedElemRestriction(*sizes, OFFSETS, np.ones((NELEM, ELEMSIZE)))
        with pytest.raises(ValueError, match="orients: expected 15 values, got 3"):
            one.OrientedElemRestriction(*sizes, OFFSETS, np.ones(3, bool))
        with pytest.raises(ValueError, match="curl_orients: expected 45 values, got 15"):
            one.CurlOrientedElemRestriction(*sizes, OFFSETS, np.ones((NELEM, ELEMSIZE), int))
        with pytest.raises(ValueError, match="curl_orients: entry 0 is 200"):
            one.CurlOrientedElemRestriction(*sizes, OFFSETS, np.full((NELEM, ELEMSIZE, 3), 200))
        with pytest.raises(ValueError, match=r"offsets: entry 14 is 11, outside \[0, 10\]"):
            one.OrientedElemRestriction(*sizes, OFFSETS + (OFFSETS == NODES - 1), np.zeros((NELEM, ELEMSIZE), bool))


class TestBlocked:
    BLOCK = 2  # the third block is half full

    def restrictions(self, ceed, ncomp=2):
        rng = np.random.default_rng(0)
        sizes = (NELEM, ELEMSIZE, self.BLOCK, ncomp, NODES, ncomp * NODES)
        orients = rng.random((NELEM, ELEMSIZE)) < 0.5
        factors = rng.integers(-2, 3, (NELEM, ELEMSIZE, 3))
        plain, signs = np.zeros((2, NELEM, ELEMSIZE, 3))
        plain[:, :, 1], signs[:, :, 1] = 1, np.where(orients, -1, 1)
        yield ceed.BlockedElemRestriction(*sizes, OFFSETS), OFFSETS, plain, NODES
        yield ceed.BlockedOrientedElemRestriction(*sizes, OFFSETS, orients), OFFSETS, signs, NODES
        yield ceed.BlockedCurlOrientedElemRestriction(*sizes, OFFSETS, factors), OFFSETS, factors, NODES
        points = ELEMSIZE * np.arange(NELEM)[:, None] * ncomp + np.arange(ELEMSIZE)
        strides = [1, ELEMSIZE, ELEMSIZE * ncomp]
        lsize = NELEM * ELEMSIZE * ncomp
        strided = ceed.BlockedStridedElemRestriction(NELEM, ELEMSIZE, self.BLOCK, ncomp, lsize, strides)
        yield strided, points, plain, ELEMSIZE

    def test_against_unblocked(self, ceed):
        """Block b, entry ((node + elemsize * component) * blksize + element in the block)."""
        ncomp = 2
        for r, offsets, factors, compstride in self.restrictions(ceed):
            layout = (1, ELEMSIZE, ELEMSIZE * ncomp)
            flat = expected_matrix(
                NELEM, ELEMSIZE, ncomp, compstride, r.lsize, offsets, factors, layout, NELEM * ELEMSIZE * ncomp
            )
            per_element = flat.reshape(NELEM, ELEMSIZE * ncomp, r.lsize)
            assert (r.num_blocks, r.esize) == (3, 3 * self.BLOCK * ELEMSIZE * ncomp)
            x = np.random.default_rng(1).random(r.lsize)
            u, v = vector_of(ceed, x), ceed.Vector(r.esize)
            r.apply(u, v)
            got = array_of(v).reshape(3, ELEMSIZE * ncomp, self.BLOCK)
            for e in range(NELEM):
                np.testing.assert_allclose(got[e // self.BLOCK, :, e % self.BLOCK], per_element[e] @ x, rtol=1e-14)
            block = ceed.Vector(self.BLOCK * ELEMSIZE * ncomp)
            r.apply_block(1, u, block)
            np.testing.assert_array_equal(array_of(block).reshape(-1, self.BLOCK), got[1])
            u.set_value(0)
            r.T.apply_block(1, block, u)
            want = sum(per_element[e].T @ per_element[e] @ x for e in (2, 3))
            np.testing.assert_allclose(array_of(u), want, rtol=1e-13)
            assert type(r.transpose()) is type(r.T)

    def test_refusals(self, one):
        r = next(self.restrictions(one))[0]
        u, v = r.create_vector()
        u.set_value(0)
        with pytest.raises(ValueError, match=r"block: expected an integer in \[0, 2\], got 3"):
            r.apply_block(3, u, v)
        with pytest.raises(ValueError, match="needs a vector of 12 entries here, got 36"):
            r.apply_block(0, u, v)
        with pytest.raises(ValueError, match="blksize"):
            one.BlockedElemRestriction(NELEM, ELEMSIZE, 0, 1, 1, NODES, OFFSETS)
        op = one.Operator(one.IdentityQFunction(2, ct.EVAL_NONE, ct.EVAL_NONE))
        with pytest.raises(ValueError, match="operators do not take"):
            op.set_field("input", r, ct.BASIS_NONE, ct.VECTOR_ACTIVE)


class TestLayout:
    def test_strides(self, ceed):
        strides = (2, 1, 6)
        r = ceed.StridedElemRestriction(4, 3, 2, 24, strides)
        assert r.get_l_layout() == strides
        backend = ceed.StridedElemRestriction(4, 3, 2, 24, ct.STRIDES_BACKEND)
        if ceed.library.has("CeedElemRestrictionGetLLayout"):
            u, v = vector_of(ceed, np.arange(24.0)), ceed.Vector(24)
            backend.apply(u, v)
            node, component, element = backend.get_l_layout()
            n, c, e = np.ogrid[:3, :2, :4]
            want = node * n + component * c + element * e
            np.testing.assert_array_equal(e_view(backend, v), want.transpose(2, 1, 0))
        else:
            with pytest.raises(CeedUnsupportedError, match=r"GetLLayout, which libCEED has from version 1\.0"):
                backend.get_l_layout()

    def test_view_and_address(self, ceed):
        r = ceed.StridedElemRestriction(4, 3, 2, 24, [1, 3, 6])
        assert "24" in r.view()
        assert r.address == int(ceed.library.ffi.cast("uintptr_t", r.pointer))


@pytest.mark.skipif(not load().has("CeedOperatorCreateAtPoints"), reason="needs libCEED 1.0")
class TestAtPoints:
    POINTS = ((0, 2), (3,), (), (1, 4, 5))

    def test_apply(self, ceed):
        r = ceed.AtPointsElemRestriction(4, 2, 12, self.POINTS)
        x = np.arange(12.0)
        u, v = vector_of(ceed, x), ceed.Vector(r.esize)
        r.apply(u, v)
        want = np.concatenate([x.reshape(6, 2)[list(points)].T.ravel() for points in self.POINTS])
        np.testing.assert_array_equal(array_of(v)[:12], want)
        u.set_value(0)
        r.T.apply(v, u)
        np.testing.assert_array_equal(array_of(u), x)

    def test_refusals(self, one):
        for points, lsize, message in (
            (self.POINTS[:3], 12, "expected the points of 4 elements, got 3"),
            (((0,), (1,), (2,), (6,)), 12, r"outside \[0, 5\]"),
            (((0,), (0.5,), (2,), (1,)), 12, "expected integers"),
            (((0, 1), (0, 1), (0, 1), (0,)), 12, "7 points of 2 components in an L-vector of 12"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                one.AtPointsElemRestriction(4, 2, lsize, points)


def test_at_points_need_a_newer_library(one):
    if not one.library.has("CeedOperatorCreateAtPoints"):
        for make in (
            lambda: one.AtPointsElemRestriction(1, 1, 1, [[0]]),
            lambda: one.OperatorAtPoints(one.QFunctionByName("MassApply")),
        ):
            with pytest.raises(CeedUnsupportedError, match=r"CreateAtPoints, which libCEED has from version 1\.0"):
                make()
