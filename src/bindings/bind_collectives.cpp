// This file binds the collectives on CUDA.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "agmm/collectives.hpp"
#include "bindings/bindings.hpp"
#include "bindings/matmul_problem.hpp"
#include "order/streaming.hpp"
#include "symmetric/collective_layout.hpp"

namespace py = pybind11;

namespace {

using agmm::Carrier;
using agmm::Collective;
using agmm::CollectiveElement;
using agmm::CollectiveLayout;
using agmm::CollectiveMethod;
using agmm::CollectiveOp;
using agmm::Collectives;

Collective described(CollectiveOp op, CollectiveMethod method, CollectiveElement element,
                     uintptr_t in, uintptr_t out, int64_t count, int ctas) {
  Collective what;
  what.op = op;
  what.method = method;
  what.element = element;
  what.in = reinterpret_cast<void const*>(in);
  what.out = reinterpret_cast<void*>(out);
  what.count = count;
  what.ctas = ctas;
  what.limit_ns = agmm::limit_ns();
  return what;
}

bool call(Collectives& collectives, CollectiveOp op, CollectiveMethod method,
          CollectiveElement element, uintptr_t in, uintptr_t out, int64_t count, bool is_average,
          uintptr_t stream, int ctas) {
  Collective what = described(op, method, element, in, out, count, ctas);
  what.is_average = is_average;
  return collectives(what, reinterpret_cast<void*>(stream));
}

bool all_reduce_rms_norm(Collectives& collectives, CollectiveMethod method,
                         CollectiveElement element, uintptr_t in, uintptr_t residual,
                         uintptr_t weight, uintptr_t normed, uintptr_t out, int64_t count,
                         int64_t row, double eps, uintptr_t stream, int ctas) {
  agmm::ResidualNorm norm;
  norm.residual = reinterpret_cast<void const*>(residual);
  norm.weight = reinterpret_cast<void const*>(weight);
  norm.normed = reinterpret_cast<void*>(normed);
  norm.row = row;
  norm.eps = static_cast<float>(eps);
  return collectives(described(CollectiveOp::AllReduce, method, element, in, out, count, ctas),
                     norm, reinterpret_cast<void*>(stream));
}

bool all_gather_two(Collectives& collectives, CollectiveMethod method, uintptr_t in, uintptr_t out,
                    int64_t nbytes, uintptr_t second, uintptr_t second_out, int64_t second_nbytes,
                    uintptr_t stream, int ctas) {
  agmm::Beside beside;
  beside.in = reinterpret_cast<void const*>(second);
  beside.out = reinterpret_cast<void*>(second_out);
  beside.count = second_nbytes;
  return collectives(
      described(CollectiveOp::AllGather, method, CollectiveElement::Byte, in, out, nbytes, ctas),
      beside, reinterpret_cast<void*>(stream));
}

bool meet(Collectives& collectives, CollectiveMethod method, uintptr_t in, uintptr_t out,
          std::string agreed, std::string words, uintptr_t stream) {
  agmm::Meeting meeting;
  meeting.method = method;
  meeting.in = reinterpret_cast<void const*>(in);
  meeting.out = reinterpret_cast<void*>(out);
  meeting.agreed = std::move(agreed);
  meeting.words = std::move(words);
  meeting.limit_ns = agmm::limit_ns();
  return collectives(meeting, reinterpret_cast<void*>(stream));
}

/// The operands of a streamed sum, but for what a norm has.
agmm::StreamedSum streamed_sum(const agmm::MatmulProblem& problem, agmm::Addresses& at) {
  agmm::StreamedSum call;
  call.matmul = problem.args;
  call.matmul.operands.a = at.next<void>();
  call.matmul.operands.b = at.next<void>();
  call.matmul.operands.bias = at.next<void>();
  call.residual = at.next<void>();
  call.matmul.operands.out = at.next<void>();
  call.matmul.limit_ns = agmm::limit_ns();
  return call;
}

bool streamed_all_reduce(Collectives& collectives, CollectiveMethod method,
                         const agmm::MatmulProblem& problem,
                         const std::vector<uintptr_t>& addresses, uintptr_t stream, double eps,
                         bool of_blocks) {
  agmm::Addresses at(addresses, 8);
  agmm::StreamedSum call = streamed_sum(problem, at);
  call.method = method;
  call.norm.weight = at.next<void>();
  call.norm.normed = at.next<void>();
  call.norm.scales = at.next<float>();
  call.norm.eps = static_cast<float>(eps);
  call.norm.of_blocks = of_blocks;
  return collectives(call, reinterpret_cast<void*>(stream));
}

bool streamed_reduce_scatter(Collectives& collectives, const agmm::MatmulProblem& problem,
                             const std::vector<uintptr_t>& addresses, bool is_average,
                             uintptr_t stream) {
  agmm::Addresses at(addresses, 5);
  agmm::StreamedSum call = streamed_sum(problem, at);
  call.op = CollectiveOp::ReduceScatter;
  call.is_average = is_average;
  return collectives(call, reinterpret_cast<void*>(stream));
}

bool gathered_matmul(Collectives& collectives, CollectiveMethod method,
                     const agmm::MatmulProblem& problem, const std::vector<uintptr_t>& addresses,
                     int64_t nbytes, uintptr_t stream) {
  agmm::Addresses at(addresses, 5);
  agmm::GatheredMatmul call;
  call.gather =
      described(CollectiveOp::AllGather, method, CollectiveElement::Byte, 0, 0, nbytes, 0);
  call.gather.in = at.next<void>();
  call.gather.out = at.next<void>();
  call.matmul = problem.args;
  call.matmul.operands.a = call.gather.out;
  call.matmul.operands.b = at.next<void>();
  call.matmul.operands.bias = at.next<void>();
  call.matmul.operands.out = at.next<void>();
  call.matmul.limit_ns = agmm::limit_ns();
  return collectives(call, reinterpret_cast<void*>(stream));
}

void relay_over(Collectives& collectives, const std::vector<std::array<int32_t, 3>>& moves) {
  std::vector<agmm::RelayMove> found;
  for (const auto& [owner, source, target] : moves) found.push_back({owner, source, target});
  collectives.relay_over(found);
}

}  // namespace

