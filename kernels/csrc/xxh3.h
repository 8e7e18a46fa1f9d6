// XXH3 with 128 bits and a seed, after the published algorithm (xxHash specification, XXH3 section).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

// Writes the canonical digest: 16 bytes, big-endian, the same as `xxhash.xxh3_128_digest(data, seed)`.
void xxh3_128(const uint8_t* input, size_t bytes, uint64_t seed, uint8_t* digest);

// The same digest of an input that comes in pieces.
class Xxh3 {
 public:
  explicit Xxh3(uint64_t seed);
  void update(const uint8_t* input, size_t bytes);
  void digest(uint8_t* out) const;

 private:
  alignas(64) uint64_t lanes_[8];
  uint8_t secret_[192];
  uint8_t held_[256];   // what is not in the lanes yet: at least the last byte
  uint8_t before_[64];  // the stripe taken before what is held
  uint64_t seed_, total_ = 0;
  size_t held_bytes_ = 0, in_block_ = 0;
};

}  // namespace kvtier
