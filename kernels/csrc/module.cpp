// The Python face of the native kernels: argument checks, GIL release, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "blake2b.h"
#include "coverage.h"
#include "flat.h"
#include "pages.h"
#include "rows.h"
#include "xxh3.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvtier;

void bind_box_fit(nb::module_& m);
void bind_ghosts(nb::module_& m);
void bind_planes(nb::module_& m);
void bind_records(nb::module_& m);
void bind_replay(nb::module_& m);
void bind_sockets(nb::module_& m);

namespace {

template <class T, class... Shape>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu, Shape...>;
template <class T>
using Vector = Array<T, nb::ndim<1>>;
using Plan = Array<const int64_t, nb::shape<-1, kPlanFields>>;
using Digests = nb::shape<-1, 16>;

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument(what); }

void same_length(const char* name, size_t length, size_t pages) {
  if (length != pages) fail(std::string(name) + " has " + std::to_string(length) + " rows for " + std::to_string(pages) + " pages");
}

template <class Arena>
Batch batch_of(const Plan& plan, const Vector<const int64_t>& page_ids, const Vector<const int32_t>& valid_tokens,
               int64_t page_tokens, const Arena& arena, const Vector<const int64_t>& offsets, int64_t cold_bytes,
               int64_t table_offset) {
  same_length("valid_tokens", valid_tokens.size(), page_ids.size());
  same_length("offsets", offsets.size(), page_ids.size());
  return {reinterpret_cast<const BufferPlan*>(plan.data()), int64_t(plan.shape(0)), page_ids.data(),
          valid_tokens.data(), offsets.data(), int64_t(page_ids.size()), page_tokens, int64_t(arena.size()),
          cold_bytes, table_offset};
}

void encode(const Plan& plan, const Vector<const int64_t>& page_ids, const Vector<const int32_t>& valid_tokens,
            int64_t page_tokens, const Vector<uint8_t>& arena, const Vector<const int64_t>& offsets,
            int64_t cold_bytes, int64_t table_offset, const Vector<const uint64_t>& seeds,
            const Array<uint8_t, Digests>& checksums_out, const Vector<uint8_t>& refused_out) {
  const Batch batch = batch_of(plan, page_ids, valid_tokens, page_tokens, arena, offsets, cold_bytes, table_offset);
  same_length("seeds", seeds.size(), page_ids.size());
  same_length("checksums_out", checksums_out.shape(0), page_ids.size());
  same_length("refused_out", refused_out.size(), page_ids.size());
  nb::gil_scoped_release nogil;
  check(batch);
  encode_pages(batch, arena.data(), seeds.data(), checksums_out.data(), refused_out.data());
}

void decode(const Plan& plan, const Vector<const int64_t>& page_ids, const Vector<const int32_t>& valid_tokens,
            int64_t page_tokens, const Vector<const uint8_t>& arena, const Vector<const int64_t>& offsets,
            int64_t cold_bytes, int64_t table_offset, int64_t buffer_begin, int64_t buffer_end) {
  const Batch batch = batch_of(plan, page_ids, valid_tokens, page_tokens, arena, offsets, cold_bytes, table_offset);
  nb::gil_scoped_release nogil;
  check(batch);
  check_decode(batch, arena.data(), buffer_begin, buffer_end);
  decode_pages(batch, arena.data(), buffer_begin, buffer_end);
}

void errors(const Plan& plan, const Vector<const int64_t>& page_ids, const Vector<const int32_t>& valid_tokens,
            int64_t page_tokens, const Vector<const uint8_t>& arena, const Vector<const int64_t>& offsets,
            int64_t cold_bytes, int64_t table_offset, const Array<double, nb::shape<-1, -1, 2>>& sums_out) {
  const Batch batch = batch_of(plan, page_ids, valid_tokens, page_tokens, arena, offsets, cold_bytes, table_offset);
  same_length("sums_out", sums_out.shape(0), page_ids.size());
  if (sums_out.shape(1) != plan.shape(0)) fail("sums_out must have a row per part of the plan");
  nb::gil_scoped_release nogil;
  check(batch);
  check_decode(batch, arena.data(), 0, batch.num_buffers);
  page_errors(batch, arena.data(), sums_out.data());
}

