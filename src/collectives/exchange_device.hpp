// Device side of the collectives, whatever carries the data: groups of elements, their sums, and
// waits that end. exchange.hpp says who waits for whom.
#pragma once

#include "collectives/exchange.hpp"
#include "collectives/packet_device.hpp"
#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"
#include "sync/device_wait.hpp"
#include "testing/fault.hpp"
#include "testing/stress_delay.hpp"

namespace agmm {

/// Time between looks for a call of another kind, in the units of a wait (2^20 ns).
constexpr uint32_t kOtherCallUnits = 1;

static_assert(kMaxLateSources >= kMaxExchangeRanks);

/// Leaves word of all sources that a wait has not heard of.
CUTLASS_DEVICE void note_late_sources(WaitLimit const& limit, uint32_t sources, uint32_t waited) {
  WaitReport volatile* const report = limit.place.report;
  if (waited % LateWait::kUnits != LateWait::kUnits - 1 || report == nullptr) return;
  for (int source = 0; source < kMaxExchangeRanks; ++source) {  // before note_late: the host looks
    if ((sources >> source & 1u) != 0) report->late_of[source] = waited;
  }
  note_late(limit, false, __ffs(int(sources)) - 1, waited);
}

/// Called after a look that did not find the tag of `sources`, a bit for each. Returns unless one
/// of them has called with something else or the wait has passed its limit. `seen`: what was found
/// of `source`. `since`: see waited_units(); returns the new one. It is a function of its own, so
/// that a call whose peers are in time does not fetch its code.
static __noinline__ __device__ uint32_t check_exchange_wait(ExchangeArgs const& args, int slot,
                                                            uint32_t sources, uint32_t seen,
                                                            int source, uint32_t since) {
  uint32_t const waited = waited_units(since);
  // Past a millisecond a peer is late: leave the memory to others.
  if (waited >= kOtherCallUnits) __nanosleep(200);
  if (seen == 0 && waited >= kOtherCallUnits) {
    // The source may have sent less, or by the other carrier: its first words of either.
    auto const* const packets = reinterpret_cast<Packet const*>(
        args.own_packets[slot] + int64_t(source) * args.packet_stretch_bytes);
    auto const* const signals = reinterpret_cast<uint32_t const*>(args.own_signals[slot]);
    seen = load_packet(packets).flag;
    if (seen == 0 || seen == args.tag) seen = load_acquire_system(signals + source * args.blocks);
    if (seen == args.tag) seen = 0;
  }
  bool const mismatch = seen != 0 && seen != args.tag;
  if (mismatch || waited > limit_units(args.limit)) {
    report_and_stop(args.limit, mismatch ? WaitReport::Mismatch : WaitReport::Timeout, source, 0,
                    seen, args.tag, uint64_t(waited) << kLogWaitUnitNs);
  }
  note_late_sources(args.limit, sources, waited);
  return since;
}

/// What one thread moves at a time: `kWords` words of elements.
template <class Element_, int kWords>
struct Groups {
  using Element = Element_;
  static constexpr int kBytes = kWords * 4;
  static constexpr int kElements = kBytes / int(sizeof(Element));
  using Elements = cutlass::Array<Element, kElements>;
  using Sum = cutlass::Array<float, kElements>;

  struct alignas(kWords == 4 ? kGroupBytes : 4) Group {
    uint32_t words[kWords];
  };

  CUTLASS_DEVICE static Group load_whole(char const* from) {
    Group found;
    if constexpr (kWords == 4) {
      reinterpret_cast<uint4&>(found) = *reinterpret_cast<uint4 const*>(from);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords; ++i) found.words[i] = reinterpret_cast<uint32_t const*>(from)[i];
    }
    return found;
  }

  CUTLASS_DEVICE static void store_whole(char* to, Group const& value) {
    if constexpr (kWords == 4) {
      *reinterpret_cast<uint4*>(to) = reinterpret_cast<uint4 const&>(value);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(to)[i] = value.words[i];
    }
  }

  // The end of a segment, and what lies at odd addresses. Functions of their own: most calls have
  // neither, and do not fetch this code.

