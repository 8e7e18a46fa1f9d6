// The forms for CPUs with AVX-512 as of Ice Lake and Zen 4: the same loops, other instructions.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own headers, whose unmasked intrinsics name a register that nothing was put into.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

// Before the target changes, so that what the headers define stays runnable everywhere.
#include "forms.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")
#endif

#define KVTIER_HAVE_AVX2
#define KVTIER_HAVE_AVX512

namespace kvtier {
namespace {
#include "forms_impl.h"
}  // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const FormKernels kAvx512Forms = KVTIER_FORM_KERNELS;

}  // namespace kvtier

#endif
