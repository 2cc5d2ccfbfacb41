#include "base/text.h"

#include <locale.h>  // NOLINT: newlocale() is POSIX's
#include <stdlib.h>  // NOLINT: strtod_l()
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <ios>
#include <locale>
#include <sstream>
#include <string>

namespace hvdlite {

std::string text_of_double(double value, int digits) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(digits);
  text << value;
  return text.str();
}

std::string text_of_fixed(double value, int digits) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(digits);
  text << std::fixed << value;
  return text.str();
}

bool parse_double(const std::string& text, double& value) {
  static const locale_t kPlain = newlocale(LC_ALL_MASK, "C", nullptr);
  char* end = nullptr;
  errno = 0;
  value = strtod_l(text.c_str(), &end, kPlain);
  return errno == 0 && end != text.c_str() && *end == '\0';
}

namespace {

constexpr std::array<std::string_view, 6> kNames = {"trace",   "debug", "info",
                                                    "warning", "error", "fatal"};
// Process-wide because standard error is.
std::atomic<int> g_level{static_cast<int>(LogLevel::kWarning)};

void write_line(int rank, std::string_view level, std::string_view text) {
  std::string line = "hvdlite";
  if (rank >= 0) line += " [" + std::to_string(rank) + "]";
  line += " ";
  line += level;
  line += text;
  line += "\n";
  // A message that cannot be written has nowhere else to go.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

LogLevel parse_log_level(std::string_view name) {
  const auto same = [](char a, char b) { return a == (b >= 'A' && b <= 'Z' ? b - 'A' + 'a' : b); };
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (std::ranges::equal(kNames[i], name, same)) return static_cast<LogLevel>(i);
  }
  return LogLevel::kWarning;
}

void set_log_level(LogLevel level) { g_level.store(static_cast<int>(level)); }

bool log_enabled(LogLevel level) { return static_cast<int>(level) >= g_level.load(); }

void log(LogLevel level, int rank, std::string_view text) {
  if (!log_enabled(level)) return;
  write_line(rank, std::string(kNames[static_cast<std::size_t>(level)]) + ": ", text);
}

void announce(int rank, std::string_view text) {
  if (log_enabled(LogLevel::kWarning)) write_line(rank, "", text);
}

}  // namespace hvdlite
