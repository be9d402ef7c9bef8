"""The rules of :mod:`ceedtap.codegen`: what each JAX primitive becomes in C."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.codegen import (
    Builder,
    Complex,
    Elements,
    Scalar,
    TranslationError,
    c_type,
    constant,
    elements,
    rule,
    translate,
)

# Loops of at most so many equations in all are written out.
MAX_UNROLLED = 400
# Branches of at most so many equations are all computed, and the result is chosen: no jump, so loops vectorise.
MAX_CHOSEN = 60

Element = Scalar | Complex

# -- elementwise arithmetic --------------------------------------------------------------------------------------------

_UNSIGNED = {"int8": "unsigned int", "int16": "unsigned int", "int32": "unsigned int", "int64": "unsigned long long"}


def _wrapping(symbol: str) -> Callable[[np.dtype], str]:
    """Integers wrap around in JAX; in C, only unsigned ones do."""

    def template(dtype: np.dtype) -> str:
        if dtype.kind == "i":
            u = _UNSIGNED[dtype.name]
            return f"({c_type(dtype)})(({u}){{0}} {symbol} ({u}){{1}})"
        if dtype.kind == "u":
            return f"({c_type(dtype)})({{0}} {symbol} {{1}})"
        if dtype.kind == "b":
            return {"+": "({0} | {1})", "*": "({0} & {1})", "-": "({0} ^ {1})"}[symbol]
        return f"{{0}} {symbol} {{1}}"

    return template


def _division(dtype: np.dtype) -> str:
    if dtype.kind == "f":
        return "{0} / {1}"
    if dtype.kind == "u":
        return f"({{1}} == 0 ? ({c_type(dtype)})-1 : {{0}} / {{1}})"
    u = _UNSIGNED[dtype.name]
    return f"({{1}} == 0 ? -1 : {{1}} == -1 ? ({c_type(dtype)})(0 - ({u}){{0}}) : {{0}} / {{1}})"


def _remainder(dtype: np.dtype) -> str:
    if dtype.kind == "f":
        return "fmod"
    return "({1} == 0 ? {0} : {1} == -1 ? 0 : {0} % {1})" if dtype.kind == "i" else "({1} == 0 ? {0} : {0} % {1})"


def _shift(symbol: str, fill: str) -> Callable[[np.dtype], str]:
    def template(dtype: np.dtype) -> str:
        bits, u = 8 * dtype.itemsize, c_type(np.dtype(f"u{dtype.itemsize}"))
        value = "{0}" if symbol == ">>" and fill else f"({u}){{0}}"
        beyond = fill or "0"
        return f"(({u}){{1}} >= {bits}U ? ({c_type(dtype)}){beyond} : ({c_type(dtype)})({value} {symbol} {{1}}))"

    return template


def _larger(symbol: str) -> Callable[[np.dtype], str]:
    """Maximum and minimum; a nan wins, and of two zeros the right one."""

    def template(dtype: np.dtype) -> str:
        if dtype.kind != "f":
            return f"({{0}} {symbol} {{1}} ? {{0}} : {{1}})"
        return f"({{0}} != {{0}} || {{0}} {symbol} {{1}} ? {{0}} : {{1}})"

    return template


def _sign(dtype: np.dtype) -> str:
    if dtype.kind == "f":
        one = "1.0f" if dtype.itemsize == 4 else "1.0"
        return f"({{0}} > 0 ? {one} : {{0}} < 0 ? -{one} : {{0}})"
    return "(({0} > 0) - ({0} < 0))" if dtype.kind == "i" else "({0} > 0)"


def _negative(dtype: np.dtype) -> str:
    return "-{0}" if dtype.kind == "f" else f"({c_type(dtype)})(0 - ({_UNSIGNED.get(dtype.name, c_type(dtype))}){{0}})"


def _absolute(dtype: np.dtype) -> str:
    if dtype.kind == "f":
        return "fabs"
    return "{0}" if dtype.kind == "u" else f"({{0}} < 0 ? {_negative(dtype)} : {{0}})"


# By primitive: an expression in {0}, {1} ..., the name of a function of <math.h>, or a function of the type.
_REAL: dict[str, str | Callable[[np.dtype], str]] = {
    "add": _wrapping("+"), "add_any": _wrapping("+"), "sub": _wrapping("-"), "mul": _wrapping("*"),
    "div": _division, "rem": _remainder, "neg": _negative, "abs": _absolute, "sign": _sign,
    "max": _larger(">"), "min": _larger("<"), "square": lambda d: _wrapping("*")(d).replace("{1}", "{0}"),
    "floor": "floor", "ceil": "ceil", "sqrt": "sqrt", "cbrt": "cbrt",
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log1p": "log1p", "pow": "pow",
    "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan", "atan2": "atan2",
    "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh",
    "erf": "erf", "erfc": "erfc", "lgamma": "lgamma", "nextafter": "nextafter",
    "shift_left": _shift("<<", ""), "shift_right_logical": _shift(">>", ""),
    "shift_right_arithmetic": lambda d: _shift(">>", "({0} < 0 ? -1 : 0)" if d.kind == "i" else "")(d),
}  # fmt: skip
_BITWISE = {"and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_FOLDED: dict[str, Callable[..., Any]] = {
    "add": operator.add, "add_any": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "square": lambda x: x * x, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "max": np.maximum, "min": np.minimum, "abs": np.abs, "sqrt": np.sqrt,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip


def call(builder: Builder, function: str, dtype: np.dtype, *args: Scalar) -> Scalar:
    """A function of <math.h>."""
    builder.math.add(function)
    name = function + ("f" if dtype.itemsize == 4 else "")
    return builder.value(f"{name}({', '.join(a.text for a in args)})", dtype, args)


def real(builder: Builder, name: str, *args: Scalar) -> Scalar:
    """An elementwise primitive of real arguments of one type; the result has that type, or is a truth value."""
    dtype = args[0].dtype
    result = np.dtype(bool) if name in _COMPARISONS else dtype
    if name in _FOLDED and all(a.is_constant for a in args) and not (dtype.kind == "b" and name in ("sub", "neg")):
        with np.errstate(all="ignore"):
            return constant(_FOLDED[name](*(a.value for a in args)), result)  # type: ignore[return-value]
    if (simple := _simplified(name, dtype, args)) is not None:
        return simple
    if name in _COMPARISONS:
        return builder.value(f"({args[0].text} {_COMPARISONS[name]} {args[1].text})", result, args)
    if name in _BITWISE:
        text = f"({args[0].text} {_BITWISE[name]} {args[1].text})"
        return builder.value(text if dtype.itemsize >= 4 else f"({c_type(dtype)}){text}", dtype, args)
    if name == "not":
        text = f"!{args[0].text}" if dtype.kind == "b" else f"({c_type(dtype)})~{args[0].text}"
        return builder.value(text, dtype, args)
    template = _REAL[name]
    text = template if isinstance(template, str) else template(dtype)
    if "{" not in text:
        return call(builder, text, dtype, *args)
    return builder.value(text.format(*(a.text for a in args)), dtype, args)


def _is(x: Scalar, value: float) -> bool:
    return x.is_constant and x.value == value and math.copysign(1, x.value) == math.copysign(1, value)


def _simplified(name: str, dtype: np.dtype, args: Sequence[Scalar]) -> Scalar | None:
    """An operand that equals the result. Of floating-point identities only those that hold for every number are used,
    and x + 0, which differs for -0 alone."""
    if dtype.kind == "b" or len(args) != 2:
        return None
    a, b = args
    if name in ("add", "add_any"):
        if _is(a, 0.0) or _is(a, -0.0):
            return b
        if _is(b, 0.0) or _is(b, -0.0):
            return a
    elif name == "sub" and _is(b, 0.0):
        return a
    elif name == "mul":
        if _is(a, 1.0):
            return b
        if _is(b, 1.0):
            return a
    elif name == "div" and _is(b, 1.0):
        return a
    return None


def convert(builder: Builder, x: Scalar, dtype: Any) -> Scalar:
    """Another type, as JAX converts: out-of-range floats become the nearest integer, nan becomes 0."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if x.is_constant and (x.dtype.kind != "f" or dtype.kind in "fb"):
        return constant(x.value, dtype)  # type: ignore[return-value]
    if dtype.kind == "b":
        return builder.value(f"({x.text} != 0)", dtype, [x])
    if x.dtype.kind == "f" and dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        ctype = c_type(dtype)
        text = (
            f"({x.text} != {x.text} ? 0 : {x.text} <= {float(low)!r} ? {constant(low, dtype).text} : "  # type: ignore[union-attr]
            f"{x.text} >= {float(high)!r} ? {constant(high, dtype).text} : ({ctype}){x.text})"  # type: ignore[union-attr]
        )
        return builder.value(text, dtype, [x])
    return builder.value(f"({c_type(dtype)}){x.text}", dtype, [x])


