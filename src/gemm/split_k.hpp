// A tile whose K is split between several CTAs: the last of them to get here adds up what the
// others have left in scratch memory, and stores the tile.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "sync/device_wait.hpp"
#include "sync/named_barrier.hpp"
#if __has_include("testing/stress_delay.hpp")
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"
#else
// The installed scheduler comes without what test builds change.
namespace agmm {
inline constexpr bool kEarlySum = false;
CUTLASS_DEVICE void stress_delay(int32_t) {}
}  // namespace agmm
#endif

namespace agmm {

/// Nobody waits for anybody, so the CTAs of a tile need not be on the GPU together.
///
/// Invariant: a CTA's partial sums (all its threads' stores, the barrier, then its addition to
/// `arrived`, acquire-release, device scope) come before the look by which the last CTA finds that
/// it is the last, and that comes before its loads (the barrier that tells its threads). Only the
/// last sets `arrived` back to 0, for the next launch, when all others have added to it. Whoever is
/// last, the order of summation is the same: the last split of K, which usually ends last, then the
/// others in the order of K.
struct SplitK {
  int32_t splits = 1;
  float4* partials = nullptr;   // [tiles][splits][a tile's floats]
  uint32_t* arrived = nullptr;  // one per tile; 0 before the launch
};

namespace split_detail {

// A cooperative kernel of CUTLASS has a warpgroup that loads and two that multiply.
constexpr int kProducerThreads = 128;
constexpr int kConsumerThreads = 256;

CUTLASS_DEVICE void sync() { named_barrier_sync<NamedBarrier::kSplitK, kConsumerThreads>(); }

/// Whether the predicate holds in any consumer thread; a barrier of these.
CUTLASS_DEVICE bool any(bool predicate) {
  return named_barrier_any<NamedBarrier::kSplitK, kConsumerThreads>(predicate);
}

}  // namespace split_detail

/// Adds up a tile whose K is split. `split` is the CTA's own, `cluster` the number of its cluster
/// of tiles. Returns whether this CTA has the whole sum in its accumulators now, and has to store
/// it. The 256 consumer threads of a cooperative kernel call it together.
template <int kClusterSize, int kFloats>
CUTLASS_DEVICE bool add_splits(SplitK const& split_k, int32_t cluster, int32_t split,
                               float (&sum)[kFloats]) {
  using namespace split_detail;
  static_assert(kFloats % 4 == 0);
  constexpr int kVectors = kFloats / 4;
  // Loads of 16 bytes that a thread has under way: they take 56 registers beside the sums, and the
  // 28 vectors of the widest tile that splits (128 x 224) take two turns. Not measured.
  constexpr int kInFlight = 14;
  constexpr int64_t kTile = int64_t(kVectors) * kConsumerThreads;

  int const thread = int(threadIdx.x) - kProducerThreads;
  int const cta = int(blockIdx.x);  // in its cluster, which is one tile wide
  uint32_t* const arrived = split_k.arrived + cluster * kClusterSize + cta;
  auto const partial = [&](int s) {
    int const unit = (cluster * split_k.splits + s) * kClusterSize + cta;
    return split_k.partials + unit * kTile + thread;
  };
  int const last = split_k.splits - 1;
  bool const leads = thread == 0;

  auto const store = [&] {
    float4* const to = partial(split);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      to[i * kConsumerThreads] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
    }
  };

  stress_delay(split);
  // If all others have arrived, the CTA need not store its sums.
  bool is_last = any(leads && load_acquire_gpu(arrived) == uint32_t(last));
  // With two splits the order of summation does not matter.
  bool const is_out_of_order = last > 1 && split != last;
  if ((!kEarlySum || is_last) && (!is_last || is_out_of_order)) store();
  if (!is_last) {
    stress_delay(split);
    sync();
    is_last = any(leads && add_acq_rel_gpu(arrived, 1) == uint32_t(last));
    if constexpr (kEarlySum) {
      stress_delay(split);
      if (!is_last || is_out_of_order) store();
    }
    if (!is_last) return false;
  }
  if (leads) *arrived = 0;

  if (is_out_of_order) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kFloats; ++i) sum[i] = 0;
  }
  CUTLASS_PRAGMA_NO_UNROLL
  for (int s = is_out_of_order ? -1 : 0; s < last; ++s) {
    float4 const* const from = partial(s < 0 ? last : last == 1 ? 1 - split : s);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectors; i += kInFlight) {
      float4 part[kInFlight];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kInFlight && i + j < kVectors; ++j) {
        part[j] = __ldcg(from + (i + j) * kConsumerThreads);  // another CTA's: not from L1
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
  return true;
}

}  // namespace agmm
