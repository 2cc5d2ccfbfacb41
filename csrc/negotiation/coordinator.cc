#include "negotiation/coordinator.h"

#include <algorithm>
#include <utility>

#include "base/deadline.h"
#include "base/text.h"
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
std::vector<std::int64_t> rows_of(const PendingTensor& pending) {
  if (!pending.request.rows_differ()) return {};
  std::vector<std::vector<std::int64_t>> rows;
  for (std::size_t i = 0; i < pending.submitted.size(); ++i) {
    if (pending.submitted[i]) {
      rows.push_back(rows_given(pending.differing[i], pending.submitted));
    } else {
      const bool gathers = pending.request.kind == Kind::kAllgather;
      rows.emplace_back(gathers ? pending.request.tensors.size() : pending.submitted.size());
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

Coordinator::Coordinator(int size, const Config& config, const CoordinatorViews& views,
                         bool cuts_at_changes)
    : size_(size),
      views_(views),
      cuts_at_changes_(cuts_at_changes),
      late_(*this),
      deadlock_(config.deadlock_grace, *this),
      stalls_(config, *this, views.stalls),
      cache_(config),
      activity_(size),
      left_(size),
      joined_(size) {
  std::vector<int>& world = tables_[0].group.ranks;
  for (int rank = 0; rank < size; ++rank) world.push_back(rank);
}

void Coordinator::add_set(const Group& group) {
  tables_[static_cast<std::uint32_t>(group.id)].group = group;
  skip_ids(static_cast<std::uint32_t>(group.id));
}

Status Coordinator::submit(int rank, const Request& request, TimePoint now, const Arrival& sent) {
  const auto found = tables_.find(request.process_set);
  const int index = found == tables_.end() ? -1 : found->second.group.index_of(rank);
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
  PendingTable& table = found->second;
  activity_[rank] = {request.name, now, activity_[rank].submissions + 1};
  if (request.kind == Kind::kJoin) join(rank, now);
  const auto member = static_cast<std::size_t>(index);
  if (request.late && late_.take(table, member, request, now)) return Status();
  sends_ = sends_ || request.is_send();
  if (fail_late_change(rank, request)) return Status();
  const std::uint64_t opened = opened_;
  PendingTensor& pending = open(table, rank, request, now);
  if (pending.submitted[index]) {
    return Status(StatusCode::kInternal,
                  "rank " + std::to_string(rank) + " submitted " + request.name + " twice");
  }
  trace_arrival(pending, request, rank, opened_ > opened);
  pending.submitted[index] = true;
  if (!pending.arrivals.empty()) pending.arrivals[index] = sent;
  --pending.missing;
  if (pending.refusal.ok()) {
    auto text = describe_mismatch(pending.first_rank, pending.request, rank, request);
    if (text) pending.refusal = Status(StatusCode::kMismatch, std::move(*text));
  }
  if (request.rows_differ() && pending.refusal.ok()) pending.differing[index] = request;
  const bool late = pending.request.late.has_value();
  if (!late && pending.missing == 0) {
    answer(table, request.key(), now);
  } else if (fail_if_left(table, pending)) {
    table.tensors.erase(request.key());
  } else if (late) {
    late_.submitted(table, pending, member, request, now);
  }
  return Status();
}

void Coordinator::answer(PendingTable& table, const std::string& key, TimePoint now) {
  auto node = table.tensors.extract(key);
  respond(table, std::move(node.mapped()), now);
}

void Coordinator::tick(TimePoint now) {
  waited_ = !idle();
  deadlock_.tick(now);
  stalls_.tick(now, notices_);
  late_.tick(now);
}

Coordinator::TimePoint Coordinator::due() const {
  TimePoint first = stalls_.due();
  for (const auto& due : {deadlock_.due(), late_.due()})
    first = std::min(first, due.value_or(first));
  return first;
}

PendingTensor& Coordinator::open(PendingTable& table, int rank, const Request& request,
                                 TimePoint now) {
  const auto [at, is_new] = table.tensors.try_emplace(request.key());
  PendingTensor& pending = at->second;
  if (!is_new) return pending;
  const std::vector<int>& members = table.group.ranks;
  pending.number = ++opened_;
  pending.request = request;
  pending.first_rank = rank;
  pending.submitted.resize(members.size());
  pending.missing = static_cast<std::size_t>(std::count_if(
      members.begin(), members.end(), [&](int member) { return awaits(pending, member); }));
  if (request.rows_differ()) pending.differing.resize(members.size());
  if (views_.steps != nullptr && request.of_a_step()) pending.arrivals.resize(size_);
  pending.since = now;
  return pending;
}

bool Coordinator::awaits(const PendingTensor& pending, int rank) const {
  const Request& request = pending.request;
  return request.concerns(rank) && (request.kind == Kind::kJoin || !joined_[rank]);
}

std::vector<int> Coordinator::submitters(const PendingTable& table, const PendingTensor& pending) {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < table.group.ranks.size(); ++i) {
    if (pending.submitted[i]) ranks.push_back(table.group.ranks[i]);
  }
  return ranks;
}

std::vector<int> Coordinator::missing_ranks(const PendingTable& table,
                                            const PendingTensor& pending) const {
  const bool late = pending.request.late.has_value();
  std::vector<int> ranks;
  for (std::size_t i = 0; i < table.group.ranks.size(); ++i) {
    const int rank = table.group.ranks[i];
    if (pending.submitted[i] || !awaits(pending, rank)) continue;
    if (!late || late_.awaits(table, pending, i)) ranks.push_back(rank);
  }
  return ranks;
}

void Coordinator::join(int rank, TimePoint now) {
  joined_[rank] = true;
  joins_ = true;
  last_joined_ = rank;
  late_.joined(rank, now);
  for (auto& [id, table] : tables_) {
    const int index = table.group.index_of(rank);
    for (auto at = table.tensors.begin(); index >= 0 && at != table.tensors.end();) {
      const auto current = at++;
      PendingTensor& pending = current->second;
      const Request& request = pending.request;
      const bool awaited = request.kind != Kind::kJoin && request.concerns(rank) && !request.late;
      if (!awaited || pending.submitted[index] || --pending.missing > 0) continue;
      auto node = table.tensors.extract(current);
      respond(table, std::move(node.mapped()), now);
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
  for (auto& [id, table] : tables_) {
    const PendingTable& its = table;
    std::erase_if(table.tensors, [&](const auto& one) { return fail_if_left(its, one.second); });
  }
}

bool Coordinator::fail_if_left(const PendingTable& table, const PendingTensor& pending) {
  for (std::size_t i = 0; i < table.group.ranks.size(); ++i) {
    const int rank = table.group.ranks[i];
    if (pending.submitted[i] || !left_[rank] || !awaits(pending, rank)) continue;
    respond_error(pending,
                  left_early(rank, *left_[rank], describe(pending.request) + " waits for it"));
    return true;
  }
  return false;
}

std::string Coordinator::describe_last(int rank, TimePoint now) const {
  const Activity& last = activity_[rank];
  if (last.name.empty()) return "has called nothing yet";
  const std::size_t begin = last.name.starts_with('#') ? 1 : 0;
  return "last called '" + last.name.substr(begin) + "' " +
         text_of_fixed(seconds_between(last.when, now), 1) + " s ago";
}

Coordinator::TimePoint Coordinator::idle_since(const PendingTable& table,
                                               const PendingTensor& pending) const {
  TimePoint since = pending.since;
  for (std::size_t i = 0; i < pending.submitted.size(); ++i) {
    const bool awaited = pending.request.kind == Kind::kJoin && !pending.submitted[i];
    if (awaited) since = std::max(since, activity_[table.group.ranks[i]].when);
  }
  return since;
}

void Coordinator::fail_stalled(TimePoint since, const std::string& reason, int rank) {
  for (auto& [id, table] : tables_) {
    const PendingTable& its = table;
    std::erase_if(table.tensors, [&](const auto& one) {
      if (idle_since(its, one.second) > since) return false;
      respond_error(one.second, Status(StatusCode::kStalled, reason, rank));
      return true;
    });
  }
}

void Coordinator::fail(PendingTable& table, const std::string& key, const Status& error) {
  const auto found = table.tensors.find(key);
  if (found->second.request.changes_process_sets()) {
    return fail_change(std::string(found->second.request.name), error);
  }
  respond_error_to_submitters(table, found->second, error);
  table.tensors.erase(found);
}

Status Coordinator::refuse(const PendingTable& table, const PendingTensor& pending) {
  const Request& request = pending.request;
  const std::vector<int>& ranks = table.group.ranks;
  const auto absent = std::find(pending.submitted.begin(), pending.submitted.end(), false);
  if (request.changes_process_sets() && absent != pending.submitted.end()) {
    const int rank = ranks[static_cast<std::size_t>(absent - pending.submitted.begin())];
    return Status(StatusCode::kInvalidArgument,
                  std::string(name_of(request.kind)) + ": every rank takes part in it, but not " +
                      has_joined(rank) + "; change process sets before join(), or after it",
                  rank);
  }
  if (request.kind == Kind::kBroadcast && !pending.submitted[table.group.index_of(request.root)]) {
    return Status(StatusCode::kInvalidArgument,
                  "broadcast '" + request.name + "': its root is " + has_joined(request.root) +
                      " and gives nothing any more; name a root that still takes part",
                  request.root);
  }
  for (std::size_t i = 0; i < ranks.size() && request.is_send(); ++i) {
    if (!request.concerns(ranks[i]) || pending.submitted[i]) continue;
    return Status(StatusCode::kInvalidArgument,
                  describe(request) + ": " + has_joined(ranks[i]) +
                      ", neither sends nor receives any more; end all transfers before join()",
                  ranks[i]);
  }
  for (std::size_t i = 0; i < ranks.size() && request.kind == Kind::kAlltoall; ++i) {
    if (!pending.submitted[i]) continue;
    HVDLITE_RETURN_IF_ERROR(refuse_splits(table, pending, ranks[i], pending.differing[i]));
  }
  if (request.kind == Kind::kReducescatter) {
    return refuse_splits(table, pending, pending.first_rank, request);
  }
  return Status();
}

Status Coordinator::refuse_splits(const PendingTable& table, const PendingTensor& pending, int rank,
                                  const Request& request) {
  if (auto text = describe_bad_splits(rank, request, pending.submitted)) {
    return Status(StatusCode::kInvalidArgument, std::move(*text), rank);
  }
  const std::vector<int>& ranks = table.group.ranks;
  for (std::size_t i = 0; i < request.splits.size(); ++i) {
    const std::size_t to = i % ranks.size();
    if (pending.submitted[to] || request.splits[i] == 0) continue;
    return Status(StatusCode::kInvalidArgument,
                  describe(request) + ": rank " + std::to_string(rank) + " sends " +
                      std::to_string(request.splits[i]) + " rows to " + has_joined(ranks[to]) +
                      " and takes nothing any more; send it none",
                  rank);
  }
  return Status();
}

Status Coordinator::note_absent(PendingTable& table, const PendingTensor& pending,
                                Response& response) {
  for (std::size_t i = 0; i < pending.submitted.size(); ++i) {
    const int rank = table.group.ranks[i];
    const std::vector<int>& left_out = response.left_out;
    const bool named = std::binary_search(left_out.begin(), left_out.end(), rank);
    if (!pending.submitted[i] && !named) response.absent.push_back(rank);
  }
  if (response.absent != table.absent) {
    if (ids_given_ >= kMaxGroupId) {
      return Status(StatusCode::kInternal, describe(pending.request) + ": join() has changed the " +
                                               "members of groups too often in this world");
    }
    table.absent = response.absent;
    table.generation = ++ids_given_;
    cut_round();
  }
  response.generation = table.generation;
  return Status();
}

void Coordinator::cut_round() {
  if (!cuts_at_changes_) return;
  Response response;
  response.form = Response::Form::kCut;
  responses_.push_back(std::move(response));
}

void Coordinator::respond(PendingTable& table, PendingTensor pending, TimePoint now) {
  if (pending.refusal.ok()) pending.refusal = refuse(table, pending);
  Response response;
  if (pending.request.late) late_.complete(table, pending, response);
  if (!pending.refusal.ok()) {
    return respond_error(pending, std::move(pending.refusal), std::move(response.left_out));
  }
  if (pending.request.changes_process_sets()) return respond_change(std::move(pending));
  // Who has joined is nothing to the two ranks of a send.
  Status noted = pending.request.is_send() ? Status() : note_absent(table, pending, response);
  if (!noted.ok()) return respond_error(pending, std::move(noted), std::move(response.left_out));
  trace_answer(pending, Status());
  const std::string key = pending.request.key();
  if (!pending.arrivals.empty()) note_step(pending, response, now);
  if (const auto id = cache_.find(key, pending.request)) {
    response.form = Response::Form::kCached;
    response.cache_id = *id;
    response.request = named(pending.request);
  } else {
    response.form = Response::Form::kFull;
    if (pending.request.cacheable()) response.cache_id = cache_.assign(key);
    cache_.remember(response.cache_id, key, pending.request);
    response.first_dimensions = rows_of(pending);
    response.request = std::move(pending.request);
    // In an alltoall they belong to one member, and all have their part of the rows.
    if (response.request.rows_differ()) response.request.splits.clear();
  }
  if (response.request.kind == Kind::kJoin) {
    response.last_joined = last_joined_;
    joined_.assign(joined_.size(), false);
    joins_ = false;
    late_.all_joined();
    failed_.clear();  // who has not made such a change has joined instead
  }
  responses_.push_back(std::move(response));
}

// A rank whose gradient is late has the moment of the answer.
void Coordinator::note_step(PendingTensor& pending, const Response& response, TimePoint now) {
  for (const int rank : response.left_out) {
    Arrival& arrival = pending.arrivals[rank];
    if (!arrival.came()) arrival = {now, now, /*after_wait=*/false};
  }
  views_.steps->arrived(pending.request.name, pending.arrivals,
                        response.absent.empty() && response.left_out.empty());
  if (auto line = views_.steps->take_line()) notices_.push_back(std::move(*line));
}

void Coordinator::trace_arrival(const PendingTensor& pending, const Request& request, int rank,
                                bool first) {
  if (views_.trace == nullptr || !views_.trace->on()) return;
  if (first) {
    views_.trace->open(TaskGroup::kNegotiations, pending.number, trace_label(request), trace_now(),
                       name_of(request.kind).data(), request.wire_bytes());
  }
  views_.trace->mark(TaskGroup::kNegotiations, pending.number, "rank", rank);
}

void Coordinator::trace_answer(const PendingTensor& pending, const Status& error) {
  if (views_.trace == nullptr || !views_.trace->on()) return;
  views_.trace->close(TaskGroup::kNegotiations, pending.number, error.message());
}

void Coordinator::respond_error(const PendingTensor& pending, Status error,
                                std::vector<int> left_out) {
  trace_answer(pending, error);
  Response response;
  response.form = Response::Form::kError;
  response.request = named(pending.request);
  response.error = std::move(error);
  response.left_out = std::move(left_out);
  responses_.push_back(std::move(response));
}

void Coordinator::respond_error_to_submitters(const PendingTable& table,
                                              const PendingTensor& pending, const Status& error) {
  respond_error(pending, error);
  responses_.back().recipients = submitters(table, pending);
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
  for (auto set = removed_.begin(); set != named; ++set) {
    late_.forget(*set);
    cache_.forget(*set);  // Rank 0 has read the answers that name its requests.
    tables_.erase(*set);
  }
  removed_.erase(removed_.begin(), named);
  taken_removals_ = removed_.size();
  return std::exchange(responses_, {});
}

// The coordinator's part in changes of the process sets. A change is a collective of the world; the
// set comes and goes at its place in the order of all responses, so no rank needs to be told twice.
namespace {

bool same(const std::vector<int>& ranks, const std::vector<std::int64_t>& others) {
  return std::equal(ranks.begin(), ranks.end(), others.begin(), others.end());
}

std::string listed(const std::vector<std::int64_t>& ranks) {
  return describe(Group{0, {ranks.begin(), ranks.end()}, 0, 0});
}

}  // namespace

PendingTable* Coordinator::find_table(const std::vector<std::int64_t>& ranks) {
  for (auto& [id, table] : tables_) {
    const bool removed = std::find(removed_.begin(), removed_.end(), id) != removed_.end();
    if (!removed && same(table.group.ranks, ranks)) return &table;
  }
  return nullptr;
}

std::optional<std::string> Coordinator::describe_bad_change(const Request& request) {
  const std::string subject = std::string(name_of(request.kind)) + " of " + listed(request.ranks);
  const PendingTable* table = find_table(request.ranks);
  if (request.kind == Kind::kRemoveProcessSet) {
    if (table != nullptr && table->group.id != 0) return std::nullopt;
    return subject + (table != nullptr ? ": the world itself stays" : ": there is no such set");
  }
  if (auto text = describe_bad_ranks(request, size_)) return text;
  if (table != nullptr) {
    return subject + ": there is one of these ranks already" +
           (table->group.id == 0 ? ", the world (hvd.global_process_set)" : "");
  }
  if (tables_.size() - removed_.size() > kMaxProcessSets) {
    return subject + ": there are " + std::to_string(kMaxProcessSets) +
           " process sets already, no more fit; remove some";
  }
  if (ids_given_ >= kMaxGroupId) {
    return subject + ": this world has had " + std::to_string(kMaxGroupId) +
           " sets and changes of their members by join(), no more fit";
  }
  return std::nullopt;
}

void Coordinator::respond_change(PendingTensor pending) {
  if (auto text = describe_bad_change(pending.request)) {
    return respond_error(pending, Status(StatusCode::kInvalidArgument, std::move(*text)));
  }
  Response response;
  if (Status noted = note_absent(tables_.at(0), pending, response); !noted.ok()) {
    return respond_error(pending, std::move(noted));
  }
  trace_answer(pending, Status());
  response.form = Response::Form::kFull;
  std::uint32_t set = 0;
  if (pending.request.kind == Kind::kAddProcessSet) {
    set = ++ids_given_;
    const auto& ranks = pending.request.ranks;
    add_set({static_cast<int>(set), {ranks.begin(), ranks.end()}, 0, 0});
  } else {
    PendingTable& table = *find_table(pending.request.ranks);
    set = static_cast<std::uint32_t>(table.group.id);
    fail_rest(table);
    removed_.push_back(set);
    cut_round();
  }
  response.set_id = static_cast<int>(set);
  response.request = std::move(pending.request);
  responses_.push_back(std::move(response));
}

void Coordinator::fail_change(const std::string& name, const Status& error) {
  Request change;
  change.name = name;
  auto node = tables_.at(0).tensors.extract(change.key());
  const PendingTensor& pending = node.mapped();
  respond_error(pending, error);
  if (pending.missing > 0) failed_[name] = {error, pending.missing};
}

bool Coordinator::fail_late_change(int rank, const Request& request) {
  const auto failed = failed_.find(request.name);
  if (failed == failed_.end() || !request.changes_process_sets()) return false;
  PendingTensor pending;
  pending.number = ++opened_;
  pending.request = request;
  trace_arrival(pending, request, rank, /*first=*/true);
  respond_error(pending, failed->second.error);
  if (--failed->second.missing == 0) failed_.erase(failed);
  return true;
}

void Coordinator::fail_rest(PendingTable& table) {
  for (const auto& [key, pending] : table.tensors) {
    const int missing = missing_ranks(table, pending).front();
    respond_error_to_submitters(
        table, pending,
        Status(StatusCode::kMismatch,
               "rank " + std::to_string(missing) + " removes " + describe(table.group) + ", but " +
                   std::string(name_of(pending.request.kind)) + " '" + pending.request.name +
                   "' of rank " + std::to_string(pending.first_rank) +
                   " waits for it there; every rank removes a set at the same point"));
  }
  table.tensors.clear();
}

}  // namespace hvdlite