def choose(builder: Builder, condition: Scalar, yes: Element, no: Element) -> Element:
    """`yes` where the condition holds, else `no`."""
    if condition.is_constant:
        return yes if condition.value else no
    if isinstance(yes, Complex):
        assert isinstance(no, Complex)
        parts = (choose(builder, condition, a, b) for a, b in ((yes.re, no.re), (yes.im, no.im)))
        return Complex(*parts)  # type: ignore[arg-type]
    assert isinstance(no, Scalar)
    if yes is no or (yes.text == no.text and yes.dtype == no.dtype):
        return yes
    return builder.value(f"({condition.text} ? {yes.text} : {no.text})", yes.dtype, [condition, yes, no])


def apply(builder: Builder, name: str, *args: Element) -> Element:
    """An elementwise primitive, real or complex."""
    if any(isinstance(a, Complex) for a in args):
        return complex_op(builder, name, *args)
    return real(builder, name, *args)  # type: ignore[arg-type]


def elementwise(builder: Builder, function: Callable[..., Element], *arrays: Elements) -> Elements:
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    out = np.empty(shape, object)
    spread = [np.broadcast_to(a, shape) for a in arrays]
    for index in np.ndindex(shape):
        out[index] = function(builder, *(a[index] for a in spread))
    return out


def _register_elementwise() -> None:
    for name in (*_REAL, *_BITWISE, *_COMPARISONS, "not", "real", "imag", "conj", "complex"):

        def translate_one(
            builder: Builder, eqn: Any, *args: Elements, _name: str = name, **params: Any
        ) -> list[Elements]:
            return [elementwise(builder, lambda b, *x: apply(b, _name, *x), *args)]

        rule(name)(translate_one)


@rule("convert_element_type")
def _convert(builder: Builder, eqn: Any, x: Elements, *, new_dtype: Any, **_: Any) -> list[Elements]:
    dtype = np.dtype(new_dtype)

    def one(b: Builder, e: Element) -> Element:
        if dtype.kind == "c":
            part = np.dtype(f"f{dtype.itemsize // 2}")
            re, im = (e.re, e.im) if isinstance(e, Complex) else (e, constant(0, part))
            return Complex(convert(b, re, part), convert(b, im, part))  # type: ignore[arg-type]
        return convert(b, e.re if isinstance(e, Complex) else e, dtype)

    return [elementwise(builder, one, x)]


@rule("reduce_precision")
def _reduce_precision(builder: Builder, eqn: Any, x: Elements, *, exponent_bits: int, mantissa_bits: int) -> list:
    dtype = eqn.invars[0].aval.dtype
    if (exponent_bits, mantissa_bits) == (8, 23) and dtype == np.float64:
        return [elementwise(builder, lambda b, e: convert(b, convert(b, e, np.float32), dtype), x)]
    finfo = jnp.finfo(dtype)
    if exponent_bits >= finfo.nexp and mantissa_bits >= finfo.nmant:
        return [x]
    raise TranslationError("has no translation to C for this precision")


@rule("is_finite")
def _is_finite(builder: Builder, eqn: Any, x: Elements) -> list[Elements]:
    # inf - inf and nan - nan are nan
    return [elementwise(builder, lambda b, e: b.value(f"({e.text} - {e.text} == 0)", bool, [e]), x)]


@rule("rsqrt")
def _rsqrt(builder: Builder, eqn: Any, x: Elements, **_: Any) -> list[Elements]:
    return [elementwise(builder, lambda b, e: real(b, "div", constant(1, e.dtype), real(b, "sqrt", e)), x)]


@rule("logistic")
def _logistic(builder: Builder, eqn: Any, x: Elements, **_: Any) -> list[Elements]:
    def one(b: Builder, e: Scalar) -> Scalar:
        one_ = constant(1, e.dtype)
        return real(b, "div", one_, real(b, "add", one_, real(b, "exp", real(b, "neg", e))))  # type: ignore[arg-type]

    return [elementwise(builder, one, x)]


