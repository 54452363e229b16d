// How a launch finds the order, in two passes over the ids.
//   count   a warp counts its own choices by expert, in shared memory
//   scan    the first row of each expert, of each CTA in it, of each warp in that
//   place   a warp gives its choices their rows, 32 at a time, in their order
// Choices are shared out in their order: a CTA, and in it a warp, has what follows on the choices
// of the one before. So the row of a choice is the first row of its expert, plus the choices of
// that expert in CTAs, warps and batches ahead, plus those in lower lanes: it depends on the ids
// alone.
//
// Why there is no race.
//   1. A row of `rows` belongs to one warp in both passes. What its lanes wrote, others of them
//   read
//      behind __syncwarp(). Between the passes the threads of the CTA take it by columns, behind a
//      barrier of the CTA, and hand it back by another one.
//   2. `totals` and `owner_rows` are written before the first barrier of the cluster, which
//   releases
//      and acquires, and not after it. Other CTAs read them between this barrier and the second
//      one, on which every CTA waits before it ends, so the memory that is read is still there.
//   3. Each element of the results has one writer. Rows of experts are numbered without gaps and
//      belong to one choice each, the rows behind them to the loop that writes zeros.
// All barriers stand in code that every thread of the CTA takes: loops around them have bounds that
// are the same in a warp, where the barrier is one of a warp. No thread returns early, but for one
// that an assertion ends, which ends the kernel. Only the barriers of the cluster wait for another
// CTA, and the CTAs of a cluster are on the GPU together.
//
// Sizes. All of choices, capacity and rows are at most 2^17, and the share of a warp times the
// number of warps is less than 32 choices a warp more, so int32 holds every sum. An id is compared
// before it is made an int32.
#include "ops/row_route.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

#include "ops/refuse.hpp"
#include "runtime/cuda.hpp"
#include "runtime/load_kernel.hpp"

/// What CUDA's assert() calls. It is declared here, since CUDA does so in debug builds alone.
extern "C" __host__ __device__ void __assert_fail(char const* assertion, char const* file,
                                                  unsigned line, char const* function) noexcept;

namespace agmm {

namespace {

constexpr int kThreads = 512;
constexpr int kWarpThreads = 32;
constexpr int kWarps = kThreads / kWarpThreads;
/// The most CTAs of a cluster that every GPU with clusters runs.
constexpr int kClusterCtas = 8;
/// Up to this many choices one CTA makes 8 steps a pass, and no cluster is worth its barriers.
constexpr int32_t kMostChoicesBesideClusters = 4096;
/// The most choices that a cluster is launched for. On an H200 it takes 26 us for so many, where
/// torch's ops take 88 in a graph (benchmarks/route.py); nobody has looked beyond.
constexpr int32_t kMostChoicesOfCluster = 1 << 17;
/// What one CTA is launched for at most: 64 steps a pass, as a cluster makes 32.
constexpr int32_t kMostChoicesOfOneCta = 1 << 15;
/// The ids that a lane asks for before it looks at the first of them.
constexpr int kBatch = 4;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
static_assert(kMostRoutedExperts <= kThreads, "a thread for each expert");

struct Shared {
  int32_t rows[kWarps][kMostRoutedExperts];  // counts of a warp's choices, then its next rows
  int32_t totals[kMostRoutedExperts];        // counts of this CTA's choices
  int32_t owner_rows[kMostRoutedExperts];    // this CTA's choices, by the rank of the expert
  int32_t warp_sums[kWarps];
};

__device__ int cta_in_cluster() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
#else
  return 0;
#endif
}

/// Releases what this thread has written, to the CTAs of its cluster.
template <int kCtas>
__device__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCtas > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

template <int kCtas>
__device__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCtas > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// What lies at this place of the shared memory in another CTA of the cluster.
template <int kCtas>
__device__ int32_t loaded_from(int32_t const* place, int cta) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCtas > 1) {
    uint32_t const own = static_cast<uint32_t>(__cvta_generic_to_shared(place));
    int32_t value;
    asm volatile(
        "{\n\t.reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %1, %2;\n\t"
        "ld.shared::cluster.s32 %0, [there];\n\t}"
        : "=r"(value)
        : "r"(own), "r"(cta)
        : "memory");
    return value;
  }
#endif
  return *place;
}

/// The choices of a warp: a multiple of its lanes for all but the last.
struct Share {
  int32_t begin;
  int32_t end;

