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

from ceedtap import codegen_layout, codegen_math
from ceedtap.codegen import (
    Builder,
    Complex,
    Elements,
    Scalar,
    TranslationError,
    c_type,
    consecutive,
    constant,
    number,
    rule,
)

# Elementwise primitives of at least so many elements become loops, if their operands lie in arrays already.
MIN_LOOPED = 32
# The same where the loop is not what is vectorised.
MIN_LOOPED_LANES = 8

Element = Any  # Scalar or Complex

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


def _shift(symbol: str) -> Callable[[np.dtype], str]:
    def template(dtype: np.dtype) -> str:
        bits, u = 8 * dtype.itemsize, c_type(np.dtype(f"u{dtype.itemsize}"))
        return f"(({u}){{1}} >= {bits}U ? ({c_type(dtype)})0 : ({c_type(dtype)})(({u}){{0}} {symbol} {{1}}))"

    return template


def _arithmetic_shift(dtype: np.dtype) -> str:
    """Copies the highest bit, of unsigned integers too."""
    signed = c_type(np.dtype(f"i{dtype.itemsize}"))
    bits, u = 8 * dtype.itemsize, c_type(np.dtype(f"u{dtype.itemsize}"))
    return f"({c_type(dtype)})(({signed}){{0}} >> (({u}){{1}} >= {bits}U ? {bits - 1} : (int){{1}}))"


def _larger(symbol: str) -> Callable[[np.dtype], str]:
    """Maximum and minimum; a nan wins, and of equal numbers the right one."""

    def template(dtype: np.dtype) -> str:
        if dtype.kind != "f":
            return f"({{0}} {symbol} {{1}} ? {{0}} : {{1}})"
        return f"(({{0}} != {{0}}) | ({{0}} {symbol} {{1}}) ? {{0}} : {{1}})"  # without jumps

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
    "sqrt": "sqrt", "cbrt": "cbrt",
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log1p": "log1p", "pow": "pow",
    "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan", "atan2": "atan2",
    "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh",
    "erf": "erf", "erfc": "erfc", "lgamma": "lgamma", "nextafter": "nextafter",
    "shift_left": _shift("<<"), "shift_right_logical": _shift(">>"),
    "shift_right_arithmetic": lambda d: _arithmetic_shift(d),
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
    """A function of <math.h>, or the one in its place that is written out."""
    builder.math.add(function)
    name = function + ("f" if dtype.itemsize == 4 else "")
    if function in codegen_math.INLINE and dtype.itemsize == 8 and not builder.precise:
        name = f"ceedtap_{function}"
        for helper, text in codegen_math.helpers(function).items():
            builder.helper(helper, text)
    return builder.value(f"{name}({', '.join(a.text for a in args)})", dtype, args)


def _limits(builder: Builder, x: Scalar) -> tuple[int, int] | None:
    """Between which numbers an integer is, as far as that is known: a truth value, and what is made of it."""
    if x.is_constant:
        return int(x.value), int(x.value)
    return (0, 1) if x.dtype.kind == "b" else builder.limits.get(x.text)


def _keep_limits(builder: Builder, result: Scalar, limits: tuple[int, int] | None) -> Scalar:
    if limits and not result.is_constant and result.dtype.kind in "iu":
        info = np.iinfo(result.dtype)
        if info.min <= limits[0] and limits[1] <= info.max:
            builder.limits[result.text] = limits
    return result


_INTERVALS: dict[str, Callable[[int, int, int, int], Sequence[int]]] = {
    "add": lambda a, b, c, d: (a + c, b + d), "sub": lambda a, b, c, d: (a - d, b - c),
    "mul": lambda a, b, c, d: (a * c, a * d, b * c, b * d), "max": lambda a, b, c, d: (max(a, c), max(b, d)),
    "min": lambda a, b, c, d: (min(a, c), min(b, d)),
    # Of the sign of the first number, and not larger than either; by zero it is that number.
    "rem": lambda a, b, c, d: (
        (max(min(a, 0), 1 - max(abs(c), abs(d))), min(max(b, 0), max(abs(c), abs(d)) - 1))
        if c > 0 or d < 0 else (min(a, 0), max(b, 0))
    ),
}  # fmt: skip


