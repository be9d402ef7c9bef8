"""The doctor: a healthy installation, and whatever can be broken."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
        "libCEED backends",
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
