#include "os/shm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace hvdlite {
namespace {

std::byte* map_pages(int fd, std::uint64_t bytes, int flags) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

}  // namespace

Result<Mapping> Mapping::shared(const Fd& memfd, std::uint64_t bytes) {
  std::byte* data = map_pages(memfd.get(), bytes, MAP_SHARED);
  if (data == nullptr) return system_error("mmap of a shared segment", errno);
  return Mapping(data, bytes);
}

Result<Mapping> Mapping::anonymous(std::uint64_t bytes) {
  std::byte* data = map_pages(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
  if (data == nullptr) return system_error("mmap of private memory", errno);
  return Mapping(data, bytes);
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

void Mapping::discard(std::uint64_t begin, std::uint64_t bytes) const {
  // The first is for a file, the second for private memory. Where the system does neither, the
  // pages stay in use.
  if (::madvise(data_ + begin, bytes, MADV_REMOVE) != 0) {
    ::madvise(data_ + begin, bytes, MADV_DONTNEED);
  }
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
    return system_error(
        "the ranks of a host share memory by memfd_create, which a container's seccomp profile may "
        "refuse",
        errno);
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
