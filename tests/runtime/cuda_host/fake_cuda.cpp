#include "fake_cuda.hpp"

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>

#include "collectives/row_combine.hpp"
#include "gemm/grouped_entry.hpp"
#include "gemm/kernel_entry.hpp"
#include "gemm/kernel_facts.hpp"
#include "gemm/packed_entry.hpp"
#include "gemm/scatter_entry.hpp"
#include "gemm/scatter_spec.hpp"
#include "sync/signals.hpp"
#include "transport/release.hpp"
#include "transport/row_dispatch.hpp"
#include "transport/stage.hpp"

namespace fake {

namespace {

std::recursive_mutex mutex;  // of what calls change: ranks are threads here
using Lock = std::lock_guard<std::recursive_mutex>;

std::map<cudaEvent_t, unsigned long long> recorded_in;  // 0: outside captures

unsigned long long capture_of(cudaStream_t stream) {
  auto const found = state().captures.find(stream);
  return found == state().captures.end() ? 0 : found->second;
}

cudaError_t enqueue(char const* name, cudaStream_t stream) {
  Lock const lock(mutex);
  State& s = state();
  if (s.fail_at >= 0 && int(s.operations.size()) >= s.fail_at) return cudaErrorUnknown;
  unsigned long long const capture = capture_of(stream);
  if (capture != 0 && s.invalid[capture]) return cudaErrorStreamCaptureInvalidated;
  s.operations.push_back({name, stream});
  return cudaSuccess;
}

CUresult enqueue_memory_operation(char const* name, CUstream stream) {
  return enqueue(name, stream) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult batch(CUstream stream, unsigned, CUstreamBatchMemOpParams*, unsigned) {
  return enqueue_memory_operation("batch", stream);
}

CUresult write(CUstream stream, CUdeviceptr, cuuint32_t, unsigned) {
  return enqueue_memory_operation("write", stream);
}

CUresult error_string(CUresult, char const** text) {
  *text = "fake driver error";
  return CUDA_SUCCESS;
}

/// Waits for FAKE_CUDA_BUSY_MS, as a call does where the device is busy.
void await_device() {
  char const* const ms = std::getenv("FAKE_CUDA_BUSY_MS");
  if (ms != nullptr) std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(ms)));
}

template <class Handle>
cudaError_t create(Handle* handle) {
  Lock const lock(mutex);
  State& s = state();
  if (s.creatable == 0) return cudaErrorMemoryAllocation;
  if (s.creatable > 0) --s.creatable;
  ++s.alive;
  static std::size_t count = 1000;
  *handle = reinterpret_cast<Handle>(count += 8);
  return cudaSuccess;
}

cudaError_t destroy() {
  Lock const lock(mutex);
  --state().alive;
  return cudaSuccess;
}

}  // namespace

State& state() {
  static State state;
  return state;
}

cudaStream_t stream(int number) { return reinterpret_cast<cudaStream_t>(std::size_t(number)); }

void begin_capture(cudaStream_t stream, unsigned long long id) { state().captures[stream] = id; }

bool end_capture(unsigned long long id) {
  auto& captures = state().captures;
  for (auto i = captures.begin(); i != captures.end();) {
    i = i->second == id ? captures.erase(i) : std::next(i);
  }
  return !state().invalid[id];
}

}  // namespace fake

using fake::state;

// --- the runtime ---

