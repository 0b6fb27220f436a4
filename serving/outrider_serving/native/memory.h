// Memory that is kept from one call to the next.

#pragma once

#include <memory>

#include "vectors.h"

namespace outrider {

template <class S>
class Memory {  // grows, and is not initialised
 public:
  S* reserve(int64_t count) {
    if (count > size_) {
      size_ = 0;
      memory_.reset();
      memory_ = std::make_unique_for_overwrite<Line[]>(pieces(count * sizeof(S), kBytes));
      size_ = count;
    }
    return reinterpret_cast<S*>(memory_.get());
  }

 private:
  struct alignas(kBytes) Line {
    char bytes[kBytes];
  };
  std::unique_ptr<Line[]> memory_;
  int64_t size_ = 0;
};

}  // namespace outrider
