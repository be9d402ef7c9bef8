"""Backends that do not work on this processor: found out without harm, avoided, and named.

Libraries for other processors are made of the one that is here: a library in front of it, which ends the process where
one of the backends has work to do, and the official wheel with undefined instructions in place of those of AVX-512.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from ceed_helpers import BACKENDS, FASTEST, FOUND, TESTS, Mass1D, array_of, check_python, library_that_dies, vector_of

from ceedtap import ceed as ct
from ceedtap import ceed_backends, ceed_trial, cpu
from ceedtap.ceed_backends import Backends, backends, choose
from ceedtap.ceed_ffi import CeedError, CeedUnsupportedError, Library, load

OPT = ["/cpu/self/opt/blocked", "/cpu/self/opt/serial"]

# Fused multiply-adds of AVX-512VL in machine code, as the official wheel has them.
AVX512VL = re.compile(rb"\x62[\x00-\xff]{2}[\x08\x18\x28\x38]\xb8")


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """Every test starts with an empty cache; the directory in it."""
    monkeypatch.setenv("CEEDTAP_LIBCEED", load().path)  # which may be in the cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ceedtap" / "backends"


@pytest.fixture
def trials(monkeypatch):
    """A list that gets an entry when a process for trials is started."""
    started, run = [], subprocess.run

    def noted(command, **options):
        if ceed_trial.__file__ in command:
            started.append(command)
        return run(command, **options)

    monkeypatch.setattr(ceed_backends.subprocess, "run", noted)
    return started


def other_processor(monkeypatch, directory, without=("avx512vl",), text=None):
    """Has `cpu` see this processor without some of its instruction sets, or another one."""
    if text is None:
        flags = " ".join(sorted((cpu.flags() | {"sse2", "avx", "fma", "avx2", "avx512f"}) - set(without)))
        text = f"vendor_id\t: Other\nflags\t\t: {flags}\n\n"
    file = directory / f"cpuinfo-{abs(hash(text))}"
    file.write_text(text)
    monkeypatch.setattr(cpu, "CPUINFO", file)


class TestHere:
    def test_those_of_the_tests_work(self):
        assert {"/cpu/self/ref/serial", "/cpu/self/opt/blocked"} <= set(BACKENDS)
        assert FOUND.working[0] == FASTEST

    @pytest.mark.parametrize("resource", BACKENDS)
    def test_explicit(self, resource):
        assert ct.Ceed(resource).get_resource() == resource

    def test_explicit_and_not_working(self):
        for resource in (name for name, fault in FOUND.faults.items() if fault):
            with pytest.raises(CeedUnsupportedError, match="Use '/cpu/self/"):
                ct.Ceed(resource)

    def test_single_elements(self):
        """What the trial is about: one element, all directions, on every backend that is said to work."""
        check_python("""
            import numpy as np
            from ceed_helpers import BACKENDS, array_of, vector_of
            from ceedtap import ceed as ct
            for resource in BACKENDS:
                ceed = ct.Ceed(resource)
                for dim in (1, 2, 3):
                    for ncomp in (1, 2, 3):
                        for nodes in (2, 3, 5):
                            for points in (2, 3, 4, 5):
                                basis = ceed.BasisTensorH1Lagrange(dim, ncomp, nodes, points, ct.GAUSS)
                                u, v = vector_of(ceed, np.ones(ncomp * nodes**dim)), ceed.Vector(ncomp * points**dim)
                                g = ceed.Vector(dim * ncomp * points**dim)
                                basis.apply(1, ct.EVAL_INTERP, u, v)
                                np.testing.assert_allclose(array_of(v), 1, rtol=1e-12)
                                basis.apply(1, ct.EVAL_GRAD, u, g)
                                np.testing.assert_allclose(array_of(g), 0, atol=1e-12)
                                basis.apply(1, ct.EVAL_INTERP, v, u, ct.TRANSPOSE)
                                basis.apply(1, ct.EVAL_GRAD, g, u, ct.TRANSPOSE)
        """)

    def test_trial_needs_nothing_of_ceedtap(self):
        """It starts fast: neither JAX nor numpy, nor the user's site-packages."""
        code = "import sys, runpy; sys.argv = ['x', '9', 'none']; runpy.run_path(sys.path.pop(), run_name='__main__'); "
        code += "print(sorted({'jax', 'numpy', 'cffi', 'ceedtap'} & set(sys.modules)))"
        command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({ceed_trial.__file__!r}); {code}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == "{}\n[]\n"

    def test_import_tries_nothing(self):
        check_python("""
            import ceedtap as ct
            from ceedtap import ceed_backends
            ct.Ceed, ct.Space, ct.Tap
            assert not ceed_backends._known
        """)


