"""What can be tapped: numbers of Python in every transformation, labels that are traced, and what is refused."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ceedtap as ct


def record(events):
    def consumer(*values, transforms=(), **labels):
        event = tuple(np.asarray(v).tolist() for v in values), tuple(name for name, _ in transforms)
        events.append((*event, {name: np.asarray(v).tolist() for name, v in labels.items()}) if labels else event)

    return consumer


def events_of(run, *args):
    events = []
    with ct.outfeed_receiver(60):
        result = jax.block_until_ready(run(record(events))(*args))
    return result, events


# -- numbers of Python -----------------------------------------------------------------------------------------------

NUMBERS = {"int": 3, "float": 2.5, "bool": True, "complex": 1j}


def tap_number(consumer, number, **options):
    return lambda h: ct.id_tap(consumer, number, h, **options)[1] * 2


PROGRAMS = {
    "grad(jit)": lambda f: jax.grad(jax.jit(f)),
    "grad": jax.grad,
    "jit(grad)": lambda f: jax.jit(jax.grad(f)),
    "jvp": lambda f: lambda h: jax.jvp(f, (h,), (1.0,))[1],
    "vjp": lambda f: lambda h: jax.vjp(f, h)[1](1.0)[0],
    "grad(scan)": lambda f: jax.grad(lambda h: lax.scan(lambda c, _: (f(c), None), h, None, length=1)[0]),
    "jvp(scan)": lambda f: (
        lambda h: jax.jvp(lambda h: lax.scan(lambda c, _: (f(c), None), h, None, length=1)[0], (h,), (1.0,))[1]
    ),
    "grad(fori)": lambda f: jax.grad(lambda h: lax.fori_loop(0, 1, lambda _, c: f(c), h)),
    "grad(cond)": lambda f: jax.grad(lambda h: lax.cond(h > 0, f, lambda h: h, h)),
    "jvp(while)": lambda f: (
        lambda h: jax.jvp(
            lambda h: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, h))[1], (h,), (1.0,)
        )[1]
    ),
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(f)),
    "grad(checkpoint(jit))": lambda f: jax.grad(jax.checkpoint(jax.jit(f))),
    "grad(custom_jvp)": lambda f: jax.grad(lambda h: jax.jit(f)(h)),
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("transform", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("flavour", [{}, {"ordered": True}, {"stateful": False}], ids=str)
def test_numbers_of_python_can_be_tapped_in_every_transformation(number, transform, flavour):
    derivative, events = events_of(lambda consumer: transform(tap_number(consumer, number, **flavour)), 1.5)
    assert derivative == 2.0
    values = [(values, marks) for values, marks in events if not marks]
    if flavour.get("stateful", True):
        assert values == [((number, 1.5), ())]
    derivatives = [values for values, marks in events if marks]
    zero = {True: False}.get(number, 0)
    assert all(v[0] == zero for v in derivatives)  # a constant has none


@pytest.mark.parametrize("tangent", [1, 1.0, np.float32(1), jnp.float32(1)], ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("primal", [3.0, np.float32(3), jnp.float32(3)], ids=lambda t: type(t).__name__)
def test_primals_and_tangents_may_be_numbers_of_python(primal, tangent):
    tangent = type(primal)(tangent) if isinstance(primal, float) else jnp.asarray(tangent, jnp.asarray(primal).dtype)
    run = lambda consumer: lambda: jax.jvp(lambda x: ct.id_tap(consumer, x) ** 2, (primal,), (tangent,))  # noqa: E731
    (value, derivative), events = events_of(run)
    assert (value, derivative) == (9.0, 6.0)
    assert events == [((3.0,), ()), ((1.0,), ("jvp",))]


def test_cotangents_may_be_numbers_of_python():
    run = lambda consumer: lambda: jax.vjp(lambda x: ct.id_tap(consumer, x), 3.0)[1](2.0)  # noqa: E731
    (cotangent,), events = events_of(run)
    assert cotangent == 2.0
    assert events == [((3.0,), ()), ((2.0,), ("jvp", "transpose"))]


# -- labels ----------------------------------------------------------------------------------------------------------


def test_traced_labels_have_their_values():
    run = lambda consumer: jax.jit(  # noqa: E731
        lambda x: lax.fori_loop(0, 3, lambda k, c: ct.id_tap(consumer, c * 2, step=k, what="w"), x)
    )
    result, events = events_of(run, 1.0)
    assert result == 8.0
    assert events == [((2.0 * 2**k,), (), {"step": k, "what": "w"}) for k in range(3)]


def test_labels_are_the_same_in_and_outside_of_compiled_code():
    label = {"a": jnp.arange(2), "b": [jnp.float32(1), None]}
    found = []
    for wrap in (lambda f: f, jax.jit):
        seen = []
        with ct.outfeed_receiver(60):
            wrap(lambda x, seen=seen: ct.id_tap(lambda x, label: seen.append((x, label)), x, label=label))(1.0)
        ((_, got),) = seen
        assert jax.tree.structure(got) == jax.tree.structure(label)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(got))
        found.append(jax.tree.map(lambda a: a.tolist(), got))
    assert found[0] == found[1]


def test_labels_have_no_derivatives():
    def f(consumer):
        return jax.grad(lambda x: ct.id_tap(consumer, x * x, at=x))

    derivative, events = events_of(f, 3.0)
    assert derivative == 6.0
    assert events == [((9.0,), (), {"at": 3.0}), ((1.0,), ("jvp", "transpose"), {"at": 3.0})]
    derivative, events = events_of(lambda consumer: jax.jit(f(consumer)), 3.0)
    assert (derivative, len(events)) == (6.0, 2)


def test_labels_in_a_batch():
    seen = []

    def consumer(x, step, transforms):
        seen.append((x.tolist(), np.asarray(step).tolist(), transforms))

    def lane(x, k):
        return ct.id_tap(consumer, x, step=k)

    with ct.outfeed_receiver(60):
        jax.vmap(lane, in_axes=(0, None))(jnp.arange(2.0), 5)
        jax.jit(jax.vmap(lane))(jnp.arange(2.0), jnp.arange(2))
    assert seen == [
        ([0.0, 1.0], 5, (("batch", {"batch_dims": (0,)}),)),
        ([0.0, 1.0], [0, 1], (("batch", {"batch_dims": (0,), "label_dims": (0,)}),)),
    ]


def test_printed_labels_are_numbers(capsys):
    with ct.outfeed_receiver(60):
        jax.jit(lambda x: lax.fori_loop(0, 2, lambda k, x: ct.id_print(x, step=k), x))(1.5)
    assert capsys.readouterr().out == "step: 0\n1.5\nstep: 1\n1.5\n"


def test_traced_labels_are_recorded(tmp_path):
    tap = ct.Tap("labelled")
    with ct.record(tmp_path / "run.ctap"):
        jax.jit(lambda x: lax.fori_loop(0, 2, lambda k, x: ct.id_tap(tap, {"u": x}, step=k)["u"], x))(1.5)
    with ct.open(tmp_path / "run.ctap") as recording:
        assert [int(event.labels["step"]) for event in recording.events()] == [0, 1]
        assert recording["labelled"].leaves == ("u", "step")


# -- what is refused -------------------------------------------------------------------------------------------------


def test_references_and_tangents_without_values_are_refused():
    with pytest.raises(TypeError, match=r"takes values, got Ref.*ref\[\.\.\.\]"):
        ct.id_tap(print, jax.new_ref(jnp.arange(3)))

    @jax.jit
    def f(x):
        ref = jax.new_ref(x)
        ct.id_tap(print, ref)
        return x

    with pytest.raises(TypeError, match="takes values, got Ref"):
        f(1.0)
    with pytest.raises(TypeError, match="the tangent of integers or Booleans, which has no values"):
        ct.id_tap(print, np.zeros((), jax.dtypes.float0))
    with pytest.raises(TypeError, match="call got the tangent of integers"):
        ct.call(lambda x: x, np.zeros((), jax.dtypes.float0), result_shape=1)


# -- what consumers get ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_no_consumer_sees_what_another_one_wrote(size, dtype):
    tap, seen = ct.Tap("shared"), []

    def vandal(a, x):
        x[:] = 7

    with (
        pytest.raises(ct.CallbackException) as caught,
        tap.attached(vandal),
        tap.attached(lambda a, x: seen.append(x.copy())),
        ct.outfeed_receiver(60),
    ):
        jax.jit(lambda x: ct.id_tap(tap, jnp.int8(1), x))(jnp.zeros(size, dtype))
    assert "read-only" in str(caught.value.exceptions[0])
    assert np.array_equal(seen[0], np.zeros(size, dtype))


def test_a_tap_is_itself_when_it_is_copied():
    tap = ct.Tap("original")
    assert copy.copy(tap) is tap
    assert copy.deepcopy({"tap": [tap]})["tap"][0] is tap
    assert pickle.loads(pickle.dumps(tap)) is tap
    data = pickle.dumps(tap)
    del tap
    assert pickle.loads(data).name == "original"


def test_consumers_of_functions_can_be_copied():
    consumer = ct.Consumer(functools.partial(print, sep="-"), every=2)
    again = copy.copy(consumer)
    assert (again.every, again.name) == (2, consumer.name)
