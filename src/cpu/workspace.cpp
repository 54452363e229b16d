#include "cpu/workspace.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "cpu/shared_segment.hpp"
#include "order/scatter_order.hpp"

namespace agmm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStopPoll{20};  // how late a copy thread that waits sees that it should stop
constexpr std::chrono::hours kIdlePoll{1};  // of an idle copy thread, which is woken for a job
// How long a rank that found a mismatch stays, so that its peers see its tag too.
constexpr milliseconds kMismatchLinger{1000};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Wait::Clock::now().time_since_epoch())
      .count();
}

template <class T>
[[noreturn]] void refuse(const char* name, T found, const std::string& wanted) {
  throw std::invalid_argument(std::string(name) + ": found " + std::to_string(found) + ", wanted " +
                              wanted);
}

uint64_t segment_fingerprint(int world_size, int chunks_per_shard, int64_t slot_bytes) {
  return 0x61676d6d00000001u ^ static_cast<uint64_t>(world_size) << 48 ^
         static_cast<uint64_t>(chunks_per_shard) << 32 ^ static_cast<uint64_t>(slot_bytes);
}

// What a wait for a chunk's signal says when it ends, or takes long.
auto message_of_chunk(const Wait& wait, const uint32_t* word, uint32_t wanted, int rank, int source,
                      int64_t chunk) {
  return [=, &wait](bool ends) {
    return (ends ? timeout_message : waiting_message)(rank, source, chunk, load_acquire(word),
                                                      wanted, wait.waited_s(), wait.limit_s());
  };
}

}  // namespace

// A queue of jobs and the thread that does them in order.
class CpuWorkspace::CopyThread {
 public:
  using Job = std::function<void(CopyThread&)>;

  CopyThread() {
    // Signals such as SIGINT are for the threads of the application.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~CopyThread() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
    }
    changed_.notify_all();
    thread_.join();
  }

  void add(Job job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_all();
  }

  bool wait_idle(std::chrono::nanoseconds slice) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, slice, [this] { return jobs_.empty(); });
  }

  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }
  void set_delay_us(int us) { delay_us_.store(us, std::memory_order_relaxed); }

  void delay() {
    const int longest = delay_us_.load(std::memory_order_relaxed);
    if (longest <= 0) return;
    std::uniform_int_distribution<int> us(0, longest);
    std::this_thread::sleep_for(std::chrono::microseconds(us(random_)));
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      // GCC 12's wait() would bind wheels to the libstdc++ of a system newer than they need.
      const auto is_due = [this] { return stopping() || !jobs_.empty(); };
      while (!changed_.wait_for(lock, kIdlePoll, is_due)) continue;
      if (stopping()) return;
      const Job& job = jobs_.front();  // stays in the queue until done, so that idle means done
      lock.unlock();
      job(*this);
      lock.lock();
      jobs_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> delay_us_{0};
  std::minstd_rand random_{std::random_device{}()};
  std::thread thread_;
};

CpuWorkspace::CpuWorkspace(int rank, int world_size, int64_t slot_bytes, int chunks_per_shard,
                           double timeout_s)
    : rank_(rank),
      world_size_(world_size),
      slot_bytes_(slot_bytes),
      chunks_per_shard_(chunks_per_shard),
      timeout_s_(0),
      warn_s_(0),
      owner_(::getpid()) {
  if (world_size < 1) refuse("world_size", world_size, ">= 1");
  if (rank < 0 || rank >= world_size) {
    refuse("rank", rank, "0 <= rank < world_size = " + std::to_string(world_size));
  }
  const int most_chunks = std::numeric_limits<int>::max() / world_size;
  if (chunks_per_shard < 1 || chunks_per_shard > most_chunks) {
    refuse("chunks_per_shard", chunks_per_shard, "1 to " + std::to_string(most_chunks));
  }
  if (slot_bytes < 0 || slot_bytes > std::numeric_limits<int64_t>::max() / 4) {
    refuse("slot_bytes", slot_bytes, "a size >= 0 that fits into memory twice");
  }
  set_timeout_s(timeout_s);

  sweep_stale_segments();
  SharedSegment own =
      SharedSegment::create(SegmentLayout(world_size, chunks_per_shard, slot_bytes),
                            segment_fingerprint(world_size, chunks_per_shard, slot_bytes));
  for (int slot = 0; slot < kSlots; ++slot) {
    for (int peer = 0; peer < world_size; ++peer) store_release(own.credits(slot) + peer, 1);
  }
  name_ = own.name();
  segments_.resize(static_cast<size_t>(world_size));
  segments_[static_cast<size_t>(rank)] = std::make_unique<SharedSegment>(std::move(own));
}

CpuWorkspace::~CpuWorkspace() { close(); }

void CpuWorkspace::set_timeout_s(double seconds) {
  if (!(seconds > 0)) refuse("timeout_s", seconds, "a number of seconds > 0");
  timeout_s_.store(seconds);
}