  static __noinline__ __device__ Group load_elements(char const* from, int32_t count) {
    Group found{};
    auto& elements = reinterpret_cast<Elements&>(found);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i < count) elements[i] = reinterpret_cast<Element const*>(from)[i];
    }
    return found;
  }

  static __noinline__ __device__ void store_elements(char* to, int32_t count, Group value) {
    auto const& elements = reinterpret_cast<Elements const&>(value);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i < count) reinterpret_cast<Element*>(to)[i] = elements[i];
    }
  }

  // Sums, from the first rank's elements on: a sum of -0 stays -0.

  CUTLASS_DEVICE static Sum floats(Group const& group) {
    return cutlass::NumericArrayConverter<float, Element, kElements>::convert(
        reinterpret_cast<Elements const&>(group));
  }

  CUTLASS_DEVICE static void add(Sum& sum, Group const& group, bool is_first) {
    Sum const more = floats(group);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; ++i) sum[i] = is_first ? more[i] : sum[i] + more[i];
  }

  CUTLASS_DEVICE static Group rounded(Sum const& sum) {
    Elements const elements =
        cutlass::NumericArrayConverter<Element, float, kElements>::convert(sum);
    return reinterpret_cast<Group const&>(elements);
  }
};

/// What both carriers do alike. `kMost`: ranks that the kernel serves, at least as many as there
/// are; loops over ranks are unrolled to it, so that all their accesses are under way together.
template <class Element_, int kWords, ExchangeStep kStep, int kMost>
struct Exchange : Groups<Element_, kWords> {
  using Base = Groups<Element_, kWords>;
  using typename Base::Element;
  using typename Base::Group;
  using typename Base::Sum;

  ExchangeArgs const& args;
  int slot = 0;

  CUTLASS_DEVICE explicit Exchange(ExchangeArgs const& args_) : args(args_) {}

  CUTLASS_DEVICE int after(int distance) const {
    int const rank = args.rank + distance;
    return rank < args.world_size ? rank : rank - args.world_size;
  }
  CUTLASS_DEVICE uint32_t others() const {
    return ((1u << args.world_size) - 1) & ~(1u << args.rank);
  }

  // Groups of segments.

  CUTLASS_DEVICE int32_t number(int of_rank, int32_t group) const {
    return kStep == ExchangeStep::SumAndShare ? of_rank * args.segment + group : group;
  }
  /// Whether a group up to `args.groups` has data.
  CUTLASS_DEVICE bool is_there(int of_rank, int32_t group) const {
    return kStep != ExchangeStep::SumAndShare || number(of_rank, group) < args.end;
  }

  CUTLASS_DEVICE bool is_second(int32_t group) const {
    return kStep == ExchangeStep::GatherTwo && group >= args.second.first;
  }

  CUTLASS_DEVICE Group load(int of_rank, int32_t group) const {
    if (is_second(group)) return load_second(group - args.second.first);
    char const* from = args.in + int64_t(group) * Base::kBytes;
    if constexpr (kStep == ExchangeStep::Scatter || kStep == ExchangeStep::SumAndShare) {
      from += of_rank * args.in_stride;
    }
    int32_t const at = number(of_rank, group);
    if (at < args.whole) return Base::load_whole(from);
    return Base::load_elements(from, args.elements - at * Base::kElements);
  }
  CUTLASS_DEVICE void store(int of_rank, int32_t group, Group const& value) const {
    if (is_second(group)) return store_second(of_rank, group - args.second.first, value);
    char* to = args.out + int64_t(group) * Base::kBytes;
    if constexpr (is_gather(kStep) || kStep == ExchangeStep::SumAndShare) {
      to += of_rank * args.out_stride;
    }
    int32_t const at = number(of_rank, group);
    if (at < args.whole) return Base::store_whole(to, value);
    Base::store_elements(to, args.elements - at * Base::kElements, value);
  }
  CUTLASS_DEVICE Group load_second(int32_t group) const {
    char const* const from = args.second.in + int64_t(group) * Base::kBytes;
    if (group < args.second.whole) return Base::load_whole(from);
    return Base::load_elements(from, args.second.elements - group * Base::kElements);
  }
  CUTLASS_DEVICE void store_second(int of_rank, int32_t group, Group const& value) const {
    char* const to =
        args.second.out + of_rank * args.second.out_stride + int64_t(group) * Base::kBytes;
    if (group < args.second.whole) return Base::store_whole(to, value);
    Base::store_elements(to, args.second.elements - group * Base::kElements, value);
  }

