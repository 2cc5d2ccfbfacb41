#include "negotiation/coordinator.h"

#include <algorithm>
#include <utility>

#include "negotiation/process_set.h"

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

// The rows that come from each member; absent ones give none.
std::vector<std::int64_t> rows_of(const Coordinator::Tally& tally) {
  if (!tally.request.rows_differ()) return {};
  std::vector<std::vector<std::int64_t>> rows;
  for (std::size_t i = 0; i < tally.submitted.size(); ++i) {
    if (tally.submitted[i]) {
      rows.push_back(rows_given(tally.differing[i], tally.submitted));
    } else {
      const bool gathers = tally.request.kind == Kind::kAllgather;
      rows.emplace_back(gathers ? tally.request.tensors.size() : tally.submitted.size());
    }
  }
  return transposed(rows);
}

// Returns why this is a request that no honest rank submits, because it refuses it at the call;
// nothing otherwise. Functions further down rely on this check.
std::optional<std::string> describe_impossible(int rank, const Request& request,
                                               const Group& group) {
  if (request.kind == Kind::kBroadcast && group.index_of(request.root) < 0) {
    return "its root, rank " + std::to_string(request.root) + ", is not a member of " +
           describe(group);
  }
  if (request.is_send() &&
      (request.tensors.size() != 1 || request.source() == request.destination() ||
       group.index_of(request.source()) < 0 || group.index_of(request.destination()) < 0 ||
       !request.concerns(rank))) {
    return "a send is of one tensor, between two members of " + describe(group);
  }
  const bool of_the_world = request.kind == Kind::kJoin || request.changes_process_sets();
  if (of_the_world && group.id != 0) return "it is for the world, not for " + describe(group);
  return std::nullopt;
}

// What says to whom a response goes, and what it answers.
Request named(const Request& request) {
  Request name;
  name.process_set = request.process_set;
  name.name = request.name;
  if (!request.is_send()) return name;
  name.kind = request.kind;
  name.ranks = request.ranks;
  return name;
}

std::string has_joined(int rank) { return "rank " + std::to_string(rank) + ", which has joined"; }

}  // namespace

Status left_early(int rank, std::uint64_t collectives, const std::string& missing,
                  const std::string& advice) {
  return Status(StatusCode::kRankFailed,
                "rank " + std::to_string(rank) + " left after " + std::to_string(collectives) +
                    " collectives, but " + missing + advice,
                rank);
}

void Coordinator::add_set(const Group& group) {
  books_[static_cast<std::uint32_t>(group.id)].group = group;
  skip_ids(static_cast<std::uint32_t>(group.id));
}

Status Coordinator::submit(int rank, const Request& request, TimePoint now, const Arrival& sent) {
  const auto found = books_.find(request.process_set);
  const int index = found == books_.end() ? -1 : found->second.group.index_of(rank);
  if (index < 0) {
    return Status(StatusCode::kInternal, "rank " + std::to_string(rank) + " submitted " +
                                             request.name + " to process set " +
                                             std::to_string(request.process_set) +
                                             ", of which it is not a member");
  }
  if (auto text = describe_impossible(rank, request, found->second.group)) {
    return Status(StatusCode::kInternal, "rank " + std::to_string(rank) + " submitted " +
                                             describe(request) + ", but " + *text);
  }
  if (joined_[rank]) {
    return Status(StatusCode::kInternal, "rank " + std::to_string(rank) + " submitted " +
                                             request.name + " although it had joined");
  }
  Book& book = found->second;
  activity_[rank] = {request.name, now, activity_[rank].submissions + 1};
  if (request.kind == Kind::kJoin) join(rank, now);
  if (request.roll && catch_up(book, static_cast<std::size_t>(index), request, now)) {
    return Status();
  }
  sends_ = sends_ || request.is_send();
  if (fail_late_change(rank, request)) return Status();
  const std::uint64_t tallied = tallied_;
  Tally& tally = open(book, rank, request, now);
  if (tally.submitted[index]) {
    return Status(StatusCode::kInternal,
                  "rank " + std::to_string(rank) + " submitted " + request.name + " twice");
  }
  if (observer_ != nullptr) observer_->arrived(tally.number, request, rank, tallied_ > tallied);
  tally.submitted[index] = true;
  if (!tally.arrivals.empty()) tally.arrivals[index] = sent;
  --tally.missing;
  if (tally.refusal.ok()) {
    auto text = describe_mismatch(tally.first_rank, tally.request, rank, request);
    if (text) tally.refusal = Status(StatusCode::kMismatch, std::move(*text));
  }
  if (request.rows_differ() && tally.refusal.ok()) tally.differing[index] = request;
  if (fail_removal(rank, request, book)) return Status();
  if (tally.request.roll) {
    arrive(book, request.key(), static_cast<std::size_t>(index), request, now);
    return Status();
  }
  if (tally.missing == 0 || fail_if_left(book, tally)) {
    auto node = book.tallies.extract(request.key());
    --waiting_;
    if (node.mapped().missing == 0) respond(book, std::move(node.mapped()), now);
  }
  return Status();
}

