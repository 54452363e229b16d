// agmm._core: the CUDA launcher and workspace. Bound in every build; without CUDA the calls refuse.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "agmm/fused_all_gather_matmul.hpp"
#include "agmm/fused_matmul_reduce_scatter.hpp"
#include "agmm/limits.hpp"
#include "bindings/bindings.hpp"
#include "gemm/kernel_facts.hpp"
#include "gemm/tile_times.hpp"
#include "order/lagged_order.hpp"
#include "order/scatter_tiles.hpp"
#include "symmetric/layout.hpp"
#include "symmetric/scatter_layout.hpp"

namespace py = pybind11;

namespace {

using agmm::AsyncInputArgs;
using agmm::DType;
using agmm::FusedAllGatherMatmul;
using agmm::FusedMatmulReduceScatter;
using agmm::KernelConfig;
using agmm::KernelFacts;
using agmm::ScatterLayout;
using agmm::WorkspaceLayout;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

KernelConfig make_config(int tile_m, int tile_n, int tile_k, int cluster_m, int cluster_n,
                         const std::string& schedule, int max_swizzle, const std::string& raster,
                         bool timed, int splits, bool swapped) {
  KernelConfig config;
  config.shape = {tile_m, tile_n, tile_k, cluster_m, cluster_n, agmm::parse_schedule(schedule),
                  timed,  swapped};
  config.max_swizzle = max_swizzle;
  config.raster = agmm::parse_raster(raster);
  config.splits = splits;
  return config;
}

// b, ldb, column-major?, n, bias (0: none), out, config
using WeightTuple =
    std::tuple<uintptr_t, int64_t, bool, int, uintptr_t, uintptr_t, const KernelConfig*>;

// The scales of B: where they are, whether there is one for each column, and of blocks the elements
// between those of neighbouring blocks of K and of columns
using WeightScalesTuple = std::tuple<uintptr_t, bool, int, int>;

// The same in fp8, column-major: b, ldb, n, bias (0: none), out, config, scales, accumulation
using ScaledWeightTuple = std::tuple<uintptr_t, int64_t, int, uintptr_t, uintptr_t,
                                     const KernelConfig*, WeightScalesTuple, agmm::Accumulation>;

// kind, and for SM push: parts, columns of a chunk, first peers, head chunks
using TransportTuple = std::tuple<int, int, int, int, int>;

agmm::BLayout layout(bool column_major) {
  return column_major ? agmm::BLayout::ColumnMajor : agmm::BLayout::RowMajor;
}

// As plans name them.
std::string name_of(agmm::BLayout b_layout) {
  return b_layout == agmm::BLayout::ColumnMajor ? "column" : "row";
}

std::vector<std::string> layouts_that_store_a(const KernelConfig& config) {
  std::vector<std::string> found;
  for (const agmm::BLayout b_layout : {agmm::BLayout::ColumnMajor, agmm::BLayout::RowMajor}) {
    if (agmm::can_store_a(config.shape, b_layout)) found.push_back(name_of(b_layout));
  }
  return found;
}

using agmm::Held;
using agmm::limit_ns;
using agmm::make_workspace;

// lda, ldb, k
using ProductTuple = std::tuple<int64_t, int64_t, int>;

// All of a call but where its tensors are: made once for calls that are made often.
agmm::MatmulScatter scatter_problem(int rows, int n, DType dtype, bool b_column_major,
                                    const std::vector<ProductTuple>& products, bool is_average,
                                    const KernelConfig& config, int all_reduce_sms) {
  agmm::MatmulScatter call;
  call.rows = rows;
  call.n = n;
  call.dtype = dtype;
  call.b_layout = layout(b_column_major);
  for (const auto& [lda, ldb, k] : products) {
    call.products.push_back({nullptr, lda, nullptr, ldb, k});
  }
  call.is_average = is_average;
  call.all_reduce_sms = all_reduce_sms;
  call.config = config;
  return call;
}

bool matmul_reduce_scatter(FusedMatmulReduceScatter& op, const agmm::MatmulScatter& problem,
                           const std::vector<uintptr_t>& operands, uintptr_t bias, uintptr_t out,
                           uintptr_t stream, uintptr_t tile_times) {
  agmm::MatmulScatter call = problem;
  if (operands.size() != 2 * call.products.size()) {
    throw std::invalid_argument("operands: found " + std::to_string(operands.size()) +
                                " addresses, wanted " + std::to_string(2 * call.products.size()));
  }
  for (std::size_t i = 0; i < call.products.size(); ++i) {
    call.products[i].a = pointer<void>(operands[2 * i]);
    call.products[i].b = pointer<void>(operands[2 * i + 1]);
  }
  call.bias = pointer<void>(bias);
  call.out = pointer<void>(out);
  call.limit_ns = limit_ns();
  call.tile_times = pointer<agmm::ScatterTimes>(tile_times);
  return op(call, pointer<void>(stream));
}

// a, lda, b, ldb, k
using ScaledProductTuple = std::tuple<uintptr_t, int64_t, uintptr_t, int64_t, int>;
// scale_a, whether there is one for each row, those of B
using ScalesTuple = std::tuple<uintptr_t, bool, WeightScalesTuple>;

bool scaled_matmul_reduce_scatter(FusedMatmulReduceScatter& op, const ScaledProductTuple& product,
                                  const ScalesTuple& scales, int rows, int n, DType dtype,
                                  agmm::Accumulation accumulation, uintptr_t bias, uintptr_t out,
                                  bool is_average, const KernelConfig& config, uintptr_t stream) {
  agmm::MatmulScatter call;
  call.rows = rows;
  call.n = n;
  call.dtype = dtype;
  const auto& [a, lda, b, ldb, k] = product;
  call.products.push_back({pointer<void>(a), lda, pointer<void>(b), ldb, k});
  const auto& [scale_a, a_per_row, of_b] = scales;
  call.scales = {pointer<float>(scale_a), pointer<float>(std::get<0>(of_b)), a_per_row,
                 std::get<1>(of_b)};
  call.accumulation = accumulation;
  call.bias = pointer<void>(bias);
  call.out = pointer<void>(out);
  call.is_average = is_average;
  call.config = config;
  call.limit_ns = limit_ns();
  return op(call, pointer<void>(stream));
}

// owner, first row of A, rows, first column, tile of the chunk or -1
using ScatterStep = std::tuple<int, int, int, int, int>;

// For each launch, each tile in the order in which clusters of CTAs take them; that of an
// all-reduce where `all_reduce_sms` is not 0.
std::vector<std::vector<ScatterStep>> scatter_steps(int rank, int world_size, int rows, int n,
                                                    const KernelConfig& config,
                                                    int all_reduce_sms) {
  const agmm::KernelShape& shape = config.shape;
  const int chunk_rows = rows / world_size;
  const int band = agmm::scatter_band_rows(chunk_rows, world_size, shape);
  std::vector<std::vector<ScatterStep>> launches;
  for (int row = 0; row < chunk_rows; row += band) {
    const agmm::ScatterTiles tiles(rank, world_size, chunk_rows,
                                   {row, std::min(row + band, chunk_rows)}, n, shape.tile_m,
                                   shape.tile_n, shape.cluster_m);
    agmm::ChunkGrid chunks(tiles.padded_rows(), 1, world_size);
    const agmm::TileOrder order(chunks, n, shape.tile_m * shape.cluster_m,
                                shape.tile_n * shape.cluster_n, tiles.first_chunk(),
                                config.max_swizzle, config.raster);
    agmm::Lag lag;
    if (all_reduce_sms != 0) {
      lag = agmm::lag_for(world_size, order.count() / world_size, all_reduce_sms);
    }
    const agmm::LaggedTileOrder lagged(order, lag);
    std::vector<ScatterStep>& steps = launches.emplace_back();
    for (int step = 0; step < order.count(); ++step) {
      const agmm::BlockCoord block =
          all_reduce_sms == 0 ? order.block_at(step) : lagged.block_at(step);
      for (int i = 0; i < shape.cluster_m * shape.cluster_n; ++i) {
        const int tile_m = block.m * shape.cluster_m + i % shape.cluster_m;
        const int tile_n = block.n * shape.cluster_n + i / shape.cluster_m;
        const int padded_row = tile_m * shape.tile_m;
        const int in_chunk = tiles.row_of(padded_row);
        steps.emplace_back(tiles.owner(padded_row), tiles.a_row(padded_row),
                           std::max(0, std::min(tiles.rows - in_chunk, int(shape.tile_m))),
                           tile_n * shape.tile_n, tiles.tile(in_chunk / shape.tile_m, tile_n));
      }
    }
  }
  return launches;
}

// Each shape once, of kernels whose operands are of 16 bits.
std::vector<KernelConfig> shapes_of(const std::vector<KernelFacts>& kernels) {
  std::vector<KernelConfig> configs;
  for (const KernelFacts& facts : kernels) {
    if (agmm::is_fp8(facts.dtype)) continue;
    const bool is_known =
        std::any_of(configs.begin(), configs.end(),
                    [&](const KernelConfig& config) { return config.shape == facts.shape; });
    if (!is_known) configs.push_back({facts.shape, 1, agmm::Raster::AlongM});
  }
  return configs;
}

void async_input_mm(uintptr_t a, uintptr_t b, uintptr_t out, uintptr_t bias, int m, int n, int k,
                    DType dtype, bool b_column_major, int64_t ldb, uintptr_t signals, int chunks_m,
                    int chunks_k, int pivot, const KernelConfig& config, int rank, int sm_count,
                    uintptr_t tile_times, uintptr_t split_scratch, uintptr_t stream) {
  AsyncInputArgs args;
  args.problem = {m, n, k, dtype, layout(b_column_major)};
  args.config = config;
  args.operands.a = pointer<void>(a);
  args.operands.b = pointer<void>(b);
  args.operands.ldb = ldb;
  args.operands.out = pointer<void>(out);
  args.operands.bias = pointer<void>(bias);
  args.arrival = {pointer<uint32_t>(signals), 1, chunks_m, chunks_k, pivot, {}};
  args.arrival.senders.chunks_per_rank = 0;
  args.rank = rank;
  args.sm_count = sm_count;
  args.limit_ns = limit_ns();
  args.tile_times = pointer<agmm::TileTimes>(tile_times);
  args.split_scratch = pointer<void>(split_scratch);
  agmm::prepare_async_input_mm(args).launch(pointer<void>(stream));
}

void async_input_scaled_mm(uintptr_t a, uintptr_t b, uintptr_t out, uintptr_t bias,
                           const ScalesTuple& scales, int m, int n, int k, DType dtype,
                           agmm::Accumulation accumulation, int64_t ldb, uintptr_t signals,
                           int chunks_m, int pivot, const KernelConfig& config, int rank,
                           int sm_count, uintptr_t stream) {
  AsyncInputArgs args;
  args.problem = {m, n, k, dtype, agmm::BLayout::ColumnMajor, accumulation};
  args.config = config;
  args.operands.a = pointer<void>(a);
  args.operands.b = pointer<void>(b);
  args.operands.ldb = ldb;
  args.operands.out = pointer<void>(out);
  args.operands.bias = pointer<void>(bias);
  const auto& [scale_a, a_per_row, of_b] = scales;
  const auto& [scale_b, b_per_column, b_k_stride, b_n_stride] = of_b;
  args.operands.scales = {pointer<float>(scale_a),
                          pointer<float>(scale_b),
                          a_per_row,
                          b_per_column,
                          nullptr,
                          nullptr,
                          b_k_stride,
                          b_n_stride};
  args.arrival = {pointer<uint32_t>(signals), 1, chunks_m, 1, pivot, {}};
  args.arrival.senders.chunks_per_rank = 0;
  args.rank = rank;
  args.sm_count = sm_count;
  args.limit_ns = limit_ns();
  agmm::prepare_async_input_mm(args).launch(pointer<void>(stream));
}

bool all_gather_scaled_matmul(FusedAllGatherMatmul& op, uintptr_t a_shard, uintptr_t scales,
                              int scale_columns, int rows, int k, DType dtype,
                              const std::vector<ScaledWeightTuple>& weights, uintptr_t a_out,
                              uintptr_t scales_out, uintptr_t stream) {
  agmm::Gather gather;
  gather.a_shard = pointer<void>(a_shard);
  gather.a_out = pointer<void>(a_out);
  gather.rows = rows;
  gather.k = k;
  gather.dtype = dtype;
  gather.limit_ns = limit_ns();
  gather.scales = pointer<float>(scales);
  gather.scales_out = pointer<float>(scales_out);
  gather.scale_columns = scale_columns;
  std::vector<agmm::Weight> parts;
  for (const auto& [b, ldb, n, bias, out, config, of_b, accumulation] : weights) {
    const auto& [scale_b, per_column, k_stride, n_stride] = of_b;
    parts.push_back({pointer<void>(b), ldb, agmm::BLayout::ColumnMajor, n, pointer<void>(bias),
                     pointer<void>(out), *config, pointer<float>(scale_b), per_column, accumulation,
                     k_stride, n_stride});
  }
  return op(gather, parts, pointer<void>(stream));
}

bool all_gather_matmul(FusedAllGatherMatmul& op, uintptr_t a_shard, int rows, int k, DType dtype,
                       const std::vector<WeightTuple>& weights, const TransportTuple& transport,
                       uintptr_t a_out, uintptr_t tile_times, uintptr_t stream) {
  agmm::Gather gather;
  int kind = 0;
  std::tie(kind, gather.push.parts, gather.push.chunk_columns, gather.push.first_peers,
           gather.push.head_chunks) = transport;
  gather.transport = static_cast<agmm::Transport>(kind);
  gather.a_shard = pointer<void>(a_shard);
  gather.a_out = pointer<void>(a_out);
  gather.rows = rows;
  gather.k = k;
  gather.dtype = dtype;
  gather.limit_ns = limit_ns();
  std::vector<agmm::Weight> parts;
  for (const auto& [b, ldb, column_major, n, bias, out, config] : weights) {
    parts.push_back({pointer<void>(b), ldb, layout(column_major), n, pointer<void>(bias),
                     pointer<void>(out), *config});
  }
  return op(gather, parts, pointer<void>(stream), pointer<agmm::TileTimes>(tile_times));
}

}  // namespace

