// What people read: numbers, and messages to standard error. Any thread.
#pragma once

#include <string>
#include <string_view>

namespace hvdlite {

// Numbers as text that is the same in every locale, because a script may have called setlocale().

// Writes at most `digits` significant digits: "2.5", "1e+10".
std::string text_of_double(double value, int digits = 15);
// Writes a fixed number of digits after the point: "10.0".
std::string text_of_fixed(double value, int digits);
// False unless the whole text is a number; "inf" and "nan" are numbers here.
bool parse_double(const std::string& text, double& value);

// Messages to standard error, such as "hvdlite [rank] warning: text". Each line is one write(2), so
// that lines of different ranks never mix.
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
