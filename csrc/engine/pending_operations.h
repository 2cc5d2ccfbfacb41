// Where the collectives of an elastic job wait between two worlds: entries without an engine.
//
// When a world of the job ends by a failure, its engine *suspends* here what it has not handed out,
// with its commit book. Waiters sleep on: a completion belongs to its entry, whichever engine ends
// it. Then the membership thread (Python) reports to the registrar, which answers with the commit
// point; deliver() hands out what some survivor has handed out, and resume() submits all else to
// the next engine. If something cannot be redone, fail() ends everything with an error instead.
//
// All engines of a process share this with its Python object. Any thread may call it. Its
// mutex is held while an engine takes an entry, and never while a completion is finished or a
// continuation runs.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/commit_book.h"
#include "engine/entry.h"
#include "negotiation/process_set.h"

namespace hvdlite {

class Engine;

// What a world of an elastic job leaves when it ends by a failure.
struct Suspended {
  Status cause;
  std::vector<EntryPtr> entries;        // besides those in `commits`
  std::shared_ptr<CommitBook> commits;  // A world of one has none.
  std::vector<GroupPtr> process_sets;   // besides that of all ranks
  bool by_itself = true;                // not by Engine::suspend()
  std::optional<Tunables> settled;      // as Engine::settled()
};

class PendingOperations {
 public:
  PendingOperations();

  // The world of this engine has ended, and leaves this.
  void suspend(const Engine& engine, Suspended suspended);
  // Becomes readable when a world has ended by itself. Reading the eventfd resets it, and so does
  // resume().
  int lost_fd() const { return lost_.get(); }

  struct Report {
    CommitCounts commits;
    std::string stuck;  // what cannot be redone without the ranks that are gone; empty: nothing
    Status cause;
  };
  // Reports on the world that ended last, without these of its ranks.
  Report report(const std::vector<int>& gone) const;

  // Hands out what is due up to the commit point.
  void deliver(const CommitCounts& commit_point);
  // The process sets that the next world has: those of the ended one, as of the commit point, whose
  // members all live on, by their new ranks. `rank_of`: by old rank, the new one, or -1. Ids
  // ascend.
  std::vector<std::pair<int, std::vector<int>>> process_sets(const std::vector<int>& rank_of) const;
  // The highest id of a process set that any world of this process has had, or 0.
  int highest_set() const;
  // The settings that the last world of this process with such has settled on: they go on in the
  // next one.
  std::optional<Tunables> settled() const;
  // Submits all that waits to `next`, in the order of its first submission, and forwards there what
  // is submitted to ended engines later. Entries that name ranks that are gone end with an error.
  // Every engine is resumed before anybody else submits to it, the first one as well.
  void resume(Engine& next, const std::vector<int>& rank_of);
  // Ends all that waits with this error, and what is submitted to ended engines until the next
  // resume(): the other ranks do not wait for it any more.
  void fail(const Status& why);
  // As fail(), because this engine was left or aborted; does nothing if another one has followed.
  void close(const Engine& engine, const Status& why);

  // Takes an entry that was submitted to an engine whose world has ended. kDuplicateName when its
  // name waits here.
  Status admit(const Engine& ended, const EntryPtr& entry);
  // Calls `call` with the engine of the present world, if there is one.
  void with_present(const std::function<void(Engine&)>& call);
  // The engine is about to go.
  void forget(const Engine& engine);

 private:
  using Continuations = std::vector<std::function<void()>>;

  // All that waits, in order.
  std::vector<EntryPtr> take_all() HVDLITE_REQUIRES(mutex_);
  std::vector<const Entry*> waiting() const HVDLITE_REQUIRES(mutex_);
  // Gives the entry to the present world, by its numbers; keeps it where that has ended. The caller
  // runs the continuations once it has released the mutex: they may submit in turn.
  Status give(const EntryPtr& entry, Continuations& then) HVDLITE_REQUIRES(mutex_);
  // Notes by which numbers later submissions to ended engines go.
  void renumber(const std::vector<int>& rank_of) HVDLITE_REQUIRES(mutex_);
  // Notes what later worlds have of this engine, of which a world that suspends may know the first
  // only: the ids of its process sets, its settings.
  void note_sets(const Engine& engine) HVDLITE_REQUIRES(mutex_);
  void note(const Engine& engine) HVDLITE_REQUIRES(mutex_);

  const Fd lost_;
  mutable Mutex mutex_;
  Engine* world_ HVDLITE_GUARDED_BY(mutex_) = nullptr;  // the last that was resumed; borrowed
  Suspended suspended_ HVDLITE_GUARDED_BY(mutex_);      // what that world left, once it has ended
  std::vector<EntryPtr> late_ HVDLITE_GUARDED_BY(mutex_);  // submitted after its end
  Status refusal_ HVDLITE_GUARDED_BY(mutex_);  // What is submitted then gets it; OK: it waits.
  int highest_set_ HVDLITE_GUARDED_BY(mutex_) = 0;
  std::optional<Tunables> settled_ HVDLITE_GUARDED_BY(mutex_);
  // The key is an engine of an earlier world. Its ranks have these numbers in the newest, or -1.
  std::map<const Engine*, std::vector<int>> earlier_ HVDLITE_GUARDED_BY(mutex_);
  // A world that ended before it was resumed.
  const Engine* early_ HVDLITE_GUARDED_BY(mutex_) = nullptr;
  Suspended left_early_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
