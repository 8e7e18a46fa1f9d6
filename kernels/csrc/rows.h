// Kernels on rows of values, one set per instruction set, chosen at run time. All sets give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tables.h"

namespace kvtier {

// Rows of one buffer in the order of hot memory: row (o, i) starts at base + o * stride[0] + i * stride[1] (bytes) and is
// row o * cold[0] + i * cold[1] of the cold buffer. No alignment is assumed.
struct Rows {
  uint8_t* base;
  int64_t count[2];
  int64_t stride[2];
  int64_t cold[2];

  static Rows single(const uint8_t* base, bool any) { return {const_cast<uint8_t*>(base), {1, any}, {0, 0}, {0, 0}}; }
};

// Distances to the same rows of the buffer that comes next, which the CPU fetches meanwhile: hot order jumps through cold
// bytes, where no hardware prefetcher follows. All 0 for nothing.
struct Ahead {
  ptrdiff_t hot, data, scales;
};

struct FormKernels;

struct RowKernels {
  const char* name;
  const FormKernels* forms;
  // Largest magnitude bits in the rows: 15 bits of 16-bit values, 31 bits of float32. NaN and infinity sort on top.
  uint32_t (*amax16)(const Rows& src, int64_t dim);
  uint32_t (*amax32)(const Rows& src, int64_t dim);
  // Values to nibbles and scales; a row has `groups` of 16 values. float32 is rounded to BF16 first.
  void (*encode16)(const Rows& src, int64_t groups, const Ahead&, const EncodeTable&, uint8_t* data, uint8_t* scales);
  void (*encode32)(const Rows& src, int64_t groups, const Ahead&, const EncodeTable&, uint8_t* data, uint8_t* scales);
  // The inverse. `stream` writes around the cache; the caller fences before it reports completion.
  void (*decode16)(const uint8_t* data, const uint8_t* scales, int64_t groups, const Ahead&, const DecodeTable&, const Rows& dst,
                   bool stream);
  void (*decode32)(const uint8_t* data, const uint8_t* scales, int64_t groups, const Ahead&, const DecodeTable&, const Rows& dst,
                   bool stream);
  // Writes around the cache where it can; the caller fences before it reports completion.
  void (*copy_stream)(const uint8_t* from, size_t bytes, uint8_t* to);
  // Stripes of 64 bytes into XXH3's eight lanes, the secret advancing by 8 bytes per stripe.
  void (*xxh3_stripes)(uint64_t* lanes, const uint8_t* input, size_t stripes, const uint8_t* secret);
  void (*xxh3_scramble)(uint64_t* lanes, const uint8_t* secret);
  // Makes streamed writes visible before whatever follows.
  void (*fence)();
};

extern const RowKernels kScalarRows;
#if defined(__x86_64__)
extern const RowKernels kAvx2Rows, kAvx512Rows;
#endif

// The set in use; `KVTIER_ISA` names the first one, else the fastest that this CPU runs.
const RowKernels& row_kernels();
std::vector<std::string> available_isas();
// Throws std::invalid_argument for a set that this CPU or build does not have.
void use_isa(const std::string& name);

}  // namespace kvtier
