#include "forms.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "rows.h"

namespace kvtier {
namespace {

DType dtype_of(const BufferPlan& b) { return DType(b.dtype); }
DType coded_of(const BufferPlan& b) {
  return dtype_of(b) == DType::kFP16 || dtype_of(b) == DType::kFP8 ? DType::kFP16 : DType::kBF16;
}
int64_t item_bytes(const BufferPlan& b) { return dtype_of(b) == DType::kFP32 ? 4 : dtype_of(b) == DType::kFP8 ? 1 : 2; }
int64_t row_groups(const BufferPlan& b) { return b.dim / kGroup; }

const Fp8Values& fp8_values(float scale) {
  static thread_local Fp8Values values{0, {}, {}};
  if (values.scale_bits != bits_of(scale)) fill(values, scale);
  return values;
}

uint8_t* row_of(const FormPart& part, int64_t head, int64_t token) {
  return part.page + head * part.plan.head_stride + token * part.plan.token_stride;
}

// What belongs to one head. Kept per thread, so that memory is touched once.
struct Scratch {
  std::vector<uint16_t> coded, side;
  std::vector<float> mean, columns, errors;
  int64_t pitch = 0;

  void fit(const BufferPlan& b, int lanes) {
    pitch = (row_groups(b) / lanes + 2) * lanes;
    // The turned means are read by whole registers.
    grow(coded, b.tokens * b.dim), grow(side, b.dim), grow(mean, b.dim);
    grow(columns, kGroup * pitch), grow(errors, 2 * (b.tokens * row_groups(b) + lanes));
  }

