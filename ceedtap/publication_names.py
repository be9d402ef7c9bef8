"""Where the sockets of publications are. Nothing here needs JAX."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def directory() -> str:
    """Where the sockets of this user are; it is made when it is not there.

    Raises:
        PermissionError: it belongs to somebody else, or others may write to it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = os.path.join(runtime, "ceedtap") if runtime else f"{tempfile.gettempdir()}/ceedtap-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} must be a directory that only this user can write to; set XDG_RUNTIME_DIR")
    return path


def socket_path(name: str) -> str:
    """The socket of a name.

    Raises:
        ValueError: no such name is possible.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a name has up to 64 letters, digits and (not as the first) ., _, -; got {name!r}")
    path = os.path.join(directory(), f"{name}.sock")
    if len(path.encode()) > 100:
        raise ValueError(f"the path of the socket is too long, {path}; set XDG_RUNTIME_DIR to a shorter one")
    return path


def published() -> list[str]:
    """Names that have a socket, of which the process may have been killed."""
    return sorted(entry.removesuffix(".sock") for entry in os.listdir(directory()) if entry.endswith(".sock"))
