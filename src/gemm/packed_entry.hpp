// The kernels for weights of 4 bits (gemm/sm90/packed_weight.hpp), which are in no table: a call
// has one by its number of rows and its groups alone.
#pragma once

#include <array>

#include "gemm/kernel_entry.hpp"

namespace agmm {

/// Tiles of 32 and of 64 rows, for one group and for four of 128 of K.
extern std::array<KernelEntry, 4> const kPackedKernels;

}  // namespace agmm