  __device__ Share(int32_t choices, int warp, int warps) {
    int32_t const steps = (choices + warps * kWarpThreads - 1) / (warps * kWarpThreads);
    begin = min(choices, warp * steps * kWarpThreads);
    end = min(choices, begin + steps * kWarpThreads);
  }
};

/// Calls `what` with the place and the id of each choice of a share, lane by lane, and with -1 for
/// the id where the last step has no choice for a lane: all lanes take the same steps.
template <class Id, class What>
__device__ void for_each_id(Id const* __restrict__ ids, Share const share, What what) {
  int const lane = threadIdx.x % kWarpThreads;
  for (int32_t begin = share.begin; begin < share.end; begin += kBatch * kWarpThreads) {
    Id batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int32_t const at = begin + i * kWarpThreads + lane;
      batch[i] = at < share.end ? __ldg(ids + at) : Id(-1);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (begin + i * kWarpThreads < share.end) what(begin + i * kWarpThreads + lane, batch[i]);
    }
  }
}

/// The sum over the threads ahead, and that over all of them in `all`. All threads call it, once.
__device__ int32_t sum_ahead(int32_t value, int32_t* warp_sums, int32_t* all) {
  int const lane = threadIdx.x % kWarpThreads;
  int const warp = threadIdx.x / kWarpThreads;
  int32_t sum = value;  // with this thread's own
#pragma unroll
  for (int step = 1; step < kWarpThreads; step *= 2) {
    int32_t const other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == kWarpThreads - 1) warp_sums[warp] = sum;
  __syncthreads();
  int32_t ahead = 0;
  int32_t total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    int32_t const of_warp = warp_sums[i];
    if (i < warp) ahead += of_warp;
    total += of_warp;
  }
  *all = total;
  return ahead + sum - value;
}

/// The number among the rank's experts of the one that an id names; -1 for any other id.
template <class Id>
__device__ int32_t expert_of(Id id, RowRoute const& args) {
  bool const is_here = id >= Id(args.first) && id < Id(args.first + args.experts);
  return is_here ? int32_t(id) - args.first : -1;
}

template <class Id, int kCtas>
__global__ void __launch_bounds__(kThreads) route_kernel(RowRoute const args) {
  __shared__ Shared shared;
  int const thread = threadIdx.x;
  int const lane = thread % kWarpThreads;
  int const warp = thread / kWarpThreads;
  int const cta = kCtas > 1 ? cta_in_cluster() : 0;
  auto const choices = int32_t(args.choices);
  auto const capacity = int32_t(args.capacity);
  auto const* const ids = static_cast<Id const*>(args.ids);
  Share const share(choices, cta * kWarps + warp, kCtas * kWarps);
  int32_t* const own = shared.rows[warp];

  for (int32_t i = lane; i < args.experts; i += kWarpThreads) own[i] = 0;
  shared.owner_rows[thread] = 0;
  __syncthreads();

  for_each_id(ids, share, [&](int32_t, Id id) {
    if (id >= Id(args.all_experts)) {
      __assert_fail("topk_ids: found an id too large", "row_route.cu", __LINE__, __func__);
    } else if (args.checks_capacity && id >= 0) {
      atomicAdd(&shared.owner_rows[int32_t(id) / args.experts], 1);
    }
    int32_t const expert = expert_of(id, args);
    if (expert >= 0) atomicAdd(&own[expert], 1);
  });
  __syncthreads();

  bool const has_expert = thread < args.experts;
  if (has_expert) {
    int32_t total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += shared.rows[i][thread];
    shared.totals[thread] = total;
  }
  arrive_at_cluster<kCtas>();
  wait_for_cluster<kCtas>();

  int32_t of_expert = 0;  // on all CTAs
  int32_t ahead = 0;      // on those with earlier choices
  int32_t of_owner = 0;
#pragma unroll
  for (int i = 0; i < kCtas; ++i) {
    int32_t const there = has_expert ? loaded_from<kCtas>(&shared.totals[thread], i) : 0;
    if (i < cta) ahead += there;
    of_expert += there;
    if (args.checks_capacity) of_owner += loaded_from<kCtas>(&shared.owner_rows[thread], i);
  }
  arrive_at_cluster<kCtas>();  // this CTA reads no other's memory from here on
  if (args.checks_capacity && of_owner > capacity) {
    __assert_fail("capacity: found more rows than that", "row_route.cu", __LINE__, __func__);
  }

  int32_t all_rows;
  int32_t const first_row = sum_ahead(of_expert, shared.warp_sums, &all_rows);
  if (has_expert) {
    int32_t next = first_row + ahead;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      int32_t const count = shared.rows[i][thread];
      shared.rows[i][thread] = next;
      next += count;
    }
    if (cta == 0) {
      args.counts[thread] = of_expert;
      args.offsets[thread] = first_row;
    }
  }
  if (cta == 0 && thread == 0) args.offsets[args.experts] = all_rows;
  __syncthreads();

  for_each_id(ids, share, [&](int32_t at, Id id) {
    int32_t const expert = expert_of(id, args);
    unsigned const same = __match_any_sync(kAllLanes, expert);
    int32_t const lower = __popc(same & ((1u << lane) - 1));
    int32_t const first = expert >= 0 ? own[expert] : 0;
    __syncwarp();  // all have read what the lowest of them writes
    if (expert >= 0 && lower == 0) own[expert] = first + __popc(same);
    __syncwarp();
    int32_t const row = first + lower;
    if (at < share.end) args.positions[at] = expert >= 0 ? row : -1;
    if (expert >= 0 && row < capacity) {
      int32_t const token = int32_t(uint32_t(at) / uint32_t(args.k));
      args.tokens[row] = token;
      args.row_choices[row] = at - token * args.k;
    }
  });

  for (int32_t row = all_rows + cta * kThreads + thread; row < capacity; row += kCtas * kThreads) {
    args.tokens[row] = 0;
    args.row_choices[row] = 0;
  }
  wait_for_cluster<kCtas>();  // the others have read this CTA's memory
}

