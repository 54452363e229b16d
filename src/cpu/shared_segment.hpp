// One rank's shared-memory segment: layout, creation, mapping, removal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace agmm {

// Offsets of a segment's parts; a function of three numbers, so that every rank computes the same.
struct SegmentLayout {
  SegmentLayout(int world_size, int chunks_per_shard, int64_t slot_bytes);

  size_t signals[2];
  size_t arrivals[2];
  size_t credits[2];
  size_t slots[2];
  size_t total;
};

class FileDescriptor;

class SharedSegment {
 public:
  // A fresh segment that this process owns, with memory for its words. See take_memory().
  static SharedSegment create(const SegmentLayout& layout, uint64_t fingerprint);
  // A peer's. Throws std::runtime_error when it is not there or was not made with `fingerprint`.
  static SharedSegment map(const std::string& name, const SegmentLayout& layout,
                           uint64_t fingerprint);

  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&&) = delete;
  ~SharedSegment();

  const std::string& name() const { return name_; }
  void unlink() noexcept;
  // Removes the name of an own segment, then takes the memory of its slots. Throws
  // std::runtime_error when there is too little.
  void take_memory();

  uint32_t* signals(int slot) const { return at<uint32_t>(layout_.signals[slot]); }
  int64_t* arrivals(int slot) const { return at<int64_t>(layout_.arrivals[slot]); }
  uint32_t* credits(int slot) const { return at<uint32_t>(layout_.credits[slot]); }
  char* slot(int slot) const { return at<char>(layout_.slots[slot]); }

 private:
  SharedSegment(std::string name, const SegmentLayout& layout, int lock_fd, char* base)
      : name_(std::move(name)), layout_(layout), lock_fd_(lock_fd), base_(base) {}

  static SharedSegment fill(std::string name, FileDescriptor& fd, const SegmentLayout& layout,
                            uint64_t fingerprint);

  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  std::string name_;
  SegmentLayout layout_;
  int lock_fd_;  // held, with an flock, while the name exists; -1 for a peer's segment and later
  char* base_;
};

// Removes the names of segments whose owners no longer exist.
void sweep_stale_segments() noexcept;

}  // namespace agmm
