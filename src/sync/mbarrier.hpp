// mbarriers with a clobber, so that the compiler moves no memory access over them. An arrival
// releases, and a test that succeeds acquires, at CTA scope.
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

/// Arrives, and makes the phase wait for so many bytes of bulk copies too.
CUTLASS_DEVICE void mbarrier_arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  auto const at = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
}

/// Stands behind the making of barriers, and ahead of the cluster's barrier behind which other CTAs
/// and bulk copies use them.
CUTLASS_DEVICE void fence_mbarriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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

/// The longest time for which a waiting warp is suspended at once.
constexpr uint32_t kSuspendedNs = 10'000'000;

/// Returns when the phase of this parity is over. Without a limit: for what the CTA's own threads
/// do, who have limits for what they wait for outside.
///
/// The warp is suspended until then, or for the time that is given. Without a time it would look
/// again and again, for all of a tile where it waits for the next one, and take the cycles of warps
/// that multiply.
CUTLASS_DEVICE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  auto const at = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "AGAIN_%=:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, %2;\n\t"
      "@!p bra AGAIN_%=;\n\t"
      "}" ::"r"(at),
      "r"(parity), "r"(kSuspendedNs)
      : "memory");
}

/// The address in a CTA of the cluster of what lies at `local` in this one.
CUTLASS_DEVICE uint32_t address_in_cluster(void const* local, int cta) {
  auto const here = uint32_t(__cvta_generic_to_shared(local));
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(cta));
  return there;
}

/// Arrives for what needs no order of memory in the other CTA, such as the end of reads. At cluster
/// scope the arrival would wait for all that the thread has under way in global memory.
CUTLASS_DEVICE void mbarrier_arrive_in_cluster(uint64_t* barrier, int cta) {
  asm volatile(
      "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_cluster(barrier, cta))
      : "memory");
}

/// Stores to an address_in_cluster(), and completes the value's bytes at the barrier at `barrier`
/// in that CTA, whose phase ends behind the store.
CUTLASS_DEVICE void store_and_complete_in_cluster(uint32_t to, float value, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
}

/// Does what mbarrier_wait() does, for what other CTAs of the cluster have written.
CUTLASS_DEVICE void mbarrier_wait_in_cluster(uint64_t* barrier, uint32_t parity) {
  auto const at = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "AGAIN_%=:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1, %2;\n\t"
      "@!p bra AGAIN_%=;\n\t"
      "}" ::"r"(at),
      "r"(parity), "r"(kSuspendedNs)
      : "memory");
}

/// The two halves of the barrier of all threads of a cluster. Whole warps call them, in launches
/// that have clusters: in others nothing comes of the arrival, and the wait is __syncthreads(). An
/// arrival orders nothing but what a fence ahead of it does (fence_mbarriers_made()): it is on the
/// way to the first load, and a release would wait for memory.
CUTLASS_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
CUTLASS_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Stores to a CTA of the cluster and arrives at its barrier, whose phase ends when the value is
/// there to be read.
CUTLASS_DEVICE void store_and_arrive_in_cluster(int32_t* local, int32_t value, uint64_t* barrier,
                                                int cta) {
  uint32_t const at = address_in_cluster(barrier, cta);
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(at),
               "n"(sizeof(value))
               : "memory");
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(
                   address_in_cluster(local, cta)),
               "r"(value), "r"(at)
               : "memory");
}

}  // namespace agmm
