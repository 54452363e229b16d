// The host code of the CUDA core on a fake CUDA: `checks NAME` runs one of them and says what is
// wrong.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "agmm/fused_all_gather_matmul.hpp"
#include "fake_cuda.hpp"
#include "ops/prepare.hpp"
#include "ops/registry.hpp"
#include "precedence.hpp"
#include "runtime/cuda.hpp"
#include "sync/signals.hpp"
#include "sync/wait_report.hpp"

namespace {

using agmm::CallSpec;
using agmm::FusedAllGatherMatmul;
using agmm::Transport;
using fake::state;

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

bool has(std::string const& text, std::string const& part) {
  return text.find(part) != std::string::npos;
}

constexpr int kRows = 128;
constexpr int kColumns = 256;
constexpr int kRanks = 4;
constexpr std::size_t kSlotBytes = 4 * kRanks * kRows * kColumns;
constexpr char const* kName[] = {"push", "pull", "SM push"};
constexpr Transport kTransports[] = {Transport::CopyEnginePush, Transport::CopyEnginePull,
                                     Transport::SmPush};

/// A workspace of rank 1, and calls on it.
struct Workspace {
  std::vector<std::vector<char>> memory;
  std::unique_ptr<FusedAllGatherMatmul> op;

  explicit Workspace(int reserved_sms = 0) {
    std::vector<uintptr_t> bases;
    for (int rank = 0; rank < kRanks; ++rank) {
      memory.emplace_back(FusedAllGatherMatmul::workspace_bytes(kSlotBytes, kRanks) + 128);
      bases.push_back((reinterpret_cast<uintptr_t>(memory.back().data()) + 127) / 128 * 128);
    }
    op = std::make_unique<FusedAllGatherMatmul>(1, bases, kSlotBytes, reserved_sms);
  }

  void call(Transport transport, cudaStream_t stream, int rows = kRows, int weights = 1,
            bool wants_a = false) const {
    static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
    agmm::Gather gather;
    gather.transport = transport;
    gather.push.parts = 4;
    gather.push.chunk_columns = 64;
    gather.a_shard = tensors;
    gather.a_out =
        wants_a || transport == Transport::CopyEnginePull ? tensors + (1 << 18) : nullptr;
    gather.rows = rows;
    gather.k = kColumns;
    agmm::Weight weight;
    weight.b = tensors + (1 << 17);
    weight.ldb = kColumns;
    weight.n = 128;
    weight.out = tensors + (1 << 19);
    weight.config.shape = {128, 128, 64, 1, 1, agmm::Schedule::Cooperative, false};
    (*op)(gather, std::vector<agmm::Weight>(std::size_t(weights), weight), stream);
  }

