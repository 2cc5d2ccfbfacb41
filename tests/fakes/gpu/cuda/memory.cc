// Device memory: one memory file for each allocation, mapped twice.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cuda/device.h"
#include "cuda/stream.h"

namespace fakegpu {
namespace {

struct Block {
  std::uint64_t address = 0;  // as handed out
  char* alias = nullptr;
  std::size_t bytes = 0;
  std::size_t mapped = 0;
  int device = 0;
};

struct Memory {
  hvdlite::Mutex mutex;
  std::map<std::uint64_t, Block> blocks HVDLITE_GUARDED_BY(mutex);  // by address
};

Memory& memory() {
  static auto* all = new Memory;  // outlives the streams' threads
  return *all;
}

std::uint64_t number_of(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }
void* pointer_of(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// New memory holds garbage on a device: a test that reads it must not pass by chance.
constexpr int kGarbage = 0xa5;
constexpr std::size_t kGarbageBytes = std::size_t{1} << 20;

Block map_device(std::size_t bytes, int device) {
  Block block;
  block.bytes = bytes;
  block.mapped = (bytes + 4095) / 4096 * 4096;
  block.device = device;
  const int fd = ::memfd_create("fake_gpu", MFD_CLOEXEC);
  if (fd < 0) return block;
  if (::ftruncate(fd, static_cast<off_t>(block.mapped)) == 0) {
    void* shown = ::mmap(nullptr, block.mapped, PROT_NONE, MAP_SHARED, fd, 0);
    void* alias = ::mmap(nullptr, block.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shown != MAP_FAILED && alias != MAP_FAILED) {
      block.address = number_of(shown);
      block.alias = static_cast<char*>(alias);
      std::memset(alias, kGarbage, std::min(bytes, kGarbageBytes));
    }
  }
  ::close(fd);
  return block;
}

// The block that holds `address`; alias is nullptr when none does.
Block block_of(std::uint64_t address) {
  hvdlite::MutexLock lock(memory().mutex);
  auto after = memory().blocks.upper_bound(address);
  if (after == memory().blocks.begin()) return {};
  const Block& block = std::prev(after)->second;
  return address - block.address < block.bytes ? block : Block{};
}

}  // namespace

char* resolve(int device, std::uint64_t address, std::size_t bytes) {
  const Block block = block_of(address);
  const std::uint64_t offset = address - block.address;
  if (block.alias == nullptr || bytes > block.bytes - offset) return nullptr;
  return device < 0 || block.device == device ? block.alias + offset : nullptr;
}

namespace {

// The place where a copy reads or writes: the alias, or the address itself when no block holds it
// (memory of the host); nullptr when it runs over the end of a block.
char* copy_end(std::uint64_t address, std::size_t bytes) {
  if (block_of(address).alias == nullptr) return static_cast<char*>(pointer_of(address));
  return resolve(-1, address, bytes);
}

// Gives `work` to the stream, for the calling thread's device.
CUresult give(CUstream handle, bool valid, std::function<void()> work) {
  return in_context([&](Device& device) -> CUresult {
    const std::shared_ptr<Stream> stream = stream_of(handle, device.ordinal);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!valid) return CUDA_ERROR_INVALID_VALUE;
    if (is_default(handle)) FAKE_COUNT(device, default_stream_work, 1);
    stream->put(std::move(work));
    return CUDA_SUCCESS;
  });
}

}  // namespace
}  // namespace fakegpu

using namespace fakegpu;

FAKE_API CUresult cuMemAlloc_v2(CUdeviceptr* out, std::size_t bytes) {
  return in_context([&](Device& device) -> CUresult {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const std::int64_t limit = fake_option("FAKE_CUDA_MEMORY", device.ordinal, 1LL << 32);
    auto& used = FAKE_COUNTER(device, live_bytes);
    if (used + static_cast<std::int64_t>(bytes) > limit) return CUDA_ERROR_OUT_OF_MEMORY;
    const Block block = map_device(bytes, device.ordinal);
    if (block.alias == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    hvdlite::MutexLock lock(memory().mutex);
    memory().blocks[block.address] = block;
    used += static_cast<std::int64_t>(bytes);
    FAKE_COUNT(device, live_allocations, 1);
    FAKE_COUNT(device, allocations, 1);
    *out = block.address;
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuMemFree_v2(CUdeviceptr address) {
  return in_context([&](Device&) -> CUresult {
    if (address == 0) return CUDA_SUCCESS;
    const Block block = block_of(address);
    if (block.alias == nullptr || block.address != address) return CUDA_ERROR_INVALID_VALUE;
    Device& owner = *device_at(block.device);
    FAKE_COUNT(owner, host_syncs, 1);  // the driver waits for the device here, too
    wait_for_device(owner.ordinal);
    hvdlite::MutexLock lock(memory().mutex);
    memory().blocks.erase(address);
    ::munmap(pointer_of(block.address), block.mapped);
    ::munmap(block.alias, block.mapped);
    FAKE_COUNT(owner, live_bytes, -static_cast<std::int64_t>(block.bytes));
    FAKE_COUNT(owner, live_allocations, -1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuPointerGetAttribute(void* out, int attribute, CUdeviceptr address) {
  if (const CUresult status = enter()) return status;
  const Block block = block_of(address);
  if (block.alias == nullptr || attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *static_cast<int*>(out) = block.device;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, std::size_t bytes,
                                CUstream stream) {
  char* to = copy_end(target, bytes);
  const char* from = copy_end(source, bytes);
  const bool valid = bytes == 0 || (to != nullptr && from != nullptr);
  return give(stream, valid, [to, from, bytes] {
    if (bytes > 0) std::memmove(to, from, bytes);
  });
}

FAKE_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, std::size_t bytes,
                                       CUstream stream) {
  return cuMemcpyAsync(target, number_of(source), bytes, stream);
}

FAKE_API CUresult cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, std::size_t bytes,
                                       CUstream stream) {
  return cuMemcpyAsync(number_of(target), source, bytes, stream);
}

FAKE_API CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, std::size_t bytes,
                                  CUstream stream) {
  char* to = resolve(-1, address, bytes);
  return give(stream, to != nullptr || bytes == 0, [to, value, bytes] {
    if (bytes > 0) std::memset(to, value, bytes);
  });
}

FAKE_API void* fake_resolve(int device, const void* address, std::size_t bytes) {
  return resolve(device, number_of(address), bytes);
}
