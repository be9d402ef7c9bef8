"""The native part of ceedtap: `ffi` and `lib` of the cffi extension. See `ceedtap.h` for what it declares."""

from ceedtap.native._native import ffi, lib

__all__ = ["ffi", "lib"]
