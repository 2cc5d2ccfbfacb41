// What is passed on between ranks that have no channel to each other (transport/control_tree.h).
//
//   bundle = count:u32 item[count]
//   item   = type:u8 ranks ranks heads count:u32 byte[count]     from whom, to whom, and the body
//   ranks  = count:u32 ( first:u32 length:u32 )[count]     runs of ranks, ascending
//   heads  = count:u8 byte[count] for each sender
//
// Several ranks often say the same: an item has the senders that say it to the same receivers, or
// the receivers that one sender says it to. What of a message is the sender's alone (the stamps of
// a submit) is its head, with which its body begins. Its type is that of a frame, or kEnded: the
// stream of the sender has ended; the body is that of an abort, or empty where the rank has closed
// it. Every length is checked, as in wire/message.h. Pure functions.
#pragma once

#include <span>
#include <vector>

#include "wire/message.h"

namespace hvdlite {

struct BundleItem {
  FrameType type = FrameType::kSubmit;
  std::vector<int> from;  // ascending, as are the others
  std::vector<int> to;
  Bytes body;   // behind the heads
  Bytes heads;  // Each sender has one, in their order; all have the same length.

  // The body of the message of one sender, by its position.
  Bytes message(std::size_t sender) const;
};

BundleItem make_bundle_item(FrameType type, int from, int to, std::span<const std::byte> body);

// Appends an item. It joins an earlier one that says the same, where no stream from one rank to
// another gets another order by it.
void add_to_bundle(std::vector<BundleItem>& items, BundleItem item);
Bytes encode_bundle(const std::vector<BundleItem>& items);
bool decode_bundle(std::span<const std::byte> body, int size, std::vector<BundleItem>& items);

}  // namespace hvdlite
