"""Arrays that carry more than numbers, such as masks or units, are refused wherever arrays come in."""

import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap.plain_arrays import check_plain, plain_array


class Quantity:
    """As in pint: an object around an array."""

    def __init__(self, magnitude, units="m"):
        self.magnitude, self.units = np.asarray(magnitude), units
        self.dtype, self.shape = self.magnitude.dtype, self.magnitude.shape

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.magnitude, dtype)

    def __float__(self):
        return float(self.magnitude)

    def __len__(self):
        return len(self.magnitude)

    def __index__(self):
        return int(self.magnitude)


class UnitArray(np.ndarray):
    """As in astropy and unyt: a subclass with a unit."""

    def __array_finalize__(self, obj):
        self.unit = getattr(obj, "unit", "m")


class Labelled(np.ndarray):
    """A subclass with state of another kind."""

    def __array_finalize__(self, obj):
        self.labels = getattr(obj, "labels", None)


KINDS = {
    "masked": lambda a: np.ma.masked_array(a, mask=np.zeros(np.shape(a), bool)),
    "masked somewhere": lambda a: np.ma.masked_array(a, mask=np.arange(np.size(a)).reshape(np.shape(a)) % 2 == 1),
    "matrix": lambda a: np.reshape(a, (1, -1)).view(np.matrix),
    "quantity": Quantity,
    "unit array": lambda a: np.asarray(a).view(UnitArray),
    "labelled": lambda a: np.asarray(a).view(Labelled),
    "list of masked": lambda a: [np.ma.masked_array(x) for x in np.asarray(a).reshape(-1)],
    "tuple of quantities": lambda a: tuple(Quantity(x) for x in np.asarray(a).reshape(-1)),
}

ROWS = np.array([[0, 1], [1, 2]])
FOUR = np.arange(4.0)
QUAD = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


@ct.pointwise
def double(x):
    return 2.0 * x


def point_operator(one):
    V = ct.Space(one, ct.mesh.box(1, 1), degree=1)

    @ct.operator(inputs={"u": V.value, "w": V.weight}, outputs={"v": V.value}, params={"k": 1.0})
    def point(u, w, params):
        return params["k"] * u * w

    return point