// Cold pages in an arena: all of one size, or each of its own.
struct ColdPages {
  const uint8_t* arena;
  const int64_t* offsets;
  const int64_t* sizes;  // null: all of `size`
  int64_t size;
  size_t count;

  int64_t bytes(size_t i) const { return sizes ? sizes[i] : size; }

  void check(size_t arena_bytes) const {
    for (size_t i = 0; i < count; ++i)
      if (bytes(i) < 0 || offsets[i] < 0 || bytes(i) > int64_t(arena_bytes) || offsets[i] > int64_t(arena_bytes) - bytes(i))
        fail("bytes [" + std::to_string(offsets[i]) + ", +" + std::to_string(bytes(i)) + ") lie outside an arena of " +
             std::to_string(arena_bytes));
  }

  void digest(size_t i, uint64_t seed, uint8_t* out) const { xxh3_128(arena + offsets[i], size_t(bytes(i)), seed, out); }
};

ColdPages cold_pages(const Vector<const uint8_t>& arena, const Vector<const int64_t>& offsets, int64_t size) {
  return {arena.data(), offsets.data(), nullptr, size, offsets.size()};
}

ColdPages cold_pages(const Vector<const uint8_t>& arena, const Vector<const int64_t>& offsets,
                     const Vector<const int64_t>& sizes) {
  same_length("nbytes", sizes.size(), offsets.size());
  return {arena.data(), offsets.data(), sizes.data(), 0, offsets.size()};
}

template <class Sizes>
void checksum(const Vector<const uint8_t>& arena, const Vector<const int64_t>& offsets, Sizes nbytes,
              const Vector<const uint64_t>& seeds, const Array<uint8_t, Digests>& checksums_out) {
  const ColdPages pages = cold_pages(arena, offsets, nbytes);
  same_length("seeds", seeds.size(), pages.count);
  same_length("checksums_out", checksums_out.shape(0), pages.count);
  nb::gil_scoped_release nogil;
  pages.check(arena.size());
  for (size_t i = 0; i < pages.count; ++i) pages.digest(i, seeds.data()[i], checksums_out.data() + 16 * i);
}

template <class Sizes>
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> verify(const Vector<const uint8_t>& arena,
                                                    const Vector<const int64_t>& offsets, Sizes nbytes,
                                                    const Vector<const uint64_t>& seeds,
                                                    const Array<const uint8_t, Digests>& checksums) {
  const ColdPages pages = cold_pages(arena, offsets, nbytes);
  same_length("seeds", seeds.size(), pages.count);
  same_length("checksums", checksums.shape(0), pages.count);
  uint8_t* ok = new uint8_t[pages.count];
  nb::capsule owner(ok, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
  {
    nb::gil_scoped_release nogil;
    pages.check(arena.size());
    for (size_t i = 0; i < pages.count; ++i) {
      uint8_t digest[16];
      pages.digest(i, seeds.data()[i], digest);
      ok[i] = std::memcmp(digest, checksums.data() + 16 * i, 16) == 0;
    }
  }
  return {ok, {pages.count}, owner};
}

nb::bytes xxh3(nb::handle buffer, uint64_t seed) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  uint8_t digest[16];
  {
    nb::gil_scoped_release nogil;
    xxh3_128(static_cast<const uint8_t*>(view.buf), size_t(view.len), seed, digest);
  }
  PyBuffer_Release(&view);
  return nb::bytes(reinterpret_cast<const char*>(digest), 16);
}

