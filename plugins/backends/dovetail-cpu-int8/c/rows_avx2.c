/* x86-64 with AVX2. */
#include "rows.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include <immintrin.h>

static inline __attribute__((always_inline)) int32_t sum_of(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

/* Sums of `num` outputs, at most four, for one token. */
static inline __attribute__((always_inline)) void tile(const int num, const int8_t *weight, int64_t stride,
                                                       const uint8_t *lower, const uint8_t *upper, int32_t *low,
                                                       int32_t *high) {
  __m256i a[4], b[4];
  for (int i = 0; i < num; i++) a[i] = b[i] = _mm256_setzero_si256();
  int64_t k = 0;
  for (; k + 16 <= stride; k += 16) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(lower + k)));
    const __m256i z = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(upper + k)));
    for (int i = 0; i < num; i++) {
      const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(weight + i * stride + k)));
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(x, w));
      b[i] = _mm256_add_epi32(b[i], _mm256_madd_epi16(z, w));
    }
  }
  for (int i = 0; i < num; i++) {
    low[i] = sum_of(a[i]);
    high[i] = sum_of(b[i]);
    for (int64_t j = k; j < stride; j++) {
      low[i] += lower[j] * weight[i * stride + j];
      high[i] += upper[j] * weight[i * stride + j];
    }
  }
}

static void dots(const int8_t *weight, int64_t stride, int num, const uint8_t *bytes, int64_t width, int rows,
                 int32_t (*low)[TILE], int32_t (*high)[TILE]) {
  for (int at = 0, step = 4; at < num; at += step) {
    const int8_t *w = weight + at * stride;
    step = at + 4 <= num ? 4 : 1;
    for (int t = 0; t < rows; t++) {
      const uint8_t *lower = bytes + 2 * t * width;
      if (step == 4) tile(4, w, stride, lower, lower + width, low[t] + at, high[t] + at);
      else tile(1, w, stride, lower, lower + width, low[t] + at, high[t] + at);
    }
  }
}

#define PATH rows_avx2
#define NAME "AVX2"
#include "rows_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
