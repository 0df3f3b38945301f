// Statistics of the weights, gathered while the weights of a strip are in registers: of each query their entropy and how
// many keys it may see, of each key what it receives and how many queries may see it. Weights are made as in weights.h.
#pragma once

#include "weights.h"

namespace multihead {
namespace MULTIHEAD_ISA {

// The queries of one part of one query head. What it adds to keys is its own: parts are put together afterwards.
static void statistics(const Problem& p, int64_t b, int64_t h, int64_t part, void* memory) {
  Room room(memory);
  WeightsRoom at(p, room);
  Strip& s = *at.strip;
  bool few = is_few(p);
  Problem own = p;  // query heads one by one: what a key receives is told of each
  own.K = p.H, own.G = 1;
  int64_t each = rows_of_part(p), last = (part + 1) * each < p.L ? (part + 1) * each : p.L;
  int64_t place = ((b * p.H + h) * p.parts + part) * p.S;
  float* received = p.received ? p.received + place : nullptr;
  float* seen_by = p.seen_by ? p.seen_by + place : nullptr;
  if (received) clear(received, size_t(p.S) * sizeof(float));
  if (seen_by) clear(seen_by, size_t(p.S) * sizeof(float));
  for (int64_t row = part * each; row < last; row += LANES) {
    open_strip(own, b, h, row, s);
    pack_queries(own, s, few, at.q, at.rows);
    alignas(64) float top[LANES], log_sum[LANES], counts[LANES];
    for (int i = 0; i < LANES; i++) {
      int64_t line = (b * p.H + h) * p.L + s.l[i];
      bool blind = p.state[line] == -INF;
      top[i] = blind ? 0 : p.state[line];
      log_sum[i] = blind ? 0 : p.state[p.B * p.H * p.L + line];
      counts[i] = blind || i >= s.count ? 0 : 1;
    }
    Floats entropy[N] = {}, visible[N] = {};
    for (int64_t block = 0; block < key_blocks(p); block++) {
      Cells cells = look(own, s, block);
      if (!cells.some) continue;
      int64_t first = block * KEY_BLOCK, keys = keys_in(p, block);
      Rows k = read_keys(p, p.k, b, h / p.G, first, keys, cells.some, p.D, few, at.keys);
      Floats of_block[N] = {};  // a sum of sums keeps what one long sum would lose
      for (Run run = next_run(cells.some, 0); run.cells; run = next_run(cells.some, run.first + run.cells)) {
        int64_t start = run.first * CELL, n = keys_of(run, keys);
        make_scores(own, s, few, at.q, k, block, run, cells, at.scores, LANES, nullptr);
        for (int64_t i = 0; i < n; i++) {
          Floats sum = {}, number = {};
          for (int j = 0; j < N; j++) {
            Floats score = load(at.scores + i * LANES + j * W), one = load(counts + j * W);
            // Below 2^-127 a weight is 0, and so is what it adds to the entropy.
            Floats log_weight = larger(all(-127.0f), (score - load(top + j * W)) - load(log_sum + j * W));
            Floats weight = power(log_weight) * one;
            Floats shown = (Floats)((score != -INF) & (Ints)one);
            of_block[j] -= weight * log_weight;
            visible[j] += shown;
            sum += weight, number += shown;
          }
          if (received) received[first + start + i] += sum_of(sum);
          if (seen_by) seen_by[first + start + i] += sum_of(number);
        }
      }
      for (int j = 0; j < N; j++) entropy[j] += of_block[j];
    }
    for (int i = 0; i < s.count; i++) {
      int64_t line = (b * p.H + h) * p.L + s.l[i];
      if (p.entropy) p.entropy[line] = entropy[i / W][i % W] * LN_2;
      if (p.visible_keys) p.visible_keys[line] = visible[i / W][i % W];
    }
  }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
