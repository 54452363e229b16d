// The host code of the collectives on a fake CUDA, whose kernels only say how they were launched:
// `collective_checks NAME` runs one of the checks and says what is wrong.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agmm/collectives.hpp"
#include "fake_cuda.hpp"
#include "precedence.hpp"
#include "runtime/cuda.hpp"
#include "sync/signals.hpp"

namespace {

using agmm::Carrier;
using agmm::Collective;
using agmm::CollectiveElement;
using agmm::CollectiveLayout;
using agmm::CollectiveMethod;
using agmm::CollectiveOp;
using agmm::Collectives;
using agmm::ExchangeArgs;
using agmm::ExchangeStep;
using fake::state;

constexpr std::size_t kSlotBytes = 2 << 20;
cudaStream_t const kStream = fake::stream(1);
cudaStream_t const kOther = fake::stream(2);

void check(bool is_right, std::string const& what) {
  if (is_right) return;
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::exit(1);
}

template <class Call>
std::string error_of(Call const& call) {
  try {
    call();
  } catch (std::exception const& error) {
    return error.what();
  }
  return "";
}

/// The workspace of one rank, at addresses that nothing reads.
struct Workspace {
  int rank;
  int world_size;
  std::vector<uintptr_t> bases;
  std::unique_ptr<Collectives> op;

  Workspace(int rank_, int world_size_, int reserved_sms = 0)
      : rank(rank_), world_size(world_size_) {
    for (int i = 0; i < world_size; ++i) bases.push_back(uintptr_t(i + 1) << 32);
    op = std::make_unique<Collectives>(rank, bases, kSlotBytes, reserved_sms);
  }