def real(builder: Builder, name: str, *args: Scalar) -> Scalar:
    """An elementwise primitive of real arguments of one type; the result has that type, or is a truth value."""
    if args[0].dtype.kind not in "iu" or len(args) != 2:
        return _real_of(builder, name, *args)
    a, b = (_limits(builder, x) for x in args)
    if a and b and name in ("lt", "ge", "gt", "le"):
        low, high = (a, b) if name in ("lt", "ge") else (b, a)
        if low[1] < high[0]:  # a < b for certain, or b < a
            return number(name in ("lt", "gt"), bool)
        if low[0] >= high[1]:
            return number(name in ("ge", "le"), bool)
    result = _real_of(builder, name, *args)
    if name in _INTERVALS and a and b:
        ends = _INTERVALS[name](*a, *b)
        return _keep_limits(builder, result, (min(ends), max(ends)))
    return result


def _real_of(builder: Builder, name: str, *args: Scalar) -> Scalar:
    dtype = args[0].dtype
    result = np.dtype(bool) if name in _COMPARISONS else dtype
    if name in ("max", "min") and dtype.kind == "f":
        return _extremum(builder, name, *args)
    if name in _FOLDED and all(a.is_constant for a in args) and not (dtype.kind == "b" and name in ("sub", "neg")):
        with np.errstate(all="ignore"):
            return number(_FOLDED[name](*(a.value for a in args)), result)
    if (simple := _simplified(builder, name, dtype, args)) is not None:
        return simple
    if name == "rem" and dtype.kind == "i" and args[1].is_constant and args[1].value in (2, 4, 8):
        # The instruction that divides is none for vectors.
        (x, low) = args[0].text, number(args[1].value - 1, dtype).text
        if (limits := _limits(builder, args[0])) and limits[0] >= 0:
            return builder.value(f"({x} & {low})", dtype, args[:1])
        one = f"({_UNSIGNED[dtype.name]})"
        return builder.value(f"({x} < 0 ? ({c_type(dtype)})-({c_type(dtype)})((0 - {one}{x}) & {low}) : {x} & {low})",
                             dtype, args[:1])  # fmt: skip
    if name in _COMMUTATIVE:
        args = tuple(sorted(args, key=_order))
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
        result_ = call(builder, text, dtype, *args)
        if name in _NOT_NEGATIVE:
            builder.no_minus_zero.add(result_.text)
        return result_
    value = builder.value(text.format(*(a.text for a in args)), dtype, args)
    if dtype.kind == "f" and _has_no_minus_zero(builder, name, args):
        builder.no_minus_zero.add(value.text)
    return value


_NOT_NEGATIVE = {"abs", "exp", "exp2", "cosh", "erfc"}


def _no_minus_zero(builder: Builder, x: Scalar) -> bool:
    if x.is_constant:
        return not _is(x, -0.0)
    return x.dtype.kind != "f" or x.text in builder.no_minus_zero


def _has_no_minus_zero(builder: Builder, name: str, args: Sequence[Scalar]) -> bool:
    """Whether a result is known not to be -0; a sum is -0 only if both numbers are."""
    if name in ("add", "add_any"):
        return any(_no_minus_zero(builder, a) for a in args)
    if name == "mul":
        return args[0].text == args[1].text
    return name == "square" or (name == "sub" and _no_minus_zero(builder, args[0]))


def _extremum(builder: Builder, name: str, a: Scalar, b: Scalar) -> Scalar:
    """Maximum or minimum: a nan wins, and -0 < 0."""
    text = _larger(">" if name == "max" else "<")(a.dtype)

    def right_is_good(x: Scalar, y: Scalar) -> bool:
        """Whether y is the result wherever x == y."""
        if any(e.is_constant and e.value != 0 for e in (x, y)):
            return True
        return _no_minus_zero(builder, y if name == "max" else x)

    if a.is_constant and b.is_constant:
        with np.errstate(all="ignore"):
            value = (np.maximum if name == "max" else np.minimum)(a.value, b.value)
        if a.value == b.value == 0:
            value = b.value if right_is_good(a, b) else a.value
        return number(value, a.dtype)
    if not right_is_good(a, b):
        if right_is_good(b, a):
            a, b = b, a
        else:
            sign = call(builder, "copysign", b.dtype, number(1, b.dtype), b)
            tie = f"({{0}} == {{1}}) & ({sign.text} {'<' if name == 'max' else '>'} 0)"
            text = text.replace(" ? ", f" | ({tie}) ? ")
            return builder.value(text.format(a.text, b.text), a.dtype, [a, b, sign])
    result = builder.value(text.format(a.text, b.text), a.dtype, [a, b])
    if all(_no_minus_zero(builder, x) for x in (a, b)):
        builder.no_minus_zero.add(result.text)
    return result


