// The backward pass. Nothing of the L x S plane was kept: scores and weights are made again, block by block.
//
// With s the scores (natural units), lse = log sum exp s, P = exp(s - lse) the weights, R what dropout multiplies them by
// (0 or 1 / (1 - p)), out = (R P) V, and a loss whose gradients by out and lse are dO and dlse:
//
//   dV = (R P)^T dO
//   d(R P) = dO V^T
//   dP = R (dO V^T)
//   ds = P (dP - rowsum(P dP)) + P dlse            softmax: d s_j / d p_i = p_i (1[i = j] - p_j);  d lse / d s_j = p_j
//
// rowsum(P dP) = rowsum((R P) (dO V^T)) = rowsum(dO out), which needs no row of weights. So with
//
//   delta = rowsum(dO out) - dlse:     ds = P (R (dO V^T) - delta)
//   d bias = ds
//   d(q k) = scale ds softcap'(q k)     softcap' = 1 - tanh^2
//   dQ = d(q k) K,   dK = d(q k)^T Q
//
// (Dao et al., "FlashAttention", 2022, appendix B.) A block of rows meets the blocks of keys it sees. Five products: the
// scores and dO V^T, as [keys][rows], whose rows are strips of lanes; from them dQ^T, likewise; and dK, dV, whose lanes
// run along D and V, over all strips of the row block at once.
#pragma once

#include "dropout.h"
#include "forward.h"
#include "kernel.h"
#include "mask.h"
#include "product.h"
#include "scores.h"
#include "storage.h"

namespace multihead {
namespace MULTIHEAD_ISA {

struct BackwardRoom {
  Strip* strips;
  float *q, *grad_out;              // of each strip, [D][LANES] and [V][LANES]: for products with keys and values
  float *q_panels, *grad_panels;    // of the row block, [panel of LANES columns][rows][LANES]: for dK and dV
  float* grad_q;                    // of each strip, [D][LANES]
  float *top, *log_sum, *delta;     // of each row
  float *weights, *grad_scores;     // [KEY_BLOCK][rows]
  float *slope, *keys, *values, *rows, *one_row;
  float *sum_k, *sum_v;             // dK and dV of the head, where they can't be summed in place
  int64_t q_size, v_size, q_panels_count, v_panels_count, row_count;

  BackwardRoom(const Problem& p, Room& room) {
    int64_t used = (p.G * p.L + LANES - 1) / LANES;
    used = used < STRIPS ? used : STRIPS;
    row_count = used * LANES;
    q_panels_count = (p.D + LANES - 1) / LANES, v_panels_count = (p.V + LANES - 1) / LANES;
    q_size = padded(p.D) * LANES, v_size = p.V * LANES;
    strips = room.take<Strip>(used);
    q = room.take(used * q_size), grad_out = room.take(used * v_size);
    q_panels = room.take(q_panels_count * row_count * LANES), grad_panels = room.take(v_panels_count * row_count * LANES);
    grad_q = room.take(used * q_size);
    top = room.take(row_count), log_sum = room.take(row_count), delta = room.take(row_count);
    int64_t block = p.S < KEY_BLOCK ? p.S : KEY_BLOCK;
    weights = room.take(block * row_count), grad_scores = room.take(block * row_count);
    slope = room.take(p.softcap > 0 ? block * row_count : 0);
    keys = room.take(block * padded(p.D)), values = room.take(block * padded(p.V));
    int64_t wide = p.D > p.V ? p.D : p.V;
    rows = room.take((LANES + 1) * wide), one_row = room.take(p.V);
    sum_k = room.take(!p.grad_k.data || is_plain(p.grad_k) ? 0 : p.S * p.D);
    sum_v = room.take(!p.grad_v.data || is_plain(p.grad_v) ? 0 : p.S * p.V);
  }
};

INLINE float dot(const float* a, const float* b, int64_t n) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) sums += load(a + i) * load(b + i);
  float sum = sum_of(sums);
  for (; i < n; i++) sum += a[i] * b[i];
  return sum;
}

// A row as columns of panels [panel][rows][LANES], the last one filled up with zeros.
static void to_panels(const float* row, int64_t width, float factor, float* panels, int64_t row_count, int64_t at) {
  for (int64_t c = 0; c < width; c += LANES) {
    float* to = panels + (c / LANES * row_count + at) * LANES;
    int64_t n = width - c < LANES ? width - c : LANES;
    for (int64_t i = 0; i < n; i++) to[i] = row[c + i] * factor;
    for (int64_t i = n; i < LANES; i++) to[i] = 0;
  }
}