@rule("round")
def _round(builder: Builder, eqn: Any, x: Elements, *, rounding_method: Any) -> list[Elements]:
    function = "rint" if "EVEN" in str(rounding_method) else "round"
    return [elementwise(builder, lambda b, e: call(b, function, e.dtype, e), x)]


@rule("integer_pow")
def _integer_pow(builder: Builder, eqn: Any, x: Elements, *, y: int) -> list[Elements]:
    return [elementwise(builder, lambda b, e: _power(b, e, y), x)]


def _power(builder: Builder, x: Element, y: int) -> Element:
    if y < 0:
        one = constant(1, x.dtype) if isinstance(x, Scalar) else constant(1, f"c{2 * x.re.dtype.itemsize}")
        return apply(builder, "div", one, _power(builder, x, -y))
    result: Element | None = None
    while y:
        if y & 1:
            result = x if result is None else apply(builder, "mul", result, x)
        y >>= 1
        if y:
            x = apply(builder, "mul", x, x)
    if result is None:
        return constant(1, x.dtype if isinstance(x, Scalar) else f"c{2 * x.re.dtype.itemsize}")
    return result


@rule("pow")
def _pow(builder: Builder, eqn: Any, x: Elements, y: Elements) -> list[Elements]:
    def one(b: Builder, base: Element, exponent: Element) -> Element:
        if isinstance(base, Scalar) and isinstance(exponent, Scalar) and exponent.dtype.kind in "iu":
            if exponent.is_constant:
                return _power(b, base, int(exponent.value))
            exponent = convert(b, exponent, base.dtype)
        return apply(b, "pow", base, exponent)

    return [elementwise(builder, one, x, y)]


@rule("clamp")
def _clamp(builder: Builder, eqn: Any, low: Elements, x: Elements, high: Elements) -> list[Elements]:
    return [elementwise(builder, lambda b, a, e, c: apply(b, "min", apply(b, "max", a, e), c), low, x, high)]


@rule("select_n")
def _select_n(builder: Builder, eqn: Any, which: Elements, *cases: Elements) -> list[Elements]:
    def one(b: Builder, w: Scalar, *options: Element) -> Element:
        if w.dtype.kind == "b":
            return choose(b, w, options[-1], options[0])
        result = options[-1]
        for i in reversed(range(len(options) - 1)):
            result = choose(b, real(b, "le", w, constant(i, w.dtype)), options[i], result)  # type: ignore[arg-type]
        return result

    return [elementwise(builder, one, which, *cases)]


@rule("population_count", "clz")
def _count_bits(builder: Builder, eqn: Any, x: Elements) -> list[Elements]:
    name = eqn.primitive.name

    def one(b: Builder, e: Scalar) -> Scalar:
        bits = 8 * e.dtype.itemsize
        helper = f"ceedtap_{name}"
        body = {
            "population_count": "for (; x; x &= x - 1) n++;",
            "clz": "n = bits; for (; x; x >>= 1) n--;",
        }[name]
        b.helpers[helper] = (
            f"CEED_QFUNCTION_HELPER int {helper}(unsigned long long x, int bits) {{\n"
            f"  int n = 0 * bits;\n  {body}\n  return n;\n}}\n"
        )
        u = c_type(np.dtype(f"u{e.dtype.itemsize}"))
        return b.value(f"({c_type(e.dtype)}){helper}(({u}){e.text}, {bits})", e.dtype, [e])

    return [elementwise(builder, one, x)]


@rule("copy", "copy_p", "optimization_barrier", "stop_gradient", "name", "sharding_constraint")
def _identity(builder: Builder, eqn: Any, *xs: Elements, **_: Any) -> list[Elements]:
    return list(xs)


# -- complex numbers ---------------------------------------------------------------------------------------------------


def complex_op(builder: Builder, name: str, *args: Element) -> Element:
    """An elementwise primitive with complex arguments, in terms of real ones."""
    op = functools.partial(real, builder)
    z = [a if isinstance(a, Complex) else Complex(a, constant(0, a.dtype)) for a in args]  # type: ignore[arg-type]
    a = z[0]
    if name in ("add", "add_any", "sub"):
        return Complex(op(name, a.re, z[1].re), op(name, a.im, z[1].im))
    if name == "neg":
        return Complex(op("neg", a.re), op("neg", a.im))
    if name == "mul" or name == "square":
        b = z[-1]
        re = op("sub", op("mul", a.re, b.re), op("mul", a.im, b.im))
        return Complex(re, op("add", op("mul", a.re, b.im), op("mul", a.im, b.re)))
    if name == "div":
        b = z[1]
        scale = op("max", op("abs", b.re), op("abs", b.im))  # keeps the squares in range
        c, d = op("div", b.re, scale), op("div", b.im, scale)
        norm = op("mul", op("add", op("mul", c, c), op("mul", d, d)), scale)
        re = op("div", op("add", op("mul", a.re, c), op("mul", a.im, d)), norm)
        return Complex(re, op("div", op("sub", op("mul", a.im, c), op("mul", a.re, d)), norm))
    if name == "abs":
        return call(builder, "hypot", a.re.dtype, a.re, a.im)
    if name == "real":
        return a.re
    if name == "imag":
        return a.im
    if name == "conj":
        return Complex(a.re, op("neg", a.im))
    if name in ("eq", "ne"):
        parts = op(name, a.re, z[1].re), op(name, a.im, z[1].im)
        return op("and" if name == "eq" else "or", *parts)
    if name == "exp":
        scale = op("exp", a.re)
        return Complex(op("mul", scale, op("cos", a.im)), op("mul", scale, op("sin", a.im)))
    if name == "log":
        return Complex(op("log", call(builder, "hypot", a.re.dtype, a.re, a.im)), op("atan2", a.im, a.re))
    if name == "sqrt":
        half = constant(0.5, a.re.dtype)
        size = call(builder, "hypot", a.re.dtype, a.re, a.im)
        big = op("sqrt", op("mul", half, op("add", size, op("abs", a.re))))  # type: ignore[arg-type]
        small = op("div", op("mul", half, op("abs", a.im)), op("max", big, constant(1e-300, a.re.dtype)))  # type: ignore[arg-type]
        right = op("ge", a.re, constant(0, a.re.dtype))  # type: ignore[arg-type]
        re, im = choose(builder, right, big, small), choose(builder, right, small, big)
        negative = op("lt", a.im, constant(0, a.re.dtype))  # type: ignore[arg-type]
        return Complex(re, choose(builder, negative, op("neg", im), im))  # type: ignore[arg-type]
    if name == "pow":
        return complex_op(builder, "exp", complex_op(builder, "mul", z[1], complex_op(builder, "log", a)))
    if name in ("sin", "cos", "sinh", "cosh"):
        x, y = (a.re, a.im) if name in ("sin", "cos") else (a.im, a.re)
        s, c, sh, ch = op("sin", x), op("cos", x), op("sinh", y), op("cosh", y)
        return {
            "sin": lambda: Complex(op("mul", s, ch), op("mul", c, sh)),
            "cos": lambda: Complex(op("mul", c, ch), op("neg", op("mul", s, sh))),
            "sinh": lambda: Complex(op("mul", c, sh), op("mul", s, ch)),
            "cosh": lambda: Complex(op("mul", c, ch), op("mul", s, sh)),
        }[name]()
    if name in ("tan", "tanh"):
        sine, cosine = ("sin", "cos") if name == "tan" else ("sinh", "cosh")
        return complex_op(builder, "div", complex_op(builder, sine, a), complex_op(builder, cosine, a))
    if name == "sign":
        size = call(builder, "hypot", a.re.dtype, a.re, a.im)
        zero = op("eq", size, constant(0, size.dtype))  # type: ignore[arg-type]
        return choose(builder, zero, a, Complex(op("div", a.re, size), op("div", a.im, size)))
    raise TranslationError("has no translation to C for complex numbers")


