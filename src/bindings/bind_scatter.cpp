// This file binds matmul + reduce-scatter on CUDA. Every build has the functions; without CUDA they
// refuse.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "agmm/fused_matmul_reduce_scatter.hpp"
#include "bindings/bindings.hpp"
#include "bindings/formats.hpp"
#include "gemm/tile_times.hpp"
#include "order/lagged_order.hpp"
#include "order/scatter_tiles.hpp"
#include "symmetric/scatter_layout.hpp"

namespace py = pybind11;

namespace {

using agmm::Addresses;
using agmm::Format;
using agmm::FusedMatmulReduceScatter;
using agmm::KernelConfig;
using agmm::layout;
using agmm::limit_ns;
using agmm::pointer;
using agmm::ScatterLayout;

// The tuple holds lda, ldb and K.
using ProductTuple = std::tuple<int64_t, int64_t, int>;

/// A matmul + reduce-scatter without the addresses of its tensors.
struct ScatterProblem {
  agmm::MatmulScatter call;

  ScatterProblem(int rows, int n, const Format& format, const std::vector<ProductTuple>& products,
                 const KernelConfig& config, bool b_column_major, bool is_average,
                 int all_reduce_sms) {
    call.rows = rows;
    call.n = n;
    call.dtype = format.dtype;
    call.b_layout = layout(b_column_major);
    for (const auto& [lda, ldb, k] : products) {
      call.products.push_back({nullptr, lda, nullptr, ldb, k, format.scale_layout()});
    }
    call.is_average = is_average;
    call.all_reduce_sms = all_reduce_sms;
    call.accumulation = format.accumulation;
    call.config = config;
  }

  std::string str() const {
    std::string text = "ScatterProblem(";
    for (const agmm::Product& product : call.products) {
      text += "A [" + std::to_string(call.rows) + ", " + std::to_string(product.k) + "] " +
              to_string(call.dtype) + ", B [" + std::to_string(product.k) + ", " +
              std::to_string(call.n) + "] " +
              (call.b_layout == agmm::BLayout::RowMajor ? "row-major" : "column-major") + ", ";
    }
    if (is_fp8(call.dtype)) text += std::string(to_string(call.accumulation)) + ", ";
    return text + (call.is_average ? "avg" : "sum") + ", " + agmm::in_words(call.config) + ")";
  }
};

bool matmul_reduce_scatter(FusedMatmulReduceScatter& op, const ScatterProblem& problem,
                           const std::vector<uintptr_t>& addresses, uintptr_t stream,
                           uintptr_t tile_times) {
  agmm::MatmulScatter call = problem.call;
  Addresses at(addresses, 4 * call.products.size() + 3);
  for (agmm::Product& product : call.products) {
    product.a = at.next<void>();
    product.b = at.next<void>();
    product.scales.a = at.next<float>();
    product.scales.b = at.next<float>();
  }
  call.bias = at.next<void>();
  call.residual = at.next<void>();
  call.out = at.next<void>();
  call.limit_ns = limit_ns();
  call.tile_times = pointer<agmm::ScatterTimes>(tile_times);
  return op(call, pointer<void>(stream));
}

// The tuple holds the owner, the first row of A, the number of rows, the first column, and the tile
// of the chunk or -1.
using ScatterStep = std::tuple<int, int, int, int, int>;

// Returns, for each launch, each tile in the order in which clusters of CTAs take it: the order of
// an all-reduce where `all_reduce_sms` is not 0.
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

}  // namespace

void bind_scatter(py::module_& m) {
  py::class_<ScatterProblem>(m, "ScatterProblem",
                             "A matmul + reduce-scatter, or matmul + all-reduce, without its "
                             "tensors, made once for calls of one kind.")
      .def(py::init<int, int, const Format&, const std::vector<ProductTuple>&, const KernelConfig&,
                    bool, bool, int>(),
           py::arg("rows"), py::arg("n"), py::arg("format"), py::arg("products"), py::arg("config"),
           py::arg("b_column_major") = true, py::arg("is_average") = false,
           py::arg("all_reduce_sms") = 0,
           "products: (lda, ldb, K) of each product; all have one format. all_reduce_sms: not 0 "
           "for an all-reduce, the number of multiprocessors that its order is made for, the same "
           "on all ranks.")
      .def("__repr__", &ScatterProblem::str);
  py::class_<FusedMatmulReduceScatter, agmm::Held<FusedMatmulReduceScatter>>(
      m, "CudaScatterWorkspace",
      "The memory for the partial sums that the ranks of a group send each other.")
      .def(py::init(&agmm::make_workspace<FusedMatmulReduceScatter>), py::arg("rank"),
           py::arg("bases"), py::arg("part_bytes"), py::arg("reserved_sms") = 0)
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
          "Indices from words_offset of the words that are 1 before the first call; the others are "
          "0.")
      .def_property_readonly("part_bytes", &FusedMatmulReduceScatter::part_bytes)
      .def("precede", &agmm::precede<FusedMatmulReduceScatter>, py::arg("stream"),
           agmm::kPrecedeDoc)
      .def("matmul_reduce_scatter", &matmul_reduce_scatter, py::arg("problem"),
           py::arg("addresses"), py::arg("stream"), py::arg("tile_times") = 0,
           py::call_guard<py::gil_scoped_release>(),
           "Enqueues the matmuls, whose kernels send. addresses: the addresses of A, B, scale_a "
           "and scale_b of each product in turn, then of bias, residual and out; 0 where there is "
           "none. "
           "tile_times: the address for SCATTER_TIMES_BYTES for each launch and each tile of each "
           "rank, or 0. Returns whether the stream is being captured.");
  m.attr("SCATTER_TIMES_BYTES") = sizeof(agmm::ScatterTimes);
  m.attr("MAX_SCATTER_TILES") = agmm::kMaxScatterTiles;
  m.def("scatter_steps", &scatter_steps, py::arg("rank"), py::arg("world_size"), py::arg("rows"),
        py::arg("n"), py::arg("config"), py::arg("all_reduce_sms") = 0,
        "Returns, for each launch of a matmul + reduce-scatter, or of an all-reduce, each tile in "
        "order: (owner, first row of A, rows, first column, tile of the chunk or -1 where it only "
        "pads).");
  m.def(
      "scatter_part_bytes",
      [](int rows, int n, int world_size, const KernelConfig& config, bool is_all_reduce) {
        return agmm::scatter_part_bytes(rows, n, world_size, config.shape, is_all_reduce);
      },
      py::arg("rows"), py::arg("n"), py::arg("world_size"), py::arg("config"),
      py::arg("is_all_reduce") = false,
      "Returns the bytes that a matmul + reduce-scatter, or an all-reduce, sends from one rank to "
      "another at a time.");
}
