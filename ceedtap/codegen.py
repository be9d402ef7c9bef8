"""jaxpr -> C: the body of a function of one quadrature point.

The values of a jaxpr are small arrays. They are taken apart into scalars here: an array is a NumPy array of
:class:`Scalar`, each a constant or a C variable. So what only moves values (reshape, transpose, slice, gather with
constant indices ...) leaves nothing behind in C, and what computes becomes a line for each element. Equal lines are
written once, constants are folded, and lines that nothing uses are left out. The rules for the primitives are in
``codegen_rules`` and the other modules ``codegen_*``; :class:`Builder` is what they write to.

Arithmetic is that of JAX's primitives one by one, rounding by rounding: nothing is rewritten that is not the same for
every number, infinities, nan and the sign of zero included. What JAX leaves open, such as the order and the fusion of
the operations in a contraction or a factorisation, is written with fused operations (FMA) where processors have them.
"""

from __future__ import annotations

import functools
import importlib
import linecache
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ceedtap import codegen_layout, codegen_math, codegen_names, jax_compat

# So many lines are written out at most; a function with more has loops over the elements of its arrays.
MAX_LINES = 3000
# So many elements are copied in a loop.
MIN_FILLED = 4

# A NumPy array of dtype object: of Scalar, or of Complex. NumPy's type hints know no such arrays.
Elements = Any


class TranslationError(TypeError):
    """A function that cannot be translated to C; the message names the primitive and the user's line."""

    located = False  # whether the message does so already


class WantsLanes(Exception):
    """Something is better written for several points at once."""


class NoLanes(Exception):
    """Something has to be written for one point at a time."""


class TooLong(Exception):
    """There are more lines than a compiler takes in a short time; loops are wanted in place of them."""


# Why primitives have no translation, for messages. A primitive that is neither here nor has a rule is unknown.
REFUSED: dict[str, str] = {}


# -- values ----------------------------------------------------------------------------------------------------------

_C_TYPES = {
    "bool": "int",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float32": "float",
    "float64": "double",
}


@functools.cache
def c_type(dtype: np.dtype) -> str:
    """The C type of an element; libCEED's compilers on GPUs know no <stdint.h>."""
    try:
        return _C_TYPES[np.dtype(dtype).name]
    except KeyError:
        raise TranslationError(
            f"values of type {dtype} have no C type here; use float64, float32 or integers"
        ) from None


@dataclass(frozen=True, eq=False)
class Scalar:
    """One element of an array: a constant (`value` is set) or what the C expression `text` means.

    `place` is set when the element lies in a C array that is not written to any more: the array and the position. Loops
    over such elements need no copy of them.
    """

    text: str
    dtype: np.dtype
    value: Any = None
    place: tuple[str, int] | None = None

    @property
    def is_constant(self) -> bool:
        return self.value is not None


@dataclass(frozen=True, eq=False)
class Key:
    """One element of an array of random keys: the two numbers that it consists of."""

    parts: tuple[Scalar, ...]


@dataclass(frozen=True, eq=False)
class Complex:
    """One element of a complex array."""

    re: Scalar
    im: Scalar


def number(value: Any, dtype: Any) -> Scalar:
    """A constant of a real type."""
    dtype = np.dtype(dtype)
    return _real_constant(np.asarray(value).astype(dtype)[()], dtype)


def constant(value: Any, dtype: Any) -> Scalar | Complex:
    """A constant of this type."""
    dtype = np.dtype(dtype)
    value = np.asarray(value).astype(dtype)[()]
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return Complex(_real_constant(value.real, part), _real_constant(value.imag, part))
    return _real_constant(value, dtype)


def _real_constant(value: Any, dtype: np.dtype) -> Scalar:
    c_type(dtype)
    return Scalar(literal(value, dtype), dtype, value)


