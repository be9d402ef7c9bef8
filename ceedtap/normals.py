"""Normals of facets at quadrature points."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def normal(tangents: Any) -> Any:
    """The outward normal of a facet at a quadrature point, as long as the area is large: for use in point functions.

    Args:
        tangents: derivatives of the coordinates along the facet, of shape (dim - 1, dim) with dim 2 or 3: the value of
            ``V.geometry.boundary(...).grad`` for the mesh's points.

    Returns:
        the normal, of shape (dim,). Its length is the ratio of areas of the facet and its reference element, so
        ``w * normal(tangents)`` is the vectorial area that belongs to a quadrature point, and
        ``w * jnp.linalg.norm(normal(tangents))`` the area.

    Raises:
        ValueError: another shape.

    The flux of the position vector out of a square is twice its area:

    >>> import ceedtap as ct, jax, jax.numpy as jnp
    >>> jax.config.update("jax_enable_x64", True)
    >>> mesh = ct.mesh.box(2, 2, upper=3)
    >>> X = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=1, components=2).boundary()
    >>> @ct.operator(inputs=dict(x=(X.value, X.grad), w=X.weight), outputs=dict(flux=ct.quadrature()))
    ... def out(x, w):
    ...     position, tangents = x
    ...     return w * position @ ct.normal(tangents)
    >>> print(round(float(out(mesh.points).sum()), 12))
    18.0
    """
    tangents = jnp.asarray(tangents)
    if tangents.shape == (1, 2):
        ((x, y),) = tangents
        return jnp.stack([y, -x])
    if tangents.shape == (2, 3):
        (a, b, c), (d, e, f) = tangents
        return jnp.stack([b * f - c * e, c * d - a * f, a * e - b * d])
    raise ValueError(f"tangents: expected the shape (1, 2) or (2, 3), got {tangents.shape}")
