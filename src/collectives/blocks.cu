// Collectives by blocks: data alone, and a signal for each block.
//
// Memory order. The data of all threads of the source's CTA, a barrier of the CTA, a release at
// system scope by the thread that signals; then an acquire at system scope by the thread that
// waits, a barrier, and loads past L1.
#include "collectives/exchange_device.hpp"

namespace agmm {

namespace {

// A CTA takes every so-many-th block.
//
// Invariant, here and for packets: a group of any segment is read, to be sent or added, and its
// result or what came in its place is written, by one and the same thread, which sends first. So
// an all-reduce may work in place.
template <class Element_, ExchangeStep kStep, int kMost>
struct Blocks : Exchange<Element_, kGroupBytes / 4, kStep, kMost> {
  using Base = Exchange<Element_, kGroupBytes / 4, kStep, kMost>;
  using Base::after, Base::args, Base::first_group, Base::group_stride, Base::is_there, Base::slot;
  using Base::Base;
  using typename Base::Group;

  // Groups of a thread that are under way to or from all peers together: of each peer so many that
  // with 16 bytes each and 512 threads some 60 KB are, more than latency times bandwidth.
  static constexpr int kTogether = kMaxExchangeRanks / kMost;
  static_assert(kMaxThreadGroups % kTogether == 0);

  CUTLASS_DEVICE uint4* vectors(int distance, int step, int source) const {
    return reinterpret_cast<uint4*>(args.slots[distance] + Base::place(step, source, 0, false));
  }
  CUTLASS_DEVICE uint32_t* signal(int distance, int step, int source, int32_t block) const {
    auto* const words = reinterpret_cast<uint32_t*>(args.slots[distance] + args.signals +
                                                    slot * args.signal_slot_bytes);
    return words + (step * args.world_size + source) * args.blocks + block;
  }
  CUTLASS_DEVICE Group received(int step, int source, int32_t group) const {
    uint4 const found = __ldcg(vectors(0, step, source) + group);
    return reinterpret_cast<Group const&>(found);
  }

  CUTLASS_DEVICE int32_t block_count() const {
    int32_t const block = args.thread_groups * int32_t(blockDim.x);
    return (args.groups + block - 1) / block;
  }
  CUTLASS_DEVICE int32_t group_at(int32_t block, int i) const {
    return (block * args.thread_groups + i) * int32_t(blockDim.x) + int32_t(threadIdx.x);
  }

  CUTLASS_DEVICE bool has(int of_rank, int32_t group) const {
    return group < args.groups && is_there(of_rank, group);
  }

