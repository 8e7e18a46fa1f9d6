// Least squares within a box on a Gram matrix that grows: see kvtier/compression/compaction/mass.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier {

// min 1/2 w'Gw - c'w for lower <= w <= upper, by an active set that is kept from one solve to the next: the weights that
// lie inside the box have their Cholesky factor at hand, which takes new rows and loses old ones at the cost of a
// matrix-vector product. Columns are scaled to a unit diagonal inside.
class BoxFit {
 public:
  BoxFit(double lower, double upper, size_t capacity);

  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }

  // `count` more columns. rows [count, size + count]: their products with all columns so far and with each other; rhs
  // [count]; start [count]: their weights. One whose product with itself is 0 keeps the weight 1.
  void extend(const double* rows, const double* rhs, const double* start, size_t count);

  // Goes on from the weights at hand. norm: |m|. False where it did not get to the minimum: too many steps.
  bool solve(double norm);

  void weights(double* out) const;

 private:
  enum class Place : uint8_t { lower, inside, upper, dead };

  double* gram(size_t row) { return gram_.data() + row * capacity_; }
  double* factor(size_t row) { return factor_.data() + row * capacity_; }
  bool let_in(size_t column);       // false: depends on those inside already
  void put_out(size_t rank, Place place);
  void inside_minimum();            // into best_, in the order of inside_

  double lower_, upper_;
  size_t capacity_, size_ = 0;
  std::vector<double> gram_, factor_, rhs_, scale_, w_, best_, work_;
  std::vector<Place> place_;
  std::vector<size_t> inside_;
  std::vector<bool> barred_;
};

}  // namespace kvtier
