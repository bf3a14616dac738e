// The tile registers of AMX as products and attention both use them: eight of 16 rows of 64 bytes.
// Included only where the compiler may use AMX.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace specserve {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Of the calling thread, until end_tiles; beginning twice costs 0.1 us and changes nothing.
inline void begin_tiles() {
  static constexpr TileConfig config;
  // Not _tile_loadconfig: gcc 12 declares only 8 of the 64 bytes as read and drops the stores.
  asm volatile("ldtilecfg %0" : : "m"(config));
}

inline void end_tiles() { _tile_release(); }

}  // namespace
}  // namespace specserve
