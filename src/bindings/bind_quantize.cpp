// agmm._core: dynamic quantisation to fp8 on CUDA.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "ops/quantize.hpp"

namespace py = pybind11;

namespace {

using agmm::Quantize;
using agmm::QuantizedFrom;
using agmm::QuantizedTo;
using agmm::ScaleOf;

void quantize(uintptr_t x, QuantizedFrom from, QuantizedTo to, ScaleOf scale_of, int64_t rows,
              int columns, bool power_of_2, uintptr_t values, uintptr_t scales, uintptr_t amax,
              bool has_amax, uintptr_t stream) {
  Quantize args;
  args.x = reinterpret_cast<void const*>(x);
  args.from = from;
  args.to = to;
  args.scale_of = scale_of;
  args.rows = rows;
  args.columns = columns;
  args.power_of_2 = power_of_2;
  args.values = reinterpret_cast<void*>(values);
  args.scales = reinterpret_cast<float*>(scales);
  args.amax = reinterpret_cast<float*>(amax);
  args.has_amax = has_amax;
  agmm::quantize(args, reinterpret_cast<void*>(stream));
}

void amax_of_matrix(uintptr_t x, QuantizedFrom from, int64_t rows, int columns, uintptr_t amax,
                    uintptr_t stream) {
  Quantize args;
  args.x = reinterpret_cast<void const*>(x);
  args.from = from;
  args.scale_of = ScaleOf::Matrix;
  args.rows = rows;
  args.columns = columns;
  args.amax = reinterpret_cast<float*>(amax);
  agmm::amax_of_matrix(args, reinterpret_cast<void*>(stream));
}

}  // namespace

void bind_quantize(py::module_& m) {
  py::enum_<QuantizedFrom>(m, "QuantizedFrom", "By torch's names.")
      .value("bfloat16", QuantizedFrom::BFloat16)
      .value("float16", QuantizedFrom::Float16)
      .value("float32", QuantizedFrom::Float32);
  py::enum_<QuantizedTo>(m, "QuantizedTo", "By torch's names.")
      .value("float8_e4m3fn", QuantizedTo::E4M3)
      .value("float8_e5m2", QuantizedTo::E5M2);
  py::enum_<ScaleOf>(m, "ScaleOf", "What a scale covers.")
      .value("row", ScaleOf::Row)
      .value("block", ScaleOf::Block)
      .value("matrix", ScaleOf::Matrix);
  m.attr("QUANTIZE_MULTIPLE") = agmm::kQuantizeMultiple;
  m.attr("QUANTIZE_BLOCK") = agmm::kQuantizeBlock;
  m.def("quantize", &quantize, py::arg("x"), py::arg("from_dtype"), py::arg("to_dtype"),
        py::arg("scale_of"), py::arg("rows"), py::arg("columns"), py::arg("power_of_2"),
        py::arg("values"), py::arg("scales"), py::arg("amax"), py::arg("has_amax"),
        py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
        "Enqueues the quantisation of a contiguous matrix to fp8 with dynamic scales. amax: a "
        "float32 where a scale covers the matrix, with has_amax that to use, else overwritten.");
  m.def("amax_of_matrix", &amax_of_matrix, py::arg("x"), py::arg("from_dtype"), py::arg("rows"),
        py::arg("columns"), py::arg("amax"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>(),
        "Enqueues the search for the largest absolute value of a contiguous matrix, in float32.");
}
