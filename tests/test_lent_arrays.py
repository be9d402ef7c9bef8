"""Arrays that a vector has lent: nothing made of one can write to the vector, or to what shares its memory, later."""

import contextlib
import ctypes
import threading

import jax
import numpy as np
import pytest
from ceed_helpers import array_of, check_python, vector_of

import ceedtap as ct
from ceedtap.ceed_ffi import CeedAccessError

try:
    import torch
except ImportError:
    torch = None


def poke(alias):
    """Writes to every entry of an alias, by whatever means it has."""
    with contextlib.suppress(ValueError, TypeError, BufferError):
        if isinstance(alias, np.ndarray):
            alias.flags.writeable = True
    with contextlib.suppress(ValueError, TypeError, BufferError, RuntimeError):
        alias[...] = 99.0
    with contextlib.suppress(ValueError, TypeError, BufferError, RuntimeError):
        for i in range(len(alias)):
            alias[i] = 99.0


def doubles(array):
    return (ctypes.c_double * array.size).from_buffer(array)


ALIASES = {
    "itself": lambda a: a,
    "slice": lambda a: a[1:],
    "slice of a slice": lambda a: a[1:][1:],
    "every second": lambda a: a[::2],
    "reshaped": lambda a: a.reshape(2, 2),
    "view": lambda a: a.view(),
    "other type": lambda a: a.view(np.uint64).view(np.float64),
    "transposed": lambda a: a.T,
    "base": lambda a: a.base,
    "flat": lambda a: a.flat,
    "buffer": memoryview,
    "buffer of a slice": lambda a: memoryview(a[1:]),
    "ctypes": doubles,
    "numpy on the buffer": lambda a: np.frombuffer(a),
    "DLPack": lambda a: np.from_dlpack(a),
    "strides": lambda a: np.lib.stride_tricks.as_strided(a, (2,), (8,)),
    **({"torch": lambda a: torch.from_numpy(a), "torch slice": lambda a: torch.from_numpy(a[1:])} if torch else {}),
}


def block(vector, make, method):
    with getattr(vector, method)() as a:
        a[:] = [1.0, 2.0, 3.0, 4.0]
        return a, make(a)


def shaped_block(vector, make, method):
    with getattr(vector, method)(2, 2) as a:
        a[:] = [[1.0, 2.0], [3.0, 4.0]]
        return a, make(a.reshape(4))


def pair(vector, make, method):
    a = getattr(vector, "get_" + method)()
    a[:] = [1.0, 2.0, 3.0, 4.0]
    alias = make(a)
    vector.restore_array()
    return a, alias


def failing_block(vector, make, method):
    with contextlib.suppress(ZeroDivisionError), getattr(vector, method)() as a:
        a[:] = [1.0, 2.0, 3.0, 4.0]
        kept = a, make(a)
        _ = 1 / 0
    return kept


WAYS = {"block": block, "shaped block": shaped_block, "get and restore": pair, "block that raises": failing_block}