 private:
  template <class T>
  static void grow(std::vector<T>& v, int64_t size) {
    if (v.size() < size_t(size)) v.resize(size_t(size));
  }
};

Scratch& scratch_for(const BufferPlan& b, const FormKernels& kernels) {
  static thread_local Scratch scratch;
  scratch.fit(b, kernels.lanes);
  return scratch;
}

// The valid rows of a head as bits of the coded type, one behind the other: where they lie, if they do.
const uint16_t* coded_head(const FormKernels& kernels, const FormPart& part, int64_t head, Scratch& scratch) {
  const BufferPlan& b = part.plan;
  const bool as_it_is = item_bytes(b) == 2 && b.token_stride == b.dim * 2 && reinterpret_cast<uintptr_t>(part.page) % 2 == 0;
  if (as_it_is) return reinterpret_cast<const uint16_t*>(row_of(part, head, 0));
  for (int64_t t = 0; t < part.tokens; ++t) {
    const uint8_t* row = row_of(part, head, t);
    // Encoders of the other codings fetch for themselves.
    if (part.ahead && Coding(b.coding) == Coding::kNvfp4)
      for (int64_t at = 0; at < b.dim * item_bytes(b); at += 64) __builtin_prefetch(row + part.ahead + at, 0, 2);
    kernels.code16(row, b.dim, dtype_of(b), b.fp8_scale(), scratch.coded.data() + t * b.dim);
  }
  return scratch.coded.data();
}

Soon soon_of(const FormPart& part, int64_t head) {
  if (part.ahead == 0) return {nullptr, 0, 0, 0, 0};
  return {row_of(part, head, 0) + part.ahead, part.plan.token_stride, part.plan.dim * item_bytes(part.plan), part.tokens, 0};
}

HotRows hot_rows(const FormPart& part, int64_t head, int64_t token) {
  return {row_of(part, head, token), part.plan.token_stride, dtype_of(part.plan), 1.0f / part.plan.fp8_scale(), part.stream};
}

// Where the bytes of one head begin.
struct HeadBytes {
  int64_t row;  // of the head's first token
  int64_t data, scales, side;
};

HeadBytes bytes_of(const BufferPlan& b, int64_t head) {
  const int64_t row = head * b.tokens, values = row * b.dim;
  int64_t data = values, scales = 0, side = head * b.dim * 2;
  switch (Coding(b.coding)) {
    case Coding::kNvfp4:
    case Coding::kOffset: data = values / 2, scales = values / kGroup; break;
    case Coding::kTwoFp4: scales = values / (kGroup / 2); break;
    case Coding::kToken: data = values / 2, scales = values / kGroup, side *= b.tokens / kGroup; break;
    default: break;
  }
  return {row, b.data_offset + data, b.scale_offset + scales, b.side_offset + side};
}

MeanColumns encode_mean(const FormPart& part, const FormKernels& kernels, const uint16_t* x, Scratch& scratch,
                        uint8_t* side) {
  const BufferPlan& b = part.plan;
  const CodedKernels& coded = kernels.coded(coded_of(b));
  coded.mean(x, part.tokens, b.dim, scratch.side.data());
  std::memcpy(side, scratch.side.data(), size_t(b.dim * 2));
  coded.turn_means(scratch.side.data(), row_groups(b), scratch.pitch, scratch.columns.data());
  kernels.widen16(scratch.side.data(), b.dim, coded_of(b), scratch.mean.data());
  return {scratch.mean.data(), scratch.columns.data(), scratch.pitch, row_groups(b)};
}

const float* decode_side(const FormPart& part, const FormKernels& kernels, const uint8_t* side, Scratch& scratch) {
  std::memcpy(scratch.side.data(), side, size_t(part.plan.dim * 2));
  kernels.widen16(scratch.side.data(), part.plan.dim, coded_of(part.plan), scratch.mean.data());
  return scratch.mean.data();
}

void encode_tokens(const FormPart& part, const CodedKernels& coded, const uint16_t* x, uint8_t* data, uint8_t* scales,
                   uint8_t* side, bool clips, Scratch& scratch, Soon& soon) {
  const BufferPlan& b = part.plan;
  for (int64_t t = 0; t < b.tokens; t += kGroup, scales += b.dim, side += b.dim * 2) {
    const int64_t valid = std::min<int64_t>(part.tokens - t, kGroup);
    if (valid <= 0) {
      std::memset(scales, kScaleMinCode, size_t(b.dim));
      std::memset(side, 0, size_t(b.dim * 2));
      continue;
    }
    coded.encode_token[clips](x + t * b.dim, valid, b.dim, part.global_scale, data + t * b.dim / 2, scales, scratch.side.data(), soon);
    std::memcpy(side, scratch.side.data(), size_t(b.dim * 2));
  }
}

}  // namespace

uint16_t fp8_amax(const FormPart& part) {
  const FormKernels& kernels = *row_kernels().forms;
  const BufferPlan& b = part.plan;
  // In the order of memory, which is read here for the first time.
  const bool token_major = b.head_stride < b.token_stride;
  const int64_t outer = token_major ? part.tokens : b.heads, inner = token_major ? b.heads : part.tokens;
  uint8_t most = 0;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t i = 0; i < inner; ++i)
      most = std::max(most, kernels.amax8(token_major ? row_of(part, i, o) : row_of(part, o, i), b.dim));
  return most == 0x7F ? 0x7E00 : fp8_values(b.fp8_scale()).half[most];
}

