// What other languages call, apart from gemm_api.cpp. Arguments are checked by the caller
// (native_step.py).
#include "row_kernels.h"
#include "step.h"

#define SPECSERVE_EXPORT __attribute__((visibility("default")))

using namespace specserve;

extern "C" {

SPECSERVE_EXPORT Pool* specserve_new_pool(int32_t num_threads) { return new Pool(num_threads); }
SPECSERVE_EXPORT void specserve_delete_pool(Pool* pool) { delete pool; }

SPECSERVE_EXPORT Workspace* specserve_new_workspace() { return new_workspace(); }
SPECSERVE_EXPORT void specserve_delete_workspace(Workspace* space) { delete_workspace(space); }

SPECSERVE_EXPORT void specserve_step(const Model* model, const Step* step, Pool* pool,
                                     Workspace* workspace, Phases* phases) {
  run_step(*model, *step, *pool, *workspace, *phases);
}

// Keys and values [T, G, H] f32 of the segments' rows into one layer's KV; then, where query
// [T, N, H] is given, attention over it into out [T, N, H].
SPECSERVE_EXPORT void specserve_attention(const Segments* segments, const Heads* heads,
                                          void* kv_keys, void* kv_values, int32_t kv_is_bf16,
                                          const float* keys, const float* values,
                                          const float* query, float* out, float scale,
                                          int64_t window, Pool* pool) {
  run_one_attention(*segments, *heads, KvLayer{kv_keys, kv_values, kv_is_bf16 != 0}, keys, values,
                    query, out, scale, window, *pool);
}

SPECSERVE_EXPORT const char* specserve_row_kernels() { return row_kernels().name; }
SPECSERVE_EXPORT int32_t specserve_choose_row_kernels(const char* name) {
  return choose_row_kernels(name) ? 1 : 0;
}

}  // extern "C"