  /// Calls `body(g[kTogether], is_last)` with the groups of this thread in a block; those that a
  /// segment does not have are beyond its end.
  template <class Body>
  CUTLASS_DEVICE void each_group(int32_t block, Body const& body) const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < args.thread_groups; i += kTogether) {
      int32_t g[kTogether];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTogether; ++j) {
        g[j] = i + j < args.thread_groups ? group_at(block, i + j) : INT32_MAX;
      }
      body(g, i + kTogether >= args.thread_groups);
    }
  }

  // The faults: a signal before its block is written, or while the last of it is not to be seen
  // yet, as without the release, which a GPU does not show of its own memory.
  static constexpr bool kSignalsAfter = !kSignalFirst && !kNoFence;

  /// A block has been written to all peers by all threads; also an empty one, so that every rank
  /// signals as often.
  CUTLASS_DEVICE void signal_block(int step, int32_t block) const {
    stress_delay(args.rank);
    __syncthreads();
    if (int(threadIdx.x) < args.world_size - 1) {
      uint32_t* const word = signal(int(threadIdx.x) + 1, step, args.rank, block);
      if constexpr (kNoFence) {
        store_relaxed_system(word, args.tag);
      } else {
        store_release_system(word, args.tag);
      }
    }
  }

  CUTLASS_DEVICE void await_block(int step, int32_t block) const {
    if (int(threadIdx.x) < args.world_size - 1) {
      int const source = after(int(threadIdx.x) + 1);
      uint32_t* const word = signal(0, step, source, block);
      uint32_t since = 0;
      for (;;) {
        uint32_t const seen = load_acquire_system(word);
        if (seen == args.tag) break;
        since = check_exchange_wait(args, slot, 1u << source, seen, source, since);
      }
      *word = 0;
    }
    __syncthreads();
  }

  CUTLASS_DEVICE void send() {
    slot = slot_of_launch(args);
    int32_t const count = block_count();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t block = int32_t(blockIdx.x); block < count; block += int32_t(gridDim.x)) {
      if constexpr (kSignalFirst) signal_block(0, block);
      each_group(block, [&](int32_t const(&g)[kTogether], [[maybe_unused]] bool is_last) {
        Group loaded[kMost - 1][kTogether];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMost - 1; ++i) {
          if (i + 1 >= args.world_size) break;
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kTogether; ++j) {
            if (has(after(i + 1), g[j])) loaded[i][j] = Base::load(after(i + 1), g[j]);
          }
        }
        if constexpr (kNoFence) {
          if (is_last) signal_block(0, block);
        }
        stress_delay(args.rank);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMost - 1; ++i) {
          if (i + 1 >= args.world_size) break;
          uint4* const to = vectors(i + 1, 0, args.rank);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kTogether; ++j) {
            if (has(after(i + 1), g[j])) to[g[j]] = reinterpret_cast<uint4&>(loaded[i][j]);
          }
        }
      });
      if constexpr (kSignalsAfter) signal_block(0, block);
    }
    if constexpr (is_gather(kStep)) {
      if (Base::is_in_place()) return;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t g = first_group(); g < args.groups; g += group_stride()) {
        Base::store(args.rank, g, Base::load(args.rank, g));
      }
    }
  }

  CUTLASS_DEVICE void sum() const {
    int32_t const count = block_count();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t block = int32_t(blockIdx.x); block < count; block += int32_t(gridDim.x)) {
      if constexpr (!kNoWait) await_block(0, block);
      constexpr bool kShares = kStep == ExchangeStep::SumAndShare;
      if constexpr (kShares && kSignalFirst) signal_block(1, block);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < args.thread_groups; ++i) {
        if constexpr (kShares && kNoFence) {
          if (i + 1 == args.thread_groups) signal_block(1, block);
        }
        int32_t const g = group_at(block, i);
        if (!has(args.rank, g)) continue;
        Group parts[kMost];
        CUTLASS_PRAGMA_UNROLL
        for (int source = 0; source < kMost; ++source) {
          if (source >= args.world_size) break;
          parts[source] = source == args.rank ? Base::load(source, g) : received(0, source, g);
        }
        Group const result = Base::sum_of([&](int source) { return parts[source]; });
        if constexpr (kShares) {
          stress_delay(args.rank);
          CUTLASS_PRAGMA_UNROLL
          for (int distance = 1; distance < kMost; ++distance) {
            if (distance >= args.world_size) break;
            vectors(distance, 1, args.rank)[g] = reinterpret_cast<uint4 const&>(result);
          }
        }
        Base::store(args.rank, g, result);
      }
      if constexpr (kNoWait) await_block(0, block);
      if constexpr (kShares && kSignalsAfter) signal_block(1, block);
    }
  }

  CUTLASS_DEVICE void gather(int step) const {
    int32_t const count = block_count();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t block = int32_t(blockIdx.x); block < count; block += int32_t(gridDim.x)) {
      if constexpr (!kNoWait) await_block(step, block);
      each_group(block, [&](int32_t const(&g)[kTogether], bool) {
        Group found[kMost - 1][kTogether];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMost - 1; ++i) {
          if (i + 1 >= args.world_size) break;
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kTogether; ++j) {
            int const source = after(i + 1);
            if (has(source, g[j])) found[i][j] = received(step, source, g[j]);
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMost - 1; ++i) {
          if (i + 1 >= args.world_size) break;
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kTogether; ++j) {
            int const source = after(i + 1);
            if (has(source, g[j])) Base::store(source, g[j], found[i][j]);
          }
        }
      });
      if constexpr (kNoWait) await_block(step, block);
    }
  }
};

template <class Element, ExchangeStep kStep, int kMost>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    blocks_kernel(__grid_constant__ ExchangeArgs const args) {
  Blocks<Element, kStep, kMost> exchange(args);
  exchange.send();
  pass_turn(args, exchange.slot);
  stress_delay(args.rank);
  if constexpr (is_gather(kStep)) {
    exchange.gather(0);
  } else {
    exchange.sum();
  }
  if constexpr (kStep == ExchangeStep::SumAndShare) exchange.gather(1);
}

template <class Element, ExchangeStep kStep, int kMost>
struct BlocksKernel {
  static constexpr ExchangeKernel kKernel = blocks_kernel<Element, kStep, kMost>;
};

}  // namespace

ExchangeKernel blocks_kernel_of(CollectiveElement element, ExchangeStep step, int world_size) {
  return exchange_kernel_of<BlocksKernel>(element, step, world_size);
}

}  // namespace agmm
