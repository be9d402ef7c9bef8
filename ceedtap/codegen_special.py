"""Rules of :mod:`ceedtap.codegen` for special functions and for what is left, and the list of what is refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ceedtap import jax_compat
from ceedtap.codegen import (
    REFUSED,
    Builder,
    Complex,
    Elements,
    Scalar,
    TranslationError,
    c_type,
    elements,
    number,
    rule,
    translate,
)
from ceedtap.codegen_control import via_jax
from ceedtap.codegen_rules import Element, apply, call, elementwise, real

# -- special functions -------------------------------------------------------------------------------------------------


def _digamma(x: Any) -> Any:
    """Reflection, recurrence up to where the asymptotic series holds, and the series."""
    negative = x < 0.5
    # The fractional part exactly, so that large negative arguments keep their digits.
    turn = x - lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    y = lax.select(negative, 1.0 - x, x)
    steps = 10
    small = y < steps
    low = lax.select(small, y, jnp.ones_like(y))
    # The sum of 1 / (low + k) as one fraction.
    above, below = jnp.ones_like(low), low
    for k in range(1, steps):
        above = above * (low + k) + below
        below = below * (low + k)
    z = lax.select(small, y + steps, y)
    inverse = 1.0 / (z * z)
    series = jnp.full_like(z, _BERNOULLI[8] / 16)
    for k in range(7, 0, -1):
        series = series * inverse + _BERNOULLI[k] / (2 * k)
    value = jnp.log(z) - 0.5 / z - series * inverse - lax.select(small, above / below, jnp.zeros_like(z))
    value = lax.select(y == jnp.inf, y, value)
    reflected = value - math.pi / jnp.tan(math.pi * turn)
    value = lax.select(negative, reflected, value)
    return lax.select((x <= 0.0) & (turn == 0.0), jnp.full_like(x, jnp.nan), value)


# Bernoulli's numbers B_2k
_BERNOULLI = {
    1: 1 / 6, 2: -1 / 30, 3: 1 / 42, 4: -1 / 30, 5: 5 / 66, 6: -691 / 2730, 7: 7 / 6, 8: -3617 / 510,
    9: 43867 / 798, 10: -174611 / 330,
}  # fmt: skip


def _zeta(s: Any, q: Any) -> Any:
    """Hurwitz's zeta function: terms one by one, then the sum formula of Euler and Maclaurin."""
    steps = 12
    total = jnp.zeros_like(q)
    for k in range(steps):
        total = total + jnp.power(q + k, -s)
    z = q + steps
    last = jnp.power(z, -s)
    total = total + z * last / (s - 1.0) + 0.5 * last
    factor = s * last / z
    for k in range(1, 11):
        total = total + factor * (_BERNOULLI[k] / math.factorial(2 * k))
        factor = factor * (s + (2 * k - 1)) * (s + 2 * k) / (z * z)
    nan = jnp.full_like(q, jnp.nan)
    whole = jnp.floor(q) == q
    pole = lax.select(jnp.fmod(s, 2.0) == 0.0, jnp.full_like(q, jnp.inf), nan)
    # Further left the terms do not suffice.
    total = lax.select((q <= 0.0) & (whole | (jnp.floor(s) != s) | (q < 1.0 - steps / 2)), nan, total)
    total = lax.select((q <= 0.0) & whole, pole, total)
    total = lax.select(q == jnp.inf, jnp.zeros_like(q), total)
    total = lax.select(s == 1.0, jnp.full_like(q, jnp.inf), total)
    return lax.select((s < 1.0) | jnp.isnan(q) | jnp.isnan(s), nan, total)


def _polygamma(m: Any, x: Any) -> Any:
    sign = jnp.where(jnp.fmod(m, 2.0) == 0.0, -1.0, 1.0)
    value = sign * jnp.exp(lax.lgamma(m + 1.0)) * _zeta(m + 1.0, x)
    value = jnp.where(m == 0.0, _digamma(x), value)
    return jnp.where((m < 0.0) | (jnp.floor(m) != m), jnp.nan, value)


