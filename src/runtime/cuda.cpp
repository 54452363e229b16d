#include "runtime/cuda.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "sync/signals.hpp"
#include "sync/wait_report.hpp"

namespace agmm {

namespace {

constexpr int kMaxDevices = 64;  // more than any host has

void* driver_entry_point(char const* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found),
             name);
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error(std::string("agmm: the NVIDIA driver has no ") + name +
                             "; wanted a driver for CUDA 12.0 or newer");
  }
  return function;
}

std::string message(WaitReport const& r) {
  double const waited_s = double(r.waited_ns) * 1e-9;
  double const limit_s = double(r.limit_ns) * 1e-9;
  switch (r.kind) {
    case WaitReport::Mismatch:
      return mismatch_message(r.rank, r.source, r.chunk, r.seen, r.wanted);
    case WaitReport::Credit:
      return credit_timeout_message(r.rank, r.source, r.chunk, r.seen, waited_s, limit_s);
    default:
      return timeout_message(r.rank, r.source, r.chunk, r.seen, r.wanted, waited_s, limit_s);
  }
}

std::atomic<DescribeReport> describe{&message};

/// Ranks and chunks of a rank of those that wait, by the keys that stand for them in what kernels
/// write (LateWait).
class WaitingRanks {
 public:
  using Entry = std::pair<int, int>;

  uint32_t key(Entry const& entry) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const found = std::find(entries_.begin(), entries_.end(), entry);
    if (found != entries_.end()) return uint32_t(found - entries_.begin()) + 1;
    if (entries_.size() == kMost) return kMost;  // then the line says no rank
    entries_.push_back(entries_.size() == kMost - 1 ? kUnknown : entry);
    return uint32_t(entries_.size());
  }

  Entry at(uint32_t key) {
    std::lock_guard<std::mutex> const lock(mutex_);
    return key == 0 || key > entries_.size() ? kUnknown : entries_[key - 1];
  }

 private:
  static constexpr uint32_t kMost = (1u << LateWait::kKeyBits) - 1;
  static constexpr Entry kUnknown{-1, 0};
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

WaitingRanks& waiting_ranks() {
  // Never destroyed: the watcher reads it to the end of the process.
  static auto* const ranks = new WaitingRanks();
  return *ranks;
}

class ReportWatcher {
 public:
  ReportWatcher() {
    void* memory = nullptr;
    AGMM_CHECK_CUDA(
        cudaHostAlloc(&memory, sizeof(Reports), cudaHostAllocPortable | cudaHostAllocMapped));
    reports_ = new (memory) Reports{};
    thread_ = std::thread([this] { watch(); });
  }

  ~ReportWatcher() {
    // The thread is not copied into a forked child, which has nothing to join.
    if (::getpid() != owner_) {
      thread_.detach();
      return;
    }
    stop_ = true;
    thread_.join();
  }

  WaitReport* report(int device) const { return &(*reports_)[device]; }

 private:
  using Reports = std::array<WaitReport, kMaxDevices>;
  // Often enough for a message after minutes; 50 looks a second are no load.
  static constexpr std::chrono::milliseconds kLook{20};

  void watch() {
    while (!stop_) {
      for (WaitReport& report : *reports_) {
        warn_if_late(report);
        if (*static_cast<uint32_t const volatile*>(&report.kind) == WaitReport::None) continue;
        std::atomic_thread_fence(std::memory_order_acquire);
        end_process(describe.load()(report));
      }
      std::this_thread::sleep_for(kLook);
    }
  }

  /// One line for all waits that began before it was written.
  void warn_if_late(WaitReport volatile& report) {
    if (report.late_what == 0) return;
    std::this_thread::sleep_for(kLook);  // for all that began together to say so
    uint32_t const what = report.late_what;
    uint32_t const units = report.late_units;  // before the place is free for the next wait
    report.late_what = 0;
    std::vector<int> sources;
    for (int source = 0; source < kMaxLateSources; ++source) {
      if (report.late_of[source] != 0) sources.push_back(source);
      report.late_of[source] = 0;
    }
    auto const [rank, chunks_per_rank] = waiting_ranks().at(LateWait::key(what));
    tell_of_late_wait(rank, chunks_per_rank == kWithoutElements);
    double const seconds = double(units) * double(1 << 20) * 1e-9;
    Clock::time_point const now = Clock::now();
    auto const began =
        now - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    if (warn_s_ <= 0 || seconds < warn_s_ || began < last_line_) return;
    last_line_ = now;
    int32_t const chunk = LateWait::chunk(what);
    double const limit_s = timeout_seconds();
    if (!sources.empty()) {
      write_line(late_ranks_message(rank, sources, seconds, limit_s));
    } else if (LateWait::is_credit(what)) {
      write_line(late_credit_message(rank, chunk, seconds, limit_s));
    } else {
      int const source = chunks_per_rank > 0 ? chunk / chunks_per_rank : -1;
      write_line(late_message(rank, source, chunk, seconds, limit_s));
    }
  }

  using Clock = std::chrono::steady_clock;

