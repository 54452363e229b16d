// A tile whose K is split between the CTAs of a cluster: each of them adds up a share of the tile,
// which it reads from the others' shared memory, and stores it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "gemm/kernel_facts.hpp"
#include "gemm/sm90/epilogue_policy.hpp"
#include "gemm/sm90/wgmma.hpp"
#include "gemm/split_k.hpp"
#include "testing/stress_delay.hpp"

namespace agmm {

/// CUTLASS's for a kernel whose clusters are of one CTA, which is launched in clusters of several:
/// its consumers would release the stages of the cluster's first CTA.
template <class Base>
struct OwnStagesPipeline : Base {
  template <class Storage, class Params, class ClusterShape, class InitBarriers>
  CUTLASS_DEVICE OwnStagesPipeline(Storage& storage, Params const& params, ClusterShape shape,
                                   InitBarriers init)
      : Base(storage, params, shape, init) {
    // The first member of Base is the CTA whose stages are released.
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

/// The address in another CTA of the cluster of what lies at `own` in this one.
CUTLASS_DEVICE uint32_t shared_address_in(void const* own, uint32_t cta) {
  uint32_t const local = cute::cast_smem_ptr_to_uint(own);
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(local), "r"(cta));
  return address;
}

/// Arrives at the barrier of all threads of the cluster that have not ended.
CUTLASS_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
/// Arrives without ordering what the thread has written, for which it would wait.
CUTLASS_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
CUTLASS_DEVICE void cluster_wait() {
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

/// The whole producer warp calls it where A is stored from the stages, once the stores have read
/// them.
CUTLASS_DEVICE void stages_are_stored() {
  if (split_detail::ctas_in_cluster() > 1) {
    named_barrier_arrive<NamedBarrier::kSplitK, split_detail::kConsumerThreads + 32>();
  }
}

/// Where the sums of a swapped kernel's tile go, and what is made of them.
template <class Policy_>
struct SumsOut {
  using Policy = Policy_;
  static_assert(sizeof(typename Policy::Out) == 2);

  typename Policy::Out* out = nullptr;  // [rows, out_columns]
  int32_t rows = 0;
  int32_t columns = 0;  // of B, a multiple of 8
  int32_t out_columns = 0;
  typename Policy::Args epilogue{};
};

/// Adds up the splits of the cluster's tile, and stores it: nothing is left to do. For the 256
/// consumer threads of a cooperative kernel together, once a CTA, when they have multiplied their
/// split and released its stages. `shared`: of those stages. `are_stored`: A is stored from them,
/// until stages_are_stored(). The tile is swapped (its MMA's rows are columns of `out`), begins at
/// `first_row` and `first_column` of it, and has kAtomsM atoms of kAtomFloats floats of a thread.
///
/// A unit is what the 32 lanes of a warp have of 16 rows and 8 columns of the MMA: 8 rows of `out`,
/// of which each gets 32 bytes. The CTAs of the cluster take the tile's units in turn, and so do
/// their warps.
///
/// Invariants. No load writes to the stages and no MMA reads them any more: the consumers have seen
/// all loads of the CTA's only tile land, and each has awaited its MMAs before the barrier of all
/// consumers. The sums of a CTA (its threads' stores, then their arrival at the cluster's barrier,
/// release) come before the others' loads (their wait, acquire). A CTA ends after the second
/// barrier, at which a thread arrives when it has added up what it has loaded, and so after the
/// loads from it. The barriers count every thread of the cluster that has not ended; the producer
/// warps end without them, which they can once all stages are released. The order of summation is
/// that of K.
template <int kAtomsM, int kAtomFloats, class To, int kFloats>
CUTLASS_DEVICE void store_splits_in_cluster(void* shared, bool are_stored,
                                            float const (&sum)[kFloats], To const& to,
                                            int32_t first_row, int32_t first_column) {
  using namespace split_detail;
  using Policy = typename To::Policy;
  static_assert(kAtomFloats % 4 == 0 && kFloats % (kAtomsM * kAtomFloats) == 0);
  constexpr int kVectors = kFloats / 4;
  constexpr int kAtomVectors = kAtomFloats / 4;
  constexpr int kWarps = kConsumerThreads / 32;
  constexpr int kWarpgroups = kConsumerThreads / 128;
  int32_t const splits = int32_t(ctas_in_cluster());
  int32_t const rank = int32_t(cute::block_rank_in_cluster());
  // CUTLASS counts the threads of an MMA so: its second warpgroup is the block's second one.
  int const thread = int(threadIdx.x) % kConsumerThreads;
  int const warp = thread / 32;
  float4* const own = static_cast<float4*>(shared);

  stress_delay(rank);
  if (are_stored) {
    named_barrier_sync<NamedBarrier::kSplitK, kConsumerThreads + 32>();
  } else {
    sync();
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    own[i * kConsumerThreads + thread] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2],
                                          sum[4 * i + 3]};
  }
  stress_delay_warp(rank);
  cute::cluster_arrive();
  cute::cluster_wait();
  stress_delay_warp(rank);

