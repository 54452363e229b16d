// Checks what precede() of a workspace does, on the fake CUDA.
#pragma once

#include <string>

#include "fake_cuda.hpp"

namespace fake {

/// Returns what is wrong, or "". `op` has made no call yet; `call(stream)` makes one.
template <class Op, class Call>
std::string wrong_precedence(Op& op, Call const& call) {
  cudaStream_t const first = stream(11);
  cudaStream_t const second = stream(12);
  auto const enqueued = [&](cudaStream_t next) {
    state().operations.clear();
    op.precede(next);
    std::string names;
    for (Operation const& operation : state().operations) names += operation.name + " ";
    return names;
  };
  std::string const nothing, wait = "wait ";
  if (enqueued(first) != nothing) return "a stream waits for no call";
  call(first);
  if (enqueued(first) != nothing) return "a stream waits for itself";
  if (enqueued(second) != wait) return "another stream does not wait";
  begin_capture(first, 901);
  if (enqueued(first) != nothing) return "a capture waits for an eager call";
  call(first);
  if (enqueued(first) != wait) return "a capture does not wait for its own call";
  if (enqueued(second) != wait) return "an eager call no longer waits for the last one";
  begin_capture(second, 902);
  if (enqueued(second) != nothing) return "a capture waits for another one's call";
  bool const are_valid = end_capture(901) && end_capture(902);
  return are_valid ? "" : "a capture was ended";
}

}  // namespace fake
