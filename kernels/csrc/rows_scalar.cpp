// Portable kernels: no intrinsics, any little-endian CPU.
#include <cstring>

#include "forms.h"
#include "rows.h"

namespace kvtier {
namespace {

template <class T>
T load(const uint8_t* at) {
  T x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

template <class F>
void each_row(const Rows& rows, F&& f) {
  for (int64_t o = 0; o < rows.count[0]; ++o)
    for (int64_t i = 0; i < rows.count[1]; ++i)
      f(rows.base + o * rows.stride[0] + i * rows.stride[1], o * rows.cold[0] + i * rows.cold[1]);
}

template <class T>
uint32_t amax(const Rows& src, int64_t dim) {
  constexpr T kMagnitude = T(~T(0)) >> 1;
  T most = 0;
  each_row(src, [&](const uint8_t* row, int64_t) {
    for (int64_t i = 0; i < dim; ++i) {
      const T magnitude = load<T>(row + i * int64_t(sizeof(T))) & kMagnitude;
      most = magnitude > most ? magnitude : most;
    }
  });
  return most;
}

inline uint16_t value16(const uint8_t* at, uint16_t) { return load<uint16_t>(at); }
inline uint16_t value16(const uint8_t* at, uint32_t) { return bf16_of(load<float>(at)); }

template <class T>
void encode_group(const uint8_t* at, const EncodeTable& table, uint8_t* data, uint8_t* scale) {
  uint16_t bits[kGroup], most = 0;
  for (int i = 0; i < kGroup; ++i) {
    bits[i] = value16(at + size_t(i) * sizeof(T), T(0));
    const uint16_t magnitude = bits[i] & 0x7FFF;
    most = magnitude > most ? magnitude : most;
  }
  *scale = table.scale[most];
  const uint32_t* threshold = table.threshold[*scale];
  uint8_t codes[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const uint16_t magnitude = bits[i] & 0x7FFF;
    int code = (bits[i] >> 12) & 8;
    for (int t = 0; t < 7; ++t) code += magnitude > uint16_t(threshold[t]);
    codes[i] = uint8_t(code);
  }
  for (int i = 0; i < kGroup / 2; ++i) data[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
}

template <class T>
void encode(const Rows& src, int64_t groups, const Ahead&, const EncodeTable& table, uint8_t* data, uint8_t* scales) {
  each_row(src, [&](const uint8_t* row, int64_t cold) {
    for (int64_t g = 0; g < groups; ++g)
      encode_group<T>(row + g * int64_t(kGroup * sizeof(T)), table, data + (cold * groups + g) * (kGroup / 2),
                      scales + cold * groups + g);
  });
}

template <class T>
void decode_group(const uint8_t* data, const uint8_t* bytes, uint8_t* at) {
  for (int i = 0; i < kGroup; ++i, at += sizeof(T)) {
    const int code = (data[i / 2] >> (i % 2 * 4)) & 15;
    const T value = T(T(uint16_t(bytes[code] | bytes[16 + code] << 8)) << (8 * (sizeof(T) - 2)));
    std::memcpy(at, &value, sizeof value);
  }
}

template <class T>
void decode(const uint8_t* data, const uint8_t* scales, int64_t groups, const Ahead&, const DecodeTable& table,
            const Rows& dst, bool) {
  each_row(dst, [&](uint8_t* row, int64_t cold) {
    for (int64_t g = 0; g < groups; ++g)
      decode_group<T>(data + (cold * groups + g) * (kGroup / 2), table.bytes[scales[cold * groups + g]],
                      row + g * int64_t(kGroup * sizeof(T)));
  });
}

void copy_stream(const uint8_t* from, size_t bytes, uint8_t* to) { std::memcpy(to, from, bytes); }

void xxh3_stripes(uint64_t* lanes, const uint8_t* input, size_t stripes, const uint8_t* secret) {
  for (size_t s = 0; s < stripes; ++s, input += 64, secret += 8)
    for (int i = 0; i < 8; ++i) {
      const uint64_t value = load<uint64_t>(input + 8 * i);
      const uint64_t keyed = value ^ load<uint64_t>(secret + 8 * i);
      lanes[i ^ 1] += value;
      lanes[i] += uint64_t(uint32_t(keyed)) * (keyed >> 32);
    }
}

void xxh3_scramble(uint64_t* lanes, const uint8_t* secret) {
  for (int i = 0; i < 8; ++i) {
    lanes[i] ^= lanes[i] >> 47;
    lanes[i] ^= load<uint64_t>(secret + 8 * i);
    lanes[i] *= 0x9E3779B1u;
  }
}

void fence() {}

}  // namespace

const RowKernels kScalarRows = {
    "scalar",         &kScalarForms,    amax<uint16_t>,   amax<uint32_t>, encode<uint16_t>, encode<uint32_t>,
    decode<uint16_t>, decode<uint32_t>, copy_stream, xxh3_stripes, xxh3_scramble,    fence,
};

}  // namespace kvtier
