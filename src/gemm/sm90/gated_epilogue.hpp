// CUTLASS's epilogue behind a gate: the sums of a tile are those of two weights, of which half as
// many results come.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "gemm/fp8_scale.cuh"
#include "gemm/sm90/activations.hpp"
#include "gemm/sm90/column_pairs.hpp"
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
/// the rows of the one that multiplies. The first half of a row's sums are gate's: those of half an
/// atom, or of the first of two atoms side by side, as sums that are promoted lie. A sum of gate
/// and that of up for the same place of out are one thread's, so that nothing moves between
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
    constexpr int kSideBySide = size<2>(Layout{});
    static_assert(kSideBySide <= 2 && cosize(Layout{}) == size(Layout{}),
                  "an atom has all columns of a tile or of a weight, and atoms follow one another");
    using At = Places<size<0>(Layout{}) * kSideBySide / 2, kAtoms, kSideBySide>;
    constexpr int kHalf = At::kHalf;
    auto results = partition_fragment_C(OutMma{}, take<0, 2>(OutTile{}));
    static_assert(size(results) == kHalf * kAtoms && cosize(results.layout()) == kHalf * kAtoms);
    int32_t const first_column = get<1>(coordinates) * size<1>(OutTile{});
    if constexpr (Policy::kScaled) {
      float of_rows[2 * kAtoms];
      read_row_scales<kAtoms>(of_rows, get<0>(coordinates) * size<0>(OutTile{}), Mma{}, thread,
                              get<0>(problem), get<1>(coordinates) == 0);
      auto const of_gate = column_scales<At>(gated_.gate.column_scales, first_column, thread);
      auto const of_up = column_scales<At>(gated_.gate.column_scales_up, first_column, thread);
      scale<At>(sums.data(), of_rows, of_gate);
      scale<At>(sums.data() + At::kUp, of_rows, of_up);
    }
    add_bias<At>(sums.data(), gated_.gate.bias, first_column, thread);
    add_bias<At>(sums.data() + At::kUp, gated_.gate.bias_up, first_column, thread);
    with_activation(gated_.gate.activation, [&](auto function) {
      CUTLASS_PRAGMA_UNROLL
      for (int atom = 0; atom < kAtoms; ++atom) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kHalf; ++i) {
          results.data()[i + kHalf * atom] =
              Policy::Math::finish(sums.data()[i + At::kAtom * atom],
                                   sums.data()[i + At::kUp + At::kAtom * atom], function);
          if constexpr (kSideBySide == 2 || Policy::kQuantizes) {  // else values are spilled
            cute::warpgroup_fence_operand(results.data()[i + kHalf * atom]);
          }
        }
      }
    });
    if constexpr (Policy::kQuantizes) {
      static_assert(size<1>(OutTile{}) == kScaleBlock, "a tile has a row's scale block");
      quantize<At>(results.data(), get<0>(coordinates) * size<0>(OutTile{}), get<1>(coordinates),
                   Mma{}, thread, get<0>(problem));
    }
    return Base::store(loads, load_state, stores, store_state, of_out_on_device(problem), OutTile{},
                       coordinates, results, OutMma{}, thread, storage, subtile);
  }

 private:
  template <class Problem>
  CUTLASS_DEVICE auto of_out_on_device(Problem problem) const {
    cute::get<1>(problem) = gated_.columns;
    return problem;
  }

  /// Where a thread's sums lie: those of one weight and of one atom's rows are kHalf neighbours;
  /// kAtom further are those of the next atom along M, kUp further those of up.
  template <int kHalf_, int kAtoms_, int kSideBySide>
  struct Places {
    static constexpr int kHalf = kHalf_;
    static constexpr int kAtoms = kAtoms_;
    static constexpr int kAtom = kSideBySide == 2 ? kHalf : 2 * kHalf;
    static constexpr int kUp = kSideBySide == 2 ? kHalf * kAtoms : kHalf;
  };

  /// The row of the thread's r-th row, two in an atom.
  template <class Mma>
  CUTLASS_DEVICE static int32_t row_of(int32_t first_row, Mma, int thread, int r) {
    return first_row + fragment_row(thread) + kAtomRows * (cute::size(Mma{}) / 128) * (r / 2) +
           8 * (r % 2);
  }

  /// Rounds results to Out, as one that is not quantised is, and multiplies them with what e4m3
  /// wants: four threads have a row. What pads a tile is 0.
  template <class At, class Results, class Mma>
  CUTLASS_DEVICE void quantize(Results results, int32_t first_row, int32_t block, Mma, int thread,
                               int32_t rows) const {
    constexpr float kLargest = 448.0f;
    int32_t const blocks = (gated_.columns + kScaleBlock - 1) / kScaleBlock;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2 * At::kAtoms; ++r) {
      float amax = 0;
      auto const each = [&](auto const& f) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 2 * (r % 2); i < At::kHalf; i += 4) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 2; ++j) f(results[i + j + At::kHalf * (r / 2)]);
        }
      };
      each([&](float& result) {
        result = float(Out(result));
        amax = max_or_nan(amax, fabsf(result));
      });
      float const* const given = gated_.gate.given_out_scale;
      if (given != nullptr) {
        amax = __ldg(given) * kLargest;
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int lane = 1; lane < 4; lane *= 2) {
          amax = max_or_nan(amax, __shfl_xor_sync(0xffffffff, amax, lane));
        }
      }
      float const up = fp8_up_of(amax, kLargest);
      each([&](float& result) { result *= up; });
      int32_t const row = row_of(first_row, Mma{}, thread, r);
      if (thread % 4 != 0 || row >= rows) continue;
      if (given == nullptr) {
        gated_.gate.out_scales[int64_t(row) * blocks + block] = __frcp_rn(up);
      } else if (row == 0 && block == 0) {
        *gated_.gate.out_scales = __frcp_rn(up);
      }
    }
  }

  /// Reads the scales of the thread's rows, two in an atom, and writes them where all are wanted.
  /// The tile has been multiplied, so its rows of A have come, and the scales with them.
  template <int kAtoms, class Mma>
  CUTLASS_DEVICE void read_row_scales(float (&of_rows)[2 * kAtoms], int32_t first_row, Mma,
                                      int thread, int32_t rows, bool is_first_of_row) const {
    RowScaleArgs const& scales = gated_.gate.row_scales;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2 * kAtoms; ++r) {
      int32_t const row = row_of(first_row, Mma{}, thread, r);
      of_rows[r] = scales.of(row < rows ? row : rows - 1);
    }
    if (scales.out == nullptr || !is_first_of_row) return;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2 * kAtoms; ++r) {
      int32_t const row = row_of(first_row, Mma{}, thread, r);
      if (row < rows) scales.out[row] = of_rows[r];
    }
  }

  template <class At>
  using ScalePairs = ColumnPairs<float2, 2 * At::kHalf>;

  /// The scales of a weight's columns of a tile; 0 for those that only pad it.
  template <class At>
  CUTLASS_DEVICE ScalePairs<At> column_scales(ColumnScaleArgs const& scales, int32_t first_column,
                                              int thread) const {
    return ScalePairs<At>(thread, [&](int column) {
      int32_t const of = scales.is_per_column ? last_pair_or(first_column + column) : 0;
      float2 const pair{__ldg(scales.scales + of),
                        __ldg(scales.scales + of + int32_t(scales.is_per_column))};
      return first_column + column < gated_.columns ? pair : float2{};
    });
  }

  /// Scales the sums of a weight, as EpiloguePolicy::scale_whole() does: four of them are two
  /// columns of two rows.
  template <class At, class Sums>
  CUTLASS_DEVICE void scale(Sums sums, float const (&of_rows)[2 * At::kAtoms],
                            ScalePairs<At> const& of_columns) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < At::kHalf; i += 4) {
      float2 const pair = of_columns.of(i / 4);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2 * At::kAtoms; ++r) {
        float* const two = &sums[i + 2 * (r % 2) + At::kAtom * (r / 2)];
        two[0] = Policy::scale_whole(two[0], of_rows[r], pair.x);
        two[1] = Policy::scale_whole(two[1], of_rows[r], pair.y);
      }
    }
  }

  /// Adds the bias of a weight to its sums, and 0 to those that only pad the tile.
  template <class At, class Sums>
  CUTLASS_DEVICE void add_bias(Sums sums, Out const* bias, int32_t first_column, int thread) const {
    if (bias == nullptr) return;
    using Pair = cutlass::AlignedArray<Out, 2>;
    ColumnPairs<Pair, 2 * At::kHalf> const of_columns(thread, [&](int column) {
      auto const pair = *reinterpret_cast<Pair const*>(bias + last_pair_or(first_column + column));
      return first_column + column < gated_.columns ? pair : Pair{};
    });
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < At::kHalf; i += 4) {
      Pair const two = of_columns.of(i / 4);
      CUTLASS_PRAGMA_UNROLL
      for (int atom = 0; atom < At::kAtoms; ++atom) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) sums[i + j + At::kAtom * atom] += float(two[j % 2]);
      }
    }
  }

  /// The column, or the first of the last two, so that none is read behind them.
  CUTLASS_DEVICE int32_t last_pair_or(int32_t column) const {
    return column < gated_.columns ? column : gated_.columns - 2;
  }

  Params const& gated_;
};

}  // namespace agmm
