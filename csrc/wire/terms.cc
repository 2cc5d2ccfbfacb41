#include "wire/terms.h"

#include "wire/late_terms.h"

namespace hvdlite {

std::optional<Difference> difference(const TermsPtr& a, const TermsPtr& b) {
  if (a && b) return a->difference(*b);
  if (!a && !b) return std::nullopt;
  return Difference{a ? a->name() : b->name(), a ? "one" : "none", b ? "one" : "none"};
}

// Only one extension decides, so there is one kind of terms.
TermsPtr read_terms(Reader& reader) { return read_late_terms(reader); }

}  // namespace hvdlite
