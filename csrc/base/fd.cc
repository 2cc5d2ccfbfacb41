#include "base/fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

namespace hvdlite {
namespace {

constexpr std::size_t kRegistered = 4096;

// Process-wide because fork() is: the child's handler has nothing else to go by, and may call only
// what is async-signal-safe. A cell holds a descriptor + 1; 0 is free.
std::array<std::atomic<int>, kRegistered> g_registered{};
std::atomic<pid_t> g_forking{0};      // the process that called fork() last
std::atomic<pid_t> g_forked_from{0};  // in a child of a process with a world: that process

void remember_parent() { g_forking.store(::getpid()); }

void close_in_child() {
  for (std::atomic<int>& cell : g_registered) {
    if (const int fd = cell.exchange(0); fd > 0) {
      ::close(fd - 1);
      g_forked_from.store(g_forking.load());
    }
  }
}

void install_once() {
  static const int kInstalled = ::pthread_atfork(&remember_parent, nullptr, &close_in_child);
  (void)kInstalled;
}

}  // namespace

void Fd::reset() {
  if (fd_ < 0) return;
  forget_in_forked_child(fd_);
  ::close(fd_);
  fd_ = -1;
}

void close_in_forked_child(int fd) {
  install_once();
  for (std::atomic<int>& cell : g_registered) {
    int free = 0;
    if (cell.compare_exchange_strong(free, fd + 1)) return;
  }
}

void forget_in_forked_child(int fd) {
  for (std::atomic<int>& cell : g_registered) {
    int held = fd + 1;
    if (cell.compare_exchange_strong(held, 0)) return;
  }
}

Status check_not_forked() {
  const pid_t parent = g_forked_from.load();
  if (parent == 0) return Status();
  return Status(StatusCode::kForked,
                "hvdlite is not usable after fork() (pid " + std::to_string(parent) + " -> " +
                    std::to_string(::getpid()) +
                    "): this process is a child of a rank; start it with the spawn method, or keep "
                    "collectives in the parent");
}

Result<Mapping> Mapping::shared(const Fd& memfd, std::uint64_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
  if (data == MAP_FAILED) return system_error("mmap of a shared segment", errno);
  return Mapping(static_cast<std::byte*>(data), bytes);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

void Mapping::discard(std::uint64_t begin, std::uint64_t bytes) const {
  // Where the system cannot, the pages stay in use.
  (void)::madvise(data_ + begin, bytes, MADV_REMOVE);
}

void Mapping::keep_out_of_dumps(std::uint64_t begin, std::uint64_t bytes) const {
  if (bytes > 0) ::madvise(data_ + begin, bytes, MADV_DONTDUMP);
}

bool address_space_is_limited() {
  struct rlimit limit{};
  return ::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

Result<Fd> create_memfd(std::uint64_t bytes) {
  Fd fd(::memfd_create("hvdlite", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) {
    const int error = errno;
    const bool full = error == EMFILE || error == ENFILE;
    return system_error(std::string("the ranks of a host share memory by memfd_create, ") +
                            (full ? "for which too many files are open; raise the limit, for "
                                    "example by `ulimit -n 4096`"
                                  : "which a container's seccomp profile may refuse"),
                        error);
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return system_error("ftruncate of a shared segment", errno);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return system_error("sealing a shared segment", errno);
  }
  return fd;
}

Status check_sealed(const Fd& memfd) {
  const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
  if (seals < 0) return system_error("reading the seals of a shared segment", errno);
  if ((seals & F_SEAL_SHRINK) != 0) return Status();
  return Status(StatusCode::kInternal,
                "a shared segment is not sealed: its owner could take its memory away");
}

Result<std::uint64_t> file_bytes(const Fd& fd) {
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) return system_error("fstat of a shared segment", errno);
  return static_cast<std::uint64_t>(info.st_size);
}

}  // namespace hvdlite
