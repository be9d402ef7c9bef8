"""Elementary functions in C without calls, for loops that a compiler vectorises.

A call, even of a vector library, spills every register, and its tables and its code compete for the cache with the data
of the points. These are straight lines of arithmetic, integer operations on the bits of a number, and choices; the
errors, of less than 3 units in the last place, and the special values are tested against mpmath.

All reduce their argument by a power of two, k. The polynomials are Chebyshev interpolants of what remains of the series
where the reduced argument is; they are evaluated in pairs, since the next loop turn waits for the last one's result.
"""

from __future__ import annotations

# x * y + z in one rounding, where processors can; compilers are told not to do it on their own.
FMA = """\
#ifdef CEED_RUNNING_JIT_PASS
#define CEEDTAP_FMA(x, y, z) fma(x, y, z)
#elif defined(__FMA__) || defined(__AVX512F__) || defined(__FP_FAST_FMA)
#define CEEDTAP_FMA(x, y, z) __builtin_fma(x, y, z)
#else
#define CEEDTAP_FMA(x, y, z) ((x) * (y) + (z))
#endif
"""

# What the functions have in common, by name; a function comes after those that it calls.
#
# Adding 2^52 + 2^51 rounds to an integer, which is in the low bits then; `ceedtap_two_to` takes such a sum to 2^k, for
# k between -1022 and 1023.
_PARTS = {
    "ceedtap_to_bits": """\
CEED_QFUNCTION_HELPER unsigned long long ceedtap_to_bits(double x) {
  union {
    double from;
    unsigned long long to;
  } bits;
  bits.from = x;
  return bits.to;
}
""",
    "ceedtap_from_bits": """\
CEED_QFUNCTION_HELPER double ceedtap_from_bits(unsigned long long x) {
  union {
    unsigned long long from;
    double to;
  } bits;
  bits.from = x;
  return bits.to;
}
""",
    "ceedtap_two_to": """\
CEED_QFUNCTION_HELPER double ceedtap_two_to(double k) {
  return ceedtap_from_bits((ceedtap_to_bits(k) << 52) + 0x3ff0000000000000ULL);
}
""",
    # log(u (1 + c)) for a normal number u = 2^k (1 + f), 0.707 < 1 + f < 1.414, and a tiny c. `bias` is 2^52 + 1023, or
    # more if u has been scaled. With s = f / (2 + f): log(1 + f) = 2 artanh(s), written as f less what is small.
    "ceedtap_log_of": """\
CEED_QFUNCTION_HELPER double ceedtap_log_of(double u, double bias, double c) {
  const unsigned long long bits = ceedtap_to_bits(u) + 0x0009600000000000ULL;
  const double f = ceedtap_from_bits((bits & 0x000fffffffffffffULL) + 0x3fe6a00000000000ULL) - 1.0;
  const double k = ceedtap_from_bits((bits >> 52) | 0x4330000000000000ULL) - bias;
  const double s = f / (2.0 + f), h = 0.5 * f * f, z = s * s, w = z * z;
  const double low = CEEDTAP_FMA(w, CEEDTAP_FMA(z, 0.22222211043822487, 0.28571428626533335),
                                 CEEDTAP_FMA(z, 0.3999999999989827, 0.666666666666667));
  const double high = CEEDTAP_FMA(w, 0.1461916477718642, CEEDTAP_FMA(z, 0.1533150172120742, 0.18182895746801428));
  const double tail = s * CEEDTAP_FMA(z, CEEDTAP_FMA(w * w, high, low), h);
  return CEEDTAP_FMA(k, 0.6931471803691238, f) - ((h - CEEDTAP_FMA(k, 1.9082149292705877e-10, c)) - tail);
}
""",
    # x = k log 2 + r, |r| < 0.3466
    "ceedtap_reduced": """\
CEED_QFUNCTION_HELPER double ceedtap_reduced(double x, double k) {
  return CEEDTAP_FMA(-k, 1.9082149292705877e-10, CEEDTAP_FMA(-k, 0.6931471803691238, x));
}
""",
    # exp(r) - 1
    "ceedtap_expm1_of": """\
CEED_QFUNCTION_HELPER double ceedtap_expm1_of(double r) {
  const double s = r * r, t = s * s;
  const double low = CEEDTAP_FMA(s, CEEDTAP_FMA(r, 0.0013888888888886537, 0.008333333333330039),
                                 CEEDTAP_FMA(r, 0.041666666666666664, 0.16666666666666669));
  const double middle = CEEDTAP_FMA(s, CEEDTAP_FMA(r, 2.7557282838800484e-07, 2.7557268276905696e-06),
                                    CEEDTAP_FMA(r, 2.4801587317228724e-05, 0.00019841269863171557));
  const double high = CEEDTAP_FMA(r, 2.09112987659402e-09, 2.5100472505694996e-08);
  const double rest = CEEDTAP_FMA(t, CEEDTAP_FMA(t, high, middle), low);
  return CEEDTAP_FMA(s, CEEDTAP_FMA(r, rest, 0.5), r);
}
""",
}

