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

const Fp8Values& fp8_values(float scale) {
  static thread_local Fp8Values values{0, {}, {}};
  if (values.scale_bits != bits_of(scale)) fill(values, scale);
  return values;
}

uint8_t* row_of(const FormPart& part, int64_t head, int64_t token) {
  return part.page + head * part.plan.head_stride + token * part.plan.token_stride;
}

// Rows of one head, and what belongs to them. Kept per thread, so that memory is touched once.
struct Scratch {
  std::vector<float> x, mean;
  std::vector<uint16_t> bits;

  void fit(const BufferPlan& b) {
    const size_t values = size_t(b.tokens * b.dim);
    if (x.size() < values) x.resize(values);
    if (bits.size() < values) bits.resize(values);
    if (mean.size() < size_t(b.dim)) mean.resize(size_t(b.dim));
  }
};

Scratch& scratch_for(const BufferPlan& b) {
  static thread_local Scratch scratch;
  scratch.fit(b);
  return scratch;
}

void load_head(const FormKernels& kernels, const FormPart& part, int64_t head, float* x) {
  const BufferPlan& b = part.plan;
  const Fp8Values* fp8 = dtype_of(b) == DType::kFP8 ? &fp8_values(b.fp8_scale()) : nullptr;
  for (int64_t t = 0; t < part.tokens; ++t) kernels.load(row_of(part, head, t), b.dim, dtype_of(b), fp8, x + t * b.dim);
}

void store_head(const FormKernels& kernels, const FormPart& part, int64_t head, const float* x) {
  const BufferPlan& b = part.plan;
  const float inverse = 1.0f / b.fp8_scale();
  for (int64_t t = 0; t < part.tokens; ++t) 
    kernels.store(x + t * b.dim, b.dim, dtype_of(b), inverse, part.stream, row_of(part, head, t));
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

void encode_plain(const FormKernels& kernels, const RowKernels& rows, const FormPart& part, Scratch& scratch,
                  int64_t head, uint8_t* data, uint8_t* scales) {
  if (part.tokens == 0) return;
  const BufferPlan& b = part.plan;
  const Fp8Values& fp8 = fp8_values(b.fp8_scale());
  for (int64_t t = 0; t < part.tokens; ++t)
    kernels.widen(row_of(part, head, t), b.dim, fp8, scratch.bits.data() + t * b.dim);
  const Rows dense = Rows::single(reinterpret_cast<const uint8_t*>(scratch.bits.data()), true);
  rows.encode16(dense, part.tokens * b.dim / kGroup, Ahead{}, encode_table(DType::kFP16, part.global_scale), data, scales);
}

void decode_plain(const FormKernels& kernels, const RowKernels& rows, const FormPart& part, Scratch& scratch,
                  int64_t head, const uint8_t* data, const uint8_t* scales) {
  if (part.tokens == 0) return;
  const BufferPlan& b = part.plan;
  const Rows dense = Rows::single(reinterpret_cast<const uint8_t*>(scratch.bits.data()), true);
  rows.decode16(data, scales, part.tokens * b.dim / kGroup, Ahead{}, fp8_decode_table(part.global_scale, b.fp8_scale()), dense, false);
  for (int64_t t = 0; t < part.tokens; ++t)
    kernels.narrow(scratch.bits.data() + t * b.dim, b.dim, row_of(part, head, t));
}

void encode_tokens(const FormKernels& kernels, const FormPart& part, const float* x, uint8_t* data, uint8_t* scales,
                   uint8_t* side) {
  const BufferPlan& b = part.plan;
  const float global_scale = part.global_scale;
  std::vector<uint16_t>& middles = scratch_for(b).bits;
  for (int64_t t = 0; t < b.tokens; t += kGroup, scales += b.dim, side += b.dim * 2) {
    const int64_t valid = std::min<int64_t>(part.tokens - t, kGroup);
    if (valid <= 0) {
      std::memset(scales, kScaleMinCode, size_t(b.dim));
      std::memset(side, 0, size_t(b.dim * 2));
      continue;
    }
    kernels.encode_token(x + t * b.dim, valid, b.dim, global_scale, coded_of(b), data + t * b.dim / 2, scales,
                         middles.data());
    std::memcpy(side, middles.data(), size_t(b.dim * 2));
  }
}

void decode_tokens(const FormKernels& kernels, const FormPart& part, const uint8_t* data, const uint8_t* scales,
                   const uint8_t* side, float* x) {
  const BufferPlan& b = part.plan;
  Scratch& scratch = scratch_for(b);
  for (int64_t t = 0; t < part.tokens; t += kGroup, scales += b.dim, side += b.dim * 2) {
    std::memcpy(scratch.bits.data(), side, size_t(b.dim * 2));
    kernels.widen16(scratch.bits.data(), b.dim, coded_of(b), scratch.mean.data());
    kernels.decode_token(data + t * b.dim / 2, scales, scratch.mean.data(), std::min<int64_t>(part.tokens - t, kGroup),
                         b.dim, step_table(part.global_scale), x + t * b.dim);
  }
}

}  // namespace

