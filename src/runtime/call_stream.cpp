#include "runtime/call_stream.hpp"

#include <stdexcept>

#include "agmm/collectives.hpp"
#include "runtime/cuda.hpp"

namespace agmm {

CallStream::CallStream(cudaStream_t stream_) : stream(stream_) {
  cudaStreamCaptureStatus status{};
  SlotRing::Capture found = 0;
  AGMM_CHECK_CUDA(cudaStreamGetCaptureInfo(stream, &status, &found));
  if (status == cudaStreamCaptureStatusInvalidated) {
    throw std::runtime_error("stream: found an invalid capture, wanted a valid one or none");
  }
  if (status == cudaStreamCaptureStatusActive) {
    capture = found;
  } else {
    AGMM_CHECK_CUDA(cudaStreamGetId(stream, &id));
  }
}

std::string CallStream::broken() const {
  return is_captured()
             ? "workspace: an earlier call of this capture failed half-way; wanted another capture"
             : "workspace: an earlier call failed half-way, so its ranks may be out of step; "
               "wanted "
               "new processes";
}

void CallStream::abandon() const noexcept {
  if (!is_captured()) return;
  // This call is not allowed in a capture, and so ends it.
  cudaStreamSynchronize(stream);
  cudaGetLastError();
}

uint64_t capture_of(void* stream) { return CallStream(static_cast<cudaStream_t>(stream)).capture; }

uint64_t stream_id(void* stream) {
  unsigned long long id = 0;
  AGMM_CHECK_CUDA(cudaStreamGetId(static_cast<cudaStream_t>(stream), &id));
  return id;
}

}  // namespace agmm
