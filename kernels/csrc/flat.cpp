#include "flat.h"

#include <stdexcept>
#include <string>

#include "rows.h"

namespace kvtier {
namespace {

void quantize_floats(const uint8_t* x, int64_t groups, int k, uint8_t* data, uint8_t* scales) {
  const float global_scale = power_of_two(-k);
  for (int64_t g = 0; g < groups; ++g, x += kGroup * 4, data += kGroup / 2) {
    float group[kGroup], amax = 0.0f;
    std::memcpy(group, x, sizeof group);
    for (float value : group) amax = std::fabs(value) > amax ? std::fabs(value) : amax;
    scales[g] = scale_code(amax, global_scale);
    const float inverse = inverse_step(scales[g], global_scale);
    for (int i = 0; i < kGroup; i += 2) {
      const int even = e2m1_magnitude(std::fabs(group[i] * inverse)) | (std::signbit(group[i]) ? 8 : 0);
      const int odd = e2m1_magnitude(std::fabs(group[i + 1] * inverse)) | (std::signbit(group[i + 1]) ? 8 : 0);
      data[i / 2] = uint8_t(even | odd << 4);
    }
  }
}

}  // namespace

void check_flat(int64_t dtype, size_t item_bytes, int k, int64_t values, int64_t data_bytes, int64_t scale_bytes) {
  const bool wide = dtype == int64_t(DType::kFP32);
  if (dtype < 0 || dtype > int64_t(DType::kFP32) || item_bytes != (wide ? 4u : 2u))
    throw std::invalid_argument("dtype code " + std::to_string(dtype) + " does not fit the array's elements");
  const KLimits limits = k_limits(DType(dtype));
  if (k < limits.low || k > limits.high)
    throw std::invalid_argument("k = " + std::to_string(k) + ", must be in [" + std::to_string(limits.low) + ", " +
                                std::to_string(limits.high) + "]");
  if (values % kGroup || data_bytes != values / 2 || scale_bytes != values / kGroup)
    throw std::invalid_argument(std::to_string(values) + " values need " + std::to_string(values / 2) + " data and " +
                                std::to_string(values / kGroup) + " scale bytes, got " + std::to_string(data_bytes) +
                                " and " + std::to_string(scale_bytes));
}

bool quantize_flat(DType dtype, const uint8_t* x, int64_t values, int k, uint8_t* data, uint8_t* scales) {
  const RowKernels& kernels = row_kernels();
  const Rows rows = Rows::single(x, values > 0);
  if (dtype == DType::kFP32) {
    if (kernels.amax32(rows, values) >= 0x7F800000u) return false;
    quantize_floats(x, values / kGroup, k, data, scales);
    return true;
  }
  if (kernels.amax16(rows, values) >= (dtype == DType::kFP16 ? 0x7C00u : 0x7F80u)) return false;
  kernels.encode16(rows, values / kGroup, Ahead{}, encode_table(dtype, power_of_two(-k)), data, scales);
  return true;
}

void dequantize_flat(DType dtype, const uint8_t* data, const uint8_t* scales, int64_t values, int k, uint8_t* out) {
  const RowKernels& kernels = row_kernels();
  const Rows rows = Rows::single(out, values > 0);
  // Every value is exact in BF16, so float32 takes BF16's table.
  const DecodeTable& table = decode_table(dtype == DType::kFP16 ? DType::kFP16 : DType::kBF16, power_of_two(-k));
  (dtype == DType::kFP32 ? kernels.decode32 : kernels.decode16)(data, scales, values / kGroup, Ahead{}, table, rows,
                                                                         false);
}

}  // namespace kvtier