def literal(value: Any, dtype: np.dtype) -> str:
    """A C literal, without the macros that GPU compilers lack."""
    if dtype.kind == "b":
        return str(int(value))
    if dtype.kind == "f":
        suffix = "f" if dtype.itemsize == 4 else ""
        if math.isnan(value):
            return f"(0.0{suffix} / 0.0{suffix})"
        if math.isinf(value):
            return f"({'-' if value < 0 else ''}1.0{suffix} / 0.0{suffix})"
        text = repr(float(value)) if dtype.itemsize == 8 else repr(float(str(value)))
        text = text if any(c in text for c in ".e") else text + ".0"
        return f"({text}{suffix})" if text.startswith("-") else text + suffix
    suffix = {"int64": "LL", "uint64": "ULL", "uint32": "U"}.get(dtype.name, "")
    value = int(value)
    if dtype.kind == "i" and value == np.iinfo(dtype).min:  # the literal without the sign would not fit
        return f"({value + 1}{suffix} - 1)"
    return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"


# -- statements ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Line:
    """A line of C. It is needed when something needs what it sets, or by itself when it sets nothing."""

    text: str
    sets: tuple[str, ...]
    uses: tuple[str, ...]
    comment: str = ""
    array: int = 0  # the size of the array that it declares
    raw: bool = False  # it is about all lanes of the points already, see codegen_lanes


@dataclass(eq=False)
class Nest:
    """Lines in braces, such as a loop. It sets variables that are declared outside of it."""

    head: str
    lines: list[Line | Nest]
    sets: tuple[str, ...]
    uses: tuple[str, ...]  # besides what the lines use
    comment: str = ""


Lines = list[Line | Nest]

# Without `static`, a compiler copies the table for every point; with it, not every GPU's compiler takes it.
_TABLE = """\
#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__OPENCL_VERSION__)
#define CEEDTAP_TABLE const
#else
#define CEEDTAP_TABLE static const
#endif
"""


@dataclass
class _Scope:
    lines: list[Line | Nest] = field(default_factory=list)
    known: dict[tuple[str, str], str] = field(default_factory=dict)


