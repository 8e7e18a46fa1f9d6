// The forms' encoding loops, behind lanes.h. Groups lie in lanes wherever a group has one scale, so that maxima and sums
// need no step across a register.

constexpr uint32_t kNibbleSign = 8;

// What the CPU fetches meanwhile: rows of hot memory, a few lines at a time.
KVTIER_INLINE void fetch(Soon& soon, int64_t bytes) {
  for (; bytes > 0 && soon.rows > 0; bytes -= 64) {
    __builtin_prefetch(soon.row + soon.at, 0, 2);
    soon.at += 64;
    if (soon.at >= soon.row_bytes) soon.row += soon.stride, soon.at = 0, --soon.rows;
  }
}

#if defined(KVTIER_HAVE_AVX2) && !defined(KVTIER_HAVE_AVX512)
// Eight values: those that lie four apart share a lane, each in half of it.
KVTIER_INLINE W nibbles_of_eight(const F* sums, const F* signed_by) {
  __m256i word = _mm256_setzero_si256();
  for (int e = 3; e >= 0; --e) {
    const __m256i code = _mm256_blend_epi16(__m256i(sums[e]), _mm256_slli_epi32(__m256i(sums[e + 4]), 16), 0xAA);
    const __m256i sign = _mm256_blend_epi16(_mm256_srli_epi32(__m256i(signed_by[e]), 16), __m256i(signed_by[e + 4]), 0xAA);
    const __m256i nibble = _mm256_or_si256(_mm256_and_si256(code, _mm256_set1_epi16(7)),
                                           _mm256_and_si256(_mm256_srli_epi16(sign, 12), _mm256_set1_epi16(8)));
    word = _mm256_or_si256(_mm256_slli_epi16(word, 4), nibble);
  }
  return W(word);
}
#else
template <int e>
KVTIER_INLINE W add_nibble(W word, F sum, F signed_by) {
  const W nibble = merged<kNibbleSign>(W(sum), W(signed_by) >> 28);
  return joined<(15u << 4 * (e % 8))>(word, nibble << 4 * (e % 8));
}
template <int... e>
KVTIER_INLINE W nibbles_of(const F* sums, const F* signed_by, std::integer_sequence<int, e...>) {
  W word = all(0u);
  ((word = add_nibble<e>(word, sums[e], signed_by[e])), ...);
  return word;
}
KVTIER_INLINE W nibbles_of_eight(const F* sums, const F* signed_by) {
  return nibbles_of(sums, signed_by, std::make_integer_sequence<int, 8>{});
}
#endif
KVTIER_INLINE Nibbles nibbles_of(const F* sums, const F* signed_by) {
  return {nibbles_of_eight(sums, signed_by), nibbles_of_eight(sums + 8, signed_by + 8)};
}

KVTIER_INLINE F amax_of(const F* column) {
  F most = magnitude(column[0]);
  for (int e = 1; e < kGroup; ++e) most = farther(most, column[e]);
  return most;
}

// In steps of the scale. Only a scale that had to be cut at 448 lets values reach 7 of them.
template <bool clips>
KVTIER_INLINE F in_steps(F x, const Scales& by) {
  const F steps = x * by.inverses;
  return clips ? larger(smaller(steps, all(6.0f)), all(-6.0f)) : steps;
}

// Calls work(x, data, scales) for kLanes groups at a time; the last call may see zeros behind the input and write to memory
// of its own, of which what is wanted is copied. A group takes `bytes` of data and `codes` of scales.
template <int bytes, int codes, class Work>
KVTIER_INLINE void each_batch(const uint16_t* x, int64_t groups, uint8_t* data, uint8_t* scales, Work&& work) {
  int64_t g = 0;
  for (; g + kLanes <= groups; g += kLanes) work(g, x + g * kGroup, data + g * bytes, scales + g * codes);
  if (g == groups) return;
  uint16_t rest[kGroup * kLanes] = {};
  uint8_t rest_data[bytes * kLanes], rest_scales[codes * kLanes];
  const size_t count = size_t(groups - g);
  __builtin_memcpy(rest, x + g * kGroup, count * kGroup * 2);
  work(g, rest, rest_data, rest_scales);
  __builtin_memcpy(data + g * bytes, rest_data, count * bytes);
  __builtin_memcpy(scales + g * codes, rest_scales, count * codes);
}

