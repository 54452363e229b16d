// The mainloop of matmul + all-reduce: that of matmul + reduce-scatter, beside which the spare
// producer warp copies the finished tiles that the other ranks send.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "gemm/sm90/scatter_mainloop.hpp"
#include "transport/tile_push_return_device.hpp"

namespace agmm {

/// Tells CUTLASS's kernels that the mainloop has work for their fourth producer warp.
template <class Base>
struct LaggedPolicy : Base {};

/// `Return`: a TileReturn.
template <class Base, class Return>
struct LaggedMainloop : Base {
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using DispatchPolicy = LaggedPolicy<typename Base::DispatchPolicy>;

  struct Arguments : Base::Arguments {
    TilePushArgs push{};
    TileReturnArgs results{};
  };
  struct Params : Base::Params {
    TilePushArgs push;
    TileReturnArgs results;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args,
                                        void* workspace) {
    return {Base::to_underlying_arguments(problem, args, workspace), args.push, args.results};
  }

  /// The warp's only work. It exits here: what the kernel would keep for its next tile takes
  /// registers. Every CTA with a tile comes here once, and each has one.
  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load_auxiliary(Params const& params, MainloopPipeline, PipelineState,
                                     cute::tuple<TensorA, TensorB> const&, BlockCoord const&,
                                     KTileIterator, int, int, uint32_t, TensorStorage&) {
    Return::copy_results(params.push, params.results, int32_t(blockIdx.y), int32_t(gridDim.y));
    asm volatile("exit;");
    __builtin_unreachable();
  }
};

}  // namespace agmm

namespace cutlass::gemm::kernel::detail {

template <class Base>
struct HasAuxiliaryLoad<agmm::LaggedPolicy<Base>> : cute::true_type {};

}  // namespace cutlass::gemm::kernel::detail
