// agmm._core: all-gather + matmul on CUDA. Bound in every build; without CUDA the calls refuse.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "agmm/fused_all_gather_matmul.hpp"
#include "bindings/bindings.hpp"
#include "bindings/operands.hpp"
#include "gemm/tile_times.hpp"
#include "symmetric/layout.hpp"

namespace py = pybind11;

namespace {

using agmm::AsyncInputArgs;
using agmm::DType;
using agmm::FusedAllGatherMatmul;
using agmm::KernelConfig;
using agmm::layout;
using agmm::limit_ns;
using agmm::pointer;
using agmm::ScalesTuple;
using agmm::WeightScalesTuple;
using agmm::WorkspaceLayout;

// b, ldb, column-major?, n, bias (0: none), out, config
using WeightTuple =
    std::tuple<uintptr_t, int64_t, bool, int, uintptr_t, uintptr_t, const KernelConfig*>;

// The same in fp8, column-major: b, ldb, n, bias (0: none), out, config, scales, accumulation
using ScaledWeightTuple = std::tuple<uintptr_t, int64_t, int, uintptr_t, uintptr_t,
                                     const KernelConfig*, WeightScalesTuple, agmm::Accumulation>;

// kind, and for SM push: parts, columns of a chunk, first peers, head chunks
using TransportTuple = std::tuple<int, int, int, int, int>;

AsyncInputArgs args_of(const agmm::Problem& problem, const KernelConfig& config, uintptr_t a,
                       uintptr_t b, int64_t ldb, uintptr_t out, uintptr_t bias, uintptr_t signals,
                       int chunks_m, int chunks_k, int pivot, int rank, int sm_count) {
  AsyncInputArgs args;
  args.problem = problem;
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
  return args;
}

void async_input_mm(uintptr_t a, uintptr_t b, uintptr_t out, uintptr_t bias, int m, int n, int k,
                    DType dtype, bool b_column_major, int64_t ldb, uintptr_t signals, int chunks_m,
                    int chunks_k, int pivot, const KernelConfig& config, int rank, int sm_count,
                    uintptr_t tile_times, uintptr_t split_scratch, uintptr_t stream) {
  AsyncInputArgs args = args_of({m, n, k, dtype, layout(b_column_major)}, config, a, b, ldb, out,
                                bias, signals, chunks_m, chunks_k, pivot, rank, sm_count);
  args.tile_times = pointer<agmm::TileTimes>(tile_times);
  args.split_scratch = pointer<void>(split_scratch);
  agmm::prepare_async_input_mm(args).launch(pointer<void>(stream));
}

void async_input_scaled_mm(uintptr_t a, uintptr_t b, uintptr_t out, uintptr_t bias,
                           const ScalesTuple& scales, int m, int n, int k, DType dtype,
                           agmm::Accumulation accumulation, int64_t ldb, uintptr_t signals,
                           int chunks_m, int pivot, const KernelConfig& config, int rank,
                           int sm_count, uintptr_t stream) {
  AsyncInputArgs args = args_of({m, n, k, dtype, agmm::BLayout::ColumnMajor, accumulation}, config,
                                a, b, ldb, out, bias, signals, chunks_m, 1, pivot, rank, sm_count);
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

void bind_gather(py::module_& m) {
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
  py::class_<FusedAllGatherMatmul, agmm::Held<FusedAllGatherMatmul>>(
      m, "CudaWorkspace", "Gather buffers, signals and credits of one group.")
      .def(py::init(&agmm::make_workspace<FusedAllGatherMatmul>), py::arg("rank"), py::arg("bases"),
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
}
