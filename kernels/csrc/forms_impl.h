// The loops behind FormKernels, included once per instruction set, inside an unnamed namespace. Written so that compilers
// make vectors of them: fixed trip counts, no calls, no branches, sums in the order of vector lanes.

constexpr uint32_t kFloatSign = 0x80000000u;

inline uint32_t to_bits(float x) {
  uint32_t b;
  __builtin_memcpy(&b, &x, 4);
  return b;
}
inline float to_float(uint32_t b) {
  float x;
  __builtin_memcpy(&x, &b, 4);
  return x;
}

inline float half_value(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7FFFu;
  const float small = float(int32_t(magnitude)) * 5.9604644775390625e-8f;  // 2^-24
  const float normal = to_float((magnitude << 13) + (112u << 23));
  return to_float(to_bits(magnitude < 0x400u ? small : normal) | uint32_t(bits & 0x8000u) << 16);
}
inline uint16_t half_bits(float x) {
  const uint32_t b = to_bits(x) & ~kFloatSign;
  const uint32_t small = to_bits(to_float(b) + 0.5f) - 0x3F000000u;  // the sum's last bit is worth 2^-24
  uint32_t normal = ((b + 0xFFFu + ((b >> 13) & 1u)) >> 13) - (112u << 10);
  normal = normal < 0x7C00u ? normal : 0x7C00u;
  return uint16_t((b < 0x38800000u ? small : normal) | ((to_bits(x) >> 16) & 0x8000u));
}
inline uint16_t brain_bits(float x) {
  const uint32_t b = to_bits(x);
  return uint16_t((b + 0x7FFFu + ((b >> 16) & 1u)) >> 16);
}
inline float brain_value(uint16_t bits) { return to_float(uint32_t(bits) << 16); }

inline uint8_t eight_bits(float x) {
  const uint32_t magnitude = to_bits(x) & ~kFloatSign;
  const uint32_t b = magnitude < 0x43E00000u ? magnitude : 0x43E00000u;  // 448
  const uint32_t small = to_bits(to_float(b) + 16384.0f) - 0x46800000u;  // the sum's last bit is worth 2^-9
  const uint32_t normal = ((b + 0x7FFFFu + ((b >> 20) & 1u)) >> 20) - (120u << 3);
  return uint8_t((b < 0x3C800000u ? small : normal) | ((to_bits(x) >> 24) & 0x80u));
}
inline float eight_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const float small = float(int32_t(magnitude)) * 0.001953125f;  // 2^-9
  const float normal = to_float((magnitude << 20) + (120u << 23));
  return to_float(to_bits(magnitude < 8u ? small : normal) | uint32_t(code & 0x80u) << 24);
}

// No alignment is assumed of hot memory.
template <class T>
inline T hot_at(const uint8_t* hot, int64_t i) {
  T x;
  __builtin_memcpy(&x, hot + i * int64_t(sizeof(T)), sizeof(T));
  return x;
}
template <class T>
inline void put_hot(uint8_t* hot, int64_t i, T x) {
  __builtin_memcpy(hot + i * int64_t(sizeof(T)), &x, sizeof(T));
}

inline void load_half(const uint8_t* hot, int64_t dim, float* x) {
#if defined(KVTIER_HAVE_AVX2)
  for (int64_t i = 0; i < dim; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(hot + 2 * i));
    _mm256_storeu_ps(x + i, _mm256_cvtph_ps(half));
  }
#else
  for (int64_t i = 0; i < dim; ++i) x[i] = half_value(hot_at<uint16_t>(hot, i));
#endif
}

template <class Load>
inline void map_rows(int64_t n, float* x, Load&& load) {
  for (int64_t i = 0; i < n; ++i) x[i] = load(i);
}

void load(const uint8_t* hot, int64_t dim, DType dtype, const Fp8Values* fp8, float* x) {
  switch (dtype) {
    case DType::kBF16: map_rows(dim, x, [&](int64_t i) { return brain_value(hot_at<uint16_t>(hot, i)); }); break;
    case DType::kFP16: load_half(hot, dim, x); break;
    case DType::kFP8: map_rows(dim, x, [&](int64_t i) { return fp8->value[hot[i]]; }); break;
    default: map_rows(dim, x, [&](int64_t i) { return brain_value(brain_bits(hot_at<float>(hot, i))); });
  }
}

