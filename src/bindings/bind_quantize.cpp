// This file binds what the CUDA core does with matrices beside matmuls: dynamic quantisation to
// fp8, sums in the order of the ranks, and gradients through activations.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/formats.hpp"
#include "ops/activation_gradient.hpp"
#include "ops/ordered_sum.hpp"
#include "ops/quantize.hpp"
#include "ops/row_route.hpp"

namespace py = pybind11;

namespace {

using agmm::OrderedSum;
using agmm::Quantize;
using agmm::QuantizedFrom;
using agmm::QuantizedTo;
using agmm::ScaleOf;
using agmm::SummedElement;

void quantize(uintptr_t x, QuantizedFrom from, QuantizedTo to, ScaleOf scale_of, int64_t rows,
              int columns, bool power_of_2, uintptr_t values, int64_t leading, uintptr_t scales,
              uintptr_t amax, bool has_amax, uintptr_t stream) {
  Quantize args;
  args.x = reinterpret_cast<void const*>(x);
  args.from = from;
  args.to = to;
  args.scale_of = scale_of;
  args.rows = rows;
  args.columns = columns;
  args.power_of_2 = power_of_2;
  args.values = reinterpret_cast<void*>(values);
  args.leading = leading;
  args.scales = reinterpret_cast<float*>(scales);
  args.amax = reinterpret_cast<float*>(amax);
  args.has_amax = has_amax;
  agmm::quantize(args, reinterpret_cast<void*>(stream));
}

void find_amax(uintptr_t x, QuantizedFrom from, ScaleOf scale_of, int64_t rows, int columns,
               uintptr_t amax, uintptr_t stream) {
  Quantize args;
  args.x = reinterpret_cast<void const*>(x);
  args.from = from;
  args.scale_of = scale_of;
  args.rows = rows;
  args.columns = columns;
  args.amax = reinterpret_cast<float*>(amax);
  agmm::find_amax(args, reinterpret_cast<void*>(stream));
}

void transpose_bytes(uintptr_t x, int64_t rows, int columns, uintptr_t values, int64_t leading,
                     uintptr_t stream) {
  Quantize args;
  args.x = reinterpret_cast<void const*>(x);
  args.rows = rows;
  args.columns = columns;
  args.values = reinterpret_cast<void*>(values);
  args.leading = leading;
  agmm::transpose_bytes(args, reinterpret_cast<void*>(stream));
}

void ordered_sum(uintptr_t partials, int64_t stride, SummedElement element, int count, int64_t rows,
                 int columns, int divisor, uintptr_t bias, uintptr_t residual, uintptr_t out,
                 bool is_wide, uintptr_t stream) {
  OrderedSum args;
  args.partials = reinterpret_cast<void const*>(partials);
  args.stride = stride;
  args.element = element;
  args.count = count;
  args.rows = rows;
  args.columns = columns;
  args.divisor = divisor;
  args.bias = reinterpret_cast<void const*>(bias);
  args.residual = reinterpret_cast<void const*>(residual);
  args.out = reinterpret_cast<void*>(out);
  args.is_wide = is_wide;
  agmm::ordered_sum(args, reinterpret_cast<void*>(stream));
}

/// A matrix in Python: its address, 0 for none, and the elements from one row to the next.
using RowsTuple = std::tuple<uintptr_t, int64_t>;

/// What both gradients are quantised to in Python: dtype, what a scale covers, whether factors are
/// powers of two, the addresses of values and scales.
using QuantizedTuple = std::tuple<QuantizedTo, ScaleOf, bool, uintptr_t, uintptr_t>;

void activation_gradient(std::string const& activation, agmm::DType dtype, int64_t rows,
                         int columns, std::vector<RowsTuple> const& matrices,
                         std::optional<QuantizedTuple> const& quantized, uintptr_t stream) {
  agmm::NamedEpilogue const named(activation);
  agmm::ActivationGradient args;
  args.activation = named.activation;
  args.dtype = dtype;
  args.rows = rows;
  args.columns = columns;
  agmm::Rows* const of_one[] = {&args.grad_out, &args.gate, &args.grad_gate};
  agmm::Rows* const of_two[] = {&args.grad_out, &args.gate, &args.up, &args.grad_gate,
                                &args.grad_up};
  bool const is_gated = named.epilogue == agmm::Epilogue::Gate;
  agmm::Rows* const* const wanted = is_gated ? of_two : of_one;
  std::size_t const count = is_gated ? std::size(of_two) : std::size(of_one);
  if (named.epilogue == agmm::Epilogue::Bias || matrices.size() != count) {
    throw std::invalid_argument("matrices: found " + std::to_string(matrices.size()) + " with '" +
                                activation + "', wanted 3 of an activation, 5 of a gated one");
  }
  for (std::size_t i = 0; i < count; ++i) {
    auto const [at, stride] = matrices[i];
    *wanted[i] = {reinterpret_cast<void*>(at), stride};
  }
  if (quantized) {
    auto const [to, scale_of, power_of_2, values, scales] = *quantized;
    args.to = to;
    args.scale_of = scale_of;
    args.power_of_2 = power_of_2;
    args.values = reinterpret_cast<void*>(values);
    args.scales = reinterpret_cast<float*>(scales);
  }
  agmm::activation_gradient(args, reinterpret_cast<void*>(stream));
}

}  // namespace

