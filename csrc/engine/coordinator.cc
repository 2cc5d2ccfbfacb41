#include "engine/coordinator.h"

#include <utility>

namespace hvdlite {
namespace {

// From the rows that each member gives, one after the other, to those that come from each member.
std::vector<std::int64_t> transposed(const std::vector<std::vector<std::int64_t>>& rows) {
  std::vector<std::int64_t> result;
  for (std::size_t i = 0; i < rows[0].size(); ++i) {
    for (const auto& member : rows) result.push_back(member[i]);
  }
  return result;
}

}  // namespace

void Coordinator::add_set(const Group& group) {
  books_[static_cast<std::uint32_t>(group.id)].group = group;
}

Status Coordinator::submit(int rank, const Request& request, TimePoint now) {
  const auto found = books_.find(request.process_set);
  const int index = found == books_.end() ? -1 : found->second.group.index_of(rank);
  if (index < 0) {
    return Status(StatusCode::kInternal, "rank " + std::to_string(rank) + " submitted " +
                                             request.name + " to process set " +
                                             std::to_string(request.process_set) +
                                             ", of which it is no member");
  }
  Book& book = found->second;
  activity_[rank] = {request.name, now};
  if (fail_late_change(rank, request)) return Status();
  const auto [at, is_new] = book.tallies.try_emplace(request.name);
  Tally& tally = at->second;
  if (is_new) {
    tally.number = ++tallied_;
    tally.request = request;
    tally.first_rank = rank;
    tally.submitted.resize(book.group.ranks.size());
    tally.missing = book.group.ranks.size();
    tally.since = tally.warned = now;
    tally.rows.resize(book.group.ranks.size());
    ++waiting_;
  }
  if (tally.submitted[index]) {
    return Status(StatusCode::kInternal,
                  "rank " + std::to_string(rank) + " submitted " + request.name + " twice");
  }
  if (timeline_ != nullptr) timeline_->arrived(tally.number, request, rank, is_new);
  tally.submitted[index] = true;
  --tally.missing;
  if (tally.refusal.ok()) compare(tally, rank, static_cast<std::size_t>(index), request);
  if (fail_removal(rank, request, book)) return Status();
  const std::string name = request.name;
  if (tally.missing == 0 || fail_if_left(book, name, tally)) {
    auto node = book.tallies.extract(at);
    --waiting_;
    if (node.mapped().missing == 0) respond(book, name, std::move(node.mapped()));
  }
  return Status();
}

void Coordinator::compare(Tally& tally, int rank, std::size_t index, const Request& request) {
  const std::size_t members = tally.rows.size();
  if (auto text = describe_mismatch(tally.first_rank, tally.request, rank, request)) {
    tally.refusal = Status(StatusCode::kMismatch, std::move(*text));
    return;
  }
  if (request.kind == Kind::kAlltoall) {
    if (auto text = describe_bad_splits(rank, request, members)) {
      tally.refusal = Status(StatusCode::kInvalidArgument, std::move(*text), rank);
      return;
    }
  }
  tally.rows[index] = rows_given(request, members);
}

Status Coordinator::submit_cached(int rank, std::uint32_t id, TimePoint now) {
  const Request* request = cache_.at(id);
  if (request == nullptr) {
    return Status(StatusCode::kInternal, "rank " + std::to_string(rank) + " submitted cache id " +
                                             std::to_string(id) + ", which was never given out");
  }
  return submit(rank, Request(*request), now);
}

void Coordinator::leave(int rank, std::uint64_t collectives) {
  left_[rank] = collectives;
  for (auto& [id, book] : books_) {
    for (auto at = book.tallies.begin(); at != book.tallies.end();) {
      if (fail_if_left(book, at->first, at->second)) {
        at = book.tallies.erase(at);
        --waiting_;
      } else {
        ++at;
      }
    }
  }
}

bool Coordinator::fail_if_left(Book& book, const std::string& name, const Tally& tally) {
  for (std::size_t i = 0; i < book.group.ranks.size(); ++i) {
    const int rank = book.group.ranks[i];
    if (tally.submitted[i] || !left_[rank]) continue;
    respond_error(
        tally,
        Status(StatusCode::kRankFailed,
               "rank " + std::to_string(rank) + " left after " + std::to_string(*left_[rank]) +
                   " collectives (clean exit), but " + std::string(name_of(tally.request.kind)) +
                   " '" + name + "' waits for it; give every rank the same number of steps",
               rank));
    return true;
  }
  return false;
}

void Coordinator::fail_stalled(TimePoint since, const std::string& reason) {
  for (auto& [id, book] : books_) {
    for (auto at = book.tallies.begin(); at != book.tallies.end();) {
      if (at->second.since > since) {
        ++at;
        continue;
      }
      respond_error(at->second, Status(StatusCode::kStalled, reason));
      at = book.tallies.erase(at);
      --waiting_;
    }
  }
}

void Coordinator::respond(Book& book, const std::string& name, Tally tally) {
  if (!tally.refusal.ok()) return respond_error(tally, std::move(tally.refusal));
  if (timeline_ != nullptr) timeline_->answered(tally.number, Status());
  if (tally.request.changes_process_sets()) return respond_change(std::move(tally));
  Response response;
  const std::string key = tally.request.key();
  if (const auto id = cache_.find(key, tally.request)) {
    response.form = Response::Form::kCached;
    response.cache_id = *id;
    response.request.process_set = static_cast<std::uint32_t>(book.group.id);
    response.request.name = name;
  } else {
    response.form = Response::Form::kFull;
    if (tally.request.cacheable()) response.cache_id = cache_.assign(key);
    cache_.remember(response.cache_id, key, tally.request);
    response.request = std::move(tally.request);
    response.request.splits.clear();  // one member's; all have their part of the rows
    response.first_dimensions = transposed(tally.rows);
  }
  responses_.push_back(std::move(response));
}

void Coordinator::respond_error(const Tally& tally, Status error) {
  if (tally.request.changes_process_sets()) {
    for (auto& [id, book] : books_) book.removing.clear();
  }
  if (timeline_ != nullptr) timeline_->answered(tally.number, error);
  Response response;
  response.form = Response::Form::kError;
  response.request.process_set = tally.request.process_set;
  response.request.name = tally.request.name;
  response.error = std::move(error);
  responses_.push_back(std::move(response));
}

std::vector<Response> Coordinator::take_responses() {
  for (const std::uint32_t set : std::exchange(removed_, {})) books_.erase(set);
  return std::exchange(responses_, {});
}

}  // namespace hvdlite
