"""Compiling C, and the cache of what was compiled."""

import ctypes
import os
import shutil
import stat
import sys
import threading
import time

import numpy as np
import pytest
from ceed_helpers import array_of, check_python, vector_of

from ceedtap import ceed as ct
from ceedtap import toolchain
from ceedtap.toolchain import CompileError, CompilerNotFound, compile_shared, find_compiler

ANSWER = "int answer(void) { return %d; }\n"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Every test starts with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ceedtap" / "objects"


def answer(path):
    return ctypes.CDLL(str(path)).answer()


def script(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class TestCompiler:
    def test_found(self):
        compiler = find_compiler()
        assert os.path.isabs(compiler.command[0])
        assert compiler.command[0] in compiler.identity

    def test_cc(self, monkeypatch, tmp_path):
        marker = tmp_path / "called"
        wrapper = script(tmp_path / "my cc", f'#!/bin/sh\necho x >> {marker}\nexec {shutil.which("cc")} "$@"\n')
        monkeypatch.setenv("CC", f"'{wrapper}' -O1")
        assert find_compiler().command == (wrapper, "-O1")
        assert answer(compile_shared(ANSWER % 17)) == 17
        assert marker.exists()

    def test_cc_is_nothing(self, monkeypatch):
        monkeypatch.setenv("CC", "no-such-compiler -m64")
        with pytest.raises(CompilerNotFound, match="there is no program 'no-such-compiler'; unset CC"):
            compile_shared(ANSWER % 1)

    def test_none(self, monkeypatch, tmp_path):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(CompilerNotFound, match=r"no C compiler.*pip install ziglang"):
            find_compiler()

    def test_ziglang(self, monkeypatch, tmp_path):
        """The package is used as `python -m ziglang cc`; here a stand-in that calls the real compiler."""
        package = tmp_path / "ziglang"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "zig").write_text("")
        real = shutil.which("cc")
        main = f"import os, sys\nassert sys.argv[1] == 'cc'\nos.execv({real!r}, [{real!r}, *sys.argv[2:]])\n"
        (package / "__main__.py").write_text(main)
        path = os.environ["PATH"]
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        compiler = find_compiler()
        assert compiler.command == (sys.executable, "-m", "ziglang", "cc")
        monkeypatch.setenv("PATH", path)
        assert answer(compile_shared(ANSWER % 18, compiler=compiler)) == 18

    def test_march_refused(self, monkeypatch, tmp_path):
        """A compiler that does not know -march=native is asked again without."""
        text = f"""#!/bin/sh
            for a in "$@"; do
              case "$a" in -march=*) echo "error: unsupported argument to -march=" >&2; exit 1;; esac
            done
            exec {shutil.which("cc")} "$@"
        """
        monkeypatch.setenv("CC", script(tmp_path / "cc", text))
        assert answer(compile_shared(ANSWER % 19)) == 19

    def test_cannot_run(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CC", script(tmp_path / "cc", "#!/no/such/interpreter\n"))
        with pytest.raises(CompileError, match="cannot run"):
            compile_shared(ANSWER % 1)


class TestErrors:
    def test_message(self):
        with pytest.raises(CompileError, match=r"my file\.c:12:.*nonsense") as info:
            compile_shared('#line 12 "my file.c"\nint f(void) { return nonsense; }\n')
        assert "-O3" in info.value.command
        assert info.value.message == str(info.value)

    def test_language_is_english_and_quiet(self, capfd):
        with pytest.raises(CompileError, match="error:"):
            compile_shared("int f(")
        compile_shared("int f(void) { int unused; return 0; }")
        assert capfd.readouterr() == ("", "")

    def test_nothing_stays_behind(self, cache):
        with pytest.raises(CompileError):
            compile_shared("int f(")
        assert list(cache.iterdir()) == []


class TestCache:
    def test_hit_needs_no_compiler(self, monkeypatch):
        first = compile_shared(ANSWER % 1)

        def refuse(*args, **kwargs):
            raise AssertionError("the compiler was started")

        monkeypatch.setattr(toolchain.subprocess, "run", refuse)
        start = time.perf_counter()
        assert compile_shared(ANSWER % 1) == first
        assert time.perf_counter() - start < 0.1
        with pytest.raises(AssertionError):
            compile_shared(ANSWER % 2)

    def test_key(self, tmp_path):
        paths = {
            compile_shared(ANSWER % 1),
            compile_shared(ANSWER % 1, flags=["-g"]),
            compile_shared(ANSWER % 1, include_dirs=[str(tmp_path)]),
            compile_shared(ANSWER % 2),
        }
        assert len(paths) == 4

    def test_damaged_object(self):
        path = compile_shared(ANSWER % 3)
        path.write_bytes(path.read_bytes()[:100])
        assert answer(compile_shared(ANSWER % 3)) == 3
        os.unlink(path)
        assert answer(compile_shared(ANSWER % 3)) == 3

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"object": 5, "digest": "", "headers": {}}', "null"])
    def test_damaged_manifest(self, cache, text):
        compile_shared(ANSWER % 4)
        (manifest,) = cache.glob("*.json")
        manifest.write_text(text)
        assert answer(compile_shared(ANSWER % 4)) == 4

    def test_headers(self, tmp_path):
        folder = tmp_path / "with space"
        folder.mkdir()
        source = '#include "value.h"\nint answer(void) { return VALUE; }\n'
        for value in (5, 6, 5):
            (folder / "value.h").write_text(f"#define VALUE {value}\n")
            # A loaded file of the same name would be found in memory: names differ by content.
            assert answer(compile_shared(source, include_dirs=[str(folder)])) == value

    def test_two_programs_of_one_source_stay_loaded(self):
        loaded = [ctypes.CDLL(str(compile_shared(ANSWER % n))) for n in (1, 2, 1)]
        assert [library.answer() for library in loaded] == [1, 2, 1]

    def test_threads(self, cache):
        found, threads = [], []
        for _ in range(6):
            threads.append(threading.Thread(target=lambda: found.append(answer(compile_shared(ANSWER % 7)))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [7] * 6
        assert {path.suffix for path in cache.iterdir()} == {".so", ".json"}

    def test_processes(self):
        check_python("""
            import ctypes, subprocess, sys
            code = "import ctypes; from ceedtap.toolchain import compile_shared as c; "
            code += "print(ctypes.CDLL(str(c('int answer(void) { return 8; }'))).answer())"
            children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
            assert [child.communicate()[0] for child in children] == [b"8\\n"] * 4
        """)

    def test_killed_compiler(self, monkeypatch, tmp_path, cache):
        """A compiler that dies half way leaves nothing that is taken for a result."""
        text = '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && printf half > "$2"; shift; done\nkill -9 $$\n'
        with monkeypatch.context() as context:
            context.setenv("CC", script(tmp_path / "cc", text))
            with pytest.raises(CompileError, match="ended with status -9"):
                compile_shared(ANSWER % 9)
        assert answer(compile_shared(ANSWER % 9)) == 9

    def test_unwritable(self, monkeypatch, tmp_path):
        """Without a cache directory results live as long as the process."""
        file = tmp_path / "file"
        file.write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(file))
        path = compile_shared(ANSWER % 10)
        assert answer(path) == 10
        assert file not in path.parents


class TestWithoutHeaders:
    def test_own_prelude(self, tmp_path):
        """A libCEED whose headers are not beside it."""
        copy = shutil.copy(ct.Ceed().library.path, tmp_path / "libceed-alone.so")
        library = ct.Library(copy)
        assert library.include_dir is None
        ceed = ct.Ceed("/cpu/self/ref/serial", library=library)
        source = """
            #include <ceed/types.h>
            #ifndef CEED_RUNNING_JIT_PASS
            #include <math.h>
            #endif
            CEED_QFUNCTION_HELPER CeedScalar half(const CeedScalar x) { return x / 2; }
            CEED_QFUNCTION(root)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
              CeedPragmaSIMD for (CeedInt i = 0; i < Q; i++) out[0][i] = half(sqrt(in[0][i]));
              return 0;
            }"""
        fields = ("u", 1, ct.EVAL_NONE), ("v", 1, ct.EVAL_NONE)
        qf = ct.QFunction.from_source(ceed, source, "root", [fields[0]], [fields[1]])
        v = ceed.Vector(2)
        qf.apply(2, [vector_of(ceed, [16.0, 36.0])], [v])
        np.testing.assert_array_equal(array_of(v), [2, 3])
