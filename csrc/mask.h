// Who sees whom: first for cells of keys, by ranges, so that what nobody sees is never computed; then, for the cells
// that are seen in part, pair by pair.
//
// A mask is a few steps in postfix order. Each kind answers for a strip of LANES rows; `both`, `either` and `invert`
// join the answers. One answer about a block of keys is two words of CELLS bits: which cells hold a visible pair
// (perhaps), and in which all pairs are visible (certainly).
#pragma once

#include "kernel.h"
#include "storage.h"
#include "vector.h"

namespace multihead {
namespace MULTIHEAD_ISA {

constexpr uint32_t ALL_CELLS = (1u << CELLS) - 1;

// LANES rows of a head, and what masks and biases want to know of them. A row is a query and one of the G heads that
// share the keys: row = l * G + g, so that a strip covers few queries and their ranges stay narrow. Lanes beyond the
// last row repeat it.
struct Strip {
  int64_t b, head, first;
  int count;
  int64_t l[LANES], h[LANES];
  alignas(64) uint32_t counter[2][LANES];  // of the generator: l and b * H + h
  alignas(64) int32_t position[LANES];
  alignas(64) double wide_position[LANES];
  alignas(64) int64_t huge_position[LANES];
  double low, high;  // of the positions
  int64_t bias[LANES];
  bool bias_is_one;  // all rows have one bias
  alignas(64) float slope[LANES];
  struct {
    alignas(64) int32_t ids[LANES];
    double low, high;
    int64_t row[LANES];  // of a table
    bool is_one;
  } step[MAX_STEPS];
};

static void find_rows(const int64_t stride[4], const Strip& s, int64_t* row, bool* is_one) {
  *is_one = true;
  for (int i = 0; i < LANES; i++) {
    row[i] = s.b * stride[0] + s.h[i] * stride[1] + s.l[i] * stride[2];
    *is_one &= row[i] == row[0];
  }
}

static void open_strip(const Problem& p, int64_t b, int64_t head, int64_t first, Strip& s) {
  int64_t rows = p.G * p.L;
  s.b = b, s.head = head, s.first = first;
  s.count = int(rows - first < LANES ? rows - first : LANES);
  for (int i = 0; i < LANES; i++) {
    int64_t row = first + (i < s.count ? i : s.count - 1);
    s.l[i] = p.G == 1 ? row : row / p.G;
    s.h[i] = p.G == 1 ? head : head * p.G + row % p.G;
  }
  if (p.has_dropout)
    for (int i = 0; i < LANES; i++) {
      s.counter[0][i] = uint32_t(s.l[i]);
      s.counter[1][i] = uint32_t(b * p.H + s.h[i]);
    }
  if (p.bias.data) find_rows(p.bias.stride, s, s.bias, &s.bias_is_one);
  if (p.slopes)
    for (int i = 0; i < LANES; i++) s.slope[i] = -LOG2_E * p.slopes[s.h[i]];
  if (!p.mask_steps && !p.slopes) return;

  const Positions& at = p.positions;
  if (at.q) {
    s.low = __builtin_inf(), s.high = -__builtin_inf();
    for (int i = 0; i < LANES; i++) {
      int64_t place = b * at.q_stride + s.l[i];
      double x = __builtin_nan("");
      if (at.kind == PositionKind::narrow) x = s.position[i] = ((const int32_t*)at.q)[place];
      if (at.kind == PositionKind::wide) x = s.wide_position[i] = ((const double*)at.q)[place];
      if (at.kind == PositionKind::huge) s.huge_position[i] = ((const int64_t*)at.q)[place];
      s.low = x < s.low ? x : s.low;
      s.high = x > s.high ? x : s.high;
      if (x != x) s.low = -__builtin_inf(), s.high = __builtin_inf();  // no number: the ranges promise nothing
    }
  }
  for (int n = 0; n < p.mask_steps; n++) {
    const MaskStep& m = p.mask[n];
    auto& own = s.step[n];
    if (m.kind == MaskKind::dense) find_rows(m.stride, s, own.row, &own.is_one);
    if (m.kind != MaskKind::documents) continue;
    own.low = __builtin_inf(), own.high = -__builtin_inf();
    for (int i = 0; i < LANES; i++) {
      own.ids[i] = m.q_ids[b * m.q_stride + s.l[i]];
      own.low = own.ids[i] < own.low ? own.ids[i] : own.low;
      own.high = own.ids[i] > own.high ? own.ids[i] : own.high;
    }
  }
}

struct Cells {
  uint32_t some, every;
};

// Ask about a block, and only if it is neither hidden nor visible as a whole, about each of its cells. `ask(low, high)`
// answers for all keys whose values lie in a range: 0 none, 1 some, 2 every.
template <typename Ask>
INLINE Cells by_ranges(const Ranges& ranges, int64_t b, int64_t block, int cells, Ask ask) {
  int64_t place = b * ranges.blocks + block;
  int whole = ask(ranges.block_low[place], ranges.block_high[place]);
  if (whole != 1) return {whole ? ALL_CELLS : 0, whole ? ALL_CELLS : 0};
  Cells found = {0, 0};
  const double* low = ranges.cell_low + b * ranges.cells + block * CELLS;
  const double* high = ranges.cell_high + b * ranges.cells + block * CELLS;
  for (int c = 0; c < cells; c++) {
    int answer = ask(low[c], high[c]);
    found.some |= uint32_t(answer > 0) << c;
    found.every |= uint32_t(answer > 1) << c;
  }
  return found;
}

// The bits of the cells of a block that lie before key n of the whole head.
INLINE Cells before(int64_t n, int64_t block, int cells) {
  Cells found = {0, 0};
  for (int c = 0; c < cells; c++) {
    int64_t first = block * KEY_BLOCK + c * CELL;
    found.some |= uint32_t(first < n) << c;
    found.every |= uint32_t(first + CELL - 1 < n) << c;
  }
  return found;
}

static Cells in_table(const uint8_t* table, int64_t step, int64_t keys) {  // one row of a block
  Cells found = {0, 0};
  for (int64_t c = 0; c * CELL < keys; c++) {
    uint8_t some = 0, every = 1;
    for (int64_t k = c * CELL; k < keys && k < (c + 1) * CELL; k++) {
      uint8_t value = table[k * step] != 0;
      some |= value, every &= value;
    }
    found.some |= uint32_t(some) << c;
    found.every |= uint32_t(every) << c;
  }
  return found;
}

static Cells in_table_row(const uint8_t* table, int64_t step, int64_t keys) {
  if (step != 1 || keys != KEY_BLOCK) return in_table(table, step, keys);
  Cells found = {0, 0};
  for (int c = 0; c < CELLS; c++) {
    uint64_t word;
    memcpy(&word, table + c * CELL, CELL);
    found.some |= uint32_t(word != 0) << c;
    // Bools are bytes of 0 or 1.
    found.every |= uint32_t(word == 0x0101010101010101u) << c;
  }
  return found;
}

INLINE double distance(const Positions& at, double q, double k) { return at.rounds ? double(float(q - k)) : q - k; }

// As PyTorch has it: beyond 64 bits it wraps around.
INLINE int64_t huge_distance(int64_t q, int64_t k) { return int64_t(uint64_t(q) - uint64_t(k)); }

// The distance of a lane to a key where positions are not narrow.
INLINE double far_distance(const Positions& at, const Strip& s, int lane, int64_t key) {
  if (at.kind == PositionKind::wide) return distance(at, s.wide_position[lane], ((const double*)at.k)[key]);
  return double(huge_distance(s.huge_position[lane], ((const int64_t*)at.k)[key]));
}

static Cells look_by_kind(const Problem& p, const Strip& s, int n, int64_t block, int64_t keys) {
  const MaskStep& m = p.mask[n];
  const Positions& at = p.positions;
  int cells = int((keys + CELL - 1) / CELL);
  switch (m.kind) {
    case MaskKind::window: {
      double left = m.left == NO_BOUND ? INF : double(m.left), right = m.right == NO_BOUND ? INF : double(m.right);
      return by_ranges(at.k_ranges, s.b, block, cells, [&](double low, double high) {
        double near = distance(at, s.low, high), far = distance(at, s.high, low);
        if (near > left || far < -right) return 0;
        return far <= left && near >= -right ? 2 : 1;
      });
    }
    case MaskKind::prefix: {
      double end = double(m.numbers[s.b * m.stride[0]]);
      return by_ranges(at.k_ranges, s.b, block, cells,
                       [&](double low, double high) { return low >= end ? 0 : high < end ? 2 : 1; });
    }
    case MaskKind::documents: {
      double first = s.step[n].low, last = s.step[n].high;
      return by_ranges(m.k_ranges, s.b, block, cells, [&](double low, double high) {
        if (high < first || low > last) return 0;
        return first == last && low == high && low == first ? 2 : 1;
      });
    }
    case MaskKind::lengths:
      return before(m.numbers[s.b * m.stride[0]], block, cells);
    case MaskKind::padding:
      return in_table_row(m.table + s.b * m.stride[0] + block * KEY_BLOCK * m.stride[3], m.stride[3], keys);
    case MaskKind::dense: {
      const uint8_t* table = m.table + block * KEY_BLOCK * m.stride[3];
      Cells found = in_table_row(table + s.step[n].row[0], m.stride[3], keys);
      if (s.step[n].is_one) return found;
      for (int i = 1; i < s.count; i++) {
        Cells next = in_table_row(table + s.step[n].row[i], m.stride[3], keys);
        found.some |= next.some, found.every &= next.every;
      }
      return found;
    }
    default:
      return {ALL_CELLS, 0};
  }
}

// Which cells of a block of keys a strip sees.
static Cells look(const Problem& p, const Strip& s, int64_t block) {
  int64_t keys = keys_in(p, block);
  uint32_t there = ALL_CELLS >> (CELLS - (keys + CELL - 1) / CELL);
  if (!p.mask_steps) return {there, there};
  Cells stack[MAX_DEPTH];
  int top = -1;
  for (int n = 0; n < p.mask_steps; n++) {
    switch (p.mask[n].kind) {
      case MaskKind::both:
        top--;
        stack[top] = {stack[top].some & stack[top + 1].some, stack[top].every & stack[top + 1].every};
        break;
      case MaskKind::either:
        top--;
        stack[top] = {stack[top].some | stack[top + 1].some, stack[top].every | stack[top + 1].every};
        break;
      case MaskKind::invert:
        stack[top] = {~stack[top].every, ~stack[top].some};
        break;
      default:
        stack[++top] = look_by_kind(p, s, n, block, keys);
    }
  }
  return {stack[0].some & there, stack[0].every & there};
}

// The same of several strips. Returns the cells that some of them see.
static uint32_t look_all(const Problem& p, const Strip* strips, int count, int64_t block, Cells* cells) {
  uint32_t some = 0;
  for (int i = 0; i < count; i++) cells[i] = look(p, strips[i], block), some |= cells[i].some;
  return some;
}

// A bound of a window in 32 bits: one beyond all distances says as much as none.
INLINE int32_t narrow_bound(int64_t n) {
  constexpr int64_t FAR = INT32_MAX - 1;
  return int32_t(n < -FAR ? -FAR : n < FAR ? n : FAR);
}

typedef Ints CellAnswer[CELL][N];  // -1 visible, 0 hidden

static void see_by_kind(const Problem& p, const Strip& s, int n, int64_t first, int64_t keys, CellAnswer& answer) {
  const MaskStep& m = p.mask[n];
  const Positions& at = p.positions;
  int64_t k_row = s.b * at.k_stride + first;
  switch (m.kind) {
    case MaskKind::window: {
      if (at.kind != PositionKind::narrow) {
        bool has_left = m.left != NO_BOUND, has_right = m.right != NO_BOUND;  // inf - inf is no distance
        for (int64_t k = 0; k < keys; k++)
          for (int i = 0; i < LANES; i++) {
            bool before, after;  // too far before the query, or after it
            if (at.kind == PositionKind::huge) {
              int64_t d = huge_distance(s.huge_position[i], ((const int64_t*)at.k)[k_row + k]);
              before = !(d <= m.left), after = !(__int128(d) >= -__int128(m.right));
            } else {
              double d = distance(at, s.wide_position[i], ((const double*)at.k)[k_row + k]);
              before = !(d <= double(m.left)), after = !(d >= -double(m.right));  // so that NaN is both
            }
            answer[k][i / W][i % W] = -int32_t(!(has_left && before) && !(has_right && after));
          }
        return;
      }
      const int32_t* k_at = (const int32_t*)at.k + k_row;
      Ints left = all_int(narrow_bound(m.left)), right = all_int(-narrow_bound(m.right));
      for (int64_t k = 0; k < keys; k++)
        for (int j = 0; j < N; j++) {
          Ints d = *(const Ints*)(s.position + j * W) - k_at[k];
          answer[k][j] = (d <= left) & (d >= right);
        }
      return;
    }
    case MaskKind::documents:
      for (int64_t k = 0; k < keys; k++) {
        int32_t id = m.k_ids[s.b * m.k_stride + first + k];
        for (int j = 0; j < N; j++) answer[k][j] = *(const Ints*)(s.step[n].ids + j * W) == id;
      }
      return;
    case MaskKind::dense: {
      const int64_t* row = s.step[n].row;
      const uint8_t* table = m.table + first * m.stride[3];
      for (int64_t k = 0; k < keys; k++, table += m.stride[3]) {
        if (s.step[n].is_one) {
          for (int j = 0; j < N; j++) answer[k][j] = all_int(-int32_t(table[row[0]] != 0));
          continue;
        }
        alignas(64) int32_t one[LANES];
        for (int i = 0; i < LANES; i++) one[i] = -int32_t(table[row[i]] != 0);
        for (int j = 0; j < N; j++) answer[k][j] = *(const Ints*)(one + j * W);
      }
      return;
    }
    default:  // the kinds that speak of keys alone
      for (int64_t k = 0; k < keys; k++) {
        bool is_seen = false;
        if (m.kind == MaskKind::lengths) is_seen = first + k < m.numbers[s.b * m.stride[0]];
        if (m.kind == MaskKind::padding) is_seen = m.table[s.b * m.stride[0] + (first + k) * m.stride[3]] != 0;
        if (m.kind == MaskKind::prefix) {
          int64_t n = m.numbers[s.b * m.stride[0]], key = k_row + k;
          if (at.kind == PositionKind::narrow) is_seen = ((const int32_t*)at.k)[key] < n;
          if (at.kind == PositionKind::wide) is_seen = ((const double*)at.k)[key] < double(n);
          if (at.kind == PositionKind::huge) is_seen = ((const int64_t*)at.k)[key] < n;
        }
        for (int j = 0; j < N; j++) answer[k][j] = all_int(-int32_t(is_seen));
      }
  }
}

// Hide what is hidden in a cell: its scores (keys x ld) become -inf.
static void hide(const Problem& p, const Strip& s, int64_t first, int64_t keys, float* scores, int64_t ld) {
  CellAnswer stack[MAX_DEPTH];
  int top = -1;
  for (int n = 0; n < p.mask_steps; n++) {
    MaskKind kind = p.mask[n].kind;
    if (kind == MaskKind::invert) {
      for (int64_t k = 0; k < keys; k++)
        for (int j = 0; j < N; j++) stack[top][k][j] = ~stack[top][k][j];
    } else if (kind == MaskKind::both || kind == MaskKind::either) {
      top--;
      for (int64_t k = 0; k < keys; k++)
        for (int j = 0; j < N; j++) {
          Ints a = stack[top][k][j], b = stack[top + 1][k][j];
          stack[top][k][j] = kind == MaskKind::both ? a & b : a | b;
        }
    } else {
      see_by_kind(p, s, n, first, keys, stack[++top]);
    }
  }
  for (int64_t k = 0; k < keys; k++)
    for (int j = 0; j < N; j++) {
      float* place = scores + k * ld + j * W;
      store(place, stack[0][k][j] ? load(place) : all(-INF));
    }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
