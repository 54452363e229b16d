#include "agmm/collectives.hpp"

#include <algorithm>
#include <initializer_list>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "collectives/exchange.hpp"
#include "gemm/kernel_facts.hpp"
#include "ops/launching.hpp"
#include "ops/prepare.hpp"
#include "ops/refuse.hpp"
#include "order/streaming.hpp"
#include "runtime/cuda.hpp"
#include "runtime/ordered_calls.hpp"
#include "symmetric/collective_layout.hpp"
#include "sync/signals.hpp"

namespace agmm {

namespace {

// The most CTAs of a launch where the caller gives no number. More would send no faster over the
// links, and would take multiprocessors from what runs beside. The number was not measured.
constexpr int64_t kUsualCtas = 64;
// The fewest threads of a CTA. A call of few packets has CTAs of so few, which spread the packets
// over more multiprocessors.
constexpr int64_t kLeastThreads = 128;

int64_t bytes_of(CollectiveElement element) {
  switch (element) {
    case CollectiveElement::Byte:
      return 1;
    case CollectiveElement::Float32:
      return 4;
    default:
      return 2;
  }
}

std::string name(CollectiveOp op) {
  switch (op) {
    case CollectiveOp::AllGather:
      return "all_gather";
    case CollectiveOp::ReduceScatter:
      return "reduce_scatter";
    default:
      return "all_reduce";
  }
}

std::string name(CollectiveMethod method) {
  switch (method) {
    case CollectiveMethod::OneShot:
      return "one-shot";
    case CollectiveMethod::TwoShot:
      return "two-shot";
    case CollectiveMethod::Blocks:
      return "blocks";
    default:
      return "relayed";
  }
}

std::string described(Collective const& call) {
  std::string const kind = call.op == CollectiveOp::AllGather ? ""
                           : call.is_average                  ? ", avg"
                                                              : ", sum";
  return name(call.op) + "(" + std::to_string(call.count) + " " + to_string(call.element) + kind +
         ", " + name(call.method) + ", " + std::to_string(call.ctas) + " CTAs)";
}

/// The call as it is carried out: what an all-gather moves are bytes, whatever they mean.
Collective as_moved(Collective call) {
  if (call.op != CollectiveOp::AllGather) return call;
  call.count *= bytes_of(call.element);
  call.element = CollectiveElement::Byte;
  return call;
}

/// What the ranks have to agree on; `more`: besides the call itself.
uint32_t tag_of(Collective const& call, std::string const& more) {
  return call_tag(call.count, call.ctas,
                  name(call.op) + name(call.method) + to_string(call.element) + more,
                  call.is_average);
}

std::string words_of(Beside const& beside) {
  return ", and " + std::to_string(beside.count) + " bytes beside them";
}

std::string words_of(ResidualNorm const& norm) {
  return ", and the norm of rows of " + std::to_string(norm.row);
}

/// An all-gather of `beside` alone, by the method of `call`.
Collective alone(Collective call, Beside const& beside) {
  call.in = beside.in;
  call.out = beside.out;
  call.count = beside.count;
  call.element = CollectiveElement::Byte;
  return call;
}

/// The collective that carries out a meeting. It gathers a word of each rank with one CTA, so that
/// it costs little.
Collective collective_of(Meeting const& meeting) {
  Collective call;
  call.op = CollectiveOp::AllGather;
  call.method = meeting.method;
  call.element = CollectiveElement::Byte;
  call.in = meeting.in;
  call.out = meeting.out;
  call.count = sizeof(uint32_t);
  call.ctas = 1;
  call.limit_ns = meeting.limit_ns;
  return call;
}

uint32_t tag_of(Meeting const& meeting) {
  return call_tag(0, 1, "meeting " + name(meeting.method) + " " + meeting.agreed, false);
}

ExchangeStep step_of(Collective const& call) {
  if (call.op == CollectiveOp::AllGather) return ExchangeStep::Gather;
  if (call.op == CollectiveOp::ReduceScatter) return ExchangeStep::Scatter;
  bool const is_shared =
      call.method == CollectiveMethod::TwoShot || call.method == CollectiveMethod::Blocks;
  return is_shared ? ExchangeStep::SumAndShare : ExchangeStep::Sum;
}

Carrier carrier_of(CollectiveMethod method) {
  return method == CollectiveMethod::Blocks ? Carrier::Blocks : Carrier::Packets;
}

int64_t ceil_of(int64_t value, int64_t to) { return (value + to - 1) / to; }

/// How a segment is shared out among CTAs and threads. The functions that do so choose the number
/// of CTAs where `ctas` is 0.
struct Shares {
  ExchangeGrid grid;
  int32_t thread_groups = 1;  // of a block
};

Shares packet_shares(int64_t groups, int ctas, int64_t most_ctas) {
  Shares shares;
  int64_t const spread = ceil_of(ceil_of(groups, ctas > 0 ? ctas : most_ctas), kLeastThreads);
  shares.grid.threads = static_cast<int>(
      std::clamp<int64_t>(spread * kLeastThreads, kLeastThreads, kExchangeThreads));
  int64_t const usual = std::clamp<int64_t>(ceil_of(groups, shares.grid.threads), 1, most_ctas);
  shares.grid.ctas = ctas > 0 ? ctas : static_cast<int>(usual);
  return shares;
}

/// Gives each CTA as few blocks as possible, all of one size, and takes only as many CTAs as these
/// blocks need: a CTA that had one block more than the others would be waited for.
Shares block_shares(int64_t groups, int ctas, int64_t most_ctas) {
  Shares shares;
  int64_t const threads = shares.grid.threads;
  int64_t const most = threads * (ctas > 0 ? ctas : most_ctas);
  int64_t const blocks_of_cta = std::max<int64_t>(1, ceil_of(groups, most * kMaxThreadGroups));
  int64_t const thread_groups = std::max<int64_t>(1, ceil_of(groups, most * blocks_of_cta));
  int64_t const share = threads * thread_groups * blocks_of_cta;
  shares.thread_groups = static_cast<int32_t>(thread_groups);
  shares.grid.ctas =
      ctas > 0 ? ctas : static_cast<int>(std::max<int64_t>(1, ceil_of(groups, share)));
  return shares;
}

Shares shares_of(Carrier carrier, int64_t groups, int ctas, int64_t most_ctas) {
  return carrier == Carrier::Packets ? packet_shares(groups, ctas, most_ctas)
                                     : block_shares(groups, ctas, most_ctas);
}

int64_t unit_of(Carrier carrier) {
  return carrier == Carrier::Packets ? kPacketDataBytes : kGroupBytes;
}

/// Whether groups may be loaded and stored by words of a packet or by 16 bytes, one of these:
/// addresses, and strides from one rank's part to the next.
bool are_aligned(Carrier carrier, std::initializer_list<int64_t> places) {
  int64_t const alignment = carrier == Carrier::Packets ? 4 : kGroupBytes;
  return std::all_of(places.begin(), places.end(),
                     [&](int64_t place) { return place % alignment == 0; });
}

int64_t address_of(void const* pointer) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer));
}

