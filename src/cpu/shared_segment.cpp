#include "cpu/shared_segment.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

namespace agmm {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }
  int take() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

namespace {

constexpr size_t kHeaderBytes = 64;  // the fingerprint, in a line of its own
constexpr size_t kCacheLine = 64;
constexpr size_t kPage = 4096;
constexpr char kDirectory[] = "/dev/shm";
constexpr char kNameFormat[] = "/agmm-%d-%016" PRIx64;
constexpr char kNamePattern[] = "agmm-%d-%16" SCNx64 "%n";

constexpr size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error("shared memory: " + what + ": " + std::strerror(error));
}

std::string fresh_name() {
  std::random_device random;
  const uint64_t number = static_cast<uint64_t>(random()) << 32 | random();
  char name[64];
  std::snprintf(name, sizeof name, kNameFormat, static_cast<int>(::getpid()), number);
  return name;
}

char* map_all(int fd, size_t bytes, const std::string& name) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("mapping " + name, errno);
  return static_cast<char*>(base);
}

[[noreturn]] void fail_reserving(size_t bytes, int error) {
  fail("reserving " + std::to_string(bytes) + " bytes in " + kDirectory, error);
}

// Takes the pages now: where there is too little room this is an error, not a SIGBUS later.
void reserve(int fd, size_t bytes) {
  int error = EINTR;
  while (error == EINTR) error = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error != 0) fail_reserving(bytes, error);
}

void sweep_one(const char* file) {
  int pid = 0;
  uint64_t number = 0;
  int length = 0;
  if (std::sscanf(file, kNamePattern, &pid, &number, &length) != 2 || file[length] != '\0') return;
  const std::string name = std::string("/") + file;
  const FileDescriptor fd(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (fd.get() < 0 || ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) return;
  ::shm_unlink(name.c_str());
}

}  // namespace

SegmentLayout::SegmentLayout(int world_size, int chunks_per_shard, int64_t slot_bytes) {
  const size_t chunks = static_cast<size_t>(world_size) * static_cast<size_t>(chunks_per_shard);
  size_t offset = kHeaderBytes;
  const auto place = [&offset](size_t bytes, size_t align) {
    const size_t at = round_up(offset, align);
    offset = at + bytes;
    return at;
  };
  for (size_t& at : signals) at = place(chunks * sizeof(uint32_t), kCacheLine);
  for (size_t& at : arrivals) at = place(chunks * sizeof(int64_t), kCacheLine);
  for (size_t& at : credits) {
    at = place(static_cast<size_t>(world_size) * sizeof(uint32_t), kCacheLine);
  }
  for (size_t& at : slots) at = place(static_cast<size_t>(slot_bytes), kPage);
  total = round_up(offset, kPage);
}

// A living owner holds an flock for as long as its segment has a name, so a name that can be locked
// is a leftover. (A pid would not do: it is used again, and differs between pid namespaces that
// share one /dev/shm.) A sweeper may come between the creation and the lock; then the owner tries
// anew. While there is a name the segment has memory for its words alone, so that a process that is
// killed meanwhile leaves next to nothing until the next job sweeps it.
SharedSegment SharedSegment::create(const SegmentLayout& layout, uint64_t fingerprint) {
  for (;;) {
    std::string name = fresh_name();
    FileDescriptor fd(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (fd.get() < 0) fail("creating " + name, errno);
    struct stat status{};
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0 && ::fstat(fd.get(), &status) == 0 &&
        status.st_nlink > 0) {
      return fill(std::move(name), fd, layout, fingerprint);
    }
    ::shm_unlink(name.c_str());
  }
}

SharedSegment SharedSegment::fill(std::string name, FileDescriptor& fd, const SegmentLayout& layout,
                                  uint64_t fingerprint) {
  try {
    reserve(fd.get(), layout.slots[0]);
    if (::ftruncate(fd.get(), static_cast<off_t>(layout.total)) != 0) {
      fail_reserving(layout.total, errno);
    }
    char* base = map_all(fd.get(), layout.total, name);
    std::memcpy(base, &fingerprint, sizeof fingerprint);
    return SharedSegment(std::move(name), layout, fd.take(), base);
  } catch (...) {
    ::shm_unlink(name.c_str());
    throw;
  }
}

SharedSegment SharedSegment::map(const std::string& name, const SegmentLayout& layout,
                                 uint64_t fingerprint) {
  const FileDescriptor fd(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (fd.get() < 0) fail("opening a peer's segment " + name, errno);
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) fail("looking at " + name, errno);
  if (static_cast<size_t>(status.st_size) != layout.total) {
    throw std::runtime_error("shared memory: " + name + ": found " +
                             std::to_string(status.st_size) + " bytes, wanted " +
                             std::to_string(layout.total));
  }
  SharedSegment segment(name, layout, -1, map_all(fd.get(), layout.total, name));
  if (std::memcmp(segment.base_, &fingerprint, sizeof fingerprint) != 0) {
    throw std::runtime_error("shared memory: " + name + " was made for another workspace");
  }
  return segment;
}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : name_(std::move(other.name_)),
      layout_(other.layout_),
      lock_fd_(std::exchange(other.lock_fd_, -1)),
      base_(std::exchange(other.base_, nullptr)) {}

SharedSegment::~SharedSegment() {
  unlink();
  if (base_ != nullptr) ::munmap(base_, layout_.total);
}

void SharedSegment::unlink() noexcept {
  if (lock_fd_ < 0) return;
  ::shm_unlink(name_.c_str());
  ::close(std::exchange(lock_fd_, -1));
}

void SharedSegment::take_memory() {
  if (lock_fd_ < 0) return;
  ::shm_unlink(name_.c_str());
  const FileDescriptor fd(std::exchange(lock_fd_, -1));
  reserve(fd.get(), layout_.total);
}

void sweep_stale_segments() noexcept {
  DIR* directory = ::opendir(kDirectory);
  if (directory == nullptr) return;
  while (const dirent* entry = ::readdir(directory)) sweep_one(entry->d_name);
  ::closedir(directory);
}

}  // namespace agmm
