"""Element restrictions: from the vector of all degrees of freedom to the elements, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ceedtap.ceed_constants import (
    COPY_VALUES,
    MEM_HOST,
    NOTRANSPOSE,
    REQUEST_IMMEDIATE,
    STRIDES_BACKEND,
    TRANSPOSE,
    Sentinel,
    TransposeMode,
)
from ceedtap.ceed_object import INT_MAX, CeedObject, copy_mode, enum, host, immediate, integer, integers
from ceedtap.ceed_vector import Vector

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed


class _ElemRestriction(CeedObject):
    """What offset and strided restrictions share.

    Attributes:
        nelem: number of elements.
        elemsize: nodes per element.
        ncomp: components per node.
        lsize: length of the L-vector.
        esize: length of the E-vector, ``nelem * elemsize * ncomp``.
    """

    nelem: int
    elemsize: int
    ncomp: int
    lsize: int

    def _sizes(self, nelem: int, elemsize: int, ncomp: int, lsize: int) -> None:
        self.nelem = integer("nelem", nelem)
        self.elemsize = integer("elemsize", elemsize, 1)
        self.ncomp = integer("ncomp", ncomp, 1)
        self.lsize = integer("lsize", lsize, 0, 2**60)
        if self.nelem * self.elemsize > INT_MAX:
            raise ValueError(
                f"nelem * elemsize is {self.nelem * self.elemsize}: libCEED's 32-bit numbers end at {INT_MAX}"
            )

    @property
    def esize(self) -> int:
        """Length of the E-vector."""
        return self.nelem * self.elemsize * self.ncomp

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} nelem={self.nelem} elemsize={self.elemsize} ncomp={self.ncomp} lsize={self.lsize}>"
        )

    def apply(self, u: Vector, v: Vector, tmode: int = NOTRANSPOSE, request: Sentinel = REQUEST_IMMEDIATE) -> None:
        """Applies the restriction or its transpose.

        Args:
            u: the L-vector; with TRANSPOSE the E-vector.
            v: the E-vector, overwritten; with TRANSPOSE the L-vector, to which the sums are ADDED.
            tmode: NOTRANSPOSE or TRANSPOSE.
            request: REQUEST_IMMEDIATE.

        Raises:
            TypeError, ValueError: `u` or `v` is no vector, has another length, or both are the same one.
            CeedAccessError: a vector has no data or is locked by an array view.
        """
        mode = enum("tmode", tmode, TransposeMode)
        immediate(request)
        sizes = (self.lsize, self.esize) if mode is NOTRANSPOSE else (self.esize, self.lsize)
        with self.ceed.lock:
            check_vector(self, "u", u, sizes[0])
            check_vector(self, "v", v, sizes[1])
            check_distinct(u, v)
            u._check_input("u")
            v._check_output("v")
            if mode is TRANSPOSE:
                v._check_input("v")
            v._prepare_output()
            immediate_pointer = REQUEST_IMMEDIATE.pointer(self.ceed.library)
            self._call("CeedElemRestrictionApply", self.pointer, mode, u.pointer, v.pointer, immediate_pointer)

    @property
    def T(self) -> TransposeElemRestriction:
        """The transpose."""
        return TransposeElemRestriction(self)

    def transpose(self) -> TransposeElemRestriction:
        """The transpose."""
        return TransposeElemRestriction(self)

    def create_vector(self, createLvec: bool = True, createEvec: bool = True) -> list[Vector | None]:
        """``[L-vector, E-vector]`` of the right lengths, or None for what is not wanted."""
        lvec = Vector(self.ceed, self.lsize) if createLvec else None
        return [lvec, Vector(self.ceed, self.esize) if createEvec else None]

    def get_multiplicity(self) -> Vector:
        """The L-vector of how many elements share each entry."""
        multiplicity = Vector(self.ceed, self.lsize)
        with self.ceed.lock:
            multiplicity.set_value(0)
            self._call("CeedElemRestrictionGetMultiplicity", self.pointer, multiplicity.pointer)
        return multiplicity

    def get_layout(self) -> tuple[int, int, int]:
        """Strides ``(node, component, element)`` of the E-vector of this backend."""
        layout = self.ceed.library.ffi.new("CeedInt[3]")
        self._call("CeedElemRestrictionGetELayout", self.pointer, layout)
        return layout[0], layout[1], layout[2]


class ElemRestriction(_ElemRestriction):
    """An element restriction given by offsets; made by :meth:`ceedtap.Ceed.ElemRestriction`.

    Component ``c`` of node ``n`` of element ``e`` is entry ``offsets[e, n] + c * compstride`` of the L-vector.

    Args:
        nelem, elemsize, ncomp: numbers of elements, of nodes per element, of components.
        compstride: distance of the components in the L-vector; arbitrary for one component.
        lsize: length of the L-vector.
        offsets: integers, nelem * elemsize of them in any shape; of any integer type, always copied.
        memtype: MEM_HOST.
        cmode: COPY_VALUES or USE_POINTER, which both copy: libCEED would read outside of its memory if offsets changed
            after they were checked.

    Raises:
        TypeError: offsets that are no integers.
        ValueError: sizes out of range, another number of offsets, or an offset that leads out of the L-vector.

    Two line elements that share a node:

    >>> import ceedtap as ct, numpy as np
    >>> ceed = ct.Ceed("/cpu/self/ref/serial")
    >>> restriction = ceed.ElemRestriction(2, 2, 1, 1, 3, np.array([[0, 1], [1, 2]]))
    >>> with restriction.get_multiplicity().array_read() as multiplicity:
    ...     print(multiplicity)
    [1. 2. 1.]
    """

    def __init__(
        self,
        ceed: Ceed,
        nelem: int,
        elemsize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> None:
        self._sizes(nelem, elemsize, ncomp, lsize)
        self.compstride = integer("compstride", compstride, 1 if self.ncomp > 1 else 0)
        host(memtype)
        copy_mode(cmode)
        last = (self.ncomp - 1) * self.compstride
        if self.nelem and last >= self.lsize:
            raise ValueError(
                f"component {self.ncomp - 1} is {last} entries (ncomp = {self.ncomp}, compstride = {self.compstride}) "
                f"after component 0, which is more than lsize = {self.lsize} has"
            )
        high = min(self.lsize - last, INT_MAX + 1)
        try:
            values = integers("offsets", offsets, self.nelem * self.elemsize, 0, high)
        except ValueError as error:
            raise ValueError(
                f"{error} (nelem = {self.nelem}, elemsize = {self.elemsize}, ncomp = {self.ncomp}, compstride = "
                f"{self.compstride}, lsize = {self.lsize})"
            ) from None

        def create(handle: Any) -> None:
            ceed._call(
                "CeedElemRestrictionCreate",
                ceed.pointer,
                self.nelem,
                self.elemsize,
                self.ncomp,
                self.compstride,
                self.lsize,
                MEM_HOST,
                COPY_VALUES,
                ceed.library.ffi.from_buffer("CeedInt[]", values),
                handle,
            )

        self._own(ceed, "CeedElemRestriction", create)


class StridedElemRestriction(_ElemRestriction):
    """An element restriction given by strides; made by :meth:`ceedtap.Ceed.StridedElemRestriction`.

    Component ``c`` of node ``n`` of element ``e`` is entry ``strides @ (n, c, e)`` of the L-vector.

    Args:
        nelem, elemsize, ncomp: numbers of elements, of nodes per element, of components.
        lsize: length of the L-vector.
        strides: three integers, or STRIDES_BACKEND for the order that the backend likes best, which is not known.

    Raises:
        TypeError: strides that are no integers.
        ValueError: sizes out of range, other than three strides, or strides that lead out of the L-vector.

    >>> import ceedtap as ct
    >>> ct.Ceed("/cpu/self/ref/serial").StridedElemRestriction(10, 4, 2, 80, [1, 4, 8])
    <StridedElemRestriction nelem=10 elemsize=4 ncomp=2 lsize=80>
    """

    def __init__(
        self, ceed: Ceed, nelem: int, elemsize: int, ncomp: int, lsize: int, strides: npt.ArrayLike | Sentinel
    ) -> None:
        self._sizes(nelem, elemsize, ncomp, lsize)
        ffi = ceed.library.ffi
        self.strides: tuple[int, int, int] | None = None
        if strides is STRIDES_BACKEND:
            pointer, last = STRIDES_BACKEND.pointer(ceed.library), self.esize - 1
        else:
            values = integers("strides", np.asarray(strides), 3, 0, INT_MAX + 1)
            pointer = ffi.from_buffer("CeedInt[]", values)
            self.strides = int(values[0]), int(values[1]), int(values[2])
            extents = (self.elemsize - 1, self.ncomp - 1, self.nelem - 1)
            last = sum(stride * extent for stride, extent in zip(self.strides, extents, strict=True))
        if self.nelem and last >= self.lsize:
            raise ValueError(
                f"strides {strides!r} lead to entry {last} of an L-vector of {self.lsize} (nelem = {self.nelem}, "
                f"elemsize = {self.elemsize}, ncomp = {self.ncomp})"
            )

        def create(handle: Any) -> None:
            ceed._call(
                "CeedElemRestrictionCreateStrided",
                ceed.pointer,
                self.nelem,
                self.elemsize,
                self.ncomp,
                self.lsize,
                pointer,
                handle,
            )

        self._own(ceed, "CeedElemRestriction", create)


class TransposeElemRestriction:
    """The transpose of an element restriction."""

    def __init__(self, elemrestriction: _ElemRestriction) -> None:
        self._restriction = elemrestriction

    def __repr__(self) -> str:
        return f"<transpose of {self._restriction!r}>"

    @property
    def T(self) -> _ElemRestriction:
        """The restriction itself."""
        return self._restriction

    def apply(self, u: Vector, v: Vector, request: Sentinel = REQUEST_IMMEDIATE) -> None:
        """Adds the sums of the E-vector `u` to the L-vector `v`."""
        self._restriction.apply(u, v, TRANSPOSE, request)


def check_vector(owner: CeedObject, name: str, vector: Any, length: int) -> None:
    """That `vector` is a Vector of the same Ceed with `length` entries."""
    if not isinstance(vector, Vector):
        raise TypeError(f"{name}: expected a Vector, got {vector!r}")
    owner._check_same_ceed(name, vector)
    if len(vector) != length:
        raise ValueError(f"{name}: {owner!r} needs a vector of {length} entries here, got {len(vector)}")


def check_distinct(u: Vector, v: Vector, names: str = "u and v") -> None:
    """That input and output do not share memory."""
    a, b = u._access.memory, v._access.memory
    if u is v or (a is not None and b is not None and np.may_share_memory(a, b)):
        raise ValueError(f"{names} share memory; libCEED needs an output of its own")