cudaError_t cudaGetDevice(int* device) {
  *device = state().device;
  return state().device_error;
}
cudaError_t cudaSetDevice(int device) {
  state().device = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "fake error";
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? 132
           : attribute == cudaDevAttrClockRate              ? 1980000
           : attribute == cudaDevAttrComputeCapabilityMajor ? state().major
           : attribute == cudaDevAttrComputeCapabilityMinor ? state().minor
                                                            : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int, int peer) {
  *value = attribute == cudaDevP2PAttrNativeAtomicSupported && peer != 2;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  fake::await_device();
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
cudaError_t cudaMemcpy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (kind == cudaMemcpyHostToDevice) std::memcpy(to, from, bytes);  // into a workspace
  return fake::enqueue("copy", stream);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return fake::create(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return fake::destroy(); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return fake::create(event); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return fake::destroy(); }
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<std::size_t>(stream);
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, cudaGraphNode_t const**,
                                     cudaGraphEdgeData const**, std::size_t*) {
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
#endif
  *id = fake::capture_of(stream);
  *status = *id == 0               ? cudaStreamCaptureStatusNone
            : state().invalid[*id] ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
/// Reports a call that a capture does not allow: it ends the capture.
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  unsigned long long const capture = fake::capture_of(stream);
  if (capture == 0) return cudaSuccess;
  state().invalid[capture] = true;
  return cudaErrorStreamCaptureUnsupported;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  fake::Lock const lock(fake::mutex);
  cudaError_t const error = fake::enqueue("record", stream);
  if (error == cudaSuccess) fake::recorded_in[event] = fake::capture_of(stream);
  return error;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  fake::Lock const lock(fake::mutex);
  unsigned long long const source = fake::recorded_in[event];
  unsigned long long const capture = fake::capture_of(stream);
  if (capture != 0 && source != capture) return cudaErrorStreamCaptureIsolation;
  cudaError_t const error = fake::enqueue("wait", stream);
  if (error == cudaSuccess && source != 0) fake::begin_capture(stream, source);  // it joins
  return error;
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *found = cudaDriverEntryPointSuccess;
  std::string const wanted = name;
  *function = wanted == "cuStreamBatchMemOp"     ? reinterpret_cast<void*>(&fake::batch)
              : wanted == "cuStreamWriteValue32" ? reinterpret_cast<void*>(&fake::write)
                                                 : reinterpret_cast<void*>(&fake::error_string);
  return cudaSuccess;
}
#endif

// --- the kernels ---

namespace agmm {

namespace {

char const* prepare(CallSpec const& call, void* params) {
  ++state().kernels_prepared;
  new (params) CallSpec(call);
  return nullptr;
}

int setup() {
  fake::await_device();
  return cudaSuccess;
}

/// Which variant a call is served by is checked here.
template <bool kLean>
int launch(void* params, void* stream) {
  CallSpec const& call = *static_cast<CallSpec*>(params);
  bool const asks = call.push.shard != nullptr || call.matmul.operands.a_out != nullptr;
  if (asks == kLean) return cudaErrorInvalidValue;
  cudaError_t const error = fake::enqueue("kernel", static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) state().launched.push_back(call);
  return error;
}

constexpr KernelVariant kFull{sizeof(CallSpec), &prepare, &setup, &launch<false>};
constexpr KernelVariant kLean{sizeof(CallSpec), &prepare, &setup, &launch<true>};

KernelEntry const kernel{facts_of({128, 128, 64, 1, 1, Schedule::Cooperative, false},
                                  DType::BFloat16, BLayout::ColumnMajor),
                         kFull, kLean};
KernelEntry const fp8_kernel{facts_of({128, 128, 128, 1, 1, Schedule::Pingpong, false}, DType::E4M3,
                                      BLayout::ColumnMajor, Accumulation::Slow),
                             kFull, kLean};
KernelEntry const swapped_kernel{facts_of({64, 128, 64, 1, 1, Schedule::Cooperative, false, true},
                                          DType::BFloat16, BLayout::ColumnMajor),
                                 kFull, kLean};

// What the kernel of a scatter, or of an all-reduce, does, as one CTA that computes tile after
// tile; elements are whole numbers of 16 bits.
using Element = uint16_t;
constexpr int kTile = 128;
constexpr std::size_t kTileBytes = kTile * kTile * sizeof(Element);

char const* prepare_scatter(ScatterSpec const& call, void* params) {
  ++state().kernels_prepared;
  new (params) ScatterSpec(call);
  return nullptr;
}

Element dot(ScatterSpec const& call, int row, int column) {
  unsigned sum = 0;
  for (int i = 0; i < call.product_count; ++i) {
    Product const& product = call.products[i];
    auto const* const a = static_cast<Element const*>(product.a) + row * product.lda;
    auto const* const b = static_cast<Element const*>(product.b) + column * product.ldb;
    for (int k = 0; k < product.k; ++k) sum += unsigned(a[k]) * b[k];
  }
  return static_cast<Element>(sum);
}

void await(uint32_t const* word, uint32_t value) {
  Backoff backoff;
  while (load_acquire(word) != value) backoff.pause();
}

bool is_all_reduce(ScatterSpec const& call) { return call.out_of_all != nullptr; }

void run_tile(ScatterSpec const& call, int owner, int a_row, int row, int column, int tile) {
  TilePushArgs const& push = call.push;
  int const rows = std::min(push.tiles.rows - row, kTile);
  int const columns = std::min(call.n - column, kTile);
  bool const is_own = owner == push.tiles.rank;
  int const others = push.tiles.world_size - 1;
  if (is_own) {
    for (int place = 0; place < others; ++place) {
      uint32_t* const signal = push.signals + place * kMaxScatterTiles + tile;
      await(signal, push.tag);
      *signal = 0;
    }
  }
  TilePushArgs::Peer const& peer = push.peers[is_own ? 0 : push.tiles.place(owner)];
  auto* const sent = reinterpret_cast<Element*>(peer.part + tile * kTileBytes);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      Element sum = dot(call, a_row + i, column + j);
      if (!is_own) {
        sent[i * kTile + j] = sum;
        continue;
      }
      for (int place = 0; place < others; ++place) {
        char const* const part = push.parts + push.tiles.place_by_arrival(place) * push.part_bytes;
        sum = static_cast<Element>(
            sum + reinterpret_cast<Element const*>(part + tile * kTileBytes)[i * kTile + j]);
      }
      int const at = (row + i) * call.n + column + j;
      if (call.residual != nullptr) {
        sum = static_cast<Element>(sum + static_cast<Element const*>(call.residual)[at]);
      }
      if (call.bias != nullptr) {
        sum = static_cast<Element>(sum + static_cast<Element const*>(call.bias)[column + j]);
      }
      static_cast<Element*>(call.out)[at] = sum;
      if (!is_all_reduce(call)) continue;
      for (int place = 0; place < others; ++place) {
        char* const there = push.peers[place].part + (push.tiles.tiles() + tile) * kTileBytes;
        reinterpret_cast<Element*>(there)[i * kTile + j] = sum;
      }
    }
  }
  if (!is_own) store_release(peer.signals + tile, push.tag);
  if (!is_own || !is_all_reduce(call)) return;
  for (int place = 0; place < others; ++place) {
    store_release(push.peers[place].signals + push.tiles.tiles() + tile, push.tag);
  }
}

