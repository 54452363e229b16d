#include "agmm/collectives.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "collectives/exchange.hpp"
#include "ops/refuse.hpp"
#include "runtime/cuda.hpp"
#include "runtime/ordered_calls.hpp"
#include "symmetric/collective_layout.hpp"
#include "sync/signals.hpp"

namespace agmm {

namespace {

// Not timed. More send no faster over the links, and take multiprocessors from what runs beside.
constexpr int64_t kUsualCtas = 64;
// Of a CTA that has few packets: they are spread over more multiprocessors.
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
    default:
      return "blocks";
  }
}

std::string name(CollectiveElement element) {
  switch (element) {
    case CollectiveElement::Byte:
      return "bytes";
    case CollectiveElement::BFloat16:
      return "bfloat16";
    case CollectiveElement::Float16:
      return "float16";
    default:
      return "float32";
  }
}

std::string described(Collective const& call) {
  std::string const kind = call.op == CollectiveOp::AllGather ? ""
                           : call.is_average                  ? ", avg"
                                                              : ", sum";
  return name(call.op) + "(" + std::to_string(call.count) + " " + name(call.element) + kind + ", " +
         name(call.method) + ", " + std::to_string(call.ctas) + " CTAs)";
}

/// What the ranks have to agree on.
uint32_t tag_of(Collective const& call) {
  return call_tag(call.count, call.ctas, name(call.op) + name(call.method) + name(call.element),
                  call.is_average);
}

ExchangeStep step_of(Collective const& call) {
  if (call.op == CollectiveOp::AllGather) return ExchangeStep::Gather;
  bool const is_shared =
      call.op == CollectiveOp::AllReduce && call.method != CollectiveMethod::OneShot;
  return is_shared ? ExchangeStep::SumAndShare : ExchangeStep::Sum;
}

Carrier carrier_of(CollectiveMethod method) {
  return method == CollectiveMethod::Blocks ? Carrier::Blocks : Carrier::Packets;
}

int64_t ceil_of(int64_t value, int64_t to) { return (value + to - 1) / to; }

/// For the groups of a segment. `ctas`: as the caller wants, or 0.
ExchangeGrid grid_of(Carrier carrier, int64_t groups, int ctas, int64_t most_ctas) {
  ExchangeGrid grid;
  if (carrier == Carrier::Packets) {
    int64_t const spread = ceil_of(ceil_of(groups, ctas > 0 ? ctas : most_ctas), kLeastThreads);
    grid.threads = static_cast<int>(
        std::clamp<int64_t>(spread * kLeastThreads, kLeastThreads, kExchangeThreads));
  }
  int64_t const usual = std::clamp<int64_t>(ceil_of(groups, grid.threads), 1, most_ctas);
  grid.ctas = ctas > 0 ? ctas : static_cast<int>(usual);
  return grid;
}

/// As large blocks as leave every CTA one.
int32_t thread_groups_of(int64_t groups, ExchangeGrid const& grid) {
  int64_t const each = groups / (int64_t(grid.ctas) * kExchangeThreads);
  return static_cast<int32_t>(std::clamp<int64_t>(each, 1, kMaxThreadGroups));
}

void check(Collective const& call) {
  if (call.count < 0) refuse("count", std::to_string(call.count), "at least 0");
  if (call.method == CollectiveMethod::TwoShot && call.op != CollectiveOp::AllReduce) {
    refuse("method", "two-shot for " + name(call.op), "one-shot or blocks");
  }
  if (call.op != CollectiveOp::AllGather && call.element == CollectiveElement::Byte) {
    refuse("element", "bytes", "bfloat16, float16 or float32 for a sum");
  }
  if (call.ctas < 0 || call.ctas > kMaxExchangeCtas) {
    refuse("ctas", std::to_string(call.ctas), "0 to " + std::to_string(kMaxExchangeCtas));
  }
  for (auto const& [argument, pointer] :
       {std::pair<char const*, void const*>{"in", call.in}, {"out", call.out}}) {
    if (call.count == 0) continue;
    if (pointer == nullptr) refuse(argument, "null", "device memory");
    if (reinterpret_cast<uintptr_t>(pointer) % std::size_t(bytes_of(call.element)) != 0) {
      refuse(argument, "an address inside an element", "a multiple of the element's size");
    }
  }
}

}  // namespace

struct Collectives::Impl {
  Impl(int rank_, std::vector<uintptr_t> bases_, std::size_t slot_bytes, int reserved_sms)
      : rank(rank_),
        bases(std::move(bases_)),
        layout(slot_bytes, static_cast<int>(bases.size())),
        sm_count(kernels_device().sm_count - reserved_sms),
        ordered(kernels_device().index) {}