void widen(const uint8_t* hot, int64_t dim, const Fp8Values& fp8, uint16_t* half) {
  for (int64_t i = 0; i < dim; ++i) half[i] = fp8.half[hot[i]];
}

void narrow(const uint16_t* decoded, int64_t dim, uint8_t* hot) {
  for (int64_t i = 0; i < dim; ++i) hot[i] = uint8_t(decoded[i]);
}

uint8_t amax8(const uint8_t* hot, int64_t dim) {
  uint8_t most = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const uint8_t magnitude = hot[i] & 0x7F;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

void widen16(const uint16_t* bits, int64_t n, DType coded, float* x) {
  if (coded == DType::kFP16)
    map_rows(n, x, [&](int64_t i) { return half_value(bits[i]); });
  else
    map_rows(n, x, [&](int64_t i) { return brain_value(bits[i]); });
}

void mean(const float* x, int64_t rows, int64_t dim, DType coded, uint16_t* bits, float* values) {
  for (int64_t c = 0; c < dim; ++c) values[c] = 0.0f;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < dim; ++c) values[c] += x[r * dim + c];
  const float count = float(rows > 0 ? rows : 1);
  for (int64_t c = 0; c < dim; ++c) values[c] /= count;
  if (coded == DType::kFP16)
    for (int64_t c = 0; c < dim; ++c) bits[c] = half_bits(values[c]);
  else
    for (int64_t c = 0; c < dim; ++c) bits[c] = brain_bits(values[c]);
  widen16(bits, dim, coded, values);
}

// Eight lanes; compilers make of them what the instruction set has.
typedef float F8 __attribute__((vector_size(32)));
typedef uint32_t W8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));

#if defined(__clang__)
#define KVTIER_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#define KVTIER_SHUFFLE2(v, w, ...) __builtin_shufflevector(v, w, __VA_ARGS__)
#else
#define KVTIER_SHUFFLE(v, ...) __builtin_shuffle(v, I8{__VA_ARGS__})
#define KVTIER_SHUFFLE2(v, w, ...) __builtin_shuffle(v, w, I8{__VA_ARGS__})
#endif
#define KVTIER_INLINE __attribute__((always_inline)) inline

KVTIER_INLINE F8 all(float x) { return F8{x, x, x, x, x, x, x, x}; }
KVTIER_INLINE W8 all(uint32_t x) { return W8{x, x, x, x, x, x, x, x}; }
KVTIER_INLINE F8 load8(const float* x) {
  F8 v;
  __builtin_memcpy(&v, x, 32);
  return v;
}
KVTIER_INLINE void store8(float* x, F8 v) { __builtin_memcpy(x, &v, 32); }
KVTIER_INLINE F8 magnitude(F8 x) { return F8(W8(x) & ~all(kFloatSign)); }
KVTIER_INLINE W8 sign(F8 x) { return W8(x) & all(kFloatSign); }
#if defined(KVTIER_HAVE_AVX2)
KVTIER_INLINE F8 larger(F8 a, F8 b) { return F8(_mm256_max_ps(__m256(b), __m256(a))); }
KVTIER_INLINE F8 smaller(F8 a, F8 b) { return F8(_mm256_min_ps(__m256(b), __m256(a))); }
#else
KVTIER_INLINE F8 larger(F8 a, F8 b) { return a < b ? b : a; }
KVTIER_INLINE F8 smaller(F8 a, F8 b) { return b < a ? b : a; }
#endif

// Eight 16-bit values. `stream` writes around the cache, to an address that is a multiple of 16.
KVTIER_INLINE void put16(W8 values, uint8_t* at, bool stream) {
  typedef uint16_t Half8 __attribute__((vector_size(16)));
  const Half8 halves = __builtin_convertvector(values, Half8);
#if defined(KVTIER_HAVE_AVX2)
  if (stream) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(at), reinterpret_cast<__m128i>(halves));
    return;
  }
