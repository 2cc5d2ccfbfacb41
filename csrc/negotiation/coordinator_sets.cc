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
  if (epochs_ >= kMaxEpoch) {
    return subject + ": this world has had " + std::to_string(kMaxEpoch) +
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
  if (observer_ != nullptr) observer_->answered(pending.number, Status());
  response.form = Response::Form::kFull;
  std::uint32_t set = 0;
  if (pending.request.kind == Kind::kAddProcessSet) {
    set = ++epochs_;
    const auto& ranks = pending.request.ranks;
    add_set({static_cast<int>(set), {ranks.begin(), ranks.end()}, 0, 0});
  } else {
    set = static_cast<std::uint32_t>(find_table(pending.request.ranks)->group.id);
    cache_.forget(set);
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
  --waiting_;
  respond_error(pending, error);
  if (pending.missing > 0) failed_[name] = {error, pending.missing};
}

bool Coordinator::fail_late_change(int rank, const Request& request) {
  const auto failed = failed_.find(request.name);
  if (failed == failed_.end() || !request.changes_process_sets()) return false;
  PendingTensor pending;
  pending.number = ++opened_;
  pending.request = request;
  if (observer_ != nullptr) observer_->arrived(pending.number, request, rank, /*first=*/true);
  respond_error(pending, failed->second.error);
  if (--failed->second.missing == 0) failed_.erase(failed);
  return true;
}

bool Coordinator::fail_removal(int rank, const Request& request, PendingTable& table) {
  PendingTable* affected = table.removing.empty() ? nullptr : &table;
  if (request.kind == Kind::kRemoveProcessSet) {
    affected = find_table(request.ranks);
    const int index = affected == nullptr ? -1 : affected->group.index_of(rank);
    if (index < 0 || affected->group.id == 0) return false;
    affected->removing.resize(affected->group.ranks.size());
    affected->removing[index] = true;
  }
  if (affected == nullptr) return false;
  Status error;
  for (auto at = affected->tensors.begin(); at != affected->tensors.end();) {
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
    at = affected->tensors.erase(at);
    --waiting_;
  }
  if (error.ok()) return false;
  std::vector<std::string> removals;
  for (const auto& [key, pending] : tables_.at(0).tensors) {
    const bool removal = pending.request.kind == Kind::kRemoveProcessSet;
    if (!removal || !same(affected->group.ranks, pending.request.ranks)) continue;
    removals.push_back(pending.request.name);
  }
  for (const std::string& name : removals) fail_change(name, error);
  return true;
}

}  // namespace hvdlite