void check_pointer(char const* argument, void const* pointer, Collective const& call) {
  if (call.count == 0) return;
  if (pointer == nullptr) refuse(argument, "null", "device memory");
  if (reinterpret_cast<uintptr_t>(pointer) % std::size_t(bytes_of(call.element)) != 0) {
    refuse(argument, "an address inside an element", "a multiple of the element's size");
  }
}

void check(Collective const& call) {
  if (call.count < 0) refuse("count", std::to_string(call.count), "at least 0");
  if (call.method == CollectiveMethod::TwoShot && call.op != CollectiveOp::AllReduce) {
    refuse("method", "two-shot for " + name(call.op), "one-shot or blocks");
  }
  if (call.method == CollectiveMethod::Relayed && call.op == CollectiveOp::ReduceScatter) {
    refuse("method", "relayed for " + name(call.op), "one-shot or blocks");
  }
  if (call.op != CollectiveOp::AllGather && call.element == CollectiveElement::Byte) {
    refuse("element", "bytes", "bfloat16, float16 or float32 for a sum");
  }
  if (call.ctas < 0 || call.ctas > kMaxExchangeCtas) {
    refuse("ctas", std::to_string(call.ctas), "0 to " + std::to_string(kMaxExchangeCtas));
  }
  check_pointer("in", call.in, call);
  check_pointer("out", call.out, call);
}

