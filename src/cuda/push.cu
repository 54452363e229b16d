#include "push.hpp"

#include <algorithm>

#include "credits.cuh"

namespace agmm {

namespace {

// A CTA works in groups of warps that take chunks in turn, so that the system fence of one chunk
// (2.4 us) is hidden behind the copies of the others.
constexpr int kMaxGroups = 8;
constexpr int kGroupThreads = 128;
// Bytes of a row that all groups have in flight: enough to fill the links, and no more, since what
// is in flight beside the first chunk delays its signal.
constexpr int kBytesInFlight = 2048;
constexpr int kLoadsInFlight = 4;

__device__ void sync_group(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(kGroupThreads) : "memory");
}

__device__ void fence_acq_rel_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ void add_relaxed_system(uint32_t* word, uint32_t value) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

struct Part {
  int32_t row_begin;
  int32_t row_end;
};

__device__ Part part_of_cta(int32_t rows) {
  int64_t const cta = blockIdx.x;
  return {int32_t(cta * rows / gridDim.x), int32_t((cta + 1) * rows / gridDim.x)};
}

/// Copies `vectors` 16-byte columns from `column` on, of this CTA's rows, to the places of `peers`
/// ranks, the nearest consumer first from `first_peer` on.
__device__ void copy_chunk(PushArgs const& args, int thread, int32_t column, FastDiv const& vectors,
                           int first_peer, int peers) {
  Part const part = part_of_cta(args.rows);
  int32_t const row_vectors = args.row_bytes / int32_t(sizeof(uint4));
  auto const* const shard = static_cast<uint4 const*>(args.shard);
  int32_t const count = (part.row_end - part.row_begin) * vectors.divisor;
  for (int32_t i = thread; i < count; i += kGroupThreads * kLoadsInFlight) {
    uint4 values[kLoadsInFlight];
    int64_t at[kLoadsInFlight];
#pragma unroll
    for (int j = 0; j < kLoadsInFlight; ++j) {
      int32_t const k = i + j * kGroupThreads;
      int32_t const row = vectors.divide(k);
      at[j] = int64_t(part.row_begin + row) * row_vectors + column + (k - row * vectors.divisor);
      if (k < count) values[j] = __ldg(shard + at[j]);
    }
    for (int p = 0; p < peers; ++p) {
      int const peer = (args.rank + 2 * args.world_size - first_peer - p) % args.world_size;
      auto* const to = static_cast<uint4*>(args.places[peer].rows);
#pragma unroll
      for (int j = 0; j < kLoadsInFlight; ++j) {
        if (i + j * kGroupThreads < count) to[at[j]] = values[j];
      }
    }
  }
}

/// The rows that the consumer's tiles at the edges of the own shard read.
__device__ void copy_own_edges(PushArgs const& args, int thread, int32_t column, int32_t vectors) {
  Part const part = part_of_cta(args.head + args.tail);
  int32_t const row_vectors = args.row_bytes / int32_t(sizeof(uint4));
  auto const* const shard = static_cast<uint4 const*>(args.shard);
  auto* const to = static_cast<uint4*>(args.places[args.rank].rows);
  int32_t const count = (part.row_end - part.row_begin) * vectors;
  for (int32_t i = thread; i < count; i += kGroupThreads) {
    int32_t const edge_row = part.row_begin + i / vectors;
    int32_t const row =
        edge_row < args.head ? edge_row : args.rows - args.tail + edge_row - args.head;
    int64_t const at = int64_t(row) * row_vectors + column + i % vectors;
    to[at] = shard[at];
  }
}

// Order. Every CTA acquires the credits itself. The last one to do so resets them, before it adds
// to any signal, and a peer gives the next credit only when all CTAs have added to all signals. A
// group's writes precede its barrier, that the fence of its first thread, and that the addition;
// a consumer that acquires the sum of all CTAs' additions has acquired the writes of all.
__global__ void __launch_bounds__(kMaxGroups* kGroupThreads) push_kernel(PushArgs const args) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  WaitLimit limit;
  limit.report = args.report;
  limit.report_lock = args.report_lock;
  limit.limit_ns = args.limit_ns;
  limit.rank = args.rank;
  int const edges = args.head + args.tail;
  for (int peer = threadIdx.x; peer < args.world_size; peer += blockDim.x) {
    if (peer != args.rank) wait_for_credit(args.credits, peer, args.slot, limit);
  }
  __syncthreads();
  if (threadIdx.x == 0 && add_acq_rel_gpu(args.ctas_with_credits, 1) + 1 == gridDim.x) {
    *args.ctas_with_credits = 0;
    for (int peer = 0; peer < args.world_size; ++peer) {
      if (peer != args.rank) args.credits[peer] = 0;
    }
  }
  // The resets precede every addition of this CTA, by this barrier and the fences below; and every
  // chunk at every peer needs one of them.
  __syncthreads();

  int const groups = blockDim.x / kGroupThreads;
  int const group = threadIdx.x / kGroupThreads;
  int const thread = threadIdx.x % kGroupThreads;
  int const peers = args.world_size - 1;
  int const rounds = args.first_peers > 0 && args.first_peers < peers ? 2 : 1;
  for (int item = group; item < rounds * args.chunks; item += groups) {
    int const round = item / args.chunks;
    int const chunk = item % args.chunks;
    int const first = rounds == 2 && round == 1 ? args.first_peers : 0;
    int const served = rounds == 2 ? (round == 0 ? args.first_peers : peers - first) : peers;
    int32_t const begin = chunk * args.chunk_bytes;
    int32_t const end = min(begin + args.chunk_bytes, args.row_bytes);
    int32_t const column = begin / int32_t(sizeof(uint4));
    int32_t const vectors = (end - begin) / int32_t(sizeof(uint4));
    FastDiv const& division = chunk + 1 < args.chunks ? args.chunk_vectors : args.last_vectors;
    copy_chunk(args, thread, column, division, first + 1, served);
    bool const own = round == 0 && edges > 0;
    if (own) copy_own_edges(args, thread, column, vectors);
    sync_group(group);
    if (thread == 0) {
      uint32_t const sum_part = 1 + (blockIdx.x == 0 ? args.tag : 0);
      fence_acq_rel_system();
      for (int p = 0; p < served; ++p) {
        int const peer = (args.rank + 2 * args.world_size - first - 1 - p) % args.world_size;
        add_relaxed_system(args.places[peer].signals + chunk, sum_part);
      }
      if (own) add_relaxed_system(args.places[args.rank].signals + chunk, sum_part);
    }
  }
}

}  // namespace

cudaError_t prepare_push() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, push_kernel);
}

cudaError_t launch_push(PushArgs const& given, int ctas, int cluster_size, cudaStream_t stream) {
  PushArgs args = given;
  int const last_bytes = args.row_bytes - (args.chunks - 1) * args.chunk_bytes;
  args.chunk_vectors = FastDiv(args.chunk_bytes / int(sizeof(uint4)));
  args.last_vectors = FastDiv(last_bytes / int(sizeof(uint4)));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(ctas);
  config.blockDim =
      kGroupThreads * std::clamp(kBytesInFlight / std::max(args.chunk_bytes, 1), 2, kMaxGroups);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = cluster_size == 1 ? 0 : 1;
  return cudaLaunchKernelEx(&config, push_kernel, args);
}

}  // namespace agmm
