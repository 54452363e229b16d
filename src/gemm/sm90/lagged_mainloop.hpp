// The mainloop of matmul + all-reduce: that of matmul + reduce-scatter, beside which the spare
// producer warp copies the finished tiles that the other ranks send.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "gemm/sm90/scatter_mainloop.hpp"
#include "transport/tile_push_return_device.hpp"

namespace agmm {

/// `Return`: a TileReturn.
template <class Base, class Return>
struct LaggedMainloop : Base {
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

  /// Each CTA's, also of one that comes too late for a tile.
  CUTLASS_DEVICE static void spare_work(Params const& params) {
    Return::copy_results(params.push, params.results, int32_t(blockIdx.y), int32_t(gridDim.y));
  }
};

}  // namespace agmm