void bind_collectives(py::module_& m) {
  py::enum_<CollectiveOp>(m, "CollectiveOp")
      .value("all_gather", CollectiveOp::AllGather)
      .value("reduce_scatter", CollectiveOp::ReduceScatter)
      .value("all_reduce", CollectiveOp::AllReduce);
  py::enum_<CollectiveMethod>(m, "CollectiveMethod",
                              "How the data of a collective travels, and in how many steps.")
      .value("one_shot", CollectiveMethod::OneShot)
      .value("two_shot", CollectiveMethod::TwoShot)
      .value("blocks", CollectiveMethod::Blocks)
      .value("relayed", CollectiveMethod::Relayed);
  py::enum_<CollectiveElement>(
      m, "CollectiveElement",
      "The element types of a collective, by torch's names; bytes can only be gathered.")
      .value("uint8", CollectiveElement::Byte)
      .value("bfloat16", CollectiveElement::BFloat16)
      .value("float16", CollectiveElement::Float16)
      .value("float32", CollectiveElement::Float32);
  m.attr("MAX_COLLECTIVE_RANKS") = agmm::kMaxExchangeRanks;
  m.attr("MAX_COLLECTIVE_CTAS") = agmm::kMaxExchangeCtas;
  m.attr("COLLECTIVE_KEPT_WORDS") = agmm::kMaxExchangeCtas + agmm::kNormCounters;
  m.attr("MAX_NORM_ROW_BYTES") = agmm::kMaxNormRowBytes;
  m.def(
      "streams_sum",
      [](CollectiveMethod method, int64_t m, int n, std::size_t slot_bytes, int world_size,
         bool by_rows) {
        const CollectiveLayout layout(slot_bytes, world_size);
        const bool has_owners = method == CollectiveMethod::TwoShot;
        const int64_t rows = by_rows ? (m + world_size - 1) / world_size : m;
        const int owners = has_owners && !by_rows ? world_size : 1;
        return agmm::streamed_packets(rows, n, owners) <= int64_t(layout.groups(Carrier::Packets));
      },
      py::arg("method"), py::arg("m"), py::arg("n"), py::arg("slot_bytes"), py::arg("world_size"),
      py::arg("by_rows") = false,
      "Whether streamed_all_reduce, in one shot or two, has room for a sum of so many rows and "
      "columns. by_rows: each rank sums neighbouring rows, as a scatter has it, and two shots with "
      "a norm.");
  m.attr("MAX_STREAMED_NORM_COLUMNS") = agmm::kMaxStreamedNormColumns;
  m.attr("COLLECTIVE_PACKET_BYTES") = CollectiveLayout::kPacketBytes;  // of a slot
  m.def(
      "capture_of",
      [](uintptr_t stream) { return agmm::capture_of(reinterpret_cast<void*>(stream)); },
      py::arg("stream"), "The id of the capture that a stream is in; 0 where there is none.");
  m.def(
      "stream_id",
      [](uintptr_t stream) { return agmm::stream_id(reinterpret_cast<void*>(stream)); },
      py::arg("stream"),
      "The id of a stream. After the stream is destroyed another one may get its handle, but not "
      "its id.");
  m.def(
      "collective_bytes",
      [](CollectiveMethod method, std::size_t slot_bytes, int world_size) {
        const bool blocks = method == CollectiveMethod::Blocks;
        const CollectiveLayout layout(slot_bytes, world_size);
        const std::size_t bytes = blocks ? agmm::kGroupBytes : agmm::kPacketDataBytes;
        return layout.groups(blocks ? Carrier::Blocks : Carrier::Packets) * bytes;
      },
      py::arg("method"), py::arg("slot_bytes"), py::arg("world_size"),
      "Returns the bytes that a rank can send to another in one step of a launch; a larger call "
      "takes several launches.");
  py::class_<Collectives, agmm::Held<Collectives>>(
      m, "CudaCollectives", "Slots of one group for all_gather, reduce_scatter and all_reduce.")
      .def(py::init(&agmm::make_workspace<Collectives>), py::arg("rank"), py::arg("bases"),
           py::arg("slot_bytes"), py::arg("reserved_sms") = 0)
      .def_static(
          "workspace_bytes",
          [](std::size_t slot_bytes, int world_size) {
            return CollectiveLayout(slot_bytes, world_size).bytes();
          },
          py::arg("slot_bytes"), py::arg("world_size"))
      .def_static(
          "words_offset",
          [](std::size_t slot_bytes, int world_size) {
            return CollectiveLayout(slot_bytes, world_size).words_offset();
          },
          py::arg("slot_bytes"), py::arg("world_size"), "Where the words begin, in bytes.")
      .def_static(
          "credit_words",
          [](int world_size) { return CollectiveLayout(0, world_size).credit_words(); },
          py::arg("world_size"),
          "Indices from words_offset of the words that are 1 before the first call. There are "
          "none: all words are 0.")
      .def_property_readonly("slot_bytes", &Collectives::slot_bytes)
      .def("precede", &agmm::precede<Collectives>, py::arg("stream"), agmm::kPrecedeDoc)
      .def("call", &call, py::arg("op"), py::arg("method"), py::arg("element"), py::arg("input"),
           py::arg("out"), py::arg("count"), py::arg("is_average"), py::arg("stream"),
           py::arg("ctas") = 0, py::call_guard<py::gil_scoped_release>(),
           "Enqueues a collective. count: the number of elements of the input or, for "
           "reduce_scatter, of out. ctas: the number of CTAs of a launch, alike on all ranks; 0 "
           "chooses it by size. Returns whether the stream is being captured.")
      .def("all_reduce_rms_norm", &all_reduce_rms_norm, py::arg("method"), py::arg("element"),
           py::arg("input"), py::arg("residual"), py::arg("weight"), py::arg("normed"),
           py::arg("out"), py::arg("count"), py::arg("row"), py::arg("eps"), py::arg("stream"),
           py::arg("ctas") = 0, py::call_guard<py::gil_scoped_release>(),
           "Enqueues an all_reduce whose sum is added to the residual, which gives out, and "
           "normalised, which gives normed. Returns whether the stream is being captured.")
      .def("streamed_all_reduce", &streamed_all_reduce, py::arg("method"), py::arg("problem"),
           py::arg("addresses"), py::arg("stream"), py::arg("eps") = 0.0,
           py::arg("of_blocks") = false, py::call_guard<py::gil_scoped_release>(),
           "Enqueues out = all_reduce(a @ b) (+ bias) (+ residual) of few rows as one kernel, a "
           "streaming one, which may norm the rows. addresses: the addresses of a, b, bias, "
           "residual, out, the norm's weight, the normed rows and their scales, which make them "
           "fp8; 0 where there is none. of_blocks: a scale is that of 128 columns, not of a row. "
           "Returns whether the stream is being captured.")
      .def(
          "streamed_reduce_scatter", &streamed_reduce_scatter, py::arg("problem"),
          py::arg("addresses"), py::arg("is_average"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>(),
          "Enqueues out = reduce_scatter(a @ b) (+ bias) (+ residual) of few rows as one kernel, a "
          "streaming one. addresses: the addresses of a, b, bias, residual and out; 0 where there "
          "is none. Returns whether the stream is being captured.")
      .def("gathered_matmul", &gathered_matmul, py::arg("method"), py::arg("problem"),
           py::arg("addresses"), py::arg("nbytes"), py::arg("stream"),
           py::call_guard<py::gil_scoped_release>(),
           "Enqueues an all_gather of so many bytes of each rank, and the product of the gathered "
           "rows by a streaming kernel, which reads its weight meanwhile. addresses: the addresses "
           "of the shard, the gathered rows, the weight, the bias and the product; 0 where there "
           "is none. Returns whether the stream is being captured.")
      .def("all_gather_two", &all_gather_two, py::arg("method"), py::arg("input"), py::arg("out"),
           py::arg("nbytes"), py::arg("second"), py::arg("second_out"), py::arg("second_nbytes"),
           py::arg("stream"), py::arg("ctas") = 0, py::call_guard<py::gil_scoped_release>(),
           "Enqueues an all_gather of two tensors, in one launch where both find room in a slot. "
           "Returns whether the stream is being captured.")
      .def("meet", &meet, py::arg("method"), py::arg("input"), py::arg("out"), py::arg("agreed"),
           py::arg("words"), py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
           "Enqueues a call without elements, which ends when all ranks have come to it. input: a "
           "word of device memory; out: one for each rank. agreed: what all ranks have to agree "
           "on; words: the call, for messages. Returns whether the stream is being captured.")
      .def("relay_over", &relay_over, py::arg("moves"), py::call_guard<py::gil_scoped_release>(),
           "Sets the routes of the method relayed: (owner, source, target) of each transfer.");
}
