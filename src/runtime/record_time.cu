#include <cuda_runtime_api.h>

#include <cstdint>

#include "agmm/async_input_mm.hpp"
#include "runtime/cuda.hpp"

namespace agmm {

namespace {

__global__ void record_time_kernel(uint64_t* ns) {
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(*ns));
}

}  // namespace

void record_time(uint64_t* ns, void* stream) {
  record_time_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(ns);
  AGMM_CHECK_CUDA(cudaGetLastError());
}

}  // namespace agmm
