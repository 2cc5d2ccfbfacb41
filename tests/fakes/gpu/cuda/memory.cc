// Device memory: one memory file for each allocation, mapped twice.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cuda/device.h"
#include "cuda/stream.h"

namespace fakegpu {
namespace {

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

void insert(const Block& block) {
  hvdlite::MutexLock lock(memory().mutex);
  memory().blocks[block.address] = block;
}

// Removes and returns the block that begins there, if it is of that kind; otherwise alias is
// nullptr.
Block take(std::uint64_t address, bool host) {
  hvdlite::MutexLock lock(memory().mutex);
  const auto found = memory().blocks.find(address);
  if (found == memory().blocks.end()) return {};
  const Block block = found->second;
  if (block.host != host) return {};
  memory().blocks.erase(found);
  return block;
}

}  // namespace

Block block_of(std::uint64_t address) {
  hvdlite::MutexLock lock(memory().mutex);
  auto after = memory().blocks.upper_bound(address);
  if (after == memory().blocks.begin()) return {};
  const Block& block = std::prev(after)->second;
  return address - block.address < block.bytes ? block : Block{};
}

char* resolve(int device, std::uint64_t address, std::size_t bytes) {
  const Block block = block_of(address);
  const std::uint64_t offset = address - block.address;
  if (block.alias == nullptr || bytes > block.bytes - offset) return nullptr;
  if (device >= 0 && !block.host && block.device != device) return nullptr;
  return block.alias + offset;
}

namespace {

// The place where a copy reads or writes: the alias, or the address itself when no block holds it
// (pageable memory of the host); nullptr when it runs over the end of a block.
char* copy_end(std::uint64_t address, std::size_t bytes) {
  if (block_of(address).alias == nullptr) return static_cast<char*>(pointer_of(address));
  return resolve(-1, address, bytes);
}

CUresult copy(Device& device, std::uint64_t target, std::uint64_t source, std::size_t bytes,
              CUstream handle) {
  const std::shared_ptr<Stream> stream = stream_of(handle, device.ordinal);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  char* to = copy_end(target, bytes);
  const char* from = copy_end(source, bytes);
  if (bytes > 0 && (to == nullptr || from == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  FAKE_COUNT(device, copies, 1);
  if (is_default(handle)) FAKE_COUNT(device, default_stream_work, 1);
  stream->put([to, from, bytes] {
    if (bytes > 0) std::memmove(to, from, bytes);
  });
  return CUDA_SUCCESS;
}

CUresult set(const char* function, std::uint64_t address, const void* unit, std::size_t unit_bytes,
             std::size_t count, CUstream handle) {
  unsigned value = 0;
  std::memcpy(&value, unit, unit_bytes);
  return in_context(function, [&](Device& device) -> CUresult {
    const std::shared_ptr<Stream> stream = stream_of(handle, device.ordinal);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    char* to = resolve(-1, address, count * unit_bytes);
    if (to == nullptr && count > 0) return CUDA_ERROR_INVALID_VALUE;
    FAKE_COUNT(device, memsets, 1);
    if (is_default(handle)) FAKE_COUNT(device, default_stream_work, 1);
    stream->put([to, value, unit_bytes, count] {
      for (std::size_t i = 0; i < count; ++i) std::memcpy(to + i * unit_bytes, &value, unit_bytes);
    });
    return CUDA_SUCCESS;
  });
}

// The copies without "Async" go through the default stream, and the host waits.
CUresult copy_and_wait(const char* function, std::uint64_t target, std::uint64_t source,
                       std::size_t bytes) {
  return in_context(function, [&](Device& device) -> CUresult {
    if (const CUresult status = copy(device, target, source, bytes, nullptr)) return status;
    FAKE_COUNT(device, host_syncs, 1);
    device.default_stream()->wait_idle();
    return device.sticky;
  });
}

}  // namespace
}  // namespace fakegpu

using namespace fakegpu;

FAKE_API CUresult cuMemAlloc_v2(CUdeviceptr* out, std::size_t bytes) {
  return in_context("cuMemAlloc_v2", [&](Device& device) -> CUresult {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const std::int64_t limit = fake_option("FAKE_CUDA_MEMORY", device.ordinal, 1LL << 32);
    auto& used = device.counters[offsetof(FakeCounters, live_bytes) / sizeof(std::int64_t)];
    if (used + static_cast<std::int64_t>(bytes) > limit) return CUDA_ERROR_OUT_OF_MEMORY;
    const Block block = map_device(bytes, device.ordinal);
    if (block.alias == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    insert(block);
    used += static_cast<std::int64_t>(bytes);
    FAKE_COUNT(device, live_allocations, 1);
    FAKE_COUNT(device, allocations, 1);
    *out = block.address;
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuMemFree_v2(CUdeviceptr address) {
  return in_context("cuMemFree_v2", [&](Device&) -> CUresult {
    if (address == 0) return CUDA_SUCCESS;
    const Block block = block_of(address);
    if (block.alias == nullptr || block.host || block.address != address) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    Device& owner = *device_at(block.device);
    FAKE_COUNT(owner, host_syncs, 1);  // the driver waits for the device here, too
    wait_for_device(owner.ordinal);
    take(address, false);
    ::munmap(pointer_of(block.address), block.mapped);
    ::munmap(block.alias, block.mapped);
    FAKE_COUNT(owner, live_bytes, -static_cast<std::int64_t>(block.bytes));
    FAKE_COUNT(owner, live_allocations, -1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
  return in_context("cuMemGetInfo_v2", [&](Device& device) -> CUresult {
    const std::int64_t total = fake_option("FAKE_CUDA_MEMORY", device.ordinal, 1LL << 32);
    const std::int64_t used =
        device.counters[offsetof(FakeCounters, live_bytes) / sizeof(std::int64_t)];
    *free_bytes = static_cast<std::size_t>(total - used);
    *total_bytes = static_cast<std::size_t>(total);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuMemHostRegister_v2(void* address, std::size_t bytes, unsigned) {
  return in_context("cuMemHostRegister_v2", [&](Device& device) -> CUresult {
    if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (block_of(number_of(address)).alias != nullptr) {
      return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    insert({number_of(address), static_cast<char*>(address), bytes, 0, device.ordinal, true});
    FAKE_COUNT(device, live_host_allocations, 1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuMemHostUnregister(void* address) {
  return in_context("cuMemHostUnregister", [&](Device&) -> CUresult {
    const Block block = take(number_of(address), true);
    if (block.alias == nullptr) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    FAKE_COUNT(*device_at(block.device), live_host_allocations, -1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuPointerGetAttribute(void* out, int attribute, CUdeviceptr address) {
  if (const CUresult status = enter("cuPointerGetAttribute")) return status;
  const Block block = block_of(address);
  if (block.alias == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(out) = device_at(block.device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(out) = block.host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(out) = block.device;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

FAKE_API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes,
                                          CUdeviceptr address) {
  if (const CUresult status = enter("cuMemGetAddressRange_v2")) return status;
  const Block block = block_of(address);
  if (block.alias == nullptr || block.host) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = block.address;
  if (bytes != nullptr) *bytes = block.bytes;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, std::size_t bytes,
                                CUstream stream) {
  return in_context("cuMemcpyAsync", [&](Device& device) -> CUresult {
    return copy(device, target, source, bytes, stream);
  });
}

FAKE_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, std::size_t bytes,
                                       CUstream stream) {
  return cuMemcpyAsync(target, source, bytes, stream);
}

FAKE_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, std::size_t bytes,
                                       CUstream stream) {
  return cuMemcpyAsync(target, number_of(source), bytes, stream);
}

FAKE_API CUresult cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, std::size_t bytes,
                                       CUstream stream) {
  return cuMemcpyAsync(number_of(target), source, bytes, stream);
}

FAKE_API CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, std::size_t bytes) {
  return copy_and_wait("cuMemcpyHtoD_v2", target, number_of(source), bytes);
}

FAKE_API CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, std::size_t bytes) {
  return copy_and_wait("cuMemcpyDtoH_v2", number_of(target), source, bytes);
}

FAKE_API CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, std::size_t count,
                                  CUstream stream) {
  return set("cuMemsetD8Async", address, &value, 1, count, stream);
}

FAKE_API CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, std::size_t count,
                                   CUstream stream) {
  return set("cuMemsetD32Async", address, &value, 4, count, stream);
}

FAKE_API bool fake_read(std::uint64_t address, void* out, std::size_t bytes) {
  const char* from = resolve(-1, address, bytes);
  if (from != nullptr) std::memcpy(out, from, bytes);
  return from != nullptr;
}

FAKE_API bool fake_write(std::uint64_t address, const void* bytes_in, std::size_t bytes) {
  char* to = resolve(-1, address, bytes);
  if (to != nullptr) std::memcpy(to, bytes_in, bytes);
  return to != nullptr;
}

FAKE_API void* fake_resolve(int device, const void* address, std::size_t bytes) {
  return resolve(device, number_of(address), bytes);
}
