"""The backends that are compiled into a libCEED."""

from __future__ import annotations

from ceedtap.ceed_ffi import Library, check

_MOST = 256  # libCEED has room for 32


def registry_get_list(library: Library) -> list[str]:
    """Names of the backends that are compiled into a libCEED.

    libCEED's function writes the i-th name through the i-th pointer of what is meant to be one pointer to a list
    (``*resources[i]`` for ``(*resources)[i]``, up to 2026). So it gets as many pointers as it can use.

    >>> from ceedtap.ceed_ffi import load
    >>> "/cpu/self/ref/serial" in registry_get_list(load())
    True
    """
    ffi = library.ffi
    count, cells, pointers = ffi.new("size_t *"), ffi.new("char *[]", _MOST), ffi.new("char **[]", _MOST)
    for i in range(1, _MOST):
        pointers[i] = cells + i
    check(library.lib.CeedRegistryGetList(count, pointers, ffi.NULL), "CeedRegistryGetList", ffi.NULL, library)
    spread = [cells[i] for i in range(1, _MOST) if cells[i] != ffi.NULL]
    listed = pointers[0]  # the list, of which only the first entry is there when the others went elsewhere
    names = [listed[i] for i in range(count[0] - len(spread))] + spread
    texts = [ffi.string(name).decode() for name in names]
    library.lib.free(listed)
    return sorted(texts)
