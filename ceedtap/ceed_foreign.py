"""Objects that other code in the process made: of the `libceed` package, or given by their addresses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ceedtap.ceed_constants import MEM_HOST
from ceedtap.ceed_ffi import (
    CeedAccessError,
    CeedIncompatibleError,
    CeedIncompleteError,
    Library,
    load,
    lock_of,
    root_of,
)
from ceedtap.ceed_object import CeedObject, aligned_zeros
from ceedtap.ceed_qfunction import _QFunction
from ceedtap.ceed_vector import Vector

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed
    from ceedtap.ceed_operator import Operator

_WORDS = {
    "CeedVector": "a vector",
    "CeedElemRestriction": "an element restriction",
    "CeedBasis": "a basis",
    "CeedQFunction": "a QFunction",
    "CeedOperator": "an operator",
    "Ceed": "a Ceed",
}


class Found(NamedTuple):
    """A foreign object: its handle, the Ceed that it belongs to, and what makes the reference that is ours."""

    pointer: Any
    ceed: Ceed
    create: Callable[[Any], None]


def find(obj: Any, ceed: Ceed | None, kind: str, own: bool) -> Found:
    """Looks up an object of the `libceed` package, or an address.

    Args:
        obj: the object, or its address as an integer.
        ceed: the Ceed that an address belongs to.
        kind: C type, for example ``"CeedVector"``.
        own: the caller's reference becomes ours; else we take one of our own.

    Raises:
        TypeError, ValueError: not such an object.
        CeedIncompatibleError: it was made by another libCEED than ceedtap's, or belongs to another Ceed.
    """
    library = load() if ceed is None else ceed.library
    address = address_of(obj, ceed, kind, own, library)
    ffi = library.ffi
    pointer = ffi.cast(kind, address)
    root = _root(library, pointer, kind)
    with lock_of(root, ffi):
        if ceed is None:
            from ceedtap.ceed import Ceed

            ceed = Ceed._wrap(library, root)
        elif ceed.pointer != root:
            raise CeedIncompatibleError(
                f"obj: the {_WORDS[kind].split(maxsplit=1)[1]} does not belong to the {ceed!r} that was given, but to "
                "another"
            )
    known: Ceed = ceed

    def create(box: Any) -> None:
        if own:
            box[0] = pointer
        else:
            known._call(f"{kind}ReferenceCopy", pointer, box)

    return Found(pointer, known, create)


def address_of(obj: Any, ceed: Any, kind: str, own: bool, library: Library) -> int:
    """Address of a foreign object."""
    word = _WORDS[kind]
    if isinstance(obj, CeedObject) and obj._kind == kind:
        raise TypeError(f"obj: {obj!r} is ceedtap's own; use it as it is")
    if isinstance(obj, int) and not isinstance(obj, bool):
        if ceed is None:
            raise TypeError("obj: an address comes with the Ceed that it belongs to")
        if obj <= 0 or obj % 8:
            raise ValueError(f"obj: {obj} is no address")
        return obj
    binding = sys.modules.get("_ceed_cffi")
    box = getattr(obj, "_pointer", None)
    if binding is None or not type(obj).__module__.startswith("libceed") or box is None:
        raise TypeError(f"obj: expected {word} of ceedtap or of the libceed package, got {type(obj).__name__}")
    if binding.ffi.typeof(box).cname != f"struct {kind}_private * *":
        raise TypeError(f"obj: expected {word}, got {type(obj).__module__}.{type(obj).__qualname__}")
    if own:
        raise ValueError("own: an object of the libceed package keeps its own reference; use own=False")

    def address(ffi: Any, pointer: Any) -> int:
        return int(ffi.cast("uintptr_t", pointer))

    # A constant of the library has one address per copy of it in the process.
    if address(binding.ffi, binding.lib.CEED_VECTOR_ACTIVE) != address(library.ffi, library.lib.CEED_VECTOR_ACTIVE):
        raise CeedIncompatibleError(
            f"obj: {word} that lives in another libCEED than the one that ceedtap opened, {library.path}; unset "
            "CEEDTAP_LIBCEED and CEED_DIR, or point CEEDTAP_LIBCEED at the libceed package's own library"
        )
    if box[0] == binding.ffi.NULL:
        raise ValueError("obj: it has been destroyed")
    return address(binding.ffi, box[0])


def _root(library: Library, pointer: Any, kind: str) -> Any:
    """The root of the Ceed tree of an object, borrowed."""
    box = library.ffi.new("Ceed *")
    rc = getattr(library.lib, f"{kind}GetCeed")(pointer, box)
    if rc or box[0] == library.ffi.NULL:
        raise CeedIncompatibleError(f"obj: libCEED does not know the Ceed of the {kind} (code {rc})")
    root = root_of(library, box[0])
    if library.getters_own:
        library.lib.CeedDestroy(box)
    return root


class WrappedVector(Vector):
    """A vector that other code made; made by :meth:`ceedtap.Vector.wrap`.

    Its memory belongs to others, who may free it at any time: arrays of it are copies, which are written back when they
    are restored.
    """

    def __init__(self, found: Found, keep: object) -> None:
        library = found.ceed.library
        length = library.ffi.new("CeedSize *")
        found.ceed._call("CeedVectorGetLength", found.pointer, length)
        self._start(int(length[0]))
        self._keep = keep
        self._own_vector(found.ceed, found.create)
        # Where arrays are copied to; libCEED does not see it.
        self._access.memory = aligned_zeros(self._length, library.scalar_dtype)

    def __repr__(self) -> str:
        return f"<WrappedVector {self._length} {self.ceed.library.scalar_dtype}>"

    def _owner_has_it(self, name: str) -> None:
        if self._access.writer is None and self.state % 2:
            raise CeedAccessError(f"{name}: {self!r} is locked by its owner, who has an array for writing")

    def _check_input(self, name: str) -> None:
        super()._check_input(name)
        self._owner_has_it(name)
        valid = self.ceed.library.ffi.new("bool *")
        self._call("CeedVectorHasValidArray", self.pointer, valid)
        if not valid[0]:
            raise CeedAccessError(f"{name}: {self!r} has no data; use set_value or set_array first")

    def _check_free(self, name: str) -> None:
        super()._check_free(name)
        self._owner_has_it(name)
        # Its owner may read it at the moment, which libCEED tells by refusing.
        ffi, lib = self.ceed.library.ffi, self.ceed.library.lib
        array = ffi.new("CeedScalar **")
        if lib.CeedVectorGetArrayWrite(self.pointer, MEM_HOST, array):
            lib.CeedResetErrorMessage(self.ceed.pointer, ffi.new("const char **"))
            raise CeedAccessError(f"{name}: {self!r} is locked by its owner, who has an array for reading")
        lib.CeedVectorRestoreArray(self.pointer, array)

    def _attach(self, memory: Any) -> None:
        array = self.ceed.library.ffi.new("CeedScalar **")
        self._call("CeedVectorGetArrayWrite", self.pointer, MEM_HOST, array)
        self._at(array[0])[:] = memory
        self._call("CeedVectorRestoreArray", self.pointer, array)

    def _share(self, array: Any, values: Any) -> None:
        raise CeedAccessError(f"set_array: the memory of {self!r} belongs to its owner; use COPY_VALUES")

    def _span(self) -> tuple[int, int]:
        ffi, lib = self.ceed.library.ffi, self.ceed.library.lib
        array = ffi.new("const CeedScalar **")
        if lib.CeedVectorGetArrayRead(self.pointer, MEM_HOST, array):
            lib.CeedResetErrorMessage(self.ceed.pointer, ffi.new("const char **"))
            return self.address, self.address + 1  # of itself
        start = self._address(array[0])
        lib.CeedVectorRestoreArrayRead(self.pointer, array)
        return start, start + self._length * self.ceed.library.scalar_dtype.itemsize

    def _after_failure(self, reason: str) -> None:
        """The locks may be its owner's: nothing is taken back."""


