// The number formats of a cold page, one value at a time. Used to build tables and by the float32 helper.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvtier {

constexpr int kGroup = 16;
constexpr int kScaleMinCode = 0x08;  // 2^-6, the smallest normal e4m3
constexpr int kScaleMaxCode = 0x7E;  // 448

// Element types of hot buffers. The numbers are part of the plan that Python builds.
enum class DType : int64_t { kBF16 = 0, kFP16 = 1, kFP32 = 2, kBytes = 3, kFP8 = 4 };

// How a part of a buffer is stored. The numbers are part of the plan that Python builds.
enum class Coding : int64_t { kRaw = 0, kNvfp4 = 1, kTwoFp4 = 2, kOffset = 3, kToken = 4, kFp8 = 5, kFp8Mean = 6 };

inline uint32_t bits_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}

inline float float_of(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

inline float bf16_to_float(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

inline float fp16_to_float(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 0x3FF;
  float x;
  if (exponent == 31)
    x = mantissa ? float_of(0x7FC00000u) : float_of(0x7F800000u);
  else if (exponent == 0)
    x = std::ldexp(float(mantissa), -24);
  else
    x = std::ldexp(float(1024 + mantissa), exponent - 25);
  return bits & 0x8000 ? -x : x;
}

// Nearest even. NaN becomes infinity: both mean a refused page, and a carry out of a NaN must not look like zero.
inline uint16_t bf16_of(float x) {
  const uint32_t b = bits_of(x);
  uint32_t magnitude = b & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) magnitude = 0x7F800000u;
  magnitude = (magnitude + 0x7FFFu + ((magnitude >> 16) & 1u)) >> 16;
  return uint16_t(magnitude | ((b >> 16) & 0x8000u));
}

// Nearest even, for |x| below 65520; NaN stays NaN. Through a float whose last bit is FP16's.
inline uint16_t fp16_of(float x) {
  const uint16_t sign = uint16_t((bits_of(x) >> 16) & 0x8000u);
  const float a = std::fabs(x);
  if (std::isnan(x)) return 0x7E00;
  if (a == 0.0f) return sign;
  int exponent = std::ilogb(a);
  if (exponent < -14) exponent = -14;
  const float steps = std::nearbyint(std::ldexp(a, 10 - exponent));
  return uint16_t(sign + ((exponent + 14) << 10) + int(steps));
}

inline float e4m3_to_float(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  float x;
  if ((code & 0x7F) == 0x7F)
    x = float_of(0x7FC00000u);
  else if (exponent == 0)
    x = std::ldexp(float(mantissa), -9);
  else
    x = std::ldexp(float(8 + mantissa), exponent - 10);
  return code & 0x80 ? -x : x;
}

// Nearest even, saturating at 448; the sign of zero is kept.
inline uint8_t e4m3_of(float x) {
  const float limited = std::fabs(x) < 448.0f ? std::fabs(x) : 448.0f;
  const uint32_t b = bits_of(limited);
  const uint32_t normal = ((b + 0x7FFFFu + ((b >> 20) & 1u)) >> 20) - (120u << 3);
  const uint32_t small = bits_of(limited + 16384.0f) - 0x46800000u;  // the sum's last bit is worth 2^-9
  return uint8_t((limited < 0.015625f ? small : normal) | ((bits_of(x) >> 24) & 0x80u));
}

inline float power_of_two(int k) { return std::ldexp(1.0f, k); }

// e4m3 code of a group's scale: amax / 6 under the global scale, nearest even, never below 2^-6.
inline uint8_t scale_code(float amax, float global_scale) {
  float wanted = global_scale * (amax * (1.0f / 6.0f));
  if (!(wanted > 0.015625f)) wanted = 0.015625f;
  if (wanted > 448.0f) wanted = 448.0f;
  const uint32_t b = bits_of(wanted);
  return uint8_t(((b + 0x7FFFFu + ((b >> 20) & 1u)) >> 20) - ((127u - 7u) << 3));
}

inline float inverse_step(uint8_t scale, float global_scale) {
  return 1.0f / (e4m3_to_float(scale) * (1.0f / global_scale));
}

// Magnitude code of e2m1: nearest, ties to the even code, saturating.
inline int e2m1_magnitude(float a) {
  return int(a > 0.25f) + int(a >= 0.75f) + int(a > 1.25f) + int(a >= 1.75f) + int(a > 2.5f) + int(a >= 3.5f) +
         int(a > 5.0f);
}

inline float e2m1_to_float(int code) {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

}  // namespace kvtier
