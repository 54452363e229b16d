// A link that one GPU imagines (AGMM_VIRTUAL_LINK, in GB/s): what is sent over it, to this GPU
// itself, is complete when the link would have carried it after all that was sent before. In test
// builds; nothing in others.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "sync/device_wait.hpp"
#include "testing/fault.hpp"

namespace agmm {

namespace virtual_link_detail {

/// When the link is free again, in ns of the GPU's global timer. Each translation unit has one,
/// which its kernels share.
static __device__ unsigned long long free_at = 0;
constexpr int kBytesPerNs = kVirtualLinkGBs == 0 ? 1 : kVirtualLinkGBs;

}  // namespace virtual_link_detail

/// The calling thread's bytes take their place behind those that others sent before. Returns when
/// they would have left shared memory: when the link has begun with them.
CUTLASS_DEVICE uint64_t virtual_link_take(uint32_t bytes, uint64_t passed) {
  if constexpr (kVirtualLinkGBs != 0) {
    auto const takes = static_cast<unsigned long long>(bytes / virtual_link_detail::kBytesPerNs);
    // No loop of compare and swap: with all multiprocessors in it, it would be slower than a link.
    atomicMax(&virtual_link_detail::free_at, static_cast<unsigned long long>(global_timer_ns()));
    unsigned long long const begins = atomicAdd(&virtual_link_detail::free_at, takes);
    while (global_timer_ns() < begins) {
    }
    return begins + takes;
  }
  return passed;
}

/// Returns when all that the thread sent has passed.
CUTLASS_DEVICE void virtual_link_wait(uint64_t passed) {
  if constexpr (kVirtualLinkGBs != 0) {
    while (global_timer_ns() < passed) {
    }
  }
}

}  // namespace agmm
