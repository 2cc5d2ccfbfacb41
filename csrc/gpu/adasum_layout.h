// How Adasum on a device cuts a batch into *rounds*, and where each lies in its scratch: pure
// arithmetic, the same on every rank but for its part.
//
// A round takes whole tensors, because their dot products are needed before any of them changes: as
// many as the fusion buffer has room for, at least one. They lie in one run, each from a multiple
// of 16 bytes on. The scratch has two large regions: the run, then the vectors in float32 where
// they travel with 16 bits, then the results; and what every rank gave of this rank's part.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/adasum_args.h"
#include "gpu/fusion_layout.h"
#include "kernels/chunks.h"

namespace hvdlite {

struct AdasumRound {
  std::size_t first = 0;              // of the tensors
  std::vector<std::uint64_t> begins;  // by tensor, elements from the begin of the run
  std::vector<std::uint64_t> counts;  // by tensor
  std::uint64_t elements = 0;         // of the run
  // Bytes from the begin of the scratch, which begins with the run.
  std::uint64_t received = 0;
  std::uint64_t partials = 0;
  std::uint64_t dots = 0;
  std::uint64_t bytes = 0;  // of it all
};

namespace adasum_layout {

inline constexpr std::uint64_t kDotsBytes = 3 * sizeof(double);

inline void append(AdasumRound& round, std::uint64_t count, std::uint64_t element_bytes) {
  round.begins.push_back(aligned(round.elements, kFusionAlign / element_bytes));
  round.counts.push_back(count);
  if (count > 0) round.elements = round.begins.back() + count;
}

inline void place(AdasumRound& round, std::uint64_t element_bytes, std::uint64_t members) {
  const std::uint64_t largest = part_of({0, round.elements}, element_bytes, members, 0).count();
  const std::uint64_t work_bytes = std::max<std::uint64_t>(element_bytes, sizeof(float));
  const std::uint64_t pairs = members / 2;
  const std::uint64_t tensors = round.counts.size();
  const std::uint64_t vectors = members * largest;
  round.received = aligned(std::max(round.elements * element_bytes,
                                    work_bytes > element_bytes ? vectors * work_bytes : 0));
  round.partials = round.received + aligned(vectors * element_bytes);
  round.dots = round.partials + pairs * (tiles_of(largest) + tensors) * kDotsBytes;
  round.bytes = round.dots + pairs * tensors * kDotsBytes;
}

// False, and nothing is changed, where the round would outgrow the room.
inline bool take(AdasumRound& round, std::uint64_t count, std::uint64_t element_bytes,
                 std::uint64_t members, std::uint64_t room) {
  const std::uint64_t before = round.elements;
  append(round, count, element_bytes);
  place(round, element_bytes, members);
  if (round.bytes <= room) return true;
  round.begins.pop_back();
  round.counts.pop_back();
  round.elements = before;
  place(round, element_bytes, members);
  return false;
}

}  // namespace adasum_layout

// `counts`: elements by tensor; `room` is what the fusion buffer has.
inline std::vector<AdasumRound> lay_out_adasum(std::span<const std::uint64_t> counts,
                                               std::uint64_t element_bytes, std::uint64_t members,
                                               std::uint64_t room) {
  std::vector<AdasumRound> rounds;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (!rounds.empty() &&
        adasum_layout::take(rounds.back(), counts[i], element_bytes, members, room)) {
      continue;
    }
    rounds.emplace_back().first = i;
    adasum_layout::append(rounds.back(), counts[i], element_bytes);
    adasum_layout::place(rounds.back(), element_bytes, members);
  }
  return rounds;
}

}  // namespace hvdlite
