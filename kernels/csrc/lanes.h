// The vector unit that the forms are written for: kLanes floats or 32-bit words, and what C++ operators on vectors lack.
// Included once per instruction set, inside an unnamed namespace. KVTIER_HAVE_AVX512 implies KVTIER_HAVE_AVX2; with neither
// there are four lanes, of which compilers make SSE2 or NEON, or loops.

#define KVTIER_INLINE __attribute__((always_inline)) inline

#if defined(KVTIER_HAVE_AVX512)
constexpr int kLanes = 16;
typedef float F __attribute__((vector_size(64)));
typedef uint32_t W __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
#elif defined(KVTIER_HAVE_AVX2)
constexpr int kLanes = 8;
typedef float F __attribute__((vector_size(32)));
typedef uint32_t W __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
#else
constexpr int kLanes = 4;
typedef float F __attribute__((vector_size(16)));
typedef uint32_t W __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
#endif
constexpr int kParts = kGroup / kLanes;  // registers of one group

constexpr uint32_t kFloatSign = 0x80000000u;

template <class T>
KVTIER_INLINE T read(const void* at) {
  T x;
  __builtin_memcpy(&x, at, sizeof(T));
  return x;
}
template <class T>
KVTIER_INLINE void write(void* at, const T& x) {
  __builtin_memcpy(at, &x, sizeof(T));
}

#if defined(KVTIER_HAVE_AVX512)
KVTIER_INLINE F all(float x) { return F(_mm512_set1_ps(x)); }
KVTIER_INLINE W all(uint32_t x) { return W(_mm512_set1_epi32(int(x))); }
#elif defined(KVTIER_HAVE_AVX2)
KVTIER_INLINE F all(float x) { return F(_mm256_set1_ps(x)); }
KVTIER_INLINE W all(uint32_t x) { return W(_mm256_set1_epi32(int(x))); }
#else
KVTIER_INLINE F all(float x) { return F{x, x, x, x}; }
KVTIER_INLINE W all(uint32_t x) { return W{x, x, x, x}; }
#endif

KVTIER_INLINE F load(const float* x) { return read<F>(x); }
KVTIER_INLINE void store(float* x, F v) { write(x, v); }
KVTIER_INLINE F magnitude(F x) { return F(W(x) & all(~kFloatSign)); }

// Of finite numbers.
#if defined(KVTIER_HAVE_AVX512)
KVTIER_INLINE F larger(F a, F b) { return F(_mm512_max_ps(__m512(a), __m512(b))); }
KVTIER_INLINE F smaller(F a, F b) { return F(_mm512_min_ps(__m512(a), __m512(b))); }
#elif defined(KVTIER_HAVE_AVX2)
KVTIER_INLINE F larger(F a, F b) { return F(_mm256_max_ps(__m256(a), __m256(b))); }
KVTIER_INLINE F smaller(F a, F b) { return F(_mm256_min_ps(__m256(a), __m256(b))); }
#else
KVTIER_INLINE F larger(F a, F b) { return a < b ? b : a; }
KVTIER_INLINE F smaller(F a, F b) { return b < a ? b : a; }
#endif

// Lanes where a comparison holds.
#if defined(KVTIER_HAVE_AVX512)
typedef __mmask16 Mask;
KVTIER_INLINE Mask less(F a, F b) { return _mm512_cmp_ps_mask(__m512(a), __m512(b), _CMP_LT_OQ); }
KVTIER_INLINE F pick(Mask m, F a, F b) { return F(_mm512_mask_blend_ps(m, __m512(b), __m512(a))); }
KVTIER_INLINE W pick(Mask m, W a, W b) { return W(_mm512_mask_blend_epi32(m, __m512i(b), __m512i(a))); }
#else
typedef W Mask;
KVTIER_INLINE Mask less(F a, F b) { return W(a < b); }
#if defined(KVTIER_HAVE_AVX2)
KVTIER_INLINE F pick(Mask m, F a, F b) { return F(_mm256_blendv_ps(__m256(b), __m256(a), __m256(m))); }
#else
KVTIER_INLINE F pick(Mask m, F a, F b) { return F((m & W(a)) | (~m & W(b))); }
#endif
KVTIER_INLINE W pick(Mask m, W a, W b) { return W(pick(m, F(a), F(b))); }
#endif

