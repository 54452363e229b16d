#include "agmm/row_combine.hpp"

#include <set>
#include <string>
#include <utility>

#include "agmm/row_dispatch.hpp"
#include "collectives/row_combine.hpp"
#include "ops/prepare_grouped.hpp"
#include "ops/refuse.hpp"
#include "ops/row_checks.hpp"
#include "order/grouped_tiles.hpp"
#include "runtime/cuda.hpp"
#include "runtime/ordered_calls.hpp"
#include "symmetric/combine_layout.hpp"
#include "sync/signals.hpp"

namespace agmm {

namespace {

int64_t row_bytes(RowCombine const& call) {
  return int64_t(call.columns) * (call.element == CollectiveElement::Float32 ? 4 : 2);
}

/// The places of the second part, and of others behind it, follow from the capacity.
std::string described(RowCombine const& call) {
  std::string const capacity =
      call.parts == 1 ? "" : " of capacity " + std::to_string(call.capacity);
  return "combine(" + in_words(call.counts) + "tokens of " + std::to_string(call.choices) +
         " choices and " + std::to_string(row_bytes(call)) + " bytes of " +
         to_string(call.element) + ", " + std::to_string(call.parts) + " parts" + capacity + ")";
}

/// What the ranks have to agree on.
uint32_t tag_of(RowCombine const& call) {
  return call_tag(total(call.counts), call.columns, described(call), false);
}

}  // namespace

struct RowCombiner::Impl {
  Impl(int rank_, std::vector<uintptr_t> bases_, std::size_t slot_bytes, int reserved_sms)
      : rank(rank_),
        bases(std::move(bases_)),
        layout(slot_bytes, static_cast<int>(bases.size())),
        sm_count(small_kernels_device().sm_count - reserved_sms),
        ordered(small_kernels_device().index) {}

  int world_size() const { return static_cast<int>(bases.size()); }
  void check(RowCombine const& call, std::size_t matmuls) const;
  CombineArgs args_of(RowCombine const& call, uint32_t tag) const;
  GroupedMatmul to_slot(GroupedMatmul args, CombineArgs const& combine, int part) const;

