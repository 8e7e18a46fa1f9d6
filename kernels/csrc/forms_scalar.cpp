// The forms for any CPU.
#include "forms.h"

namespace kvtier {
namespace {
#include "forms_impl.h"
}  // namespace

const FormKernels kScalarForms = KVTIER_FORM_KERNELS;

}  // namespace kvtier