#endif
  (void)stream;
  __builtin_memcpy(at, &halves, 16);
}

KVTIER_INLINE W8 brain8(F8 x) { return (W8(x) + all(0x7FFFu) + (W8(x) >> 16 & all(1u))) >> 16; }
KVTIER_INLINE W8 half8(F8 x) {
#if defined(KVTIER_HAVE_AVX2)
  return W8(_mm256_cvtepu16_epi32(_mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT)));
#else
  const W8 b = W8(x) & ~all(kFloatSign);
  const W8 small = W8(F8(b) + all(0.5f)) - all(0x3F000000u);
  const W8 rounded = ((b + all(0xFFFu) + (b >> 13 & all(1u))) >> 13) - all(112u << 10);
  const W8 normal = rounded < all(0x7C00u) ? rounded : all(0x7C00u);
  return (b < all(0x38800000u) ? small : normal) | (W8(x) & all(kFloatSign)) >> 16;
#endif
}

void store(const float* x, int64_t dim, DType dtype, float inverse_fp8_scale, bool stream, uint8_t* hot) {
  stream = stream && reinterpret_cast<uintptr_t>(hot) % 16 == 0;
  switch (dtype) {
    case DType::kBF16:
      for (int64_t i = 0; i < dim; i += 8) put16(brain8(load8(x + i)), hot + 2 * i, stream);
      break;
    case DType::kFP16:
      for (int64_t i = 0; i < dim; i += 8) put16(half8(load8(x + i)), hot + 2 * i, stream);
      break;
    case DType::kFP8:
      for (int64_t i = 0; i < dim; ++i) hot[i] = eight_bits(x[i] * inverse_fp8_scale);
      break;
    default:
      for (int64_t i = 0; i < dim; ++i) put_hot(hot, i, brain_value(brain_bits(x[i])));
  }
}

// Lanes i and i + 4, then + 2, then + 1.
KVTIER_INLINE float sum_lanes(F8 x) {
  x = x + KVTIER_SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3);
  x = x + KVTIER_SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5);
  x = x + KVTIER_SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6);
  return x[0];
}
// e2m1 code without sign of a magnitude in steps, and what it is worth: adding a number whose last bit is one step rounds.
struct Rounded {
  W8 code;
  F8 magnitude;
};
KVTIER_INLINE Rounded round_e2m1(F8 steps) {
  const F8 t = smaller(steps, all(6.0f));
  // The power of two below it, from 1 up; 1.5 * 2^22 times that has steps of half of it.
  const F8 power = larger(F8(W8(t) & all(0x7F800000u)), all(1.0f));
  const F8 large = F8(W8(power) + all(0x0B400000u));
  const F8 sum = t + large;
  return {W8(sum) - W8(large) + (W8(power) >> 22) - all(254u), sum - large};
}

// Codes of eight neighbours to nibbles in their places; the lanes are to be joined.
KVTIER_INLINE W8 spread(W8 codes) { return codes << W8{0, 4, 8, 12, 16, 20, 24, 28}; }

KVTIER_INLINE void pack8(W8 codes, uint8_t* data) {
  W8 x = spread(codes);
  x = x | KVTIER_SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3);
  x = x | KVTIER_SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5);
  x = x | KVTIER_SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6);
  const uint32_t word = x[0];
  __builtin_memcpy(data, &word, 4);
}

KVTIER_INLINE void pack16(W8 first, W8 second, uint8_t* data) {
  const W8 a = spread(first), b = spread(second);
  W8 x = KVTIER_SHUFFLE2(a, b, 0, 1, 2, 3, 8, 9, 10, 11) | KVTIER_SHUFFLE2(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  x = x | KVTIER_SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5);
  x = x | KVTIER_SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6);
  const uint32_t words[2] = {x[0], x[4]};
  __builtin_memcpy(data, words, 8);
}

