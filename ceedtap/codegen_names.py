"""Names of C variables from the lines of the user's source that their values come from.

An equation of a jaxpr knows the line and the columns of the expression that made it. Where that is all that is assigned
in the line, its result has the name of the variable; of several such equations, which is the value and which a
derivative of it shows their order and what they do.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ceedtap import jax_compat

# Words of C, C++ and CUDA, of <math.h>, and of the file around the lines, besides those with a reserved prefix.
_WORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const const_cast
    consteval constexpr constinit continue co_await co_return co_yield decltype default delete do double dynamic_cast
    else enum explicit export extern false float for friend goto if import inline int long module mutable namespace new
    noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires restrict
    return short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try
    typedef typeid typename typeof union unsigned using virtual void volatile wchar_t while xor xor_eq linux unix main
    half global local constant kernel threadIdx blockIdx blockDim gridDim warpSize
    abs acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh div erf erfc exp exp2 expm1 fabs fabsf fdim
    floor fma fmax fmin fmod frexp gamma hypot ilogb j0 j1 jn ldexp lgamma llrint llround log log10 log1p log2 logb
    lrint lround max min modf nan nearbyint nextafter pow remainder remquo rint round rsqrt scalbn signbit signgam sin
    sinh sqrt tan tanh tgamma trunc y0 y1 yn isnan isinf isfinite isnormal clamp step mix sign index time errno
    DOMAIN EOF HUGE HUGE_VAL INFINITY NAN NULL OVERFLOW PLOSS SING TLOSS UNDERFLOW
    ctx Q in out i k
"""
_RESERVED = frozenset(_WORDS.split())
_PREFIXES = ("_", "ceed", "CEED", "Ceed", "M_", "FP_", "MATH_", "HAVE_", "INT", "UINT", "FLT_", "DBL_")
# A name is given so many times, for values of the same line.
MAX_REPEATED = 9
# Longer names of functions are cut: what follows the name tells them apart.
MAX_LENGTH = 64


def is_c_name(name: str) -> bool:
    """Whether a variable in a generated file can have this name."""
    return (
        bool(re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII)) and name not in _RESERVED and not name.startswith(_PREFIXES)
    )


def function_name(name: str) -> str:
    """What the C function of something with this name, whatever it is, begins with."""
    word = re.sub(r"\W", "_", name, flags=re.ASCII)[:MAX_LENGTH]
    return word if re.match(r"[A-Za-z]", word) else f"f_{word}"


def c_names(names: Iterable[str]) -> list[str]:
    """Different C variables for these names, with the names themselves where that can be."""
    taken: set[str] = set()
    out = []
    for name in names:
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        if not is_c_name(name):
            name = f"f{name}" if not re.match(r"[A-Za-z]", name) or name.startswith(_PREFIXES) else f"{name}_"
        while name in taken:
            name += "_"
        taken.add(name)
        out.append(name)
    return out