  double const warn_s_ = warn_seconds();
  Clock::time_point last_line_{};
  Reports* reports_ = nullptr;
  pid_t owner_ = ::getpid();
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

int current_device_index() {
  int index = 0;
  cudaError_t const error = cudaGetDevice(&index);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    throw std::runtime_error(std::string("agmm: found no CUDA device (") +
                             cudaGetErrorString(error) + "), wanted one of " +
                             std::string(kArchitecture));
  }
  check_cuda(error, "cudaGetDevice");
  if (index >= kMaxDevices) throw std::runtime_error("agmm: more than 64 CUDA devices");
  return index;
}

}  // namespace

void check_cuda(cudaError_t error, char const* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string("agmm: ") + call + " failed: " + cudaGetErrorString(error));
}

void check_driver(CUresult result, char const* call) {
  if (result == CUDA_SUCCESS) return;
  char const* text = nullptr;
  driver().get_error_string(result, &text);
  throw std::runtime_error(std::string("agmm: ") + call + " failed: " + (text ? text : "?"));
}

Driver const& driver() {
  static Driver const found = [] {
    Driver d{};
    d.stream_batch_mem_op = reinterpret_cast<decltype(d.stream_batch_mem_op)>(
        driver_entry_point("cuStreamBatchMemOp", 12000));
    d.stream_write_value32 = reinterpret_cast<decltype(d.stream_write_value32)>(
        driver_entry_point("cuStreamWriteValue32", 12000));
    d.get_error_string = reinterpret_cast<decltype(d.get_error_string)>(
        driver_entry_point("cuGetErrorString", 6000));
    return d;
  }();
  return found;
}

DeviceFacts const& current_device() {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<DeviceFacts, kMaxDevices> facts;
  int const index = current_device_index();
  std::call_once(once[index], [index] {
    DeviceFacts f{index, 0, 0, 0, 0, ""};
    AGMM_CHECK_CUDA(cudaDeviceGetAttribute(&f.sm_count, cudaDevAttrMultiProcessorCount, index));
    AGMM_CHECK_CUDA(cudaDeviceGetAttribute(&f.clock_khz, cudaDevAttrClockRate, index));
    AGMM_CHECK_CUDA(
        cudaDeviceGetAttribute(&f.capability_major, cudaDevAttrComputeCapabilityMajor, index));
    AGMM_CHECK_CUDA(
        cudaDeviceGetAttribute(&f.capability_minor, cudaDevAttrComputeCapabilityMinor, index));
    bool const is_kernels =
        f.capability_major == kCapabilityMajor && f.capability_minor == kCapabilityMinor;
    std::string const name = is_kernels ? kArchitecture
                                        : "sm_" + std::to_string(f.capability_major) +
                                              std::to_string(f.capability_minor);
    name.copy(f.architecture, sizeof(f.architecture) - 1);
    facts[index] = f;
  });
  return facts[index];
}

namespace {

[[noreturn]] void refuse_device(DeviceFacts const& device, std::string const& built) {
  throw std::runtime_error("agmm: no kernel for sm_" + std::to_string(device.capability_major) +
                           std::to_string(device.capability_minor) + "; built: " + built);
}

}  // namespace

DeviceFacts const& kernels_device() {
  DeviceFacts const& device = current_device();
  if (std::string(device.architecture) != kArchitecture) refuse_device(device, kArchitecture);
  return device;
}

DeviceFacts const& small_kernels_device() {
  DeviceFacts const& device = current_device();
  if (std::tie(device.capability_major, device.capability_minor) <
      std::tie(kLeastCapabilityMajor, kLeastCapabilityMinor)) {
    refuse_device(device, "sm_" + std::to_string(kLeastCapabilityMajor) +
                              std::to_string(kLeastCapabilityMinor) + " and newer");
  }
  return device;
}

DeviceGuard::DeviceGuard(int index) : previous_(current_device_index()), index_(index) {
  if (index_ != previous_) AGMM_CHECK_CUDA(cudaSetDevice(index_));
}

DeviceGuard::~DeviceGuard() {
  if (index_ != previous_) cudaSetDevice(previous_);
}

ReportPlace report_place(int rank, int chunks_per_rank) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<uint32_t*, kMaxDevices> locks;
  int const index = current_device_index();
  std::call_once(once[index], [index] {
    RelaxedCapture const relaxed;
    AGMM_CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&locks[index]), sizeof(uint32_t)));
    uint32_t const zero = 0;
    AGMM_CHECK_CUDA(cudaMemcpy(locks[index], &zero, sizeof(zero), cudaMemcpyHostToDevice));
  });
  // Made after the first CUDA call, so that it is gone before the CUDA runtime is torn down.
  static ReportWatcher const watcher = [] {
    RelaxedCapture const relaxed;
    return ReportWatcher();
  }();
  uint32_t const key = waiting_ranks().key({rank, chunks_per_rank});
  return {watcher.report(index), locks[index], LateWait::what(key, false, 0)};
}

void describe_reports_by(DescribeReport by) { describe = by; }

}  // namespace agmm
