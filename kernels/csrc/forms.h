// Forms other than plain NVFP4 of 16-bit and 32-bit values: one head of a part at a time, through float rows in cache.
#pragma once

#include "pages.h"
#include "tables.h"

namespace kvtier {

// On rows of floats that are values of the coded type. Plain loops, compiled once per instruction set.
struct FormKernels {
  // Hot elements to floats and back. `fp8` is used for FP8 elements only.
  void (*load)(const uint8_t* hot, int64_t dim, DType dtype, const Fp8Values* fp8, float* x);
  void (*store)(const float* x, int64_t dim, DType dtype, float inverse_fp8_scale, bool stream, uint8_t* hot);
  // FP8 elements to FP16 bits, and decoded low bytes back to FP8 elements.
  void (*widen)(const uint8_t* hot, int64_t dim, const Fp8Values& fp8, uint16_t* half);
  void (*narrow)(const uint16_t* decoded, int64_t dim, uint8_t* hot);
  uint8_t (*amax8)(const uint8_t* hot, int64_t dim);

  // Mean over `rows` rows: bits of the coded type, and what they are worth.
  void (*mean)(const float* x, int64_t rows, int64_t dim, DType coded, uint16_t* bits, float* values);

  void (*encode_two)(const float* x, int64_t groups, float global_scale, uint8_t* data, uint8_t* scales);
  void (*decode_two)(const uint8_t* data, const uint8_t* scales, int64_t groups, const StepTable&, float* x);
  // Rows of `row_groups` groups, one behind the other.
  void (*encode_offset)(const float* x, const float* mean, int64_t row_groups, int64_t groups, float global_scale,
                        uint8_t* data, uint8_t* scales);
  void (*decode_offset)(const uint8_t* data, const uint8_t* scales, const float* mean, int64_t groups, const StepTable&,
                        float* x);
  // 16 tokens, of which `rows` are valid. data: dim / 2 bytes per token; scales and middles: one per channel.
  void (*encode_token)(const float* x, int64_t rows, int64_t dim, float global_scale, DType coded, uint8_t* data, uint8_t* scales, uint16_t* middles);
  void (*decode_token)(const uint8_t* data, const uint8_t* scales, const float* middles, int64_t rows, int64_t dim,
                       const StepTable&, float* x);
  // One row. The result tells whether a value clipped; encode_fp8_mean sets *centred.
  bool (*encode_fp8)(const float* x, int64_t dim, uint8_t* data);
  bool (*encode_fp8_mean)(const float* x, const float* mean, int64_t dim, uint8_t* data, bool* centred);
  // `mean` may be null.
  void (*decode_fp8)(const uint8_t* data, const float* mean, int64_t dim, float* x);
  void (*widen16)(const uint16_t* bits, int64_t n, DType coded, float* x);
  // Sums of squares of a - b and of b.
  void (*errors)(const float* a, const float* b, int64_t n, double* difference, double* size);
};

extern const FormKernels kScalarForms;
#if defined(__x86_64__)
extern const FormKernels kAvx2Forms;
#endif

// A part of one page: `page` is the address of its first element, `tokens` are valid. For every coding but raw, and NVFP4
// only of FP8 elements. encode_form returns false if a value clipped.
struct FormPart {
  const BufferPlan& plan;
  uint8_t* page;
  int64_t tokens;
  float global_scale;
  bool stream;  // decoded rows are written around the cache; the caller fences
};
uint16_t fp8_amax(const FormPart& part);
bool encode_form(const FormPart& part, uint8_t* cold);
void decode_form(const FormPart& part, const uint8_t* cold);

}  // namespace kvtier
