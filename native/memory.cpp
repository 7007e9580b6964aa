#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace moedecode {

namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;
}

Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    bytes_ = 0;
    throw std::bad_alloc();
  }
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePage) madvise(p, bytes, MADV_HUGEPAGE);  // advice only: refusal costs speed, not truth
#endif
  data_ = p;
}

Buffer::~Buffer() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace moedecode
