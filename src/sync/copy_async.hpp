// Copies of few bytes from global to shared memory that a thread does not wait for (PTX cp.async).
// They are the generic proxy's, as its loads and stores are.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace agmm {

/// Copies a float, or writes 0 and reads nothing.
CUTLASS_DEVICE void copy_async(float* to, float const* from, bool reads) {
  auto const at = uint32_t(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from),
               "r"(reads ? 4 : 0)
               : "memory");
}

/// Arrives at a barrier, which counts this arrival as any other, when all copies that the thread
/// has begun are there.
CUTLASS_DEVICE void arrive_when_copied(uint64_t* barrier) {
  auto const at = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
}

}  // namespace agmm