  /// The slot of a call by push.
  int slot_of_call(cudaStream_t stream) const {
    call(Transport::CopyEnginePush, stream);
    auto const at = reinterpret_cast<uintptr_t>(state().launched.back().matmul.operands.a);
    auto const first = (reinterpret_cast<uintptr_t>(memory[1].data()) + 127) / 128 * 128;
    return static_cast<int>((at - first) / kSlotBytes);
  }
};

cudaStream_t const kStream = fake::stream(1);
cudaStream_t const kOther = fake::stream(2);

void slots_of_captures() {
  Workspace const workspace;
  std::vector<int> eager;
  auto const call = [&] { eager.push_back(workspace.slot_of_call(kStream)); };
  call();
  call();
  call();
  for (unsigned long long id : {71ull, 72ull, 73ull, 74ull, 75ull, 76ull, 77ull, 78ull, 79ull}) {
    // A graph that is made in several attempts has an odd number of calls.
    fake::begin_capture(kStream, id);
    for (int wanted : {0, 1, 0}) {
      int const found = workspace.slot_of_call(kStream);
      check(found == wanted,
            "slot " + std::to_string(found) + " in a capture, wanted " + std::to_string(wanted));
    }
    check(fake::end_capture(id), "a capture was ended");
    call();
  }
  for (std::size_t i = 0; i < eager.size(); ++i) {
    check(eager[i] == int(i % 2),
          "eager call " + std::to_string(i) + " took slot " + std::to_string(eager[i]));
  }
}

void precedence() {
  for (Transport transport : kTransports) {
    Workspace const workspace;
    std::string const wrong = fake::wrong_precedence(
        *workspace.op, [&](cudaStream_t stream) { workspace.call(transport, stream); });
    check(wrong.empty(), std::string(kName[int(transport)]) + ": " + wrong);
  }
}

/// Two captures are under way at once, with eager calls between, on any stream.
void captures_at_once() {
  for (Transport transport : kTransports) {
    Workspace const workspace;
    fake::begin_capture(kStream, 81);
    fake::begin_capture(kOther, 82);
    for (int i = 0; i < 3; ++i) {
      for (cudaStream_t stream : {kStream, kOther, fake::stream(3)}) {
        std::string const error = error_of([&] { workspace.call(transport, stream); });
        check(error.empty(), std::string(kName[int(transport)]) + ": " + error);
      }
    }
    check(fake::end_capture(81) && fake::end_capture(82), "a capture was ended");
  }
}

/// Whichever operation of a call fails: either nothing was enqueued, and the next call is as if
/// this one had not been, or all later calls refuse.
void failures() {
  for (Transport transport : kTransports) {
    // Rows that end inside tiles, so that push has a stage kernel.
    for (int rows : {kRows, kRows - 8}) {
      for (int failing = 0;; ++failing) {
        std::string const name =
            std::string(kName[int(transport)]) + ", operation " + std::to_string(failing);
        Workspace const workspace;
        workspace.call(transport, kStream, rows);
        state().operations.clear();
        state().fail_at = failing;
        std::string const error = error_of([&] { workspace.call(transport, kOther, rows); });
        state().fail_at = -1;
        if (error.empty()) break;
        bool const has_begun = !state().operations.empty();
        std::string const after = error_of([&] { workspace.call(transport, kOther, rows); });
        check(has(after, "failed half-way") || (!has_begun && after.empty()),
              name + ": the call after it: " + (after.empty() ? "none" : after));
        std::string const later = error_of([&] { workspace.call(transport, kStream, rows); });
        check(later == after, name + ": a later call: " + later);
      }
    }
  }
}

/// A capture that fails leaves nothing behind, and a call of it that failed half-way ends it.
void failures_in_captures() {
  unsigned long long id = 100;
  for (Transport transport : kTransports) {
    for (int failing = 0;; ++failing) {
      std::string const name =
          std::string(kName[int(transport)]) + ", operation " + std::to_string(failing);
      Workspace const workspace;
      check(workspace.slot_of_call(kStream) == 0, "first slot");
      fake::begin_capture(kStream, ++id);
      workspace.call(transport, kStream);
      state().operations.clear();
      state().fail_at = failing;
      std::string const error = error_of([&] { workspace.call(transport, kStream); });
      state().fail_at = -1;
      if (error.empty()) {
        check(fake::end_capture(id), name + ": a capture was ended");
        break;
      }
      state().operations.clear();
      std::string const after = error_of([&] { workspace.call(transport, kStream); });
      check(!after.empty(), name + ": the capture goes on after half a call");
      check(state().operations.empty(), name + ": enqueued in a broken capture");
      check(!fake::end_capture(id), name + ": a graph with half a call");
      for (int wanted : {1, 0}) {
        int const found = workspace.slot_of_call(kStream);
        check(found == wanted, name + ": eager slot " + std::to_string(found) + " after it");
      }
    }
  }
}

/// A call that gets no stream or event of its own leaves nothing half done, of eager calls or of a
/// capture, whichever of them is missing.
void creations() {
  unsigned long long id = 400;
  for (Transport transport : kTransports) {
    for (int creatable = 0;; ++creatable) {
      std::string const name =
          std::string(kName[int(transport)]) + ", " + std::to_string(creatable) + " handles";
      Workspace const workspace;
      workspace.call(transport, kStream);
      fake::begin_capture(kStream, ++id);
      state().operations.clear();
      state().creatable = creatable;
      int const alive = state().alive;
      std::string const error = error_of([&] { workspace.call(transport, kStream); });
      state().creatable = -1;
      if (error.empty()) {
        check(creatable > 0, name + ": a capture takes no handles of its own");
        check(fake::end_capture(id), name + ": a capture was ended");
        break;
      }
      check(state().alive == alive, name + ": handles are left");
      check(state().operations.empty(), name + ": something was enqueued");
      std::string const after = error_of([&] { workspace.call(transport, kStream); });
      check(after.empty(), name + ": the call after it: " + after);
      check(fake::end_capture(id), name + ": the capture was ended");
    }
  }
}

/// Branches of a graph may run one after the other, in the order of their capture: then what a
/// matmul waits for has to come before it.
void copies_come_first() {
  unsigned long long id = 200;
  for (Transport transport : kTransports) {
    for (bool is_captured : {false, true}) {
      Workspace const workspace;
      if (is_captured) fake::begin_capture(kStream, ++id);
      state().operations.clear();
      workspace.call(transport, kStream);
      bool is_kernel_there = false;
      for (fake::Operation const& operation : state().operations) {
        bool const moves = operation.name == "copy" || operation.name == "batch" ||
                           operation.name == "write" || operation.name == "stage";
        check(!(moves && is_kernel_there),
              std::string(kName[int(transport)]) + ": " + operation.name + " after the matmul");
        is_kernel_there = is_kernel_there || operation.name == "kernel";
      }
      check(is_kernel_there, "no kernel");
      if (is_captured) fake::end_capture(id);
    }
  }
}

CallSpec of_one_matmul(char* tensors, int rows) {
  CallSpec call;
  agmm::AsyncInputArgs& mm = call.matmul;
  mm.problem = {rows, 128, 256};
  mm.config.shape = {128, 128, 64, 1, 1, agmm::Schedule::Cooperative, false};
  mm.operands.a = mm.operands.b = tensors;
  mm.operands.out = tensors + 4096;
  mm.operands.ldb = 256;
  return call;
}

/// A call whose counts would not fit into 32 bits is refused, whatever memory there is.
void sizes() {
  std::size_t const slot = std::size_t(1) << 50;
  std::vector<uintptr_t> bases;
  for (uintptr_t rank = 0; rank < kRanks; ++rank) bases.push_back((rank + 1) << 52);
  FusedAllGatherMatmul op(3, bases, slot);
  static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
  auto const call = [&](int rows, int n) {
    agmm::Gather gather;
    gather.a_shard = tensors;
    gather.rows = rows;
    gather.k = 8;
    agmm::Weight weight;
    weight.b = weight.out = tensors;
    weight.ldb = 8;
    weight.n = n;
    weight.config.shape = {128, 128, 64, 1, 1, agmm::Schedule::Cooperative, false};
    return error_of([&] { op(gather, {weight}, kStream); });
  };
  int const most = agmm::kMaxSize / kRanks;
  check(call(most / 8 * 8, 8).empty(), "the most rows: " + call(most / 8 * 8, 8));
  for (int const rows : {most + 1, 1 << 29, INT32_MAX}) {
    std::string const error = call(rows, 8);
    check(has(error, "A_shard: found " + std::to_string(rows) + " rows, wanted at most " +
                         std::to_string(most)),
          error);
  }
  check(has(call(8, INT32_MAX / 8 * 8), "B: found N=2147483640, wanted at most"), "N");
  CallSpec alone = of_one_matmul(tensors, INT32_MAX);
  check(has(error_of([&] { prepare(alone); }), "A: found M=2147483647, wanted at most"), "M");
}

/// A launch that differs in any field is prepared anew, an equal one is not.
void equality() {
  static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
  CallSpec call = of_one_matmul(tensors, 133 * 128);  // more than a wave
  call.push.shard = tensors;
  auto* const word = reinterpret_cast<uint32_t*>(tensors);
  std::map<std::string, std::function<void(CallSpec&)>> const changes = {
      {"nothing", [](CallSpec&) {}},
      {"consumers_copy", [](CallSpec& c) { c.push.consumers_copy = true; }},
      {"a place", [](CallSpec& c) { c.push.places[15].signals = c.push.go + 1; }},
      {"a row of a place", [](CallSpec& c) { c.push.places[3].rows = tensors; }},
      {"a chunk", [](CallSpec& c) { c.push.order.chunk_at[127] = 1; }},
      {"rounds", [](CallSpec& c) { c.push.order.rounds = 2; }},
      {"go", [&](CallSpec& c) { c.push.go = word; }},
      {"across", [](CallSpec& c) { c.matmul.config.across = true; }},
      {"swizzle", [](CallSpec& c) { c.matmul.config.max_swizzle = 2; }},
      {"early", [](CallSpec& c) { c.starts_early = true; }},
      {"sent", [&](CallSpec& c) { c.release.sent = word; }},
      {"limit", [](CallSpec& c) { c.matmul.limit_ns = 1; }},
      {"signals", [&](CallSpec& c) { c.matmul.arrival.signals = word; }},
      {"tags", [&](CallSpec& c) { c.matmul.arrival.senders.tags = word; }},
      {"bias", [](CallSpec& c) { c.matmul.operands.bias = tensors; }},
  };
  prepare(call);
  for (auto const& [name, change] : changes) {
    CallSpec changed = call;
    change(changed);
    int const before = state().kernels_prepared;
    prepare(changed);
    prepare(changed);
    int const wanted = name == "nothing" ? 0 : 1;
    check(state().kernels_prepared - before == wanted,
          name + ": " + std::to_string(state().kernels_prepared - before) + " prepared");
  }
}

/// What the consumer of each transport is told: the parts of the gather go into the launch as they
/// are, and the first and the last of several matmuls have their own duties.
void duties() {
  for (Transport transport : kTransports) {
    std::string const name = kName[int(transport)];
    Workspace const workspace;
    state().launched.clear();
    workspace.call(transport, kStream, kRows, 3, true);
    check(state().launched.size() == 3, name + ": matmuls");
    bool const copies_a = transport == Transport::CopyEnginePull;
    for (std::size_t i = 0; i < 3; ++i) {
      CallSpec const& call = state().launched[i];
      agmm::Arrival const& arrival = call.matmul.arrival;
      int const chunks = transport == Transport::SmPush ? kColumns / 64 : 1;
      check(arrival.chunks_m == kRanks && arrival.chunks_k == chunks && arrival.pivot == 1,
            name + ": chunks");
      check(arrival.senders.chunks_per_rank == chunks && arrival.senders.mismatch_is_fatal,
            name + ": senders");
      check((arrival.senders.tags != nullptr) == copies_a, name + ": tags");
      check((call.push.shard != nullptr) == (transport == Transport::SmPush && i == 0),
            name + ": push");
      check((call.matmul.operands.a_out != nullptr) == (!copies_a && i == 0), name + ": a_out");
      check((call.release.signals != nullptr) == (i == 2), name + ": release");
      check((call.release.sent != nullptr) == (transport == Transport::CopyEnginePush && i == 2),
            name + ": sent");
      check(call.release.signal_count == (i == 2 ? kRanks * (1 + chunks) : 0), name + ": words");
    }
  }
}

/// What a rank is told of its own call where another rank's differs.
void check_name(agmm::CallSpec const& call, std::string const& wanted) {
  uint32_t const tag = call.matmul.arrival.ready_value;
  std::string const message = agmm::mismatch_message(1, 0, 0, tag + 1, tag);
  check(has(message, "; this rank: " + wanted), message);
}

void names() {
  Workspace const workspace;
  workspace.call(Transport::CopyEnginePush, kStream);
  check_name(state().launched.back(), "all_gather_matmul(A_shard [128, 256] ");
}

/// In fp8 scales are sent before the signal of their shard, and the slot is given back behind the
/// matmuls, whose epilogues read scales until they end: by a batch, or by a kernel where the
/// matmuls send the shard.
void scaled_push() {
  static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
  Workspace const workspace;
  auto* const scale_a = reinterpret_cast<float*>(tensors + (1 << 19));
  agmm::Gather gather;
  gather.a_shard = tensors;
  gather.a_out = tensors + (1 << 18);
  gather.rows = kRows;
  gather.k = kColumns;
  gather.push.parts = 4;
  gather.push.chunk_columns = 64;
  gather.dtype = agmm::DType::E4M3;
  gather.scales = scale_a;
  gather.scales_out = scale_a + 1024;
  agmm::Weight weight;
  weight.b = tensors + (1 << 17);
  weight.ldb = kColumns;
  weight.n = 136;
  weight.out = tensors + (1 << 19);
  weight.config.shape = {128, 128, 128, 1, 1, agmm::Schedule::Pingpong, false};
  weight.scales = scale_a + 2048;
  weight.scale_per_column = true;
  weight.accumulation = agmm::Accumulation::Slow;
  std::vector<agmm::Weight> const weights(2, weight);
  for (bool const is_sm_push : {true, false}) {
    gather.transport = is_sm_push ? Transport::SmPush : Transport::CopyEnginePush;
    state().operations.clear();
    state().launched.clear();
    (*workspace.op)(gather, weights, kStream);

    std::string copies, main;
    for (fake::Operation const& operation : state().operations) {
      if (operation.name == "record" || operation.name == "wait") continue;
      (operation.stream == kStream ? main : copies) += operation.name + " ";
    }
    char const* const by_engines = "batch copy copy write copy copy write copy copy batch ";
    check(copies == (is_sm_push ? "" : by_engines), "copies: " + copies);
    check(main == (is_sm_push ? "kernel kernel release " : "kernel kernel batch "),
          "main: " + main);
    check(state().launched.size() == 2, "matmuls");
    check_name(state().launched[0], "all_gather_scaled_matmul(A_shard [128, 256] ");
    for (std::size_t i = 0; i < 2; ++i) {
      agmm::CallSpec const& call = state().launched[i];
      agmm::Operands const& operands = call.matmul.operands;
      agmm::Scales const& scales = operands.scales;
      check(call.release.signals == nullptr, "the matmul gives the slot back");
      check(reinterpret_cast<char const*>(scales.a) ==
                static_cast<char const*>(operands.a) + kRanks * kRows * kColumns,
            "gathered scales");
      check(scales.a_per_row && scales.b_per_column && scales.b == weight.scales, "scales");
      check(scales.a_local == scale_a && operands.local_begin == kRows, "own scales");
      check((scales.a_out != nullptr) == (i == 0), "scales_out");
      check(call.matmul.problem.accumulation == agmm::Accumulation::Slow, "accumulation");
      bool const sends = is_sm_push && i == 0;
      check(call.push.scales == (sends ? scale_a : nullptr), "scales to send");
      check(call.push.scales_behind ==
                (sends ? (kRanks - 1) * kRows * kColumns + kRows * int64_t(sizeof(float)) : 0),
            "where scales go, from this rank's shard");
    }
  }

  auto const refusal = [&](std::function<void(agmm::Gather&, agmm::Weight&)> const& change) {
    agmm::Gather other = gather;
    agmm::Weight changed = weight;
    change(other, changed);
    return error_of([&] { (*workspace.op)(other, {changed}, kStream); });
  };
  auto const refused = [&](auto const& change, std::string const& wanted) {
    std::string const error = refusal(change);
    check(has(error, wanted), error + "; wanted " + wanted);
  };
  refused([](agmm::Gather& g, agmm::Weight&) { g.transport = Transport::CopyEnginePull; },
          "transport: found pull for fp8, wanted push or SM push");
  refused([](agmm::Gather& g, agmm::Weight&) { g.scales = nullptr; }, "scale_a: found null");
  refused([](agmm::Gather&, agmm::Weight& w) { w.scales = nullptr; }, "scale_b: found null");
  for (Transport const transport : {Transport::CopyEnginePush, Transport::SmPush}) {
    refused(
        [&](agmm::Gather& g, agmm::Weight&) {
          g.transport = transport;
          g.k = kColumns + 8;
        },
        "A: found K=264, wanted a multiple of 16");
  }
  refused([](agmm::Gather&, agmm::Weight& w) { w.accumulation = agmm::Accumulation::Fast; },
          "512x136x256 e4m3 B col fast");
  refused([](agmm::Gather& g, agmm::Weight&) { g.scale_columns = 2; },
          "scale_a: found 2 for a row, wanted 1");
  refused([](agmm::Gather&, agmm::Weight& w) { w.accumulation = agmm::Accumulation::Block; },
          "scale_a: found 1 for a row, wanted 2");
  // The shards with their scales no longer fit.
  refused([](agmm::Gather& g, agmm::Weight&) { g.rows = 4 * kRows; }, "wanted at most the");
}

/// The order is chunk after chunk where not all tiles are computed at once.
void order_of_tiles() {
  static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
  for (int const rows : {256, 132 * 128, 133 * 128}) {
    prepare(of_one_matmul(tensors, rows)).launch(kStream);
    bool const is_across = state().launched.back().matmul.config.across;
    check(is_across == (rows <= 132 * 128), std::to_string(rows) + " rows");
  }
}

/// A number of multiprocessors above the GPU's counts as the GPU's.
void sm_count() {
  static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
  for (int const asked : {0, 100, 132, 133, 1000}) {
    CallSpec call = of_one_matmul(tensors, 133 * 128);
    call.matmul.sm_count = asked;
    prepare(call).launch(kStream);
    agmm::AsyncInputArgs const& launched = state().launched.back().matmul;
    int const most = asked == 100 ? 100 : 132;
    check(launched.sm_count > 0 && launched.sm_count <= most, std::to_string(asked));
    check(!launched.config.across, "133 tiles are more than a wave");
  }
}

/// Matmuls leave the reserved multiprocessors free, whatever moves A.
void reserved_sms() {
  for (Transport transport : kTransports) {
    Workspace const workspace(10);
    workspace.call(transport, kStream);
    int const found = state().launched.back().matmul.sm_count;
    check(found > 0 && found <= 132 - 10,
          std::string(kName[int(transport)]) + ": " + std::to_string(found));
  }
  for (int reserved : {-1, 131, 200}) {
    std::string const error = error_of([&] { Workspace const workspace(reserved); });
    check(has(error, "reserved_sms: found " + std::to_string(reserved) + ", wanted 0 to 130"),
          error);
  }
}

void peer_atomics() {
  check(agmm::has_peer_atomics(0, 1) && agmm::has_peer_atomics(2, 2), "atomics");
  check(!agmm::has_peer_atomics(0, 2), "a link without");
}

void other_device() {
  state().major = 8;
  std::string const wanted = "no kernel for sm_80; built: sm_90a";
  for (auto const& [name, call] : std::map<std::string, std::function<void()>>{
           {"load", [] { agmm::load_kernels(); }},
           {"prepare", [] { equality(); }},
           {"workspace", [] { Workspace(); }},
       }) {
    std::string const error = error_of(call);
    check(has(error, wanted), name + ": " + error);
  }
}

void no_device() {
  state().device_error = cudaErrorNoDevice;
  for (auto const& [name, call] : std::map<std::string, std::function<void()>>{
           {"load", [] { agmm::load_kernels(); }},
           {"prepare", [] { equality(); }},
           {"workspace", [] { Workspace(); }},
       }) {
    std::string const error = error_of(call);
    check(has(error,
              "found no CUDA device (no CUDA-capable device is detected), wanted one of sm_90a"),
          name + ": " + error);
  }
}

/// Reports of kernels on two devices do not mix. The process ends with the exit code of a timeout
/// and one message.
void two_devices_report() {
  state().device = 0;
  agmm::WaitReport volatile& first = *agmm::report_place().report;
  state().device = 1;
  agmm::WaitReport volatile& second = *agmm::report_place().report;
  second.rank = 5;
  second.source = 6;
  second.chunk = 7;
  first.rank = 1;  // on its way
  second.kind = agmm::WaitReport::Timeout;
  ::sleep(5);
}

std::string described(agmm::WaitReport const& report) {
  return "rank " + std::to_string(report.rank) + " as asked for";
}

void describes() {
  agmm::WaitReport volatile& report = *agmm::report_place().report;
  agmm::describe_reports_by(&described);
  report.rank = 5;
  report.kind = agmm::WaitReport::Timeout;
  ::sleep(5);
}

/// A wait that takes long is reported once, and goes on.
void late_waits() {
  agmm::ReportPlace const place = agmm::report_place(5, 1000);
  check(place.late == agmm::report_place(5, 1000).late, "another key for the same");
  check(place.late != agmm::report_place(4, 1000).late, "the same key for another");
  agmm::WaitReport volatile& report = *place.report;
  auto const note = [&](bool is_credit, int chunk, double seconds) {
    report.late_units = uint32_t(seconds * 1e9) >> 20;
    report.late_what = place.late + agmm::LateWait::what(0, is_credit, chunk);
    for (int i = 0; report.late_what != 0 && i < 500; ++i) ::usleep(10'000);
    check(report.late_what == 0, "nobody looked");
  };
  note(false, 6007, 2);
  note(false, 6001, 4);
  note(false, 6008, 4.1);  // the same wait, or another of that time
  note(true, 6, 4);
}

/// The line about a late credit says which peer is awaited.
void late_credits() {
  agmm::ReportPlace const place = agmm::report_place(5, 1000);
  agmm::WaitReport volatile& report = *place.report;
  report.late_units = 4000;
  report.late_what = place.late + agmm::LateWait::what(0, true, 6);
  for (int i = 0; report.late_what != 0 && i < 500; ++i) ::usleep(10'000);
}

/// Threads that wait for a rank each say so one after the other; the line names all ranks.
void late_ranks() {
  agmm::ReportPlace const place = agmm::report_place(5, 1000);
  agmm::WaitReport volatile& report = *place.report;
  report.late_units = 4000;
  for (int const source : {2, 6}) {
    report.late_of[source] = 4000;
    report.late_what = place.late + agmm::LateWait::what(0, false, source);
    ::usleep(3'000);
  }
  for (int i = 0; report.late_of[6] != 0 && i < 500; ++i) ::usleep(10'000);
  check(report.late_what == 0 && report.late_of[2] == 0, "what was said stays");
}

/// The listener is told of each wait that takes long, one at a time, and whether its call has
/// elements.
void late_listener() {
  static std::atomic<int> told{0};
  static std::atomic<bool> goes_on{false};
  static std::array<std::pair<int, bool>, 8> what;
  agmm::set_late_listener([](int rank, bool without_elements) {
    what[std::size_t(told)] = {rank, without_elements};
    ++told;
    while (!goes_on) ::usleep(1'000);
    throw std::runtime_error("what the listener cannot do");
  });
  auto const note = [&](agmm::ReportPlace const& place) {
    place.report->late_units = 1000;
    place.report->late_what = place.late;
    for (int i = 0; place.report->late_what != 0 && i < 500; ++i) ::usleep(10'000);
  };
  auto const await = [&](int count) {
    for (int i = 0; told < count && i < 500; ++i) ::usleep(10'000);
    ::usleep(50'000);
    check(told == count, std::to_string(told) + " were told");
  };
  note(agmm::report_place(5, 1000));
  await(1);
  note(agmm::report_place(3, agmm::kWithoutElements));  // while it still listens to the first
  await(1);
  goes_on = true;
  ::usleep(50'000);
  note(agmm::report_place(3, agmm::kWithoutElements));
  await(2);
  check(what[0] == std::pair(5, false) && what[1] == std::pair(3, true), "what was told");
}

/// Where K is split, the chunks that are sent first are those with which the splits begin.
void first_columns() {
  Workspace const workspace;
  static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
  constexpr int kSplits = 4;
  constexpr int kTiles = 40;  // a chunk each
  for (bool const in_cluster : {false, true}) {
    agmm::Gather gather;
    gather.transport = Transport::SmPush;
    gather.push.parts = 1;
    gather.push.chunk_columns = 64;
    gather.a_shard = tensors;
    gather.rows = 8;
    gather.k = 64 * kTiles;
    agmm::Weight weight;
    weight.b = tensors + (1 << 17);
    weight.ldb = gather.k;
    weight.n = 128;
    weight.out = tensors + (1 << 19);
    weight.config.shape = {128, 128, 64, 1, 1, agmm::Schedule::Cooperative, false};
    if (in_cluster) {
      weight.config.shape.tile_m = 64;
      weight.config.shape.swapped = true;
    }
    weight.config.splits = kSplits;
    (*workspace.op)(gather, {weight}, kStream);
    agmm::KSplits const splits(kTiles, kSplits);
    for (int i = 0; i < kSplits; ++i) {
      int const found = state().launched.back().push.order.chunk_at[i];
      int const wanted =
          in_cluster ? splits.even_split(i, agmm::FastDiv(kSplits)).begin : splits.split(i).begin;
      check(found == wanted, "chunk " + std::to_string(found) + " comes as number " +
                                 std::to_string(i) + ", wanted " + std::to_string(wanted));
    }
  }
}

/// The scratch memory is the workspace's own, also where its first call is captured: none of it is
/// the graph's.
void split_scratch() {
  Workspace const workspace;
  Workspace const other;
  fake::begin_capture(kStream, 300);
  workspace.call(Transport::CopyEnginePush, kStream);
  void* const captured = state().launched.back().matmul.split_scratch;
  check(fake::end_capture(300), "a capture was ended");
  check(captured != nullptr, "none");
  for (Transport transport : kTransports) {
    workspace.call(transport, kStream, kRows, 2);
    for (std::size_t i = 1; i <= 2; ++i) {
      void* const found = state().launched[state().launched.size() - i].matmul.split_scratch;
      check(found == captured, std::string(kName[int(transport)]) + ": another one");
    }
  }
  other.call(Transport::CopyEnginePush, kStream);
  check(state().launched.back().matmul.split_scratch != captured, "that of another workspace");
  auto const* const words = static_cast<uint32_t const*>(captured);
  for (std::size_t i = 0; i < agmm::kSplitCounterBytes / sizeof(uint32_t); ++i) {
    check(words[i] == 0, "a counter that does not begin as 0");
  }
}

/// A copy of the kernel of `of_one_matmul` with another width of tile.
agmm::KernelEntry const& kernel_of_width(int tile_n, char const* architecture = "sm_90a") {
  auto* const entry = new agmm::KernelEntry(*agmm::kKernelTable[0]);  // entries stay for ever
  entry->facts.shape.tile_n = tile_n;
  entry->facts.architecture = architecture;
  return *entry;
}

/// Kernels that are added are found from then on, by their op and their architecture.
void registry() {
  static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
  agmm::KernelRegistry& registry = agmm::kernel_registry();
  std::vector<agmm::KernelFacts> const built = agmm::built_kernels();
  check(built.size() == 7 && built[3].op == agmm::Op::MatmulReduceScatter &&
            built[6].op == agmm::Op::MatmulAllReduce,
        "the tables of the build");
  auto const error_with = [&](int tile_n) {
    CallSpec call = of_one_matmul(tensors, 256);
    call.matmul.config.shape.tile_n = tile_n;
    return error_of([&] { prepare(call).launch(kStream); });
  };
  check(has(error_with(256), "wanted a kernel of this build"), error_with(256));
  agmm::KernelEntry const& added = kernel_of_width(256);
  registry.add(added);
  check(error_with(256).empty(), error_with(256));
  registry.add(kernel_of_width(64, "sm_100a"));
  check(has(error_with(64), "wanted a kernel of this build"), "a kernel for another GPU");
  check(agmm::built_kernels().size() == 9, "what there is now");

  std::string const twice = error_of([&] { registry.add(added); });
  check(has(twice,
            "kernel: found a second all_gather_matmul 128x256x64_1x1_cooperative bf16 B col fast "
            "bias for sm_90a, wanted one"),
        twice);
  std::string const no_sender =
      error_of([&] { registry.add(agmm::Op::AllGatherMatmul, *agmm::kScatterTable[0]); });
  check(has(no_sender, "op: found all_gather_matmul, wanted one whose kernels send"), no_sender);
  // Known for matmul + reduce-scatter, but new for this op.
  registry.add(agmm::Op::MatmulAllReduce, *agmm::kScatterTable[1]);
  check(agmm::built_kernels().size() == 10, "after refusals");
}

/// Some threads add kernels while others look for them.
void registry_of_threads() {
  static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
  constexpr int kThreads = 8;
  constexpr int kOfEach = 20;
  std::size_t const before = agmm::built_kernels().size();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int j = 0; j < kOfEach; ++j) {
        int const tile_n = 1024 + i * kOfEach + j;
        agmm::kernel_registry().add(kernel_of_width(tile_n));
        CallSpec call = of_one_matmul(tensors, 256);
        call.matmul.config.shape.tile_n = tile_n;
        if (!error_of([&] { prepare(call); }).empty()) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  check(wrong == 0, std::to_string(wrong) + " were not found");
  check(agmm::built_kernels().size() == before + kThreads * kOfEach, "some are missing");
}

/// A kernel that is added later and needs more scratch memory for splits of K than a workspace has
/// is refused, by that workspace alone.
void scratch_of_added_kernels() {
  static char* const tensors = static_cast<char*>(std::aligned_alloc(256, 1 << 20));
  auto const error_on = [&](Workspace const& workspace) {
    agmm::Gather gather;
    gather.a_shard = tensors;
    gather.rows = kRows;
    gather.k = kColumns;
    agmm::Weight weight;
    weight.b = tensors + (1 << 17);
    weight.ldb = kColumns;
    weight.n = 128;
    weight.out = tensors + (1 << 19);
    weight.config.shape = {128, 192, 64, 1, 1, agmm::Schedule::Cooperative, false};
    weight.config.splits = 2;
    return error_of([&] { (*workspace.op)(gather, {weight}, kStream); });
  };
  Workspace const before;
  agmm::kernel_registry().add(kernel_of_width(192));
  check(has(error_on(before), "config: found 2 splits of 128x192x64_1x1_cooperative, which take "),
        error_on(before));
  Workspace const after;
  check(error_on(after).empty(), error_on(after));
}

/// A child process, such as a data loader's, has a copy of what waits for the watching thread at
/// the end, and no such thread.
void forked_child() {
  agmm::report_place();
  pid_t const child = ::fork();
  if (child == 0) {
    ::alarm(10);  // a child that waits for the thread would do so for ever
    std::exit(7);
  }
  int status = 0;
  check(::waitpid(child, &status, 0) == child, "no child");
  check(WIFEXITED(status) && WEXITSTATUS(status) == 7,
        "the child ended with status " + std::to_string(status));
  // The thread of the parent goes on.
  uint32_t volatile& late = agmm::report_place().report->late_what;
  late = agmm::report_place().late;
  for (int i = 0; late != 0 && i < 500; ++i) ::usleep(10'000);
  check(late == 0, "nobody looks in the parent");
}

}  // namespace

int main(int count, char** arguments) {
  std::map<std::string, void (*)()> const checks = {
      {"slots_of_captures", &slots_of_captures},
      {"precedence", &precedence},
      {"captures_at_once", &captures_at_once},
      {"failures", &failures},
      {"failures_in_captures", &failures_in_captures},
      {"creations", &creations},
      {"sizes", &sizes},
      {"copies_come_first", &copies_come_first},
      {"duties", &duties},
      {"names", &names},
      {"scaled_push", &scaled_push},
      {"equality", &equality},
      {"order_of_tiles", &order_of_tiles},
      {"sm_count", &sm_count},
      {"reserved_sms", &reserved_sms},
      {"peer_atomics", &peer_atomics},
      {"other_device", &other_device},
      {"no_device", &no_device},
      {"two_devices_report", &two_devices_report},
      {"describes", &describes},
      {"late_waits", &late_waits},
      {"late_credits", &late_credits},
      {"late_ranks", &late_ranks},
      {"late_listener", &late_listener},
      {"forked_child", &forked_child},
      {"split_scratch", &split_scratch},
      {"first_columns", &first_columns},
      {"registry", &registry},
      {"registry_of_threads", &registry_of_threads},
      {"scratch_of_added_kernels", &scratch_of_added_kernels},
  };
  if (count == 1) {
    for (auto const& [name, run] : checks) std::printf("%s\n", name.c_str());
    return 0;
  }
  checks.at(arguments[1])();
  return 0;
}
