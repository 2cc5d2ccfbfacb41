// A world of one rank: it needs no agreement, and has neither a thread nor a fabric. The thread
// that submits a collective executes it, one thread at a time, and it is done when submit()
// returns. So nobody waits, nothing is in flight when the world ends, and no error ends it.
#pragma once

#include <functional>

#include "base/mutex.h"
#include "engine/world.h"
#include "execution/executor.h"
#include "execution/parts.h"

namespace hvdlite {

class LoneWorld : public World {
 public:
  LoneWorld(EngineParts& parts, Park park);  // the parts are borrowed

  Status submit(EntryPtr entry, bool blocking) override;
  bool wait(const Entry& entry, bool blocking, Deadline deadline) override;
  void abort(const std::string& /*reason*/) override {}
  void shutdown() override;
  void suspend(const std::string& reason) override;
  Status status() const override { return Status(); }
  Tunables tunables() const override;

 private:
  // `then`: the entry's continuation, which is the caller's to run.
  Status execute(const EntryPtr& entry, std::function<void()>& then);

  EngineParts& parts_;
  const Park park_;
  Mutex mutex_;  // its holder is the runner
  Executor executor_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
