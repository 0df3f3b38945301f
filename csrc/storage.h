// Reading and writing what tensors hold: float, bfloat16 or float16, in any layout, and what caches store: pages, int8.
// Arithmetic is in float throughout.
#pragma once

#include "kernel.h"
#include "vector.h"

namespace multihead {
namespace MULTIHEAD_ISA {

INLINE float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

INLINE float from_bf16(uint16_t h) { return from_bits(uint32_t(h) << 16); }
INLINE uint16_t to_bf16(float x) {  // to the nearest, ties to even
  uint32_t bits = to_bits(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

INLINE float from_f16(uint16_t h) {
  // Exponent and fraction moved into place are 2^-112 of the number, denormals included.
  uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
  uint32_t bits = to_bits(from_bits(magnitude) * from_bits(0x77800000));
  bits = (h & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : bits;
  return from_bits(bits | uint32_t(h & 0x8000) << 16);
}
INLINE uint16_t to_f16(float x) {  // to the nearest, ties to even
  uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t usual = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Below the smallest normal number a sum with 0.5 rounds where a float16 would: its unit is then 2^-24.
  uint32_t tiny = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000;
  uint32_t found = magnitude < 0x38800000 ? tiny : usual;
  found = magnitude >= 0x477ff000 ? 0x7c00 : found;
  found = magnitude > 0x7f800000 ? 0x7e00 : found;
  return uint16_t(sign | found);
}

// Zeros; also of nothing, whose address may be null.
INLINE void clear(void* to, size_t bytes) {
  if (bytes) memset(to, 0, bytes);
}

// Up to whole vectors.
INLINE int64_t padded(int64_t width) { return (width + W - 1) / W * W; }

INLINE int64_t offset_of(const Tensor4& t, int64_t b, int64_t head, int64_t token) {
  return b * t.stride[0] + head * t.stride[1] + token * t.stride[2];
}

// Whether rows can be read and written where they lie.
INLINE bool is_plain(const Tensor4& t) { return t.dtype == Dtype::f32 && t.stride[3] == 1; }

static void copy_row(const Tensor4& t, int64_t offset, int64_t n, float* to) {
  int64_t step = t.stride[3];
  if (t.dtype == Dtype::f32) {
    const float* from = (const float*)t.data + offset;
    for (int64_t i = 0; i < n; i++) to[i] = from[i * step];
    return;
  }
  const uint16_t* from = (const uint16_t*)t.data + offset;
  if (t.dtype == Dtype::bf16) {
    if (step == 1)
      for (int64_t i = 0; i < n; i++) to[i] = from_bf16(from[i]);
    else
      for (int64_t i = 0; i < n; i++) to[i] = from_bf16(from[i * step]);
  } else if (step == 1) {
    for (int64_t i = 0; i < n; i++) to[i] = from_f16(from[i]);
  } else {
    for (int64_t i = 0; i < n; i++) to[i] = from_f16(from[i * step]);
  }
}

// How many of n tokens from `token` on lie evenly one after the other: those of a page.
INLINE int64_t together(const Tensor4& t, int64_t token, int64_t n) {
  if (!t.pages) return n;
  int64_t left = t.page_size - token % t.page_size;
  return left < n ? left : n;
}

// Where a token of a head is, by the strides of the numbers or of their factors.
INLINE int64_t stored_at(const Tensor4& t, const int64_t* stride, int64_t b, int64_t head, int64_t token) {
  if (!t.pages) return b * stride[0] + head * stride[1] + token * stride[2];
  int64_t page = t.pages[b * t.pages_stride + token / t.page_size];
  return page * stride[0] + head * stride[1] + token % t.page_size * stride[2];
}

static void copy_bytes(const int8_t* from, int64_t step, float factor, int64_t n, float* to) {
  if (step == 1)
    for (int64_t i = 0; i < n; i++) to[i] = float(from[i]) * factor;
  else
    for (int64_t i = 0; i < n; i++) to[i] = float(from[i * step]) * factor;
}

// A row as floats: in place where it can be, else in `room`.
static const float* read_row(const Tensor4& t, int64_t b, int64_t head, int64_t token, int64_t n, float* room) {
  int64_t offset = offset_of(t, b, head, token);
  if (is_plain(t)) return (const float*)t.data + offset;
  copy_row(t, offset, n, room);
  return room;
}

static void write_row(const Tensor4& t, int64_t b, int64_t head, int64_t token, int64_t n, const float* from) {
  int64_t offset = offset_of(t, b, head, token), step = t.stride[3];
  if (t.dtype == Dtype::f32) {
    float* to = (float*)t.data + offset;
    if (step == 1 && n > 0)
      memcpy(to, from, size_t(n) * sizeof(float));
    else
      for (int64_t i = 0; i < n; i++) to[i * step] = from[i];
    return;
  }
  uint16_t* to = (uint16_t*)t.data + offset;
  if (t.dtype == Dtype::bf16)
    for (int64_t i = 0; i < n; i++) to[i * step] = to_bf16(from[i]);
  else
    for (int64_t i = 0; i < n; i++) to[i * step] = to_f16(from[i]);
}

// Some keys or values as rows of floats, `step` apart, or in the pages of `paged` from token `first` of a head on.
struct Rows {
  const float* data;
  int64_t step;
  const Tensor4* paged;
  int64_t b, head, first;
};

// Calls use(rows, start, count) for `n` of the rows, from `start` on, in pieces that lie evenly; each counts its start
// from there.
template <typename Use>
INLINE void by_pieces(const Rows& rows, int64_t start, int64_t n, const Use& use) {
  if (!rows.paged) return use(rows.data + start * rows.step, 0, n);
  for (int64_t done = 0; done < n;) {
    int64_t token = rows.first + start + done, count = together(*rows.paged, token, n - done);
    use(rows.data + stored_at(*rows.paged, rows.paged->stride, rows.b, rows.head, token), done, count);
    done += count;
  }
}

// How many keys a block has; the last of a head may have fewer.
INLINE int64_t keys_in(const Problem& p, int64_t block) {
  int64_t left = p.S - block * KEY_BLOCK;
  return left < KEY_BLOCK ? left : KEY_BLOCK;
}

// Keys (or values) first .. first + n of a head. Read in place where they can be, else the cells in `cells` are copied
// to `room`, rows `width` rounded up to W apart. Keys that `seen` knows nobody sees are zeros: what they hold must not
// come back as 0 * NaN.
static Rows read_keys(const Problem& p, const Tensor4& t, int64_t b, int64_t head, int64_t first, int64_t n,
                      uint32_t cells, int64_t width, bool whole_vectors, float* room) {
  if (is_plain(t) && !p.seen && (!whole_vectors || width % W == 0)) {
    if (t.pages) return {(const float*)t.data, t.stride[2], &t, b, head, first};
    return {(const float*)t.data + offset_of(t, b, head, first), t.stride[2], nullptr, 0, 0, 0};
  }
  int64_t step = padded(width);
  const uint8_t* seen = p.seen ? p.seen + (b * p.K + head) * p.S + first : nullptr;
  for (int64_t start = 0; start < n;) {
    int64_t stop = start + together(t, first + start, n - start);
    int64_t place = stored_at(t, t.stride, b, head, first + start);
    const float* factors = t.factors ? t.factors + stored_at(t, t.factor_stride, b, head, first + start) : nullptr;
    for (int64_t i = start; i < stop; i++, place += t.stride[2]) {
      if (!(cells >> (i / CELL) & 1)) continue;
      float* row = room + i * step;
      bool wanted = !seen || seen[i];
      if (wanted && factors)
        copy_bytes((const int8_t*)t.data + place, t.stride[3], factors[(i - start) * t.factor_stride[2]], width, row);
      else if (wanted)
        copy_row(t, place, width, row);
      for (int64_t j = wanted ? width : 0; j < step; j++) row[j] = 0;
    }
    start = stop;
  }
  return {room, step, nullptr, 0, 0, 0};
}

// Memory for one thread, handed out piece by piece. With no memory behind it, it only counts.
struct Room {
  char* next;
  size_t used;

  explicit Room(void* start) : next((char*)start), used(0) {}
  template <typename T = float>
  T* take(int64_t count) {
    size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64;
    T* piece = (T*)next;
    if (next) next += bytes;
    used += bytes;
    return piece;
  }
};

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
