// The public scheduler as a user of CUTLASS takes it: beside CUTLASS's own collectives, with its
// default arguments, so that the producer warp awaits a tile's signals when it fetches the tile.
// Compiled alone and called through the C functions below.
#include <cuda_runtime_api.h>

#include "agmm/persistent_async_input_scheduler.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace {

using Element = cutlass::bfloat16_t;
constexpr int kAlignment = 8;
using TileShape = cute::Shape<cute::_128, cute::_128, cute::_64>;
using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;

template <class Schedule, class EpilogueSchedule>
struct PlainGemm {
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      cutlass::layout::RowMajor, kAlignment, Element, cutlass::layout::RowMajor, kAlignment,
      EpilogueSchedule>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      kAlignment, Element, cutlass::layout::ColumnMajor, kAlignment, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                           cutlass::gemm::PersistentAsyncInputScheduler<Schedule>>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(void const* a, void const* b, void* out, int m, int n, int k,
                 uint32_t const* signals, int tiles_per_chunk, int pivot_tile, int sm_count,
                 void* stream) {
    typename Gemm::Arguments args{};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = {m, n, k, 1};
    args.mainloop.ptr_A = static_cast<Element const*>(a);
    cute::get<0>(args.mainloop.dA) = k;
    args.mainloop.ptr_B = static_cast<Element const*>(b);
    cute::get<0>(args.mainloop.dB) = k;
    args.epilogue.ptr_D = static_cast<Element*>(out);
    cute::get<0>(args.epilogue.dD) = n;
    args.epilogue.thread.alpha = 1;
    args.hw_info.sm_count = sm_count;
    args.scheduler.tiles_per_chunk_m = tiles_per_chunk;
    args.scheduler.chunk_signals = signals;
    args.scheduler.tile_idx_pivot_m = pivot_tile;
    args.scheduler.wait_limit.limit_ns = 20'000'000'000ull;
    Gemm gemm;
    if (gemm.can_implement(args) != cutlass::Status::kSuccess) return 1;
    if (gemm.initialize(args) != cutlass::Status::kSuccess) return 2;
    return gemm.run(static_cast<cudaStream_t>(stream)) == cutlass::Status::kSuccess ? 0 : 3;
  }
};

}  // namespace

#define PLAIN_GEMM(name, Schedule, EpilogueSchedule)                                              \
  extern "C" int name(void const* a, void const* b, void* out, int m, int n, int k,               \
                      uint32_t const* signals, int tiles_per_chunk, int pivot_tile, int sm_count, \
                      void* stream) {                                                             \
    return PlainGemm<cutlass::gemm::Schedule, cutlass::epilogue::EpilogueSchedule>::run(          \
        a, b, out, m, n, k, signals, tiles_per_chunk, pivot_tile, sm_count, stream);              \
  }

PLAIN_GEMM(cooperative, KernelTmaWarpSpecializedCooperative, TmaWarpSpecializedCooperative)
PLAIN_GEMM(pingpong, KernelTmaWarpSpecializedPingpong, TmaWarpSpecialized)
