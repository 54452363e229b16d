// This file binds the chunk and tile arithmetic, for the tests and for pictures.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.hpp"
#include "order/chunking.hpp"
#include "order/clusters.hpp"
#include "order/lagged_order.hpp"
#include "order/scatter_order.hpp"
#include "symmetric/layout.hpp"
#include "transport/sm_push.hpp"

namespace py = pybind11;

namespace {

using agmm::ChunkGrid;
using agmm::Range;
using agmm::TileOrder;

TileOrder make_order(int m, int n, int block_rows, int block_cols, int chunks, int pivot,
                     int max_swizzle, const std::string& raster) {
  if (m < 1 || n < 1 || block_rows < 1 || block_cols < 1) {
    throw std::invalid_argument("m, n, block_rows, block_cols: wanted at least 1 each");
  }
  if (chunks < 1 || !ChunkGrid(m, 1, chunks).is_legal()) {
    throw std::invalid_argument("chunks: found " + std::to_string(chunks) +
                                " for m=" + std::to_string(m) + ", wanted a row in each");
  }
  if (pivot < 0 || pivot >= chunks) {
    throw std::invalid_argument("pivot: found " + std::to_string(pivot) + ", wanted 0 to " +
                                std::to_string(chunks - 1));
  }
  return TileOrder(ChunkGrid(m, 1, chunks), n, block_rows, block_cols, pivot, max_swizzle,
                   agmm::parse_raster(raster));
}

agmm::ScatterBands make_bands(int rows, int world_size) {
  if (world_size < 1 || rows < 0 || rows % world_size != 0) {
    throw std::invalid_argument("rows: found " + std::to_string(rows) + ", wanted a multiple of " +
                                "the world size " + std::to_string(world_size));
  }
  return agmm::ScatterBands(rows, world_size);
}

}  // namespace

