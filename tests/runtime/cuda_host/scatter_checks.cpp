// The host code of matmul + reduce-scatter on a fake CUDA, whose kernel does on the host what the
// real one does: `scatter_checks NAME` runs one of the checks and says what is wrong.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "agmm/fused_matmul_reduce_scatter.hpp"
#include "fake_cuda.hpp"
#include "gemm/scatter_spec.hpp"
#include "order/scatter_tiles.hpp"
#include "precedence.hpp"
#include "runtime/cuda.hpp"
#include "sync/signals.hpp"
#include "transport/tile_push.hpp"

namespace {

using agmm::FusedMatmulReduceScatter;
using agmm::MatmulScatter;
using fake::state;
using Element = uint16_t;

constexpr std::size_t kPartBytes = 16 << 20;
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

/// Memory that is aligned as TMA wants it.
struct Memory {
  explicit Memory(std::size_t bytes) : at(std::aligned_alloc(128, (bytes + 127) / 128 * 128)) {}
  ~Memory() { std::free(at); }
  Memory(Memory const&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(at);
  }
  void* at;
};

struct Ranks {
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<std::unique_ptr<FusedMatmulReduceScatter>> ops;

  explicit Ranks(int count, int reserved_sms = 0) {
    std::size_t const bytes = FusedMatmulReduceScatter::workspace_bytes(kPartBytes, count);
    std::vector<uintptr_t> bases;
    for (int rank = 0; rank < count; ++rank) {
      memory.push_back(std::make_unique<Memory>(bytes));
      bases.push_back(reinterpret_cast<uintptr_t>(memory.back()->at));
      FusedMatmulReduceScatter::initialise_workspace(memory.back()->at, kPartBytes, count, kStream);
    }
    for (int rank = 0; rank < count; ++rank) {
      ops.push_back(
          std::make_unique<FusedMatmulReduceScatter>(rank, bases, kPartBytes, reserved_sms));
    }
  }
};

constexpr int kWorkers = 5;  // that the order of an all-reduce is made for

Element drawn(unsigned seed) { return static_cast<Element>((seed * 2654435761u) >> 20); }

MatmulScatter call_of(int rows, int n, std::vector<int> const& ks, Memory const& a, Memory const& b,
                      Memory const* bias, Memory const& out) {
  MatmulScatter call;
  call.rows = rows;
  call.n = n;
  call.config.shape = {128, 128, 64, 1, 1, agmm::Schedule::Pingpong, false};
  auto const* from_a = a.as<Element>();
  auto const* from_b = b.as<Element>();
  for (int const k : ks) {
    call.products.push_back({from_a, k, from_b, k, k});
    from_a += std::size_t(rows) * std::size_t(k);
    from_b += std::size_t(n) * std::size_t(k);
  }
  call.bias = bias == nullptr ? nullptr : bias->at;
  call.out = out.at;
  return call;
}

/// What each rank gets is the sum, over ranks and products, of its rows, or of an all-reduce of
/// all.
void sums_of(bool is_all_reduce) {
  state().runs_scatters = true;
  struct Case {
    int ranks, chunk_rows, n;
    std::vector<int> ks;
    bool has_bias;  // and a residual
  };
  for (Case const& c : std::vector<Case>{{2, 128, 128, {8}, false},
                                         {2, 1, 8, {16}, true},
                                         {3, 130, 136, {8, 24}, true},
                                         {4, 300, 264, {8, 8, 16}, false},
                                         {5, 17, 400, {8}, true},
                                         {8, 129, 128, {8}, false},
                                         {4, 2100, 16, {8}, true}}) {  // two launches
    Ranks const ranks(c.ranks);
    int const rows = c.ranks * c.chunk_rows;
    int k_all = 0;
    for (int const k : c.ks) k_all += k;
    std::vector<std::unique_ptr<Memory>> as, bs, outs, residuals;
    Memory const bias(std::size_t(c.n) * 2);
    for (int j = 0; j < c.n; ++j) bias.as<Element>()[j] = drawn(unsigned(j) + 5);
    for (int rank = 0; rank < c.ranks; ++rank) {
      as.push_back(std::make_unique<Memory>(std::size_t(rows) * std::size_t(k_all) * 2));
      bs.push_back(std::make_unique<Memory>(std::size_t(c.n) * std::size_t(k_all) * 2));
      residuals.push_back(std::make_unique<Memory>(std::size_t(c.chunk_rows * c.n) * 2));
      for (int i = 0; i < c.chunk_rows * c.n; ++i) {
        residuals.back()->as<Element>()[i] = drawn(unsigned(i) + 11 * unsigned(rank));
      }
      int const out_rows = is_all_reduce ? rows : c.chunk_rows;
      outs.push_back(std::make_unique<Memory>(std::size_t(out_rows) * std::size_t(c.n) * 2));
    }
    for (unsigned turn = 0; turn < 3; ++turn) {
      for (int rank = 0; rank < c.ranks; ++rank) {
        auto const r = std::size_t(rank);
        for (int i = 0; i < rows * k_all; ++i) {
          as[r]->as<Element>()[i] = drawn(unsigned(i) * 7 + unsigned(rank) + 100 * turn);
        }
        for (int i = 0; i < c.n * k_all; ++i) {
          bs[r]->as<Element>()[i] = drawn(unsigned(i) * 13 + unsigned(rank) * 3 + turn);
        }
      }
      std::vector<std::thread> threads;
      for (int rank = 0; rank < c.ranks; ++rank) {
        threads.emplace_back([&, rank] {
          auto const r = std::size_t(rank);
          MatmulScatter call =
              call_of(rows, c.n, c.ks, *as[r], *bs[r], c.has_bias ? &bias : nullptr, *outs[r]);
          if (c.has_bias) call.residual = residuals[r]->at;
          if (is_all_reduce) call.all_reduce_sms = kWorkers;
          (*ranks.ops[r])(call, fake::stream(rank + 1));
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (int row = 0; row < rows; ++row) {
        for (int j = 0; j < c.n; ++j) {
          int const owner = row / c.chunk_rows;
          unsigned wanted = 0;
          if (c.has_bias) {
            int const at = row % c.chunk_rows * c.n + j;
            wanted =
                unsigned(bias.as<Element>()[j]) + residuals[std::size_t(owner)]->as<Element>()[at];
          }
          for (std::size_t r = 0; r < as.size(); ++r) {
            auto const* a = as[r]->as<Element>();
            auto const* b = bs[r]->as<Element>();
            for (int const k : c.ks) {
              for (int i = 0; i < k; ++i) wanted += unsigned(a[row * k + i]) * b[j * k + i];
              a += rows * k;
              b += c.n * k;
            }
          }
          for (int rank = 0; rank < c.ranks; ++rank) {
            if (rank != owner && !is_all_reduce) continue;
            int const out_row = is_all_reduce ? row : row % c.chunk_rows;
            Element const found = outs[std::size_t(rank)]->as<Element>()[out_row * c.n + j];
            check(found == static_cast<Element>(wanted),
                  std::to_string(c.ranks) + " ranks, row " + std::to_string(row) + ", column " +
                      std::to_string(j) + ", on rank " + std::to_string(rank) + ": " +
                      std::to_string(found));
          }
        }
      }
    }
  }
}

void sums() { sums_of(false); }
void sums_on_all_ranks() { sums_of(true); }

/// One call on rank 1 of 4, whose kernel computes nothing.
struct One {
  Ranks ranks{4};
  Memory tensor{1 << 20};

  MatmulScatter call(int rows = 512) const {
    return call_of(rows, 128, {64}, tensor, tensor, nullptr, tensor);
  }
  void operator()(MatmulScatter const& what, cudaStream_t stream) const {
    (*ranks.ops[1])(what, stream);
  }
};

/// What a rank is told of its own call where another rank's differs.
void names() {
  One const one;
  std::map<std::string, void (*)(MatmulScatter&)> const calls = {
      {"matmul_reduce_scatter", [](MatmulScatter&) {}},
      {"matmul_all_reduce", [](MatmulScatter& c) { c.all_reduce_sms = kWorkers; }},
      {"scaled_matmul_reduce_scatter",
       [](MatmulScatter& c) {
         c.dtype = agmm::DType::E4M3;
         c.accumulation = agmm::Accumulation::Slow;
         c.products[0].scales.a = c.products[0].scales.b = static_cast<float const*>(c.out);
       }},
  };
  for (auto const& [name, change] : calls) {
    MatmulScatter call = one.call();
    change(call);
    one(call, kStream);
    uint32_t const tag = state().scatters.back().push.tag;
    std::string const message = agmm::mismatch_message(1, 0, 0, tag + 1, tag);
    check(message.find("; this rank: " + name + "(A [512, 64] ") != std::string::npos, message);
  }
}

/// An equal call is not prepared again, one that differs in any field is.
void equality() {
  One const one;
  one(one.call(), kStream);
  std::map<std::string, void (*)(MatmulScatter&)> const changes = {
      {"nothing", [](MatmulScatter&) {}},
      {"rows", [](MatmulScatter& c) { c.rows = 1024; }},
      {"n", [](MatmulScatter& c) { c.n = 64; }},
      {"k", [](MatmulScatter& c) { c.products[0].k = 32; }},
      {"a product", [](MatmulScatter& c) { c.products.push_back(c.products[0]); }},
      {"a scale of a product",
       [](MatmulScatter& c) { c.products[0].scales.b = static_cast<float const*>(c.out); }},
      {"average", [](MatmulScatter& c) { c.is_average = true; }},
      {"all-reduce", [](MatmulScatter& c) { c.all_reduce_sms = kWorkers; }},
      {"swizzle", [](MatmulScatter& c) { c.config.max_swizzle = 2; }},
      {"bias", [](MatmulScatter& c) { c.bias = c.out; }},
      {"residual", [](MatmulScatter& c) { c.residual = c.out; }},
      {"limit", [](MatmulScatter& c) { c.limit_ns = 1; }},
  };
  for (auto const& [name, change] : changes) {
    MatmulScatter changed = one.call();
    change(changed);
    int const before = state().kernels_prepared;
    one(changed, kStream);
    one(changed, kOther);
    check(state().kernels_prepared - before == (name == "nothing" ? 0 : 1), name);
  }
  // The calls are those of a model's layers in turn.
  constexpr int kLayers = 100;
  int const before = state().kernels_prepared;
  for (int i = 0; i < 3 * kLayers; ++i) {
    MatmulScatter call = one.call();
    call.products[0].b = one.tensor.as<char>() + 256 * (1 + i % kLayers);
    one(call, kStream);
  }
  check(state().kernels_prepared - before == kLayers, "layers in turn");
}

/// A call that is refused enqueues nothing.
void refusals() {
  One const one;
  struct Case {
    std::string message;
    void (*change)(MatmulScatter&);
  };
  for (Case const& c : std::vector<Case>{
           {"A: found M=510", [](MatmulScatter& call) { call.rows = 510; }},
           {"B: found N=12", [](MatmulScatter& call) { call.n = 12; }},
           {"A: found K=20", [](MatmulScatter& call) { call.products[0].k = 20; }},
           {"A: found leading dimension=65",
            [](MatmulScatter& call) { call.products[0].lda = 65; }},
           {"A: found 0 products", [](MatmulScatter& call) { call.products.clear(); }},
           {"out: found null", [](MatmulScatter& call) { call.out = nullptr; }},
           {"config: found 64x128", [](MatmulScatter& call) { call.config.shape.tile_m = 64; }},
           {"config: found 2 splits", [](MatmulScatter& call) { call.config.splits = 2; }},
           {"across chunks", [](MatmulScatter& call) { call.config.across = true; }},
           {"all_reduce_sms: found -1", [](MatmulScatter& call) { call.all_reduce_sms = -1; }},
           {"wanted a kernel of this build that sends finished tiles",
            [](MatmulScatter& call) {
              call.all_reduce_sms = kWorkers;
              call.config.shape.schedule = agmm::Schedule::Cooperative;
            }},
           {"scale_b: found null",
            [](MatmulScatter& call) {
              call.dtype = agmm::DType::E4M3;
              call.products[0].scales.a = static_cast<float const*>(call.out);
            }},
           {"residual: found one of fp8 operands, wanted none",
            [](MatmulScatter& call) {
              call.dtype = agmm::DType::E4M3;
              agmm::Scales& scales = call.products[0].scales;
              scales.a = scales.b = static_cast<float const*>(call.out);
              call.residual = call.out;
            }},
           {"A: found 2 products, wanted 1 of fp8",
            [](MatmulScatter& call) {
              call.dtype = agmm::DType::E4M3;
              agmm::Scales& scales = call.products[0].scales;
              scales.a = scales.b = static_cast<float const*>(call.out);
              call.products.push_back(call.products[0]);
            }},
           {"bytes for each other rank", [](MatmulScatter& call) { call.n = 1 << 15; }}}) {
    MatmulScatter call = one.call(8192);
    c.change(call);
    state().operations.clear();
    std::string const error = error_of([&] { one(call, kStream); });
    check(error.find(c.message) != std::string::npos, c.message + ": " + error);
    check(state().operations.empty(), c.message + ": enqueued");
  }
}

/// Whichever operation fails: either nothing was enqueued, or all later calls refuse; and nothing
/// is left of a capture.
void failures() {
  unsigned long long id = 100;
  for (bool is_captured : {false, true}) {
    for (int failing = 0;; ++failing) {
      One const one;
      one(one.call(), kStream);
      if (is_captured) fake::begin_capture(kOther, ++id);
      state().operations.clear();
      state().fail_at = failing;
      std::string const error = error_of([&] { one(one.call(16384), kOther); });
      state().fail_at = -1;
      if (error.empty()) {
        check(failing > 2, "no operation that can fail");
        if (is_captured) check(fake::end_capture(id), "a capture was ended");
        break;
      }
      std::string const name = "operation " + std::to_string(failing);
      if (is_captured) {
        check(!error_of([&] { one(one.call(), kOther); }).empty(), name + ": goes on");
        check(!fake::end_capture(id), name + ": a graph with half a call");
        check(error_of([&] { one(one.call(), kStream); }).empty(), name + ": eager calls");
      } else {
        std::string const after = error_of([&] { one(one.call(), kOther); });
        check(after.find("failed half-way") != std::string::npos, name + ": " + after);
      }
    }
  }
}

/// Calls on several streams are ordered, eager ones only where the stream changes.
void order() {
  One const one;
  auto const waits = [&](cudaStream_t stream) {
    state().operations.clear();
    one(one.call(), stream);
    int count = 0;
    for (fake::Operation const& operation : state().operations) count += operation.name == "wait";
    return count;
  };
  check(waits(kStream) == 0, "the first call waits");
  check(waits(kStream) == 0, "a call waits for its own stream");
  check(waits(kOther) == 1, "a call on another stream does not wait");
  check(waits(kOther) == 0, "a call waits for its own stream");
}

void precedence() {
  One const one;
  std::string const wrong = fake::wrong_precedence(
      *one.ranks.ops[1], [&](cudaStream_t stream) { one(one.call(), stream); });
  check(wrong.empty(), wrong);
}

/// The i-th sum that an owner adds is that of the rank which computes its rows at position i.
void arrivals() {
  for (int ranks : {2, 3, 4, 8}) {
    for (int rank = 0; rank < ranks; ++rank) {
      agmm::ScatterTiles const tiles(rank, ranks, 128, {0, 128}, 128, 128, 128, 1);
      for (int i = 0; i + 1 < ranks; ++i) {
        int const source = tiles.at_place(tiles.place_by_arrival(i));
        check(source != rank && agmm::scatter_owner(source, i, ranks) == rank,
              "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + ", sum " +
                  std::to_string(i) + ": of rank " + std::to_string(source));
      }
    }
  }
}

/// All that send in a wave have the links together, and the copies under way that fill them.
void paces() {
  int const clock_khz = agmm::current_device().clock_khz;
  for (int senders = 1; senders <= 144; ++senders) {
    std::string const name = std::to_string(senders) + " senders: ";
    for (int const rate : {agmm::kLeastSendBytesPerNs, agmm::kMostSendBytesPerNs}) {
      double const cycles = agmm::SendPace(senders, clock_khz, rate).cycles;
      double const wanted = senders * double(agmm::kSendBytes) / rate * clock_khz * 1e-6;
      check(cycles <= wanted && cycles + 1 > wanted, name + std::to_string(cycles) + " cycles");
    }
    agmm::SendPace const pace(senders, clock_khz);
    int const under_way = senders << pace.log_under_way;
    check(pace.log_under_way == agmm::kLogFewestUnderWay || under_way <= agmm::kMostUnderWay,
          name + std::to_string(under_way) + " copies under way");
    check(pace.log_under_way == agmm::kLogMostUnderWay || 2 * under_way > agmm::kMostUnderWay,
          name + "only " + std::to_string(under_way) + " copies under way");
  }
  // The rate is checked where tiles are computed faster than links take them, and where more
  // slowly.
  check(agmm::send_bytes_per_ns(2 * 2048, 132, 1980000) == agmm::kMostSendBytesPerNs, "K = 2048");
  check(agmm::send_bytes_per_ns(2 * 7168, 132, 1980000) == agmm::kLeastSendBytesPerNs, "K = 7168");
  // The launches are checked against the order of their tiles.
  One const one;
  for (int const n : {128, 520, 2048}) {
    for (int const rows : {512, 2048, 8192}) {
      MatmulScatter call = one.call(rows);
      call.n = n;
      state().scatters.clear();
      one(call, kStream);
      agmm::TilePushArgs const& push = state().scatters.at(0).push;
      agmm::ScatterTiles const& tiles = push.tiles;
      agmm::TileOrder const order(agmm::ChunkGrid(tiles.padded_rows(), 1, 4), n, 128, 128,
                                  tiles.first_chunk(), 1, agmm::Raster::AlongM);
      int const ctas = std::min(132, order.count());
      for (int begin = 0; begin < order.count(); begin += ctas) {
        int senders = 0;
        for (int step = begin; step < std::min(begin + ctas, order.count()); ++step) {
          senders += tiles.owner(order.block_at(step).m * 128) != tiles.rank;
        }
        if (senders == 0) break;
        int const rate = agmm::send_bytes_per_ns(2 * call.products[0].k, ctas, clock_khz);
        agmm::SendPace const wanted(senders, clock_khz, rate);
        agmm::SendPace const& found = push.paces.of_wave(begin / ctas);
        check(found.cycles == wanted.cycles && found.log_under_way == wanted.log_under_way,
              std::to_string(rows) + " rows, " + std::to_string(n) + " columns, wave " +
                  std::to_string(begin / ctas) + ": " + std::to_string(found.cycles) + " cycles, " +
                  std::to_string(senders) + " senders");
      }
    }
  }
}

/// K is split where a kernel can, in one wave of CTAs; the splits' sums have memory of their own.
void splits() {
  One const one;
  MatmulScatter call = one.call();
  call.products[0].k = 256;
  call.config.splits = 2;
  std::string const refused = error_of([&] { one(call, kStream); });
  check(refused.find("found 2 splits of 128x128x64_1x1_pingpong") != std::string::npos, refused);
  call.config.shape.schedule = agmm::Schedule::Cooperative;
  state().scatters.clear();
  one(call, kStream);
  agmm::ScatterSpec const& spec = state().scatters.at(0);
  check(spec.config.splits == 2 && spec.split_scratch != nullptr, "scratch memory");
  auto const* const counters = static_cast<uint32_t const*>(spec.split_scratch);
  for (int i = 0; i < 132; ++i) check(counters[i] == 0, "a counter is not 0");
  call.n = 128 * 17;  // 4 x 17 tiles
  std::string const too_many = error_of([&] { one(call, kStream); });
  check(too_many.find("found 136 parts of tiles, wanted one wave of them, at most 132") !=
            std::string::npos,
        too_many);
  call.n = 128;
  call.config.splits = 5;
  std::string const no_k = error_of([&] { one(call, kStream); });
  check(no_k.find("found 5 splits of 4 k tiles") != std::string::npos, no_k);
  // The k tiles of all products count.
  call.products.push_back(call.products[0]);
  one(call, kStream);
}

/// What an all-reduce's launches are given: finished tiles lie behind as many sums, rows of `out`
/// are those of the bands, and what all CTAs send in a wave is what the links take.
void launches() {
  One const one;
  MatmulScatter call = one.call(16384);
  call.all_reduce_sms = kWorkers;
  state().scatters.clear();
  one(call, kStream);
  check(state().scatters.size() == 2, std::to_string(state().scatters.size()) + " launches");
  for (std::size_t band = 0; band < state().scatters.size(); ++band) {
    agmm::ScatterSpec const& spec = state().scatters[band];
    agmm::ScatterTiles const& tiles = spec.push.tiles;
    check(spec.push.part_bytes == int64_t(2) * tiles.tiles() * 128 * 128 * 2, "part_bytes");
    auto const at = [&](void const* pointer) {
      return (static_cast<char const*>(pointer) - static_cast<char const*>(call.out)) / (128 * 2);
    };
    check(at(spec.out_of_all) == int64_t(band) * 2048, "rows of out");
    check(at(spec.out) == int64_t(band) * 2048 + 4096, "own rows of out");
    agmm::Lag const lag = agmm::lag_for(4, tiles.tiles(), kWorkers);
    check(spec.lag.group == lag.group && spec.lag.groups == lag.groups, "lag");
    int const ctas = std::min(132, tiles.all_tiles());
    double const cycles_per_ns = agmm::current_device().clock_khz * 1e-6;
    auto const bytes_per_ns = [&](agmm::SendPace const& pace, double kilobytes) {
      return kilobytes * agmm::kSendBytes / ((pace.cycles + 1) / cycles_per_ns);
    };
    // 3 of 4 tiles to a rank, one to three.
    double const usual = bytes_per_ns(spec.push.paces.usual, ctas * (0.75 + 0.25 * 3));
    check(usual <= agmm::kMostSendBytesPerNs && usual > 0.9 * agmm::kMostSendBytesPerNs,
          std::to_string(usual) + " B/ns");
    int const in_last = tiles.all_tiles() - spec.push.paces.last_wave * ctas;
    double const last = bytes_per_ns(spec.push.paces.last, in_last * 3);
    check(last <= agmm::kMostSendBytesPerNs && last > 0.9 * agmm::kMostSendBytesPerNs,
          std::to_string(last) + " B/ns in the last wave");
  }
}

void reserved_sms() {
  for (int reserved : {-1, 131, 200}) {
    std::string const error = error_of([&] { Ranks const ranks(2, reserved); });
    check(error.find("reserved_sms: found " + std::to_string(reserved) + ", wanted 0 to 130") !=
              std::string::npos,
          error);
  }
}

}  // namespace

int main(int, char** arguments) {
  std::map<std::string, void (*)()> const checks = {
      {"sums", &sums},         {"sums_on_all_ranks", &sums_on_all_ranks},
      {"names", &names},       {"equality", &equality},
      {"refusals", &refusals}, {"failures", &failures},
      {"order", &order},       {"precedence", &precedence},
      {"launches", &launches}, {"reserved_sms", &reserved_sms},
      {"arrivals", &arrivals}, {"paces", &paces},
      {"splits", &splits},
  };
  checks.at(arguments[1])();
  return 0;
}