Coordinator::Tally& Coordinator::open(Book& book, int rank, const Request& request, TimePoint now) {
  const auto [at, is_new] = book.tallies.try_emplace(request.key());
  Tally& tally = at->second;
  if (!is_new) return tally;
  const std::vector<int>& members = book.group.ranks;
  tally.number = ++tallied_;
  tally.request = request;
  tally.first_rank = rank;
  tally.submitted.resize(members.size());
  tally.missing = static_cast<std::size_t>(std::count_if(
      members.begin(), members.end(), [&](int member) { return awaits(tally, member); }));
  if (request.rows_differ()) tally.differing.resize(members.size());
  if (steps_ != nullptr && request.of_a_step()) tally.arrivals.resize(size_);
  tally.since = tally.warned = now;
  ++waiting_;
  return tally;
}

bool Coordinator::awaits(const Tally& tally, int rank) const {
  const Request& request = tally.request;
  return request.concerns(rank) && (request.kind == Kind::kJoin || !joined_[rank]);
}

std::vector<int> Coordinator::submitters(const Book& book, const Tally& tally) {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < book.group.ranks.size(); ++i) {
    if (tally.submitted[i]) ranks.push_back(book.group.ranks[i]);
  }
  return ranks;
}

std::vector<int> Coordinator::missing_ranks(const Book& book, const Tally& tally) const {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < book.group.ranks.size(); ++i) {
    const int rank = book.group.ranks[i];
    if (tally.submitted[i] || !awaits(tally, rank) || is_late(book, tally, i)) continue;
    ranks.push_back(rank);
  }
  return ranks;
}

void Coordinator::join(int rank, TimePoint now) {
  joined_[rank] = true;
  joins_ = true;
  last_joined_ = rank;
  if (rolls_) join_rolls(rank, now);
  for (auto& [id, book] : books_) {
    const int index = book.group.index_of(rank);
    for (auto at = book.tallies.begin(); index >= 0 && at != book.tallies.end();) {
      const auto current = at++;
      Tally& tally = current->second;
      const Request& request = tally.request;
      const bool awaited = request.kind != Kind::kJoin && request.concerns(rank) && !request.roll;
      if (!awaited || tally.submitted[index] || --tally.missing > 0) continue;
      auto node = book.tallies.extract(current);
      --waiting_;
      respond(book, std::move(node.mapped()), now);
    }
  }
}

Status Coordinator::submit_cached(int rank, std::uint32_t id, TimePoint now, const Arrival& sent) {
  const Request* request = cache_.at(id);
  if (request == nullptr) {
    return Status(StatusCode::kInternal, "rank " + std::to_string(rank) + " submitted cache id " +
                                             std::to_string(id) + ", which was never given out");
  }
  return submit(rank, Request(*request), now, sent);
}

void Coordinator::leave(int rank, std::uint64_t collectives) {
  left_[rank] = collectives;
  for (auto& [id, book] : books_) {
    for (auto at = book.tallies.begin(); at != book.tallies.end();) {
      if (fail_if_left(book, at->second)) {
        at = book.tallies.erase(at);
        --waiting_;
      } else {
        ++at;
      }
    }
  }
}