class TestBackendThatDies:
    def test_another_is_chosen(self, tmp_path):
        library = Library(library_that_dies(tmp_path))
        ceed = ct.Ceed("/cpu/self", library=library)
        assert ceed.get_resource() == OPT[0]
        assert set(backends(library).working) == {*OPT, "/cpu/self/ref/serial", "/cpu/self/ref/blocked"}
        mass = Mass1D(ceed, n=1)
        v = ceed.Vector(mass.lsize)
        mass.op.apply(vector_of(ceed, np.ones(mass.lsize)), v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ np.ones(mass.lsize), rtol=1e-12)

    @pytest.mark.parametrize("resource", ["/cpu/self/avx/blocked", "/cpu/self/avx/serial", "/cpu/self/avx"])
    def test_explicit(self, resource, tmp_path):
        library = Library(library_that_dies(tmp_path))
        with pytest.raises(CeedUnsupportedError) as info:
            ct.Ceed(resource, library=library)
        for text in (f"'{resource}'", "ends the process with SIGILL", f"Use '{OPT[0]}'", repr(library)):
            assert text in str(info.value)
        assert ct.Ceed("/cpu/self/ref", library=library).get_resource().startswith("/cpu/self/ref/")

    def test_family(self, tmp_path):
        """A name that stands for several backends means those of them that work."""
        library = Library(library_that_dies(tmp_path, "/opt/blocked"))
        assert ct.Ceed("/cpu/self/opt", library=library).get_resource() == "/cpu/self/opt/serial"
        with pytest.raises(CeedUnsupportedError, match="/cpu/self/opt/blocked ends the process with SIGILL"):
            ct.Ceed("/cpu/self/opt/blocked", library=library)

    @pytest.mark.parametrize(
        ("how", "text"),
        [
            ("__builtin_trap()", "SIGILL: it was compiled for another processor"),
            ("raise(SIGSEGV)", "SIGSEGV"),
            ("raise(SIGFPE)", "SIGFPE"),
            ("abort()", "SIGABRT"),
            ("_exit(3)", "ends the process with status 3"),
        ],
    )
    def test_kinds_of_deaths(self, how, text, tmp_path):
        library = Library(library_that_dies(tmp_path, "/opt", how))
        with pytest.raises(CeedUnsupportedError, match=text):
            ct.Ceed(OPT[1], library=library)
        assert ct.Ceed("/cpu/self/ref/serial", library=library).get_resource() == "/cpu/self/ref/serial"

    def test_hangs(self, tmp_path, monkeypatch, kept):
        """Not kept: a machine may be slow for once."""
        monkeypatch.setattr(ceed_trial, "LIMIT_SEC", 1)
        library = Library(library_that_dies(tmp_path, "/opt/serial", "for (;;) pause()"))
        with pytest.raises(CeedUnsupportedError, match="had not done a small piece of work after 1 s"):
            ct.Ceed(OPT[1], library=library)
        assert ct.Ceed("/cpu/self/opt", library=library).get_resource() == OPT[0]
        assert not kept.exists()

    @pytest.mark.parametrize("resource", ["/cpu/self", "/cpu/self/ref/serial", "/cpu/self/opt"])
    def test_everything_dies(self, resource, tmp_path):
        library = Library(library_that_dies(tmp_path, "/cpu"))
        assert backends(library).working == []
        with pytest.raises(CeedUnsupportedError, match=r"No backend .* works here: build libCEED on this machine"):
            ct.Ceed(resource, library=library)

    def test_by_environment(self, tmp_path):
        """The library of CEEDTAP_LIBCEED; the process that uses it lives."""
        code = """
            from ceed_helpers import BACKENDS
            from ceedtap import ceed as ct
            ceed = ct.Ceed()
            basis, u = ceed.BasisTensorH1Lagrange(3, 1, 3, 3, ct.GAUSS), ceed.Vector(27)
            u.set_value(1.0)
            basis.apply(1, ct.EVAL_INTERP, u, ceed.Vector(27))
            print(ceed.get_resource(), *BACKENDS)
        """
        out = check_python(code, CEEDTAP_LIBCEED=library_that_dies(tmp_path)).split()
        assert out[0] == OPT[0]
        assert not [name for name in out if "avx" in name]

    def test_names_that_libceed_refuses(self, tmp_path):
        """Parts of names are no backends, whatever dies."""
        for where in ("/avx", "/cpu"):
            library = Library(library_that_dies(tmp_path, where))
            for resource in ("/c", "/cpu", "/cpu/self/", "/cpu/self/a", "/cpu/self/avx/"):
                with pytest.raises(CeedError):
                    ct.Ceed(resource, library=library)

    def test_objects_of_others(self, monkeypatch):
        """Somebody else has started a backend that is going to die."""
        resource = BACKENDS[-1]
        theirs = ct.Ceed(resource)
        fault = "ends the process with SIGILL"
        monkeypatch.setitem(
            ceed_backends._known, load(), Backends({resource: fault, "/cpu/self/ref/serial": ""}, "a test")
        )
        with pytest.raises(CeedUnsupportedError, match=rf"{resource} {fault}.*Use '/cpu/self/ref/serial'"):
            ct.Ceed.wrap(theirs.address)
        other = ct.Ceed("/cpu/self/ref/serial")
        assert ct.Ceed.wrap(other.address).get_resource() == "/cpu/self/ref/serial"


