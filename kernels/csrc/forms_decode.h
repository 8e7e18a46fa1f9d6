// The forms' decoding loops, behind lanes.h, and conversions of whole rows.

// The 16 values of a group of nibbles.
KVTIER_INLINE void nibble_values(const uint8_t* data, F* x) {
#if defined(KVTIER_HAVE_AVX512)
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f,
                                      -4.0f, -6.0f);
  // Each of the eight 64-bit words takes two nibbles of all 16 to the lowest bits of its halves.
  const __m512i from = _mm512_setr_epi64(0x0400000000, 0x0C00000008, 0x1400000010, 0x1C00000018, 0x2400000020, 0x2C00000028,
                                         0x3400000030, 0x3C00000038);
  const __m512i codes = _mm512_multishift_epi64_epi8(from, _mm512_set1_epi64(read<int64_t>(data)));
  x[0] = F(_mm512_permutexvar_ps(codes, table));
#elif defined(KVTIER_HAVE_AVX2)
  // As FP16, of which only the high bytes are not 0.
  const __m128i table = _mm_setr_epi8(0, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46, -0x80, -0x48, -0x44, -0x42, -0x40, -0x3E,
                                      -0x3C, -0x3A);
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)), nibble = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(packed, nibble), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
  const __m128i high = _mm_shuffle_epi8(table, _mm_unpacklo_epi8(even, odd)), zero = _mm_setzero_si128();
  x[0] = F(_mm256_cvtph_ps(_mm_unpacklo_epi8(zero, high)));
  x[1] = F(_mm256_cvtph_ps(_mm_unpackhi_epi8(zero, high)));
#else
  for (int p = 0; p < kParts; ++p) {
    const W codes = all(uint32_t(read<uint16_t>(data + 2 * p))) >> W{0, 4, 8, 12};
    const W size = codes & all(7u);
    const F small = __builtin_convertvector(I(size), F) * all(0.5f);
    const F sizes = pick(W(size < all(2u)), small, F((size << 22) + all(126u << 23)));
    x[p] = F(W(sizes) | (codes << 28 & all(kFloatSign)));
  }
#endif
}

// What kLanes e4m3 codes are worth; no code means NaN here.
KVTIER_INLINE F e4m3_values(const uint8_t* data) {
#if defined(KVTIER_HAVE_AVX2)
  // As FP16 with the same bits, which is worth 2^-8 of it. The sign arrives twice.
#if defined(KVTIER_HAVE_AVX512)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xBFFF)));
  return F(_mm512_cvtph_ps(half)) * all(256.0f);
#else
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)));
  const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(int16_t(0xBFFF)));
  return F(_mm256_cvtph_ps(half)) * all(256.0f);
#endif
#else
  W codes;
  for (int i = 0; i < kLanes; ++i) codes[i] = data[i];
  const W size = codes & all(0x7Fu);
  const F small = __builtin_convertvector(I(size), F) * all(0.001953125f);  // 2^-9
  const F normal = F((size << 20) + all(120u << 23));
  return F(W(pick(W(size < all(8u)), small, normal)) | (codes & all(0x80u)) << 24);
#endif
}

// 16 decoded values to hot memory. Around the cache to addresses that are multiples of 16.
template <DType dtype, bool kStream>
KVTIER_INLINE void put_group(const F* x, float inverse_fp8_scale, uint8_t* at) {
  if constexpr (dtype == DType::kFP8) {
    W codes[kParts];
    for (int i = 0; i < kParts; ++i) {
      const F value = x[i] * all(inverse_fp8_scale);
      codes[i] = signed_e4m3(with_sign_of(smaller(magnitude(value), all(448.0f)), value));
    }
    put_group_bytes(codes, at);
  } else if constexpr (dtype == DType::kFP32) {
    for (int i = 0; i < kParts; ++i) write(at + 4 * kLanes * i, brain_bits(x[i]) << 16);
  } else {
#if defined(KVTIER_HAVE_AVX2)
    const __m256i bits = rounded<dtype>(x);
    if constexpr (kStream) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(at), _mm256_castsi256_si128(bits));
      _mm_stream_si128(reinterpret_cast<__m128i*>(at) + 1, _mm256_extracti128_si256(bits, 1));
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bits);
    }
#else
    for (int i = 0; i < kParts; ++i) {
      uint16_t bits[kLanes];
      put_rounded<dtype>(x[i], bits);
      __builtin_memcpy(at + 2 * kLanes * i, bits, sizeof bits);
    }
#endif
  }
}

// Calls values(row, group, x) for all groups, row by row, and writes what it leaves in x.
template <DType dtype, bool kStream, class Values>
KVTIER_INLINE void put_rows(const HotRows& hot, int64_t rows, int64_t row_groups, Values&& values) {
  constexpr int64_t kItem = dtype == DType::kFP8 ? 1 : dtype == DType::kFP32 ? 4 : 2;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < row_groups; ++g) {
      F x[kParts];
      values(r, g, x);
      put_group<dtype, kStream>(x, hot.inverse_fp8_scale, hot.base + r * hot.stride + g * kGroup * kItem);
    }
}
template <class Values>
KVTIER_INLINE void put_rows(const HotRows& hot, int64_t rows, int64_t row_groups, Values&& values) {
  const bool stream = hot.stream && (reinterpret_cast<uintptr_t>(hot.base) | uintptr_t(hot.stride)) % 16 == 0;
  switch (hot.dtype) {
    case DType::kBF16:
      return stream ? put_rows<DType::kBF16, true>(hot, rows, row_groups, values)
                    : put_rows<DType::kBF16, false>(hot, rows, row_groups, values);
    case DType::kFP16:
      return stream ? put_rows<DType::kFP16, true>(hot, rows, row_groups, values)
                    : put_rows<DType::kFP16, false>(hot, rows, row_groups, values);
    case DType::kFP8: return put_rows<DType::kFP8, false>(hot, rows, row_groups, values);
    default: return put_rows<DType::kFP32, false>(hot, rows, row_groups, values);
  }
}

