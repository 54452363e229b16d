#include "gemm/packed_entry.hpp"
#include "gemm/sm90/streaming_instance.cuh"

namespace agmm {

namespace {
template <int kTileM, int kGroups>
using Instance = StreamingInstance<PackedBf16<kGroups>, cutlass::layout::ColumnMajor, kTileM, 64,
                                   kStreamedK, 1, 1, Schedule::Streaming>;
}  // namespace

std::array<KernelEntry, 4> const kPackedKernels = {
    Instance<32, 1>::entry(), Instance<64, 1>::entry(), Instance<32, 4>::entry(),
    Instance<64, 4>::entry()};

}  // namespace agmm
