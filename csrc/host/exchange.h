// Full-duplex transfers with several ranks at once over channels: everything that can move moves,
// in either direction, so that no order of sends and receives can block for ever.
//
// A collective queues what it sends and receives, and waits for parts of that. Meanwhile all that
// is queued moves. What goes to one rank moves in the order in which it was queued, and so does
// what comes from it: two ranks queue alike what they have in common, however each cuts it into
// spans. The plane of a rank has one exchange, and a collective begins it. Thread: the engine's
// runner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "transport/fabric.h"

namespace hvdlite {

class Exchange {
 public:
  explicit Exchange(const Fabric& fabric)  // borrowed
      : fabric_(fabric), streams_(fabric.data.size()) {}

  // Begins a collective: nothing is queued. `operation` is for messages.
  void begin(Patience patience, const char* operation);
  // Queues bytes, which stay as they are, or are left alone, until they have moved.
  void send(int rank, std::span<const std::byte> bytes);
  void receive(int rank, std::span<std::byte> bytes);
  // Returns a mark behind all that is queued so far.
  std::uint64_t mark() { return ++mark_; }

  // Each returns when what was queued before the mark has arrived, or has also left. Errors name
  // the rank, and are final: kRankFailed, or kTimeout when it made no progress for the patience.
  Status await_received(std::uint64_t mark) { return await(mark, false); }
  Status await_moved(std::uint64_t mark) { return await(mark, true); }
  // Sends what can leave now, and never waits. The next wait returns its error.
  void send_some();

 private:
  // What is left of what was queued for one direction.
  template <typename Byte>
  struct Queue {
    struct Item {
      std::span<Byte> bytes;
      std::uint64_t mark;  // the next one after it
    };
    std::vector<Item> items;
    std::size_t first = 0;  // before it all has moved

    bool empty() const { return first == items.size(); }
    bool moved(std::uint64_t mark) const { return empty() || items[first].mark > mark; }
    void clear() {
      items.clear();
      first = 0;
    }
  };
  // The transfers with one rank.
  struct Stream {
    Queue<const std::byte> outgoing;
    Queue<std::byte> incoming;
    bool active = false;  // it is in active_
  };
  Stream& stream_of(int rank);
  Status await(std::uint64_t mark, bool sent);
  // Moves what it can of all streams; returns whether they have come to the mark.
  bool come_to(std::uint64_t mark, bool sent);
  Status write_some(Channel& channel, Queue<const std::byte>& queue);
  // Reads what was queued before the mark. What comes later stays in the kernel until it is needed:
  // by then it is in the processor's cache when it is reduced.
  Status read_some(Channel& channel, Queue<std::byte>& queue, std::uint64_t mark);

  const Fabric& fabric_;
  std::vector<Stream> streams_;  // Each rank has one.
  // The rest belongs to this collective.
  std::vector<int> active_;  // ranks with a stream
  Patience patience_{0};
  const char* operation_ = "";
  std::uint64_t mark_ = 0;
  std::uint64_t moved_ = 0;  // bytes
  int waiting_for_ = -1;
  const char* owes_ = "";  // what that rank has not done
  Status broken_;
};

}  // namespace hvdlite