void check(Collective const& call, Beside const& beside) {
  check(call);
  if (call.op != CollectiveOp::AllGather) {
    refuse("op", name(call.op) + " of two tensors", "all_gather");
  }
  check(alone(call, beside));
}

void check(Collective const& call, ResidualNorm const& norm) {
  check(call);
  bool const is_packets =
      call.method == CollectiveMethod::OneShot || call.method == CollectiveMethod::TwoShot;
  if (call.op != CollectiveOp::AllReduce || !is_packets) {
    refuse("method", name(call.method) + " for " + name(call.op) + " and a norm",
           "one-shot or two-shot for all_reduce");
  }
  int64_t const most = kMaxNormRowBytes / bytes_of(call.element);
  if (norm.row < 1 || norm.row > most || call.count % norm.row != 0) {
    refuse("row", std::to_string(norm.row) + " of " + std::to_string(call.count) + " elements",
           "a divisor of these up to " + std::to_string(most));
  }
  check_pointer("residual", norm.residual, call);
  check_pointer("weight", norm.weight, call);
  check_pointer("normed", norm.normed, call);
}

}  // namespace

struct Collectives::Impl {
  Impl(int rank_, std::vector<uintptr_t> bases_, std::size_t slot_bytes, int reserved_sms)
      : rank(rank_),
        bases(std::move(bases_)),
        layout(slot_bytes, static_cast<int>(bases.size())),
        sm_count(small_kernels_device().sm_count - reserved_sms),
        reserves_sms(reserved_sms > 0),
        ordered(small_kernels_device().index) {}

  int world_size() const { return static_cast<int>(bases.size()); }
  int64_t most_ctas() const { return std::min<int64_t>(kUsualCtas, sm_count); }
  // The ranks have to have the same grid. Where the size of a call decides its CTAs, the tag
  // contains the most that they may be.
  uint32_t tag_of(Collective call, std::string const& more = "") const {
    if (call.ctas == 0) call.ctas = static_cast<int32_t>(-most_ctas());
    return agmm::tag_of(as_moved(call), more);
  }
  /// `chunks_per_rank` is that of report_place().
  ExchangeArgs args_of(Collective const& call, uint32_t tag, int chunks_per_rank) const;
  void enqueue(Collective const& call, uint32_t tag, int chunks_per_rank, cudaStream_t stream,
               bool lets_next_start = false) const;
  void enqueue(Collective const& call, ResidualNorm const& norm, cudaStream_t stream) const;
  void enqueue(Collective const& call, Beside const& beside, cudaStream_t stream) const;
  /// The rows of a sum that each rank makes; 0 where it makes all of them, or some packets.
  int32_t owned_rows(StreamedSum const& call) const {
    bool const is_shared = call.method == CollectiveMethod::TwoShot && call.norm.weight != nullptr;
    bool const are_owned = is_shared || call.op == CollectiveOp::ReduceScatter;
    return are_owned ? ceil_div(call.matmul.problem.m, world_size()) : 0;
  }
  /// The most packets that a rank sends to another in a step.
  int64_t sent_packets(StreamedSum const& call) const {
    Problem const& problem = call.matmul.problem;
    int32_t const owned = owned_rows(call);
    int const owners = owned == 0 && call.method == CollectiveMethod::TwoShot ? world_size() : 1;
    return streamed_packets(owned != 0 ? owned : problem.m, problem.n, owners);
  }
  PreparedMatmul prepared(StreamedSum const& call, uint32_t tag) const;
  void check(StreamedSum const& call) const;
  void check_relays(CollectiveMethod method) const {
    if (method == CollectiveMethod::Relayed && !has_relays) {
      refuse("method", "relayed", "a call of relay_over before, or another method");
    }
  }
  void note(uint32_t tag, std::string const& what) {
    if (noted.insert(tag).second) note_call(tag, what);
  }