def multiply_add(builder: Builder, x: Element, y: Element, z: Element | None = None, *, minus: bool = False) -> Element:
    """x * y + z, or z - x * y; in one rounding where processors can, so only for what JAX does not say how to compute.

    Without `z` that is 0.
    """
    if isinstance(x, Complex) or isinstance(y, Complex) or isinstance(z, Complex):
        product = apply(builder, "mul", x, y)
        return product if z is None else apply(builder, "sub" if minus else "add", z, product)
    z = number(0, x.dtype) if z is None else z
    exact = x.dtype != np.float64 or any(e.is_constant and abs(e.value) == 1 for e in (x, y))
    if exact or (x.is_constant and y.is_constant):
        return real(builder, "sub" if minus else "add", z, real(builder, "mul", x, y))
    builder.helper("CEEDTAP_FMA", codegen_math.FMA)
    x, y = sorted((x, y), key=_order)
    return builder.value(f"CEEDTAP_FMA({'-' * minus}{x.text}, {y.text}, {z.text})", x.dtype, [x, y, z])


# Equal but for the order of operands: written in one order, so that they are computed once.
_COMMUTATIVE = {"add", "add_any", "mul", "and", "or", "xor", "eq", "ne"}


def _order(x: Scalar) -> tuple[bool, int, str]:
    return not x.is_constant, len(x.text), x.text


def _is(x: Scalar, value: float) -> bool:
    return x.is_constant and x.value == value and math.copysign(1, x.value) == math.copysign(1, value)


def _simplified(builder: Builder, name: str, dtype: np.dtype, args: Sequence[Scalar]) -> Scalar | None:
    """An operand that equals the result. Of floating-point identities only those that hold for every number are used;
    x + 0 is not x for -0."""
    if len(args) != 2:
        return None
    a, b = args
    if dtype.kind == "b":
        if name in ("and", "or"):
            for x, other in ((a, b), (b, a)):
                if x.is_constant:
                    return other if bool(x.value) == (name == "and") else x
        if name in ("eq", "ne"):
            for x, other in ((a, b), (b, a)):
                if x.is_constant and bool(x.value) == (name == "eq"):
                    return other
        return None
    if name in ("add", "add_any"):
        for x, other in ((a, b), (b, a)):
            if _is(x, -0.0) or (_is(x, 0.0) and _no_minus_zero(builder, other)):
                return other
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
        return number(x.value, dtype)
    if dtype.kind == "b":
        return builder.value(f"({x.text} != 0)", dtype, [x])
    limits = _limits(builder, x) if x.dtype.kind in "biu" else None
    if limits and x.dtype.itemsize == 8 and dtype.kind == "f" and limits[0] >= -(2**31) and limits[1] < 2**31:
        # Few processors convert 64 bits of integers as vectors.
        return builder.value(f"({c_type(dtype)})(int){x.text}", dtype, [x])
    if x.dtype.kind == "f" and dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        ctype = c_type(dtype)
        text = (
            f"({x.text} != {x.text} ? 0 : {x.text} <= {float(low)!r} ? {number(low, dtype).text} : "
            f"{x.text} >= {float(high)!r} ? {number(high, dtype).text} : ({ctype}){x.text})"
        )
        whole = builder.value(text, dtype, [x])
        builder.truncated[whole.text] = x
        return whole
    if dtype.kind == "f" and x.text in builder.truncated:
        # gcc would take both conversions together as `trunc`, which makes -0 of -0.5.
        source, bounds = builder.truncated[x.text], np.iinfo(x.dtype)
        least, most = float(bounds.min), float(bounds.max)
        return builder.value(
            f"({c_type(dtype)})({source.text} != {source.text} ? 0 : {source.text} <= {least!r} ? {least!r} : "
            f"{source.text} >= {most!r} ? {most!r} : trunc({source.text}) + 0.0)",
            dtype,
            [source],
        )
    return _keep_limits(builder, builder.value(f"({c_type(dtype)}){x.text}", dtype, [x]), limits)


