// The module agmm._core, the torch-free core. Each bind_*.cpp binds a piece of it.
#include <pybind11/pybind11.h>

#include <string>

#include "testing/fault.hpp"

namespace py = pybind11;

void bind_cpu(py::module_& m);
void bind_chunking(py::module_& m);
void bind_kernels(py::module_& m);
void bind_gather(py::module_& m);
void bind_scatter(py::module_& m);
void bind_collectives(py::module_& m);
void bind_quantize(py::module_& m);
void bind_grouped(py::module_& m);

PYBIND11_MODULE(_core, m) {
  m.doc() = "The torch-free core of agmm.";
  m.attr("__version__") = AGMM_VERSION;
  m.attr("fault") = std::string(agmm::kFault);  // "" in a build for use
  m.attr("stress_delays") = agmm::kStressDelays;
  m.attr("virtual_link_gbs") = agmm::kVirtualLinkGBs;  // 0 in a build for use
  bind_cpu(m);
  bind_chunking(m);
  bind_kernels(m);
  bind_gather(m);
  bind_scatter(m);
  bind_collectives(m);
  bind_quantize(m);
  bind_grouped(m);
}
