// The gain of a position only shrinks while others are chosen (the sum of logarithms is submodular), so an old gain is an
// upper bound. The positions with the highest bounds are looked at, a batch at a time, until no bound reaches the best
// gain found: what is then chosen is what looking at all would have chosen, ties to the lowest position included.
#include "coverage.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvtier {

namespace {

constexpr size_t kBatch = 8;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Bound {
  double gain;
  int64_t position;
};

// The order of a heap whose front has the highest gain, of equal ones the lowest position.
bool below(const Bound& a, const Bound& b) {
  return a.gain < b.gain || (a.gain == b.gain && a.position > b.position);
}

// Summed in order, as the reference does.
double gain_of(const double* shares, const double* covered, int64_t rows, double epsilon) {
  double sum = 0;
  for (int64_t r = 0; r < rows; ++r) sum += std::log1p(shares[r] / (covered[r] + epsilon));
  return sum;
}

}  // namespace

int64_t choose_by_coverage(const CoverageRows& p, double* covered, double* bounds, int64_t count, int64_t* chosen_out) {
  // All terms are positive and each is right to a few units in the last place; so is the sum, to one more per term.
  const double slack = 1.0 + double(p.rows + 16) * 8 * std::numeric_limits<double>::epsilon();
  std::vector<Bound> heap;
  heap.reserve(size_t(p.positions));
  for (int64_t t = 0; t < p.positions; ++t)
    if (bounds[t] > -kInfinity) heap.push_back({bounds[t], t});
  if (int64_t(heap.size()) < count)
    throw std::invalid_argument(std::to_string(count) + " positions are to be chosen of " + std::to_string(heap.size()));
  std::make_heap(heap.begin(), heap.end(), below);

  int64_t computed = 0;
  std::vector<Bound> looked_at;
  for (int64_t step = 0; step < count; ++step) {
    Bound best{-kInfinity, -1};
    looked_at.clear();
    // A gain of exactly 0 stays so: nothing of the position is in any row.
    auto may_win = [&](const Bound& b) {
      return best.position < 0 || (b.gain == 0 ? best.gain == 0 && b.position < best.position : b.gain * slack >= best.gain);
    };
    while (!heap.empty() && may_win(heap.front())) {
      const size_t first = looked_at.size();
      while (!heap.empty() && looked_at.size() - first < kBatch && may_win(heap.front())) {
        std::pop_heap(heap.begin(), heap.end(), below);
        looked_at.push_back(heap.back());
        heap.pop_back();
      }
      for (size_t n = first; n < looked_at.size(); ++n) {
        Bound& b = looked_at[n];
        if (b.gain != 0) {
          b.gain = gain_of(p.shares + b.position * p.rows, covered, p.rows, p.epsilon);
          ++computed;
        }
        if (below(best, b)) best = b;
      }
    }
    const double* shares = p.shares + best.position * p.rows;
    for (int64_t r = 0; r < p.rows; ++r) covered[r] += shares[r];
    bounds[best.position] = -kInfinity;
    chosen_out[step] = best.position;
    for (const Bound& b : looked_at)
      if (b.position != best.position) {
        heap.push_back(b);
        std::push_heap(heap.begin(), heap.end(), below);
      }
  }
  for (const Bound& b : heap) bounds[b.position] = b.gain;
  return computed;
}

}  // namespace kvtier
