// Per-row steps between the matrix products. Included once per instruction set.
#pragma once
#include "row_kernels.h"
#include "vector.h"

namespace specserve {
namespace SPECSERVE_ISA {

inline void rms_norm(const float* x, const float* weight, float* y, int64_t n, float eps) {
  F sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int u = 0; u < 4; u++) {
      F part = load(x + i + u * W);
      sums[u] = fma(part, part, sums[u]);
    }
  for (; i + W <= n; i += W) {
    F part = load(x + i);
    sums[0] = fma(part, part, sums[0]);
  }
  float total = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  for (; i < n; i++) total += x[i] * x[i];
  float factor = 1.0f / __builtin_sqrtf(total / float(n) + eps);
  F factors = set1(factor);
  for (i = 0; i + W <= n; i += W) store(y + i, mul(mul(load(x + i), factors), load(weight + i)));
  for (; i < n; i++) y[i] = x[i] * factor * weight[i];
}

inline void rotate(float* x, const float* cos, const float* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  float* y = x + half;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    F a = load(x + i), b = load(y + i), c = load(cos + i), s = load(sin + i);
    store(x + i, sub(mul(a, c), mul(b, s)));
    store(y + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; i++) {
    float a = x[i], b = y[i];
    x[i] = a * cos[i] - b * sin[i];
    y[i] = b * cos[i] + a * sin[i];
  }
}

inline void write_kv(const KvLayer& kv, const Heads& heads, int64_t block_size, int64_t block,
                     int64_t offset, const float* key, const float* value) {
  const int64_t head_dim = heads.head_dim;
  if (kv.is_bf16) {
    // A token's keys lie in as many cache lines as a head has pairs: ask for all of them at once.
    const int64_t size = heads.num_kv_heads * block_size * head_dim;
    const uint16_t* keys = static_cast<const uint16_t*>(kv.keys) + block * size + offset * 2;
    for (int64_t at = 0; at < size; at += block_size * 2) __builtin_prefetch(keys + at, 1);
  }
  for (int64_t g = 0; g < heads.num_kv_heads; g++, key += head_dim, value += head_dim) {
    const int64_t base = (block * heads.num_kv_heads + g) * block_size * head_dim;
    if (kv.is_bf16) {
      uint16_t* keys = static_cast<uint16_t*>(kv.keys) + base + offset * 2;
      for (int64_t h = 0; h < head_dim; h += 2) {
        uint32_t pair = float_to_bf16(key[h]) | uint32_t(float_to_bf16(key[h + 1])) << 16;
        memcpy(keys + h * block_size, &pair, 4);
      }
      uint16_t* values = static_cast<uint16_t*>(kv.values) + base + offset * head_dim;
      for (int64_t h = 0; h < head_dim; h++) values[h] = float_to_bf16(value[h]);
    } else {
      float* keys = static_cast<float*>(kv.keys) + base + offset;
      for (int64_t h = 0; h < head_dim; h++) keys[h * block_size] = key[h];
      memcpy(static_cast<float*>(kv.values) + base + offset * head_dim, value,
             size_t(head_dim) * 4);
    }
  }
}

inline void widen_bf16(const uint16_t* x, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(y + i, load_bf16(x + i));
  for (; i < n; i++) y[i] = bf16_to_float(x[i]);
}

}  // namespace SPECSERVE_ISA
}  // namespace specserve
