"""Several points at once: what :class:`ceedtap.codegen.Builder` writes for one point, with a lane for each of a few.

Functions with large inner loops, such as neural networks, work on local arrays. With one point at a time there is
nothing to vectorise but the inner loops, which are short and read all weights for every point. Here a local array has
one more index, the lane, which runs over a block of as many points as a vector register holds. Contractions are written
in vectors of lanes, with a block of sums in registers; a weight is read once for all lanes. All other lines stand in
loops over the lanes, which the compiler vectorises.

A variable and an array are *varying* if they depend on the point. Those that do not have no lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ceedtap.codegen import Builder, Line, Nest, NoLanes, Scalar

# Sums of a contraction that are in registers at once.
SUMS = 8
# Numbers in all local arrays together, for one lane; the lanes must stay in the cache.
MAX_NUMBERS = 6144

# Without vectors of the compiler's, and on GPUs, where threads are the lanes, there is one lane. Beyond the last point
# there is that point again. CEEDTAP_LANES_FMA(x, y, z) is x * y + z in one rounding, where processors can; a factor may
# be one number for all lanes, of which the difference to 0 makes lanes.
SUPPORT = """\
#if defined(CEED_RUNNING_JIT_PASS) || !defined(__GNUC__)
#define CEEDTAP_LANES 1
typedef double ceedtap_lanes;
#define CEEDTAP_LANES_FMA(x, y, z) CEEDTAP_FMA(x, y, z)
#else
#ifdef __AVX512F__
#define CEEDTAP_LANES 8
#elif defined(__AVX__)
#define CEEDTAP_LANES 4
#else
#define CEEDTAP_LANES 2
#endif
typedef double ceedtap_lanes __attribute__((vector_size(8 * CEEDTAP_LANES), aligned(8), may_alias));
#ifdef __clang__
#if __has_builtin(__builtin_elementwise_fma)
#define CEEDTAP_LANES_OF(x, y, z) __builtin_elementwise_fma(x, y, z)
#endif
#elif defined(__AVX512F__)
#define CEEDTAP_LANES_OF(x, y, z) __builtin_ia32_vfmaddpd512_mask(x, y, z, -1, 4)
#elif defined(__FMA__)
#define CEEDTAP_LANES_OF(x, y, z) __builtin_ia32_vfmaddpd256(x, y, z)
#elif defined(__FP_FAST_FMA)
#define CEEDTAP_LANES_OF(x, y, z) (ceedtap_lanes){fma((x)[0], (y)[0], (z)[0]), fma((x)[1], (y)[1], (z)[1])}
#endif
#ifdef CEEDTAP_LANES_OF
#define CEEDTAP_LANES_FMA(x, y, z) CEEDTAP_LANES_OF((x) - (ceedtap_lanes){0}, (y) - (ceedtap_lanes){0}, z)
#else
#define CEEDTAP_LANES_FMA(x, y, z) ((x) * (y) + (z))
#endif
#endif
CEED_QFUNCTION_HELPER void ceedtap_read(double *to, const double *from, int size, CeedInt Q, CeedInt first) {
  if (first + CEEDTAP_LANES <= Q) {
    for (int k = 0; k < size; k++)
      for (int n = 0; n < CEEDTAP_LANES; n++) to[k * CEEDTAP_LANES + n] = from[k * Q + first + n];
  } else {
    for (int k = 0; k < size; k++)
      for (int n = 0; n < CEEDTAP_LANES; n++)
        to[k * CEEDTAP_LANES + n] = from[k * Q + (first + n < Q ? first + n : Q - 1)];
  }
}
CEED_QFUNCTION_HELPER void ceedtap_write(double *to, const double *from, int size, CeedInt Q, CeedInt first) {
  const int count = first + CEEDTAP_LANES <= Q ? CEEDTAP_LANES : (int)(Q - first);
  for (int k = 0; k < size; k++)
    for (int n = 0; n < count; n++) to[k * Q + first + n] = from[k * CEEDTAP_LANES + n];
}
"""

Item = Line | Nest


# -- contractions ------------------------------------------------------------------------------------------------------


def product(
    builder: Builder, out: str, x: tuple[str, int], w: tuple[str, int], sizes: tuple[int, int, int],
    strides: tuple[int, int],
) -> None:  # fmt: skip
    """out[i, j] = sum over k of x[i, k] * w[j, k] for arrays of `sizes` (i, j, k).

    `x` and `w` are arrays and where in them the factors begin, `strides` those of j and k in `w`.
    """
    rows = sizes[0]
    if rows == 1:
        _row(builder, out, x, w, "0", sizes, strides)
        return
    with builder.count(rows) as i:
        _row(builder, out, x, w, i.text, sizes, strides)


def _row(
    builder: Builder, out: str, x: tuple[str, int], w: tuple[str, int], i: str, sizes: tuple[int, int, int],
    strides: tuple[int, int],
) -> None:  # fmt: skip
    width = sizes[1]
    whole = width - width % SUMS
    if whole:
        with builder.count(whole, step=SUMS) as j:
            _sums(builder, out, x, w, (i, j.text), SUMS, sizes, strides)
    if width - whole:
        _sums(builder, out, x, w, (i, str(whole)), width - whole, sizes, strides)


def _sums(
    builder: Builder, out: str, x: tuple[str, int], w: tuple[str, int], at: tuple[str, str], number: int,
    sizes: tuple[int, int, int], strides: tuple[int, int],
) -> None:  # fmt: skip
    (i, j), (_, width, depth) = at, sizes
    sums = [builder.name() for _ in range(number)]
    builder.raw(f"ceedtap_lanes {', '.join(f'{s} = {{0}}' for s in sums)};", sums, ())

    def lanes(array: str, index: str) -> str:
        if array in builder.varying:
            return f"*(const ceedtap_lanes *)({array} + ({index}) * CEEDTAP_LANES)"
        return f"{array}[{index}]"

    with builder.count(depth) as k:
        factor = builder.name()
        kind = "ceedtap_lanes" if x[0] in builder.varying else "double"
        builder.raw(f"const {kind} {factor} = {lanes(x[0], _sum((i, depth), (k.text, 1), x[1]))};", [factor], (x[0],))
        for q, s in enumerate(sums):
            index = _sum((j, strides[0]), (k.text, strides[1]), w[1] + q * strides[0])
            builder.raw(f"{s} = CEEDTAP_LANES_FMA({factor}, {lanes(w[0], index)}, {s});", [s], (s, factor, w[0]))
    for q, s in enumerate(sums):
        place = f"({out} + ({_sum((i, width), (j, 1), q)}) * CEEDTAP_LANES)"
        builder.raw(f"*(ceedtap_lanes *){place} = {s};", [out], (s, out))
    builder.varying.add(out)


def _sum(*terms: tuple[str, int] | int) -> str:
    """A sum of products and numbers in C."""
    number = sum(t if isinstance(t, int) else int(t[0]) * t[1] if t[0].isdigit() else 0 for t in terms)
    words = [t[0] if t[1] == 1 else f"{t[0]} * {t[1]}" for t in terms if not isinstance(t, int) and not t[0].isdigit()]
    return " + ".join(words + [str(number)] * bool(number or not words))


# -- lanes -------------------------------------------------------------------------------------------------------------


def with_lanes(lines: Sequence[Item], varying: set[str], name: Callable[[], str]) -> list[Item]:
    """The lines for one point as lines for a block of points.

    Raises:
        NoLanes: the arrays are too large.
    """
    lane, numbers, types = name(), 0, {}
    arrays: set[str] = set()
    for line in _flat(lines):
        if line.array:
            numbers += line.array
            arrays.add(line.sets[0])
        elif line.text.startswith("const "):
            types[line.sets[0]] = line.text.removeprefix("const ").partition(f" {line.sets[0]} =")[0]
    if numbers > MAX_NUMBERS:
        raise NoLanes
    varying_arrays = varying & arrays
    kept: dict[str, str] = {}  # where the values of a variable are that is used beyond its loop over the lanes

    def group(part: list[Line]) -> list[Item]:
        """One loop over the lanes."""
        inside = {s for line in part for s in line.sets}
        outside = [u for line in part for u in line.uses if u in varying and u not in inside and u not in arrays]
        loads: list[Item] = []
        for u in dict.fromkeys(outside):
            kept.setdefault(u, name())
            loads.append(Line(f"const {types[u]} {u} = {kept[u]}[{lane}];", (u,), ()))
        body = [Line(_indexed(line.text, varying_arrays, lane), line.sets, (), line.comment) for line in part]
        return [
            Nest(f"for (int {lane} = 0; {lane} < CEEDTAP_LANES; {lane}++)", [*loads, *body], (), (), part[0].comment)
        ]

    def blocks(lines: Sequence[Item]) -> list[Item]:
        out: list[Item] = []
        part: list[Line] = []

        def end() -> None:
            if part:
                out.extend(group(list(part)))
                part.clear()

        for line in lines:
            if isinstance(line, Nest):
                end()
                out.append(Nest(line.head, blocks(line.lines), line.sets, line.uses, line.comment))
            elif line.array and line.sets[0] in varying:
                size = f"[{line.array} * CEEDTAP_LANES]"
                out.append(Line(line.text.replace(f"[{line.array}]", size), line.sets, (), line.comment))
            elif line.raw or not varying.intersection(line.sets):
                if line.raw:
                    end()
                out.append(line)
            else:
                part.append(line)
        end()
        return out

    done = blocks(lines)
    stored = [_with_stores(item, kept, lane) for item in done]
    declared: list[Item] = [Line(f"{types[u]} {array}[CEEDTAP_LANES];", (array,), ()) for u, array in kept.items()]
    return [*declared, *stored]


def _with_stores(item: Item, kept: dict[str, str], lane: str) -> Item:
    if isinstance(item, Line):
        return item
    lines: list[Item] = []
    for line in item.lines:
        lines.append(_with_stores(line, kept, lane))
        if isinstance(line, Line) and len(line.sets) == 1 and line.sets[0] in kept:
            array = kept[line.sets[0]]
            if not line.text.endswith(f"= {array}[{lane}];"):
                lines.append(Line(f"{array}[{lane}] = {line.sets[0]};", (array,), ()))
    return Nest(item.head, lines, item.sets, item.uses, item.comment)


def _flat(lines: Sequence[Item]) -> Iterator[Line]:
    for line in lines:
        if isinstance(line, Nest):
            yield from _flat(line.lines)
        else:
            yield line


def _indexed(text: str, arrays: set[str], lane: str) -> str:
    """Elements of varying arrays as those of a lane: `a[k]` as `a[(k) * CEEDTAP_LANES + lane]`."""
    out, start = "", 0
    while (bracket := text.find("[", start)) >= 0:
        begin = bracket
        while begin and (text[begin - 1].isalnum() or text[begin - 1] == "_"):
            begin -= 1
        end, depth = bracket + 1, 1
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            end += 1
        index = _indexed(text[bracket + 1 : end - 1], arrays, lane)
        if text[begin:bracket] in arrays:
            index = f"({index}) * CEEDTAP_LANES + {lane}" if index != "0" else lane
        out += f"{text[start:bracket]}[{index}]"
        start = end
    return out + text[start:]


def is_varying(builder: Builder, element: Scalar) -> bool:
    return not element.is_constant and (element.place[0] if element.place else element.text) in builder.varying
