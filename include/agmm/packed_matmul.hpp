// The matmul of few rows with a weight of 4 bits, on one GPU.
#pragma once

#include <cstdint>

namespace agmm {

/// out[m, n] = a[m, k] @ B (+ bias), of bfloat16. All pointers are device memory, aligned to 16
/// bytes.
struct PackedMatmul {
  int32_t m = 0;
  int32_t n = 0;       // a multiple of 8
  int32_t k = 0;       // a multiple of 8
  int32_t groups = 1;  // of 128 of K: 1, or 4 of 32
  int32_t splits = 1;  // of K
  int32_t sm_count = 0;
  void const* a = nullptr;     // row-major
  void const* b = nullptr;     // atoms of 64 columns by 128 of K (src/gemm/sm90/packed_weight.hpp)
  void const* bias = nullptr;  // [n] or null
  void* out = nullptr;         // row-major
};

/// Enqueues the product on a stream of the current device. Throws std::invalid_argument when it is
/// not legal, std::runtime_error when CUDA refuses.
void packed_matmul(PackedMatmul const& call, void* stream);

}  // namespace agmm
