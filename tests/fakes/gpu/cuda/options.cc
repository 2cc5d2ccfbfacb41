// Options, which a test sets or else the environment, and injected failures.
#include <cstdlib>
#include <map>
#include <string>

#include "base/mutex.h"
#include "hooks.h"

namespace {

struct Option {
  std::int64_t value = 0;
  std::int64_t at = 0;  // of a failure: the one call that fails, from 1; 0: every call
  std::int64_t calls = 0;
};

struct Options {
  hvdlite::Mutex mutex;
  std::map<std::string, Option> by_name HVDLITE_GUARDED_BY(mutex);  // as tests set them

  Option* find(const std::string& name, int device) HVDLITE_REQUIRES(mutex) {
    auto found = by_name.find(name + ":" + std::to_string(device));
    if (found == by_name.end()) found = by_name.find(name);
    return found == by_name.end() ? nullptr : &found->second;
  }
};

Options& options() {
  static auto* all = new Options;  // outlives the streams' threads
  return *all;
}

}  // namespace

FAKE_API void fake_set_option(const char* name, int device, const char* value) {
  const std::string key =
      device < 0 ? std::string(name) : std::string(name) + ":" + std::to_string(device);
  hvdlite::MutexLock lock(options().mutex);
  options().by_name.erase(key);
  if (value == nullptr) return;
  char* end = nullptr;
  Option& option = options().by_name[key];
  option.value = std::strtoll(value, &end, 10);
  if (*end == '@') option.at = std::strtoll(end + 1, nullptr, 10);  // "VALUE@CALL"
}

FAKE_API std::int64_t fake_option(const char* name, int device, std::int64_t fallback) {
  hvdlite::MutexLock lock(options().mutex);
  if (const Option* option = options().find(name, device)) return option->value;
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoll(text, nullptr, 10) : fallback;
}

FAKE_API int fake_take_failure(const char* function, int device) {
  hvdlite::MutexLock lock(options().mutex);
  Option* option = options().find(std::string("FAKE_FAIL_") + function, device);
  if (option == nullptr) return 0;
  ++option->calls;
  return option->at == 0 || option->at == option->calls ? static_cast<int>(option->value) : 0;
}
