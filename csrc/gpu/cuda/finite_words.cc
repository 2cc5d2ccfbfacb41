#include "gpu/cuda/finite_words.h"

namespace hvdlite {
namespace {

constexpr std::size_t kBlockBytes = 4096;

}  // namespace

FiniteWords::Stock::~Stock() {
  const CudaDevice::Current current(*device);
  for (void* block : blocks) (void)device->api().host_memory_free(block);
}

Result<FiniteWord> FiniteWords::take() {
  if (stock_->spare.empty()) {
    const CudaDevice& device = *stock_->device;
    const CudaDevice::Current current(device);
    void* block = nullptr;
    HVDLITE_RETURN_IF_ERROR(device.check(device.api().host_memory_allocate(&block, kBlockBytes),
                                         "allocating pinned memory"));
    stock_->blocks.push_back(block);
    auto* words = static_cast<std::uint32_t*>(block);
    for (std::size_t i = 0; i < kBlockBytes / sizeof(*words); ++i) {
      stock_->spare.push_back(words + i);
    }
  }
  std::uint32_t* word = stock_->spare.back();
  stock_->spare.pop_back();
  *word = 0;
  return FiniteWord(word, [stock = stock_](std::uint32_t* back) { stock->spare.push_back(back); });
}

}  // namespace hvdlite
