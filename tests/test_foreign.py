"""Objects that other code made: of the `libceed` package, and raw addresses."""

import gc

import numpy as np
import pytest
from ceed_helpers import Mass1D, array_of, check_python, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedIncompatibleError, load

PACKAGE = pytest.mark.skipif("package" not in load().origin, reason="needs the libceed package")


def made_elsewhere(ceed, kind, *args):
    """The address of an object that was made with libCEED's C interface."""
    box = ceed.library.ffi.new(f"{kind} *")
    ceed._call(f"{kind}Create", ceed.pointer, *args, box)
    return int(ceed.library.ffi.cast("uintptr_t", box[0]))


def references(ceed, address):
    """Destroys one more reference, whose loss must not matter."""
    box = ceed.library.ffi.new("CeedVector *", ceed.library.ffi.cast("CeedVector", address))
    ceed._call("CeedVectorDestroy", box)


class TestAddresses:
    def test_borrowed_vector(self, one):
        address = made_elsewhere(one, "CeedVector", 4)
        wrapped = ct.Vector.wrap(address, one)
        assert (len(wrapped), wrapped.address) == (4, address)
        references(one, address)  # its owner lets go: it lives on
        with pytest.raises(CeedAccessError, match="no data"):
            wrapped.to_numpy()
        wrapped.set_array(np.arange(4.0))
        wrapped.scale(2)
        assert array_of(wrapped).tolist() == [0, 2, 4, 6]
        with wrapped.array() as a:
            a += 1
        with wrapped.array_write() as a:
            a[:] = a + 1
        assert wrapped.to_numpy().tolist() == [2, 4, 6, 8]
        assert wrapped.norm(ct.NORM_MAX) == 8
        assert repr(wrapped) == "<WrappedVector 4 float64>"
        del wrapped
        gc.collect()

    def test_owned_vector(self):
        """Ours is the only reference: it is destroyed once."""
        check_python("""
            import gc, resource
            from ceedtap import ceed as ct
            from test_foreign import made_elsewhere
            ceed = ct.Ceed("/cpu/self")
            def work(n):
                for _ in range(n):
                    vector = ct.Vector.wrap(made_elsewhere(ceed, "CeedVector", 100_000), ceed, own=True)
                    vector.set_value(1)
                    del vector
                gc.collect()
                return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            before = work(50)
            assert work(500) - before < 20_000
        """)

    def test_arrays_are_copies(self, one):
        """The memory is its owner's, who may free it."""
        wrapped = ct.Vector.wrap(made_elsewhere(one, "CeedVector", 4), one, own=True)
        wrapped.set_value(1)
        a = wrapped.to_numpy()
        wrapped.set_value(2)
        assert a.tolist() == [1, 1, 1, 1]
        with pytest.raises(BufferError, match="does not share its memory"):
            np.from_dlpack(wrapped.exported(write=True))
        with pytest.raises(CeedAccessError, match="belongs to its owner"):
            wrapped.set_array(np.zeros(4), cmode=ct.USE_POINTER)
        with pytest.raises(CeedAccessError, match="shares no array"):
            wrapped.take_array()

    def test_locked_by_its_owner(self, one):
        address = made_elsewhere(one, "CeedVector", 4)
        wrapped = ct.Vector.wrap(address, one, own=True)
        wrapped.set_value(1)
        ffi = one.library.ffi
        for kind, calls in (
            ("", (wrapped.to_numpy, lambda: wrapped.set_value(1), lambda: wrapped.norm())),
            ("Read", (lambda: wrapped.set_value(1), wrapped.get_array, lambda: wrapped.set_array(np.zeros(4)))),
        ):
            array = ffi.new("CeedScalar **" if not kind else "const CeedScalar **")
            one._call(f"CeedVectorGetArray{kind}", wrapped.pointer, ct.MEM_HOST, array)
            for call in calls:
                with pytest.raises(CeedAccessError, match="locked by its owner"):
                    call()
            one._call(f"CeedVectorRestoreArray{kind}", wrapped.pointer, array)
            wrapped.set_value(3)

    def test_all_kinds(self, one):
        mass = Mass1D(one)
        r = ct.ElemRestriction.wrap(mass.restriction.address, one)
        points = ct.ElemRestriction.wrap(mass.strided.address, one)
        basis = ct.Basis.wrap(mass.basis.address, one)
        qf = ct.QFunction.wrap(mass.op.qfunction.address, one)
        q = ct.Vector.wrap(mass.qdata.address, one)
        assert (r.nelem, r.elemsize, r.ncomp, r.lsize) == (mass.n, 3, 1, mass.lsize)
        assert points.strides == (1, 4, 4)
        assert (basis.P1d, basis.Q1d, basis.dim, basis.space) == (3, 4, 1, "H1")
        assert qf.fields == mass.op.qfunction.fields
        op = one.Operator(qf)
        op.set_field("u", r, basis, ct.VECTOR_ACTIVE)
        op.set_field("qdata", points, ct.BASIS_NONE, q)
        op.set_field("v", r, basis, ct.VECTOR_ACTIVE)
        u, v = (ct.Vector.wrap(made_elsewhere(one, "CeedVector", mass.lsize), one, own=True) for _ in range(2))
        u.set_array(np.ones(mass.lsize))
        op.apply(u, v)
        np.testing.assert_allclose(v.to_numpy(), mass.matrix @ np.ones(mass.lsize), rtol=1e-13)
        matrix, data = mass.matrix, mass.data.copy()
        del mass, r, points, basis, qf, q
        gc.collect()
        op.apply(u, v)
        np.testing.assert_allclose(v.to_numpy(), matrix @ np.ones(len(u)), rtol=1e-13)
        assert data.size
        with pytest.raises(ValueError, match="u and v share memory"):
            op.apply(u, ct.Vector.wrap(u.address, one))

    def test_blocked_and_vector_bases(self, one):
        blocked = one.BlockedElemRestriction(3, 2, 2, 1, 1, 4, [[0, 1], [1, 2], [2, 3]])
        wrapped = ct.ElemRestriction.wrap(blocked.address, one)
        assert (wrapped.blksize, wrapped.num_blocks, wrapped.esize) == (2, 2, 8)
        backend = one.StridedElemRestriction(3, 2, 1, 6, ct.STRIDES_BACKEND)
        assert ct.ElemRestriction.wrap(backend.address, one).strides is None
        hdiv = one.BasisHdiv(ct.TRIANGLE, 1, 3, 1, np.ones(6), np.ones(3), np.ones(2), np.ones(1))
        wrapped = ct.Basis.wrap(hdiv.address, one)
        assert (wrapped.space, wrapped.dim, wrapped.get_div().shape) == ("H(div)", 2, (1, 3))

    def test_ceed(self, one):
        other = ct.Ceed.wrap(one.address)
        assert other.lock is one.lock
        assert other.get_resource() == one.get_resource()
        assert "Ceed" in one.view()
        with pytest.raises(TypeError, match="own; use it as it is"):
            ct.Ceed.wrap(one)
        with pytest.raises(TypeError, match="obj: expected a Ceed"):
            ct.Ceed.wrap("x")

    def test_refusals(self, one):
        vector = vector_of(one, [1.0])
        other = ct.Ceed("/cpu/self")
        for wrap in (ct.Vector.wrap, ct.ElemRestriction.wrap, ct.Basis.wrap, ct.QFunction.wrap, ct.Operator.wrap):
            for value in (0, -8, 7):
                with pytest.raises(ValueError, match="is no address"):
                    wrap(value, one)
            for value in (None, "x", True, 1.5, object()):
                with pytest.raises(TypeError, match="obj: expected"):
                    wrap(value, one)
            with pytest.raises(TypeError, match="comes with the Ceed"):
                wrap(vector.address)
        with pytest.raises(TypeError, match="own; use it as it is"):
            ct.Vector.wrap(vector)
        with pytest.raises(CeedIncompatibleError, match="does not belong to"):
            ct.Vector.wrap(vector.address, other)