  int rank;
  std::vector<uintptr_t> bases;
  CollectiveLayout layout;
  int sm_count;  // multiprocessors for this workspace's kernels
  bool reserves_sms;
  OrderedCalls ordered;
  std::set<uint32_t> noted;  // tags
  RelayArgs relays;
  bool has_relays = false;
};

ExchangeArgs Collectives::Impl::args_of(Collective const& call, uint32_t tag,
                                        int chunks_per_rank) const {
  Carrier const carrier = carrier_of(call.method);
  ExchangeArgs args;
  args.rank = rank;
  args.world_size = world_size();
  args.scale = call.is_average ? 1.0f / static_cast<float>(world_size()) : 1.0f;
  args.tag = tag;
  auto const data = [&](int slot) { return static_cast<int64_t>(layout.data(carrier, slot)); };
  for (int distance = 0; distance < world_size(); ++distance) {
    uintptr_t const base = bases[std::size_t((rank + distance) % world_size())];
    args.slots[distance] = reinterpret_cast<char*>(base) + data(0);
  }
  char* const own = reinterpret_cast<char*>(bases[std::size_t(rank)]);
  for (int slot = 0; slot < CollectiveLayout::kSlots; ++slot) {
    args.own_packets[slot] = own + layout.data(Carrier::Packets, slot);
    args.own_signals[slot] = own + layout.signals(slot);
  }
  args.slot_bytes = data(1) - data(0);
  args.stretch_bytes = static_cast<int32_t>(layout.stretch_bytes(carrier));
  args.packet_stretch_bytes = static_cast<int32_t>(layout.stretch_bytes(Carrier::Packets));
  args.blocks = static_cast<int32_t>(layout.blocks());
  args.signals = static_cast<int64_t>(layout.signals(0)) - data(0);
  args.signal_slot_bytes = static_cast<int64_t>(layout.signals(1) - layout.signals(0));
  args.turns = reinterpret_cast<uint32_t*>(own + layout.turns());
  args.limit.place = report_place(rank, chunks_per_rank);
  args.limit.limit_ns = call.limit_ns;
  args.limit.rank = rank;
  return args;
}

void Collectives::Impl::enqueue(Collective const& call, uint32_t tag, int chunks_per_rank,
                                cudaStream_t stream, bool lets_next_start) const {
  Carrier const carrier = carrier_of(call.method);
  ExchangeStep const step = step_of(call);
  int64_t const element_bytes = bytes_of(call.element);
  int64_t const unit = unit_of(carrier);
  int64_t const group = unit / element_bytes;  // elements
  int64_t const w = world_size();
  int64_t const all_groups = static_cast<int64_t>(layout.groups(carrier));
  // A launch takes at most so many elements of each segment, or of all segments together where each
  // rank sums one of them.
  int64_t const most = all_groups * group * (step == ExchangeStep::SumAndShare ? w : 1);

  ExchangeArgs args = args_of(call, tag, chunks_per_rank);
  for (int64_t begin = 0; begin < call.count; begin += most) {
    args.lets_next_start = lets_next_start && begin + most >= call.count;
    int64_t const count = std::min(most, call.count - begin);
    args.in = static_cast<char const*>(call.in) + begin * element_bytes;
    args.out = static_cast<char*>(call.out) + begin * element_bytes;
    args.in_stride = call.op == CollectiveOp::ReduceScatter ? call.count * element_bytes : 0;
    args.out_stride = call.op == CollectiveOp::AllGather ? call.count * element_bytes : 0;
    args.elements = static_cast<int32_t>(count);
    args.end = static_cast<int32_t>(ceil_of(count, group));
    args.groups = args.end;
    if (step == ExchangeStep::SumAndShare) {
      args.groups = args.segment = static_cast<int32_t>(ceil_of(args.end, w));
      args.in_stride = args.out_stride = int64_t(args.segment) * unit;
    }
    bool const is_aligned = are_aligned(
        carrier, {address_of(args.in), address_of(args.out), args.in_stride, args.out_stride});
    args.whole = is_aligned ? static_cast<int32_t>(count / group) : 0;
    auto const [grid, thread_groups] = shares_of(carrier, args.groups, call.ctas, most_ctas());
    args.thread_groups = thread_groups;
    cudaError_t const error =
        call.method == CollectiveMethod::Relayed
            ? launch_relayed(args, relays, call.element, step, grid, stream)
            : launch_exchange(args, call.element, step, carrier, grid, stream);
    check_cuda(error, "kernel launch");
  }
}