/// Calls `what` with the type of the ids, as a value of it.
template <class What>
void with_ids(RouteIds type, What what) {
  return type == RouteIds::Int32 ? what(int32_t{}) : what(int64_t{});
}

/// Whether the code for the current device has clusters. Every build has that of Hopper; on later
/// GPUs it may be what the driver has compiled for them from that of sm_80.
bool has_clusters() {
  DeviceFacts const& device = small_kernels_device();
  return device.capability_major == 9 && device.capability_minor == 0;
}

template <class Id, int kCtas>
void launch(RowRoute const& args, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCtas);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCtas, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = kCtas > 1 ? 1 : 0;
  AGMM_CHECK_CUDA(cudaLaunchKernelEx(&config, route_kernel<Id, kCtas>, args));
}

void check_between(char const* name, int64_t found, int64_t least, int64_t most) {
  if (found >= least && found <= most) return;
  refuse(name, std::to_string(found), std::to_string(least) + " to " + std::to_string(most));
}

void check(RowRoute const& args) {
  check_between("choices", args.choices, 1, most_routed_choices());
  check_between("capacity", args.capacity, 0, most_routed_choices());
  check_between("k", args.k, 1, args.choices);
  check_between("experts", args.experts, 1, kMostRoutedExperts);
  check_between("all_experts", args.all_experts, args.experts,
                int64_t(args.experts) * kMostRoutedExperts);
  check_between("first", args.first, 0, args.all_experts - args.experts);
  if (args.ids == nullptr || args.counts == nullptr || args.offsets == nullptr ||
      args.positions == nullptr ||
      (args.capacity > 0 && (args.tokens == nullptr || args.row_choices == nullptr))) {
    refuse("ids, tokens, row_choices, counts, offsets, positions", "null", "device memory");
  }
}

}  // namespace

int32_t most_routed_choices() {
  return has_clusters() ? kMostChoicesOfCluster : kMostChoicesOfOneCta;
}

void load_row_routes() {
  static std::mutex mutex;
  static std::set<int> loaded;  // devices
  std::lock_guard<std::mutex> const lock(mutex);
  int const device = small_kernels_device().index;
  if (loaded.count(device) != 0) return;
  for (RouteIds const type : {RouteIds::Int32, RouteIds::Int64}) {
    with_ids(type, [](auto of) {
      using Id = decltype(of);
      load(route_kernel<Id, 1>);
      if (has_clusters()) load(route_kernel<Id, kClusterCtas>);
    });
  }
  loaded.insert(device);
}

void route_rows(RowRoute const& args, void* stream) {
  check(args);
  with_ids(args.type, [&](auto of) {
    using Id = decltype(of);
    auto const on = static_cast<cudaStream_t>(stream);
    if (args.choices > kMostChoicesBesideClusters && has_clusters()) {
      launch<Id, kClusterCtas>(args, on);
    } else {
      launch<Id, 1>(args, on);
    }
  });
}

}  // namespace agmm
