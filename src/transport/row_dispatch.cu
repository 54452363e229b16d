#include "transport/row_dispatch.hpp"

#include <algorithm>

#include "order/grouped_tiles.hpp"
#include "sync/device_wait.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"

namespace agmm {

namespace {

// Offers are made as the transports' shards are staged (stage.cu).
constexpr int kOfferThreads = 512;
constexpr int kOfferCtasPerSm = 2;

constexpr int kDispatchThreads = 768;
constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
/// Vectors of a row that a lane has under way. With them a thread fills the 80 registers that 768
/// threads leave it; of 1,024 it would spill.
constexpr int kTogether = 8;

/// The tags of the sources in a rank's memory.
CUTLASS_DEVICE uint32_t* offers(DispatchArgs const& args, int rank, int slot) {
  return reinterpret_cast<uint32_t*>(args.memory[rank] + args.offers + slot * args.words_of_slot);
}

/// The tokens that a rank offers in a slot.
CUTLASS_DEVICE char* offered(DispatchArgs const& args, int rank, int slot) {
  return args.memory[rank] + (kOneSlot ? 0 : slot) * args.slot_bytes;
}

CUTLASS_DEVICE void add_release_gpu(uint32_t* word, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

CUTLASS_DEVICE void add_to_count(uint32_t* word) {
  if constexpr (kNoFence) {
    add_relaxed_gpu(word, 1);
  } else {
    add_release_gpu(word, 1);
  }
}

/// The rows that there are: offsets that are wrong give rows that exist.
CUTLASS_DEVICE int32_t clamped(DispatchArgs const& args, int32_t offset) {
  return max_of(0, min_of(offset, args.capacity));
}

/// Whether the calling CTA is the last one of its launch. All threads call it; what the threads of
/// all CTAs did before is visible to those of the last one.
CUTLASS_DEVICE bool is_last_cta(DispatchArgs const& args) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = add_acq_rel_gpu(args.finished, 1) + 1 == gridDim.x;
    if (is_last) *args.finished = 0;
  }
  __syncthreads();
  return is_last;
}

/// The first row of an expert whose token is not before `token`.
CUTLASS_DEVICE int32_t first_row(DispatchArgs const& args, int32_t expert, int32_t token) {
  int32_t low = clamped(args, __ldg(args.offsets + expert));
  int32_t high = max_of(low, clamped(args, __ldg(args.offsets + expert + 1)));
  while (low < high) {
    int32_t const middle = (low + high) / 2;
    if (__ldg(args.tokens + middle) < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

CUTLASS_DEVICE void tell_peers(DispatchArgs const& args, int slot) {
  int const peer = int(threadIdx.x);
  if (peer >= args.world_size || peer == args.rank) return;
  store_release_system(offers(args, peer, slot) + args.rank, args.tag);
}

__global__ void __launch_bounds__(kOfferThreads)
    offer_kernel(__grid_constant__ DispatchArgs const args) {
  int const slot = int(load_relaxed_gpu(args.turn));
  stress_delay(args.rank);
  if constexpr (kSignalFirst) tell_peers(args, slot);

  auto const first = int64_t(blockIdx.x) * kOfferThreads + threadIdx.x;
  auto const stride = int64_t(gridDim.x) * kOfferThreads;
  int32_t const own = args.first_token[args.rank + 1] - args.first_token[args.rank];
  auto const* const from = reinterpret_cast<uint4 const*>(args.x);
  auto* const to = reinterpret_cast<uint4*>(offered(args, args.rank, slot));
  for (int64_t i = first; i < int64_t(own) * args.vectors; i += stride) to[i] = from[i];
  int32_t const segments = args.experts * args.world_size;
  for (int64_t i = first; i < segments; i += stride) {
    auto const expert = int32_t(i) / args.world_size;
    auto const source = int32_t(i) % args.world_size;
    args.begins[i] = first_row(args, expert, args.first_token[source]);
    args.arrived[i] = 0;
  }

  if (!is_last_cta(args)) return;
  if (threadIdx.x == 0) *args.turn = uint32_t(1 - slot);
  if constexpr (!kSignalFirst) tell_peers(args, slot);
}

/// What a warp of dispatch does. Warps take rows one by one in their order, so that the experts'
/// rows come in the order in which the matmul wants them.
struct Dispatch {
  DispatchArgs const& args;
  int32_t const* offsets;  // of the experts' rows, in shared memory, clamped
  int slot;
  uint32_t seen = 0;  // the sources whose tags this warp has acquired

  CUTLASS_DEVICE static int32_t warp() {
    return int32_t(blockIdx.x * (kDispatchThreads / kLanes) + threadIdx.x / kLanes);
  }
  CUTLASS_DEVICE static int32_t warps() { return int32_t(gridDim.x) * (kDispatchThreads / kLanes); }

  CUTLASS_DEVICE int source_of(int32_t token) const {
    int source = 0;
    while (source + 1 < args.world_size && token >= args.first_token[source + 1]) ++source;
    return source;
  }

  CUTLASS_DEVICE void await(int source) {
    if (source == args.rank || (seen >> source & 1u) != 0) return;
    if (lane_id() == 0 && !kNoWait) {
      wait_signal(offers(args, args.rank, slot) + source, args.tag, source, args.limit);
    }
    __syncwarp();
    seen |= 1u << source;
  }

  /// The row of a choice of a token, or -1.
  CUTLASS_DEVICE int32_t row_of(int32_t token, int choice) const {
    int32_t const row = __ldg(args.positions + int64_t(token) * args.choices + choice);
    return row < offsets[args.experts] ? row : -1;
  }

  /// Calls `body(token)` with the tokens of all those numbers, from 0 to `end`, of which
  /// `token_of(number)`, which the lanes call each for another number, is not -1.
  template <class TokenOf, class Body>
  CUTLASS_DEVICE static void each_token(int32_t end, TokenOf const& token_of, Body const& body) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t first = warp(); first < end; first += int64_t(kLanes) * warps()) {
      int64_t const number = first + int64_t(lane_id()) * warps();
      int32_t const token = number < end ? token_of(int32_t(number)) : -1;
      uint32_t left = __ballot_sync(kAllLanes, token >= 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; left != 0; left &= left - 1) {
        body(__shfl_sync(kAllLanes, token, __ffs(int(left)) - 1));
      }
    }
  }

  /// Brings a token to all of its rows, and counts them.
  CUTLASS_DEVICE void bring(int32_t token) {
    int const source = source_of(token);
    await(source);
    stress_delay_warp(args.rank);
    int32_t const row = lane_id() < args.choices ? row_of(token, lane_id()) : -1;
    uint32_t const places = __ballot_sync(kAllLanes, row >= 0);
    int64_t const row_bytes = int64_t(args.vectors) * int64_t(sizeof(uint4));
    int64_t const in_source = (token - args.first_token[source]) * row_bytes;
    char const* const shard = source == args.rank ? args.x : offered(args, source, slot);
    auto const* const from = reinterpret_cast<uint4 const*>(shard + in_source);
    if constexpr (kSignalFirst || kNoFence) count(source, row);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t first = lane_id(); first < args.vectors; first += kTogether * kLanes) {
      uint4 held[kTogether];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        if (first + i * kLanes < args.vectors) held[i] = __ldcg(from + first + i * kLanes);
      }
      auto const store = [&](char* at) {
        auto* const to = reinterpret_cast<uint4*>(at);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          if (first + i * kLanes < args.vectors) to[first + i * kLanes] = held[i];
        }
      };
      // The lanes of a warp may leave the loop of vectors at different times; so the rows come from
      // memory here, not from other lanes.
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t left = places; left != 0; left &= left - 1) {
        store(args.rows + row_of(token, __ffs(int(left)) - 1) * row_bytes);
      }
      if (args.gathered != nullptr) store(args.gathered + token * row_bytes);
    }
    __syncwarp();
    if constexpr (!kSignalFirst && !kNoFence) count(source, row);
  }

  CUTLASS_DEVICE void count(int source, int32_t row) const {
    if (row < 0) return;
    int32_t const expert = expert_of_block(offsets, args.experts, row);
    add_to_count(args.arrived + source * args.experts + expert);
  }

  /// The token of a row, if no row before it holds the token too.
  CUTLASS_DEVICE int32_t token_of_row(int32_t row) const {
    int32_t const token = __ldg(args.tokens + row);
    if (token < 0 || token >= args.first_token[args.world_size]) return -1;
    for (int choice = 0; choice < args.choices; ++choice) {
      int32_t const other = row_of(token, choice);
      if (other >= 0 && other < row) return -1;
    }
    return token;
  }

  /// The token, if no row holds it.
  CUTLASS_DEVICE int32_t unwanted(int32_t token) const {
    for (int choice = 0; choice < args.choices; ++choice) {
      if (row_of(token, choice) >= 0) return -1;
    }
    return token;
  }

  CUTLASS_DEVICE void run() {
    each_token(
        offsets[args.experts], [&](int32_t row) { return token_of_row(row); },
        [&](int32_t token) { bring(token); });
    if (args.gathered == nullptr) return;
    each_token(
        args.first_token[args.world_size], [&](int32_t token) { return unwanted(token); },
        [&](int32_t token) { bring(token); });
  }
};

