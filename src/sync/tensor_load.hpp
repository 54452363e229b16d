// Loads of boxes of a matrix by TMA (PTX cp.async.bulk.tensor), of one thread. They are the async
// proxy's, as bulk copies are (sync/bulk_copy.hpp).
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace agmm {

/// Brings a descriptor, which lies among a kernel's parameters, to the cache of TMA.
CUTLASS_DEVICE void prefetch_descriptor(void const* descriptor) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(descriptor) : "memory");
}

/// The cache policy of what is read once: in L2 it makes room before all else.
CUTLASS_DEVICE uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Loads the box that begins at (x, y) and completes its bytes at `barrier`. `policy`: how L2 keeps
/// it.
CUTLASS_DEVICE void tensor_load(void* to, void const* descriptor, int32_t x, int32_t y,
                                uint64_t* barrier, uint64_t policy) {
  auto const at = uint32_t(__cvta_generic_to_shared(to));
  auto const completes = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(at),
      "l"(descriptor), "r"(x), "r"(y), "r"(completes), "l"(policy)
      : "memory");
}

/// Loads the box for each CTA of the cluster whose bit `ctas` has, to the same places in their
/// shared memories, and completes it at each one's barrier.
CUTLASS_DEVICE void tensor_load_for(uint16_t ctas, void* to, void const* descriptor, int32_t x,
                                    int32_t y, uint64_t* barrier) {
  auto const at = uint32_t(__cvta_generic_to_shared(to));
  auto const completes = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(at),
      "l"(descriptor), "r"(x), "r"(y), "r"(completes), "h"(ctas)
      : "memory");
}

/// Loads a box for this CTA alone, as L2 usually keeps it.
CUTLASS_DEVICE void tensor_load(void* to, void const* descriptor, int32_t x, int32_t y,
                                uint64_t* barrier) {
  auto const at = uint32_t(__cvta_generic_to_shared(to));
  auto const completes = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(at),
      "l"(descriptor), "r"(x), "r"(y), "r"(completes)
      : "memory");
}

/// Loads the box that begins at (x, y) of matrix z of several.
CUTLASS_DEVICE void tensor_load_of(void* to, void const* descriptor, int32_t x, int32_t y,
                                   int32_t z, uint64_t* barrier) {
  auto const at = uint32_t(__cvta_generic_to_shared(to));
  auto const completes = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(at),
      "l"(descriptor), "r"(x), "r"(y), "r"(z), "r"(completes)
      : "memory");
}

}  // namespace agmm
