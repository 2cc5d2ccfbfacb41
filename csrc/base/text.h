// Numbers as text that is the same in every locale, because a script may have called setlocale().
// Any thread.
#pragma once

#include <string>

namespace hvdlite {

// Writes at most `digits` significant digits: "2.5", "1e+10".
std::string text_of_double(double value, int digits = 15);
// Writes a fixed number of digits after the point: "10.0".
std::string text_of_fixed(double value, int digits);
// False unless the whole text is a number; "inf" and "nan" are numbers here.
bool parse_double(const std::string& text, double& value);

}  // namespace hvdlite