@rule("complex")
def _complex(builder: Builder, eqn: Any, re: Elements, im: Elements) -> list[Elements]:
    return [elementwise(builder, lambda b, x, y: Complex(x, y), re, im)]


# -- moving values -----------------------------------------------------------------------------------------------------


def _moved(eqn: Any, params: dict[str, Any], operands: Sequence[Elements], moving: int) -> list[Elements]:
    """A primitive that only moves the elements of its first `moving` operands; the other operands are constants.

    JAX itself says where they go: the primitive is applied to the numbers of the elements.
    """
    starts = np.cumsum([0] + [x.size for x in operands[:moving]])
    numbers: list[Any] = []
    for x, start in zip(operands[:moving], starts, strict=False):
        numbers.append(jnp.asarray(np.arange(start, start + x.size).reshape(x.shape)))
    for x, atom in zip(operands[moving:], eqn.invars[moving:], strict=True):
        numbers.append(jnp.asarray(_constants(x, atom.aval.dtype)))
    with jax_compat.concrete():
        results = eqn.primitive.bind(*numbers, **params)
    results = results if eqn.primitive.multiple_results else [results]
    pool = np.concatenate([x.reshape(-1) for x in operands[:moving]]) if starts[-1] else np.empty(0, object)
    out = []
    for result in results:
        where = np.asarray(result)
        moved = np.empty(where.shape, object)
        for index in np.ndindex(where.shape):
            moved[index] = pool[where[index]]
        out.append(moved)
    return out


def _constants(x: Elements, dtype: Any) -> np.ndarray:
    out = np.empty(x.shape, dtype)
    for index in np.ndindex(x.shape):
        if isinstance(x[index], Complex) or not x[index].is_constant:
            raise TranslationError("needs an operand that is known when the function is translated")
        out[index] = x[index].value
    return out


def _all_constant(x: Elements) -> bool:
    return all(isinstance(e, Scalar) and e.is_constant for e in x.reshape(-1))


@rule("reshape", "transpose", "slice", "rev", "squeeze", "expand_dims", "concatenate", "pad", "broadcast_in_dim", "split",
      "tile")  # fmt: skip
def _structural(builder: Builder, eqn: Any, *operands: Elements, **params: Any) -> list[Elements]:
    if eqn.primitive.name in ("reshape", "broadcast_in_dim"):
        operands = operands[:1]
        params = dict(params, sharding=None) if "sharding" in params else params
    return _moved(eqn, params, operands, len(operands))


@rule("iota")
def _iota(builder: Builder, eqn: Any, *, dtype: Any, shape: Any, dimension: int, **_: Any) -> list[Elements]:
    index = [1] * len(shape)
    index[dimension] = shape[dimension]
    return [elements(np.broadcast_to(np.arange(shape[dimension]).reshape(index), shape), dtype)]


# -- indices known at run time only ------------------------------------------------------------------------------------


def _flat_index(builder: Builder, parts: Sequence[tuple[int, Scalar]], offset: int) -> Scalar:
    """offset + sum of stride * index."""
    total: Scalar = constant(offset, np.int32)  # type: ignore[assignment]
    for stride, index in parts:
        scaled = real(builder, "mul", constant(stride, np.int32), convert(builder, index, np.int32))  # type: ignore[arg-type]
        total = real(builder, "add", scaled, total)
    return total


def _clamped(builder: Builder, index: Scalar, high: int) -> Scalar:
    low = constant(0, index.dtype)
    return real(builder, "min", real(builder, "max", index, low), constant(max(high, 0), index.dtype))  # type: ignore[arg-type]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _parts(builder: Builder, x: Elements) -> list[list[Scalar]]:
    """The real arrays that an array consists of: one, or two of a complex one."""
    flat = list(x.reshape(-1))
    if flat and isinstance(flat[0], Complex):
        return [[e.re for e in flat], [e.im for e in flat]]
    return [flat]


def _joined(parts: Sequence[list[Scalar]], shape: Any) -> Elements:
    out = np.empty(len(parts[0]), object)
    for i, part in enumerate(zip(*parts, strict=True)):
        out[i] = part[0] if len(part) == 1 else Complex(*part)
    return out.reshape(shape)


@rule("dynamic_slice")
def _dynamic_slice(builder: Builder, eqn: Any, x: Elements, *starts: Elements, slice_sizes: Any) -> list[Elements]:
    if all(_all_constant(s) for s in starts):
        at = [min(max(int(s[()].value), 0), n - k) for s, n, k in zip(starts, x.shape, slice_sizes, strict=True)]
        return [x[tuple(slice(a, a + k) for a, k in zip(at, slice_sizes, strict=True))]]
    strides = _strides(x.shape)
    first = [
        (stride, _clamped(builder, s[()], n - k))
        for s, n, k, stride in zip(starts, x.shape, slice_sizes, strides, strict=True)
    ]
    parts = []
    for part in _parts(builder, x):
        array = builder.array(part, part[0].dtype)
        loaded = []
        for index in np.ndindex(*slice_sizes):
            flat = _flat_index(builder, first, sum(i * s for i, s in zip(index, strides, strict=True)))
            loaded.append(builder.load(array, flat.text, part[0].dtype, [flat]))
        parts.append(loaded)
    return [_joined(parts, slice_sizes)]