def choose(builder: Builder, condition: Scalar, yes: Element, no: Element) -> Element:
    """`yes` where the condition holds, else `no`."""
    if condition.is_constant:
        return yes if condition.value else no
    if isinstance(yes, Complex):
        assert isinstance(no, Complex)
        parts = (choose(builder, condition, a, b) for a, b in ((yes.re, no.re), (yes.im, no.im)))
        return Complex(*parts)
    assert isinstance(no, Scalar)
    if yes is no or (yes.text == no.text and yes.dtype == no.dtype):
        return yes
    result = builder.value(f"({condition.text} ? {yes.text} : {no.text})", yes.dtype, [condition, yes, no])
    if _no_minus_zero(builder, yes) and _no_minus_zero(builder, no):
        builder.no_minus_zero.add(result.text)
    if yes.dtype.kind in "iu":
        a, b = _limits(builder, yes), _limits(builder, no)
        if a and b:
            return _keep_limits(builder, result, (min(a[0], b[0]), max(a[1], b[1])))
    return result


def apply(builder: Builder, name: str, *args: Element) -> Element:
    """An elementwise primitive, real or complex."""
    if any(isinstance(a, Complex) for a in args):
        return complex_op(builder, name, *args)
    return real(builder, name, *args)


def elementwise(builder: Builder, function: Callable[..., Element], *arrays: Elements) -> Elements:
    """A function of elements, for every element of arrays that are broadcast against each other."""
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    out = np.empty(shape, object)
    spread = [np.broadcast_to(a, shape) for a in arrays]
    if builder.loops and out.size >= MIN_LOOPED_LANES:
        if any(_in_array(a) for a in spread):
            return _looped_nest(builder, function, spread)
    elif out.size >= (MIN_LOOPED_LANES if builder.lanes else MIN_LOOPED) and any(
        consecutive(list(a.reshape(-1))) for a in spread
    ):
        return _looped(builder, function, spread)
    for index in np.ndindex(shape):
        out[index] = function(builder, *(a[index] for a in spread))
    return out


def _looped(builder: Builder, function: Callable[..., Element], arrays: Sequence[Elements]) -> Elements:
    size, shape = arrays[0].size, arrays[0].shape
    sources: list[Element | tuple[str, int, np.dtype]] = []
    for array in arrays:
        flat = list(array.reshape(-1))
        if all(e is flat[0] for e in flat) or isinstance(flat[0], Complex):
            sources.append(flat[0])
        else:
            sources.append((*builder.table(flat, flat[0].dtype), flat[0].dtype))
    with builder.count(size) as j:
        args = [s if isinstance(s, Scalar | Complex) else load_at(builder, s, 0, j) for s in sources]
        result = function(builder, *args)
        parts = [result.re, result.im] if isinstance(result, Complex) else [result]
        stored = [(builder.empty_array(size, part.dtype, outside=True), part.dtype) for part in parts]
        for (array_, _), part in zip(stored, parts, strict=True):
            builder.store(array_, j, part)
    read = [builder.elements_of(array_, shape, dtype) for array_, dtype in stored]
    if len(read) == 1:
        return read[0]
    out = np.empty(shape, object)
    for index in np.ndindex(shape):
        out[index] = Complex(read[0][index], read[1][index])
    return out


def _in_array(array: Elements) -> bool:
    """Whether many of the elements lie in arrays."""
    flat = array.reshape(-1)
    return (
        sum(getattr(e.re if isinstance(e, Complex) else e, "place", None) is not None for e in flat) >= len(flat) // 2
    )


