// What a generated translation unit of matmul + reduce-scatter exports: no CUTLASS types.
#pragma once

#include <cstddef>

#include "gemm/kernel_entry.hpp"

namespace agmm {

struct ScatterSpec;

struct ScatterEntry {
  KernelFacts facts;
  std::size_t params_bytes;
  /// The bytes in which a tile travels.
  std::size_t tile_bytes;
  /// These functions do what those of KernelVariant do, for a ScatterSpec.
  char const* (*prepare)(ScatterSpec const& call, void* params);
  int (*setup)();
  int (*launch)(void* params, void* stream);
};

/// The kernels of this build for matmul + reduce-scatter. CMake generates both tables.
extern ScatterEntry const* const kScatterTable[];
extern std::size_t const kScatterCount;
/// The kernels for matmul + all-reduce, which send finished tiles too.
extern ScatterEntry const* const kLaggedTable[];
extern std::size_t const kLaggedCount;

}  // namespace agmm
