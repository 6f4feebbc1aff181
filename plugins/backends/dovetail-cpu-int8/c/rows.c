/* The one function that Python calls: it chooses the path for the processor, and divides work among threads.

   Threads are those of the OpenMP runtime that torch has loaded: its `GOMP_parallel` is handed in, so that no second pool
   exists. Without it one thread computes. */
#include <stdlib.h>

#include "rows.h"

#if defined(__GNUC__)
#define PUBLIC __attribute__((visibility("default")))
#else
#define PUBLIC
#endif

enum {
  VECTORS = 64,
  MANY = 8,  /* tokens */
  SHARE = 20 /* 2^20 products of bytes are the least of a thread: waking it takes longer than fewer */
};

typedef void (*parallel)(void (*run)(void *), void *data, unsigned threads, unsigned flags);

struct share {
  struct job *job;
  part run;
  int64_t next, count, step;
};

static const struct path *available(int at) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const int has_avx512 = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         __builtin_cpu_supports("bmi2") && has_avx2;
  if (has_avx512 && at-- == 0) return &rows_avx512;
  if (has_avx2 && at-- == 0) return &rows_avx2;
#endif
  return at == 0 ? &rows_plain : NULL;
}

/* The name of a path that this processor has, the fastest first; NULL behind the last one. */
PUBLIC const char *dovetail_rows_path(int32_t at) {
  const struct path *found = available(at);
  return found ? found->name : NULL;
}

static void work(void *data) {
  struct share *share = data;
  for (;;) {
    const int64_t at = __atomic_fetch_add(&share->next, share->step, __ATOMIC_RELAXED);
    if (at >= share->count) return;
    share->run(share->job, at, at + share->step < share->count ? at + share->step : share->count);
  }
}

static void divide(struct job *job, part run, int64_t count, int64_t least, parallel start, int32_t threads) {
  if (!start || threads <= 1 || count <= least) {
    run(job, 0, count);
    return;
  }
  const int64_t even = count / (4 * threads) / least * least;
  struct share share = {job, run, 0, count, even < least ? least : even};
  start(work, &share, (unsigned)threads, 0);
}

/* Compute a job; `start` is NULL or `GOMP_parallel`. Returns 0, or 1 where there is no memory for a block's bytes. */
PUBLIC int32_t dovetail_rows_run(const struct matrix *matrix, const uint16_t *x, int64_t x_stride, int64_t rows,
                                 const uint16_t *norm, float eps, const uint16_t *bias, const uint16_t *residual,
                                 int64_t residual_stride, uint16_t *y, int32_t is_gated, parallel start,
                                 int32_t threads, int32_t at) {
  if (rows == 0) return 0;
  const struct path *path = available(at);
  struct job job = {matrix, x, norm, bias, residual, y, x_stride, residual_stride, rows, eps, is_gated};
  const int64_t shares = (rows * matrix->num_out * matrix->num_in) >> SHARE;
  if (shares < threads) threads = shares < 1 ? 1 : (int32_t)shares;
  job.width = (matrix->num_in + VECTORS - 1) / VECTORS * VECTORS;
  const int64_t most = rows < BLOCK ? rows : BLOCK;
  char *memory = aligned_alloc(VECTORS, (size_t)(most * (4 * job.width + VECTORS)));
  if (!path || !memory) {
    free(memory);
    return 1;
  }
  job.bytes = (uint8_t *)memory;
  job.normed = (uint16_t *)(memory + 2 * most * job.width);
  job.most = (float *)(memory + 4 * most * job.width);
  for (; job.first < rows; job.first += job.num) {
    job.num = rows - job.first < BLOCK ? rows - job.first : BLOCK;
    divide(&job, path->tokens, job.num, MANY, start, threads);
    divide(&job, path->outputs, is_gated ? matrix->num_out / 2 : matrix->num_out, TILE, start, threads);
  }
  free(memory);
  return 0;
}
