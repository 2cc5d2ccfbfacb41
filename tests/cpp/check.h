// A small test registry: TEST(name) { CHECK(...); }. A failed check is reported and counted. It
// does not end the test, so that any thread of a test may use it.
#pragma once

#include <sstream>
#include <string>

#include "base/status.h"

namespace hvdlite::testing {

struct Registration {
  Registration(const char* name, void (*body)());
};
void report_failure(const char* file, int line, const std::string& text);

// How many of so many random cases a model without threads runs. CMakeLists.txt gives a part of
// them to ThreadSanitizer, which makes them ten times as slow and has nothing to find in them.
constexpr unsigned cases_of_model(unsigned cases) { return cases / MODEL_CASES_DIVISOR; }

template <typename T>
std::string show(const T& value) {
  if constexpr (requires(std::ostringstream& out) { out << value; }) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else {
    return "(no text)";
  }
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!(a == b)) report_failure(file, line, std::string(text) + ": " + show(a) + " vs " + show(b));
}
inline void check_status(const Status& status, StatusCode code, const char* text, const char* file,
                         int line) {
  if (status.code() == code) return;
  report_failure(file, line,
                 std::string(text) + ": code " + std::to_string(static_cast<int>(status.code())) +
                     ", expected " + std::to_string(static_cast<int>(code)) + ": " +
                     status.message());
}

// True when `text` contains `part`.
inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace hvdlite::testing

#define TEST(name)                                                                                 \
  static void test_##name();                                                                       \
  static const ::hvdlite::testing::Registration registration_##name(#name, &test_##name);          \
  static void test_##name()
#define CHECK(...)                                                                                 \
  do {                                                                                             \
    if (!(__VA_ARGS__)) ::hvdlite::testing::report_failure(__FILE__, __LINE__, #__VA_ARGS__);      \
  } while (false)
#define CHECK_EQ(a, ...)                                                                           \
  ::hvdlite::testing::check_equal((a), (__VA_ARGS__), #a " == " #__VA_ARGS__, __FILE__, __LINE__)
#define CHECK_STATUS(status, code)                                                                 \
  ::hvdlite::testing::check_status((status), (code), #status, __FILE__, __LINE__)
#define CHECK_OK(...)                                                                              \
  ::hvdlite::testing::check_status((__VA_ARGS__), ::hvdlite::StatusCode::kOk, #__VA_ARGS__,        \
                                   __FILE__, __LINE__)
