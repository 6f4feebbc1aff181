/* x86-64 with AVX-512 VNNI: 64 products of bytes an instruction. */
#include "rows.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,bmi2,prefer-vector-width=512")
#endif
#include <immintrin.h>
#include <string.h>

enum {
  VECTOR = 64,  /* bytes */
  AHEAD = 6144, /* how far before its use a weight is fetched for a lone token; for several ones, two tiles */
  SEVERAL = 6,  /* tokens from which turning a matrix pays */
  PANEL = 1024, /* inputs of a part of a matrix that stays in the first cache */
};
#define INLINE static inline __attribute__((always_inline))

/* Add products of unsigned and signed bytes, in place: GCC 12 copies accumulators around the intrinsic. */
#define ADD_DOTS(sum, x, w) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w))

/* Sums of each of sixteen vectors, in order. */
INLINE __m512i sums_of(const __m512i *v) {
  __m512i fours[4];
  for (int i = 0; i < 4; i++) {
    const __m512i a = v[4 * i], b = v[4 * i + 1], c = v[4 * i + 2], d = v[4 * i + 3];
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  }
  const __m512i one = _mm512_add_epi32(_mm512_shuffle_i32x4(fours[0], fours[1], 0x88),
                                       _mm512_shuffle_i32x4(fours[0], fours[1], 0xdd));
  const __m512i two = _mm512_add_epi32(_mm512_shuffle_i32x4(fours[2], fours[3], 0x88),
                                       _mm512_shuffle_i32x4(fours[2], fours[3], 0xdd));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(one, two, 0x88), _mm512_shuffle_i32x4(one, two, 0xdd));
}

/* Add the dots of a vector of inputs: of outputs `first` to `first + some`, of `num`, and `rows` tokens. */
INLINE void add_vectors(const int num, const int rows, const int first, const int some, const int8_t *weight,
                        int64_t stride, __mmask64 mask, const uint8_t *bytes, int64_t width, __m512i *sums) {
  __m512i w[8];
  for (int i = 0; i < some; i++) w[i] = _mm512_maskz_loadu_epi8(mask, weight + (first + i) * stride);
  for (int t = 0; t < rows; t++) {
    const __m512i lower = _mm512_loadu_si512(bytes + 2 * t * width);
    const __m512i upper = _mm512_loadu_si512(bytes + (2 * t + 1) * width);
    for (int i = 0; i < some; i++) {
      ADD_DOTS(sums[2 * num * t + first + i], lower, w[i]);
      ADD_DOTS(sums[2 * num * t + num + first + i], upper, w[i]);
    }
  }
}

/* Sums of `num` outputs for `rows` tokens, of which `2 * num * rows` accumulators are at most sixteen; `some` outputs
   are read side by side. Those `ahead` bytes on are fetched meanwhile; 0: they have been. */
INLINE void tile(const int num, const int rows, const int some, const int8_t *weight, int64_t stride,
                 const uint8_t *bytes, int64_t width, int32_t (*low)[TILE], int32_t (*high)[TILE], int64_t ahead) {
  __m512i sums[16];
  for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int first = 0; first < num; first += some) {
    int64_t k = 0;
    for (; k + VECTOR <= stride; k += VECTOR) {
      if (ahead)
        for (int i = 0; i < some; i++)
          _mm_prefetch((const char *)weight + (first + i) * stride + k + ahead, _MM_HINT_T0);
      add_vectors(num, rows, first, some, weight + k, stride, ~0ull, bytes + k, width, sums);
    }
    if (k < stride) {
      const __mmask64 mask = _bzhi_u64(~0ull, (unsigned)(stride - k));
      add_vectors(num, rows, first, some, weight + k, stride, mask, bytes + k, width, sums);
    }
  }
  int32_t found[16];
  _mm512_storeu_si512(found, sums_of(sums));
  for (int t = 0; t < rows; t++)
    for (int i = 0; i < num; i++) {
      low[t][i] = found[2 * num * t + i];
      high[t][i] = found[2 * num * t + num + i];
    }
}

/* Dots of few tokens, whose vectors lie along the inputs. */
static void few(const int8_t *weight, int64_t stride, int num, const uint8_t *bytes, int64_t width, int rows,
                int32_t (*low)[TILE], int32_t (*high)[TILE]) {
  int at = 0;
  for (; rows == 1 && at + 8 <= num; at += 8) {
    const int8_t *w = weight + at * stride;
    int32_t(*lower)[TILE] = (int32_t(*)[TILE])(low[0] + at), (*upper)[TILE] = (int32_t(*)[TILE])(high[0] + at);
    tile(8, 1, 1, w, stride, bytes, width, lower, upper, AHEAD); /* in the order of memory */
  }
  for (int step = 4; at < num; at += step) {
    const int8_t *w = weight + at * stride;
    step = at + 4 <= num ? 4 : 1;
    for (int t = 0; t < rows;) {
      int32_t(*lower)[TILE] = (int32_t(*)[TILE])(low[t] + at), (*upper)[TILE] = (int32_t(*)[TILE])(high[t] + at);
      const uint8_t *x = bytes + 2 * t * width;
      const int64_t ahead = t ? 0 : 8 * stride;
      if (step == 4 && t + 2 <= rows) tile(4, 2, 4, w, stride, x, width, lower, upper, ahead), t += 2;
      else if (step == 4) tile(4, 1, 4, w, stride, x, width, lower, upper, ahead), t += 1;
      else tile(1, 1, 1, w, stride, x, width, lower, upper, 0), t += 1;
    }
  }
}