__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_kernel(__grid_constant__ DispatchArgs const args) {
  // A matmul may start when all CTAs of this launch run.
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  __shared__ int32_t offsets[kMostExperts + 1];
  for (int i = int(threadIdx.x); i <= args.experts; i += kDispatchThreads) {
    offsets[i] = clamped(args, __ldg(args.offsets + i));
  }
  // The offer ahead in the stream has taken its turn.
  int const slot = 1 - int(load_relaxed_gpu(args.turn));
  __syncthreads();
  Dispatch{args, offsets, slot}.run();

  if (!is_last_cta(args)) return;
  int const source = int(threadIdx.x);
  if (source >= args.world_size || source == args.rank) return;
  // The rank may have wanted no row of a source, which offers all the same.
  uint32_t* const offer = offers(args, args.rank, slot) + source;
  wait_signal(offer, args.tag, source, args.limit);
  *offer = 0;
}

}  // namespace

cudaError_t prepare_dispatch() {
  cudaFuncAttributes attributes{};
  cudaError_t const error = cudaFuncGetAttributes(&attributes, offer_kernel);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, dispatch_kernel);
}

cudaError_t launch_offer(DispatchArgs const& args, int sm_count, cudaStream_t stream) {
  int64_t const own = args.first_token[args.rank + 1] - args.first_token[args.rank];
  int64_t const items = std::max<int64_t>(own * args.vectors, args.experts * args.world_size);
  int64_t const wanted = (items + kOfferThreads - 1) / kOfferThreads;
  auto const ctas =
      static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, int64_t(sm_count) * kOfferCtasPerSm));
  offer_kernel<<<ctas, kOfferThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_dispatch(DispatchArgs const& args, int ctas, bool in_pairs,
                            cudaStream_t stream) {
  cudaLaunchAttribute pair{};
  pair.id = cudaLaunchAttributeClusterDimension;
  pair.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ctas));
  config.blockDim = dim3(kDispatchThreads);
  config.stream = stream;
  config.attrs = &pair;
  config.numAttrs = in_pairs ? 1 : 0;
  return cudaLaunchKernelEx(&config, dispatch_kernel, args);
}

}  // namespace agmm
