// The coordinator's part in changes of the process sets. A change is a collective of the world; the
// set comes and goes at its place in the order of all responses, so no rank needs to be told twice.
#include <algorithm>
#include <utility>

#include "negotiation/coordinator.h"
#include "negotiation/process_set.h"

namespace hvdlite {
namespace {

bool same(const std::vector<int>& ranks, const std::vector<std::int64_t>& others) {
  return std::equal(ranks.begin(), ranks.end(), others.begin(), others.end());
}

std::string listed(const std::vector<std::int64_t>& ranks) {
  return describe(Group{0, {ranks.begin(), ranks.end()}, 0, 0});
}

}  // namespace

Coordinator::Book* Coordinator::find_book(const std::vector<std::int64_t>& ranks) {
  for (auto& [id, book] : books_) {
    const bool removed = std::find(removed_.begin(), removed_.end(), id) != removed_.end();
    if (!removed && same(book.group.ranks, ranks)) return &book;
  }
  return nullptr;
}

std::optional<std::string> Coordinator::describe_bad_change(const Request& request) {
  const std::string subject = std::string(name_of(request.kind)) + " of " + listed(request.ranks);
  const Book* book = find_book(request.ranks);
  if (request.kind == Kind::kRemoveProcessSet) {
    if (book != nullptr && book->group.id != 0) return std::nullopt;
    return subject + (book != nullptr ? ": the world itself stays" : ": there is no such set");
  }
  if (auto text = describe_bad_ranks(request, size_)) return text;
  if (book != nullptr) {
    return subject + ": there is one of these ranks already" +
           (book->group.id == 0 ? ", the world (hvd.global_process_set)" : "");
  }
  if (books_.size() - removed_.size() > kMaxProcessSets) {
    return subject + ": there are " + std::to_string(kMaxProcessSets) +
           " process sets already, no more fit; remove some";
  }
  if (epochs_ >= kMaxEpoch) {
    return subject + ": this world has had " + std::to_string(kMaxEpoch) +
           " sets and changes of their members by join(), no more fit";
  }
  return std::nullopt;
}

void Coordinator::respond_change(Tally tally) {
  if (auto text = describe_bad_change(tally.request)) {
    return respond_error(tally, Status(StatusCode::kInvalidArgument, std::move(*text)));
  }
  Response response;
  if (Status noted = note_absent(books_.at(0), tally, response); !noted.ok()) {
    return respond_error(tally, std::move(noted));
  }
  if (observer_ != nullptr) observer_->answered(tally.number, Status());
  response.form = Response::Form::kFull;
  std::uint32_t set = 0;
  if (tally.request.kind == Kind::kAddProcessSet) {
    set = ++epochs_;
    const auto& ranks = tally.request.ranks;
    add_set({static_cast<int>(set), {ranks.begin(), ranks.end()}, 0, 0});
  } else {
    set = static_cast<std::uint32_t>(find_book(tally.request.ranks)->group.id);
    cache_.forget(set);
    removed_.push_back(set);
    cut_round();
  }
  response.set_id = static_cast<int>(set);
  response.request = std::move(tally.request);
  responses_.push_back(std::move(response));
}

void Coordinator::fail_change(const std::string& name, const Status& error) {
  Request change;
  change.name = name;
  auto node = books_.at(0).tallies.extract(change.key());
  const Tally& tally = node.mapped();
  --waiting_;
  respond_error(tally, error);
  if (tally.missing > 0) failed_[name] = {error, tally.missing};
}

bool Coordinator::fail_late_change(int rank, const Request& request) {
  const auto failed = failed_.find(request.name);
  if (failed == failed_.end() || !request.changes_process_sets()) return false;
  Tally tally;
  tally.number = ++tallied_;
  tally.request = request;
  if (observer_ != nullptr) observer_->arrived(tally.number, request, rank, /*first=*/true);
  respond_error(tally, failed->second.error);
  if (--failed->second.missing == 0) failed_.erase(failed);
  return true;
}

bool Coordinator::fail_removal(int rank, const Request& request, Book& book) {
  Book* affected = book.removing.empty() ? nullptr : &book;
  if (request.kind == Kind::kRemoveProcessSet) {
    affected = find_book(request.ranks);
    const int index = affected == nullptr ? -1 : affected->group.index_of(rank);
    if (index < 0 || affected->group.id == 0) return false;
    affected->removing.resize(affected->group.ranks.size());
    affected->removing[index] = true;
  }
  if (affected == nullptr) return false;
  Status error;
  for (auto at = affected->tallies.begin(); at != affected->tallies.end();) {
    int remover = -1;
    for (std::size_t i = 0; i < affected->group.ranks.size(); ++i) {
      const int member = affected->group.ranks[i];
      const bool awaited = at->second.request.concerns(member) && !at->second.submitted[i];
      if (affected->removing[i] && awaited) remover = member;
    }
    if (remover < 0) {
      ++at;
      continue;
    }
    if (error.ok()) {
      error = Status(StatusCode::kMismatch,
                     "rank " + std::to_string(remover) + " removes " + describe(affected->group) +
                         ", but " + std::string(name_of(at->second.request.kind)) + " '" +
                         at->second.request.name + "' of rank " +
                         std::to_string(at->second.first_rank) +
                         " waits for it there; every rank removes a set at the same point");
    }
    respond_error_to_submitters(*affected, at->second, error);
    at = affected->tallies.erase(at);
    --waiting_;
  }
  if (error.ok()) return false;
  std::vector<std::string> removals;
  for (const auto& [key, tally] : books_.at(0).tallies) {
    const bool removal = tally.request.kind == Kind::kRemoveProcessSet;
    if (!removal || !same(affected->group.ranks, tally.request.ranks)) continue;
    removals.push_back(tally.request.name);
  }
  for (const std::string& name : removals) fail_change(name, error);
  return true;
}

}  // namespace hvdlite
