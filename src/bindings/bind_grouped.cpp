// This file binds grouped matmuls, the order of their tiles, and what moves their rows.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "agmm/grouped_matmul.hpp"
#include "agmm/row_combine.hpp"
#include "agmm/row_dispatch.hpp"
#include "bindings/bindings.hpp"
#include "bindings/formats.hpp"
#include "order/grouped_tiles.hpp"
#include "symmetric/combine_layout.hpp"
#include "symmetric/dispatch_layout.hpp"

namespace py = pybind11;

namespace {

using agmm::ExpertWeight;
using agmm::GroupedMatmul;
using agmm::RowCombiner;
using agmm::RowDispatcher;

/// A RowArrival in Python: addresses of `arrived` and `begins`, sources, the first source, rank.
using ArrivalTuple = std::tuple<uintptr_t, uintptr_t, int, int, int>;

/// The scales of fp8 matrices in Python: address, strides of experts, of K and of columns, and the
/// columns of a scale; those of other matrices have address 0.
using ExpertScalesTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int>;

/// The scales of fp8 rows in Python: address, strides of rows and of K; of other rows address 0.
using RowsScalesTuple = std::tuple<uintptr_t, int64_t, int64_t>;

/// An expert's weight in Python: address, leading dimension, stride of experts, address of the
/// bias, scales.
using WeightTuple = std::tuple<uintptr_t, int64_t, int64_t, uintptr_t, ExpertScalesTuple>;

ExpertWeight weight_of(WeightTuple const& given) {
  auto const [b, ldb, expert_stride, bias, scales] = given;
  auto const [at, by_expert, by_k, by_n, columns] = scales;
  return {agmm::pointer<void const>(b),
          ldb,
          expert_stride,
          agmm::pointer<void const>(bias),
          {agmm::pointer<float const>(at), by_expert, by_k, by_n, columns}};
}

agmm::RowsScales scales_of(RowsScalesTuple const& given) {
  auto const [at, by_row, by_k] = given;
  return {agmm::pointer<float const>(at), by_row, by_k};
}

using Sizes = std::tuple<int, int, int, int>;

/// A matmul of dispatched rows in Python: kernel, dtype, whether the weights are column-major, the
/// gate's name or "", sizes, weights, and the address of out.
using MatmulTuple = std::tuple<agmm::KernelConfig, agmm::DType, bool, std::string, Sizes,
                               std::vector<WeightTuple>, uintptr_t>;

GroupedMatmul matmul_of(MatmulTuple const& given) {
  auto const& [config, dtype, column_major, activation, sizes, weights, out] = given;
  agmm::NamedEpilogue const named(activation);
  if (weights.size() != std::size_t(agmm::columns_per_out(named.epilogue))) {
    throw std::invalid_argument("weights: found " + std::to_string(weights.size()) + ", wanted " +
                                std::to_string(agmm::columns_per_out(named.epilogue)));
  }
  GroupedMatmul args;
  args.shape = config.shape;
  args.dtype = dtype;
  args.b_layout = agmm::layout(column_major);
  args.epilogue = named.epilogue;
  args.activation = named.activation;
  std::tie(args.rows, args.out_columns, args.k, args.experts) = sizes;
  args.weight = weight_of(weights[0]);
  if (weights.size() == 2) args.up = weight_of(weights[1]);
  args.out = agmm::pointer<void>(out);
  return args;
}

void grouped_matmul(agmm::KernelConfig const& config, agmm::DType dtype, bool column_major,
                    std::string const& activation, Sizes const& sizes, uintptr_t a, int64_t lda,
                    uintptr_t offsets, std::vector<WeightTuple> const& weights, uintptr_t out,
                    int sm_count, uintptr_t stream, std::optional<ArrivalTuple> const& arrival,
                    RowsScalesTuple const& scales) {
  GroupedMatmul args = matmul_of({config, dtype, column_major, activation, sizes, weights, out});
  args.a = agmm::pointer<void const>(a);
  args.lda = lda;
  args.scales = scales_of(scales);
  args.offsets = agmm::pointer<int32_t const>(offsets);
  args.sm_count = sm_count;
  if (arrival) {
    auto const [arrived, begins, sources, first_source, rank] = *arrival;
    args.arrival = {agmm::pointer<uint32_t const>(arrived),
                    agmm::pointer<int32_t const>(begins),
                    sources,
                    first_source,
                    rank,
                    agmm::limit_ns()};
  }
  agmm::grouped_matmul(args, agmm::pointer<void>(stream));
}

bool dispatch(RowDispatcher& dispatcher, Sizes const& sizes, std::vector<int32_t> const& counts,
              std::array<uintptr_t, 8> const& addresses, std::vector<MatmulTuple> const& matmuls,
              uintptr_t stream, int ctas) {
  agmm::RowDispatch call;
  int row_bytes = 0;
  std::tie(row_bytes, call.choices, call.experts, call.capacity) = sizes;
  call.row_bytes = row_bytes;
  call.counts = counts;
  auto const [x, tokens, offsets, positions, rows, gathered, arrived, begins] = addresses;
  call.x = agmm::pointer<void const>(x);
  call.tokens = agmm::pointer<int32_t const>(tokens);
  call.offsets = agmm::pointer<int32_t const>(offsets);
  call.positions = agmm::pointer<int32_t const>(positions);
  call.rows = agmm::pointer<void>(rows);
  call.gathered = agmm::pointer<void>(gathered);
  call.arrived = agmm::pointer<uint32_t>(arrived);
  call.begins = agmm::pointer<int32_t>(begins);
  call.ctas = ctas;
  call.limit_ns = agmm::limit_ns();
  std::vector<GroupedMatmul> behind;
  for (MatmulTuple const& each : matmuls) behind.push_back(matmul_of(each));
  return dispatcher(call, behind, agmm::pointer<void>(stream));
}

void bind_dispatch(py::module_& m) {
  using agmm::DispatchLayout;
  m.attr("MOST_CHOICES") = agmm::kMostChoices;
  py::class_<RowDispatcher, agmm::Held<RowDispatcher>>(
      m, "CudaRowDispatch", "Slots of one group in which the ranks offer each other their tokens.")
      .def(py::init(&agmm::make_workspace<RowDispatcher>), py::arg("rank"), py::arg("bases"),
           py::arg("slot_bytes"), py::arg("reserved_sms") = 0)
      .def_static(
          "workspace_bytes",
          [](std::size_t slot_bytes, int world_size) {
            return DispatchLayout(slot_bytes, world_size).bytes();
          },
          py::arg("slot_bytes"), py::arg("world_size"))
      .def_static(
          "words_offset",
          [](std::size_t slot_bytes, int world_size) {
            return DispatchLayout(slot_bytes, world_size).words_offset();
          },
          py::arg("slot_bytes"), py::arg("world_size"), "Where the words begin, in bytes.")
      .def_static(
          "credit_words",
          [](int world_size) { return DispatchLayout(0, world_size).credit_words(); },
          py::arg("world_size"),
          "Indices from words_offset of the words that are 1 before the first call. There are "
          "none: all words are 0.")
      .def_property_readonly("slot_bytes", &RowDispatcher::slot_bytes)
      .def("precede", &agmm::precede<RowDispatcher>, py::arg("stream"), agmm::kPrecedeDoc)
      .def("dispatch", &dispatch, py::arg("sizes"), py::arg("counts"), py::arg("addresses"),
           py::arg("matmuls"), py::arg("stream"), py::arg("ctas") = 0,
           py::call_guard<py::gil_scoped_release>(),
           "Enqueues a dispatch of rows, and behind it the matmuls that take them as they come. "
           "sizes: bytes of a row, choices of a token, experts, rows that there is room for. "
           "counts: the tokens of each rank. addresses: those of this rank's tokens, of tokens, "
           "offsets and positions of the routing, of the rows, of the gathered tokens or 0, and of "
           "ranks * experts words for counts and as many for first rows. matmuls: for each its "
           "kernel, dtype, layout, activation, sizes, weights and the address of out, as in "
           "grouped_matmul. ctas: those that bring rows; 0 leaves the number to agmm. Returns "
           "whether the stream is being captured.");
}

/// A matmul whose rows are combined: it, and the address, leading dimension and scales of its A.
using CombinedTuple = std::tuple<MatmulTuple, uintptr_t, int64_t, RowsScalesTuple>;

bool combine(RowCombiner& combiner, agmm::CollectiveElement element, Sizes const& sizes,
             std::vector<int32_t> const& counts, std::array<uintptr_t, 4> const& addresses,
             std::vector<uintptr_t> const& rows, std::vector<CombinedTuple> const& matmuls,
             uintptr_t stream) {
  agmm::RowCombine call;
  call.element = element;
  std::tie(call.columns, call.choices, call.experts, call.capacity) = sizes;
  call.counts = counts;
  call.parts = static_cast<int32_t>(rows.size() + matmuls.size());
  auto const [offsets, positions, weights, out] = addresses;
  call.offsets = agmm::pointer<int32_t const>(offsets);
  call.positions = agmm::pointer<int32_t const>(positions);
  for (uintptr_t const each : rows) call.rows.push_back(agmm::pointer<void const>(each));
  call.weights = agmm::pointer<float const>(weights);
  call.out = agmm::pointer<void>(out);
  call.limit_ns = agmm::limit_ns();
  std::vector<GroupedMatmul> ahead;
  for (auto const& [given, a, lda, scales] : matmuls) {
    GroupedMatmul& args = ahead.emplace_back(matmul_of(given));
    args.a = agmm::pointer<void const>(a);
    args.lda = lda;
    args.scales = scales_of(scales);
    args.offsets = call.offsets;
  }
  return combiner(call, ahead, agmm::pointer<void>(stream));
}

void bind_combine(py::module_& m) {
  using agmm::CombineLayout;
  py::class_<RowCombiner, agmm::Held<RowCombiner>>(
      m, "CudaRowCombine", "The slot of one group in which the ranks leave the rows of tokens.")
      .def(py::init(&agmm::make_workspace<RowCombiner>), py::arg("rank"), py::arg("bases"),
           py::arg("slot_bytes"), py::arg("reserved_sms") = 0)
      .def_static(
          "workspace_bytes",
          [](std::size_t slot_bytes, int world_size) {
            return CombineLayout(slot_bytes, world_size).bytes();
          },
          py::arg("slot_bytes"), py::arg("world_size"))
      .def_static(
          "words_offset",
          [](std::size_t slot_bytes, int world_size) {
            return CombineLayout(slot_bytes, world_size).words_offset();
          },
          py::arg("slot_bytes"), py::arg("world_size"), "Where the words begin, in bytes.")
      .def_static(
          "credit_words",
          [](int world_size) { return CombineLayout(0, world_size).credit_words(); },
          py::arg("world_size"),
          "Indices from words_offset of the words that are 1 before the first call; the others are "
          "0.")
      .def_static(
          "slot_bytes_of", &CombineLayout::slot_bytes_of, py::arg("choices"), py::arg("rows"),
          py::arg("row_bytes"),
          "The slot that a call takes, of so many choices of all ranks' tokens, and rows of "
          "all parts.")
      .def_property_readonly("slot_bytes", &RowCombiner::slot_bytes)
      .def("precede", &agmm::precede<RowCombiner>, py::arg("stream"), agmm::kPrecedeDoc)
      .def("combine", &combine, py::arg("element"), py::arg("sizes"), py::arg("counts"),
           py::arg("addresses"), py::arg("rows"), py::arg("matmuls"), py::arg("stream"),
           py::call_guard<py::gil_scoped_release>(),
           "Enqueues the matmuls that compute rows, and behind them the sums of the rows of each "
           "token. sizes: columns, choices of a token, experts, rows that there is room for. "
           "counts: the tokens of each rank. addresses: those of offsets and positions of the "
           "routing, of the weights in float32 or 0, and of out. rows: the addresses of rows that "
           "are there already, of each part. matmuls: as for a dispatch, but for out, each with "
           "the address, the leading dimension and the scales of its rows. Returns whether the "
           "stream is being "
           "captured.");
}

/// What the kernel's warps do with the offsets, in the order of the blocks.
std::vector<std::tuple<int, int, int, int, int, int>> grouped_blocks(
    std::vector<int32_t> const& offsets, int rows, int columns, int tile_rows, int block_columns,
    std::vector<int32_t> const& first_rows) {
  if (!first_rows.empty() && first_rows.size() + 1 != offsets.size()) {
    throw std::invalid_argument("first_rows: found " + std::to_string(first_rows.size()) +
                                ", wanted one for each expert");
  }
  if (offsets.empty() || tile_rows < agmm::kTileQuarters || block_columns < 1 || columns < 1) {
    throw std::invalid_argument("offsets: found sizes of nothing, wanted positive ones");
  }
  auto const experts = int32_t(offsets.size()) - 1;
  agmm::GroupedOrder const order(rows, experts, columns, tile_rows, block_columns);
  std::vector<int32_t> first_block(1, 0);
  for (int32_t i = 0; i < experts; ++i) {
    first_block.push_back(first_block.back() +
                          order.blocks_of_expert(order.rows_of_expert(offsets[i], offsets[i + 1])));
  }
  std::vector<std::tuple<int, int, int, int, int, int>> found;
  for (int32_t number = 0; number < first_block.back(); ++number) {
    int32_t const expert = agmm::expert_of_block(first_block.data(), experts, number);
    agmm::GroupedBlock const block = order.block_of_expert(
        expert, order.rows_of_expert(offsets[expert], offsets[expert + 1]),
        number - first_block[expert], first_rows.empty() ? 0 : first_rows[expert]);
    found.emplace_back(block.expert, block.rows.rows.begin, block.rows.rows.end,
                       block.rows.first_row, block.rows.quarters, block.column_block);
  }
  return found;
}

}  // namespace

