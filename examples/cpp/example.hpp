// What both examples need: error checks, and a copy of A that arrives chunk by chunk.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace example {

inline void check(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T* device_memory(std::size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  check(cudaMemset(memory, 0, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}

/// Pinned: a copy from it is the copy engine's, which runs beside a kernel that fills the GPU. A
/// copy inside the GPU is a kernel, and would wait for that one's end.
template <class T>
T* pinned_memory(std::size_t count) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocDefault), "cudaHostAlloc");
  return static_cast<T*>(memory);
}

/// Enqueues, per chunk: its rows, then its signal. The driver's stream memory operation orders the
/// signal behind the rows for everyone who acquires it.
inline void send_chunks(void const* from, void* to, std::size_t chunk_bytes, int chunks,
                        uint32_t* signals, uint32_t ready_value, cudaStream_t stream) {
  using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function, 12000,
                                         cudaEnableDefault, &found),
        "cuStreamWriteValue32");
  auto const write_value = reinterpret_cast<WriteValue>(function);
  for (int i = 0; i < chunks; ++i) {
    std::size_t const offset = std::size_t(i) * chunk_bytes;
    check(cudaMemcpyAsync(static_cast<char*>(to) + offset, static_cast<char const*>(from) + offset,
                          chunk_bytes, cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    if (write_value(stream, reinterpret_cast<CUdeviceptr>(signals + i), ready_value,
                    CU_STREAM_WRITE_VALUE_DEFAULT) != CUDA_SUCCESS) {
      std::fprintf(stderr, "cuStreamWriteValue32 failed\n");
      std::exit(1);
    }
  }
}

/// Small whole numbers, of which sums are exact in every type here.
inline int element(int row, int column) { return (row * 7 + column * 3) % 5 - 2; }

}  // namespace example
