// The stream that a call comes on, which may be in a capture.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "symmetric/slot_ring.hpp"

namespace agmm {

struct CallStream {
  cudaStream_t stream = nullptr;
  SlotRing::Capture capture = 0;  // 0: none
  // Eager calls are told apart by it, since another stream may get the handle of one that was
  // destroyed.
  unsigned long long id = 0;

  CallStream() = default;
  /// Throws std::runtime_error when CUDA refuses, or where the capture is invalid.
  explicit CallStream(cudaStream_t stream);

  bool is_captured() const { return capture != 0; }
  /// What is wrong where an earlier call of this capture, or an eager one, failed half-way.
  std::string broken() const;
  /// A call that began does not end: its capture is made invalid, so that no graph has half a call.
  void abandon() const noexcept;
};

}  // namespace agmm
