#include "pages.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "forms.h"
#include "rows.h"
#include "xxh3.h"

namespace kvtier {
namespace {

// From here on decoded pages are written around the cache: they would push out more than they are worth.
constexpr int64_t kStreamBytes = 8 << 20;

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument(what); }

std::string text(int64_t n) { return std::to_string(n); }

DType dtype_of(const BufferPlan& b) { return DType(b.dtype); }
int64_t item_bytes(const BufferPlan& b) {
  return dtype_of(b) == DType::kFP32 ? 4 : dtype_of(b) == DType::kBytes || dtype_of(b) == DType::kFP8 ? 1 : 2;
}
// The 16-bit type that a compressed buffer is encoded from and decoded to.
DType coded_dtype(const BufferPlan& b) {
  return dtype_of(b) == DType::kFP16 || dtype_of(b) == DType::kFP8 ? DType::kFP16 : DType::kBF16;
}
// Plain NVFP4 of 16-bit and 32-bit values goes straight from hot to cold memory; everything else takes the forms' way.
bool direct(const BufferPlan& b) { return Coding(b.coding) == Coding::kNvfp4 && dtype_of(b) != DType::kFP8; }
int64_t values(const BufferPlan& b) { return b.heads * b.tokens * b.dim; }
int64_t row_bytes(const BufferPlan& b) { return b.dim * item_bytes(b); }
bool per_token(const Batch& batch, const BufferPlan& b) { return b.tokens == batch.page_tokens; }

// Tokens of page i that hold data, and those that exist in memory.
int64_t valid_tokens(const Batch& batch, const BufferPlan& b, int64_t i) {
  return per_token(batch, b) ? batch.valid_tokens[i] : b.tokens;
}
int64_t existing_tokens(const Batch& batch, const BufferPlan& b, int64_t i) {
  return per_token(batch, b) ? std::min(b.tokens, b.num_tokens - batch.page_ids[i] * batch.page_tokens) : b.tokens;
}

uint8_t* page_address(const BufferPlan& b, int64_t page) {
  return reinterpret_cast<uint8_t*>(uintptr_t(b.address)) + page * b.page_stride;
}

struct Extent {
  int64_t begin, end;
};

int64_t table_bytes_before(const Batch& batch, int64_t buffer) {
  int64_t bytes = 0;
  for (int64_t n = 0; n < buffer; ++n) bytes += batch.buffers[n].table_bytes();
  return bytes;
}

int64_t table_bytes(const Batch& batch) {
  if (batch.table_offset < 0) return 0;
  return table_bytes_before(batch, batch.num_buffers);
}

float checkpoint_scale(const uint8_t* entry) {
  float global_scale;
  std::memcpy(&global_scale, entry, sizeof global_scale);
  return global_scale;
}

// Global scale of a part from its entry in a cold page's table, which moves on.
float stored_scale(const Batch& batch, const BufferPlan& b, const uint8_t*& table) {
  if (batch.table_offset < 0 || !b.has_k()) return 1.0f;
  const uint8_t* entry = table;
  table += b.table_bytes();
  return b.global_scale_bits ? checkpoint_scale(entry) : power_of_two(-int8_t(*entry));
}

struct Sizes {
  int64_t data, scales, side;
};

Sizes sizes_of(const BufferPlan& b) {
  const int64_t n = values(b), mean = b.heads * b.dim * 2;
  switch (Coding(b.coding)) {
    case Coding::kNvfp4: return {n / 2, n / kGroup, 0};
    case Coding::kTwoFp4: return {n, n / (kGroup / 2), 0};
    case Coding::kOffset: return {n / 2, n / kGroup, mean};
    case Coding::kToken: return {n / 2, n / kGroup, mean * (b.tokens / kGroup)};
    case Coding::kFp8: return {n, 0, 0};
    case Coding::kFp8Mean: return {n, 0, mean + (b.heads * b.tokens + 7) / 8};
    default: return {n * item_bytes(b), 0, 0};
  }
}

// Everything that is written in a cold page besides padding, in order.
std::vector<Extent> extents(const Batch& batch) {
  std::vector<Extent> all;
  for (int64_t i = 0; i < batch.num_buffers; ++i) {
    const BufferPlan& b = batch.buffers[i];
    const Sizes sizes = sizes_of(b);
    all.push_back({b.data_offset, b.data_offset + sizes.data});
    if (sizes.scales) all.push_back({b.scale_offset, b.scale_offset + sizes.scales});
    if (sizes.side) all.push_back({b.side_offset, b.side_offset + sizes.side});
  }
  if (table_bytes(batch)) all.push_back({batch.table_offset, batch.table_offset + table_bytes(batch)});
  std::sort(all.begin(), all.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  return all;
}

std::vector<Extent> paddings(const Batch& batch) {
  std::vector<Extent> gaps;
  int64_t at = 0;
  for (const Extent& e : extents(batch)) {
    if (e.begin > at) gaps.push_back({at, e.begin});
    at = e.end;
  }
  if (at < batch.cold_bytes) gaps.push_back({at, batch.cold_bytes});
  return gaps;
}

void check_buffer(const Batch& batch, int64_t index) {
  const BufferPlan& b = batch.buffers[index];
  const std::string name = "buffer " + text(index);
  if (b.address == 0) fail(name + ": address is 0");
  if (b.heads < 1 || b.tokens < 1 || b.dim < 1) fail(name + ": heads, tokens and dim must be at least 1");
  if (b.dtype < 0 || b.dtype > int64_t(DType::kFP8)) fail(name + ": unknown dtype code " + text(b.dtype));
  int64_t bytes;
  if (__builtin_mul_overflow(b.heads, b.tokens, &bytes) || __builtin_mul_overflow(bytes, b.dim, &bytes) ||
      __builtin_mul_overflow(bytes, int64_t(4), &bytes))
    fail(name + ": too large");
  if (b.coding < 0 || b.coding > int64_t(Coding::kFp8Mean)) fail(name + ": unknown coding " + text(b.coding));
  if (!b.compressed()) return;
  if (dtype_of(b) == DType::kBytes) fail(name + ": bytes cannot be compressed");
  if (Coding(b.coding) == Coding::kToken && b.tokens % kGroup)
    fail(name + ": " + text(b.tokens) + " tokens are not a multiple of " + text(kGroup));
  if (dtype_of(b) == DType::kFP8 && !(b.fp8_scale() > 0 && std::isfinite(b.fp8_scale()) && std::isfinite(1 / b.fp8_scale())))
    fail(name + ": fp8_scale must be a positive number");
  if (b.global_scale_bits && !checkpoint_scale_ok(dtype_of(b), b.global_scale()))
    fail(name + ": the global scale of its checkpoint is out of range for such values");
  if (b.dim % kGroup) fail(name + ": dim " + text(b.dim) + " is not a multiple of " + text(kGroup));
}

// From buffer n of page i to the next one of the batch, among the buffers [begin, end) of each page.
Ahead ahead_of(const Batch& batch, int64_t n, int64_t begin, int64_t end, int64_t i) {
  const bool last = n + 1 == end;
  const int64_t page = last ? i + 1 : i;
  if (page == batch.num_pages) return {};
  const BufferPlan& b = batch.buffers[n];
  const BufferPlan& next = batch.buffers[last ? begin : n + 1];
  const bool alike = next.dtype == b.dtype && next.heads == b.heads && next.tokens == b.tokens && next.dim == b.dim &&
                     next.head_stride == b.head_stride && next.token_stride == b.token_stride;
  if (!alike) return {};
  const ptrdiff_t hot = page_address(next, batch.page_ids[page]) - page_address(b, batch.page_ids[i]);
  if (next.coding != b.coding) return {hot, 0, 0};
  const ptrdiff_t slot = batch.offsets[page] - batch.offsets[i];
  return {hot, slot + next.data_offset - b.data_offset, slot + next.scale_offset - b.scale_offset};
}

// The first `tokens` tokens of every head, in the order of hot memory, and the length of a row: rows that lie one behind
// the other both hot and cold are joined.
struct Span {
  Rows rows;
  int64_t dim;
};

Span span_of(const BufferPlan& b, uint8_t* page, int64_t tokens) {
  const int64_t row = row_bytes(b);
  if (tokens == 0) return {{page, {0, 0}, {0, 0}, {0, 0}}, b.dim};
  if (b.token_stride != row) {
    // Whichever axis moves in smaller steps is the inner one.
    if (b.heads > 1 && b.head_stride < b.token_stride)
      return {{page, {tokens, b.heads}, {b.token_stride, b.head_stride}, {1, b.tokens}}, b.dim};
    return {{page, {b.heads, tokens}, {b.head_stride, b.token_stride}, {b.tokens, 1}}, b.dim};
  }
  if (b.heads == 1 || (tokens == b.tokens && b.head_stride == tokens * row))
    return {{page, {1, 1}, {0, 0}, {0, 0}}, b.heads * tokens * b.dim};
  if (tokens == b.tokens) return {{page, {1, b.heads}, {0, b.head_stride}, {0, 1}}, tokens * b.dim};
  return {{page, {b.heads, tokens}, {b.head_stride, row}, {b.tokens, 1}}, b.dim};
}

// Rows that lie one behind the other in hot memory, joined for work that does not care where they lie when cold.
Span dense(Span span, int64_t item_bytes) {
  for (int axis : {1, 0}) {
    if (span.rows.count[axis] > 1 && span.rows.stride[axis] != span.dim * item_bytes) break;
    span.dim *= span.rows.count[axis];
    span.rows.count[axis] = span.dim > 0;
  }
  return span;
}

// Largest magnitude of the valid rows as bits of the coded type.
uint16_t amax_bits(const RowKernels& kernels, const BufferPlan& b, uint8_t* page, int64_t tokens, const Span& cold_order) {
  if (dtype_of(b) == DType::kFP8) return fp8_amax({b, page, tokens, 1.0f, false, 0, 0});
  const Span span = dense(cold_order, item_bytes(b));
  if (dtype_of(b) == DType::kFP32) return bf16_of(float_of(kernels.amax32(span.rows, span.dim)));
  return uint16_t(kernels.amax16(span.rows, span.dim));
}

// k is chosen for the largest number that will be quantized: the distance from a mean is at most twice the amax.
float largest(const BufferPlan& b, uint16_t amax) {
  const float value = coded_dtype(b) == DType::kFP16 ? fp16_to_float(amax) : bf16_to_float(amax);
  const Coding coding = Coding(b.coding);
  return coding == Coding::kOffset || coding == Coding::kToken || coding == Coding::kFp8Mean ? 2.0f * value : value;
}

template <class F>
void each_row(const Span& span, int64_t item_bytes, F&& f) {
  const Rows& rows = span.rows;
  for (int64_t o = 0; o < rows.count[0]; ++o)
    for (int64_t i = 0; i < rows.count[1]; ++i)
      f(rows.base + o * rows.stride[0] + i * rows.stride[1],
        (o * rows.cold[0] + i * rows.cold[1]) * span.dim * item_bytes, size_t(span.dim * item_bytes));
}

void copy_in(const BufferPlan& b, const Span& span, int64_t tokens, uint8_t* cold) {
  uint8_t* data = cold + b.data_offset;
  each_row(span, item_bytes(b), [&](uint8_t* row, int64_t at, size_t bytes) { std::memcpy(data + at, row, bytes); });
  for (int64_t h = 0; h < b.heads && tokens < b.tokens; ++h)
    std::memset(data + (h * b.tokens + tokens) * row_bytes(b), 0, size_t((b.tokens - tokens) * row_bytes(b)));
}

void copy_out(const RowKernels& kernels, const BufferPlan& b, const uint8_t* cold, const Span& span, bool stream) {
  const uint8_t* data = cold + b.data_offset;
  each_row(span, item_bytes(b), [&](uint8_t* row, int64_t at, size_t bytes) {
    stream ? kernels.copy_stream(data + at, bytes, row) : void(std::memcpy(row, data + at, bytes));
  });
}

// Whether rows may be written around the cache: not where a line of memory is shared with columns that are another part,
// and would be written twice.
bool whole_lines(const BufferPlan& b, const uint8_t* page) {
  const int64_t row = row_bytes(b);
  const int64_t step = std::min(b.heads > 1 ? b.head_stride : b.token_stride, b.tokens > 1 ? b.token_stride : b.head_stride);
  return step <= row || ((reinterpret_cast<uintptr_t>(page) | uintptr_t(step | row)) % 64 == 0);
}

void quantize(const RowKernels& kernels, const BufferPlan& b, const Span& span, int64_t tokens, const Ahead& ahead,
              float global_scale, uint8_t* cold) {
  uint8_t* data = cold + b.data_offset;
  uint8_t* scales = cold + b.scale_offset;
  const auto encode = dtype_of(b) == DType::kFP32 ? kernels.encode32 : kernels.encode16;
  encode(span.rows, span.dim / kGroup, ahead, encode_table(coded_dtype(b), global_scale), data, scales);
  for (int64_t h = 0; h < b.heads && tokens < b.tokens; ++h) {
    const int64_t first = (h * b.tokens + tokens) * b.dim, rest = (b.tokens - tokens) * b.dim;
    std::memset(data + first / 2, 0, size_t(rest / 2));
    std::memset(scales + first / kGroup, kScaleMinCode, size_t(rest / kGroup));
  }
}

void dequantize(const RowKernels& kernels, const BufferPlan& b, const uint8_t* cold, const Span& span,
                const Ahead& ahead, float global_scale, bool stream) {
  const auto decode = dtype_of(b) == DType::kFP32 ? kernels.decode32 : kernels.decode16;
  decode(cold + b.data_offset, cold + b.scale_offset, span.dim / kGroup, ahead, decode_table(coded_dtype(b), global_scale),
         span.rows, stream);
}

void zero_tokens(const BufferPlan& b, uint8_t* page, int64_t begin, int64_t end) {
  for (int64_t h = 0; h < b.heads; ++h)
    for (int64_t t = begin; t < end; ++t)
      std::memset(page + h * b.head_stride + t * b.token_stride, 0, size_t(row_bytes(b)));
}

// A hot row as floats, by way of the bits that it is coded in.
void widen(const RowKernels& kernels, const BufferPlan& b, const uint8_t* hot, uint16_t* coded, float* x) {
  kernels.forms->code16(hot, b.dim, dtype_of(b), b.fp8_scale(), coded);
  kernels.forms->widen16(coded, b.dim, coded_dtype(b), x);
}

Refusal encode_page(const Batch& batch, const RowKernels& kernels, int64_t i, uint8_t* cold) {
  uint8_t* table = cold + batch.table_offset;
  for (int64_t n = 0; n < batch.num_buffers; ++n) {
    const BufferPlan& b = batch.buffers[n];
    const int64_t tokens = valid_tokens(batch, b, i);
    uint8_t* page = page_address(b, batch.page_ids[i]);
    const Span span = span_of(b, page, tokens);
    if (!b.compressed()) {
      copy_in(b, span, tokens, cold);
      continue;
    }
    const uint16_t amax = amax_bits(kernels, b, page, tokens, span);
    if (amax >= (coded_dtype(b) == DType::kFP16 ? 0x7C00 : 0x7F80)) return kNonFinite;
    float global_scale = 1.0f;
    if (batch.table_offset >= 0 && b.has_k()) {
      if (b.global_scale_bits) {
        global_scale = b.global_scale();
        std::memcpy(table, &global_scale, sizeof global_scale);
      } else {
        const GlobalScaleChoice choice = select_k(dtype_of(b), largest(b, amax));
        if (choice.clips) return kOutOfRange;
        global_scale = power_of_two(-choice.k);
        *table = uint8_t(choice.k);
      }
      table += b.table_bytes();
    }
    const Ahead ahead = ahead_of(batch, n, 0, batch.num_buffers, i);
    if (direct(b))
      quantize(kernels, b, span, tokens, ahead, global_scale, cold);
    else if (!encode_form({b, page, tokens, global_scale, false, ahead.hot, largest(b, amax)}, cold))
      return kOutOfRange;
  }
  return kAccepted;
}

}  // namespace

void check(const Batch& batch) {
  if (batch.page_tokens < 1) fail("page_tokens = " + text(batch.page_tokens) + ", must be at least 1");
  if (batch.cold_bytes < 1) fail("cold_bytes = " + text(batch.cold_bytes) + ", must be at least 1");
  for (int64_t n = 0; n < batch.num_buffers; ++n) check_buffer(batch, n);
  int64_t at = 0;
  for (const Extent& e : extents(batch)) {
    if (e.begin < at || e.end > batch.cold_bytes || e.end < e.begin)
      fail("cold bytes [" + text(e.begin) + ", " + text(e.end) + ") overlap others or lie outside a page of " +
           text(batch.cold_bytes));
    at = e.end;
  }
  for (int64_t i = 0; i < batch.num_pages; ++i) {
    const int64_t page = batch.page_ids[i], valid = batch.valid_tokens[i], offset = batch.offsets[i];
    if (offset < 0 || offset > batch.arena_bytes - batch.cold_bytes)
      fail("offset " + text(offset) + " of a cold page of " + text(batch.cold_bytes) + " bytes lies outside an arena of " +
           text(batch.arena_bytes));
    if (valid < 0 || valid > batch.page_tokens)
      fail("page " + text(page) + ": " + text(valid) + " valid tokens, a page holds " + text(batch.page_tokens));
    for (int64_t n = 0; n < batch.num_buffers; ++n) {
      const BufferPlan& b = batch.buffers[n];
      const int64_t last = (b.num_tokens - 1) / batch.page_tokens;
      if (page < 0 || b.num_tokens < 1 || page > last)
        fail("page " + text(page) + " is outside the pool, whose buffer " + text(n) + " has " + text(b.num_tokens) + " tokens");
      if (per_token(batch, b) && page * batch.page_tokens + valid > b.num_tokens)
        fail("page " + text(page) + " with " + text(valid) + " valid tokens reaches past the " + text(b.num_tokens) +
             " tokens of buffer " + text(n));
    }
  }
}

void check_decode(const Batch& batch, const uint8_t* arena, int64_t buffer_begin, int64_t buffer_end) {
  if (buffer_begin < 0 || buffer_end < buffer_begin || buffer_end > batch.num_buffers)
    fail("buffers [" + text(buffer_begin) + ", " + text(buffer_end) + ") of a page with " + text(batch.num_buffers));
  if (batch.table_offset < 0) return;
  for (int64_t i = 0; i < batch.num_pages; ++i) {
    const uint8_t* table = arena + batch.offsets[i] + batch.table_offset;
    for (int64_t n = 0; n < batch.num_buffers; ++n) {
      if (!batch.buffers[n].has_k()) continue;
      const uint8_t* entry = table;
      table += batch.buffers[n].table_bytes();
      if (batch.buffers[n].global_scale_bits) {
        const float global_scale = checkpoint_scale(entry);
        if (!checkpoint_scale_ok(dtype_of(batch.buffers[n]), global_scale))
          fail("cold page " + text(i) + " of the batch: the global scale of buffer " + text(n) +
               " is out of range; the bytes are not those of such a page");
        continue;
      }
      const int k = int8_t(*entry);
      const KLimits limits = k_limits(dtype_of(batch.buffers[n]));
      if (k < limits.low || k > limits.high)
        fail("cold page " + text(i) + " of the batch: k = " + text(k) + " for buffer " + text(n) + " is outside [" +
             text(limits.low) + ", " + text(limits.high) + "]; the bytes are not those of such a page");
    }
  }
}

void encode_pages(const Batch& batch, uint8_t* arena, const uint64_t* seeds, uint8_t* checksums, uint8_t* refused) {
  const RowKernels& kernels = row_kernels();
  const std::vector<Extent> gaps = paddings(batch);
  for (int64_t i = 0; i < batch.num_pages; ++i) {
    uint8_t* cold = arena + batch.offsets[i];
    refused[i] = encode_page(batch, kernels, i, cold);
    if (refused[i] != kAccepted) continue;
    for (const Extent& gap : gaps) std::memset(cold + gap.begin, 0, size_t(gap.end - gap.begin));
    xxh3_128(cold, size_t(batch.cold_bytes), seeds[i], checksums + 16 * i);
  }
}

void decode_pages(const Batch& batch, const uint8_t* arena, int64_t buffer_begin, int64_t buffer_end) {
  const RowKernels& kernels = row_kernels();
  int64_t hot_bytes = 0;
  for (int64_t n = buffer_begin; n < buffer_end; ++n) hot_bytes += values(batch.buffers[n]) * item_bytes(batch.buffers[n]);
  const bool large = hot_bytes * batch.num_pages >= kStreamBytes;
  const int64_t table_before = table_bytes_before(batch, buffer_begin);
  for (int64_t i = 0; i < batch.num_pages; ++i) {
    const uint8_t* cold = arena + batch.offsets[i];
    const uint8_t* table = cold + batch.table_offset + table_before;
    for (int64_t n = buffer_begin; n < buffer_end; ++n) {
      const BufferPlan& b = batch.buffers[n];
      uint8_t* page = page_address(b, batch.page_ids[i]);
      const int64_t tokens = valid_tokens(batch, b, i);
      const Span span = span_of(b, page, tokens);
      const float global_scale = stored_scale(batch, b, table);
      const bool stream = large && whole_lines(b, page);
      if (direct(b))
        dequantize(kernels, b, cold, span, ahead_of(batch, n, buffer_begin, buffer_end, i), global_scale, stream);
      else if (b.compressed())
        decode_form({b, page, tokens, global_scale, stream, 0, 0}, cold);
      else
        copy_out(kernels, b, cold, span, stream);
      zero_tokens(b, page, tokens, existing_tokens(batch, b, i));
    }
  }
  kernels.fence();
}

void page_errors(const Batch& batch, const uint8_t* arena, double* sums) {
  const RowKernels& kernels = row_kernels();
  std::vector<uint8_t> decoded;
  std::vector<uint16_t> coded;
  std::vector<float> rows;
  std::fill(sums, sums + batch.num_pages * batch.num_buffers * 2, 0.0);
  for (int64_t i = 0; i < batch.num_pages; ++i) {
    const uint8_t* cold = arena + batch.offsets[i];
    const uint8_t* table = cold + batch.table_offset;
    for (int64_t n = 0; n < batch.num_buffers; ++n, sums += 2) {
      const BufferPlan& b = batch.buffers[n];
      if (!b.compressed()) continue;
      const float global_scale = stored_scale(batch, b, table);
      decoded.resize(size_t(values(b) * item_bytes(b)));
      rows.resize(size_t(2 * b.dim));
      coded.resize(size_t(b.dim));
      BufferPlan dense_plan = b;
      dense_plan.head_stride = b.tokens * row_bytes(b), dense_plan.token_stride = row_bytes(b);
      const int64_t tokens = valid_tokens(batch, b, i);
      if (direct(b))
        dequantize(kernels, dense_plan, cold, span_of(dense_plan, decoded.data(), tokens), Ahead{}, global_scale, false);
      else
        decode_form({dense_plan, decoded.data(), tokens, global_scale, false, 0, 0}, cold);
      const uint8_t* page = page_address(b, batch.page_ids[i]);
      for (int64_t h = 0; h < b.heads; ++h)
        for (int64_t t = 0; t < tokens; ++t) {
          const uint8_t* back = decoded.data() + (h * b.tokens + t) * row_bytes(b);
          widen(kernels, b, back, coded.data(), rows.data());
          widen(kernels, b, page + h * b.head_stride + t * b.token_stride, coded.data(), rows.data() + b.dim);
          kernels.forms->errors(rows.data(), rows.data() + b.dim, b.dim, sums, sums + 1);
        }
    }
  }
}

}  // namespace kvtier