uint16_t fp8_amax(const FormPart& part) {
  const FormKernels& kernels = *row_kernels().forms;
  uint8_t most = 0;
  for (int64_t h = 0; h < part.plan.heads; ++h)
    for (int64_t t = 0; t < part.tokens; ++t) most = std::max(most, kernels.amax8(row_of(part, h, t), part.plan.dim));
  return most == 0x7F ? 0x7E00 : fp8_values(part.plan.fp8_scale()).half[most];
}

bool encode_form(const FormPart& part, uint8_t* cold) {
  const BufferPlan& b = part.plan;
  const RowKernels& rows = row_kernels();
  const FormKernels& kernels = *rows.forms;
  const Coding coding = Coding(b.coding);
  Scratch& scratch = scratch_for(b);
  float* x = scratch.x.data();
  const int64_t valid = part.tokens * b.dim, rest = (b.tokens - part.tokens) * b.dim;
  const float global_scale = part.global_scale;
  uint8_t* flags = cold + b.side_offset + b.heads * b.dim * 2;
  if (coding == Coding::kFp8Mean) std::memset(flags, 0, size_t((b.heads * b.tokens + 7) / 8));
  bool fits = true;
  for (int64_t h = 0; h < b.heads; ++h) {
    const HeadBytes at = bytes_of(b, h);
    uint8_t* data = cold + at.data;
    uint8_t* scales = cold + at.scales;
    const bool plain = coding == Coding::kNvfp4;
    if (!plain) load_head(kernels, part, h, x);
    const bool centred = coding == Coding::kOffset || coding == Coding::kFp8Mean;
    if (centred) {
      kernels.mean(x, part.tokens, b.dim, coded_of(b), scratch.bits.data(), scratch.mean.data());
      std::memcpy(cold + at.side, scratch.bits.data(), size_t(b.dim * 2));
    }
    int64_t bytes_per_32_values = 16, scales_per_32_values = 2;
    switch (coding) {
      case Coding::kNvfp4: encode_plain(kernels, rows, part, scratch, h, data, scales); break;
      case Coding::kTwoFp4:
        kernels.encode_two(x, valid / kGroup, global_scale, data, scales);
        bytes_per_32_values = 32, scales_per_32_values = 4;
        break;
      case Coding::kOffset:
        kernels.encode_offset(x, scratch.mean.data(), b.dim / kGroup, valid / kGroup, global_scale, data, scales);
        break;
      case Coding::kToken:
        encode_tokens(kernels, part, x, data, scales, cold + at.side);
        scales_per_32_values = 0;
        break;
      default:
        for (int64_t t = 0; t < part.tokens; ++t) {
          bool flag = false, clipped;
          if (coding == Coding::kFp8)
            clipped = kernels.encode_fp8(x + t * b.dim, b.dim, data + t * b.dim);
          else
            clipped = kernels.encode_fp8_mean(x + t * b.dim, scratch.mean.data(), b.dim, data + t * b.dim, &flag);
          fits &= !clipped;
          if (flag) flags[(at.row + t) / 8] |= uint8_t(1 << ((at.row + t) % 8));
        }
        bytes_per_32_values = 32, scales_per_32_values = 0;
    }
    std::memset(data + valid * bytes_per_32_values / 32, 0, size_t(rest * bytes_per_32_values / 32));
    std::memset(scales + valid * scales_per_32_values / 32, kScaleMinCode, size_t(rest * scales_per_32_values / 32));
  }
  return fits;
}

void decode_form(const FormPart& part, const uint8_t* cold) {
  const BufferPlan& b = part.plan;
  const RowKernels& rows = row_kernels();
  const FormKernels& kernels = *rows.forms;
  const Coding coding = Coding(b.coding);
  Scratch& scratch = scratch_for(b);
  float* x = scratch.x.data();
  const uint8_t* flags = cold + b.side_offset + b.heads * b.dim * 2;
  for (int64_t h = 0; h < b.heads; ++h) {
    const HeadBytes at = bytes_of(b, h);
    const uint8_t* data = cold + at.data;
    const uint8_t* scales = cold + at.scales;
    if (coding == Coding::kNvfp4) {
      decode_plain(kernels, rows, part, scratch, h, data, scales);
      continue;
    }
    if (coding == Coding::kOffset || coding == Coding::kFp8Mean) {
      std::memcpy(scratch.bits.data(), cold + at.side, size_t(b.dim * 2));
      kernels.widen16(scratch.bits.data(), b.dim, coded_of(b), scratch.mean.data());
    }
    switch (coding) {
      case Coding::kTwoFp4: kernels.decode_two(data, scales, part.tokens * b.dim / kGroup, step_table(part.global_scale), x); break;
      case Coding::kOffset:
        for (int64_t t = 0; t < part.tokens; ++t)
          kernels.decode_offset(data + t * b.dim / 2, scales + t * b.dim / kGroup, scratch.mean.data(), b.dim / kGroup,
                                step_table(part.global_scale), x + t * b.dim);
        break;
      case Coding::kToken: decode_tokens(kernels, part, data, scales, cold + at.side, x); break;
      default:
        for (int64_t t = 0; t < part.tokens; ++t) {
          const bool flag = coding == Coding::kFp8Mean && flags[(at.row + t) / 8] >> ((at.row + t) % 8) & 1;
          kernels.decode_fp8(data + t * b.dim, flag ? scratch.mean.data() : nullptr, b.dim, x + t * b.dim);
        }
    }
    store_head(kernels, part, h, x);
  }
}

}  // namespace kvtier
