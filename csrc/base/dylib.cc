#include "base/dylib.h"

#include <dlfcn.h>
#include <link.h>

#include "base/mutex.h"

namespace hvdlite {
namespace {

// Our own lock around the loader's, which ThreadSanitizer does not see: one thread may ask about a
// library that another thread loads.
Mutex loading;

}  // namespace

Dylib::~Dylib() {
  if (handle_ != nullptr) ::dlclose(handle_);
}

Dylib Dylib::find_loaded(const std::string& name) {
  MutexLock lock(loading);
  return Dylib(::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD));
}

Result<Dylib> Dylib::open(const std::string& name) {
  MutexLock lock(loading);
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return Dylib(handle);
  const char* why = ::dlerror();
  return Status(StatusCode::kInvalidArgument,
                why == nullptr ? name + " cannot be loaded" : std::string(why));
}

std::string Dylib::path() const {
  MutexLock lock(loading);
  ::link_map* map = nullptr;
  const bool known = handle_ != nullptr && ::dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0;
  return known ? std::string(map->l_name) : std::string();
}

void* Dylib::symbol(const char* name) const { return ::dlsym(handle_, name); }

}  // namespace hvdlite