// All that is known of a strip's rows before keys are looked at. Rows that see nothing have no weights and take no part:
// zeros stand in for what their q and dO hold.
static void open_rows(const Problem& p, const Strip& s, int index, bool few, const BackwardRoom& at) {
  int64_t wide = p.D > p.V ? p.D : p.V;
  float *zeros = at.rows, *room = at.rows + wide;
  clear(zeros, size_t(wide) * sizeof(float));
  const float *q_rows[LANES], *grad_rows[LANES];
  bool takes_part[LANES];
  for (int i = 0; i < LANES; i++) {
    int64_t row = index * LANES + i, place = (s.b * p.H + s.h[i]) * p.L + s.l[i];
    takes_part[i] = i < s.count && p.state[place] != -INF;
    // Lanes without a row repeat the mask and the bias of the last one: next to this all their scores are nothing.
    at.top[row] = takes_part[i] ? p.state[place] : i < s.count ? 0 : __FLT_MAX__;
    at.log_sum[row] = takes_part[i] ? p.state[p.B * p.H * p.L + place] : 0;
    at.delta[row] = 0;
    grad_rows[i] = zeros;
    if (!takes_part[i]) continue;
    grad_rows[i] = read_row(p.grad_out, s.b, s.h[i], s.l[i], p.V, room + i * wide);
    at.delta[row] = dot(grad_rows[i], read_row(p.out, s.b, s.h[i], s.l[i], p.V, at.one_row), p.V);
    if (p.rest.data) at.delta[row] += dot(grad_rows[i], read_row(p.rest, s.b, s.h[i], s.l[i], p.V, at.one_row), p.V);
    if (p.grad_lse) at.delta[row] -= p.grad_lse[place];
  }
  transpose_in(grad_rows, p.V, 1.0f, at.grad_out + index * at.v_size);
  for (int i = 0; i < LANES; i++) to_panels(grad_rows[i], p.V, 1.0f, at.grad_panels, at.row_count, index * LANES + i);
  for (int i = 0; i < LANES; i++)  // in the same room: the rows of dO are packed by now
    q_rows[i] = takes_part[i] ? read_row(p.q, s.b, s.h[i], s.l[i], p.D, room + i * wide) : zeros;
  if (few)
    copy_queries(p, s.count, q_rows, at.q);
  else
    transpose_in(q_rows, p.D, query_factor(p), at.q + index * at.q_size);
  for (int i = 0; i < LANES; i++) to_panels(q_rows[i], p.D, p.scale, at.q_panels, at.row_count, index * LANES + i);
  clear(at.grad_q + index * at.q_size, size_t(at.q_size) * sizeof(float));
}

// From scores to weights, and from dO V^T to the gradient by the scores: both in place, for n keys of one strip.
static __attribute__((noinline)) void weights_and_gradient(const Problem& p, const Strip& s, int64_t first, int64_t n,
                                                           float* weights, float* grad, int64_t ld, const float* top,
                                                           const float* log_sum, const float* delta) {
  for (int64_t k = 0; k < n; k += 4) {
    Ints kept[4][N];
    if (p.has_dropout) draw(p, s, first + k, kept);
    for (int64_t i = 0; i < 4 && k + i < n; i++)
      for (int j = 0; j < N; j++) {
        float *w = weights + (k + i) * ld + j * W, *g = grad + (k + i) * ld + j * W;
        Floats weight = power((load(w) - load(top + j * W)) - load(log_sum + j * W)), from_out = load(g);
        if (p.has_dropout) {
          from_out = (Floats)((Ints)(from_out * p.keep_scale) & kept[i][j]);
          store(w, (Floats)((Ints)(weight * p.keep_scale) & kept[i][j]));
        } else {
          store(w, weight);
        }
        // Where there is no weight there is no gradient, whatever a hidden value holds.
        store(g, weight == 0.0f ? Floats{} : weight * (from_out - load(delta + j * W)));
      }
  }
}

template <typename Number>
static void add_to(Number* sums, const Problem& p, const Strip& s, int64_t first, int64_t n, const float* grad,
                   int64_t ld) {
  const int64_t* stride = p.grad_bias_stride;
  for (int i = 0; i < s.count; i++) {
    Number* to = sums + s.b * stride[0] + s.h[i] * stride[1] + s.l[i] * stride[2] + first * stride[3];
    for (int64_t k = 0; k < n; k++) to[k * stride[3]] += grad[k * ld + i];
  }
}

static void add_to_bias(const Problem& p, const Strip& s, int64_t first, int64_t n, const float* grad, int64_t ld) {
  if (p.grad_bias_sums)
    add_to(p.grad_bias_sums, p, s, first, n, grad, ld);
  else
    add_to(p.grad_bias, p, s, first, n, grad, ld);
}