class Builder:
    """What rules write to.

    Args:
        scalar: the floating-point type of the fields, float64 or float32.
        prefix: of the names of variables.
        taken: names that variables cannot have in the end.
        precise: elementary functions are those of <math.h>.
        most: lines; more of them raise :class:`TooLong`. None: there are as many as are needed, and whatever can be a
            loop is one (``codegen_loops``).
        lanes: the lines will be made lines for several points; what cannot be so raises :class:`NoLanes`. None: they
            will not, and what had better be so raises :class:`WantsLanes`.

    Attributes:
        varying: names of the variables and arrays that depend on the point, with `lanes`.
    """

    def __init__(
        self, scalar: Any = np.float64, prefix: str = "t", *, precise: bool = False, lanes: bool | None = False,
        taken: Iterable[str] = (), most: int | None = MAX_LINES,
    ) -> None:  # fmt: skip
        self.scalar = np.dtype(scalar)
        self.limits: dict[str, tuple[int, int]] = {}  # of variables that are integers, where they are known
        self.no_minus_zero: set[str] = set()  # variables that are never -0
        self.truncated: dict[str, Scalar] = {}  # of variables that are integers: the numbers that they were made of
        self.permutations: dict[str, Any] = {}  # of variables that number rows: their order, see codegen_permutation
        self.names = codegen_names.Names(prefix, taken)
        self.precise = precise
        self.lanes = lanes
        self.varying: set[str] = set()
        self.loops = most is None
        self.data: dict[str, str] = {}  # constants of files, by name
        self.helpers: dict[str, str] = {}  # C functions that the lines call, by name
        self.math: set[str] = set()  # functions of <math.h> that the lines call
        self.comment = ""
        self._prefix = prefix
        self._count = 0
        self._room = most
        self._scopes = [_Scope()]

    def helper(self, name: str, text: str) -> None:
        """A C function, or a macro, that the lines use; several generated files may end in one translation unit."""
        guard = f"HAVE_{name}".upper()
        self.helpers[name] = f"#ifndef {guard}\n#define {guard}\n{text}#endif\n"

    def give(self, name: str, value: Elements) -> None:
        """Gives the variables that an array consists of its name, where they have none yet."""
        parts: dict[str, list[tuple[str, tuple[int, ...]]]] = {"": [], "_re": [], "_im": []}
        arrays = set()
        for index in np.ndindex(value.shape):
            e = value[index]
            for part, scalar in (("_re", e.re), ("_im", e.im)) if isinstance(e, Complex) else (("", e),):
                parts[part].append((scalar.text, index))
                arrays.add((part, scalar.place and scalar.place[0]))
        for part, variables in parts.items():
            mine = [array for p, array in arrays if p == part]
            if len(mine) == 1 and mine[0]:  # an array in C as well
                variables = [(mine[0], ())]
            self.names.give(name + part, variables, value.shape)

    # -- lines ---------------------------------------------------------------------------------------------------

    def name(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count}"

    def _append(self, statement: Line | Nest) -> None:
        statement.comment = self.comment
        self._scopes[-1].lines.append(statement)
        if self._room is not None:
            self._room -= 1
            if self._room < 0:
                raise TooLong
        if isinstance(statement, Line) and not self.varying.isdisjoint(statement.uses):
            self.varying.update(statement.sets)

    def statement(self, text: str, sets: Sequence[str], uses: Sequence[str]) -> None:
        """Any line, such as a call of a function that fills arrays."""
        self._append(Line(text, tuple(sets), tuple(uses)))

    def raw(self, text: str, sets: Sequence[str], uses: Sequence[str]) -> None:
        """A line for all lanes at once."""
        self._append(Line(text, tuple(sets), tuple(uses), raw=True))

    def value(self, text: str, dtype: Any, uses: Iterable[Scalar]) -> Scalar:
        """The value of a C expression; the same variable for the same expression."""
        dtype = np.dtype(dtype)
        key = (c_type(dtype), text)
        for scope in self._scopes:
            if known := scope.known.get(key):
                return Scalar(known, dtype)
        name = self.name()
        line = Line(f"const {key[0]} {name} = {text};", (name,), tuple(names(uses)))
        self._append(line)
        self._scopes[-1].known[key] = name
        return Scalar(name, dtype)

    def variable(self, initial: Scalar | None, dtype: Any) -> Scalar:
        """A variable that can be set again, with :meth:`set`."""
        if self.lanes:  # such as the state of a loop whose end depends on the point
            raise NoLanes
        name = self.name()
        ctype = c_type(np.dtype(dtype))
        start = f" = {initial.text}" if initial is not None else ""
        self._append(Line(f"{ctype} {name}{start};", (name,), tuple(names([initial] if initial else []))))
        return Scalar(name, np.dtype(dtype))

    def set(self, variable: Scalar, value: Scalar) -> None:
        self._append(Line(f"{variable.text} = {value.text};", (variable.text,), (*names([value]), variable.text)))

    def table(self, elements: Sequence[Scalar], dtype: Any) -> tuple[str, int]:
        """An array for reading, and where in it these elements begin."""
        if run := consecutive(elements):
            return run
        dtype = np.dtype(dtype)
        if not all(e.is_constant for e in elements):
            return self.array(elements, dtype), 0
        if len(elements) * dtype.itemsize >= codegen_layout.MIN_BYTES:
            return self.known(np.array([e.value for e in elements], dtype)), 0
        values = textwrap.fill(", ".join(e.text for e in elements), 110, break_on_hyphens=False)
        text = f"[{len(elements)}] = {{{values}}};"
        key = (c_type(dtype), text)
        for scope in self._scopes:
            if known := scope.known.get(key):
                return known, 0
        name = self.name()
        self.helper("CEEDTAP_TABLE", _TABLE)
        self._append(Line(f"CEEDTAP_TABLE {key[0]} {name}{text}", (name,), ()))
        self._scopes[-1].known[key] = name
        return name, 0

    def known(self, values: np.ndarray) -> str:
        """A large array of constants, for reading."""
        ctype = c_type(values.dtype)
        of_file, definition = codegen_layout.data(values, ctype)
        self.data[of_file] = definition
        key = (ctype, of_file)
        for scope in self._scopes:
            if known := scope.known.get(key):
                return known
        name = self.name()
        self._append(Line(f"const {ctype} *const {name} = {of_file}.values;", (name,), ()))
        self._scopes[-1].known[key] = name
        return name

    def array(self, elements: Sequence[Scalar], dtype: Any) -> str:
        """A new local array with these elements, which can be written to."""
        dtype = np.dtype(dtype)
        if self.loops:
            return self._filled(elements, dtype)
        name, size = self.name(), max(len(elements), 1)
        self._append(Line(f"{c_type(dtype)} {name}[{size}];", (name,), (), array=size))
        for i, element in enumerate(elements):
            self._append(Line(f"{name}[{i}] = {element.text};", (name,), (*names([element]), name)))
        return name

    def _filled(self, elements: Sequence[Scalar], dtype: np.dtype) -> str:
        """A new local array with these elements, by loops over those that lie in arrays."""
        name = self.empty_array(len(elements), dtype)
        arrays, constants, others = codegen_layout.groups(elements)
        parts = []
        for source, here in arrays.items():
            if len(here) < MIN_FILLED:
                others += here
            else:
                parts.append((source, here, [elements[k].place[1] for k in here]))  # type: ignore[index]
        if len(constants) < MIN_FILLED:
            others += constants
        elif len({elements[k].text for k in constants}) == 1:
            parts.append((elements[constants[0]].text, constants, []))
        else:
            parts.append(
                (self.table([elements[k] for k in constants], dtype)[0], constants, list(range(len(constants))))
            )
        for k in sorted(others):
            self._append(Line(f"{name}[{k}] = {elements[k].text};", (name,), (*names([elements[k]]), name)))
        for source, to, at in parts:
            sequences = [to, at] if at else [to]
            loops = codegen_layout.nest(sequences)
            if loops is None:  # positions that are read from tables
                tables = [self.table([number(k, np.int32) for k in positions], np.int32)[0] for positions in sequences]
                loops, uses = [(len(to), [1] * len(sequences))], tables
            else:
                tables, uses = [], []
            with self.loop_nest(loops) as indices:
                counters = [i.text for i in indices]
                where = [
                    f"{tables[n]}[{counters[0]}]" if tables
                    else codegen_layout.index(s[0], [strides[n] for _, strides in loops], counters)
                    for n, s in enumerate(sequences)
                ]  # fmt: skip
                value = f"{source}[{where[1]}]" if at else source
                used = (*counters, *uses, *([source] if at else []))
                self._append(Line(f"{name}[{where[0]}] = {value};", (name,), (*used, name)))
        return name

    @contextmanager
    def loop_nest(self, loops: Sequence[tuple[int, Any]]) -> Iterator[list[Scalar]]:
        """Loops in one another, of so many turns each."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.count(turns)) for turns, _ in loops]

    def empty_array(self, size: int, dtype: Any, *, outside: int = False) -> str:
        """A local array to write to, declared before the innermost `outside` nests that are being written."""
        name, size = self.name(), max(size, 1)
        line = Line(f"{c_type(np.dtype(dtype))} {name}[{size}];", (name,), (), self.comment, array=size)
        self._scopes[-1 - outside].lines.append(line)
        return name

    def store(self, array: str, index: Scalar, value: Scalar) -> None:
        self._append(Line(f"{array}[{index.text}] = {value.text};", (array,), (*names([index, value]), array)))

    def load(self, array: str, index: str, dtype: Any, uses: Iterable[Scalar] = ()) -> Scalar:
        """An element of an array that is not set any more, in a variable."""
        name = self.name()
        dtype = np.dtype(dtype)
        text = f"const {c_type(dtype)} {name} = {array}[{index}];"
        self._append(Line(text, (name,), (*names(uses), array)))
        return Scalar(name, dtype)

    def elements_of(self, array: str, shape: Sequence[int], dtype: Any) -> Elements:
        """All elements of an array that is not set any more."""
        out = np.empty(math.prod(shape), object)
        for i in range(out.size):
            out[i] = Scalar(f"{array}[{i}]", np.dtype(dtype), place=(array, i))
        return out.reshape(shape)

    @contextmanager
    def count(
        self, end: int | str, start: int | str = 0, step: int = 1, uses: Iterable[Scalar] = ()
    ) -> Iterator[Scalar]:
        """A loop with an index; where it ends and starts may depend on those of other loops, `uses`."""
        j = self.name()
        advance = f"{j}++" if step == 1 else f"{j} += {step}" if step > 0 else f"{j} -= {-step}"
        with self.nest(f"for (int {j} = {start}; {j} {'<' if step > 0 else '>='} {end}; {advance})", uses):
            yield Scalar(j, np.dtype(np.int32))

    @contextmanager
    def nest(self, head: str, uses: Iterable[Scalar] = ()) -> Iterator[None]:
        """What is written inside goes into braces after `head`."""
        scope = _Scope()
        self._scopes.append(scope)
        try:
            yield
        finally:
            self._scopes.pop()
        inside = {name for line in scope.lines for name in line.sets if isinstance(line, Line) and _declares(line)}
        sets = tuple({name for line in scope.lines for name in line.sets} - inside)
        self._append(Nest(head, scope.lines, sets, tuple(names(uses))))

    def exit_unless(self, condition: Scalar) -> None:
        """Leaves the innermost loop when the condition is false."""
        self._append(Line(f"if (!{condition.text}) break;", (), tuple(names([condition]))))

    def exit_if(self, condition: Scalar) -> None:
        """Leaves the innermost loop when the condition is true."""
        self._append(Line(f"if ({condition.text}) break;", (), tuple(names([condition]))))

    # -- output --------------------------------------------------------------------------------------------------

    def text(self, needed: Iterable[Scalar], indent: str, rewrite: Callable[[Lines], Lines] | None = None) -> str:
        """The lines that are needed for these values, as C. Forgets the helpers and functions that are not.

        Args:
            needed: values.
            indent: before every line.
            rewrite: makes other lines of them.
        """
        lines = _prune(self._scopes[0].lines, set(names(needed)))
        if rewrite:
            lines = rewrite(lines)
        text = self.names.apply("".join(_format(lines, indent)))
        for function in codegen_math.INLINE & self.math:
            if text.count(f"ceedtap_{function}(") > codegen_math.MAX_SITES:
                text = text.replace(f"ceedtap_{function}(", f"{function}(")
        # Not the words of the user's source lines
        words = set(re.findall(r"\w+", re.sub(r"/\*.*?\*/", "", text)))
        while more := [name for name in self.helpers if name in words and not self._words_of(name) <= words]:
            for name in more:
                words |= self._words_of(name)
        self.data = {name: definition for name, definition in self.data.items() if name in words}
        self.helpers = {name: helper for name, helper in self.helpers.items() if name in words}
        self.math = {function for function in self.math if words & {function, function + "f"}}
        return text

    def _words_of(self, helper: str) -> frozenset[str]:
        """The helpers that a helper calls, and itself."""
        return frozenset(re.findall(r"\w+", self.helpers[helper])) & self.helpers.keys()


def _declares(line: Line) -> bool:
    return line.sets != () and line.sets[0] not in line.uses


def names(scalars: Iterable[Scalar]) -> list[str]:
    """Variables in values; a constant has none."""
    return [s.place[0] if s.place else s.text for s in scalars if not s.is_constant]


def consecutive(elements: Sequence[Any]) -> tuple[str, int] | None:
    """The array in which these elements lie one after the other, and where they begin."""
    first = elements[0].place if elements and isinstance(elements[0], Scalar) else None
    if first is None:
        return None
    array, start = first
    if all(isinstance(e, Scalar) and e.place == (array, start + i) for i, e in enumerate(elements)):
        return first
    return None


def _prune(lines: Sequence[Line | Nest], wanted: set[str]) -> list[Line | Nest]:
    """The lines that set what is wanted; `wanted` grows by what they use."""
    kept: list[Line | Nest] = []
    for line in reversed(lines):
        if line.sets and not wanted.intersection(line.sets):
            continue
        wanted.update(line.uses)
        if isinstance(line, Nest):
            # What a loop sets is used by the next turn as well, so its lines are looked at until nothing is added.
            size = -1
            while size != len(wanted):
                size = len(wanted)
                inner = _prune(line.lines, wanted)
            kept.append(Nest(line.head, inner, line.sets, line.uses, line.comment))
        else:
            kept.append(line)
    return kept[::-1]


def _format(lines: Sequence[Line | Nest], indent: str, comment: str = "") -> Iterator[str]:
    for line in lines:
        if line.comment and line.comment != comment:
            yield f"{indent}/* {line.comment} */\n"
        comment = line.comment
        if isinstance(line, Nest):
            yield f"{indent}{line.head} {{\n"
            yield from _format(line.lines, indent + "  ", comment)
            yield f"{indent}}}\n"
        else:
            yield f"{indent}{line.text}\n"


# -- jaxprs ----------------------------------------------------------------------------------------------------------

Rule = Callable[..., "list[Elements]"]
RULES: dict[str, Rule] = {}


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Makes a function ``(builder, equation, *operands, **params) -> results`` the rule of these primitives."""

    def register(function: Rule) -> Rule:
        for primitive in primitives:
            RULES[primitive] = function
        return function

    return register


