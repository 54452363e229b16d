// All-reduce by packets, then the residual and its RMS norm, in one kernel.
//
// A CTA takes a row at a time, so that it can norm what it has summed. In two steps a row is summed
// by one rank, its owner, and goes back to all as the new residual, which each norms for itself.
// That ends as other exchanges do: CTA i of all ranks takes the same rows in the same order, sends
// all of its first step before it waits, and an owner awaits nothing but first steps.
//
// Which thread squares what depends on the length of a row alone, and partial sums are added in one
// order: all ranks get the same bits, in one step and in two.
#include "collectives/packet_exchange.hpp"
#include "collectives/row_norm.hpp"

namespace agmm {

namespace {

constexpr int kWarpThreads = cutlass::NumThreadsPerWarp;

template <class Element_, ExchangeStep kStep, int kMost>
struct NormedPackets : Packets<Element_, kStep, kMost> {
  using Base = Packets<Element_, kStep, kMost>;
  using Base::args, Base::kElements, Base::packet, Base::packet_of, Base::group_of, Base::place;
  using Base::slot;
  using typename Base::Group;
  using typename Base::Sum;

  static constexpr bool kIsShared = kStep == ExchangeStep::SumAndShare;

  NormArgs const& norm;
  uint32_t* const kept;  // the new residual of a row

  CUTLASS_DEVICE NormedPackets(ExchangeArgs const& args_, NormArgs const& norm_, uint32_t* kept_)
      : Base(args_), norm(norm_), kept(kept_) {}

  CUTLASS_DEVICE int owner(int32_t row) const { return kIsShared ? row / norm.owned_rows : -1; }
  CUTLASS_DEVICE bool is_own(int32_t row) const { return !kIsShared || owner(row) == args.rank; }
  /// The number that a group of a row has in a stretch.
  CUTLASS_DEVICE int32_t packet_number(int32_t row, int32_t group) const {
    int32_t const of_owner = kIsShared ? row % norm.owned_rows : row;
    return of_owner * norm.row_groups + group;
  }

  // A row of a tensor. All of them have rows of the same length, or are one.

  CUTLASS_DEVICE Group load_row(char const* tensor, int32_t row, int32_t group) const {
    char const* const from = tensor + row * norm.row_bytes + int64_t(group) * Base::kBytes;
    if (group < norm.whole) return Base::load_whole(from);
    return Base::load_elements(from, norm.row_elements - group * kElements);
  }
  CUTLASS_DEVICE void store_row(char* tensor, int32_t row, int32_t group,
                                Group const& value) const {
    char* const to = tensor + row * norm.row_bytes + int64_t(group) * Base::kBytes;
    if (group < norm.whole) return Base::store_whole(to, value);
    Base::store_elements(to, norm.row_elements - group * kElements, value);
  }

  CUTLASS_DEVICE void send() {
    slot = slot_of_launch(args);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t row = blockIdx.x; row < norm.rows; row += gridDim.x) {
      if (kIsShared && is_own(row)) continue;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t g = threadIdx.x; g < norm.row_groups; g += blockDim.x) {
        Group const group = load_row(args.in, row, g);
        int64_t const at = place(0, args.rank, packet_number(row, g), true);
        if constexpr (kIsShared) {
          int const ahead = owner(row) - args.rank;
          stress_delay(args.rank);
          store_packet(packet(ahead < 0 ? ahead + args.world_size : ahead, at), packet_of(group));
        } else {
          send_to_all(at, group);
        }
      }
    }
  }

