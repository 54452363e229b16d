// What becomes of a sum of products: the arithmetic of an epilogue, its operands, and the forms in
// which kernels call it. A new epilogue is written here, and nowhere else in the kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "agmm/async_input_mm.hpp"
#include "cute/tensor.hpp"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "gemm/sm90/activations.hpp"
#include "gemm/sm90/row_scales.hpp"
#include "order/chunking.hpp"

namespace agmm {

/// Sums of neighbouring columns of one row, or what goes with them.
template <int kSize>
using Floats = cutlass::Array<float, kSize>;

struct ColumnScaleArgs {
  float const* scales = nullptr;
  bool is_per_column = false;  // else one for all columns
};

/// The arithmetic of an epilogue, in float32, without scales: what tells one from another.
/// finish() makes a row's columns of `out` of as many sums that are whole and scaled, where one
/// column of B becomes one of out. kKeepsSums: without a bias it changes nothing. kNoBias is added
/// where CUTLASS's epilogue finds no bias. Own: what it reads beside the bias.
template <Epilogue kEpilogue>
struct EpilogueMath;

template <>
struct EpilogueMath<Epilogue::Bias> {
  static constexpr bool kKeepsSums = true;
  static constexpr float kNoBias = 0.0f;
  struct Own {};

  template <int kSize>
  CUTLASS_DEVICE static Floats<kSize> finish(Floats<kSize> const& sums, Floats<kSize> const& bias,
                                             Own const& = {}) {
    Floats<kSize> out;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) out[i] = sums[i] + bias[i];
    return out;
  }
};

template <>
struct EpilogueMath<Epilogue::Activation> {
  static constexpr bool kKeepsSums = false;
  static constexpr float kNoBias = -0.0f;  // which keeps the sign of a sum of 0
  struct Own {
    Activation activation = Activation::Relu;
  };

  template <int kSize>
  CUTLASS_DEVICE static Floats<kSize> finish(Floats<kSize> const& sums, Floats<kSize> const& bias,
                                             Own const& own) {
    Floats<kSize> out;
    with_activation(own.activation, [&](auto function) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) {
        out[i] = activated<decltype(function)::value>(sums[i] + bias[i]);
      }
    });
    return out;
  }
};

/// Its sums of gate and up are halves of a tile, which GatedEpilogue holds together; the biases are
/// in them.
template <>
struct EpilogueMath<Epilogue::Gate> {
  template <class Out>
  struct Of {
    Activation activation = Activation::Relu;
    Out const* bias_up = nullptr;  // [columns of out] or null
    ColumnScaleArgs column_scales_up{};
  };

  template <class Function>
  CUTLASS_DEVICE static float finish(float gate, float up, Function) {
    return activated<Function::value>(gate) * up;
  }
};

/// Quantises what Gate makes.
template <>
struct EpilogueMath<Epilogue::GateFp8> : EpilogueMath<Epilogue::Gate> {
  template <class Out>
  struct Of : EpilogueMath<Epilogue::Gate>::Of<Out> {
    float* out_scales = nullptr;             // [rows, blocks of columns], or [1]
    float const* given_out_scale = nullptr;  // of all values, or null
  };
};

/// What an epilogue reads of its own, by the type of the result.
template <Epilogue kEpilogue, class Out>
struct OwnArgsOf {
  using type = typename EpilogueMath<kEpilogue>::Own;
};
template <class Out>
struct OwnArgsOf<Epilogue::Gate, Out> {
  using type = typename EpilogueMath<Epilogue::Gate>::template Of<Out>;
};
template <class Out>
struct OwnArgsOf<Epilogue::GateFp8, Out> {
  using type = typename EpilogueMath<Epilogue::GateFp8>::template Of<Out>;
};

/// All that an epilogue reads beside the sums.
template <Epilogue kEpilogue, class Out>
struct EpilogueArgs : OwnArgsOf<kEpilogue, Out>::type {
  Out const* bias = nullptr;  // [columns of B], those of gate alone where there are two; or null
  RowScaleArgs row_scales{};
  ColumnScaleArgs column_scales{};
};

/// Makes the arguments of every kernel's epilogue, but for what an epilogue reads of its own.
template <Epilogue kEpilogue, class Out>
EpilogueArgs<kEpilogue, Out> epilogue_args(void const* bias, Scales const& scales,
                                           Range const& local_rows) {
  EpilogueArgs<kEpilogue, Out> args;
  args.bias = static_cast<Out const*>(bias);
  args.row_scales = {scales.a, scales.a_per_row, local_rows, scales.a_local, scales.a_out};
  args.column_scales = {scales.b, scales.b_per_column};
  return args;
}

/// What becomes of the sums of a kernel. kScaled: they are scaled first, as sums of fp8 products
/// are whose scales are not those of blocks. The order of the multiplications is a part of the
/// result: scale_whole() has that of a sum that is finished at once, scale_part() that of a sum
/// that other ranks' are added to.
template <Epilogue kEpilogue, class Out_, bool kScaled_>
struct EpiloguePolicy {
  using Out = Out_;
  using Args = EpilogueArgs<kEpilogue, Out>;
  using Math = EpilogueMath<kEpilogue>;
  static constexpr bool kScaled = kScaled_;
  static constexpr bool kQuantizes = quantizes(kEpilogue);
  /// The type of what is stored.
  using Stored = cute::conditional_t<kQuantizes, cutlass::float_e4m3_t, Out>;
  static constexpr int kColumnsPerOut = columns_per_out(kEpilogue);
  static constexpr bool kHasOwn = !std::is_empty_v<typename OwnArgsOf<kEpilogue, Out>::type>;