@rule("dynamic_update_slice")
def _dynamic_update_slice(
    builder: Builder, eqn: Any, x: Elements, update: Elements, *starts: Elements
) -> list[Elements]:
    if all(_all_constant(s) for s in starts):
        out = x.copy()
        at = [min(max(int(s[()].value), 0), n - k) for s, n, k in zip(starts, x.shape, update.shape, strict=True)]
        out[tuple(slice(a, a + k) for a, k in zip(at, update.shape, strict=True))] = update
        return [out]
    strides = _strides(x.shape)
    first = [
        (stride, _clamped(builder, s[()], n - k))
        for s, n, k, stride in zip(starts, x.shape, update.shape, strides, strict=True)
    ]
    parts = []
    for part, new in zip(_parts(builder, x), _parts(builder, update), strict=True):
        array = builder.array([_variable_of(builder, e) for e in part], part[0].dtype)
        for index, value in zip(np.ndindex(*update.shape), new, strict=True):
            flat = _flat_index(builder, first, sum(i * s for i, s in zip(index, strides, strict=True)))
            builder.store(array, flat, value)
        parts.append([builder.load(array, str(i), part[0].dtype) for i in range(len(part))])
    return [_joined(parts, x.shape)]


def _variable_of(builder: Builder, x: Scalar) -> Scalar:
    """A value that is not a constant, so that an array of it can be written to."""
    return builder.value(x.text, x.dtype, []) if x.is_constant else x


@rule("gather")
def _gather(
    builder: Builder, eqn: Any, x: Elements, indices: Elements, *, dimension_numbers: Any, slice_sizes: Any,
    fill_value: Any, mode: Any, **params: Any,
) -> list[Elements]:  # fmt: skip
    if _all_constant(indices):
        params = dict(eqn.params)
        if "FILL" in str(mode):
            return [_filled_gather(eqn, x, indices)]
        return _moved(eqn, params, [x, indices], 1)
    numbers = dimension_numbers
    batching_x, batching_i = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    window = [d for d in range(x.ndim) if d not in numbers.collapsed_slice_dims and d not in batching_x]
    out_shape = eqn.outvars[0].aval.shape
    strides = _strides(x.shape)
    fill = "FILL" in str(mode)
    arrays = [(builder.array(part, part[0].dtype), part[0].dtype) for part in _parts(builder, x)]
    results: list[list[Scalar]] = [[] for _ in arrays]
    for out_index in np.ndindex(*out_shape):
        batch = [i for d, i in enumerate(out_index) if d not in numbers.offset_dims]
        offsets = dict(zip(window, (out_index[d] for d in numbers.offset_dims), strict=True))
        first, inside = [], constant(True, bool)
        for k, d in enumerate(numbers.start_index_map):
            index = indices[(*batch, k)]
            high = x.shape[d] - slice_sizes[d]
            if fill:
                ok = real(builder, "and", real(builder, "ge", index, constant(0, index.dtype)),  # type: ignore[arg-type]
                          real(builder, "le", index, constant(high, index.dtype)))  # type: ignore[arg-type] # fmt: skip
                inside = real(builder, "and", inside, ok)  # type: ignore[arg-type]
            first.append((strides[d], _clamped(builder, index, high)))
        offset = sum(i * strides[d] for d, i in offsets.items())
        for dx, di in zip(batching_x, batching_i, strict=True):
            offset += strides[dx] * batch[di]
        flat = _flat_index(builder, first, offset)
        for result, (array, dtype) in zip(results, arrays, strict=True):
            value: Any = builder.load(array, flat.text, dtype, [flat])
            if fill:
                value = choose(builder, inside, value, constant(_fill_value(fill_value, dtype), dtype))  # type: ignore[arg-type]
            result.append(value)
    return [_joined(results, out_shape)]


def _fill_value(fill_value: Any, dtype: np.dtype) -> Any:
    if fill_value is not None:
        return fill_value
    return np.nan if dtype.kind == "f" else np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max


def _filled_gather(eqn: Any, x: Elements, indices: Elements) -> Elements:
    """With constant indices: positions outside of the operand come out as -1 and are filled."""
    numbers = jnp.asarray(np.arange(x.size).reshape(x.shape))
    at = jnp.asarray(_constants(indices, eqn.invars[1].aval.dtype))
    with jax_compat.concrete():
        where = np.asarray(eqn.primitive.bind(numbers, at, **dict(eqn.params, fill_value=-1)))
    dtype = eqn.invars[0].aval.dtype
    out = np.empty(where.shape, object)
    for index in np.ndindex(where.shape):
        value = where[index]
        out[index] = constant(_fill_value(eqn.params["fill_value"], dtype), dtype) if value < 0 else x.flat[value]
    return out


@rule("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min", "scatter_min", "scatter-max",
      "scatter_max", "scatter-sub", "scatter_sub")  # fmt: skip