  CUTLASS_DEVICE void send_to_all(int64_t at, Group const& group) const {
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < kMost; ++distance) {
      if (distance >= args.world_size) break;
      stress_delay(args.rank);
      store_packet(packet(distance, at), packet_of(group));
    }
  }

  /// A group of the new residual, on its owner: the sum is rounded as all_reduce rounds it, and
  /// then what the residual and it make.
  CUTLASS_DEVICE Group new_residual(int32_t row, int32_t group) const {
    Group const own = load_row(args.in, row, group);
    Sum sum = Base::floats(load_row(norm.residual, row, group));
    Packet found[kMost];
    Base::take(0, packet_number(row, group), Base::others(), found);
    Group const reduced = Base::sum_of(
        [&](int source) { return source == args.rank ? own : group_of(found[source]); });
    Sum const more = Base::floats(reduced);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; ++i) sum[i] += more[i];
    return Base::rounded(sum);
  }

  /// The new residual on the ranks that do not own the row: its owner sends it.
  CUTLASS_DEVICE Group shared_residual(int32_t row, int32_t group) const {
    Packet found[kMost];
    Base::take(1, packet_number(row, group), 1u << owner(row), found);
    Group result{};
    CUTLASS_PRAGMA_UNROLL
    for (int source = 0; source < kMost; ++source) {
      if (source == owner(row)) result = group_of(found[source]);
    }
    return result;
  }

  /// Makes a row's new residual and returns the sum of its squares.
  CUTLASS_DEVICE float reduce_row(int32_t row) const {
    float squares = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t g = threadIdx.x; g < norm.row_groups; g += blockDim.x) {
      Group result;
      if (is_own(row)) {
        result = new_residual(row, g);
        if constexpr (kIsShared) {
          send_to_all(place(1, args.rank, packet_number(row, g), true), result);
        }
      } else {
        result = shared_residual(row, g);
      }
      store_row(args.out, row, g, result);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Packet::kWords; ++i) kept[g * Packet::kWords + i] = result.words[i];
      squares += sum_of_squares(Base::floats(result));  // those past the end of a row are 0
    }
    return squares;
  }

  CUTLASS_DEVICE void norm_row(int32_t row, float scale) const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t g = threadIdx.x; g < norm.row_groups; g += blockDim.x) {
      Sum const weight = Base::floats(load_row(norm.weight, 0, g));
      Group own;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Packet::kWords; ++i) own.words[i] = kept[g * Packet::kWords + i];
      Sum values = Base::floats(own);
      apply_norm(values, scale, weight);
      store_row(norm.normed, row, g, Base::rounded(values));
    }
  }

  CUTLASS_DEVICE void run() const {
    // Two, so that one barrier in a row is enough: a warp that is a row ahead writes to the other.
    __shared__ float partial[2][kExchangeThreads / kWarpThreads];
    int turn = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t row = blockIdx.x; row < norm.rows; row += gridDim.x) {
      float const squares = sum_of_warp(reduce_row(row));
      if (threadIdx.x % kWarpThreads == 0) partial[turn][threadIdx.x / kWarpThreads] = squares;
      __syncthreads();
      float sum = 0;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < int(blockDim.x) / kWarpThreads; ++i) sum += partial[turn][i];
      norm_row(row, norm_scale(sum, norm.row_elements, norm.eps));
      turn = 1 - turn;
    }
  }
};

template <class Element, ExchangeStep kStep, int kMost>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    norm_kernel(__grid_constant__ ExchangeArgs const args, __grid_constant__ NormArgs const norm) {
  extern __shared__ uint32_t kept[];
  NormedPackets<Element, kStep, kMost> exchange(args, norm, kept);
  exchange.send();
  pass_turn(args, exchange.slot);
  stress_delay(args.rank);
  exchange.run();
}

template <class Element, int kMost>
NormKernel norm_kernel_of(ExchangeStep step) {
  return step == ExchangeStep::Sum ? norm_kernel<Element, ExchangeStep::Sum, kMost>
                                   : norm_kernel<Element, ExchangeStep::SumAndShare, kMost>;
}

template <int kMost>
NormKernel norm_kernel_of(CollectiveElement element, ExchangeStep step) {
  switch (element) {
    case CollectiveElement::BFloat16:
      return norm_kernel_of<cutlass::bfloat16_t, kMost>(step);
    case CollectiveElement::Float16:
      return norm_kernel_of<cutlass::half_t, kMost>(step);
    default:
      return norm_kernel_of<float, kMost>(step);
  }
}

}  // namespace

NormKernel norm_kernel_of(CollectiveElement element, ExchangeStep step, int world_size) {
  if (world_size <= 2) return norm_kernel_of<2>(element, step);
  if (world_size <= 4) return norm_kernel_of<4>(element, step);
  return norm_kernel_of<kMaxExchangeRanks>(element, step);
}

}  // namespace agmm
