"""Processes that fork while libCEED computes: the child never waits for a thread that it does not have."""

import os
import sys

import pytest
from ceed_helpers import check_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# A second thread that is inside of libCEED, and thus has the lock, when the process forks.
BUSY = """
import os, threading, warnings
import numpy as np
from ceed_helpers import Mass1D, array_of, vector_of
from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError
warnings.simplefilter("ignore")  # newer Pythons warn of every fork with threads
ceed = ct.Ceed("/cpu/self/ref/serial")
inside, leave = threading.Event(), threading.Event()
def slow(ctx, q, inputs, outputs):
    inside.set()
    assert leave.wait(60)
    outputs[0][:] = inputs[0]
qf = ceed.PythonQFunction(slow, [("u", 1, ct.EVAL_NONE)], [("v", 1, ct.EVAL_NONE)])
vector, u, v = vector_of(ceed, [1.0, 2.0]), vector_of(ceed, [3.0]), ceed.Vector(1)
thread = threading.Thread(target=qf.apply, args=(1, [u], [v]))
thread.start()
assert inside.wait(60)
def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]
def parent_goes_on():
    leave.set()
    thread.join()
    assert array_of(v).tolist() == [3.0] and array_of(vector).tolist() == [1.0, 2.0]
"""

USES = {
    "a vector": "vector.set_value(1.0)",
    "an array of one": "vector.get_array()",
    "a copy": "vector.to_numpy(copy=True)",
    "a new object": "ceed.Vector(3)",
    "the Ceed": "ceed.get_resource()",
    "the QFunction": "qf.apply(1, [u], [v])",
}


@pytest.mark.parametrize("use", USES)
def test_the_lock_that_the_parent_holds_is_an_error(use):
    check_python(
        BUSY
        + f"""
def work():
    for _ in range(2):
        try:
            {USES[use]}
        except CeedAccessError as error:
            assert "forked while another thread was inside of libCEED" in str(error), error
            assert "Make a new Ceed" in str(error)
        else:
            raise AssertionError("accepted")
assert child(work) == 0
parent_goes_on()
"""
    )


def test_a_new_ceed_in_the_child_works():
    check_python(
        BUSY
        + """
def work():
    import gc
    global vector, ceed, qf, u, v
    mass = Mass1D(ct.Ceed("/cpu/self"))
    w = mass.ceed.Vector(mass.lsize)
    mass.op.apply(vector_of(mass.ceed, np.ones(mass.lsize)), w)
    np.testing.assert_allclose(array_of(w), mass.matrix @ np.ones(mass.lsize), rtol=1e-13)
    del vector, ceed, qf, u, v, mass, w
    gc.collect()  # what belongs to the parent's thread is left alone
assert child(work) == 0
parent_goes_on()
"""
    )


def test_without_a_thread_inside_the_child_goes_on():
    check_python(
        BUSY
        + """
leave.set()
thread.join()
mass = Mass1D(ceed)
w = ceed.Vector(mass.lsize)
x = vector_of(ceed, np.ones(mass.lsize))
def work():
    mass.op.apply(x, w)
    np.testing.assert_allclose(array_of(w), mass.matrix @ np.ones(mass.lsize), rtol=1e-13)
assert child(work) == 0
assert child(lambda: [child(work), ceed.Vector(3)][0] and os._exit(2)) == 0
work()
"""
    )


def test_a_fork_by_the_thread_that_is_inside():
    """From a Python QFunction, or a block that has the lock: the child has it too, and gives it back."""
    check_python("""
        import os, threading, warnings
        from ceed_helpers import array_of, vector_of
        from ceedtap import ceed as ct
        warnings.simplefilter("ignore")
        ceed = ct.Ceed("/cpu/self/ref/serial")
        vector = vector_of(ceed, [1.0, 2.0])
        with ceed.lock, ceed.lock:
            pid = os.fork()
            if pid == 0:
                vector.scale(2.0)
        if pid == 0:
            vector.scale(2.0)
            thread = threading.Thread(target=vector.scale, args=(2.0,))
            thread.start()
            thread.join()
            os._exit(array_of(vector).tolist() != [8.0, 16.0])
        assert os.waitpid(pid, 0)[1] == 0
        assert array_of(vector).tolist() == [1.0, 2.0]
    """)


def test_an_embedded_operator_in_the_child():
    """The handler finds the same lock: an error in the child's program, not a wait."""
    check_python(
        BUSY
        + """
from ceedtap.native import ffi, lib
def work():
    assert lib.ct_lock_acquire(ceed.lock.pointer) == 0
    assert lib.ct_lock_try_acquire(ceed.lock.pointer) == 0
assert child(work) == 0
parent_goes_on()
assert lib.ct_lock_acquire(ceed.lock.pointer) == 1
lib.ct_lock_release(ceed.lock.pointer)
"""
    )


def test_guards_of_creation():
    """Threads that make and destroy Ceeds all the time while the process forks, many times."""
    check_python(
        """
        import os, sys, threading, warnings
        from ceed_helpers import array_of, vector_of
        from ceedtap import ceed as ct
        from ceedtap.ceed_ffi import CeedAccessError
        warnings.simplefilter("ignore")
        sys.setswitchinterval(1e-5)
        shared, stop = ct.Ceed("/cpu/self/ref/serial"), threading.Event()
        x = vector_of(shared, [1.0, 2.0])
        def make():
            while not stop.is_set():
                vector_of(ct.Ceed("/cpu/self/ref/serial"), [1.0]).norm()
        def use():
            while not stop.is_set():
                x.norm()
        threads = [threading.Thread(target=work) for work in (make, use)]
        [thread.start() for thread in threads]
        refused = 0
        for _ in range(60):
            pid = os.fork()
            if pid == 0:
                code = 0
                try:
                    x.norm()
                except CeedAccessError:
                    code = 3
                assert vector_of(ct.Ceed("/cpu/self/ref/serial"), [3.0, 4.0]).norm() == 5
                os._exit(code)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in (0, 3), status
            refused += status == 3
        stop.set()
        [thread.join() for thread in threads]
        assert x.norm() > 2
        """,
        timeout=300,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forkserver and fork of multiprocessing")
def test_spawn_is_the_way(tmp_path):
    """What the message recommends."""
    (tmp_path / "work.py").write_text(
        "from ceedtap import ceed as ct\n"
        "def norm(values):\n"
        "    vector = ct.Ceed('/cpu/self/ref/serial').Vector(len(values))\n"
        "    vector.set_array(values)\n"
        "    return vector.norm()\n"
    )
    check_python(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import multiprocessing, work
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.map(work.norm, [[3.0, 4.0]]) == [5.0]
    """)
