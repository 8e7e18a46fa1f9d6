// The loops behind FormKernels, included once per instruction set, inside an unnamed namespace. Written so that compilers
// make vectors of them: fixed trip counts, no calls, no branches, sums in the order of vector lanes.

constexpr float kHalfStep = 6291456.0f;  // 1.5 * 2^22: a float that large has steps of 0.5, and so on
constexpr float kOneStep = 12582912.0f;
constexpr float kTwoStep = 25165824.0f;
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

template <class Load>
inline void map_rows(int64_t n, float* x, Load&& load) {
  for (int64_t i = 0; i < n; ++i) x[i] = load(i);
}

void load(const uint8_t* hot, int64_t dim, DType dtype, const Fp8Values* fp8, float* x) {
  switch (dtype) {
    case DType::kBF16: map_rows(dim, x, [&](int64_t i) { return brain_value(hot_at<uint16_t>(hot, i)); }); break;
    case DType::kFP16: map_rows(dim, x, [&](int64_t i) { return half_value(hot_at<uint16_t>(hot, i)); }); break;
    case DType::kFP8: map_rows(dim, x, [&](int64_t i) { return fp8->value[hot[i]]; }); break;
    default: map_rows(dim, x, [&](int64_t i) { return brain_value(brain_bits(hot_at<float>(hot, i))); });
  }
}

void store(const float* x, int64_t dim, DType dtype, float inverse_fp8_scale, uint8_t* hot) {
  switch (dtype) {
    case DType::kBF16:
      for (int64_t i = 0; i < dim; ++i) put_hot(hot, i, brain_bits(x[i]));
      break;
    case DType::kFP16:
      for (int64_t i = 0; i < dim; ++i) put_hot(hot, i, half_bits(x[i]));
      break;
    case DType::kFP8:
      for (int64_t i = 0; i < dim; ++i) hot[i] = eight_bits(x[i] * inverse_fp8_scale);
      break;
    default:
      for (int64_t i = 0; i < dim; ++i) put_hot(hot, i, brain_value(brain_bits(x[i])));
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
KVTIER_INLINE F8 larger(F8 a, F8 b) { return a < b ? b : a; }
KVTIER_INLINE F8 smaller(F8 a, F8 b) { return b < a ? b : a; }

// Lanes i and i + 4, then + 2, then + 1.
KVTIER_INLINE float sum_lanes(F8 x) {
  x = x + KVTIER_SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3);
  x = x + KVTIER_SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5);
  x = x + KVTIER_SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6);
  return x[0];
}
KVTIER_INLINE float largest_lane(F8 x) {
  x = larger(x, KVTIER_SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = larger(x, KVTIER_SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5));
  x = larger(x, KVTIER_SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6));
  return x[0];
}

// Scale code of a magnitude, as scale_code() has it.
KVTIER_INLINE uint32_t scale_bits(float amax, float global_scale) {
  float wanted = global_scale * (amax * (1.0f / 6.0f));
  wanted = wanted > 0.015625f ? wanted : 0.015625f;
  wanted = wanted < 448.0f ? wanted : 448.0f;
  const uint32_t b = to_bits(wanted);
  return ((b + 0x7FFFFu + ((b >> 20) & 1u)) >> 20) - (120u << 3);
}