# In place of the rules for functions with many elements; None: there is nothing to be gained.
LOOPED: dict[str, Callable[..., list[Elements] | None]] = {}


def looped(*primitives: str) -> Callable[[Any], Any]:
    """Makes a function the rule of these primitives where loops are wanted; it may return None."""

    def register(function: Any) -> Any:
        for primitive in primitives:
            LOOPED[primitive] = function
        return function

    return register


@functools.cache
def _load_rules() -> None:
    for room in (
        "rules",
        "arrays",
        "control",
        "sums",
        "linalg",
        "spectral",
        "schur",
        "special",
        "loops",
        "random",
        "ecosystem",
    ):  # they import this module
        importlib.import_module(f"ceedtap.codegen_{room}")


def elements(values: Any, dtype: Any) -> Elements:
    """An array of constants."""
    values = np.asarray(values)
    out = np.empty(values.shape, object)
    for index in np.ndindex(values.shape):
        out[index] = constant(values[index], dtype)
    return out


def translate(builder: Builder, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Elements]) -> list[Elements]:
    """Writes the equations of a jaxpr and returns its results.

    Raises:
        TranslationError: a primitive without a rule, or one that a rule refuses.
    """
    _load_rules()
    values: dict[Any, Elements] = {}

    def read(atom: Any) -> Elements:
        if jax_compat.is_literal(atom):
            return elements(atom.val, atom.aval.dtype)
        return values[atom]

    for var, const in zip(jaxpr.constvars, consts, strict=True):
        values[var] = const if isinstance(const, Known) or _is_elements(const) else constants(const, var.aval.dtype)
    for var, operand in zip(jaxpr.invars, operands, strict=True):
        values[var] = operand
    outer = builder.comment
    named = {} if outer else codegen_names.assigned(jaxpr.eqns)
    for number, eqn in enumerate(jaxpr.eqns):
        builder.comment = outer or _comment(eqn)
        try:
            results = _apply_rule(builder, eqn, [read(atom) for atom in eqn.invars])
        except TranslationError as error:
            raise _located(error, eqn) from None
        for var, result in zip(eqn.outvars, results, strict=True):
            values[var] = result
        for name, result in zip(named.get(number, ()), results, strict=False):
            builder.give(name, result)
    builder.comment = outer
    return [read(atom) for atom in jaxpr.outvars]


