// The local half of the host data plane: staging buffers and progress counters of the ranks of one
// host, and the waits between them.
//
// Words: the *locals* of a group are its members on this host, in ascending rank order. A *step* is
// one use of a buffer by all locals, numbered per lane: upwards from where the stamp of the group
// says (transport/topology.h), so that a set that takes over a lane counts on from higher numbers,
// whatever its members did there before. In a step every local *publishes* (its input lies in its
// buffer), drivers *reduce* (their result lies in their buffer), and every local is *done* (it
// needs no other local's buffer of this step any more). Steps alternate between the two buffers.
//
// Why buffers can be reused: a rank writes to a buffer only after every local of the group that
// used the buffer last is done with that step (reuse()). A local's being done depends on nothing
// that this rank still has to do, so the wait always ends; and it holds across process sets,
// because each buffer remembers the group of its last use. Thread: the engine's runner.
//
// Members that have joined (hvd.join) miss steps. A generation of the group begins with a number
// above all those of the ones before it, so that no member has to know how many steps it missed.
#pragma once

#include <array>
#include <cstdint>
#include <span>
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
    int index = 0;  // This rank has this index among them.
  };
  struct Step {
    const Locals* locals = nullptr;
    std::uint64_t number = 0;
    int buffer = 0;
    Patience patience{0};
    const char* operation = "";  // for messages
  };

  // Where a local's tensors lie in its gradient memory, or nowhere.
  struct Place {
    static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};
    std::uint64_t begin = kNowhere;  // The first tensor lies there.
    std::uint64_t check = 0;         // It says how the others lie behind the first.
  };

  explicit Staging(Fabric& fabric) : fabric_(fabric) {}  // borrowed
  // From here on, waits for other ranks are drawn on this row. Both are borrowed.
  void trace_to(Trace* trace, const char* row) {
    trace_ = trace;
    trace_row_ = row;
  }

  std::uint64_t buffer_bytes() const { return fabric_.own_segment->layout().buffer_bytes; }
  // Returns the next step of the group, which done() must end, unless an error ends everything. It
  // refers to `locals`.
  Step begin(const Locals& locals, Patience patience, const char* operation);
  // Waits until this rank may write to its buffer of the step.
  Status reuse(const Step& step);

  // Addresses in shared memory; valid as long as the fabric.
  std::byte* own_buffer(const Step& step) const {
    return fabric_.own_segment->staging_buffer(step.buffer);
  }
  const std::byte* buffer_of(const Step& step, int local_index) const {
    return segment_of(*step.locals, local_index).staging_buffer(step.buffer);
  }
  // The addresses `offset` bytes after the begin of every local's buffer, in their order.
  std::vector<const void*> buffers(const Step& step, std::size_t offset) const;

  // The gradient memory of a local (transport/segment.h), which only that local writes to.
  std::span<std::byte> gradients_of(const Locals& locals, int local_index) const {
    return segment_of(locals, local_index).gradients();
  }
  // Shows the others where this rank's tensors lie. Comes before publish(), after reuse().
  void show(const Step& step, Place place);
  // What a local has shown that has published the step; until this rank is done with the step.
  Place place_of(const Step& step, int local_index) const;

  // What this rank has done in the step.
  void publish(const Step& step);
  void reduced(const Step& step);
  void done(const Step& step);
  // Waits for the others: kRankFailed and kTimeout name the first of them that has not come.
  Status await_published(const Step& step);                   // All locals have to.
  Status await_published(const Step& step, int local_index);  // This one has to.
  Status await_reduced(const Step& step, int drivers);        // The first `drivers` locals have to.
  Status await_done(const Step& step);                        // All locals have to.

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
  std::array<std::uint64_t, kLaneCount> numbers_{};  // The last step of each lane has one.
  std::array<LastUse, kStagingBuffers> last_use_;    // Each buffer has one.
};

}  // namespace hvdlite
