"""Installing libCEED into the user's cache, from a wheel made here of the library that is at hand."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from ceedtap import ceed_ffi, install
from ceedtap.install import InstallError, install_libceed


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ceedtap" / "libceed"


@pytest.fixture
def wheel(monkeypatch):
    """Has pip find a wheel; counts how often."""
    calls = []

    def download(version, directory, timeout):
        calls.append(version)
        path = Path(directory) / f"libceed-{version}-cp311-cp311-manylinux.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(ceed_ffi.load().path, f"libceed/lib/{ceed_ffi.library_name()}")
            archive.writestr("libceed/include/ceed/types.h", "/* types */\n")
            archive.writestr("libceed/ceed.py", "")
            archive.writestr(f"libceed-{version}.dist-info/LICENSE", "licence\n")
        return path

    monkeypatch.setattr(install, "_download", download)
    return calls


def test_installs(wheel, cache):
    lines = []
    path = install_libceed(say=lines.append)
    assert path == cache / "0.12.0" / "lib" / ceed_ffi.library_name()
    assert sorted(p.name for p in (cache / "0.12.0").iterdir()) == ["LICENSE", "include", "lib"]
    assert [p.name for p in cache.iterdir()] == ["0.12.0"]
    assert ceed_ffi.Library(path).include_dir == str(path.parent.parent / "include")
    assert "downloading the official libceed 0.12.0 wheel" in lines[0]
    assert f"installed: {path}" in lines[1]


def test_second_time(wheel, cache):
    path, lines = install_libceed(say=lambda line: None), []
    assert install_libceed(say=lines.append) == path
    assert wheel == ["0.12.0"]
    assert "installed already" in lines[0]
    assert install_libceed(force=True, say=lines.append) == path
    assert wheel == ["0.12.0"] * 2
    assert path.is_file()
    assert [p.name for p in cache.iterdir()] == ["0.12.0"]


def test_damaged_installation(wheel):
    path = install_libceed(say=lambda line: None)
    path.unlink()
    path.write_text("")
    assert install_libceed(say=lambda line: None) == path
    assert ceed_ffi.Library(path).version
    assert len(wheel) == 2


@pytest.mark.parametrize("content", [None, b"no library"])
def test_bad_wheel(monkeypatch, cache, content):
    def download(version, directory, timeout):
        path = Path(directory) / "libceed.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"libceed/lib/{ceed_ffi.library_name()}" if content else "libceed/lib/x", content or b"")
        return path

    monkeypatch.setattr(install, "_download", download)
    with pytest.raises(InstallError, match=r"has no lib/|does not load here"):
        install_libceed(say=lambda line: None)
    assert list(cache.iterdir()) == []


def test_other_platform(monkeypatch):
    monkeypatch.setattr(install.platform, "machine", lambda: "riscv64")
    with pytest.raises(InstallError, match=r"no official libCEED for .*riscv64.*CEED_DIR"):
        install_libceed(say=lambda line: None)


@pytest.mark.parametrize("version", ["", "../0.12", "0.12.0 --index-url=x", "latest"])
def test_versions(version):
    with pytest.raises(InstallError, match="is no version number"):
        install_libceed(version)


def test_pip_fails(monkeypatch, cache):
    def run(command, **kwargs):
        assert "libceed==0.12.0" in command
        assert {"--no-deps", "--only-binary=:all:", "--python-version=3.11"} <= set(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")

    monkeypatch.setattr(install.subprocess, "run", run)
    with pytest.raises(InstallError, match=r"pip could not download libceed 0\.12\.0:\nERROR: no network"):
        install_libceed(say=lambda line: None)

    def hang(command, **kwargs):
        raise subprocess.TimeoutExpired(command, kwargs["timeout"])

    monkeypatch.setattr(install.subprocess, "run", hang)
    with pytest.raises(InstallError, match="within 3 s"):
        install_libceed(say=lambda line: None, timeout=3)
    assert list(cache.iterdir()) == []


def test_unwritable(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(InstallError, match="cannot install"):
        install_libceed(say=lambda line: None)