// to[key][column] += sum over rows of weights[key][row] * panels[row][column].
static void add_to_keys(const float* weights, int64_t row_count, const float* panels, int64_t panel_count, int64_t width,
                        int64_t first_row, int64_t rows, int64_t keys, float* to, int64_t step) {
  for (int64_t panel = 0; panel < panel_count; panel++) {
    const float* b = panels + (panel * row_count + first_row) * LANES;
    int64_t columns = width - panel * LANES;
    float* c = to + panel * LANES;
    if (columns >= LANES) {
      product<Along::depth, Into::sum>(keys, weights + first_row, row_count, b, LANES, c, step, rows);
      continue;
    }
    for (int64_t key = 0; key < keys; key += M) {  // the last columns, by way of a tile that has room for all lanes
      float tile[M * LANES];
      int64_t n = keys - key < M ? keys - key : M;
      product<Along::depth, Into::fresh>(n, weights + key * row_count + first_row, row_count, b, LANES, tile, LANES, rows);
      for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < columns; j++) c[(key + i) * step + j] += tile[i * LANES + j];
    }
  }
}

// dK and dV of a block of keys. Cells that the same strips see go together; strips between them that see nothing of
// a cell have zeros there.
static void add_keys_and_values(const Problem& p, const BackwardRoom& at, const Cells* cells, int strips, int64_t first,
                                int64_t keys, float* grad_k, int64_t k_step, float* grad_v, int64_t v_step) {
  int low[CELLS], high[CELLS], count = int((keys + CELL - 1) / CELL);
  for (int c = 0; c < count; c++) {
    low[c] = strips, high[c] = -1;
    for (int i = 0; i < strips; i++)
      if (cells[i].some >> c & 1) low[c] = low[c] < i ? low[c] : i, high[c] = i;
    for (int i = low[c] + 1; i < high[c]; i++) {
      if (cells[i].some >> c & 1) continue;
      int64_t n = keys - c * CELL < CELL ? keys - c * CELL : CELL;
      for (int64_t k = c * CELL; k < c * CELL + n; k++) {
        clear(at.weights + k * at.row_count + i * LANES, LANES * sizeof(float));
        clear(at.grad_scores + k * at.row_count + i * LANES, LANES * sizeof(float));
      }
    }
  }
  for (int c = 0; c < count;) {
    int end = c + 1;
    while (end < count && low[end] == low[c] && high[end] == high[c]) end++;
    if (high[c] >= 0) {
      int64_t start = c * CELL, n = keys_of({c, end - c}, keys);
      int64_t row = low[c] * LANES, rows = (high[c] + 1 - low[c]) * LANES;
      const float *weights = at.weights + start * at.row_count, *grad = at.grad_scores + start * at.row_count;
      add_to_keys(weights, at.row_count, at.grad_panels, at.v_panels_count, p.V, row, rows, n,
                  grad_v + (first + start) * v_step, v_step);
      add_to_keys(grad, at.row_count, at.q_panels, at.q_panels_count, p.D, row, rows, n,
                  grad_k + (first + start) * k_step, k_step);
    }
    c = end;
  }
}

INLINE bool is_finite_row(const float* row, int64_t n) {
  Ints bad = {};
  int64_t c = 0;
  for (; c + W <= n; c += W) bad |= not_finite(load(row + c));
  bool found = any(bad);
  for (; c < n; c++) found |= (to_bits(row[c]) & 0x7f800000) == 0x7f800000;
  return !found;
}

