// Runs all tests, or those whose name contains the first argument. Each test has a deadline.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <vector>

#include "check.h"

namespace hvdlite::testing {
namespace {

constexpr unsigned kSecondsPerTest = 600;  // only a hang reaches it, also under a sanitizer
constexpr double kLongSeconds = 5;         // such tests are named, with their time

struct Test {
  const char* name;
  void (*body)();
};

// Filled before main() by the registrations of all files.
std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
std::atomic<int> failures{0};
std::atomic<const char*> running{""};

void on_deadline(int) {
  constexpr char kText[] = "test deadline passed in: ";
  const char* name = running.load();
  [[maybe_unused]] ssize_t written = ::write(2, kText, sizeof kText - 1);
  written = ::write(2, name, std::strlen(name));
  written = ::write(2, "\n", 1);
  std::abort();
}

// Also of a thread of a test.
void on_uncaught_exception() {
  std::string text = "terminated without an exception";
  try {
    if (std::current_exception() != nullptr) std::rethrow_exception(std::current_exception());
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {
    text = "an exception without a text";
  }
  report_failure("uncaught", 0, text);
  std::abort();
}

}  // namespace

Registration::Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }

void report_failure(const char* file, int line, const std::string& text) {
  failures.fetch_add(1);
  std::fprintf(stderr, "%s:%d: in %s: %s\n", file, line, running.load(), text.c_str());
}

int run_all(const char* filter) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // in order with stderr, and not lost by abort()
  std::signal(SIGALRM, &on_deadline);
  std::set_terminate(&on_uncaught_exception);
  int passed = 0;
  std::vector<const char*> failed;
  for (const Test& test : tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    running = test.name;
    const int before = failures;
    ::alarm(kSecondsPerTest);
    const auto begun = std::chrono::steady_clock::now();
    try {
      test.body();
    } catch (const std::exception& error) {
      report_failure(test.name, 0, error.what());
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    if (took.count() > kLongSeconds) std::printf("%5.1f s: %s\n", took.count(), test.name);
    if (failures == before) {
      ++passed;
    } else {
      failed.push_back(test.name);
    }
  }
  ::alarm(0);
  // Names once more at the end, for readers of the last lines of a log.
  for (const char* name : failed) std::printf("failed: %s\n", name);
  std::printf("%d passed, %zu failed\n", passed, failed.size());
  return !failed.empty() || passed == 0 ? 1 : 0;
}

}  // namespace hvdlite::testing

int main(int argc, char** argv) { return hvdlite::testing::run_all(argc > 1 ? argv[1] : ""); }
