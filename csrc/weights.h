// The weights themselves, for who wants to look at them: 2^(score - largest) / sum, with the largest score and the sum of
// the forward pass, whose output this leaves as it is. Here the L x S plane is the answer, of each head or their mean.
#pragma once

#include "forward.h"
#include "kernel.h"
#include "mask.h"
#include "product.h"
#include "scores.h"
#include "storage.h"

namespace multihead {
namespace MULTIHEAD_ISA {

struct WeightsRoom {
  Strip* strip;
  float *q, *scores, *turned, *keys, *rows;

  WeightsRoom(const Problem& p, Room& room) {
    int64_t block = p.S < KEY_BLOCK ? p.S : KEY_BLOCK;
    strip = room.take<Strip>(1);
    q = room.take(padded(p.D) * LANES);
    scores = room.take(block * LANES), turned = room.take(block * LANES);
    keys = room.take(block * padded(p.D));
    rows = room.take(LANES * padded(p.D));
  }
};

// All heads' rows of some queries, so that no other item adds to the same mean.
static void weights(const Problem& p, int64_t b, int64_t first_query, int64_t last_query, void* memory) {
  Room room(memory);
  WeightsRoom at(p, room);
  Strip& s = *at.strip;
  bool few = is_few(p);
  float share = p.average ? 1.0f / float(p.H) : 1.0f;
  if (p.average)
    clear(p.weights + (b * p.L + first_query) * p.S, size_t((last_query - first_query) * p.S) * sizeof(float));
  for (int64_t head = 0; head < p.K; head++) {
    for (int64_t row = first_query * p.G; row < last_query * p.G; row += LANES) {
      open_strip(p, b, head, row, s);
      int count = int(last_query * p.G - row < s.count ? last_query * p.G - row : s.count);
      pack_queries(p, s, few, at.q, at.rows);
      alignas(64) float top[LANES], log_sum[LANES], factor[LANES];
      for (int i = 0; i < LANES; i++) {
        int64_t place = (b * p.H + s.h[i]) * p.L + s.l[i];
        bool blind = p.state[place] == -INF;
        top[i] = blind ? 0 : p.state[place];
        log_sum[i] = p.state[p.B * p.H * p.L + place];
        factor[i] = blind ? 0 : share;
      }
      for (int64_t block = 0; block < key_blocks(p); block++) {
        Cells cells = look(p, s, block);
        int64_t first = block * KEY_BLOCK, keys = keys_in(p, block);
        const auto line_of = [&](int i) {
          int64_t line = p.average ? b * p.L + s.l[i] : (b * p.H + s.h[i]) * p.L + s.l[i];
          return p.weights + line * p.S + first;
        };
        if (!p.average && next_run(cells.some, 0).cells * CELL < keys)  // what is hidden is zeros
          for (int i = 0; i < count; i++) clear(line_of(i), size_t(keys) * sizeof(float));
        if (!cells.some) continue;
        Rows k = read_keys(p, p.k, b, head, first, keys, cells.some, p.D, few, at.keys);
        for (Run run = next_run(cells.some, 0); run.cells; run = next_run(cells.some, run.first + run.cells)) {
          int64_t start = run.first * CELL, n = keys_of(run, keys);
          make_scores(p, s, few, at.q, k, block, run, cells, at.scores, LANES, nullptr);
          for (int64_t i = 0; i < n; i++)
            for (int j = 0; j < N; j++) {
              float* place = at.scores + i * LANES + j * W;
              Floats weight = power((load(place) - load(top + j * W)) - load(log_sum + j * W));
              store(place, weight * load(factor + j * W));
            }
          float* lines[LANES];
          for (int i = 0; i < LANES; i++) lines[i] = at.turned + i * n;
          transpose_out(at.scores, n, lines);
          for (int i = 0; i < count; i++) {
            float* to = line_of(i) + start;
            if (!p.average)
              memcpy(to, lines[i], size_t(n) * sizeof(float));
            else
              for (int64_t c = 0; c < n; c++) to[c] += lines[i][c];
          }
        }
      }
    }
  }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