def _erf_inv(x: Any) -> Any:
    """Winitzki's approximation, and two steps of Halley's method, each of which triples the number of digits."""
    a = 0.147
    size = jnp.abs(x)
    log = jnp.log1p(-size * size)
    t = 2.0 / (math.pi * a) + 0.5 * log
    y = jnp.sqrt((-log / a) / (jnp.sqrt(t * t - log / a) + t))
    y = lax.select(size < 1e-8, size, y)  # the square is lost there, and one step is exact
    for _ in range(2):
        # Of erf near 0 and of erfc near 1: both keep their digits there.
        error = lax.select(size < 0.5, lax.erf(y) - size, (1.0 - size) - lax.erfc(y))
        step = error * (0.5 * math.sqrt(math.pi)) * jnp.exp(y * y)
        y = y - step / (1.0 + y * step)
    y = lax.select(size == 1.0, jnp.full_like(x, jnp.inf), y)
    return lax.select(x < 0.0, -y, lax.select(x == 0.0, x, y))


def _bessel(x: Any, near: Sequence[float], far: Sequence[float], odd: bool) -> Any:
    """exp(-|x|) I_0(x) or I_1(x), by Chebyshev series in |x| up to 8 and in 1 / |x| beyond."""
    size = jnp.abs(x)
    inside = size <= 8.0
    left = _chebyshev(lax.select(inside, size, jnp.ones_like(x)) * 0.25 - 1.0, near)
    if odd:
        left = left * size
    right = lax.select(inside, jnp.full_like(x, 8.0), size)
    right = _chebyshev(16.0 / right - 1.0, far) / jnp.sqrt(right)
    value = lax.select(inside, left, right)
    if not odd:
        return value
    return lax.select(x < 0.0, -value, lax.select(x == 0.0, x, value))


def _chebyshev(t: Any, coefficients: Sequence[float]) -> Any:
    """Clenshaw's recurrence."""
    one, two = jnp.zeros_like(t), jnp.zeros_like(t)
    twice = t + t
    for c in coefficients[:0:-1]:
        one, two = twice * one - two + c, one
    return t * one - two + coefficients[0]


# Chebyshev coefficients of exp(-x) I_0(x) and exp(-x) I_1(x) / x for x = 4 (t + 1), and of sqrt(x) exp(-x) I(x) for
# x = 16 / (t + 1), calculated with 40 digits.
_I0_NEAR = (
    0.33839763720473803, -0.3046826723431984, 0.17162090152220877, -0.09490109704804764, 0.04930528423967071,
    -0.02373741480589947, 0.010546460394594998, -0.004324309995050576, 0.0016394756169413357,
    -0.0005763755745385824, 0.00018850288509584165, -5.754195010082104e-05, 1.6448448070728896e-05,
    -4.4167383584587505e-06, 1.1173875391201037e-06, -2.670793853940612e-07, 6.046995022541919e-08,
    -1.300025009986248e-08, 2.6598237246823866e-09, -5.189795601635263e-10, 9.675809035373237e-11,
    -1.726826291441556e-11, 2.95505266312964e-12, -4.856446783111929e-13, 7.676185498604936e-14,
    -1.1685332877993451e-14, 1.715391285555133e-15, -2.431279846547955e-16, 3.3307945188222384e-17,
    -4.4153416464793395e-18, 5.669178006921496e-19,
)  # fmt: skip
_I0_FAR = (
    0.4022452055070544, 0.0033691164782556943, 6.889758346916825e-05, 2.8913705208347567e-06,
    2.0489185894690638e-07, 2.266668990498178e-08, 3.3962320257083865e-09, 4.94060238822497e-10,
    1.1889147107846439e-11, -3.1499165279632416e-11, -1.3215811840447713e-11, -1.7941785315068062e-12,
    7.180124451383666e-13, 3.8527783827421426e-13, 1.54008621752141e-14, -4.150569347287222e-14,
    -9.554846698828307e-15, 3.8116806693526224e-15, 1.7725601330565263e-15, -3.425485619677219e-16,
    -2.8276239805165836e-16, 3.461222867697461e-17, 4.46562142029676e-17, -4.830504485944182e-18,
    -7.233180487874754e-18, 9.921475412173699e-19, 1.193650890845982e-18,
)  # fmt: skip
_I1_NEAR = (
    0.12629359322181682, -0.17641651835783406, 0.1026436586898471, -0.05294598120809499, 0.024726449030626516,
    -0.010564084894626197, 0.004156422944312888, -0.0015135724506312532, 0.0005122859561685758,
    -0.00016176081582589674, 4.781565107550054e-05, -1.3273163656039436e-05, 3.4702513081376785e-06,
    -8.568720264695455e-07, 2.0032947535521353e-07, -4.445059128796328e-08, 9.381537386495773e-09,
    -1.8872497517228294e-09, 3.625590281552117e-10, -6.663489723502027e-11, 1.1736186298890901e-11,
    -1.9839743977649436e-12, 3.223793365945575e-13, -5.042185504727912e-14, 7.600684294735408e-15,
    -1.1055969477353862e-15, 1.5536319577362005e-16, -2.111421214358166e-17, 2.7779141127610464e-18,
    -3.541581772542136e-19,
)  # fmt: skip
_I1_FAR = (
    0.38928811750914005, -0.009761097491361469, -0.00011058893876262371, -3.882564808877691e-06,
    -2.512236237870209e-07, -2.6314688468895196e-08, -3.835380385964237e-09, -5.589743462196584e-10,
    -1.8974958123505413e-11, 3.2526035830154884e-11, 1.4125807436613782e-11, 2.0356285441470896e-12,
    -7.198551776245908e-13, -4.0835511110921974e-13, -2.1015418427726643e-14, 4.272440016711951e-14,
    1.0420276984128802e-14, -3.8144030724370075e-15, -1.8803547755107825e-15, 3.3082023109209285e-16,
    2.96262899764595e-16, -3.209525921993424e-17, -4.6503053684893586e-17, 4.414348323071708e-18,
    7.517296310842105e-18, -9.314178867326884e-19, -1.242193275194891e-18,
)  # fmt: skip


