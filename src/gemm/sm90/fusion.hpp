// What the epilogue makes of a sum: by the element types, the tree for CUTLASS's epilogue and what
// it is called with.
#pragma once

#include "agmm/async_input_mm.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "gemm/sm90/element_types.hpp"
#include "gemm/sm90/row_scales.hpp"

namespace agmm {

/// A null bias reads as 0. kSwapped: the columns of out are rows of the tile (KernelShape).
template <class Element, class TileShape, bool kSwapped>
using BiasNode =
    cute::conditional_t<kSwapped,
                        cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, Element, float>,
                        cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, Element, float>>;

/// out = sum + bias, added in float32.
template <class Element, class TileShape, bool kSwapped>
struct Fusion {
  using type = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, Element, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      BiasNode<Element, TileShape, kSwapped>, cutlass::epilogue::fusion::Sm90AccFetch>;

  static typename type::Arguments arguments(Operands const& operands) {
    return {{static_cast<Element const*>(operands.bias)}, {}, {}};
  }
};

inline RowScaleArgs row_scales(Operands const& operands) {
  Scales const& scales = operands.scales;
  return {scales.a,
          scales.a_per_row,
          {operands.local_begin, operands.local_end},
          scales.a_local,
          scales.a_out};
}

/// out = scale of the row * (scale of the column * sum) + bias, in float32.
template <class A, class B, class TileShape, bool kSwapped>
struct Fusion<Fp8<A, B>, TileShape, kSwapped> {
  using Out = typename TypesOf<Fp8<A, B>>::Out;
  /// The bool: a scale for each column, else one for all.
  using ColumnStride = cute::conditional_t<kSwapped, cute::Stride<bool, cute::_0, int64_t>,
                                           cute::Stride<cute::_0, bool, int64_t>>;
  using ColumnScales = cute::conditional_t<
      kSwapped,
      cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, float, float, ColumnStride>,
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, float, float, ColumnStride>>;
  using ScaledSum = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      ColumnScales, cutlass::epilogue::fusion::Sm90AccFetch>;
  using type = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Out, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      RowScales<kSwapped>, ScaledSum, BiasNode<Out, TileShape, kSwapped>>;

  static typename type::Arguments arguments(Operands const& operands) {
    Scales const& scales = operands.scales;
    ColumnStride of_columns{};
    cute::get<kSwapped ? 0 : 1>(of_columns) = scales.b_per_column;
    return {row_scales(operands),
            {{scales.b, 0, of_columns}, {}, {}},
            {static_cast<Out const*>(operands.bias)},
            {}};
  }
};

}  // namespace agmm
