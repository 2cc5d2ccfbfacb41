// What ranks that wait for each other are told. Pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/status.h"
#include "wire/message.h"

namespace hvdlite {

inline constexpr std::size_t kRanksShown = 8;

// "barrier 'x'"; a change of the process sets has no name that the user knows.
std::string describe_awaited(const Request& request);

// A rank that waits for another one in an operation.
struct Wait {
  int rank = -1;
  int awaited = -1;
  const Request* request = nullptr;  // borrowed from its table
  std::string place = "";            // " (/home/me/train.py:12)", where it is known
};
// "rank 1 waits for rank 0 in allreduce 'loss'"
std::string describe_wait(const Wait& wait);
// What the ranks of such waits do about it.
std::string advice_for(const std::vector<Wait>& waits);
// The error of the operations in which the ranks wait, each for the next one.
Status deadlock_error(const std::vector<Wait>& waits, const std::string& more = "");

}  // namespace hvdlite
