// The coordinator's part in frozen schedules (negotiation/frozen_schedule.h).
#include <algorithm>
#include <tuple>
#include <utility>

#include "negotiation/coordinator.h"

namespace hvdlite {

bool Coordinator::can_freeze() const {
  const auto is_true = [](bool one) { return one; };
  const bool all_here = std::none_of(left_.begin(), left_.end(), [](auto& one) { return one; }) &&
                        std::none_of(joined_.begin(), joined_.end(), is_true);
  if (rolls_ || !all_here || !failed_.empty() || !responses_.empty()) return false;
  return std::all_of(books_.begin(), books_.end(), [&](const auto& row) {
    const Book& book = row.second;
    if (std::any_of(book.removing.begin(), book.removing.end(), is_true)) return false;
    if (row.first != 0) return book.tallies.empty();
    return book.absent.empty() &&
           std::all_of(book.tallies.begin(), book.tallies.end(), [&](const auto& tally) {
             return cache_.find(tally.first, tally.second.request).has_value();
           });
  });
}

void Coordinator::freeze(std::vector<std::uint32_t> ids) {
  Book& world = books_.at(0);
  waiting_ -= world.tallies.size();
  world.tallies.clear();
  Response response;
  response.form = Response::Form::kFreeze;
  response.freeze = {++frozen_, world.generation, std::move(ids)};
  responses_.push_back(std::move(response));
}

void Coordinator::note_thaw(const std::string& last_name, TimePoint when) {
  for (Activity& one : activity_) {
    if (one.when < when) std::tie(one.name, one.when) = std::tie(last_name, when);
  }
}

}  // namespace hvdlite
