#include "negotiation/wait_texts.h"

#include <algorithm>

#include "negotiation/coordinator.h"

namespace hvdlite {

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

}  // namespace hvdlite
