"""Why libCEED left an object locked for good; Python and the native handler of compiled programs share it."""

from __future__ import annotations

from typing import Any

from ceedtap.ceed_ffi import CeedAccessError
from ceedtap.ceed_object import CeedObject
from ceedtap.native import ffi


class Poisonable(CeedObject):
    """An object that libCEED can leave locked, after which it must not be used any more."""

    def _start_poison(self) -> None:
        self._native_poison: Any = ffi.new("ct_poison *")

    @property
    def poisoned(self) -> str:
        """The error after which libCEED left it locked; empty while it can be used."""
        return str(ffi.string(self._native_poison.text).decode(errors="replace"))

    def _set_poison(self, reason: str) -> None:
        text = reason.encode()[: ffi.sizeof(self._native_poison.text) - 1]
        ffi.memmove(self._native_poison.text, text + b"\0", len(text) + 1)

    def _check_poison(self) -> None:
        if self._native_poison.text[0] != b"\0":
            raise CeedAccessError(
                f"{self!r} cannot be used any more, libCEED left it locked. Poisoned by: {self.poisoned}"
            )
