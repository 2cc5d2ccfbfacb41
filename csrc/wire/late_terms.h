// The terms on which an all-reduce goes on without ranks that are late
// (negotiation/late_gradients).
//
//   late_terms = key:text step:u64 quorum:u32 grace:i64 bound:u32 fold:u8    grace in microseconds
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "wire/terms.h"

namespace hvdlite {

inline constexpr std::int64_t kMaxGraceUs = std::int64_t{1} << 40;  // twelve days

struct LateTerms final : Terms {
  LateTerms() = default;
  LateTerms(std::string its_key, std::uint64_t its_step, std::uint32_t its_quorum,
            std::int64_t its_grace_us, std::uint32_t its_bound, bool folds)
      : key(std::move(its_key)),
        step(its_step),
        quorum(its_quorum),
        grace_us(its_grace_us),
        bound(its_bound),
        fold(folds) {}
  // The terms of a request, which has some.
  static const LateTerms& of(const TermsPtr& terms) {
    return static_cast<const LateTerms&>(*terms);
  }

  std::string name() const override { return "late gradients"; }
  void put(Writer& writer) const override;
  std::optional<Difference> difference(const Terms& other) const override;

  std::string key;            // all requests of one step with this key share one decision
  std::uint64_t step = 0;     // read where the name is new to the key, and not compared
  std::uint32_t quorum = 1;   // So many of all members of the process set suffice.
  std::int64_t grace_us = 0;  // then the others have so many microseconds more
  std::uint32_t bound = 1;    // no rank is more steps than that behind
  bool fold = true;           // what comes late goes into a later step; otherwise it is forgotten
};

TermsPtr read_late_terms(Reader& reader);

}  // namespace hvdlite
