"""QFunctions of libCEED's gallery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ceedtap.ceed_constants import EvalMode
from ceedtap.ceed_context import QFunctionContext
from ceedtap.ceed_ffi import CeedAccessError, CeedError, CeedIncompatibleError, CeedIncompleteError
from ceedtap.ceed_object import enum, integer, text
from ceedtap.ceed_qfunction import OpenQFunction, QFunctionField, _QFunction

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed

# Names whose C function is called otherwise.
_KERNELS = {"Identity to scalar": "IdentityScalar", "Scale (scalar)": "ScaleScalar"}
# Those that leave their fields to the user: how many inputs they have, and whether they read a context.
_OPEN = {"Identity to scalar": (1, False), "Scale": (2, True), "Scale (scalar)": (2, True)}


class QFunctionByName(OpenQFunction):
    """A QFunction of libCEED's gallery; made by :meth:`ceedtap.Ceed.QFunctionByName`.

    Args:
        name: for example ``"MassApply"`` or ``"Poisson3DBuild"``.

    Raises:
        CeedError: the gallery has no QFunction of this name.

    >>> import ceedtap as ct
    >>> ct.Ceed("/cpu/self").QFunctionByName("MassApply")
    <QFunctionByName MassApply (u, qdata) -> (v)>

    A few leave their fields to the user, who adds them: ``"Scale"``, which multiplies its ``input`` of any size by its
    ``scale`` of the same size; from libCEED 1.0 on ``"Scale (scalar)"``, whose ``scale`` is of size 1, and
    ``"Identity to scalar"``, whose ``output`` is the first component of its ``input``. Their context is
    made here, unless it is set.

    >>> scale = ct.Ceed("/cpu/self").QFunctionByName("Scale")
    >>> scale.add_input("input", 3, ct.EVAL_NONE)
    >>> scale.add_input("scale", 3, ct.EVAL_NONE)
    >>> scale.add_output("output", 3, ct.EVAL_INTERP)
    """

    def __init__(self, ceed: Ceed, name: str) -> None:
        wanted = text("name", name)
        self._start()
        self.name = name
        ffi = ceed.library.ffi

        def create(handle: Any) -> None:
            try:
                ceed._call("CeedQFunctionCreateInteriorByName", ceed.pointer, wanted, handle)
            except CeedError as error:
                shown = name if len(name) < 100 else name[:100] + "..."
                raise CeedError.from_code(error.code, f"{shown!r}: {error.message}", error.function) from None
            # libCEED takes the name with the longest common beginning, "M" for any that begins with it.
            kernel = ffi.new("const char **")
            ceed._call("CeedQFunctionGetKernelName", handle[0], kernel)
            found = ffi.string(kernel[0]).decode() if kernel[0] != ffi.NULL else name
            if found != _KERNELS.get(name, name):
                ceed.library.lib.CeedQFunctionDestroy(handle)
                raise CeedError(f"libCEED's gallery has no QFunction {name!r}; the nearest name is {found!r}", code=-3)

        self._own(ceed, "CeedQFunction", create)
        if name not in _OPEN:  # reading the fields lets nobody add more, in 0.12
            self._read_fields()

    def _add(self, function: str, fields: dict[str, QFunctionField], fieldname: str, size: int, emode: int) -> None:
        if self.name not in _OPEN:
            advice = "; use IdentityQFunction" if self.name == "Identity" else ""
            raise CeedAccessError(f"{self!r}: its fields come from libCEED's gallery{advice}")
        super()._add(function, fields, fieldname, size, emode)

    def set_context(self, ctx: QFunctionContext) -> None:
        """Sets the context of a QFunction that leaves its fields to the user: one int32, the size of the input."""
        if self.name not in _OPEN:
            raise CeedAccessError(f"{self!r}: libCEED's gallery has no use for a context here")
        super().set_context(ctx)

    def _check_usable(self) -> None:
        if self.name in _OPEN and not self._frozen:
            self._check_open()
        super()._check_usable()

    def _check_open(self) -> None:
        """That the code of the gallery finds the fields and the context that it reads without asking."""
        num_inputs, has_context = _OPEN[self.name]
        sizes = [field.size for field in self.fields.values()]
        if (len(self._inputs), len(self._outputs)) != (num_inputs, 1):
            raise CeedIncompleteError(f"{self!r} needs {num_inputs} input(s) and one output; use add_input, add_output")
        wanted = {
            "Scale": [sizes[0]] * 3,
            "Scale (scalar)": [sizes[0], 1, sizes[0]],
            "Identity to scalar": [sizes[0], 1],
        }[self.name]
        if sizes != wanted:
            raise CeedIncompatibleError(f"{self!r} needs fields of sizes {wanted}, has {sizes}")
        if not has_context:
            return
        if self._context is None:
            context = QFunctionContext(self.ceed)
            context.set_data(np.array([sizes[0]], np.int32))
            self.set_context(context)
        assert self._context is not None
        self._context._check_ready()
        data = self._context.get_data()
        if data.dtype != np.int32 or data.reshape(-1).tolist() != [sizes[0]]:
            raise CeedIncompatibleError(
                f"{self!r} reads the size of its input, {sizes[0]}, from its context as one int32, got {data!r}"
            )


class IdentityQFunction(_QFunction):
    """The QFunction that copies its ``input`` to its ``output``; made by :meth:`ceedtap.Ceed.IdentityQFunction`.

    Args:
        size: values per quadrature point.
        inmode, outmode: evaluation modes of the fields.
    """

    def __init__(self, ceed: Ceed, size: int, inmode: int, outmode: int) -> None:
        size = integer("size", size, 1)
        modes = enum("inmode", inmode, EvalMode), enum("outmode", outmode, EvalMode)
        if EvalMode.WEIGHT in modes:
            raise ValueError("an identity QFunction has no use for EVAL_WEIGHT")
        self._start()
        self.name = "Identity"

        def create(handle: Any) -> None:
            ceed._call("CeedQFunctionCreateIdentity", ceed.pointer, size, *modes, handle)

        self._own(ceed, "CeedQFunction", create)
        self._read_fields()
