#include "transport/stream_ops.hpp"

namespace agmm {

CopyStream::CopyStream() {
  try {
    int least = 0;
    int greatest = 0;
    AGMM_CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    AGMM_CHECK_CUDA(cudaStreamCreateWithPriority(&copies, cudaStreamNonBlocking, greatest));
    for (cudaEvent_t* event : {&fork, &staged, &copies_done, &call_done}) {
      AGMM_CHECK_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
  } catch (...) {
    destroy();
    throw;
  }
}

CopyStream::~CopyStream() { destroy(); }

void CopyStream::destroy() noexcept {
  // Destruction at exit may come after the driver is gone: errors mean nothing here.
  if (copies != nullptr) cudaStreamDestroy(copies);
  for (cudaEvent_t event : {fork, staged, copies_done, call_done}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  cudaGetLastError();
}

namespace stream_ops {

namespace {
CUdeviceptr address(void const* p) { return reinterpret_cast<CUdeviceptr>(p); }
}  // namespace

CUstreamBatchMemOpParams write_op(uint32_t* word, uint32_t value) {
  CUstreamBatchMemOpParams op{};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  op.writeValue.address = address(word);
  op.writeValue.value = value;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return op;
}

CUstreamBatchMemOpParams wait_op(uint32_t* word, uint32_t value, unsigned flags) {
  CUstreamBatchMemOpParams op{};
  op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  op.waitValue.address = address(word);
  op.waitValue.value = value;
  op.waitValue.flags = flags;
  return op;
}

void batch(cudaStream_t stream, Batch& ops) {
  if (ops.empty()) return;
  check_driver(
      driver().stream_batch_mem_op(stream, static_cast<unsigned>(ops.size()), ops.data(), 0),
      "cuStreamBatchMemOp");
}

void write(cudaStream_t stream, uint32_t* word, uint32_t value) {
  check_driver(
      driver().stream_write_value32(stream, address(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
      "cuStreamWriteValue32");
}

void copy(void* to, void const* from, std::size_t bytes, cudaStream_t stream) {
  if (bytes != 0)
    AGMM_CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace stream_ops
}  // namespace agmm
