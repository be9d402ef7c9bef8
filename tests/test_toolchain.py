"""Compiling C, and the cache of what was compiled."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from ceed_helpers import TESTS, array_of, check_python, vector_of

from ceedtap import ceed as ct
from ceedtap import cpu, toolchain
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

        monkeypatch.setattr(toolchain.subprocess, "Popen", refuse)
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
        beginning = path.read_bytes()[:100]
        os.unlink(path)  # this process has the file loaded
        path.write_bytes(beginning)
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
        with pytest.warns(UserWarning, match=rf"{file}.*Set XDG_CACHE_HOME"):
            path = compile_shared(ANSWER % 10)
        assert answer(path) == 10
        assert file not in path.parents
        assert answer(compile_shared(ANSWER % 11)) == 11  # says it once

    def test_other_processor(self, monkeypatch, tmp_path):
        """Processors that share a home directory: each has objects of its own, and finds them again."""
        paths = []
        for i, flags in enumerate(("sse2 avx2", "sse2 avx2 avx512vl", "sse2 avx2")):
            (tmp_path / str(i)).write_text(f"vendor_id : Some\nflags : {flags}\n\n")
            monkeypatch.setattr(cpu, "CPUINFO", tmp_path / str(i))
            paths.append(compile_shared(ANSWER % 12))
        assert paths[0] == paths[2] != paths[1]


# Prints the results of a compiled point function and an operator, and what was warned of.
PLAIN = """
import warnings
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
import ceedtap as ct
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    x = jnp.arange(1.0, 5.0)
    for f in (ct.pointwise(lambda x: jnp.sin(x) * x), ct.pointwise(lambda x: x**3)):
        f(x), jax.jit(jax.grad(lambda x: f(x).sum()))(x)
    np.testing.assert_allclose(f(x), x**3, rtol=1e-14)
    V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=1)
    @ct.operator(inputs={"u": V.value, "x": V.geometry.grad, "w": V.weight}, outputs={"v": V.value})
    def mass(u, x, w):
        return w * jnp.linalg.det(x) * u
    np.testing.assert_allclose(mass(jnp.ones(9), V.mesh.points).sum(), 1, rtol=1e-13)
for warning in said:
    print(str(warning.message).replace(chr(10), " "))