@dataclass(frozen=True, eq=False)
class Known:
    """A large array of constants, whose elements are made where a rule needs them."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype


def constants(values: Any, dtype: Any) -> Elements:
    """An array of constants; a large one stays as it is."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        numbers = elements(jax.random.key_data(values), np.uint32)
        keys = np.empty(numbers.shape[:-1], object)
        for index in np.ndindex(keys.shape):
            keys[index] = Key(tuple(numbers[index]))
        return keys
    array = np.asarray(values)
    dtype = np.dtype(dtype)
    if array.nbytes < codegen_layout.MIN_BYTES or dtype.kind not in "fiu" or dtype.itemsize > 8:
        return elements(array, dtype)
    c_type(dtype)
    return Known(array.astype(dtype))


def _apply_rule(builder: Builder, eqn: Any, operands: Sequence[Elements]) -> list[Elements]:
    rule_ = _rule_of(eqn)
    name = eqn.primitive.name
    if operands and all(isinstance(x, Known) for x in operands) and name in _FOLDED_KNOWN:
        with jax_compat.concrete():
            result = eqn.primitive.bind(*(x.array for x in operands), **eqn.primitive.get_bind_params(eqn.params))
        return [constants(np.asarray(result), eqn.outvars[0].aval.dtype)]
    if name not in TAKES_KNOWN:
        operands = [elements(x.array, x.dtype) if isinstance(x, Known) else x for x in operands]
    if (
        builder.loops
        and name in LOOPED
        and (results := LOOPED[name](builder, eqn, *operands, **eqn.params)) is not None
    ):
        return results
    return rule_(builder, eqn, *operands, **eqn.params)


