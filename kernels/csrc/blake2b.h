// Keyed BLAKE2b-256 of many short messages of one length (RFC 7693).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

constexpr size_t kDigestBytes = 32;

// `key` is 32 bytes; message i is messages[i * bytes : (i + 1) * bytes], bytes >= 1; `out` takes count * 32 bytes.
void blake2b_keyed(const uint8_t* key, const uint8_t* messages, size_t bytes, size_t count, uint8_t* out);

// Which of `keys` (key_count * 32 bytes) makes digest i (digests[32 * i : 32 * i + 32]) of message i: its index into
// out[i], or -1. Neighbours mostly share one, so the key that was right last is tried first.
void blake2b_owners(const uint8_t* keys, size_t key_count, const uint8_t* digests, const uint8_t* messages,
                    size_t bytes, size_t count, int32_t* out);

}  // namespace kvtier
