"""Variables of the generated C are named after those of the user's source."""

import keyword
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import check, source_of, standalone

import ceedtap as ct
from ceedtap.codegen_names import assignment, c_names, is_c_name
from ceedtap.codegen_qfunction import Argument, qfunction
from ceedtap.toolchain import compile_shared


def lines(source):
    """By variable, what is assigned to it."""
    body = source.split("CEED_QFUNCTION")[-1]
    return dict(re.findall(r"const double (\w+) = (.*);", body))


def diffusion(u, x, w):
    J = x.T
    K = jnp.linalg.inv(J)
    dV = w * jnp.linalg.det(J)
    flux = K @ K.T @ u
    return dV * flux


def test_values_have_the_names_of_the_source():
    named = lines(source_of(diffusion, (2,), (2, 2), ()))
    assert named["J_01"] == "u1[2 * Q + i]"
    assert {"K_00", "K_01", "K_10", "K_11", "flux_0", "flux_1", "u0_0", "u0_1", "u2_i"} <= named.keys()
    assert named["dV"].startswith("u2_i * ")
    assert named["v0_1"] == "dV * flux_1"


def energy(F):
    J = jnp.linalg.det(F)
    lnJ = jnp.log(J)
    s = jnp.sin(lnJ)
    mean = jnp.mean(F)
    return s * J + mean


def test_names_are_those_of_the_values_and_not_of_their_derivatives():
    for function, shapes in (
        (energy, ((2, 2),)),
        (jax.grad(energy), ((2, 2),)),
        (lambda F, d: jax.jvp(energy, (F,), (d,)), ((2, 2),) * 2),
        (lambda F, d: jax.jvp(jax.grad(energy), (F,), (d,))[1], ((2, 2),) * 2),
    ):
        named = lines(source_of(function, *shapes))
        assert named["lnJ"] == "ceedtap_log(J)"
        assert re.fullmatch(r"\w+ [-+*] \w+", named["J"])
        if "s" in named:
            assert named["s"] == "sin(lnJ)"
        # Of a quotient and its derivative, which stand in one line, neither is known to be the value.
        assert "mean" not in named or function is energy


def test_the_tangent_of_an_operator():
    space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=1)

    @ct.operator(inputs={"u": space.value, "x": space.geometry.grad, "w": space.weight}, outputs={"v": space.value})
    def mass(u, x, w):
        J = jnp.linalg.det(x)
        cube = u * u * u
        return w * J * cube

    tangent, _ = mass._application.jvp((True, False))
    for source in (mass.source, tangent.function.source[0]):
        named = lines(source)
        assert re.fullmatch(r"u_i \* \w+|\w+ \* u_i", named["cube"]) if "cube" in named else source is not mass.source
        assert re.fullmatch(r"\w+ [-+*] \w+", named["J"])


def same_names(x):
    log = jnp.log(x)
    double = log * 2
    t1 = double + x
    Q = t1 * t1
    i = Q - 1
    x_0 = i * i
    λ = x_0 + 2
    M_PI = λ * x
    return M_PI, jnp.stack([log, t1, i])


def test_names_that_c_has_already():
    x = np.random.default_rng(0).uniform(1, 2, 5)
    named = lines(check(same_names, x).source)
    assert {"log_", "double_", "t1_2", "Q_", "i_", "x_0", "fM_PI"} <= named.keys() | {"t1_2", "fM_PI"}
    assert not {"log", "double", "Q", "i", "M_PI", "λ"} & named.keys()


def twice(x):
    def square(y):
        s = y * y
        return s + 1

    return square(x) + square(x + 1) + square(x - 1)


def test_one_line_more_than_once():
    assert {"s", "s2", "s3"} <= lines(check(twice, np.arange(1.0, 5.0)).source).keys()

    def often(x):
        for _ in range(40):
            y = x * 1.5
            x = jnp.sin(y)
        return x

    named = lines(check(often, np.arange(1.0, 5.0)).source)
    assert len([n for n in named if n.startswith("y")]) == 9


def test_large_arrays_have_one_name():
    def layer(x):
        hidden = jnp.tanh(jnp.asarray(np.sin(np.arange(64.0 * 3)).reshape(64, 3)) @ x)
        return hidden, hidden[0]

    assert "double hidden[64];" in source_of(layer, (3,))
    check(layer, np.ones((3, 3)))


def test_the_source_is_the_same_every_time():
    assert source_of(diffusion, (2,), (2, 2), ()) == source_of(diffusion, (2,), (2, 2), ())


