// Forms other than plain NVFP4 of 16-bit and 32-bit values: one head of a part at a time.
#pragma once

#include <type_traits>
#include <utility>

#include "pages.h"
#include "tables.h"

namespace kvtier {

// Rows of hot memory that the CPU fetches while it works on others, and how far it is.
struct Soon {
  const uint8_t* row;
  int64_t stride, row_bytes, rows, at;
};

// A mean over tokens: its values, and the same turned as the encoders want them (turn_means).
struct MeanColumns {
  const float* values;
  const float* columns;
  int64_t pitch, row_groups;
};

// Rows of one head in hot memory that are decoded to.
struct HotRows {
  uint8_t* base;
  int64_t stride;
  DType dtype;
  float inverse_fp8_scale;
  bool stream;  // around the cache, where alignment allows
};

// Encoders of values that lie one behind the other as bits of one type, BF16 or FP16. Of each the first assumes that no
// value clips: that all are within 2784 under the global scale, or 464 in FP8.
struct CodedKernels {
  void (*mean)(const uint16_t* x, int64_t rows, int64_t dim, uint16_t* bits);
  void (*turn_means)(const uint16_t* bits, int64_t row_groups, int64_t pitch, float* columns);
  void (*encode_two[2])(const uint16_t* x, int64_t groups, float global_scale, uint8_t* data, uint8_t* scales, Soon&);
  void (*encode_offset[2])(const uint16_t* x, const MeanColumns&, int64_t groups, float global_scale, uint8_t* data,
                        uint8_t* scales, Soon&);
  // 16 tokens, of which `rows` are valid. data: dim / 2 bytes per token; scales and middles: one per channel.
  void (*encode_token[2])(const uint16_t* x, int64_t rows, int64_t dim, float global_scale, uint8_t* data, uint8_t* scales,
                       uint16_t* middles, Soon&);
  // True if a value clipped.
  bool (*encode_fp8[2])(const uint16_t* x, int64_t values, uint8_t* data, Soon&);
  // Sets the flags of rows stored as distances. `errors`: room for two floats per group, and 32.
  bool (*encode_fp8_mean[2])(const uint16_t* x, const MeanColumns&, int64_t rows, uint8_t* data, uint8_t* flags,
                          int64_t first_flag, float* errors, Soon&);
};

// One set per instruction set; all give the same bits.
struct FormKernels {
  int lanes;  // groups that are worked on at a time
  CodedKernels brain, half;
  // Hot elements as bits of the type they are coded in.
  void (*code16)(const uint8_t* hot, int64_t values, DType dtype, float fp8_scale, uint16_t* out);
  void (*widen16)(const uint16_t* bits, int64_t values, DType coded, float* x);
  uint8_t (*amax8)(const uint8_t* hot, int64_t dim);
  void (*decode_two)(const uint8_t* data, const uint8_t* scales, int64_t rows, int64_t row_groups, const StepTable&,
                     const HotRows&);
  void (*decode_offset)(const uint8_t* data, const uint8_t* scales, const float* mean, int64_t rows, int64_t row_groups,
                        const StepTable&, const HotRows&);
  // Up to 16 tokens. `steps`: room for a row.
  void (*decode_token)(const uint8_t* data, const uint8_t* scales, const float* middles, int64_t rows, int64_t row_groups,
                       const StepTable&, float* steps, const HotRows&);
  // `mean` and `flags` may be null.
  void (*decode_fp8)(const uint8_t* data, const float* mean, const uint8_t* flags, int64_t first_flag, int64_t rows,
                     int64_t row_groups, const HotRows&);
  // Plain NVFP4 to FP8 elements.
  void (*decode_plain)(const uint8_t* data, const uint8_t* scales, int64_t rows, int64_t row_groups, const DecodeTable&,
                       const HotRows&);
  // Sums of squares of a - b and of b.
  void (*errors)(const float* a, const float* b, int64_t n, double* difference, double* size);

  const CodedKernels& coded(DType t) const { return t == DType::kFP16 ? half : brain; }
};

extern const FormKernels kScalarForms;
#if defined(__x86_64__)
extern const FormKernels kAvx2Forms, kAvx512Forms;
#endif

// A part of one page: `page` is the address of its first element, `tokens` are valid. For every coding but raw, and NVFP4
// only of FP8 elements. encode_form returns false if a value clipped.
struct FormPart {
  const BufferPlan& plan;
  uint8_t* page;
  int64_t tokens;
  float global_scale;
  bool stream;      // decoded rows are written around the cache; the caller fences
  int64_t ahead;    // bytes to the part of the same shape that is encoded next, 0 for none
  float largest;    // no number that is encoded has a larger magnitude
};
uint16_t fp8_amax(const FormPart& part);
bool encode_form(const FormPart& part, uint8_t* cold);
void decode_form(const FormPart& part, const uint8_t* cold);

}  // namespace kvtier
