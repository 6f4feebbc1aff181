/* What the translation units share: T tokens, N outputs, K inputs, F = N / 2 outputs of a gated matrix. */
#ifndef DOVETAIL_ROWS_H
#define DOVETAIL_ROWS_H

#include <stdint.h>

enum { BLOCK = 64, TILE = 32 }; /* tokens and outputs that are computed at a time */

/* A matrix as it is stored; laid out as `Matrix` in kernels.py. */
struct matrix {
  const int8_t *weight; /* [N, K] */
  const float *scale;   /* [N]: of an output's whole number */
  const int32_t *zero;  /* [N]: what the shift of the bytes adds to a sum */
  int64_t num_out, num_in;
};

/* One call. Floats of 16 bits are bfloat16; rows are so many numbers apart. */
struct job {
  const struct matrix *matrix;
  const uint16_t *x;
  const uint16_t *norm;     /* [K] or NULL: RMS norm of the rows before the product */
  const uint16_t *bias;     /* [N] or NULL */
  const uint16_t *residual; /* [T, N] or NULL: is added last */
  uint16_t *y;              /* [T, N], or [T, F] if gated */
  int64_t x_stride, residual_stride, rows;
  float eps;
  int32_t is_gated; /* y is silu of the first half of the outputs, times the second half */
  /* Of the block of tokens at hand. */
  int64_t first, num;
  int64_t width;    /* K, rounded up to whole vectors */
  uint16_t *normed; /* [num, width] */
  uint8_t *bytes;   /* [num, 2, width]: lower and upper bytes of each number of a row */
  float *most;      /* [num]: the largest number of a row */
};

typedef void (*part)(struct job *, int64_t first, int64_t last);

/* The same two functions for each kind of processor: rows become bytes, and bytes are multiplied. */
struct path {
  const char *name;
  part tokens, outputs;
};

extern const struct path rows_plain;
#if defined(__x86_64__)
extern const struct path rows_avx2, rows_avx512;
#endif

#endif