@pytest.mark.parametrize("method", ["array", "array_write"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ALIASES)
def test_no_alias_writes_to_the_vector_or_to_jax_arrays(ceed, kind, way, method):
    vector = vector_of(ceed, np.zeros(4))
    variable, alias = WAYS[way](vector, ALIASES[kind], method)
    poke(alias)
    assert array_of(vector).tolist() == [1, 2, 3, 4]
    x, n = vector.to_jax(), np.asarray(vector)
    poke(variable)
    poke(alias)
    assert x.tolist() == n.tolist() == array_of(vector).tolist() == [1, 2, 3, 4]
    assert vector.norm(ct.NORM_1) == 10
    if not ceed.get_resource().startswith("/cpu/self/memcheck"):
        assert x.unsafe_buffer_pointer() == n.ctypes.data  # and it is shared


@pytest.mark.parametrize("kind", ALIASES)
def test_an_alias_that_is_all_that_is_left_does_not_reach_jax_arrays(one, kind):
    vector = vector_of(one, [1.0, 2.0, 3.0, 4.0])

    def lend():
        alias = ALIASES[kind](vector.get_array())
        vector.restore_array()
        return alias

    alias = lend()
    x, n = vector.to_jax(), np.from_dlpack(vector)
    poke(alias)
    assert x.tolist() == n.tolist() == [1, 2, 3, 4]


def test_an_operator_sees_what_the_vector_says(ceed):
    """A slice that is written to later does not go past libCEED's count of writes."""
    vector, op = vector_of(ceed, [1.0, 2.0, 3.0, 4.0]), ceed.Operator(ceed.QFunctionByName("MassApply"))
    points = ceed.StridedElemRestriction(2, 2, 1, 4, [1, 2, 2])
    for name, data in (("u", ct.VECTOR_ACTIVE), ("qdata", vector), ("v", ct.VECTOR_ACTIVE)):
        basis = ct.BASIS_NONE if name == "qdata" else ceed.BasisTensorH1Lagrange(1, 1, 2, 2, ct.GAUSS_LOBATTO)
        op.set_field(name, points, basis, data)
    u, v = vector_of(ceed, np.ones(4)), ceed.Vector(4)
    for factor in (1.0, 10.0):
        with vector.array() as a:
            a *= factor
            kept = a[1:]
        kept.flags.writeable and kept.fill(7.0)
        op.apply(u, v)
        np.testing.assert_allclose(array_of(v), array_of(vector), rtol=1e-14)
        np.testing.assert_allclose(array_of(v), factor * np.arange(1.0, 5.0), rtol=1e-14)


def test_no_copy_in_the_usual_block(one):
    """Without an alias the vector stays where it is."""
    vector = vector_of(one, np.zeros(1000))
    addresses = []
    for value in range(5):
        with vector.array(10, 100) as a:
            a[:] = value
        with vector.array_write() as b:
            b[:] = value
        addresses += [a.ctypes.data, b.ctypes.data]
    assert len(set(addresses)) == 1


def test_shared_arrays_stay_shared(one):
    """The user's own array is his own to write to: a vector that shares it does not leave it."""
    own = np.zeros(4)
    vector = one.Vector(4)
    vector.set_array(own, cmode=ct.USE_POINTER)
    with vector.array() as a:
        kept = a[1:]
        a[:] = 5.0
    assert own.tolist() == [5, 5, 5, 5]
    assert kept.base is not None
    vector.scale(2.0)
    assert own.tolist() == [10, 10, 10, 10]


def test_the_flag_cannot_be_set_back(one):
    vector = vector_of(one, np.zeros(4))
    with vector.array() as a:
        pass
    while isinstance(a, np.ndarray):
        with pytest.raises(ValueError, match="WRITEABLE"):
            a.flags.writeable = True
        a = a.base


@pytest.mark.parametrize("dropped", [False, True])
def test_memory_that_moved_away_lives_as_long_as_its_aliases(one, dropped):
    vector = vector_of(one, np.arange(1000.0))
    with vector.array() as a:
        kept = a[10:20]
    if dropped:
        del vector, a
    trash = [vector_of(one, np.full(1000, -1.0)) for _ in range(50)]
    assert kept.tolist() == list(range(10, 20))
    assert len(trash) == 50


class TestThreads:
    """Whoever copies a vector while another thread uses it waits; nobody finds it locked."""

    COPIES = (
        "vector.to_numpy(copy=True)",
        "np.array(vector)",
        "np.from_dlpack(vector, copy=True)",
        "vector.to_jax(copy=True)",
        "other.copy_from(vector)",
        "vector.norm()",
    )

    @pytest.mark.parametrize("how", COPIES)
    def test_beside_apply(self, how):
        check_python(f"""
            import sys, threading
            import jax, numpy as np
            jax.config.update("jax_enable_x64", True)
            from ceed_helpers import Mass1D, vector_of
            from ceedtap import ceed as ct
            sys.setswitchinterval(1e-6)
            ceed = ct.Ceed("/cpu/self")
            mass = Mass1D(ceed, n=200)
            u, vector, other = vector_of(ceed, np.ones(mass.lsize)), ceed.Vector(mass.lsize), ceed.Vector(mass.lsize)
            mass.op.apply(u, vector)
            wanted, errors, stop = vector.to_numpy(copy=True), [], threading.Event()
            def run(work):
                try:
                    while not stop.is_set():
                        work()
                except BaseException as error:
                    errors.append(error)
            threads = [threading.Thread(target=run, args=(work,)) for work in (
                lambda: mass.op.apply(u, vector), lambda: vector.set_array(wanted))]
            for thread in threads:
                thread.start()
            try:
                for _ in range(300):
                    {how}
            finally:
                stop.set()
                [thread.join() for thread in threads]
            assert not errors, errors
            np.testing.assert_array_equal(vector.to_numpy(copy=True), wanted)
        """)

    def test_an_array_that_is_kept_is_still_an_error_elsewhere(self, one):
        vector = vector_of(one, np.ones(3))
        errors = []

        def write():
            try:
                vector.set_value(2.0)
            except CeedAccessError as error:
                errors.append(error)

        with vector.array_read():
            thread = threading.Thread(target=write)
            thread.start()
            thread.join()
        assert len(errors) == 1
        x = jax.block_until_ready(vector.to_jax(copy=True))
        vector.set_value(2.0)
        assert x.tolist() == [1, 1, 1]
