// What a kernel of a shape can do: the one definition of these rules, for the kernels themselves,
// the launcher and, through the bindings, for plans, in builds without CUDA too.
#pragma once

#include "agmm/problem.hpp"

namespace agmm {

/// Whether it is a kernel for few rows, which computes any number of tiles with any splits of K.
constexpr bool is_streaming(KernelShape const& shape) {
  return shape.schedule == Schedule::Streaming;
}

/// Whether several CTAs can compute a tile together. The CTAs of a tile are neighbours only where
/// clusters are one tile wide in the MMA's columns, their sums are those of all consumers' threads
/// (cooperative), and tiles larger than 128 x 224 leave these no register to add up another's.
constexpr bool can_split(KernelShape const& shape) {
  if (is_streaming(shape)) return true;
  int const cluster_columns = shape.swapped ? shape.cluster_m : shape.cluster_n;
  return shape.schedule == Schedule::Cooperative && cluster_columns == 1 && !shape.timed &&
         shape.tile_m * shape.tile_n <= 128 * 224;
}

/// Whether the CTAs of a tile are a cluster that adds up in shared memory, and not neighbours that
/// add up in global memory.
constexpr bool splits_in_cluster(KernelShape const& shape) {
  if (is_streaming(shape)) return true;
  return can_split(shape) && shape.swapped && shape.cluster_m * shape.cluster_n == 1;
}

/// The largest cluster that every Hopper runs.
constexpr int kMaxClusterSplits = 8;

/// Whether A can be stored. A stage has to be refilled with A by this CTA alone, whose producer
/// knows when the store has read it; and tiles 192 and more wide, or larger than 128 x 256, of a
/// row-major B, whose load takes several TMA instructions, leave the producer warp no register for
/// it.
constexpr bool can_store_a(KernelShape const& shape, BLayout b_layout) {
  if (is_streaming(shape)) return false;
  bool const is_large = shape.tile_n >= 192 || shape.tile_m * shape.tile_n > 128 * 256;
  bool const is_one_box = !shape.swapped || shape.tile_k == 64;  // of TMA
  return shape.cluster_n == 1 && is_one_box && !(is_large && b_layout == BLayout::RowMajor);
}

/// Whether the kernel has spare warps that send this rank's shard (SM push).
constexpr bool can_push(KernelShape const& shape) { return !is_streaming(shape); }

/// The facts of a kernel that is built. A kernel with block scales, or with the sums of two
/// weights, cannot split K, but for streaming ones.
constexpr KernelFacts facts_of(KernelShape const& shape, DType dtype, BLayout b_layout,
                               Accumulation accumulation = Accumulation::Fast,
                               Epilogue epilogue = Epilogue::Bias) {
  return {shape,
          dtype,
          b_layout,
          can_split(shape) && (is_streaming(shape) ||
                               (!is_block_scaled(accumulation) && columns_per_out(epilogue) == 1)),
          can_store_a(shape, b_layout),
          kArchitecture,
          accumulation,
          Op::AllGatherMatmul,
          epilogue};
}

}  // namespace agmm
