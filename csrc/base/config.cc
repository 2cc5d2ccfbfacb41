#include "base/config.h"

#include <cerrno>
#include <cstdlib>
#include <type_traits>

#include "base/text.h"

namespace hvdlite {
namespace {

std::string upper(std::string text) {
  for (char& c : text) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return text;
}

std::string environment_name(const std::string& field) { return "HVDLITE_" + upper(field); }

bool parse(const std::string& text, std::string& value) {
  value = text;
  return true;
}

bool parse(const std::string& text, std::int64_t& value) {
  char* end = nullptr;
  errno = 0;
  value = std::strtoll(text.c_str(), &end, 10);
  return errno == 0 && end != text.c_str() && *end == '\0';
}

bool parse(const std::string& text, double& value) {
  return parse_double(text, value) && value >= 0;  // no NaN either
}

using Allowed = std::optional<IntegerRange>;

// True when the knob takes this value.
template <typename T>
bool fits(const Allowed& range, const T& value) {
  if constexpr (std::is_same_v<T, std::int64_t>) {
    return !range || (value >= range->least && value <= range->most);
  }
  return true;
}

// The values that a knob takes, for the error: "a whole number from 0 to 1".
template <typename T>
std::string what_it_takes(const Allowed& range) {
  if constexpr (std::is_same_v<T, double>) return "a number of at least 0, or inf";
  if (!range) return "a whole number";
  return "a whole number from " + std::to_string(range->least) + " to " +
         std::to_string(range->most);
}

template <typename T>
std::string type_name() {
  if constexpr (std::is_same_v<T, std::int64_t>) return "int";
  if constexpr (std::is_same_v<T, double>) return "float";
  return "str";
}

std::string text_of(const std::string& value) { return value; }
std::string text_of(std::int64_t value) { return std::to_string(value); }
std::string text_of(double value) { return text_of_double(value); }

// The variable that is set for a knob, Horovod's name last; nullptr when neither is.
const char* lookup(const std::string& name, const std::string& horovod, std::string& used) {
  used = name;
  if (const char* text = std::getenv(name.c_str())) return text;
  if (horovod.empty()) return nullptr;
  used = horovod;
  return std::getenv(horovod.c_str());
}

bool is_set(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0';
}

template <typename T>
Status read(const std::string& field, const Allowed& range, const std::string& horovod, T& value) {
  std::string used;
  const char* text = lookup(environment_name(field), horovod, used);
  if (text == nullptr || *text == '\0') return Status();
  T parsed{};
  if (!parse(text, parsed) || !fits(range, parsed)) {
    return Status(StatusCode::kInvalidArgument, used + "=" + text + " cannot be used: it takes " +
                                                    what_it_takes<T>(range) +
                                                    "; unset it or see docs/knobs.md");
  }
  value = parsed;
  return Status();
}

}  // namespace

Result<Config> Config::from_environment() {
  Config config;
#define HVDLITE_READ(type, field, value, range, unit, horovod, help)                               \
  HVDLITE_RETURN_IF_ERROR(read<type>(#field, range, horovod, config.field));
  HVDLITE_KNOBS(HVDLITE_READ)
#undef HVDLITE_READ
  const double timeout = config.collective_timeout;
  // In Horovod the gloo timeout does not end the wait for a rank that has not called a collective.
  if (timeout > 0 && timeout < config.stall_shutdown && is_set("HVDLITE_COLLECTIVE_TIMEOUT") &&
      !is_set("HVDLITE_STALL_SHUTDOWN") && !is_set("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")) {
    config.stall_shutdown = timeout;
  }
  return config;
}

std::vector<std::pair<std::string, std::string>> Config::agreed() const {
  return {{environment_name("fusion_threshold"), text_of(fusion_threshold)},
          {environment_name("cache_capacity"), text_of(cache_capacity)},
          {environment_name("shm_chunk"), text_of(shm_chunk)},
          {environment_name("shm_small"), text_of(shm_small)},
          {environment_name("tcp_chunk"), text_of(tcp_chunk)},
          {environment_name("average_over_joined"), text_of(average_over_joined)},
          {environment_name("check_replicas"), text_of(check_replicas)}};
}

const std::vector<Knob>& knobs() {
  static const std::vector<Knob> kRows = {
#define HVDLITE_ROW(type, field, value, range, unit, horovod, help)                                \
  {#field, environment_name(#field), horovod, type_name<type>(), text_of(type(value)), unit, help, \
   range},
      HVDLITE_KNOBS(HVDLITE_ROW)
#undef HVDLITE_ROW
  };
  return kRows;
}

}  // namespace hvdlite
