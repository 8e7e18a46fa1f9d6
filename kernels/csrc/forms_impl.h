// The loops behind FormKernels, included once per instruction set, inside an unnamed namespace.
#include "lanes.h"

#include "forms_encode.h"
#include "forms_decode.h"

#define KVTIER_CODED_KERNELS(t)                                                                                         \
  {                                                                                                                     \
    mean<t>, turn_means<t>, {encode_two<t, false>, encode_two<t, true>}, {encode_offset<t, false>, encode_offset<t, true>}, \
        {encode_token<t, false>, encode_token<t, true>}, {encode_fp8<t, false>, encode_fp8<t, true>},                   \
        {encode_fp8_mean<t, false>, encode_fp8_mean<t, true>}                                                           \
  }
#define KVTIER_FORM_KERNELS                                                                                             \
  {                                                                                                                     \
    kLanes, KVTIER_CODED_KERNELS(DType::kBF16), KVTIER_CODED_KERNELS(DType::kFP16), code16, widen16, amax8, decode_two, \
        decode_offset, decode_token, decode_fp8, decode_plain, errors                                                   \
  }