def test_fields_may_have_any_name():
    names = ["in", "Q", "i", "double", "log", "t1", "ctx", "ceedtap_log", "M_PI", "class"]
    closed = jax.make_jaxpr(lambda *x: jnp.log(sum(x)))(*[1.0] * len(names))
    source = qfunction("f", closed, [Argument(n) for n in names], ["out"])
    compile_shared(standalone(source))
    assert " = in[9];" in source


@pytest.mark.parametrize(
    ("line", "names", "expression"),
    [
        ("    J = x.T\n", ("J",), "x.T"),
        ("  a: float = b + c  # why", ("a",), "b + c"),
        ("q, r = jnp.linalg.qr(a)", ("q", "r"), "jnp.linalg.qr(a)"),
        ("a = b = c", None, ""),
        ("a += b", None, ""),
        ("a.b = c", None, ""),
        ("a = f(", None, ""),
        ("return a", None, ""),
        ("", None, ""),
    ],
)
def test_assignments(line, names, expression):
    found = assignment(line)
    assert (found and found.names) == names
    if found:
        assert line[slice(*found.columns)] == expression


def test_c_names():
    assert c_names(["a", "a", "a_", "in", "_x", "CeedInt", "1", "a-b"]) == ["a", "a_", "a__", "in_", "f_x", "fCeedInt",
                                                                           "f1", "a_b"]  # fmt: skip
    assert all(is_c_name(n) for n in ("J", "x_0", "lnJ", "I1"))
    assert not any(is_c_name(n) for n in ("int", "sin", "_a", "CEED_X", "é", "2a", "M_PI"))


def test_a_variable_with_the_name_of_those_without_one_is_named_again_and_again():
    """The prefix of numbered variables is `t`; a user's `t` that is assigned in a row once never came to an end."""

    def total(x):
        t = x[0] * 2.0
        t = t + x[1]
        t = t * x[2]
        t2 = t + 1.0
        return t2 * t

    run = check(total, np.random.default_rng(0).random((5, 3)))
    assert {"t", "t_2", "t_3"} <= lines(run.source).keys()


ANY_NAME = [
    "Wärmeleitung", "3d-elasticity", "", " ", "double", "main", "_", "日本語", "a" * 300, "operator=", 'quo"te',
    "new\nline", "*/", "100%s", "back\\slash", "sin", "in", "f.<locals>.<lambda>",
]  # fmt: skip


@pytest.mark.parametrize("name", ANY_NAME)
def test_an_operator_has_any_name(name):
    """And so have functions of plain arrays, their fields, and their derivatives."""
    space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=1)
    field = name if name.isidentifier() and not keyword.iskeyword(name) else "u"  # a parameter of the function
    inputs = {field: space.value, "w": space.weight}

    def mass(**given):
        return given["w"] * given[field] ** 3

    operator = ct.operator(inputs=inputs, outputs={f"{field}v": space.value}, name=name)(mass)
    u = jnp.asarray(space.nodes[:, 0])
    np.testing.assert_allclose(operator(u), operator.reference(u), rtol=1e-13, atol=1e-15)
    du = jnp.ones_like(u)
    for f in (lambda f: jax.jvp(f, (u,), (du,))[1], lambda f: jax.vjp(f, u)[1](du)[0]):
        np.testing.assert_allclose(f(operator), f(operator.reference), rtol=1e-13, atol=1e-15)
    mass_at = ct.pointwise(lambda x: 2.0 * x)

    def doubled(x):
        return 2.0 * x

    doubled.__name__ = name
    mass_at = ct.pointwise(doubled)
    np.testing.assert_array_equal(mass_at(u), 2 * u)
    np.testing.assert_array_equal(jax.grad(lambda x: mass_at(x).sum())(u), 2 * du)


def test_derivatives_of_fields_that_have_the_names_of_derivatives():
    space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=1)
    names = ("u", "du", "dv", "v_bar", "u_bar", "du_bar")

    def product(w, **fields):
        out = w
        for value in fields.values():
            out = out * (1 + value)
        return out

    operator = ct.operator(
        inputs={**dict.fromkeys(names, space.value), "w": space.weight}, outputs={"v": space.value}, name="product"
    )(product)
    values = [jnp.asarray(x) for x in np.random.default_rng(0).random((6, *space.shape))]
    np.testing.assert_allclose(
        jax.jvp(operator, values, values[::-1])[1], jax.jvp(operator.reference, values, values[::-1])[1], rtol=1e-12
    )
    for got, want in zip(
        jax.vjp(operator, *values)[1](values[0]), jax.vjp(operator.reference, *values)[1](values[0]), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-12)