void bind_cuda(py::module_& m) {
#ifdef AGMM_WITH_CUDA
  m.attr("cuda_built") = true;
#else
  m.attr("cuda_built") = false;
#endif
  py::enum_<DType>(m, "DType",
                   "The element types of the kernels, by torch's names; in fp8 A's and "
                   "B's.")
      .value("bfloat16", DType::BFloat16)
      .value("float16", DType::Float16)
      .value("float8_e4m3fn_float8_e4m3fn", DType::E4M3)
      .value("float8_e4m3fn_float8_e5m2", DType::E4M3ByE5M2)
      .value("float8_e5m2_float8_e4m3fn", DType::E5M2ByE4M3);
  py::enum_<agmm::Accumulation>(
      m, "Accumulation",
      "How sums of fp8 products are kept and scaled: by the tensor cores, "
      "promoted every 128 of K, or promoted with the scales of blocks.")
      .value("fast", agmm::Accumulation::Fast)
      .value("slow", agmm::Accumulation::Slow)
      .value("block", agmm::Accumulation::Block)
      .value("block_1x128", agmm::Accumulation::Block1x128);
  py::class_<KernelConfig>(m, "KernelConfig", "A kernel shape and its swizzle and raster.")
      .def(py::init(&make_config), py::arg("tile_m"), py::arg("tile_n"), py::arg("tile_k"),
           py::arg("cluster_m"), py::arg("cluster_n"), py::arg("schedule"),
           py::arg("max_swizzle") = 1, py::arg("raster") = "along_m", py::arg("timed") = false,
           py::arg("splits") = 1, py::arg("swapped") = false)
      .def_property_readonly("timed", [](const KernelConfig& c) { return c.shape.timed; })
      .def_property_readonly("swapped", [](const KernelConfig& c) { return c.shape.swapped; })
      .def_property_readonly("name", [](const KernelConfig& c) { return c.shape.str(); })
      .def_property_readonly("tile_m", [](const KernelConfig& c) { return c.shape.tile_m; })
      .def_property_readonly("tile_n", [](const KernelConfig& c) { return c.shape.tile_n; })
      .def_property_readonly("tile_k", [](const KernelConfig& c) { return c.shape.tile_k; })
      .def_property_readonly("cluster_m", [](const KernelConfig& c) { return c.shape.cluster_m; })
      .def_property_readonly("cluster_n", [](const KernelConfig& c) { return c.shape.cluster_n; })
      .def_property_readonly(
          "schedule",
          [](const KernelConfig& c) { return std::string(agmm::to_string(c.shape.schedule)); })
      .def_property_readonly("can_split",
                             [](const KernelConfig& c) { return agmm::can_split(c.shape); })
      .def_property_readonly(
          "splits_in_cluster",
          [](const KernelConfig& c) { return agmm::splits_in_cluster(c.shape); },
          "Whether the CTAs of a tile are a cluster, which takes no scratch.")
      .def_property_readonly("stores_A", &layouts_that_store_a,
                             "The layouts of B with which it can store A.")
      .def_readonly("splits", &KernelConfig::splits)
      .def_readonly("max_swizzle", &KernelConfig::max_swizzle)
      .def_property_readonly(
          "raster", [](const KernelConfig& c) { return std::string(agmm::to_string(c.raster)); })
      .def("__repr__", [](const KernelConfig& c) {
        const std::string splits = c.splits == 1 ? "" : "_split" + std::to_string(c.splits);
        return c.shape.str() + splits + "_swizzle" + std::to_string(c.max_swizzle) + "_" +
               agmm::to_string(c.raster);
      });
  m.def(
      "kernels", [] { return shapes_of(agmm::built_kernels()); },
      "The kernels of this build for operands of 16 bits, each shape once; empty without CUDA.");
  m.def(
      "scatter_kernels", [] { return shapes_of(agmm::built_scatter_kernels()); },
      "Those of matmul + reduce-scatter.");
  m.def(
      "all_reduce_kernels", [] { return shapes_of(agmm::built_all_reduce_kernels()); },
      "Those of matmul + all-reduce.");
  py::class_<KernelFacts>(m, "KernelFacts", "What a kernel of this build can do.")
      .def_property_readonly("kernel", [](const KernelFacts& f) { return f.shape.str(); })
      .def_readonly("dtype", &KernelFacts::dtype)
      .def_property_readonly("b_layout", [](const KernelFacts& f) { return name_of(f.b_layout); })
      .def_property_readonly("timed", [](const KernelFacts& f) { return f.shape.timed; })
      .def_readonly("can_split", &KernelFacts::can_split)
      .def_readonly("can_store_A", &KernelFacts::can_store_a)
      .def_property_readonly("is_fp8", [](const KernelFacts& f) { return agmm::is_fp8(f.dtype); })
      .def_readonly("accumulation", &KernelFacts::accumulation)
      .def_property_readonly(
          "fast_accum",
          [](const KernelFacts& f) { return f.accumulation == agmm::Accumulation::Fast; })
      .def_property_readonly("architecture",
                             [](const KernelFacts& f) { return std::string(f.architecture); });
  m.def("scatter_kernel_facts", &agmm::built_scatter_kernels,
        "As kernel_facts, of the kernels of matmul + reduce-scatter.");
  m.def("kernel_facts", &agmm::built_kernels,
        "One entry per kernel of this build: shape, dtype, layout of B and accumulation; empty "
        "without CUDA.");
  m.attr("ALIGNMENT") = agmm::kAlignment;
  m.attr("MAX_CLUSTER_SPLITS") = agmm::kMaxClusterSplits;
  m.attr("CAPABILITY") = 10 * agmm::kCapabilityMajor + agmm::kCapabilityMinor;
  m.def("async_input_mm", &async_input_mm, py::arg("a"), py::arg("b"), py::arg("out"),
        py::arg("bias"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("dtype"),
        py::arg("b_column_major"), py::arg("ldb"), py::arg("signals"), py::arg("chunks_m"),
        py::arg("chunks_k"), py::arg("pivot"), py::arg("config"), py::arg("rank"),
        py::arg("sm_count"), py::arg("tile_times"), py::arg("split_scratch"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>(),
        "out = a @ b (+ bias) on a CUDA stream; pointers are device addresses, 0 where absent.");
  m.def("async_input_scaled_mm", &async_input_scaled_mm, py::arg("a"), py::arg("b"), py::arg("out"),
        py::arg("bias"), py::arg("scales"), py::arg("m"), py::arg("n"), py::arg("k"),
        py::arg("dtype"), py::arg("accumulation"), py::arg("ldb"), py::arg("signals"),
        py::arg("chunks_m"), py::arg("pivot"), py::arg("config"), py::arg("rank"),
        py::arg("sm_count"), py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
        "The same of fp8 operands, B column-major, out in bfloat16. scales: (scale_a, one for each "
        "row?, (scale_b, one for each column?, strides of blocks along K and N)).");
  m.attr("FP8_ALIGNMENT") = agmm::alignment_of(DType::E4M3);
  m.def("peer_atomics", &agmm::has_peer_atomics, py::arg("device"), py::arg("peer"),
        "Whether additions of one GPU to words in the memory of another are atomic there.");
  m.def(
      "record_time",
      [](uintptr_t ns, uintptr_t stream) {
        agmm::record_time(pointer<uint64_t>(ns), pointer<void>(stream));
      },
      py::arg("ns"), py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
      "Writes the GPU's timer in ns to a device address when the stream comes to it.");
  m.def("split_scratch_bytes", &agmm::max_split_scratch_bytes,
        "Bytes of scratch memory on the current device for configs with splits.");
  m.attr("SPLIT_COUNTER_BYTES") = agmm::kSplitCounterBytes;
  m.attr("TILE_TIMES_BYTES") = sizeof(agmm::TileTimes);
  py::class_<FusedAllGatherMatmul, Held<FusedAllGatherMatmul>>(
      m, "CudaWorkspace", "Gather buffers, signals and credits of one group.")
      .def(py::init(&make_workspace<FusedAllGatherMatmul>), py::arg("rank"), py::arg("bases"),
           py::arg("slot_bytes"), py::arg("reserved_sms") = 0)
      .def_static(
          "workspace_bytes",
          [](std::size_t slot_bytes, int world_size) {
            return WorkspaceLayout(slot_bytes, world_size).bytes();
          },
          py::arg("slot_bytes"), py::arg("world_size"))
      .def_static(
          "words_offset",
          [](std::size_t slot_bytes, int world_size) {
            return WorkspaceLayout(slot_bytes, world_size).words_offset();
          },
          py::arg("slot_bytes"), py::arg("world_size"), "Where the words begin, in bytes.")
      .def_static(
          "credit_words",
          [](int world_size) { return WorkspaceLayout(0, world_size).credit_words(); },
          py::arg("world_size"),
          "The words after the slots that are 1 before the first call; the others are 0.")
      .def_property_readonly("slot_bytes", &FusedAllGatherMatmul::slot_bytes)
      .def("precede", &agmm::precede<FusedAllGatherMatmul>, py::arg("stream"), agmm::kPrecedeDoc)
      .def("all_gather_matmul", &all_gather_matmul, py::arg("a_shard"), py::arg("rows"),
           py::arg("k"), py::arg("dtype"), py::arg("weights"), py::arg("transport"),
           py::arg("a_out"), py::arg("tile_times"), py::arg("stream"),
           py::call_guard<py::gil_scoped_release>(),
           "Enqueues gather and matmuls. weights: (b, ldb, b_column_major, n, bias, out, config). "
           "transport: (0 push, 1 pull, 2 SM push; parts, columns of a chunk, first peers, head "
           "chunks). "
           "Returns whether the stream is being captured.")
      .def("all_gather_scaled_matmul", &all_gather_scaled_matmul, py::arg("a_shard"),
           py::arg("scales"), py::arg("scale_columns"), py::arg("rows"), py::arg("k"),
           py::arg("dtype"), py::arg("weights"), py::arg("a_out"), py::arg("scales_out"),
           py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
           "The same in fp8 by push, with so many scales for each row. weights: (b, ldb, n, bias, "
           "out, config, (scale_b, one for each column?, strides of blocks along K and N), "
           "accumulation).");
  py::class_<agmm::MatmulScatter>(m, "ScatterProblem",
                                  "A matmul + reduce-scatter without its tensors. products: (lda, "
                                  "ldb, k).")
      .def(py::init(&scatter_problem), py::arg("rows"), py::arg("n"), py::arg("dtype"),
           py::arg("b_column_major"), py::arg("products"), py::arg("is_average"), py::arg("config"),
           py::arg("all_reduce_sms") = 0,
           "all_reduce_sms: not 0 for an all-reduce, whose order is made for so many "
           "multiprocessors, the same on all ranks.");
  py::class_<FusedMatmulReduceScatter, Held<FusedMatmulReduceScatter>>(
      m, "CudaScatterWorkspace", "The sums that the ranks of a group send each other.")
      .def(py::init(&make_workspace<FusedMatmulReduceScatter>), py::arg("rank"), py::arg("bases"),
           py::arg("part_bytes"), py::arg("reserved_sms") = 0)
      .def_static(
          "workspace_bytes",
          [](std::size_t part_bytes, int world_size) {
            return ScatterLayout(part_bytes, world_size).bytes();
          },
          py::arg("part_bytes"), py::arg("world_size"))
      .def_static(
          "words_offset",
          [](std::size_t part_bytes, int world_size) {
            return ScatterLayout(part_bytes, world_size).words_offset();
          },
          py::arg("part_bytes"), py::arg("world_size"), "Where the words begin, in bytes.")
      .def_static(
          "credit_words",
          [](int world_size) { return ScatterLayout(0, world_size).credit_words(); },
          py::arg("world_size"),
          "The words after the sums that are 1 before the first call; the others are 0.")
      .def_property_readonly("part_bytes", &FusedMatmulReduceScatter::part_bytes)
      .def("precede", &agmm::precede<FusedMatmulReduceScatter>, py::arg("stream"),
           agmm::kPrecedeDoc)
      .def("matmul_reduce_scatter", &matmul_reduce_scatter, py::arg("problem"), py::arg("operands"),
           py::arg("bias"), py::arg("out"), py::arg("stream"), py::arg("tile_times") = 0,
           py::call_guard<py::gil_scoped_release>(),
           "Enqueues the matmuls, whose kernels send. operands: addresses of A and B, of each "
           "product in turn. tile_times: of each launch SCATTER_TIMES_BYTES for each rank's tiles. "
           "Returns whether the stream is being captured.")
      .def("scaled_matmul_reduce_scatter", &scaled_matmul_reduce_scatter, py::arg("product"),
           py::arg("scales"), py::arg("rows"), py::arg("n"), py::arg("dtype"),
           py::arg("accumulation"), py::arg("bias"), py::arg("out"), py::arg("is_average"),
           py::arg("config"), py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
           "The same of one product of fp8 operands, B column-major, out in bfloat16. scales: as "
           "those of async_input_scaled_mm, for rows and columns or for all.");
  m.attr("SCATTER_TIMES_BYTES") = sizeof(agmm::ScatterTimes);
  m.attr("MAX_SCATTER_TILES") = agmm::kMaxScatterTiles;
  m.def("scatter_steps", &scatter_steps, py::arg("rank"), py::arg("world_size"), py::arg("rows"),
        py::arg("n"), py::arg("config"), py::arg("all_reduce_sms") = 0,
        "For each launch of a matmul + reduce-scatter, or of an all-reduce, each tile in order: "
        "(owner, first row of A, rows, first column, tile of the chunk or -1 where it only pads).");
  m.def(
      "scatter_part_bytes",
      [](int rows, int n, int world_size, const KernelConfig& config, bool is_all_reduce) {
        return agmm::scatter_part_bytes(rows, n, world_size, config.shape, is_all_reduce);
      },
      py::arg("rows"), py::arg("n"), py::arg("world_size"), py::arg("config"),
      py::arg("is_all_reduce") = false,
      "Bytes that a matmul + reduce-scatter, or an all-reduce, sends from one rank to another at a "
      "time.");
}
