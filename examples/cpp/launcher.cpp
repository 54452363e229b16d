// The host launcher without Python: out = A @ B (+ bias), where A arrives in chunks of rows while
// the matmul runs.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "agmm/limits.hpp"
#include "example.hpp"

namespace {

// Exact for the small numbers here.
uint16_t bf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

float from_bf16(uint16_t value) {
  uint32_t const bits = uint32_t(value) << 16;
  float result = 0;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

agmm::KernelShape any_kernel() {
  for (agmm::KernelFacts const& facts : agmm::built_kernels()) {
    if (facts.op == agmm::Op::AllGatherMatmul && !facts.shape.timed &&
        facts.dtype == agmm::DType::BFloat16 && facts.b_layout == agmm::BLayout::ColumnMajor) {
      return facts.shape;
    }
  }
  std::fprintf(stderr, "no kernel in this build\n");
  std::exit(1);
}

}  // namespace

int main() {
  constexpr int m = 2048, n = 1024, k = 16;
  constexpr int chunks = 8;

  auto* const a_source = example::pinned_memory<uint16_t>(m * k);
  auto* const a = example::device_memory<uint16_t>(m * k);
  auto* const b = example::device_memory<uint16_t>(n * k);
  auto* const out = example::device_memory<uint16_t>(m * n);
  auto* const signals = example::device_memory<uint32_t>(chunks);
  std::vector<uint16_t> b_source(n * k);
  for (int i = 0; i < m * k; ++i) a_source[i] = bf16(float(example::element(i / k, i % k)));
  for (int i = 0; i < n * k; ++i) b_source[i] = bf16(float(example::element(i % k, i / k)));
  example::check(cudaMemcpy(b, b_source.data(), n * k * sizeof(uint16_t), cudaMemcpyHostToDevice),
                 "cudaMemcpy");

  agmm::AsyncInputArgs args;
  args.problem = {m, n, k, agmm::DType::BFloat16, agmm::BLayout::ColumnMajor};
  args.config.shape = any_kernel();
  args.operands.a = a;
  args.operands.b = b;
  args.operands.ldb = k;
  args.operands.out = out;
  args.arrival.signals = signals;
  args.arrival.chunks_m = chunks;
  args.arrival.senders.chunks_per_rank = 0;  // of no rank
  args.limit_ns = static_cast<uint64_t>(agmm::timeout_seconds() * 1e9);

  cudaStream_t compute = nullptr;
  cudaStream_t copies = nullptr;
  example::check(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking), "stream");
  example::check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "stream");
  agmm::prepare_async_input_mm(args).launch(compute);
  example::send_chunks(a_source, a, std::size_t(m / chunks) * k * sizeof(uint16_t), chunks, signals,
                       args.arrival.ready_value, copies);
  example::check(cudaStreamSynchronize(compute), "the matmul");

  std::vector<uint16_t> result(m * n);
  example::check(
      cudaMemcpy(result.data(), out, result.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost),
      "cudaMemcpy");
  int wrong = 0;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      int sum = 0;  // at most 64: exact in bfloat16
      for (int l = 0; l < k; ++l) sum += example::element(i, l) * example::element(l, j);
      wrong += from_bf16(result[std::size_t(i) * n + j]) != float(sum);
    }
  }
  std::printf("%s: %d wrong elements\n", wrong == 0 ? "right" : "WRONG", wrong);
  return wrong == 0 ? 0 : 1;
}
