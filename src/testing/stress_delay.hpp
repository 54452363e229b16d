// Pseudo-random delays on the device, so that a stress test meets orders that are rare otherwise.
// In test builds with AGMM_STRESS_DELAYS; nothing in others.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "sync/device_wait.hpp"
#include "testing/fault.hpp"

namespace agmm {

namespace stress_detail {

// The clobber keeps memory accesses on their side of a delay.
CUTLASS_DEVICE uint32_t clock_cycles() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

CUTLASS_DEVICE uint32_t hash(uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

}  // namespace stress_detail

/// Delays one lane, in one of 16 cases, by up to 2^15 cycles, 16 to 20 us. Each rank is slow in
/// some stretches of a millisecond, in which every second case is delayed: then the others get far
/// ahead.
CUTLASS_DEVICE void stress_delay(int32_t rank) {
  if constexpr (kStressDelays) {
    using namespace stress_detail;
    uint32_t const stretch = uint32_t(global_timer_ns() >> 20);
    uint32_t const one_in = hash(stretch * 16 + uint32_t(rank)) % 8 == 0 ? 2 : 16;
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    uint32_t const start = clock_cycles();
    uint32_t const drawn = hash(start ^ sm << 20);
    if (drawn % one_in != 0) return;
    while (clock_cycles() - start < drawn >> 17) {
    }
  }
}

/// Delays all lanes of a warp together.
CUTLASS_DEVICE void stress_delay_warp(int32_t rank) {
  if constexpr (kStressDelays) {
    stress_delay(rank);
    __syncwarp();
  }
}

}  // namespace agmm
