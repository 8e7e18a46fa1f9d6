#include "xxh3.h"

#include <cstring>

#include "rows.h"

namespace kvtier {
namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu,
                   kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u,
                   kPrime64_5 = 0x27D4EB2F165667C5u;

constexpr size_t kSecretBytes = 192;
constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct U128 {
  uint64_t low, high;
};

uint32_t read32(const uint8_t* at) {
  uint32_t x;
  std::memcpy(&x, at, 4);
  return x;
}

uint64_t read64(const uint8_t* at) {
  uint64_t x;
  std::memcpy(&x, at, 8);
  return x;
}

U128 multiply(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = Wide(a) * b;
  return {uint64_t(product), uint64_t(product >> 64)};
}

uint64_t folded_product(uint64_t a, uint64_t b) {
  const U128 product = multiply(a, b);
  return product.low ^ product.high;
}

uint64_t avalanche(uint64_t h) {
  h ^= h >> 37;
  h *= 0x165667919E3779F9u;
  return h ^ h >> 32;
}

uint64_t avalanche64(uint64_t h) {
  h ^= h >> 33;
  h *= kPrime64_2;
  h ^= h >> 29;
  h *= kPrime64_3;
  return h ^ h >> 32;
}

U128 hash_1_to_3(const uint8_t* p, size_t n, uint64_t seed) {
  const uint32_t low = uint32_t(p[0]) << 16 | uint32_t(p[n >> 1]) << 24 | uint32_t(p[n - 1]) | uint32_t(n) << 8;
  const uint32_t swapped = __builtin_bswap32(low);
  const uint32_t high = swapped << 13 | swapped >> 19;
  return {avalanche64(low ^ ((read32(kSecret) ^ read32(kSecret + 4)) + seed)),
          avalanche64(high ^ ((read32(kSecret + 8) ^ read32(kSecret + 12)) - seed))};
}

U128 hash_4_to_8(const uint8_t* p, size_t n, uint64_t seed) {
  seed ^= uint64_t(__builtin_bswap32(uint32_t(seed))) << 32;
  const uint64_t value = read32(p) + (uint64_t(read32(p + n - 4)) << 32);
  const uint64_t flip = (read64(kSecret + 16) ^ read64(kSecret + 24)) + seed;
  U128 m = multiply(value ^ flip, kPrime64_1 + (n << 2));
  m.high += m.low << 1;
  m.low ^= m.high >> 3;
  m.low ^= m.low >> 35;
  m.low *= 0x9FB21C651E98DF25u;
  m.low ^= m.low >> 28;
  return {m.low, avalanche(m.high)};
}

U128 hash_9_to_16(const uint8_t* p, size_t n, uint64_t seed) {
  const uint64_t flip_low = (read64(kSecret + 32) ^ read64(kSecret + 40)) - seed;
  const uint64_t flip_high = (read64(kSecret + 48) ^ read64(kSecret + 56)) + seed;
  uint64_t high = read64(p + n - 8);
  U128 m = multiply(read64(p) ^ high ^ flip_low, kPrime64_1);
  m.low += uint64_t(n - 1) << 54;
  high ^= flip_high;
  m.high += high + uint64_t(uint32_t(high)) * (kPrime32_2 - 1);
  m.low ^= __builtin_bswap64(m.high);
  U128 h = multiply(m.low, kPrime64_2);
  h.high += m.high * kPrime64_2;
  return {avalanche(h.low), avalanche(h.high)};
}

U128 hash_empty(uint64_t seed) {
  return {avalanche64(seed ^ read64(kSecret + 64) ^ read64(kSecret + 72)),
          avalanche64(seed ^ read64(kSecret + 80) ^ read64(kSecret + 88))};
}

uint64_t mix16(const uint8_t* p, const uint8_t* secret, uint64_t seed) {
  return folded_product(read64(p) ^ (read64(secret) + seed), read64(p + 8) ^ (read64(secret + 8) - seed));
}

void mix32(U128& sum, const uint8_t* a, const uint8_t* b, const uint8_t* secret, uint64_t seed) {
  sum.low = (sum.low + mix16(a, secret, seed)) ^ (read64(b) + read64(b + 8));
  sum.high = (sum.high + mix16(b, secret + 16, seed)) ^ (read64(a) + read64(a + 8));
}

U128 finish_mixed(const U128& sum, size_t n, uint64_t seed) {
  const uint64_t low = sum.low + sum.high;
  const uint64_t high = sum.low * kPrime64_1 + sum.high * kPrime64_4 + (n - seed) * kPrime64_2;
  return {avalanche(low), 0 - avalanche(high)};
}

// Pairs of 16 bytes from both ends towards the middle.
U128 hash_17_to_128(const uint8_t* p, size_t n, uint64_t seed) {
  U128 sum{n * kPrime64_1, 0};
  for (size_t i = (n - 1) / 32 + 1; i-- > 0;)
    mix32(sum, p + 16 * i, p + n - 16 * (i + 1), kSecret + 32 * i, seed);
  return finish_mixed(sum, n, seed);
}

U128 hash_129_to_240(const uint8_t* p, size_t n, uint64_t seed) {
  constexpr size_t kFirstRounds = 4;
  constexpr size_t kLastSecret = 136 - 17 - 16;
  U128 sum{n * kPrime64_1, 0};
  for (size_t i = 0; i < kFirstRounds; ++i) mix32(sum, p + 32 * i, p + 32 * i + 16, kSecret + 32 * i, seed);
  sum = {avalanche(sum.low), avalanche(sum.high)};
  for (size_t i = kFirstRounds; i < n / 32; ++i)
    mix32(sum, p + 32 * i, p + 32 * i + 16, kSecret + 3 + 32 * (i - kFirstRounds), seed);
  mix32(sum, p + n - 16, p + n - 32, kSecret + kLastSecret, 0 - seed);
  return finish_mixed(sum, n, seed);
}

uint64_t merge(const uint64_t* lanes, const uint8_t* secret, uint64_t start) {
  for (int i = 0; i < 8; i += 2)
    start += folded_product(lanes[i] ^ read64(secret + 8 * i), lanes[i + 1] ^ read64(secret + 8 * i + 8));
  return avalanche(start);
}

constexpr size_t kStripe = 64, kStripesPerBlock = (kSecretBytes - kStripe) / 8, kShort = 240;

// The part of a long input that was taken so far. The last byte of the input must never be taken: its stripe is the
// last one, which `finish` gets. So block ends are only scrambled where something follows.
struct Lanes {
  uint64_t* lanes;
  const uint8_t* secret;
  size_t in_block;  // stripes taken of the block under way

