// Whole pages between hot buffers and cold slots, many in one call.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace kvtier {

// One part of every page, a buffer or a range of its columns, as a row of the plan. Element (page, head, token, d) is at
// address + page * page_stride + head * head_stride + token * token_stride + d * item size; strides in bytes.
struct BufferPlan {
  int64_t address, page_stride, head_stride, token_stride;
  int64_t num_tokens;  // of the pool: token page * page_tokens + token exists if it is smaller
  int64_t heads, tokens, dim;
  int64_t dtype;       // DType
  int64_t coding;      // Coding
  int64_t data_offset, scale_offset;
  int64_t side_offset;     // of means, middles and flags
  int64_t fp8_scale_bits;  // what an e4m3 element is multiplied by, as the bits of a float
  int64_t global_scale_bits;  // of a checkpoint, as the bits of a float; 0: chosen for the page, or 1

  bool compressed() const { return coding != int64_t(Coding::kRaw); }
  // Has scale bytes, and a byte k in the table.
  bool has_k() const { return compressed() && coding != int64_t(Coding::kFp8) && coding != int64_t(Coding::kFp8Mean); }
  float fp8_scale() const { return float_of(uint32_t(fp8_scale_bits)); }
  float global_scale() const { return float_of(uint32_t(global_scale_bits)); }
  // Bytes of its entry in the table: k, or the global scale itself.
  int64_t table_bytes() const { return !has_k() ? 0 : global_scale_bits ? 4 : 1; }
};
constexpr int64_t kPlanFields = 15;
static_assert(sizeof(BufferPlan) == kPlanFields * sizeof(int64_t));

struct Batch {
  const BufferPlan* buffers;
  int64_t num_buffers;
  const int64_t* page_ids;
  const int32_t* valid_tokens;
  const int64_t* offsets;  // of each cold page in the arena
  int64_t num_pages;
  int64_t page_tokens;
  int64_t arena_bytes;
  int64_t cold_bytes;
  int64_t table_offset;  // of the entries of BufferPlan::table_bytes(), -1 where the global scale is 1
};

enum Refusal : uint8_t { kAccepted = 0, kNonFinite = 1, kOutOfRange = 2 };

// Throws std::invalid_argument, before anything is written, where a page, a row or a byte would lie out of bounds.
void check(const Batch& batch);
void check_decode(const Batch& batch, const uint8_t* arena, int64_t buffer_begin, int64_t buffer_end);

// After check(). checksums: 16 bytes per page, of the cold page under seeds[i]. refused: a Refusal per page.
void encode_pages(const Batch& batch, uint8_t* arena, const uint64_t* seeds, uint8_t* checksums, uint8_t* refused);

// After check() and check_decode(). Writes the buffers [buffer_begin, buffer_end) of every page.
void decode_pages(const Batch& batch, const uint8_t* arena, int64_t buffer_begin, int64_t buffer_end);

// After check() and check_decode(), of pages just encoded: per page and compressed part, the sum of squared errors of its
// valid rows and the sum of squares; zeros for parts that are kept as they are. FP32 counts as rounded to BF16.
void page_errors(const Batch& batch, const uint8_t* arena, double* sums);

}  // namespace kvtier