  int rank;
  std::vector<uintptr_t> bases;
  CombineLayout layout;
  int sm_count;  // multiprocessors for this workspace's kernels
  OrderedCalls ordered;
  std::set<uint32_t> noted;  // tags
};

void RowCombiner::Impl::check(RowCombine const& call, std::size_t matmuls) const {
  check_counts(call.counts, bases.size());
  if (call.element == CollectiveElement::Byte) refuse("element", "bytes", "numbers for a sum");
  check_between("columns", call.columns, 1, kMaxSize);
  check_row_bytes(row_bytes(call));
  check_between("choices", call.choices, 1, kMostChoices);
  check_between("parts", call.parts, 1, kMostCombinedParts);
  check_between("experts", call.experts, 1, kMostExperts);
  check_between("capacity", call.capacity, 1, kMaxSize);
  if (call.rows.size() + matmuls != std::size_t(call.parts) ||
      (!call.rows.empty() && matmuls != 0)) {
    refuse("rows",
           std::to_string(call.rows.size()) + " and " + std::to_string(matmuls) + " matmuls",
           "rows or a matmul of each part");
  }
  std::size_t const needed = CombineLayout::slot_bytes_of(
      total(call.counts) * call.choices, int64_t(call.parts) * call.capacity, row_bytes(call));
  if (needed > layout.slot_bytes()) {
    refuse("slot_bytes", std::to_string(layout.slot_bytes()), "at least " + std::to_string(needed));
  }
  for (void const* const rows : call.rows) check_address("rows", rows, 16);
  if (call.counts[std::size_t(rank)] > 0) check_address("out", call.out, 16);
  check_address("offsets", call.offsets, sizeof(int32_t));
  check_address("positions", call.positions, sizeof(int32_t));
}

CombineArgs RowCombiner::Impl::args_of(RowCombine const& call, uint32_t tag) const {
  CombineArgs args;
  args.rank = rank;
  args.world_size = world_size();
  args.choices = call.choices;
  args.parts = call.parts;
  args.vectors = static_cast<int32_t>(row_bytes(call) / 16);
  for (int i = 0; i < rank; ++i) args.first_token += call.counts[std::size_t(i)];
  args.tokens = call.counts[std::size_t(rank)];
  args.all_tokens = static_cast<int32_t>(total(call.counts));
  args.capacity = call.capacity;
  args.row_count = call.offsets + call.experts;
  args.positions = call.positions;
  for (std::size_t i = 0; i < call.rows.size(); ++i) {
    args.rows[i] = static_cast<char const*>(call.rows[i]);
  }
  args.weights = call.weights;
  args.out = static_cast<char*>(call.out);
  for (std::size_t i = 0; i < bases.size(); ++i) {
    args.memory[i] = reinterpret_cast<char*>(bases[i]);
  }
  args.slot_rows = static_cast<int64_t>(CombineLayout::rows(total(call.counts) * call.choices));
  args.part_bytes = call.capacity * row_bytes(call);
  args.tags = static_cast<int64_t>(layout.tags());
  args.credits = static_cast<int64_t>(layout.credits());
  args.finished = reinterpret_cast<uint32_t*>(args.memory[rank] + layout.finished());
  args.tag = tag;
  Senders senders{};
  senders.mismatch_is_fatal = true;  // the chunks are the sources
  args.limit = {report_place(rank, 1), call.limit_ns, senders, rank};
  return args;
}

GroupedMatmul RowCombiner::Impl::to_slot(GroupedMatmul args, CombineArgs const& combine,
                                         int part) const {
  args.out = combine.memory[rank] + combine.slot_rows + part * combine.part_bytes;
  args.clears_rest = false;
  args.sm_count = sm_count;
  return args;
}

RowCombiner::RowCombiner(int rank, std::vector<uintptr_t> const& bases, std::size_t slot_bytes,
                         int reserved_sms)
    : impl_(std::make_unique<Impl>(rank, bases, slot_bytes, reserved_sms)) {
  check_between("rank", rank, 0, impl_->world_size() - 1);
  if (reserved_sms < 0 || impl_->sm_count < 1) {
    refuse("reserved_sms", std::to_string(reserved_sms), "some that leave at least 1");
  }
  AGMM_CHECK_CUDA(prepare_combine());
}

RowCombiner::~RowCombiner() = default;

std::size_t RowCombiner::slot_bytes() const { return impl_->layout.slot_bytes(); }

bool RowCombiner::operator()(RowCombine const& call, std::vector<GroupedMatmul> const& matmuls,
                             void* stream) {
  return impl_->ordered.make(stream, [&] {
    impl_->check(call, matmuls.size());
    uint32_t const tag = tag_of(call);
    CombineArgs const args = impl_->args_of(call, tag);
    std::vector<PreparedGrouped> prepared;
    for (GroupedMatmul const& each : matmuls) {
      if (each.out_columns != call.columns || each.rows != call.capacity) {
        refuse("weights", "a matmul of other rows", "one of the rows that are combined");
      }
      int const part = static_cast<int>(prepared.size());
      prepared.push_back(prepare_grouped(impl_->to_slot(each, args, part)));
    }
    if (impl_->noted.insert(tag).second) note_call(tag, described(call));
    return [this, args, prepared, element = call.element](cudaStream_t on) {
      AGMM_CHECK_CUDA(launch_open(args, impl_->sm_count, on));
      for (PreparedGrouped const& each : prepared) each.launch(on);
      AGMM_CHECK_CUDA(launch_combine(args, element, impl_->sm_count, on));
    };
  });
}

void RowCombiner::precede(void* stream) { impl_->ordered.precede(stream); }

}  // namespace agmm
