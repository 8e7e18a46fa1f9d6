// Encodes and decodes pages of every coding and type with every instruction set that this CPU runs, and compares bits. Built
// with sanitizers by `make test-native`; every buffer is exactly as large as it must be. Prints a digest of all bytes, which
// is the same on every machine.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "../../kernels/csrc/box_fit.h"
#include "../../kernels/csrc/coverage.h"
#include "../../kernels/csrc/flat.h"
#include "../../kernels/csrc/pages.h"
#include "../../kernels/csrc/rows.h"
#include "../../kernels/csrc/xxh3.h"

using namespace kvtier;

namespace {

struct Random {
  uint64_t state;

  uint64_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
  }
  float normal() {
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += float(int64_t(next() >> 40)) * 0x1p-24f - 0.5f;
    return sum * 1.75f;
  }
};

int64_t item_bytes(DType t) { return t == DType::kFP32 ? 4 : t == DType::kFP8 ? 1 : 2; }

void put(DType t, float x, uint8_t* at) {
  const uint16_t bits = t == DType::kBF16 ? bf16_of(x) : t == DType::kFP16 ? fp16_of(x) : 0;
  const uint8_t code = e4m3_of(x);
  if (t == DType::kFP32) std::memcpy(at, &x, 4);
  else if (t == DType::kFP8) std::memcpy(at, &code, 1);
  else std::memcpy(at, &bits, 2);
}

struct Case {
  Coding key;
  DType dtype;
  int64_t heads, tokens, dim, pages;
  bool token_major, table;
  float fp8_scale, global_scale;  // global_scale 0: chosen for the page
};

int64_t up16(int64_t n) { return (n + 15) / 16 * 16; }

// K in the coding of the case, V plain, with a table of k behind them.
struct Page {
  std::vector<BufferPlan> parts;
  int64_t cold_bytes = 0, table_offset = -1;

  explicit Page(const Case& c) {
    int64_t at = 0, table = 0;
    for (const Coding coding : {c.key, Coding::kNvfp4}) {
      BufferPlan b{};
      const int64_t n = c.heads * c.tokens * c.dim, mean = c.heads * c.dim * 2;
      const bool wide = coding == Coding::kTwoFp4 || coding == Coding::kFp8 || coding == Coding::kFp8Mean;
      const bool in_fp8 = coding == Coding::kFp8 || coding == Coding::kFp8Mean;
      b.heads = c.heads, b.tokens = c.tokens, b.dim = c.dim;
      b.dtype = int64_t(c.dtype), b.coding = int64_t(coding), b.num_tokens = c.pages * c.tokens;
      b.data_offset = at, at += wide ? n : n / 2;
      b.scale_offset = at, at += in_fp8 ? 0 : coding == Coding::kTwoFp4 ? n / 8 : n / 16;
      b.side_offset = at;
      if (coding == Coding::kOffset) at += mean;
      if (coding == Coding::kToken) at += mean * (c.tokens / 16);
      if (coding == Coding::kFp8Mean) at += mean + (c.heads * c.tokens + 7) / 8;
      b.fp8_scale_bits = bits_of(c.fp8_scale), b.global_scale_bits = c.global_scale == 0 ? 0 : bits_of(c.global_scale);
      const int64_t row = c.dim * item_bytes(c.dtype);
      b.page_stride = c.heads * c.tokens * row;
      b.head_stride = c.token_major ? row : c.tokens * row, b.token_stride = c.token_major ? c.heads * row : row;
      table += b.table_bytes();
      parts.push_back(b);
    }
    if (c.table && table) table_offset = up16(at), at = table_offset + table;
    cold_bytes = c.table ? at : up16(at);
  }
};

struct Result {
  std::vector<uint8_t> cold, checksums, refused, hot;
  std::vector<double> errors;

  bool operator==(const Result& o) const {
    return cold == o.cold && checksums == o.checksums && refused == o.refused && hot == o.hot && errors == o.errors;
  }
};

