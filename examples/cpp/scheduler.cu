// A CUTLASS matmul of your own whose A is still on its way: PersistentAsyncInputScheduler as the
// fourth argument of GemmUniversal, with CUTLASS's own mainloop and epilogue. The kernel starts
// first; a second stream brings A in chunks of rows and sets the signal of each.
#include <cstdio>
#include <vector>

#include "agmm/persistent_async_input_scheduler.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "example.hpp"

namespace {

using Element = cutlass::half_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using TileShape = cute::Shape<cute::_128, cute::_128, cute::_64>;
using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
constexpr int kAlignment = 16 / sizeof(Element);

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, kAlignment,
    Element, RowMajor, kAlignment, cutlass::epilogue::TmaWarpSpecialized>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, kAlignment, Element,
    ColumnMajor, kAlignment, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    Schedule>::CollectiveOp;
using Kernel =
    cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                         cutlass::gemm::PersistentAsyncInputScheduler<Schedule>>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

void check(cutlass::Status status, char const* what) {
  if (status == cutlass::Status::kSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cutlass::cutlassGetStatusString(status));
  std::exit(1);
}

}  // namespace

int main() {
  constexpr int m = 2048, n = 1024, k = 512;
  constexpr int chunks = 8;
  constexpr uint32_t ready = 1;

  auto* const a_source = example::pinned_memory<Element>(m * k);
  auto* const a = example::device_memory<Element>(m * k);
  auto* const b = example::device_memory<Element>(n * k);
  auto* const out = example::device_memory<Element>(m * n);
  auto* const signals = example::device_memory<uint32_t>(chunks);
  std::vector<Element> b_source(n * k);  // column-major: column j of B is row j here
  for (int i = 0; i < m * k; ++i) a_source[i] = Element(float(example::element(i / k, i % k)));
  for (int i = 0; i < n * k; ++i) b_source[i] = Element(float(example::element(i % k, i / k)));
  example::check(cudaMemcpy(b, b_source.data(), n * k * sizeof(Element), cudaMemcpyHostToDevice),
                 "cudaMemcpy");

  Gemm::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {m, n, k, 1};
  arguments.mainloop.ptr_A = a;
  arguments.mainloop.dA = cute::make_stride(int64_t(k), cute::_1{}, int64_t(0));
  arguments.mainloop.ptr_B = b;
  arguments.mainloop.dB = cute::make_stride(int64_t(k), cute::_1{}, int64_t(0));
  arguments.epilogue.thread.alpha = 1.0f;
  arguments.epilogue.ptr_D = out;
  arguments.epilogue.dD = cute::make_stride(int64_t(n), cute::_1{}, int64_t(0));
  arguments.hw_info =
      cutlass::KernelHardwareInfo::make_kernel_hardware_info<Kernel>(/*device_id=*/0);
  arguments.scheduler.rows_per_chunk = m / chunks;
  arguments.scheduler.chunk_signals = signals;
  arguments.scheduler.ready_value = ready;
  arguments.scheduler.chunk_pivot = chunks / 2;              // the first to be sent, below
  arguments.scheduler.wait_limit.limit_ns = 10'000'000'000;  // then the kernel traps

  cudaStream_t compute = nullptr;
  cudaStream_t copies = nullptr;
  example::check(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking), "stream");
  example::check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "stream");
  Gemm gemm;
  check(gemm.can_implement(arguments), "can_implement");
  check(gemm.initialize(arguments, nullptr, compute), "initialize");
  check(gemm.run(compute), "run");
  // Around the ring from the pivot, in the order of the tiles.
  int const first = chunks / 2;
  std::size_t const chunk = std::size_t(m / chunks) * k;
  example::send_chunks(a_source + first * chunk, a + first * chunk, chunk * sizeof(Element),
                       chunks - first, signals + first, ready, copies);
  example::send_chunks(a_source, a, chunk * sizeof(Element), first, signals, ready, copies);
  example::check(cudaStreamSynchronize(compute), "the matmul");

  std::vector<Element> result(m * n);
  example::check(
      cudaMemcpy(result.data(), out, result.size() * sizeof(Element), cudaMemcpyDeviceToHost),
      "cudaMemcpy");
  int wrong = 0;
  for (int i = 0; i < m; i += 3) {
    for (int j = 0; j < n; j += 5) {
      int sum = 0;
      for (int l = 0; l < k; ++l) sum += example::element(i, l) * example::element(l, j);
      wrong += float(result[std::size_t(i) * n + j]) != float(Element(float(sum)));
    }
  }
  std::printf("%s: %d wrong elements\n", wrong == 0 ? "right" : "WRONG", wrong);
  return wrong == 0 ? 0 : 1;
}