void Collectives::Impl::enqueue(Collective const& call, Beside const& beside,
                                cudaStream_t stream) const {
  Carrier const carrier = carrier_of(call.method);
  int64_t const unit = unit_of(carrier);
  uint32_t const tag = tag_of(call, words_of(beside));
  int64_t const first = ceil_of(call.count, unit);
  int64_t const all = first + ceil_of(beside.count, unit);
  bool const has_room = all <= static_cast<int64_t>(layout.groups(carrier));
  bool const has_both = call.count > 0 && beside.count > 0;
  if (!has_room || !has_both || call.method == CollectiveMethod::Relayed) {
    enqueue(call, tag, 1, stream);
    enqueue(alone(call, beside), tag, 1, stream);
    return;
  }
  ExchangeArgs args = args_of(call, tag, 1);
  args.in = static_cast<char const*>(call.in);
  args.out = static_cast<char*>(call.out);
  args.out_stride = call.count;
  args.elements = static_cast<int32_t>(call.count);
  args.groups = args.end = static_cast<int32_t>(all);
  if (are_aligned(carrier, {address_of(call.in), address_of(call.out), call.count})) {
    args.whole = static_cast<int32_t>(call.count / unit);
  }
  args.second.in = static_cast<char const*>(beside.in);
  args.second.out = static_cast<char*>(beside.out);
  args.second.out_stride = beside.count;
  args.second.first = static_cast<int32_t>(first);
  args.second.elements = static_cast<int32_t>(beside.count);
  if (are_aligned(carrier, {address_of(beside.in), address_of(beside.out), beside.count})) {
    args.second.whole = static_cast<int32_t>(beside.count / unit);
  }
  auto const [grid, thread_groups] = shares_of(carrier, args.groups, call.ctas, most_ctas());
  args.thread_groups = thread_groups;
  check_cuda(launch_exchange(args, call.element, ExchangeStep::GatherTwo, carrier, grid, stream),
             "kernel launch");
}

void Collectives::Impl::enqueue(Collective const& call, ResidualNorm const& norm,
                                cudaStream_t stream) const {
  ExchangeStep const step = step_of(call);
  int64_t const element_bytes = bytes_of(call.element);
  int64_t const group = kPacketDataBytes / element_bytes;  // elements
  int64_t const w = world_size();
  int64_t const all_rows = call.count / norm.row;
  NormArgs rows;
  rows.weight = static_cast<char const*>(norm.weight);
  rows.row_bytes = norm.row * element_bytes;
  rows.row_elements = static_cast<int32_t>(norm.row);
  rows.row_groups = static_cast<int32_t>(ceil_of(norm.row, group));
  rows.eps = norm.eps;
  // In a launch a rank sends each other rank `sent` rows at most. The call's rows that a launch
  // takes are as many, or w times as many where each rank sums a shard of them.
  int64_t const sent = static_cast<int64_t>(layout.groups(Carrier::Packets)) / rows.row_groups;
  int64_t const most = sent * (step == ExchangeStep::SumAndShare ? w : 1);

  ExchangeArgs args = args_of(call, tag_of(call, words_of(norm)), 1);
  for (int64_t begin = 0; begin < all_rows; begin += most) {
    int64_t const at = begin * rows.row_bytes;
    rows.rows = static_cast<int32_t>(std::min(most, all_rows - begin));
    rows.owned_rows = static_cast<int32_t>(ceil_of(rows.rows, w));
    args.in = static_cast<char const*>(call.in) + at;
    args.out = static_cast<char*>(call.out) + at;
    rows.residual = static_cast<char const*>(norm.residual) + at;
    rows.normed = static_cast<char*>(norm.normed) + at;
    bool is_aligned = rows.row_bytes % 4 == 0;
    for (void const* const tensor :
         {static_cast<void const*>(args.in), static_cast<void const*>(args.out), norm.residual,
          norm.weight, static_cast<void const*>(norm.normed)}) {
      is_aligned = is_aligned && reinterpret_cast<uintptr_t>(tensor) % 4 == 0;
    }
    rows.whole = is_aligned ? static_cast<int32_t>(norm.row / group) : 0;
    // The length of a row alone decides how many threads it gets, so that their sums are added in
    // the same order in every call.
    ExchangeGrid grid;
    grid.threads = static_cast<int>(std::clamp<int64_t>(
        ceil_of(rows.row_groups, kLeastThreads) * kLeastThreads, kLeastThreads, kExchangeThreads));
    int64_t const usual = std::min<int64_t>(rows.rows, most_ctas());
    grid.ctas = call.ctas > 0 ? call.ctas : static_cast<int>(usual);
    check_cuda(launch_norm(args, rows, call.element, step, grid, stream), "kernel launch");
  }
}