# What makes large arrays of large arrays, and what takes them as they are.
_FOLDED_KNOWN = {
    "convert_element_type", "copy", "device_put", "neg", "reshape", "rev", "slice", "squeeze", "stop_gradient",
    "transpose",
}  # fmt: skip
TAKES_KNOWN = {
    "closed_call", "cond", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "dynamic_slice", "gather", "jit",
    "pjit", "remat2", "while",
}  # fmt: skip


def _is_elements(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object


def _rule_of(eqn: Any) -> Rule:
    name = eqn.primitive.name
    if name in RULES:
        return RULES[name]
    if name not in REFUSED and "" in RULES:
        return RULES[""]
    why = REFUSED.get(name)
    raise TranslationError("has no translation to C" + (f": {why}" if why else ""))


def _located(error: TranslationError, eqn: Any) -> TranslationError:
    """The error with the primitive and the innermost line of the user's that is known."""
    if error.located:
        return error
    place = jax_compat.user_line(eqn)
    text = str(error)
    if not text.startswith("the JAX primitive "):
        text = f"the JAX primitive `{eqn.primitive.name}` {text}"
    if place:
        text += f", at {place[0]}:{place[1]} ({place[2]})"
    located = TranslationError(text)
    located.located = place is not None
    return located


def _comment(eqn: Any) -> str:
    place = jax_compat.user_line(eqn)
    if place is None:
        return ""
    source = linecache.getline(place[0], place[1]).strip().replace("*/", "* /")
    return source or f"line {place[1]} of {place[2]}"


# -- <math.h> ---------------------------------------------------------------------------------------------------------

# Functions of glibc's vector library; a loop with others of <math.h> in it is not vectorised.
VECTORISED = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "erf", "erfc", "exp", "exp2",
    "expm1", "hypot", "log", "log1p", "pow", "sin", "sinh", "tan", "tanh",
}  # fmt: skip
_TWO_ARGUMENTS = {"atan2", "hypot", "pow"}


def preamble(functions: set[str], precise: bool) -> str:
    text = "#pragma once\n#include <ceed/types.h>\n#ifndef CEED_RUNNING_JIT_PASS\n#include <math.h>\n"
    if "sqrt" in functions:
        # Without errno, which nobody looks at, it is an instruction.
        text += "#if defined(__GNUC__) && !defined(__cplusplus)\n"
        text += "double sqrt(double) __attribute__((const));\nfloat sqrtf(float) __attribute__((const));\n#endif\n"
    vectorised = sorted(functions & VECTORISED)
    if vectorised and not precise:
        text += (
            "#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)\n"
            "#if __GLIBC_PREREQ(2, 35) /* these have vector variants there */\n"
            '#ifdef __cplusplus\nextern "C" {\n#endif\n'
        )
        for function in vectorised:
            arguments = "double, double" if function in _TWO_ARGUMENTS else "double"
            text += f'double {function}({arguments}) __attribute__((const, simd("notinbranch")));\n'
        text += "#ifdef __cplusplus\n}\n#endif\n#endif\n#endif\n"
    return text + "#endif\n\n"
