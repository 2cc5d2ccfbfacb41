// The terms on which a request does not wait for all members of its process set. What they say is
// known to the feature alone that decides about such requests (negotiation/extension.h), and is a
// subclass in a file of its own; read_terms() has one line for it.
//
// Requests share their terms, which nobody changes. Pure functions, any thread.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "wire/bytes.h"

namespace hvdlite {

// The first field in which two requests differ, in words.
struct Difference {
  std::string field, a, b;
};

class Terms {
 public:
  Terms() = default;
  Terms(const Terms&) = default;
  Terms& operator=(const Terms&) = default;
  virtual ~Terms() = default;

  // What a request with such terms is, for messages.
  virtual std::string name() const = 0;
  virtual void put(Writer& writer) const = 0;
  // Where the terms of two ranks differ that must have them alike; nothing when they agree.
  // REQUIRES: `other` is of the same class.
  virtual std::optional<Difference> difference(const Terms& other) const = 0;
};

// The terms of a request, or none. Two of them are equal if ranks that have them agree.
struct TermsPtr : std::shared_ptr<const Terms> {
  using std::shared_ptr<const Terms>::shared_ptr;
  bool operator==(const TermsPtr& other) const {
    if (get() == other.get()) return true;
    return get() != nullptr && other.get() != nullptr && !get()->difference(*other);
  }
};

// Where two requests differ in their terms, or in that one of them has none.
std::optional<Difference> difference(const TermsPtr& a, const TermsPtr& b);
// Reads what Terms::put() has written, and rejects what no rank writes.
TermsPtr read_terms(Reader& reader);

}  // namespace hvdlite
