#include "agmm/fused_matmul_reduce_scatter.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "agmm/async_input_mm.hpp"
#include "gemm/scatter_entry.hpp"
#include "gemm/scatter_spec.hpp"
#include "gemm/tile_times.hpp"
#include "ops/launching.hpp"
#include "ops/registry.hpp"
#include "ops/scatter_fields.hpp"
#include "order/scatter_tiles.hpp"
#include "runtime/cuda.hpp"
#include "runtime/ordered_calls.hpp"
#include "symmetric/scatter_layout.hpp"
#include "sync/signals.hpp"

namespace agmm {

namespace {

using Single = ScatterLayout::Single;

constexpr int kLeastSms = 2;  // for a cluster of two CTAs

bool is_all_reduce(MatmulScatter const& call) { return call.all_reduce_sms != 0; }

ScatterEntry const* find_kernel(MatmulScatter const& call) {
  Op const op = is_all_reduce(call) ? Op::MatmulAllReduce : Op::MatmulReduceScatter;
  return kernel_registry().find_scatter({kernels_device().architecture, op, call.dtype,
                                         call.accumulation, call.b_layout, call.epilogue,
                                         call.config.shape});
}

std::string described(MatmulScatter const& call) {
  std::string text = is_all_reduce(call)  ? "matmul_all_reduce("
                     : is_fp8(call.dtype) ? "scaled_matmul_reduce_scatter("
                                          : "matmul_reduce_scatter(";
  for (Product const& product : call.products) {
    text += "A [" + std::to_string(call.rows) + ", " + std::to_string(product.k) + "] " +
            to_string(call.dtype) + ", B [" + std::to_string(product.k) + ", " +
            std::to_string(call.n) + "], ";
  }
  return text + (call.is_average ? "avg" : "sum") + ", " + call.config.shape.str() + ")";
}

/// What the ranks have to agree on. It contains each product's K, since nothing else may tell sums
/// of different products apart.
uint32_t tag_of(MatmulScatter const& call) {
  int64_t k = 0;
  for (Product const& product : call.products) k = k * 31 + product.k;
  std::string what = std::string("scatter ") + to_string(call.dtype) + " " +
                     std::to_string(call.n) + " " + call.config.shape.str() +
                     (call.is_average ? " avg" : " sum");
  // The order of the tiles is agreed on too: ranks whose orders differ could wait for each other in
  // a ring.
  if (is_all_reduce(call)) {
    what += " to all " + std::to_string(call.all_reduce_sms) + " " +
            std::to_string(call.config.max_swizzle) + " " + to_string(call.config.raster);
  }
  return call_tag(call.rows, k, what, false);
}

void check_splits(MatmulScatter const& call, KernelFacts const& facts) {
  int32_t const splits = call.config.splits;
  if (splits == 1) return;
  int32_t k_tiles = 0;
  for (Product const& product : call.products) {
    k_tiles += ceil_div(product.k, call.config.shape.tile_k);
  }
  if (splits < 1 || splits > k_tiles) {
    refuse("config", std::to_string(splits) + " splits of " + std::to_string(k_tiles) + " k tiles",
           "at least a k tile in each");
  }
  if (!facts.can_split) {
    refuse("config", std::to_string(splits) + " splits of " + call.config.shape.str(),
           "a kernel that can split K");
  }
}

/// Checks the call and returns its kernel.
ScatterEntry const& check(MatmulScatter const& call, int world_size, std::size_t part_bytes) {
  if (call.rows < 1 || call.rows % world_size != 0) {
    refuse("A", "M=" + std::to_string(call.rows),
           "a positive multiple of the " + std::to_string(world_size) + " ranks");
  }
  if (call.n < 1) refuse("B", "N=" + std::to_string(call.n), "at least 1");
  require_multiple("B", "N", call.n, kAlignment * columns_per_out(call.epilogue));
  if (call.products.empty() || call.products.size() > ScatterSpec::kMaxProducts) {
    refuse("A", std::to_string(call.products.size()) + " products",
           "1 to " + std::to_string(ScatterSpec::kMaxProducts));
  }
  for (Product const& product : call.products) {
    if (product.k < 1) refuse("A", "K=" + std::to_string(product.k), "at least 1");
    int32_t const alignment = alignment_of(call.dtype);
    require_multiple("A", "K", product.k, alignment);
    require_multiple("A", "leading dimension", product.lda, alignment);
    require_multiple("B", "leading dimension", product.ldb, alignment);
    require_aligned("A", product.a);
    require_aligned("B", product.b);
    if (is_fp8(call.dtype)) {
      if (product.scales.a == nullptr) refuse("scale_a", "null", "device memory");
      if (product.scales.b == nullptr) refuse("scale_b", "null", "device memory");
      if (is_block_scaled(call.accumulation)) require_countable_scales(call.rows, product.k);
    }
  }
  if (is_fp8(call.dtype) && call.products.size() != 1) {
    refuse("A", std::to_string(call.products.size()) + " products", "1 of fp8");
  }
  require_aligned("out", call.out);
  if (call.bias != nullptr) require_aligned("bias", call.bias);
  if (call.residual != nullptr) {
    require_aligned("residual", call.residual);
    if (is_fp8(call.dtype)) refuse("residual", "one of fp8 operands", "none");
  }
  ScatterEntry const* const kernel = find_kernel(call);
  if (kernel == nullptr) {
    refuse("config",
           call.config.shape.str() + " " + to_string(call.dtype) + " B " +
               to_string(call.b_layout) + " " + to_string(call.accumulation),
           is_all_reduce(call) ? "a kernel of this build that sends finished tiles"
                               : "a kernel of this build that sends tiles");
  }
  if (call.all_reduce_sms < 0) {
    refuse("all_reduce_sms", std::to_string(call.all_reduce_sms), "at least 0");
  }
  if (call.config.across) {
    refuse("config", call.config.shape.str() + " across chunks", "the order of a scatter");
  }
  check_splits(call, kernel->facts);
  std::size_t const needed =
      scatter_part_bytes(call.rows, call.n, world_size, call.config.shape, is_all_reduce(call));
  if (needed > part_bytes) {
    refuse("A", std::to_string(needed) + " bytes for each other rank",
           "at most the workspace's " + std::to_string(part_bytes));
  }
  return *kernel;
}

/// One launch of a call.
struct Launch {
  ScatterEntry const* kernel;
  KernelParams params;
};

/// The hash of a call, under which its prepared launches are cached.
struct CallHash {
  std::size_t operator()(MatmulScatter const& call) const {
    // Only pointers are hashed, since calls of a loop hardly ever differ in the other fields alone.
    std::size_t hash = std::hash<void const*>{}(call.out);
    for (Product const& product : call.products) {
      hash = hash * 31 + std::hash<void const*>{}(product.a);
      hash = hash * 31 + std::hash<void const*>{}(product.b);
    }
    return hash;
  }
};
struct CallsAreSame {
  bool operator()(MatmulScatter const& a, MatmulScatter const& b) const {
    return same_fields(a, b);
  }
};

/// The tiles of a launch, in whole clusters of CTAs: `sent` are those of the other ranks' chunks.
struct LaunchTiles {
  int32_t sent;
  int32_t all;

