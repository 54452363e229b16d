// What the quantisation kernels share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/quantize.hpp"
#include "runtime/cuda.hpp"
#include "runtime/load_kernel.hpp"

namespace agmm::quantizing {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr double kLeastAmax = 1e-12;  // torchao's

/// The larger of two numbers; a NaN counts as the larger one, as in torch.
__device__ inline float max_or_nan(float a, float b) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
  return found;
}

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

/// An fp8 type: what values are cut at, and two of them from two floats.
template <QuantizedTo to>
struct Fp8 {
  static constexpr float kLargest = to == QuantizedTo::E4M3 ? 448.f : 57344.f;
  static constexpr auto kKind = to == QuantizedTo::E4M3 ? __NV_E4M3 : __NV_E5M2;

  __device__ static uint32_t pair(float a, float b) {
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kKind);
  }
};

/// What values are multiplied with before they are rounded. torch divides a number by a tensor as
/// the number times the reciprocal, each rounded to float64; this does so too, for equal bits.
template <QuantizedTo to>
__device__ float up_of(float amax, bool power_of_2) {
  double const from = static_cast<double>(amax);
  double const clamped = from < kLeastAmax ? kLeastAmax : from;  // a NaN stays
  auto up = static_cast<float>(__dmul_rn(__drcp_rn(clamped), double(Fp8<to>::kLargest)));
  if (power_of_2) up = exp2f(floorf(log2f(up)));
  return up;
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
