// Words by which kernels tell the host, without a copy, that they have moved an infinity or a NaN
// (kernel_args.h). The words lie in pinned memory of the host, which the device sees at the same
// address. A word is used again when its last holder has let go of it. Words may outlive this
// object. Runner only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/cuda/cuda_device.h"

namespace hvdlite {

using FiniteWord = std::shared_ptr<std::uint32_t>;

class FiniteWords {
 public:
  explicit FiniteWords(std::shared_ptr<CudaDevice> device)
      : stock_(std::make_shared<Stock>(std::move(device))) {}

  // Gives a word that is 0. The caller holds it until the device has ended the work that writes to
  // it, and reads it then (execution/finite_check.h).
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