void Collectives::Impl::check(StreamedSum const& call) const {
  Problem const& problem = call.matmul.problem;
  KernelShape const& shape = call.matmul.config.shape;
  if (!is_streaming(shape)) refuse("config", shape.str(), "a streaming kernel");
  if (problem.epilogue != Epilogue::Bias || call.matmul.arrival.signals != nullptr) {
    refuse("problem", problem.str(), "a product of rows that are there, without an activation");
  }
  bool const is_scatter = call.op == CollectiveOp::ReduceScatter;
  bool const is_shared = call.method == CollectiveMethod::TwoShot;
  if (call.op != CollectiveOp::AllReduce && !is_scatter) {
    refuse("op", name(call.op), "all_reduce or reduce_scatter");
  }
  if (is_shared ? is_scatter : call.method != CollectiveMethod::OneShot) {
    refuse("method", name(call.method), is_scatter ? "one-shot" : "one-shot or two-shot");
  }
  if (is_scatter && problem.m % world_size() != 0) {
    refuse("A", "M=" + std::to_string(problem.m),
           "a multiple of " + std::to_string(world_size()) + " ranks");
  }
  int64_t const packets = sent_packets(call);
  int64_t const most = static_cast<int64_t>(layout.groups(Carrier::Packets));
  if (packets > most) {
    refuse("A",
           "M=" + std::to_string(problem.m) + ", a sum of " + std::to_string(packets) + " packets",
           "at most " + std::to_string(most));
  }
  if (call.norm.weight != nullptr) {
    if (is_scatter) refuse("op", name(call.op) + " with a norm", "all_reduce");
    if (call.is_average) refuse("is_average", "true with a norm", "false");
    if (problem.n > kMaxStreamedNormColumns) {
      refuse("B", "N=" + std::to_string(problem.n) + " with a norm",
             "at most " + std::to_string(kMaxStreamedNormColumns));
    }
    require_aligned("weight", call.norm.weight);
    require_aligned("normed", call.norm.normed);
  }
  if (reinterpret_cast<uintptr_t>(call.residual) % sizeof(uint32_t) != 0) {
    refuse("residual", "an address that is no multiple of 4 bytes", "one that is");
  }
}

PreparedMatmul Collectives::Impl::prepared(StreamedSum const& call, uint32_t tag) const {
  Collective sum;
  sum.limit_ns = call.matmul.limit_ns;
  CallSpec spec = call_of(call.matmul);
  spec.matmul.rank = rank;
  spec.matmul.sm_count = sm_count;
  sum.is_average = call.is_average;
  StreamedExchange& exchange = spec.exchange;
  exchange.args = args_of(sum, tag, 1);
  exchange.residual = call.residual;
  exchange.is_shared = call.method == CollectiveMethod::TwoShot;
  exchange.is_scattered = call.op == CollectiveOp::ReduceScatter;
  exchange.owned_rows = owned_rows(call);
  if (call.norm.weight != nullptr) {
    char* const own = reinterpret_cast<char*>(bases[std::size_t(rank)]);
    int32_t const n = call.matmul.problem.n;
    StreamedNormArgs& norm = exchange.norm;
    norm.weight = call.norm.weight;
    norm.normed = call.norm.normed;
    norm.eps = call.norm.eps;
    norm.scales = call.norm.scales;
    norm.scale_columns = call.norm.of_blocks ? kScaleBlock : n;
    norm.scales_of_row = ceil_div(n, norm.scale_columns);
    norm.counters = reinterpret_cast<uint32_t*>(own + layout.counters());
  }
  return prepare(spec);
}

