// A few rows against many keys, as when text is generated: one new query for each head.
//
// The register tile of product.h would leave most lanes empty. Here the lanes run along D instead: each key is loaded
// once, as vectors, and multiplied with all rows that share it (the G query heads of a group); each value is loaded once
// and added to all of them. The time is that of reading the keys and values. Scores still lie as [keys][rows], so masks
// and softmax are those of the forward pass. Where heads are few, the keys of a row are shared out in parts, which are
// put together in a fixed order: the result is the same for any number of threads.
#pragma once

#include "kernel.h"
#include "mask.h"
#include "scores.h"
#include "storage.h"

namespace multihead {
namespace MULTIHEAD_ISA {

constexpr int64_t FEW = 8;  // rows, up to which this is faster
static_assert(FEW <= LANES, "they are one strip");

static bool is_few(const Problem& p) { return p.G * p.L <= FEW; }

// q of a strip as [rows][D], times the factor of the scores.
static void copy_queries(const Problem& p, int count, const float* const* rows, float* to) {
  float factor = query_factor(p);
  int64_t step = padded(p.D);
  for (int i = 0; i < count; i++)
    for (int64_t c = 0; c < step; c++) to[i * step + c] = c < p.D ? rows[i][c] * factor : 0;
}

INLINE float sum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#elif defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
  float sum = 0;
  for (int i = 0; i < W; i++) sum += x[i];
  return sum;
#endif
}

// Keys and values come from memory, once: they are asked for some rows ahead. (An address that is not there does no harm.)
constexpr int64_t AHEAD = 16;
constexpr int64_t LINE = 16;  // floats to a line of the cache
INLINE void fetch(const float* p) { __builtin_prefetch(p); }

template <int ROWS>
static void dots_of(const float* q, int64_t q_step, const float* k, int64_t step, int64_t keys, int64_t width, float* to) {
  int64_t key = 0;
  for (; key + 2 <= keys; key += 2, k += 2 * step, to += 2 * LANES) {
    Floats sums[2][ROWS] = {};
    for (int64_t c = 0; c < width; c += LINE) fetch(k + AHEAD * step + c), fetch(k + (AHEAD + 1) * step + c);
    for (int64_t c = 0; c < width; c += W) {
      Floats a = load(k + c), b = load(k + step + c);
      for (int i = 0; i < ROWS; i++) {
        Floats row = load(q + i * q_step + c);
        sums[0][i] += a * row, sums[1][i] += b * row;
      }
    }
    for (int i = 0; i < ROWS; i++) to[i] = sum_of(sums[0][i]), to[LANES + i] = sum_of(sums[1][i]);
  }
  if (key == keys) return;
  for (int i = 0; i < ROWS; i++) {
    Floats sum = {};
    for (int64_t c = 0; c < width; c += W) sum += load(k + c) * load(q + i * q_step + c);
    to[i] = sum_of(sum);
  }
}

// Scores [keys][LANES] of some rows, at most FEW.
static void dots(const Problem& p, int rows, const float* q, const float* k, int64_t step, int64_t keys, float* to) {
  int64_t width = padded(p.D);
  for (int done = 0; done < rows; done += 4, q += 4 * width, to += 4) switch (rows - done) {
      case 1: dots_of<1>(q, width, k, step, keys, width, to); break;
      case 2: dots_of<2>(q, width, k, step, keys, width, to); break;
      case 3: dots_of<3>(q, width, k, step, keys, width, to); break;
      default: dots_of<4>(q, width, k, step, keys, width, to);
    }
}

// Keys whose values are taken column by column, so that their lines stay in the first cache meanwhile.
constexpr int64_t AT_ONCE = 32;

template <int ROWS, int WIDE>
INLINE void mix_columns(const float* weights, const float* v, int64_t step, int64_t keys, float* out, int64_t out_step) {
  Floats sums[ROWS][WIDE];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < WIDE; j++) sums[i][j] = load(out + i * out_step + j * W);
  for (int64_t key = 0; key < keys; key++, v += step, weights += LANES) {
    fetch(v + AT_ONCE * step);
    for (int j = 0; j < WIDE; j++) {
      Floats value = load(v + j * W);
      for (int i = 0; i < ROWS; i++) sums[i][j] += weights[i] * value;
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < WIDE; j++) store(out + i * out_step + j * W, sums[i][j]);
}

template <int ROWS>
static void mix_of(const float* weights, const float* v, int64_t step, int64_t keys, int64_t width, float* out) {
  for (int64_t key = 0; key < keys; key += AT_ONCE, v += AT_ONCE * step, weights += AT_ONCE * LANES) {
    int64_t n = keys - key < AT_ONCE ? keys - key : AT_ONCE, c = 0;
    for (; c + 2 * W <= width; c += 2 * W) mix_columns<ROWS, 2>(weights, v + c, step, n, out + c, width);
    for (; c < width; c += W) mix_columns<ROWS, 1>(weights, v + c, step, n, out + c, width);
  }
}

// out [rows][V] += weights^T [rows][keys] * values [keys][V].
static void mix(const Problem& p, int rows, const float* weights, const float* v, int64_t step, int64_t keys, float* out) {
  int64_t width = padded(p.V);
  for (int done = 0; done < rows; done += 4, weights += 4, out += 4 * width) switch (rows - done) {
      case 1: mix_of<1>(weights, v, step, keys, width, out); break;
      case 2: mix_of<2>(weights, v, step, keys, width, out); break;
      case 3: mix_of<3>(weights, v, step, keys, width, out); break;
      default: mix_of<4>(weights, v, step, keys, width, out);
    }
}

static void shrink_rows(const Problem& p, int rows, const float* shrink, float* out) {
  int64_t width = padded(p.V);
  for (int i = 0; i < rows; i++)
    for (int64_t c = 0; c < width; c += W) store(out + i * width + c, load(out + i * width + c) * shrink[i]);
}

// Where the result of one part for one row waits: the largest score, the sum, and the output, not divided by it.
static float* part_of(const Problem& p, int64_t b, int64_t head, int64_t part, int64_t row) {
  return p.partial + ((((b * p.K + head) * p.parts + part) * p.G * p.L) + row) * (2 + p.V);
}

static void keep_part(const Problem& p, const Strip& s, int64_t part, const float* top, const float* sum, const float* out,
                      bool few, float* room) {
  const float* rows = out;
  int64_t width = padded(p.V);
  if (!few) {
    float* to[LANES];
    for (int i = 0; i < LANES; i++) to[i] = room + i * p.V;
    transpose_out(out, p.V, to);
    rows = room, width = p.V;
  }
  for (int i = 0; i < s.count; i++) {
    float* to = part_of(p, s.b, s.head, part, s.first + i);
    to[0] = top[i], to[1] = sum[i];
    memcpy(to + 2, rows + i * width, size_t(p.V) * sizeof(float));
  }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