  int world_size() const { return static_cast<int>(bases.size()); }
  int64_t most_ctas() const { return std::min<int64_t>(kUsualCtas, sm_count); }
  // The ranks have to have the same grid.
  uint32_t tag_of(Collective call) const {
    if (call.ctas == 0) call.ctas = static_cast<int32_t>(-most_ctas());
    return agmm::tag_of(call);
  }
  ExchangeArgs args_of(Collective const& call) const;
  void enqueue(Collective call, cudaStream_t stream) const;

  int rank;
  std::vector<uintptr_t> bases;
  CollectiveLayout layout;
  int sm_count;  // multiprocessors for this workspace's kernels
  OrderedCalls ordered;
  std::set<uint32_t> noted;  // tags
};

ExchangeArgs Collectives::Impl::args_of(Collective const& call) const {
  Carrier const carrier = carrier_of(call.method);
  ExchangeArgs args;
  args.rank = rank;
  args.world_size = world_size();
  args.scale = call.is_average ? 1.0f / static_cast<float>(world_size()) : 1.0f;
  args.tag = tag_of(call);
  for (std::size_t i = 0; i < bases.size(); ++i) args.memory[i] = reinterpret_cast<char*>(bases[i]);
  for (int slot = 0; slot < CollectiveLayout::kSlots; ++slot) {
    args.data[slot] = static_cast<int64_t>(layout.data(carrier, slot));
    args.packets[slot] = static_cast<int64_t>(layout.data(Carrier::Packets, slot));
    args.signals[slot] = static_cast<int64_t>(layout.signals(slot));
  }
  args.stretch_bytes = static_cast<int32_t>(layout.stretch_bytes(carrier));
  args.packet_stretch_bytes = static_cast<int32_t>(layout.stretch_bytes(Carrier::Packets));
  args.blocks = static_cast<int32_t>(layout.blocks());
  args.turns = static_cast<int64_t>(layout.turns());
  args.limit.place = report_place(rank, 1);
  args.limit.limit_ns = call.limit_ns;
  args.limit.rank = rank;
  return args;
}

void Collectives::Impl::enqueue(Collective call, cudaStream_t stream) const {
  if (call.op == CollectiveOp::AllGather) {  // which need not know what it moves
    call.count *= bytes_of(call.element);
    call.element = CollectiveElement::Byte;
  }
  Carrier const carrier = carrier_of(call.method);
  ExchangeStep const step = step_of(call);
  int64_t const element_bytes = bytes_of(call.element);
  int64_t const unit = carrier == Carrier::Packets ? kPacketDataBytes : kGroupBytes;
  int64_t const group = unit / element_bytes;  // elements
  // Words of a packet are loaded and stored one by one.
  int64_t const alignment = carrier == Carrier::Packets ? 4 : kGroupBytes;
  int64_t const w = world_size();
  int64_t const all_groups = static_cast<int64_t>(layout.groups(carrier));
  // Of a launch: elements of a segment, or of all of them where each rank sums one.
  int64_t const most = all_groups * group * (step == ExchangeStep::SumAndShare ? w : 1);

  ExchangeArgs args = args_of(call);
  for (int64_t begin = 0; begin < call.count; begin += most) {
    int64_t const count = std::min(most, call.count - begin);
    args.in = static_cast<char const*>(call.in) + begin * element_bytes;
    args.out = static_cast<char*>(call.out) + begin * element_bytes;
    args.count = static_cast<int32_t>(count);
    args.in_stride = call.op == CollectiveOp::ReduceScatter ? call.count : 0;
    args.out_stride = call.op == CollectiveOp::AllGather ? call.count : 0;
    if (step == ExchangeStep::SumAndShare) {
      int64_t const segment = ceil_of(ceil_of(count, w), group) * group;
      args.total = args.count;
      args.count = static_cast<int32_t>(segment);
      args.in_stride = args.out_stride = segment;
    }
    auto const is_multiple = [&](auto const value) { return int64_t(value) % alignment == 0; };
    args.is_aligned = is_multiple(reinterpret_cast<uintptr_t>(args.in)) &&
                      is_multiple(reinterpret_cast<uintptr_t>(args.out)) &&
                      is_multiple(args.in_stride * element_bytes) &&
                      is_multiple(args.out_stride * element_bytes);
    ExchangeGrid const grid = grid_of(carrier, ceil_of(args.count, group), call.ctas, most_ctas());
    args.thread_groups = thread_groups_of(ceil_of(args.count, group), grid);
    check_cuda(launch_exchange(args, call.element, step, carrier, grid, stream), "kernel launch");
  }
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
  AGMM_CHECK_CUDA(prepare_exchanges());
}

Collectives::~Collectives() = default;

std::size_t Collectives::slot_bytes() const { return impl_->layout.slot_bytes(); }

bool Collectives::operator()(Collective const& call, void* stream) {
  return impl_->ordered.make(stream, [&] {
    check(call);
    uint32_t const tag = impl_->tag_of(call);
    if (impl_->noted.insert(tag).second) note_call(tag, described(call));
    return [&](cudaStream_t on) { impl_->enqueue(call, on); };
  });
}

}  // namespace agmm
