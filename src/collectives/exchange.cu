// The collectives. In a call every rank sends each other rank its segment, into that one's memory,
// and takes out what the others sent; an all-reduce in two steps then does so with the sums.
//
//   packets   group -> packet in the peer's memory | ... | own memory: wait, take out, add, store
//   blocks    groups -> the peer's memory | block's signal | ... | wait, add, store | ...
//
// Who waits for whom, and why it ends. CTA i waits for what CTA i of the other ranks sends: the
// ranks have the same grid and take the same groups in the same order. It sends all of its first
// step before it waits, so in the first step it waits only until those CTAs run; and a second step
// is sent when the first is there. CTAs start in the order of their numbers: where not all find
// room at once, the lowest that is not done runs on every rank, and nothing keeps it from ending.
//
// Why two slots are enough, without credits. A launch ends on no rank before it has begun on all:
// it ends when something has come from every rank, or a sum of what has. Launches of a rank run one
// after the other, each from its start to its end. So who begins launch n + 2 has ended n + 1,
// which the others have begun, so they have ended launch n and have taken everything out of its
// slot. The same slot is taken by all, since all make the same calls; each CTA counts for itself
// and for those that a smaller grid leaves out (`turns`), so nobody has to be last.
//
// Every flag and signal is reset by the thread that has seen it, at most one per launch and place;
// the reset is in the owner's memory before its next kernel begins, which is before a peer can
// write there again. So nothing that was left over is ever taken for new, in replayed graphs too.
//
// Memory order. A packet is one access of 128 bits: who sees the flag has the data. Of a block: the
// data of all threads, a barrier of the CTA, a release at system scope; then an acquire at system
// scope, a barrier, and loads past L1.
#include "collectives/exchange.hpp"

#include "collectives/packet_device.hpp"
#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"
#include "sync/device_wait.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"

namespace agmm {

namespace {

/// Time between looks for a call of another kind, in the units of a wait (2^20 ns).
constexpr uint32_t kOtherCallUnits = 1;

/// After a look that did not find the tag: returns unless the source has called with something else
/// or the wait has passed its limit.
CUTLASS_DEVICE void check_exchange_wait(ExchangeArgs const& args, int slot, uint32_t seen,
                                        int source, uint32_t& since) {
  uint32_t const waited = waited_units(since);
  // Past a millisecond a peer is late: leave the memory to others.
  if (waited >= kOtherCallUnits) __nanosleep(200);
  if (seen == 0 && waited >= kOtherCallUnits) {
    // The source may have sent less, or by the other carrier: its first words of either.
    char const* const own = args.memory[args.rank];
    auto const* const packets = reinterpret_cast<Packet const*>(
        own + args.packets[slot] + int64_t(source) * args.packet_stretch_bytes);
    auto const* const signals = reinterpret_cast<uint32_t const*>(own + args.signals[slot]);
    seen = load_packet(packets).flag;
    if (seen == 0 || seen == args.tag) seen = load_acquire_system(signals + source * args.blocks);
    if (seen == args.tag) seen = 0;
  }
  bool const mismatch = seen != 0 && seen != args.tag;
  if (mismatch || waited > limit_units(args.limit)) {
    report_and_stop(args.limit, mismatch ? WaitReport::Mismatch : WaitReport::Timeout, source, 0,
                    seen, args.tag, uint64_t(waited) << kLogWaitUnitNs);
  }
  if (lane_id() == 0) note_late(args.limit, false, source, waited);
}

template <class Element_, ExchangeStep kStep, Carrier kCarrier>
struct Exchange {
  using Element = Element_;
  static constexpr int kWords = kCarrier == Carrier::Packets ? Packet::kWords : kGroupBytes / 4;
  static constexpr int kElements = kWords * 4 / int(sizeof(Element));
  using Elements = cutlass::Array<Element, kElements>;

  struct alignas(kWords == 4 ? kGroupBytes : 4) Group {
    uint32_t words[kWords];
  };

  ExchangeArgs const& args;
  int const slot;

  CUTLASS_DEVICE Exchange(ExchangeArgs const& args_, int slot_) : args(args_), slot(slot_) {}

  CUTLASS_DEVICE void run() const {
    if constexpr (kCarrier == Carrier::Packets) {
      send_packets();
      stress_delay(args.rank);
      if constexpr (kStep == ExchangeStep::Gather) {
        gather_packets(0);
      } else {
        sum_packets();
      }
      if constexpr (kStep == ExchangeStep::SumAndShare) gather_packets(1);
    } else {
      send_blocks();
      if constexpr (kStep == ExchangeStep::Gather) {
        gather_blocks(0);
      } else {
        sum_blocks();
      }
      if constexpr (kStep == ExchangeStep::SumAndShare) gather_blocks(1);
    }
  }

