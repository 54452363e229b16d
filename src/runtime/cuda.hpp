// What the host code of the CUDA core shares: error checks, driver entry points looked up at first
// use, and the report of a wait that passed its limit.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "agmm/problem.hpp"
#include "sync/wait_limit.hpp"

namespace agmm {

/// Throws std::runtime_error that names the call when `error` is not cudaSuccess.
void check_cuda(cudaError_t error, char const* call);
void check_driver(CUresult result, char const* call);
#define AGMM_CHECK_CUDA(call) ::agmm::check_cuda((call), #call)

/// Stream memory operations of the driver. Looked up at first use, so that the module imports on a
/// machine without libcuda.
struct Driver {
  CUresult (*stream_batch_mem_op)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);
  CUresult (*stream_write_value32)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
  CUresult (*get_error_string)(CUresult, char const**);
};
Driver const& driver();

/// In place of the chunks of a rank: what waits is a call without elements.
constexpr int kWithoutElements = -1;

/// The current device's place for reports. It is created at first use, together with a thread that
/// reads it and ends the process with the message. `rank` and `chunks_per_rank` are those of who
/// waits there, for the line that says so after AGMM_WARN_S; -1 and 0 where they are unknown.
ReportPlace report_place(int rank = -1, int chunks_per_rank = 0);

/// What that message says. It is called by the thread that reads, at the end of the process, and
/// may take its time. The default names rank, source, chunk and the words seen.
using DescribeReport = std::string (*)(WaitReport const& report);
void describe_reports_by(DescribeReport describe);

struct DeviceFacts {
  int index;
  int sm_count;
  int clock_khz;  // at most
  int capability_major;
  int capability_minor;
  char architecture[8];  // what its kernels are compiled for, as KernelFacts names it
};
/// Throws std::runtime_error where there is none.
DeviceFacts const& current_device();

/// The current device, where this build has matmul kernels for it; else throws std::runtime_error.
DeviceFacts const& kernels_device();
/// The current device, where this build has collectives, quantisers and copies for it; else throws
/// as kernels_device() does.
DeviceFacts const& small_kernels_device();

/// Lets a call that a stream capture in another mode would forbid (an allocation) go through.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(RelaxedCapture const&) = delete;
  RelaxedCapture& operator=(RelaxedCapture const&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  int previous_ = 0;
  int index_;
};

}  // namespace agmm
