#include "transport/stage.hpp"

#include <algorithm>

#include "sync/device_wait.hpp"

namespace agmm {

namespace {

// Half of the threads that a multiprocessor holds, in a CTA: CTAs wait for peers, so no more come
// than there are multiprocessors that may, and what is reserved for other kernels stays free. Not
// tuned: a shard is copied once, and the links take longer for it.
constexpr int kThreads = 1024;

// Order. Every CTA acquires the credits itself, so no CTA writes to a buffer that is still read. A
// CTA's writes precede its count (bar.sync, then acq_rel at GPU scope); the last CTA has thereby
// acquired those of all others, and its releases at system scope carry them on. A credit is reset
// before the tag, and the peer gives the next one only after it has seen tag or data of this call.
__global__ void __launch_bounds__(kThreads) stage_kernel(StageArgs const args) {
  int const rank = args.limit.rank;
  for (int peer = threadIdx.x; peer < args.world_size; peer += kThreads) {
    if (args.credits != nullptr && peer != rank) {
      wait_credit(args.credits, peer, args.slot, args.limit);
    }
  }
  __syncthreads();

  std::size_t const first = std::size_t(blockIdx.x) * kThreads + threadIdx.x;
  std::size_t const stride = std::size_t(gridDim.x) * kThreads;
  for (StageCopy const& copy : args.copies) {
    auto const* const from = static_cast<uint4 const*>(copy.from);
    auto* const to = static_cast<uint4*>(copy.to);
    auto* const also_to = static_cast<uint4*>(copy.also_to);
    for (std::size_t i = first; i < copy.bytes / sizeof(uint4); i += stride) {
      uint4 const value = from[i];
      to[i] = value;
      if (also_to != nullptr) also_to[i] = value;
    }
  }

  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) is_last = add_acq_rel_gpu(args.finished_ctas, 1) + 1 == gridDim.x;
  __syncthreads();
  if (!is_last) return;
  for (int peer = threadIdx.x; peer < args.world_size; peer += kThreads) {
    if (args.credits != nullptr && peer != rank) args.credits[peer] = 0;
    if (args.peer_tags != nullptr) store_release_system(args.peer_tags[peer], args.tag);
    if (peer == rank) {
      *args.finished_ctas = 0;
      store_release_system(args.own_signal, args.tag);
    }
  }
}

}  // namespace

cudaError_t prepare_stage() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, stage_kernel);
}

cudaError_t launch_stage(StageArgs const& args, int sm_count, cudaStream_t stream) {
  std::size_t vectors = 0;
  for (StageCopy const& copy : args.copies) {
    vectors = std::max(vectors, copy.bytes / sizeof(uint4));
  }
  std::size_t const wanted = (vectors + kThreads - 1) / kThreads;
  auto const ctas =
      static_cast<unsigned>(std::clamp<std::size_t>(wanted, 1, std::size_t(sm_count)));
  stage_kernel<<<ctas, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace agmm
