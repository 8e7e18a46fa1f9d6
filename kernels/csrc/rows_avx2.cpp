// AVX2 kernels: one group of 16 values per 256-bit register. Compiled for every x86-64, run where the CPU has AVX2.
#if defined(__x86_64__)

#include <immintrin.h>

#include "forms.h"
#include "rows.h"

#define KVTIER_AVX2 __attribute__((target("avx2")))
#define KVTIER_AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline

namespace kvtier {
namespace {

KVTIER_AVX2_INLINE __m256i load256(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
KVTIER_AVX2_INLINE __m128i load128(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

// 8 floats to BF16 magnitude bits with the sign in bit 15, in 32-bit lanes. NaN becomes infinity, as in bf16_of.
KVTIER_AVX2_INLINE __m256i bf16_lanes(__m256i x) {
  const __m256i magnitude = _mm256_min_epu32(_mm256_and_si256(x, _mm256_set1_epi32(0x7FFFFFFF)), _mm256_set1_epi32(0x7F800000));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x7FFF)), odd), 16);
  return _mm256_or_si256(rounded, _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(0x8000)));
}

KVTIER_AVX2 uint32_t amax16(const Rows& src, int64_t dim) {
  const __m256i mask = _mm256_set1_epi16(0x7FFF);
  __m256i m0 = _mm256_setzero_si256(), m1 = m0, m2 = m0, m3 = m0;
  const int64_t row_bytes = dim * 2;
  for (int64_t o = 0; o < src.count[0]; ++o)
    for (int64_t i = 0; i < src.count[1]; ++i) {
      const uint8_t* at = src.base + o * src.stride[0] + i * src.stride[1];
      const uint8_t* end = at + row_bytes;
      for (; end - at >= 128; at += 128) {
        m0 = _mm256_max_epi16(m0, _mm256_and_si256(load256(at), mask));
        m1 = _mm256_max_epi16(m1, _mm256_and_si256(load256(at + 32), mask));
        m2 = _mm256_max_epi16(m2, _mm256_and_si256(load256(at + 64), mask));
        m3 = _mm256_max_epi16(m3, _mm256_and_si256(load256(at + 96), mask));
      }
      for (; at < end; at += 32) m0 = _mm256_max_epi16(m0, _mm256_and_si256(load256(at), mask));
    }
  const __m256i m = _mm256_max_epi16(_mm256_max_epi16(m0, m1), _mm256_max_epi16(m2, m3));
  const __m128i half = _mm_max_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  // The only horizontal instruction finds a minimum.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  return uint16_t(~_mm_cvtsi128_si32(least));
}

KVTIER_AVX2 uint32_t amax32(const Rows& src, int64_t dim) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i m0 = _mm256_setzero_si256(), m1 = m0;
  const int64_t row_bytes = dim * 4;
  for (int64_t o = 0; o < src.count[0]; ++o)
    for (int64_t i = 0; i < src.count[1]; ++i) {
      const uint8_t* at = src.base + o * src.stride[0] + i * src.stride[1];
      for (const uint8_t* end = at + row_bytes; at < end; at += 64) {
        m0 = _mm256_max_epi32(m0, _mm256_and_si256(load256(at), mask));
        m1 = _mm256_max_epi32(m1, _mm256_and_si256(load256(at + 32), mask));
      }
    }
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_max_epi32(m0, m1));
  int32_t most = 0;
  for (int32_t lane : lanes) most = lane > most ? lane : most;
  return uint32_t(most);
}

// Scale code of one group.
KVTIER_AVX2_INLINE uint8_t group_scale(__m256i x, const EncodeTable& table) {
  const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
  const __m128i half = _mm_max_epi16(_mm256_castsi256_si128(magnitude), _mm256_extracti128_si256(magnitude, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(0x7FFF)));
  return table.scale[0x7FFF ^ _mm_extract_epi16(least, 0)];
}

// As a float load, which compilers keep as the one instruction that it is.
KVTIER_AVX2_INLINE __m256i broadcast(const uint32_t* at) {
  return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(at)));
}

