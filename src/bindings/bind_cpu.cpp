// This file binds the CPU workspace, waits and messages.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/workspace.hpp"
#include "sync/signals.hpp"

namespace py = pybind11;

namespace {

using agmm::CpuWorkspace;
using agmm::Wait;

constexpr std::chrono::milliseconds kSlice{20};  // how late Ctrl-C is seen

// Waits without the GIL, slice by slice. Between two slices Python handles its signals (Ctrl-C).
template <class PollSlice>
void wait_interruptibly(const PollSlice& poll) {
  for (;;) {
    bool done = false;
    {
      const py::gil_scoped_release unlocked;
      done = poll();
    }
    if (done) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

const uint32_t* signal_at(uintptr_t address) {
  if (address == 0 || address % alignof(uint32_t) != 0) {
    throw std::invalid_argument("ptr: found " + std::to_string(address) +
                                ", wanted the address of a uint32");
  }
  return reinterpret_cast<const uint32_t*>(address);
}

}  // namespace

void bind_cpu(py::module_& module) {
  module.attr("TIMEOUT_EXIT_CODE") = agmm::kTimeoutExitCode;
  module.def("timeout_seconds", &agmm::timeout_seconds,
             "The limit of every wait in seconds: AGMM_TIMEOUT_S, or 600. Raises ValueError when "
             "it is not a number > 0.");
  module.def("warn_seconds", &agmm::warn_seconds,
             "The seconds after which a wait says on stderr what it waits for: AGMM_WARN_S, or 30; "
             "0 means never. Raises ValueError when it is not a number >= 0.");
  module.def("timeout_message", &agmm::timeout_message, py::arg("rank"), py::arg("source"),
             py::arg("chunk"), py::arg("seen"), py::arg("wanted"), py::arg("waited_s"),
             py::arg("limit_s"), "The line printed when a wait for a chunk passes its limit.");
  module.def("mismatch_message", &agmm::mismatch_message, py::arg("rank"), py::arg("source"),
             py::arg("chunk"), py::arg("seen"), py::arg("wanted"),
             py::call_guard<py::gil_scoped_release>(),
             "The line printed when a chunk carries the tag of a different call.");
  module.def("waiting_message", &agmm::waiting_message, py::arg("rank"), py::arg("source"),
             py::arg("chunk"), py::arg("seen"), py::arg("wanted"), py::arg("waited_s"),
             py::arg("limit_s"), "The line printed when a wait for a chunk takes long.");
  module.def("write_line", &agmm::write_line, py::arg("message"),
             "Writes one line to stderr, in one piece.");
  module.def("end_process", &agmm::end_process, py::arg("message"),
             "Writes the line and ends the process with TIMEOUT_EXIT_CODE.");
  module.def("note_call", &agmm::note_call, py::arg("tag"), py::arg("what"),
             "Records which calls' signals carry the tag, for mismatch_message.");
  module.def("set_call_lookup", &agmm::set_call_lookup, py::arg("lookup"),
             py::call_guard<py::gil_scoped_release>(),
             "Sets the function that finds out, from (rank, source, tag, what note_call recorded "
             "for the tag), what two ranks called whose calls differ. It runs on a thread of its "
             "own, for some seconds at most.");
  module.def("set_late_listener", &agmm::set_late_listener, py::arg("listener"),
             py::call_guard<py::gil_scoped_release>(),
             "Sets the function that is told, each second that a kernel waits, which rank waits "
             "and whether its call has no elements. It runs on a thread of its own.");
  module.def("call_tag", &agmm::call_tag, py::arg("m_local"), py::arg("k"), py::arg("dtype"),
             py::arg("return_A"),
             "The nonzero 32-bit value that the signals of one call carry: a hash of what all "
             "ranks have to agree on.");
  module.def(
      "cpu_wait_signal",
      [](uintptr_t ptr, uint32_t wanted, int rank, int source, int64_t chunk, double timeout_s) {
        const uint32_t* word = signal_at(ptr);
        Wait wait(timeout_s, agmm::warn_seconds());
        wait_interruptibly(
            [&] { return agmm::wait_signal(wait, word, wanted, rank, source, chunk, kSlice); });
      },
      py::arg("ptr"), py::arg("wanted"), py::arg("rank"), py::arg("source"), py::arg("chunk"),
      py::arg("timeout_s"),
      "Waits until the uint32 at `ptr` is `wanted`; ends the process after `timeout_s` seconds. "
      "rank and source only serve the message; -1 leaves them out.");

  py::class_<CpuWorkspace>(module, "CpuWorkspace",
                           "One rank's shared memory and copy thread of one group.")
      .def(py::init([](int rank, int world_size, int64_t slot_bytes, int chunks_per_shard,
                       double timeout_s) {
             const double warn_s = agmm::warn_seconds();
             const py::gil_scoped_release unlocked;
             auto made = std::make_unique<CpuWorkspace>(rank, world_size, slot_bytes,
                                                        chunks_per_shard, timeout_s);
             made->set_warn_s(warn_s);
             return made;
           }),
           py::arg("rank"), py::arg("world_size"), py::arg("slot_bytes"),
           py::arg("chunks_per_shard"), py::arg("timeout_s"))
      .def_property_readonly("rank", &CpuWorkspace::rank)
      .def_property_readonly("world_size", &CpuWorkspace::world_size)
      .def_property_readonly("slot_bytes", &CpuWorkspace::slot_bytes)
      .def_property_readonly("chunks_per_shard", &CpuWorkspace::chunks_per_shard)
      .def_property_readonly("name", &CpuWorkspace::name)
      .def_property("timeout_s", &CpuWorkspace::timeout_s, &CpuWorkspace::set_timeout_s)
      .def_property("warn_s", &CpuWorkspace::warn_s, &CpuWorkspace::set_warn_s)
      .def("connect", &CpuWorkspace::connect, py::arg("names"),
           py::call_guard<py::gil_scoped_release>(),
           "Maps the segments of all ranks, names in rank order, and starts the copy thread.")
      .def("take_memory", &CpuWorkspace::take_memory, py::call_guard<py::gil_scoped_release>(),
           "Removes the segment's name, then takes the memory of its slots. Call it when every "
           "rank is connected.")
      .def("close", &CpuWorkspace::close, py::call_guard<py::gil_scoped_release>(),
           "Stops the copy thread and unmaps everything.")
      .def("end_waits", &CpuWorkspace::end_waits,
           "Makes every wait on this workspace raise RuntimeError, also the waits under way. Call "
           "it before close where another thread may wait.")
      .def(
          "slot_ptr",
          [](const CpuWorkspace& self, int slot) {
            return reinterpret_cast<uintptr_t>(self.slot(slot));
          },
          py::arg("slot"), "The address of this rank's slot, slot_bytes long.")
      .def(
          "signals_ptr",
          [](const CpuWorkspace& self, int slot) {
            return reinterpret_cast<uintptr_t>(self.signals(slot));
          },
          py::arg("slot"),
          "The address of this rank's signals, world_size * chunks_per_shard uint32.")
      .def(
          "push",
          [](CpuWorkspace& self, int slot, uintptr_t shard_ptr, int64_t shard_bytes,
             int64_t chunk_bytes, uint32_t tag) {
            self.push(slot, reinterpret_cast<const void*>(shard_ptr), shard_bytes, chunk_bytes,
                      tag);
          },
          py::arg("slot"), py::arg("shard_ptr"), py::arg("shard_bytes"), py::arg("chunk_bytes"),
          py::arg("tag"),
          "Hands the shard to the copy thread; the shard must stay unchanged until wait_pushed().")
      .def("take_credits", &CpuWorkspace::take_credits, py::arg("slot"),
           "Makes the copy thread take the credit of every peer's slot, before the sends.")
      .def(
          "send",
          [](CpuWorkspace& self, int slot, int owner, int index, uintptr_t piece_ptr,
             int64_t piece_bytes, int64_t part_bytes, int64_t offset, uint32_t tag) {
            self.send(slot, owner, index, reinterpret_cast<const void*>(piece_ptr), piece_bytes,
                      part_bytes, offset, tag);
          },
          py::arg("slot"), py::arg("owner"), py::arg("index"), py::arg("piece_ptr"),
          py::arg("piece_bytes"), py::arg("part_bytes"), py::arg("offset"), py::arg("tag"),
          "Hands a piece of this rank's partial sum for the owner to the copy thread; the piece "
          "must stay unchanged until wait_pushed().")
      .def(
          "wait_chunk",
          [](const CpuWorkspace& self, int slot, int chunk, uint32_t tag) {
            Wait wait(self.timeout_s(), self.warn_s());
            wait_interruptibly([&] { return self.wait_chunk(wait, slot, chunk, tag, kSlice); });
          },
          py::arg("slot"), py::arg("chunk"), py::arg("tag"),
          "Waits until the chunk is in the slot; ends the process after timeout_s seconds or when "
          "the signal carries another tag.")
      .def(
          "wait_pushed",
          [](CpuWorkspace& self) { wait_interruptibly([&] { return self.wait_pushed(kSlice); }); },
          "Waits until all that was handed to push() and send() may be overwritten.")
      .def("release", &CpuWorkspace::release, py::arg("slot"),
           "Says that this rank has read the slot: resets its signals and gives the credits.")
      .def("arrival_ns", &CpuWorkspace::arrival_ns, py::arg("slot"),
           "When each chunk of the slot was signalled, in ns of time.monotonic_ns(); 0 for this "
           "rank's own chunks.")
      .def("set_push_delay_us", &CpuWorkspace::set_push_delay_us, py::arg("us"),
           "Delays every chunk by a random time up to `us` microseconds, for tests.");
}