_FUNCTIONS = {
    "log": """\
CEED_QFUNCTION_HELPER double ceedtap_log(double x) {
  const int tiny = x < 2.2250738585072014e-308;
  const double y =
      ceedtap_log_of(tiny ? x * 18014398509481984.0 : x, tiny ? 4503599627371573.0 : 4503599627371519.0, 0.0);
  const double special = x == 0 ? -1.0 / 0.0 : x > 0 ? x : 0.0 / 0.0;
  return ((x > 0) & (x < 1.0 / 0.0)) ? y : special;
}
""",
    # c is the rounding error of 1 + x; the factor is near enough to 1 / (1 + x).
    "log1p": """\
CEED_QFUNCTION_HELPER double ceedtap_log1p(double x) {
  const double u = 1.0 + x, c = (x - (u - 1.0)) * (1.0 - x + 0.5 * x * x);
  const double y = ceedtap_log_of(u, 4503599627371519.0, x < 1.0 ? c : 0.0);
  const double special = x == -1.0 ? -1.0 / 0.0 : x < -1.0 ? 0.0 / 0.0 : x;
  return ((x > -1.0) & (x < 1.0 / 0.0) & (x != 0)) ? y : special;
}
""",
    # In two factors, since the result may be a denormal number, or 2^k be too large when it is not.
    "exp": """\
CEED_QFUNCTION_HELPER double ceedtap_exp(double x) {
  const double k = CEEDTAP_FMA(x, 1.4426950408889634, 6755399441055744.0) - 6755399441055744.0;
  const double half = CEEDTAP_FMA(0.5, k, 6755399441055744.0);
  const double rest = (k - (half - 6755399441055744.0)) + 6755399441055744.0;
  const double y = 1.0 + ceedtap_expm1_of(ceedtap_reduced(x, k));
  const double special = x > 0 ? 1.0 / 0.0 : x < 0 ? 0.0 : x;
  return ((x > -746.0) & (x < 710.0)) ? y * ceedtap_two_to(half) * ceedtap_two_to(rest) : special;
}
""",
    "expm1": """\
CEED_QFUNCTION_HELPER double ceedtap_expm1(double x) {
  const double k = CEEDTAP_FMA(x, 1.4426950408889634, 6755399441055744.0) - 6755399441055744.0;
  const int big = k > 1023.0;
  const double scale = ceedtap_two_to((big ? 1023.0 : k) + 6755399441055744.0);
  const double y = CEEDTAP_FMA(ceedtap_expm1_of(ceedtap_reduced(x, k)), scale, scale - (big ? 0.5 : 1.0));
  const double special = x > 0 ? 1.0 / 0.0 : x < 0 ? -1.0 : x;
  return ((x > -40.0) & (x < 710.0) & (x != 0)) ? (big ? 2.0 * y : y) : special;
}
""",
    # From e = expm1(2 x).
    "tanh": """\
CEED_QFUNCTION_HELPER double ceedtap_tanh(double x) {
  const double a = CEEDTAP_FMA(x, 2.8853900817779268, 6755399441055744.0), scale = ceedtap_two_to(a);
  const double e = CEEDTAP_FMA(ceedtap_expm1_of(ceedtap_reduced(2.0 * x, a - 6755399441055744.0)), scale, scale - 1.0);
  const double special = x > 0 ? 1.0 : x < 0 ? -1.0 : x;
  return ((x > -22.0) & (x < 22.0) & (x != 0)) ? e / (e + 2.0) : special;
}
""",
}

#: The functions that there are, by their names in <math.h>.
INLINE = frozenset(_FUNCTIONS)

#: A function that is written out more often than this in one loop makes it too long; the library is called then.
MAX_SITES = 24


def helpers(function: str) -> dict[str, str]:
    """The C of ``ceedtap_<function>`` and before it what it may call, by name. GPUs have good functions."""
    name = f"ceedtap_{function}"
    parts = {"CEEDTAP_FMA": FMA}
    parts |= {key: f"#ifndef CEED_RUNNING_JIT_PASS\n{text}#endif\n" for key, text in _PARTS.items()}
    plain = f"#ifdef CEED_RUNNING_JIT_PASS\n#define {name}(x) {function}(x)\n#else\n{_FUNCTIONS[function]}#endif\n"
    return {**parts, name: plain}
