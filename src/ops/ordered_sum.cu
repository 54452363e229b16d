#include "ops/ordered_sum.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>

#include "ops/refuse.hpp"
#include "runtime/cuda.hpp"
#include "runtime/load_kernel.hpp"

namespace agmm {

namespace {

constexpr int kThreads = 256;
/// What a thread reads of a matrix at once.
constexpr int kVectorBytes = 16;

template <class T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Pack {
  T values[kSize];
};

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ float widened(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float widened(__half value) { return __half2float(value); }
__device__ float widened(float value) { return value; }
__device__ double widened(double value) { return value; }

template <class Out, class In>
__device__ Out rounded(In value) {
  if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else if constexpr (std::is_same_v<Out, __half>) {
    return __float2half_rn(value);
  } else {
    return value;
  }
}

template <class T, int kSize>
__device__ Pack<T, kSize> loaded(void const* matrix, int64_t at) {
  return *reinterpret_cast<Pack<T, kSize> const*>(static_cast<T const*>(matrix) + at);
}

/// Each thread adds up as many elements as it reads at once. The additions are not reordered: the
/// compiler has no leave to, and contracts none of them with the division.
template <class T, class Out, int kSize>
__global__ void __launch_bounds__(kThreads) sum_in_order(OrderedSum const args) {
  int64_t const elements = args.rows * args.columns;
  int64_t const step = int64_t(gridDim.x) * kThreads * kSize;
  for (int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kSize; at < elements;
       at += step) {
    auto const* matrix = static_cast<char const*>(args.partials);
    Pack<T, kSize> const first = loaded<T, kSize>(matrix, at);
    Wide<T> total[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) total[i] = widened(first.values[i]);
#pragma unroll 4
    for (int rank = 1; rank < args.count; ++rank) {
      matrix += args.stride;
      Pack<T, kSize> const next = loaded<T, kSize>(matrix, at);
#pragma unroll
      for (int i = 0; i < kSize; ++i) total[i] += widened(next.values[i]);
    }
    if (args.divisor != 1) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) total[i] /= static_cast<Wide<T>>(args.divisor);
    }
    if (args.bias != nullptr) {
      Pack<T, kSize> const bias = loaded<T, kSize>(args.bias, at % args.columns);
#pragma unroll
      for (int i = 0; i < kSize; ++i) total[i] += widened(bias.values[i]);
    }
    if (args.residual != nullptr) {
      Pack<T, kSize> const residual = loaded<T, kSize>(args.residual, at);
#pragma unroll
      for (int i = 0; i < kSize; ++i) total[i] += widened(residual.values[i]);
    }
    Pack<Out, kSize> result;
#pragma unroll
    for (int i = 0; i < kSize; ++i) result.values[i] = rounded<Out>(total[i]);
    *reinterpret_cast<Pack<Out, kSize>*>(static_cast<Out*>(args.out) + at) = result;
  }
}

/// Calls `what` with the type of the elements, as a value of it.
template <class What>
void with_element(SummedElement element, What what) {
  switch (element) {
    case SummedElement::BFloat16:
      return what(__nv_bfloat16{});
    case SummedElement::Float16:
      return what(__half{});
    case SummedElement::Float32:
      return what(float{});
    default:
      return what(double{});
  }
}

bool is_aligned(void const* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

/// Whether threads may read 16 bytes at once, of one row each where there is a bias.
bool by_vectors(OrderedSum const& args, int64_t size) {
  int64_t const columns = args.bias == nullptr ? args.rows * args.columns : args.columns;
  return columns % size == 0 && args.stride % kVectorBytes == 0 && is_aligned(args.partials) &&
         is_aligned(args.bias) && is_aligned(args.residual) && is_aligned(args.out);
}

template <class T, class Out>
void launch(OrderedSum const& args, cudaStream_t stream) {
  constexpr int kSize = kVectorBytes / sizeof(T);
  bool const is_fast = by_vectors(args, kSize);
  int64_t const share = int64_t(kThreads) * (is_fast ? kSize : 1);
  // A launch has at most as many CTAs as run at once.
  constexpr int64_t kCtasPerSm = 8;
  int64_t const most = current_device().sm_count * kCtasPerSm;
  int64_t const ctas = std::min((args.rows * args.columns + share - 1) / share, most);
  auto* const kernel = is_fast ? sum_in_order<T, Out, kSize> : sum_in_order<T, Out, 1>;
  kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args);
  AGMM_CHECK_CUDA(cudaGetLastError());
}

template <class T, class Out>
void load_from() {
  load(sum_in_order<T, Out, kVectorBytes / sizeof(T)>);
  load(sum_in_order<T, Out, 1>);
}

void check(OrderedSum const& args) {
  if (args.count < 1 || args.rows < 1 || args.columns < 1 || args.divisor < 1) {
    refuse("partials",
           std::to_string(args.count) + " matrices of " + std::to_string(args.rows) + " rows of " +
               std::to_string(args.columns) + ", divided by " + std::to_string(args.divisor),
           "at least 1 of each");
  }
  if (args.partials == nullptr || args.out == nullptr) {
    refuse("partials, out", "null", "device memory");
  }
  small_kernels_device();  // or a message that says why there are none
}

}  // namespace

void load_ordered_sums() {
  static std::mutex mutex;
  static std::set<int> loaded;  // devices
  std::lock_guard<std::mutex> const lock(mutex);
  int const device = small_kernels_device().index;
  if (loaded.count(device) != 0) return;
  for (SummedElement const element : {SummedElement::BFloat16, SummedElement::Float16,
                                      SummedElement::Float32, SummedElement::Float64}) {
    with_element(element, [](auto of) {
      using T = decltype(of);
      load_from<T, T>();
      load_from<T, Wide<T>>();
    });
  }
  loaded.insert(device);
}

void ordered_sum(OrderedSum const& args, void* stream) {
  check(args);
  with_element(args.element, [&](auto of) {
    using T = decltype(of);
    auto const on = static_cast<cudaStream_t>(stream);
    if (args.is_wide) {
      launch<T, Wide<T>>(args, on);
    } else {
      launch<T, T>(args, on);
    }
  });
}

}  // namespace agmm