template <DType coded, bool clips>
void encode_two(const uint16_t* x, int64_t groups, float global_scale, uint8_t* data, uint8_t* scales, Soon& soon) {
  each_batch<16, 2>(x, groups, data, scales, [&](int64_t, const uint16_t* at, uint8_t* to, uint8_t* codes) {
    fetch(soon, kLanes * kGroup * 2);
    F column[kGroup], left[kGroup], sums[kGroup];
    load_columns<coded>(at, column);
    const Scales first = scales_of(amax_of(column), global_scale);
    for (int e = 0; e < kGroup; ++e) {
      const Coded c = e2m1_code(in_steps<clips>(magnitude(column[e]), first));
      sums[e] = c.sum;
      left[e] = column[e] - with_sign_of((c.sum - c.added) * first.steps, column[e]);
    }
    const Nibbles main = nibbles_of(sums, column);
    const Scales second = scales_of(amax_of(left), global_scale);
    for (int e = 0; e < kGroup; ++e) sums[e] = e2m1_code(in_steps<clips>(magnitude(left[e]), second)).sum;
    const Nibbles rest = nibbles_of(sums, left);
    put_nibbles(main, rest, to);
    uint32_t both[kLanes];
    write(both, first.codes | second.codes << 8);
    for (int i = 0; i < kLanes; ++i) write(codes + 2 * i, uint16_t(both[i]));
  });
}

// `columns` holds the means turned like the values, `pitch` of each: the mean that belongs to value e of group g of a row
// is columns[e * pitch + g], and so on behind the row's end for as many groups as there are lanes.
template <DType coded>
void turn_means(const uint16_t* bits, int64_t row_groups, int64_t pitch, float* columns) {
  for (int64_t g = 0; g < pitch; g += kLanes) {
    uint16_t means[kGroup * kLanes];
    for (int i = 0; i < kLanes; ++i) __builtin_memcpy(means + kGroup * i, bits + (g + i) % row_groups * kGroup, kGroup * 2);
    F column[kGroup];
    load_columns<coded>(means, column);
    for (int e = 0; e < kGroup; ++e) store(columns + e * pitch + g, column[e]);
  }
}

template <DType coded, bool clips>
void encode_offset(const uint16_t* x, const MeanColumns& mean, int64_t groups, float global_scale, uint8_t* data,
                   uint8_t* scales, Soon& soon) {
  each_batch<8, 1>(x, groups, data, scales, [&](int64_t g, const uint16_t* at, uint8_t* to, uint8_t* codes) {
    fetch(soon, kLanes * kGroup * 2);
    const float* means = mean.columns + g % mean.row_groups;
    F value[kGroup], distance[kGroup], sums[kGroup];
    load_columns<coded>(at, value);
    for (int e = 0; e < kGroup; ++e) distance[e] = value[e] - load(means + e * mean.pitch);
    const Scales plain = scales_of(amax_of(value), global_scale), off = scales_of(amax_of(distance), global_scale);
    const auto error = [](const F* from, const Scales& by) {
      return sum_columns([&](int e) {
        const F left = from[e] - e2m1_value(in_steps<clips>(from[e], by)) * by.steps;
        return left * left;
      });
    };
    const Mask taken = less(error(distance, off), error(value, plain));
    const Scales by{pick(taken, off.codes | all(0x80u), plain.codes), {}, pick(taken, off.inverses, plain.inverses)};
    for (int e = 0; e < kGroup; ++e) {
      value[e] = pick(taken, distance[e], value[e]);
      sums[e] = e2m1_code(in_steps<clips>(magnitude(value[e]), by)).sum;
    }
    const Nibbles n = nibbles_of(sums, value);
    put_nibbles({pick(taken, positive_zeros(n.low), n.low), pick(taken, positive_zeros(n.high), n.high)}, to);
    put_bytes(by.codes, codes);
  });
}

