// Stands in for the CUDA core in a build without CUDA, so that every build binds the same names.
#include <stdexcept>

#include "agmm/fused_all_gather_matmul.hpp"

namespace agmm {

namespace {
[[noreturn]] void refuse() {
  throw std::runtime_error("agmm: built without CUDA; wanted a build with AGMM_CUDA=ON and nvcc");
}
}  // namespace

std::vector<KernelShape> built_kernels() { return {}; }
bool can_split(KernelShape const&) { return false; }
std::size_t max_split_scratch_bytes() { refuse(); }
void load_kernels() { refuse(); }
PreparedMatmul prepare_async_input_mm(AsyncInputArgs const&) { refuse(); }
void record_time(uint64_t*, void*) { refuse(); }
void PreparedMatmul::launch(void*) const { refuse(); }

std::size_t AllGather::workspace_bytes(std::size_t, int) { refuse(); }
std::size_t AllGather::words_offset(std::size_t, int) { refuse(); }
std::size_t AllGather::first_credit_word(int, int) { refuse(); }
bool has_peer_atomics(int, int) { refuse(); }
AllGather::AllGather(int, std::vector<uintptr_t> const&, std::size_t, int) { refuse(); }
AllGather::~AllGather() = default;

FusedAllGatherMatmul::FusedAllGatherMatmul(int rank, std::vector<uintptr_t> const& bases,
                                           std::size_t slot_bytes, int)
    : gather_(rank, bases, slot_bytes) {}
bool FusedAllGatherMatmul::operator()(FusedArgs const&, std::vector<Weight> const&, void*) {
  refuse();
}

}  // namespace agmm
