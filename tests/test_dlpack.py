"""Arrays that share memory with vectors: the matrix of docs/arrays.md, lifetimes, locks, capsules."""

import ctypes
import gc
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import Mass1D, array_of, check_python, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedExportedError

try:
    import torch
except ImportError:
    torch = None

VALUES = np.array([1.0, 2.0, 3.0, 4.0])


def aligned(n, offset=0, dtype=np.float64):
    """An array at an address that is `offset` modulo 64."""
    raw = np.zeros(n * np.dtype(dtype).itemsize + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + n * np.dtype(dtype).itemsize].view(dtype)


class Producer:
    """A DLPack producer of the older protocol, without keywords, on a chosen device."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device, self.asked = array, device, 0

    def __dlpack__(self, *, stream=None):
        self.asked += 1
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


# -- the matrix --------------------------------------------------------------------------------------------------------


def producers():
    """Name of the memory in the table -> makes a producer; by library."""
    frozen = VALUES.copy()
    frozen.flags.writeable = False
    table = {
        ("NumPy", "aligned"): lambda: np.copyto(a := aligned(4), VALUES) or a,
        ("NumPy", "unaligned"): lambda: np.frombuffer(b"x" + VALUES.tobytes(), np.uint8)[1:].view(np.float64),
        ("NumPy", "strided"): lambda: np.repeat(VALUES, 2)[::2],
        ("NumPy", "read-only"): lambda: frozen,
        ("NumPy", "wrong dtype"): lambda: VALUES.astype(np.float32),
        ("NumPy", "wrong device"): lambda: Producer(VALUES, (2, 0)),
        ("NumPy", "zero length"): lambda: np.zeros(0),
        ("JAX", "aligned"): lambda: jnp.asarray(VALUES),
        ("JAX", "read-only"): lambda: jnp.asarray(VALUES),
        ("JAX", "wrong dtype"): lambda: jnp.asarray(VALUES, jnp.float32),
        ("JAX", "zero length"): lambda: jnp.zeros(0),
    }
    if torch is not None:
        table |= {
            ("PyTorch", "aligned"): lambda: torch.tensor(VALUES),
            ("PyTorch", "strided"): lambda: torch.tensor(np.repeat(VALUES, 2))[::2],
            ("PyTorch", "wrong dtype"): lambda: torch.tensor(VALUES, dtype=torch.float32),
            ("PyTorch", "zero length"): lambda: torch.zeros(0, dtype=torch.float64),
        }
    return table


def import_outcome(ceed, make):
    source = make()
    try:
        vector = ct.Vector.from_dlpack(ceed, source)
    except (TypeError, ValueError, BufferError) as error:
        return type(error).__name__
    assert len(vector) == np.size(np.asarray(source))
    address = np.asarray(source).ctypes.data
    if not len(vector):
        return "empty"
    assert vector._access.memory.ctypes.data == address
    try:
        vector.set_value(7)
    except CeedAccessError:
        return "shared, input only"
    assert np.all(np.asarray(source) == 7)
    return "shared"


def memory_vectors(ceed):
    """Kind of memory -> a vector that has it."""

    def sharing(array):
        vector = ceed.Vector(array.size)
        vector.set_array(array, cmode=ct.USE_POINTER)
        return vector

    return {
        "aligned": lambda: vector_of(ceed, VALUES),
        "unaligned": lambda: sharing(aligned(4, 8)),
        "read-only": lambda: ct.Vector.from_dlpack(ceed, jnp.asarray(VALUES)),
        "zero length": lambda: vector_of(ceed, []),
    }


def consume(library, vector, write):
    if library == "NumPy":
        return np.from_dlpack(vector.exported(write=write)) if write else np.from_dlpack(vector)
    if library == "JAX":
        if write:
            return jax.dlpack.from_dlpack(vector.exported(write=True))
        return vector.to_jax()
    return torch.from_dlpack(vector.exported(write=write))


def address_of(array):
    if isinstance(array, jax.Array):
        return array.unsafe_buffer_pointer()
    return array.data_ptr() if torch is not None and isinstance(array, torch.Tensor) else array.ctypes.data


def export_outcome(library, vector, write):
    try:
        array = consume(library, vector, write)
    except (BufferError, CeedAccessError, ValueError) as error:
        return "BufferError" if isinstance(error, BufferError) else type(error).__name__
    if not len(vector):
        return "empty"
    if address_of(array) != vector._access.memory.ctypes.data:
        return "copy"
    if write:
        with pytest.raises(CeedExportedError):
            vector.norm()
        return "shared, locks all"
    with pytest.raises(CeedExportedError):
        vector.set_array(np.zeros(len(vector)))
    vector.norm()
    return "shared, locks writes"


def documented():
    """The table of the docs: (library, direction, memory) -> outcome."""
    text = (Path(__file__).parent.parent / "docs" / "arrays.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    head = next(row for row in rows if row[0] == "memory")
    table = {}
    for row in rows[rows.index(head) + 1 :]:
        for column, outcome in zip(head[1:], row[1:], strict=True):
            library, direction = column.split(", ")
            table[library, direction, row[0]] = outcome.strip("`")
    return table


def test_matrix(one):
    """Every cell of the table in docs/arrays.md is what happens; "-" where the library has no such array."""
    table = documented()
    memories = ["aligned", "unaligned", "strided", "read-only", "wrong dtype", "wrong device", "zero length"]
    assert {memory for *_, memory in table} == set(memories)
    sources, vectors, checked = producers(), memory_vectors(one), 0
    for (library, direction, memory), outcome in table.items():
        if library == "PyTorch" and torch is None:
            continue
        if direction == "import":
            make = sources.get((library, memory))
            got = "-" if make is None else import_outcome(one, make)
        else:
            make = vectors.get(memory)
            got = "-" if make is None else export_outcome(library, make(), direction == "export write")
        gc.collect()
        assert got == outcome, (library, direction, memory)
        checked += got != "-"
    assert checked >= 18


# -- rules -------------------------------------------------------------------------------------------------------------


class TestZeroCopy:
    def test_jax_shares_our_memory(self, ceed):
        vector = vector_of(ceed, VALUES)
        x = vector.to_jax(2, 2)
        assert x.unsafe_buffer_pointer() == array_address(vector)
        np.testing.assert_array_equal(x, VALUES.reshape(2, 2))
        assert vector.to_jax(copy=True).unsafe_buffer_pointer() != array_address(vector)

    def test_output_of_an_operator(self, ceed):
        """libCEED writes, JAX reads, without a copy in between."""
        mass = Mass1D(ceed)
        u = ct.Vector.from_dlpack(ceed, jnp.arange(float(mass.lsize)))
        v = ceed.Vector(mass.lsize)
        mass.op.apply(u, v)
        y = jax.jit(lambda y: y)(v.to_jax())
        np.testing.assert_allclose(y, mass.matrix @ np.arange(mass.lsize), atol=1e-13)

    def test_numpy(self, ceed):
        vector = vector_of(ceed, VALUES)
        for array in (vector.to_numpy(), np.asarray(vector), np.from_dlpack(vector)):
            assert array.ctypes.data == array_address(vector)
            assert not array.flags.writeable
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
        own = np.array(vector, copy=True)
        own[:] = 0
        np.testing.assert_array_equal(array_of(vector), VALUES)
        assert np.asarray(vector, dtype=np.float32).dtype == np.float32
        with pytest.raises(ValueError, match="is a copy"):
            np.asarray(vector, dtype=np.float32, copy=False)
        np.testing.assert_allclose(vector, VALUES)

    def test_from_jax(self, ceed):
        x = jnp.asarray(VALUES)
        vector = ct.Vector.from_dlpack(ceed, x)
        assert array_address(vector) == x.unsafe_buffer_pointer()
        del x
        gc.collect()
        np.testing.assert_array_equal(array_of(vector), VALUES)


def array_address(vector):
    with vector.array_read() as array:
        return array.ctypes.data


class TestLocks:
    def test_until_the_last_alias(self, one):
        vector = vector_of(one, VALUES)
        a = np.from_dlpack(vector)
        b = a[1:3].reshape(2, 1)
        c = vector.to_jax()
        del a
        for remaining in ("b", "c"):
            with pytest.raises(CeedExportedError, match="exported for reading"):
                vector.set_value(0)
            if remaining == "b":
                del b
            else:
                del c
            gc.collect()
        vector.set_value(0)

    def test_error_names_the_export(self, one):
        vector = vector_of(one, VALUES)
        a = np.from_dlpack(vector)
        other = vector_of(one, VALUES)
        for call in (
            lambda: vector.set_value(1),
            lambda: vector.set_array(VALUES),
            lambda: vector.scale(2),
            vector.get_array,
            vector.get_array_write,
            lambda: vector.exported(write=True).__dlpack__(),
            lambda: vector.copy_from(other),
        ):
            with pytest.raises(BufferError, match=r"<Vector 4 float64> is exported for reading, by DLPack"):
                call()
        other.copy_from(vector)
        assert vector.norm(ct.NORM_1) == 10
        del a
        w = np.from_dlpack(vector.exported(write=True))
        for call in (lambda: vector.norm(), lambda: vector.to_numpy(), lambda: other.copy_from(vector), vector.to_jax):
            with pytest.raises(BufferError, match="exported for writing"):
                call()
        w[0] = 9
        del w
        assert array_of(vector)[0] == 9

    def test_as_output_of_an_operator(self, ceed):
        mass = Mass1D(ceed)
        u, v = vector_of(ceed, np.ones(mass.lsize)), vector_of(ceed, np.zeros(mass.lsize))
        kept = v.to_jax()
        with pytest.raises(CeedExportedError, match=r"^v: "):
            mass.op.apply(u, v)
        np.testing.assert_array_equal(kept, 0)
        held = u.to_numpy()
        del kept
        gc.collect()
        mass.op.apply(u, v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ held, rtol=1e-13)

    def test_state_moves_after_a_write(self, ceed):
        """A passive input that was written through an export: operators see it."""
        mass = Mass1D(ceed)
        u, v = vector_of(ceed, np.ones(mass.lsize)), ceed.Vector(mass.lsize)
        mass.op.apply(u, v)
        q = np.from_dlpack(mass.qdata.exported(mass.n, 4, write=True))
        q *= 3
        del q
        mass.op.apply(u, v)
        np.testing.assert_allclose(array_of(v), 3 * mass.matrix @ np.ones(mass.lsize), rtol=1e-13)

    def test_vector_may_go_first(self, one):
        vector = vector_of(one, VALUES)
        a, x = np.from_dlpack(vector), vector.to_jax()
        w = np.from_dlpack(vector_of(one, VALUES).exported(write=True))
        del vector
        gc.collect()
        np.testing.assert_array_equal(a, VALUES)
        np.testing.assert_array_equal(x, VALUES)
        w += 1
        np.testing.assert_array_equal(w, VALUES + 1)

    def test_no_data(self, one):
        for call in (
            np.from_dlpack,
            np.asarray,
            lambda v: v.to_jax(),
            lambda v: np.from_dlpack(v.exported(write=True)),
        ):
            with pytest.raises(CeedAccessError, match="has no data"):
                call(one.Vector(3))

    def test_threads(self, one):
        """Aliases that die in other threads while this one computes."""
        vector, stop, errors = vector_of(one, VALUES), threading.Event(), []

        def work():
            try:
                while not stop.is_set():
                    a, x = np.from_dlpack(vector), vector.to_jax()
                    assert a[3] == x[3] == 4
                    del a, x
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(300):
                assert vector.norm(ct.NORM_MAX) == 4
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors
        gc.collect()
        vector.set_value(1)
        assert vector._access.lent == 0


# -- capsules ----------------------------------------------------------------------------------------------------------


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


READ_ONLY, IS_COPIED = 1, 2


def opened(capsule, kind):
    name = b"dltensor_versioned" if kind is Versioned else b"dltensor"
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = (
        ctypes.c_void_p,
        [ctypes.py_object, ctypes.c_char_p],
    )
    return kind.from_address(api.PyCapsule_GetPointer(capsule, name))


class TestCapsule:
    def check(self, tensor, address, shape):
        assert (tensor.device_type, tensor.device_id, tensor.byte_offset) == (1, 0, 0)
        assert (tensor.code, tensor.bits, tensor.lanes) == (2, 64, 1)
        assert tensor.ndim == len(shape)
        assert tensor.shape[: tensor.ndim] == list(shape)
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        assert tensor.strides[: tensor.ndim] == strides
        assert tensor.data == address or address is None

    def test_versioned(self, one):
        vector = vector_of(one, VALUES)
        capsule = vector.__dlpack__(max_version=(1, 2))
        managed = opened(capsule, Versioned)
        assert (managed.major, managed.flags) == (1, READ_ONLY)
        assert managed.deleter
        self.check(managed.tensor, array_address(vector), (4,))
        del capsule
        capsule = vector.exported(2, 2, write=True).__dlpack__(max_version=(1, 0))
        managed = opened(capsule, Versioned)
        assert managed.flags == 0
        self.check(managed.tensor, vector._access.memory.ctypes.data, (2, 2))

    def test_copy(self, one):
        vector = vector_of(one, VALUES)
        managed = opened(capsule := vector.__dlpack__(max_version=(1, 0), copy=True), Versioned)
        assert managed.flags & IS_COPIED
        assert managed.tensor.data != vector._access.memory.ctypes.data
        vector.set_value(0)  # nothing is locked
        del capsule

    def test_legacy(self, one):
        vector = vector_of(one, VALUES)
        with pytest.raises(BufferError, match=r"does not know DLPack 1\.0 .*to_jax"):
            vector.__dlpack__()
        vector.set_value(1)
        managed = opened(capsule := vector.exported(write=True).__dlpack__(), Managed)
        self.check(managed.tensor, vector._access.memory.ctypes.data, (4,))
        assert managed.deleter
        del capsule
        np.testing.assert_array_equal(np.from_dlpack(Producer(vector.exported(write=True))), 1)

    def test_keywords(self, one):
        vector = vector_of(one, VALUES)
        for keywords, message in (
            ({"stream": 1}, "stream"),
            ({"stream": -1}, "stream"),
            ({"dl_device": (2, 0)}, "dl_device"),
        ):
            with pytest.raises(BufferError, match=message):
                vector.__dlpack__(max_version=(1, 0), **keywords)
        vector.__dlpack__(max_version=(1, 0), stream=None, dl_device=(1, 0), copy=False)
        assert vector.__dlpack_device__() == vector.exported().__dlpack_device__() == (1, 0)
        gc.collect()
        vector.set_value(1)
        for shape in ((3,), (2, 3), (-2, -2)):
            with pytest.raises(ValueError, match="does not hold the 4 entries"):
                vector.exported(*shape)

    @pytest.mark.parametrize("write", [False, True])
    def test_deleter_runs_once(self, one, write):
        """Consumed, not consumed, consumed twice."""
        vector = vector_of(one, VALUES)
        capsule = vector.exported(write=write).__dlpack__(max_version=(1, 0))
        del capsule
        vector.set_value(1)  # given back without a consumer
        capsule = vector.exported(write=write).__dlpack__(max_version=(1, 0))

        class Given(Producer):
            def __dlpack__(self, **_):
                return self.array

        a = np.from_dlpack(Given(capsule))
        with pytest.raises(ValueError, match=r"PyCapsule|capsule"):
            np.from_dlpack(Given(capsule))
        del capsule
        with pytest.raises(CeedExportedError):
            vector.set_value(2)
        del a
        gc.collect()
        vector.set_value(2)
        assert vector._access.lent == 0
        assert vector.state % 2 == 0

    def test_at_exit(self):
        """Aliases and capsules that are alive, in cycles and globals, when the interpreter ends."""
        check_python("""
            import jax
            jax.config.update("jax_enable_x64", True)
            import numpy as np
            from ceedtap import ceed as ct
            vectors = []
            for resource in ("/cpu/self", "/cpu/self/ref/serial"):
                ceed = ct.Ceed(resource)
                for write in (False, True):
                    v = ceed.Vector(100)
                    v.set_value(1)
                    a = np.from_dlpack(v.exported(write=write))
                    w = ceed.Vector(100)
                    w.set_value(2)
                    vectors.append([v, a, w.exported(write=write).__dlpack__(max_version=(1, 0))])
                    vectors[-1].append(vectors[-1])
                x = ceed.Vector(100)
                x.set_value(3)
                vectors.append([x.to_jax(), ct.Vector.from_dlpack(ceed, jax.numpy.ones(7))])
            del v, w, x, a
        """)

    def test_leaks_nothing(self):
        check_python("""
            import gc, resource
            import jax
            jax.config.update("jax_enable_x64", True)
            import numpy as np
            from ceedtap import ceed as ct
            ceed = ct.Ceed("/cpu/self")
            v = ceed.Vector(200_000)
            v.set_value(1)
            x = jax.numpy.ones(200_000)
            def work(n):
                for _ in range(n):
                    np.from_dlpack(v), v.to_jax(), np.asarray(v)
                    v.exported(write=True).__dlpack__(max_version=(1, 0))
                    v.__dlpack__(max_version=(1, 0), copy=True)
                    ct.Vector.from_dlpack(ceed, x)
                    ct.Vector.from_dlpack(ceed, np.ones(1000))
                gc.collect()
                return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            before = work(100)
            assert work(1000) - before < 20_000, "kilobytes"
        """)


class TestImport:
    def test_jax_arrays_are_never_written(self, ceed):
        mass = Mass1D(ceed)
        x = jnp.ones(mass.lsize)
        u = ct.Vector.from_dlpack(ceed, x)
        other = vector_of(ceed, np.zeros(mass.lsize))
        for call in (
            lambda: u.set_value(0),
            lambda: u.scale(2),
            lambda: u.axpy(1, other),
            u.reciprocal,
            u.get_array,
            u.get_array_write,
            lambda: u.exported(write=True).__dlpack__(max_version=(1, 0)),
            lambda: mass.op.apply(other, u),
            lambda: mass.op.apply_add(other, u),
            lambda: mass.op.linear_assemble_diagonal(u),
            lambda: (
                mass.restriction.T.apply(ceed.Vector(mass.restriction.esize), u)
                if False
                else u.pointwise_mult(other, other)
            ),
        ):
            with pytest.raises(CeedAccessError, match=r"nothing can write to .*its memory is that of a jax.*read-only"):
                call()
        np.testing.assert_array_equal(x, 1)
        v = ceed.Vector(mass.lsize)
        mass.op.apply(u, v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ np.ones(mass.lsize), rtol=1e-13)
        u.set_array(np.full(mass.lsize, 2.0))  # memory of its own from here on
        u.scale(2)
        np.testing.assert_array_equal(x, 1)
        assert array_of(u)[0] == 4

    def test_read_only_as_passive_field(self, ceed):
        mass = Mass1D(ceed)
        q = ct.Vector.from_dlpack(ceed, jnp.asarray(2 * mass.data))
        op = ceed.Operator(ceed.QFunctionByName("MassApply"))
        op.set_field("u", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        op.set_field("qdata", mass.strided, ct.BASIS_NONE, q)
        op.set_field("v", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        v = ceed.Vector(mass.lsize)
        op.apply(vector_of(ceed, np.ones(mass.lsize)), v)
        np.testing.assert_allclose(array_of(v), 2 * mass.matrix @ np.ones(mass.lsize), rtol=1e-13)

    def test_shares_a_writable_array(self, ceed):
        a = VALUES.copy()
        vector = ct.Vector.from_dlpack(ceed, a)
        vector.scale(2)
        np.testing.assert_array_equal(a, 2 * VALUES)
        assert np.shares_memory(vector.take_array(), a)

    def test_older_protocol(self, one):
        """A producer without `max_version`: numpy takes unversioned memory for read-only."""
        producer = Producer(VALUES.copy())
        vector = ct.Vector.from_dlpack(one, producer)
        assert producer.asked == 1
        np.testing.assert_array_equal(array_of(vector), VALUES)
        with pytest.raises(CeedAccessError, match="read-only"):
            vector.set_value(0)

    def test_capsule(self, one):
        a = VALUES.copy()
        capsule = a.__dlpack__()
        np.testing.assert_array_equal(array_of(ct.Vector.from_dlpack(one, capsule)), VALUES)
        with pytest.raises(ValueError, match=r"PyCapsule|capsule"):
            ct.Vector.from_dlpack(one, capsule)

    def test_copy(self, one):
        for source in (np.repeat(VALUES, 2)[::2], jnp.asarray(VALUES), VALUES.reshape(2, 2)):
            vector = ct.Vector.from_dlpack(one, source, copy=True)
            vector.scale(1)
            np.testing.assert_array_equal(array_of(vector), VALUES)
            assert array_address(vector) % 64 == 0

    def test_shape_and_offset(self, one):
        a = np.arange(24.0).reshape(4, 6)
        vector = ct.Vector.from_dlpack(one, a[1:3])
        np.testing.assert_array_equal(array_of(vector), np.arange(6.0, 18.0))

    def test_other_vector(self, one):
        """From one vector to another, and both locks."""
        a = vector_of(one, VALUES)
        b = ct.Vector.from_dlpack(one, a)
        with pytest.raises(CeedExportedError):
            a.set_value(0)
        with pytest.raises(CeedAccessError, match="read-only"):
            b.set_value(0)
        with pytest.raises(ValueError, match="share memory"):
            one.StridedElemRestriction(1, 4, 1, 4, [1, 4, 4]).apply(b, ct.Vector.from_dlpack(one, a))
        del b
        gc.collect()
        a.set_value(0)

    @pytest.mark.parametrize("dtype", [np.float32, np.int64, np.complex128, np.bool_, np.float16])
    def test_types(self, one, dtype):
        with pytest.raises(
            TypeError, match=rf"numpy.ndarray holds {np.dtype(dtype)}, libCEED computes in float64 here"
        ):
            ct.Vector.from_dlpack(one, np.zeros(3, dtype))

    def test_more_refusals(self, one):
        for source, error, message in (
            (jnp.zeros(3, jnp.bfloat16), (TypeError, BufferError), r"libCEED computes in float64|Unsupported|bfloat16"),
            (np.float64(1), TypeError, "has no __dlpack__"),
            (np.array(1.0), ValueError, "scalar"),
            (None, TypeError, "NoneType has no __dlpack__"),
            ([1.0], TypeError, "list has no __dlpack__"),
            (np.zeros(3, ">f8"), (TypeError, BufferError), "byte order"),
            (Producer(VALUES, (2, 1)), BufferError, r"on DLPack device \(2, 1\)"),
            (Producer(VALUES, (10, 0)), BufferError, r"on DLPack device \(10, 0\)"),
        ):
            with pytest.raises(error, match=message):
                ct.Vector.from_dlpack(one, source)


class TestJAX:
    def test_x64(self, one):
        vector = vector_of(one, VALUES)
        jax.config.update("jax_enable_x64", False)
        try:
            with pytest.raises(
                TypeError, match=r"float64 here, and JAX has 64-bit numbers switched off.*jax_enable_x64"
            ):
                vector.to_jax()
        finally:
            jax.config.update("jax_enable_x64", True)
        vector.set_value(1)

    def test_unaligned(self, one):
        a = aligned(4, 8)
        vector = one.Vector(4)
        vector.set_array(a, cmode=ct.USE_POINTER)
        with pytest.raises(BufferError, match="64-byte aligned"):
            vector.to_jax(copy=False)
        x = vector.to_jax()
        vector.set_value(5)  # a copy: not locked
        np.testing.assert_array_equal(x, 0)

    def test_donation_does_not_write(self, one):
        vector = vector_of(one, VALUES)
        f = jax.jit(lambda x: x + 1, donate_argnums=0)
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = f(vector.to_jax())
        np.testing.assert_array_equal(y, VALUES + 1)
        np.testing.assert_array_equal(array_of(vector), VALUES)


def test_docs_examples_name_real_things():
    text = (Path(__file__).parent.parent / "docs" / "arrays.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(?:ct\.)?Vector\.(\w+)", text):
        assert hasattr(ct.Vector, name), name
