// A file in memory that the code under test writes and the test reads.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "base/fd.h"
#include "check.h"

namespace hvdlite::testing {

// The code under test gets a descriptor of its own.
class ScratchFile {
 public:
  ScratchFile() : fd_(::memfd_create("trace", MFD_CLOEXEC)) {}
  Fd writer() const { return Fd(::dup(fd_.get())); }
  std::string text() const {
    std::string text(static_cast<std::size_t>(::lseek(fd_.get(), 0, SEEK_END)), '\0');
    CHECK_EQ(::pread(fd_.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    return text;
  }

 private:
  Fd fd_;
};

}  // namespace hvdlite::testing
