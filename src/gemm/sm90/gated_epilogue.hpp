// CUTLASS's epilogue behind a gate: the sums of a tile are those of two weights, of which half as
// many results come.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "gemm/sm90/activations.hpp"
#include "gemm/sm90/epilogue_policy.hpp"
#include "gemm/sm90/wgmma.hpp"

namespace agmm {

/// The visitor tree for results that are finished: it rounds them.
template <class Out>
struct RoundingTree {
  using type = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::epilogue::thread::Identity, Out, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      cutlass::epilogue::fusion::Sm90AccFetch>;
};

/// Base: CUTLASS's epilogue of a tile of out, OutTile; OutMma: an MMA as wide as that tile, with
/// the rows of the one that multiplies. The first half of each atom's sums are gate's. A sum of
/// gate and that of up for the same place of out are one thread's, so that nothing moves between
/// threads.
template <class Base, class Policy, class OutTile, class OutMma>
struct GatedEpilogue : Base {
  using typename Base::TensorStorage;
  using Out = typename Policy::Out;

  struct Arguments : Base::Arguments {
    typename Policy::Args gate{};
  };
  struct Params : Base::Params {
    typename Policy::Args gate;
    int32_t columns;  // of out
  };

  template <class Problem>
  static auto of_out(Problem problem) {
    cute::get<1>(problem) = cute::get<1>(problem) / Policy::kColumnsPerOut;
    return problem;
  }

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args,
                                        void* workspace) {
    return {Base::to_underlying_arguments(of_out(problem), args, workspace), args.gate,
            int32_t(cute::get<1>(of_out(problem)))};
  }

  template <class Problem>
  static bool can_implement(Problem const& problem, Arguments const& args) {
    return Base::can_implement(of_out(problem), args);
  }

  template <class Tile>
  CUTLASS_HOST_DEVICE static constexpr int get_load_pipe_increment(Tile) {
    return Base::get_load_pipe_increment(OutTile{});
  }
  template <class Tile>
  CUTLASS_HOST_DEVICE static constexpr int get_store_pipe_increment(Tile) {
    return Base::get_store_pipe_increment(OutTile{});
  }

  CUTLASS_DEVICE GatedEpilogue(Params const& params, TensorStorage& storage)
      : Base(params, storage), gated_(params) {}

  template <class Loads, class LoadState, class Stores, class StoreState, class Problem, class Tile,
            class Coordinates, class Engine, class Layout, class Mma>
  CUTLASS_DEVICE auto store(Loads loads, LoadState load_state, Stores stores,
                            StoreState store_state, Problem problem, Tile, Coordinates coordinates,
                            cute::Tensor<Engine, Layout>& sums, Mma, int thread,
                            TensorStorage& storage, int subtile = -1) {
    using namespace cute;
    constexpr int kAtoms = size<1>(Layout{});  // along M
    constexpr int kHalf = size<0>(Layout{}) / 2;
    static_assert(size<2>(Layout{}) == 1 && cosize(Layout{}) == 2 * kHalf * kAtoms,
                  "an atom has all columns of a tile, and atoms follow one another");
    auto results = partition_fragment_C(OutMma{}, take<0, 2>(OutTile{}));
    static_assert(size(results) == kHalf * kAtoms && cosize(results.layout()) == kHalf * kAtoms);
    int32_t const first_column = get<1>(coordinates) * size<1>(OutTile{}) + fragment_column(thread);
    add_bias<kAtoms, kHalf>(sums.data(), gated_.gate.bias, first_column);
    add_bias<kAtoms, kHalf>(sums.data() + kHalf, gated_.gate.bias_up, first_column);
    with_activation(gated_.gate.activation, [&](auto function) {
      CUTLASS_PRAGMA_UNROLL
      for (int atom = 0; atom < kAtoms; ++atom) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kHalf; ++i) {
          results.data()[i + kHalf * atom] =
              Policy::Math::finish(sums.data()[i + 2 * kHalf * atom],
                                   sums.data()[i + kHalf + 2 * kHalf * atom], function);
        }
      }
    });
    return Base::store(loads, load_state, stores, store_state, of_out_on_device(problem), OutTile{},
                       coordinates, results, OutMma{}, thread, storage, subtile);
  }

 private:
  template <class Problem>
  CUTLASS_DEVICE auto of_out_on_device(Problem problem) const {
    cute::get<1>(problem) = gated_.columns;
    return problem;
  }

  /// Adds the bias of a weight to its sums: four of them are two columns of two rows.
  template <int kAtoms, int kHalf, class Sums>
  CUTLASS_DEVICE void add_bias(Sums sums, Out const* bias, int32_t first_column) const {
    if (bias == nullptr) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kHalf; i += 4) {
      int32_t const column = first_column + 2 * i;
      if (column >= gated_.columns) continue;  // only pads the tile
      auto const two = *reinterpret_cast<cutlass::AlignedArray<Out, 2> const*>(bias + column);
      CUTLASS_PRAGMA_UNROLL
      for (int atom = 0; atom < kAtoms; ++atom) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) sums[i + j + 2 * kHalf * atom] += float(two[j % 2]);
      }
    }
  }

  Params const& gated_;
};

}  // namespace agmm
