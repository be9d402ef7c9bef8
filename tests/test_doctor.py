"""The doctor: a healthy installation, and whatever can be broken."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ceed_helpers import library_that_dies

import ceedtap
from ceedtap import doctor, toolchain


def by_name(names=tuple(doctor.CHECKS)):
    return {finding.name: finding for finding in doctor.findings(names)}


def test_healthy_installation():
    found = by_name()
    assert [finding.name for finding in found.values() if finding.status == doctor.PROBLEM] == []
    for name in (
        "Python",
        "ceedtap",
        "JAX",
        "native part",
        "JAX interface",
        "libCEED",
        "processor",
        "libCEED backends",
        "C compiler",
        "cache",
        "trial run",
    ):
        assert found[name].status == doctor.OK, found[name]
    assert "/cpu/self/ref/serial" in found["libCEED backends"].detail
    assert "float64" in found["libCEED"].detail
    assert "meshio (optional)" in found


def test_command_of_a_healthy_installation():
    done = subprocess.run([sys.executable, "-m", "ceedtap", "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All that ceedtap needs is there" in done.stdout
    assert "PROBLEM" not in done.stdout
    assert "\x1b" not in done.stdout  # no colours outside of a terminal


def test_colours_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    finding = doctor.Finding("libCEED", doctor.PROBLEM, "not found", "ceedtap install-libceed")
    monkeypatch.setattr(doctor, "findings", lambda: iter([finding]))
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    assert doctor.main(stream) == 1
    assert "\x1b[1;31mPROBLEM" in stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    assert doctor.main(stream) == 1
    assert "\x1b" not in stream.getvalue()


def test_library_that_is_none(tmp_path, monkeypatch):
    path = tmp_path / "libceed.so"
    path.write_text("not a library")
    monkeypatch.setenv("CEEDTAP_LIBCEED", str(path))
    stream = io.StringIO()
    assert doctor.main(stream) == 1
    lines = stream.getvalue().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("PROBLEM  libCEED "))
    assert str(path) in lines[at]
    assert "fix: unset CEEDTAP_LIBCEED" in lines[at + 1]
    assert "ceedtap install-libceed" in lines[at + 1]
    assert any(line.startswith("PROBLEM  trial run") for line in lines)
    assert any(line.startswith("ok       native part") for line in lines)  # the rest is looked at all the same


@pytest.mark.parametrize(("body", "how"), [("abort();", "SIGABRT"), ("exit(3);", "status 3")])
def test_library_that_kills_the_process(body, how, tmp_path, monkeypatch):
    source = f"#include <stdlib.h>\n__attribute__((constructor)) static void start(void) {{ {body} }}\n"
    library = tmp_path / "libceed.so"
    command = toolchain.find_compiler().command
    subprocess.run([*command, "-shared", "-fPIC", "-xc", "-", "-o", library], input=source, text=True, check=True)
    monkeypatch.setenv("CEEDTAP_LIBCEED", str(library))
    found = by_name(["libCEED", "optional packages"])
    assert found["libCEED"].status == doctor.PROBLEM
    assert how in found["libCEED"].detail
    assert "unset CEEDTAP_LIBCEED" in found["libCEED"].fix
    assert "meshio (optional)" in found  # checks after the one that died


def test_library_that_hangs(tmp_path, monkeypatch):
    source = "#include <unistd.h>\n__attribute__((constructor)) static void start(void) { sleep(60); }\n"
    library = tmp_path / "libceed.so"
    command = toolchain.find_compiler().command
    subprocess.run([*command, "-shared", "-fPIC", "-xc", "-", "-o", library], input=source, text=True, check=True)
    monkeypatch.setenv("CEEDTAP_LIBCEED", str(library))
    monkeypatch.setattr(doctor, "TIMEOUT_SEC", 5.0)
    found = by_name(["libCEED"])
    assert "had not ended after 5 s" in found["libCEED"].detail


def test_compiler_is_optional(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    (finding,) = by_name(["C compiler"]).values()
    assert finding.status == doctor.NOTE
    assert "no-such-compiler" in finding.detail
    assert finding.fix


@pytest.mark.parametrize("cc", ["false", "true", "gcc '"])
def test_compiler_that_does_not_work(cc, monkeypatch):
    """A function is compiled, loaded and run to find out; the work can be done without."""
    monkeypatch.setenv("CC", cc)
    found = by_name(["C compiler", "trial run"])
    assert found["C compiler"].status == doctor.NOTE
    assert "plain JAX" in found["C compiler"].detail
    assert found["C compiler"].fix.startswith("unset CC")
    assert found["trial run"].status == doctor.OK


def test_cache_that_cannot_be_used(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = by_name(["C compiler"])
    assert found["C compiler"].status == doctor.OK
    assert found["cache"].status == doctor.NOTE
    assert str(tmp_path / "file") in found["cache"].detail
    assert "XDG_CACHE_HOME" in found["cache"].fix


def test_no_temporary_directory(monkeypatch):
    def nowhere(*args, **options):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", nowhere)
    assert by_name(["Python"])["Python"].status == doctor.OK


def test_backends_that_do_not_work(monkeypatch, tmp_path):
    """Which, why, and what to use instead; the work can be done with the others."""
    monkeypatch.setenv("CEEDTAP_LIBCEED", library_that_dies(tmp_path))
    found = list(doctor.findings(["libCEED", "trial run"]))
    (backends,) = (finding for finding in found if finding.name == "libCEED backends")
    assert backends.status == doctor.OK
    assert "avx" not in backends.detail
    dead = [finding for finding in found if finding.name == "libCEED backend"]
    assert {finding.detail.split()[0] for finding in dead} == {"/cpu/self/avx/blocked", "/cpu/self/avx/serial"}
    for finding in dead:
        assert finding.status == doctor.NOTE
        assert "SIGILL" in finding.detail
        assert finding.fix.startswith('use "/cpu/self/opt/blocked"')
    assert found[-1].status == doctor.OK


def test_no_backend_works(monkeypatch, tmp_path):
    monkeypatch.setenv("CEEDTAP_LIBCEED", library_that_dies(tmp_path, "/cpu"))
    found = by_name(["libCEED"])
    assert found["libCEED backends"].status == doctor.PROBLEM
    assert "CEEDTAP_LIBCEED" in found["libCEED backends"].fix


def test_package_without_its_native_part(tmp_path):
    """The doctor starts where the rest does not."""
    package = tmp_path / "ceedtap"
    shutil.copytree(Path(ceedtap.__file__).parent, package, ignore=shutil.ignore_patterns("_native*", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "ceedtap", "doctor"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    lines = {line[9:31].strip(): line[:9].strip() for line in done.stdout.splitlines()}
    assert lines["ceedtap"] == lines["JAX"] == "ok"
    assert lines["native part"] == lines["trial run"] == "PROBLEM"
    assert "pip install" in done.stdout


def test_jax_that_does_not_import(tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise ImportError('jaxlib is too old')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = by_name(["JAX", "trial run"])
    assert found["JAX"].status == doctor.PROBLEM
    assert "jaxlib is too old" in found["JAX"].detail
    assert found["JAX"].fix.startswith("pip install")
    assert found["trial run"].status == doctor.PROBLEM


@pytest.mark.skipif(not os.environ.get("CEEDTAP_TEST_FP32"), reason="names no libCEED in single precision")
def test_single_precision():
    """A libCEED in single precision does the same work."""
    environment = {**os.environ, "CEEDTAP_LIBCEED": os.environ["CEEDTAP_TEST_FP32"]}
    command = [sys.executable, "-m", "ceedtap", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "float32" in done.stdout
    assert "an embedded operator ran" in done.stdout
