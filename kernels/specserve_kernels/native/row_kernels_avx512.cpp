// build[x86_64]: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -Wno-uninitialized -Wno-maybe-uninitialized
#include "attention_kernels.h"
#include "elementwise_kernels.h"

namespace specserve {

const RowKernels* avx512_row_kernels() {
  static const RowKernels table = {
      "avx512",
      [] {},
      [] {},
      avx512::rms_norm,
      avx512::rotate,
      avx512::write_kv,
      avx512::widen_bf16,
      avx512::attend,
      avx512::merge,
  };
  return &table;
}

}  // namespace specserve
