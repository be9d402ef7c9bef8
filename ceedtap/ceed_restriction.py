"""Element restrictions: from the vector of all degrees of freedom to the elements, and back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

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
from ceedtap.ceed_ffi import CeedUnsupportedError
from ceedtap.ceed_object import INT_MAX, CeedObject, copy_mode, enum, host, immediate, integer, integers
from ceedtap.ceed_vector import Vector
from ceedtap.plain_arrays import plain_array

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
    def _block(self) -> tuple[int, ...]:
        """The number of elements in a block, if there are blocks: an argument of libCEED's."""
        return ()

    @property
    def esize(self) -> int:
        """Length of the E-vector."""
        return self.nelem * self.elemsize * self.ncomp

    _variant = ""  # what it is a copy without

    def __repr__(self) -> str:
        sizes = f"nelem={self.nelem} elemsize={self.elemsize} ncomp={self.ncomp} lsize={self.lsize}"
        return f"<{type(self).__name__}{self._variant} {sizes}>"

    @classmethod
    def wrap(cls, obj: Any, ceed: Ceed | None = None, *, own: bool = False) -> ElemRestriction | StridedElemRestriction:
        """An element restriction that other code made; see :meth:`ceedtap.Vector.wrap`."""
        from ceedtap import ceed_blocked, ceed_foreign

        found = ceed_foreign.find(obj, ceed, "CeedElemRestriction", own)
        library = found.ceed.library
        strided, block = library.ffi.new("bool *"), library.ffi.new("CeedInt *")
        with found.ceed.lock:
            found.ceed._call("CeedElemRestrictionIsStrided", found.pointer, strided)
            found.ceed._call("CeedElemRestrictionGetBlockSize", found.pointer, block)
            rooms = (ceed_blocked.BlockedElemRestriction, ceed_blocked.BlockedStridedElemRestriction)
            kind: Any = rooms[strided[0]] if block[0] > 1 else (ElemRestriction, StridedElemRestriction)[strided[0]]
            self: Any = kind.__new__(kind)
            self.blksize = block[0]
            self._read_sizes(found.ceed, found.pointer)
            self._own(found.ceed, "CeedElemRestriction", found.create, lambda _: obj)
        return self

    @classmethod
    def _adopt(cls, ceed: Ceed, handle: Any) -> Any:
        """Takes over a restriction that libCEED made. Under the lock."""
        self = cls.__new__(cls)
        self._read_sizes(ceed, handle[0])

        def create(box: Any) -> None:
            box[0] = handle[0]

        self._own(ceed, "CeedElemRestriction", create)
        return self

    def _read_sizes(self, ceed: Ceed, pointer: Any) -> None:
        sizes = []
        for name in ("NumElements", "ElementSize", "NumComponents", "LVectorSize"):
            value = ceed.library.ffi.new("CeedSize *" if name == "LVectorSize" else "CeedInt *")
            ceed._call(f"CeedElemRestrictionGet{name}", pointer, value)
            sizes.append(int(value[0]))
        self.nelem, self.elemsize, self.ncomp, self.lsize = sizes
        if isinstance(self, StridedElemRestriction):
            self.strides = None
            backend, strides = ceed.library.ffi.new("bool *"), ceed.library.ffi.new("CeedInt[3]")
            ceed._call("CeedElemRestrictionHasBackendStrides", pointer, backend)
            if not backend[0]:
                ceed._call("CeedElemRestrictionGetStrides", pointer, strides)
                self.strides = strides[0], strides[1], strides[2]

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
        self._apply("CeedElemRestrictionApply", (), u, v, tmode, request, self.esize)

    def _apply(
        self, function: str, block: tuple[int, ...], u: Vector, v: Vector, tmode: int, request: Sentinel, esize: int
    ) -> None:
        mode = enum("tmode", tmode, TransposeMode)
        immediate(request)
        sizes = (self.lsize, esize) if mode is NOTRANSPOSE else (esize, self.lsize)
        with self.ceed.lock:
            check_vector(self, "u", u, sizes[0])
            check_vector(self, "v", v, sizes[1])
            check_distinct(u, v)
            u._check_input("u")
            v._check_output("v")
            if mode is TRANSPOSE:
                v._check_input("v")
            v._prepare_output()
            last = self.ceed.library.request_immediate
            self._call(function, self.pointer, *block, mode, u.pointer, v.pointer, last)

    @property
    def T(self) -> TransposeElemRestriction:
        """The transpose."""
        return TransposeElemRestriction(self)

    def transpose(self) -> TransposeElemRestriction:
        """The transpose."""
        return TransposeElemRestriction(self)

    def create_unsigned_copy(self) -> Self:
        """The same restriction without signs: an oriented one does not flip any, a curl-oriented one has the absolute
        values of its factors."""
        return self._copy("CeedElemRestrictionCreateUnsignedCopy", " without signs")

    def create_unoriented_copy(self) -> Self:
        """The same restriction without orientations: an oriented or curl-oriented one only picks entries."""
        return self._copy("CeedElemRestrictionCreateUnorientedCopy", " without orientations")

    def _copy(self, function: str, variant: str) -> Self:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, _original=self, _variant=variant)
        copy._own(self.ceed, "CeedElemRestriction", functools.partial(self._call, function, self.pointer))
        return copy

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

    def get_e_layout(self) -> tuple[int, int, int]:
        """Strides ``(node, component, element)`` of the E-vector of this backend."""
        return self.get_layout()

    def get_l_layout(self) -> tuple[int, int, int]:
        """Strides ``(node, component, element)`` of the L-vector, of restrictions that are given by strides.

        Raises:
            CeedUnsupportedError: it is given by offsets, or the strides are STRIDES_BACKEND and libCEED is older than
                1.0.
        """
        raise CeedUnsupportedError(
            f"{self!r}: only a restriction that is given by strides has a layout of its L-vector"
        )

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

    compstride: int

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
        self._create_offset(ceed, (nelem, elemsize, ncomp, compstride, lsize), offsets, memtype, cmode)

    def _create_offset(
        self,
        ceed: Ceed,
        sizes: tuple[int, int, int, int, int],
        offsets: npt.ArrayLike,
        memtype: int,
        cmode: int,
        orients: np.ndarray | None = None,
    ) -> None:
        nelem, elemsize, ncomp, compstride, lsize = sizes
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
        ffi = ceed.library.ffi
        block = self._block
        kind = ("Blocked" if block else "") + self._orientation
        arrays = [ffi.from_buffer("CeedInt[]", values)]
        if orients is not None:
            arrays.append(ffi.from_buffer("bool[]" if orients.dtype == np.bool_ else "CeedInt8[]", orients))

        def create(handle: Any) -> None:
            ceed._call(
                f"CeedElemRestrictionCreate{kind}",
                ceed.pointer,
                self.nelem,
                self.elemsize,
                *block,
                self.ncomp,
                self.compstride,
                self.lsize,
                MEM_HOST,
                COPY_VALUES,
                *arrays,
                handle,
            )

        self._own(ceed, "CeedElemRestriction", create)

    _orientation = ""


