// The knobs that may change while a world runs (Autotune::retune). Ranks plan batches, chunks
// and paths from them, so all ranks change them between the same two rounds. Plain values.
#pragma once

#include <array>
#include <cstdint>

#include "base/config.h"

namespace hvdlite {

struct Tunables {
  std::int64_t fusion_threshold = 0;
  std::int64_t shm_chunk = 0;
  std::int64_t shm_small = 0;
  std::int64_t tcp_chunk = 0;

  bool operator==(const Tunables&) const = default;
};

// What all ranks are to change to.
struct NewTunables {
  Tunables tunables;
  bool settled = false;  // nothing changes them any more
};

struct Tunable {
  const char* name;  // The knob has this name.
  std::int64_t Tunables::* field;
};
inline constexpr std::array<Tunable, 4> kTunables = {
    {{"fusion_threshold", &Tunables::fusion_threshold},
     {"shm_chunk", &Tunables::shm_chunk},
     {"shm_small", &Tunables::shm_small},
     {"tcp_chunk", &Tunables::tcp_chunk}}};

// The values of the knobs, with which every world begins.
inline Tunables tunables_of(const Config& config) {
  return {config.fusion_threshold, config.shm_chunk, config.shm_small, config.tcp_chunk};
}

}  // namespace hvdlite