  LaunchTiles(ScatterTiles const& tiles, KernelShape const& shape)
      : sent(tiles.padded.divisor / shape.tile_m *
             (ceil_div(tiles.tiles_n, shape.cluster_n) * shape.cluster_n) * (tiles.world_size - 1)),
        all(sent / (tiles.world_size - 1) * tiles.world_size) {}
};

}  // namespace

struct FusedMatmulReduceScatter::Impl {
  Impl(int rank_, std::vector<uintptr_t> bases_, std::size_t part_bytes, int reserved_sms)
      : rank(rank_),
        bases(std::move(bases_)),
        layout(part_bytes, static_cast<int>(bases.size())),
        sm_count(kernels_device().sm_count - reserved_sms),
        ordered(kernels_device().index),
        split_scratch(allocate_split_scratch(
            split_scratch_bytes(kernel_registry().scatters(kernels_device().architecture)))) {}

  int world_size() const { return static_cast<int>(bases.size()); }
  template <class T>
  T* at(int of_rank, std::size_t offset) const {
    return reinterpret_cast<T*>(bases[static_cast<std::size_t>(of_rank)] + offset);
  }

  using Launches = std::vector<Launch>;

  TilePushArgs push_args(MatmulScatter const& call, ScatterTiles const& tiles,
                         std::size_t tile_bytes) const;
  Launches prepare_call(MatmulScatter const& call) const;
  Launches const& find_or_prepare(MatmulScatter const& call);

  // There is room for as many calls, of a few KB each, as the layers of a large model make for some
  // numbers of rows. One call more empties the cache.
  static constexpr std::size_t kKeptCalls = 4096;