@PACKAGE
def test_package_objects():
    """Both sides use the same objects; they go in any order."""
    check_python("""
        import gc
        import libceed
        import numpy as np
        from ceed_helpers import BACKENDS
        from ceedtap import ceed as ct
        for resource in BACKENDS:
            theirs = libceed.Ceed(resource)
            u, v, q = theirs.Vector(8), theirs.Vector(8), theirs.Vector(8)
            u.set_value(1.0); q.set_value(3.0); v.set_value(0.0)
            r = theirs.StridedElemRestriction(2, 4, 1, 8, np.array([1, 4, 4], np.int32))
            b = theirs.BasisTensorH1Lagrange(1, 1, 4, 4, libceed.GAUSS_LOBATTO)
            U, V, Q = (ct.Vector.wrap(x) for x in (u, v, q))
            ceed = U.ceed
            assert V.ceed.lock is ceed.lock and ct.Ceed.wrap(theirs).lock is ceed.lock
            op = ceed.Operator(ceed.QFunctionByName("MassApply"))
            op.set_field("u", ct.ElemRestriction.wrap(r), ct.Basis.wrap(b), ct.VECTOR_ACTIVE)
            op.set_field("qdata", ct.ElemRestriction.wrap(r), ct.BASIS_NONE, Q)
            op.set_field("v", ct.ElemRestriction.wrap(r), ct.Basis.wrap(b), ct.VECTOR_ACTIVE)
            op.apply(U, V)
            with v.array_read() as values:
                np.testing.assert_allclose(values, 3, rtol=1e-12)
            try:
                ct.Vector.wrap(u, own=True)
            except ValueError as error:
                assert "keeps its own reference" in str(error)
            else:
                raise AssertionError
            del theirs, u, q, r, b
            gc.collect()
            op.apply(U, V)
            np.testing.assert_allclose(V.to_numpy(), 3, rtol=1e-12)
            del op, U, V, Q, ceed
            gc.collect()
            with v.array_read() as values:
                np.testing.assert_allclose(values, 3, rtol=1e-12)
            del v
            gc.collect()
    """)