std::size_t Collectives::workspace_bytes(std::size_t slot_bytes, int world_size) {
  return CollectiveLayout(slot_bytes, world_size).bytes();
}

Collectives::Collectives(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
                         int reserved_sms)
    : impl_(std::make_unique<Impl>(rank, bases, slot_bytes, reserved_sms)) {
  if (rank < 0 || rank >= impl_->world_size()) {
    refuse("rank", std::to_string(rank), "0 to " + std::to_string(impl_->world_size() - 1));
  }
  if (impl_->layout.blocks() < 1) {
    refuse("slot_bytes", std::to_string(slot_bytes), "room for a block of each rank and step");
  }
  if (reserved_sms < 0 || impl_->sm_count < 1) {
    refuse("reserved_sms", std::to_string(reserved_sms),
           "0 to " + std::to_string(impl_->sm_count + reserved_sms - 1));
  }
  AGMM_CHECK_CUDA(prepare_exchanges(impl_->world_size()));
}

Collectives::~Collectives() = default;

std::size_t Collectives::slot_bytes() const { return impl_->layout.slot_bytes(); }

bool Collectives::operator()(Collective const& given, void* stream) {
  Collective const call = as_moved(given);
  return impl_->ordered.make(stream, [&] {
    check(given);
    impl_->check_relays(call.method);
    uint32_t const tag = impl_->tag_of(call);
    impl_->note(tag, described(call));
    return [&, tag](cudaStream_t on) { impl_->enqueue(call, tag, 1, on); };
  });
}

bool Collectives::operator()(Collective const& call, ResidualNorm const& norm, void* stream) {
  return impl_->ordered.make(stream, [&] {
    check(call, norm);
    impl_->note(impl_->tag_of(call, words_of(norm)), described(call) + words_of(norm));
    return [&](cudaStream_t on) { impl_->enqueue(call, norm, on); };
  });
}

bool Collectives::operator()(Collective const& given, Beside const& beside, void* stream) {
  Collective const call = as_moved(given);
  return impl_->ordered.make(stream, [&] {
    check(given, beside);
    impl_->check_relays(call.method);
    impl_->note(impl_->tag_of(call, words_of(beside)), described(call) + words_of(beside));
    return [&](cudaStream_t on) { impl_->enqueue(call, beside, on); };
  });
}

bool Collectives::operator()(Meeting const& meeting, void* stream) {
  return impl_->ordered.make(stream, [&] {
    Collective const call = collective_of(meeting);
    check(call);
    impl_->check_relays(call.method);
    uint32_t const tag = tag_of(meeting);
    impl_->note(tag, meeting.words);
    return [this, call, tag](cudaStream_t on) { impl_->enqueue(call, tag, kWithoutElements, on); };
  });
}

bool Collectives::operator()(StreamedSum const& call, void* stream) {
  return impl_->ordered.make(stream, [&] {
    impl_->check(call);
    Problem const& problem = call.matmul.problem;
    KernelConfig const& config = call.matmul.config;
    // The ranks have to have the same CTAs, whose number follows from these; the layout of B is
    // each rank's own.
    std::string const sizes = std::to_string(problem.m) + "x" + std::to_string(problem.n) + "x" +
                              std::to_string(problem.k) + " " + to_string(problem.dtype);
    std::string const kind = call.op == CollectiveOp::ReduceScatter ? " streamed scatter of "
                             : call.norm.weight != nullptr          ? " streamed, normed sum of "
                                                                    : " streamed sum of ";
    std::string const words = name(call.method) + kind + sizes + " by " + config.shape.str() +
                              " with " + std::to_string(config.splits) + " splits on " +
                              std::to_string(impl_->sm_count) + " multiprocessors";
    uint32_t const tag = call_tag(problem.m, problem.n, words, call.is_average);
    PreparedMatmul const prepared = impl_->prepared(call, tag);
    impl_->note(tag, words);
    return [prepared](cudaStream_t on) { prepared.launch(on); };
  });
}

