// The loops behind FormKernels, included once per instruction set, inside an unnamed namespace.
#include "lanes.h"

#include "forms_encode.h"
#include "forms_decode.h"

#define KVTIER_CODED_KERNELS(t) \
  { mean<t>, turn_means<t>, encode_two<t>, encode_offset<t>, encode_token<t>, encode_fp8<t>, encode_fp8_mean<t> }
#define KVTIER_FORM_KERNELS                                                                                              \
  {                                                                                                                      \
    kLanes, KVTIER_CODED_KERNELS(DType::kBF16), KVTIER_CODED_KERNELS(DType::kFP16), code16, widen16, amax8, decode_two,  \
        decode_offset, decode_token, decode_fp8, decode_plain, errors                                                    \
  }
