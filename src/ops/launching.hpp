// What the launchers share: kernel parameters of the launches seen lately, and kernels that are
// loaded once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "gemm/kernel_entry.hpp"
#include "gemm/kernel_facts.hpp"
#include "ops/fields.hpp"
#include "ops/refuse.hpp"
#include "order/chunking.hpp"
#include "runtime/cuda.hpp"

namespace agmm {

using KernelParams = std::shared_ptr<void>;

inline KernelParams allocate_params(std::size_t bytes) {
  auto const free = [](void* p) { ::operator delete(p, std::align_val_t(kParamsAlignment)); };
  return {::operator new(bytes, std::align_val_t(kParamsAlignment)), free};
}

/// Kernel parameters, cached by what is launched: TMA descriptors cost microseconds to build, and a
/// training or serving loop calls with the same pointers again.
template <class Spec>
class KeptParams {
 public:
  template <class Build>
  KernelParams find_or_build(Spec const& spec, Build const& build) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const found = params_.find(spec);
    if (found != params_.end()) return found->second;
    if (params_.size() >= kCapacity) params_.clear();
    return params_.emplace(spec, build()).first->second;
  }

 private:
  struct Hash {
    std::size_t operator()(Spec const& spec) const { return hash_of_fields(spec); }
  };
  struct IsSame {
    bool operator()(Spec const& a, Spec const& b) const { return same_fields(a, b); }
  };

  // There is room for as many launches, of a few KB each, as the layers of a large model make for
  // some numbers of rows. One launch more empties the cache.
  static constexpr std::size_t kCapacity = 4096;
  std::mutex mutex_;
  std::unordered_map<Spec, KernelParams, Hash, IsSame> params_;
};

/// The bytes of scratch memory that calls of a kernel need to split K on the current device: a
/// counter for each tile, then the partial sums of one wave. 0 where the kernel cannot split K, or
/// the CTAs of a tile are a cluster.
inline std::size_t split_scratch_bytes(KernelFacts const& facts) {
  KernelShape const& shape = facts.shape;
  if (!facts.can_split || splits_in_cluster(shape)) return 0;
  std::size_t const tile_floats = std::size_t(shape.tile_m) * std::size_t(shape.tile_n);
  int const sm_count = current_device().sm_count;
  static_assert(kSplitCounterBytes % 16 == 0, "partial sums are loaded 16 bytes at a time");
  if (sm_count > int(kSplitCounterBytes / sizeof(uint32_t))) {
    throw std::runtime_error("agmm: found a device of " + std::to_string(sm_count) +
                             " multiprocessors, wanted at most one per counter of a split");
  }
  return kSplitCounterBytes + std::size_t(sm_count) * tile_floats * sizeof(float);
}

/// The bytes of scratch memory that are enough for each of these kernels.
template <class Entry>
std::size_t split_scratch_bytes(std::vector<Entry const*> const& kernels) {
  std::size_t bytes = 0;
  for (Entry const* const kernel : kernels) {
    bytes = std::max(bytes, split_scratch_bytes(kernel->facts));
  }
  return bytes;
}

/// The scratch memory of a workspace for calls that split K. A kernel that is added after the
/// workspace is made may need more.
struct SplitScratch {
  std::size_t bytes = 0;
  std::shared_ptr<void> memory;  // for one call at a time; null for 0 bytes

  void check(KernelFacts const& facts, int32_t splits) const {
    std::size_t const needed = splits == 1 ? 0 : split_scratch_bytes(facts);
    if (needed > bytes) {
      refuse("config",
             std::to_string(splits) + " splits of " + facts.shape.str() + ", which take " +
                 std::to_string(needed) + " bytes",
             "at most the " + std::to_string(bytes) +
                 " that the kernels take which the workspace was made for");
    }
  }
};

/// Allocates scratch memory, with its counters 0. It does not come from a pool of the caller's
/// allocator, since the pool may belong to a graph.
inline SplitScratch allocate_split_scratch(std::size_t bytes) {
  if (bytes == 0) return {};
  RelaxedCapture const relaxed;
  void* scratch = nullptr;
  AGMM_CHECK_CUDA(cudaMalloc(&scratch, bytes));
  std::shared_ptr<void> held(scratch, [](void* memory) {
    RelaxedCapture const relaxed;
    cudaFree(memory);
    cudaGetLastError();
  });
  std::vector<char> const zeros(kSplitCounterBytes);
  AGMM_CHECK_CUDA(cudaMemcpy(scratch, zeros.data(), zeros.size(), cudaMemcpyHostToDevice));
  return {bytes, std::move(held)};
}

/// Loads a kernel on the device and opts in to its shared memory, once.
template <class Entry>
void make_ready(Entry const& kernel, DeviceFacts const& device) {
  static std::mutex mutex;
  static std::set<std::pair<Entry const*, int>> ready;
  std::lock_guard<std::mutex> const lock(mutex);
  if (ready.count({&kernel, device.index}) != 0) return;
  check_cuda(static_cast<cudaError_t>(kernel.setup()), "cudaFuncSetAttribute");
  ready.insert({&kernel, device.index});
}

template <class T>
void require_multiple(char const* argument, char const* name, T value,
                      int32_t multiple = kAlignment) {
  if (value % multiple != 0) {
    refuse(argument, std::string(name) + "=" + std::to_string(value),
           "a multiple of " + std::to_string(multiple) + " (16-byte TMA alignment)");
  }
}

/// The kernels count the scales of A's blocks in 32 bits.
inline void require_countable_scales(int64_t rows, int32_t k) {
  int64_t const scales = rows * ceil_div(k, kScaleBlock);
  if (scales > INT32_MAX) {
    refuse("scale_a", std::to_string(scales) + " scales", "at most " + std::to_string(INT32_MAX));
  }
}

inline void require_aligned(char const* argument, void const* pointer) {
  if (pointer == nullptr) refuse(argument, "null", "device memory");
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
    refuse(argument, "an address that is no multiple of 16 bytes", "one that is (TMA alignment)");
  }
}

}  // namespace agmm
