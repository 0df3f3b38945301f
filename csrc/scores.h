// From products to scores: softcap, bias, slopes, mask, in this order. Scores are in units of log2, so that the softmax
// takes powers of 2; they lie as [keys][rows], a strip of LANES rows to a line.
#pragma once

#include "kernel.h"
#include "mask.h"
#include "storage.h"
#include "vector.h"

namespace multihead {
namespace MULTIHEAD_ISA {

// What q is multiplied by when it is packed: with a softcap the products become the argument of its tanh.
INLINE float query_factor(const Problem& p) { return p.softcap > 0 ? p.scale / p.softcap : p.scale * LOG2_E; }

INLINE float bias_at(const Bias& bias, int64_t place) {
  if (bias.dtype == Dtype::f32) return ((const float*)bias.data)[place];
  uint16_t half = ((const uint16_t*)bias.data)[place];
  return bias.dtype == Dtype::bf16 ? from_bf16(half) : from_f16(half);
}

// A score with a bias added, in units of log2. The lowest biases hide.
template <typename Vector>
INLINE void add_one(const Bias& bias, Vector one, float* place) {
  typedef float Anywhere __attribute__((vector_size(sizeof(Vector)), aligned(4), may_alias));
  Vector sum = one * LOG2_E + *(const Anywhere*)place;
  *(Anywhere*)place = one <= bias.lowest ? Vector{} - INF : sum;
}

static void add_bias(const Problem& p, const Strip& s, int64_t first, int64_t keys, float* scores, int64_t ld) {
  const Bias& bias = p.bias;
  int64_t step = bias.stride[3], start = first * step, k = 0;
  if (s.bias_is_one) {
    for (; k < keys; k++) {
      Floats one = all(bias_at(bias, start + s.bias[0] + k * step));
      for (int j = 0; j < N; j++) add_one(bias, one, scores + k * ld + j * W);
    }
    return;
  }
  if (bias.dtype == Dtype::f32 && step == 1) {  // squares of it, turned as the scores lie
    const float* table = (const float*)bias.data + start;
    for (; k + SIDE <= keys; k += SIDE)
      for (int i = 0; i < LANES; i += SIDE) {
        Line square[SIDE];
        for (int j = 0; j < SIDE; j++) square[j] = load_line(table + s.bias[i + j] + k);
        turn(square);
        for (int j = 0; j < SIDE; j++) add_one(bias, square[j], scores + (k + j) * ld + i);
      }
  }
  for (; k < keys; k++)
    for (int j = 0; j < N; j++) {
      Floats one;
      for (int i = 0; i < W; i++) one[i] = bias_at(bias, start + s.bias[j * W + i] + k * step);
      add_one(bias, one, scores + k * ld + j * W);
    }
}

static void add_slopes(const Problem& p, const Strip& s, int64_t first, int64_t keys, float* scores, int64_t ld) {
  const Positions& at = p.positions;
  int64_t k_row = s.b * at.k_stride + first;
  for (int64_t k = 0; k < keys; k++)
    for (int j = 0; j < N; j++) {
      Floats far;
      if (at.kind != PositionKind::narrow) {
        for (int i = 0; i < W; i++) far[i] = float(__builtin_fabs(far_distance(at, s, j * W + i, k_row + k)));
      } else {
        Ints d = *(const Ints*)(s.position + j * W) - ((const int32_t*)at.k)[k_row + k];
        far = __builtin_convertvector(d < 0 ? -d : d, Floats);
      }
      float* place = scores + k * ld + j * W;
      store(place, *(const Floats*)(s.slope + j * W) * far + load(place));
    }
}

// Cells first .. first + cells of a block, as one run of keys.
struct Run {
  int first, cells;
};

// The next run of set bits from cell `from` on; cells = 0: there is none.
INLINE Run next_run(uint32_t bits, int from) {
  uint32_t rest = from < CELLS ? bits >> from : 0;
  if (!rest) return {CELLS, 0};
  int first = from + __builtin_ctz(rest);
  return {first, __builtin_ctz(~(bits >> first))};
}

INLINE int64_t keys_of(Run run, int64_t keys_in_block) {
  int64_t left = keys_in_block - run.first * CELL, wanted = run.cells * CELL;
  return left < wanted ? left : wanted;
}

// Whether anything but the mask acts on the scores.
INLINE bool adjusts(const Problem& p) { return p.softcap > 0 || p.bias.data || p.slopes; }

// All of it for one run of a block. `scores` and `slope` point to the run's first key; `slope` (or null) is given the
// softcap's derivative at each score.
static void adjust(const Problem& p, const Strip& s, int64_t block, Run run, uint32_t every, float* scores, int64_t ld,
                   float* slope) {
  int64_t first = block * KEY_BLOCK + run.first * CELL;
  int64_t keys = keys_of(run, keys_in(p, block));
  if (p.softcap > 0) {
    float height = p.softcap * LOG2_E;
    for (int64_t k = 0; k < keys; k++)
      for (int j = 0; j < N; j++) {
        Floats t = tanh_of(load(scores + k * ld + j * W));
        store(scores + k * ld + j * W, t * height);
        if (slope) store(slope + k * ld + j * W, 1.0f - t * t);
      }
  }
  if (p.bias.data) add_bias(p, s, first, keys, scores, ld);
  if (p.slopes) add_slopes(p, s, first, keys, scores, ld);
  for (int c = 0; c < run.cells; c++) {
    if (every >> (run.first + c) & 1) continue;
    int64_t k = c * CELL;
    hide(p, s, first + k, keys - k < CELL ? keys - k : CELL, scores + k * ld, ld);
  }
}

// Which keys of a head somebody sees: no mask hides them from all, and no bias of -inf.
static void find_seen(const Problem& p, int64_t b, int64_t head, void* memory) {
  Room room(memory);
  Strip& s = *room.take<Strip>(1);
  float* scores = room.take(KEY_BLOCK * LANES);
  uint8_t* seen = p.seen + (b * p.K + head) * p.S;
  clear(seen, size_t(p.S));
  for (int64_t row = 0; row < p.G * p.L; row += LANES) {
    open_strip(p, b, head, row, s);
    for (int64_t block = 0; block < key_blocks(p); block++) {
      int64_t keys = keys_in(p, block);
      Cells cells = look(p, s, block);
      for (Run run = next_run(cells.some, 0); run.cells; run = next_run(cells.some, run.first + run.cells)) {
        int64_t n = keys_of(run, keys);
        clear(scores, size_t(n * LANES) * sizeof(float));
        adjust(p, s, block, run, cells.every, scores, LANES, nullptr);
        for (int64_t k = 0; k < n; k++)
          for (int i = 0; i < LANES; i++)
            if (scores[k * LANES + i] != -INF) seen[block * KEY_BLOCK + run.first * CELL + k] = 1;
      }
    }
  }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
