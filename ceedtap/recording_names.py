"""Names of recorded arrays in files of other formats, none of which can have every name."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

#: Separators of paths, what addresses of the web are encoded with, and what writers of XML may not escape.
_UNSAFE = "/\\%<>&\"'"


def distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """The names, with ``_`` after those that are taken or have been there.

    >>> distinct(["u", "step", "u"], ["step"])
    ['u', 'step_', 'u_']
    """
    seen, out = set(taken), []
    for name in names:
        while name in seen:
            name += "_"
        seen.add(name)
        out.append(name)
    return out


def of_leaf(leaf: str, tap: str) -> str:
    """The name of an array that need not have one of its own."""
    return leaf or tap or "value"


def in_files(names: Sequence[str], taken: Iterable[str], max_bytes: int | None = None) -> dict[str, str]:
    """Names for files, which `urllib.parse.unquote` makes the names again; by the names.

    What some format or file system cannot have is percent-encoded, as in addresses of the web: slashes, what is not
    printed, names of dots only, capitals where names differ in nothing else. ``_`` follows names that are taken; names
    of more than `max_bytes` are cut and end in a hash.

    >>> in_files(["vel", "vel/max", "Vel", "step", ".."], ["step"])
    {'vel': 'vel', 'vel/max': 'vel%2Fmax', 'Vel': '%56el', 'step': 'step_', '..': '%2E.'}
    """
    folded = {_folded(name) for name in taken}
    found = {}
    for name in names:
        here = _cut(quoted(name), name, max_bytes)
        if _folded(here) in folded:
            here = _cut(quoted(name, plain=False), name, max_bytes)
        while _folded(here) in folded:
            here += "_"
        folded.add(_folded(here))
        found[name] = here
    return found


def dimensions(shapes: Mapping[str, Sequence[int]], taken: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names of the dimensions of arrays by the arrays' names, other than all names there are.

    >>> dimensions({"u": (2, 3), "u_0": ()}, ["event"])
    {'u': ('u_0_', 'u_1'), 'u_0': ()}
    """
    every = [f"{name}_{axis}" for name, shape in shapes.items() for axis in range(len(shape))]
    found = iter(distinct(every, [*taken, *shapes]))
    return {name: tuple(next(found) for _ in shape) for name, shape in shapes.items()}


def quoted(name: str, plain: bool = True) -> str:
    """The name with what cannot be in all files percent-encoded; if not `plain`, capitals and accents as well."""
    # Letters whose accents could be written in another way are the same name in some formats and file systems.
    plain_letters = plain and unicodedata.normalize("NFC", name) == name
    out = [
        _encoded(c) if not c.isprintable() or c in _UNSAFE or (not plain_letters and (c.isupper() or c > "~")) else c
        for c in name
    ]
    # Hidden files, and what zarr and netCDF keep for themselves.
    if name.startswith((".", " ", "__", "_nc4_non_coord_")):
        out[0] = _encoded(name[0])
    if name.endswith((" ", ".npy")) or name == "zarr.json":
        at = -1 if name.endswith(" ") else name.rindex(".")
        out[at] = _encoded(name[at])
    return "".join(out)


def _encoded(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _cut(text: str, name: str, max_bytes: int | None) -> str:
    data = text.encode()
    if max_bytes is None or len(data) <= max_bytes:
        return text
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{data[: max_bytes - 17].decode(errors='ignore')}~{digest}"
