// The world that an engine runs in: it takes entries that have passed the local checks, and brings
// each to its end. Two implementations: PeerWorld, of several ranks, and LoneWorld, of one.
//
// Threads: all calls come from any thread. Within, one thread at a time is the runner, which alone
// executes collectives. The engine owns its world and destroys it after shutdown().
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "base/tunables.h"
#include "engine/commit_book.h"
#include "engine/entry.h"
#include "negotiation/process_set.h"

namespace hvdlite {

// What a world of an elastic job leaves when it ends by a failure (pending_operations.h).
struct Suspended {
  Status cause;
  std::vector<EntryPtr> entries;        // besides those in `commits`
  std::shared_ptr<CommitBook> commits;  // A world of one has none.
  std::vector<GroupPtr> process_sets;   // besides that of all ranks
  bool by_itself = true;                // not by Engine::suspend()
  std::optional<Tunables> settled;      // as Engine::settled()
};
using Suspend = std::function<void(Suspended)>;  // It is null unless the job is elastic.

class World {
 public:
  virtual ~World() = default;
  // As Engine::enqueue(), behind its checks.
  virtual Status submit(EntryPtr entry, bool blocking) = 0;
  // As the functions of Engine.
  virtual bool wait(const Entry& entry, bool blocking, Deadline deadline) = 0;
  virtual void abort(const std::string& reason) = 0;
  virtual void shutdown() = 0;
  virtual void suspend(const std::string& reason) = 0;
  virtual Status status() const = 0;
  virtual Tunables tunables() const = 0;
  virtual std::optional<Tunables> settled() const = 0;
};

}  // namespace hvdlite
