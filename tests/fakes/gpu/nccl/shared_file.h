// The memory file that the ranks of one communicator share. The unique id leads to it, as
// /proc/PID/fd/FD of the process that made it, so that nothing is left behind when a process dies.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "nccl/nccl_abi.h"

namespace fakegpu {

inline constexpr int kMaxRanks = 16;
inline constexpr std::size_t kChunkBytes = std::size_t{1} << 18;
inline constexpr std::size_t kRingBytes = std::size_t{1} << 16;

enum class Kind : int {
  kNone,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kSend,
  kRecv,
};

// What must be the same on all ranks of a collective.
struct Descriptor {
  Kind kind = Kind::kNone;
  int dtype = 0;
  int op = 0;  // a pre-multiplied sum counts as ncclNumOps
  int root = 0;
  std::uint64_t count = 0;
  std::uint64_t sequence = 0;
  bool operator==(const Descriptor&) const = default;
};
std::string describe(const Descriptor& descriptor);

// Futex words that processes share. `generation` grows when all have arrived.
struct SharedBarrier {
  std::atomic<std::uint32_t> arrived;
  std::atomic<std::uint32_t> generation;
};

struct Member {
  std::atomic<int> pid;   // 0: has not come yet
  std::atomic<int> left;  // aborted or destroyed
  int device;             // physical
  std::uint64_t host;
  Descriptor current;
  int color;
  int key;
  ncclUniqueId child;  // of the communicator that this rank founds when splitting
};

// The bytes from one rank to another, as a ring.
struct Ring {
  std::atomic<std::uint64_t> written;
  std::atomic<std::uint64_t> read;
  char bytes[kRingBytes];
};

struct SharedFile {
  std::uint64_t nonce;
  std::atomic<int> size;    // ranks; 0: none has come yet
  std::atomic<int> failed;  // a rank found a mismatch; `failure` says which
  std::atomic<int> failure_written;
  char failure[1024];
  SharedBarrier on_host;    // for init and split
  SharedBarrier on_stream;  // for collectives
  Member members[kMaxRanks];
  char chunks[kMaxRanks][kChunkBytes];
  Ring rings[kMaxRanks][kMaxRanks];  // [from][to]
};

// Makes a file and its id. ncclSystemError when there is no memory.
ncclResult_t make_file(ncclUniqueId& id);
// nullptr when the id does not lead to a file, or does so no longer.
SharedFile* open_file(const ncclUniqueId& id);
void close_file(SharedFile* file);
// Drops the descriptor of the file if this process made it. Called when all ranks have opened it.
void forget_file(const ncclUniqueId& id);

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value);
void futex_wake(std::atomic<std::uint32_t>& word);

}  // namespace fakegpu