// Values of kLanes neighbours in four rows as nibbles at data + r * row_bytes: the codes that sums[r] end in, with the
// signs of signed_by[r] where they are not 0.
KVTIER_INLINE void put_row_nibbles(const F* sums, const F* signed_by, uint8_t* data, int64_t row_bytes) {
  W codes[4];
  for (int r = 0; r < 4; ++r) codes[r] = merged<kNibbleSign>(W(sums[r]), W(signed_by[r]) >> 28);
#if defined(KVTIER_HAVE_AVX512)
  for (int r = 0; r < 4; ++r) {
    const __m512i low = __m512i(codes[r]), high = _mm512_srli_epi64(low, 28);
    const __m512i pairs = __m512i(merged<0xF0u>(W(low), W(high)));
    write(data + r * row_bytes, positive_zeros<uint64_t>(uint64_t(_mm_cvtsi128_si64(_mm512_cvtepi64_epi8(pairs))), 0x7777777777777777u));
  }
#elif defined(KVTIER_HAVE_AVX2)
  for (W& code : codes) code &= all(15u);
  const __m256i ab = _mm256_packus_epi32(__m256i(codes[0]), __m256i(codes[1]));
  const __m256i cd = _mm256_packus_epi32(__m256i(codes[2]), __m256i(codes[3]));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_packus_epi16(ab, cd), _mm256_set1_epi16(0x1001));
  const __m256i bytes = _mm256_packus_epi16(pairs, pairs);
  typedef uint32_t Four __attribute__((vector_size(16)));
  const Four words = Four(_mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
  const Four four = positive_zeros(words, Four(_mm_set1_epi8(0x77)));
  for (int r = 0; r < 4; ++r) write(data + r * row_bytes, uint32_t(four[r]));
#else
  for (int r = 0; r < 4; ++r)
    for (int i = 0; i < kLanes / 2; ++i) {
      const uint32_t pair = (codes[r][2 * i] & 15u) | (codes[r][2 * i + 1] & 15u) << 4;
      data[r * row_bytes + i] = uint8_t(positive_zeros(pair, 0x77u));
    }
#endif
}

// 16 tokens, of which `rows` are valid; all 16 are written.
template <DType coded, bool clips>
void encode_token(const uint16_t* x, int64_t rows, int64_t dim, float global_scale, uint8_t* data, uint8_t* scales,
                  uint16_t* middles, Soon& soon) {
  for (int64_t c = 0; c < dim; c += kLanes) {
    fetch(soon, kLanes * kGroup * 2);
    F value[kGroup];
    F low = widened<coded>(x + c), high = low;
    value[0] = low;
    for (int r = 1; r < kGroup; ++r) {
      // A row that is not valid repeats the first.
      value[r] = widened<coded>(x + (r < rows ? r * dim : 0) + c);
      low = smaller(low, value[r]), high = larger(high, value[r]);
    }
    put_rounded<coded>(low * all(0.5f) + high * all(0.5f) + all(0.0f), middles + c);
    const F middle = widened<coded>(middles + c);
    // Rounding keeps order, so the farthest values are the lowest and the highest.
    const Scales by = scales_of(farther(magnitude(low - middle), high - middle), global_scale);
    put_bytes(by.codes, scales + c);
    for (int r = 0; r < kGroup; r += 4) {
      F distance[4], sums[4];
      for (int i = 0; i < 4; ++i) {
        distance[i] = r + i < rows ? value[r + i] - middle : all(0.0f);
        sums[i] = e2m1_code(in_steps<clips>(magnitude(distance[i]), by)).sum;
      }
      put_row_nibbles(sums, distance, data + (r * dim + c) / 2, dim / 2);
    }
  }
}

KVTIER_INLINE bool any_above(F x, float limit) {
#if defined(KVTIER_HAVE_AVX512)
  return less(all(limit), x) != 0;
#elif defined(KVTIER_HAVE_AVX2)
  return _mm256_movemask_ps(__m256(less(all(limit), x))) != 0;
#else
  const W above = less(all(limit), x);
  uint32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= above[i];
  return any != 0;
#endif
}

constexpr float kLargestE4m3 = 464.0f;  // what is not above rounds to 448

// The e4m3 code of a value up to 464 in the lowest byte.
KVTIER_INLINE W signed_e4m3(F x) { return merged<0x80u>(e4m3_code(magnitude(x)), W(x) >> 24); }