// One group as 16 lanes of 16 bits.
template <int kItemSize>
KVTIER_AVX2_INLINE __m256i load_group(const uint8_t* at) {
  if constexpr (kItemSize == 2) {
    return load256(at);
  } else {
    const __m256i packed = _mm256_packus_epi32(bf16_lanes(load256(at)), bf16_lanes(load256(at + 32)));
    return _mm256_permute4x64_epi64(packed, 0xD8);
  }
}

// Codes of one group in 16 lanes, sign in bit 3.
KVTIER_AVX2_INLINE __m256i group_codes(__m256i x, const uint32_t* threshold) {
  const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
  __m256i codes = _mm256_and_si256(_mm256_srli_epi16(x, 12), _mm256_set1_epi16(8));
  for (int i = 0; i < 7; ++i)
    codes = _mm256_sub_epi16(codes, _mm256_cmpgt_epi16(magnitude, broadcast(threshold + i)));
  // One group after the other in the code, overlapped by the CPU. Compilers would load the thresholds of four groups
  // first, and spill them.
  asm volatile("" : "+x"(codes) : : "memory");
  return codes;
}

// Two groups of codes to bytes: per 128-bit lane, 4 words of the first and 4 of the second.
KVTIER_AVX2_INLINE __m256i nibble_pairs(__m256i a, __m256i b) {
  return _mm256_maddubs_epi16(_mm256_packus_epi16(a, b), _mm256_set1_epi16(0x1001));
}

// `soon` is what the CPU fetches meanwhile, null for nothing.
template <int kItemSize>
KVTIER_AVX2_INLINE void encode_codes(const uint8_t* at, const uint8_t* soon, int64_t groups, const EncodeTable& table,
                                     uint8_t* data, const uint8_t* scales) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  int64_t g = 0;
  for (; g + 4 <= groups; g += 4, at += 128, data += 32) {
    for (int line = 0; soon && line < 64 * kItemSize; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(soon) + g * kGroup * kItemSize + line, _MM_HINT_T1);
    const __m256i a = group_codes(load256(at), table.threshold[scales[g]]);
    const __m256i b = group_codes(load256(at + 32), table.threshold[scales[g + 1]]);
    const __m256i c = group_codes(load256(at + 64), table.threshold[scales[g + 2]]);
    const __m256i d = group_codes(load256(at + 96), table.threshold[scales[g + 3]]);
    const __m256i bytes = _mm256_packus_epi16(nibble_pairs(a, b), nibble_pairs(c, d));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), _mm256_permutevar8x32_epi32(bytes, order));
  }
  for (; g < groups; ++g, at += 32, data += 8) {
    const __m256i pairs = nibble_pairs(group_codes(load256(at), table.threshold[scales[g]]), _mm256_setzero_si256());
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(pairs, pairs), order);
    const int64_t eight = _mm_cvtsi128_si64(_mm256_castsi256_si128(bytes));
    __builtin_memcpy(data, &eight, 8);
  }
}

constexpr int kRunGroups = 64;

// Part of a buffer whose scales are all found before its codes: the look-up of a scale takes as long as forty of the
// other instructions, and codes that wait for it would fill the CPU's queues.
struct Run {
  const uint8_t* base;
  int64_t stride, rows, groups;  // rows * groups <= kRunGroups
  uint8_t* data;
  uint8_t* scales;
  int64_t cold_stride;  // in groups, from row to row
};

// Cold bytes of one short row of the next buffer; long rows are followed by the hardware.
template <bool kWrite>
KVTIER_AVX2_INLINE void prefetch_cold(const uint8_t* data, const uint8_t* scales, int64_t groups, const Ahead& ahead) {
  if (ahead.data == 0 || groups > kRunGroups) return;
  for (int64_t at = 0; at < groups * 8; at += 64) __builtin_prefetch(data + ahead.data + at, kWrite, 2);
  __builtin_prefetch(scales + ahead.scales, kWrite, 2);
}

