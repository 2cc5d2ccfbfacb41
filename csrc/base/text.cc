#include "base/text.h"

#include <locale.h>  // NOLINT: newlocale() is POSIX's
#include <stdlib.h>  // NOLINT: strtod_l()

#include <cerrno>
#include <ios>
#include <locale>
#include <sstream>

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

}  // namespace hvdlite