void bind_quantize(py::module_& m) {
  py::enum_<QuantizedFrom>(m, "QuantizedFrom",
                           "The element types that can be quantised, by torch's names.")
      .value("bfloat16", QuantizedFrom::BFloat16)
      .value("float16", QuantizedFrom::Float16)
      .value("float32", QuantizedFrom::Float32);
  py::enum_<QuantizedTo>(m, "QuantizedTo",
                         "The element types of quantised values, by torch's names.")
      .value("float8_e4m3fn", QuantizedTo::E4M3)
      .value("float8_e5m2", QuantizedTo::E5M2);
  py::enum_<ScaleOf>(m, "ScaleOf", "What a scale covers.")
      .value("row", ScaleOf::Row)
      .value("block", ScaleOf::Block)
      .value("matrix", ScaleOf::Matrix)
      .value("column", ScaleOf::Column)
      .value("square", ScaleOf::Square);
  m.attr("QUANTIZE_MULTIPLE") = agmm::kQuantizeMultiple;
  m.attr("QUANTIZE_BLOCK") = agmm::kQuantizeBlock;
  m.def(
      "load_quantizers",
      [] {
        agmm::load_quantizers();
        agmm::load_activation_gradients();
        agmm::load_row_routes();
      },
      py::call_guard<py::gil_scoped_release>(),
      "Loads the kernels that quantise, and those of activation_gradient and route_rows, on the "
      "current device, which waits for it.");
  m.def("quantize", &quantize, py::arg("x"), py::arg("from_dtype"), py::arg("to_dtype"),
        py::arg("scale_of"), py::arg("rows"), py::arg("columns"), py::arg("power_of_2"),
        py::arg("values"), py::arg("leading"), py::arg("scales"), py::arg("amax"),
        py::arg("has_amax"), py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
        "Enqueues the quantisation of a contiguous matrix to fp8 with dynamic scales. leading: not "
        "0 only where each column has a scale: then values are the transpose, [columns, leading]. "
        "amax: one float32 for each scale where the scales are of the matrix or of columns; "
        "has_amax says whether they are to be used, otherwise they are overwritten.");
  m.def("find_amax", &find_amax, py::arg("x"), py::arg("from_dtype"), py::arg("scale_of"),
        py::arg("rows"), py::arg("columns"), py::arg("amax"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>(),
        "Enqueues the search for the largest absolute values of a contiguous matrix or of each of "
        "its columns, in float32.");
  m.def("transpose_bytes", &transpose_bytes, py::arg("x"), py::arg("rows"), py::arg("columns"),
        py::arg("values"), py::arg("leading"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>(),
        "Enqueues the transpose of a contiguous matrix of bytes to [columns, leading], filled up "
        "with zeros.");
  py::enum_<SummedElement>(m, "SummedElement",
                           "The element types of partial sums, by torch's names.")
      .value("bfloat16", SummedElement::BFloat16)
      .value("float16", SummedElement::Float16)
      .value("float32", SummedElement::Float32)
      .value("float64", SummedElement::Float64);
  m.def("load_ordered_sums", &agmm::load_ordered_sums, py::call_guard<py::gil_scoped_release>(),
        "Loads the kernels of ordered_sum on the current device, which waits for it.");
  m.def("ordered_sum", &ordered_sum, py::arg("partials"), py::arg("stride"), py::arg("element"),
        py::arg("count"), py::arg("rows"), py::arg("columns"), py::arg("divisor"), py::arg("bias"),
        py::arg("residual"), py::arg("out"), py::arg("is_wide"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>(),
        "Enqueues the sum of contiguous matrices in their order, in float32 (float64 for float64), "
        "divided, with bias and residual added, rounded once. stride: bytes from one matrix to the "
        "next. bias, residual: 0 for none. is_wide: out is float32 (float64 for float64).");
  m.attr("GRADIENT_MULTIPLE") = agmm::kGradientMultiple;
  m.attr("MOST_QUANTIZED_COLUMNS") = agmm::kMostQuantizedColumns;
  m.def(
      "activation_gradient", &activation_gradient, py::arg("activation"), py::arg("dtype"),
      py::arg("rows"), py::arg("columns"), py::arg("matrices"), py::arg("quantized"),
      py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
      "Enqueues the gradients of products for that of their activation, in float32, rounded once. "
      "matrices: address and stride of rows of the result's gradient, of gate and up, and of "
      "their gradients; without a gate of the result's gradient, the product and its gradient. "
      "quantized: dtype, what a scale covers, whether to powers of two, addresses of values and "
      "scales of both gradients side by side; None for none.");
}