// Bits of `b` where `mask` is set, of `a` elsewhere.
template <uint32_t mask>
KVTIER_INLINE W merged(W a, W b) {
#if defined(KVTIER_HAVE_AVX512)
  return W(_mm512_ternarylogic_epi32(__m512i(a), __m512i(b), _mm512_set1_epi32(int(mask)), 0xD8));
#else
  return (a & all(~mask)) | (b & all(mask));
#endif
}
// `a` with the bits of `b` that `mask` has.
template <uint32_t mask>
KVTIER_INLINE W joined(W a, W b) {
#if defined(KVTIER_HAVE_AVX512)
  return W(_mm512_ternarylogic_epi32(__m512i(a), __m512i(b), _mm512_set1_epi32(int(mask)), 0xF8));
#else
  return a | (b & all(mask));
#endif
}

KVTIER_INLINE F with_sign_of(F size, F x) { return F(joined<kFloatSign>(W(size), W(x))); }

// The low byte of each lane.
KVTIER_INLINE void put_bytes(W x, uint8_t* at) {
#if defined(KVTIER_HAVE_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(__m512i(x)));
#elif defined(KVTIER_HAVE_AVX2)
  const __m256i low = __m256i(x & all(0xFFu)), words = _mm256_packus_epi32(low, low);
  const __m256i bytes = _mm256_packus_epi16(words, words);
  write(at, uint32_t(_mm256_extract_epi32(bytes, 0)));
  write(at + 4, uint32_t(_mm256_extract_epi32(bytes, 4)));
#else
  for (int i = 0; i < kLanes; ++i) at[i] = uint8_t(x[i]);
#endif
}

// The same of a group.
KVTIER_INLINE void put_group_bytes(const W* x, uint8_t* at) {
#if defined(KVTIER_HAVE_AVX2) && !defined(KVTIER_HAVE_AVX512)
  const __m256i words = _mm256_packus_epi32(__m256i(x[0] & all(0xFFu)), __m256i(x[1] & all(0xFFu)));
  const __m256i bytes = _mm256_packus_epi16(words, words);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(
                                                       bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5))));
#else
  for (int i = 0; i < kParts; ++i) put_bytes(x[i], at + kLanes * i);
#endif
}

// 16 bytes, those of -0 as +0.
KVTIER_INLINE void put_positive_zeros(uint8_t* at) {
  typedef int8_t Group __attribute__((vector_size(16)));
  const Group bytes = read<Group>(at), minus_zero = Group{} + int8_t(-0x80);
  write(at, bytes & ~Group(bytes == minus_zero));
}

// Halves of the numbers that forms are made of, BF16 or FP16.
KVTIER_INLINE W brain_bits(F x) { return (W(x) + all(0x7FFFu) + (W(x) >> 16 & all(1u))) >> 16; }

#if !defined(KVTIER_HAVE_AVX2)
KVTIER_INLINE F half_values(W bits) {
  const W size = bits & all(0x7FFFu);
  const F small = __builtin_convertvector(I(size), F) * all(5.9604644775390625e-8f);  // 2^-24
  const F normal = F((size << 13) + all(112u << 23));
  return F(W(size < all(0x400u) ? small : normal) | (bits & all(0x8000u)) << 16);
}
KVTIER_INLINE W half_bits(F x) {
  const W b = W(x) & all(~kFloatSign);
  const W small = W(F(b) + all(0.5f)) - all(0x3F000000u);  // the sum's last bit is worth 2^-24
  const W rounded = ((b + all(0xFFFu) + (b >> 13 & all(1u))) >> 13) - all(112u << 10);
  const W normal = rounded < all(0x7C00u) ? rounded : all(0x7C00u);
  return (b < all(0x38800000u) ? small : normal) | (W(x) & all(kFloatSign)) >> 16;
}
#endif

