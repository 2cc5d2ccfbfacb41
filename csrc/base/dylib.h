// Owner of one handle to a shared library that was opened at run time. Any thread, one at a time.
#pragma once

#include <string>
#include <utility>

#include "base/status.h"

namespace hvdlite {

class Dylib {
 public:
  Dylib() = default;
  Dylib(Dylib&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Dylib& operator=(Dylib&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Dylib(const Dylib&) = delete;
  Dylib& operator=(const Dylib&) = delete;
  ~Dylib();

  // Finds the copy of a library, by name or path, that any part of this process has loaded already,
  // from any folder. The result is not valid() when there is none.
  static Dylib find_loaded(const std::string& name);
  // Opens a library. `name` is a path, or a file that the system's loader looks for.
  // kInvalidArgument carries the loader's message.
  static Result<Dylib> open(const std::string& name);

  bool valid() const { return handle_ != nullptr; }
  // The file that was loaded.
  std::string path() const;
  // nullptr when the library has no such symbol.
  void* symbol(const char* name) const;

 private:
  explicit Dylib(void* handle) : handle_(handle) {}
  void* handle_ = nullptr;
};

}  // namespace hvdlite
