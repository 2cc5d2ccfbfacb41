// Send and Recv: a ring of bytes for each pair of ranks, a header before each message.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>

#include "nccl/communicator.h"

namespace fakegpu {
namespace {

struct Header {
  std::uint64_t count = 0;
  int dtype = 0;
  int padding = 0;
};

struct Transfer {
  const Operation* operation = nullptr;
  Ring* ring = nullptr;
  char* buffer = nullptr;
  std::size_t bytes = 0;
  bool sends = false;
  bool started = false;  // the header has gone through
  std::size_t done = 0;
};

// Moves up to `bytes` into the ring, or out of it, and returns how many it moved.
std::size_t push(Ring& ring, const char* from, std::size_t bytes) {
  const std::uint64_t written = ring.written;
  bytes = std::min<std::size_t>(bytes, kRingBytes - (written - ring.read));
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t at = (written + done) % kRingBytes;
    const std::size_t part = std::min(bytes - done, kRingBytes - at);
    std::memcpy(ring.bytes + at, from + done, part);
    done += part;
  }
  ring.written += bytes;
  return bytes;
}

std::size_t pull(Ring& ring, char* to, std::size_t bytes) {
  const std::uint64_t read = ring.read;
  bytes = std::min<std::size_t>(bytes, ring.written - read);
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t at = (read + done) % kRingBytes;
    const std::size_t part = std::min(bytes - done, kRingBytes - at);
    std::memcpy(to + done, ring.bytes + at, part);
    done += part;
  }
  ring.read += bytes;
  return bytes;
}

bool start(Communicator& communicator, Transfer& transfer) {
  const Descriptor& what = transfer.operation->what;
  Header header{what.count, what.dtype, 0};
  Ring& ring = *transfer.ring;
  if (transfer.sends) {
    if (kRingBytes - (ring.written - ring.read) < sizeof header) return false;
    push(ring, reinterpret_cast<const char*>(&header), sizeof header);
    return true;
  }
  if (ring.written - ring.read < sizeof header) return false;
  pull(ring, reinterpret_cast<char*>(&header), sizeof header);
  if (header.count == what.count && header.dtype == what.dtype) return true;
  Descriptor sent = what;
  sent.kind = Kind::kSend;
  sent.count = header.count;
  sent.dtype = header.dtype;
  communicator.fail_all("mismatch, where NCCL would hang or crash: rank " +
                        std::to_string(communicator.rank()) + " has " + describe(what) + ", rank " +
                        std::to_string(transfer.operation->peer) + " has " + describe(sent));
  return false;
}

// True when something moved.
bool advance(Communicator& communicator, Transfer& transfer) {
  bool moved = false;
  if (!transfer.started) {
    transfer.started = start(communicator, transfer);
    if (!transfer.started) return false;
    moved = true;
  }
  char* at = transfer.buffer + transfer.done;
  const std::size_t left = transfer.bytes - transfer.done;
  const std::size_t bytes =
      transfer.sends ? push(*transfer.ring, at, left) : pull(*transfer.ring, at, left);
  transfer.done += bytes;
  return moved || bytes > 0;
}

bool prepare(Communicator& communicator, const std::vector<Operation>& operations,
             std::vector<Transfer>& out) {
  SharedFile& file = communicator.file();
  for (const Operation& operation : operations) {
    Transfer transfer;
    transfer.operation = &operation;
    transfer.sends = operation.what.kind == Kind::kSend;
    transfer.bytes = operation.what.count * element_bytes(operation.what.dtype);
    transfer.ring = transfer.sends ? &file.rings[communicator.rank()][operation.peer]
                                   : &file.rings[operation.peer][communicator.rank()];
    const void* address = transfer.sends ? operation.input : operation.output;
    transfer.buffer =
        static_cast<char*>(fake_resolve(communicator.device, address, transfer.bytes));
    if (transfer.buffer == nullptr && transfer.bytes > 0) {
      communicator.fail_all("rank " + std::to_string(communicator.rank()) +
                            " gives an address that is not its device's to " +
                            describe(operation.what));
      return false;
    }
    out.push_back(transfer);
  }
  return true;
}

// A peer that is gone has put all it had into the ring before; nothing more will come.
void blame_lost_peers(Communicator& communicator, std::vector<Transfer>& transfers) {
  for (Transfer& transfer : transfers) {
    if (transfer.started && transfer.done == transfer.bytes) continue;
    const int peer = transfer.operation->peer;
    if (communicator.is_lost(peer) && !advance(communicator, transfer)) {
      communicator.set_error(ncclRemoteError, "connection closed by remote peer: rank " +
                                                  std::to_string(peer) + " is gone");
    }
  }
}

}  // namespace

void run_transfers(Communicator& communicator, const std::vector<Operation>& operations) {
  std::vector<Transfer> transfers;
  if (!prepare(communicator, operations, transfers)) return;
  communicator.file().members[communicator.rank()].current = operations.front().what;
  auto until = communicator.deadline();
  while (true) {
    bool moved = false;
    bool all_done = true;
    std::set<Ring*> busy;  // an earlier message has to go first
    for (Transfer& transfer : transfers) {
      const auto done = [&] { return transfer.started && transfer.done == transfer.bytes; };
      if (done()) continue;
      if (busy.count(transfer.ring) == 0) moved |= advance(communicator, transfer);
      if (done()) continue;
      busy.insert(transfer.ring);
      all_done = false;
    }
    if (all_done) return;
    if (moved) {
      until = communicator.deadline();
      continue;
    }
    blame_lost_peers(communicator, transfers);
    if (!communicator.keep_waiting(until)) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace fakegpu
