// This file binds dynamic quantisation to fp8 on CUDA.
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
      .value("column", ScaleOf::Column);
  m.attr("QUANTIZE_MULTIPLE") = agmm::kQuantizeMultiple;
  m.attr("QUANTIZE_BLOCK") = agmm::kQuantizeBlock;
  m.def("load_quantizers", &agmm::load_quantizers, py::call_guard<py::gil_scoped_release>(),
        "Loads the kernels of these functions on the current device, which waits for it.");
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
}