def _orients(orients: npt.ArrayLike, nelem: int, elemsize: int) -> np.ndarray:
    array = plain_array("orients", orients)
    if array.dtype != np.bool_:
        raise TypeError(
            f"orients: expected bool values, got an array of {array.dtype}; use orients < 0 or .astype(bool)"
        )
    if array.size != nelem * elemsize:
        raise ValueError(f"orients: expected {nelem * elemsize} values, got {array.size} (shape {array.shape})")
    return np.array(array.reshape(-1), order="C")


def _curl_orients(curl_orients: npt.ArrayLike, nelem: int, elemsize: int) -> np.ndarray:
    return integers("curl_orients", curl_orients, 3 * nelem * elemsize, -128, 128).astype(np.int8)


class OrientedElemRestriction(ElemRestriction):
    """An element restriction that flips signs, as H(div) elements need.

    Made by :meth:`ceedtap.Ceed.OrientedElemRestriction`.

    Args:
        nelem, elemsize, ncomp, compstride, lsize, offsets, memtype, cmode: as for :class:`ElemRestriction`.
        orients: bool values, one per offset; True where the sign is flipped.

    Raises:
        TypeError: offsets that are no integers, orients that are no bools.
        ValueError: sizes out of range, another number of values, or an offset that leads out of the L-vector.

    >>> import ceedtap as ct
    >>> ceed = ct.Ceed("/cpu/self/ref/serial")
    >>> restriction = ceed.OrientedElemRestriction(2, 2, 1, 1, 3, [[0, 1], [1, 2]], [[False, False], [True, False]])
    >>> u, v = restriction.create_vector()
    >>> u.set_array([1, 2, 3])
    >>> restriction.apply(u, v)
    >>> v.to_numpy()
    array([ 1.,  2., -2.,  3.])
    """

    _orientation = "Oriented"

    def __init__(
        self,
        ceed: Ceed,
        nelem: int,
        elemsize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        orients: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> None:
        signs = _orients(orients, integer("nelem", nelem), integer("elemsize", elemsize, 1))
        self._create_offset(ceed, (nelem, elemsize, ncomp, compstride, lsize), offsets, memtype, cmode, signs)


class CurlOrientedElemRestriction(ElemRestriction):
    """An element restriction that mixes neighbouring nodes, as H(curl) elements need.

    Made by :meth:`ceedtap.Ceed.CurlOrientedElemRestriction`. Each element multiplies its nodes by a tridiagonal matrix.

    Args:
        nelem, elemsize, ncomp, compstride, lsize, offsets, memtype, cmode: as for :class:`ElemRestriction`.
        curl_orients: integers in [-128, 127], three per offset: the row of the matrix, that is the factors of the node
            before, of the node itself, and of the node after it.

    Raises:
        TypeError: values that are no integers.
        ValueError: sizes out of range, another number of values, or an offset that leads out of the L-vector.
    """

    _orientation = "CurlOriented"

    def __init__(
        self,
        ceed: Ceed,
        nelem: int,
        elemsize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        curl_orients: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> None:
        rows = _curl_orients(curl_orients, integer("nelem", nelem), integer("elemsize", elemsize, 1))
        self._create_offset(ceed, (nelem, elemsize, ncomp, compstride, lsize), offsets, memtype, cmode, rows)


class StridedElemRestriction(_ElemRestriction):
    """An element restriction given by strides; made by :meth:`ceedtap.Ceed.StridedElemRestriction`.

    Component ``c`` of node ``n`` of element ``e`` is entry ``strides @ (n, c, e)`` of the L-vector.

    Args:
        nelem, elemsize, ncomp: numbers of elements, of nodes per element, of components.
        lsize: length of the L-vector.
        strides: three integers, or STRIDES_BACKEND for the order that the backend likes best, see :meth:`get_l_layout`.

    Raises:
        TypeError: strides that are no integers.
        ValueError: sizes out of range, other than three strides, or strides that lead out of the L-vector.

    >>> import ceedtap as ct
    >>> ct.Ceed("/cpu/self/ref/serial").StridedElemRestriction(10, 4, 2, 80, [1, 4, 8])
    <StridedElemRestriction nelem=10 elemsize=4 ncomp=2 lsize=80>
    """

    strides: tuple[int, int, int] | None

    def __init__(
        self, ceed: Ceed, nelem: int, elemsize: int, ncomp: int, lsize: int, strides: npt.ArrayLike | Sentinel
    ) -> None:
        self._create_strided(ceed, (nelem, elemsize, ncomp, lsize), strides)

    def _create_strided(self, ceed: Ceed, sizes: tuple[int, int, int, int], strides: npt.ArrayLike | Sentinel) -> None:
        self._sizes(*sizes)
        ffi = ceed.library.ffi
        self.strides = None
        if strides is STRIDES_BACKEND:
            pointer, last = STRIDES_BACKEND.pointer(ceed.library), self.esize - 1
        else:
            values = integers("strides", strides, 3, 0, INT_MAX + 1)
            pointer = ffi.from_buffer("CeedInt[]", values)
            self.strides = int(values[0]), int(values[1]), int(values[2])
            extents = (self.elemsize - 1, self.ncomp - 1, self.nelem - 1)
            last = sum(stride * extent for stride, extent in zip(self.strides, extents, strict=True))
        if self.nelem and last >= self.lsize:
            raise ValueError(
                f"strides {strides!r} lead to entry {last} of an L-vector of {self.lsize} (nelem = {self.nelem}, "
                f"elemsize = {self.elemsize}, ncomp = {self.ncomp})"
            )
        block = self._block

        def create(handle: Any) -> None:
            ceed._call(
                f"CeedElemRestrictionCreate{'Blocked' if block else ''}Strided",
                ceed.pointer,
                self.nelem,
                self.elemsize,
                *block,
                self.ncomp,
                self.lsize,
                pointer,
                handle,
            )

        self._own(ceed, "CeedElemRestriction", create)

    def get_l_layout(self) -> tuple[int, int, int]:
        """Strides ``(node, component, element)`` of the L-vector.

        Raises:
            CeedUnsupportedError: the strides are STRIDES_BACKEND, and libCEED is older than 1.0.
        """
        if self.strides is not None:
            return self.strides
        layout = self.ceed.library.ffi.new("CeedInt[3]")
        self._call("CeedElemRestrictionGetLLayout", self.pointer, layout)
        return layout[0], layout[1], layout[2]


class AtPointsElemRestriction(_ElemRestriction):
    """A restriction to points, a different number in each element.

    Made by :meth:`ceedtap.Ceed.AtPointsElemRestriction`.

    Component ``c`` of point ``p`` is entry ``p * ncomp + c`` of the L-vector. The E-vector has one element after the
    other, in each of them the components slowest.

    Args:
        nelem: number of elements.
        ncomp: components per point.
        lsize: length of the L-vector, at least ``ncomp`` times the number of points.
        points: for each element the numbers of its points, a list of integer sequences.

    Raises:
        CeedUnsupportedError: libCEED is older than 1.0, whose operators have no use for it.
        TypeError, ValueError: sizes out of range, or a point outside of the L-vector.
    """

    def __init__(self, ceed: Ceed, nelem: int, ncomp: int, lsize: int, points: Sequence[npt.ArrayLike]) -> None:
        ceed.library.first("CeedOperatorCreateAtPoints")
        self._sizes(nelem, 1, ncomp, lsize)
        if len(points) != self.nelem or not self.nelem:
            raise ValueError(
                f"points: expected the points of {nelem} elements, got {len(points)}; there is at least one"
            )
        lists = [integers("points", p, np.size(p), 0, min(self.lsize // self.ncomp, INT_MAX)) for p in points]
        counts = [p.size for p in lists]
        self.num_points = sum(counts)
        if self.num_points * self.ncomp > self.lsize or self.num_points + self.nelem >= INT_MAX:
            raise ValueError(f"points: {self.num_points} points of {ncomp} components in an L-vector of {lsize}")
        self.elemsize = max(counts)
        starts = self.nelem + 1 + np.concatenate([[0], np.cumsum(counts)])
        offsets = np.concatenate([starts, *lists]).astype(np.int32)
        pointer = ceed.library.ffi.from_buffer("CeedInt[]", offsets)

        def create(handle: Any) -> None:
            sizes = (self.nelem, self.num_points, self.ncomp, self.lsize)
            ceed._call(
                "CeedElemRestrictionCreateAtPoints", ceed.pointer, *sizes, MEM_HOST, COPY_VALUES, pointer, handle
            )

        self._own(ceed, "CeedElemRestriction", create)
        size = ceed.library.ffi.new("CeedSize *")
        self._call("CeedElemRestrictionGetEVectorSize", self.pointer, size)
        self._esize = int(size[0])
        self.points = tuple(tuple(p.tolist()) for p in lists)

    @property
    def esize(self) -> int:
        """Length of the E-vector, which backends may fill up at its end."""
        return self._esize

    def apply_at_points_in_element(
        self, elem: int, u: Vector, v: Vector, tmode: int = NOTRANSPOSE, request: Sentinel = REQUEST_IMMEDIATE
    ) -> None:
        """Applies the restriction to the points of one element, or its transpose.

        Args:
            elem: number of the element.
            u: the L-vector; with TRANSPOSE the values at the points of the element, components slowest.
            v: those values, overwritten; with TRANSPOSE the L-vector, to which they are ADDED.
            tmode: NOTRANSPOSE or TRANSPOSE.
            request: REQUEST_IMMEDIATE.

        Raises:
            TypeError, ValueError, CeedAccessError: as :meth:`apply`.
        """
        elem = integer("elem", elem, 0, self.nelem - 1)
        size = len(self.points[elem]) * self.ncomp
        self._apply("CeedElemRestrictionApplyAtPointsInElement", (elem,), u, v, tmode, request, size)

    def __repr__(self) -> str:
        sizes = f"nelem={self.nelem} num_points={self.num_points} ncomp={self.ncomp} lsize={self.lsize}"
        return f"<AtPointsElemRestriction {sizes}>"


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
    if u is v or u._overlaps(v):
        raise ValueError(f"{names} share memory; libCEED needs an output of its own")
