// The consumers' side of the mainloop for fp8 whose sums are promoted. The tensor cores add fp8
// products with fewer bits than float32 has, so each k tile is summed up anew, and its sums, times
// the scales of its blocks if there are any, are added to float32 registers: as cuBLAS does, every
// 128 of K.
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace agmm {

/// Sums are added as they are.
struct NoScales {
  CUTLASS_DEVICE void begin(int) {}
  CUTLASS_DEVICE void next(int) {}
  CUTLASS_DEVICE void prepare(int, int) {}
  CUTLASS_DEVICE static float times(float sum, float part, int) { return sum + part; }
};

/// Multiplies in place of Mainloop::mma(), and like it leaves the last stage for mma_tail() to
/// release. `sums` are taken atom by atom, so that the registers of one atom more are enough. While
/// a warpgroup adds up, the tensor cores work for the other one: the scales are read while its own
/// MMA runs. Where `sums` are one atom and have scales, there are registers for two more: then a
/// warpgroup adds up one k tile while the tensor cores work on its next one. (Block scales, 128 x
/// 128 tiles on one H100: 15% less. With tiles of 128 x 256, turns that the warpgroups take by
/// barriers gained nothing.)
template <class Mainloop, class Sums, class Scales>
CUTLASS_DEVICE void promoting_mma(typename Mainloop::MainloopPipeline& pipeline,
                                  typename Mainloop::PipelineState read, Sums& sums, int k_tiles,
                                  int thread, typename Mainloop::TensorStorage& storage,
                                  Scales scales) {
  using namespace cute;
  using TiledMma = typename Mainloop::TiledMma;
  static_assert(Mainloop::K_PIPE_MMAS == 1, "mma_tail() releases one stage");
  static_assert(size<2>(typename Mainloop::TileShape{}) == 128, "promotes every 128 of K");

  Tensor sA = make_tensor(make_smem_ptr(storage.smem_A.data()), typename Mainloop::SmemLayoutA{});
  Tensor sB = make_tensor(make_smem_ptr(storage.smem_B.data()), typename Mainloop::SmemLayoutB{});
  constexpr int kWarpgroups = size(TiledMma{}) / cutlass::NumThreadsPerWarpGroup;
  int const warpgroup = __shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0);
  TiledMma mma;
  auto const part_of_mma = mma.get_slice(
      make_layout(Int<kWarpgroups>{}, Int<cutlass::NumThreadsPerWarpGroup>{})(warpgroup));
  Tensor a = part_of_mma.make_fragment_A(part_of_mma.partition_A(sA));  // (MMA,MMA_M,MMA_K,PIPE)
  Tensor b = part_of_mma.make_fragment_B(part_of_mma.partition_B(sB));  // (MMA,MMA_N,MMA_K,PIPE)

  auto const multiply = [&](auto& part, int m, int n, int stage) {
    warpgroup_fence_operand(part);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(a); ++k) {
      cute::gemm(mma, a(_, m, k, stage), b(_, n, k, stage), part);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  auto const add = [&](auto const& part, int m, int n) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(part); ++i) sums(i, m, n) = scales.times(sums(i, m, n), part(i), i);
  };

  clear(sums);
  constexpr bool kIsOneAtom = size<1>(Sums{}) == 1 && size<2>(Sums{}) == 1;
  constexpr bool kHasScales = !std::is_same_v<Scales, NoScales>;
  if constexpr (kIsOneAtom && kHasScales) {
    Tensor even = make_fragment_like(sums(_, 0, 0));
    Tensor odd = make_fragment_like(sums(_, 0, 0));
    pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
    scales.begin(read.index());
    multiply(even, 0, 0, read.index());
    // One k tile's sums are added up while the next one's are computed.
    auto const step = [&](auto& part, auto& next, int k_tile) {
      auto const done = read;
      ++read;
      pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
      multiply(next, 0, 0, read.index());
      scales.next(k_tile);
      scales.prepare(0, 0);
      warpgroup_wait<1>();
      warpgroup_fence_operand(part);
      pipeline.consumer_release(done);
      add(part, 0, 0);
    };
    auto const last = [&](auto& part, int k_tile) {
      scales.next(k_tile);
      scales.prepare(0, 0);
      warpgroup_wait<0>();
      warpgroup_fence_operand(part);
      add(part, 0, 0);
    };
    int k_tile = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tile + 2 < k_tiles; k_tile += 2) {
      step(even, odd, k_tile);
      step(odd, even, k_tile + 1);
    }
    if (k_tile + 1 < k_tiles) {
      step(even, odd, k_tile);
      last(odd, k_tile + 1);
    } else {
      last(even, k_tile);
    }
  } else {
    Tensor part = make_fragment_like(sums(_, 0, 0));
    if constexpr (kHasScales) {
      pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
      scales.begin(read.index());
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile, ++read) {
      pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < size<1>(sums); ++m) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < size<2>(sums); ++n) {
          multiply(part, m, n, read.index());
          if (m == 0 && n == 0) {
            scales.next(k_tile);
          }
          scales.prepare(m, n);
          warpgroup_wait<0>();
          warpgroup_fence_operand(part);
          bool const is_read = m + 1 == size<1>(sums) && n + 1 == size<2>(sums);
          if (is_read && k_tile + 1 < k_tiles) pipeline.consumer_release(read);
          add(part, m, n);
        }
      }
    }
  }
}

}  // namespace agmm