class WrappedQFunction(_QFunction):
    """A QFunction that other code made; made by :meth:`ceedtap.QFunction.wrap`."""

    def __init__(self, found: Found, keep: object) -> None:
        self._start()
        self._own(found.ceed, "CeedQFunction", found.create, lambda _: keep)
        ffi, name = found.ceed.library.ffi, found.ceed.library.ffi.new("const char **")
        self._call("CeedQFunctionGetKernelName", self.pointer, name)
        self.name = ffi.string(name[0]).decode() if name[0] != ffi.NULL else "(unnamed)"
        self._read_fields()

    def _check_usable(self) -> None:
        super()._check_usable()
        ffi, lib = self.ceed.library.ffi, self.ceed.library.lib
        context, valid, state = ffi.new("CeedQFunctionContext *"), ffi.new("bool *"), ffi.new("uint64_t *")
        self._call("CeedQFunctionGetInnerContext", self.pointer, context)  # borrowed, in every libCEED
        if context[0] == ffi.NULL:
            return
        if not lib.CeedQFunctionContextGetState(context[0], state) and state[0] % 2:
            raise CeedAccessError(f"the context of {self!r} is locked by its owner, who has its data for writing")
        if not lib.CeedQFunctionContextHasValidData(context[0], valid) and not valid[0]:
            raise CeedIncompleteError(f"the context of {self!r} has no data; its owner has to set it first")


