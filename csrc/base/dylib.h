// Owner of one handle to a shared library that was opened at run time. Any thread, one at a time.
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <string>
#include <utility>

#include "base/mutex.h"
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
  ~Dylib() {
    if (handle_ != nullptr) ::dlclose(handle_);
  }

  // Finds the copy of a library, by name or path, that any part of this process has loaded already,
  // from any folder. The result is not valid() when there is none.
  static Dylib find_loaded(const std::string& name) {
    MutexLock lock(loading());
    return Dylib(::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD));
  }
  // Opens a library. `name` is a path, or a file that the system's loader looks for.
  // kInvalidArgument carries the loader's message.
  static Result<Dylib> open(const std::string& name) {
    MutexLock lock(loading());
    void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return Dylib(handle);
    const char* why = ::dlerror();
    return Status(StatusCode::kInvalidArgument,
                  why == nullptr ? name + " cannot be loaded" : std::string(why));
  }

  bool valid() const { return handle_ != nullptr; }
  // The file that was loaded.
  std::string path() const {
    MutexLock lock(loading());
    ::link_map* map = nullptr;
    const bool known = handle_ != nullptr && ::dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0;
    return known ? std::string(map->l_name) : std::string();
  }
  // nullptr when the library has no such symbol.
  void* symbol(const char* name) const { return ::dlsym(handle_, name); }

 private:
  explicit Dylib(void* handle) : handle_(handle) {}
  // Our own lock around the loader's, which ThreadSanitizer does not see: one thread may ask about
  // a library that another thread loads.
  static Mutex& loading() {
    static Mutex mutex;
    return mutex;
  }

  void* handle_ = nullptr;
};

}  // namespace hvdlite
