#include "attention_kernels.h"
#include "elementwise_kernels.h"

namespace specserve {

const RowKernels* portable_row_kernels() {
  static const RowKernels table = {
      "portable",
      [] {},
      [] {},
      portable::rms_norm,
      portable::rotate,
      portable::write_kv,
      portable::widen_bf16,
      portable::attend,
      portable::merge,
  };
  return &table;
}

}  // namespace specserve
