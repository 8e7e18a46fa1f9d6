// Byte planes of an array: plane p holds byte p of every element.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class Byte, int kDims>
using Bytes = nb::ndarray<Byte, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

void check(size_t bytes, size_t planes, size_t elements) {
  if ((planes != 1 && planes != 2 && planes != 4) || bytes != planes * elements)
    throw std::invalid_argument(std::to_string(bytes) + " bytes are not " + std::to_string(planes) + " planes of " +
                                std::to_string(elements) + ": 1, 2 or 4 planes are possible");
}

void split2(const uint8_t* from, int64_t n, uint8_t* __restrict a, uint8_t* __restrict b) {
  for (int64_t i = 0; i < n; ++i) a[i] = from[2 * i], b[i] = from[2 * i + 1];
}
void split4(const uint8_t* from, int64_t n, uint8_t* __restrict a, uint8_t* __restrict b, uint8_t* __restrict c,
            uint8_t* __restrict d) {
  for (int64_t i = 0; i < n; ++i)
    a[i] = from[4 * i], b[i] = from[4 * i + 1], c[i] = from[4 * i + 2], d[i] = from[4 * i + 3];
}

void join2(const uint8_t* a, const uint8_t* b, int64_t n, uint8_t* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[2 * i] = a[i], to[2 * i + 1] = b[i];
}
void join4(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, int64_t n, uint8_t* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[4 * i] = a[i], to[4 * i + 1] = b[i], to[4 * i + 2] = c[i], to[4 * i + 3] = d[i];
}

void split_planes(const Bytes<const uint8_t, 1>& values, const Bytes<uint8_t, 2>& planes_out) {
  const size_t planes = planes_out.shape(0), n = planes_out.shape(1);
  check(values.size(), planes, n);
  const uint8_t* from = values.data();
  uint8_t* to = planes_out.data();
  nb::gil_scoped_release nogil;
  if (planes == 1) std::memcpy(to, from, n);
  if (planes == 2) split2(from, int64_t(n), to, to + n);
  if (planes == 4) split4(from, int64_t(n), to, to + n, to + 2 * n, to + 3 * n);
}

void join_planes(const Bytes<const uint8_t, 2>& planes, const Bytes<uint8_t, 1>& values_out) {
  const size_t count = planes.shape(0), n = planes.shape(1);
  check(values_out.size(), count, n);
  const uint8_t* from = planes.data();
  uint8_t* to = values_out.data();
  nb::gil_scoped_release nogil;
  if (count == 1) std::memcpy(to, from, n);
  if (count == 2) join2(from, from + n, int64_t(n), to);
  if (count == 4) join4(from, from + n, from + 2 * n, from + 3 * n, int64_t(n), to);
}

}  // namespace

void bind_planes(nb::module_& m) {
  m.def("split_planes", &split_planes, "values"_a, "planes_out"_a);
  m.def("join_planes", &join_planes, "planes"_a, "values_out"_a);
}
