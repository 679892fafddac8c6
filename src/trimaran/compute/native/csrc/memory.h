// Large, zeroed, 64-byte aligned memory that is taken from the system page by page as it
// is touched, in huge pages where they can be had.
#pragma once

#include <cstddef>
#include <memory>

namespace trimaran {

class Memory {
 public:
  Memory() = default;
  // Throws std::bad_alloc.
  explicit Memory(std::size_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A piece of a large stretch that many share: small matrices by themselves would lie in small
// pages, whose translation costs more than their reading. The stretch goes with its last
// piece.
class SharedMemory {
 public:
  SharedMemory() = default;
  // Throws std::bad_alloc. May be called by several threads.
  explicit SharedMemory(std::size_t bytes);
  // Bytes `at` to `at + bytes` of a stretch; they must lie in it.
  SharedMemory(std::shared_ptr<Memory> stretch, std::size_t at, std::size_t bytes);

  std::size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::shared_ptr<Memory> stretch_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace trimaran