// Sums or maxima of eight registers, one per lane, in the order of sum_lanes.
template <bool kSum>
KVTIER_INLINE F8 join(F8 a, F8 b) {
  return kSum ? a + b : larger(a, b);
}
template <bool kSum>
KVTIER_INLINE F8 reduce8(const F8* v) {
  F8 s[4], t[2];
  for (int i = 0; i < 4; ++i)
    s[i] = join<kSum>(KVTIER_SHUFFLE2(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11),
                      KVTIER_SHUFFLE2(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15));
  for (int i = 0; i < 2; ++i)
    t[i] = join<kSum>(KVTIER_SHUFFLE2(s[2 * i], s[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13),
                      KVTIER_SHUFFLE2(s[2 * i], s[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15));
  const F8 u = join<kSum>(KVTIER_SHUFFLE2(t[0], t[1], 0, 2, 8, 10, 4, 6, 12, 14),
                          KVTIER_SHUFFLE2(t[0], t[1], 1, 3, 9, 11, 5, 7, 13, 15));
  return KVTIER_SHUFFLE(u, 0, 4, 1, 5, 2, 6, 3, 7);
}

// What scale codes of normal size are worth.
KVTIER_INLINE F8 steps_of(W8 scales, float global) { return F8((scales << 20) + all(120u << 23)) * all(global); }

// Scale codes of eight magnitudes, as scale_code() has them.
KVTIER_INLINE W8 scales_of(F8 amax, float global_scale) {
  const F8 wanted = smaller(larger(all(global_scale) * (amax * all(1.0f / 6.0f)), all(0.015625f)), all(448.0f));
  return ((W8(wanted) + all(0x7FFFFu) + (W8(wanted) >> 20 & all(1u))) >> 20) - all(120u << 3);
}

constexpr int kBlock = 8;  // groups that are encoded at a time

// Eight groups as codes with their sign in bit 3, and what is left of them.
struct Block {
  W8 code[2 * kBlock];
  F8 rest[2 * kBlock];
  W8 scales;
};
KVTIER_INLINE void quantize_block(const F8* x, float global_scale, Block& block) {
  F8 most[kBlock];
  for (int g = 0; g < kBlock; ++g) most[g] = larger(magnitude(x[2 * g]), magnitude(x[2 * g + 1]));
  block.scales = scales_of(reduce8<false>(most), global_scale);
  float steps[8], inverses[8];
  const F8 step = steps_of(block.scales, 1.0f / global_scale);
  store8(steps, step);
  store8(inverses, all(1.0f) / step);
  for (int i = 0; i < 2 * kBlock; ++i) {
    const Rounded r = round_e2m1(magnitude(x[i]) * all(inverses[i / 2]));
    block.code[i] = r.code | sign(x[i]) >> 28;
    block.rest[i] = x[i] - F8(W8(r.magnitude * all(steps[i / 2])) | sign(x[i]));
  }
}

// Up to eight groups, the missing ones as zeros.
KVTIER_INLINE void load_block(const float* x, int64_t groups, F8* block) {
  for (int i = 0; i < 2 * kBlock; ++i) block[i] = i < 2 * groups ? load8(x + 8 * i) : all(0.0f);
}

void encode_two(const float* x, int64_t groups, float global_scale, uint8_t* data, uint8_t* scales) {
  for (int64_t g = 0; g < groups; g += kBlock) {
    F8 values[2 * kBlock];
    Block first, second;
    const int64_t count = groups - g < kBlock ? groups - g : kBlock;
    load_block(x + g * 16, count, values);
    quantize_block(values, global_scale, first);
    quantize_block(first.rest, global_scale, second);
    for (int64_t i = 0; i < count; ++i) {
      pack16(first.code[2 * i], first.code[2 * i + 1], data + (g + i) * 16);
      pack16(second.code[2 * i], second.code[2 * i + 1], data + (g + i) * 16 + 8);
      scales[2 * (g + i)] = uint8_t(first.scales[i]), scales[2 * (g + i) + 1] = uint8_t(second.scales[i]);
    }
  }
}

KVTIER_INLINE W8 positive_zeros(W8 codes) { return codes == all(8u) ? all(0u) : codes; }

// Scales of eight groups, their sums of squared errors, and what their values are to be multiplied with.
struct Tried {
  W8 scales;
  F8 errors;
  F8 inverses;
};
template <class At>
KVTIER_INLINE Tried try_block(At&& at, float global_scale) {
  F8 values[kBlock];
  for (int g = 0; g < kBlock; ++g) values[g] = larger(magnitude(at(g, 0)), magnitude(at(g, 8)));
  const W8 scales = scales_of(reduce8<false>(values), global_scale);
  const F8 step = steps_of(scales, 1.0f / global_scale), inverse = all(1.0f) / step;
  float steps[8], inverses[8];
  store8(steps, step);
  store8(inverses, inverse);
  for (int g = 0; g < kBlock; ++g) {
    const F8 a = magnitude(at(g, 0)), b = magnitude(at(g, 8)), s = all(steps[g]), i = all(inverses[g]);
    // The square does not know the sign.
    const F8 left = a - round_e2m1(a * i).magnitude * s, right = b - round_e2m1(b * i).magnitude * s;
    values[g] = left * left + right * right;
  }
  return {scales, reduce8<true>(values), inverse};
}

void encode_offset(const float* x, const float* mean, int64_t row_groups, int64_t groups, float global_scale,
                   uint8_t* data, uint8_t* scales) {
  int64_t column = 0;  // of the mean, in groups
  for (int64_t g = 0; g < groups; g += kBlock) {
    float rest[16 * kBlock] = {};
    const float* block = x + g * 16;
    const int64_t count = groups - g < kBlock ? groups - g : kBlock;
    if (count < kBlock) {
      __builtin_memcpy(rest, block, size_t(count) * 64);
      block = rest;
    }
    const float* means[kBlock];
    for (const float*& m : means) {
      m = mean + column * 16;
      column = column + 1 == row_groups ? 0 : column + 1;
    }
    const auto value = [&](int64_t n, int at) { return load8(block + n * 16 + at); };
    const auto distance = [&](int64_t n, int at) { return load8(block + n * 16 + at) - load8(means[n] + at); };
    const Tried plain = try_block(value, global_scale), off = try_block(distance, global_scale);
    const W8 taken = W8(off.errors < plain.errors);
    const W8 stored = ((off.scales | all(0x80u)) & taken) | (plain.scales & ~taken);
    float inverses[8];
    uint32_t take[8], chosen[8];
    store8(inverses, F8((W8(off.inverses) & taken) | (W8(plain.inverses) & ~taken)));
    __builtin_memcpy(take, &taken, 32);
    __builtin_memcpy(chosen, &stored, 32);
    for (int64_t n = 0; n < count; ++n) {
      const W8 mask = all(take[n]), minus_zero = mask & all(8u);
      const F8 inverse = all(inverses[n]);
      W8 codes[2];
      for (int half = 0; half < 2; ++half) {
        const F8 from = value(n, 8 * half) - F8(W8(load8(means[n] + 8 * half)) & mask);
        const W8 code = round_e2m1(magnitude(from) * inverse).code | sign(from) >> 28;
        codes[half] = code & ~(W8(code == minus_zero) & mask);
      }
      scales[g + n] = uint8_t(chosen[n]);
      pack16(codes[0], codes[1], data + (g + n) * 8);
    }
  }
}

// Eight nibbles as e2m1 values.
KVTIER_INLINE F8 values8(const uint8_t* data) {
  uint32_t word;
  __builtin_memcpy(&word, data, 4);
  const W8 codes = all(word) >> W8{0, 4, 8, 12, 16, 20, 24, 28};
  const W8 signs = codes << 28 & all(kFloatSign);
#if defined(KVTIER_HAVE_AVX2)
  // One instruction, which looks at the lower three bits of each index.
  const F8 table = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const F8 sizes = F8(_mm256_permutevar8x32_ps(__m256(table), __m256i(codes)));
#else
  const W8 size = codes & all(7u);
  const F8 small = __builtin_convertvector(I8(size), F8) * all(0.5f);
  const F8 sizes = size < all(2u) ? small : F8((size << 22) + all(126u << 23));
#endif
  return F8(W8(sizes) | signs);
}

void decode_two(const uint8_t* data, const uint8_t* scales, int64_t groups, const StepTable& table, float* x) {
  for (int64_t g = 0; g < groups; ++g, x += 16, data += 16, scales += 2) {
    const F8 first = all(table.step[scales[0] & 0x7F]), second = all(table.step[scales[1] & 0x7F]);
    store8(x, values8(data) * first + values8(data + 8) * second);
    store8(x + 8, values8(data + 4) * first + values8(data + 12) * second);
  }
}

void decode_offset(const uint8_t* data, const uint8_t* scales, const float* mean, int64_t groups,
                   const StepTable& table, float* x) {
  for (int64_t g = 0; g < groups; ++g, x += 16, mean += 16, data += 8) {
    const F8 step = all(table.step[scales[g] & 0x7F]);
    // Adding -0 changes nothing, not even the sign of a zero.
    const W8 off = all(scales[g] & 0x80 ? 0xFFFFFFFFu : 0u), nothing = ~off & all(kFloatSign);
    store8(x, values8(data) * step + F8((W8(load8(mean)) & off) | nothing));
    store8(x + 8, values8(data + 4) * step + F8((W8(load8(mean + 8)) & off) | nothing));
  }
}

KVTIER_INLINE F8 half_values(W8 bits) {
  const W8 size = bits & all(0x7FFFu);
  const F8 small = __builtin_convertvector(I8(size), F8) * all(5.9604644775390625e-8f);  // 2^-24
  const F8 normal = F8((size << 13) + all(112u << 23));
  return F8(W8(size < all(0x400u) ? small : normal) | (bits & all(0x8000u)) << 16);
}

KVTIER_INLINE F8 rounded_to(DType coded, F8 x, uint16_t* bits) {
  const W8 rounded = coded == DType::kFP16 ? half8(x) : brain8(x);
  put16(rounded, reinterpret_cast<uint8_t*>(bits), false);
  return coded == DType::kFP16 ? half_values(rounded) : F8(rounded << 16);
}

void encode_token(const float* x, int64_t rows, int64_t dim, float global_scale, DType coded,
                  uint8_t* data, uint8_t* scales, uint16_t* middles) {
  for (int64_t c = 0; c < dim; c += 8) {
    F8 low = load8(x + c), high = low;
    for (int64_t r = 1; r < rows; ++r) {
      const F8 value = load8(x + r * dim + c);
      low = smaller(low, value), high = larger(high, value);
    }
    const F8 middle = rounded_to(coded, low * all(0.5f) + high * all(0.5f) + all(0.0f), middles + c);
    // Rounding keeps order, so the farthest values are the lowest and the highest.
    const F8 amax = larger(magnitude(low - middle), magnitude(high - middle));
    const W8 codes = scales_of(amax, global_scale);
    for (int i = 0; i < 8; ++i) scales[c + i] = uint8_t(codes[i]);
    const F8 inverse = all(1.0f) / steps_of(codes, 1.0f / global_scale);
    for (int64_t r = 0; r < rows; ++r) {
      const F8 scaled = (load8(x + r * dim + c) - middle) * inverse;
      pack8(positive_zeros(round_e2m1(magnitude(scaled)).code | sign(scaled) >> 28), data + (r * dim + c) / 2);
    }
  }
}

void decode_token(const uint8_t* data, const uint8_t* scales, const float* middles, int64_t rows, int64_t dim,
                  const StepTable& table, float* x) {
  for (int64_t c = 0; c < dim; c += 8) {
    float steps[8];
    for (int i = 0; i < 8; ++i) steps[i] = table.step[scales[c + i] & 0x7F];
    const F8 step = load8(steps), middle = load8(middles + c);
    for (int64_t r = 0; r < rows; ++r) store8(x + r * dim + c, values8(data + (r * dim + c) / 2) * step + middle);
  }
}

// The e4m3 value nearest to a magnitude.
KVTIER_INLINE F8 round_eight(F8 x) {
  const F8 t = smaller(x, all(448.0f));
  const F8 small = (t + all(16384.0f)) - all(16384.0f);
  const W8 normal = (W8(t) + all(0x7FFFFu) + (W8(t) >> 20 & all(1u))) & all(0xFFF00000u);
  return t < all(0.015625f) ? small : F8(normal);
}

KVTIER_INLINE W8 eight8(F8 x) {
  const F8 t = smaller(magnitude(x), all(448.0f));
  const W8 small = W8(t + all(16384.0f)) - all(0x46800000u);
  const W8 normal = ((W8(t) + all(0x7FFFFu) + (W8(t) >> 20 & all(1u))) >> 20) - all(120u << 3);
  return (t < all(0.015625f) ? small : normal) | sign(x) >> 24;
}

KVTIER_INLINE void put8(W8 codes, uint8_t* data) {
#if defined(KVTIER_HAVE_AVX2)
  const __m256i words = _mm256_packus_epi32(__m256i(codes), __m256i(codes));
  const __m256i bytes = _mm256_packus_epi16(words, words);
  const uint32_t halves[2] = {uint32_t(_mm256_extract_epi32(bytes, 0)), uint32_t(_mm256_extract_epi32(bytes, 4))};
  __builtin_memcpy(data, halves, 8);
#else
  typedef uint8_t Byte8 __attribute__((vector_size(8)));
  const Byte8 bytes = __builtin_convertvector(codes, Byte8);
  __builtin_memcpy(data, &bytes, 8);
#endif
}

// Whether a magnitude lies above 464.
KVTIER_INLINE bool clips(F8 most) {
  float lanes[8];
  store8(lanes, most);
  bool any = false;
  for (float lane : lanes) any |= lane > 464.0f;
  return any;
}

bool encode_fp8(const float* x, int64_t dim, uint8_t* data) {
  F8 most = all(0.0f);
  for (int64_t at = 0; at < dim; at += 8) {
    most = larger(most, magnitude(load8(x + at)));
    put8(eight8(load8(x + at)), data + at);
  }
  return clips(most);
}

bool encode_fp8_mean(const float* x, const float* mean, int64_t dim, uint8_t* data, bool* centred) {
  float error = 0.0f, off_error = 0.0f;
  for (int64_t at = 0; at < dim; at += 16) {
    F8 rest[2], off_rest[2];
    for (int i = 0; i < 2; ++i) {
      const F8 value = load8(x + at + 8 * i), d = value - load8(mean + at + 8 * i);
      // The sign of what is left does not matter for its square.
      rest[i] = magnitude(value) - round_eight(magnitude(value));
      off_rest[i] = magnitude(d) - round_eight(magnitude(d));
    }
    error += sum_lanes(rest[0] * rest[0] + rest[1] * rest[1]);
    off_error += sum_lanes(off_rest[0] * off_rest[0] + off_rest[1] * off_rest[1]);
  }
  *centred = off_error < error;
  const W8 taken = all(*centred ? 0xFFFFFFFFu : 0u);
  F8 most = all(0.0f);
  for (int64_t at = 0; at < dim; at += 8) {
    const F8 value = load8(x + at) - F8(W8(load8(mean + at)) & taken);
    most = larger(most, magnitude(value));
    const W8 code = eight8(value);
    put8(code == (all(0x80u) & taken) ? all(0u) : code, data + at);
  }
  return clips(most);
}

void decode_fp8(const uint8_t* data, const float* mean, int64_t dim, float* x) {
  if (mean)
    for (int64_t i = 0; i < dim; ++i) x[i] = eight_value(data[i]) + mean[i];
  else
    for (int64_t i = 0; i < dim; ++i) x[i] = eight_value(data[i]);
}

void errors(const float* a, const float* b, int64_t n, double* difference, double* size) {
  double lost[8] = {}, whole[8] = {};
  for (int64_t i = 0; i < n; i += 8)
    for (int l = 0; l < 8; ++l) {
      const double d = double(a[i + l]) - double(b[i + l]), x = double(b[i + l]);
      lost[l] += d * d;
      whole[l] += x * x;
    }
  for (int l = 0; l < 8; ++l) *difference += lost[l], *size += whole[l];
}

#define KVTIER_FORM_KERNELS                                                                                       \
  {                                                                                                               \
    load, store, widen, narrow, amax8, mean, encode_two, decode_two, encode_offset, decode_offset, encode_token, \
        decode_token, encode_fp8, encode_fp8_mean, decode_fp8, widen16, errors                                    \
  }
