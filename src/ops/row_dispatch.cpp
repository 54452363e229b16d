#include "agmm/row_dispatch.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <set>
#include <string>
#include <utility>

#include "ops/prepare_grouped.hpp"
#include "ops/refuse.hpp"
#include "ops/row_checks.hpp"
#include "order/grouped_tiles.hpp"
#include "runtime/cuda.hpp"
#include "runtime/ordered_calls.hpp"
#include "symmetric/dispatch_layout.hpp"
#include "sync/signals.hpp"
#include "transport/row_dispatch.hpp"

namespace agmm {

namespace {

constexpr int64_t kVectorBytes = 16;

std::string described(RowDispatch const& call) {
  std::string counts;
  for (int32_t const count : call.counts) counts += std::to_string(count) + " ";
  return "dispatch(" + counts + "tokens of " + std::to_string(call.row_bytes) + " bytes)";
}

/// What follows makes a dispatch take about a quarter of its matmul, so that few rows come late,
/// and no multiprocessor more than that is away from the matmul. With up to kFewRows rows of each
/// expert, which are latency, it is the usual number. All are choices among what two H200 took
/// with 4 to 32 CTAs (benchmarks/dispatch.py), where a CTA wrote 38 to 50 GB/s.
constexpr double kBytesPerUs = 40e3;   // that a CTA writes
constexpr double kFlopsPerUs = 650e6;  // of a matmul with many rows
constexpr double kShareOfMatmul = 0.25;
constexpr int32_t kFewRows = 64;
constexpr double kFewestCtas = 4;
constexpr double kMostCtas = 24;

/// The CTAs that bring rows beside the matmul that takes them as they come, if experts are used
/// alike.
int32_t usual_ctas(RowDispatch const& call, int32_t world_size, GroupedMatmul const* matmul) {
  int64_t const chosen = int64_t(total(call.counts)) * call.choices / world_size;
  int64_t const rows = std::min<int64_t>(chosen, call.capacity);
  if (matmul == nullptr || rows <= int64_t(kFewRows) * call.experts) return kDispatchCtas;
  int const weights = matmul->epilogue == Epilogue::Gate ? 2 : 1;
  double const flops_of_row = 2.0 * weights * matmul->out_columns * matmul->k;
  // fp8, which nobody has measured here, is taken to multiply twice as fast.
  double const flops_per_us = (is_fp8(matmul->dtype) ? 2 : 1) * kFlopsPerUs;
  double const bytes_per_us = double(call.row_bytes) * flops_per_us / flops_of_row / kShareOfMatmul;
  return int32_t(std::clamp(std::ceil(bytes_per_us / kBytesPerUs), kFewestCtas, kMostCtas));
}

/// The scales of a row of fp8.
int64_t scales_of_row(GroupedMatmul const& args) {
  bool const is_block = args.weight.scales.columns == kScaleBlock;
  return is_block ? (args.k + kScaleBlock - 1) / kScaleBlock : 1;
}

/// Whether rows of so many bytes are those of a matmul. fp8 has the scales behind a row's numbers,
/// and perhaps bytes that fill it up.
bool has_rows_of(GroupedMatmul const& args, int64_t row_bytes) {
  int64_t const bytes = int64_t(args.k) * element_bytes(args.dtype);
  if (!is_fp8(args.dtype)) return bytes == row_bytes;
  return bytes + scales_of_row(args) * int64_t(sizeof(float)) <= row_bytes;
}

/// What the ranks have to agree on. How many rows of a token there are does not matter to the rank
/// that offers it.
uint32_t tag_of(RowDispatch const& call) {
  return call_tag(total(call.counts), call.row_bytes, described(call), false);
}

}  // namespace

struct RowDispatcher::Impl {
  Impl(int rank_, std::vector<uintptr_t> bases_, std::size_t slot_bytes, int reserved_sms)
      : rank(rank_),
        bases(std::move(bases_)),
        layout(slot_bytes, static_cast<int>(bases.size())),
        sm_count(small_kernels_device().sm_count - reserved_sms),
        in_pairs(small_kernels_device().capability_major >= 9),
        ordered(small_kernels_device().index) {}

  int world_size() const { return static_cast<int>(bases.size()); }
  void check(RowDispatch const& call) const;
  /// An even number where CTAs come in pairs.
  int ctas_of(RowDispatch const& call, GroupedMatmul const* matmul) const {
    int const wanted = call.ctas > 0 ? call.ctas : usual_ctas(call, world_size(), matmul);
    int const ctas = std::clamp(wanted, 1, std::max(1, sm_count / 2));
    return in_pairs ? std::max(2, ctas / 2 * 2) : ctas;
  }
  DispatchArgs args_of(RowDispatch const& call, uint32_t tag) const;
  GroupedMatmul with_rows(GroupedMatmul args, RowDispatch const& call, bool is_first) const;