// Rows and keys of one head, both given as blocks. dK and dV of these keys are made from these rows alone, and dQ of these
// rows from these keys alone, so what is wanted decides what has to be given whole.
static bool backward(const Problem& p, int64_t b, int64_t head, int64_t first_row_block, int64_t last_row_block,
                     int64_t first_key_block, int64_t last_key_block, unsigned wanted, void* memory) {
  Room room(memory);
  BackwardRoom at(p, room);
  bool few = is_few(p), good = true;

  float *grad_k = at.sum_k, *grad_v = at.sum_v;
  int64_t k_step = p.D, v_step = p.V;
  if (is_plain(p.grad_k)) grad_k = (float*)p.grad_k.data + offset_of(p.grad_k, b, head, 0), k_step = p.grad_k.stride[2];
  if (is_plain(p.grad_v)) grad_v = (float*)p.grad_v.data + offset_of(p.grad_v, b, head, 0), v_step = p.grad_v.stride[2];
  int64_t first_key = first_key_block * KEY_BLOCK, last_key = last_key_block * KEY_BLOCK;
  last_key = last_key < p.S ? last_key : p.S;
  if (wanted & GRAD_KV)
    for (int64_t k = first_key; k < last_key; k++) {
      clear(grad_k + k * k_step, size_t(p.D) * sizeof(float));
      clear(grad_v + k * v_step, size_t(p.V) * sizeof(float));
    }

  for (int64_t row_block = first_row_block; row_block < last_row_block; row_block++) {
    int64_t first_row = row_block * ROWS_AT_ONCE, rows = p.G * p.L - first_row;
    int strips = int(rows < ROWS_AT_ONCE ? (rows + LANES - 1) / LANES : STRIPS);
    bool is_open = false;
    for (int i = 0; i < strips; i++) open_strip(p, b, head, first_row + i * LANES, at.strips[i]);
    for (int64_t block = first_key_block; block < last_key_block; block++) {
      Cells cells[STRIPS];
      uint32_t some = look_all(p, at.strips, strips, block, cells);
      if (!some) continue;
      if (!is_open)
        for (int i = 0; i < strips; i++) open_rows(p, at.strips[i], i, few, at);
      is_open = true;
      int64_t first = block * KEY_BLOCK, keys = keys_in(p, block);
      Rows k = read_keys(p, p.k, b, head, first, keys, some, p.D, few, at.keys);
      Rows v = read_keys(p, p.v, b, head, first, keys, some, p.V, false, at.values);
      for (int i = 0; i < strips; i++) {
        const Strip& s = at.strips[i];
        uint32_t own = cells[i].some;
        float *q = at.q + i * at.q_size, *grad_out = at.grad_out + i * at.v_size, *grad_q = at.grad_q + i * at.q_size;
        for (Run run = next_run(own, 0); run.cells; run = next_run(own, run.first + run.cells)) {
          int64_t start = run.first * CELL, n = keys_of(run, keys), place = start * at.row_count + i * LANES;
          float *weights = at.weights + place, *grad = at.grad_scores + place;
          float* slope = p.softcap > 0 ? at.slope + place : nullptr;
          make_scores(p, s, few, q, k, block, run, cells[i], weights, at.row_count, slope);
          product<Along::depth, Into::fresh>(n, v.data + start * v.step, v.step, grad_out, LANES, grad, at.row_count, p.V);
          weights_and_gradient(p, s, first + start, n, weights, grad, at.row_count, at.top + i * LANES,
                               at.log_sum + i * LANES, at.delta + i * LANES);
          if (wanted & GRAD_BIAS) add_to_bias(p, s, first + start, n, grad, at.row_count);
          if (slope)
            for (int64_t key = 0; key < n; key++)
              for (int j = 0; j < N; j++) {
                int64_t one = key * at.row_count + j * W;
                store(grad + one, load(grad + one) * load(slope + one));
              }
          if (wanted & GRAD_Q)
            product<Along::rows, Into::sum>(p.D, k.data + start * k.step, k.step, grad, at.row_count, grad_q, LANES, n);
        }
      }
      if (wanted & GRAD_KV) add_keys_and_values(p, at, cells, strips, first, keys, grad_k, k_step, grad_v, v_step);
    }
    if (!(wanted & GRAD_Q)) continue;
    for (int i = 0; i < strips; i++) {
      const Strip& s = at.strips[i];
      float* grad_q = at.grad_q + i * at.q_size;
      if (!is_open) clear(grad_q, size_t(at.q_size) * sizeof(float));
      Ints bad = {}, takes_part[N];
      for (int j = 0; j < LANES; j++) {
        float top = p.state[(b * p.H + s.h[j]) * p.L + s.l[j]];
        takes_part[j / W][j % W] = -int32_t(top != -INF);
      }
      for (int64_t c = 0; c < p.D * LANES; c += W) {  // rows that see nothing are zeros, whatever the keys hold
        Floats x = (Floats)((Ints)(load(grad_q + c) * p.scale) & takes_part[c / W % N]);
        bad |= not_finite(x);
        store(grad_q + c, x);
      }
      good &= !any(bad);
      turn_rows(grad_q, p.grad_q, s, p.D, at.rows);
      for (int r = 0; r < s.count && !is_plain(p.grad_q); r++)
        write_row(p.grad_q, b, s.h[r], s.l[r], p.D, at.rows + r * p.D);
    }
  }
  if (wanted & GRAD_KV)
    for (int64_t key = first_key; key < last_key; key++) {
      const float *k = grad_k + key * k_step, *v = grad_v + key * v_step;
      good &= is_finite_row(k, p.D) && is_finite_row(v, p.V);
      if (!is_plain(p.grad_k)) write_row(p.grad_k, b, head, key, p.D, k);
      if (!is_plain(p.grad_v)) write_row(p.grad_v, b, head, key, p.V, v);
    }
  return good;
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
