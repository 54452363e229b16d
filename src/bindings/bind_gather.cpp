// This file binds all-gather + matmul on CUDA. Every build has the functions; without CUDA they
// refuse.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "agmm/fused_all_gather_matmul.hpp"
#include "agmm/packed_matmul.hpp"
#include "bindings/bindings.hpp"
#include "bindings/formats.hpp"
#include "bindings/matmul_problem.hpp"
#include "gemm/tile_times.hpp"
#include "symmetric/layout.hpp"
#include "testing/fault.hpp"

namespace py = pybind11;

namespace {

using agmm::Addresses;
using agmm::AsyncInputArgs;
using agmm::BTuple;
using agmm::ChunksTuple;
using agmm::DType;
using agmm::Format;
using agmm::FusedAllGatherMatmul;
using agmm::KernelConfig;
using agmm::layout;
using agmm::limit_ns;
using agmm::MatmulProblem;
using agmm::MoreTuple;
using agmm::NamedEpilogue;
using agmm::pointer;
using agmm::SizeTuple;
using agmm::WorkspaceLayout;

// The tuple holds the kind of transport and, for SM push, the parts, the columns of a chunk, the
// first peers and the head chunks.
using TransportTuple = std::tuple<int, int, int, int, int>;

std::string b_in_words(int k, int n, agmm::BLayout b_layout) {
  return "B [" + std::to_string(k) + ", " + std::to_string(n) + "] " +
         (b_layout == agmm::BLayout::RowMajor ? "row-major" : "column-major");
}

void async_input_mm(const MatmulProblem& problem, const std::vector<uintptr_t>& addresses,
                    uintptr_t stream, uintptr_t tile_times, uintptr_t split_scratch,
                    bool weight_is_new) {
  AsyncInputArgs args = problem.args;
  args.weight_is_new = weight_is_new;
  const bool is_gated = agmm::columns_per_out(args.problem.epilogue) == 2;
  const bool is_quantized = agmm::quantizes(args.problem.epilogue);
  const std::size_t of_more = 4 * std::size_t(args.operands.more_count);
  Addresses at(addresses, 7 + (is_gated ? 3 : 0) + (is_quantized ? 2 : 0) + of_more);
  args.operands.a = at.next<void>();
  args.operands.b = at.next<void>();
  args.operands.scales.a = at.next<float>();
  args.operands.scales.b = at.next<float>();
  args.operands.bias = at.next<void>();
  args.operands.out = at.next<void>();
  args.arrival.signals = at.next<uint32_t>();
  if (is_gated) {
    args.operands.b_up = at.next<void>();
    args.operands.bias_up = at.next<void>();
    args.operands.scales.b_up = at.next<float>();
  }
  if (is_quantized) {
    args.operands.out_scales = at.next<float>();
    args.operands.given_out_scale = at.next<float>();
  }
  for (int i = 0; i < args.operands.more_count; ++i) {
    agmm::MoreWeight& weight = args.operands.more[i];
    weight.b = at.next<void>();
    weight.scales = at.next<float>();
    weight.bias = at.next<void>();
    weight.out = at.next<void>();
  }
  args.limit_ns = limit_ns();
  args.tile_times = pointer<agmm::TileTimes>(tile_times);
  args.split_scratch = pointer<void>(split_scratch);
  agmm::prepare_async_input_mm(args).launch(pointer<void>(stream));
}

void packed_matmul(const SizeTuple& size, int groups, int splits,
                   const std::vector<uintptr_t>& addresses, uintptr_t stream, int sm_count) {
  agmm::PackedMatmul call;
  std::tie(call.m, call.n, call.k) = size;
  call.groups = groups;
  call.splits = splits;
  call.sm_count = sm_count;
  Addresses at(addresses, 4);
  call.a = at.next<void>();
  call.b = at.next<void>();
  call.bias = at.next<void>();
  call.out = at.next<void>();
  agmm::packed_matmul(call, pointer<void>(stream));
}

/// One of the weights that share a gather, or two of them behind one gate.
struct GatherWeight {
  agmm::Weight weight;
  Format format;

