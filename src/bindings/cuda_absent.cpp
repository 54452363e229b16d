// Stands in for the CUDA core in a build without CUDA, so that every build binds the same names.
#include <stdexcept>

#include "agmm/async_input_mm.hpp"
#include "agmm/collectives.hpp"
#include "agmm/fused_all_gather_matmul.hpp"
#include "agmm/fused_matmul_reduce_scatter.hpp"
#include "agmm/grouped_matmul.hpp"
#include "agmm/packed_matmul.hpp"
#include "agmm/row_combine.hpp"
#include "agmm/row_dispatch.hpp"
#include "ops/activation_gradient.hpp"
#include "ops/ordered_sum.hpp"
#include "ops/quantize.hpp"
#include "ops/row_route.hpp"

namespace agmm {

namespace {
[[noreturn]] void refuse() {
  throw std::runtime_error("agmm: built without CUDA; wanted a build with AGMM_CUDA=ON and nvcc");
}
}  // namespace

std::vector<KernelFacts> built_kernels() { return {}; }
std::size_t max_split_scratch_bytes() { refuse(); }
void load_kernels() { refuse(); }
PreparedMatmul prepare_async_input_mm(AsyncInputArgs const&) { refuse(); }
void record_time(uint64_t*, void*) { refuse(); }
void load_quantizers() { refuse(); }
void quantize(Quantize const&, void*) { refuse(); }
void find_amax(Quantize const&, void*) { refuse(); }
void transpose_bytes(Quantize const&, void*) { refuse(); }
void load_ordered_sums() { refuse(); }
void ordered_sum(OrderedSum const&, void*) { refuse(); }
void load_activation_gradients() { refuse(); }
void activation_gradient(ActivationGradient const&, void*) { refuse(); }
void load_row_routes() { refuse(); }
int32_t most_routed_choices() { refuse(); }
void route_rows(RowRoute const&, void*) { refuse(); }
void grouped_matmul(GroupedMatmul const&, void*) { refuse(); }
void packed_matmul(PackedMatmul const&, void*) { refuse(); }
void PreparedMatmul::launch(void*) const { refuse(); }
bool has_peer_atomics(int, int) { refuse(); }

struct FusedAllGatherMatmul::Impl {};
FusedAllGatherMatmul::FusedAllGatherMatmul(int, std::vector<uintptr_t> const&, std::size_t, int) {
  refuse();
}
FusedAllGatherMatmul::~FusedAllGatherMatmul() = default;
std::size_t FusedAllGatherMatmul::slot_bytes() const { refuse(); }
bool FusedAllGatherMatmul::operator()(Gather const&, std::vector<Weight> const&, void*,
                                      TileTimes*) {
  refuse();
}
void FusedAllGatherMatmul::precede(void*) { refuse(); }

struct FusedMatmulReduceScatter::Impl {};
FusedMatmulReduceScatter::FusedMatmulReduceScatter(int, std::vector<uintptr_t> const&, std::size_t,
                                                   int) {
  refuse();
}
FusedMatmulReduceScatter::~FusedMatmulReduceScatter() = default;
std::size_t FusedMatmulReduceScatter::part_bytes() const { refuse(); }
bool FusedMatmulReduceScatter::operator()(MatmulScatter const&, void*) { refuse(); }
void FusedMatmulReduceScatter::precede(void*) { refuse(); }

uint64_t capture_of(void*) { refuse(); }
uint64_t stream_id(void*) { refuse(); }
struct Collectives::Impl {};
Collectives::Collectives(int, std::vector<uintptr_t> const&, std::size_t, int) { refuse(); }
Collectives::~Collectives() = default;
std::size_t Collectives::slot_bytes() const { refuse(); }
bool Collectives::operator()(Collective const&, void*) { refuse(); }
bool Collectives::operator()(Collective const&, ResidualNorm const&, void*) { refuse(); }
bool Collectives::operator()(Collective const&, Beside const&, void*) { refuse(); }
void Collectives::precede(void*) { refuse(); }
bool Collectives::operator()(Meeting const&, void*) { refuse(); }
bool Collectives::operator()(StreamedSum const&, void*) { refuse(); }
bool Collectives::operator()(GatheredMatmul const&, void*) { refuse(); }
void Collectives::relay_over(std::vector<RelayMove> const&) { refuse(); }

struct RowDispatcher::Impl {};
RowDispatcher::RowDispatcher(int, std::vector<uintptr_t> const&, std::size_t, int) { refuse(); }
RowDispatcher::~RowDispatcher() = default;
std::size_t RowDispatcher::slot_bytes() const { refuse(); }
bool RowDispatcher::operator()(RowDispatch const&, std::vector<GroupedMatmul> const&, void*) {
  refuse();
}
void RowDispatcher::precede(void*) { refuse(); }

struct RowCombiner::Impl {};
RowCombiner::RowCombiner(int, std::vector<uintptr_t> const&, std::size_t, int) { refuse(); }
RowCombiner::~RowCombiner() = default;
std::size_t RowCombiner::slot_bytes() const { refuse(); }
bool RowCombiner::operator()(RowCombine const&, std::vector<GroupedMatmul> const&, void*) {
  refuse();
}
void RowCombiner::precede(void*) { refuse(); }

}  // namespace agmm
