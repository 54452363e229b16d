// A fake CUDA that only records what is enqueued, so that the host code of the CUDA core runs
// without a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "collectives/exchange.hpp"
#include "gemm/call_spec.hpp"
#include "gemm/scatter_spec.hpp"

namespace fake {

/// One operation that was enqueued: "wait", "record", "batch", "write", "copy", "stage", "kernel",
/// "release", "scatter" or "exchange".
struct Operation {
  std::string name;
  cudaStream_t stream = nullptr;
};

/// A launch of a collective.
struct Exchange {
  agmm::ExchangeArgs args;
  agmm::CollectiveElement element;
  agmm::ExchangeStep step;
  agmm::Carrier carrier;
  agmm::ExchangeGrid grid;
  agmm::NormArgs norm;
  agmm::RelayArgs relays;
};

struct State {
  cudaError_t device_error = cudaSuccess;  // of every question for a device
  int device = 0;
  int major = 9;
  int minor = 0;
  std::vector<Operation> operations;
  int fail_at = -1;    // this operation, counted from 0, and those after it are refused
  int creatable = -1;  // so many streams and events more; -1: any number
  int alive = 0;       // streams and events
  std::vector<agmm::CallSpec> launched;
  std::vector<Exchange> exchanges;
  std::vector<agmm::ScatterSpec> scatters;  // those that do not run
  std::atomic<int> kernels_prepared = 0;
  bool runs_scatters = false;  // their kernels compute, at once, and wait for those of other ranks
  std::map<cudaStream_t, unsigned long long> captures;  // under way
  std::map<unsigned long long, bool> invalid;
};

State& state();

/// The handle of a stream of the caller.
cudaStream_t stream(int number);
void begin_capture(cudaStream_t stream, unsigned long long id);
/// Whether the capture was valid until it ended.
bool end_capture(unsigned long long id);

}  // namespace fake
