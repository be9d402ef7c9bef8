"""The cache directory, and files that come into it whole; what the processor is."""

import os
import threading

import pytest
from ceed_helpers import check_python

from ceedtap import cache, cpu
from ceedtap.ceed_ffi import load


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / "ceedtap"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "ceedtap"


def test_no_home_directory(monkeypatch):
    """Neither $HOME nor an entry in the list of users."""
    import pwd

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(OSError, match="no home directory; set XDG_CACHE_HOME"):
        cache.cache_dir()


def test_all_goes_without_a_home_directory():
    """libCEED starts; the cache command says what is missing."""
    out = check_python(
        """
        import pwd
        def nobody(uid):
            raise KeyError(uid)
        pwd.getpwuid = nobody
        from ceedtap import cli, install
        from ceedtap.ceed import Ceed
        assert Ceed("/cpu/self").Vector(3).get_length() == 3
        import contextlib, io
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert cli.main(["cache", "info"]) == 1
        print(said.getvalue())
        try:
            install.install_libceed()
        except install.InstallError as error:
            print(error)
        """,
        HOME=None,
        XDG_CACHE_HOME=None,
        CEEDTAP_LIBCEED=load().path,
    )
    assert out.count("set XDG_CACHE_HOME") == 2


def test_digest_takes_parts_by_themselves():
    assert cache.digest("ab", "c") != cache.digest("a", "bc") != cache.digest("abc")
    assert cache.digest("a") == cache.digest(b"a")


def test_write(tmp_path):
    """Readers see the old content or the new one."""
    path = tmp_path / "a" / "b"
    contents = [bytes([i]) * 100_000 for i in range(4)]
    cache.write(path, contents[0])
    threads = [threading.Thread(target=cache.write, args=(path, content)) for content in contents * 5]
    for thread in threads:
        thread.start()
        assert path.read_bytes() in contents
    for thread in threads:
        thread.join()
    assert [file.name for file in path.parent.iterdir()] == ["b"]


def test_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        cache.write(tmp_path / "a", b"text")
    assert list(tmp_path.iterdir()) == []


X86 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 33
model name\t: AMD Ryzen
cpu MHz\t\t: 3393.623
flags\t\t: fpu sse sse2 avx fma avx2
bogomips\t: 6787.24

processor\t: 1
flags\t\t: other
"""
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\n"


class TestProcessor:
    def use(self, monkeypatch, tmp_path, text):
        file = tmp_path / f"cpuinfo {hash(text)}"
        file.write_text(text)
        monkeypatch.setattr(cpu, "CPUINFO", file)
        return cpu.identity()

    def test_flags(self, monkeypatch, tmp_path):
        self.use(monkeypatch, tmp_path, X86)
        assert cpu.flags() == {"fpu", "sse", "sse2", "avx", "fma", "avx2"}
        self.use(monkeypatch, tmp_path, ARM)
        assert cpu.flags() == {"fp", "asimd", "sve"}

    def test_identity(self, monkeypatch, tmp_path):
        """Changes with what `native` means to a compiler, and with nothing that changes by itself."""
        first = self.use(monkeypatch, tmp_path, X86)
        for old, new, same in (
            ("3393.623", "800.1", True),
            ("flags\t\t: other", "flags\t\t: another", True),
            ("fma avx2", "fma avx2 avx512f", False),
            ("cpu family\t: 25", "cpu family\t: 26", False),
            ("model\t\t: 33", "model\t\t: 34", False),
            ("AuthenticAMD", "GenuineIntel", False),
        ):
            assert old in X86
            assert (self.use(monkeypatch, tmp_path, X86.replace(old, new)) == first) is same, old
        arm = self.use(monkeypatch, tmp_path, ARM)
        assert self.use(monkeypatch, tmp_path, ARM.replace("0xd40", "0xd4f")) != arm
        assert self.use(monkeypatch, tmp_path, ARM.replace(" sve", "")) != arm

    def test_unknown(self, monkeypatch, tmp_path):
        """Then every machine has its own."""
        monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "none")
        assert cpu.flags() == frozenset()
        monkeypatch.setattr(cpu.platform, "node", lambda: "one")
        first = cpu.identity()
        monkeypatch.setattr(cpu.platform, "node", lambda: "two")
        assert cpu.identity() != first

    def test_here(self):
        """The system tells, on Linux."""
        if os.path.exists("/proc/cpuinfo"):
            assert len(cpu.identity().splitlines()) > 2
