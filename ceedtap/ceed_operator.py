"""Operators: restrictions, bases and a QFunction put together."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ceedtap.ceed_assembly import Assembly
from ceedtap.ceed_basis import Basis
from ceedtap.ceed_blocked import _Blocked
from ceedtap.ceed_constants import (
    BASIS_NONE,
    ELEMRESTRICTION_NONE,
    REQUEST_IMMEDIATE,
    VECTOR_ACTIVE,
    VECTOR_NONE,
    EvalMode,
    Sentinel,
)
from ceedtap.ceed_ffi import (
    CeedAccessError,
    CeedError,
    CeedIncompleteError,
    CeedUnsupportedError,
    check,
)
from ceedtap.ceed_object import captured, check_same_ceed, immediate, text
from ceedtap.ceed_operator_context import OperatorContext
from ceedtap.ceed_poison import Poisonable
from ceedtap.ceed_qfunction import MAX_FIELDS, QFunction, QFunctionField, _QFunction, with_status
from ceedtap.ceed_restriction import AtPointsElemRestriction, _ElemRestriction, check_distinct, check_vector
from ceedtap.ceed_vector import Vector

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed


class OperatorField(NamedTuple):
    """A field of an operator."""

    name: str
    restriction: _ElemRestriction | Sentinel
    basis: Basis | Sentinel
    vector: Vector | Sentinel
    eval_mode: EvalMode
    is_input: bool


_Named = list[tuple[str, Vector]]


class _Operator(OperatorContext, Assembly):
    """What all operators share."""

    def _start(self) -> None:
        self._name = ""
        self._start_poison()
        self._settled = False  # whether what a failure left locked has been taken back
        self._frozen = False
        self._lengths: tuple[int, int] | None = None  # when they cannot change any more
        self._passives: tuple[_Named, _Named] | None = None  # likewise
        self._functions: list[_QFunction] = []  # likewise: all of the tree

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """A name for messages; may be set."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._call("CeedOperatorSetName", self.pointer, text("name", name))
        self._name = name

    @property
    def active_lengths(self) -> tuple[int, int]:
        """Lengths of the active input and output vector; 0 where there is no active field."""
        if self._lengths is None:
            size = self.ceed.library.ffi.new("CeedSize[2]")
            self._call("CeedOperatorGetActiveVectorLengths", self.pointer, size, size + 1)
            lengths = max(size[0], 0), max(size[1], 0)
            if not self._frozen:
                return lengths
            self._lengths = lengths
        return self._lengths

    def _passive(self) -> tuple[_Named, _Named]:
        """The vectors of its passive input and output fields, with names for messages."""
        return [], []

    def _check_complete(self) -> None:
        """That nothing is missing; under the lock."""

    def check(self) -> None:
        """Checks that the operator is complete; it cannot be changed afterwards.

        Raises:
            CeedIncompleteError: fields are missing; the message names them.
            CeedError: libCEED refuses the operator, or it was left locked by an earlier error.
        """
        with self.ceed.lock:
            self._check_usable()
            self._call("CeedOperatorCheckReady", self.pointer)
            self._freeze()

    def _check_usable(self) -> None:
        self._settle()
        self._check_poison()
        self._check_complete()

    def _settle(self) -> None:
        """Takes back, once, what a failure in a compiled program left locked; under the lock."""
        if self._native_poison.text[0] != b"\0" and not self._settled:
            self._settled = True
            for _, vector in itertools.chain(*(self._passives or self._passive())):
                vector._after_failure(self.poisoned)

    def check_applicable(self) -> None:
        """All that :meth:`apply` checks apart from the active vectors, for a compiled program that will apply it."""
        with self.ceed.lock:
            self._check_usable()
            inputs, outputs = self._passives or self._passive()
            self._check_vectors(inputs, outputs)
            for _, vector in outputs:
                vector._prepare_output()

    @property
    def passive_vectors(self) -> tuple[_Named, _Named]:
        """The vectors of its passive input and output fields, with names for messages."""
        return self._passives or self._passive()

    def parts(self) -> list[Poisonable]:
        """What libCEED can leave locked: the operator, its parts, and their QFunctions."""
        return [self, *self._all_functions()]

    def get_name(self) -> str:
        """Its name, empty where it has none."""
        return self._name

    def get_flops_estimate(self) -> int:
        """How many floating-point operations an application needs, as libCEED counts them.

        Raises:
            CeedError: a QFunction does not say how many it needs per point; see `set_user_flops_estimate` there.
        """
        flops = self.ceed.library.ffi.new("CeedSize *")
        with self.ceed.lock:
            self._check_usable()
            self._call("CeedOperatorGetFlopsEstimate", self.pointer, flops)
            self._freeze()
        return int(flops[0])

    def view_terse(self) -> str:
        """The beginning of what :meth:`view` says.

        Raises:
            CeedUnsupportedError: libCEED is older than 1.0.
        """
        return captured(self.ceed, lambda stream: self._call("CeedOperatorViewTerse", self.pointer, stream))

    # -- what it does --------------------------------------------------------------------------------------------------

    def apply(self, u: Vector | Sentinel, v: Vector | Sentinel, request: Sentinel = REQUEST_IMMEDIATE) -> None:
        """Applies the operator; outputs, passive ones too, are overwritten.

        Args:
            u: the active input; VECTOR_NONE if the operator has none.
            v: the active output, another vector than `u` and than all passive fields; VECTOR_NONE if there is none.
            request: REQUEST_IMMEDIATE.

        Raises:
            TypeError, ValueError: a vector where none is wanted or the other way round, or one of another length.
            CeedIncompleteError: a field is missing.
            CeedAccessError: a vector has no data or is locked by an array view, or an earlier error has left the
                operator locked.
            CeedError: libCEED failed. The operator cannot be used any more.
        """
        self._apply("CeedOperatorApply", u, v, request)

    def apply_add(self, u: Vector | Sentinel, v: Vector | Sentinel, request: Sentinel = REQUEST_IMMEDIATE) -> None:
        """As :meth:`apply`, but adds to the outputs, passive ones too."""
        self._apply("CeedOperatorApplyAdd", u, v, request)

    def apply_add_active(
        self, u: Vector | Sentinel, v: Vector | Sentinel, request: Sentinel = REQUEST_IMMEDIATE
    ) -> None:
        """As :meth:`apply`, but adds to the active output; passive outputs are overwritten.

        Raises:
            CeedUnsupportedError: libCEED is older than 1.0.
        """
        self.ceed.library.first("CeedOperatorApplyAddActive")
        self._apply("CeedOperatorApplyAddActive", u, v, request)

    def _apply(self, function: str, u: Vector | Sentinel, v: Vector | Sentinel, request: Sentinel) -> None:
        if request is not REQUEST_IMMEDIATE:
            immediate(request)
        with self.ceed.lock:
            self._check_usable()
            lengths = self._lengths or self.active_lengths
            inputs, outputs = self._passives or self._passive()
            pointers = []
            for name, vector, length in (("u", u, lengths[0]), ("v", v, lengths[1])):
                if length:
                    check_vector(self, name, vector, length)
                elif vector is not VECTOR_NONE:
                    kind = "input" if name == "u" else "output"
                    raise ValueError(f"{name}: {self!r} has no active {kind}; pass VECTOR_NONE")
                pointers.append(vector.pointer if isinstance(vector, Vector) else vector.pointer(self.ceed.library))
            if isinstance(u, Vector):
                inputs = [*inputs, ("u", u)]
            if isinstance(v, Vector):
                outputs = [*outputs, ("v", v)]
            self._check_vectors(inputs, outputs)
            if function == "CeedOperatorApplyAdd":
                for name, vector in outputs:
                    vector._check_input(name)
            elif function == "CeedOperatorApplyAddActive" and isinstance(v, Vector):
                v._check_input("v")
            self._run(function, inputs, outputs, *pointers)

    @staticmethod
    def _check_vectors(inputs: _Named, outputs: _Named) -> None:
        """That libCEED can read and write the vectors; under the lock."""
        for name, vector in inputs:
            vector._check_input(name)
        for i, (name, vector) in enumerate(outputs):
            vector._check_output(name)
            for other_name, other in inputs:
                if other is vector or other._overlaps(vector):
                    check_distinct(other, vector, f"{other_name} and {name}")
            for other_name, other in outputs[:i]:
                check_distinct(other, vector, f"{other_name} and {name}")

    def _run(self, function: str, inputs: _Named, outputs: _Named, *args: Any, request: bool = True) -> None:
        """Calls libCEED, and handles what a failure leaves behind; under the lock."""
        library = self.ceed.library
        for _, vector in outputs:
            if vector._access.memory is None:
                vector._prepare_output()
        if self._passives is None:
            self._freeze()
        if request:
            args = (*args, library.request_immediate)
        rc = getattr(library.lib, function)(self._box[0], *args)
        if rc:
            try:
                check(rc, function, self.ceed.pointer, library)
            except CeedError as error:
                told = with_status(error, self._all_functions())
                self._set_poison(str(told))
                self._settled = True
                for _, vector in (*inputs, *outputs):
                    vector._after_failure(str(told))
                raise told from None
        for qfunction in self._functions:
            qfunction._raise_pending()

    def _freeze(self) -> None:
        """Nothing about the operator changes any more."""
        self._frozen = True
        self._passives = self._passive()
        self._functions = [
            qf for qf in self._all_functions() if type(qf)._raise_pending is not _QFunction._raise_pending
        ]

    def _all_functions(self) -> list[_QFunction]:
        """The QFunctions of all parts."""
        return []