  void take(const uint8_t* p, size_t stripes) {
    const RowKernels& kernels = row_kernels();
    while (stripes) {
      const size_t now = stripes < kStripesPerBlock - in_block ? stripes : kStripesPerBlock - in_block;
      kernels.xxh3_stripes(lanes, p, now, secret + 8 * in_block);
      p += now * kStripe;
      stripes -= now;
      in_block += now;
      if (in_block == kStripesPerBlock) {
        kernels.xxh3_scramble(lanes, secret + kSecretBytes - kStripe);
        in_block = 0;
      }
    }
  }

  U128 finish(const uint8_t* last_stripe, uint64_t n) {
    row_kernels().xxh3_stripes(lanes, last_stripe, 1, secret + kSecretBytes - kStripe - 7);
    return {merge(lanes, secret + 11, n * kPrime64_1),
            merge(lanes, secret + kSecretBytes - kStripe - 11, ~(n * kPrime64_2))};
  }
};

void start(uint64_t* lanes, uint8_t* secret, uint64_t seed) {
  constexpr uint64_t kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                  kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  std::memcpy(lanes, kStart, sizeof kStart);
  for (size_t i = 0; i < kSecretBytes; i += 16) {
    const uint64_t low = read64(kSecret + i) + seed, high = read64(kSecret + i + 8) - seed;
    std::memcpy(secret + i, &low, 8);
    std::memcpy(secret + i + 8, &high, 8);
  }
}

U128 hash_long(const uint8_t* p, size_t n, uint64_t seed) {
  uint8_t secret[kSecretBytes];
  alignas(64) uint64_t lanes[8];
  start(lanes, secret, seed);
  Lanes taken{lanes, secret, 0};
  taken.take(p, (n - 1) / kStripe);
  return taken.finish(p + n - kStripe, n);
}

U128 hash(const uint8_t* p, size_t n, uint64_t seed) {
  if (n > kShort) return hash_long(p, n, seed);
  if (n > 128) return hash_129_to_240(p, n, seed);
  if (n > 16) return hash_17_to_128(p, n, seed);
  if (n > 8) return hash_9_to_16(p, n, seed);
  if (n > 3) return hash_4_to_8(p, n, seed);
  return n ? hash_1_to_3(p, n, seed) : hash_empty(seed);
}

void write(const U128& h, uint8_t* digest) {
  const uint64_t high = __builtin_bswap64(h.high), low = __builtin_bswap64(h.low);
  std::memcpy(digest, &high, 8);
  std::memcpy(digest + 8, &low, 8);
}

}  // namespace

void xxh3_128(const uint8_t* input, size_t bytes, uint64_t seed, uint8_t* digest) {
  write(hash(input, bytes, seed), digest);
}

Xxh3::Xxh3(uint64_t seed) : seed_(seed) {
  static_assert(sizeof secret_ == kSecretBytes && sizeof held_ > kShort, "short inputs are hashed from what is held");
  start(lanes_, secret_, seed);
}

void Xxh3::update(const uint8_t* p, size_t n) {
  total_ += n;
  if (held_bytes_ + n <= sizeof held_) {
    if (n) std::memcpy(held_ + held_bytes_, p, n);
    held_bytes_ += n;
    return;
  }
  Lanes taken{lanes_, secret_, in_block_};
  if (held_bytes_) {
    const size_t missing = sizeof held_ - held_bytes_;
    std::memcpy(held_ + held_bytes_, p, missing);
    p += missing;
    n -= missing;
    taken.take(held_, sizeof held_ / kStripe);
    std::memcpy(before_, held_ + sizeof held_ - kStripe, kStripe);
  }
  if (n > kStripe) {
    const size_t stripes = (n - 1) / kStripe;
    taken.take(p, stripes);
    p += stripes * kStripe;
    n -= stripes * kStripe;
    std::memcpy(before_, p - kStripe, kStripe);
  }
  std::memcpy(held_, p, n);
  held_bytes_ = n;
  in_block_ = taken.in_block;
}

void Xxh3::digest(uint8_t* out) const {
  if (total_ <= kShort) return write(hash(held_, held_bytes_, seed_), out);
  alignas(64) uint64_t lanes[8];
  std::memcpy(lanes, lanes_, sizeof lanes);
  Lanes taken{lanes, secret_, in_block_};
  taken.take(held_, (held_bytes_ - 1) / kStripe);
  uint8_t last[kStripe];
  const size_t here = held_bytes_ < kStripe ? held_bytes_ : kStripe;
  std::memcpy(last, before_ + here, kStripe - here);
  std::memcpy(last + kStripe - here, held_ + held_bytes_ - here, here);
  write(taken.finish(last, total_), out);
}

}  // namespace kvtier
