/* The body of each path, behind its `dots`; PATH and NAME are its names.

   A number x of a row becomes a whole number of 16 bits, x * 32512 / (the row's largest), as two bytes of which each is
   128 too large, so that products of unsigned by signed bytes apply. Sums are whole numbers: a row's bits depend neither
   on other rows nor on the order of summation. */

#include <math.h>
#include <string.h>

#define MOST 32512.0f
#define SHIFT 32896.5f /* 128 * 256 + 128, and a half to round */
#define LEAST 1e-30f
#define LANES 16

static inline float wide(uint16_t number) {
  union { uint32_t bits; float value; } as = {(uint32_t)number << 16};
  return as.value;
}

static inline uint16_t narrow(float number) {
  union { float value; uint32_t bits; } as = {number};
  return (uint16_t)((as.bits + 0x7fffu + ((as.bits >> 16) & 1u)) >> 16);
}

static void rms_norm(const uint16_t *restrict x, const uint16_t *restrict norm, float eps, int64_t num,
                     uint16_t *restrict out) {
  float parts[LANES] = {0}, total = 0;
  int64_t k = 0;
  for (; k + LANES <= num; k += LANES)
    for (int j = 0; j < LANES; j++) parts[j] += wide(x[k + j]) * wide(x[k + j]);
  for (; k < num; k++) parts[k % LANES] += wide(x[k]) * wide(x[k]);
  for (int j = 0; j < LANES; j++) total += parts[j];
  const float factor = 1.0f / sqrtf(total / (float)num + eps);
  for (k = 0; k < num; k++) out[k] = narrow(wide(narrow(wide(x[k]) * factor)) * wide(norm[k]));
}

/* As bits, infinity is above all numbers and NaN above infinity: neither is lost. */
static float largest(const uint16_t *restrict x, int64_t num) {
  uint16_t most = 0;
  for (int64_t k = 0; k < num; k++) {
    const uint16_t size = x[k] & 0x7fff;
    most = size > most ? size : most;
  }
  const float found = wide(most);
  return found < LEAST ? LEAST : found;
}

static void to_bytes(const uint16_t *restrict x, int64_t num, int64_t width, float most, uint8_t *restrict low,
                     uint8_t *restrict high) {
  const float factor = (1.0f / most) * MOST;
  for (int64_t k = 0; k < num; k++) {
    const int32_t whole = (int32_t)(wide(x[k]) * factor + SHIFT);
    low[k] = (uint8_t)whole;
    high[k] = (uint8_t)(whole >> 8);
  }
  memset(low + num, 0, (size_t)(width - num));
  memset(high + num, 0, (size_t)(width - num));
}

static void tokens(struct job *job, int64_t first, int64_t last) {
  const int64_t num = job->matrix->num_in, width = job->width;
  for (int64_t t = first; t < last; t++) {
    const uint16_t *x = job->x + (job->first + t) * job->x_stride;
    if (job->norm) {
      rms_norm(x, job->norm, job->eps, num, job->normed + t * width);
      x = job->normed + t * width;
    }
    uint8_t *low = job->bytes + 2 * t * width;
    job->most[t] = largest(x, num);
    to_bytes(x, num, width, job->most[t], low, low + width);
  }
}

/* Write x Wᵀ of outputs `at` to `at + num` of all tokens of the block, rounded to bfloat16, bias added. */
static void products(const struct job *job, int64_t at, int num, float (*restrict y)[TILE]) {
  const struct matrix *m = job->matrix;
  int32_t low[BLOCK][TILE], high[BLOCK][TILE];
  dots(m->weight + at * m->num_in, m->num_in, num, job->bytes, job->width, (int)job->num, low, high);
  for (int64_t t = 0; t < job->num; t++) {
    const float most = job->most[t];
    for (int i = 0; i < num; i++) {
      const float scale = m->scale[at + i];
      const float lower = (float)(low[t][i] - m->zero[at + i]) * scale;
      const float upper = (float)(high[t][i] - m->zero[at + i]) * scale;
      y[t][i] = wide(narrow(fmaf(upper, 256.0f, lower) * most));
    }
    if (job->bias)
      for (int i = 0; i < num; i++) y[t][i] = wide(narrow(y[t][i] + wide(job->bias[at + i])));
  }
}

/* e to the power of a number: 2^n times a polynomial, within 2 units in the last place; NaN stays. */
static inline float power(float x) {
  x = x > 89.0f ? 89.0f : x; /* of which the power is infinity */
  x = x < -87.0f ? -87.0f : x;
  const float n = floorf(x * 1.44269504f + 0.5f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  union { uint32_t bits; float value; } scale = {(uint32_t)((int32_t)n + 127) << 23};
  return p * scale.value;
}

static void gated(const struct job *job, int64_t first, int num) {
  const int64_t half = job->matrix->num_out / 2;
  float gate[BLOCK][TILE], up[BLOCK][TILE];
  products(job, first, num, gate);
  products(job, half + first, num, up);
  for (int64_t t = 0; t < job->num; t++) {
    uint16_t *y = job->y + (job->first + t) * half + first;
    for (int i = 0; i < num; i++) {
      const float silu = wide(narrow(gate[t][i] / (1.0f + power(-gate[t][i]))));
      y[i] = narrow(silu * up[t][i]);
    }
  }
}

static void linear(const struct job *job, int64_t first, int num) {
  const int64_t num_out = job->matrix->num_out;
  float sums[BLOCK][TILE];
  products(job, first, num, sums);
  for (int64_t t = 0; t < job->num; t++) {
    uint16_t *y = job->y + (job->first + t) * num_out + first;
    if (job->residual) {
      const uint16_t *added = job->residual + (job->first + t) * job->residual_stride + first;
      for (int i = 0; i < num; i++) y[i] = narrow(wide(added[i]) + sums[t][i]);
    } else {
      for (int i = 0; i < num; i++) y[i] = narrow(sums[t][i]);
    }
  }
}

static void outputs(struct job *job, int64_t first, int64_t last) {
  for (int64_t at = first; at < last; at += TILE) {
    const int num = (int)(last - at < TILE ? last - at : TILE);
    if (job->is_gated) gated(job, at, num);
    else linear(job, at, num);
  }
}

const struct path PATH = {NAME, tokens, outputs};