bool encode_form(const FormPart& part, uint8_t* cold) {
  const BufferPlan& b = part.plan;
  const RowKernels& rows = row_kernels();
  const FormKernels& kernels = *rows.forms;
  const CodedKernels& coded = kernels.coded(coded_of(b));
  const Coding coding = Coding(b.coding);
  Scratch& scratch = scratch_for(b, kernels);
  const int64_t valid = part.tokens * b.dim, rest = (b.tokens - part.tokens) * b.dim;
  uint8_t* flags = cold + b.side_offset + b.heads * b.dim * 2;
  if (coding == Coding::kFp8Mean) std::memset(flags, 0, size_t((b.heads * b.tokens + 7) / 8));
  bool clipped = false;
  const bool in_fp8 = coding == Coding::kFp8 || coding == Coding::kFp8Mean;
  const bool clips = in_fp8 ? part.largest > 448.0f : part.largest * part.global_scale > 2784.0f;
  for (int64_t h = 0; h < b.heads; ++h) {
    const HeadBytes at = bytes_of(b, h);
    uint8_t* data = cold + at.data;
    uint8_t* scales = cold + at.scales;
    const uint16_t* x = coded_head(kernels, part, h, scratch);
    Soon soon = soon_of(part, h);
    int64_t bytes_per_32_values = 16, scales_per_32_values = 2;
    switch (coding) {
      case Coding::kNvfp4:
        if (valid)
          rows.encode16(Rows::single(reinterpret_cast<const uint8_t*>(x), true), valid / kGroup, Ahead{},
                        encode_table(DType::kFP16, part.global_scale), data, scales);
        break;
      case Coding::kTwoFp4:
        coded.encode_two[clips](x, valid / kGroup, part.global_scale, data, scales, soon);
        bytes_per_32_values = 32, scales_per_32_values = 4;
        break;
      case Coding::kOffset:
        coded.encode_offset[clips](x, encode_mean(part, kernels, x, scratch, cold + at.side), valid / kGroup, part.global_scale,
                            data, scales, soon);
        break;
      case Coding::kToken:
        encode_tokens(part, coded, x, data, scales, cold + at.side, clips, scratch, soon);
        scales_per_32_values = 0;
        break;
      case Coding::kFp8:
        clipped |= coded.encode_fp8[clips](x, valid, data, soon);
        bytes_per_32_values = 32, scales_per_32_values = 0;
        break;
      default:
        clipped |= coded.encode_fp8_mean[clips](x, encode_mean(part, kernels, x, scratch, cold + at.side), part.tokens, data, flags,
                                         at.row, scratch.errors.data(), soon);
        bytes_per_32_values = 32, scales_per_32_values = 0;
    }
    std::memset(data + valid * bytes_per_32_values / 32, 0, size_t(rest * bytes_per_32_values / 32));
    std::memset(scales + valid * scales_per_32_values / 32, kScaleMinCode, size_t(rest * scales_per_32_values / 32));
  }
  return !clipped;
}

void decode_form(const FormPart& part, const uint8_t* cold) {
  const BufferPlan& b = part.plan;
  const FormKernels& kernels = *row_kernels().forms;
  const Coding coding = Coding(b.coding);
  Scratch& scratch = scratch_for(b, kernels);
  const StepTable& steps = step_table(part.global_scale);
  const DecodeTable* fp8 = coding == Coding::kNvfp4 ? &fp8_decode_table(part.global_scale, b.fp8_scale()) : nullptr;
  const uint8_t* flags = cold + b.side_offset + b.heads * b.dim * 2;
  for (int64_t h = 0; h < b.heads; ++h) {
    const HeadBytes at = bytes_of(b, h);
    const uint8_t* data = cold + at.data;
    const uint8_t* scales = cold + at.scales;
    const uint8_t* side = cold + at.side;
    const HotRows hot = hot_rows(part, h, 0);
    switch (coding) {
      case Coding::kNvfp4: kernels.decode_plain(data, scales, part.tokens, row_groups(b), *fp8, hot); break;
      case Coding::kTwoFp4: kernels.decode_two(data, scales, part.tokens, row_groups(b), steps, hot); break;
      case Coding::kOffset:
        kernels.decode_offset(data, scales, decode_side(part, kernels, side, scratch), part.tokens, row_groups(b), steps,
                              hot);
        break;
      case Coding::kToken:
        for (int64_t t = 0; t < part.tokens; t += kGroup, scales += b.dim, side += b.dim * 2)
          kernels.decode_token(data + t * b.dim / 2, scales, decode_side(part, kernels, side, scratch),
                               std::min<int64_t>(part.tokens - t, kGroup), row_groups(b), steps, scratch.columns.data(),
                               hot_rows(part, h, t));
        break;
      case Coding::kFp8: kernels.decode_fp8(data, nullptr, nullptr, 0, part.tokens, row_groups(b), hot); break;
      default:
        kernels.decode_fp8(data, decode_side(part, kernels, side, scratch), flags, at.row, part.tokens, row_groups(b), hot);
    }
  }
}

}  // namespace kvtier