# -- parts of operators ------------------------------------------------------------------------------------------------


def _got(ceed: Ceed, kind: str, pointer: Any) -> Found:
    """What a function of libCEED has returned: a reference that is ours by now, in 0.12 one that is borrowed."""

    def create(box: Any) -> None:
        if ceed.library.getters_own:
            box[0] = pointer
        else:
            ceed._call(f"{kind}ReferenceCopy", pointer, box)

    return Found(pointer, ceed, create)


def _singles(op: Operator) -> list[Any]:
    """The handles of the operators that a foreign one is the sum of, itself where it is no sum. Under the lock."""
    library = op.ceed.library
    flag, count, subs = library.ffi.new("bool *"), library.ffi.new("CeedInt *"), library.ffi.new("CeedOperator **")
    op._call("CeedOperatorIsComposite", op.pointer, flag)
    if not flag[0]:
        return [op.pointer]
    for what, to in (("NumSub", count), ("SubList", subs)):
        op._call(library.first(f"CeedOperatorCompositeGet{what}", f"CeedCompositeOperatorGet{what}"), op.pointer, to)
    return [subs[0][i] for i in range(count[0])]


def qfunctions(op: Operator) -> list[_QFunction]:
    """The QFunctions of an operator that other code made; under the lock."""
    functions: list[_QFunction] = []
    for single in _singles(op):
        box = op.ceed.library.ffi.new("CeedQFunction *")
        op._call("CeedOperatorGetQFunction", single, box)
        functions.append(WrappedQFunction(_got(op.ceed, "CeedQFunction", box[0]), op._foreign))
    return functions


def passive_vectors(op: Operator) -> tuple[list[tuple[str, Vector]], list[tuple[str, Vector]]]:
    """The vectors of the passive fields of a complete operator that other code made; under the lock."""
    ceed, ffi, lib = op.ceed, op.ceed.library.ffi, op.ceed.library.lib
    sides: tuple[list[tuple[str, Vector]], list[tuple[str, Vector]]] = [], []
    for single in _singles(op):
        counts, fields = ffi.new("CeedInt[2]"), ffi.new("CeedOperatorField *[2]")
        op._call("CeedOperatorGetFields", single, counts, fields, counts + 1, fields + 1)
        for side, kind in enumerate(("input", "output")):
            for i in range(counts[side]):
                name, vector = ffi.new("const char **"), ffi.new("CeedVector *")
                op._call("CeedOperatorFieldGetName", fields[side][i], name)
                op._call("CeedOperatorFieldGetVector", fields[side][i], vector)
                if vector[0] not in (lib.CEED_VECTOR_ACTIVE, lib.CEED_VECTOR_NONE):
                    wrapped = WrappedVector(_got(ceed, "CeedVector", vector[0]), op._foreign)
                    sides[side].append((f"the passive {kind} field {ffi.string(name[0]).decode()!r}", wrapped))
        at_points = ffi.new("bool *")
        if ceed.library.has("CeedOperatorAtPointsGetPoints"):
            op._call("CeedOperatorIsAtPoints", single, at_points)
        if at_points[0]:
            vector = ffi.new("CeedVector *")
            op._call("CeedOperatorAtPointsGetPoints", single, ffi.NULL, vector)
            wrapped = WrappedVector(_got(ceed, "CeedVector", vector[0]), op._foreign)
            sides[0].append(("the coordinates of the points", wrapped))
    return sides
