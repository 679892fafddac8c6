#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

namespace trimaran {

// AddressSanitizer sees the ends of what comes from its own allocator only.
#if defined(__SANITIZE_ADDRESS__)
Memory::Memory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = std::aligned_alloc(64, round_up(bytes, 64));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, bytes);
}

Memory::~Memory() { std::free(data_); }
#else
Memory::Memory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    throw std::bad_alloc();
  }
#if defined(MADV_HUGEPAGE)
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  if (bytes >= kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}
#endif

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SharedMemory::SharedMemory(std::size_t bytes) : bytes_(bytes) {
#if defined(__SANITIZE_ADDRESS__)
  constexpr std::size_t kStretch = 0;  // every piece by itself
#else
  constexpr std::size_t kStretch = std::size_t{64} << 20;
#endif
  static std::mutex mutex;
  static std::weak_ptr<Memory> current;
  static std::size_t used = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::size_t wanted = round_up(bytes, 64);
  stretch_ = current.lock();
  if (!stretch_ || stretch_->size() - used < wanted) {
    stretch_ = std::make_shared<Memory>(wanted > kStretch ? wanted : kStretch);
    current = stretch_;
    used = 0;
  }
  data_ = stretch_->as<char>() + used;
  used += wanted;
}

SharedMemory::SharedMemory(std::shared_ptr<Memory> stretch, std::size_t at, std::size_t bytes)
    : stretch_(std::move(stretch)), data_(stretch_->as<char>() + at), bytes_(bytes) {}

}  // namespace trimaran