/* Write four inputs of sixteen outputs a vector: sixteen rows of a matrix, of which `num` exist, turned by words. */
INLINE void turn(const int8_t *weight, int64_t stride, int num, __mmask64 mask, __m512i (*out)[2]) {
  __m512i v[16], u[16];
  for (int i = 0; i < 16; i++) v[i] = i < num ? _mm512_maskz_loadu_epi8(mask, weight + i * stride) : _mm512_setzero_si512();
  for (int i = 0; i < 8; i++) {
    u[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    u[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      v[4 * i + 2 * j] = _mm512_unpacklo_epi64(u[4 * i + j], u[4 * i + 2 + j]);
      v[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(u[4 * i + j], u[4 * i + 2 + j]);
    }
  for (int j = 0; j < 4; j++) { /* lane l of v[4 i + j]: input word 4 l + j of outputs 4 i to 4 i + 3 */
    const __m512i a = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x44), b = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xee), d = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xee);
    out[j][0] = _mm512_shuffle_i32x4(a, b, 0x88);
    out[4 + j][0] = _mm512_shuffle_i32x4(a, b, 0xdd);
    out[8 + j][0] = _mm512_shuffle_i32x4(c, d, 0x88);
    out[12 + j][0] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}

/* The part of a matrix that is used next, fetched line by line. */
struct next {
  const int8_t *at;
  int64_t stride, inputs, k;
  int left; /* rows */
};

INLINE void fetch(struct next *next) {
  if (next->left <= 0) return;
  _mm_prefetch((const char *)next->at + next->k, _MM_HINT_T0);
  if ((next->k += VECTOR) >= next->inputs) {
    next->k = 0;
    next->at += next->stride;
    next->left--;
  }
}

/* Add the sums of a panel of `words` inputs by four to those of `rows` tokens, at most six. */
INLINE void panel_tile(const int rows, const __m512i (*panel)[2], int64_t words, const uint8_t *bytes, int64_t width,
                       int32_t (*low)[TILE], int32_t (*high)[TILE], struct next *next) {
  __m512i sums[12][2];
  for (int t = 0; t < 2 * rows; t++)
    for (int h = 0; h < 2; h++) sums[t][h] = _mm512_loadu_si512((t % 2 ? high : low)[t / 2] + 16 * h);
  for (int64_t k = 0; k < words; k++) {
    const __m512i one = panel[k][0], two = panel[k][1];
    fetch(next);
    fetch(next);
    for (int t = 0; t < 2 * rows; t++) {
      int32_t word;
      memcpy(&word, bytes + t * width + 4 * k, sizeof word);
      const __m512i x = _mm512_set1_epi32(word);
      ADD_DOTS(sums[t][0], x, one);
      ADD_DOTS(sums[t][1], x, two);
    }
  }
  for (int t = 0; t < 2 * rows; t++)
    for (int h = 0; h < 2; h++) _mm512_storeu_si512((t % 2 ? high : low)[t / 2] + 16 * h, sums[t][h]);
}

/* Dots of many tokens, whose vectors lie along the outputs: nothing is summed within a vector. */
static void many(const int8_t *weight, int64_t stride, int num, const uint8_t *bytes, int64_t width, int rows,
                 int32_t (*low)[TILE], int32_t (*high)[TILE]) {
  __m512i panel[PANEL / 4][2];
  memset(low, 0, (size_t)rows * sizeof *low);
  memset(high, 0, (size_t)rows * sizeof *high);
  for (int64_t first = 0; first < stride; first += PANEL) {
    const int64_t inputs = stride - first < PANEL ? stride - first : PANEL;
    for (int64_t k = 0; k < inputs; k += VECTOR) {
      const __mmask64 mask = inputs - k < VECTOR ? _bzhi_u64(~0ull, (unsigned)(inputs - k)) : ~0ull;
      for (int h = 0; h < 2; h++)
        turn(weight + 16 * h * stride + first + k, stride, num - 16 * h, mask, (__m512i(*)[2])(panel[k / 4] + h));
    }
    const int64_t words = (inputs + 3) / 4, behind = first + inputs;
    const int is_last = behind == stride;
    struct next next = {weight + (is_last ? TILE * stride : behind), stride,
                        is_last ? (stride < PANEL ? stride : PANEL) : stride - behind < PANEL ? stride - behind : PANEL,
                        0, num};
    for (int t = 0; t < rows; t += 6) {
      const uint8_t *x = bytes + 2 * t * width + first;
      switch (rows - t) {
      case 1: panel_tile(1, panel, words, x, width, low + t, high + t, &next); break;
      case 2: panel_tile(2, panel, words, x, width, low + t, high + t, &next); break;
      case 3: panel_tile(3, panel, words, x, width, low + t, high + t, &next); break;
      case 4: panel_tile(4, panel, words, x, width, low + t, high + t, &next); break;
      case 5: panel_tile(5, panel, words, x, width, low + t, high + t, &next); break;
      default: panel_tile(6, panel, words, x, width, low + t, high + t, &next);
      }
    }
  }
}

static void dots(const int8_t *weight, int64_t stride, int num, const uint8_t *bytes, int64_t width, int rows,
                 int32_t (*low)[TILE], int32_t (*high)[TILE]) {
  (rows < SEVERAL ? few : many)(weight, stride, num, bytes, width, rows, low, high);
}

#define PATH rows_avx512
#define NAME "AVX-512 VNNI"
#include "rows_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
