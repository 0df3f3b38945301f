// Vectors of the width of the instruction set, and the two functions of them that attention needs: 2^x and tanh.
//
// The vector types of GCC and Clang carry the arithmetic, so one source serves every instruction set. Intrinsics are used
// only where the language has no word for an instruction.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace multihead {
namespace MULTIHEAD_ISA {

// W floats to a vector; a strip of rows is N vectors wide; the register tile is M x N vectors (product.h), chosen so that
// M * N sums, N loaded vectors and one broadcast number fit the registers.
#if defined(__AVX512F__)
constexpr int W = 16, N = 2, M = 12;
#elif defined(__AVX2__)
constexpr int W = 8, N = 2, M = 6;
#elif defined(__ARM_NEON)
constexpr int W = 4, N = 4, M = 6;
#else
constexpr int W = 4, N = 2, M = 6;
#endif
constexpr int LANES = W * N;

typedef float Floats __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef float FloatsAnywhere __attribute__((vector_size(W * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

constexpr float INF = __builtin_inff();
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

INLINE Floats load(const float* p) { return *(const FloatsAnywhere*)p; }
INLINE void store(float* p, Floats x) { *(FloatsAnywhere*)p = x; }
INLINE Floats all(float x) { return x - Floats{}; }
INLINE Ints all_int(int32_t x) { return x - Ints{}; }

// The second operand where either is NaN.
INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// Likewise.
INLINE Floats smaller(Floats a, Floats b) { return -larger(-a, -b); }

INLINE bool any(Ints x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
  int32_t found = 0;
  for (int i = 0; i < W; i++) found |= x[i];
  return found != 0;
#endif
}

INLINE Ints not_finite(Floats x) { return ((Ints)x & 0x7f800000) == 0x7f800000; }

// (2^f - 1) / f for |f| <= 1/2: the minimax polynomial for the relative error of 2^f, 2e-9.
INLINE Floats power_slope(Floats f) {
  Floats p = 1.5353361960e-04f * f + 1.3398875017e-03f;
  p = p * f + 9.6184369177e-03f;
  p = p * f + 5.5503323674e-02f;
  p = p * f + 2.4022647738e-01f;
  return p * f + 6.9314718246e-01f;
}

struct Power {
  Floats whole;     // 2^n
  Floats fraction;  // x - n
};

// x = n + fraction, n whole, for -127 <= x <= 127. 2^-127 is taken for 0.
INLINE Power split(Floats x) {
  // The sum with 1.5 * 2^23 has no place for a fraction, and n + 127 in its lowest bits, where an exponent is made of it.
  const float magic = 12582912.0f + 127.0f;
  Floats sum = x + magic;
  return {(Floats)((Ints)sum << 23), x - (sum - magic)};
}

// 2^x for x that are 0 at most (but for rounding), and 0 from x = -127 on down. NaN stays NaN.
INLINE Floats power(Floats x) {
  Power p = split(larger(all(-127.0f), x));
  return p.whole * (power_slope(p.fraction) * p.fraction + 1.0f);
}

// tanh(x) = e / (e + 2) with e = exp(2 x) - 1, which is made without cancellation near 0.
INLINE Floats tanh_of(Floats x) {
  Floats y = x * (2 * LOG2_E);
  y = smaller(all(60.0f), larger(all(-60.0f), y));
  Power p = split(y);
  Floats e = p.whole * (power_slope(p.fraction) * p.fraction) + (p.whole - 1.0f);
  return e / (e + 2.0f);
}

// Squares of numbers are turned in registers, SIDE x SIDE at a time.
#if defined(__AVX2__)
constexpr int SIDE = 8;
#else
constexpr int SIDE = 4;
#endif
typedef float Line __attribute__((vector_size(SIDE * 4)));
typedef int32_t Places __attribute__((vector_size(SIDE * 4)));
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Places{__VA_ARGS__})
#endif
typedef float LineAnywhere __attribute__((vector_size(SIDE * 4), aligned(4), may_alias));

INLINE Line load_line(const float* p) { return *(const LineAnywhere*)p; }
INLINE void store_line(float* p, Line x) { *(LineAnywhere*)p = x; }

// Pairs of lines are mixed so that what belongs together comes to lie together: by one number, by two, then by four.
INLINE void turn(Line (&x)[SIDE]) {
  Line y[SIDE];
#if defined(__AVX2__)
  for (int i = 0; i < 8; i += 2) {
    y[i] = SHUFFLE(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    y[i + 1] = SHUFFLE(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = SHUFFLE(y[i + j], y[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      x[i + 2 * j + 1] = SHUFFLE(y[i + j], y[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    y[i] = SHUFFLE(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    y[i + 4] = SHUFFLE(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int i = 0; i < 8; i++) x[i] = y[i];
#else
  for (int i = 0; i < 4; i += 2) {
    y[i] = SHUFFLE(x[i], x[i + 1], 0, 4, 1, 5);
    y[i + 1] = SHUFFLE(x[i], x[i + 1], 2, 6, 3, 7);
  }
  for (int j = 0; j < 2; j++) {
    x[2 * j] = SHUFFLE(y[j], y[j + 2], 0, 1, 4, 5);
    x[2 * j + 1] = SHUFFLE(y[j], y[j + 2], 2, 3, 6, 7);
  }
#endif
}

// to[j * LANES + i] = from[i][j] * factor for LANES rows of n numbers.
static void transpose_in(const float* const* from, int64_t n, float factor, float* to) {
  for (int i = 0; i < LANES; i += SIDE) {
    int64_t j = 0;
    for (; j + SIDE <= n; j += SIDE) {
      Line square[SIDE];
      for (int k = 0; k < SIDE; k++) square[k] = load_line(from[i + k] + j) * factor;
      turn(square);
      for (int k = 0; k < SIDE; k++) store_line(to + (j + k) * LANES + i, square[k]);
    }
    for (; j < n; j++)
      for (int k = 0; k < SIDE; k++) to[j * LANES + i + k] = from[i + k][j] * factor;
  }
}

// to[i][j] = from[j * LANES + i] for LANES rows of n numbers.
static void transpose_out(const float* from, int64_t n, float* const* to) {
  for (int i = 0; i < LANES; i += SIDE) {
    int64_t j = 0;
    for (; j + SIDE <= n; j += SIDE) {
      Line square[SIDE];
      for (int k = 0; k < SIDE; k++) square[k] = load_line(from + (j + k) * LANES + i);
      turn(square);
      for (int k = 0; k < SIDE; k++) store_line(to[i + k] + j, square[k]);
    }
    for (; j < n; j++)
      for (int k = 0; k < SIDE; k++) to[i + k][j] = from[j * LANES + i + k];
  }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
