// Bulk copies between shared and global memory, a peer's too (PTX cp.async.bulk), of one thread.
// They are the async proxy's: what it reads in shared memory needs fence_proxy_async_shared() of
// the threads that wrote it, and what it reads or writes in global memory
// fence_proxy_async_global() after the acquire that allowed it.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace agmm {

/// Stands between writes to shared memory and the barrier behind which bulk copies read them.
CUTLASS_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// A group of its own. Addresses and `bytes`: multiples of 16.
CUTLASS_DEVICE void bulk_copy_to_global(void* to, void const* from, uint32_t bytes) {
  auto const at = uint32_t(__cvta_generic_to_shared(from));
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\t"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(at), "r"(bytes)
      : "memory");
}

/// Completes a phase of `barrier`, whose only arrival this is. Addresses and `bytes`: multiples of
/// 16.
CUTLASS_DEVICE void bulk_copy_to_shared(void* to, void const* from, uint32_t bytes,
                                        uint64_t* barrier) {
  auto const at = uint32_t(__cvta_generic_to_shared(to));
  auto const completes = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n\t"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(at),
      "l"(from), "r"(bytes), "r"(completes)
      : "memory");
}

/// Copies to shared memory and completes the bytes at `barrier`, which somebody has told to expect
/// them. `policy`: how L2 keeps what is read (sync/tensor_load.hpp).
CUTLASS_DEVICE void bulk_load(void* to, void const* from, uint32_t bytes, uint64_t* barrier,
                              uint64_t policy) {
  auto const at = uint32_t(__cvta_generic_to_shared(to));
  auto const completes = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(at),
      "l"(from), "r"(bytes), "r"(completes), "l"(policy)
      : "memory");
}

/// Brings global memory to L2. It is a hint: what it reads may still be written. `bytes`: a
/// multiple of 16.
CUTLASS_DEVICE void bulk_prefetch(void const* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/// A copy whose group stays open until bulk_commit().
CUTLASS_DEVICE void bulk_copy_in_group(void* to, void const* from, uint32_t bytes) {
  auto const at = uint32_t(__cvta_generic_to_shared(from));
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(at),
               "r"(bytes)
               : "memory");
}

CUTLASS_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Returns when all but the last `kLeft` of this thread's groups have been read from shared memory.
template <int kLeft>
CUTLASS_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

/// Returns when all but the last `kLeft` of this thread's groups are complete: what they wrote is
/// visible to it, and to whoever acquires what it releases then. That they have been read is not
/// enough for that.
template <int kLeft>
CUTLASS_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace agmm