void CpuWorkspace::connect(const std::vector<std::string>& names) {
  require_open("connect");
  if (names.size() != segments_.size()) {
    refuse("names", names.size(), std::to_string(segments_.size()) + " of them");
  }
  if (thread_) throw std::runtime_error("connect: this workspace is connected already");
  const SegmentLayout layout(world_size_, chunks_per_shard_, slot_bytes_);
  const uint64_t fingerprint = segment_fingerprint(world_size_, chunks_per_shard_, slot_bytes_);
  for (size_t peer = 0; peer < names.size(); ++peer) {
    if (peer == static_cast<size_t>(rank_)) continue;
    segments_[peer] =
        std::make_unique<SharedSegment>(SharedSegment::map(names[peer], layout, fingerprint));
  }
  thread_ = std::make_unique<CopyThread>();
}

void CpuWorkspace::take_memory() {
  require_connected("take_memory");
  if (::getpid() == owner_) segments_[static_cast<size_t>(rank_)]->take_memory();
}

void CpuWorkspace::close() noexcept {
  if (::getpid() != owner_) {
    // A forked child: the thread was not copied into it, and the names are the parent's.
    static_cast<void>(thread_.release());
    for (std::unique_ptr<SharedSegment>& segment : segments_) static_cast<void>(segment.release());
  }
  thread_.reset();
  segments_.clear();
}

void CpuWorkspace::require_open(const char* what) const {
  if (segments_.empty()) throw std::runtime_error(std::string(what) + ": the workspace is closed");
}

void CpuWorkspace::require_connected(const char* what) const {
  require_open(what);
  if (!thread_) throw std::runtime_error(std::string(what) + ": call connect first");
}

void CpuWorkspace::require_slot(int slot) const {
  if (slot < 0 || slot >= kSlots) refuse("slot", slot, "0 or 1");
}

void CpuWorkspace::require_waits() const {
  if (waits_ended_.load()) throw std::runtime_error("wait: this workspace is about to be closed");
}

char* CpuWorkspace::slot(int slot) const {
  require_open("slot");
  require_slot(slot);
  return segments_[static_cast<size_t>(rank_)]->slot(slot);
}

uint32_t* CpuWorkspace::signals(int slot) const {
  require_open("signals");
  require_slot(slot);
  return segments_[static_cast<size_t>(rank_)]->signals(slot);
}

void CpuWorkspace::push(int slot, const void* shard, int64_t shard_bytes, int64_t chunk_bytes,
                        uint32_t tag) {
  require_connected("push");
  require_slot(slot);
  if (shard_bytes < 0 || shard_bytes > slot_bytes_ / world_size_) {
    refuse("shard_bytes", shard_bytes,
           "0 to slot_bytes / world_size = " + std::to_string(slot_bytes_ / world_size_));
  }
  if (chunk_bytes < 0 || (shard_bytes > 0 && chunk_bytes == 0) ||
      (shard_bytes > 0 && (shard_bytes - 1) / chunk_bytes >= chunks_per_shard_)) {
    refuse("chunk_bytes", chunk_bytes,
           "enough that " + std::to_string(chunks_per_shard_) + " chunks hold " +
               std::to_string(shard_bytes) + " bytes");
  }
  if (tag == 0) refuse("tag", tag, "a nonzero value");
  const auto* from = static_cast<const char*>(shard);
  thread_->add([=](CopyThread& thread) {
    for (int distance = 1; distance < world_size_; ++distance) {
      const int peer = (rank_ - distance + world_size_) % world_size_;
      take_credit(slot, peer, thread);
      if (thread.stopping()) return;
      for (int i = 0; i < chunks_per_shard_; ++i) {
        const int64_t begin = std::min(i * chunk_bytes, shard_bytes);
        const int64_t end = std::min(begin + chunk_bytes, shard_bytes);
        write(slot, peer, rank_ * shard_bytes + begin, from + begin, end - begin, i, tag, thread);
      }
    }
  });
}

void CpuWorkspace::take_credits(int slot) {
  require_connected("take_credits");
  require_slot(slot);
  thread_->add([=](CopyThread& thread) {
    for (int distance = 1; distance < world_size_ && !thread.stopping(); ++distance) {
      take_credit(slot, (rank_ + distance) % world_size_, thread);
    }
  });
}

