// Kernels that are loaded before a call needs them: to load one later waits for the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/cuda.hpp"

namespace agmm {

/// Loads a kernel on the current device. Throws std::runtime_error where CUDA refuses.
template <class Kernel>
void load(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  AGMM_CHECK_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<void const*>(kernel)));
}

}  // namespace agmm