/// The finished rows of the other ranks go to `out`.
void copy_results(ScatterSpec const& call, LaggedTileOrder const& order) {
  TilePushArgs const& push = call.push;
  ScatterTiles const& tiles = push.tiles;
  for (int number = 0; number < tiles.tiles(); ++number) {
    BlockCoord const block = order.own_block(number);
    int const row = tiles.row_of(block.m * kTile);
    int const tile = tiles.tiles() + tiles.tile(row / kTile, block.n);
    for (int place = 0; place < tiles.world_size - 1; ++place) {
      uint32_t* const signal = push.signals + place * kMaxScatterTiles + tile;
      await(signal, push.tag);
      *signal = 0;
      auto const* const from = reinterpret_cast<Element const*>(
          push.parts + place * push.part_bytes + tile * kTileBytes);
      auto* const to = static_cast<Element*>(call.out_of_all) +
                       std::size_t(tiles.at_place(place) * tiles.chunk_stride + row) * call.n;
      int const columns = std::min(call.n - block.n * kTile, kTile);
      for (int i = 0; i < std::min(tiles.rows - row, kTile); ++i) {
        std::copy(from + i * kTile, from + i * kTile + columns, to + i * call.n + block.n * kTile);
      }
    }
  }
}

int launch_scatter(void* params, void* stream) {
  auto const& call = *static_cast<ScatterSpec*>(params);
  cudaError_t const error = fake::enqueue("scatter", static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess && !state().runs_scatters) state().scatters.push_back(call);
  if (error != cudaSuccess || !state().runs_scatters) return error;
  TilePushArgs const& push = call.push;
  ScatterTiles const& tiles = push.tiles;
  for (int place = 0; place < tiles.world_size - 1; ++place) {
    await(push.credits + place, 1);
    push.credits[place] = 0;
  }
  TileOrder const order(ChunkGrid(tiles.padded_rows(), 1, tiles.world_size), call.n, kTile, kTile,
                        tiles.first_chunk(), 1, Raster::AlongM);
  LaggedTileOrder const lagged(order, call.lag);
  for (int step = 0; step < order.count(); ++step) {
    BlockCoord const block = is_all_reduce(call) ? lagged.block_at(step) : order.block_at(step);
    int const padded_row = block.m * kTile;
    int const row = tiles.row_of(padded_row);
    int const tile = tiles.tile(row / kTile, block.n);
    if (tile >= 0) {
      run_tile(call, tiles.owner(padded_row), tiles.a_row(padded_row), row, block.n * kTile, tile);
    }
  }
  if (is_all_reduce(call)) copy_results(call, lagged);
  for (int place = 0; place < tiles.world_size - 1; ++place) {
    store_release(push.peers[place].credit, 1);
  }
  return cudaSuccess;
}