  int rank;
  std::vector<uintptr_t> bases;
  ScatterLayout layout;
  int sm_count;  // multiprocessors for this workspace's kernels
  OrderedCalls ordered;
  SplitScratch split_scratch;
  std::unordered_map<MatmulScatter, Launches, CallHash, CallsAreSame> calls;
};

std::size_t FusedMatmulReduceScatter::needed_part_bytes(int32_t rows, int32_t n, int world_size,
                                                        KernelShape const& shape,
                                                        bool is_all_reduce) {
  return scatter_part_bytes(rows, n, world_size, shape, is_all_reduce);
}

std::size_t FusedMatmulReduceScatter::workspace_bytes(std::size_t part_bytes, int world_size) {
  return ScatterLayout(part_bytes, world_size).bytes();
}

void FusedMatmulReduceScatter::initialise_workspace(void* memory, std::size_t part_bytes,
                                                    int world_size, void* stream_handle) {
  ScatterLayout const layout(part_bytes, world_size);
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  std::vector<uint32_t> words((layout.bytes() - layout.words_offset()) / sizeof(uint32_t));
  for (std::size_t const i : layout.credit_words()) words[i] = 1;
  AGMM_CHECK_CUDA(cudaMemcpyAsync(static_cast<char*>(memory) + layout.words_offset(), words.data(),
                                  words.size() * sizeof(uint32_t), cudaMemcpyHostToDevice, stream));
  AGMM_CHECK_CUDA(cudaStreamSynchronize(stream));
}

FusedMatmulReduceScatter::FusedMatmulReduceScatter(int rank, std::vector<uintptr_t> const& bases,
                                                   std::size_t part_bytes, int reserved_sms)
    : impl_(std::make_unique<Impl>(rank, bases, part_bytes, reserved_sms)) {
  if (rank < 0 || rank >= impl_->world_size()) {
    refuse("rank", std::to_string(rank), "0 to " + std::to_string(impl_->world_size() - 1));
  }
  if (impl_->world_size() > kMaxPushRanks) {
    refuse("group", std::to_string(impl_->world_size()) + " ranks",
           "at most " + std::to_string(kMaxPushRanks));
  }
  int const all = impl_->sm_count + reserved_sms;
  if (reserved_sms < 0 || impl_->sm_count < kLeastSms) {
    refuse("reserved_sms", std::to_string(reserved_sms), "0 to " + std::to_string(all - kLeastSms));
  }
  DeviceFacts const& device = kernels_device();
  for (ScatterEntry const* const kernel : kernel_registry().scatters(device.architecture)) {
    make_ready(*kernel, device);
  }
}

FusedMatmulReduceScatter::~FusedMatmulReduceScatter() = default;

std::size_t FusedMatmulReduceScatter::part_bytes() const { return impl_->layout.part_bytes(); }

TilePushArgs FusedMatmulReduceScatter::Impl::push_args(MatmulScatter const& call,
                                                       ScatterTiles const& tiles,
                                                       std::size_t tile_bytes) const {
  TilePushArgs push;
  push.tiles = tiles;
  push.tag = tag_of(call);
  push.scale = call.is_average ? 1.0f / static_cast<float>(world_size()) : 1.0f;
  push.parts = at<char>(rank, layout.part(0));
  push.part_bytes =
      static_cast<int64_t>(std::size_t(tiles.tiles()) * tile_bytes * (is_all_reduce(call) ? 2 : 1));
  push.signals = at<uint32_t>(rank, layout.signals(0));
  push.credits = at<uint32_t>(rank, layout.credit(0));
  push.go = at<uint32_t>(rank, layout.single(Single::Go));
  push.done = at<uint32_t>(rank, layout.single(Single::Done));
  push.claims = at<uint32_t>(rank, layout.single(Single::Claims));
  for (int place = 0; place < world_size() - 1; ++place) {
    int const peer = tiles.at_place(place);
    int const there = part_place(rank, peer, world_size());
    push.peers[place] = {at<char>(peer, layout.part(0)) + push.part_bytes * there,
                         at<uint32_t>(peer, layout.signals(there)),
                         at<uint32_t>(peer, layout.credit(there))};
  }
  push.limit.place = report_place(rank, kMaxScatterTiles);
  push.limit.limit_ns = call.limit_ns;
  push.limit.senders = {nullptr, kMaxScatterTiles, 0, true};
  push.limit.rank = rank;
  KernelShape const& shape = call.config.shape;
  LaunchTiles const launched(tiles, shape);
  int32_t const cluster = shape.cluster_m * shape.cluster_n;
  int32_t const at_once = min_of(sm_count / cluster * cluster, launched.all);
  if (call.config.splits > 1 && launched.all * call.config.splits > sm_count / cluster * cluster) {
    refuse("config", std::to_string(launched.all * call.config.splits) + " parts of tiles",
           "one wave of them, at most " + std::to_string(sm_count / cluster * cluster));
  }
  int64_t k_bytes = 0;
  for (Product const& product : call.products) k_bytes += product.k * element_bytes(call.dtype);
  int32_t const clock_khz = kernels_device().clock_khz;
  push.paces = is_all_reduce(call)
                   ? SendPaces::of_all_reduce(launched.all, at_once, world_size(), clock_khz)
                   : SendPaces(launched.sent, at_once, clock_khz, k_bytes);
  return push;
}

FusedMatmulReduceScatter::Impl::Launches FusedMatmulReduceScatter::Impl::prepare_call(
    MatmulScatter const& call) const {
  ScatterEntry const& kernel = check(call, world_size(), layout.part_bytes());
  split_scratch.check(kernel.facts, call.config.splits);
  make_ready(kernel, kernels_device());
  KernelShape const& shape = call.config.shape;
  int32_t const chunk_rows = call.rows / world_size();
  int32_t const band = scatter_band_rows(chunk_rows, world_size(), shape);
  note_call(tag_of(call), described(call));
  Launches launches;
  ScatterTimes* times = call.tile_times;
  for (int32_t row = 0; row < chunk_rows; row += band) {
    ScatterTiles const tiles(rank, world_size(), chunk_rows, {row, min_of(row + band, chunk_rows)},
                             call.n, shape.tile_m, shape.tile_n, shape.cluster_m);
    int32_t const most_tiles = is_all_reduce(call) ? kMaxScatterTiles / 2 : kMaxScatterTiles;
    if (tiles.tiles() > most_tiles) {
      refuse("B", std::to_string(tiles.tiles()) + " tiles in a chunk",
             "at most " + std::to_string(most_tiles));
    }
    ScatterSpec spec;
    spec.config = call.config;
    spec.rows = call.rows;
    spec.n = call.n;
    spec.dtype = call.dtype;
    spec.b_layout = call.b_layout;
    std::copy(call.products.begin(), call.products.end(), spec.products);
    spec.product_count = static_cast<int32_t>(call.products.size());
    spec.accumulation = call.accumulation;
    spec.bias = call.bias;
    spec.epilogue = call.epilogue;
    std::size_t const row_bytes = std::size_t(spec.out_columns()) * 2;
    spec.out = static_cast<char*>(call.out) + std::size_t(row) * row_bytes;
    if (call.residual != nullptr) {
      spec.residual = static_cast<char const*>(call.residual) + std::size_t(row) * row_bytes;
    }
    if (is_all_reduce(call)) {
      spec.out_of_all = spec.out;
      spec.out =
          static_cast<char*>(spec.out) + std::size_t(rank) * std::size_t(chunk_rows) * row_bytes;
      spec.lag =
          lag_for(world_size(), LaunchTiles(tiles, shape).all / world_size(), call.all_reduce_sms);
    }
    spec.push = push_args(call, tiles, kernel.tile_bytes);
    spec.sm_count = sm_count;
    spec.split_scratch = split_scratch.memory.get();
    spec.tile_times = times;
    if (times != nullptr) times += tiles.all_tiles();
    KernelParams params = allocate_params(kernel.params_bytes);
    if (char const* reason = kernel.prepare(spec, params.get())) {
      throw std::invalid_argument("agmm: " + described(call) + ": " + reason);
    }
    launches.push_back({&kernel, std::move(params)});
  }
  return launches;
}

FusedMatmulReduceScatter::Impl::Launches const& FusedMatmulReduceScatter::Impl::find_or_prepare(
    MatmulScatter const& call) {
  auto const found = calls.find(call);
  if (found != calls.end()) return found->second;
  Launches launches = prepare_call(call);
  if (calls.size() >= kKeptCalls) calls.clear();
  return calls.emplace(call, std::move(launches)).first->second;
}

bool FusedMatmulReduceScatter::operator()(MatmulScatter const& what, void* stream_handle) {
  return impl_->ordered.make(stream_handle, [&] {
    Impl::Launches const& launches = impl_->find_or_prepare(what);
    return [&launches](cudaStream_t stream) {
      for (Launch const& launch : launches) {
        check_cuda(static_cast<cudaError_t>(launch.kernel->launch(launch.params.get(), stream)),
                   "kernel launch");
      }
    };
  });
}

void FusedMatmulReduceScatter::precede(void* stream) { impl_->ordered.precede(stream); }

}  // namespace agmm
