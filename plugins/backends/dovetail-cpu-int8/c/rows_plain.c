/* Any processor, as far as the compiler finds vectors in it. */
#include "rows.h"

static inline __attribute__((always_inline)) void dots(const int8_t *weight, int64_t stride, int num,
                                                       const uint8_t *bytes, int64_t width, int rows,
                                                       int32_t (*low)[TILE], int32_t (*high)[TILE]) {
  for (int i = 0; i < num; i++) {
    const int8_t *restrict w = weight + i * stride;
    for (int t = 0; t < rows; t++) {
      const uint8_t *restrict lower = bytes + 2 * t * width, *restrict upper = lower + width;
      int32_t sum = 0, other = 0;
      for (int64_t k = 0; k < stride; k++) {
        sum += (int16_t)lower[k] * (int16_t)w[k];
        other += (int16_t)upper[k] * (int16_t)w[k];
      }
      low[t][i] = sum;
      high[t][i] = other;
    }
  }
}

#define PATH rows_plain
#define NAME "plain C"
#include "rows_body.h"
