// build[x86_64]: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx2 -mfma -mamx-tile -mamx-int8 -mamx-bf16 -Wno-uninitialized -Wno-maybe-uninitialized
#include "attention_amx.h"
#include "elementwise_kernels.h"

namespace specserve {

const RowKernels* amx_row_kernels() {
  static const RowKernels table = {
      "amx",
      begin_tiles,
      end_tiles,
      amx::rms_norm,
      amx::rotate,
      amx::write_kv,
      amx::widen_bf16,
      amx::attend_tiles,
      amx::merge,
  };
  return &table;
}

}  // namespace specserve