template <int kItemSize>
KVTIER_AVX2_INLINE void encode_run(const Run& run, const Ahead& ahead, const EncodeTable& table) {
  alignas(32) uint8_t rounded[kItemSize == 4 ? kRunGroups * 32 : 32];
  uint8_t* to = rounded;
  for (int64_t r = 0; r < run.rows; ++r)
    for (int64_t g = 0; g < run.groups; ++g) {
      const __m256i x = load_group<kItemSize>(run.base + r * run.stride + g * kGroup * kItemSize);
      run.scales[r * run.cold_stride + g] = group_scale(x, table);
      if constexpr (kItemSize == 4) _mm256_store_si256(reinterpret_cast<__m256i*>(to), x), to += 32;
    }
  for (int64_t r = 0; r < run.rows; ++r) {
    const uint8_t* row = run.base + r * run.stride;
    uint8_t* data = run.data + r * run.cold_stride * 8;
    const uint8_t* scales = run.scales + r * run.cold_stride;
    prefetch_cold<true>(data, scales, run.groups, ahead);
    encode_codes<kItemSize>(kItemSize == 4 ? rounded + r * run.groups * 32 : row, ahead.hot ? row + ahead.hot : nullptr,
                            run.groups, table, data, scales);
  }
}

template <int kItemSize>
KVTIER_AVX2 void encode(const Rows& src, int64_t groups, const Ahead& ahead, const EncodeTable& table, uint8_t* data,
                        uint8_t* scales) {
  if (groups < 1) return;
  const int64_t per_run = groups < kRunGroups ? kRunGroups / groups : 1;
  for (int64_t o = 0; o < src.count[0]; ++o)
    for (int64_t i = 0; i < src.count[1]; i += per_run) {
      const uint8_t* at = src.base + o * src.stride[0] + i * src.stride[1];
      const int64_t rows = src.count[1] - i < per_run ? src.count[1] - i : per_run;
      const int64_t cold = (o * src.cold[0] + i * src.cold[1]) * groups;
      for (int64_t g = 0; g < groups; g += kRunGroups) {
        const int64_t some = groups - g < kRunGroups ? groups - g : kRunGroups;
        encode_run<kItemSize>({at + g * kGroup * kItemSize, src.stride[1], rows, some, data + (cold + g) * 8,
                               scales + cold + g, src.cold[1] * groups}, ahead, table);
      }
    }
}

// Eight 16-bit values each, one behind the other. Around the cache in halves: NumPy's arrays are aligned to 16 bytes only.
template <bool kStream>
KVTIER_AVX2_INLINE void store(uint8_t* at, __m128i first, __m128i second) {
  if constexpr (kStream) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(at), first);
    _mm_stream_si128(reinterpret_cast<__m128i*>(at) + 1, second);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm256_set_m128i(second, first));
  }
}

// 16 nibble indices in a register to 16 values at `at`.
template <int kItemSize, bool kStream>
KVTIER_AVX2_INLINE void store_group(__m128i nibbles, const uint8_t* bytes, uint8_t* at) {
  const __m128i low = _mm_shuffle_epi8(load128(bytes), nibbles);
  const __m128i high = _mm_shuffle_epi8(load128(bytes + 16), nibbles);
  const __m128i first = _mm_unpacklo_epi8(low, high), second = _mm_unpackhi_epi8(low, high);
  if constexpr (kItemSize == 2) {
    store<kStream>(at, first, second);
  } else {
    const __m128i zero = _mm_setzero_si128();
    store<kStream>(at, _mm_unpacklo_epi16(zero, first), _mm_unpackhi_epi16(zero, first));
    store<kStream>(at + 32, _mm_unpacklo_epi16(zero, second), _mm_unpackhi_epi16(zero, second));
  }
}

template <int kItemSize, bool kStream>
KVTIER_AVX2_INLINE void decode_row(const uint8_t* data, const uint8_t* scales, int64_t groups, const DecodeTable& table,
                                   uint8_t* at) {
  constexpr int kGroupBytes = kGroup * kItemSize;
  const __m128i nibble = _mm_set1_epi8(15);
  for (; groups >= 2; groups -= 2, at += 2 * kGroupBytes, data += 16, scales += 2) {
    const __m128i packed = load128(data);
    const __m128i even = _mm_and_si128(packed, nibble), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    store_group<kItemSize, kStream>(_mm_unpacklo_epi8(even, odd), table.bytes[scales[0]], at);
    store_group<kItemSize, kStream>(_mm_unpackhi_epi8(even, odd), table.bytes[scales[1]], at + kGroupBytes);
  }
  if (groups) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data));
    const __m128i even = _mm_and_si128(packed, nibble), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    store_group<kItemSize, kStream>(_mm_unpacklo_epi8(even, odd), table.bytes[scales[0]], at);
  }
}

