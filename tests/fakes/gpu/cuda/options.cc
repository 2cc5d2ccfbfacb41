// Options and injected failures. A test sets them, or else the environment.
#include <cstdlib>
#include <map>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "hooks.h"

namespace {

struct Option {
  std::int64_t value = 0;
  std::int64_t at = 0;  // of a failure: the one call that fails, from 1; 0: every call
  std::int64_t calls = 0;
};

// "VALUE" or "VALUE@CALL".
Option parse(const char* text) {
  char* end = nullptr;
  Option option;
  option.value = std::strtoll(text, &end, 10);
  if (*end == '@') option.at = std::strtoll(end + 1, nullptr, 10);
  return option;
}

struct Options {
  hvdlite::Mutex mutex;
  std::map<std::string, std::optional<Option>> by_name HVDLITE_GUARDED_BY(mutex);

  // A variable that is not in the map was not read yet. An empty value: the environment lacks it.
  Option* find(const std::string& key, const char* in_environment) HVDLITE_REQUIRES(mutex) {
    auto found = by_name.find(key);
    if (found == by_name.end()) {
      const char* text = in_environment != nullptr ? std::getenv(in_environment) : nullptr;
      found = by_name.emplace(key, text ? std::optional(parse(text)) : std::nullopt).first;
    }
    return found->second ? &*found->second : nullptr;
  }
  Option* find(const char* name, int device) HVDLITE_REQUIRES(mutex) {
    Option* own = find(std::string(name) + ":" + std::to_string(device), nullptr);
    return own != nullptr ? own : find(name, name);
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
  if (value != nullptr) options().by_name[key] = parse(value);
}

FAKE_API std::int64_t fake_option(const char* name, int device, std::int64_t fallback) {
  hvdlite::MutexLock lock(options().mutex);
  const Option* option = options().find(name, device);
  return option != nullptr ? option->value : fallback;
}

FAKE_API int fake_take_failure(const char* function, int device) {
  hvdlite::MutexLock lock(options().mutex);
  Option* option = options().find((std::string("FAKE_FAIL_") + function).c_str(), device);
  if (option == nullptr) return 0;
  ++option->calls;
  return option->at == 0 || option->at == option->calls ? static_cast<int>(option->value) : 0;
}
