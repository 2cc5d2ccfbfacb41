#include "base/shm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace hvdlite {

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