void CpuWorkspace::send(int slot, int owner, int index, const void* piece, int64_t piece_bytes,
                        int64_t part_bytes, int64_t offset, uint32_t tag) {
  require_connected("send");
  require_slot(slot);
  if (owner < 0 || owner >= world_size_ || owner == rank_) {
    refuse("owner", owner, "another rank of " + std::to_string(world_size_));
  }
  if (index < 0 || index >= chunks_per_shard_) {
    refuse("index", index, "0 <= index < " + std::to_string(chunks_per_shard_));
  }
  const int64_t most = slot_bytes_ / (world_size_ - 1);
  if (part_bytes < 0 || part_bytes > most) {
    refuse("part_bytes", part_bytes,
           "0 to slot_bytes / (world_size - 1) = " + std::to_string(most));
  }
  if (offset < 0 || offset > part_bytes) {
    refuse("offset", offset, "0 to part_bytes = " + std::to_string(part_bytes));
  }
  if (piece_bytes < 0 || piece_bytes > part_bytes - offset) {
    refuse("piece_bytes", piece_bytes, "0 to " + std::to_string(part_bytes - offset));
  }
  if (tag == 0) refuse("tag", tag, "a nonzero value");
  const int64_t at = part_place(rank_, owner, world_size_) * part_bytes + offset;
  const auto* from = static_cast<const char*>(piece);
  thread_->add(
      [=](CopyThread& thread) { write(slot, owner, at, from, piece_bytes, index, tag, thread); });
}

// Writes one chunk to the peer's slot, whose credit has been taken, and signals it.
void CpuWorkspace::write(int slot, int peer, int64_t at, const char* from, int64_t bytes, int index,
                         uint32_t tag, CopyThread& thread) const {
  thread.delay();
  const SharedSegment& segment = *segments_[static_cast<size_t>(peer)];
  if (bytes > 0) std::memcpy(segment.slot(slot) + at, from, static_cast<size_t>(bytes));
  const int chunk = rank_ * chunks_per_shard_ + index;
  segment.arrivals(slot)[chunk] = now_ns();
  store_release(segment.signals(slot) + chunk, tag);
}

void CpuWorkspace::take_credit(int slot, int peer, const CopyThread& thread) const {
  uint32_t* credit = segments_[static_cast<size_t>(rank_)]->credits(slot) + peer;
  Wait wait(timeout_s(), warn_s());
  const auto is_over = [&] { return load_acquire(credit) == 1 || thread.stopping(); };
  const auto message = [&](bool ends) {
    return (ends ? credit_timeout_message : credit_waiting_message)(
        rank_, peer, slot, load_acquire(credit), wait.waited_s(), wait.limit_s());
  };
  while (!wait.poll(is_over, kStopPoll, message)) {
  }
  if (thread.stopping()) return;
  // Plain order is enough: the peer gives the next credit only after it has seen our signal.
  store_release(credit, 0);
}

bool CpuWorkspace::wait_chunk(Wait& wait, int slot, int chunk, uint32_t tag,
                              std::chrono::nanoseconds slice) const {
  require_open("wait_chunk");
  require_slot(slot);
  require_waits();
  const int chunks = world_size_ * chunks_per_shard_;
  if (chunk < 0 || chunk >= chunks) {
    refuse("chunk", chunk, "0 <= chunk < " + std::to_string(chunks));
  }
  const int source = chunk / chunks_per_shard_;
  if (source == rank_) {
    refuse("chunk", chunk, "a chunk of another rank (this is rank " + std::to_string(rank_) + ")");
  }
  const uint32_t* word = signals(slot) + chunk;
  const auto message = message_of_chunk(wait, word, tag, rank_, source, chunk);
  if (!wait.poll([word] { return load_acquire(word) != 0; }, slice, message)) return false;
  const uint32_t seen = load_acquire(word);
  if (seen == tag) return true;
  if (thread_) thread_->wait_idle(kMismatchLinger);
  end_process(mismatch_message(rank_, source, chunk, seen, tag));
}

bool CpuWorkspace::wait_pushed(std::chrono::nanoseconds slice) {
  require_open("wait_pushed");
  require_waits();
  return !thread_ || thread_->wait_idle(slice);
}

void CpuWorkspace::release(int slot) {
  require_connected("release");
  require_slot(slot);
  uint32_t* words = signals(slot);
  for (int chunk = 0; chunk < world_size_ * chunks_per_shard_; ++chunk) {
    store_release(words + chunk, 0);
  }
  for (int distance = 1; distance < world_size_; ++distance) {
    const size_t peer = static_cast<size_t>((rank_ + distance) % world_size_);
    store_release(segments_[peer]->credits(slot) + rank_, 1);
  }
}

std::vector<int64_t> CpuWorkspace::arrival_ns(int slot) const {
  require_open("arrival_ns");
  require_slot(slot);
  const int64_t* times = segments_[static_cast<size_t>(rank_)]->arrivals(slot);
  return std::vector<int64_t>(times, times + world_size_ * chunks_per_shard_);
}

void CpuWorkspace::set_push_delay_us(int us) {
  if (us < 0) refuse("us", us, ">= 0");
  require_connected("set_push_delay_us");
  thread_->set_delay_us(us);
}

bool wait_signal(Wait& wait, const uint32_t* word, uint32_t wanted, int rank, int source,
                 int64_t chunk, std::chrono::nanoseconds slice) {
  return wait.poll([=] { return load_acquire(word) == wanted; }, slice,
                   message_of_chunk(wait, word, wanted, rank, source, chunk));
}

}  // namespace agmm