def _looped_nest(builder: Builder, function: Callable[..., Element], arrays: Sequence[Elements]) -> Elements:
    """A function of elements in loops, wherever the elements lie."""
    size, shape = arrays[0].size, arrays[0].shape
    parts: list[list[Scalar]] = []  # real arrays
    counts = []  # how many of them an array consists of
    for array in arrays:
        flat = list(array.reshape(-1))
        pair = any(isinstance(e, Complex) for e in flat)
        parts += [[e.re for e in flat], [e.im for e in flat]] if pair else [flat]
        counts.append(2 if pair else 1)
    where: list[tuple[str, list[int]] | Scalar] = []
    for part in parts:
        if all(e is part[0] or (e.text == part[0].text and e.dtype == part[0].dtype) for e in part):
            where.append(part[0])
            continue
        places = [e.place for e in part]
        if all(p is not None and p[0] == places[0][0] for p in places):  # type: ignore[index]
            where.append((places[0][0], [p[1] for p in places]))  # type: ignore[index]
        else:
            where.append((builder.table(part, part[0].dtype)[0], list(range(size))))
    loops = codegen_layout.nest([range(size), *(w[1] for w in where if not isinstance(w, Scalar))])
    if loops is None:
        for n, (w, part) in enumerate(zip(where, parts, strict=True)):
            if not isinstance(w, Scalar) and codegen_layout.nest([range(size), w[1]]) != [(size, [1, 1])]:
                where[n] = (builder.array(part, part[0].dtype), list(range(size)))
        loops = codegen_layout.nest([range(size), *(w[1] for w in where if not isinstance(w, Scalar))])
        assert loops is not None
    with builder.loop_nest(loops) as indices:
        words = [i.text for i in indices]
        loaded: list[Scalar] = []
        used = 0
        for w, part in zip(where, parts, strict=True):
            if isinstance(w, Scalar):
                loaded.append(w)
                continue
            used += 1
            at = codegen_layout.index(w[1][0], [strides[used] for _, strides in loops], words)
            loaded.append(builder.load(w[0], at, part[0].dtype, indices))
        given = iter(loaded)
        args = [next(given) if n == 1 else Complex(next(given), next(given)) for n in counts]
        result = function(builder, *args)
        results = [result.re, result.im] if isinstance(result, Complex) else [result]
        to = builder.value(codegen_layout.index(0, [strides[0] for _, strides in loops], words), np.int32, indices)
        stored = [(builder.empty_array(size, r.dtype, outside=len(loops)), r.dtype) for r in results]
        for (array_, _), r in zip(stored, results, strict=True):
            builder.store(array_, to, r)
    read = [builder.elements_of(array_, shape, dtype) for array_, dtype in stored]
    return read[0] if len(read) == 1 else _complex_of(*read)


def _complex_of(re: Elements, im: Elements) -> Elements:
    out = np.empty(re.shape, object)
    for index in np.ndindex(re.shape):
        out[index] = Complex(re[index], im[index])
    return out


def load_at(builder: Builder, source: tuple[str, int, np.dtype], offset: int, *terms: Scalar | str) -> Scalar:
    """The element of an array at the sum of the start, the offset and the terms."""
    array, start, dtype = source
    words = [t if isinstance(t, str) else t.text for t in terms]
    if start + offset:
        words.append(str(start + offset))
    return builder.load(array, " + ".join(words) or "0", dtype, [t for t in terms if isinstance(t, Scalar)])


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
            re, im = (e.re, e.im) if isinstance(e, Complex) else (e, number(0, part))
            return Complex(convert(b, re, part), convert(b, im, part))
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
    return [elementwise(builder, lambda b, e: real(b, "div", number(1, e.dtype), real(b, "sqrt", e)), x)]


@rule("logistic")
def _logistic(builder: Builder, eqn: Any, x: Elements, **_: Any) -> list[Elements]:
    def one(b: Builder, e: Scalar) -> Scalar:
        one_ = number(1, e.dtype)
        return real(b, "div", one_, real(b, "add", one_, real(b, "exp", real(b, "neg", e))))

    return [elementwise(builder, one, x)]


