// build[x86_64]: -mavx2 -mfma
#include "attention_kernels.h"
#include "elementwise_kernels.h"

namespace specserve {

const RowKernels* avx2_row_kernels() {
  static const RowKernels table = {
      "avx2",
      [] {},
      [] {},
      avx2::rms_norm,
      avx2::rotate,
      avx2::write_kv,
      avx2::widen_bf16,
      avx2::attend,
      avx2::merge,
  };
  return &table;
}

}  // namespace specserve