Result run(const Case& c, const std::string& isa) {
  use_isa(isa);
  Page page(c);
  Random random{0x9E3779B97F4A7C15u};
  const int64_t item = item_bytes(c.dtype), values = c.pages * c.heads * c.tokens * c.dim;
  std::vector<int64_t> ids, offsets;
  std::vector<int32_t> valid;
  std::vector<uint64_t> seeds;
  for (int64_t i = 0; i < c.pages; ++i) {
    ids.push_back(i), offsets.push_back(i * page.cold_bytes), seeds.push_back(uint64_t(i) * 77);
    valid.push_back(int32_t(i % 4 == 3 ? 0 : i % 4 == 1 ? (c.tokens + 1) / 2 : c.tokens));
  }
  std::vector<std::vector<uint8_t>> buffers;
  for (size_t n = 0; n < page.parts.size(); ++n) {
    std::vector<uint8_t> hot(size_t(values * item) + (values == 0));
    for (int64_t p = 0; p < c.pages; ++p)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t t = 0; t < c.tokens; ++t)
          for (int64_t d = 0; d < c.dim; ++d) {
            const BufferPlan& b = page.parts[n];
            float x = random.normal() * power_of_two(int(random.next() % 5) - 2) + (d % 13 == 5 ? 30.0f : 0.0f);
            if (t == 0 && d == 0) x = -0.0f;
            if (p % 5 == 4 && t == 1 && d == 3) x = 60000.0f;  // clips, or not, by type and form
            if (t >= valid[size_t(p)]) x = float_of(0x7FC00000u);
            if (c.dtype == DType::kFP8) x = std::isnan(x) ? 448.0f : x / c.fp8_scale;
            put(c.dtype, x, hot.data() + p * b.page_stride + h * b.head_stride + t * b.token_stride + d * item);
          }
    buffers.push_back(std::move(hot));
    page.parts[n].address = int64_t(reinterpret_cast<uintptr_t>(buffers[n].data()));
  }
  Result r;
  r.cold.assign(size_t(c.pages * page.cold_bytes), 0xC3);
  r.checksums.assign(size_t(c.pages) * 16, 0);
  r.refused.assign(size_t(c.pages), 0);
  Batch batch{page.parts.data(), int64_t(page.parts.size()), ids.data(), valid.data(), offsets.data(), c.pages, c.tokens,
              int64_t(r.cold.size()), page.cold_bytes, page.table_offset};
  check(batch);
  encode_pages(batch, r.cold.data(), seeds.data(), r.checksums.data(), r.refused.data());

  // What was refused holds no page.
  std::vector<int64_t> good_ids, good_offsets;
  std::vector<int32_t> good_valid;
  for (size_t i = 0; i < size_t(c.pages); ++i) {
    if (r.refused[i]) {
      std::memset(r.cold.data() + offsets[i], 0, size_t(page.cold_bytes));
      continue;
    }
    good_ids.push_back(ids[i]), good_offsets.push_back(offsets[i]), good_valid.push_back(valid[i]);
  }
  batch.page_ids = good_ids.data(), batch.offsets = good_offsets.data(), batch.valid_tokens = good_valid.data();
  batch.num_pages = int64_t(good_ids.size());
  check_decode(batch, r.cold.data(), 0, batch.num_buffers);
  r.errors.assign(good_ids.size() * page.parts.size() * 2, 0.0);
  page_errors(batch, r.cold.data(), r.errors.data());
  std::vector<std::vector<uint8_t>> back;
  for (size_t n = 0; n < page.parts.size(); ++n) {
    back.emplace_back(size_t(values * item) + (values == 0), uint8_t(0x55));
    page.parts[n].address = int64_t(reinterpret_cast<uintptr_t>(back[n].data()));
  }
  decode_pages(batch, r.cold.data(), 0, batch.num_buffers);
  for (const auto& buffer : back) r.hot.insert(r.hot.end(), buffer.begin(), buffer.end());
  return r;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int coding = 1; coding <= 6; ++coding)
    for (const DType dtype : {DType::kBF16, DType::kFP16, DType::kFP32, DType::kFP8})
      for (const int64_t dim : {16, 48, 128, 144})
        for (const bool token_major : {false, true}) {
          const int64_t tokens = Coding(coding) == Coding::kToken ? 32 : dim == 48 ? 19 : 16;
          const float fp8_scale = dtype == DType::kFP8 && token_major ? 1.7f : 1.0f;
          all.push_back({Coding(coding), dtype, dim == 16 ? 3 : 2, tokens, dim, 6, token_major, true, fp8_scale, 0.0f});
          if (dim == 48) all.push_back({Coding(coding), dtype, 2, tokens, dim, 3, token_major, false, fp8_scale, 0.0f});
          if (dim == 48) all.push_back({Coding(coding), dtype, 2, tokens, dim, 3, token_major, true, fp8_scale, 0.7f});
        }
  for (const int64_t pages : {0, 1, 257}) all.push_back({Coding::kOffset, DType::kBF16, 1, 16, 16, pages, false, true, 1.0f, 0.0f});
  // Large enough to be written around the cache.
  all.push_back({Coding::kFp8Mean, DType::kBF16, 8, 32, 128, 64, true, true, 1.0f, 0.0f});
  return all;
}

