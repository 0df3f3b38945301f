// Dropout without memory: whether a weight is dropped is a function of the seed and of the weight's place.
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter of
// four words into four random words. The counter is (s / 4, l, b * H + h, 0), and word s % 4 belongs to key s. So the
// backward pass draws what the forward pass drew, whatever the blocks, threads and instruction set, and plain PyTorch
// can draw it too (kernels/philox.py).
#pragma once

#include "kernel.h"
#include "mask.h"
#include "vector.h"

namespace multihead {
namespace MULTIHEAD_ISA {

struct Wide {
  Words high, low;
};

// Both halves of the products of 32-bit numbers.
INLINE Wide multiply(Words a, uint32_t b) {
#if defined(__AVX512F__)
  __m512i x = (__m512i)a, y = _mm512_set1_epi32(int(b));
  __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  return {(Words)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd),
          (Words)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32))};
#elif defined(__AVX2__)
  __m256i x = (__m256i)a, y = _mm256_set1_epi32(int(b));
  __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  return {(Words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
          (Words)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
#else
  Wide found;
  for (int i = 0; i < W; i++) {
    uint64_t product = uint64_t(a[i]) * b;
    found.high[i] = uint32_t(product >> 32);
    found.low[i] = uint32_t(product);
  }
  return found;
#endif
}

struct FourWords {
  Words x[4];
};

INLINE FourWords philox(FourWords counter, uint32_t key_0, uint32_t key_1) {
  Words* c = counter.x;
  for (int round = 0; round < 10; round++) {
    Wide a = multiply(c[0], 0xD2511F53u), b = multiply(c[2], 0xCD9E8D57u);
    Words c0 = b.high ^ c[1] ^ key_0, c2 = a.high ^ c[3] ^ key_1;
    c[0] = c0, c[1] = b.low, c[2] = c2, c[3] = a.low;
    key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
  }
  return counter;
}

// Of four keys from `first` on (a multiple of 4): -1 where the weight of a row is kept, 0 where it is dropped.
INLINE void draw(const Problem& p, const Strip& s, int64_t first, Ints kept[4][N]) {
  for (int j = 0; j < N; j++) {
    FourWords counter;
    counter.x[0] = Words{} + uint32_t(first / 4);
    counter.x[1] = *(const Words*)(s.counter[0] + j * W);
    counter.x[2] = *(const Words*)(s.counter[1] + j * W);
    counter.x[3] = Words{};
    FourWords drawn = philox(counter, p.key[0], p.key[1]);
    for (int k = 0; k < 4; k++) kept[k][j] = (Ints)(drawn.x[k] >= p.threshold);
  }
}

}  // namespace MULTIHEAD_ISA
}  // namespace multihead