void bind_grouped(py::module_& m) {
  m.attr("MOST_EXPERTS") = agmm::kMostExperts;
  m.attr("MOST_COMBINED_PARTS") = agmm::kMostCombinedParts;
  bind_dispatch(m);
  bind_combine(m);
  m.def(
      "grouped_matmul", &grouped_matmul, py::arg("config"), py::arg("dtype"),
      py::arg("column_major"), py::arg("activation"), py::arg("sizes"), py::arg("a"),
      py::arg("lda"), py::arg("offsets"), py::arg("weights"), py::arg("out"), py::arg("sm_count"),
      py::arg("stream"), py::arg("arrival") = py::none(), py::arg("scales") = RowsScalesTuple{},
      py::call_guard<py::gil_scoped_release>(),
      "Enqueues the products of rows that are grouped by expert, each expert's with its own "
      "matrix, and zeros behind the last expert's rows. activation: empty for one weight, or the "
      "gate's name. sizes: rows, N, K, experts. weights: for each weight its address, leading "
      "dimension, elements from an expert to the next, the address of the biases or 0, and of "
      "fp8 the scales: address, elements between experts, along K and along columns, and the "
      "columns of one. scales: of fp8 rows their address, elements between rows and along K. "
      "arrival: where rows of A are still on their way, the addresses of the counts of those that "
      "have come and of the sources' first rows, the sources, the one that comes first, and this "
      "rank.");
  m.def("grouped_blocks", &grouped_blocks, py::arg("offsets"), py::arg("rows"), py::arg("columns"),
        py::arg("tile_rows"), py::arg("block_columns"),
        py::arg("first_rows") = std::vector<int32_t>{},
        "The blocks of a grouped matmul in their order: expert, its rows from begin to end, the "
        "first row that is loaded, how many quarters of the tile are, and the block of columns. "
        "first_rows: for each expert a row of the tile that comes first.");
}