ScatterEntry scatter_kernel(Schedule schedule, DType dtype = DType::BFloat16,
                            Accumulation accumulation = Accumulation::Fast) {
  return {facts_of({kTile, kTile, 64, 1, 1, schedule, false}, dtype, BLayout::ColumnMajor,
                   accumulation),
          sizeof(ScatterSpec),
          kTileBytes,
          &prepare_scatter,
          &setup,
          &launch_scatter};
}
ScatterEntry const pingpong_scatter = scatter_kernel(Schedule::Pingpong);
ScatterEntry const cooperative_scatter = scatter_kernel(Schedule::Cooperative);
ScatterEntry const fp8_scatter =
    scatter_kernel(Schedule::Pingpong, DType::E4M3, Accumulation::Slow);

}  // namespace

KernelEntry const* const kKernelTable[] = {&kernel, &fp8_kernel, &swapped_kernel};
std::size_t const kKernelCount = 3;
ScatterEntry const* const kScatterTable[] = {&pingpong_scatter, &cooperative_scatter, &fp8_scatter};
std::size_t const kScatterCount = 3;
ScatterEntry const* const kLaggedTable[] = {&pingpong_scatter};
std::size_t const kLaggedCount = 1;
GroupedEntry const* const kGroupedTable[] = {nullptr};
std::size_t const kGroupedCount = 0;
std::array<KernelEntry, 4> const kPackedKernels{};

cudaError_t prepare_stage() { return cudaSuccess; }
cudaError_t launch_stage(StageArgs const&, int, cudaStream_t stream) {
  return fake::enqueue("stage", stream);
}

cudaError_t prepare_release() { return cudaSuccess; }
cudaError_t launch_release(Release const&, cudaStream_t stream) {
  return fake::enqueue("release", stream);
}

cudaError_t prepare_combine() { return cudaSuccess; }
cudaError_t launch_open(CombineArgs const&, int, cudaStream_t stream) {
  return fake::enqueue("open", stream);
}
cudaError_t launch_combine(CombineArgs const&, CollectiveElement, int, cudaStream_t stream) {
  return fake::enqueue("combine", stream);
}

cudaError_t prepare_dispatch() { return cudaSuccess; }
cudaError_t launch_offer(DispatchArgs const&, int, cudaStream_t stream) {
  return fake::enqueue("offer", stream);
}
cudaError_t launch_dispatch(DispatchArgs const&, int, bool, cudaStream_t stream) {
  return fake::enqueue("dispatch", stream);
}

cudaError_t prepare_exchanges(int) { return cudaSuccess; }
cudaError_t prepare_relayed() { return cudaSuccess; }
cudaError_t launch_exchange(ExchangeArgs const& args, CollectiveElement element, ExchangeStep step,
                            Carrier carrier, ExchangeGrid const& grid, cudaStream_t stream) {
  fake::state().exchanges.push_back({args, element, step, carrier, grid, {}, {}});
  return fake::enqueue("exchange", stream);
}
cudaError_t launch_norm(ExchangeArgs const& args, NormArgs const& norm, CollectiveElement element,
                        ExchangeStep step, ExchangeGrid const& grid, cudaStream_t stream) {
  fake::state().exchanges.push_back({args, element, step, Carrier::Packets, grid, norm, {}});
  return fake::enqueue("exchange", stream);
}
cudaError_t launch_relayed(ExchangeArgs const& args, RelayArgs const& relays,
                           CollectiveElement element, ExchangeStep step, ExchangeGrid const& grid,
                           cudaStream_t stream) {
  fake::state().exchanges.push_back({args, element, step, Carrier::Packets, grid, {}, relays});
  return fake::enqueue("exchange", stream);
}

}  // namespace agmm
