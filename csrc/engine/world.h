// The world that an engine runs in: it takes entries that have passed the local checks, and brings
// each to its end. Two implementations: PeerWorld, of several ranks, and LoneWorld, of one.
//
// Threads: all calls come from any thread. Within, one thread at a time is the runner, which alone
// executes collectives. The engine owns its world and destroys it after shutdown().
#pragma once

#include <string>

#include "base/deadline.h"
#include "base/status.h"
#include "base/tunables.h"
#include "entry/entry.h"

namespace hvdlite {

class World {
 public:
  virtual ~World() = default;
  // As Engine::enqueue(), behind its checks.
  virtual Status submit(EntryPtr entry, bool blocking) = 0;
  // As the functions of Engine.
  virtual bool wait(const Entry& entry, bool blocking, Deadline deadline) = 0;
  virtual void abort(const std::string& reason) = 0;
  virtual void shutdown() = 0;
  virtual Status status() const = 0;
  virtual Tunables tunables() const = 0;
};

}  // namespace hvdlite
