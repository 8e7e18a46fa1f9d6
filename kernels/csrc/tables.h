// Tables that turn NVFP4 arithmetic on 16-bit values into look-ups and integer compares. Built once per type and global
// scale, which is 2^-k or a number from a checkpoint.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace kvtier {

struct EncodeTable {
  // Scale code by the 15 magnitude bits of a group's amax.
  alignas(64) uint8_t scale[1 << 15];
  // Per scale code, seven thresholds on magnitude bits: a value's code is how many it exceeds. Ties are folded in.
  // Each is stored twice in 32 bits, the form that one load broadcasts to 16 lanes.
  alignas(64) uint32_t threshold[128][8];
};

struct DecodeTable {
  // Per scale code, the low bytes and then the high bytes of the 16 values that a nibble can mean.
  alignas(64) uint8_t bytes[256][32];
};

struct KLimits {
  int low, high;
};

// Range of k by the type that decoded values have.
constexpr KLimits k_limits(DType dtype) {
  return dtype == DType::kFP16 ? KLimits{-14, 4} : dtype == DType::kFP8 ? KLimits{-2, 4} : KLimits{-100, 100};
}

// Range of a global scale of a checkpoint: as far as 2^-k goes below, so that no value decodes past the type's end.
inline bool checkpoint_scale_ok(DType dtype, float global_scale) {
  return global_scale >= power_of_two(-k_limits(dtype).high) && global_scale <= 0x1p100f;
}

// `dtype` is kBF16 or kFP16; a global scale is within its limits. Thread-safe; the table lives as long as the process.
const EncodeTable& encode_table(DType dtype, float global_scale);
const DecodeTable& decode_table(DType dtype, float global_scale);

// Values in the low bytes as e4m3 codes of what FP8 elements with that scale mean; the high bytes are 0.
const DecodeTable& fp8_decode_table(float global_scale, float fp8_scale);

struct StepTable {
  float step[128];     // what one unit of e2m1 is worth, by scale code
  float inverse[128];  // its correctly rounded reciprocal
};
const StepTable& step_table(float global_scale);

// What an FP8 element with its scale is worth, by its code: as FP16 and widened again. NaN codes give NaN.
struct Fp8Values {
  uint32_t scale_bits;
  uint16_t half[256];
  float value[256];
};
void fill(Fp8Values& values, float fp8_scale);

// The smallest k with amax <= 2784 * 2^k, clamped to the limits; `clips` tells that even the largest k is too small.
struct GlobalScaleChoice {
  int k;
  bool clips;
};
GlobalScaleChoice select_k(DType dtype, float amax);

}  // namespace kvtier
