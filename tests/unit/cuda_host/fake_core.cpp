// The bindings of the CUDA room on the fake CUDA.
#include <pybind11/pybind11.h>

void bind_cuda(pybind11::module_& m);

PYBIND11_MODULE(fake_core, m) { bind_cuda(m); }
