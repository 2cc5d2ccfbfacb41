// The local half of the host data plane: staging slots and progress counters of the ranks of one
// host, and the waits between them.
//
// Words: the *locals* of a group are its members on this host, in ascending rank order. A *step* is
// one use of a slot by all locals, numbered per lane: upwards from where the epoch of the group
// says (transport/topology.h), so that a set that takes over a lane counts on from higher numbers,
// whatever its members did there before. In a step every local *publishes* (its input lies in its
// slot), drivers *reduce* (their result lies in their slot), and everybody is *done* (it needs
// nobody's slot of this step any more). Steps alternate between the two slots.
//
// Why slots can be reused: a rank writes to a slot only after every local of the group that used
// the slot last is done with that step (reuse()). A local's being done depends on nothing that this
// rank still has to do, so the wait always ends; and it holds across process sets, because each
// slot remembers the group of its last use. Thread: the engine's runner.
//
// Members that have joined (hvd.join) miss steps. A generation of the group begins with a number
// above all those of the ones before it, so that nobody has to know how many it missed.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "trace/trace.h"
#include "transport/fabric.h"

namespace hvdlite {

class Staging {
 public:
  // The group as one step sees it.
  struct Locals {
    Group group;    // members on this host only
    int index = 0;  // of this rank among them
  };
  struct Step {
    const Locals* locals = nullptr;
    std::uint64_t number = 0;
    int slot = 0;
    Patience patience{0};
    const char* operation = "";  // for messages
  };

  explicit Staging(Fabric& fabric) : fabric_(fabric) {}  // borrowed
  // Waits for other ranks are drawn on this row from here on. Both are borrowed.
  void trace_to(Trace* trace, const char* row) {
    trace_ = trace;
    trace_row_ = row;
  }

  std::uint64_t slot_bytes() const { return fabric_.own_segment->layout().slot_bytes; }
  // The next step of the group. It must be ended by done(), unless an error ends everything.
  Step begin(const Locals& locals, Patience patience, const char* operation);
  // Waits until this rank may write to its slot of the step.
  Status reuse(const Step& step);

  std::byte* own_slot(const Step& step) const { return fabric_.own_segment->slot(step.slot); }
  const std::byte* slot_of(const Step& step, int local_index) const {
    return segment_of(*step.locals, local_index).slot(step.slot);
  }
  // The addresses `offset` bytes after the begin of every local's slot, in their order.
  std::vector<const void*> slots(const Step& step, std::size_t offset) const;

  void publish(const Step& step);
  void reduced(const Step& step);
  void done(const Step& step);
  Status await_published(const Step& step);                   // by all locals
  Status await_published(const Step& step, int local_index);  // by one
  Status await_reduced(const Step& step, int drivers);        // by the first `drivers` locals

  Fabric& fabric() const { return fabric_; }

 private:
  using Counter = std::atomic<std::uint64_t> Lane::*;
  struct LastUse {
    Locals locals;
    std::uint64_t number = 0;
  };
  const Segment& segment_of(const Locals& locals, int local_index) const {
    return *fabric_.segments[locals.group.ranks[local_index]];
  }
  void advance(const Step& step, Counter counter);
  // Waits until `counter` of the locals [first, last) has reached `number`.
  Status await(const Locals& locals, Counter counter, std::uint64_t number, int first, int last,
               Patience patience, const char* operation);

  Fabric& fabric_;
  Trace* trace_ = nullptr;
  const char* trace_row_ = "";
  std::array<std::uint64_t, kLaneCount> numbers_{};
  std::array<LastUse, kSlotCount> last_use_;
};

}  // namespace hvdlite