nb::bytes page_keys(const nb::bytes& namespace_digest, const nb::bytes& hashes, int64_t hash_bytes) {
  if (namespace_digest.size() != kDigestBytes)
    fail("namespace_digest has " + std::to_string(namespace_digest.size()) + " bytes, must be 32");
  if (hash_bytes < 1 || hashes.size() % size_t(hash_bytes))
    fail(std::to_string(hashes.size()) + " bytes are not hashes of " + std::to_string(hash_bytes) + " bytes each");
  const size_t count = hashes.size() / size_t(hash_bytes);
  nb::object keys = nb::steal(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(count * kDigestBytes)));
  if (!keys.is_valid()) throw nb::python_error();
  uint8_t* out = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(keys.ptr()));
  const uint8_t* key = reinterpret_cast<const uint8_t*>(namespace_digest.c_str());
  const uint8_t* messages = reinterpret_cast<const uint8_t*>(hashes.c_str());
  {
    nb::gil_scoped_release nogil;
    blake2b_keyed(key, messages, size_t(hash_bytes), count, out);
  }
  return nb::cast<nb::bytes>(keys);
}

constexpr size_t kManyKeys = 1024;  // from which other threads may have the interpreter meanwhile

nb::list list_of(const uint8_t* packed, size_t bytes, size_t count) {
  nb::list out = nb::steal<nb::list>(PyList_New(Py_ssize_t(count)));
  if (!out.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < count; ++i) {
    PyObject* item = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(packed + i * bytes), Py_ssize_t(bytes));
    if (!item) throw nb::python_error();
    PyList_SET_ITEM(out.ptr(), Py_ssize_t(i), item);
  }
  return out;
}

nb::list keys_of(const nb::bytes& digest, const std::vector<uint8_t>& packed, size_t bytes, size_t count) {
  if (digest.size() != kDigestBytes)
    fail("namespace_digest has " + std::to_string(digest.size()) + " bytes, must be 32");
  std::vector<uint8_t> keys(count * kDigestBytes);
  const uint8_t* key = reinterpret_cast<const uint8_t*>(digest.c_str());
  if (count < kManyKeys) {
    blake2b_keyed(key, packed.data(), bytes, count, keys.data());
  } else {
    nb::gil_scoped_release nogil;
    blake2b_keyed(key, packed.data(), bytes, count, keys.data());
  }
  return list_of(keys.data(), kDigestBytes, count);
}

nb::object page_key_list(const nb::bytes& digest, const nb::list& hashes) {
  const size_t count = hashes.size();
  if (!count) return nb::list();
  std::vector<uint8_t> packed;
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(hashes.ptr(), Py_ssize_t(i));
    if (!PyBytes_Check(item)) return nb::none();
    const size_t size = size_t(PyBytes_GET_SIZE(item));
    if (!i) packed.resize(count * (bytes = size));
    if (!bytes || size != bytes) return nb::none();
    std::memcpy(packed.data() + i * bytes, PyBytes_AS_STRING(item), bytes);
  }
  return keys_of(digest, packed, bytes, count);
}

int nibble(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

nb::object page_names(const nb::bytes& digest, const nb::list& hashes) {
  const size_t count = hashes.size();
  if (!count) return nb::make_tuple(nb::list(), nb::list());
  std::vector<uint8_t> packed;
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(hashes.ptr(), Py_ssize_t(i));
    Py_ssize_t length = 0;
    const char* text = PyUnicode_Check(item) ? PyUnicode_AsUTF8AndSize(item, &length) : nullptr;
    if (!text) {
      PyErr_Clear();
      return nb::none();
    }
    if (!i) packed.resize(count * (bytes = size_t(length) / 2));
    if (!bytes || size_t(length) != 2 * bytes) return nb::none();
    for (size_t b = 0; b < bytes; ++b) {
      const int high = nibble(text[2 * b]), low = nibble(text[2 * b + 1]);
      if (high < 0 || low < 0) return nb::none();
      packed[i * bytes + b] = uint8_t(high << 4 | low);
    }
  }
  nb::list keys = keys_of(digest, packed, bytes, count);
  return nb::make_tuple(list_of(packed.data(), bytes, count), keys);
}

nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> page_owners(const nb::bytes& namespace_digests, const nb::bytes& keys,
                                                         const nb::bytes& hashes, int64_t hash_bytes) {
  if (namespace_digests.size() % kDigestBytes || keys.size() % kDigestBytes)
    fail(std::to_string(namespace_digests.size()) + " and " + std::to_string(keys.size()) +
         " bytes are not digests and keys of 32 bytes each");
  const size_t count = keys.size() / kDigestBytes;
  if (hash_bytes < 1 || hashes.size() != count * size_t(hash_bytes))
    fail(std::to_string(hashes.size()) + " bytes are not " + std::to_string(count) + " hashes of " +
         std::to_string(hash_bytes) + " bytes each");
  int32_t* owners = new int32_t[count];
  nb::capsule owner(owners, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
  const auto bytes = [](const nb::bytes& b) { return reinterpret_cast<const uint8_t*>(b.c_str()); };
  {
    nb::gil_scoped_release nogil;
    blake2b_owners(bytes(namespace_digests), namespace_digests.size() / kDigestBytes, bytes(keys), bytes(hashes),
                   size_t(hash_bytes), count, owners);
  }
  return {owners, {count}, owner};
}

template <class T>
bool quantize(const Vector<const T>& x, int64_t dtype, int k, const Vector<uint8_t>& data_out,
              const Vector<uint8_t>& scales_out) {
  check_flat(dtype, sizeof(T), k, int64_t(x.size()), int64_t(data_out.size()), int64_t(scales_out.size()));
  nb::gil_scoped_release nogil;
  return quantize_flat(DType(dtype), reinterpret_cast<const uint8_t*>(x.data()), int64_t(x.size()), k, data_out.data(),
                       scales_out.data());
}

template <class T>
void dequantize(const Vector<const uint8_t>& data, const Vector<const uint8_t>& scales, int64_t dtype, int k,
                const Vector<T>& out) {
  check_flat(dtype, sizeof(T), k, int64_t(out.size()), int64_t(data.size()), int64_t(scales.size()));
  nb::gil_scoped_release nogil;
  dequantize_flat(DType(dtype), data.data(), scales.data(), int64_t(out.size()), k,
                  reinterpret_cast<uint8_t*>(out.data()));
}

int64_t coverage_choose(const Array<const double, nb::ndim<2>>& shares, const Vector<double>& covered,
                        const Vector<double>& bounds, double epsilon, const Vector<int64_t>& chosen_out) {
  if (covered.size() != shares.shape(1)) fail("covered must have one entry per column of shares");
  if (bounds.size() != shares.shape(0)) fail("bounds must have one entry per row of shares");
  nb::gil_scoped_release nogil;
  return choose_by_coverage({shares.data(), int64_t(shares.shape(0)), int64_t(shares.shape(1)), epsilon}, covered.data(),
                            bounds.data(), int64_t(chosen_out.size()), chosen_out.data());
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // an engine may end with its store open; that is no news for its users
  m.doc() = "kvtier native kernels. Every call releases the GIL while bytes move; ValueError before anything is written.";
  m.attr("PLAN_FIELDS") = kPlanFields;

  m.def("encode_pages", &encode, nb::arg("plan").noconvert(), nb::arg("page_ids").noconvert(),
        nb::arg("valid_tokens").noconvert(), "page_tokens"_a, nb::arg("arena").noconvert(),
        nb::arg("offsets").noconvert(), "cold_bytes"_a, "table_offset"_a, nb::arg("seeds").noconvert(),
        nb::arg("checksums_out").noconvert(), nb::arg("refused_out").noconvert());
  m.def("decode_pages", &decode, nb::arg("plan").noconvert(), nb::arg("page_ids").noconvert(),
        nb::arg("valid_tokens").noconvert(), "page_tokens"_a, nb::arg("arena").noconvert(),
        nb::arg("offsets").noconvert(), "cold_bytes"_a, "table_offset"_a, "buffer_begin"_a, "buffer_end"_a);

  m.def("page_errors", &errors, nb::arg("plan").noconvert(), nb::arg("page_ids").noconvert(),
        nb::arg("valid_tokens").noconvert(), "page_tokens"_a, nb::arg("arena").noconvert(),
        nb::arg("offsets").noconvert(), "cold_bytes"_a, "table_offset"_a, nb::arg("sums_out").noconvert());

  m.def("checksum_pages", &checksum<int64_t>, nb::arg("arena").noconvert(), nb::arg("offsets").noconvert(), "nbytes"_a,
        nb::arg("seeds").noconvert(), nb::arg("checksums_out").noconvert());
  m.def("checksum_pages", &checksum<const Vector<const int64_t>&>, nb::arg("arena").noconvert(),
        nb::arg("offsets").noconvert(), nb::arg("nbytes").noconvert(), nb::arg("seeds").noconvert(),
        nb::arg("checksums_out").noconvert());
  m.def("verify_pages", &verify<int64_t>, nb::arg("arena").noconvert(), nb::arg("offsets").noconvert(), "nbytes"_a,
        nb::arg("seeds").noconvert(), nb::arg("checksums").noconvert());
  m.def("verify_pages", &verify<const Vector<const int64_t>&>, nb::arg("arena").noconvert(),
        nb::arg("offsets").noconvert(), nb::arg("nbytes").noconvert(), nb::arg("seeds").noconvert(),
        nb::arg("checksums").noconvert());
  m.def("xxh3_128", &xxh3, "buffer"_a, "seed"_a = 0, "16 bytes, as xxhash.xxh3_128_digest(buffer, seed)");
  m.def("page_keys", &page_keys, "namespace_digest"_a, "hashes"_a, "hash_bytes"_a,
        "Packed hashes of equal length to 32 bytes each: BLAKE2b-256 keyed with the namespace digest");
  m.def("page_key_list", &page_key_list, "namespace_digest"_a, "hashes"_a,
        "As page_keys, of a list of hashes and as a list; None unless all are of one length");
  m.def("page_names", &page_names, "namespace_digest"_a, "hashes"_a,
        "Of a list of hashes in hexadecimal, them as bytes, and their keys; None unless all are such, and of one length");
  m.def("page_owners", &page_owners, "namespace_digests"_a, "keys"_a, "hashes"_a, "hash_bytes"_a,
        "For each page the index of the namespace whose key for its hash it has, or -1");

  m.def("quantize", &quantize<uint16_t>, nb::arg("x").noconvert(), "dtype"_a, "k"_a, nb::arg("data_out").noconvert(),
        nb::arg("scales_out").noconvert(), "True if x was finite; the output is garbage otherwise");
  m.def("quantize", &quantize<float>, nb::arg("x").noconvert(), "dtype"_a, "k"_a, nb::arg("data_out").noconvert(),
        nb::arg("scales_out").noconvert());
  m.def("dequantize", &dequantize<uint16_t>, nb::arg("data").noconvert(), nb::arg("scales").noconvert(), "dtype"_a,
        "k"_a, nb::arg("out").noconvert());
  m.def("dequantize", &dequantize<float>, nb::arg("data").noconvert(), nb::arg("scales").noconvert(), "dtype"_a, "k"_a,
        nb::arg("out").noconvert());

  m.def("choose_by_coverage", &coverage_choose, nb::arg("shares").noconvert(), nb::arg("covered").noconvert(),
        nb::arg("bounds").noconvert(), "epsilon"_a, nb::arg("chosen_out").noconvert(),
        "kvtier.kernels.compaction.coverage_reference, lazily: the number of gains computed");

  m.def("isas", &available_isas, "Instruction sets that can be used here, fastest first");
  m.def("isa", [] { return std::string(row_kernels().name); });
  m.def("use_isa", &use_isa, "name"_a, "Switch all kernels of this process, for tests and benchmarks");
  bind_box_fit(m);
  bind_ghosts(m);
  bind_records(m);
  bind_replay(m);
  bind_planes(m);
  bind_sockets(m);

  // A wrong KVTIER_ISA is told at import, not in the middle of an offload.
  row_kernels();
}
