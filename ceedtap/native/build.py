"""Builder of the native extension `ceedtap.native._native` (cffi, API mode, limited API: one file for every Python)."""

import importlib.util
import re
from pathlib import Path

import cffi

HERE = Path("ceedtap/native")  # builds run in the project's root, and setuptools wants relative source paths
SOURCES = ["lock.c", "registry.c", "queue.c", "tap.c", "call.c", "operator.c", "pointwise.c", "crc.c", "signals.c"]


def xla_headers() -> str:
    """Directory of the XLA FFI headers in the jaxlib of the build environment; found without importing jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("building ceedtap needs the XLA FFI headers of jaxlib==0.10.2; `pip install .` brings it")
    return str(Path(spec.submodule_search_locations[0]) / "include")


def declarations() -> str:
    """The part of ceedtap.h that Python sees."""
    text = (HERE / "ceedtap.h").read_text(encoding="utf-8")
    match = re.search(r"/\* CDEF BEGIN \*/(.*)/\* CDEF END \*/", text, re.DOTALL)
    assert match is not None
    return match.group(1)


builder = cffi.FFI()
builder.cdef(declarations())
builder.set_source(
    "ceedtap.native._native",
    '#include "ceedtap.h"',
    sources=[str(HERE / name) for name in SOURCES],
    depends=[str(HERE / name) for name in ("ceedtap.h", "frame.h", "queue.h", "signals.h", "xla_ffi.h")],
    include_dirs=[str(HERE), xla_headers()],
    extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
)