def _through_jax(function: Callable[..., Any]) -> Callable[..., list[Elements]]:
    def translate_one(builder: Builder, eqn: Any, *args: Elements, **_: Any) -> list[Elements]:
        dtype = eqn.outvars[0].aval.dtype
        aval = jax.ShapeDtypeStruct((), dtype)

        def one(b: Builder, *values: Scalar) -> Element:
            (result,) = via_jax(b, function, [_scalar(v) for v in values], [aval] * len(values))
            return result[()]

        return [elementwise(builder, one, *args)]

    return translate_one


def _scalar(value: Element) -> Elements:
    out = np.empty((), object)
    out[()] = value
    return out


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bessel_i0e": functools.partial(_bessel, near=_I0_NEAR, far=_I0_FAR, odd=False),
    "bessel_i1e": functools.partial(_bessel, near=_I1_NEAR, far=_I1_FAR, odd=True),
    "digamma": _digamma,
    "zeta": _zeta,
    "polygamma": _polygamma,
    "erf_inv": _erf_inv,
}
for _name, _function in _FUNCTIONS.items():
    rule(_name)(_through_jax(_function))
for _name in ("igamma", "igamma_grad_a", "igammac", "regularized_incomplete_beta"):
    rule(_name)(_through_jax(jax_compat.special_function(_name)))


@rule("log2")
def _log2(builder: Builder, eqn: Any, x: Elements, **_: Any) -> list[Elements]:
    def one(b: Builder, e: Element) -> Element:
        if isinstance(e, Complex):
            scale = number(1 / math.log(2), e.re.dtype)
            z = apply(b, "log", e)
            return Complex(real(b, "mul", z.re, scale), real(b, "mul", z.im, scale))
        return call(b, "log2", e.dtype, e)

    return [elementwise(builder, one, x)]


@rule("one_minus_square")
def _one_minus_square(builder: Builder, eqn: Any, x: Elements) -> list[Elements]:
    def one(b: Builder, e: Element) -> Element:
        unit = elements(1, eqn.outvars[0].aval.dtype)[()]
        return apply(b, "mul", apply(b, "add", unit, e), apply(b, "sub", unit, e))

    return [elementwise(builder, one, x)]