// Adding -0 changes nothing, not even the sign of a zero.
constexpr float kNothing[kGroup] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f,
                                    -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};

void decode_two(const uint8_t* data, const uint8_t* scales, int64_t rows, int64_t row_groups, const StepTable& table,
                const HotRows& hot) {
  put_rows(hot, rows, row_groups, [&](int64_t r, int64_t g, F* x) {
    const int64_t n = r * row_groups + g;
    const F first = all(table.step[scales[2 * n] & 0x7F]), second = all(table.step[scales[2 * n + 1] & 0x7F]);
    F rest[kParts];
    nibble_values(data + 16 * n, x), nibble_values(data + 16 * n + 8, rest);
    for (int i = 0; i < kParts; ++i) x[i] = x[i] * first + rest[i] * second;
  });
}

void decode_offset(const uint8_t* data, const uint8_t* scales, const float* mean, int64_t rows, int64_t row_groups,
                   const StepTable& table, const HotRows& hot) {
  put_rows(hot, rows, row_groups, [&](int64_t r, int64_t g, F* x) {
    const int64_t n = r * row_groups + g;
    const F step = all(table.step[scales[n] & 0x7F]);
    const float* add = scales[n] & 0x80 ? mean + g * kGroup : kNothing;
    nibble_values(data + 8 * n, x);
    for (int i = 0; i < kParts; ++i) x[i] = x[i] * step + load(add + i * kLanes);
  });
}

// Up to 16 tokens. `steps`: room for a row.
void decode_token(const uint8_t* data, const uint8_t* scales, const float* middles, int64_t rows, int64_t row_groups,
                  const StepTable& table, float* steps, const HotRows& hot) {
  for (int64_t c = 0; c < row_groups * kGroup; ++c) steps[c] = table.step[scales[c] & 0x7F];
  put_rows(hot, rows, row_groups, [&](int64_t r, int64_t g, F* x) {
    nibble_values(data + 8 * (r * row_groups + g), x);
    for (int i = 0; i < kParts; ++i) {
      const int64_t c = g * kGroup + i * kLanes;
      x[i] = x[i] * load(steps + c) + load(middles + c);
    }
  });
}

// The mean belongs to rows whose flag is set; they begin with bit `first_flag`. `flags` may be null.
void decode_fp8(const uint8_t* data, const float* mean, const uint8_t* flags, int64_t first_flag, int64_t rows,
                int64_t row_groups, const HotRows& hot) {
  put_rows(hot, rows, row_groups, [&](int64_t r, int64_t g, F* x) {
    const int64_t flag = first_flag + r;
    const float* add = flags && flags[flag / 8] >> flag % 8 & 1 ? mean + g * kGroup : kNothing;
    for (int i = 0; i < kParts; ++i)
      x[i] = e4m3_values(data + (r * row_groups + g) * kGroup + i * kLanes) + load(add + i * kLanes);
  });
}

// NVFP4 to FP8 elements, whose codes are the low bytes of the table.
void decode_plain(const uint8_t* data, const uint8_t* scales, int64_t rows, int64_t row_groups, const DecodeTable& table,
                  const HotRows& hot) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < row_groups; ++g, data += 8, ++scales) {
      uint8_t* at = hot.base + r * hot.stride + g * kGroup;
      const uint8_t* bytes = table.bytes[*scales];
#if defined(KVTIER_HAVE_AVX2)
      const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)), nibble = _mm_set1_epi8(15);
      const __m128i even = _mm_and_si128(packed, nibble), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
      write(at, _mm_shuffle_epi8(read<__m128i>(bytes), _mm_unpacklo_epi8(even, odd)));
#else
      for (int i = 0; i < kGroup; ++i) at[i] = bytes[data[i / 2] >> (i % 2 * 4) & 15];
#endif
    }
}

// Hot elements as 16 bits of the type that they are coded in.
void code16(const uint8_t* hot, int64_t values, DType dtype, float fp8_scale, uint16_t* out) {
  if (dtype == DType::kFP8) {
    for (int64_t i = 0; i < values; i += kLanes) put_rounded<DType::kFP16>(e4m3_values(hot + i) * all(fp8_scale), out + i);
  } else if (dtype == DType::kFP32) {
    for (int64_t i = 0; i < values; i += kLanes) put_rounded<DType::kBF16>(read<F>(hot + 4 * i), out + i);
  } else {
    __builtin_memcpy(out, hot, size_t(values * 2));
  }
}

void widen16(const uint16_t* bits, int64_t values, DType coded, float* x) {
  for (int64_t i = 0; i < values; i += kLanes)
    store(x + i, coded == DType::kFP16 ? widened<DType::kFP16>(bits + i) : widened<DType::kBF16>(bits + i));
}

uint8_t amax8(const uint8_t* hot, int64_t dim) {
  uint8_t most = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const uint8_t size = hot[i] & 0x7F;
    most = size > most ? size : most;
  }
  return most;
}

// Sums of squares of a - b and of b.
void errors(const float* a, const float* b, int64_t n, double* difference, double* size) {
  double lost[8] = {}, whole[8] = {};
  for (int64_t i = 0; i < n; i += 8)
    for (int l = 0; l < 8; ++l) {
      const double d = double(a[i + l]) - double(b[i + l]), x = double(b[i + l]);
      lost[l] += d * d;
      whole[l] += x * x;
    }
  for (int l = 0; l < 8; ++l) *difference += lost[l], *size += whole[l];
}
