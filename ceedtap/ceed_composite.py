"""Operators of two more kinds: at any points of the elements, and sums of operators."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ceedtap.ceed_basis import BasisTensorH1
from ceedtap.ceed_constants import BASIS_NONE, REQUEST_IMMEDIATE, Sentinel
from ceedtap.ceed_ffi import CeedAccessError, CeedIncompleteError, CeedUnsupportedError
from ceedtap.ceed_object import integers
from ceedtap.ceed_operator import Operator, OperatorField, _Named, _Operator
from ceedtap.ceed_poison import Poisonable
from ceedtap.ceed_qfunction import QFunctionField, _QFunction
from ceedtap.ceed_restriction import AtPointsElemRestriction, _ElemRestriction, check_vector
from ceedtap.ceed_vector import Vector

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed


class OperatorAtPoints(Operator):
    """An operator on any points of the elements; made by :meth:`ceedtap.Ceed.OperatorAtPoints`.

    Its fields are those of :class:`Operator`. Where the basis is BASIS_NONE, the restriction is an
    :class:`AtPointsElemRestriction` to the points of :meth:`set_points`; the other bases are tensor products, whose own
    quadrature points play no part.

    Raises:
        CeedUnsupportedError: libCEED is older than 1.0.
    """

    _create = "CeedOperatorCreateAtPoints"
    _at_points = True
    _points: AtPointsElemRestriction | None = None

    def set_points(self, rstr_points: AtPointsElemRestriction, point_coords: Vector) -> None:
        """Says where the points are.

        Args:
            rstr_points: which points are in which element, with as many components as there are dimensions.
            point_coords: their coordinates in the reference element, in [-1, 1].

        Raises:
            TypeError, ValueError: no such restriction, or a vector of another length.
            CeedAccessError: the points are set already, or the operator was applied.
        """
        if not isinstance(rstr_points, AtPointsElemRestriction):
            raise TypeError(f"rstr_points: expected an AtPointsElemRestriction, got {rstr_points!r}")
        self._check_same_ceed("rstr_points", rstr_points)
        with self.ceed.lock:
            if self._points is not None or self._frozen:
                raise CeedAccessError(f"{self!r}: the points are set once, before it is checked or applied")
            for field in self._fields.values():
                _check_points(f"field {field.name!r}", field.restriction, field.basis, rstr_points)
            check_vector(self, "point_coords", point_coords, rstr_points.lsize)
            point_coords._check_input("point_coords")
            self._call("CeedOperatorAtPointsSetPoints", self.pointer, rstr_points.pointer, point_coords.pointer)
            self._points, self._coordinates = rstr_points, point_coords

    def _passive(self) -> tuple[_Named, _Named]:
        inputs, outputs = super()._passive()
        if self._points is not None:
            inputs.append(("the coordinates of the points", self._coordinates))
        return inputs, outputs

    def _check_complete(self) -> None:
        if self._points is None:
            raise CeedIncompleteError(f"{self!r} has no points; use set_points")
        super()._check_complete()

    def _check_field(self, field: QFunctionField, restriction: Any, basis: Any, vector: Any) -> None:
        where = f"field {field.name!r} (EVAL_{field.eval_mode.name}, size {field.size})"
        _check_points(where, restriction, basis, self._points)
        others = (other.restriction for other in self._fields.values())
        known = next((other for other in others if isinstance(other, AtPointsElemRestriction)), None)
        if known is not None and basis is BASIS_NONE and restriction.points != known.points:
            raise ValueError(f"{where}: restriction: {restriction!r} has other points than {known!r} of another field")
        super()._check_field(field, restriction, basis, vector)

    def _num_points(self, restriction: Any, basis: Any) -> int:
        return 0 if self._points is None else self._points.elemsize

    def linear_assemble_qfunction(self, request: Sentinel = REQUEST_IMMEDIATE) -> Any:
        """Not for points."""
        raise CeedUnsupportedError(f"{self!r}: libCEED does not assemble QFunctions at points")


def _check_points(where: str, restriction: Any, basis: Any, points: AtPointsElemRestriction | None) -> None:
    """That a field fits the points of its operator, as far as they are known."""
    if basis is BASIS_NONE:
        if not isinstance(restriction, AtPointsElemRestriction) or (points and restriction.points != points.points):
            raise ValueError(f"{where}: restriction: expected one to the points of the operator, got {restriction!r}")
        return
    if isinstance(restriction, AtPointsElemRestriction):
        raise ValueError(f"{where}: restriction: {restriction!r} takes no basis")
    if not isinstance(basis, BasisTensorH1):
        raise ValueError(f"{where}: basis: expected a tensor basis, got {basis!r}")
    if points is None:
        return
    nelem = restriction.nelem if isinstance(restriction, _ElemRestriction) else points.nelem
    if nelem != points.nelem or basis.dim != points.ncomp:
        raise ValueError(f"{where}: {restriction!r} and {basis!r} do not fit the points {points!r}")


class CompositeOperator(_Operator):
    """The sum of operators; made by :meth:`ceedtap.Ceed.CompositeOperator`."""

    def __init__(self, ceed: Ceed) -> None:
        self._start()
        self._subs: list[Operator] = []
        create = ceed.library.first("CeedOperatorCreateComposite", "CeedCompositeOperatorCreate")
        self._own(ceed, "CeedOperator", lambda box: ceed._call(create, ceed.pointer, box))

    def __repr__(self) -> str:
        label = f" {self._name!r}" if self._name else ""
        return f"<CompositeOperator{label} of {len(self._subs)}>"

    def _repr_html_(self) -> str:
        return "".join([f"<p>{html.escape(repr(self))}</p>", *(sub._repr_html_() for sub in self._subs)])

    @property
    def sub_operators(self) -> tuple[Operator, ...]:
        """The operators that it is the sum of."""
        return tuple(self._subs)

    def add_sub(self, subop: Operator) -> None:
        """Adds an operator, which must be complete and cannot be changed afterwards.

        Raises:
            TypeError, ValueError: no operator, or one whose active vectors have other lengths than those of the others.
                A part without an active input (a load) or output goes with all.
            CeedError: it is incomplete or cannot be used.
        """
        if not isinstance(subop, Operator):
            raise TypeError(f"subop: expected an Operator, got {subop!r}")
        self._check_same_ceed("subop", subop)
        with self.ceed.lock:
            if self._frozen:
                raise CeedAccessError(f"{self!r} cannot be changed any more, it was checked or applied")
            subop.check()
            if any(0 != mine != its != 0 for mine, its in zip(self.active_lengths, subop.active_lengths, strict=True)):
                raise ValueError(
                    f"subop: active lengths {subop.active_lengths}, but the others have {self.active_lengths}"
                )
            function = self.ceed.library.first("CeedOperatorCompositeAddSub", "CeedCompositeOperatorAddSub")
            self._call(function, self.pointer, subop.pointer)
            self._subs.append(subop)

    @property
    def active_lengths(self) -> tuple[int, int]:
        """Lengths of the active input and output vector; 0 where no part has an active field."""
        if self._lengths is not None:
            return self._lengths
        lengths = [sub.active_lengths for sub in self._subs]
        both = max((n for n, _ in lengths), default=0), max((n for _, n in lengths), default=0)
        if self._frozen:
            self._lengths = both
        return both

    def _check_matrix(self) -> None:
        if loads := [sub for sub in self._subs if 0 in sub.active_lengths]:
            raise CeedUnsupportedError(
                f"{self!r}: the part {loads[0]!r} has no active input or no active output, so it has no matrix; "
                "assemble a composite operator of the other parts"
            )

    def get_sub_by_name(self, name: str) -> Operator:
        """The part with this name.

        Raises:
            KeyError: no part has it.
        """
        for sub in self._subs:
            if sub.name and sub.name == name:
                return sub
        raise KeyError(f"{name!r}: the parts are called {[sub.name for sub in self._subs]}")

    def set_sequential(self, is_sequential: bool) -> None:
        """Says whether the parts run one after the other on GPUs, where they could run at the same time.

        Raises:
            CeedUnsupportedError: libCEED is older than 1.0.
        """
        self._call("CeedOperatorCompositeSetSequential", self.pointer, bool(is_sequential))

    def is_sequential(self) -> bool:
        """What was set by :meth:`set_sequential`."""
        flag = self.ceed.library.ffi.new("bool *")
        self._call("CeedOperatorCompositeIsSequential", self.pointer, flag)
        return bool(flag[0])

    def _passive(self) -> tuple[_Named, _Named]:
        inputs: _Named = []
        outputs: dict[int, tuple[str, Vector]] = {}  # several may add to one
        for sub in self._subs:
            more = sub._passive()
            inputs += more[0]
            outputs.update((id(vector), (name, vector)) for name, vector in more[1])
        return inputs, list(outputs.values())

    def _active_fields(self) -> list[OperatorField]:
        return [field for sub in self._subs for field in sub._active_fields()]

    def _all_functions(self) -> list[_QFunction]:
        return [qf for sub in self._subs for qf in sub._all_functions()]

    def parts(self) -> list[Poisonable]:
        """What libCEED can leave locked: the operator, its parts, and their QFunctions."""
        return [self, *(part for sub in self._subs for part in sub.parts())]

    def get_multiplicity(self, skip_indices: Sequence[int] = ()) -> Vector:
        """The L-vector of how many of the parts with an active input touch each entry.

        Args:
            skip_indices: parts that are not counted.
        """
        skip = integers("skip_indices", skip_indices, len(skip_indices), 0, len(self._subs))
        with self.ceed.lock:
            self._check_usable()
            multiplicity = Vector(self.ceed, self.active_lengths[0])
            multiplicity.set_value(0)
            # libCEED takes indices to skip and, for a `continue` in an inner loop, skips nothing.
            rest = CompositeOperator(self.ceed)
            for i, sub in enumerate(self._subs):
                if i not in skip and sub.active_lengths[0]:
                    rest.add_sub(sub)
            if rest._subs:
                function = self.ceed.library.first(
                    "CeedOperatorCompositeGetMultiplicity", "CeedCompositeOperatorGetMultiplicity"
                )
                self._call(function, rest.pointer, 0, self.ceed.library.ffi.NULL, multiplicity.pointer)
        return multiplicity

    def _check_complete(self) -> None:
        if not self._subs:
            raise CeedIncompleteError(f"{self!r}: use add_sub")
        for sub in self._subs:
            sub._check_usable()
