#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "box_fit.h"

namespace nb = nanobind;
using namespace nb::literals;
using kvtier::BoxFit;

namespace {

template <class... Shape>
using Doubles = nb::ndarray<const double, nb::c_contig, nb::device::cpu, Shape...>;

void extend(BoxFit& self, const Doubles<nb::ndim<2>>& rows, const Doubles<nb::ndim<1>>& rhs,
            const Doubles<nb::ndim<1>>& start) {
  const size_t count = rows.shape(0);
  if (rows.shape(1) != self.size() + count) throw std::invalid_argument("rows must have a product with every column");
  if (rhs.size() != count || start.size() != count) throw std::invalid_argument("rhs and start must have one entry per row");
  if (self.size() + count > self.capacity()) throw std::invalid_argument("more columns than the capacity");
  nb::gil_scoped_release nogil;
  self.extend(rows.data(), rhs.data(), start.data(), count);
}

void weights(const BoxFit& self, const nb::ndarray<double, nb::c_contig, nb::device::cpu, nb::ndim<1>>& out) {
  if (out.size() != self.size()) throw std::invalid_argument("out must have one entry per column");
  self.weights(out.data());
}

}  // namespace

void bind_box_fit(nb::module_& m) {
  nb::class_<BoxFit>(m, "BoxFit", "Least squares within a box, see kvtier.compression.compaction.mass; not thread-safe")
      .def(nb::init<double, double, size_t>(), "lower"_a, "upper"_a, "capacity"_a)
      .def("extend", &extend, nb::arg("rows").noconvert(), nb::arg("rhs").noconvert(), nb::arg("start").noconvert())
      .def("solve", &BoxFit::solve, "norm"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("weights", &weights, nb::arg("out").noconvert())
      .def("__len__", &BoxFit::size);
}
