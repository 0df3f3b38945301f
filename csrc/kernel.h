// What the operators and the kernels of each instruction set share: one call, described in plain numbers and pointers.
//
// Letters as everywhere in multihead: B batch, H query heads, K key/value heads, L queries, S keys, D width of q and k,
// V width of v. G = H / K query heads read one key/value head. Sizes and strides are counted in elements, in 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace multihead {

// Keys are looked at in blocks, and whether they are visible is known for cells of 8 of them.
constexpr int64_t CELL = 8;
constexpr int64_t CELLS = 24;  // to a block: one bit each in a uint32_t
constexpr int64_t KEY_BLOCK = CELL * CELLS;

constexpr int64_t PART_BLOCKS = 4;

constexpr int ROWS_AT_ONCE = 64;  // share the keys of a block while they are in the cache

constexpr int MAX_STEPS = 32;  // of a mask
constexpr int MAX_DEPTH = 8;   // operands that wait for their operation

enum class Dtype { f32, bf16, f16, i8 };  // of what is stored; all arithmetic is in float

// A tensor of four axes: rows of the batch, heads, tokens, width.
struct Tensor4 {
  void* data;
  Dtype dtype;
  int64_t stride[4];

  // Of keys and values as a cache stores them. In pages: the first axis is of pages, the third of the tokens in one.
  const int64_t* pages;  // (B, pages of a row), or null: which page a row's tokens are in
  int64_t pages_stride, page_size;
  const float* factors;  // what the numbers of a row of the width are multiplied by, for i8
  int64_t factor_stride[3];
};

// Least and greatest value of each cell and of each block of keys, (B or 1, cells) and (B or 1, blocks).
struct Ranges {
  const double* cell_low;
  const double* cell_high;
  const double* block_low;
  const double* block_high;
  int64_t cells, blocks;  // from one row of the batch to the next; 0 where all rows share them
};

// Where tokens stand, counted from a common origin: 32-bit whole numbers wherever they fit, else doubles, and whole numbers
// that these can't tell apart in 64 bits. Of the last ranges are not known: they are from -inf to inf.
enum class PositionKind { narrow, wide, huge };

struct Positions {
  PositionKind kind;
  bool rounds;       // distances are rounded to float, as those of float positions are in PyTorch
  const void* q;     // (B or 1, L)
  const void* k;     // (B or 1, S)
  int64_t q_stride;  // from one row of the batch to the next: L or 0
  int64_t k_stride;  // S or 0
  Ranges k_ranges;
};

// One step of a mask, which is written in postfix order: kinds that look, and operations on the last one or two answers.
enum class MaskKind { window, lengths, prefix, padding, documents, dense, both, either, invert };

struct MaskStep {
  MaskKind kind;
  int64_t left, right;     // window: bounds of the distance, q - k in -right .. left; NO_BOUND: none
  const int64_t* numbers;  // lengths, prefix: n (B or 1), of a prefix counted from the positions' origin
  const uint8_t* table;    // padding (B or 1, S), dense (B or 1, H or 1, L or 1, S or 1)
  int64_t stride[4];       // of the table or the numbers; 0 along an axis of 1
  const int32_t* q_ids;    // documents (B or 1, L), (B or 1, S)
  const int32_t* k_ids;
  int64_t q_stride, k_stride;
  Ranges k_ranges;
};

constexpr int64_t NO_BOUND = INT64_MAX;

struct Bias {
  const void* data;  // null: there is none. (B or 1, H or 1, L or 1, S or 1)
  Dtype dtype;
  int64_t stride[4];  // 0 along an axis of 1
  float lowest;       // this and below hides
};

struct Problem {
  int64_t B, H, K, G, L, S, D, V;
  Tensor4 q, k, v, out;
  Tensor4 rest;  // what out lost when it was rounded to a narrow dtype, for the backward pass; data null: not wanted
  float* lse;    // (B, H, L), contiguous
  float* state;  // (2, B, H, L), contiguous, or null: of each row the largest score and log2 of the sum of
                 // 2^(score - largest), in units of log2. One number for both, as lse is, would be too coarse to make
                 // weights of where scores are large.

  float scale, softcap;  // softcap 0: none
  Bias bias;
  const float* slopes;  // ALiBi: (H), or null
  Positions positions;  // only read by masks and slopes
  MaskStep mask[MAX_STEPS];
  int mask_steps;

  bool has_dropout;
  uint32_t key[2];     // of the generator
  uint32_t threshold;  // drawn numbers below it drop a weight
  float keep_scale;    // of the weights that are kept

  // Which keys some query sees, (B, K, S), or null while nobody has asked. Where it is given the others are read as zeros.
  uint8_t* seen;

  // Backward.
  Tensor4 grad_out, grad_q, grad_k, grad_v;
  const float* grad_lse;   // (B, H, L), contiguous, or null
  float* grad_bias;        // in the shape of the bias, or null
  double* grad_bias_sums;  // in its place where many rows add to each number, or null
  int64_t grad_bias_stride[4];

  // The weights, where they are what is asked for: (B, H, L, S), or their mean over heads (B, L, S).
  float* weights;
  bool average;

  // Statistics of the weights, each null where it is not asked for.
  float *entropy, *visible_keys;  // (B, H, L), of queries
  float *received, *seen_by;      // (B, H, parts, S), of keys: each from the queries of one part

  // Few queries against many keys: those of one row are shared out in `parts`, PART_BLOCKS each, whose results wait here.
  // For statistics the queries of a head are.
  int64_t parts;   // 1: they are not
  float* partial;  // (B, K, parts, rows, 2 + V): maximum, sum, output
};

// Queries of one part of a head, for statistics.
static inline int64_t rows_of_part(const Problem& p) {
  int64_t each = (p.L + p.parts - 1) / p.parts;
  return (each + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
}

static inline int64_t key_blocks(const Problem& p) { return (p.S + KEY_BLOCK - 1) / KEY_BLOCK; }

// What a part of the backward pass is to find.
enum Wanted : unsigned { GRAD_Q = 1, GRAD_KV = 2, GRAD_BIAS = 4 };
// Of which statistics a call is asked.
enum Statistics : unsigned { ENTROPY = 1, VISIBLE_KEYS = 2, RECEIVED = 4, SEEN_BY = 8 };

struct Kernel {
  // All rows of a key/value head, G * L, are cut into blocks; a forward item is one block of one head.
  int64_t (*row_blocks)(const Problem&);
  size_t (*scratch_bytes)(const Problem&, bool with_backward);
  // False: something that is not finite came out.
  bool (*forward)(const Problem&, int64_t b, int64_t head, int64_t row_block, int64_t part, void* scratch);
  bool (*combine)(const Problem&, int64_t b, int64_t head, void* scratch);
  void (*find_seen)(const Problem&, int64_t b, int64_t head, void* scratch);
  bool (*backward)(const Problem&, int64_t b, int64_t head, int64_t first_row_block, int64_t last_row_block,
                   int64_t first_key_block, int64_t last_key_block, unsigned wanted, void* scratch);
  void (*weights)(const Problem&, int64_t b, int64_t first_query, int64_t last_query, void* scratch);
  void (*statistics)(const Problem&, int64_t b, int64_t query_head, int64_t part, void* scratch);
};

const Kernel* kernel_baseline();
const Kernel* kernel_avx2();
const Kernel* kernel_avx512();
const Kernel* kernel_neon();

}  // namespace multihead
