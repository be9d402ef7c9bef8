"""Finding and opening libCEED, its errors, the lock of a Ceed tree."""

import os
import pickle
import threading
import time

import numpy as np
import pytest
from ceed_helpers import check_python

from ceedtap import ceed_ffi
from ceedtap.ceed import Ceed
from ceedtap.ceed_ffi import CeedError, CeedLock, LibCEEDNotFound, Library, load

ODD_RESOURCES = [
    "/nope",
    "",
    "/",
    ":",
    "help",
    "helpful",
    "/gpu/cuda",
    "/gpu/cuda/ref:device_id=0",
    "/gpu/hip/magma/det",
    "/gpu/sycl",
    "/cpu/self/xsmm/blocked",
    "/cpu/self/occa",
    "/cpu/self/ref/serial/more",
    "/cpu/self/re",
    "/c",
    "cpu/self",
    " /cpu/self",
    "/CPU/SELF",
    "/cpu/self ",
    "%s%n%s%n",
    "/cpu/\u00e9\u4e2d",
    "x" * 100_000,
    "/cpu/self/" + "x" * 1000,
]


class TestLoad:
    def test_library(self):
        library = load()
        assert library is load()
        assert library.scalar_dtype in (np.float64, np.float32)
        assert os.path.isfile(library.path)
        assert library.version.count(".") == 2
        assert library.version in repr(library)
        assert library.origin in repr(library)

    def test_features_by_symbol(self):
        library = load()
        assert library.has("CeedOperatorApply")
        assert library.has("CEED_VECTOR_ACTIVE")
        assert not library.has("CeedNoSuchFunction")
        assert library.address("CeedOperatorApply") != library.address("CeedOperatorApplyAdd")
        assert library.first("CeedNoSuchFunction", "CeedInit") == "CeedInit"
        with pytest.raises(ceed_ffi.CeedUnsupportedError, match="CeedNoSuchFunction or CeedNorThis"):
            library.first("CeedNoSuchFunction", "CeedNorThis")

    def test_resources(self):
        assert {"/cpu/self/ref/serial", "/cpu/self/opt/blocked"} <= set(load().resources)

    def test_import_is_lazy(self):
        check_python("""
            import sys
            from ceedtap import ceed, ceed_ffi
            assert ceed_ffi._library is None
            ceed_ffi.load()
            assert "libceed" not in sys.modules
        """)

    def test_threads_open_it_once(self):
        check_python("""
            import threading
            from ceedtap import ceed_ffi
            found, threads = [], []
            for _ in range(8):
                threads.append(threading.Thread(target=lambda: found.append(ceed_ffi.load())))
            [thread.start() for thread in threads], [thread.join() for thread in threads]
            assert len(found) == 8 and len(set(map(id, found))) == 1
        """)

    def test_file_by_name(self, monkeypatch):
        monkeypatch.setenv("CEEDTAP_LIBCEED", load().path)
        library = ceed_ffi.find()
        assert library.origin == f"CEEDTAP_LIBCEED={load().path}"
        assert os.path.samefile(library.path, load().path)

    def test_prefix(self, monkeypatch, tmp_path):
        monkeypatch.delenv("CEEDTAP_LIBCEED", raising=False)
        monkeypatch.setenv("CEED_DIR", str(tmp_path))
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / ceed_ffi.library_name()).symlink_to(load().path)
        assert ceed_ffi.find().origin == f"CEED_DIR={tmp_path}"

    def test_cache(self, monkeypatch, tmp_path):
        for name in ("CEEDTAP_LIBCEED", "CEED_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(ceed_ffi, "_package", lambda: None)
        lib = tmp_path / "ceedtap" / "libceed" / "0.12.0" / "lib"
        lib.mkdir(parents=True)
        (lib / ceed_ffi.library_name()).symlink_to(load().path)
        assert ceed_ffi.find().origin == "libceed 0.12.0 installed by `ceedtap install-libceed`"

    def test_named_file_is_missing(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CEEDTAP_LIBCEED", str(tmp_path / "libceed.so"))
        with pytest.raises(LibCEEDNotFound, match=r"CEEDTAP_LIBCEED=.*libceed\.so: no such file.*unset"):
            ceed_ffi.find()

    def test_named_file_is_no_library(self, monkeypatch, tmp_path):
        file = tmp_path / "libceed.so"
        file.write_text("this is text")
        monkeypatch.setenv("CEEDTAP_LIBCEED", str(file))
        with pytest.raises(LibCEEDNotFound, match=r"libceed\.so"):
            ceed_ffi.find()

    def test_other_library(self):
        with pytest.raises(OSError, match="is no libCEED"):
            Library("libm.so.6")

    def test_not_found(self, monkeypatch, tmp_path):
        for name in ("CEEDTAP_LIBCEED", "CONDA_PREFIX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CEED_DIR", str(tmp_path / "prefix"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(ceed_ffi, "_package", lambda: None)
        monkeypatch.setattr(ceed_ffi, "library_name", lambda: "libceed-absent.so")
        with pytest.raises(LibCEEDNotFound) as info:
            ceed_ffi.find()
        for text in ("ceedtap install-libceed", "CEEDTAP_LIBCEED", "the Python package libceed: not installed"):
            assert text in str(info.value)
        assert f"{tmp_path}/prefix/lib/libceed-absent.so (CEED_DIR={tmp_path}/prefix): no such file" in str(info.value)
        assert issubclass(LibCEEDNotFound, ImportError)


class TestInitialize:
    @pytest.mark.parametrize("handler", [None, "abort", "exit", "store", "return"])
    def test_odd_resources(self, handler):
        """None of them ends the process, and a good one works afterwards."""
        code = f"""
            import os
            from ceedtap.ceed import Ceed
            from ceedtap.ceed_ffi import CeedError
            for resource in {ODD_RESOURCES!r}:
                try:
                    Ceed(resource)
                except CeedError as error:
                    assert error.code < 0 and error.message, (resource, error)
                else:
                    raise AssertionError(resource)
                assert os.environ["CEED_ERROR_HANDLER"] == "return"
            assert Ceed("/cpu/self").Vector(3).get_length() == 3
        """
        check_python(code, CEED_ERROR_HANDLER=handler)

    def test_unknown(self):
        with pytest.raises(CeedError, match=r"there is no backend '/nope'.*/cpu/self/ref/serial") as info:
            Ceed("/nope")
        assert info.value.code == -1
        assert info.value.function == "CeedInit"

    def test_not_compiled(self):
        with pytest.raises(CeedError, match="Backend not currently compiled") as info:
            Ceed("/cpu/self/xsmm/blocked")
        assert info.value.code == -3
        assert isinstance(info.value, ceed_ffi.CeedUnsupportedError)

    def test_not_text(self):
        with pytest.raises(TypeError, match="resource: expected a string"):
            Ceed(b"/cpu/self")
        with pytest.raises(ValueError, match="zero character"):
            Ceed("/cpu/self\0")

    def test_errors_come_back(self):
        """An error inside libCEED is an exception with its text."""
        ceed = Ceed("/cpu/self")
        vector = ceed.Vector(3)
        with pytest.raises(CeedError, match=r"CeedVectorSyncArray failed with code .*valid data"):
            ceed_ffi.call(ceed, "CeedVectorSyncArray", vector.pointer, 0)
        with pytest.raises(CeedError) as info:
            ceed_ffi.call(ceed, "CeedVectorRestoreArray", vector.pointer, ceed.library.ffi.new("CeedScalar **"))
        assert info.value.message


class TestError:
    def test_classes(self):
        error = CeedError.from_code(2, "text", "CeedFunction")
        assert type(error) is ceed_ffi.CeedDimensionError
        assert (error.code, error.message, error.function) == (2, "text", "CeedFunction")
        assert str(error) == "CeedFunction failed with code 2: text"
        assert type(CeedError.from_code(-77, "", "f")) is CeedError
        assert str(CeedError.from_code(5, "", "f")) == "f failed with code 5: (libCEED gave no message)"

    def test_pickle(self):
        error = pickle.loads(pickle.dumps(CeedError.from_code(3, "text", "f")))
        assert type(error) is ceed_ffi.CeedIncompleteError
        assert (str(error), error.code, error.function) == ("f failed with code 3: text", 3, "f")


class TestLock:
    def test_one_per_tree(self):
        a, b = Ceed("/cpu/self"), Ceed("/cpu/self")
        assert a.lock is not b.lock
        assert a.lock is ceed_ffi.lock_of(a.pointer, a.library.ffi)
        assert a.Vector(1).ceed.lock is a.lock

    def test_excludes_and_is_recursive(self):
        lock, order = CeedLock(), []

        def other():
            with lock:
                order.append("other")

        with lock, lock:
            thread = threading.Thread(target=other)
            thread.start()
            time.sleep(0.05)
            order.append("first")
        thread.join()
        assert order == ["first", "other"]

    def test_released_after_an_exception(self):
        lock = CeedLock()
        with pytest.raises(ZeroDivisionError), lock:
            _ = 1 / 0
        done = []
        thread = threading.Thread(target=lambda: lock.destroy_later(lambda: done.append(1)))
        thread.start()
        thread.join()
        assert done == [1]

    def test_destroys_wait_for_the_end_of_the_call(self):
        lock, done = CeedLock(), []
        with lock:
            with lock:
                lock.destroy_later(lambda: done.append("own thread"))
                thread = threading.Thread(target=lambda: lock.destroy_later(lambda: done.append("other thread")))
                thread.start()
                thread.join()
            assert done == []
        assert done == ["own thread", "other thread"]
        lock.destroy_later(lambda: done.append("free"))
        assert done[-1] == "free"

    def test_ctrl_c_while_waiting(self):
        check_python("""
            import os, signal, threading, time
            from ceedtap.ceed_ffi import CeedLock
            lock, held = CeedLock(), threading.Event()
            def hold():
                with lock:
                    held.set()
                    time.sleep(0.5)
            thread = threading.Thread(target=hold)
            thread.start()
            held.wait()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                with lock:
                    raise AssertionError("interrupted too late")
            except KeyboardInterrupt:
                pass
            thread.join()
            free = []
            def take():
                with lock:
                    free.append(1)
            thread = threading.Thread(target=take, daemon=True)
            thread.start()
            thread.join(10)
            assert free
        """)


class TestLifetimes:
    def test_exit_with_live_objects(self):
        check_python("""
            from ceedtap import ceed as ct
            ceed = ct.Ceed("/cpu/self")
            vectors = [ceed.Vector(10) for _ in range(10)]
            view = vectors[0].get_array_write()
            qf = ceed.QFunctionByName("MassApply")
            op = ceed.Operator(qf)
            cycle = [op]; cycle.append(cycle)
        """)

    def test_any_order_of_collection(self):
        check_python("""
            import gc, itertools
            from ceed_helpers import Mass1D, vector_of
            from ceedtap import ceed as ct
            for order in itertools.permutations(range(4)):
                ceed = ct.Ceed("/cpu/self")
                mass = Mass1D(ceed)
                u, v = vector_of(ceed, [1.0] * mass.lsize), ceed.Vector(mass.lsize)
                mass.op.apply(u, v)
                things = [ceed, mass, u, v]
                del ceed, mass, u, v
                for i in order:
                    things[i] = None
                    gc.collect()
        """)

    def test_threads_create_and_destroy(self):
        """On one Ceed, while others compute, with the collector running in all of them."""
        check_python("""
            import gc, threading
            import numpy as np
            from ceed_helpers import Mass1D, array_of, vector_of
            from ceedtap import ceed as ct
            gc.set_threshold(20)
            ceed, errors = ct.Ceed("/cpu/self"), []
            def work(seed):
                try:
                    for i in range(60):
                        mass = Mass1D(ceed, n=9, seed=seed)
                        values = np.random.default_rng(i).random(mass.lsize)
                        u, v = vector_of(ceed, values), ceed.Vector(mass.lsize)
                        cycle = [mass, u]; cycle.append(cycle)
                        mass.op.apply(u, v)
                        np.testing.assert_allclose(array_of(v), mass.matrix @ values, rtol=1e-12)
                except BaseException as error:
                    errors.append(error)
            threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
            [t.start() for t in threads], [t.join() for t in threads]
            assert not errors, errors
        """)

    def test_ceeds_in_threads(self):
        check_python("""
            import threading
            from ceedtap import ceed as ct
            def work():
                for _ in range(200):
                    ct.Ceed("/cpu/self/ref/serial").Vector(5).set_value(1)
            threads = [threading.Thread(target=work) for _ in range(4)]
            [t.start() for t in threads], [t.join() for t in threads]
        """)
