#include "collectives/row_combine.hpp"

#include <algorithm>

#include "collectives/exchange_device.hpp"
#include "order/grouped_tiles.hpp"

namespace agmm {

namespace {

constexpr int kThreads = 512;
constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
/// Rows of a token that a warp has under way.
constexpr int kTogether = 4;

CUTLASS_DEVICE uint32_t* words(CombineArgs const& args, int rank, int64_t at) {
  return reinterpret_cast<uint32_t*>(args.memory[rank] + at);
}

/// Whether this thread looks after a peer, whose number is its own.
CUTLASS_DEVICE bool has_peer(CombineArgs const& args) {
  return int(threadIdx.x) < args.world_size && int(threadIdx.x) != args.rank;
}

CUTLASS_DEVICE void tell_peer(CombineArgs const& args) {
  store_release_system(words(args, int(threadIdx.x), args.tags) + args.rank, args.tag);
}

/// Whether the calling CTA is the last one of its launch. All threads call it; what the threads of
/// all CTAs did before is visible to those of the last one.
CUTLASS_DEVICE bool is_last_cta(CombineArgs const& args) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = add_acq_rel_gpu(args.finished, 1) + 1 == gridDim.x;
    if (is_last) *args.finished = 0;
  }
  __syncthreads();
  return is_last;
}

__global__ void __launch_bounds__(kThreads) open_kernel(__grid_constant__ CombineArgs const args) {
  uint32_t* const credits = words(args, args.rank, args.credits);
  int const peer = int(threadIdx.x);
  if constexpr (!kNoCredit) {
    if (has_peer(args)) wait_credit(credits, peer, 0, args.limit);
  }
  __syncthreads();
  stress_delay(args.rank);
  auto const first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  auto const stride = int64_t(gridDim.x) * kThreads;
  int32_t const rows = max_of(0, min_of(__ldg(args.row_count), args.capacity));
  auto* const places = reinterpret_cast<int32_t*>(args.memory[args.rank]);
  for (int64_t i = first; i < int64_t(args.all_tokens) * args.choices; i += stride) {
    int32_t const row = __ldg(args.positions + i);
    places[i] = row < rows ? row : -1;
  }
  for (int part = 0; part < args.parts; ++part) {
    auto const* const from = reinterpret_cast<uint4 const*>(args.rows[part]);
    if (from == nullptr) continue;
    auto* const to =
        reinterpret_cast<uint4*>(args.memory[args.rank] + args.slot_rows + part * args.part_bytes);
    for (int64_t i = first; i < int64_t(rows) * args.vectors; i += stride) to[i] = from[i];
  }
  if (!is_last_cta(args)) return;
  if (has_peer(args)) credits[peer] = 0;
  if constexpr (kSignalFirst) {
    if (has_peer(args)) tell_peer(args);
  }
}

/// What a warp of combine does: it adds up some columns of a token.
template <class Element>
struct Combine {
  using Base = Groups<Element, kGroupBytes / 4>;
  using Group = typename Base::Group;
  using Sum = typename Base::Sum;
  CombineArgs const& args;

  CUTLASS_DEVICE Group load(int source, int part, int32_t row, int32_t vector) const {
    char const* const part_of = args.memory[source] + args.slot_rows + part * args.part_bytes;
    auto const* const vectors = reinterpret_cast<uint4 const*>(part_of);
    uint4 const found = __ldcg(vectors + int64_t(row) * args.vectors + vector);
    return reinterpret_cast<Group const&>(found);
  }

