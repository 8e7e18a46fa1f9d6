#include "box_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvtier {

namespace {

// A column whose distance from the others' span is below this, squared and relative, is a combination of them.
constexpr double kDependent = 1e-11;
// A gradient that is smaller relative to |m| is none.
constexpr double kFlat = 1e-11;

// Eight sums, so that they go on side by side: the order is the same everywhere.
double dot(const double* a, const double* b, size_t n) {
  double s[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (size_t k = 0; k < 8; ++k) s[k] += a[i + k] * b[i + k];
  for (; i < n; ++i) s[0] += a[i] * b[i];
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

}  // namespace

BoxFit::BoxFit(double lower, double upper, size_t capacity)
    : lower_(lower), upper_(upper), capacity_(capacity), gram_(capacity * capacity), factor_(capacity * capacity),
      rhs_(capacity), scale_(capacity), w_(capacity), best_(capacity), work_(capacity), place_(capacity, Place::dead),
      barred_(capacity, false) {
  inside_.reserve(capacity);
}

void BoxFit::extend(const double* rows, const double* rhs, const double* start, size_t count) {
  const size_t old = size_, width = old + count;
  for (size_t k = 0; k < count; ++k) {
    const double own = rows[k * width + old + k];
    const bool live = own > std::numeric_limits<double>::min();
    scale_[old + k] = live ? 1.0 / std::sqrt(own) : 1.0;
    place_[old + k] = live ? Place::lower : Place::dead;
  }
  for (size_t k = 0; k < count; ++k) {
    const size_t column = old + k;
    rhs_[column] = rhs[k] * scale_[column];
    for (size_t i = 0; i < width; ++i) {
      const double product = rows[k * width + i] * scale_[column] * scale_[i];
      gram(column)[i] = product;
      gram(i)[column] = product;
    }
    gram(column)[column] = 1.0;
  }
  size_ = width;
  for (size_t column = old; column < width; ++column) {
    if (place_[column] == Place::dead) {
      w_[column] = std::min(std::max(1.0, lower_), upper_);
      continue;
    }
    const double weight = start[column - old];
    const double bottom = lower_ / scale_[column], top = upper_ / scale_[column];
    w_[column] = std::min(std::max(weight / scale_[column], bottom), top);
    if (w_[column] >= top) place_[column] = Place::upper;
    else if (w_[column] > bottom && !let_in(column)) w_[column] = bottom;
  }
}

bool BoxFit::let_in(size_t column) {
  const size_t n = inside_.size();
  double* row = factor(n);
  double left = 1.0;
  for (size_t i = 0; i < n; ++i) {
    row[i] = (gram(column)[inside_[i]] - dot(factor(i), row, i)) / factor(i)[i];
    left -= row[i] * row[i];
  }
  if (!(left > kDependent)) return false;
  row[n] = std::sqrt(left);
  inside_.push_back(column);
  place_[column] = Place::inside;
  return true;
}

void BoxFit::put_out(size_t rank, Place place) {
  const size_t column = inside_[rank];
  const double bound = (place == Place::lower ? lower_ : upper_) / scale_[column];
  place_[column] = place;
  w_[column] = bound;
  inside_.erase(inside_.begin() + std::ptrdiff_t(rank));
  const size_t n = inside_.size();
  // The rows behind move up with one entry too many each; rotations bring the factor back to a triangle.
  for (size_t k = rank; k < n; ++k) std::copy(factor(k + 1), factor(k + 1) + k + 2, factor(k));
  for (size_t k = rank; k < n; ++k) {
    const double a = factor(k)[k], b = factor(k)[k + 1], r = std::hypot(a, b);
    const double c = a / r, s = b / r;
    factor(k)[k] = r;
    for (size_t i = k + 1; i < n; ++i) {
      double* row = factor(i);
      const double x = row[k], y = row[k + 1];
      row[k] = c * x + s * y;
      row[k + 1] = c * y - s * x;
    }
  }
}

void BoxFit::inside_minimum() {
  const size_t n = inside_.size();
  for (size_t i = 0; i < size_; ++i) work_[i] = place_[i] == Place::inside || place_[i] == Place::dead ? 0.0 : w_[i];
  for (size_t i = 0; i < n; ++i) {
    const size_t column = inside_[i];
    const double right = rhs_[column] - dot(gram(column), work_.data(), size_);
    best_[i] = (right - dot(factor(i), best_.data(), i)) / factor(i)[i];
  }
  for (size_t i = n; i-- > 0;) {
    best_[i] /= factor(i)[i];
    const double x = best_[i];
    const double* row = factor(i);
    for (size_t k = 0; k < i; ++k) best_[k] -= x * row[k];
  }
}

bool BoxFit::solve(double norm) {
  std::fill(barred_.begin(), barred_.begin() + std::ptrdiff_t(size_), false);
  size_t entered = size_;  // the column that came in last, none
  for (size_t step = 0; step < 6 * size_ + 100; ++step) {
    inside_minimum();
    // As far as the box allows.
    double length = 1.0;
    size_t first = inside_.size();
    Place side = Place::lower;
    for (size_t i = 0; i < inside_.size(); ++i) {
      const size_t column = inside_[i];
      const double from = w_[column], to = best_[i];
      const double bottom = lower_ / scale_[column], top = upper_ / scale_[column];
      const double reach = to < bottom ? (from - bottom) / (from - to) : to > top ? (top - from) / (to - from) : 2.0;
      if (reach < length) {
        length = std::max(reach, 0.0);
        first = i;
        side = to < bottom ? Place::lower : Place::upper;
      }
    }
    for (size_t i = 0; i < inside_.size(); ++i) w_[inside_[i]] += length * (best_[i] - w_[inside_[i]]);
    if (first < inside_.size()) {
      const size_t column = inside_[first];
      if (column == entered && length == 0) barred_[column] = true;  // rounding let it in: it must not come and go
      put_out(first, side);
      continue;
    }
    // The minimum of those inside. Who outside would lower it most?
    double worst = kFlat * norm;
    entered = size_;
    for (size_t i = 0; i < size_; ++i) work_[i] = place_[i] == Place::dead ? 0.0 : w_[i];
    for (size_t i = 0; i < size_; ++i) {
      if (barred_[i] || place_[i] == Place::inside || place_[i] == Place::dead) continue;
      const double slope = dot(gram(i), work_.data(), size_) - rhs_[i];
      const double gain = place_[i] == Place::lower ? -slope : slope;
      if (gain > worst) {
        worst = gain;
        entered = i;
      }
    }
    if (entered == size_) return true;
    if (!let_in(entered)) barred_[entered] = true;
  }
  return false;
}

void BoxFit::weights(double* out) const {
  for (size_t i = 0; i < size_; ++i) {
    const Place place = place_[i];
    out[i] = place == Place::lower   ? lower_
             : place == Place::upper ? upper_
             : place == Place::dead  ? w_[i]
                                     : std::min(std::max(w_[i] * scale_[i], lower_), upper_);
  }
}

}  // namespace kvtier
