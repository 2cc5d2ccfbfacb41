#include "engine/features.h"

#include <utility>

#include "engine/autotune.h"
#include "engine/blocked_report.h"
#include "engine/late_results.h"
#include "negotiation/deadlock_watch.h"
#include "negotiation/late_gradients.h"
#include "negotiation/stall_monitor.h"

namespace hvdlite {

std::vector<std::unique_ptr<Extension>> add_features(Coordinator& coordinator, EngineParts& parts) {
  std::vector<std::unique_ptr<Extension>> made;
  made.push_back(std::make_unique<DeadlockWatch>(parts.config.deadlock_grace, coordinator));
  made.push_back(std::make_unique<StallMonitor>(parts.config, coordinator, parts.live.stalls));
  made.push_back(std::make_unique<LateGradients>(coordinator));
  for (const auto& extension : made) coordinator.add(*extension);
  coordinator.add(parts.live.steps);
  return made;
}

void add_features(EngineParts& parts, bool settled) {
  parts.extensions.add(std::make_unique<LateResults>(
      parts.rank, parts.size, [&parts](const EntryPtr& entry, Status status) {
        parts.queue.finish(entry, std::move(status));
      }));
  if (parts.fabric != nullptr && parts.config.deadlock_grace > 0) {
    parts.extensions.add(std::make_unique<BlockedReport>(
        parts.config.deadlock_grace, [&parts] { return parts.queue.pushed(); },
        [&parts] { parts.extensions.ask_for_report(); }));
  }
  if (parts.fabric != nullptr && parts.rank == 0 && !settled && parts.config.autotune != 0) {
    parts.extensions.add(
        std::make_unique<Autotune>(parts.config, parts.fabric->topology.host_count() > 1,
                                   parts.fabric->own_segment->layout().buffer_bytes));
  }
}

}  // namespace hvdlite