PLACES = {
    "offsets": (ROWS, lambda c, a: c.ElemRestriction(2, 2, 1, 1, 3, a)),
    "oriented offsets": (ROWS, lambda c, a: c.OrientedElemRestriction(2, 2, 1, 1, 3, a, np.zeros((2, 2), bool))),
    "blocked offsets": (ROWS, lambda c, a: c.BlockedElemRestriction(2, 2, 8, 1, 1, 3, a)),
    "orients": (ROWS > 0, lambda c, a: c.OrientedElemRestriction(2, 2, 1, 1, 3, ROWS, a)),
    "curl orients": (np.zeros((2, 6), int), lambda c, a: c.CurlOrientedElemRestriction(2, 2, 1, 1, 3, ROWS, a)),
    "strides": (np.array([1, 2, 2]), lambda c, a: c.StridedElemRestriction(2, 2, 1, 4, a)),
    "blocked strides": (np.array([1, 2, 2]), lambda c, a: c.BlockedStridedElemRestriction(2, 2, 8, 1, 4, a)),
    "interp1d": (np.ones((2, 2)), lambda c, a: c.BasisTensorH1(1, 1, 2, 2, a, np.ones(4), np.ones(2), np.ones(2))),
    "qweight": (np.ones(2), lambda c, a: c.BasisH1(ct.LINE, 1, 2, 2, np.ones(4), np.ones(4), np.ones(2), a)),
    "set_array": (FOUR, lambda c, a: c.Vector(4).set_array(a)),
    "shared": (FOUR, lambda c, a: c.Vector(4).set_array(a, cmode=ct.USE_POINTER)),
    "from_dlpack": (FOUR, lambda c, a: ct.Vector.from_dlpack(c, a)),
    "context field": (FOUR, lambda c, a: c.QFunctionContext({"a": a})),
    "context update": (FOUR, lambda c, a: c.QFunctionContext({"a": FOUR}).update(a=a)),
    "context data": (FOUR, lambda c, a: c.QFunctionContext().set_data(a)),
    "mesh points": (QUAD, lambda c, a: ct.mesh.Mesh(a, np.array([[0, 1, 2, 3]]), 1)),
    "mesh cells": (np.array([[0, 1, 2, 3]]), lambda c, a: ct.mesh.Mesh(QUAD, a, 1)),
    "mesh from points": (QUAD, lambda c, a: ct.mesh.Mesh.from_arrays(a, np.array([[0, 1, 3, 2]]), "quad")),
    "mesh from cells": (np.array([[0, 1, 3, 2]]), lambda c, a: ct.mesh.Mesh.from_arrays(QUAD, a, "quad")),
    "mesh corner": (np.zeros(2), lambda c, a: ct.mesh.box(1, 1, lower=a)),
    "warped mesh": (QUAD, lambda c, a: ct.mesh.box(1, 1, warp=lambda x: a)),
    "interpolation": (FOUR, lambda c, a: ct.Space(c, ct.mesh.box(1, 1), degree=1).interpolate(lambda x: a)),
    "operator": (FOUR, lambda c, a: point_operator(c)(a, params={"k": 1.0})),
    "bound field": (FOUR, lambda c, a: point_operator(c).bind(u=a)),
    "parameters": (np.array(1.0), lambda c, a: point_operator(c)(jnp.ones(4), params={"k": a})),
    "pointwise": (FOUR, lambda c, a: double(a)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_refused_everywhere(one, place, kind):
    plain, take = PLACES[place]
    if place == "parameters" and kind in ("matrix", "list of masked", "tuple of quantities"):
        kind = "masked"  # a scalar
    value = KINDS[kind](plain)
    with pytest.raises((TypeError, ct.mesh.MeshError)) as info:
        take(one, value)
    if place not in ("shared", "from_dlpack", "context data") or isinstance(value, np.ndarray):
        assert "carries more than numbers" in str(info.value), info.value


@pytest.mark.parametrize("place", PLACES)
def test_plain_ones_are_taken(one, place, tmp_path):
    plain, take = PLACES[place]
    plain = np.array(plain)
    take(one, plain)
    mapped = np.memmap(tmp_path / "array", plain.dtype, "w+", shape=plain.shape or (1,))
    mapped[...] = plain
    take(one, mapped if plain.shape else mapped[0])


def test_what_the_message_says():
    with pytest.raises(TypeError, match=r"x: numpy\.ma.*\.MaskedArray carries .* a mask, .*use \.filled"):
        check_plain("x", np.ma.masked_array([1.0, 2.0]))
    with pytest.raises(TypeError, match=r"a unit, .*\.magnitude or \.value"):
        check_plain("x", [1.0, Quantity(2.0)])
    with pytest.raises(TypeError, match=r"whatever its type adds, .*numpy\.asarray"):
        check_plain("x", np.ones((1, 1)).view(np.matrix))


def test_types_that_add_nothing():
    class Plain(np.ndarray):
        pass

    for value in ([1, 2.0], (1, [2]), np.float64(1), jnp.ones(2), np.ones(2).view(Plain), np.ones(2).view(np.recarray)):
        check_plain("x", value)
    assert plain_array("x", [1.0, 2.0]).tolist() == [1, 2]


def test_numbers(one):
    vector = one.Vector(2)
    for value in (np.ma.masked, Quantity(2.0), np.asarray(2.0).view(UnitArray)):
        with pytest.raises(TypeError, match="carries more than numbers"):
            vector.set_value(value)


def test_embedded_operators_refuse_them(one):
    op = one.Operator(one.IdentityQFunction(1, ct.EVAL_NONE, ct.EVAL_NONE))
    points = one.StridedElemRestriction(2, 2, 1, 4, [1, 2, 2])
    for name in op.qfunction.fields:
        op.set_field(name, points, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
    f = ct.embed(op, symmetric=True)
    assert f(FOUR).tolist() == [0, 1, 2, 3]
    for kind in KINDS.values():
        with pytest.raises(TypeError, match="carries more than numbers"):
            f(kind(FOUR))