void bind_chunking(py::module_& m) {
  using agmm::WorkspaceLayout;
  py::class_<WorkspaceLayout>(m, "WorkspaceLayout",
                              "The layout of a CUDA workspace, as offsets in bytes.")
      .def(py::init<std::size_t, int>(), py::arg("slot_bytes"), py::arg("world_size"))
      .def_property_readonly_static("slots",
                                    [](const py::object&) { return WorkspaceLayout::kSlots; })
      .def_property_readonly_static("max_column_chunks",
                                    [](const py::object&) { return agmm::kMaxColumnChunks; })
      .def_property_readonly("bytes", &WorkspaceLayout::bytes)
      .def_property_readonly("words_offset", &WorkspaceLayout::words_offset)
      .def("gather_buffer", &WorkspaceLayout::gather_buffer, py::arg("slot"))
      .def("staged_shard", &WorkspaceLayout::staged_shard, py::arg("slot"))
      .def("tags", &WorkspaceLayout::tags, py::arg("slot"))
      .def("signals", &WorkspaceLayout::signals, py::arg("slot"))
      .def("credits", &WorkspaceLayout::credits, py::arg("slot"))
      .def(
          "single_words",
          [](const WorkspaceLayout& self, int slot) {
            std::vector<std::size_t> found;
            for (int i = 0; i < static_cast<int>(WorkspaceLayout::Single::Count); ++i) {
              found.push_back(self.single(slot, static_cast<WorkspaceLayout::Single>(i)));
            }
            return found;
          },
          py::arg("slot"))
      .def("credit_words", &WorkspaceLayout::credit_words,
           "Indices from words_offset of the words that are 1 before the first call.");
  m.attr("SM_PUSH_HEAD_ITEM_BYTES") = agmm::kHeadItemBytes;
  m.attr("MAX_PUSH_PARTS") = agmm::kMaxPushParts;
  m.attr("MAX_PUSH_RANKS") = agmm::kMaxPushRanks;
  m.attr("MAX_COLUMN_CHUNKS") = agmm::kMaxColumnChunks;
  m.def(
      "tile_order",
      [](int rows, int n, int block_rows, int block_cols, int chunks, int pivot, int max_swizzle,
         const std::string& raster) {
        const TileOrder order =
            make_order(rows, n, block_rows, block_cols, chunks, pivot, max_swizzle, raster);
        std::vector<std::tuple<int, int, int, int>> steps;
        for (int step = 0; step < order.count(); ++step) {
          const agmm::BlockCoord block = order.block_at(step);
          const Range touched = order.chunks.row_chunks(order.block_row_range(block.m));
          steps.emplace_back(block.m, block.n, touched.begin, touched.end);
        }
        return steps;
      },
      py::arg("m"), py::arg("n"), py::arg("block_rows"), py::arg("block_cols"), py::arg("chunks"),
      py::arg("pivot"), py::arg("max_swizzle") = 1, py::arg("raster") = "along_m",
      "The order in which blocks are computed: (block of M, block of N, first chunk, last chunk + "
      "1) for each step.");
  m.def(
      "first_blocks",
      [](int rows, int n, int block_rows, int block_cols, int chunks, int pivot, int max_swizzle,
         const std::string& raster, int steps) {
        const TileOrder order =
            make_order(rows, n, block_rows, block_cols, chunks, pivot, max_swizzle, raster);
        const agmm::FirstBlocks first(order, steps);
        std::vector<std::tuple<int, int>> blocks;
        for (int step = 0; step < std::min({steps, order.count(), agmm::FirstBlocks::kMost});
             ++step) {
          blocks.emplace_back(first.blocks[step].m, first.blocks[step].n);
        }
        return blocks;
      },
      py::arg("m"), py::arg("n"), py::arg("block_rows"), py::arg("block_cols"), py::arg("chunks"),
      py::arg("pivot"), py::arg("max_swizzle"), py::arg("raster"), py::arg("steps"),
      "The table of the first blocks of tile_order, at most 288: (block of M, block of N) for each "
      "step.");
  m.def(
      "clusters_to_launch",
      [](int rows, int n, int block_rows, int block_cols, int chunks, int at_once) {
        const TileOrder order =
            make_order(rows, n, block_rows, block_cols, chunks, 0, 1, "along_m");
        return agmm::Clusters(rows, n, block_rows, block_cols, at_once).to_launch(order.chunks);
      },
      py::arg("m"), py::arg("n"), py::arg("block_rows"), py::arg("block_cols"), py::arg("chunks"),
      py::arg("at_once"),
      "How many clusters of CTAs are launched, of the number that there is room for at once.");
  m.def(
      "chunks_of_rows",
      [](int rows, int chunks, int begin, int end) {
        const Range touched = ChunkGrid(rows, 1, chunks).row_chunks({begin, end});
        return std::make_tuple(touched.begin, touched.end);
      },
      py::arg("m"), py::arg("chunks"), py::arg("begin"), py::arg("end"),
      "The half-open range of row chunks that rows [begin, end) touch.");
  m.def(
      "chunk_columns",
      [](int depth, int chunks_k, int chunk_k) {
        const Range columns = ChunkGrid(1, depth, 1, chunks_k).chunk_columns(chunk_k);
        return std::make_tuple(columns.begin, columns.end);
      },
      py::arg("depth"), py::arg("chunks_k"), py::arg("chunk_k"),
      "The half-open range of columns of a chunk.");
  m.def(
      "k_parts",
      [](int k_tiles, int parts, bool in_cluster) {
        const agmm::KSplits of_k(k_tiles, parts);
        const agmm::FastDiv by_splits(parts);
        std::vector<std::tuple<int, int>> ranges;
        for (int i = 0; i < parts; ++i) {
          const Range split = in_cluster ? of_k.even_split(i, by_splits) : of_k.split(i);
          ranges.emplace_back(split.begin, split.end);
        }
        return ranges;
      },
      py::arg("k_tiles"), py::arg("parts"), py::arg("in_cluster") = false,
      "The half-open range of k tiles of each split of K.");
  m.def(
      "stretch_chunks",
      [](int k, int tile_k, int parts, int columns, bool in_cluster) {
        const int chunks = agmm::ceil_div(k, columns);
        const int cut = ChunkGrid(1, k, 1, chunks).columns_per_chunk;
        const agmm::KSplits of_k(agmm::ceil_div(k, tile_k), parts);
        return of_k.stretch_chunks(tile_k, cut, chunks, in_cluster);
      },
      py::arg("k"), py::arg("tile_k"), py::arg("parts"), py::arg("columns"),
      py::arg("in_cluster") = false,
      "How many chunks of columns lie between the beginnings of one split of K and the next.");
  m.def(
      "push_order",
      [](int chunks, int log_parts, int head_chunks, int head_level, int tail_level, int rounds,
         int stretches, int stretch_chunks) {
        if (chunks < 1 || chunks > agmm::kMaxColumnChunks || stretches < 1 || stretch_chunks < 0 ||
            stretches * stretch_chunks > chunks) {
          throw std::invalid_argument(
              "chunks: found " + std::to_string(chunks) + ", and " + std::to_string(stretches) +
              " stretches of " + std::to_string(stretch_chunks) + ", wanted 1 to " +
              std::to_string(agmm::kMaxColumnChunks) + ", and stretches of no more");
        }
        agmm::PushOrder order(chunks, stretches, stretch_chunks);
        order.log_parts = log_parts;
        order.head_chunks = head_chunks;
        order.head_level = head_level;
        order.tail_level = tail_level;
        order.rounds = rounds;
        std::vector<std::tuple<int, int, int, int>> items;
        for (const bool is_tail : {false, true}) {
          for (int i = 0; i < order.count(is_tail); ++i) {
            const agmm::PushOrder::Item item = order.item(is_tail, i);
            items.emplace_back(item.round, item.chunk, item.part, item.parts);
          }
        }
        return items;
      },
      py::arg("chunks"), py::arg("log_parts"), py::arg("head_chunks"), py::arg("head_level"),
      py::arg("tail_level"), py::arg("rounds"), py::arg("stretches") = 1,
      py::arg("stretch_chunks") = 0,
      "The order in which SM push sends a shard: (round, chunk, first part, parts) for each item.");
  m.def(
      "shared_rows",
      [](int begin, int end, int tile_rows, int total_rows) {
        const agmm::SharedRows shared = agmm::shared_rows({begin, end}, tile_rows, total_rows);
        return std::make_tuple(shared.head.begin, shared.head.end, shared.tail.begin,
                               shared.tail.end);
      },
      py::arg("begin"), py::arg("end"), py::arg("tile_rows"), py::arg("total_rows"),
      "The rows of a shard that tiles share with its neighbours: head and tail, half-open.");
  m.def(
      "fast_divide",
      [](int n, int divisor) {
        if (n < 0 || divisor < 1) {
          throw std::invalid_argument("n, divisor: found " + std::to_string(n) + " and " +
                                      std::to_string(divisor) + ", wanted n >= 0, divisor >= 1");
        }
        return agmm::FastDiv(divisor).divide(n);
      },
      py::arg("n"), py::arg("divisor"));
  m.attr("SCATTER_BAND_ROWS") = agmm::ScatterBands::kMostRows;
  m.def(
      "scatter_bands",
      [](int rows, int world_size) {
        const agmm::ScatterBands bands = make_bands(rows, world_size);
        std::vector<std::tuple<int, int>> found;
        for (int band = 0; band < bands.count(); ++band) {
          found.emplace_back(bands.rows(band).begin, bands.rows(band).end);
        }
        return found;
      },
      py::arg("rows"), py::arg("world_size"),
      "The bands in which matmul + reduce-scatter takes its rows: half-open ranges of the rows of "
      "each rank.");
  m.def(
      "scatter_slot_bytes",
      [](int rows, int64_t row_bytes, int world_size) {
        return make_bands(rows, world_size).slot_bytes(row_bytes);
      },
      py::arg("rows"), py::arg("row_bytes"), py::arg("world_size"),
      "The bytes of a slot for the partial sums of a matmul + reduce-scatter whose product A @ B "
      "has `rows` rows.");
  m.def("scatter_owner", &agmm::scatter_owner, py::arg("rank"), py::arg("position"),
        py::arg("world_size"),
        "The rank whose rows `rank` computes at this position of its order.");
  m.def("part_place", &agmm::part_place, py::arg("source"), py::arg("owner"), py::arg("world_size"),
        "The index at which the owner stores the partial sum of the source, another rank.");
  m.def(
      "lagged_steps",
      [](int world_size, int blocks, int group, int lag) {
        if (world_size < 1 || blocks < 0 || group < 1 || lag < 0) {
          throw std::invalid_argument("world_size, blocks, group, lag: found " +
                                      std::to_string(world_size) + ", " + std::to_string(blocks) +
                                      ", " + std::to_string(group) + ", " + std::to_string(lag) +
                                      ", wanted at least 1, 0, 1, 0");
        }
        const agmm::LaggedOrder order(world_size, blocks, {group, lag});
        std::vector<std::tuple<int, int>> steps;
        for (int step = 0; step < order.count(); ++step) {
          const int place = order.place(step);
          steps.emplace_back(place / blocks, place % blocks);
        }
        return steps;
      },
      py::arg("world_size"), py::arg("blocks"), py::arg("group"), py::arg("lag"),
      "The steps of a matmul + all-reduce, the same on all ranks: (position, block of the chunk) "
      "for each step; scatter_owner says whose rows a position has.");
  m.def(
      "lag_for",
      [](int world_size, int blocks, int workers) {
        const agmm::Lag lag = agmm::lag_for(world_size, blocks, workers);
        return std::make_tuple(lag.group, lag.groups);
      },
      py::arg("world_size"), py::arg("blocks"), py::arg("workers"),
      "The lag for a number of workers: (blocks of a group, groups by which a rank's own blocks "
      "lag).");
}