  /// Whether an all-gather finds this rank's part at its place. Of two tensors each part is stored,
  /// there too.
  CUTLASS_DEVICE bool is_in_place() const {
    return kStep == ExchangeStep::Gather && args.in == args.out + args.rank * args.out_stride;
  }

  /// `part(source)`: what each rank has sent.
  template <class Part>
  CUTLASS_DEVICE Group sum_of(Part const& part) const {
    Sum sum{};
    CUTLASS_PRAGMA_UNROLL
    for (int source = 0; source < kMost; ++source) {
      if (source < args.world_size) Base::add(sum, part(source), source == 0);
    }
    if (args.scale != 1.0f) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Base::kElements; ++i) sum[i] *= args.scale;
    }
    return Base::rounded(sum);
  }

  /// Where a group lies that `source` sends in a step, from the beginning of the first slot.
  CUTLASS_DEVICE int64_t place(int step, int source, int32_t group, bool is_packet) const {
    int const data_slot = kOneSlot && !is_packet ? 0 : slot;
    return data_slot * args.slot_bytes +
           int64_t(step * args.world_size + source) * args.stretch_bytes +
           int64_t(group) * kGroupBytes;
  }

  // A thread takes every so-many-th group.
  CUTLASS_DEVICE static int32_t first_group() {
    return int32_t(blockIdx.x * blockDim.x + threadIdx.x);
  }
  CUTLASS_DEVICE static int32_t group_stride() { return int32_t(gridDim.x * blockDim.x); }
};

/// The slot of a launch. Each CTA counts for itself and for those that a smaller grid leaves out.
CUTLASS_DEVICE int slot_of_launch(ExchangeArgs const& args) {
  uint32_t slot;
  // Volatile: what was loaded before is under way before it, and in order is all that is waited.
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
               : "=r"(slot)
               : "l"(args.turns + blockIdx.x)
               : "memory");
  return int(slot);
}

/// To be called once by all threads of the CTA, when they have the slot: the next launch is the
/// first to look again.
CUTLASS_DEVICE void pass_turn(ExchangeArgs const& args, int slot) {
  __syncthreads();
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = blockIdx.x + threadIdx.x * gridDim.x; i < kMaxExchangeCtas;
       i += blockDim.x * gridDim.x) {
    args.turns[i] = uint32_t(1 - slot);
  }
}

/// `Kernel<Element, kStep, kMost>::kKernel` for a call.
template <template <class, ExchangeStep, int> class Kernel, class Element, int kMost>
ExchangeKernel exchange_kernel_of(ExchangeStep step) {
  switch (step) {
    case ExchangeStep::Sum:
      return Kernel<Element, ExchangeStep::Sum, kMost>::kKernel;
    case ExchangeStep::Scatter:
      return Kernel<Element, ExchangeStep::Scatter, kMost>::kKernel;
    default:
      return Kernel<Element, ExchangeStep::SumAndShare, kMost>::kKernel;
  }
}

template <template <class, ExchangeStep, int> class Kernel, int kMost>
ExchangeKernel exchange_kernel_of(CollectiveElement element, ExchangeStep step) {
  // What is gathered is bytes.
  if (step == ExchangeStep::Gather) return Kernel<uint8_t, ExchangeStep::Gather, kMost>::kKernel;
  if (step == ExchangeStep::GatherTwo) {
    return Kernel<uint8_t, ExchangeStep::GatherTwo, kMost>::kKernel;
  }
  switch (element) {
    case CollectiveElement::BFloat16:
      return exchange_kernel_of<Kernel, cutlass::bfloat16_t, kMost>(step);
    case CollectiveElement::Float16:
      return exchange_kernel_of<Kernel, cutlass::half_t, kMost>(step);
    case CollectiveElement::Float32:
      return exchange_kernel_of<Kernel, float, kMost>(step);
    case CollectiveElement::Byte:
      break;
  }
  return nullptr;
}

template <template <class, ExchangeStep, int> class Kernel>
ExchangeKernel exchange_kernel_of(CollectiveElement element, ExchangeStep step, int world_size) {
  if (world_size <= 2) return exchange_kernel_of<Kernel, 2>(element, step);
  if (world_size <= 4) return exchange_kernel_of<Kernel, 4>(element, step);
  return exchange_kernel_of<Kernel, kMaxExchangeRanks>(element, step);
}

}  // namespace agmm
