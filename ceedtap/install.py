"""Brings libCEED where no wheel of it fits: the library inside the official wheel for CPython 3.11 loads anywhere."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ceedtap.cache import cache_dir
from ceedtap.ceed_ffi import Library, library_name

__all__ = ["InstallError", "install_libceed"]

VERSION = "0.12.0"
# The oldest tag first: pip takes a wheel only if one of its own tags is asked for.
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64")


class InstallError(RuntimeError):
    """libCEED could not be installed."""


def install_libceed(
    version: str = VERSION, *, force: bool = False, say: Callable[[str], object] = print, timeout: float = 600
) -> Path:
    """Downloads the official wheel of the `libceed` package and keeps its library and headers in the user's cache.

    Args:
        version: of the package; wheels exist for 0.12.0 and older.
        force: download again what is there already.
        say: gets lines about what happens.
        timeout: seconds for the download.

    Returns:
        the shared library, which :func:`ceedtap.ceed_ffi.load` finds from now on.

    Raises:
        InstallError: no wheel for this platform, no pip, no network, or not a working library; with pip's text.
    """
    if not re.fullmatch(r"\d+(\.\d+)+\w*", version, re.ASCII):
        raise InstallError(f"{version!r} is no version number")
    try:
        prefix = cache_dir() / "libceed" / version
    except OSError as error:
        raise InstallError(str(error)) from None
    library = prefix / "lib" / library_name()
    if library.is_file() and not force:
        with contextlib.suppress(OSError):
            Library(library)
            say(f"libCEED {version} is installed already: {library}")
            return library
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise InstallError(
            f"there is no official libCEED for {sys.platform} {platform.machine()}, only for Linux on x86-64. Build it "
            "from https://github.com/CEED/libCEED and set CEED_DIR to where you installed it"
        )
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=prefix.parent, prefix="download-") as directory:
            return _install(version, prefix, Path(directory), say, timeout)
    except OSError as error:
        raise InstallError(f"cannot install libCEED into {prefix}: {error}") from error


def _install(version: str, prefix: Path, directory: Path, say: Callable[[str], object], timeout: float) -> Path:
    say(f"downloading the official libceed {version} wheel (CPython 3.11, Linux x86-64) with pip")
    wheel = _download(version, directory, timeout)
    unpacked = directory / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            # lib/libceed.so and the headers; the rest is the package's Python part, which ceedtap does not use.
            if name.startswith(("libceed/lib/", "libceed/include/")) or name.endswith(("LICENSE", "NOTICE")):
                archive.extract(name, unpacked)
    new = unpacked / "libceed"
    if not (new / "lib" / library_name()).is_file():
        raise InstallError(f"{wheel.name} has no lib/{library_name()}")
    for name in ("LICENSE", "NOTICE"):
        for found in sorted(unpacked.glob(f"*.dist-info/**/{name}"))[:1]:
            shutil.copy(found, new / name)
    try:
        library = Library(new / "lib" / library_name())
    except OSError as error:
        raise InstallError(f"the library in {wheel.name} does not load here: {error}") from error
    _swap(new, prefix)
    path = prefix / "lib" / library_name()
    say(f"libCEED {library.version} ({library.scalar_dtype}) installed: {path}")
    return path


def _download(version: str, directory: Path, timeout: float) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--abi=cp311"]
    command += [f"--platform={name}" for name in PLATFORMS]
    command += [f"--dest={directory}", f"libceed=={version}"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"pip did not download libceed {version} within {timeout:g} s") from None
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode or not wheels:
        said = (result.stderr or result.stdout).strip() or f"status {result.returncode}"
        raise InstallError(f"pip could not download libceed {version}:\n{said}")
    return wheels[0]


def _swap(new: Path, prefix: Path) -> None:
    """Puts a directory in its place; whoever looks meanwhile finds the old one, the new one, or for a moment none."""
    for _ in range(10):
        try:
            os.rename(new, prefix)  # also replaces an empty directory
            return
        except OSError:
            if not prefix.is_dir():
                raise
        # A process that has the old library loaded keeps its file, which goes with the temporary directory.
        with contextlib.suppress(OSError):
            os.rename(prefix, new.parent / "old")
    raise OSError(f"another process keeps replacing {prefix}")
