// A world of one rank: it needs no agreement, and has neither a thread nor a fabric. The thread
// that submits a collective executes it, one thread at a time, and it is done when submit()
// returns. So nobody waits, nothing is in flight when the world ends, and no error ends it.
#pragma once

#include <functional>
#include <optional>

#include "base/mutex.h"
#include "engine/executor.h"
#include "engine/parts.h"
#include "engine/world.h"

namespace hvdlite {

class LoneWorld : public World {
 public:
  // The parts are borrowed. A world of one only hands `settled` on.
  LoneWorld(EngineParts& parts, std::optional<Tunables> settled, Suspend suspend);

  Status submit(EntryPtr entry, bool blocking) override;
  bool wait(const Entry& entry, bool blocking, Deadline deadline) override;
  void abort(const std::string& /*reason*/) override {}
  void shutdown() override;
  void suspend(const std::string& reason) override;
  Status status() const override { return Status(); }
  Tunables tunables() const override;
  std::optional<Tunables> settled() const override { return settled_; }

 private:
  // `then`: the entry's continuation, which is the caller's to run.
  Status execute(const EntryPtr& entry, std::function<void()>& then);

  EngineParts& parts_;
  const std::optional<Tunables> settled_;
  const Suspend suspend_;
  Mutex mutex_;  // its holder is the runner
  Executor executor_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