template <int kItemSize, bool kStream>
KVTIER_AVX2 void decode_rows(const uint8_t* data, const uint8_t* scales, int64_t groups, const Ahead& ahead,
                             const DecodeTable& table, const Rows& dst) {
  for (int64_t o = 0; o < dst.count[0]; ++o)
    for (int64_t i = 0; i < dst.count[1]; ++i) {
      const int64_t cold = (o * dst.cold[0] + i * dst.cold[1]) * groups;
      prefetch_cold<false>(data + cold * 8, scales + cold, groups, ahead);
      decode_row<kItemSize, kStream>(data + cold * 8, scales + cold, groups, table,
                                     dst.base + o * dst.stride[0] + i * dst.stride[1]);
    }
}

template <int kItemSize>
KVTIER_AVX2 void decode(const uint8_t* data, const uint8_t* scales, int64_t groups, const Ahead& ahead,
                        const DecodeTable& table, const Rows& dst, bool stream) {
  const bool aligned = (reinterpret_cast<uintptr_t>(dst.base) | uintptr_t(dst.stride[0] | dst.stride[1])) % 16 == 0;
  if (stream && aligned)
    decode_rows<kItemSize, true>(data, scales, groups, ahead, table, dst);
  else
    decode_rows<kItemSize, false>(data, scales, groups, ahead, table, dst);
}

KVTIER_AVX2 void copy_stream(const uint8_t* from, size_t bytes, uint8_t* to) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  for (; bytes >= 32; bytes -= 32, from += 32, to += 32) {
    const __m256i x = load256(from);
    store<true>(to, _mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  __builtin_memcpy(to, from, bytes);
}

KVTIER_AVX2 void xxh3_stripes(uint64_t* lanes, const uint8_t* input, size_t stripes, const uint8_t* secret) {
  __m256i* at = reinterpret_cast<__m256i*>(lanes);
  __m256i sum[2] = {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
  for (size_t s = 0; s < stripes; ++s, input += 64, secret += 8)
    for (int half = 0; half < 2; ++half) {
      const __m256i value = load256(input + 32 * half);
      const __m256i keyed = _mm256_xor_si256(value, load256(secret + 32 * half));
      const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, _mm256_shuffle_epi32(value, 0x4E)));
    }
  _mm256_storeu_si256(at, sum[0]);
  _mm256_storeu_si256(at + 1, sum[1]);
}

KVTIER_AVX2 void xxh3_scramble(uint64_t* lanes, const uint8_t* secret) {
  const __m256i prime = _mm256_set1_epi32(int(0x9E3779B1u));
  __m256i* at = reinterpret_cast<__m256i*>(lanes);
  for (int half = 0; half < 2; ++half) {
    __m256i x = _mm256_loadu_si256(at + half);
    x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, 47)), load256(secret + 32 * half));
    const __m256i low = _mm256_mul_epu32(x, prime);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
    _mm256_storeu_si256(at + half, _mm256_add_epi64(low, _mm256_slli_epi64(high, 32)));
  }
}

void fence() { _mm_sfence(); }

}  // namespace

const RowKernels kAvx2Rows = {
    "avx2", &kAvx2Forms, amax16, amax32, encode<2>, encode<4>, decode<2>, decode<4>, copy_stream, xxh3_stripes, xxh3_scramble, fence,
};

// Rows are bound by memory, and wider registers gain them nothing; forms are not.
const RowKernels kAvx512Rows = {
    "avx512", &kAvx512Forms, amax16, amax32, encode<2>, encode<4>, decode<2>, decode<4>, copy_stream, xxh3_stripes, xxh3_scramble, fence,
};

}  // namespace kvtier

#endif
