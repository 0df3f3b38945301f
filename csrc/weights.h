// The weights themselves, for who wants to look at them: exp(score - lse), with the lse of the forward pass, whose output
// this leaves as it is. Here the L x S plane is the answer; either that of each head, or the mean over heads.
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
    q = room.take(p.D * LANES);
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
  bool adjusts = p.softcap > 0 || p.bias.data || p.slopes;
  float share = p.averages ? 1.0f / float(p.H) : 1.0f;
  int64_t heads = p.averages ? 1 : p.H;
  for (int64_t h = 0; h < heads; h++)
    memset(p.weights + ((b * heads + h) * p.L + first_query) * p.S, 0, size_t((last_query - first_query) * p.S) * sizeof(float));
  for (int64_t head = 0; head < p.K; head++) {
    for (int64_t row = first_query * p.G; row < last_query * p.G; row += LANES) {
      open_strip(p, b, head, row, s);
      int count = int(last_query * p.G - row < s.count ? last_query * p.G - row : s.count);
      pack_queries(p.q, s, p.D, query_factor(p), at.q, at.rows);
      alignas(64) float base[LANES], factor[LANES];
      for (int i = 0; i < LANES; i++) {
        float lse = p.lse[(b * p.H + s.h[i]) * p.L + s.l[i]];
        base[i] = lse == -INF ? 0 : lse * LOG2_E;
        factor[i] = lse == -INF ? 0 : share;
      }
      for (int64_t block = 0; block * KEY_BLOCK < p.S; block++) {
        Cells cells = look(p, s, block);
        if (!cells.some) continue;
        int64_t first = block * KEY_BLOCK, keys = p.S - first < KEY_BLOCK ? p.S - first : KEY_BLOCK;
        Rows k = read_keys(p, p.k, b, head, first, keys, cells.some, p.D, false, at.keys);
        for (Run run = next_run(cells.some, 0); run.cells; run = next_run(cells.some, run.first + run.cells)) {
          int64_t start = run.first * CELL, n = keys_of(run, keys);
          product<Along::depth, Into::fresh>(n, k.data + start * k.step, k.step, at.q, LANES, at.scores, LANES, p.D);
          if (adjusts || cells.some != cells.every) adjust(p, s, block, run, cells.every, at.scores, LANES, nullptr);
          for (int64_t i = 0; i < n; i++)
            for (int j = 0; j < N; j++) {
              float* place = at.scores + i * LANES + j * W;
              store(place, power(load(place) - load(base + j * W)) * load(factor + j * W));
            }
          float* lines[LANES];
          for (int i = 0; i < LANES; i++) lines[i] = at.turned + i * n;
          transpose_out(at.scores, n, lines);
          for (int i = 0; i < count; i++) {
            int64_t line = p.averages ? b * p.L + s.l[i] : (b * p.H + s.h[i]) * p.L + s.l[i];
            float* to = p.weights + line * p.S + first + start;
            for (int64_t c = 0; c < n; c++) to[c] += lines[i][c];
          }
        }
      }
    }
  }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
