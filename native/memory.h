// Owned memory on cache-line boundaries, with huge pages advised where it is large enough for them.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace moedecode {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes);  // zero-filled; throws std::bad_alloc
  ~Buffer();
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <class T = unsigned char>
  T* as() const { return static_cast<T*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Hands out cache-line aligned pieces of one buffer. Two passes: measure (base null), then place.
class Arena {
 public:
  explicit Arena(unsigned char* base) : base_(base) {}
  template <class T>
  T* take(std::size_t count) {
    unsigned char* p = base_ ? base_ + used_ : nullptr;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    T* first = reinterpret_cast<T*>(p);
    if constexpr (!std::is_trivially_default_constructible_v<T>)
      for (std::size_t i = 0; first && i < count; ++i) new (first + i) T();
    return first;
  }
  std::size_t used() const { return used_; }

 private:
  unsigned char* base_;
  std::size_t used_ = 0;
};

}  // namespace moedecode