  GatherWeight(int n, const BTuple& b, const Format& format_, const KernelConfig& config,
               const std::string& activation, int64_t up_leading, bool quantizes)
      : format(format_) {
    const agmm::Scales scales = format.scale_layout();
    const NamedEpilogue named(activation, quantizes);
    weight.epilogue = named.epilogue;
    weight.activation = named.activation;
    weight.ldb_up = up_leading;
    weight.n = named.columns_of_b(n);
    weight.b_layout = layout(b.first);
    weight.ldb = b.second;
    weight.config = config;
    weight.accumulation = format.accumulation;
    weight.scale_per_column = scales.b_per_column;
    weight.scale_k_stride = scales.b_k_stride;
    weight.scale_n_stride = scales.b_n_stride;
  }
};

/// An all-gather + matmul without the addresses of its tensors.
struct GatherProblem {
  agmm::Gather gather;
  std::vector<agmm::Weight> weights;

  GatherProblem(int rows, int k, const std::vector<GatherWeight>& given,
                const TransportTuple& transport) {
    int kind = 0;
    std::tie(kind, gather.push.parts, gather.push.chunk_columns, gather.push.first_peers,
             gather.push.head_chunks) = transport;
    gather.transport = static_cast<agmm::Transport>(kind);
    gather.rows = rows;
    gather.k = k;
    for (const GatherWeight& one : given) {
      const DType first = given.front().format.dtype;
      if (one.format.dtype != first) {
        throw std::invalid_argument(std::string("B: found ") + to_string(first) + " and " +
                                    to_string(one.format.dtype) + ", wanted one kind of elements");
      }
      weights.push_back(one.weight);
    }
    if (given.empty()) return;  // which the call refuses
    const Format& format = given.front().format;
    gather.dtype = format.dtype;
    if (format.scales) gather.scale_columns = format.scales->a_columns;
  }

  std::string str() const {
    std::string text = "GatherProblem(A_shard [" + std::to_string(gather.rows) + ", " +
                       std::to_string(gather.k) + "] " + to_string(gather.dtype);
    if (is_fp8(gather.dtype)) {
      text += " with " + std::to_string(gather.scale_columns) + " scales for a row";
    }
    for (const agmm::Weight& weight : weights) {
      text += ", " + b_in_words(gather.k, weight.n, weight.b_layout);
      if (is_fp8(gather.dtype)) text += std::string(" ") + to_string(weight.accumulation);
      if (weight.epilogue != agmm::Epilogue::Bias) {
        text += std::string(" ") + to_string(weight.epilogue);
      }
      text += " by " + agmm::in_words(weight.config);
    }
    return text + ")";
  }
};

bool is_gated(const agmm::Weight& weight) { return agmm::columns_per_out(weight.epilogue) == 2; }
bool is_quantized(const agmm::Weight& weight) { return agmm::quantizes(weight.epilogue); }

bool all_gather_matmul(FusedAllGatherMatmul& op, const GatherProblem& problem,
                       const std::vector<uintptr_t>& addresses, uintptr_t stream,
                       uintptr_t tile_times) {
  agmm::Gather gather = problem.gather;
  std::vector<agmm::Weight> weights = problem.weights;
  const std::size_t gates = std::count_if(weights.begin(), weights.end(), is_gated);
  const std::size_t quantized = std::count_if(weights.begin(), weights.end(), is_quantized);
  Addresses at(addresses, 4 + 4 * weights.size() + 3 * gates + 2 * quantized);
  gather.a_shard = at.next<void>();
  gather.scales = at.next<float>();
  gather.a_out = at.next<void>();
  gather.scales_out = at.next<float>();
  gather.limit_ns = limit_ns();
  for (agmm::Weight& weight : weights) {
    weight.b = at.next<void>();
    weight.scales = at.next<float>();
    weight.bias = at.next<void>();
    weight.out = at.next<void>();
    if (!is_gated(weight)) continue;
    weight.b_up = at.next<void>();
    weight.bias_up = at.next<void>();
    weight.scales_up = at.next<float>();
    if (!is_quantized(weight)) continue;
    weight.out_scales = at.next<float>();
    weight.given_out_scale = at.next<float>();
  }
  return op(gather, weights, pointer<void>(stream), pointer<agmm::TileTimes>(tile_times));
}

}  // namespace

