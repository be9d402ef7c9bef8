/* CRC-32 of zlib, many bytes at a time, where the processor multiplies polynomials.
 *
 * The register of a CRC is the remainder of a polynomial. 64 bytes that have been read are multiplied by x^512 modulo
 * the polynomial and added to the next 64, so they shrink to 16 bytes that have the same CRC as all of them. zlib does
 * the rest: what is slow there, byte by byte through a table, is not worth a table here. */
#include "ceedtap.h"

#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#include <immintrin.h>

/* x * k: the halves of x are multiplied by x^(n+32) and x^(n-32) modulo the polynomial, bits reflected, to move it by n
 * bits. */
__attribute__((target("pclmul"))) static inline __m128i shift(__m128i x, __m128i k) {
  return _mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11));
}

__attribute__((target("pclmul"))) static void fold(uint32_t crc, const __m128i *data, size_t size, void *rest) {
  const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i x[4];
  for (int i = 0; i < 4; i++) x[i] = _mm_loadu_si128(data + i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)~crc));
  for (const __m128i *end = data + size / 16; (data += 4) < end;)
    for (int i = 0; i < 4; i++) x[i] = _mm_xor_si128(shift(x[i], by_512), _mm_loadu_si128(data + i));
  for (int i = 1; i < 4; i++) x[i] = _mm_xor_si128(shift(x[i - 1], by_128), x[i]);
  _mm_storeu_si128(rest, x[3]);
}

int ct_crc32_fold(uint32_t crc, const void *data, size_t size, void *rest) {
  if (!__builtin_cpu_supports("pclmul") || size == 0 || size % 64) return 0;
  fold(crc, data, size, rest);
  return 1;
}
#else
int ct_crc32_fold(uint32_t crc, const void *data, size_t size, void *rest) {
  (void)crc, (void)data, (void)size, (void)rest;
  return 0;
}
#endif
