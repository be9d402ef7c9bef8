"""The user's cache directory, and files that come into it whole."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

__all__ = ["cache_dir", "digest", "write"]


def cache_dir() -> Path:
    """The user's cache directory of ceedtap: ``$XDG_CACHE_HOME/ceedtap``, by default ``~/.cache/ceedtap``.

    Raises:
        OSError: the system knows no home directory of this user.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    if os.path.isabs(base):
        return Path(base) / "ceedtap"
    try:
        return Path.home() / ".cache" / "ceedtap"
    except RuntimeError:
        raise OSError("this user has no home directory; set XDG_CACHE_HOME to a directory for caches") from None


def digest(*parts: str | bytes) -> str:
    """Hexadecimal digits that stand for texts or bytes, each taken by itself."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()


def write(path: Path, data: bytes) -> None:
    """Writes a file so that others see all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