# -- assignments in source lines ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """A source line that assigns the value of an expression.

    Attributes:
        names: of the variables.
        columns: where the expression begins and ends.
        primitives: of JAX that compute such an expression, as far as can be said.
    """

    names: tuple[str, ...]
    columns: tuple[int, int]
    primitives: frozenset[str]


_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "dot_general",
    ast.Pow: "integer_pow pow square", ast.USub: "neg",
}  # fmt: skip
_CALLS = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arctan2": "atan2", "power": "pow", "sum": "reduce_sum",
    "prod": "reduce_prod", "max": "reduce_max", "min": "reduce_min", "multiply": "mul", "subtract": "sub",
    "divide": "div", "negative": "neg", "matmul": "dot_general", "dot": "dot_general", "einsum": "dot_general",
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def assignment(line: str) -> Assignment | None:
    """What a source line assigns, if it is a whole assignment to names."""
    indent = len(line) - len(line.lstrip())
    try:
        (statement,) = ast.parse(line.strip()).body
    except (SyntaxError, ValueError):
        return None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return None
    value = statement.value
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    if value is None or value.end_col_offset is None or not all(isinstance(t, ast.Name) for t in targets):
        return None
    names = tuple(t.id for t in targets if isinstance(t, ast.Name))
    primitives = ""
    if isinstance(value, ast.BinOp | ast.UnaryOp):
        primitives = _OPERATORS.get(type(value.op), "")
    elif isinstance(value, ast.Attribute) and value.attr == "T":
        primitives = "transpose"
    elif isinstance(value, ast.Call):
        function = value.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        primitives = f"{called} {_CALLS.get(called, '')}"
    return Assignment(names, (value.col_offset + indent, value.end_col_offset + indent), frozenset(primitives.split()))


def assigned(equations: Sequence[Any]) -> dict[int, tuple[str, ...]]:
    """By the number of an equation, the names that the user gave to its results."""
    out: dict[int, tuple[str, ...]] = {}
    groups: list[tuple[Any, list[int]]] = []  # equations of one expression, one after the other
    seen, last = set(), None
    for number, eqn in enumerate(equations):
        span = jax_compat.user_span(eqn)
        key = (*span, jax_compat.name_stack(eqn)) if span else None
        if key is not None and key == last:
            groups[-1][1].append(number)
        # What comes again in derivatives is a derivative.
        elif key is not None and (key not in seen or "jvp(" not in key[-1]):
            groups.append((key, [number]))
        else:
            key = None
        seen.add(key)
        last = key
    for (file, first_line, first_column, last_line, last_column, stack), numbers in groups:
        if first_line != last_line or "transpose(" in stack:
            continue
        found = assignment(linecache.getline(file, first_line))
        if found is None or found.columns != (first_column, last_column):
            continue
        if len(numbers) > 1 and "jvp(" in stack:
            # The value comes before its derivatives.
            numbers = [n for n in numbers if not found.primitives.isdisjoint(_does(equations[n]))][:1]
        if not numbers:
            continue
        eqn = equations[numbers[-1]]
        # The derivative of a function returns the value, and then what belongs to the derivative.
        more = len(eqn.outvars) - len(found.names)
        if more == 0 or (more > 0 and "jvp(" in stack):
            out[numbers[-1]] = found.names
    return out


def _does(eqn: Any) -> set[str]:
    """The names of a primitive, and of the function that it calls."""
    name = eqn.primitive.name
    called = str(eqn.params.get("name", "")) if name in ("jit", "pjit", "custom_jvp_call") else ""
    return {name, called, called.lstrip("_")}


# -- names of elements -------------------------------------------------------------------------------------------------


class Names:
    """Which names the variables of a file get in the end; :attr:`new` has them by the names that they have now."""

    def __init__(self, prefix: str, taken: Iterable[str] = ()) -> None:
        self.new: dict[str, str] = {}
        self._taken = set(taken)
        self._prefix = prefix
        self._pattern = re.compile(rf"{prefix}\d+")
        self._times: dict[str, int] = {}

    def give(self, name: str, variables: Sequence[tuple[str, tuple[int, ...]]], shape: tuple[int, ...]) -> None:
        """Gives the elements of an array its name and their indices: those variables that have no such name yet."""
        if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
            return
        free = {v: index for v, index in reversed(variables) if self._pattern.fullmatch(v) and v not in self.new}
        times = self._times.get(name, 0)
        if not free or times == MAX_REPEATED:
            return
        self._times[name] = times + 1
        separator = "" if all(n <= 10 for n in shape) else "_"
        wanted = name if is_c_name(name) else c_names([name])[0]
        base, more = wanted, times + 1
        while True:
            if times:
                # Neither digits after digits, nor what a variable without a name is called.
                glue = "_" if wanted[-1].isdigit() or wanted == self._prefix else ""
                base = f"{wanted}{glue}{more}"
            new = {v: base + ("_" + separator.join(map(str, index)) if index else "") for v, index in free.items()}
            if self._taken.isdisjoint(new.values()) and not any(map(self._pattern.fullmatch, new.values())):
                break
            times, more = 1, more + 1
        self._taken.update(new.values())
        self.new.update(new)

    def apply(self, text: str) -> str:
        """The text of a file with its variables' names; comments, which are the user's, stay."""
        return re.sub(rf"/\*.*?\*/|\b{self._pattern.pattern}\b", lambda found: self.new.get(found[0], found[0]), text)