// kLanes 16-bit numbers to floats, exactly.
template <DType coded>
KVTIER_INLINE F widened(const uint16_t* x) {
#if defined(KVTIER_HAVE_AVX512)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  if (coded == DType::kFP16) return F(_mm512_cvtph_ps(bits));
  return F(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(KVTIER_HAVE_AVX2)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  if (coded == DType::kFP16) return F(_mm256_cvtph_ps(bits));
  return F(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
  W bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = x[i];
  return coded == DType::kFP16 ? half_values(bits) : F(bits << 16);
#endif
}

#if defined(KVTIER_HAVE_AVX2)
// A group, to nearest even. FP16 beyond its range becomes infinity.
template <DType coded>
KVTIER_INLINE __m256i rounded(const F* x) {
#if defined(KVTIER_HAVE_AVX512)
  return coded == DType::kFP16 ? _mm512_cvtps_ph(__m512(x[0]), _MM_FROUND_TO_NEAREST_INT)
                               : _mm512_cvtepi32_epi16(__m512i(brain_bits(x[0])));
#else
  if (coded == DType::kFP16)
    return _mm256_set_m128i(_mm256_cvtps_ph(__m256(x[1]), _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(__m256(x[0]), _MM_FROUND_TO_NEAREST_INT));
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(__m256i(brain_bits(x[0])), __m256i(brain_bits(x[1]))), 0xD8);
#endif
}
#endif

// To nearest even. FP16 beyond its range becomes infinity.
template <DType coded>
KVTIER_INLINE void put_rounded(F x, uint16_t* at) {
#if defined(KVTIER_HAVE_AVX512)
  const __m256i bits = coded == DType::kFP16 ? _mm512_cvtps_ph(__m512(x), _MM_FROUND_TO_NEAREST_INT)
                                             : _mm512_cvtepi32_epi16(__m512i(brain_bits(x)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bits);
#elif defined(KVTIER_HAVE_AVX2)
  if (coded == DType::kFP16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT));
    return;
  }
  const __m256i words = __m256i(brain_bits(x));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_castsi256_si128(packed));
#else
  const W bits = coded == DType::kFP16 ? half_bits(x) : brain_bits(x);
  for (int i = 0; i < kLanes; ++i) at[i] = uint16_t(bits[i]);
#endif
}

// The larger magnitude.
KVTIER_INLINE F farther(F size, F x) {
#if defined(KVTIER_HAVE_AVX512)
  return F(_mm512_range_ps(__m512(size), __m512(x), 0x0B));
#else
  return larger(size, magnitude(x));
#endif
}

// Rounding by adding a number whose last bit is worth one step of the value's binade. That number ends in the code of the
// binade's start less the steps that lead there, so that the sum of a magnitude ends in its code.

// The number to be added to multiples, below 7, of an e2m1 step: steps of 1/2 below 2, of 1 below 4, of 2 from there.
KVTIER_INLINE F e2m1_added(F steps) {
  constexpr float a = 6291456.0f, b = 12582914.0f, c = 25165832.0f;
  // The lowest bits of the exponent choose. Values that share them with [2, 8) are too small to be rounded to but 0.
#if defined(KVTIER_HAVE_AVX512)
  const __m512 table = _mm512_setr_ps(b, c, a, a, a, a, a, a, a, a, a, a, a, a, a, a);
  return F(_mm512_permutexvar_ps(_mm512_srli_epi32(__m512i(steps), 23), table));
#elif defined(KVTIER_HAVE_AVX2)
  const __m256 table = _mm256_setr_ps(b, c, a, a, a, a, a, a);
  return F(_mm256_permutevar8x32_ps(table, _mm256_srli_epi32(__m256i(steps), 23)));
#else
  const F size = magnitude(steps);
  return pick(less(size, all(2.0f)), all(a), pick(less(size, all(4.0f)), all(b), all(c)));
#endif
}
// To the nearest e2m1 value; zeros become +0.
KVTIER_INLINE F e2m1_value(F steps) {
  const F added = e2m1_added(steps);
  return (steps + added) - added;
}
// The code of a magnitude in the lowest bits of `sum`; the value is sum - added.
struct Coded {
  F sum, added;
};
KVTIER_INLINE Coded e2m1_code(F steps) {
  steps = larger(steps, all(0.125f));  // 0 like all below, but with an exponent that chooses rightly
  const F added = e2m1_added(steps);
  return {steps + added, added};
}

