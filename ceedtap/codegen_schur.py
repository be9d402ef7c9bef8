"""Rules of :mod:`ceedtap.codegen` for eigenvalues of small matrices that are not symmetric: Schur's form.

They are in a C function that is called at every point; its loops end when they have converged, so the loop over points
is not vectorised. The order of the eigenvalues is not that of LAPACK, which does not say what it is either.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ceedtap.codegen import Builder, Complex, Elements, NoLanes, Scalar, TranslationError, number, rule
from ceedtap.codegen_linalg import batched
from ceedtap.codegen_rules import convert

# Complex numbers are pairs. Rotations first make zeros below the first subdiagonal, from the bottom up; then every turn
# is a step of the QR method on the last block that has not fallen apart, shifted by the eigenvalue of its last two rows
# that is nearer to the last number.
_ROTATION = """\
/* The rotation that makes the second one of two complex numbers zero: G = (c' s'; -s c). */
CEED_QFUNCTION_HELPER void ceedtap_rotation(const double *a, const double *b, double *g) {
  const double size = sqrt(a[0] * a[0] + a[1] * a[1] + b[0] * b[0] + b[1] * b[1]);
  const double inverse = size == 0 ? 0.0 : 1.0 / size;
  g[0] = size == 0 ? 1.0 : a[0] * inverse;
  g[1] = a[1] * inverse;
  g[2] = b[0] * inverse;
  g[3] = b[1] * inverse;
}
/* Two rows G (x; y), from left on; `step` is between numbers of a row. */
CEED_QFUNCTION_HELPER void ceedtap_rotate(const double *g, double *x, double *y, int count, int step) {
  for (int j = 0; j < count; j++, x += 2 * step, y += 2 * step) {
    const double re = g[0] * x[0] + g[1] * x[1] + g[2] * y[0] + g[3] * y[1];
    const double im = g[0] * x[1] - g[1] * x[0] + g[2] * y[1] - g[3] * y[0];
    const double low_re = g[0] * y[0] - g[1] * y[1] - g[2] * x[0] + g[3] * x[1];
    const double low_im = g[0] * y[1] + g[1] * y[0] - g[2] * x[1] - g[3] * x[0];
    x[0] = re;
    x[1] = im;
    y[0] = low_re;
    y[1] = low_im;
  }
}
/* The same from the right, (x y) G*, which is the conjugate rotation of two columns. */
CEED_QFUNCTION_HELPER void ceedtap_rotate_columns(const double *g, double *x, double *y, int count, int step) {
  const double conjugate[4] = {g[0], -g[1], g[2], -g[3]};
  ceedtap_rotate(conjugate, x, y, count, step);
}
"""

_SCHUR = """\
CEED_QFUNCTION_HELPER void ceedtap_schur(double *h, double *z, int n) {
  double largest = 0, g[4 * CEEDTAP_SCHUR_MAX];
  for (int i = 0; i < 2 * n * n; i++) {
    largest = fabs(h[i]) > largest ? fabs(h[i]) : largest;
    z[i] = i % (2 * (n + 1)) == 0 ? 1.0 : 0.0;
  }
  /* Keeps the squares in range; of the largest numbers the reciprocal is none that processors like. */
  const double shrink = largest > 1e300 ? 0.0009765625 : 1.0;
  const double inverse = largest > 0 ? 1.0 / (largest * shrink) : 1.0;
  for (int i = 0; i < 2 * n * n; i++) h[i] = h[i] * shrink * inverse;
  for (int j = 0; j < n - 2; j++)
    for (int i = n - 1; i > j + 1; i--) {
      double *upper = h + 2 * (i - 1) * n, *lower = h + 2 * i * n;
      ceedtap_rotation(upper + 2 * j, lower + 2 * j, g);
      ceedtap_rotate(g, upper + 2 * j, lower + 2 * j, n - j, 1);
      ceedtap_rotate_columns(g, h + 2 * (i - 1), h + 2 * i, n, n);
      ceedtap_rotate_columns(g, z + 2 * (i - 1), z + 2 * i, n, n);
    }
  int last = n - 1, turn = 0;
  for (int all = 0; last > 0 && all < 40 * n; all++) {
    int first = last;
    for (; first > 0; first--) {
      const double *a = h + 2 * (first - 1) * (n + 1), *d = a + 2 * (n + 1);
      double *c = h + 2 * (first * n + first - 1);
      if (fabs(c[0]) + fabs(c[1]) <= 1e-16 * (fabs(a[0]) + fabs(a[1]) + fabs(d[0]) + fabs(d[1]))) {
        c[0] = 0;
        c[1] = 0;
        break;
      }
    }
    if (first == last) {
      last--;
      turn = 0;
      continue;
    }
    /* The shift: d + p / (q +- sqrt(q^2 + p)) with q = (a - d) / 2 and p = b c, of two signs that of the larger sum. */
    const double *a = h + 2 * (last - 1) * (n + 1), *b = a + 2, *d = a + 2 * (n + 1), *c = d - 2;
    const double q[2] = {0.5 * (a[0] - d[0]), 0.5 * (a[1] - d[1])};
    const double p[2] = {b[0] * c[0] - b[1] * c[1], b[0] * c[1] + b[1] * c[0]};
    const double s[2] = {q[0] * q[0] - q[1] * q[1] + p[0], 2.0 * q[0] * q[1] + p[1]};
    const double size = sqrt(s[0] * s[0] + s[1] * s[1]);
    double root[2] = {sqrt(0.5 * (size + fabs(s[0]))), 0};
    root[1] = root[0] > 0 ? 0.5 * fabs(s[1]) / root[0] : 0.0;
    if (s[0] < 0) {
      const double swapped = root[0];
      root[0] = root[1];
      root[1] = swapped;
    }
    if (s[1] < 0) root[1] = -root[1];
    const double sign = q[0] * root[0] + q[1] * root[1] < 0 ? -1.0 : 1.0;
    const double w[2] = {q[0] + sign * root[0], q[1] + sign * root[1]}, norm = w[0] * w[0] + w[1] * w[1];
    double shift[2] = {d[0], d[1]};
    if (norm > 0) {
      shift[0] -= (p[0] * w[0] + p[1] * w[1]) / norm;
      shift[1] -= (p[1] * w[0] - p[0] * w[1]) / norm;
    }
    if (++turn % 10 == 0) shift[0] += fabs(c[0]) + fabs(c[1]); /* out of a circle */
    for (int k = first; k <= last; k++) {
      h[2 * k * (n + 1)] -= shift[0];
      h[2 * k * (n + 1) + 1] -= shift[1];
    }
    for (int k = first; k < last; k++) {
      double *x = h + 2 * k * (n + 1), *y = x + 2 * n;
      ceedtap_rotation(x, y, g + 4 * k);
      ceedtap_rotate(g + 4 * k, x, y, n - k, 1);
    }
    for (int k = first; k < last; k++) {
      ceedtap_rotate_columns(g + 4 * k, h + 2 * k, h + 2 * k + 2, k + 2, n);
      ceedtap_rotate_columns(g + 4 * k, z + 2 * k, z + 2 * k + 2, n, n);
    }
    for (int k = first; k <= last; k++) {
      h[2 * k * (n + 1)] += shift[0];
      h[2 * k * (n + 1) + 1] += shift[1];
    }
  }
  const double scale = last > 0 ? 0.0 / 0.0 : largest > 0 ? largest : 1.0; /* not converged */
  for (int i = 0; i < 2 * n * n; i++) {
    h[i] *= scale;
    if (last > 0) z[i] = scale;
  }
}
"""

# Solves (T - t_kk) x = 0 for every k, with x_k = 1 and zeros below, and returns Z x with the norm 1.
_VECTORS = """\
CEED_QFUNCTION_HELPER void ceedtap_schur_vectors(const double *t, const double *z, double *v, int n) {
  double size = 0;
  for (int i = 0; i < 2 * n * n; i++) size = fabs(t[i]) > size ? fabs(t[i]) : size;
  const double tiny = size > 0 ? 1e-16 * size : 1.0;
  for (int k = 0; k < n; k++) {
    double x[2 * CEEDTAP_SCHUR_MAX];
    x[2 * k] = 1;
    x[2 * k + 1] = 0;
    for (int i = k - 1; i >= 0; i--) {
      double re = 0, im = 0;
      for (int j = i + 1; j <= k; j++) {
        const double *a = t + 2 * (i * n + j);
        re -= a[0] * x[2 * j] - a[1] * x[2 * j + 1];
        im -= a[0] * x[2 * j + 1] + a[1] * x[2 * j];
      }
      double d = t[2 * i * (n + 1)] - t[2 * k * (n + 1)], e = t[2 * i * (n + 1) + 1] - t[2 * k * (n + 1) + 1];
      d = fabs(d) + fabs(e) < tiny ? tiny : d;
      const double inverse = 1.0 / (d * d + e * e);
      x[2 * i] = (re * d + im * e) * inverse;
      x[2 * i + 1] = (im * d - re * e) * inverse;
    }
    double norm = 0;
    for (int i = 0; i < n; i++) {
      double re = 0, im = 0;
      for (int j = 0; j <= k; j++) {
        const double *a = z + 2 * (i * n + j);
        re += a[0] * x[2 * j] - a[1] * x[2 * j + 1];
        im += a[0] * x[2 * j + 1] + a[1] * x[2 * j];
      }
      v[2 * (i * n + k)] = re;
      v[2 * (i * n + k) + 1] = im;
      norm += re * re + im * im;
    }
    const double scale = 1.0 / sqrt(norm);
    for (int i = 0; i < n; i++) {
      v[2 * (i * n + k)] *= scale;
      v[2 * (i * n + k) + 1] *= scale;
    }
  }
}
"""

# Larger matrices are not what is at a point.
MAX_SIZE = 12


def _schur_form(builder: Builder, a: Elements, with_vectors: bool) -> tuple[str, str, str]:
    """Arrays of the triangular factor, of Schur's vectors, and of the eigenvectors if they are wanted."""
    n = len(a)
    if builder.lanes:
        raise NoLanes
    if n > MAX_SIZE:
        raise TranslationError(f"has no translation to C for matrices of more than {MAX_SIZE} rows")
    builder.math.add("sqrt")
    builder.helper("CEEDTAP_SCHUR_MAX", f"#define CEEDTAP_SCHUR_MAX {MAX_SIZE}\n")
    builder.helper("ceedtap_rotate", _ROTATION)
    builder.helper("ceedtap_schur", _SCHUR)
    builder.helper("ceedtap_schur_vectors", _VECTORS)
    zero = number(0, np.float64)
    parts: list[Scalar] = []
    for e in a.reshape(-1):
        pair = (e.re, e.im) if isinstance(e, Complex) else (e, zero)
        parts += [convert(builder, part, np.float64) for part in pair]
    h = builder.array(parts, np.float64)
    z = builder.empty_array(2 * n * n, np.float64)
    v = builder.empty_array(2 * n * n, np.float64)
    builder.statement(f"ceedtap_schur({h}, {z}, {n});", (h, z), (h, z))
    if with_vectors:
        builder.statement(f"ceedtap_schur_vectors({h}, {z}, {v}, {n});", (v,), (h, z, v))
    return h, z, v