void bind_gather(py::module_& m) {
  py::class_<MatmulProblem>(m, "MatmulProblem",
                            "A matmul without its tensors, made once for calls of one kind.")
      .def(py::init<const SizeTuple&, const BTuple&, const Format&, const KernelConfig&,
                    const ChunksTuple&, int, int, const std::string&, int64_t, bool,
                    const std::vector<MoreTuple>&>(),
           py::arg("size"), py::arg("b"), py::arg("format"), py::arg("config"),
           py::arg("chunks") = ChunksTuple(1, 1, 0), py::arg("rank") = 0, py::arg("sm_count") = 0,
           py::arg("activation") = "", py::arg("up_leading") = 0, py::arg("quantizes") = false,
           py::arg("more") = std::vector<MoreTuple>(),
           "size: (M, N, K). b: (whether B is column-major, its leading dimension). chunks: how "
           "many chunks of A's rows and of its columns signals announce, and which is computed "
           "first. rank: the rank that the message of a wait that passes its limit names. "
           "sm_count: CTAs at most; 0: all multiprocessors. activation: what becomes of the sums, "
           "\"silu\" or, of two weights of N columns each, gate and up, \"silu_mul\"; empty: "
           "nothing. up_leading: the leading dimension of up, in the layout of b. quantizes: "
           "whether the result of a gate is fp8. more: the columns, the leading dimension and the "
           "strides of block scales of each weight beside the first, which a streaming kernel "
           "multiplies in the same launch.")
      .def("__repr__", &MatmulProblem::str);
  m.attr("MAX_STREAMED_WEIGHTS") = agmm::kMostStreamedWeights;
  m.def("async_input_mm", &async_input_mm, py::arg("problem"), py::arg("addresses"),
        py::arg("stream"), py::arg("tile_times") = 0, py::arg("split_scratch") = 0,
        py::arg("weight_is_new") = false, py::call_guard<py::gil_scoped_release>(),
        "Enqueues out = a @ b (+ bias). addresses: the addresses of a, b, scale_a, scale_b, bias, "
        "out and signals, of a gate those of up, its bias and scale_up too, of a quantised result "
        "its scales and the given one, of more weights b, scale_b, bias and out of each; 0 where "
        "there is none.");
  m.def(
      "packed_matmul", &packed_matmul, py::arg("size"), py::arg("groups"), py::arg("splits"),
      py::arg("addresses"), py::arg("stream"), py::arg("sm_count") = 0,
      py::call_guard<py::gil_scoped_release>(),
      "Enqueues out = a @ B (+ bias) of bfloat16 with a weight of 4 bits. size: (M, N, K). groups: "
      "how many 128 of K have, 1 or 4. addresses: those of a, the packed weight, bias and out.");
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
  py::class_<GatherWeight>(m, "GatherWeight", "A weight of a GatherProblem, without its tensors.")
      .def(py::init<int, const BTuple&, const Format&, const KernelConfig&, const std::string&,
                    int64_t, bool>(),
           py::arg("n"), py::arg("b"), py::arg("format"), py::arg("config"),
           py::arg("activation") = "", py::arg("up_leading") = 0, py::arg("quantizes") = false,
           "b: (whether B is column-major, its leading dimension). activation, up_leading, "
           "quantizes: as those of MatmulProblem.");
  py::class_<GatherProblem>(
      m, "GatherProblem",
      "An all-gather + matmul without its tensors, made once for calls of one kind.")
      .def(py::init<int, int, const std::vector<GatherWeight>&, const TransportTuple&>(),
           py::arg("rows"), py::arg("k"), py::arg("weights"),
           py::arg("transport") = TransportTuple(0, 0, 0, 0, 0),
           "rows: the number of rows of A_shard. transport: (0 push, 1 pull, 2 SM push; parts, "
           "columns of a chunk, first peers, head chunks).")
      .def("__repr__", &GatherProblem::str);
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
          "Indices from words_offset of the words that are 1 before the first call; the others are "
          "0.")
      .def_property_readonly("slot_bytes", &FusedAllGatherMatmul::slot_bytes)
      .def("precede", &agmm::precede<FusedAllGatherMatmul>, py::arg("stream"), agmm::kPrecedeDoc)
      .def("all_gather_matmul", &all_gather_matmul, py::arg("problem"), py::arg("addresses"),
           py::arg("stream"), py::arg("tile_times") = 0, py::call_guard<py::gil_scoped_release>(),
           "Enqueues gather and matmuls. addresses: the addresses of A_shard, scale_a, A and the "
           "gathered scale_a, then of B, scale_b, bias and out of each weight, of a gate up, its "
           "bias and scale_up too, of a quantised result its scales and the given one; 0 where "
           "there is none. "
           "tile_times: the address for the times of the first weight's tiles, or 0. Returns "
           "whether the stream is being captured.");
}
