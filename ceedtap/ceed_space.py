"""Spaces of libCEED's own objects, for what :class:`ceedtap.Space` does not offer."""

from __future__ import annotations

import functools

import numpy as np

from ceedtap.ceed import (
    AtPointsElemRestriction,
    Basis,
    Ceed,
    ElemRestriction,
    StridedElemRestriction,
)
from ceedtap.elements import ElementSpace
from ceedtap.lattice import IntArray, frozen


class CeedSpace(ElementSpace):
    """A space made of a libCEED restriction and basis: simplices, H(div), H(curl), or elements of your own.

    A field of the space is an L-vector: an array of shape (lsize,), laid out as the restriction says. The evaluations
    that the basis has are its fields: ``.value``, ``.grad``, ``.div``, ``.curl``, ``.weight``. Spaces of one operator
    have the same elements in the same order and the same quadrature points; only the numbers of these are checked.

    Args:
        restriction: with offsets (oriented or not) or strides.
        basis: with the restriction's nodes and components, on the same Ceed.

    Raises:
        TypeError: another kind of restriction, or no basis.
        ValueError: they do not fit together.

    Two triangles that make the unit square, and its area:

    >>> import ceedtap as ct, numpy as np, jax.numpy as jnp, jax
    >>> jax.config.update("jax_enable_x64", True)
    >>> ceed = ct.Ceed("/cpu/self")
    >>> points = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> corners = np.array([[0, 1, 2], [3, 2, 1]])
    >>> third = np.full((1, 3), 1 / 3)
    >>> slopes = np.array([[-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0]])
    >>> where, weight = np.full(2, 1 / 3), np.array([0.5])
    >>> basis = ceed.BasisH1(ct.TRIANGLE, 2, 3, 1, third, slopes, where, weight)
    >>> X = ct.CeedSpace(ceed.ElemRestriction(2, 3, 2, 1, 8, 2 * corners), basis)
    >>> area = ct.operator(inputs=dict(x=X.grad, w=X.weight), outputs=dict(a=ct.quadrature()))(
    ...     lambda x, w: w * jnp.linalg.det(x)
    ... )
    >>> print(area(points.reshape(-1)).ravel())
    [0.5 0.5]
    """

    def __init__(self, restriction: ElemRestriction | StridedElemRestriction, basis: Basis) -> None:
        if not isinstance(restriction, (ElemRestriction, StridedElemRestriction)) or hasattr(restriction, "num_blocks"):
            what = type(restriction).__name__
            hint = "; points that differ between elements need a libCEED operator and ct.embed" if isinstance(
                restriction, AtPointsElemRestriction
            ) else ""  # fmt: skip
            raise TypeError(f"restriction: expected one with offsets or strides, not blocked, got {what}{hint}")
        if not isinstance(basis, Basis):
            raise TypeError(f"basis: expected a ceedtap.Basis, got {type(basis).__name__}")
        if restriction.ceed.lock is not basis.ceed.lock:
            raise ValueError(f"the restriction is on {restriction.ceed!r}, the basis on another Ceed, {basis.ceed!r}")
        ours, theirs = (restriction.elemsize, restriction.ncomp), (basis.num_nodes, basis.ncomp)
        if ours != theirs:
            raise ValueError(
                f"the restriction has {ours[0]} nodes and {ours[1]} components, the basis {theirs[0]} and {theirs[1]}"
            )
        self.ceed = restriction.ceed
        self.restriction = restriction
        self.basis = basis

    def __repr__(self) -> str:
        return f"CeedSpace({self.restriction!r}, {self.basis!r})"

    @property
    def shape(self) -> tuple[int, ...]:
        """(lsize,)"""
        return (self.restriction.lsize,)

    @property
    def where(self) -> str:
        return f"{self.num_elements} elements of {self.restriction!r}"

    def on(self, ceed: Ceed) -> CeedSpace:
        if ceed is not self.ceed:
            raise TypeError(f"{self!r} stays on its Ceed; make its restriction and basis on the other one")
        return self

    @functools.cached_property
    def _signed(self) -> tuple[IntArray, np.ndarray | None]:
        """Entries of the L-vector and their signs, found by looking at what the restriction does."""
        size = self.shape[0]
        entries = self._restricted(np.arange(1.0, size + 1))
        signs, dofs = np.sign(entries), np.clip(np.abs(entries).astype(np.int64) - 1, 0, size - 1)
        probe = np.random.default_rng(0).normal(size=size).astype(self.ceed.library.scalar_dtype)
        if not np.array_equal(self._restricted(probe), signs * probe[dofs]):
            raise NotImplementedError(
                f"{self!r}: its restriction mixes degrees of freedom (curl-oriented), which plain JAX evaluation and "
                "assembly do not know; calls through libCEED do"
            )
        return frozen(dofs), None if (signs == 1).all() else frozen(signs)

    def _restricted(self, values: np.ndarray) -> np.ndarray:
        """(elements, nodes, components) entries of the E-vector."""
        r = self.restriction
        u, v = self.ceed.Vector(r.lsize), self.ceed.Vector(r.esize)
        u.set_array(values.astype(self.ceed.library.scalar_dtype))
        v.set_value(0.0)
        r.apply(u, v)
        node, component, element = r.get_e_layout()
        places = np.add.outer(
            np.add.outer(np.arange(r.nelem) * element, np.arange(r.elemsize) * node), np.arange(r.ncomp) * component
        )
        with v.array_read() as entries:
            return np.array(entries)[places]

    @property
    def element_dofs(self) -> IntArray:
        return self._signed[0]

    @property
    def orientation(self) -> np.ndarray | None:
        return self._signed[1]
