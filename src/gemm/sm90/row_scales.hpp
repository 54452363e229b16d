// The scales of A's rows for CUTLASS's epilogue: a node of its visitor trees, as Sm90ColBroadcast
// is, but one scale may be that of all rows, and scales are read as late as A.
#pragma once

#include <cstddef>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "order/chunking.hpp"

namespace agmm {

struct RowScaleArgs {
  float const* scales = nullptr;
  bool is_per_row = false;  // else one for all rows
  Range local_rows{};       // whose scales are at `local`
  float const* local = nullptr;
  float* out = nullptr;  // where those of all rows are written, or null

  /// The scale of a row that has come. It is read from L2: L1 may hold a line from before.
  CUTLASS_DEVICE float of(int32_t row) const {
    bool const is_local = local_rows.begin <= row && row < local_rows.end;
    return __ldcg(is_local ? local + (row - local_rows.begin) : scales + (is_per_row ? row : 0));
  }
};

/// kSwapped: rows of A are columns of the tile (KernelShape).
template <bool kSwapped>
struct RowScales {
  struct SharedStorage {};
  using Arguments = RowScaleArgs;
  using Params = Arguments;
  static constexpr int kRows = kSwapped ? 1 : 0;  // the mode of a tile that has A's
  static constexpr int kColumns = 1 - kRows;

  RowScales() = default;
  CUTLASS_HOST_DEVICE RowScales(Params const& params, SharedStorage const&) : params(params) {}

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args,
                                                  void*) {
    return args;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape>
  static std::size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*,
                                              cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_zero() const { return false; }

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(
      cutlass::epilogue::fusion::ProducerLoadArgs<Args...> const&) {
    return cutlass::epilogue::fusion::EmptyProducerLoadCallbacks{};
  }

  /// `scales` are of all elements of the thread, in memory once for each of its rows; `rows` are
  /// those of the scales, from the thread's first on.
  template <class Scales, class Rows>
  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE Callbacks(Scales const& scales, Rows const& rows, int first_row, int rows_left,
                             bool writes, Params const& params)
        : scales(scales),
          rows(rows),
          first_row(first_row),
          rows_left(rows_left),
          writes(writes),
          params(params) {}

    /// The tile has been multiplied, so its rows of A have come, and the scales with them.
    CUTLASS_DEVICE void begin() {
      auto held = cute::filter_zeros(scales);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(held); ++i) {
        int const place = cute::get<kRows>(rows(i));
        held(i) = place < rows_left ? params.of(first_row + place) : 0.0f;
      }
      if (!writes) return;
      // The stores do not stand between the loads, each of which a store would await.
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(held); ++i) {
        int const place = cute::get<kRows>(rows(i));
        if (place < rows_left) params.out[first_row + place] = held(i);
      }
    }

    template <class Sum, int kSize>
    CUTLASS_DEVICE cutlass::Array<float, kSize> visit(cutlass::Array<Sum, kSize> const&, int epi_v,
                                                      int epi_m, int epi_n) {
      cutlass::Array<float, kSize> found;
      auto const of_subtile = scales(cute::_, cute::_, cute::_, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) found[i] = of_subtile(epi_v * kSize + i);
      return found;
    }

    Scales scales;
    Rows rows;
    int first_row;
    int rows_left;
    bool writes;
    Params const& params;
  };

  template <bool kReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    auto const m = get<0>(args.problem_shape_mnkl);
    auto const n = get<1>(args.problem_shape_mnkl);
    // Where the scales would be if they were a matrix [m, n] of equal columns, or rows if swapped.
    using Stride = conditional_t<kSwapped, cute::Stride<_0, _1, _0>, cute::Stride<_1, _0, _0>>;
    Tensor all =
        make_tensor(make_gmem_ptr(params.scales), make_layout(make_shape(m, n, _1{}), Stride{}));
    Tensor of_thread = cutlass::epilogue::fusion::sm90_partition_for_epilogue<kReferenceSrc>(
        all, args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile, args.tiled_copy,
        args.thread_idx);  // (CPY,CPY_M,CPY_N,EPI_M,EPI_N)
    Tensor scales = make_tensor_like<float>(of_thread);
    Tensor rows = filter_zeros(args.tCcD, of_thread.stride());
    int const rows_left = get<kRows>(args.residue_tCcD);
    return Callbacks<decltype(scales), decltype(rows)>(
        scales, rows, get<kRows>(args.problem_shape_mnkl) - rows_left, rows_left,
        params.out != nullptr && get<kColumns>(args.tile_coord_mnkl) == 0, params);
  }

  Params params;
};

}  // namespace agmm