bool Coordinator::fail_if_left(const Book& book, const Tally& tally) {
  for (std::size_t i = 0; i < book.group.ranks.size(); ++i) {
    const int rank = book.group.ranks[i];
    if (tally.submitted[i] || !left_[rank] || !awaits(tally, rank)) continue;
    respond_error(tally, left_early(rank, *left_[rank], describe(tally.request) + " waits for it"));
    return true;
  }
  return false;
}

Coordinator::TimePoint Coordinator::idle_since(const Book& book, const Tally& tally) const {
  TimePoint since = tally.since;
  for (std::size_t i = 0; i < tally.submitted.size(); ++i) {
    const bool awaited = tally.request.kind == Kind::kJoin && !tally.submitted[i];
    if (awaited) since = std::max(since, activity_[book.group.ranks[i]].when);
  }
  return since;
}

void Coordinator::fail_stalled(TimePoint since, const std::string& reason, int rank) {
  for (auto& [id, book] : books_) {
    for (auto at = book.tallies.begin(); at != book.tallies.end();) {
      if (idle_since(book, at->second) > since) {
        ++at;
        continue;
      }
      respond_error(at->second, Status(StatusCode::kStalled, reason, rank));
      at = book.tallies.erase(at);
      --waiting_;
    }
  }
}

void Coordinator::fail(Book& book, const std::string& key, const Status& error) {
  const auto found = book.tallies.find(key);
  if (found->second.request.changes_process_sets()) {
    return fail_change(std::string(found->second.request.name), error);
  }
  respond_error_to_submitters(book, found->second, error);
  book.tallies.erase(found);
  --waiting_;
}

Status Coordinator::refuse(const Book& book, const Tally& tally) {
  const Request& request = tally.request;
  const std::vector<int>& ranks = book.group.ranks;
  const auto absent = std::find(tally.submitted.begin(), tally.submitted.end(), false);
  if (request.changes_process_sets() && absent != tally.submitted.end()) {
    const int rank = ranks[static_cast<std::size_t>(absent - tally.submitted.begin())];
    return Status(StatusCode::kInvalidArgument,
                  std::string(name_of(request.kind)) + ": every rank takes part in it, but not " +
                      has_joined(rank) + "; change process sets before join(), or after it",
                  rank);
  }
  if (request.kind == Kind::kBroadcast && !tally.submitted[book.group.index_of(request.root)]) {
    return Status(StatusCode::kInvalidArgument,
                  "broadcast '" + request.name + "': its root is " + has_joined(request.root) +
                      " and gives nothing any more; name a root that still takes part",
                  request.root);
  }
  for (std::size_t i = 0; i < ranks.size() && request.is_send(); ++i) {
    if (!request.concerns(ranks[i]) || tally.submitted[i]) continue;
    return Status(StatusCode::kInvalidArgument,
                  describe(request) + ": " + has_joined(ranks[i]) +
                      ", neither sends nor receives any more; end all transfers before join()",
                  ranks[i]);
  }
  for (std::size_t i = 0; i < ranks.size() && request.kind == Kind::kAlltoall; ++i) {
    if (!tally.submitted[i]) continue;
    HVDLITE_RETURN_IF_ERROR(refuse_splits(book, tally, ranks[i], tally.differing[i]));
  }
  if (request.kind == Kind::kReducescatter) {
    return refuse_splits(book, tally, tally.first_rank, request);
  }
  return Status();
}

Status Coordinator::refuse_splits(const Book& book, const Tally& tally, int rank,
                                  const Request& request) {
  if (auto text = describe_bad_splits(rank, request, tally.submitted)) {
    return Status(StatusCode::kInvalidArgument, std::move(*text), rank);
  }
  const std::vector<int>& ranks = book.group.ranks;
  for (std::size_t i = 0; i < request.splits.size(); ++i) {
    const std::size_t to = i % ranks.size();
    if (tally.submitted[to] || request.splits[i] == 0) continue;
    return Status(StatusCode::kInvalidArgument,
                  describe(request) + ": rank " + std::to_string(rank) + " sends " +
                      std::to_string(request.splits[i]) + " rows to " + has_joined(ranks[to]) +
                      " and takes nothing any more; send it none",
                  rank);
  }
  return Status();
}