@rule("polynomial")
def _polynomial(builder: Builder, eqn: Any, x: Elements, *coefficients: Elements, **_: Any) -> list[Elements]:
    result = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        result = elementwise(builder, lambda b, u, v, w: apply(b, "add", apply(b, "mul", u, v), w), result, x, c)
    return [elementwise(builder, lambda b, u, v: u, result, x)]


# -- bits --------------------------------------------------------------------------------------------------------------


@rule("lt_to", "le_to", "eq_to")
def _total_order(builder: Builder, eqn: Any, x: Elements, y: Elements) -> list[Elements]:
    """The order in which -0 < 0 and nan is last, or first if its sign says so."""
    dtype = eqn.invars[0].aval.dtype
    name = eqn.primitive.name.removesuffix("_to")
    if dtype.kind != "f":
        return [elementwise(builder, lambda b, u, v: apply(b, name, u, v), x, y)]
    whole = np.dtype(f"i{dtype.itemsize}")

    def key(b: Builder, e: Scalar) -> Scalar:
        bits = _bits(b, e, whole)
        flipped = real(b, "xor", bits, number(np.iinfo(whole).max, whole))
        return b.value(f"({bits.text} < 0 ? {flipped.text} : {bits.text})", whole, [bits, flipped])

    return [elementwise(builder, lambda b, u, v: real(b, name, key(b, u), key(b, v)), x, y)]


def _bits(builder: Builder, x: Scalar, dtype: np.dtype) -> Scalar:
    """The same bits as another type of the same size."""
    if x.dtype == dtype:
        return x
    if x.dtype.kind != "f" and dtype.kind != "f":
        return builder.value(f"({c_type(dtype)}){x.text}", dtype, [x])
    helper = f"ceedtap_bits_{x.dtype.name}_{dtype.name}"
    builder.helper(
        helper,
        f"CEED_QFUNCTION_HELPER {c_type(dtype)} {helper}({c_type(x.dtype)} x) {{\n"
        f"  union {{\n    {c_type(x.dtype)} from;\n    {c_type(dtype)} to;\n  }} bits;\n"
        f"  bits.from = x;\n  return bits.to;\n}}\n",
    )
    return builder.value(f"{helper}({x.text})", dtype, [x])


@rule("bitcast_convert_type")
def _bitcast(builder: Builder, eqn: Any, x: Elements, *, new_dtype: Any) -> list[Elements]:
    old, new = eqn.invars[0].aval.dtype, np.dtype(new_dtype)
    if old.itemsize != new.itemsize or "c" in (old.kind, new.kind):
        raise TranslationError("has no translation to C for types of different sizes")
    return [elementwise(builder, lambda b, e: _bits(b, e, new), x)]


@rule("mulhi")
def _mulhi(builder: Builder, eqn: Any, x: Elements, y: Elements) -> list[Elements]:
    dtype = eqn.outvars[0].aval.dtype
    bits = 8 * dtype.itemsize
    wide = "long long" if dtype.kind == "i" else "unsigned long long"

    def one(b: Builder, u: Scalar, v: Scalar) -> Scalar:
        if bits < 64:
            return b.value(f"({c_type(dtype)})((({wide}){u.text} * ({wide}){v.text}) >> {bits})", dtype, [u, v])
        helper = "ceedtap_mulhi"
        b.helper(helper, _MULHI)
        high = f"{helper}((unsigned long long){u.text}, (unsigned long long){v.text})"
        if dtype.kind == "i":  # two's complement
            high += f" - ({u.text} < 0 ? (unsigned long long){v.text} : 0) - "
            high += f"({v.text} < 0 ? (unsigned long long){u.text} : 0)"
        return b.value(f"({c_type(dtype)})({high})", dtype, [u, v])

    return [elementwise(builder, one, x, y)]


