#include "tables.h"

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace kvtier {
namespace {

float widen(DType dtype, uint16_t bits) {
  return dtype == DType::kFP16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

uint16_t largest_finite(DType dtype) { return dtype == DType::kFP16 ? 0x7BFF : 0x7F7F; }

void fill(EncodeTable& table, DType dtype, float global_scale) {
  const uint16_t last = largest_finite(dtype);
  for (int m = 0; m < 1 << 15; ++m)
    table.scale[m] = m > last ? uint8_t(kScaleMaxCode) : scale_code(widen(dtype, uint16_t(m)), global_scale);
  for (int code = 0; code < 128; ++code) {
    const bool used = code >= kScaleMinCode && code <= kScaleMaxCode;
    const float inverse = used ? inverse_step(uint8_t(code), global_scale) : 0.0f;
    for (int i = 0; i < 8; ++i) {
      // The smallest magnitude whose code is above i; codes grow with magnitude, so bisect.
      int below = 0, above = last + 1;
      while (used && i < 7 && above - below > 1) {
        const int middle = (below + above) / 2;
        (e2m1_magnitude(widen(dtype, uint16_t(middle)) * inverse) > i ? above : below) = middle;
      }
      table.threshold[code][i] = uint32_t(above - 1) * 0x10001u;
    }
  }
}

void fill(DecodeTable& table, DType dtype, float global_scale) {
  const float global = 1.0f / global_scale;
  for (int scale = 0; scale < 256; ++scale)
    for (int code = 0; code < 16; ++code) {
      const float x = e2m1_to_float(code) * (e4m3_to_float(uint8_t(scale)) * global);
      const uint16_t bits = dtype == DType::kFP16 ? fp16_of(x) : std::isnan(x) ? uint16_t(0x7FC0) : bf16_of(x);
      table.bytes[scale][code] = uint8_t(bits);
      table.bytes[scale][16 + code] = uint8_t(bits >> 8);
    }
}

void fill(StepTable& table, DType, float global_scale) {
  const float global = 1.0f / global_scale;
  for (int code = 0; code < 128; ++code) {
    table.step[code] = e4m3_to_float(uint8_t(code)) * global;
    table.inverse[code] = code >= kScaleMinCode && code <= kScaleMaxCode ? inverse_step(uint8_t(code), global_scale) : 0.0f;
  }
}

void fill_fp8(DecodeTable& table, float inverse_scale, float global_scale) {
  const float global = 1.0f / global_scale;
  for (int scale = 0; scale < 256; ++scale)
    for (int code = 0; code < 16; ++code) {
      const float x = e2m1_to_float(code) * (e4m3_to_float(uint8_t(scale)) * global);
      table.bytes[scale][code] = std::isnan(x) ? uint8_t(0x7F) : e4m3_of(x * inverse_scale);
      table.bytes[scale][16 + code] = 0;
    }
}

template <class Table>
class Cache {
 public:
  const Table& at(DType dtype, float global_scale) {
    Entry& entry = entry_of(dtype == DType::kFP16, global_scale);
    std::call_once(entry.once, [&] {
      auto table = std::make_unique<Table>();
      fill(*table, dtype, global_scale);
      entry.table = std::move(table);
    });
    return *entry.table;
  }

 private:
  struct Entry {
    std::once_flag once;
    std::unique_ptr<Table> table;
  };

  Entry& entry_of(bool fp16, float global_scale) {
    int exponent;
    const int k = std::frexp(global_scale, &exponent) == 0.5f ? 1 - exponent : kMaxK + 1;
    if (k >= -kMaxK && k <= kMaxK) return entries_[fp16][size_t(k + kMaxK)];
    // A model has two per layer at most.
    std::lock_guard<std::mutex> lock(mutex_);
    return others_[{fp16, bits_of(global_scale)}];
  }

  static constexpr int kMaxK = 100;
  std::array<std::array<Entry, 2 * kMaxK + 1>, 2> entries_;
  std::mutex mutex_;
  std::map<std::pair<bool, uint32_t>, Entry> others_;
};

}  // namespace

const EncodeTable& encode_table(DType dtype, float global_scale) {
  static Cache<EncodeTable>& cache = *new Cache<EncodeTable>;
  return cache.at(dtype, global_scale);
}

const DecodeTable& decode_table(DType dtype, float global_scale) {
  static Cache<DecodeTable>& cache = *new Cache<DecodeTable>;
  return cache.at(dtype, global_scale);
}

const DecodeTable& fp8_decode_table(float global_scale, float fp8_scale) {
  // Engines have few scales, one per layer and role at most; an entry is 8 KiB and stays.
  static std::mutex& mutex = *new std::mutex;
  static auto& tables = *new std::map<std::pair<uint32_t, uint32_t>, std::unique_ptr<DecodeTable>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<DecodeTable>& table = tables[{bits_of(global_scale), bits_of(fp8_scale)}];
  if (!table) {
    table = std::make_unique<DecodeTable>();
    fill_fp8(*table, 1.0f / fp8_scale, global_scale);
  }
  return *table;
}

const StepTable& step_table(float global_scale) {
  static Cache<StepTable>& cache = *new Cache<StepTable>;
  return cache.at(DType::kBF16, global_scale);
}

void fill(Fp8Values& values, float fp8_scale) {
  values.scale_bits = bits_of(fp8_scale);
  for (int code = 0; code < 256; ++code) {
    const float x = e4m3_to_float(uint8_t(code)) * fp8_scale;
    values.half[code] = std::fabs(x) >= 65520.0f ? uint16_t(0x7C00 | (code & 0x80) << 8) : fp16_of(x);
    values.value[code] = fp16_to_float(values.half[code]);
  }
}

GlobalScaleChoice select_k(DType dtype, float amax) {
  const KLimits limits = k_limits(dtype);
  if (amax == 0.0f) return {limits.low, false};
  if (std::isinf(amax)) return {limits.high, true};
  // 2784 = 1.359375 * 2^11, so the mantissa of amax decides between two neighbours.
  const int exponent = std::ilogb(amax);
  int k = exponent - 11 + (std::ldexp(amax, -exponent) > 1.359375f);
  if (k > limits.high) return {limits.high, true};
  if (k < limits.low) k = limits.low;
  return {k, false};
}

}  // namespace kvtier