"""


def in_namespace(directory, options):
    """The beginning of a command that mounts a file system on a directory for one process; skips where it may not."""
    command = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} none "{directory}" && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount file systems")
    return command


COMPILERS = {
    "quotation": ("gcc '", "No closing quotation"),
    "fails": ("false", "ended with status 1"),
    "makes nothing": ("true", "made nothing"),
    "missing": ("no-such-compiler", "there is no program"),
}


class TestUnusable:
    """A compiler or a cache that is there and cannot be used."""

    @pytest.mark.parametrize("name", COMPILERS)
    def test_compiler(self, name, monkeypatch):
        cc, text = COMPILERS[name]
        monkeypatch.setenv("CC", cc)
        for _ in range(2):
            with pytest.raises(CompilerNotFound, match=rf"{text}.*CC"):
                compile_shared(ANSWER % 1)

    @pytest.mark.parametrize("name", COMPILERS)
    def test_plain_jax_where_no_compiler_works(self, name):
        cc, text = COMPILERS[name]
        (line,) = check_python(PLAIN, CC=cc, CEEDTAP_LIBCEED=ct.load().path).splitlines()
        assert "plain JAX" in line
        assert text in line
        assert "CC" in line

    def test_compiler_that_hangs(self, monkeypatch, tmp_path):
        """It is killed, and what it has started as well."""
        monkeypatch.setattr(toolchain, "SUSPICIOUS_SEC", 1.0)
        monkeypatch.setenv("CC", script(tmp_path / "cc", "#!/bin/sh\nsleep 600\necho late\n"))
        with pytest.raises(CompilerNotFound, match="had not ended after 1 s"):
            compile_shared(ANSWER % 1)

    def test_compiler_that_takes_long(self, monkeypatch, tmp_path):
        monkeypatch.setattr(toolchain, "SUSPICIOUS_SEC", 2.0)
        real = shutil.which("cc")
        text = f'#!/bin/sh\nfor a in "$@"; do grep -q slow "$a" 2>/dev/null && sleep 3; done\nexec {real} "$@"\n'
        monkeypatch.setenv("CC", script(tmp_path / "cc", text))
        assert answer(compile_shared("// slow\n" + ANSWER % 21)) == 21

    def test_fault_of_the_source(self):
        """The compiler works: its message is the user's, without a word about the cache."""
        with pytest.raises(CompileError, match="nonsense") as info:
            compile_shared("int f(void) { return nonsense; }")
        assert not isinstance(info.value, CompilerNotFound)
        with pytest.raises(CompileError, match="undefined symbol: nowhere") as info:
            compile_shared("int nowhere(void); int f(void) { return nowhere(); }")
        assert not isinstance(info.value, CompilerNotFound)

    @pytest.mark.parametrize("options", ["noexec", "size=8k", "ro"])
    def test_mounted(self, options, tmp_path):
        """A cache on a file system without programs, without room, without writing."""
        directory = tmp_path / "mounted"
        directory.mkdir()
        environment = {
            **os.environ, "XDG_CACHE_HOME": str(directory), "CEEDTAP_LIBCEED": ct.load().path,
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS))),
        }  # fmt: skip
        command = [*in_namespace(directory, options), sys.executable, "-c", PLAIN]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        assert "for this process only" in line
        assert str(directory) in line
        assert "Set XDG_CACHE_HOME" in line

    def test_no_room_for_the_compiler(self, monkeypatch, tmp_path, cache):
        """The compiler says that the disk is full, while there is room for less."""
        text = f"""#!/bin/sh
            case "$*" in *{cache}*) echo "fatal error: error writing: No space left on device" >&2; exit 1;; esac
            exec {shutil.which("cc")} "$@"
        """
        monkeypatch.setenv("CC", script(tmp_path / "cc", text))
        with pytest.warns(UserWarning, match=r"No space left on device.*Set XDG_CACHE_HOME"):
            path = compile_shared(ANSWER % 22)
        assert answer(path) == 22
        assert cache not in path.parents

    def test_no_room_for_the_note(self, monkeypatch, cache):
        """What is made can be used although the cache does not learn of it."""

        def full(path, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(toolchain, "write", full)
        path = compile_shared(ANSWER % 23)
        assert answer(path) == 23
        assert cache in path.parents

    def test_no_home_directory(self, monkeypatch):
        def nowhere():
            raise OSError("this user has no home directory, for a test")

        monkeypatch.setattr(toolchain, "cache_dir", nowhere)
        with pytest.warns(UserWarning, match=r"no home directory.*Set XDG_CACHE_HOME"):
            assert answer(compile_shared(ANSWER % 24)) == 24

    def test_no_temporary_directory(self, monkeypatch):
        """The cache is enough; the compiler's temporary files are made there."""

        def nowhere():
            raise FileNotFoundError(2, "No usable temporary directory found")

        monkeypatch.setattr(toolchain, "_temporary_dir", nowhere)
        assert answer(compile_shared(ANSWER % 25)) == 25

    def test_no_directory_at_all(self, tmp_path):
        (tmp_path / "file").write_text("")
        code = f"""
def nowhere():
    raise FileNotFoundError(2, "No usable temporary directory found")
from ceedtap import toolchain
toolchain._temporary_dir = nowhere
{PLAIN}"""
        environment = {"XDG_CACHE_HOME": str(tmp_path / "file"), "CEEDTAP_LIBCEED": ct.load().path}
        (line,) = check_python(code, **environment).splitlines()
        assert "plain JAX" in line
        for text in (str(tmp_path / "file"), "No usable temporary directory", "XDG_CACHE_HOME or TMPDIR"):
            assert text in line


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