  CUTLASS_DEVICE static float scale_whole(float sum, float of_row, float of_column) {
    return of_row * (of_column * sum);
  }
  CUTLASS_DEVICE static float scale_part(float sum, float of_row, float of_column) {
    return sum * (of_row * of_column);
  }

  /// What is the same for all columns of a row of `out`.
  struct Row {
    float scale = 1;
  };
  /// The tile has been multiplied, so its rows of A have come, and their scales with them.
  CUTLASS_DEVICE static Row row(Args const& args, int32_t row) {
    if constexpr (kScaled) return {args.row_scales.of(row)};
    return {};
  }

  /// Returns the columns of `out` that come of kSize whole sums, from `column` of B on, a multiple
  /// of kSize. Without a bias 0 is added.
  template <int kSize>
  CUTLASS_DEVICE static auto apply(Args const& args, Row const& row, int32_t column,
                                   Floats<kSize> sums) {
    cutlass::AlignedArray<Out, kSize> of_columns{};
    if (args.bias != nullptr) {
      of_columns = *reinterpret_cast<cutlass::AlignedArray<Out, kSize> const*>(args.bias + column);
    }
    Floats<kSize> bias;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) {
      if constexpr (kScaled) {
        ColumnScaleArgs const& scales = args.column_scales;
        float const of_column = scales.scales[scales.is_per_column ? column + i : 0];
        sums[i] = scale_whole(sums[i], row.scale, of_column);
      }
      bias[i] = float(of_columns[i]);
    }
    Floats<kSize> const finished = Math::finish(sums, bias, args);
    cutlass::AlignedArray<Out, kSize> out;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) out[i] = Out(finished[i]);
    return out;
  }

  /// OfLoaded does what apply() does, of operands that CUTLASS's nodes have loaded.
  template <class Values>
  struct OfLoaded {
    CUTLASS_DEVICE Values operator()(Values const& sums, Values const& bias) const {
      return Math::finish(sums, bias);
    }
    CUTLASS_DEVICE Values operator()(Values const& of_rows, Values const& of_columns,
                                     Values const& sums, Values const& bias) const {
      Values scaled;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Values::kElements; ++i) {
        scaled[i] = scale_whole(sums[i], of_rows[i], of_columns[i]);
      }
      return Math::finish(scaled, bias);
    }
  };

  /// OfLoaded for an epilogue that has arguments of its own, which CUTLASS hands over by this name.
  template <class Values>
  struct OfLoadedAndOwn {
    using Arguments = typename OwnArgsOf<kEpilogue, Out>::type;
    CUTLASS_DEVICE Values operator()(Values const& sums, Values const& bias,
                                     Arguments const& own) const {
      return Math::finish(sums, bias, own);
    }
    CUTLASS_DEVICE Values operator()(Values const& of_rows, Values const& of_columns,
                                     Values const& sums, Values const& bias,
                                     Arguments const& own) const {
      Values scaled;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Values::kElements; ++i) {
        scaled[i] = scale_whole(sums[i], of_rows[i], of_columns[i]);
      }
      return Math::finish(scaled, bias, own);
    }
  };

  /// The visitor tree for CUTLASS's epilogue: nodes that load the operands below one that calls
  /// OfLoaded. kSwapped: the columns of `out` are rows of the tile (KernelShape).
  template <class TileShape, bool kSwapped>
  struct Tree {
    static_assert(kColumnsPerOut == 1, "CUTLASS's epilogue stores as many columns as it has sums");
    // The bool: a scale for each column, else one for all.
    using ColumnStride = cute::conditional_t<kSwapped, cute::Stride<bool, cute::_0, int64_t>,
                                             cute::Stride<cute::_0, bool, int64_t>>;
    template <class Element, class... Stride>
    using OfColumns = cute::conditional_t<
        kSwapped,
        cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, Element, float, Stride...>,
        cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, Element, float, Stride...>>;
    template <template <class> class Function>
    using Computed =
        cutlass::epilogue::fusion::Sm90Compute<Function, Out, float,
                                               cutlass::FloatRoundStyle::round_to_nearest>;
    using Root = cute::conditional_t<kHasOwn, Computed<OfLoadedAndOwn>, Computed<OfLoaded>>;
    using Sums = cutlass::epilogue::fusion::Sm90AccFetch;
    using type = cute::conditional_t<
        kScaled,
        cutlass::epilogue::fusion::Sm90EVT<Root, RowScales<kSwapped>,
                                           OfColumns<float, ColumnStride>, Sums, OfColumns<Out>>,
        cutlass::epilogue::fusion::Sm90EVT<Root, Sums, OfColumns<Out>>>;

    /// `no_bias` is added where there is no bias.
    static typename type::Arguments arguments(Args const& args, Out no_bias = Out(Math::kNoBias)) {
      typename Root::Arguments own{};
      if constexpr (kHasOwn) own = args;
      if constexpr (kScaled) {
        ColumnStride of_columns{};
        cute::get<kSwapped ? 0 : 1>(of_columns) = args.column_scales.is_per_column;
        return {args.row_scales,
                {args.column_scales.scales, 0, of_columns},
                {},
                {args.bias, no_bias},
                own};
      } else {
        return {{}, {args.bias, no_bias}, own};
      }
    }
  };
};

}  // namespace agmm
