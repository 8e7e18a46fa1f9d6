#include "blake2b.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

namespace kvtier {
namespace {

constexpr size_t kBlock = 128;
constexpr uint64_t kInitial[8] = {0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
                                  0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

inline uint64_t rotate_right(uint64_t x, int by) { return x >> by | x << (64 - by); }

inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x, d = rotate_right(d ^ a, 32);
  c += d, b = rotate_right(b ^ c, 24);
  a += b + y, d = rotate_right(d ^ a, 16);
  c += d, b = rotate_right(b ^ c, 63);
}

// `total` counts the bytes up to and including this block; the last block may be padded with zeros.
void compress(uint64_t* state, const uint8_t* block, uint64_t total, bool last) {
  uint64_t m[16], v[16];
  std::memcpy(m, block, kBlock);
  std::memcpy(v, state, 64);
  std::memcpy(v + 8, kInitial, 64);
  v[12] ^= total;
  if (last) v[14] = ~v[14];
  for (int round = 0; round < 12; ++round) {
    const uint8_t* s = kOrder[round % 10];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
  }
  for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

// The key fills the first block, which all messages share.
struct Keyed {
  uint64_t state[8];

  explicit Keyed(const uint8_t* key) {
    std::memcpy(state, kInitial, sizeof state);
    state[0] ^= 0x01010000u ^ kDigestBytes << 8 ^ kDigestBytes;
    uint8_t block[kBlock] = {};
    std::memcpy(block, key, kDigestBytes);
    compress(state, block, kBlock, false);
  }
};

// What is hashed behind the key: whole blocks where it lies, and the rest padded.
class Message {
 public:
  Message(const uint8_t* data, size_t bytes) : data_(data), bytes_(bytes), whole_((bytes - 1) / kBlock * kBlock) {
    std::memcpy(last_, data + whole_, bytes - whole_);
  }

  void digest(const Keyed& key, uint8_t* out) const {
    uint64_t state[8];
    std::memcpy(state, key.state, sizeof state);
    for (size_t done = 0; done < whole_; done += kBlock) compress(state, data_ + done, kBlock + done + kBlock, false);
    compress(state, last_, kBlock + bytes_, true);
    std::memcpy(out, state, kDigestBytes);
  }

 private:
  const uint8_t* data_;
  size_t bytes_, whole_;
  uint8_t last_[kBlock] = {};
};

}  // namespace

void blake2b_keyed(const uint8_t* key, const uint8_t* messages, size_t bytes, size_t count, uint8_t* out) {
  const Keyed keyed(key);
  for (size_t i = 0; i < count; ++i) Message(messages + i * bytes, bytes).digest(keyed, out + i * kDigestBytes);
}

void blake2b_owners(const uint8_t* keys, size_t key_count, const uint8_t* digests, const uint8_t* messages,
                    size_t bytes, size_t count, int32_t* out) {
  std::vector<Keyed> keyed;
  keyed.reserve(key_count);
  for (size_t k = 0; k < key_count; ++k) keyed.emplace_back(keys + k * kDigestBytes);
  std::vector<int32_t> latest(key_count);  // the one that was right last comes first
  std::iota(latest.begin(), latest.end(), 0);
  for (size_t i = 0; i < count; ++i) {
    const Message message(messages + i * bytes, bytes);
    const auto right = std::find_if(latest.begin(), latest.end(), [&](int32_t k) {
      uint8_t digest[kDigestBytes];
      message.digest(keyed[size_t(k)], digest);
      return std::memcmp(digest, digests + i * kDigestBytes, kDigestBytes) == 0;
    });
    out[i] = right == latest.end() ? -1 : *right;
    if (right != latest.end()) std::rotate(latest.begin(), right, right + 1);
  }
}

}  // namespace kvtier