def _scatter(builder: Builder, eqn: Any, x: Elements, indices: Elements, updates: Elements, **params: Any) -> list:
    name = eqn.primitive.name.replace("-", "_").removeprefix("scatter").removeprefix("_")

    def combined(old: Element, new: Element) -> Element:
        return new if not name else apply(builder, name, old, new)

    numbers = params["dimension_numbers"]
    batching_x, batching_i = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    window = [d for d in range(x.ndim) if d not in numbers.inserted_window_dims and d not in batching_x]
    sizes = {d: updates.shape[u] for d, u in zip(window, numbers.update_window_dims, strict=True)}
    strides = _strides(x.shape)
    clip = "CLIP" in str(params["mode"])
    dynamic = not _all_constant(indices)
    out = x.copy().reshape(-1)
    arrays = None
    if dynamic:
        parts = _parts(builder, x)
        if len(parts) > 1:
            raise TranslationError("has no translation to C for complex numbers at indices known at run time only")
        dtype = parts[0][0].dtype
        arrays = builder.array([_variable_of(builder, e) for e in parts[0]], dtype)
    for index in np.ndindex(*updates.shape):
        batch = [i for d, i in enumerate(index) if d not in numbers.update_window_dims]
        offsets = dict(zip(window, (index[d] for d in numbers.update_window_dims), strict=True))
        offset = sum(i * strides[d] for d, i in offsets.items())
        for dx, di in zip(batching_x, batching_i, strict=True):
            offset += strides[dx] * batch[di]
        starts = []
        for k, d in enumerate(numbers.scatter_dims_to_operand_dims):
            starts.append((d, indices[(*batch, k)], x.shape[d] - sizes.get(d, 1)))
        if not dynamic:
            at, inside = offset, True
            for d, start, high in starts:
                value = int(start.value)
                inside &= 0 <= value <= high
                at += strides[d] * (min(max(value, 0), high) if clip else value)
            if inside or clip:
                out[at] = combined(out[at], updates[index])
            continue
        inside_: Scalar = constant(True, bool)  # type: ignore[assignment]
        first = []
        for d, start, high in starts:
            if not clip:
                ok = real(builder, "and", real(builder, "ge", start, constant(0, start.dtype)),  # type: ignore[arg-type]
                          real(builder, "le", start, constant(high, start.dtype)))  # type: ignore[arg-type] # fmt: skip
                inside_ = real(builder, "and", inside_, ok)
            first.append((strides[d], _clamped(builder, start, high)))
        flat = _flat_index(builder, first, offset)
        assert arrays is not None
        old = builder.load(arrays, flat.text, dtype, [flat])
        builder.store(arrays, flat, choose(builder, inside_, combined(old, updates[index]), old))  # type: ignore[arg-type]
    if dynamic:
        assert arrays is not None
        for i in range(out.size):
            out[i] = builder.load(arrays, str(i), dtype)
    return [out.reshape(x.shape)]


# -- reductions --------------------------------------------------------------------------------------------------------


def _reduced(builder: Builder, name: str, values: Sequence[Element], start: Element) -> Element:
    """Combined in order. What the compiler may not reorder stays in the order in which it is written."""
    result: Element | None = None
    for value in values:
        result = value if result is None else apply(builder, name, result, value)
    return start if result is None else result


_REDUCTIONS = {"reduce_sum": ("add", 0), "reduce_prod": ("mul", 1), "reduce_max": ("max", -np.inf),
               "reduce_min": ("min", np.inf), "reduce_and": ("and", True), "reduce_or": ("or", False),
               "reduce_xor": ("xor", 0)}  # fmt: skip


@rule(*_REDUCTIONS)
def _reduce(builder: Builder, eqn: Any, x: Elements, *, axes: Any, **_: Any) -> list[Elements]:
    name, start = _REDUCTIONS[eqn.primitive.name]
    dtype = eqn.outvars[0].aval.dtype
    if x.size == 0 and dtype.kind in "iu" and isinstance(start, float):
        start = np.iinfo(dtype).min if start < 0 else np.iinfo(dtype).max
    kept = [d for d in range(x.ndim) if d not in axes]
    moved = x.transpose([*kept, *axes]).reshape(*(x.shape[d] for d in kept), -1)
    out = np.empty([x.shape[d] for d in kept], object)
    for index in np.ndindex(out.shape):
        out[index] = _reduced(builder, name, list(moved[index]), constant(start if x.size == 0 else 0, dtype))
    return [out]


@rule("argmax", "argmin")
def _arg(builder: Builder, eqn: Any, x: Elements, *, axes: Any, index_dtype: Any) -> list[Elements]:
    compare = "gt" if eqn.primitive.name == "argmax" else "lt"
    (axis,) = axes
    moved = np.moveaxis(x, axis, -1)
    out = np.empty(moved.shape[:-1], object)
    for index in np.ndindex(out.shape):
        best, at = moved[index][0], constant(0, index_dtype)
        for i, value in enumerate(moved[index][1:], 1):
            better = real(builder, compare, value, best)
            if value.dtype.kind == "f":  # the first nan wins
                is_nan = real(builder, "ne", value, value)
                was_nan = real(builder, "ne", best, best)
                better = real(builder, "and", real(builder, "or", better, is_nan), real(builder, "not", was_nan))
            at = choose(builder, better, constant(i, index_dtype), at)  # type: ignore[assignment]
            best = choose(builder, better, value, best)  # type: ignore[assignment]
        out[index] = at
    return [out]


_CUMULATIVE = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}


@rule(*_CUMULATIVE)
def _cumulative(builder: Builder, eqn: Any, x: Elements, *, axis: int, reverse: bool) -> list[Elements]:
    moved = np.moveaxis(x, axis, -1).copy()
    order = range(moved.shape[-1] - 1, -1, -1) if reverse else range(moved.shape[-1])
    for index in np.ndindex(moved.shape[:-1]):
        so_far = None
        for i in order:
            value = moved[(*index, i)]
            so_far = value if so_far is None else apply(builder, _CUMULATIVE[eqn.primitive.name], so_far, value)
            moved[(*index, i)] = so_far
    return [np.moveaxis(moved, -1, axis)]


@rule("cumlogsumexp")
def _cumlogsumexp(builder: Builder, eqn: Any, x: Elements, *, axis: int, reverse: bool) -> list[Elements]:
    def function(x: Any) -> Any:
        return jax.lax.associative_scan(jnp.logaddexp, x, axis=axis, reverse=reverse)

    return via_jax(builder, function, [x], [eqn.invars[0].aval])


@rule("dot_general")
def _dot_general(
    builder: Builder, eqn: Any, a: Elements, b: Elements, *, dimension_numbers: Any, **_: Any
) -> list[Elements]:
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    free_a = [d for d in range(a.ndim) if d not in contract_a and d not in batch_a]
    free_b = [d for d in range(b.ndim) if d not in contract_b and d not in batch_b]
    dtype = eqn.outvars[0].aval.dtype
    k = math.prod(a.shape[d] for d in contract_a)
    left = a.transpose([*batch_a, *free_a, *contract_a]).reshape(
        math.prod(a.shape[d] for d in batch_a), math.prod(a.shape[d] for d in free_a), k
    )
    right = b.transpose([*batch_b, *free_b, *contract_b]).reshape(
        left.shape[0], math.prod(b.shape[d] for d in free_b), k
    )
    out = np.empty((left.shape[0], left.shape[1], right.shape[1]), object)
    for n, i, j in np.ndindex(out.shape):
        out[n, i, j] = _inner(builder, left[n, i], right[n, j], dtype)
    return [out.reshape(eqn.outvars[0].aval.shape)]


