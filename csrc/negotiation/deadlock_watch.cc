#include "negotiation/deadlock_watch.h"

#include <algorithm>
#include <set>
#include <utility>

#include "negotiation/coordinator.h"

namespace hvdlite {

Bytes encode(const Blocked& blocked) {
  Writer writer;
  writer.put(blocked.submitted);
  writer.put(blocked.pending);
  writer.put(static_cast<std::uint32_t>(blocked.keys.size()));
  for (std::size_t i = 0; i < blocked.keys.size(); ++i) {
    writer.put_text(blocked.keys[i]);
    const std::string place = i < blocked.places.size() ? blocked.places[i] : "";
    writer.put_text(place.size() <= kMaxPlaceBytes ? place : "");
  }
  return writer.take();
}

bool decode(std::span<const std::byte> bytes, Blocked& blocked) {
  Reader reader(bytes);
  blocked.submitted = reader.get<std::uint64_t>();
  blocked.pending = reader.get<std::uint32_t>();
  blocked.keys.resize(reader.get_count(2 * sizeof(std::uint16_t)));
  blocked.places.resize(blocked.keys.size());
  for (std::size_t i = 0; i < blocked.keys.size(); ++i) {
    blocked.keys[i] = reader.get_text(kMaxKeyBytes);
    blocked.places[i] = reader.get_text(kMaxPlaceBytes);
  }
  return !reader.bad() && reader.at_end();
}

std::string describe_awaited(const Request& request) {
  return request.changes_process_sets() ? std::string(name_of(request.kind)) : describe(request);
}

std::string describe_wait(const Wait& wait) {
  return "rank " + std::to_string(wait.rank) + " waits for rank " + std::to_string(wait.awaited) +
         " in " + describe_awaited(*wait.request) + wait.place;
}

std::string advice_for(const std::vector<Wait>& waits) {
  const auto changes = [](const Wait& wait) { return wait.request->changes_process_sets(); };
  const auto sends = [](const Wait& wait) { return wait.request->is_send(); };
  if (std::any_of(waits.begin(), waits.end(), changes)) {
    return "every rank changes process sets at the same point";
  }
  if (std::all_of(waits.begin(), waits.end(), sends)) {
    return "ranks that send to each other submit both transfers before they wait, with "
           "dist.isend() or dist.irecv()";
  }
  return std::string(
             "call the same operations in the same order on all ranks, and none of them "
             "under `if hvd.rank() == 0:`; ") +
         kJoinAtTheEnd;
}

namespace {

constexpr std::size_t kRanksShown = 8;

// The error of the operations in which the ranks wait, each for the next one.
Status deadlock_error(const std::vector<Wait>& waits, const std::string& more) {
  std::string text = "deadlock: ";
  for (std::size_t i = 0; i < waits.size(); ++i) {
    if (i == kRanksShown) {
      text += ", and so on";
      break;
    }
    text += (i == 0 ? "" : i + 1 == waits.size() ? ", and " : ", ") + describe_wait(waits[i]);
  }
  return Status(StatusCode::kDeadlock, text + more + ": " + advice_for(waits));
}

}  // namespace

DeadlockWatch::DeadlockWatch(double grace, Coordinator& coordinator)
    : half_(delay_of(grace / 2)), coordinator_(coordinator) {}

bool DeadlockWatch::reported(int rank, std::span<const std::byte> body, TimePoint now) {
  Blocked blocked;
  if (!decode(body, blocked)) return false;
  if (half_ <= Patience::zero()) return true;
  reports_.erase(rank);
  if (!blocked.keys.empty()) reports_[rank] = {std::move(blocked), now};
  return true;
}

std::optional<DeadlockWatch::TimePoint> DeadlockWatch::due() const {
  std::optional<TimePoint> first;
  for (const auto& [rank, report] : reports_) {
    if (report.examined) continue;
    const TimePoint at = report.since + half_;
    if (!first || at < *first) first = at;
  }
  return first;
}

// Between two new reports nothing can make a rank deadlocked: so it looks once for each.
void DeadlockWatch::tick(TimePoint now) {
  bool grown = false;
  for (auto& [rank, report] : reports_) {
    const bool due = !report.examined && now >= report.since + half_;
    report.examined = report.examined || due;
    grown = grown || due;
  }
  if (!grown) return;
  const std::map<std::string, Open> open = open_operations();
  Waits waits;
  for (const auto& [rank, report] : reports_) {
    auto own = waits_of(rank, report, open);
    if (!own.empty()) waits[rank] = std::move(own);
  }
  keep_deadlocked(waits);
  // All of them get the error together, so it comes with the youngest report.
  const bool all_due = std::all_of(
      waits.begin(), waits.end(), [&](const auto& row) { return reports_.at(row.first).examined; });
  if (all_due) fail(waits);
}

std::map<std::string, DeadlockWatch::Open> DeadlockWatch::open_operations() const {
  std::map<std::string, Open> open;
  for (const auto& [set, table] : coordinator_.tables()) {
    for (const auto& [key, pending] : table.tensors) {
      open[key] = {set, key, &pending, coordinator_.missing_ranks(table, pending)};
    }
  }
  return open;
}

bool DeadlockWatch::submitted_by(const Open& operation, int rank) const {
  const int index = coordinator_.group(operation.set).index_of(rank);
  return index >= 0 && operation.pending->submitted[static_cast<std::size_t>(index)];
}

std::vector<const DeadlockWatch::Open*> DeadlockWatch::waits_of(
    int rank, const Report& report, const std::map<std::string, Open>& open) const {
  if (coordinator_.activity(rank).submissions != report.blocked.submitted) return {};
  std::uint32_t pending = 0;
  for (const auto& [key, operation] : open) pending += submitted_by(operation, rank) ? 1 : 0;
  if (pending != report.blocked.pending) return {};
  std::vector<const Open*> waits;
  for (const std::string& key : report.blocked.keys) {
    const auto found = open.find(key);
    if (found == open.end() || !submitted_by(found->second, rank)) return {};
    waits.push_back(&found->second);
  }
  return waits;
}

bool DeadlockWatch::stuck(const Open& operation, const Waits& waits) {
  const Request& request = operation.pending->request;
  if (request.late || request.kind == Kind::kJoin) return false;
  return std::any_of(operation.missing.begin(), operation.missing.end(),
                     [&](int rank) { return waits.contains(rank); });
}

void DeadlockWatch::keep_deadlocked(Waits& waits) {
  std::size_t released = 1;
  while (released > 0) {
    std::set<const Open*> stuck_ones;
    for (const auto& [rank, own] : waits) {
      for (const Open* one : own) {
        if (!stuck_ones.contains(one) && stuck(*one, waits)) stuck_ones.insert(one);
      }
    }
    released = std::erase_if(waits, [&](const auto& row) {
      return !std::all_of(row.second.begin(), row.second.end(),
                          [&](const Open* one) { return stuck_ones.contains(one); });
    });
  }
}

void DeadlockWatch::fail(const Waits& waits) {
  std::map<std::string, std::pair<std::uint32_t, Status>> failures;  // The key is the operation's.
  for (const auto& [rank, own] : waits) {
    for (const Open* one : own) {
      if (!failures.contains(one->key)) failures[one->key] = {one->set, describe(*one, waits)};
    }
  }
  for (const auto& [rank, own] : waits) reports_.erase(rank);
  for (const auto& [key, failure] : failures) {
    coordinator_.fail(coordinator_.tables().at(failure.first), key, failure.second);
  }
}

// The ranks from one that waits in the operation on, each of which waits for the next one, until
// they come round. The shortest way round is the clearest.
Status DeadlockWatch::describe(const Open& operation, const Waits& waits) const {
  std::vector<Wait> path;
  const auto visited = [&](int rank) {
    return std::any_of(path.begin(), path.end(), [&](const Wait& one) { return one.rank == rank; });
  };
  const auto first = std::find_if(waits.begin(), waits.end(), [&](const auto& row) {
    return std::count(row.second.begin(), row.second.end(), &operation) > 0;
  });
  int rank = first->first;
  const Open* open = &operation;
  while (!visited(rank)) {
    path.push_back({rank, -1, &open->pending->request, place_of(rank, *open)});
    int next = -1;
    for (const int missing : open->missing) {
      if (!waits.contains(missing)) continue;
      if (next < 0 || (visited(missing) && !visited(next))) next = missing;
    }
    path.back().awaited = next;
    rank = next;
    open = waits.at(rank).front();
  }
  return deadlock_error(path, describe_others(path, waits));
}

std::string DeadlockWatch::place_of(int rank, const Open& operation) const {
  const Blocked& blocked = reports_.at(rank).blocked;
  const auto key = std::find(blocked.keys.begin(), blocked.keys.end(), operation.key);
  if (key == blocked.keys.end()) return "";
  const std::string& place = blocked.places[static_cast<std::size_t>(key - blocked.keys.begin())];
  return place.empty() ? "" : " (" + place + ")";
}

std::string DeadlockWatch::describe_others(const std::vector<Wait>& path,
                                           const Waits& waits) const {
  std::string text;
  std::size_t others = 0;
  for (const auto& [rank, own] : waits) {
    const int other = rank;
    const bool told =
        std::any_of(path.begin(), path.end(), [&](const Wait& wait) { return wait.rank == other; });
    if (told || ++others > kRanksShown) continue;
    text += (others == 1 ? "; also waiting: rank " : ", rank ") + std::to_string(rank) + " in " +
            describe_awaited(own.front()->pending->request) + place_of(rank, *own.front());
  }
  if (others > kRanksShown) text += " and " + std::to_string(others - kRanksShown) + " more ranks";
  return text;
}

}  // namespace hvdlite
