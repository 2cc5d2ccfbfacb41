#include "execution/finite_check.h"

#include <utility>

#include "base/log.h"
#include "kernels/finite.h"

namespace hvdlite {

void NameList::add(std::string name) {
  if (first_.size() < kMost) {
    first_.push_back(std::move(name));
  } else {
    ++more_;
  }
}

std::string NameList::text() const {
  std::string text;
  for (const std::string& name : first_) text += (text.empty() ? "" : ", ") + name;
  if (more_ > 0) text += " and " + std::to_string(more_) + " more";
  return text;
}

void FiniteCheck::look(const std::string& name, ElementTypes types, const Piece& piece) {
  const std::size_t at = first_nonfinite(types, piece.input, piece.count, piece.prescale);
  if (at == piece.count) return;
  ++found_;
  const std::string as = types.cast() ? " as " + std::string(name_of(types.wire)) : "";
  if (first_name_.empty()) first_name_ = name;
  waiting_.add("'" + name + "' (first at element " + std::to_string(at) + as + ")");
}

void FiniteCheck::found_in(const NameList& names) {
  ++found_;
  waiting_.add("on a GPU among " + names.text());
}

void FiniteCheck::report() {
  if (waiting_.empty() || !quiet_.passed()) return;
  std::string text = "rank " + std::to_string(rank_) +
                     " gives infinities or NaN to a reduction: " + waiting_.text();
  log(LogLevel::kWarning, rank_, text);
  events_.add("nonfinite", rank_, std::exchange(first_name_, {}), std::move(text));
  waiting_ = {};
  quiet_ = Deadline::after(kQuiet);
}

}  // namespace hvdlite
