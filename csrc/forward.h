// The forward pass: blocks of keys, one after the other, under an online softmax (Milakov, Gimelshein 2018; Dao et al.,
// "FlashAttention", 2022). See docs/kernel.md for a picture.
//
// For each row three things are kept: the largest score so far, the sum of 2^(score - largest), and the output weighted
// in the same way. When a block of keys brings a larger score, sum and output shrink by 2^(old - new). So no more than
// a strip of scores, [KEY_BLOCK][LANES], exists at any time.
#pragma once

#include "decode.h"
#include "dropout.h"
#include "kernel.h"
#include "mask.h"
#include "product.h"
#include "scores.h"
#include "storage.h"

namespace multihead {
namespace MULTIHEAD_ISA {

constexpr int STRIPS = ROWS_AT_ONCE / LANES;

static int64_t row_blocks(const Problem& p) { return (p.G * p.L + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; }

struct Softmax {
  Floats top[N], sum[N];
};

// Weights of a block from its scores, in place, not yet divided by their sum. Returns whether the output so far has to
// shrink, by `shrink`.
static __attribute__((noinline)) bool weigh(const Problem& p, const Strip& s, Softmax& softmax, uint32_t some,
                                            int64_t block, int64_t keys, float* scores, Floats shrink[N]) {
  Floats top[N];
  for (int j = 0; j < N; j++) top[j] = softmax.top[j];
  for (Run run = next_run(some, 0); run.cells; run = next_run(some, run.first + run.cells)) {
    const float* line = scores + run.first * CELL * LANES;
    for (int64_t k = keys_of(run, keys); k > 0; k--, line += LANES)
      for (int j = 0; j < N; j++) top[j] = larger(load(line + j * W), top[j]);  // passes over NaN: the power keeps it
  }
  Floats base[N];
  bool changes = false;
  for (int j = 0; j < N; j++) {
    changes |= any(top[j] != softmax.top[j]);
    base[j] = top[j] == -INF ? Floats{} : top[j];  // rows that have seen nothing yet
    shrink[j] = power(softmax.top[j] - base[j]);
    softmax.top[j] = top[j];
  }
  Floats sum[N] = {}, other[N] = {};
  for (Run run = next_run(some, 0); run.cells; run = next_run(some, run.first + run.cells)) {
    float* line = scores + run.first * CELL * LANES;
    int64_t n = keys_of(run, keys), k = 0;
    if (p.has_dropout) {
      int64_t first = block * KEY_BLOCK + run.first * CELL;
      for (; k < n; k += 4) {
        Ints kept[4][N];
        draw(p, s, first + k, kept);
        for (int64_t i = 0; i < 4 && k + i < n; i++)
          for (int j = 0; j < N; j++) {
            float* place = line + (k + i) * LANES + j * W;
            Floats weight = power(load(place) - base[j]);
            sum[j] += weight;
            store(place, (Floats)((Ints)weight & kept[i][j]));
          }
      }
      continue;
    }
    for (; k + 2 <= n; k += 2, line += 2 * LANES)
      for (int j = 0; j < N; j++) {
        Floats a = power(load(line + j * W) - base[j]);
        Floats b = power(load(line + LANES + j * W) - base[j]);
        store(line + j * W, a), store(line + LANES + j * W, b);
        sum[j] += a, other[j] += b;
      }
    for (; k < n; k++, line += LANES)
      for (int j = 0; j < N; j++) {
        Floats a = power(load(line + j * W) - base[j]);
        store(line + j * W, a);
        sum[j] += a;
      }
  }
  for (int j = 0; j < N; j++) softmax.sum[j] = softmax.sum[j] * shrink[j] + (sum[j] + other[j]);
  return changes;
}

// The strips of a row block and what is kept for them.
struct ForwardRoom {
  Strip* strips;
  Softmax* softmaxes;
  float *q, *out;  // of each strip: [D][LANES], [V][LANES]; in decode.h [rows][D], [rows][V]
  float *scores, *keys, *values, *rows;
  int64_t q_size, out_size;

  ForwardRoom(const Problem& p, Room& room) {
    int64_t d = padded(p.D), v = padded(p.V);
    int64_t strips_used = (p.G * p.L + LANES - 1) / LANES;
    strips_used = strips_used < STRIPS ? strips_used : STRIPS;
    q_size = d * LANES, out_size = v * LANES;
    strips = room.take<Strip>(strips_used);
    softmaxes = room.take<Softmax>(strips_used);
    q = room.take(strips_used * q_size);
    out = room.take(strips_used * out_size);
    int64_t block = p.S < KEY_BLOCK ? p.S : KEY_BLOCK;
    scores = room.take(block * LANES);
    keys = room.take(block * d);
    values = room.take(block * v);
    rows = room.take(LANES * (d > v ? d : v));
  }
};

// q of a strip, times the factor of the scores: as [rows][D] where they are few, else as [D][LANES], with zeros in lanes
// without a row.
static void pack_queries(const Problem& p, const Strip& s, bool few, float* to, float* room) {
  const float* rows[LANES];
  for (int i = 0; i < LANES; i++) {
    rows[i] = room + i * p.D;
    if (i < s.count)
      rows[i] = read_row(p.q, s.b, s.h[i], s.l[i], p.D, room + i * p.D);
    else
      clear(room + i * p.D, size_t(p.D) * sizeof(float));
  }
  if (few)
    copy_queries(p, s.count, rows, to);
  else
    transpose_in(rows, p.D, query_factor(p), to);
}

// The scores of one run of a block. Forward, backward and weights all make them here: they have to be the same to the bit,
// or large ones would not cancel. `slope` as in `adjust`.
static void make_scores(const Problem& p, const Strip& s, bool few, const float* q, Rows k, int64_t block, Run run,
                        Cells cells, float* scores, int64_t ld, float* slope) {
  int64_t start = run.first * CELL, n = keys_of(run, keys_in(p, block));
  if (few) clear(scores, size_t(n * LANES) * sizeof(float));  // there is one strip, so ld is LANES
  by_pieces(k, start, n, [&](const float* keys, int64_t done, int64_t count) {
    if (few)
      dots(p, s.count, q, keys, k.step, count, scores + done * LANES);
    else
      product<Along::depth, Into::fresh>(count, keys, k.step, q, LANES, scores + done * ld, ld, p.D);
  });
  if (adjusts(p) || cells.some != cells.every) adjust(p, s, block, run, cells.every, scores, ld, slope);
}

// [width][LANES] as rows: where they belong in `t`, or, if they can't be written there, side by side in `room`.
static void turn_rows(const float* from, const Tensor4& t, const Strip& s, int64_t width, float* room) {
  float* rows[LANES];
  for (int i = 0; i < LANES; i++) {
    bool is_there = is_plain(t) && i < s.count;
    rows[i] = is_there ? (float*)t.data + offset_of(t, s.b, s.h[i], s.l[i]) : room + i * width;
  }
  transpose_out(from, width, rows);
}

// The backward pass needs rowsum(dO out) (backward.h), where the rounding of a narrow out would add up.
static void write_rest(const Problem& p, const Strip& s, int row, const float* exact) {
  for (int64_t first = 0; first < p.V; first += LANES) {
    float piece[LANES];
    int64_t n = p.V - first < LANES ? p.V - first : LANES;
    copy_row(p.out, offset_of(p.out, s.b, s.h[row], s.l[row]) + first * p.out.stride[3], n, piece);
    for (int64_t i = 0; i < n; i++) piece[i] = exact[first + i] - piece[i];
    Tensor4 place = p.rest;
    place.data = (uint16_t*)place.data + first * place.stride[3];
    write_row(place, s.b, s.h[row], s.l[row], n, piece);
  }
}

// Divide by the sums and write. Rows that have seen nothing are zeros, whatever the values hold. False: something is not
// finite.
static bool finish(const Problem& p, const Strip& s, const Softmax& softmax, float* out, bool few, float* room) {
  Floats factor[N];
  Ints is_blind[N], bad = {};
  for (int j = 0; j < N; j++) {
    is_blind[j] = softmax.sum[j] == 0.0f;
    factor[j] = is_blind[j] ? Floats{} : p.keep_scale / softmax.sum[j];
    bad |= not_finite(factor[j]);
  }
  const float* rows = out;
  int64_t step = padded(p.V);
  if (few) {
    for (int i = 0; i < s.count; i++)
      for (int64_t c = 0; c < step; c += W) {
        Floats x = is_blind[i / W][i % W] ? Floats{} : load(out + i * step + c) * factor[i / W][i % W];
        bad |= not_finite(x);
        store(out + i * step + c, x);
      }
  } else {
    for (int64_t c = 0; c < p.V; c++)
      for (int j = 0; j < N; j++) {
        Floats x = is_blind[j] ? Floats{} : load(out + c * LANES + j * W) * factor[j];
        bad |= not_finite(x);
        store(out + c * LANES + j * W, x);
      }
    turn_rows(out, p.out, s, p.V, room);
    rows = room, step = p.V;
  }
  bool is_written = !few && is_plain(p.out);
  for (int i = 0; i < s.count; i++) {
    if (!is_written) write_row(p.out, s.b, s.h[i], s.l[i], p.V, rows + i * step);
    if (p.rest.data) write_rest(p, s, i, rows + i * step);
    int64_t place = (s.b * p.H + s.h[i]) * p.L + s.l[i];
    float sum = softmax.sum[i / W][i % W], top = softmax.top[i / W][i % W];
    bool blind = is_blind[i / W][i % W];
    p.lse[place] = blind ? -INF : top * LN_2 + __builtin_logf(sum);
    if (!p.state) continue;
    p.state[place] = blind ? -INF : sum != sum ? sum : top;  // -inf is for rows that see nothing alone
    p.state[p.B * p.H * p.L + place] = blind ? 0 : __builtin_log2f(sum);
  }
  return !any(bad);
}

// One block of rows of one head over the keys of one part.
static bool forward(const Problem& p, int64_t b, int64_t head, int64_t row_block, int64_t part, void* memory) {
  Room room(memory);
  ForwardRoom at(p, room);
  bool few = is_few(p);
  int64_t first_row = row_block * ROWS_AT_ONCE, rows = p.G * p.L - first_row;
  int strips = int(rows < ROWS_AT_ONCE ? (rows + LANES - 1) / LANES : STRIPS);
  for (int i = 0; i < strips; i++) {
    Strip& s = at.strips[i];
    open_strip(p, b, head, first_row + i * LANES, s);
    pack_queries(p, s, few, at.q + i * at.q_size, at.rows);
    for (int j = 0; j < N; j++) at.softmaxes[i].top[j] = all(-INF), at.softmaxes[i].sum[j] = Floats{};
    clear(at.out + i * at.out_size, size_t(at.out_size) * sizeof(float));
  }

  int64_t block = p.parts > 1 ? part * PART_BLOCKS : 0;
  int64_t last_block = p.parts > 1 ? block + PART_BLOCKS : key_blocks(p);
  for (; block < last_block && block < key_blocks(p); block++) {
    Cells cells[STRIPS];
    uint32_t some = look_all(p, at.strips, strips, block, cells);
    if (!some) continue;
    int64_t first = block * KEY_BLOCK, keys = keys_in(p, block);
    Rows k = read_keys(p, p.k, b, head, first, keys, some, p.D, few, at.keys);
    Rows v = read_keys(p, p.v, b, head, first, keys, some, p.V, few, at.values);
    for (int i = 0; i < strips; i++) {
      const Strip& s = at.strips[i];
      uint32_t own = cells[i].some;
      if (!own) continue;
      float *q = at.q + i * at.q_size, *out = at.out + i * at.out_size;
      for (Run run = next_run(own, 0); run.cells; run = next_run(own, run.first + run.cells)) {
        make_scores(p, s, few, q, k, block, run, cells[i], at.scores + run.first * CELL * LANES, LANES, nullptr);
      }
      Floats shrink[N];
      if (weigh(p, s, at.softmaxes[i], own, block, keys, at.scores, shrink)) {
        if (few)
          shrink_rows(p, s.count, (const float*)shrink, out);
        else
          for (int64_t c = 0; c < p.V; c++)
            for (int j = 0; j < N; j++) store(out + c * LANES + j * W, load(out + c * LANES + j * W) * shrink[j]);
      }
      for (Run run = next_run(own, 0); run.cells; run = next_run(own, run.first + run.cells)) {
        int64_t start = run.first * CELL, n = keys_of(run, keys);
        by_pieces(v, start, n, [&](const float* values, int64_t done, int64_t count) {
          const float* weights = at.scores + (start + done) * LANES;
          if (few)
            mix(p, s.count, weights, values, v.step, count, out);
          else
            product<Along::rows, Into::sum>(p.V, values, v.step, weights, LANES, out, LANES, count);
        });
      }
    }
  }
  bool good = true;
  for (int i = 0; i < strips; i++) {
    if (p.parts > 1)
      keep_part(p, at.strips[i], part, (const float*)at.softmaxes[i].top, (const float*)at.softmaxes[i].sum,
                at.out + i * at.out_size, few, at.rows);
    else
      good &= finish(p, at.strips[i], at.softmaxes[i], at.out + i * at.out_size, few, at.rows);
  }
  return good;
}

// Put the parts of a head's keys together, in their order.
static bool combine(const Problem& p, int64_t b, int64_t head, void* memory) {
  Room room(memory);
  Strip& s = *room.take<Strip>(1);
  Softmax softmax;
  int64_t v = padded(p.V), rows = p.G * p.L;
  float* out = room.take(LANES * v);
  bool good = true;
  for (int64_t first = 0; first < rows; first += LANES) {
    open_strip(p, b, head, first, s);
    float *top = (float*)softmax.top, *sum = (float*)softmax.sum;
    for (int i = 0; i < LANES; i++) top[i] = -INF, sum[i] = 0;
    for (int i = 0; i < s.count; i++) {
      for (int64_t part = 0; part < p.parts; part++) {
        float here = part_of(p, b, head, part, first + i)[0];
        top[i] = here > top[i] ? here : top[i];
      }
      float base = top[i] == -INF ? 0 : top[i], *row = out + i * v;
      clear(row, size_t(v) * sizeof(float));
      for (int64_t part = 0; part < p.parts; part++) {
        const float* found = part_of(p, b, head, part, first + i);
        float factor = power(all(found[0] - base))[0];
        sum[i] += factor * found[1];
        for (int64_t c = 0; c < p.V; c++) row[c] += factor * found[2 + c];
      }
    }
    good &= finish(p, s, softmax, out, true, nullptr);
  }
  return good;
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
