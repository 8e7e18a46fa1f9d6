// Greedy choice of positions by the logarithm of the coverage they add: see kernels/compaction/coverage_reference.py.
#pragma once

#include <cstdint>

namespace kvtier {

struct CoverageRows {
  const double* shares;  // [positions, rows]
  int64_t positions, rows;
  double epsilon;
};

// Chooses `count` more positions, in the order of choice, into chosen_out. covered [rows] and bounds [positions] are the
// state between calls: what is covered so far, and for each position a gain that it cannot exceed any more (infinity
// before it was looked at, -infinity for one that must not be chosen or was). Returns the number of gains computed.
int64_t choose_by_coverage(const CoverageRows& p, double* covered, double* bounds, int64_t count, int64_t* chosen_out);

}  // namespace kvtier
