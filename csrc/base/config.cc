#include "base/config.h"

#include <cerrno>
#include <cstdlib>
#include <type_traits>

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
  char* end = nullptr;
  errno = 0;
  value = std::strtod(text.c_str(), &end);
  return errno == 0 && end != text.c_str() && *end == '\0' && value >= 0;
}

template <typename T>
std::string type_name() {
  if constexpr (std::is_same_v<T, std::int64_t>) return "int";
  if constexpr (std::is_same_v<T, double>) return "float";
  return "str";
}

std::string text_of(const std::string& value) { return value; }
std::string text_of(std::int64_t value) { return std::to_string(value); }
std::string text_of(double value) {
  std::string text = std::to_string(value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text;
}

// The variable that is set for a knob, Horovod's name last; nullptr when neither is.
const char* lookup(const std::string& name, const std::string& horovod, std::string& used) {
  used = name;
  if (const char* text = std::getenv(name.c_str())) return text;
  if (horovod.empty()) return nullptr;
  used = horovod;
  return std::getenv(horovod.c_str());
}

template <typename T>
Status read(const std::string& field, const std::string& horovod, T& value) {
  std::string used;
  const char* text = lookup(environment_name(field), horovod, used);
  if (text == nullptr || *text == '\0') return Status();
  T parsed{};
  if (!parse(text, parsed)) {
    return Status(StatusCode::kInvalidArgument,
                  used + "=" + text + " cannot be used: it takes a value of type " +
                      type_name<T>() + "; unset it or see docs/knobs.md");
  }
  value = parsed;
  return Status();
}

}  // namespace

Result<Config> Config::from_environment() {
  Config config;
#define HVDLITE_READ(type, field, value, unit, horovod, help)                                      \
  HVDLITE_RETURN_IF_ERROR(read<type>(#field, horovod, config.field));
  HVDLITE_KNOBS(HVDLITE_READ)
#undef HVDLITE_READ
  return config;
}

std::vector<std::pair<std::string, std::string>> Config::agreed() const {
  return {{environment_name("fusion_threshold"), text_of(fusion_threshold)},
          {environment_name("cache_capacity"), text_of(cache_capacity)},
          {environment_name("shm_chunk"), text_of(shm_chunk)},
          {environment_name("shm_small"), text_of(shm_small)},
          {environment_name("tcp_chunk"), text_of(tcp_chunk)}};
}

const std::vector<Knob>& knobs() {
  static const std::vector<Knob> kRows = {
#define HVDLITE_ROW(type, field, value, unit, horovod, help)                                       \
  {#field, environment_name(#field), horovod, type_name<type>(), text_of(type(value)), unit, help},
      HVDLITE_KNOBS(HVDLITE_ROW)
#undef HVDLITE_ROW
  };
  return kRows;
}

}  // namespace hvdlite
