// Messages to standard error: "hvdlite [rank] warning: text", one write(2) a line, so that lines of
// different ranks never mix. Safe from any thread.
#pragma once

#include <string_view>

namespace hvdlite {

enum class LogLevel : int { kTrace = 0, kDebug, kInfo, kWarning, kError, kFatal };

// In lower or upper case. Unknown names give kWarning.
LogLevel parse_log_level(std::string_view name);
// The level is per process (as standard error is); rank -1 prints no rank.
void set_log_level(LogLevel level);
bool log_enabled(LogLevel level);
void log(LogLevel level, int rank, std::string_view text);
// What the user has asked to be told: "hvdlite [rank] text", where warnings are printed, too.
void announce(int rank, std::string_view text);

}  // namespace hvdlite