class Operator(_Operator):
    """An operator; made by :meth:`ceedtap.Ceed.Operator`, or from a foreign one by :meth:`wrap`.

    Args:
        ceed: the Ceed.
        qf: the QFunction.
        dqf, qdfT: its derivative and transposed derivative; libCEED keeps them and makes no use of them.

    Raises:
        TypeError: no QFunction.

    A mass operator on one line element; the entries of its matrix sum up to the element's length:

    >>> import ceedtap as ct, numpy as np
    >>> ceed = ct.Ceed("/cpu/self")
    >>> restriction = ceed.ElemRestriction(1, 3, 1, 1, 3, np.arange(3))
    >>> points = ceed.StridedElemRestriction(1, 4, 1, 4, [1, 4, 4])
    >>> basis = ceed.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
    >>> qdata = ceed.Vector(4)
    >>> basis.apply(1, ct.EVAL_WEIGHT, ct.VECTOR_NONE, qdata)  # the element is [-1, 1]: no Jacobian
    >>> mass = ceed.Operator(ceed.QFunctionByName("MassApply"))
    >>> mass.set_field("u", restriction, basis, ct.VECTOR_ACTIVE)
    >>> mass.set_field("qdata", points, ct.BASIS_NONE, qdata)
    >>> mass.set_field("v", restriction, basis, ct.VECTOR_ACTIVE)
    >>> u, v = ceed.Vector(3), ceed.Vector(3)
    >>> u.set_value(1)
    >>> mass.apply(u, v)
    >>> with v.array_read() as values:
    ...     print(round(values.sum(), 14))
    2.0
    """

    def __init__(
        self, ceed: Ceed, qf: _QFunction, dqf: _QFunction | None = None, qdfT: _QFunction | None = None
    ) -> None:
        self._start()
        functions: list[Any] = []
        for name, function in (("qf", qf), ("dqf", dqf), ("qdfT", qdfT)):
            if function is None and name != "qf":
                functions.append(ceed.library.lib.CEED_QFUNCTION_NONE)
                continue
            if not isinstance(function, _QFunction):
                raise TypeError(f"{name}: expected a QFunction, got {type(function).__name__}")
            check_same_ceed(name, function, ceed)
            functions.append(function.pointer)
        self.qfunction: _QFunction | None = qf
        self._derivatives = dqf, qdfT
        self._fields: dict[str, OperatorField] = {}
        self._foreign: object = None
        self._origin = ""

        def create(handle: Any) -> None:
            ceed._call(self._create, ceed.pointer, *functions, handle)

        self._own(ceed, "CeedOperator", create)

    _create = "CeedOperatorCreate"
    _at_points = False
    _wrapped = False
    _wrapped_functions: Sequence[_QFunction] = ()

    @classmethod
    def wrap(cls, obj: Any, ceed: Ceed | None = None, *, own: bool = False) -> Operator:
        """An operator that other code made: it is used and kept alive.

        Args:
            obj: an operator of the `libceed` package, or the address of a ``struct CeedOperator_private``.
            ceed: the Ceed that an address belongs to. An address cannot be checked: it must be that of a living object
                of the same libCEED.
            own: take over the caller's reference, which is destroyed with this object; else a reference of its own.

        Returns:
            an operator whose :attr:`fields` are empty, since they are not known here.

        Raises:
            TypeError, ValueError: an object of another kind.
            CeedIncompatibleError: it was made by another libCEED than ceedtap's, or belongs to another Ceed.
        """
        from ceedtap import ceed_foreign

        found = ceed_foreign.find(obj, ceed, "CeedOperator", own)
        library = found.ceed.library
        ffi, lib, pointer = library.ffi, library.lib, found.pointer
        with found.ceed.lock:
            self = cls.__new__(cls)
            self._start()
            self.qfunction = None
            self._derivatives = None, None
            self._fields = {}
            self._foreign = obj
            self._origin = ""
            self._wrapped = True
            # The finalizer keeps the foreign object: what its owner frees with it, a callback say, is needed till then.
            self._own(found.ceed, "CeedOperator", found.create, lambda _: obj)
            flag = ffi.new("bool *")
            if library.has("CeedOperatorIsComposite") and not lib.CeedOperatorIsComposite(pointer, flag) and flag[0]:
                self._name = "composite"
            self._wrapped_functions = ceed_foreign.qfunctions(self)
        return self

    def __repr__(self) -> str:
        label = f" {self._name!r}" if self._name else ""
        if self._origin:
            return f"<Operator{label} {self._origin}>"
        if self.qfunction is None:
            return f"<Operator{label} of {type(self._foreign).__module__}>"
        return f"<Operator{label} {self.qfunction.name} fields {', '.join(self._fields) or 'not set'}>"

    def _repr_html_(self) -> str:
        """For notebooks: the fields as a table."""
        heads = ("field", "", "mode", "size", "restriction", "basis", "vector")
        rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
        for name, known in (self.qfunction.fields if self.qfunction is not None else {}).items():
            field = self._fields.get(name)
            parts = ("not set",) * 3 if field is None else tuple(repr(part).strip("<>") for part in field[1:4])
            kind = "input" if known.is_input else "output"
            cells = (name, kind, known.eval_mode.name, str(known.size), *parts)
            rows.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
        return f"<table><caption>{html.escape(repr(self))}</caption>{''.join(rows)}</table>"

    def _derive(self, handle: Any, origin: str, keep: Sequence[object] = (), **fields: Any) -> Operator:
        """An operator that libCEED made of this one, complete and not to be changed; takes over `handle[0]`.

        Args:
            handle: cffi's box.
            origin: what it is, for its repr.
            keep: what it needs.
            fields: attributes of it, where they are known.
        """
        other = Operator.__new__(Operator)
        other._start()
        other.qfunction = None
        other._derivatives = None, None
        other._fields = {}
        other._foreign = (self, *keep)
        other._origin = origin
        for name, value in fields.items():
            setattr(other, name, value)

        def create(box: Any) -> None:
            box[0] = handle[0]

        other._own(self.ceed, "CeedOperator", create)
        other._freeze()
        return other

    @property
    def fields(self) -> dict[str, OperatorField]:
        """Name -> field, of those that are set; empty for a wrapped operator."""
        return dict(self._fields)

    def _passive(self) -> tuple[_Named, _Named]:
        if self._wrapped:
            from ceedtap import ceed_foreign

            return ceed_foreign.passive_vectors(self)
        inputs: _Named = []
        outputs: _Named = []
        for field in self._fields.values():
            if isinstance(field.vector, Vector):
                kind, vectors = ("input", inputs) if field.is_input else ("output", outputs)
                vectors.append((f"the passive {kind} field {field.name!r}", field.vector))
        return inputs, outputs

    def _check_complete(self) -> None:
        if self._wrapped and not self._frozen:
            self._call("CeedOperatorCheckReady", self.pointer)
            self._freeze()
        for function in self._wrapped_functions:
            function._check_usable()
        if self.qfunction is None:
            return
        if self._frozen:  # it was complete then
            self.qfunction._check_usable()
            return
        fields = self.qfunction.fields
        if missing := [name for name in fields if name not in self._fields]:
            raise CeedIncompleteError(
                f"{self!r} lacks the field{'s' * (len(missing) > 1)} {', '.join(missing)}; use set_field"
            )
        if not fields:
            raise CeedIncompleteError(f"the QFunction of {self!r} has no fields")
        if self.qfunction.name == "Identity" and not isinstance(self.qfunction, QFunction):
            # Backends copy the active input to the active output then, whatever the fields' vectors are.
            modes = {field.eval_mode for field in self._fields.values()}
            if modes == {EvalMode.NONE} and any(field.vector is not VECTOR_ACTIVE for field in self._fields.values()):
                raise CeedUnsupportedError(
                    f"{self!r}: libCEED applies an identity with EVAL_NONE only to active vectors; use a QFunction in C"
                )
        self.qfunction._check_usable()

    def _freeze(self) -> None:
        super()._freeze()
        if self.qfunction is not None:
            self.qfunction._frozen = True

    def _all_functions(self) -> list[_QFunction]:
        return [*self._wrapped_functions] if self.qfunction is None else [self.qfunction]

    def set_field(
        self,
        fieldname: str,
        restriction: _ElemRestriction | Sentinel,
        basis: Basis | Sentinel,
        vector: Vector | Sentinel,
    ) -> None:
        """Says where an input or output of the QFunction comes from or goes to.

        Args:
            fieldname: name of a field of the QFunction.
            restriction: its element restriction; ELEMRESTRICTION_NONE for EVAL_WEIGHT.
            basis: its basis; BASIS_NONE for EVAL_NONE.
            vector: VECTOR_ACTIVE for what `apply` gets, a vector for passive data, VECTOR_NONE for EVAL_WEIGHT.

        Raises:
            TypeError, ValueError: no such field, or parts that do not fit together; nothing is changed.
            CeedIncompatibleError: a part belongs to another Ceed.
            CeedAccessError: the operator was applied or checked already.
        """
        text("fieldname", fieldname)
        if self.qfunction is None:
            raise CeedAccessError(f"{self!r} is set up by its owner")
        field = self.qfunction.fields.get(fieldname)
        if field is None:
            names = ", ".join(self.qfunction.fields) or "none"
            raise ValueError(f"fieldname: {self.qfunction!r} has no field {fieldname!r}; its fields are {names}")
        with self.ceed.lock:
            if self._frozen:
                raise CeedAccessError(
                    f"{self!r} cannot be changed any more, it was checked, applied or made part of another"
                )
            if fieldname in self._fields:
                raise ValueError(f"fieldname: the field {fieldname!r} is set already")
            if len(self._fields) == MAX_FIELDS:
                # When it destroys the operator, libCEED 0.12 looks at as many inputs as there are fields.
                raise ValueError(f"fieldname: an operator has at most {MAX_FIELDS} fields, inputs and outputs together")
            self._check_field(field, restriction, basis, vector)
            args = (
                part.pointer(self.ceed.library) if isinstance(part, Sentinel) else part.pointer
                for part in (restriction, basis, vector)
            )
            self._call("CeedOperatorSetField", self.pointer, fieldname.encode(), *args)
            self._fields[fieldname] = OperatorField(
                fieldname, restriction, basis, vector, field.eval_mode, field.is_input
            )

    def _check_field(self, field: QFunctionField, restriction: Any, basis: Any, vector: Any) -> None:
        where, mode = f"field {field.name!r} (EVAL_{field.eval_mode.name}, size {field.size})", field.eval_mode
        for name, part, kind, sentinels in (
            ("restriction", restriction, _ElemRestriction, (ELEMRESTRICTION_NONE,)),
            ("basis", basis, Basis, (BASIS_NONE,)),
            ("vector", vector, Vector, (VECTOR_ACTIVE, VECTOR_NONE)),
        ):
            if isinstance(part, AtPointsElemRestriction) and not self._at_points:
                raise ValueError(f"{where}: restriction: {part!r} is for OperatorAtPoints")
            if isinstance(part, _Blocked):
                raise ValueError(
                    f"{where}: restriction: operators do not take {part!r}; they make blocks by themselves"
                )
            if isinstance(part, kind):
                self._check_same_ceed(f"{where}: {name}", part)
            elif not any(part is sentinel for sentinel in sentinels):
                words = " or ".join([kind.__name__.strip("_"), *map(repr, sentinels)])
                raise TypeError(f"{where}: {name}: expected {words}, got {part!r}")
        weight = mode is EvalMode.WEIGHT
        for name, part, none, wanted in (
            ("restriction", restriction, ELEMRESTRICTION_NONE, weight),
            ("basis", basis, BASIS_NONE, mode is EvalMode.NONE),
            ("vector", vector, VECTOR_NONE, weight),
        ):
            if (part is none) != wanted:
                raise ValueError(
                    f"{where}: {name}: expected {none if wanted else f'something other than {none}'}, got {part!r}"
                )
        if isinstance(basis, Basis):
            if not basis.components(mode):
                raise ValueError(f"{where}: {basis!r} has no EVAL_{mode.name}")
            if not weight:
                basis.check_kernel(transpose=not field.is_input)
            if field.size != basis.field_size(mode):
                raise ValueError(f"{where}: {basis!r} gives {basis.field_size(mode)} values per quadrature point")
        if isinstance(restriction, _ElemRestriction):
            if isinstance(basis, Basis):
                if restriction.elemsize != basis.num_nodes or restriction.ncomp != basis.ncomp:
                    raise ValueError(
                        f"{where}: {restriction!r} does not fit {basis!r}: elemsize is not num_nodes, or the "
                        "components differ"
                    )
            elif restriction.ncomp != field.size:
                raise ValueError(f"{where}: {restriction!r} has {restriction.ncomp} components")
            if isinstance(vector, Vector) and len(vector) != restriction.lsize:
                raise ValueError(f"{where}: {vector!r} must have lsize = {restriction.lsize} entries")
        points = self._num_points(restriction, basis)
        for other in self._fields.values():
            self._check_against(other, where, field, restriction, vector, points)

    def _num_points(self, restriction: Any, basis: Any) -> int:
        """Quadrature points per element that a field has."""
        points = basis.num_quadrature_points if isinstance(basis, Basis) else restriction.elemsize
        return int(points)

    def _check_against(
        self, other: OperatorField, where: str, field: QFunctionField, restriction: Any, vector: Any, points: int
    ) -> None:
        """That a field fits one that is set already."""
        if isinstance(other.restriction, _ElemRestriction) and isinstance(restriction, _ElemRestriction):
            if restriction.nelem != other.restriction.nelem:
                raise ValueError(
                    f"{where}: {restriction.nelem} elements, but field {other.name!r} has {other.restriction.nelem}"
                )
            active = vector is VECTOR_ACTIVE and other.vector is VECTOR_ACTIVE and field.is_input == other.is_input
            if active and restriction.lsize != other.restriction.lsize:
                raise ValueError(
                    f"{where}: active with lsize = {restriction.lsize}, but the active field {other.name!r} has "
                    f"{other.restriction.lsize}"
                )
        there = self._num_points(other.restriction, other.basis)
        if points != there:
            raise ValueError(f"{where}: {points} quadrature points, but field {other.name!r} has {there}")
        if isinstance(vector, Vector) and not (field.is_input and other.is_input) and vector is other.vector:
            raise ValueError(
                f"{where}: the vector is also that of field {other.name!r}; outputs need vectors of their own"
            )