Status Coordinator::note_absent(Book& book, const Tally& tally, Response& response) {
  for (std::size_t i = 0; i < tally.submitted.size(); ++i) {
    const int rank = book.group.ranks[i];
    const bool late = std::binary_search(response.late.begin(), response.late.end(), rank);
    if (!tally.submitted[i] && !late) response.absent.push_back(rank);
  }
  if (response.absent != book.absent) {
    if (epochs_ >= kMaxEpoch) {
      return Status(StatusCode::kInternal, describe(tally.request) + ": join() has changed the " +
                                               "members of groups too often in this world");
    }
    book.absent = response.absent;
    book.generation = ++epochs_;
    cut_round();
  }
  response.generation = book.generation;
  return Status();
}

void Coordinator::cut_round() {
  if (!cuts_at_changes_) return;
  Response response;
  response.form = Response::Form::kCut;
  responses_.push_back(std::move(response));
}

void Coordinator::tell_steps(Tally& tally, const std::vector<int>& late, bool all_came,
                             TimePoint now) {
  for (const int rank : late) {
    if (!tally.arrivals[rank].came()) tally.arrivals[rank] = {now, now, /*after_wait=*/false};
  }
  steps_->arrived(tally.request.name, tally.arrivals, all_came);
}

void Coordinator::respond(Book& book, Tally tally, TimePoint now) {
  if (tally.refusal.ok()) tally.refusal = refuse(book, tally);
  Response response;
  if (tally.request.roll) response.late = note_late(book, tally);
  if (!tally.refusal.ok()) {
    return respond_error(tally, std::move(tally.refusal), std::move(response.late));
  }
  if (tally.request.changes_process_sets()) return respond_change(std::move(tally));
  // Who has joined is nothing to the two ranks of a send.
  Status noted = tally.request.is_send() ? Status() : note_absent(book, tally, response);
  if (!noted.ok()) return respond_error(tally, std::move(noted), std::move(response.late));
  if (observer_ != nullptr) observer_->answered(tally.number, Status());
  const std::string key = tally.request.key();
  const bool all_came = response.absent.empty() && response.late.empty();
  if (!tally.arrivals.empty()) tell_steps(tally, response.late, all_came, now);
  if (const auto id = cache_.find(key, tally.request)) {
    response.form = Response::Form::kCached;
    response.cache_id = *id;
    response.request = named(tally.request);
  } else {
    response.form = Response::Form::kFull;
    if (tally.request.cacheable()) response.cache_id = cache_.assign(key);
    cache_.remember(response.cache_id, key, tally.request);
    response.first_dimensions = rows_of(tally);
    response.request = std::move(tally.request);
    // Of an alltoall they are one member's, and all have their part of the rows.
    if (response.request.rows_differ()) response.request.splits.clear();
  }
  if (response.request.kind == Kind::kJoin) {
    response.last_joined = last_joined_;
    joined_.assign(joined_.size(), false);
    joins_ = false;
    return_to_rolls();
    failed_.clear();  // who has not made such a change has joined instead
  }
  responses_.push_back(std::move(response));
}

void Coordinator::respond_error(const Tally& tally, Status error, std::vector<int> late) {
  if (tally.request.changes_process_sets()) {
    for (auto& [id, book] : books_) book.removing.clear();
  }
  if (observer_ != nullptr) observer_->answered(tally.number, error);
  Response response;
  response.form = Response::Form::kError;
  response.request = named(tally.request);
  response.error = std::move(error);
  response.late = std::move(late);
  responses_.push_back(std::move(response));
}

void Coordinator::respond_error_to_submitters(const Book& book, const Tally& tally,
                                              const Status& error) {
  respond_error(tally, error);
  responses_.back().recipients = submitters(book, tally);
}

void Coordinator::tune(const Tunables& tunables, bool settled) {
  Response response;
  response.form = Response::Form::kTune;
  response.tunables = tunables;
  response.settled = settled;
  responses_.push_back(std::move(response));
}

std::vector<Response> Coordinator::take_responses() {
  const auto named = removed_.begin() + static_cast<std::ptrdiff_t>(taken_removals_);
  for (auto set = removed_.begin(); set != named; ++set) books_.erase(*set);
  removed_.erase(removed_.begin(), named);
  taken_removals_ = removed_.size();
  return std::exchange(responses_, {});
}

}  // namespace hvdlite
