// What the quantisation kernels share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/fp8_scale.cuh"
#include "ops/quantize.hpp"
#include "runtime/cuda.hpp"
#include "runtime/load_kernel.hpp"

namespace agmm::quantizing {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

template <class In>
struct Vector {
  static constexpr int kSize = 16 / sizeof(In);
  uint4 bits;

  __device__ float operator[](int i) const {
    return static_cast<float>(reinterpret_cast<In const*>(&bits)[i]);
  }
  __device__ float amax() const {
    float found = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) found = max_or_nan(found, fabsf((*this)[i]));
    return found;
  }
};

template <int kLanes>
__device__ float max_of_lanes(float value) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = max_or_nan(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

/// The maximum over all threads of the CTA, in each of them. `room` has a word for each warp.
template <int kThreadsOfCta>
__device__ float max_of_cta(float value, float* room) {
  constexpr int kWarps = kThreadsOfCta / kWarp;
  value = max_of_lanes<kWarp>(value);
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = max_of_lanes<kWarps>(room[threadIdx.x % kWarps]);
  __syncthreads();  // before the room is used again
  return value;
}

/// An fp8 type: what values are cut at, and two of them from two floats.
template <QuantizedTo to>
struct Fp8 {
  static constexpr float kLargest = to == QuantizedTo::E4M3 ? 448.f : 57344.f;
  static constexpr auto kKind = to == QuantizedTo::E4M3 ? __NV_E4M3 : __NV_E5M2;

  __device__ static uint32_t pair(float a, float b) {
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kKind);
  }
};

/// What values are multiplied with before they are rounded.
template <QuantizedTo to>
__device__ float up_of(float amax, bool power_of_2) {
  return fp8_up_of(amax, Fp8<to>::kLargest, power_of_2);
}

template <QuantizedTo to, class In>
__device__ void store(Vector<In> const& x, float up, uint8_t* at) {
  constexpr int kWords = Vector<In>::kSize / 4;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = Fp8<to>::pair(x[4 * i] * up, x[4 * i + 1] * up) |
               Fp8<to>::pair(x[4 * i + 2] * up, x[4 * i + 3] * up) << 16;
  }
  if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint32_t*>(at) = words[0];
  }
}

/// Calls `f` with a value of the type of x.
template <class F>
void with_type(QuantizedFrom from, F const& f) {
  switch (from) {
    case QuantizedFrom::BFloat16:
      return f(__nv_bfloat16{});
    case QuantizedFrom::Float16:
      return f(__half{});
    case QuantizedFrom::Float32:
      return f(float{});
  }
}

/// Throws std::invalid_argument for what does not fit.
void check(Quantize const& args);

/// Does what quantize() does with ScaleOf::Column, for checked arguments.
void quantize_columns(Quantize const& args, cudaStream_t stream);
void find_amax_of_columns(Quantize const& args, cudaStream_t stream);
/// Loads the kernels of both, and of transpose_bytes().
void load_columns();

}  // namespace agmm::quantizing
