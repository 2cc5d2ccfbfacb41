// Whole messages over the control channels: to and from every peer. Nothing here blocks.
//
// A message of any length can be sent: a long one travels in pieces (wire/message.h), and arrives
// as the one frame that it was. Where the world has a control tree, a message to a rank of another
// host is passed on by the leaders between them (relay.h); that changes nothing for its sender and
// its receiver. When a leader goes, the ranks behind it are cut off.
//
// What does not fit into a channel waits in an outgoing queue; poll() moves it on. A peer's stream
// ends once everything it had written was read. The negotiator owns it; only the runner calls it.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "negotiation/relay.h"
#include "transport/fabric.h"
#include "wire/message.h"

namespace hvdlite {

struct Frame {
  int from = -1;
  FrameType type = FrameType::kSubmit;
  Bytes body;
};

// What went over this rank's control channels.
struct ControlTraffic {
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
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
  bool ended(int rank) const { return ended_ranks_[rank]; }
  // The ranks that had not said goodbye when a leader on the way to them went, each with that
  // leader: they may still be there, and can do nothing for this rank.
  struct CutOff {
    int rank;
    int leader;
  };
  const std::vector<CutOff>& cut_off() const { return cut_off_; }
  // Moves what is on its way out; true when nothing is left of it.
  bool flush();
  // What of it is left: bytes, and the ranks that have not read them.
  std::size_t unsent() const;
  std::vector<int> unread() const;
  std::uint64_t frames_sent() const { return frames_sent_; }

  // Whether this rank passes on messages of others, and whether some of these have not left yet.
  bool passes_on() const { return relay_ && relay_->tree().leads(); }
  bool awaited() const { return relay_ && relay_->awaited(); }
  // Until when poll() holds what it passes on.
  std::optional<Relay::TimePoint> held_until() const;
  const ControlTraffic& traffic() const { return traffic_; }

 private:
  struct Link {
    int rank = -1;
    Channel* channel = nullptr;  // borrowed from the fabric
    Bytes incoming;              // It holds an unfinished frame.
    Bytes pieces;                // They belong to a message whose last frame is still to come.
    Bytes outgoing;
    std::size_t written = 0;  // bytes of `outgoing` that have left
    bool ended = false;
  };
  void read(Link& link);
  void write(Link& link);
  void parse(Link& link);
  void take_frame(Link& link, std::span<const std::byte> frame);  // without its length
  void take_item(BundleItem& item);
  void push(Link& link, const Bytes& frame);
  void push_bundles(bool all);
  void end(Link& link, const Status& why);
  void note_end(int rank, const Status& why);
  // To those who do not see it: that the stream of a linked rank has ended.
  void pass_on_end(int rank, const Status& why);

  const Topology topology_;
  std::unique_ptr<Relay> relay_;  // It is null without a control tree.
  std::vector<Link> links_;       // ascending
  std::vector<int> link_of_;      // Each rank has an index of links_ or -1.
  std::vector<bool> ended_ranks_;
  std::vector<bool> said_goodbye_;
  std::vector<CutOff> cut_off_;
  std::vector<Frame> frames_;
  std::vector<std::pair<int, Status>> ended_;
  Bytes chunk_;
  std::uint64_t frames_sent_ = 0;
  ControlTraffic traffic_;
};

}  // namespace hvdlite
