// What a rank says while its threads wait, from blocked_report.h to deadlock_watch.h:
//
//   blocked = submitted:u64 pending:u32 count:u32 (key:text place:text)[count]
//
// Pure functions, which touch nothing beyond their bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "wire/bytes.h"
#include "wire/message.h"

namespace hvdlite {

inline constexpr std::size_t kMaxKeyBytes = kMaxNameBytes + 64;  // bounds Request::key()
inline constexpr std::size_t kMaxPlaceBytes = 4200;              // PATH_MAX, and a line

struct Blocked {
  std::uint64_t submitted = 0;    // operations of this rank so far
  std::uint32_t pending = 0;      // those of them that have no answer yet
  std::vector<std::string> keys;  // Request::key() of those that it awaits; empty: not blocked
  // Where the program waits for each of them: "/home/me/train.py:12", or "".
  std::vector<std::string> places;
  bool operator==(const Blocked&) const = default;
};

Bytes encode(const Blocked& blocked);
// False: these bytes are not a report.
bool decode(std::span<const std::byte> bytes, Blocked& blocked);

}  // namespace hvdlite