class TestOtherProcessor:
    """The official wheel and an older processor."""

    def test_instructions_are_missing(self, tmp_path):
        """The wheel with an undefined instruction in place of every fused multiply-add of AVX-512VL."""
        data, count = AVX512VL.subn(b"\x0f\x0b\x90\x90\x90", Path(load().path).read_bytes())
        if not count:
            pytest.skip("this libCEED has no code for AVX-512VL")
        path = tmp_path / "libceed-old.so"
        path.write_bytes(data)
        library = Library(path)
        assert backends(library).working == [*OPT, "/cpu/self/ref/serial", "/cpu/self/ref/blocked"]
        for name in ("/cpu/self/avx/blocked", "/cpu/self/avx/serial"):
            assert "SIGILL" in backends(library).faults[name]

    @pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="qemu-x86_64 is not installed (package qemu-user)")
    def test_emulated(self, tmp_path):
        """A processor without AVX-512, by an emulator: Ceed, operators and taps of the wheel run there."""
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec qemu-x86_64 -cpu Haswell-noTSX {sys.executable} "$@" 2>/dev/null\n')
        python.chmod(0o755)
        code = f"""
import sys
sys.executable = {str(python)!r}
sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS)!r}]
from ceed_helpers import BACKENDS, FOUND, Mass1D, array_of, vector_of
import json
import numpy as np
from ceedtap import ceed as ct
for resource in ("/cpu/self", *BACKENDS):
    ceed = ct.Ceed(resource)
    for n in (1, 9):
        mass = Mass1D(ceed, n)
        u, v = vector_of(ceed, np.ones(mass.lsize)), ceed.Vector(mass.lsize)
        mass.op.apply(u, v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ np.ones(mass.lsize), rtol=1e-12)
        mass.op.linear_assemble_diagonal(v)
        np.testing.assert_allclose(array_of(v), mass.matrix.diagonal(), rtol=1e-12)
    for dim in (1, 2, 3):
        basis = ceed.BasisTensorH1Lagrange(dim, 3, 5, 5, ct.GAUSS)
        u, v = vector_of(ceed, np.ones(3 * 5**dim)), ceed.Vector(3 * 5**dim)
        basis.apply(1, ct.EVAL_INTERP, u, v)
        np.testing.assert_allclose(array_of(v), 1, rtol=1e-12)
        basis.apply(1, ct.EVAL_INTERP, v, u, ct.TRANSPOSE)
print(json.dumps([ct.Ceed("/cpu/self").get_resource(), FOUND.faults, FOUND.how]))
"""
        done = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, text=True, timeout=300)
        assert done.returncode == 0
        chosen, faults, how = json.loads(done.stdout)
        assert how == "tried in processes of their own"
        assert not faults[chosen]
        if AVX512VL.search(Path(load().path).read_bytes()):
            assert chosen == OPT[0]
            assert "SIGILL" in faults["/cpu/self/avx/blocked"]


