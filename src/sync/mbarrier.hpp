// mbarriers of a CTA with a clobber, so that the compiler moves no memory access over them. An
// arrival releases, and a test that succeeds acquires, at CTA scope.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace agmm {

CUTLASS_DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  auto const at = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

CUTLASS_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  auto const at = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

/// Whether the phase of this parity, the present one or the one before, is over.
CUTLASS_DEVICE bool mbarrier_test(uint64_t* barrier, uint32_t parity) {
  auto const at = uint32_t(__cvta_generic_to_shared(barrier));
  uint32_t is_over;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.b32 %0, 1, 0, p;\n\t"
      "}"
      : "=r"(is_over)
      : "r"(at), "r"(parity)
      : "memory");
  return is_over != 0;
}

/// Returns when the phase of this parity is over. Without a limit: for what the CTA's own threads
/// do, who have limits for what they wait for outside.
CUTLASS_DEVICE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  auto const at = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "AGAIN_%=:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
      "@!p bra AGAIN_%=;\n\t"
      "}" ::"r"(at),
      "r"(parity)
      : "memory");
}

}  // namespace agmm
