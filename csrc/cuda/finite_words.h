// Words that kernels write and the host reads without a copy: whether something infinite or NaN was
// moved (kernel_args.h). They lie in pinned memory of the host, which the device sees at the same
// address. A word is used again when nobody holds it. Runner only; outlived by its words.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/cuda_device.h"

namespace hvdlite {

using FiniteWord = std::shared_ptr<std::uint32_t>;

class FiniteWords {
 public:
  explicit FiniteWords(std::shared_ptr<CudaDevice> device)
      : stock_(std::make_shared<Stock>(std::move(device))) {}

  // A word that is 0. Held until the device has ended what writes to it.
  Result<FiniteWord> take();

 private:
  struct Stock {
    explicit Stock(std::shared_ptr<CudaDevice> on) : device(std::move(on)) {}
    ~Stock();
    const std::shared_ptr<CudaDevice> device;
    std::vector<void*> blocks;
    std::vector<std::uint32_t*> spare;
  };
  std::shared_ptr<Stock> stock_;
};

}  // namespace hvdlite