KVTIER_INLINE W e4m3_binade(F x) { return W(larger(F(W(x) & all(0x7F800000u)), all(0.015625f))); }
// To the nearest e4m3 value, of magnitudes up to 464.
KVTIER_INLINE F e4m3_value(F x) {
  const F added = F(e4m3_binade(x) + all(0x0A400000u));
  return (x + added) - added;
}
// The code of a magnitude in the lowest byte.
KVTIER_INLINE W e4m3_code(F x) {
  const W power = e4m3_binade(x);
  return W(x + F(power + (power >> 20) + all(0x0A400000u - (121u << 3))));
}

// Scale codes of magnitudes, as scale_code() has them, what they are worth, and its reciprocal.
struct Scales {
  W codes;
  F steps, inverses;
};
KVTIER_INLINE Scales scales_of(F amax, float global_scale) {
  const F wanted = smaller(larger(all(global_scale) * (amax * all(1.0f / 6.0f)), all(0.015625f)), all(448.0f));
  const W codes = ((W(wanted) + all(0x7FFFFu) + (W(wanted) >> 20 & all(1u))) >> 20) - all(120u << 3);
  const F steps = F((codes << 20) + all(120u << 23)) * all(1.0f / global_scale);
  return {codes, steps, all(1.0f) / steps};
}

#if defined(KVTIER_HAVE_AVX512)
// Index tables of the transposition below.
struct ColumnOrder {
  alignas(64) uint16_t four[2][32], eight[2][32], column[4][32];
  alignas(64) uint32_t pairs[2][16];
  alignas(64) uint64_t turns[2][8];

  constexpr ColumnOrder() : four{}, eight{}, column{}, pairs{}, turns{} {
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < 32; ++i) {
        four[h][i] = uint16_t(16 * (i % 4) + 8 * h + i / 4);
        eight[h][i] = uint16_t(i % 8 < 4 ? (4 * h + i / 8) * 4 + i % 8 : 32 + (4 * h + i / 8) * 4 + i % 8 - 4);
      }
    for (int e = 0; e < 4; ++e)
      for (int i = 0; i < 32; ++i) {
        const int group = i / 2;
        column[e][i] = uint16_t(group < 8 ? e * 8 + group : 32 + e * 8 + group - 8);
      }
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < 16; ++i) pairs[h][i] = uint32_t(8 * h + i / 2 + 16 * (i % 2));
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < 8; ++i) turns[h][i] = uint64_t(4 * h + i / 2 + 8 * (i % 2));
  }
};
constexpr ColumnOrder kColumnOrder;
KVTIER_INLINE __m512i order512(const void* at) { return _mm512_load_si512(at); }
#endif

// kLanes groups that lie one behind the other, turned: value i of each group in column[i].
template <DType coded>
KVTIER_INLINE void load_columns(const uint16_t* x, F* column) {
#if defined(KVTIER_HAVE_AVX512)
  __m512i z[8], p[8], r[8];
  for (int i = 0; i < 8; ++i) z[i] = _mm512_loadu_si512(x + 32 * i);
  for (int i = 0; i < 4; ++i)
    for (int h = 0; h < 2; ++h)
      p[4 * h + i] = _mm512_permutex2var_epi16(z[2 * i], order512(kColumnOrder.four[h]), z[2 * i + 1]);
  for (int e = 0; e < 2; ++e)  // values 0 to 7, 8 to 15
    for (int i = 0; i < 2; ++i)
      for (int h = 0; h < 2; ++h)
        r[4 * e + 2 * h + i] = _mm512_permutex2var_epi16(p[4 * e + 2 * i], order512(kColumnOrder.eight[h]), p[4 * e + 2 * i + 1]);
  for (int e = 0; e < 16; ++e) {
    const __m512i first = r[e / 4 * 2], second = r[e / 4 * 2 + 1], order = order512(kColumnOrder.column[e % 4]);
    const __m512i bits = _mm512_maskz_permutex2var_epi16(0xAAAAAAAAu, first, order, second);
    column[e] = coded == DType::kFP16 ? F(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)))) : F(bits);
  }