_MULHI = """\
CEED_QFUNCTION_HELPER unsigned long long ceedtap_mulhi(unsigned long long a, unsigned long long b) {
  const unsigned long long low = 0xffffffffULL, a0 = a & low, a1 = a >> 32, b0 = b & low, b1 = b >> 32;
  const unsigned long long middle = a1 * b0 + ((a0 * b0) >> 32);
  return a1 * b1 + (middle >> 32) + (((middle & low) + a0 * b1) >> 32);
}
"""

# -- arrays ------------------------------------------------------------------------------------------------------------


@rule("fft")
def _fft(builder: Builder, eqn: Any, x: Elements, *, fft_type: Any, fft_lengths: Any) -> list[Elements]:
    """As products with a matrix: the arrays at a point are small."""
    kind = fft_type.name

    def function(x: Any) -> Any:
        *others, last = range(x.ndim - len(fft_lengths), x.ndim)
        sizes = dict(zip([*others, last], fft_lengths, strict=True))
        real_input, real_output = kind.endswith("RFFT") and "I" not in kind, "IRFFT" in kind
        sign = 2j * math.pi if kind.startswith("I") else -2j * math.pi
        complex_type = jnp.promote_types(x.dtype, jnp.complex64)
        x = x.astype(complex_type)
        for axis in [last, *others] if real_input else [*others, last]:
            n = sizes[axis]
            k = np.arange(n)
            matrix = np.exp(sign * ((k[:, None] * k[None, :]) % n) / n) / (n if kind.startswith("I") else 1)
            if axis == last and real_output:
                x = _hermitian(x, axis, n)
            if axis == last and real_input:
                matrix = matrix[: n // 2 + 1]
            x = jnp.moveaxis(jnp.tensordot(jnp.asarray(matrix, complex_type), x, axes=(1, axis)), 0, axis)
        return x.real if real_output else x

    return via_jax(builder, function, [x], [eqn.invars[0].aval])


def _hermitian(x: Any, axis: int, n: int) -> Any:
    """The full spectrum of a real signal; parts that must be real are taken to be so."""
    half = jnp.moveaxis(x, axis, -1)
    whole = [half[..., k] if k <= n // 2 else jnp.conj(half[..., n - k]) for k in range(n)]
    for k in {0, n // 2} if n % 2 == 0 else {0}:
        whole[k] = whole[k].real.astype(x.dtype)
    return jnp.moveaxis(jnp.stack(whole, -1), -1, axis)


@rule("reduce")
def _reduce_any(builder: Builder, eqn: Any, *operands: Elements, jaxpr: Any, dimensions: Any, **_: Any) -> list:
    """Any reduction, in order."""
    half = len(operands) // 2
    kept = [d for d in range(operands[0].ndim) if d not in dimensions]
    shape = [operands[0].shape[d] for d in kept]
    moved = [x.transpose([*kept, *dimensions]).reshape(*shape, -1) for x in operands[:half]]
    out = [np.empty(shape, object) for _ in moved]
    for index in np.ndindex(*shape):
        state = [x.reshape(()) for x in operands[half:]]
        for i in range(moved[0].shape[-1]):
            items = [_scalar(x[(*index, i)]) for x in moved]
            state = translate(builder, jaxpr.jaxpr, jaxpr.consts, [*state, *items])
        for array, value in zip(out, state, strict=True):
            array[index] = value[()]
    return out


def _windows(eqn: Any, shape: Sequence[int], params: dict[str, Any]) -> tuple[tuple[int, ...], list[list[int | None]]]:
    """For every output, the positions in the flat operand that its window covers; None in the padding."""
    rank = len(shape)
    size = params["window_dimensions"]
    strides = params["window_strides"]
    padding = params["padding"]
    base = params.get("base_dilation") or (1,) * rank
    dilation = params.get("window_dilation") or (1,) * rank
    out_shape = []
    for d in range(rank):
        length = (shape[d] - 1) * base[d] + 1 + sum(padding[d]) if shape[d] else sum(padding[d])
        out_shape.append(max((length - (size[d] - 1) * dilation[d] - 1) // strides[d] + 1, 0))
    windows = []
    for out_index in np.ndindex(*out_shape):
        window: list[int | None] = []
        for offset in np.ndindex(*size):
            at: int | None = 0
            for d in range(rank):
                position = out_index[d] * strides[d] + offset[d] * dilation[d] - padding[d][0]
                inside = position % base[d] == 0 and 0 <= position // base[d] < shape[d]
                at = at * shape[d] + position // base[d] if at is not None and inside else None
            window.append(at)
        windows.append(window)
    return tuple(out_shape), windows


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(builder: Builder, eqn: Any, x: Elements, **params: Any) -> list[Elements]:
    kind = eqn.primitive.name.removeprefix("reduce_window_")
    name = {"sum": "add"}.get(kind, kind)
    shape, windows = _windows(eqn, x.shape, params)
    dtype = eqn.outvars[0].aval.dtype
    if kind == "sum":
        empty: Any = 0
    elif dtype.kind == "f":
        empty = -np.inf if kind == "max" else np.inf
    else:
        empty = np.iinfo(dtype).min if kind == "max" else np.iinfo(dtype).max
    flat = x.reshape(-1)
    out = np.empty(len(windows), object)
    for i, window in enumerate(windows):
        values = [flat[at] for at in window if at is not None]
        first = values[0] if values else elements(empty, dtype)[()]
        out[i] = functools.reduce(lambda u, v: apply(builder, name, u, v), values[1:], first)
    return [out.reshape(shape)]


@rule("reduce_window")
def _reduce_window_any(
    builder: Builder, eqn: Any, *operands: Elements, jaxpr: Any, consts: Any = (), **params: Any
) -> list:
    half = len(operands) // 2
    shape, windows = _windows(eqn, operands[0].shape, params)
    out = [np.empty(len(windows), object) for _ in range(half)]
    for i, window in enumerate(windows):
        state = [x.reshape(()) for x in operands[half:]]
        for at in window:
            items = [
                _scalar(start[()] if at is None else x.reshape(-1)[at])
                for x, start in zip(operands[:half], operands[half:], strict=True)
            ]
            state = translate(
                builder, getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", consts), [*state, *items]
            )
        for array, value in zip(out, state, strict=True):
            array[i] = value[()]
    return [array.reshape(shape) for array in out]


@rule("select_and_scatter_add", "select_and_gather_add")
def _pooling_derivatives(
    builder: Builder, eqn: Any, first: Elements, operand: Elements, **params: Any
) -> list[Elements]:
    """The first argument at the place of each window's largest (smallest) element of the second one."""
    compare = "ge" if "ge" in str(params["select_prim"]) else "le"
    shape, windows = _windows(eqn, operand.shape, params)
    source, keys = first.reshape(-1), operand.reshape(-1)
    dtype = eqn.outvars[0].aval.dtype
    zero = elements(0, dtype)[()]
    scatter = eqn.primitive.name == "select_and_scatter_add"
    out = np.full(operand.size if scatter else len(windows), zero, object)
    for i, window in enumerate(windows):
        inside = [at for at in window if at is not None]
        if not inside:
            continue
        best, where_ = keys[inside[0]], number(inside[0], np.int32)
        value = source[inside[0]] if not scatter else zero
        for at in inside[1:]:
            keep = apply(builder, compare, best, keys[at])
            best = _pick(builder, keep, best, keys[at])
            where_ = _pick(builder, keep, where_, number(at, np.int32))
            if not scatter:
                value = _pick(builder, keep, value, source[at])
        if not scatter:
            out[i] = value
            continue
        for at in set(inside):
            here = apply(builder, "eq", where_, number(at, np.int32))
            out[at] = apply(builder, "add", out[at], _pick(builder, here, source[i], zero))
    return [out.reshape(operand.shape if scatter else shape)]


def _pick(builder: Builder, condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
    if condition.is_constant:
        return yes if condition.value else no
    return builder.value(f"({condition.text} ? {yes.text} : {no.text})", yes.dtype, [condition, yes, no])


@rule("empty", "empty2")
def _empty(builder: Builder, eqn: Any, *_: Any, **__: Any) -> list[Elements]:
    return [elements(np.zeros(v.aval.shape), v.aval.dtype) for v in eqn.outvars]


@rule("zeros_like")
def _zeros_like(builder: Builder, eqn: Any, x: Elements, **_: Any) -> list[Elements]:
    return [elements(np.zeros(x.shape), eqn.outvars[0].aval.dtype)]


@rule("approx_top_k")
def _approx_top_k(
    builder: Builder, eqn: Any, x: Elements, *, k: int, reduction_dimension: int, is_max_k: bool, **_: Any
) -> list:
    def function(x: Any) -> Any:
        values, where = lax.top_k(jnp.moveaxis(x if is_max_k else -x, reduction_dimension, -1), k)
        values = values if is_max_k else -values
        return jnp.moveaxis(values, -1, reduction_dimension), jnp.moveaxis(where, -1, reduction_dimension)

    return via_jax(builder, function, [x], [eqn.invars[0].aval])


# -- functions in functions --------------------------------------------------------------------------------------------


@rule("eval_jaxpr")
def _eval_jaxpr(builder: Builder, eqn: Any, *operands: Elements, **params: Any) -> list[Elements]:
    jaxpr = params.get("call_jaxpr", params.get("jaxpr"))
    return translate(builder, getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), operands)


@rule("platform_index")
def _platform_index(builder: Builder, eqn: Any, *, platforms: Sequence[Any]) -> list[Elements]:
    """The branch for CPUs, which is what the other rules correspond to."""
    for i, names in enumerate(platforms):
        if names is None or "cpu" in names:
            return [elements(i, np.int32)]
    raise TranslationError("has no translation to C: there is no branch for CPUs")


@rule("call_hi_primitive")
def _call_hi_primitive(builder: Builder, eqn: Any, *operands: Elements, _prim: Any, **_: Any) -> list[Elements]:
    function = jax_compat.expansion(_prim)
    return via_jax(builder, function, operands, [v.aval for v in eqn.invars])


# -- what has no translation -------------------------------------------------------------------------------------------

_REASONS = {
    "it draws random numbers in a way that has no translation; with keys of the default kind, bits, uniform and normal "
    "numbers have": "random_gamma rng_bit_generator rng_uniform threefry4x32 philox2x32 philox4x32",
    "it prints on the host; ceedtap.id_print does so from a point function": "debug_print inspect_sharding",
    "it calls Python on the host; ceedtap.id_tap does so from a point function": "debug_callback io_callback",
    "it communicates between devices, and a point has none": (
        "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start all_gather_start "
        "all_to_all all_to_all_done all_to_all_start axis_index pbroadcast pbroadcast_done pbroadcast_dynamic "
        "pbroadcast_start pmax pmin ppermute ppermute_done ppermute_start precv preduced psend psum psum_done "
        "psum_invariant psum_invariant_start psum_start pvary ragged_all_to_all reduce_scatter reduce_scatter_done "
        "reduce_scatter_start reduced_vary_cast reduced_vary_cast_p shard_map unreduced_pmax unreduced_pmin "
        "unreduced_psum unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start "
        "vary_unreduced_cast vary_unreduced_cast_p reshard relayout core_map global_array_to_host_local_array "
        "host_local_array_to_global_array"
    ),
    "it changes arrays in place": (
        "accum_grad_in_ref addupdate box_get box_set create_linear empty_ref free_ref freeze get new_box new_ref pin "
        "run_state swap unpin new_log log_extend log_read"
    ),
    "it calls a compiled library": (
        "call_exported cudnn_fusion custom_partitioning dot_product_attention_bwd dot_product_attention_bwd_wrapper "
        "dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd "
        "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper ffi_call "
        "scaled_dot scaled_matmul scaled_matmul_wrapper"
    ),
    "this factor of matrices that are not symmetric is not implemented": (
        "geqp3 hessenberg tridiagonal"
    ),
    "shapes must be known": "dim_as_value dimension_size ragged_dot_general shape_assertion",
    "it belongs to JAX's own machinery": (
        "after_all call_hi_primitive_linearized check create_token custom_jvp_call_jaxpr dce_sink "
        "from_edtype select_and_scatter stage tie to_edtype unreachable"
    ),
}  # fmt: skip
REFUSED.update({name: why for why, names in _REASONS.items() for name in names.split()})