 private:
  // Segments.

  CUTLASS_DEVICE int32_t length(int of_rank) const {
    if constexpr (kStep != ExchangeStep::SumAndShare) return args.count;
    int32_t const rest = args.total - of_rank * args.count;
    return rest < 0 ? 0 : rest < args.count ? rest : args.count;
  }
  CUTLASS_DEVICE static int32_t groups(int32_t elements) {
    return (elements + kElements - 1) / kElements;
  }
  CUTLASS_DEVICE int after(int distance) const {
    int const rank = args.rank + distance;
    return rank < args.world_size ? rank : rank - args.world_size;
  }
  CUTLASS_DEVICE Element const* input(int of_rank) const {
    return static_cast<Element const*>(args.in) + of_rank * args.in_stride;
  }
  CUTLASS_DEVICE Element* output(int of_rank) const {
    return static_cast<Element*>(args.out) + of_rank * args.out_stride;
  }

  CUTLASS_DEVICE Group load(Element const* from, int32_t group, int32_t count) const {
    int32_t const first = group * kElements;
    Group found{};
    if (args.is_aligned && first + kElements <= count) {
      if constexpr (kWords == 4) {
        reinterpret_cast<uint4&>(found) = *reinterpret_cast<uint4 const*>(from + first);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWords; ++i) {
          found.words[i] = reinterpret_cast<uint32_t const*>(from + first)[i];
        }
      }
      return found;
    }
    auto& elements = reinterpret_cast<Elements&>(found);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (first + i < count) elements[i] = from[first + i];
    }
    return found;
  }

