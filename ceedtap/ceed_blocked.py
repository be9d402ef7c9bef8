"""Element restrictions to blocks of elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy.typing as npt

from ceedtap.ceed_constants import COPY_VALUES, MEM_HOST, NOTRANSPOSE, REQUEST_IMMEDIATE, TRANSPOSE, Sentinel
from ceedtap.ceed_object import integer
from ceedtap.ceed_restriction import (
    ElemRestriction,
    StridedElemRestriction,
    TransposeElemRestriction,
    _curl_orients,
    _ElemRestriction,
    _orients,
)
from ceedtap.ceed_vector import Vector

if TYPE_CHECKING:
    from ceedtap.ceed import Ceed


class _Blocked(_ElemRestriction):
    """What the restrictions to blocks of elements share.

    The E-vector has its elements in blocks of `blksize`, in which the element is the fastest index; the last block is
    filled up with copies of the last element. Such a restriction is not for operators.
    """

    blksize: int

    @property
    def _block(self) -> tuple[int, ...]:
        return (self.blksize,)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.nelem // self.blksize)

    @property
    def esize(self) -> int:
        """Length of the E-vector, with the last block filled up."""
        return self.num_blocks * self.blksize * self.elemsize * self.ncomp

    def apply_block(
        self, block: int, u: Vector, v: Vector, tmode: int = NOTRANSPOSE, request: Sentinel = REQUEST_IMMEDIATE
    ) -> None:
        """Applies the restriction of one block, or its transpose.

        Args:
            block: number of the block.
            u: the L-vector; with TRANSPOSE the block, of ``blksize * elemsize * ncomp`` entries.
            v: the block, overwritten; with TRANSPOSE the L-vector, to which the sums are ADDED.
            tmode: NOTRANSPOSE or TRANSPOSE.
            request: REQUEST_IMMEDIATE.

        Raises:
            TypeError, ValueError, CeedAccessError: as :meth:`apply`.
        """
        block = integer("block", block, 0, max(self.num_blocks - 1, 0))
        if not self.nelem:
            raise ValueError(f"block: {self!r} has none")
        self._apply("CeedElemRestrictionApplyBlock", (block,), u, v, tmode, request, self.esize // self.num_blocks)

    @property
    def T(self) -> TransposeBlockedElemRestriction:
        """The transpose."""
        return TransposeBlockedElemRestriction(self)

    def transpose(self) -> TransposeBlockedElemRestriction:
        """The transpose."""
        return TransposeBlockedElemRestriction(self)


class BlockedElemRestriction(_Blocked, ElemRestriction):
    """An :class:`ElemRestriction` to blocks of elements; made by :meth:`ceedtap.Ceed.BlockedElemRestriction`.

    Args:
        blksize: elements in a block.
        nelem, elemsize, ncomp, compstride, lsize, offsets, memtype, cmode: as for :class:`ElemRestriction`.
    """

    def __init__(
        self,
        ceed: Ceed,
        nelem: int,
        elemsize: int,
        blksize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> None:
        self.blksize = integer("blksize", blksize, 1, 4096)
        self._create_offset(ceed, (nelem, elemsize, ncomp, compstride, lsize), offsets, memtype, cmode)


class BlockedOrientedElemRestriction(_Blocked, ElemRestriction):
    """An :class:`OrientedElemRestriction` to blocks of elements."""

    _orientation = "Oriented"

    def __init__(
        self,
        ceed: Ceed,
        nelem: int,
        elemsize: int,
        blksize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        orients: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> None:
        self.blksize = integer("blksize", blksize, 1, 4096)
        signs = _orients(orients, integer("nelem", nelem), integer("elemsize", elemsize, 1))
        self._create_offset(ceed, (nelem, elemsize, ncomp, compstride, lsize), offsets, memtype, cmode, signs)


class BlockedCurlOrientedElemRestriction(_Blocked, ElemRestriction):
    """A :class:`CurlOrientedElemRestriction` to blocks of elements."""

    _orientation = "CurlOriented"

    def __init__(
        self,
        ceed: Ceed,
        nelem: int,
        elemsize: int,
        blksize: int,
        ncomp: int,
        compstride: int,
        lsize: int,
        offsets: npt.ArrayLike,
        curl_orients: npt.ArrayLike,
        memtype: int = MEM_HOST,
        cmode: int = COPY_VALUES,
    ) -> None:
        self.blksize = integer("blksize", blksize, 1, 4096)
        rows = _curl_orients(curl_orients, integer("nelem", nelem), integer("elemsize", elemsize, 1))
        self._create_offset(ceed, (nelem, elemsize, ncomp, compstride, lsize), offsets, memtype, cmode, rows)


class BlockedStridedElemRestriction(_Blocked, StridedElemRestriction):
    """A :class:`StridedElemRestriction` to blocks of elements."""

    def __init__(
        self,
        ceed: Ceed,
        nelem: int,
        elemsize: int,
        blksize: int,
        ncomp: int,
        lsize: int,
        strides: npt.ArrayLike | Sentinel,
    ) -> None:
        self.blksize = integer("blksize", blksize, 1, 4096)
        self._create_strided(ceed, (nelem, elemsize, ncomp, lsize), strides)


class TransposeBlockedElemRestriction(TransposeElemRestriction):
    """The transpose of a restriction to blocks."""

    def __init__(self, elemrestriction: _Blocked) -> None:
        super().__init__(elemrestriction)
        self._blocked = elemrestriction

    def apply_block(self, block: int, u: Vector, v: Vector, request: Sentinel = REQUEST_IMMEDIATE) -> None:
        """Adds the sums of the block `u` to the L-vector `v`."""
        self._blocked.apply_block(block, u, v, TRANSPOSE, request)
