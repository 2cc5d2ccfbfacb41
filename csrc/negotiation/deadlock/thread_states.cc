#include "negotiation/deadlock/thread_states.h"

#include <linux/futex.h>
#include <sys/syscall.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace hvdlite {
namespace {

using Sleep = ThreadState::Kind;

// `line` has the number of the system call and its six arguments, or says "running".
Sleep kind_of(const std::string& line) {
  std::istringstream words(line);
  long call = -1;
  std::uint64_t arguments[6] = {};
  if (!(words >> std::dec >> call >> std::hex)) return Sleep::kOther;
  for (std::uint64_t& argument : arguments) words >> argument;
  if (!words) return Sleep::kOther;
  if (call == SYS_nanosleep || call == SYS_clock_nanosleep) return Sleep::kForATime;
  if (call != SYS_futex) return Sleep::kOther;
  const auto operation = static_cast<int>(arguments[1]);
  const int command = operation & FUTEX_CMD_MASK;
  const bool waits = command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET;
  // Another process may wake the waiters of a futex that is not private.
  if (!waits || (operation & FUTEX_PRIVATE_FLAG) == 0) return Sleep::kOther;
  return arguments[3] == 0 ? Sleep::kUntilWoken : Sleep::kForATime;
}

// Fills in what the file "status" of a thread says; false where it has ended.
bool read_status(const std::filesystem::path& folder, ThreadState& state) {
  std::ifstream file(folder / "status");
  std::string line;
  int found = 0;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key == "Name:") {
      words >> state.name;
    } else if (key.ends_with("voluntary_ctxt_switches:")) {  // and "nonvoluntary_..."
      std::uint64_t count = 0;
      words >> count;
      state.switches += count;
      ++found;
    }
  }
  return found == 2;
}

}  // namespace

std::optional<std::vector<ThreadState>> thread_states() {
  if (!std::ifstream("/proc/thread-self/syscall").is_open()) return std::nullopt;
  std::vector<ThreadState> states;
  std::error_code error;
  std::filesystem::directory_iterator each("/proc/self/task", error);
  for (; !error && each != std::filesystem::directory_iterator(); each.increment(error)) {
    const std::filesystem::path& folder = each->path();
    ThreadState state;
    state.id = std::stoi(folder.filename().string());
    std::string line;
    std::ifstream file(folder / "syscall");
    std::getline(file, line);
    state.kind = kind_of(line);
    // Afterwards: a count that has not changed since the last look holds up to the line above.
    if (read_status(folder, state)) states.push_back(std::move(state));
  }
  if (error) return std::nullopt;
  std::sort(states.begin(), states.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return states;
}

}  // namespace hvdlite
