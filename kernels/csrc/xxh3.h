// XXH3 with 128 bits and a seed, after the published algorithm (xxHash specification, XXH3 section).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

// Writes the canonical digest: 16 bytes, big-endian, the same as `xxhash.xxh3_128_digest(data, seed)`.
void xxh3_128(const uint8_t* input, size_t bytes, uint64_t seed, uint8_t* digest);

}  // namespace kvtier