def _complex_of(builder: Builder, array: str, n: int, dtype: np.dtype) -> Elements:
    flat = builder.elements_of(array, [2 * n * n], np.float64)
    part = np.dtype(f"f{dtype.itemsize // 2}")
    out = np.empty(n * n, object)
    for i in range(n * n):
        out[i] = Complex(*(convert(builder, flat[2 * i + k], part) for k in (0, 1)))
    return out.reshape(n, n)


@rule("schur")
def _schur(
    builder: Builder, eqn: Any, a: Elements, *, compute_schur_vectors: bool, sort_eig_vals: bool,
    select_callable: Any, **_: Any,
) -> list[Elements]:  # fmt: skip
    dtype = np.dtype(eqn.outvars[0].aval.dtype)
    if dtype.kind != "c":
        raise TranslationError('has no translation to C for the real form; with output="complex" it has')
    if sort_eig_vals or select_callable is not None:
        raise TranslationError("has no translation to C with eigenvalues in an order")

    def one(matrix: Elements) -> list[Elements]:
        h, z, _v = _schur_form(builder, matrix, False)
        triangle = _complex_of(builder, h, len(matrix), dtype)
        zero = number(0, triangle[0, 0].re.dtype)
        for i in range(len(matrix)):
            triangle[i, :i] = [Complex(zero, zero)] * i
        return [triangle, _complex_of(builder, z, len(matrix), dtype)][: 2 if compute_schur_vectors else 1]

    return batched(eqn, one, [a], [2])


@rule("eig")
def _eig(
    builder: Builder, eqn: Any, a: Elements, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool,
    **_: Any,
) -> list[Elements]:  # fmt: skip
    if compute_left_eigenvectors:
        raise TranslationError("has no translation to C for left eigenvectors")
    dtype = np.dtype(eqn.outvars[0].aval.dtype)

    def one(matrix: Elements) -> list[Elements]:
        h, _z, v = _schur_form(builder, matrix, compute_right_eigenvectors)
        values = _complex_of(builder, h, len(matrix), dtype).diagonal().copy()
        return [values, *([_complex_of(builder, v, len(matrix), dtype)] if compute_right_eigenvectors else [])]

    return batched(eqn, one, [a], [2])