  // The lane's place in a unit. Of the two columns of the MMA that it has, it stores one, for two
  // rows that are neighbours: its own and that of the lane with which it exchanges the rest.
  bool const is_odd = thread / 4 % 2 != 0;
  int const row = fragment_column(thread) + (is_odd ? 1 : 0);
  int const column = thread % 32 / 8 * 2;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int unit = rank + warp * splits; unit < kVectors * kWarps; unit += kWarps * splits) {
    float4 const* const from = own + unit * 32 + thread % 32;
    float4 part[kMaxClusterSplits];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kMaxClusterSplits; ++i) {
      if (i < splits) part[i] = load_in_cluster(shared_address_in(from, uint32_t(i)));
    }
    float4 whole = part[0];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < kMaxClusterSplits; ++i) {
      if (i < splits) {
        whole.x += part[i].x;
        whole.y += part[i].y;
        whole.z += part[i].z;
        whole.w += part[i].w;
      }
    }
    float const given[2] = {is_odd ? whole.x : whole.y, is_odd ? whole.z : whole.w};
    float const kept[2] = {is_odd ? whole.y : whole.x, is_odd ? whole.w : whole.z};
    int const vector = unit / kWarps;
    int const atom = vector / kAtomVectors;
    int const of_warp = unit % kWarps;
    int32_t const out_row =
        first_row + row + 8 * (vector % kAtomVectors + kAtomVectors * (atom / kAtomsM));
    int32_t const mma_row =
        kAtomRows * (of_warp / 4 + kWarpgroups * (atom % kAtomsM)) + 16 * (of_warp % 4);
    typename Policy::Row of_row{};
    if (out_row < to.rows) of_row = Policy::row(to.epilogue, out_row);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      float const taken = __shfl_xor_sync(0xffffffffu, given[i], 4);
      int32_t const out_column = first_column + mma_row + column + 8 * i;
      if (out_row >= to.rows || out_column >= to.columns) continue;
      Floats<2> sums;
      sums[0] = is_odd ? taken : kept[i];
      sums[1] = is_odd ? kept[i] : taken;
      auto const finished = Policy::apply(to.epilogue, of_row, out_column, sums);
      auto* const at =
          to.out + int64_t(out_row) * to.out_columns + out_column / Policy::kColumnsPerOut;
      *reinterpret_cast<std::remove_const_t<decltype(finished)>*>(at) = finished;
    }
    if constexpr (Policy::kScaled) {
      float* const scales_out = to.epilogue.row_scales.out;
      bool const is_first = first_column + mma_row + column == 0;
      if (scales_out != nullptr && is_first && out_row < to.rows)
        scales_out[out_row] = of_row.scale;
    }
  }
  cluster_arrive_relaxed();
  cute::cluster_wait();
}

}  // namespace agmm
