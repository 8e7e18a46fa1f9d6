#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "rows.h"

namespace kvtier {
namespace {

#if defined(__x86_64__)
bool avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi");
}
#endif

// Fastest first.
std::vector<const RowKernels*> supported() {
  std::vector<const RowKernels*> sets;
#if defined(__x86_64__)
  if (avx512()) sets.push_back(&kAvx512Rows);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) sets.push_back(&kAvx2Rows);
#endif
  sets.push_back(&kScalarRows);
  return sets;
}

const RowKernels* find(const std::string& name) {
  for (const RowKernels* set : supported())
    if (name == set->name) return set;
  std::string names;
  for (const std::string& known : available_isas()) names += (names.empty() ? "" : ", ") + known;
  throw std::invalid_argument("KVTIER_ISA = '" + name + "' is not available here; use one of: " + names);
}

const RowKernels* initial() {
  const char* name = std::getenv("KVTIER_ISA");
  return name && *name ? find(name) : supported().front();
}

std::atomic<const RowKernels*>& current() {
  static std::atomic<const RowKernels*> set{initial()};
  return set;
}

}  // namespace

const RowKernels& row_kernels() { return *current().load(std::memory_order_acquire); }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const RowKernels* set : supported()) names.emplace_back(set->name);
  return names;
}

void use_isa(const std::string& name) { current().store(find(name), std::memory_order_release); }

}  // namespace kvtier