// e2m1 code without sign of a magnitude in steps, and what it is worth: adding a number whose last bit is one step rounds.
struct Rounded {
  W8 code;
  F8 magnitude;
};
KVTIER_INLINE Rounded round_e2m1(F8 steps) {
  const F8 t = smaller(steps, all(6.0f));
  const F8 large = t < all(2.0f) ? all(kHalfStep) : t < all(4.0f) ? all(kOneStep) : all(kTwoStep);
  const W8 base = t < all(2.0f)   ? all(0x4AC00000u)
                  : t < all(4.0f) ? all(0x4B400000u - 2u)
                                  : all(0x4BC00000u - 4u);
  const F8 sum = t + large;
  return {W8(sum) - base, sum - large};
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

// 16 values as codes with their sign in bit 3, and what is left of them.
struct Group {
  W8 code[2];
  F8 rest[2];
  uint32_t scale;
};
KVTIER_INLINE Group quantize16(F8 x0, F8 x1, float global_scale, const StepTable& table) {
  Group g;
  g.scale = scale_bits(largest_lane(larger(magnitude(x0), magnitude(x1))), global_scale);
  const F8 inverse = all(table.inverse[g.scale]), step = all(table.step[g.scale]);
  const F8 x[2] = {x0, x1};
  for (int i = 0; i < 2; ++i) {
    const Rounded r = round_e2m1(magnitude(x[i] * inverse));
    g.code[i] = r.code | sign(x[i]) >> 28;
    g.rest[i] = x[i] - F8(W8(r.magnitude * step) | sign(x[i]));
  }
  return g;
}

KVTIER_INLINE float squares16(F8 a, F8 b) { return sum_lanes(a * a + b * b); }

void encode_two(const float* x, int64_t groups, float global_scale, const StepTable& table, uint8_t* data,
                uint8_t* scales) {
  for (int64_t g = 0; g < groups; ++g, x += 16, data += 16, scales += 2) {
    const Group first = quantize16(load8(x), load8(x + 8), global_scale, table);
    const Group second = quantize16(first.rest[0], first.rest[1], global_scale, table);
    pack16(first.code[0], first.code[1], data);
    pack16(second.code[0], second.code[1], data + 8);
    scales[0] = uint8_t(first.scale), scales[1] = uint8_t(second.scale);
  }
}

KVTIER_INLINE W8 positive_zeros(W8 codes) { return codes == all(8u) ? all(0u) : codes; }

void encode_offset(const float* x, const float* mean, int64_t groups, float global_scale, const StepTable& table,
                   uint8_t* data, uint8_t* scales) {
  for (int64_t g = 0; g < groups; ++g, x += 16, mean += 16, data += 8) {
    const F8 a = load8(x), b = load8(x + 8);
    const Group plain = quantize16(a, b, global_scale, table);
    const Group off = quantize16(a - load8(mean), b - load8(mean + 8), global_scale, table);
    const bool take = squares16(off.rest[0], off.rest[1]) < squares16(plain.rest[0], plain.rest[1]);
    scales[g] = uint8_t(take ? off.scale | 0x80u : plain.scale);
    const W8 taken = all(take ? 0xFFFFFFFFu : 0u);
    pack16((positive_zeros(off.code[0]) & taken) | (plain.code[0] & ~taken),
           (positive_zeros(off.code[1]) & taken) | (plain.code[1] & ~taken), data);
  }
}

// Eight nibbles as e2m1 values.
KVTIER_INLINE F8 values8(const uint8_t* data) {
  uint32_t word;
  __builtin_memcpy(&word, data, 4);
  const W8 codes = all(word) >> W8{0, 4, 8, 12, 16, 20, 24, 28};
  const W8 signs = codes << 28 & all(kFloatSign);
#if defined(KVTIER_PERMUTES) && !defined(__clang__)
  // One instruction, which looks at the lower three bits of each index.
  const F8 sizes = __builtin_shuffle(F8{0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f}, I8(codes));
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

KVTIER_INLINE F8 rounded_to(DType coded, F8 x, uint16_t* bits) {
  float values[8];
  store8(values, x);
  if (coded == DType::kFP16)
    for (int i = 0; i < 8; ++i) bits[i] = half_bits(values[i]), values[i] = half_value(bits[i]);
  else
    for (int i = 0; i < 8; ++i) bits[i] = brain_bits(values[i]), values[i] = brain_value(bits[i]);
  return load8(values);
}

// What scale codes of normal size are worth.
KVTIER_INLINE F8 steps_of(W8 scales, float global) { return F8((scales << 20) + all(120u << 23)) * all(global); }

void encode_token(const float* x, int64_t rows, int64_t dim, float global_scale, const StepTable&, DType coded,
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
    const F8 wanted = smaller(larger(all(global_scale) * (amax * all(1.0f / 6.0f)), all(0.015625f)), all(448.0f));
    const W8 codes = ((W8(wanted) + all(0x7FFFFu) + (W8(wanted) >> 20 & all(1u))) >> 20) - all(120u << 3);
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

inline bool encode_eight(const float* x, int64_t dim, uint8_t* data) {
  uint32_t most = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const uint32_t magnitude = to_bits(x[i]) & ~kFloatSign;
    most = magnitude > most ? magnitude : most;
  }
  for (int64_t i = 0; i < dim; ++i) data[i] = eight_bits(x[i]);
  return most > 0x43E80000u;  // 464
}

bool encode_fp8(const float* x, int64_t dim, uint8_t* data) { return encode_eight(x, dim, data); }

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
    error += squares16(rest[0], rest[1]);
    off_error += squares16(off_rest[0], off_rest[1]);
  }
  *centred = off_error < error;
  if (!*centred) return encode_eight(x, dim, data);
  uint32_t most = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const uint32_t magnitude = to_bits(x[i] - mean[i]) & ~kFloatSign;
    most = magnitude > most ? magnitude : most;
  }
  for (int64_t i = 0; i < dim; ++i) {
    const uint8_t code = eight_bits(x[i] - mean[i]);
    data[i] = code == 0x80 ? uint8_t(0) : code;
  }
  return most > 0x43E80000u;
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
