// Messages to standard error, such as "hvdlite [rank] warning: text". Each line is one write(2), so
// that lines of different ranks never mix. Any thread may call these functions.
#pragma once

#include <string_view>

namespace hvdlite {

enum class LogLevel : int { kTrace = 0, kDebug, kInfo, kWarning, kError, kFatal };

// Takes a name in lower or upper case. Unknown names give kWarning.
LogLevel parse_log_level(std::string_view name);
// The level belongs to the process, as standard error does.
void set_log_level(LogLevel level);
bool log_enabled(LogLevel level);
// Prints the text if the level is enabled. With rank -1 the line names no rank.
void log(LogLevel level, int rank, std::string_view text);
// Prints what the user has asked for, as "hvdlite [rank] text", unless warnings are switched off.
void announce(int rank, std::string_view text);

}  // namespace hvdlite