def _inner(builder: Builder, a: Elements, b: Elements, dtype: Any) -> Element:
    def cast(x: Element) -> Element:
        return convert(builder, x, dtype) if isinstance(x, Scalar) and np.dtype(dtype).kind != "c" else x

    total: Element | None = None
    for x, y in zip(a, b, strict=True):
        if any(isinstance(e, Scalar) and e.is_constant and e.value == 0 for e in (x, y)):
            continue
        product = apply(builder, "mul", cast(x), cast(y))
        total = product if total is None else apply(builder, "add", total, product)
    return constant(0, dtype) if total is None else total


@rule("conv_general_dilated")
def _convolution(builder: Builder, eqn: Any, x: Elements, kernel: Elements, **params: Any) -> list[Elements]:
    """Every output is a sum of products; JAX's derivative of the convolution of zeros says which."""
    dtype = eqn.outvars[0].aval.dtype
    with jax_compat.concrete():
        count = np.asarray(eqn.primitive.bind(jnp.zeros(x.shape), jnp.zeros(kernel.shape), **params)).shape
        out = np.full(math.prod(count), None, object)
        for i in range(x.size):
            unit = jnp.zeros(x.size).at[i].set(1.0).reshape(x.shape)
            marks = jnp.asarray(np.arange(1.0, kernel.size + 1).reshape(kernel.shape))
            which = np.asarray(eqn.primitive.bind(unit, marks, **params)).reshape(-1).round().astype(int)
            for o in np.nonzero(which)[0]:
                product = apply(builder, "mul", x.flat[i], kernel.flat[which[o] - 1])
                out[o] = product if out[o] is None else apply(builder, "add", out[o], product)
    for o in range(out.size):
        if out[o] is None:
            out[o] = constant(0, dtype)
    return [out.reshape(count)]


@rule("sort")
def _sort(builder: Builder, eqn: Any, *operands: Elements, dimension: int, num_keys: int, **_: Any) -> list[Elements]:
    """An insertion network: stable, without jumps; nan sorts last."""
    moved = [np.moveaxis(x, dimension, -1).copy() for x in operands]
    n = moved[0].shape[-1]
    for index in np.ndindex(moved[0].shape[:-1]):
        rows = [x[index] for x in moved]
        for last in range(n - 1, 0, -1):
            for i in range(last):
                swap = _comes_before(builder, [r[i + 1] for r in rows[:num_keys]], [r[i] for r in rows[:num_keys]])
                for row in rows:
                    a, b = row[i], row[i + 1]
                    row[i], row[i + 1] = choose(builder, swap, b, a), choose(builder, swap, a, b)
    return [np.moveaxis(x, -1, dimension) for x in moved]


def _comes_before(builder: Builder, a: Sequence[Scalar], b: Sequence[Scalar]) -> Scalar:
    """Whether a sorts strictly before b, by the first key that differs."""
    op = functools.partial(real, builder)
    result: Scalar = constant(False, bool)  # type: ignore[assignment]
    for x, y in reversed(list(zip(a, b, strict=True))):
        less = op("lt", x, y)
        equal = op("eq", x, y)
        if x.dtype.kind == "f":
            x_nan, y_nan = op("ne", x, x), op("ne", y, y)
            less = op("or", less, op("and", op("not", x_nan), y_nan))
            equal = op("or", equal, op("and", x_nan, y_nan))
        result = op("or", less, op("and", equal, result))
    return result


@rule("top_k")
def _top_k(builder: Builder, eqn: Any, x: Elements, *, k: int, axis: int = -1, **_: Any) -> list[Elements]:
    def function(x: Any) -> Any:
        n = x.shape[axis]
        positions = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim)
        values, where = jax.lax.sort((-x, positions), dimension=axis % x.ndim, num_keys=1)
        cut = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=min(k, n), axis=axis % x.ndim)
        return -cut(values), cut(where)

    return via_jax(builder, function, [x], [eqn.invars[0].aval])


# -- functions in functions --------------------------------------------------------------------------------------------