// True if a value clipped, and what is written means nothing. Without `clips` none does.
template <DType coded, bool clips>
bool encode_fp8(const uint16_t* x, int64_t values, uint8_t* data, Soon& soon) {
  F most = all(0.0f);
  for (int64_t at = 0; at < values; at += kGroup) {
    fetch(soon, at % 32 ? 0 : 64);
    W codes[kParts];
    for (int i = 0; i < kParts; ++i) {
      const F value = widened<coded>(x + at + i * kLanes);
      if (clips) most = farther(most, value);
      codes[i] = signed_e4m3(value);
    }
    put_group_bytes(codes, data + at);
  }
  return clips && any_above(most, kLargestE4m3);
}

// What rounding to e4m3 leaves, squared.
template <bool clips>
KVTIER_INLINE F e4m3_error(F x) {
  const F left = clips ? magnitude(x) - e4m3_value(smaller(magnitude(x), all(448.0f))) : x - e4m3_value(x);
  return left * left;
}

// Rows behind one another, whose flags begin with bit `first_flag`. `errors`: two floats per group, for the call.
template <DType coded, bool clips>
bool encode_fp8_mean(const uint16_t* x, const MeanColumns& mean, int64_t rows, uint8_t* data, uint8_t* flags,
                     int64_t first_flag, float* errors, Soon& soon) {
  const int64_t row_groups = mean.row_groups, groups = rows * row_groups, dim = row_groups * kGroup;
  float* off_errors = errors + groups + kLanes;
  for (int64_t g = 0; g < groups; g += kLanes) {
    fetch(soon, kLanes * kGroup * 2);
    const float* means = mean.columns + g % row_groups;
    F value[kGroup];
    uint16_t rest[kGroup * kLanes] = {};
    const uint16_t* at = x + g * kGroup;
    if (g + kLanes > groups) __builtin_memcpy(rest, at, size_t((groups - g) * kGroup * 2)), at = rest;
    load_columns<coded>(at, value);
    store(errors + g, sum_columns([&](int e) { return e4m3_error<clips>(value[e]); }));
    store(off_errors + g, sum_columns([&](int e) { return e4m3_error<clips>(value[e] - load(means + e * mean.pitch)); }));
  }
  F most = all(0.0f);
  const auto put_row = [&](auto distance) {
    for (int64_t at = 0; at < dim; at += kGroup) {
      W codes[kParts];
      for (int i = 0; i < kParts; ++i) {
        const int64_t n = at + i * kLanes;
        const F value = distance.value ? widened<coded>(x + n) - load(mean.values + n) : widened<coded>(x + n);
        if (clips) most = farther(most, value);
        codes[i] = signed_e4m3(value);
      }
      put_group_bytes(codes, data + at);
      if (distance.value) put_positive_zeros(data + at);
    }
  };
  for (int64_t r = 0; r < rows; ++r, x += dim, data += dim) {
    float error = 0.0f, off_error = 0.0f;
    for (int64_t g = r * row_groups; g < (r + 1) * row_groups; ++g) error += errors[g], off_error += off_errors[g];
    const int64_t flag = first_flag + r;
    if (off_error < error) {
      flags[flag / 8] |= uint8_t(1 << flag % 8);
      put_row(std::true_type{});
    } else {
      put_row(std::false_type{});
    }
  }
  return clips && any_above(most, kLargestE4m3);
}

// Bits of the mean over `rows` rows: added row by row.
template <DType coded>
void mean(const uint16_t* x, int64_t rows, int64_t dim, uint16_t* bits) {
  const F count = all(float(rows > 0 ? rows : 1));
  int64_t c = 0;
  const auto columns = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    for (; c + kWidth * kLanes <= dim; c += kWidth * kLanes) {
      F sums[kWidth];
      for (F& sum : sums) sum = all(0.0f);
      for (int64_t r = 0; r < rows; ++r)
        for (int i = 0; i < kWidth; ++i) sums[i] = sums[i] + widened<coded>(x + r * dim + c + i * kLanes);
      for (int i = 0; i < kWidth; ++i) put_rounded<coded>(sums[i] / count, bits + c + i * kLanes);
    }
  };
  columns(std::integral_constant<int, 4>{});
  columns(std::integral_constant<int, 1>{});
}
