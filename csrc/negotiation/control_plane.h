// Whole messages over the control channels: to and from every peer. Nothing here blocks.
//
// A message of any length can be sent: a long one travels in pieces (wire/message.h), and arrives
// as the one frame that it was.
//
// What does not fit into a channel waits in an outgoing queue; poll() moves it on. A peer's stream
// ends once everything it had written was read. The negotiator owns it; only the runner calls it.
#pragma once

#include <span>
#include <vector>

#include "transport/fabric.h"
#include "wire/message.h"

namespace hvdlite {

struct Frame {
  int from = -1;
  FrameType type = FrameType::kSubmit;
  Bytes body;
};

class ControlPlane {
 public:
  explicit ControlPlane(Fabric& fabric);  // borrowed

  // Frames of one sender arrive in the order of send().
  void send(int rank, const Bytes& frame);
  // Moves bytes both ways. True when frames or ended streams wait to be taken.
  bool poll();
  std::vector<Frame> take_frames();
  // Returns the ranks whose stream has ended since the last call, in the order of detection; a
  // frame of theirs that arrived earlier is in take_frames() no later than this. kInternal: garbage
  // from a peer; otherwise as channels end.
  std::vector<std::pair<int, Status>> take_ended();
  bool ended(int rank) const { return peers_[rank].ended; }
  // Moves what is on its way out; true when nothing is left of it.
  bool flush();
  // What of it is left: bytes, and the ranks that have not read them.
  std::size_t unsent() const;
  std::vector<int> unread() const;
  std::uint64_t frames_sent() const { return frames_sent_; }

 private:
  struct Peer {
    Channel* channel = nullptr;  // borrowed from the fabric; null for self
    Bytes incoming;              // of an unfinished frame
    Bytes pieces;                // of a message whose last frame is still to come
    Bytes outgoing;
    std::size_t written = 0;  // bytes of `outgoing` that have left
    bool ended = false;
  };
  void read(int rank);
  void write(int rank);
  void parse(int rank);
  void take_frame(int rank, std::span<const std::byte> frame);  // without its length
  void end(int rank, Status why);

  std::vector<Peer> peers_;  // by rank
  std::vector<Frame> frames_;
  std::vector<std::pair<int, Status>> ended_;
  Bytes chunk_;
  std::uint64_t frames_sent_ = 0;
};

}  // namespace hvdlite
