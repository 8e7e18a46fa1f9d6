// NVFP4 on a flat array, for the public helper.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numbers.h"

namespace kvtier {

// Throws std::invalid_argument for a type of another item size, k out of range or arrays that do not fit together.
void check_flat(int64_t dtype, size_t item_bytes, int k, int64_t values, int64_t data_bytes, int64_t scale_bytes);

// True if x was finite. float32 is taken as it is, not rounded to BF16.
bool quantize_flat(DType dtype, const uint8_t* x, int64_t values, int k, uint8_t* data, uint8_t* scales);
void dequantize_flat(DType dtype, const uint8_t* data, const uint8_t* scales, int64_t values, int k, uint8_t* out);

}  // namespace kvtier