  CUTLASS_DEVICE void store(Element* to, int32_t group, int32_t count, Group const& value) const {
    int32_t const first = group * kElements;
    if (args.is_aligned && first + kElements <= count) {
      if constexpr (kWords == 4) {
        *reinterpret_cast<uint4*>(to + first) = reinterpret_cast<uint4 const&>(value);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWords; ++i) {
          reinterpret_cast<uint32_t*>(to + first)[i] = value.words[i];
        }
      }
      return;
    }
    auto const& elements = reinterpret_cast<Elements const&>(value);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (first + i < count) to[first + i] = elements[i];
    }
  }

  // Sums, from the first rank's elements on: a sum of -0 stays -0.

  using Sum = cutlass::Array<float, kElements>;

  CUTLASS_DEVICE static void add(Sum& sum, Group const& group, bool is_first) {
    Sum const floats = cutlass::NumericArrayConverter<float, Element, kElements>::convert(
        reinterpret_cast<Elements const&>(group));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; ++i) sum[i] = is_first ? floats[i] : sum[i] + floats[i];
  }

  CUTLASS_DEVICE Group rounded(Sum sum) const {
    if (args.scale != 1.0f) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kElements; ++i) sum[i] *= args.scale;
    }
    Elements const elements =
        cutlass::NumericArrayConverter<Element, float, kElements>::convert(sum);
    return reinterpret_cast<Group const&>(elements);
  }

  // Places in the memory of a rank.

  CUTLASS_DEVICE char* stretch(int of_rank, int step, int source) const {
    int const data_slot = kOneSlot && kCarrier == Carrier::Blocks ? 0 : slot;
    return args.memory[of_rank] + args.data[data_slot] +
           int64_t(step * args.world_size + source) * args.stretch_bytes;
  }
  CUTLASS_DEVICE Packet* packets(int of_rank, int step, int source) const {
    return reinterpret_cast<Packet*>(stretch(of_rank, step, source));
  }
  CUTLASS_DEVICE uint4* vectors(int of_rank, int step, int source) const {
    return reinterpret_cast<uint4*>(stretch(of_rank, step, source));
  }
  CUTLASS_DEVICE uint32_t* signal(int of_rank, int step, int source, int32_t block) const {
    auto* const words = reinterpret_cast<uint32_t*>(args.memory[of_rank] + args.signals[slot]);
    return words + (step * args.world_size + source) * args.blocks + block;
  }

  // Packets. A thread takes every so-many-th group.

  CUTLASS_DEVICE static int32_t first_group() {
    return int32_t(blockIdx.x * blockDim.x + threadIdx.x);
  }
  CUTLASS_DEVICE static int32_t group_stride() { return int32_t(gridDim.x * blockDim.x); }

  CUTLASS_DEVICE static Packet packet_of(Group const& group, uint32_t tag) {
    return {{group.words[0], group.words[1], group.words[2]}, tag};
  }

  CUTLASS_DEVICE void send_packets() const {
    int32_t const end = groups(args.count);
    for (int32_t g = first_group(); g < end; g += group_stride()) {
      Group group[kMaxExchangeRanks - 1];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kMaxExchangeRanks - 1; ++i) {  // all are under way together
        if (i + 1 >= args.world_size) break;
        if (i > 0 && args.in_stride == 0) {
          group[i] = group[0];
        } else {
          group[i] = load(input(after(i + 1)), g, length(after(i + 1)));
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kMaxExchangeRanks - 1; ++i) {
        if (i + 1 >= args.world_size) break;
        int const peer = after(i + 1);
        stress_delay(args.rank);
        if (g < groups(length(peer))) {
          store_packet(packets(peer, 0, args.rank) + g, packet_of(group[i], args.tag));
        }
      }
      if constexpr (kStep == ExchangeStep::Gather) {
        if (output(args.rank) != input(args.rank))
          store(output(args.rank), g, args.count, group[0]);
      }
    }
  }

  static CUTLASS_DEVICE Group group_of(Packet const& packet) {
    return {{packet.data[0], packet.data[1], packet.data[2]}};
  }

  /// Whether a group comes from this rank.
  CUTLASS_DEVICE bool comes_from(int source, int32_t group, int32_t count) const {
    return source < args.world_size && source != args.rank && group < groups(count);
  }

  /// Takes out all packets of a group. `counts(source)`: elements that the source sends.
  template <class Counts>
  CUTLASS_DEVICE void take(int step, int32_t group, Counts const& counts,
                           Packet (&found)[kMaxExchangeRanks]) const {
    uint32_t pending = 0;  // a bit for each source
    CUTLASS_PRAGMA_UNROLL
    for (int source = 0; source < kMaxExchangeRanks; ++source) {
      found[source] = Packet{};
      if (comes_from(source, group, counts(source))) pending |= 1u << source;
    }
    uint32_t const coming = pending;
    uint32_t since = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      // All are under way together.
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMaxExchangeRanks; ++source) {
        load_packet_if((pending >> source & 1u) != 0, found[source],
                       packets(args.rank, step, source) + group);
      }
      int missing = -1;
      uint32_t seen = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMaxExchangeRanks; ++source) {
        if (found[source].flag == args.tag) {
          pending &= ~(1u << source);
        } else if ((pending >> source & 1u) != 0 && seen == 0) {
          missing = source;  // rather one that called with something else
          seen = found[source].flag;
        }
      }
      if (pending != 0) check_exchange_wait(args, slot, seen, missing, since);
    } while (pending != 0 && !kNoWait);
    CUTLASS_PRAGMA_UNROLL
    for (int source = 0; source < kMaxExchangeRanks; ++source) {
      if ((coming >> source & 1u) == 0) continue;
      Packet* const place = packets(args.rank, step, source) + group;
      if constexpr (kNoWait) {
        // With the fault too every packet is taken out once.
        while (load_packet(place).flag != args.tag)
          check_exchange_wait(args, slot, 0, source, since);
      }
      place->flag = 0;
    }
  }

  CUTLASS_DEVICE void sum_packets() const {
    int32_t const count = length(args.rank);
    for (int32_t g = first_group(); g < groups(count); g += group_stride()) {
      Group const own = load(input(args.rank), g, count);
      Packet found[kMaxExchangeRanks];
      take(0, g, [&](int) { return count; }, found);
      Sum sum{};
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMaxExchangeRanks; ++source) {
        if (source >= args.world_size) continue;
        add(sum, source == args.rank ? own : group_of(found[source]), source == 0);
      }
      Group const result = rounded(sum);
      store(output(args.rank), g, count, result);
      if constexpr (kStep == ExchangeStep::SumAndShare) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int distance = 1; distance < args.world_size; ++distance) {
          stress_delay(args.rank);
          store_packet(packets(after(distance), 1, args.rank) + g, packet_of(result, args.tag));
        }
      }
    }
  }

  CUTLASS_DEVICE void gather_packets(int step) const {
    int32_t const end = groups(args.count);
    for (int32_t g = first_group(); g < end; g += group_stride()) {
      Packet found[kMaxExchangeRanks];
      take(step, g, [&](int source) { return length(source); }, found);
      CUTLASS_PRAGMA_UNROLL
      for (int source = 0; source < kMaxExchangeRanks; ++source) {
        int32_t const count = length(source);
        if (!comes_from(source, g, count)) continue;
        store(output(source), g, count, group_of(found[source]));
      }
    }
  }

  // Blocks. A CTA takes every so-many-th.
  //
  // Invariant, here and for packets: a group of any segment is read, to be sent or added, and its
  // result or what came in its place is written, by one and the same thread, which sends first. So
  // an all-reduce may work in place.

  CUTLASS_DEVICE int32_t block_count() const {
    int32_t const block = args.thread_groups * kExchangeThreads;
    return (groups(args.count) + block - 1) / block;
  }
  CUTLASS_DEVICE int32_t group_at(int32_t block, int i) const {
    return (block * args.thread_groups + i) * kExchangeThreads + int(threadIdx.x);
  }

  /// A block has been written to all peers by all threads; also an empty one, so that every rank
  /// signals as often.
  CUTLASS_DEVICE void signal_block(int step, int32_t block) const {
    stress_delay(args.rank);
    if constexpr (!kSignalFirst) __syncthreads();
    if (int(threadIdx.x) < args.world_size - 1) {
      uint32_t* const word = signal(after(int(threadIdx.x) + 1), step, args.rank, block);
      if constexpr (kNoFence) {
        store_relaxed_system(word, args.tag);
      } else {
        store_release_system(word, args.tag);
      }
    }
    if constexpr (kSignalFirst) __syncthreads();
  }

  CUTLASS_DEVICE void await_block(int step, int32_t block) const {
    if (int(threadIdx.x) < args.world_size - 1) {
      int const source = after(int(threadIdx.x) + 1);
      uint32_t* const word = signal(args.rank, step, source, block);
      uint32_t since = 0;
      for (;;) {
        uint32_t const seen = load_acquire_system(word);
        if (seen == args.tag) break;
        check_exchange_wait(args, slot, seen, source, since);
      }
      *word = 0;
    }
    __syncthreads();
  }

  CUTLASS_DEVICE void send_blocks() const {
    for (int32_t block = int32_t(blockIdx.x); block < block_count(); block += int32_t(gridDim.x)) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int distance = 1; distance < args.world_size; ++distance) {
        int const peer = after(distance);
        int32_t const count = length(peer);
        Group loaded[kMaxThreadGroups];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMaxThreadGroups; ++i) {
          if (i >= args.thread_groups) break;
          loaded[i] = load(input(peer), group_at(block, i), count);
        }
        stress_delay(args.rank);
        uint4* const to = vectors(peer, 0, args.rank);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMaxThreadGroups; ++i) {
          if (i >= args.thread_groups) break;
          if (group_at(block, i) < groups(count)) {
            to[group_at(block, i)] = reinterpret_cast<uint4 const&>(loaded[i]);
          }
        }
      }
      signal_block(0, block);
    }
    if constexpr (kStep == ExchangeStep::Gather) {
      if (output(args.rank) == input(args.rank)) return;
      for (int32_t g = first_group(); g < groups(args.count); g += group_stride()) {
        store(output(args.rank), g, args.count, load(input(args.rank), g, args.count));
      }
    }
  }

  CUTLASS_DEVICE Group received(int step, int source, int32_t group) const {
    uint4 const found = __ldcg(vectors(args.rank, step, source) + group);
    return reinterpret_cast<Group const&>(found);
  }

  CUTLASS_DEVICE void sum_blocks() const {
    int32_t const count = length(args.rank);
    for (int32_t block = int32_t(blockIdx.x); block < block_count(); block += int32_t(gridDim.x)) {
      if constexpr (!kNoWait) await_block(0, block);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kMaxThreadGroups; ++i) {
        if (i >= args.thread_groups) break;
        int32_t const g = group_at(block, i);
        if (g >= groups(count)) continue;
        Group parts[kMaxExchangeRanks];
        CUTLASS_PRAGMA_UNROLL
        for (int source = 0; source < kMaxExchangeRanks; ++source) {
          if (source >= args.world_size) continue;
          parts[source] =
              source == args.rank ? load(input(source), g, count) : received(0, source, g);
        }
        Sum sum{};
        CUTLASS_PRAGMA_UNROLL
        for (int source = 0; source < kMaxExchangeRanks; ++source) {
          if (source < args.world_size) add(sum, parts[source], source == 0);
        }
        Group const result = rounded(sum);
        store(output(args.rank), g, count, result);
        if constexpr (kStep == ExchangeStep::SumAndShare) {
          CUTLASS_PRAGMA_NO_UNROLL
          for (int distance = 1; distance < args.world_size; ++distance) {
            vectors(after(distance), 1, args.rank)[g] = reinterpret_cast<uint4 const&>(result);
          }
        }
      }
      if constexpr (kNoWait) await_block(0, block);
      if constexpr (kStep == ExchangeStep::SumAndShare) signal_block(1, block);
    }
  }

  CUTLASS_DEVICE void gather_blocks(int step) const {
    for (int32_t block = int32_t(blockIdx.x); block < block_count(); block += int32_t(gridDim.x)) {
      if constexpr (!kNoWait) await_block(step, block);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int distance = 1; distance < args.world_size; ++distance) {
        int const source = after(distance);
        int32_t const count = length(source);
        Group found[kMaxThreadGroups];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMaxThreadGroups; ++i) {
          if (i >= args.thread_groups) break;
          found[i] = received(step, source, group_at(block, i));  // in the workspace, sent or not
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMaxThreadGroups; ++i) {
          if (i >= args.thread_groups) break;
          int32_t const g = group_at(block, i);
          if (g < groups(count)) store(output(source), g, count, found[i]);
        }
      }
      if constexpr (kNoWait) await_block(step, block);
    }
  }
};

