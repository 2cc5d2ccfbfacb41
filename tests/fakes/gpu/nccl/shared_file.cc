#include "nccl/shared_file.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>

#include "base/mutex.h"

namespace fakegpu {
namespace {

struct OwnFiles {
  hvdlite::Mutex mutex;
  std::map<std::string, int> by_id HVDLITE_GUARDED_BY(mutex);
};

OwnFiles& own_files() {
  static auto* all = new OwnFiles;
  return *all;
}

std::uint64_t next_nonce() {
  static std::atomic<std::uint64_t> last{0};
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return (static_cast<std::uint64_t>(now.tv_sec) << 32) ^
         (static_cast<std::uint64_t>(now.tv_nsec) << 8) ^ ++last;
}

SharedFile* map(int fd) {
  void* mapped = ::mmap(nullptr, sizeof(SharedFile), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<SharedFile*>(mapped);
}

}  // namespace

ncclResult_t make_file(ncclUniqueId& id) {
  const int fd = ::memfd_create("fake_nccl", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, sizeof(SharedFile)) != 0) return ncclSystemError;
  SharedFile* file = map(fd);
  if (file == nullptr) return ncclSystemError;
  file->nonce = next_nonce();
  id = {};
  std::snprintf(id.internal, sizeof id.internal, "fake %d %d %llu", ::getpid(), fd,
                static_cast<unsigned long long>(file->nonce));
  close_file(file);
  hvdlite::MutexLock lock(own_files().mutex);
  own_files().by_id[id.internal] = fd;
  return ncclSuccess;
}

SharedFile* open_file(const ncclUniqueId& id) {
  int pid = 0;
  int number = 0;
  unsigned long long nonce = 0;
  if (std::sscanf(id.internal, "fake %d %d %llu", &pid, &number, &nonce) != 3) return nullptr;
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  const off_t bytes = ::lseek(fd, 0, SEEK_END);
  SharedFile* file = bytes == static_cast<off_t>(sizeof(SharedFile)) ? map(fd) : nullptr;
  ::close(fd);
  if (file != nullptr && file->nonce != nonce) {
    close_file(file);
    return nullptr;
  }
  return file;
}

void close_file(SharedFile* file) { ::munmap(file, sizeof(SharedFile)); }

void forget_file(const ncclUniqueId& id) {
  hvdlite::MutexLock lock(own_files().mutex);
  const auto found = own_files().by_id.find(id.internal);
  if (found == own_files().by_id.end()) return;
  ::close(found->second);
  own_files().by_id.erase(found);
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const timespec nap{0, 2000000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &nap, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

std::string describe(const Descriptor& descriptor) {
  constexpr const char* kKinds[] = {"nothing",   "AllReduce",     "Broadcast", "Reduce",
                                    "AllGather", "ReduceScatter", "Send",      "Recv"};
  constexpr const char* kTypes[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                    "uint64", "float16", "float32", "float64", "bfloat16"};
  constexpr const char* kOps[] = {"sum", "product", "max", "min", "average", "pre-multiplied sum"};
  return std::string(kKinds[static_cast<int>(descriptor.kind)]) + " number " +
         std::to_string(descriptor.sequence) + " of " + std::to_string(descriptor.count) + " " +
         kTypes[descriptor.dtype] + ", " + kOps[descriptor.op] + ", root " +
         std::to_string(descriptor.root);
}

}  // namespace fakegpu
