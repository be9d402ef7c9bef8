"""Contexts of operators: fields that are read and set by name, in all parts."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from ceedtap.ceed_context import QFunctionContext, field_value
from ceedtap.ceed_object import text
from ceedtap.ceed_poison import Poisonable

_FIELD_KINDS = {1: "Double", 2: "Int32", 3: "Boolean"}
_FIELD_TYPES: dict[str, tuple[str, np.dtype]] = {
    "Double": ("double", np.dtype(np.float64)),
    "Int32": ("int32_t", np.dtype(np.int32)),
    "Boolean": ("bool", np.dtype(np.bool_)),
}


class OperatorContext(Poisonable):
    """What all operators do with the contexts of their QFunctions."""

    @abc.abstractmethod
    def _all_functions(self) -> list[Any]: ...

    @abc.abstractmethod
    def _settle(self) -> None: ...

    @property
    def context_fields(self) -> tuple[str, ...]:
        """Names of the context fields of all its parts; not known for an operator that other code made."""
        contexts = [getattr(qf, "_context", None) for qf in self._all_functions()]
        known = [context for context in contexts if isinstance(context, QFunctionContext)]
        return tuple(dict.fromkeys(name for context in known for name in context.fields))

    def _label(self, name: str) -> tuple[Any, str, int]:
        """libCEED's label of a context field, its kind and number of values; under the lock."""
        self._settle()
        self._check_poison()
        ffi, lib = self.ceed.library.ffi, self.ceed.library.lib
        label = ffi.new("CeedContextFieldLabel *")
        self._call("CeedOperatorGetContextFieldLabel", self.pointer, text("name", name), label)
        if label[0] == ffi.NULL:  # libCEED would follow it
            names = ", ".join(self.context_fields) or "none that are known"
            raise KeyError(f"{name!r}: no part of {self!r} has a context with this field; there are {names}")
        count, kind = ffi.new("size_t *"), ffi.new("CeedContextFieldType *")
        texts = ffi.new("const char *[2]")
        lib.CeedContextFieldLabelGetDescription(label[0], texts, ffi.new("size_t *"), count, texts + 1, kind)
        return label[0], _FIELD_KINDS[kind[0]], count[0]

    def get_context(self, name: str) -> Any:
        """Value of a context field: that of the first part that has it.

        Raises:
            KeyError: no context of this operator, or of its parts, has such a field.
        """
        ffi, lib = self.ceed.library.ffi, self.ceed.library.lib
        with self.ceed.lock:
            label, kind, count = self._label(name)
            ctype, dtype = _FIELD_TYPES[kind]
            size, values = ffi.new("size_t *"), ffi.new(f"const {ctype} **")
            self._call(f"CeedOperatorGetContext{kind}Read", self.pointer, label, size, values)
            data = bytes(ffi.buffer(ffi.cast("char *", values[0]), count * dtype.itemsize))
            getattr(lib, f"CeedOperatorRestoreContext{kind}Read")(self.pointer, label, values)
        array = np.frombuffer(data, dtype)
        return array[0].item() if count == 1 else array.copy()

    def set_context(self, name: str, value: Any) -> None:
        """Sets a context field by name, in all parts of the operator that have it.

        Data that libCEED has assembled is marked as out of date, unless a single operator has the value already.

        Args:
            name: of a field.
            value: a number, or an array of as many float64, integer or bool values as the field has.

        Raises:
            KeyError: no part has such a field.
            TypeError, ValueError: a value of another type or size.
        """
        with self.ceed.lock:
            label, kind, count = self._label(name)
            ctype, dtype = _FIELD_TYPES[kind]
            shape = () if count == 1 and not np.ndim(value) else (count,)
            flat = np.reshape(value, -1) if shape else value
            values = np.array(field_value(name, flat, dtype, shape), dtype).reshape(-1)
            if not hasattr(self, "sub_operators") and np.array_equal(values, self.get_context(name)):
                return
            pointer = self.ceed.library.ffi.from_buffer(f"{ctype}[]", values)
            self._call(f"CeedOperatorSetContext{kind}", self.pointer, label, pointer)
