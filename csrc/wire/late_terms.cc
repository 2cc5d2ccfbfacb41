#include "wire/late_terms.h"

#include "wire/message.h"

namespace hvdlite {

void LateTerms::put(Writer& writer) const {
  writer.put_text(key);
  writer.put(step);
  writer.put(quorum);
  writer.put(grace_us);
  writer.put(bound);
  writer.put(static_cast<std::uint8_t>(fold));
}

TermsPtr read_late_terms(Reader& reader) {
  auto terms = std::make_shared<LateTerms>();
  terms->key = reader.get_text(kMaxNameBytes);
  terms->step = reader.get<std::uint64_t>();
  terms->quorum = reader.get<std::uint32_t>();
  terms->grace_us = reader.get<std::int64_t>();
  terms->bound = reader.get<std::uint32_t>();
  terms->fold = reader.get<std::uint8_t>() != 0;
  const bool timed = terms->grace_us >= 0 && terms->grace_us <= kMaxGraceUs;
  if (!timed || terms->quorum == 0 || terms->bound == 0) reader.reject();
  return terms;
}

std::optional<Difference> LateTerms::difference(const Terms& other) const {
  const auto& b = static_cast<const LateTerms&>(other);
  if (key != b.key) {
    return Difference{"key of late gradients", "'" + key + "'", "'" + b.key + "'"};
  }
  if (quorum != b.quorum) {
    return Difference{"quorum of late gradients", std::to_string(quorum), std::to_string(b.quorum)};
  }
  if (grace_us != b.grace_us) {
    return Difference{"grace of late gradients", std::to_string(grace_us) + " us",
                      std::to_string(b.grace_us) + " us"};
  }
  if (bound != b.bound) {
    return Difference{"bound of late gradients", std::to_string(bound), std::to_string(b.bound)};
  }
  if (fold != b.fold) {
    return Difference{"policy of late gradients", fold ? "fold" : "drop", b.fold ? "fold" : "drop"};
  }
  return std::nullopt;
}

}  // namespace hvdlite
