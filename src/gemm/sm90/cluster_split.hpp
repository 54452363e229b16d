// A tile whose K is split between the CTAs of a cluster: the first of them reads the others' sums
// from their shared memory, adds them up and stores the tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "gemm/split_k.hpp"
#include "testing/stress_delay.hpp"

namespace agmm {

/// CUTLASS's for a kernel whose clusters are of one CTA, which is launched in clusters of several:
/// its consumers would release the stages of the cluster's first CTA.
template <class Base>
struct OwnStagesPipeline : Base {
  template <class Storage, class Params, class ClusterShape>
  CUTLASS_DEVICE OwnStagesPipeline(Storage& storage, Params const& params, ClusterShape shape)
      : Base(storage, params, shape) {
    // Its first member is the CTA whose stages are released.
    static_assert(std::is_standard_layout_v<Base>);
    *reinterpret_cast<uint32_t*>(static_cast<Base*>(this)) = cute::block_rank_in_cluster();
  }
};

namespace split_detail {

CUTLASS_DEVICE uint32_t ctas_in_cluster() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

/// Of another CTA of the cluster.
CUTLASS_DEVICE uint32_t shared_address_in(void const* own, uint32_t cta) {
  uint32_t const local = cute::cast_smem_ptr_to_uint(own);
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(local), "r"(cta));
  return address;
}

/// Of all threads of the cluster that have not ended.
CUTLASS_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

CUTLASS_DEVICE float4 load_in_cluster(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

}  // namespace split_detail

/// Where A is stored from the stages: for the whole producer warp, once the stores have read them.
CUTLASS_DEVICE void stages_are_stored() {
  if (split_detail::ctas_in_cluster() > 1) {
    named_barrier_arrive<NamedBarrier::kSplitK, split_detail::kConsumerThreads + 32>();
  }
}

/// Adds up the parts of the cluster's tile; afterwards the accumulators of its first CTA have the
/// whole sum. For the 256 consumer threads of a cooperative kernel together, once a CTA, when they
/// have multiplied their part and released its stages. `shared`: of those stages. `are_stored`: A
/// is stored from them, until stages_are_stored().
///
/// Invariants. No load writes to the stages and no MMA reads them any more: the consumers have seen
/// all loads of the CTA's only tile land, and each has awaited its MMAs before the barrier of all
/// consumers. The sums of a CTA (its threads' stores, then their arrival at the cluster's barrier,
/// release) come before the first CTA's loads (its wait, acquire). A CTA ends after the second
/// barrier, and so after the loads from it. The barriers count every thread of the cluster that
/// has not ended; the producer warps end without them, which they can once all stages are released.
/// The order of summation is that of K.
template <int kFloats>
CUTLASS_DEVICE void add_splits_in_cluster(void* shared, bool are_stored, float (&sum)[kFloats]) {
  using namespace split_detail;
  static_assert(kFloats % 4 == 0);
  constexpr int kVectors = kFloats / 4;
  constexpr int kInFlight = kVectors < 16 ? kVectors : 16;
  uint32_t const parts = ctas_in_cluster();
  if (parts == 1) return;

  uint32_t const rank = cute::block_rank_in_cluster();
  int const thread = int(threadIdx.x) - kProducerThreads;
  float4* const own = static_cast<float4*>(shared) + thread;
  stress_delay(int32_t(rank));
  if (are_stored) {
    named_barrier_sync<NamedBarrier::kSplitK, kConsumerThreads + 32>();
  } else {
    sync();
  }
  if (rank != 0) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      own[i * kConsumerThreads] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
    }
  }
  cluster_barrier();
  if (rank == 0) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (uint32_t cta = 1; cta < parts; ++cta) {
      uint32_t const from = shared_address_in(own, cta);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectors; i += kInFlight) {
        float4 part[kInFlight];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kInFlight && i + j < kVectors; ++j) {
          part[j] = load_in_cluster(from + (i + j) * kConsumerThreads * int(sizeof(float4)));
        }
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kInFlight && i + j < kVectors; ++j) {
          sum[4 * (i + j)] += part[j].x;
          sum[4 * (i + j) + 1] += part[j].y;
          sum[4 * (i + j) + 2] += part[j].z;
          sum[4 * (i + j) + 3] += part[j].w;
        }
      }
    }
  }
  cluster_barrier();
}

}  // namespace agmm