  int rank;
  std::vector<uintptr_t> bases;
  DispatchLayout layout;
  int sm_count;   // multiprocessors for this workspace's kernels
  bool in_pairs;  // whether the GPU has clusters
  OrderedCalls ordered;
  std::set<uint32_t> noted;  // tags
};

void RowDispatcher::Impl::check(RowDispatch const& call) const {
  check_counts(call.counts, bases.size());
  check_row_bytes(call.row_bytes);
  check_between("row_bytes", call.row_bytes, kVectorBytes, int64_t(kMaxSize) * 8);
  int64_t const room = static_cast<int64_t>(layout.slot_bytes()) / call.row_bytes;
  for (int32_t const count : call.counts) check_between("tokens_per_rank", count, 0, room);
  check_between("choices", call.choices, 1, kMostChoices);
  check_between("experts", call.experts, 1, kMostExperts);
  check_between("capacity", call.capacity, 1, kMaxSize);
  check_between("ctas", call.ctas, 0, sm_count);
  if (call.counts[std::size_t(rank)] > 0) check_address("x", call.x, kVectorBytes);
  check_address("rows", call.rows, kVectorBytes);
  if (call.gathered != nullptr) check_address("gathered", call.gathered, kVectorBytes);
  for (auto const& [name, pointer] : {std::pair<char const*, void const*>{"tokens", call.tokens},
                                      {"offsets", call.offsets},
                                      {"positions", call.positions},
                                      {"arrived", call.arrived},
                                      {"begins", call.begins}}) {
    check_address(name, pointer, sizeof(int32_t));
  }
}

DispatchArgs RowDispatcher::Impl::args_of(RowDispatch const& call, uint32_t tag) const {
  DispatchArgs args;
  args.rank = rank;
  args.world_size = world_size();
  args.choices = call.choices;
  args.experts = call.experts;
  args.capacity = call.capacity;
  args.vectors = static_cast<int32_t>(call.row_bytes / kVectorBytes);
  for (std::size_t i = 0; i < call.counts.size(); ++i) {
    args.first_token[i + 1] = args.first_token[i] + call.counts[i];
    args.memory[i] = reinterpret_cast<char*>(bases[i]);
  }
  args.x = static_cast<char const*>(call.x);
  args.tokens = call.tokens;
  args.offsets = call.offsets;
  args.positions = call.positions;
  args.rows = static_cast<char*>(call.rows);
  args.gathered = static_cast<char*>(call.gathered);
  args.arrived = call.arrived;
  args.begins = call.begins;
  args.slot_bytes = static_cast<int64_t>(layout.data(1) - layout.data(0));
  args.offers = static_cast<int64_t>(layout.offers(0));
  args.words_of_slot = static_cast<int64_t>(layout.offers(1) - layout.offers(0));
  char* const own = args.memory[rank];
  args.turn = reinterpret_cast<uint32_t*>(own + layout.turn());
  args.finished = reinterpret_cast<uint32_t*>(own + layout.finished());
  args.tag = tag;
  Senders senders{};
  senders.mismatch_is_fatal = true;  // the chunks are the sources
  args.limit = {report_place(rank, 1), call.limit_ns, senders, rank};
  return args;
}

GroupedMatmul RowDispatcher::Impl::with_rows(GroupedMatmul args, RowDispatch const& call,
                                             bool is_first) const {
  args.a = call.rows;
  args.lda = call.row_bytes / element_bytes(args.dtype);
  if (is_fp8(args.dtype)) {
    auto const* const scales = static_cast<char const*>(call.rows) + args.k;
    args.scales = {reinterpret_cast<float const*>(scales), call.row_bytes / int64_t(sizeof(float)),
                   scales_of_row(args) > 1 ? 1 : 0};
  }
  args.offsets = call.offsets;
  args.sm_count = sm_count;
  if (is_first) {
    args.arrival = {call.arrived, call.begins, world_size(), rank, rank, call.limit_ns};
    args.starts_early = true;
    args.sm_count -= ctas_of(call, &args);
  }
  return args;
}

std::size_t RowDispatcher::workspace_bytes(std::size_t slot_bytes, int world_size) {
  return DispatchLayout(slot_bytes, world_size).bytes();
}

RowDispatcher::RowDispatcher(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
                             int reserved_sms)
    : impl_(std::make_unique<Impl>(rank, bases, slot_bytes, reserved_sms)) {
  check_between("rank", rank, 0, impl_->world_size() - 1);
  if (reserved_sms < 0 || impl_->sm_count < 4) {
    refuse("reserved_sms", std::to_string(reserved_sms), "some that leave at least 4");
  }
  AGMM_CHECK_CUDA(prepare_dispatch());
}

RowDispatcher::~RowDispatcher() = default;

std::size_t RowDispatcher::slot_bytes() const { return impl_->layout.slot_bytes(); }

bool RowDispatcher::operator()(RowDispatch const& call, std::vector<GroupedMatmul> const& matmuls,
                               void* stream) {
  return impl_->ordered.make(stream, [&] {
    impl_->check(call);
    uint32_t const tag = tag_of(call);
    std::vector<PreparedGrouped> prepared;
    for (GroupedMatmul const& each : matmuls) {
      if (!has_rows_of(each, call.row_bytes) || each.experts != call.experts ||
          each.rows != call.capacity) {
        refuse("weights", "a matmul of other rows", "one of the rows that are dispatched");
      }
      prepared.push_back(prepare_grouped(impl_->with_rows(each, call, prepared.empty())));
    }
    if (impl_->noted.insert(tag).second) note_call(tag, described(call));
    DispatchArgs const args = impl_->args_of(call, tag);
    int const ctas = impl_->ctas_of(call, matmuls.empty() ? nullptr : &matmuls.front());
    return [this, args, prepared, ctas](cudaStream_t on) {
      AGMM_CHECK_CUDA(launch_offer(args, impl_->sm_count, on));
      // No event or other work stands between the dispatch and the matmul that starts early.
      AGMM_CHECK_CUDA(launch_dispatch(args, ctas, impl_->in_pairs, on));
      for (PreparedGrouped const& each : prepared) each.launch(on);
    };
  });
}

void RowDispatcher::precede(void* stream) { impl_->ordered.precede(stream); }

}  // namespace agmm