template <class Element, ExchangeStep kStep, Carrier kCarrier>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    exchange_kernel(__grid_constant__ ExchangeArgs const args) {
  auto* const turns = reinterpret_cast<uint32_t*>(args.memory[args.rank] + args.turns);
  int const slot = int(__ldcg(turns + blockIdx.x));
  Exchange<Element, kStep, kCarrier>(args, slot).run();
  __syncthreads();  // all have read the turn
  for (int i = blockIdx.x + threadIdx.x * gridDim.x; i < kMaxExchangeCtas;
       i += blockDim.x * gridDim.x) {
    turns[i] = uint32_t(1 - slot);
  }
}

using Kernel = void (*)(ExchangeArgs);

template <class Element, Carrier kCarrier>
Kernel kernel_of(ExchangeStep step) {
  return step == ExchangeStep::Sum ? exchange_kernel<Element, ExchangeStep::Sum, kCarrier>
                                   : exchange_kernel<Element, ExchangeStep::SumAndShare, kCarrier>;
}

template <Carrier kCarrier>
Kernel kernel_of(CollectiveElement element, ExchangeStep step) {
  // What is gathered is bytes.
  if (step == ExchangeStep::Gather) return exchange_kernel<uint8_t, ExchangeStep::Gather, kCarrier>;
  switch (element) {
    case CollectiveElement::BFloat16:
      return kernel_of<cutlass::bfloat16_t, kCarrier>(step);
    case CollectiveElement::Float16:
      return kernel_of<cutlass::half_t, kCarrier>(step);
    case CollectiveElement::Float32:
      return kernel_of<float, kCarrier>(step);
    case CollectiveElement::Byte:
      break;
  }
  return nullptr;
}