def via_jax(
    builder: Builder, function: Callable[..., Any], operands: Sequence[Elements], avals: Sequence[Any]
) -> list[Elements]:
    """Translates a JAX function in place of a primitive."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    with jax_compat.concrete():
        closed = jax.make_jaxpr(function)(*shapes)
    return translate(builder, closed.jaxpr, closed.consts, operands)


@rule("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call",
      "custom_vjp_call_jaxpr", "xla_call", "named_call", "custom_lin")  # fmt: skip
def _nested(builder: Builder, eqn: Any, *operands: Elements, **params: Any) -> list[Elements]:
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    if inner is None:
        raise TranslationError("has no translation to C")
    consts = getattr(inner, "consts", ())
    return translate(builder, getattr(inner, "jaxpr", inner), consts, operands)


@rule("custom_linear_solve")
def _custom_linear_solve(builder: Builder, eqn: Any, *operands: Elements, const_lengths: Any, jaxprs: Any) -> list:
    skip = sum(const_lengths[name_] for name_ in ("matvec", "vecmat")) if hasattr(const_lengths, "keys") else (
        const_lengths.matvec + const_lengths.vecmat
    )  # fmt: skip
    all_consts = const_lengths.matvec + const_lengths.vecmat + const_lengths.solve + const_lengths.transpose_solve
    solve = operands[skip : skip + const_lengths.solve]
    return translate(builder, jaxprs.solve.jaxpr, jaxprs.solve.consts, [*solve, *operands[all_consts:]])


def _num_equations(jaxpr: Any) -> int:
    return sum(1 + sum(_num_equations(sub) for sub in jax_compat.sub_jaxprs(eqn)) for eqn in jaxpr.eqns)


@rule("cond")
def _cond(builder: Builder, eqn: Any, which: Elements, *operands: Elements, branches: Any, **_: Any) -> list[Elements]:
    index = which[()]
    if index.is_constant:
        chosen = branches[min(max(int(index.value), 0), len(branches) - 1)]
        return translate(builder, chosen.jaxpr, chosen.consts, operands)
    cheap = all(_num_equations(b.jaxpr) <= MAX_CHOSEN and not _has_loop(b.jaxpr) for b in branches)
    if cheap:
        results = [translate(builder, b.jaxpr, b.consts, operands) for b in branches]
        # A condition of two branches is converted from a truth value, which is all that is needed of it.
        return [
            _select_n(builder, eqn, np.array(index, object), *options)[0] if options[0].size else options[0]
            for options in zip(*results, strict=True)
        ]
    avals = [v.aval for v in eqn.outvars]
    out = [_variables(builder, None, aval) for aval in avals]
    for i, branch in enumerate(branches):
        head = "if" if i == 0 else "else if"
        test = f" ({index.text} <= {i})" if i < len(branches) - 1 else ""
        with builder.nest((head if test else "else") + test, [index]):
            for variables, values in zip(out, translate(builder, branch.jaxpr, branch.consts, operands), strict=True):
                _assign(builder, variables, values)
    return out


def _has_loop(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in ("while", "scan") or any(map(_has_loop, jax_compat.sub_jaxprs(eqn))) for eqn in jaxpr.eqns
    )


def _variables(builder: Builder, initial: Elements | None, aval: Any) -> Elements:
    out = np.empty(aval.shape, object)
    dtype = np.dtype(aval.dtype)
    for index in np.ndindex(aval.shape):
        start = None if initial is None else initial[index]
        if dtype.kind == "c":
            part = f"f{dtype.itemsize // 2}"
            parts = (None, None) if start is None else (start.re, start.im)
            out[index] = Complex(*(builder.variable(p, part) for p in parts))
        else:
            out[index] = builder.variable(start, dtype)
    return out


def _assign(builder: Builder, variables: Elements, values: Elements) -> None:
    for variable, value in zip(variables.reshape(-1), values.reshape(-1), strict=True):
        if isinstance(variable, Complex):
            builder.set(variable.re, value.re)
            builder.set(variable.im, value.im)
        else:
            builder.set(variable, value)


def _held(builder: Builder, values: Elements, variables: set[str]) -> Elements:
    """Values that do not change when the variables are set: those that are variables themselves are copied."""

    def hold(x: Scalar) -> Scalar:
        if x.text not in variables:
            return x
        copy = builder.variable(x, x.dtype)
        return copy

    out = values.copy()
    for index in np.ndindex(values.shape):
        e = values[index]
        out[index] = Complex(hold(e.re), hold(e.im)) if isinstance(e, Complex) else hold(e)
    return out


def _update(builder: Builder, carry: Sequence[Elements], new: Sequence[Elements]) -> None:
    """Sets the variables of a loop to their next values, all at once."""
    names = {s.text for c in carry for e in c.reshape(-1) for s in ((e.re, e.im) if isinstance(e, Complex) else (e,))}
    held = [_held(builder, values, names) for values in new]
    for variables, values in zip(carry, held, strict=True):
        _assign(builder, variables, values)


@rule("while")
def _while(
    builder: Builder, eqn: Any, *operands: Elements, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int,
    body_jaxpr: Any, **_: Any,
) -> list[Elements]:  # fmt: skip
    cond_consts = operands[:cond_nconsts]
    body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
    start = operands[cond_nconsts + body_nconsts :]
    carry = [_variables(builder, s, v.aval) for s, v in zip(start, eqn.outvars, strict=True)]
    with builder.nest("for (;;)"):
        (go,) = translate(builder, cond_jaxpr.jaxpr, cond_jaxpr.consts, [*cond_consts, *carry])
        builder.exit_unless(go[()])
        new = translate(builder, body_jaxpr.jaxpr, body_jaxpr.consts, [*body_consts, *carry])
        _update(builder, carry, new)
    return carry


@rule("scan")
def _scan(
    builder: Builder, eqn: Any, *operands: Elements, jaxpr: Any, length: int, reverse: bool, **params: Any
) -> list:
    num_consts, num_carry = jax_compat.scan_counts(eqn)
    consts, start, xs = (
        operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    )  # fmt: skip
    order = range(length - 1, -1, -1) if reverse else range(length)
    y_avals = [v.aval for v in eqn.outvars[num_carry:]]
    if length * max(_num_equations(jaxpr.jaxpr), 1) <= MAX_UNROLLED:
        carry = list(start)
        ys = [np.empty(aval.shape, object) for aval in y_avals]
        for i in order:
            results = translate(
                builder, jaxpr.jaxpr, jaxpr.consts, [*consts, *carry, *(x[i : i + 1].reshape(x.shape[1:]) for x in xs)]
            )
            carry = results[:num_carry]
            for y, value in zip(ys, results[num_carry:], strict=True):
                y[i] = value if value.ndim else value[()]
        return [*carry, *ys]

    arrays = [[(builder.array(part, part[0].dtype), part[0].dtype) for part in _parts(builder, x)] if x.size else []
              for x in xs]  # fmt: skip
    carry = [_variables(builder, s, v.aval) for s, v in zip(start, eqn.outvars, strict=False)]
    stored = [_result_arrays(builder, aval) for aval in y_avals]
    step = builder.variable(constant(order[0] if length else 0, np.int32), np.int32)  # type: ignore[arg-type]
    with builder.nest(f"for (; {step.text} {'>= 0' if reverse else f'< {length}'};)", [step]):
        inner = []
        for x, parts in zip(xs, arrays, strict=True):
            size, shape = math.prod(x.shape[1:]), x.shape[1:]
            loaded = [
                [builder.load(a, f"{step.text} * {size} + {k}", dtype, [step]) for k in range(size)]
                for a, dtype in parts
            ]
            inner.append(_joined(loaded, shape) if size else np.empty(shape, object))
        results = translate(builder, jaxpr.jaxpr, jaxpr.consts, [*consts, *carry, *inner])
        for parts, value in zip(stored, results[num_carry:], strict=True):
            for (a, _), part in zip(parts, _parts(builder, value), strict=False):
                for k, scalar in enumerate(part):
                    at = _flat_index(builder, [(len(part), step)], k)
                    builder.store(a, at, scalar)
        _update(builder, carry, results[:num_carry])
        one = constant(-1 if reverse else 1, np.int32)
        builder.set(step, builder.value(f"{step.text} + {one.text}", np.int32, [step]))  # type: ignore[union-attr]
    ys = []
    for parts, aval in zip(stored, y_avals, strict=True):
        read = [[builder.load(a, str(k), dtype) for k in range(math.prod(aval.shape))] for a, dtype in parts]
        ys.append(_joined(read, aval.shape))
    return [*carry, *ys]


def _result_arrays(builder: Builder, aval: Any) -> list[tuple[str, np.dtype]]:
    dtype = np.dtype(aval.dtype)
    parts = [np.dtype(f"f{dtype.itemsize // 2}")] * 2 if dtype.kind == "c" else [dtype]
    size = math.prod(aval.shape)
    return [(builder.empty_array(size, part), part) for part in parts]


_register_elementwise()
# After the loop over elementwise primitives, which these two refine.
rule("pow")(_pow)
rule("complex")(_complex)
