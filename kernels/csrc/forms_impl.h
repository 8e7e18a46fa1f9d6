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

// Scale code of a magnitude, as scale_code() has it.
inline uint32_t scale_bits(float amax, float global_scale) {
  float wanted = global_scale * (amax * (1.0f / 6.0f));
  wanted = wanted > 0.015625f ? wanted : 0.015625f;
  wanted = wanted < 448.0f ? wanted : 448.0f;
  const uint32_t b = to_bits(wanted);
  return ((b + 0x7FFFFu + ((b >> 20) & 1u)) >> 20) - (120u << 3);
}

// e2m1 code without sign of a magnitude in steps, and what it is worth: adding a number whose last bit is one step rounds.
struct Rounded {
  uint32_t code;
  float magnitude;
};
inline Rounded round_e2m1(float steps) {
  const float t = steps < 6.0f ? steps : 6.0f;
  const float above = t < 4.0f ? kOneStep : kTwoStep;
  const uint32_t above_code = t < 4.0f ? 0x4B400000u - 2u : 0x4BC00000u - 4u;
  const float large = t < 2.0f ? kHalfStep : above;
  const uint32_t base = t < 2.0f ? 0x4AC00000u : above_code;
  const float sum = t + large;
  return {to_bits(sum) - base, sum - large};
}

// 16 codes, one per byte, to 8 bytes.
inline void pack(const uint8_t* codes, uint8_t* data) {
  uint16_t pairs[8];
  __builtin_memcpy(pairs, codes, 16);
  for (int i = 0; i < 8; ++i) data[i] = uint8_t(pairs[i] | pairs[i] >> 4);
}

inline float sum16(const float* x) {
  float a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) a[i] = x[i] + x[i + 8];
  for (int i = 0; i < 4; ++i) b[i] = a[i] + a[i + 4];
  for (int i = 0; i < 2; ++i) c[i] = b[i] + b[i + 2];
  return c[0] + c[1];
}

inline float amax16(const float* x) {
  int32_t most = 0;
  for (int i = 0; i < 16; ++i) {
    const int32_t magnitude = int32_t(to_bits(x[i]) & ~kFloatSign);
    most = magnitude > most ? magnitude : most;
  }
  return to_float(uint32_t(most));
}

// Codes of 16 values (sign in bit 3) and what is left of them; the scale code.
inline uint32_t quantize16(const float* x, float global_scale, const StepTable& table, uint8_t* codes, float* rest) {
  const uint32_t scale = scale_bits(amax16(x), global_scale);
  const float inverse = table.inverse[scale], step = table.step[scale];
  for (int i = 0; i < 16; ++i) {
    const uint32_t sign = to_bits(x[i]) & kFloatSign;
    const Rounded r = round_e2m1(to_float(to_bits(x[i] * inverse) & ~kFloatSign));
    codes[i] = uint8_t(r.code | sign >> 28);
    rest[i] = x[i] - to_float(to_bits(r.magnitude * step) | sign);
  }
  return scale;
}

inline float squares16(const float* x) {
  float squares[16];
  for (int i = 0; i < 16; ++i) squares[i] = x[i] * x[i];
  return sum16(squares);
}

void encode_two(const float* x, int64_t groups, float global_scale, const StepTable& table, uint8_t* data,
                uint8_t* scales) {
  uint8_t codes[16];
  float rest[16], unused[16];
  for (int64_t g = 0; g < groups; ++g, x += 16, data += 16, scales += 2) {
    scales[0] = uint8_t(quantize16(x, global_scale, table, codes, rest));
    pack(codes, data);
    scales[1] = uint8_t(quantize16(rest, global_scale, table, codes, unused));
    pack(codes, data + 8);
  }
}

void encode_offset(const float* x, const float* mean, int64_t groups, float global_scale, const StepTable& table,
                   uint8_t* data, uint8_t* scales) {
  uint8_t codes[16], off_codes[16];
  float rest[16], off_rest[16], d[16];
  for (int64_t g = 0; g < groups; ++g, x += 16, mean += 16, data += 8) {
    for (int i = 0; i < 16; ++i) d[i] = x[i] - mean[i];
    const uint32_t scale = quantize16(x, global_scale, table, codes, rest);
    const uint32_t off_scale = quantize16(d, global_scale, table, off_codes, off_rest);
    const bool off = squares16(off_rest) < squares16(rest);
    for (int i = 0; i < 16; ++i) off_codes[i] = off_codes[i] == 8 ? uint8_t(0) : off_codes[i];
    scales[g] = uint8_t(off ? off_scale | 0x80u : scale);
    pack(off ? off_codes : codes, data);
  }
}

// 8 bytes to 16 codes, one per byte.
inline void unpack(const uint8_t* data, uint8_t* codes) {
  uint16_t pairs[8];
  for (int i = 0; i < 8; ++i) pairs[i] = uint16_t((data[i] & 15) | (data[i] & 0xF0) << 4);
  __builtin_memcpy(codes, pairs, 16);
}

inline float e2m1_value(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const float small = float(int32_t(magnitude)) * 0.5f;
  const float normal = to_float((magnitude << 22) + (126u << 23));
  return to_float(to_bits(magnitude < 2u ? small : normal) | (code & 8u) << 28);
}

inline void values16(const uint8_t* data, float step, float* x) {
  uint8_t codes[16];
  unpack(data, codes);
  for (int i = 0; i < 16; ++i) x[i] = e2m1_value(codes[i]) * step;
}