Kernel kernel_of(CollectiveElement element, ExchangeStep step, Carrier carrier) {
  return carrier == Carrier::Packets ? kernel_of<Carrier::Packets>(element, step)
                                     : kernel_of<Carrier::Blocks>(element, step);
}

}  // namespace

cudaError_t prepare_exchanges() {
  for (Carrier const carrier : {Carrier::Packets, Carrier::Blocks}) {
    for (ExchangeStep const step :
         {ExchangeStep::Gather, ExchangeStep::Sum, ExchangeStep::SumAndShare}) {
      for (CollectiveElement const element :
           {CollectiveElement::BFloat16, CollectiveElement::Float16, CollectiveElement::Float32}) {
        cudaFuncAttributes attributes{};
        auto const* const kernel = reinterpret_cast<void const*>(kernel_of(element, step, carrier));
        cudaError_t const error = cudaFuncGetAttributes(&attributes, kernel);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t launch_exchange(ExchangeArgs const& args, CollectiveElement element, ExchangeStep step,
                            Carrier carrier, ExchangeGrid const& grid, cudaStream_t stream) {
  ExchangeArgs copy = args;
  void* params[] = {&copy};
  auto const* const kernel = reinterpret_cast<void const*>(kernel_of(element, step, carrier));
  return cudaLaunchKernel(kernel, dim3(unsigned(grid.ctas)), dim3(unsigned(grid.threads)), params,
                          0, stream);
}

}  // namespace agmm