#elif defined(KVTIER_HAVE_AVX2)
  __m256i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16 * i));
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm256_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm256_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i)
    for (int h = 0; h < 2; ++h) {
      a[4 * i + 2 * h] = _mm256_unpacklo_epi32(b[4 * i + h], b[4 * i + 2 + h]);
      a[4 * i + 2 * h + 1] = _mm256_unpackhi_epi32(b[4 * i + h], b[4 * i + 2 + h]);
    }
  for (int e = 0; e < 4; ++e) {
    b[2 * e] = _mm256_unpacklo_epi64(a[e], a[e + 4]);
    b[2 * e + 1] = _mm256_unpackhi_epi64(a[e], a[e + 4]);
  }
  for (int e = 0; e < 8; ++e)
    for (int h = 0; h < 2; ++h) {
      const __m128i bits = h ? _mm256_extracti128_si256(b[e], 1) : _mm256_castsi256_si128(b[e]);
      column[8 * h + e] = coded == DType::kFP16 ? F(_mm256_cvtph_ps(bits))
                                                : F(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
#else
  for (int e = 0; e < kGroup; ++e) {
    uint16_t lane[kLanes];
    for (int i = 0; i < kLanes; ++i) lane[i] = x[kGroup * i + e];
    column[e] = widened<coded>(lane);
  }
#endif
}

// Sum over 16 columns in the order of the format: i and i + 8, then i + 4, i + 2, i + 1.
template <class Column>
KVTIER_INLINE F sum_columns(Column&& x) {
  F z[4];
  for (int i = 0; i < 4; ++i) z[i] = (x(i) + x(i + 8)) + (x(i + 4) + x(i + 12));
  return (z[0] + z[2]) + (z[1] + z[3]);
}

// The nibbles of groups in lanes: values 0 to 7 in one word of 32 bits, 8 to 15 in the other.
struct Nibbles {
  W low, high;
};
// To the 8 bytes that a group takes, group by group.
KVTIER_INLINE void put_nibbles(const Nibbles& n, uint8_t* at) {
#if defined(KVTIER_HAVE_AVX512)
  for (int h = 0; h < 2; ++h)
    _mm512_storeu_si512(at + 64 * h, _mm512_permutex2var_epi32(__m512i(n.low), order512(kColumnOrder.pairs[h]), __m512i(n.high)));
#elif defined(KVTIER_HAVE_AVX2)
  const __m256i a = _mm256_unpacklo_epi32(__m256i(n.low), __m256i(n.high));
  const __m256i b = _mm256_unpackhi_epi32(__m256i(n.low), __m256i(n.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm256_permute2x128_si256(a, b, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at) + 1, _mm256_permute2x128_si256(a, b, 0x31));
#else
  for (int i = 0; i < kLanes; ++i) write(at + 8 * i, uint32_t(n.low[i])), write(at + 8 * i + 4, uint32_t(n.high[i]));
#endif
}

// Two of them, 8 bytes each by turns.
KVTIER_INLINE void put_nibbles(const Nibbles& a, const Nibbles& b, uint8_t* at) {
#if defined(KVTIER_HAVE_AVX512)
  for (int h = 0; h < 2; ++h) {
    const __m512i order = order512(kColumnOrder.pairs[h]);
    const __m512i first = _mm512_permutex2var_epi32(__m512i(a.low), order, __m512i(a.high));
    const __m512i second = _mm512_permutex2var_epi32(__m512i(b.low), order, __m512i(b.high));
    for (int q = 0; q < 2; ++q)
      _mm512_storeu_si512(at + 128 * h + 64 * q,
                          _mm512_permutex2var_epi64(first, order512(kColumnOrder.turns[q]), second));
  }
#else
  uint32_t words[4][kLanes];
  write(words[0], a.low), write(words[1], a.high), write(words[2], b.low), write(words[3], b.high);
  for (int i = 0; i < kLanes; ++i)
    for (int n = 0; n < 4; ++n) write(at + 16 * i + 4 * n, words[n][i]);
#endif
}

// Nibbles of -0 become +0.
template <class T>
KVTIER_INLINE T positive_zeros(T nibbles, T sevens) {
  return nibbles & (((nibbles & sevens) + sevens) | sevens);
}
KVTIER_INLINE W positive_zeros(W nibbles) { return positive_zeros(nibbles, all(0x77777777u)); }