  std::vector<fake::Exchange> call(Collective const& what, cudaStream_t stream = kStream) {
    state().exchanges.clear();
    (*op)(what, stream);
    return state().exchanges;
  }
};

Collective collective(CollectiveOp op, CollectiveMethod method, int64_t count) {
  Collective call;
  call.op = op;
  call.method = method;
  call.element = CollectiveElement::BFloat16;
  call.in = reinterpret_cast<void const*>(uintptr_t(1) << 60);
  call.out = reinterpret_cast<void*>(uintptr_t(1) << 61);
  call.count = count;
  return call;
}

std::vector<Collective> every(int64_t count) {
  std::vector<Collective> found;
  for (CollectiveOp const op :
       {CollectiveOp::AllGather, CollectiveOp::ReduceScatter, CollectiveOp::AllReduce}) {
    for (CollectiveMethod const method :
         {CollectiveMethod::OneShot, CollectiveMethod::TwoShot, CollectiveMethod::Blocks}) {
      if (method == CollectiveMethod::TwoShot && op != CollectiveOp::AllReduce) continue;
      found.push_back(collective(op, method, count));
    }
  }
  return found;
}

/// The launches of a call cover its elements once, in order, and fit into a slot.
void bands() {
  for (int const w : {2, 3, 8}) {
    CollectiveLayout const layout(kSlotBytes, w);
    Workspace workspace(w - 1, w);
    for (int64_t const count : {1, 5, 7, 4096, 1'000'003, 5'000'000}) {
      for (Collective const& call : every(count)) {
        std::string const name = std::to_string(w) + " ranks, " + std::to_string(count) + ", op " +
                                 std::to_string(int(call.op)) + ", method " +
                                 std::to_string(int(call.method));
        bool const is_gather = call.op == CollectiveOp::AllGather;
        int64_t const element_bytes = is_gather ? 1 : 2;
        int64_t done = 0;
        for (fake::Exchange const& launch : workspace.call(call)) {
          ExchangeArgs const& args = launch.args;
          bool const is_shared = launch.step == ExchangeStep::SumAndShare;
          int64_t const elements = args.elements;
          auto const offset = [&](auto const* at, auto const* from) {
            return static_cast<char const*>(at) - static_cast<char const*>(from);
          };
          check(offset(args.in, call.in) == done * element_bytes, name + ": begins elsewhere");
          check(offset(args.out, call.out) == done * element_bytes, name + ": stored elsewhere");
          int64_t const unit = launch.carrier == Carrier::Packets ? 12 : 16;
          int64_t const group = unit / element_bytes;
          int64_t const groups = args.groups;
          check(groups <= int64_t(layout.groups(launch.carrier)), name + ": does not fit");
          check(groups > 0 && elements > 0, name + ": nothing to do");
          check(args.end == (elements + group - 1) / group, name + ": groups in all");
          bool const is_aligned = (done * element_bytes) % (unit == 12 ? 4 : 16) == 0 &&
                                  (args.in_stride | args.out_stride) % (unit == 12 ? 4 : 16) == 0;
          check(args.whole == (is_aligned ? elements / group : 0), name + ": whole groups");
          if (is_shared) {
            check(groups * w >= args.end, name + ": elements of nobody");
            check(args.segment == groups, name + ": a segment is not all groups");
            int64_t const stride = groups * unit;
            check(args.in_stride == stride && args.out_stride == stride, name + ": stride");
          } else {
            int64_t const all = count * 2;
            check(groups == args.end, name + ": groups of a segment");
            check(args.in_stride == (call.op == CollectiveOp::ReduceScatter ? all : 0),
                  name + ": stride of what is sent");
            check(args.out_stride == (is_gather ? all : 0), name + ": stride of what is received");
          }
          int64_t const block = int64_t(args.thread_groups) * launch.grid.threads;
          check(launch.carrier == Carrier::Packets ||
                    (groups + block - 1) / block <= int64_t(layout.blocks()),
                name + ": more blocks than signals");
          check(launch.grid.ctas >= 1 && launch.grid.ctas <= agmm::kMaxExchangeCtas, name);
          if (launch.carrier == Carrier::Blocks) {
            int64_t const blocks = (groups + block - 1) / block;
            int64_t const of_cta = (blocks + launch.grid.ctas - 1) / launch.grid.ctas;
            check((launch.grid.ctas - 1) * of_cta * block < groups,
                  name + ": CTAs of unequal shares");
          }
          done += elements;
        }
        check(done == count * (is_gather ? 2 : 1), name + ": " + std::to_string(done) + " done");
      }
    }
  }
}

/// No two regions of a workspace overlap.
void layouts() {
  for (int w = 2; w <= agmm::kMaxExchangeRanks; ++w) {
    CollectiveLayout const layout(kSlotBytes, w);
    std::map<std::size_t, std::size_t> ends;  // by begin
    auto const take = [&](std::size_t begin, std::size_t bytes) {
      check(ends.emplace(begin, begin + bytes).second, "two begin at one place");
    };
    for (int slot = 0; slot < CollectiveLayout::kSlots; ++slot) {
      for (Carrier const carrier : {Carrier::Packets, Carrier::Blocks}) {
        check(layout.groups(carrier) * agmm::kGroupBytes <= layout.stretch_bytes(carrier),
              "a stretch too short");
        for (int i = 0; i < CollectiveLayout::kSteps * w; ++i) {
          take(layout.data(carrier, slot) + std::size_t(i) * layout.stretch_bytes(carrier),
               layout.stretch_bytes(carrier));
        }
      }
      take(layout.signals(slot), CollectiveLayout::kSteps * std::size_t(w) * layout.blocks() * 4);
    }
    take(layout.turns(), agmm::kMaxExchangeCtas * 4);
    take(layout.counters(), agmm::kNormCounters * 4);
    std::size_t last = 0;
    for (auto const& [begin, end] : ends) {
      check(begin >= last, "two overlap with " + std::to_string(w) + " ranks");
      last = end;
    }
    check(last == layout.bytes(), "does not end with the last");
  }
}

/// Ranks have the same grid, and signals say whether they call alike.
void agreement() {
  for (Collective const& call : every(100'000)) {
    Workspace first(0, 4);
    Workspace other(3, 4);
    auto const a = first.call(call);
    auto const b = other.call(call);
    check(a.size() == b.size(), "launches");
    for (std::size_t i = 0; i < a.size(); ++i) {
      check(a[i].grid.ctas == b[i].grid.ctas && a[i].grid.threads == b[i].grid.threads, "grid");
      check(a[i].args.tag == b[i].args.tag && a[i].args.tag != 0, "tag");
      check(a[i].args.thread_groups == b[i].args.thread_groups, "blocks");
    }
    std::vector<Collective> others = every(100'000);
    for (Collective& each : others) {
      bool const is_same = each.op == call.op && each.method == call.method;
      check((other.call(each)[0].args.tag == a[0].args.tag) == is_same, "tag of another call");
    }
    for (auto const change :
         {+[](Collective& c) { c.count = 1; }, +[](Collective& c) { c.is_average = true; },
          +[](Collective& c) { c.element = CollectiveElement::Float32; },
          +[](Collective& c) { c.ctas = 3; }}) {
      Collective changed = call;
      change(changed);
      check(other.call(changed)[0].args.tag != a[0].args.tag, "tag of a changed call");
    }
    Workspace fewer(3, 4, 100);
    check(fewer.call(call)[0].args.tag != a[0].args.tag, "tag of another number of CTAs");
  }
}

void refusals() {
  Workspace workspace(1, 4);
  auto const refused = [&](auto const& change) {
    Collective call = collective(CollectiveOp::AllReduce, CollectiveMethod::OneShot, 64);
    change(call);
    std::size_t const before = state().operations.size();
    std::string const error = error_of([&] { workspace.call(call); });
    check(state().operations.size() == before, "something was enqueued");
    check(error.find("found") != std::string::npos, "no error, or: " + error);
  };
  refused([](Collective& call) { call.count = -1; });
  refused([](Collective& call) { call.in = nullptr; });
  refused([](Collective& call) { call.out = reinterpret_cast<void*>(uintptr_t(3)); });
  refused([](Collective& call) { call.element = CollectiveElement::Byte; });
  refused([](Collective& call) { call.ctas = agmm::kMaxExchangeCtas + 1; });
  refused([](Collective& call) {
    call.op = CollectiveOp::AllGather;
    call.method = CollectiveMethod::TwoShot;
  });
  check(workspace.call(collective(CollectiveOp::AllReduce, CollectiveMethod::OneShot, 64)).size() ==
            1,
        "a call after those that were refused");
  check(workspace.call(collective(CollectiveOp::AllReduce, CollectiveMethod::OneShot, 0)).empty(),
        "a launch for nothing");
  for (int const w : {1, agmm::kMaxExchangeRanks + 1}) {
    check(!error_of([&] { Workspace(0, w); }).empty(), std::to_string(w) + " ranks");
  }
  check(!error_of([&] { Workspace(4, 4); }).empty(), "a rank outside the group");
}

/// A call without elements is one small launch, told apart from all that have some.
void meetings() {
  auto const meet = [](Workspace& workspace, std::string const& agreed, CollectiveMethod method) {
    agmm::Meeting meeting;
    meeting.method = method;
    meeting.in = reinterpret_cast<void const*>(uintptr_t(1) << 60);
    meeting.out = reinterpret_cast<void*>(uintptr_t(1) << 61);
    meeting.agreed = agreed;
    meeting.words = "nothing, in words";
    state().exchanges.clear();
    (*workspace.op)(meeting, kStream);
    check(state().exchanges.size() == 1, "launches of a call without elements");
    return state().exchanges[0];
  };
  for (auto const method : {CollectiveMethod::OneShot, CollectiveMethod::Blocks}) {
    Workspace first(0, 4);
    Workspace fewer(3, 4, 100);
    fake::Exchange const launch = meet(first, "no rows", method);
    check(launch.grid.ctas == 1 && launch.step == ExchangeStep::Gather, "more than a signal each");
    check(launch.args.limit.place.late == agmm::report_place(0, agmm::kWithoutElements).late,
          "what is said of a long wait");
    check(launch.args.elements == 4 && launch.args.tag != 0, "a word of each rank");
    check(meet(fewer, "no rows", method).args.tag == launch.args.tag, "tag on another rank");
    check(meet(first, "no columns", method).args.tag != launch.args.tag, "tag of another one");
    // A gather of as many bytes by as many CTAs carries another tag.
    Collective gather = collective(CollectiveOp::AllGather, method, 4);
    gather.element = CollectiveElement::Byte;
    gather.ctas = 1;
    check(first.call(gather)[0].args.tag != launch.args.tag, "tag of a call with elements");
  }
  Workspace workspace(1, 4);
  agmm::Meeting nowhere;
  check(error_of([&] { (*workspace.op)(nowhere, kStream); }).find("in: found null") == 0,
        "no word");
  nowhere.in = nowhere.out = reinterpret_cast<void*>(uintptr_t(1) << 60);
  nowhere.method = CollectiveMethod::Relayed;
  check(!error_of([&] { (*workspace.op)(nowhere, kStream); }).empty(), "relays that are unknown");
}

/// Calls on several streams run one after the other.
void order() {
  Workspace workspace(1, 4);
  Collective const call = collective(CollectiveOp::AllReduce, CollectiveMethod::OneShot, 64);
  workspace.call(call, kStream);
  state().operations.clear();
  workspace.call(call, kStream);
  workspace.call(call, kOther);
  std::string names;
  for (fake::Operation const& operation : state().operations) names += operation.name + " ";
  check(names == "exchange record wait exchange record ", names);
}

void precedence() {
  Workspace workspace(1, 4);
  Collective const call = collective(CollectiveOp::AllReduce, CollectiveMethod::OneShot, 64);
  std::string const wrong = fake::wrong_precedence(
      *workspace.op, [&](cudaStream_t stream) { workspace.call(call, stream); });
  check(wrong.empty(), wrong);
}

/// A call that gets no event leaves nothing half done.
void creations() {
  Workspace workspace(1, 4);
  Collective const call = collective(CollectiveOp::AllReduce, CollectiveMethod::OneShot, 64);
  unsigned long long id = 500;
  for (bool const is_captured : {false, true}) {
    if (is_captured) fake::begin_capture(kStream, id);
    state().operations.clear();
    state().creatable = 0;
    check(!error_of([&] { workspace.call(call); }).empty(), "an event from nowhere");
    state().creatable = -1;
    check(state().operations.empty(), "something was enqueued");
    std::string const after = error_of([&] { workspace.call(call); });
    check(after.empty(), "the call after it: " + after);
  }
  check(fake::end_capture(id), "the capture was ended");
}

/// The message to ranks that differ names the call, which it reads from a signal's note.
void notes() {
  Workspace workspace(1, 4);
  for (Collective const& call : every(96)) {
    uint32_t const tag = workspace.call(call)[0].args.tag;
    std::string const message = agmm::mismatch_message(1, 0, 0, tag + 1, tag);
    check(message.find("; this rank: ") != std::string::npos, message);
  }
}

/// The launches of a call with a norm cover its rows once, in order, and fit into a slot.
void norms() {
  for (int const w : {2, 3, 8}) {
    CollectiveLayout const layout(kSlotBytes, w);
    for (auto const method : {CollectiveMethod::OneShot, CollectiveMethod::TwoShot}) {
      for (auto const& [all_rows, row] :
           {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {3000, 8192}, {100, 24000}}) {
        std::string const name = std::to_string(w) + " ranks, " + std::to_string(all_rows) +
                                 " rows of " + std::to_string(row);
        Workspace workspace(w - 1, w);
        Collective const call = collective(CollectiveOp::AllReduce, method, all_rows * row);
        agmm::ResidualNorm norm;
        norm.residual = reinterpret_cast<void const*>(uintptr_t(3) << 60);
        norm.weight = reinterpret_cast<void const*>(uintptr_t(5) << 60);
        norm.normed = reinterpret_cast<void*>(uintptr_t(7) << 60);
        norm.row = row;
        state().exchanges.clear();
        (*workspace.op)(call, norm, kStream);
        int64_t done = 0;
        int threads = 0;
        for (fake::Exchange const& launch : state().exchanges) {
          bool const is_shared = method == CollectiveMethod::TwoShot;
          int64_t const at = done * row * 2;
          auto const is_at = [&](void const* pointer, void const* from) {
            return static_cast<char const*>(pointer) == static_cast<char const*>(from) + at;
          };
          check(is_at(launch.args.in, call.in) && is_at(launch.args.out, call.out),
                name + ": rows");
          check(
              is_at(launch.norm.residual, norm.residual) && is_at(launch.norm.normed, norm.normed),
              name + ": other rows");
          check(launch.norm.weight == norm.weight, name + ": a weight for all rows");
          int64_t const groups = (row + 5) / 6;
          check(launch.norm.row_groups == groups && launch.norm.row_elements == row, name);
          check(launch.norm.whole == (row % 2 == 0 ? row / 6 : 0), name + ": whole groups");
          check(int64_t(launch.norm.owned_rows) * w >= launch.norm.rows, name + ": rows of nobody");
          int64_t const sent = is_shared ? launch.norm.owned_rows : launch.norm.rows;
          check(sent * groups <= int64_t(layout.groups(Carrier::Packets)), name + ": does not fit");
          check(threads == 0 || threads == launch.grid.threads, name + ": another order of sums");
          threads = launch.grid.threads;
          done += launch.norm.rows;
        }
        check(done == all_rows, name + ": " + std::to_string(done) + " done");
      }
    }
  }
  Workspace workspace(0, 2);
  agmm::ResidualNorm norm;
  norm.residual = norm.weight = norm.normed = reinterpret_cast<void*>(uintptr_t(3) << 60);
  auto const refused = [&](CollectiveMethod method, int64_t count, int64_t row) {
    norm.row = row;
    Collective const call = collective(CollectiveOp::AllReduce, method, count);
    std::string const error = error_of([&] { (*workspace.op)(call, norm, kStream); });
    check(error.find("found") != std::string::npos, "no error, or: " + error);
  };
  refused(CollectiveMethod::Blocks, 64, 64);
  refused(CollectiveMethod::OneShot, 64, 0);
  refused(CollectiveMethod::OneShot, 64, 60);
  refused(CollectiveMethod::OneShot, 48 << 10, 48 << 10);
}

/// What a rank of a square, 0-1-2-3-0, sends, gets and passes on.
void relays() {
  std::vector<agmm::RelayMove> moves;
  for (int owner = 0; owner < 4; ++owner) {
    int const next = (owner + 1) % 4;
    moves.push_back({owner, owner, next});
    moves.push_back({owner, owner, (owner + 3) % 4});
    moves.push_back({owner, next, (owner + 2) % 4});
  }
  Workspace workspace(1, 4);
  Collective const call = collective(CollectiveOp::AllReduce, CollectiveMethod::Relayed, 64);
  check(!error_of([&] { workspace.call(call); }).empty(), "a call without relays");
  workspace.op->relay_over(moves);
  auto const launches = workspace.call(call);
  check(launches.size() == 1 && launches[0].step == ExchangeStep::Sum, "one shot");
  agmm::RelayArgs const& found = launches[0].relays;
  check(found.near == 0b0101 && found.far == 0b1000, "who sends to rank 1");
  check(found.near_distances == 0b1010, "to whom it sends: those one ahead and one behind");
  for (uint32_t owner = 0; owner < 4; ++owner) {
    check(found.passed_on[owner] == (owner == 0 ? 0b0010u : 0), "what of 0 it passes on to 2");
  }
  moves.pop_back();
  for (int rank = 0; rank < 4; ++rank) {
    bool const is_refused = !error_of([&] { Workspace(rank, 4).op->relay_over(moves); }).empty();
    check(is_refused == (rank == 1), "a shard that does not come");
  }
  moves[0].target = 4;
  check(!error_of([&] { Workspace(0, 4).op->relay_over(moves); }).empty(), "no such rank");
}

}  // namespace

int main(int count, char** arguments) {
  std::map<std::string, void (*)()> const checks = {
      {"bands", &bands},         {"layouts", &layouts},   {"agreement", &agreement},
      {"meetings", &meetings},   {"refusals", &refusals}, {"norms", &norms},
      {"relays", &relays},       {"order", &order},       {"precedence", &precedence},
      {"creations", &creations}, {"notes", &notes}};
  if (count == 1) {
    for (auto const& [name, run] : checks) std::printf("%s\n", name.c_str());
    return 0;
  }
  checks.at(arguments[1])();
  return 0;
}