void decode_two(const uint8_t* data, const uint8_t* scales, int64_t groups, const StepTable& table, float* x) {
  float rest[16];
  for (int64_t g = 0; g < groups; ++g, x += 16, data += 16, scales += 2) {
    values16(data, table.step[scales[0] & 0x7F], x);
    values16(data + 8, table.step[scales[1] & 0x7F], rest);
    for (int i = 0; i < 16; ++i) x[i] += rest[i];
  }
}

void decode_offset(const uint8_t* data, const uint8_t* scales, const float* mean, int64_t groups,
                   const StepTable& table, float* x) {
  for (int64_t g = 0; g < groups; ++g, x += 16, mean += 16, data += 8) {
    values16(data, table.step[scales[g] & 0x7F], x);
    // Adding 0 would lose the sign of zeros.
    const bool off = scales[g] & 0x80;
    for (int i = 0; i < 16; ++i) {
      const float sum = x[i] + mean[i];
      x[i] = off ? sum : x[i];
    }
  }
}

constexpr int64_t kChannels = 64;  // of one block of encode_token and decode_token

template <int kCount>
inline void encode_channels(const float* x, int64_t rows, int64_t dim, float global_scale, const StepTable& table,
                            DType coded, uint8_t* data, uint8_t* scales, uint16_t* middles) {
  float low[kCount], high[kCount], middle[kCount], inverse[kCount];
  for (int c = 0; c < kCount; ++c) low[c] = high[c] = x[c];
  for (int64_t r = 1; r < rows; ++r)
    for (int c = 0; c < kCount; ++c) {
      const float value = x[r * dim + c];
      low[c] = value < low[c] ? value : low[c];
      high[c] = value > high[c] ? value : high[c];
    }
  for (int c = 0; c < kCount; ++c) middle[c] = low[c] * 0.5f + high[c] * 0.5f + 0.0f;
  if (coded == DType::kFP16)
    for (int c = 0; c < kCount; ++c) middles[c] = half_bits(middle[c]), middle[c] = half_value(middles[c]);
  else
    for (int c = 0; c < kCount; ++c) middles[c] = brain_bits(middle[c]), middle[c] = brain_value(middles[c]);
  // Rounding keeps order, so the farthest values are the lowest and the highest.
  for (int c = 0; c < kCount; ++c) {
    const float below = to_float(to_bits(low[c] - middle[c]) & ~kFloatSign);
    const float above = to_float(to_bits(high[c] - middle[c]) & ~kFloatSign);
    scales[c] = uint8_t(scale_bits(below > above ? below : above, global_scale));
  }
  for (int c = 0; c < kCount; ++c) inverse[c] = table.inverse[scales[c]];
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t codes[kCount];
    for (int c = 0; c < kCount; ++c) {
      const float scaled = (x[r * dim + c] - middle[c]) * inverse[c];
      const uint32_t code = round_e2m1(to_float(to_bits(scaled) & ~kFloatSign)).code | (to_bits(scaled) & kFloatSign) >> 28;
      codes[c] = uint8_t(code == 8u ? 0u : code);
    }
    for (int c = 0; c < kCount; c += 16) pack(codes + c, data + r * dim / 2 + c / 2);
  }
}

void encode_token(const float* x, int64_t rows, int64_t dim, float global_scale, const StepTable& table, DType coded,
                  uint8_t* data, uint8_t* scales, uint16_t* middles) {
  int64_t c = 0;
  for (; c + kChannels <= dim; c += kChannels)
    encode_channels<kChannels>(x + c, rows, dim, global_scale, table, coded, data + c / 2, scales + c, middles + c);
  for (; c < dim; c += 16)
    encode_channels<16>(x + c, rows, dim, global_scale, table, coded, data + c / 2, scales + c, middles + c);
}

void decode_token(const uint8_t* data, const uint8_t* scales, const float* middles, int64_t rows, int64_t dim,
                  const StepTable& table, float* x) {
  for (int64_t c = 0; c < dim; c += 16) {
    float step[16];
    for (int i = 0; i < 16; ++i) step[i] = table.step[scales[c + i] & 0x7F];
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t codes[16];
      unpack(data + (r * dim + c) / 2, codes);
      float* to = x + r * dim + c;
      for (int i = 0; i < 16; ++i) to[i] = e2m1_value(codes[i]) * step[i] + middles[c + i];
    }
  }
}

inline bool encode_eight(const float* x, int64_t dim, uint8_t* data) {
  uint32_t most = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const uint32_t magnitude = to_bits(x[i]) & ~kFloatSign;
    most = magnitude > most ? magnitude : most;
    data[i] = eight_bits(x[i]);
  }
  return most > 0x43E80000u;  // 464
}

bool encode_fp8(const float* x, int64_t dim, uint8_t* data) { return encode_eight(x, dim, data); }

bool encode_fp8_mean(const float* x, const float* mean, int64_t dim, uint8_t* data, bool* centred) {
  float error = 0.0f, off_error = 0.0f;
  for (int64_t at = 0; at < dim; at += 16) {
    float rest[16], off_rest[16];
    for (int i = 0; i < 16; ++i) {
      const float d = x[at + i] - mean[at + i];
      rest[i] = x[at + i] - eight_value(eight_bits(x[at + i]));
      off_rest[i] = d - eight_value(eight_bits(d));
    }
    error += squares16(rest);
    off_error += squares16(off_rest);
  }
  *centred = off_error < error;
  if (!*centred) return encode_eight(x, dim, data);
  uint32_t most = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const float d = x[i] - mean[i];
    const uint32_t magnitude = to_bits(d) & ~kFloatSign;
    most = magnitude > most ? magnitude : most;
    const uint8_t code = eight_bits(d);
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
