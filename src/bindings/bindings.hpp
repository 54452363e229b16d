// What the files that bind the core share.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "agmm/limits.hpp"
#include "agmm/problem.hpp"

namespace agmm {

/// The limit of a wait as a call passes it on: timeout_seconds(), but at most eleven days, since
/// kernels count in 32 bits, of 2^20 ns each.
inline uint64_t limit_ns() { return static_cast<uint64_t>(std::min(timeout_seconds(), 1e6) * 1e9); }

/// Destroying a workspace frees device memory, which waits for the device; other threads may have
/// to go on for it to get there.
struct DeleteWithoutGil {
  template <class Workspace>
  void operator()(Workspace* workspace) const {
    const pybind11::gil_scoped_release unlocked;
    delete workspace;
  }
};
template <class Workspace>
using Held = std::unique_ptr<Workspace, DeleteWithoutGil>;

/// Makes a workspace without the GIL: its constructor loads kernels, which waits for the device.
template <class Workspace>
Held<Workspace> make_workspace(int rank, const std::vector<uintptr_t>& bases, std::size_t bytes,
                               int reserved_sms) {
  const pybind11::gil_scoped_release unlocked;
  return Held<Workspace>(new Workspace(rank, bases, bytes, reserved_sms));
}

template <class Workspace>
void precede(Workspace& workspace, uintptr_t stream) {
  workspace.precede(reinterpret_cast<void*>(stream));
}
/// The docstring of precede(), which every workspace binds.
constexpr char kPrecedeDoc[] =
    "Makes what is enqueued on the stream from now on wait for the last call, eager or of the "
    "capture that the stream is in.";

inline Raster parse_raster(const std::string& name) {
  if (name == "along_m") return Raster::AlongM;
  if (name == "along_n") return Raster::AlongN;
  throw std::invalid_argument("raster: found '" + name + "', wanted along_m or along_n");
}

inline Schedule parse_schedule(const std::string& name) {
  if (name == "cooperative") return Schedule::Cooperative;
  if (name == "pingpong") return Schedule::Pingpong;
  if (name == "streaming") return Schedule::Streaming;
  throw std::invalid_argument("schedule: found '" + name +
                              "', wanted cooperative, pingpong or streaming");
}

inline std::string in_words(const KernelConfig& config) {
  return config.shape.str() + (config.splits == 1 ? "" : "_split" + std::to_string(config.splits)) +
         "_swizzle" + std::to_string(config.max_swizzle) + "_" + to_string(config.raster) +
         (config.across ? "_across" : "");
}

}  // namespace agmm
