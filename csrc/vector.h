// Vectors of the width of the instruction set, and the two functions of them that attention needs: 2^x and tanh.
//
// GCC's vector types carry the arithmetic, so one source serves every instruction set. Intrinsics are used only where
// the language has no word for an instruction.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
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
typedef int32_t IntsAnywhere __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16)));
typedef float FourAnywhere __attribute__((vector_size(16), aligned(4), may_alias));

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

// 2^x, and 0 from x = -127 on down. NaN stays NaN.
INLINE Floats power(Floats x) {
  x = larger(all(-127.0f), x);
  x = -larger(all(-127.0f), -x);
  Power p = split(x);
  return p.whole * (power_slope(p.fraction) * p.fraction + 1.0f);
}

// The same for x that are known to be 0 at most.
INLINE Floats power_below_one(Floats x) {
  Power p = split(larger(all(-127.0f), x));
  return p.whole * (power_slope(p.fraction) * p.fraction + 1.0f);
}

// tanh(x) = e / (e + 2) with e = exp(2 x) - 1, which is made without cancellation near 0.
INLINE Floats tanh_of(Floats x) {
  Floats y = x * (2 * LOG2_E);
  y = larger(all(-60.0f), y);
  y = -larger(all(-60.0f), -y);
  Power p = split(y);
  Floats e = p.whole * (power_slope(p.fraction) * p.fraction) + (p.whole - 1.0f);
  return e / (e + 2.0f);
}

// Four rows of four, turned.
INLINE void transpose_four(Four& a, Four& b, Four& c, Four& d) {
  typedef int32_t Index __attribute__((vector_size(16)));
  Four ab = __builtin_shuffle(a, b, Index{0, 4, 1, 5}), cd = __builtin_shuffle(c, d, Index{0, 4, 1, 5});
  Four ab2 = __builtin_shuffle(a, b, Index{2, 6, 3, 7}), cd2 = __builtin_shuffle(c, d, Index{2, 6, 3, 7});
  a = __builtin_shuffle(ab, cd, Index{0, 1, 4, 5});
  b = __builtin_shuffle(ab, cd, Index{2, 3, 6, 7});
  c = __builtin_shuffle(ab2, cd2, Index{0, 1, 4, 5});
  d = __builtin_shuffle(ab2, cd2, Index{2, 3, 6, 7});
}

// to[j * ld + i] = from[i][j] * factor for LANES rows of n numbers.
static void transpose_in(const float* const* from, int64_t n, float factor, float* to, int64_t ld) {
  for (int i = 0; i < LANES; i += 4) {
    const float *r0 = from[i], *r1 = from[i + 1], *r2 = from[i + 2], *r3 = from[i + 3];
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
      Four a = *(const FourAnywhere*)(r0 + j) * factor, b = *(const FourAnywhere*)(r1 + j) * factor;
      Four c = *(const FourAnywhere*)(r2 + j) * factor, d = *(const FourAnywhere*)(r3 + j) * factor;
      transpose_four(a, b, c, d);
      *(FourAnywhere*)(to + j * ld + i) = a;
      *(FourAnywhere*)(to + (j + 1) * ld + i) = b;
      *(FourAnywhere*)(to + (j + 2) * ld + i) = c;
      *(FourAnywhere*)(to + (j + 3) * ld + i) = d;
    }
    for (; j < n; j++) {
      to[j * ld + i] = r0[j] * factor;
      to[j * ld + i + 1] = r1[j] * factor;
      to[j * ld + i + 2] = r2[j] * factor;
      to[j * ld + i + 3] = r3[j] * factor;
    }
  }
}

// to[i][j] = from[j * LANES + i] for LANES rows of n numbers.
static void transpose_out(const float* from, int64_t n, float* const* to) {
  for (int i = 0; i < LANES; i += 4) {
    float *r0 = to[i], *r1 = to[i + 1], *r2 = to[i + 2], *r3 = to[i + 3];
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
      Four a = *(const FourAnywhere*)(from + j * LANES + i), b = *(const FourAnywhere*)(from + (j + 1) * LANES + i);
      Four c = *(const FourAnywhere*)(from + (j + 2) * LANES + i), d = *(const FourAnywhere*)(from + (j + 3) * LANES + i);
      transpose_four(a, b, c, d);
      *(FourAnywhere*)(r0 + j) = a;
      *(FourAnywhere*)(r1 + j) = b;
      *(FourAnywhere*)(r2 + j) = c;
      *(FourAnywhere*)(r3 + j) = d;
    }
    for (; j < n; j++)
      for (int k = 0; k < 4; k++) to[i + k][j] = from[j * LANES + i + k];
  }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
