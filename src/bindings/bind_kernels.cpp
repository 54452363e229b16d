// This file binds shapes of kernels, and what the kernels of this build can do; without CUDA there
// are none.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agmm/async_input_mm.hpp"
#include "bindings/bindings.hpp"
#include "bindings/config_fields.hpp"
#include "bindings/formats.hpp"
#include "gemm/kernel_facts.hpp"
#include "order/clusters.hpp"
#include "order/streaming.hpp"

namespace py = pybind11;

namespace {

using agmm::DType;
using agmm::Format;
using agmm::KernelConfig;
using agmm::KernelFacts;

// The name that plans give a layout of B.
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

}  // namespace

void bind_kernels(py::module_& m) {
#ifdef AGMM_WITH_CUDA
  m.attr("cuda_built") = true;
#else
  m.attr("cuda_built") = false;
#endif
  py::enum_<DType>(
      m, "DType",
      "The element types of the kernels, by torch's names; an fp8 type names A's and B's.")
      .value("bfloat16", DType::BFloat16)
      .value("float16", DType::Float16)
      .value("float8_e4m3fn_float8_e4m3fn", DType::E4M3)
      .value("float8_e4m3fn_float8_e5m2", DType::E4M3ByE5M2)
      .value("float8_e5m2_float8_e4m3fn", DType::E5M2ByE4M3);
  py::enum_<agmm::Accumulation>(
      m, "Accumulation",
      "How sums of fp8 products are accumulated and scaled: by the tensor cores, promoted every "
      "128 of K, or promoted and multiplied with block scales.")
      .value("fast", agmm::Accumulation::Fast)
      .value("slow", agmm::Accumulation::Slow)
      .value("block", agmm::Accumulation::Block)
      .value("block_1x128", agmm::Accumulation::Block1x128);
  py::class_<KernelConfig> config(m, "KernelConfig",
                                  "A kernel shape and what may change from launch to launch.");
  agmm::bind_fields(config, std::make_index_sequence<agmm::kConfigFields>());
  config.def_property_readonly("name", [](const KernelConfig& c) { return c.shape.str(); })
      .def_property_readonly("can_split",
                             [](const KernelConfig& c) { return agmm::can_split(c.shape); })
      .def_property_readonly(
          "splits_in_cluster",
          [](const KernelConfig& c) { return agmm::splits_in_cluster(c.shape); },
          "Whether the CTAs that split K of a tile are a cluster, which takes no scratch memory.")
      .def_property_readonly(
          "can_push", [](const KernelConfig& c) { return agmm::can_push(c.shape); },
          "Whether the kernel has spare warps that send a shard (SM push).")
      .def_property_readonly(
          "is_streaming", [](const KernelConfig& c) { return agmm::is_streaming(c.shape); },
          "Whether it is a kernel for few rows, whose splits of K are those of "
          "`streaming_splits`.")
      .def_property_readonly("stores_A", &layouts_that_store_a,
                             "The layouts of B with which the kernel can store A.")
      .def("__repr__", &agmm::in_words);
  py::class_<agmm::ScaleLayout>(m, "ScaleLayout", "How the scales of fp8 operands lie.")
      .def(py::init([](bool a_per_row, int a_columns, bool b_per_column, int b_k_stride,
                       int b_n_stride) {
             return agmm::ScaleLayout{a_per_row, a_columns, b_per_column, b_k_stride, b_n_stride};
           }),
           py::arg("a_per_row"), py::arg("a_columns") = 1, py::arg("b_per_column") = false,
           py::arg("b_k_stride") = 0, py::arg("b_n_stride") = 0,
           "a_columns: the number of scales of a row of A. b_k_stride, b_n_stride: for block "
           "scales, the elements from one scale block of K or of columns to the next.")
      .def_readonly("a_per_row", &agmm::ScaleLayout::a_per_row)
      .def_readonly("a_columns", &agmm::ScaleLayout::a_columns)
      .def_readonly("b_per_column", &agmm::ScaleLayout::b_per_column)
      .def_readonly("b_k_stride", &agmm::ScaleLayout::b_k_stride)
      .def_readonly("b_n_stride", &agmm::ScaleLayout::b_n_stride);
  py::class_<Format>(
      m, "Format",
      "What the elements of a product are, and how its sums are accumulated and scaled.")
      .def(py::init<DType, agmm::Accumulation, std::optional<agmm::ScaleLayout>>(),
           py::arg("dtype"),
           py::arg_v("accumulation", agmm::Accumulation::Fast, "agmm._core.Accumulation.fast"),
           py::arg("scales") = py::none(),
           "scales: the layout of the scales, for fp8 operands alone.")
      .def_readonly("dtype", &Format::dtype)
      .def_readonly("accumulation", &Format::accumulation)
      .def_readonly("scales", &Format::scales)
      .def("__repr__", &Format::str);
  py::class_<KernelFacts>(m, "KernelFacts", "What a kernel of this build is for, and can do.")
      .def_property_readonly("op",
                             [](const KernelFacts& f) { return std::string(to_string(f.op)); })
      .def_property_readonly(
          "epilogue", [](const KernelFacts& f) { return std::string(to_string(f.epilogue)); })
      .def_property_readonly(
          "config",
          [](const KernelFacts& f) { return KernelConfig{f.shape, 1, agmm::Raster::AlongM}; },
          "The kernel's shape with the default order of tiles.")
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
  m.def("kernel_facts", &agmm::built_kernels,
        "One entry per kernel of this build: op, shape, dtype, layout of B, accumulation and "
        "epilogue; empty without CUDA.");
  m.def("streaming_splits", &agmm::streaming_splits, py::arg("n"), py::arg("k"),
        py::arg("element_bits") = 16,
        "The splits of K that a streaming kernel has for a B of this size, whatever M is.");
  m.def("clusters_at_once", &agmm::clusters_at_once, py::arg("sms"), py::arg("ctas"),
        "The number of clusters of so many CTAs that are computed at once; none of more than 8.");
  m.attr("MAX_STREAMING_CLUSTER") = agmm::kMaxStreamingCluster;
  m.attr("ALIGNMENT") = agmm::kAlignment;
  m.attr("MAX_SIZE") = agmm::kMaxSize;
  m.attr("MAX_CLUSTER_SPLITS") = agmm::kMaxClusterSplits;
  m.attr("CAPABILITY") = 10 * agmm::kCapabilityMajor + agmm::kCapabilityMinor;
  m.attr("LEAST_CAPABILITY") = 10 * agmm::kLeastCapabilityMajor + agmm::kLeastCapabilityMinor;
  m.attr("FP8_ALIGNMENT") = agmm::alignment_of(DType::E4M3);
}
