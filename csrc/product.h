// The register tile: all matrix products of the kernel are made of it.
//
//   c[i][j] (+)= sum over k of a(i, k) * b[k][j],   j = 0 .. LANES - 1
//
// M x N sums live in registers for the whole depth. Each step loads N vectors of b and broadcasts M numbers of a, for
// M * N fused multiply-adds: 6 x 2 with AVX2, 12 multiply-adds for 8 loads, and 12 independent sums, more than the 8
// that two units with a latency of 4 cycles need to be kept busy.
//
// a is read where it lies: nothing of the keys and values is packed. Only b, the side of the queries, is brought into
// strips of LANES rows, once for all keys:
//
//   scores^T    [keys][rows]  = K        [keys][d]   Q^T  [d][rows]       a = K,        its d next to each other
//   output^T    [v][rows]    += V^T      [v][keys]   P^T  [keys][rows]    a = V^T,      its v next to each other
//   grad V      [keys][v]    += P^T      [keys][rows] dO  [rows][v]       a = P^T,      its rows next to each other
#pragma once

#include "vector.h"

namespace multihead {
namespace MULTIHEAD_ISA {

// How the numbers of a lie: a(i, k) is a[i * step + k] or a[k * step + i].
enum class Along { depth, rows };
enum class Into { fresh, sum };

template <int ROWS, Along ALONG, Into INTO>
static void register_tile(const float* a, int64_t step, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
  Floats sums[ROWS][N] = {};
  for (int64_t k = 0; k < depth; k++) {
    Floats right[N];
    for (int j = 0; j < N; j++) right[j] = load(b + j * W);
    for (int i = 0; i < ROWS; i++) {
      Floats left = all(ALONG == Along::depth ? a[i * step] : a[i]);
      for (int j = 0; j < N; j++) sums[i][j] += left * right[j];
    }
    b += ldb;
    a += ALONG == Along::depth ? 1 : step;
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < N; j++) {
      float* place = c + i * ldc + j * W;
      store(place, INTO == Into::sum ? load(place) + sums[i][j] : sums[i][j]);
    }
}

// How many rows to take next of n: M, and towards the end no tile so small that the units wait for each other.
INLINE int next_rows(int64_t n) {
  if (n >= 2 * M || n == M) return M;
  if (n > M) return n - M >= M / 2 ? M : int(n + 1) / 2;
  return int(n);
}

template <Along ALONG, Into INTO>
static void product(int64_t rows, const float* a, int64_t step, const float* b, int64_t ldb, float* c, int64_t ldc,
                    int64_t depth) {
  while (rows > 0) {
    int n = next_rows(rows);
    switch (n) {
#define ROWS_CASE(R) \
  case R:            \
    register_tile<R, ALONG, INTO>(a, step, b, ldb, c, ldc, depth); \
    break;
      ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
#if defined(__AVX512F__)
      ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12)
#endif
#undef ROWS_CASE
    }
    a += ALONG == Along::depth ? n * step : n;
    c += n * ldc;
    rows -= n;
  }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