  CUTLASS_DEVICE void sum(int32_t token, int32_t vector) const {
    int const lane = lane_id();
    bool const is_there = vector < args.vectors;
    int64_t const choice = int64_t(token) * args.choices + lane;
    int64_t const first = int64_t(args.first_token) * args.choices;
    int32_t place[kMaxExchangeRanks];
    CUTLASS_PRAGMA_UNROLL
    for (int source = 0; source < kMaxExchangeRanks; ++source) {
      place[source] = -1;
      if (source < args.world_size && lane < args.choices) {
        place[source] =
            __ldcg(reinterpret_cast<int32_t const*>(args.memory[source]) + first + choice);
      }
    }
    float const weight =
        args.weights != nullptr && lane < args.choices ? __ldg(args.weights + choice) : 1.0f;
    Sum total{};
    CUTLASS_PRAGMA_UNROLL
    for (int source = 0; source < kMaxExchangeRanks; ++source) {
      if (source >= args.world_size) break;
      uint32_t left = __ballot_sync(kAllLanes, place[source] >= 0);
      if (left == 0) continue;
      Sum of_rank{};
      CUTLASS_PRAGMA_NO_UNROLL
      while (left != 0) {
        int chosen[kTogether];
        Group held[kTogether];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          chosen[i] = left == 0 ? -1 : __ffs(int(left)) - 1;
          left &= left - 1;  // 0 stays 0
          int32_t const row = __shfl_sync(kAllLanes, place[source], max_of(0, chosen[i]));
          if (chosen[i] >= 0 && is_there) held[i] = load(source, 0, row, vector);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          if (chosen[i] < 0) break;
          float const weight_of = __shfl_sync(kAllLanes, weight, chosen[i]);
          int32_t const row = __shfl_sync(kAllLanes, place[source], chosen[i]);
          Sum value = Base::floats(held[i]);
          CUTLASS_PRAGMA_NO_UNROLL
          for (int part = 1; part < args.parts; ++part) {
            if (!is_there) break;
            Sum const more = Base::floats(load(source, part, row, vector));
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < Base::kElements; ++j) value[j] = __fadd_rn(value[j], more[j]);
          }
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < Base::kElements; ++j) {
            of_rank[j] = __fadd_rn(of_rank[j], __fmul_rn(value[j], weight_of));
          }
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Base::kElements; ++j) total[j] = __fadd_rn(total[j], of_rank[j]);
    }
    if (!is_there) return;
    auto* const out = reinterpret_cast<Group*>(args.out);
    out[int64_t(token) * args.vectors + vector] = Base::rounded(total);
  }

  CUTLASS_DEVICE void run() const {
    int32_t const pieces = (args.vectors + kLanes - 1) / kLanes;
    int64_t const warps = int64_t(gridDim.x) * (kThreads / kLanes);
    int64_t const end = int64_t(args.tokens) * pieces;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t item = int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
         item < end; item += warps) {
      auto const token = int32_t(item / pieces);
      sum(token, int32_t(item - int64_t(token) * pieces) * kLanes + lane_id());
    }
  }
};

template <class Element>
__global__ void __launch_bounds__(kThreads, 1)
    combine_kernel(__grid_constant__ CombineArgs const args) {
  int const peer = int(threadIdx.x);
  if constexpr (!kSignalFirst) {
    if (blockIdx.x == 0 && has_peer(args)) tell_peer(args);
  }
  uint32_t* const tags = words(args, args.rank, args.tags);
  stress_delay(args.rank);
  if constexpr (!kNoWait) {
    if (has_peer(args)) wait_signal(tags + peer, args.tag, peer, args.limit);
  }
  __syncthreads();
  Combine<Element>{args}.run();
  if (!is_last_cta(args) || !has_peer(args)) return;
  if constexpr (kNoWait) wait_signal(tags + peer, args.tag, peer, args.limit);
  tags[peer] = 0;
  store_release_system(words(args, peer, args.credits) + args.rank, 1);
}

using CombineKernel = void (*)(CombineArgs);

CombineKernel kernel_of(CollectiveElement element) {
  switch (element) {
    case CollectiveElement::BFloat16:
      return combine_kernel<cutlass::bfloat16_t>;
    case CollectiveElement::Float16:
      return combine_kernel<cutlass::half_t>;
    default:
      return combine_kernel<float>;
  }
}

/// At most one for each multiprocessor, since they wait for peers: what is reserved for other
/// kernels stays free.
unsigned ctas_of(int64_t threads, int sm_count) {
  int64_t const wanted = (threads + kThreads - 1) / kThreads;
  return unsigned(std::clamp<int64_t>(wanted, 1, sm_count));
}

}  // namespace

cudaError_t prepare_combine() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, open_kernel);
  for (CollectiveElement const element :
       {CollectiveElement::BFloat16, CollectiveElement::Float16, CollectiveElement::Float32}) {
    if (error != cudaSuccess) return error;
    error = cudaFuncGetAttributes(&attributes, reinterpret_cast<void const*>(kernel_of(element)));
  }
  return error;
}

cudaError_t launch_open(CombineArgs const& args, int sm_count, cudaStream_t stream) {
  int64_t const rows = args.rows[0] == nullptr ? 0 : int64_t(args.capacity) * args.vectors;
  int64_t const items = std::max<int64_t>(rows, int64_t(args.all_tokens) * args.choices);
  open_kernel<<<ctas_of(items, sm_count), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_combine(CombineArgs const& args, CollectiveElement element, int sm_count,
                           cudaStream_t stream) {
  int64_t const pieces = (args.vectors + kLanes - 1) / kLanes;
  unsigned const ctas = ctas_of(int64_t(args.tokens) * pieces * kLanes, sm_count);
  kernel_of(element)<<<ctas, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace agmm
