// What the copy engine's transports enqueue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/cuda.hpp"

namespace agmm {

/// The copy stream of a sequence of calls, and the events that tie it to theirs. One of its own for
/// each, since a stream that takes part in a capture can serve no other call meanwhile.
struct CopyStream {
  cudaStream_t copies = nullptr;
  cudaEvent_t fork = nullptr;
  cudaEvent_t staged = nullptr;
  cudaEvent_t copies_done = nullptr;
  cudaEvent_t call_done = nullptr;

  CopyStream();
  ~CopyStream();
  CopyStream(CopyStream const&) = delete;
  CopyStream& operator=(CopyStream const&) = delete;

 private:
  void destroy() noexcept;
};

namespace stream_ops {

using Batch = std::vector<CUstreamBatchMemOpParams>;

CUstreamBatchMemOpParams write_op(uint32_t* word, uint32_t value);
/// flags: CU_STREAM_WAIT_VALUE_EQ or _GEQ.
CUstreamBatchMemOpParams wait_op(uint32_t* word, uint32_t value, unsigned flags);
void batch(cudaStream_t stream, Batch& ops);
void write(cudaStream_t stream, uint32_t* word, uint32_t value);
void copy(void* to, void const* from, std::size_t bytes, cudaStream_t stream);

}  // namespace stream_ops
}  // namespace agmm