// Positions chosen by coverage, a few per call, against a look at all of them in every step. Many positions are alike or
// empty. (Not in the digest: logarithms differ in the last bit from one C library to the next.)
int coverage_failures() {
  int failures = 0;
  Random random{7};
  for (const auto& [positions, rows] : {std::pair<int64_t, int64_t>{1, 1}, {40, 3}, {90, 17}, {200, 1}}) {
    std::vector<double> shares(size_t(positions * rows));
    for (int64_t t = 0; t < positions; ++t)
      for (int64_t r = 0; r < rows; ++r)
        shares[size_t(t * rows + r)] = t % 5 == 0 ? 0.0 : t % 5 == 1 ? 0.125 : double(random.next() >> 40) * 0x1p-24;
    const double epsilon = 1e-6, infinity = std::numeric_limits<double>::infinity();
    std::vector<double> covered(size_t(rows), 0.0), plain(covered), bounds(size_t(positions), infinity);
    std::vector<bool> taken(size_t(positions), false);
    for (int64_t done = 0; done < positions;) {
      std::vector<int64_t> chosen(size_t(std::min<int64_t>(7, positions - done)));
      choose_by_coverage({shares.data(), positions, rows, epsilon}, covered.data(), bounds.data(), int64_t(chosen.size()),
                         chosen.data());
      for (const int64_t found : chosen) {
        int64_t best = -1;
        double most = -infinity;
        for (int64_t t = 0; t < positions; ++t) {
          if (taken[size_t(t)]) continue;
          double gain = 0;
          for (int64_t r = 0; r < rows; ++r) gain += std::log1p(shares[size_t(t * rows + r)] / (plain[size_t(r)] + epsilon));
          if (gain > most) most = gain, best = t;
        }
        failures += found != best;
        if (found < 0 || found >= positions || taken[size_t(found)]) return failures + 1;
        taken[size_t(found)] = true;
        for (int64_t r = 0; r < rows; ++r) plain[size_t(r)] += shares[size_t(found * rows + r)];
        ++done;
      }
    }
  }
  return failures;
}

// Weights fitted within a box, columns added a few at a time, some empty and some twice: no weight may be able to lower
// the residual by moving. (Not in the digest: it rests on tolerances.)
int box_fit_failures() {
  int failures = 0;
  Random random{11};
  for (const auto& [rows, columns] : {std::pair<size_t, size_t>{5, 1}, {9, 14}, {60, 40}, {30, 64}}) {
    std::vector<double> e(rows * columns), m(rows), gram(columns * columns), rhs(columns), w(columns);
    for (size_t q = 0; q < rows; ++q) {
      for (size_t j = 0; j < columns; ++j)
        e[q * columns + j] = j % 7 == 5 ? 0.0 : j % 7 == 6 ? e[q * columns + j - 2] : double(random.next() >> 40) * 0x1p-24;
      m[q] = 4 * double(random.next() >> 40) * 0x1p-24;
    }
    double norm = 0;
    for (size_t q = 0; q < rows; ++q) {
      norm += m[q] * m[q];
      for (size_t i = 0; i < columns; ++i) {
        rhs[i] += e[q * columns + i] * m[q];
        for (size_t j = 0; j < columns; ++j) gram[i * columns + j] += e[q * columns + i] * e[q * columns + j];
      }
    }
    const double lower = 0.05, upper = 1.5;
    BoxFit fit(lower, upper, columns);
    for (size_t done = 0; done < columns;) {
      const size_t count = std::min<size_t>(3, columns - done), width = done + count;
      std::vector<double> part(count * width), right(rhs.begin() + std::ptrdiff_t(done), rhs.begin() + std::ptrdiff_t(width));
      for (size_t k = 0; k < count; ++k)
        for (size_t i = 0; i < width; ++i) part[k * width + i] = gram[(done + k) * columns + i];
      fit.extend(part.data(), right.data(), std::vector<double>(count, done % 2 ? 1.0 : 0.0).data(), count);
      failures += !fit.solve(std::sqrt(norm));
      std::vector<double> got(width);
      fit.weights(got.data());
      for (size_t i = 0; i < width; ++i) {
        if (gram[i * columns + i] == 0) {
          failures += got[i] != 1.0;
          continue;
        }
        double slope = -rhs[i];
        for (size_t j = 0; j < width; ++j) slope += gram[i * columns + j] * got[j];
        const double flat = 1e-7 * norm;
        failures += got[i] < lower || got[i] > upper || (got[i] > lower && slope > flat) || (got[i] < upper && slope < -flat);
      }
      done = width;
    }
  }
  return failures;
}

}  // namespace

int main() {
  uint64_t seed = 0;
  int failures = coverage_failures();
  if (failures) std::printf("%d positions chosen by coverage differ\n", failures);
  if (const int wrong = box_fit_failures()) {
    std::printf("%d fitted weights are wrong\n", wrong);
    failures += wrong;
  }
  for (const Case& c : cases()) {
    const Result expected = run(c, "scalar");
    uint8_t digest[16];
    for (const std::vector<uint8_t>* bytes : {&expected.cold, &expected.checksums, &expected.refused, &expected.hot}) {
      xxh3_128(bytes->data(), bytes->size(), seed, digest);
      std::memcpy(&seed, digest, sizeof seed);
    }
    for (const std::string& isa : available_isas())
      if (!(run(c, isa) == expected)) {
        std::printf("%s differs: coding %d, dtype %d, %d x %d x %d, %d pages, token major %d, table %d, global scale %g\n",
                    isa.c_str(), int(c.key), int(c.dtype), int(c.heads), int(c.tokens), int(c.dim), int(c.pages),
                    int(c.token_major), int(c.table), double(c.global_scale));
        ++failures;
      }
  }
  for (const std::string& isa : available_isas()) std::printf("%s ", isa.c_str());
  std::printf("%s; digest %016llx\n", failures ? "DIFFER" : "agree", (unsigned long long)seed);
  return failures != 0;
}