# In strict floating point gcc vectorises `rint`, but not `floor`, `ceil` and `round`: they are corrections of it.
def _nearest(builder: Builder, x: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    nearest = call(builder, "rint", x.dtype, x)
    one = number(1, x.dtype)
    return nearest, real(builder, "sub", nearest, one), real(builder, "add", nearest, one)


@rule("floor")
def _floor(builder: Builder, eqn: Any, x: Elements, **_: Any) -> list[Elements]:
    def one(b: Builder, e: Scalar) -> Scalar:
        nearest, below, _above = _nearest(b, e)
        return choose(b, real(b, "gt", nearest, e), below, nearest)

    return [elementwise(builder, one, x)]


@rule("ceil")
def _ceil(builder: Builder, eqn: Any, x: Elements, **_: Any) -> list[Elements]:
    def one(b: Builder, e: Scalar) -> Scalar:
        nearest, _below, above = _nearest(b, e)
        return call(b, "copysign", e.dtype, choose(b, real(b, "lt", nearest, e), above, nearest), e)  # -0.5 -> -0

    return [elementwise(builder, one, x)]


@rule("round")
def _round(builder: Builder, eqn: Any, x: Elements, *, rounding_method: Any) -> list[Elements]:
    def one(b: Builder, e: Scalar) -> Scalar:
        if rounding_method == jax.lax.RoundingMethod.TO_NEAREST_EVEN:
            return call(b, "rint", e.dtype, e)
        # From the middle away from zero, where `rint` goes to the even number.
        size = real(b, "abs", e)
        nearest, _below, above = _nearest(b, size)
        middle = real(b, "eq", real(b, "sub", size, nearest), number(0.5, e.dtype))
        return call(b, "copysign", e.dtype, choose(b, middle, above, nearest), e)

    return [elementwise(builder, one, x)]


@rule("integer_pow")
def _integer_pow(builder: Builder, eqn: Any, x: Elements, *, y: int) -> list[Elements]:
    return [elementwise(builder, lambda b, e: _power(b, e, y), x)]


def _power(builder: Builder, x: Element, y: int) -> Element:
    """The products that JAX writes."""
    dtype = x.dtype if isinstance(x, Scalar) else np.dtype(f"c{2 * x.re.dtype.itemsize}")
    if y <= 0:
        one = constant(1, dtype)
        return one if y == 0 else apply(builder, "div", one, _power(builder, x, -y))
    result: Element | None = None
    while y:
        if y & 1:
            result = x if result is None else apply(builder, "mul", result, x)
        y >>= 1
        if y:
            x = apply(builder, "mul", x, x)
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


def select(builder: Builder, which: Scalar, *cases: Element) -> Element:
    """The case with this number, the nearest one if there is none."""
    if which.dtype.kind == "b":
        return choose(builder, which, cases[-1], cases[0])
    result = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        result = choose(builder, real(builder, "le", which, number(i, which.dtype)), cases[i], result)
    return result


@rule("select_n")
def _select_n(builder: Builder, eqn: Any, which: Elements, *cases: Elements) -> list[Elements]:
    return [elementwise(builder, select, which, *cases)]


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
        b.helper(
            helper,
            f"CEED_QFUNCTION_HELPER int {helper}(unsigned long long x, int bits) {{\n"
            f"  int n = 0 * bits;\n  {body}\n  return n;\n}}\n",
        )
        u = c_type(np.dtype(f"u{e.dtype.itemsize}"))
        return b.value(f"({c_type(e.dtype)}){helper}(({u}){e.text}, {bits})", e.dtype, [e])

    return [elementwise(builder, one, x)]


@rule("copy", "optimization_barrier", "stop_gradient", "name", "sharding_constraint", "device_put",
      "layout_constraint", "with_memory_space_constraint")  # fmt: skip
def _identity(builder: Builder, eqn: Any, *xs: Elements, **_: Any) -> list[Elements]:
    return list(xs)


# -- complex numbers ---------------------------------------------------------------------------------------------------


def complex_op(builder: Builder, name: str, *args: Element) -> Element:
    """An elementwise primitive with complex arguments, in terms of real ones."""
    op = functools.partial(real, builder)
    z = [a if isinstance(a, Complex) else Complex(a, number(0, a.dtype)) for a in args]
    a = z[0]
    if name in ("add", "add_any", "sub"):
        return Complex(op(name, a.re, z[1].re), op(name, a.im, z[1].im))
    if name == "neg":
        return Complex(op("neg", a.re), op("neg", a.im))
    if name == "mul" or name == "square":
        b = z[-1]
        re = multiply_add(builder, a.re, b.re, op("neg", op("mul", a.im, b.im)))
        return Complex(re, multiply_add(builder, a.im, b.re, op("mul", a.re, b.im)))
    if name == "div":
        return _complex_quotient(builder, a, z[1])
    if name == "abs":
        return _modulus(builder, a)
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
        im = op("mul", scale, op("sin", a.im))
        is_real = op("eq", a.im, number(0, a.im.dtype))  # even where exp is infinite
        return Complex(op("mul", scale, op("cos", a.im)), choose(builder, is_real, a.im, im))
    if name == "log":
        return Complex(op("log", _modulus(builder, a)), op("atan2", a.im, a.re))
    if name == "sqrt":
        half = number(0.5, a.re.dtype)
        size = _modulus(builder, a)
        # Halved one by one: their sum may be too large.
        big = op("sqrt", op("add", op("mul", half, size), op("mul", half, op("abs", a.re))))
        small = op("div", op("mul", half, op("abs", a.im)), op("max", big, number(1e-300, a.re.dtype)))
        right = op("ge", a.re, number(0, a.re.dtype))
        re, im = choose(builder, right, big, small), choose(builder, right, small, big)
        negative = op("lt", a.im, number(0, a.re.dtype))
        return Complex(re, choose(builder, negative, op("neg", im), im))
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
        size = _modulus(builder, a)
        zero = op("eq", size, number(0, size.dtype))
        return choose(builder, zero, a, Complex(op("div", a.re, size), op("div", a.im, size)))
    raise TranslationError("has no translation to C for complex numbers")


def _modulus(builder: Builder, z: Complex) -> Scalar:
    """Of infinity and nan it is infinite, as in C, NumPy and newer JAX."""
    return call(builder, "hypot", z.re.dtype, z.re, z.im)


def _complex_quotient(builder: Builder, a: Complex, b: Complex) -> Complex:
    """Smith's method, and where that gives two nan, what infinities and zeros make of it: as the C standard has it."""
    op = functools.partial(real, builder)
    dtype = a.re.dtype
    zero, one, inf = (number(x, dtype) for x in (0, 1, np.inf))

    def isinf(x: Scalar) -> Scalar:
        return op("eq", op("abs", x), inf)

    def finite(z: Complex) -> Scalar:
        return op("and", *(op("lt", op("abs", x), inf) for x in (z.re, z.im)))

    def unit(z: Complex) -> Complex:
        """1 for infinity and 0 for what is finite, with the signs."""
        return Complex(
            *(call(builder, "copysign", dtype, choose(builder, isinf(x), one, zero), x) for x in (z.re, z.im))
        )

    def product(x: Complex, y: Complex) -> Complex:
        """x times the conjugate of y."""
        return Complex(
            op("add", op("mul", x.re, y.re), op("mul", x.im, y.im)),
            op("sub", op("mul", x.im, y.re), op("mul", x.re, y.im)),
        )

    first = op("ge", op("abs", b.re), op("abs", b.im))
    large, small = choose(builder, first, b.re, b.im), choose(builder, first, b.im, b.re)
    ratio = op("div", small, large)
    norm = op("add", large, op("mul", small, ratio))
    # Of a.re + a.im * ratio and a.im - a.re * ratio, or a.re * ratio + a.im and a.im * ratio - a.re
    x, y = choose(builder, first, a.re, a.im), choose(builder, first, a.im, a.re)
    re = op("div", op("add", x, op("mul", y, ratio)), norm)
    scaled = op("mul", x, ratio)
    im = op("div", choose(builder, first, op("sub", y, scaled), op("sub", scaled, y)), norm)
    result = Complex(re, im)

    lost = op("and", op("ne", re, re), op("ne", im, im))
    signed = call(builder, "copysign", dtype, inf, b.re)
    by_zero = Complex(op("mul", signed, a.re), op("mul", signed, a.im))
    is_zero = op("and", op("eq", b.re, zero), op("eq", b.im, zero))
    is_number = op("or", op("eq", a.re, a.re), op("eq", a.im, a.im))
    infinite = product(unit(a), b)
    infinite = Complex(op("mul", inf, infinite.re), op("mul", inf, infinite.im))
    is_infinite = op("and", op("or", isinf(a.re), isinf(a.im)), finite(b))
    vanishing = product(a, unit(b))
    vanishing = Complex(op("mul", zero, vanishing.re), op("mul", zero, vanishing.im))
    vanishes = op("and", op("or", isinf(b.re), isinf(b.im)), finite(a))
    for condition, value in ((vanishes, vanishing), (is_infinite, infinite), (op("and", is_zero, is_number), by_zero)):
        result = choose(builder, op("and", lost, condition), value, result)
    return result


@rule("complex")
def _complex(builder: Builder, eqn: Any, re: Elements, im: Elements) -> list[Elements]:
    return [elementwise(builder, lambda b, x, y: Complex(x, y), re, im)]


_register_elementwise()
# After the loop over elementwise primitives, which these two refine.
rule("pow")(_pow)
rule("complex")(_complex)
