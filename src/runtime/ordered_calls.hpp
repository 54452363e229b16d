// Calls of one workspace, one after the other, on whatever streams they come.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#include <stdexcept>

#include "runtime/call_stream.hpp"
#include "runtime/cuda.hpp"
#include "symmetric/slot_ring.hpp"

namespace agmm {

/// Eager calls are ordered among themselves, and those of each capture.
class OrderedCalls {
 public:
  explicit OrderedCalls(int device) : device_(device) {}
  ~OrderedCalls() {
    for (cudaEvent_t const event : call_done_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    cudaGetLastError();
  }
  OrderedCalls(OrderedCalls const&) = delete;
  OrderedCalls& operator=(OrderedCalls const&) = delete;

  /// `prepare()` returns what enqueues the call on a stream, and may throw: then nothing is
  /// enqueued. Past it nothing short of a CUDA failure can stop the call; then later ones of its
  /// sequence refuse. Returns whether the stream is being captured.
  template <class Prepare>
  bool make(void* stream_handle, Prepare const& prepare) {
    std::lock_guard<std::mutex> const lock(mutex_);
    DeviceGuard const device(device_);
    auto const stream = static_cast<cudaStream_t>(stream_handle);
    CallStream const calling(stream);
    if (sequences_.is_broken(calling.capture)) throw std::runtime_error(calling.broken());
    auto const& enqueue = prepare();
    bool const is_first = sequences_.find(calling.capture) == SlotRing::kNone;
    auto const i = static_cast<std::size_t>(sequences_.place(calling.capture));
    // The call is not marked as begun yet: what fails here leaves nothing half done.
    if (call_done_[i] == nullptr) {
      RelaxedCapture const relaxed;
      AGMM_CHECK_CUDA(cudaEventCreateWithFlags(&call_done_[i], cudaEventDisableTiming));
    }
    sequences_.begin(calling.capture);
    try {
      if (!is_first && (calling.is_captured() || last_stream_[i] != calling.id)) {
        AGMM_CHECK_CUDA(cudaStreamWaitEvent(stream, call_done_[i], 0));
      }
      enqueue(stream);
      AGMM_CHECK_CUDA(cudaEventRecord(call_done_[i], stream));
    } catch (...) {
      calling.abandon();
      throw;
    }
    last_stream_[i] = calling.id;
    sequences_.end(calling.capture);
    return calling.is_captured();
  }

  /// What is enqueued on the stream from now on comes behind the last call of its sequence.
  void precede(void* stream_handle) {
    std::lock_guard<std::mutex> const lock(mutex_);
    CallStream const next(static_cast<cudaStream_t>(stream_handle));
    int const i = sequences_.find(next.capture);
    if (i == SlotRing::kNone || (!next.is_captured() && last_stream_[i] == next.id)) return;
    AGMM_CHECK_CUDA(cudaStreamWaitEvent(next.stream, call_done_[i], 0));
  }

 private:
  int device_;
  std::mutex mutex_;
  SlotRing sequences_;
  std::array<cudaEvent_t, SlotRing::kSequences> call_done_{};
  std::array<unsigned long long, SlotRing::kSequences> last_stream_{};  // its id
};

}  // namespace agmm
