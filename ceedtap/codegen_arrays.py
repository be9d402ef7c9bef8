"""Rules of :mod:`ceedtap.codegen` for primitives that move, read and write elements of arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.codegen import (
    Builder,
    Complex,
    Elements,
    Known,
    Scalar,
    TranslationError,
    constant,
    constants,
    elements,
    number,
    rule,
)
from ceedtap.codegen_permutation import known
from ceedtap.codegen_rules import Element, apply, choose, convert, real

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
        numbers.append(jnp.asarray(known_values(x, atom.aval.dtype)))
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


def known_values(x: Elements, dtype: Any) -> np.ndarray:
    out = np.empty(x.shape, dtype)
    for index in np.ndindex(x.shape):
        if isinstance(x[index], Complex) or not x[index].is_constant:
            raise TranslationError("needs an operand that is known when the function is translated")
        out[index] = x[index].value
    return out


def all_constant(x: Elements) -> bool:
    return all(isinstance(e, Scalar) and e.is_constant for e in x.reshape(-1))


@rule("reshape", "transpose", "slice", "rev", "squeeze", "concatenate", "pad", "broadcast_in_dim",
      "broadcast_to", "split", "tile", "stack", "unstack")  # fmt: skip
def _structural(builder: Builder, eqn: Any, *operands: Elements, **params: Any) -> list[Elements]:
    if eqn.primitive.name in _NUMPY:
        return _NUMPY[eqn.primitive.name](operands, eqn)
    return _moved(eqn, params, operands, len(operands))


def _broadcast(operands: Sequence[Elements], eqn: Any) -> list[Elements]:
    shape, where = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    spread = [1] * len(shape)
    for d, size in zip(where, operands[0].shape, strict=True):
        spread[d] = size
    return [np.broadcast_to(operands[0].reshape(spread), shape)]


def _slice(operands: Sequence[Elements], eqn: Any) -> list[Elements]:
    p = eqn.params
    strides = p["strides"] or (1,) * operands[0].ndim
    return [operands[0][tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]]


def _pad(operands: Sequence[Elements], eqn: Any) -> list[Elements]:
    """Interior padding by strides; then a border, which is cut off where it is negative."""
    x, value = operands
    config = eqn.params["padding_config"]
    inside = [(n - 1) * (gap + 1) + 1 if n else 0 for n, (_, _, gap) in zip(x.shape, config, strict=True)]
    border = [(max(low, 0), max(high, 0)) for low, high, _ in config]
    out = np.full([n + low + high for n, (low, high) in zip(inside, border, strict=True)], value[()], object)
    out[tuple(slice(low, low + n, c[2] + 1) for n, (low, _), c in zip(inside, border, config, strict=True))] = x
    cut = [(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(out.shape, config, strict=True)]
    return [out[tuple(slice(*c) for c in cut)]]


# What NumPy can do as well: JAX compiles a program for every shape.
_NUMPY: dict[str, Callable[[Sequence[Elements], Any], list[Elements]]] = {
    "reshape": lambda x, eqn: [x[0].reshape(eqn.outvars[0].aval.shape)],
    "squeeze": lambda x, eqn: [x[0].reshape(eqn.outvars[0].aval.shape)],
    "transpose": lambda x, eqn: [x[0].transpose(eqn.params["permutation"])],
    "rev": lambda x, eqn: [np.flip(x[0], eqn.params["dimensions"])],
    "concatenate": lambda x, eqn: [np.concatenate(x, eqn.params["dimension"])],
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "pad": _pad,
}


@rule("iota")
def _iota(builder: Builder, eqn: Any, *, dtype: Any, shape: Any, dimension: int, **_: Any) -> list[Elements]:
    index = [1] * len(shape)
    index[dimension] = shape[dimension]
    return [elements(np.broadcast_to(np.arange(shape[dimension]).reshape(index), shape), dtype)]


# -- indices known at run time only ------------------------------------------------------------------------------------


def flat_index(builder: Builder, parts: Sequence[tuple[int, Scalar]], offset: int) -> Scalar:
    """offset + sum of stride * index."""
    total: Scalar = number(offset, np.int32)
    for stride, index in parts:
        scaled = real(builder, "mul", number(stride, np.int32), convert(builder, index, np.int32))
        total = real(builder, "add", scaled, total)
    return total


def clamped(builder: Builder, index: Scalar, high: int) -> Scalar:
    low = number(0, index.dtype)
    return real(builder, "min", real(builder, "max", index, low), number(max(high, 0), index.dtype))


def strides_of(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def real_parts(x: Elements) -> list[list[Scalar]]:
    """The real arrays that an array consists of: one, or two of a complex one."""
    flat = list(x.reshape(-1))
    if flat and isinstance(flat[0], Complex):
        return [[e.re for e in flat], [e.im for e in flat]]
    return [flat]


def tables(builder: Builder, x: Elements) -> list[tuple[str, int, np.dtype]]:
    """The real arrays that an array consists of, for reading: where each lies in C, where it begins, and its type."""
    if isinstance(x, Known):
        return [(builder.known(x.array), 0, x.dtype)]
    return [(*builder.table(part, part[0].dtype), part[0].dtype) for part in real_parts(x)]


def from_parts(parts: Sequence[list[Scalar]], shape: Any) -> Elements:
    out = np.empty(len(parts[0]), object)
    for i, part in enumerate(zip(*parts, strict=True)):
        out[i] = part[0] if len(part) == 1 else Complex(*part)
    return out.reshape(shape)


# Of so few elements the one at an index is chosen, without an array in memory: so that loops over points vectorise.
MAX_CANDIDATES = 9
MAX_CHOICES = 128


def _few(builder: Builder, counts: Sequence[int], number: int, indices: Elements | None = None) -> bool:
    if indices is not None and len(counts) == 1 and any(known(builder, e) for e in indices.reshape(-1)):
        return True
    candidates = math.prod(counts)
    return candidates <= MAX_CANDIDATES and candidates * number <= MAX_CHOICES


def _chosen(builder: Builder, flat: Sequence[Element], dims: Sequence[tuple[int, Scalar, int]], offset: int) -> Element:
    """The element at offset + sum of stride * index; every index is clamped to what there is: stride, index, count."""
    if not dims:
        return flat[offset]
    (stride, index, count), *rest = dims
    if (place := known(builder, index)) and not rest:
        permutation, i = place
        column = [flat[offset + c * stride] for c in range(count)]
        return permutation.apply(builder, column)[i]
    result = _chosen(builder, flat, rest, offset + (count - 1) * stride)
    for c in reversed(range(count - 1)):
        here = real(builder, "le", index, number(c, index.dtype))
        result = choose(builder, here, _chosen(builder, flat, rest, offset + c * stride), result)
    return result


@rule("dynamic_slice")
def _dynamic_slice(builder: Builder, eqn: Any, x: Elements, *starts: Elements, slice_sizes: Any) -> list[Elements]:
    if all(all_constant(s) for s in starts):
        at = [min(max(int(s[()].value), 0), n - k) for s, n, k in zip(starts, x.shape, slice_sizes, strict=True)]
        x = x.array if isinstance(x, Known) else x
        part = x[tuple(slice(a, a + k) for a, k in zip(at, slice_sizes, strict=True))]
        return [part if part.dtype == object else constants(part, part.dtype)]
    strides = strides_of(x.shape)
    first = [
        (stride, clamped(builder, s[()], n - k))
        for s, n, k, stride in zip(starts, x.shape, slice_sizes, strides, strict=True)
    ]
    counts = [n - k + 1 for n, k in zip(x.shape, slice_sizes, strict=True)]
    if _few(builder, counts, math.prod(slice_sizes)):
        x = elements(x.array, x.dtype) if isinstance(x, Known) else x
        out = np.empty(slice_sizes, object)
        dims = [(stride, s[()], count) for stride, s, count in zip(strides, starts, counts, strict=True)]
        for index in np.ndindex(*slice_sizes):
            at = sum(i * s for i, s in zip(index, strides, strict=True))
            out[index] = _chosen(builder, x.reshape(-1), dims, at)
        return [out]
    parts = []
    for array, begin, dtype in tables(builder, x):
        loaded = []
        for index in np.ndindex(*slice_sizes):
            flat = flat_index(builder, first, begin + sum(i * s for i, s in zip(index, strides, strict=True)))
            loaded.append(builder.load(array, flat.text, dtype, [flat]))
        parts.append(loaded)
    return [from_parts(parts, slice_sizes)]


@rule("dynamic_update_slice")
def _dynamic_update_slice(
    builder: Builder, eqn: Any, x: Elements, update: Elements, *starts: Elements
) -> list[Elements]:
    if all(all_constant(s) for s in starts):
        out = x.copy()
        at = [min(max(int(s[()].value), 0), n - k) for s, n, k in zip(starts, x.shape, update.shape, strict=True)]
        out[tuple(slice(a, a + k) for a, k in zip(at, update.shape, strict=True))] = update
        return [out]
    strides = strides_of(x.shape)
    first = [
        (stride, clamped(builder, s[()], n - k))
        for s, n, k, stride in zip(starts, x.shape, update.shape, strides, strict=True)
    ]
    parts = []
    for part, new in zip(real_parts(x), real_parts(update), strict=True):
        array = builder.array(part, part[0].dtype)
        for index, value in zip(np.ndindex(*update.shape), new, strict=True):
            flat = flat_index(builder, first, sum(i * s for i, s in zip(index, strides, strict=True)))
            builder.store(array, flat, value)
        parts.append(list(builder.elements_of(array, [len(part)], part[0].dtype)))
    return [from_parts(parts, x.shape)]


@rule("gather")
def _gather(
    builder: Builder, eqn: Any, x: Elements, indices: Elements, *, dimension_numbers: Any, slice_sizes: Any,
    fill_value: Any, mode: Any, **params: Any,
) -> list[Elements]:  # fmt: skip
    if all_constant(indices):
        params = dict(eqn.params)
        x = elements(x.array, x.dtype) if isinstance(x, Known) else x
        if "FILL" in str(mode):
            return [_filled_gather(eqn, x, indices)]
        return _moved(eqn, params, [x, indices], 1)
    numbers = dimension_numbers
    batching_x, batching_i = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    window = [d for d in range(x.ndim) if d not in numbers.collapsed_slice_dims and d not in batching_x]
    out_shape = eqn.outvars[0].aval.shape
    strides = strides_of(x.shape)
    fill = "FILL" in str(mode)
    counts = [x.shape[d] - slice_sizes[d] + 1 for d in numbers.start_index_map]
    few = _few(builder, counts, math.prod(out_shape), indices)
    x = elements(x.array, x.dtype) if few and isinstance(x, Known) else x
    chosen, value = np.empty(out_shape, object), None
    arrays = [] if few else tables(builder, x)
    results: list[list[Scalar]] = [[] for _ in arrays]
    for out_index in np.ndindex(*out_shape):
        batch = [i for d, i in enumerate(out_index) if d not in numbers.offset_dims]
        offsets = dict(zip(window, (out_index[d] for d in numbers.offset_dims), strict=True))
        first, inside, dims = [], number(True, bool), []
        for k, d in enumerate(numbers.start_index_map):
            index = indices[(*batch, k)]
            high = x.shape[d] - slice_sizes[d]
            if fill:
                ok = real(builder, "and", real(builder, "ge", index, number(0, index.dtype)),
                          real(builder, "le", index, number(high, index.dtype)))  # fmt: skip
                inside = real(builder, "and", inside, ok)
            dims.append((strides[d], index, high + 1))
            if not few:
                first.append((strides[d], clamped(builder, index, high)))
        offset = sum(i * strides[d] for d, i in offsets.items())
        for dx, di in zip(batching_x, batching_i, strict=True):
            offset += strides[dx] * batch[di]
        if few:
            value = _chosen(builder, x.reshape(-1), dims, offset)
            if fill:
                dtype = eqn.invars[0].aval.dtype
                value = choose(builder, inside, value, constant(_fill_value(fill_value, dtype), dtype))
            chosen[out_index] = value
        for result, (array, begin, dtype) in zip(results, arrays, strict=True):
            flat = flat_index(builder, first, begin + offset)
            value = builder.load(array, flat.text, dtype, [flat])
            if fill:
                value = choose(builder, inside, value, constant(_fill_value(fill_value, dtype), dtype))
            result.append(value)
    return [chosen if few else from_parts(results, out_shape)]


def _fill_value(fill_value: Any, dtype: np.dtype) -> Any:
    if fill_value is not None:
        return fill_value
    return np.nan if dtype.kind == "f" else np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max


def _filled_gather(eqn: Any, x: Elements, indices: Elements) -> Elements:
    """With constant indices: positions outside of the operand come out as -1 and are filled."""
    numbers = jnp.asarray(np.arange(x.size).reshape(x.shape))
    at = jnp.asarray(known_values(indices, eqn.invars[1].aval.dtype))
    with jax_compat.concrete():
        where = np.asarray(eqn.primitive.bind(numbers, at, **dict(eqn.params, fill_value=-1)))
    dtype = eqn.invars[0].aval.dtype
    out = np.empty(where.shape, object)
    for index in np.ndindex(where.shape):
        value = where[index]
        out[index] = constant(_fill_value(eqn.params["fill_value"], dtype), dtype) if value < 0 else x.flat[value]
    return out


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub")
def _scatter(builder: Builder, eqn: Any, x: Elements, indices: Elements, updates: Elements, **params: Any) -> list:
    name = eqn.primitive.name.replace("-", "_").removeprefix("scatter").removeprefix("_")

    def combined(old: Element, new: Element) -> Element:
        return new if not name else apply(builder, name, old, new)

    numbers = params["dimension_numbers"]
    batching_x, batching_i = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    window = [d for d in range(x.ndim) if d not in numbers.inserted_window_dims and d not in batching_x]
    sizes = {d: updates.shape[u] for d, u in zip(window, numbers.update_window_dims, strict=True)}
    strides = strides_of(x.shape)
    clip = "CLIP" in str(params["mode"])
    dynamic = not all_constant(indices)
    out = x.copy().reshape(-1)
    arrays = None
    few = dynamic and _few(
        builder, [x.shape[d] - sizes.get(d, 1) + 1 for d in numbers.scatter_dims_to_operand_dims], updates.size
    )
    if dynamic and not few:
        arrays = [(builder.array(part, part[0].dtype), part[0].dtype) for part in real_parts(x)]
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
        if few:
            ranges = [range(high + 1) for _, _, high in starts]
            for where in itertools.product(*ranges):
                here: Scalar = number(True, bool)
                for (_, start, high), c in zip(starts, where, strict=True):
                    index_ = clamped(builder, start, high) if clip else start
                    here = real(builder, "and", here, real(builder, "eq", index_, number(c, start.dtype)))
                at = offset + sum(strides[d] * c for (d, _, _), c in zip(starts, where, strict=True))
                out[at] = choose(builder, here, combined(out[at], updates[index]), out[at])
            continue
        inside_: Scalar = number(True, bool)
        first = []
        for d, start, high in starts:
            if not clip:
                ok = real(builder, "and", real(builder, "ge", start, number(0, start.dtype)),
                          real(builder, "le", start, number(high, start.dtype)))  # fmt: skip
                inside_ = real(builder, "and", inside_, ok)
            first.append((strides[d], clamped(builder, start, high)))
        flat = flat_index(builder, first, offset)
        assert arrays is not None
        loaded = [[builder.load(array, flat.text, dtype, [flat])] for array, dtype in arrays]
        old = from_parts(loaded, ())[()]
        new = np.array(choose(builder, inside_, combined(old, updates[index]), old), object)
        for (array, _), part in zip(arrays, real_parts(new), strict=True):
            builder.store(array, flat, part[0])
    if dynamic and not few:
        assert arrays is not None
        out = from_parts([list(builder.elements_of(array, [out.size], dtype)) for array, dtype in arrays], out.shape)
    return [out.reshape(x.shape)]