class TestKept:
    def test_one_trial_for_all(self, tmp_path, trials):
        path = library_that_dies(tmp_path)
        found = backends(Library(path))
        assert len(trials) == 1
        assert backends(Library(path)) == found
        same = tmp_path / "copy.so"
        shutil.copy(path, same)
        assert backends(Library(same)) == found
        assert len(trials) == 1

    def test_other_library(self, tmp_path, trials):
        """The same file with other content."""
        path = library_that_dies(tmp_path)
        backends(Library(path))
        new = library_that_dies(tmp_path, "/opt")
        os.replace(new, path)
        assert OPT[0] in backends(Library(path)).faults
        assert len(trials) == 2

    def test_other_processor(self, tmp_path, trials, monkeypatch):
        """A home directory that machines share."""
        path = library_that_dies(tmp_path)
        for text in ("flags : sse2\n\n", "flags : sse2 avx\n\n", "flags : sse2\n\n"):
            other_processor(monkeypatch, tmp_path, text=text)
            backends(Library(path))
        assert len(trials) == 2

    @pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}", '{"/cpu/self/ref/serial": 0}', '{"x": "y"}'])
    def test_damaged(self, text, tmp_path, trials, kept):
        path = library_that_dies(tmp_path)
        found = backends(Library(path))
        (file,) = kept.iterdir()
        file.write_text(text)
        assert backends(Library(path)) == found
        assert len(trials) == 2

    def test_unwritable(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert ct.Ceed("/cpu/self", library=Library(library_that_dies(tmp_path))).get_resource() == OPT[0]

    def test_no_cache_directory(self, tmp_path, monkeypatch):
        def nowhere():
            raise OSError("this user has no home directory")

        monkeypatch.setattr(ceed_backends, "cache_dir", nowhere)
        assert ct.Ceed("/cpu/self", library=Library(library_that_dies(tmp_path))).get_resource() == OPT[0]

    def test_threads(self, tmp_path, trials):
        library, found = Library(library_that_dies(tmp_path)), []
        threads = [threading.Thread(target=lambda: found.append(choose(library, "/cpu/self"))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [OPT[0]] * 6
        assert len(trials) == 1

    def test_gpu_and_others_are_not_tried(self, trials):
        library = Library(load().path)
        for resource in ("/gpu/cuda/gen", "/gpu/hip", "/nope", "", "/", "/cpu/other", b"/cpu/self", None):
            assert choose(library, resource) is resource
        assert trials == []


class TestWithoutProcesses:
    """Where no process can be started, the processor's flags decide."""

    @pytest.fixture(params=["refused", "no executable", "another program", "failing program"])
    def alone(self, request, monkeypatch, tmp_path):
        if request.param == "refused":

            def refuse(*args, **options):
                raise PermissionError(1, "Operation not permitted")

            monkeypatch.setattr(ceed_backends.subprocess, "run", refuse)
        else:
            program = {"no executable": "", "another program": "/bin/true", "failing program": "/bin/false"}
            monkeypatch.setattr(sys, "executable", program[request.param])
        return Library(load().path)

    def test_older_processor(self, alone, tmp_path, monkeypatch, kept):
        other_processor(monkeypatch, tmp_path)
        assert ct.Ceed("/cpu/self", library=alone).get_resource() == OPT[0]
        with pytest.raises(CeedUnsupportedError) as info:
            ct.Ceed("/cpu/self/avx/serial", library=alone)
        for text in ("may need AVX-512VL, which this processor lacks", "by the processor's flags", f"Use '{OPT[0]}'"):
            assert text in str(info.value)
        assert not kept.exists()

    def test_newer_processor(self, alone, tmp_path, monkeypatch):
        other_processor(monkeypatch, tmp_path, text="flags : sse2 avx fma avx2 avx512f avx512vl\n\n")
        assert choose(alone, "/cpu/self") == "/cpu/self"
        assert choose(alone, "/cpu/self/avx/serial") == "/cpu/self/avx/serial"

    def test_unknown_processor(self, alone, tmp_path, monkeypatch):
        monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "none")
        assert choose(alone, "/cpu/self") == OPT[0]
        with pytest.raises(CeedUnsupportedError, match="the system does not tell whether this processor has it"):
            choose(alone, "/cpu/self/avx")
        assert choose(alone, "/cpu/self/ref") == "/cpu/self/ref"
