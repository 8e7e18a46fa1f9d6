// The forms for CPUs with AVX2 and F16C: the same loops, other instructions.
#if defined(__x86_64__)

#include <immintrin.h>

// Before the target changes, so that what the headers define stays runnable everywhere.
#include "forms.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#define KVTIER_HAVE_AVX2

namespace kvtier {
namespace {
#include "forms_impl.h"
}  // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const FormKernels kAvx2Forms = KVTIER_FORM_KERNELS;

}  // namespace kvtier

#endif