bool Collectives::operator()(GatheredMatmul const& given, void* stream) {
  Collective const call = as_moved(given.gather);
  return impl_->ordered.make(stream, [&] {
    check(given.gather);
    impl_->check_relays(call.method);
    if (call.op != CollectiveOp::AllGather) refuse("op", name(call.op), "all_gather");
    if (!is_streaming(given.matmul.config.shape)) {
      refuse("config", given.matmul.config.shape.str(), "a streaming kernel");
    }
    if (given.matmul.operands.a != given.gather.out || given.matmul.arrival.signals != nullptr) {
      refuse("A", "a product of other rows", "that of the gathered ones");
    }
    Problem const& problem = given.matmul.problem;
    int64_t const gathered = call.count * bytes_of(call.element) * impl_->world_size();
    int64_t const wanted = int64_t(problem.m) * problem.k * element_bytes(problem.dtype);
    bool const has_local_rows = given.matmul.operands.local_end > given.matmul.operands.local_begin;
    if (gathered != wanted || gathered == 0 || has_local_rows) {
      refuse("gather", std::to_string(gathered) + " bytes of all ranks",
             "all " + std::to_string(wanted) + " of A");
    }
    // No other rank need multiply alike, so the tag is that of any such gather.
    uint32_t const tag = impl_->tag_of(call);
    impl_->note(tag, described(call));
    CallSpec spec = call_of(given.matmul);
    spec.matmul.rank = impl_->rank;
    spec.matmul.sm_count = impl_->sm_count;
    // Together the two kernels would have CTAs on multiprocessors that are left free for others.
    bool const is_beside = !impl_->reserves_sms;
    spec.is_behind_gather = is_beside;
    PreparedMatmul const prepared = prepare(spec);
    return [&, tag, prepared, is_beside](cudaStream_t on) {
      impl_->enqueue(call, tag, 1, on, is_beside);
      prepared.launch(on);
    };
  });
}

void Collectives::precede(void* stream) { impl_->ordered.precede(stream); }

void Collectives::relay_over(std::vector<RelayMove> const& moves) {
  int const rank = impl_->rank;
  int const w = impl_->world_size();
  RelayArgs relays;
  auto const bit = [](int i) { return 1u << i; };
  auto const distance = [&](int of_rank) { return (of_rank - rank + w) % w; };
  for (RelayMove const& move : moves) {
    for (int32_t const each : {move.owner, move.source, move.target}) {
      if (each < 0 || each >= w) {
        refuse("moves", "rank " + std::to_string(each), "0 to " + std::to_string(w - 1));
      }
    }
    bool const is_first = move.owner == move.source;
    if (move.target == rank) (is_first ? relays.near : relays.far) |= bit(move.owner);
    if (move.source != rank) continue;
    uint32_t& to = is_first ? relays.near_distances : relays.passed_on[move.owner];
    to |= bit(distance(move.target));
  }
  uint32_t passed_on = 0;
  for (int owner = 0; owner < w; ++owner) {
    if (relays.passed_on[owner] != 0) passed_on |= bit(owner);
  }
  uint32_t const others = (bit(w) - 1) & ~bit(rank);
  if ((relays.near | relays.far) != others || (relays.near & relays.far) != 0 ||
      (passed_on & ~relays.near) != 0) {
    refuse("moves", "some that do not bring each shard once",
           "those of an all-gather in two steps");
  }
  AGMM_CHECK_CUDA(prepare_relayed());
  impl_->relays = relays;
  impl_->has_relays = true;
}

}  // namespace agmm
