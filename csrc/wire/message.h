// What ranks say to each other on the control plane.
//
//   frame    = length:u32 type:u8 body[length - 1]            1 <= length <= kMaxFrameBytes
//   message  = more* frame         its body is that of the pieces, then the frame's own
//   more     = a frame of the type kMore: a piece of what does not fit into one frame
//   submit   = stamps bits requests                            any rank -> the coordinator
//              without requests it asks for a sign of life, which is a respond without responses
//   stamps   = first:i64 last:i64                              nanoseconds on rank 0's clock
//   bits     = first_word:u32 count:u32 word:u64[count]        cached requests, bit i = cache id i
//   requests = count:u32 request[count]                        what the cache does not know
//   request  = kind:u8 op:u8 flags:u8 root:i32 set:u32 prescale:f64 postscale:f64 name:text
//              transaction:text count:u32 tensor[count] count:u32 split:i64[count] late?
//              flags: 1 weighted, 2 late gradients. split: a rank where the request
//              changes the process sets, or is a send: source and destination
//   late     = key:text step:u64 quorum:u32 grace:i64 bound:u32 fold:u8    grace in microseconds
//   tensor   = dtype:u8 wire:u8 device:u8 ndim:u8 name:text dim:i64[ndim]
//   respond  = count:u32 response[count]                       the coordinator -> members
//   response = form:u8 ( cached: id:u32
//                      | full:   id:u32 request count:u32 number:i64[count]
//                      | error:  code:u8 rank:i32 set:u32 name:text count:u32 end:i64[count]
//                                message:text
//                      | absent: generation:u32 count:u32 rank:i32[count]
//                      | left_out: count:u32 rank:i32[count]
//                      | tune:   count:u8 value:i64[count]
//                      | cut )
//              end: of a send, source and destination
//              number: first_dimensions; the one set_id, or the one last_joined rank, where the
//              request changes the process sets, or is a join
//              absent and left_out are not responses: they say who had joined, and whose tensors do
//              not count, for the responses behind them; tune and cut go to every rank of the
//              world, and end a round; tune holds from here on
//   abort    = code:u8 rank:i32 message:text                   any rank -> all: the root cause
//   goodbye  = collectives:u64                                 any rank -> all: a clean exit
//   report   = bytes                                           any rank -> the coordinator: what
//              its threads wait for (negotiation/deadlock_watch.h)
//   bundle   = several messages, each with the ranks that it comes from and goes to
//              (negotiation/relay.h)
//
// Everything is little-endian; peers are authenticated before the first frame, yet every length and
// every enumeration is checked: a decoder returns false and touches nothing beyond its bytes.
// Pure functions, no thread of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/dtype.h"
#include "base/status.h"
#include "wire/bytes.h"

namespace hvdlite {

inline constexpr std::uint32_t kMaxFrameBytes = 1 << 20;
inline constexpr std::size_t kMaxNameBytes = 512;
inline constexpr std::size_t kMaxDimensions = 32;
inline constexpr std::uint32_t kNotCached = UINT32_MAX;
inline constexpr std::int64_t kMaxCacheIds = 1 << 22;

enum class FrameType : std::uint8_t {
  kSubmit = 1,
  kRespond = 2,
  kAbort = 3,
  kGoodbye = 4,
  kMore = 5,
  kReport = 6,
  kBundle = 7,  // messages that are passed on, and kEnded inside of it (negotiation/relay.h)
  kEnded = 8,
};

enum class Kind : std::uint8_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kBarrier = 3,
  kAlltoall = 4,
  kReducescatter = 5,
  kJoin = 6,  // "nothing more from this rank, until every rank says so"
  // Changes of the process sets, which all ranks of the world make alike.
  kAddProcessSet = 7,
  kRemoveProcessSet = 8,
  kCommit = 9,  // hands out the results of a transaction, see engine/commit_book.h
  kSend = 10,   // from one rank to another; both of them submit it, and nobody else takes part
};
inline constexpr Kind kLastKind = Kind::kSend;
inline constexpr std::string_view kJoinName = "#join";
std::string_view name_of(Kind kind);

// Whether messages take a shape: with dimensions of 0 counted as 1, it has at most 2^56 elements,
// so that products of some of its dimensions, in bytes, fit into 64 bits. None is negative.
bool shape_travels(const std::vector<std::int64_t>& dims);

struct TensorShape {
  std::string name;
  DataType dtype = DataType::kFloat32;
  std::vector<std::int64_t> dims;
  DeviceType device = DeviceType::kHost;
  // What an allreduce casts it to on the way: a 16-bit float for a floating-point tensor.
  DataType wire = dtype;

  std::uint64_t count() const;  // elements
  std::uint64_t bytes() const { return count() * size_of(dtype); }
  std::uint64_t wire_bytes() const { return count() * size_of(wire); }
  bool operator==(const TensorShape&) const = default;
};

inline constexpr std::int64_t kMaxGraceUs = std::int64_t{1} << 40;  // twelve days

// How an all-reduce goes on without the gradients of ranks that are late
// (negotiation/late_gradients.h).
struct LateTerms {
  std::string key;            // all requests of one step with this key share one decision
  std::uint64_t step = 0;     // read where the name is new to the key, and not compared
  std::uint32_t quorum = 1;   // So many of all members of the process set suffice.
  std::int64_t grace_us = 0;  // then the others have so many microseconds more
  std::uint32_t bound = 1;    // no rank is more steps than that behind
  bool fold = true;           // what comes late goes into a later step; otherwise it is forgotten

  bool operator==(const LateTerms& other) const {
    return key == other.key && quorum == other.quorum && grace_us == other.grace_us &&
           bound == other.bound && fold == other.fold;
  }
};

// One collective as one rank wants it: all that ranks must agree on.
struct Request {
  Kind kind = Kind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  bool weighted = false;
  std::int32_t root = -1;
  std::uint32_t process_set = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  std::string name;
  // In elastic jobs: the results are handed out by the commit of this transaction, together with
  // all others of it. Empty: by themselves.
  std::string transaction;
  std::vector<TensorShape> tensors;
  // Alltoall: how many rows go to each member; empty: the same number to each. Reducescatter, where
  // members agree: the same, tensor after tensor; empty: numbers that are as even as can be. This
  // is what the rank says; describe_bad_splits() checks it.
  std::vector<std::int64_t> splits;
  // Changes of the process sets: the ranks of the set, which describe_bad_ranks() checks. A send:
  // source and destination, which decoders and the engine's local checks have seen to.
  std::vector<std::int64_t> ranks;
  std::optional<LateTerms> late;  // where it does not wait for all members

  bool operator==(const Request&) const = default;
  bool changes_process_sets() const {
    return kind == Kind::kAddProcessSet || kind == Kind::kRemoveProcessSet;
  }
  bool is_send() const { return kind == Kind::kSend; }
  int source() const { return static_cast<int>(ranks[0]); }
  int destination() const { return static_cast<int>(ranks[1]); }
  // The tensor's own name, or that of the call.
  const std::string& tensor_name(const TensorShape& tensor) const {
    return tensor.name.empty() ? name : tensor.name;
  }
  // Whether a member of the process set takes part.
  bool concerns(int rank) const { return !is_send() || rank == source() || rank == destination(); }
  // As tensors travel.
  std::uint64_t wire_bytes() const {
    std::uint64_t bytes = 0;
    for (const TensorShape& tensor : tensors) bytes += tensor.wire_bytes();
    return bytes;
  }
  // Requests of ranks meet by (set, name), across kinds, so that a mix-up of kinds is seen; sends
  // by (set, source, destination, name), so that different pairs of ranks may use one name.
  std::string key() const;
  // Members may give different numbers of rows.
  bool rows_differ() const { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }
  // A name that starts with '#' is used once: its negotiation is not worth remembering.
  // An allgather's first dimensions and an alltoall's splits may change with every call.
  bool cacheable() const { return !rows_differ() && !name.starts_with('#'); }
  // Whether it is one of those by which steps are known (negotiation/step_clock.h).
  bool of_a_step() const { return kind == Kind::kAllreduce && process_set == 0 && cacheable(); }
};

// "allreduce 'layer1.weight'", "send 'x' from rank 0 to rank 1", for messages; "allreduce.0" for
// the first one without a name.
std::string describe(const Request& request);
// Its name, and after a NUL the names of its tensors, where there are several, for the trace.
std::string trace_label(const Request& request);

// When the sender's program submitted the first and the last of its requests that are of_a_step(),
// as it says itself: nanoseconds on rank 0's monotonic clock. Both are 0 where none is.
struct Stamps {
  std::int64_t first = 0;
  std::int64_t last = 0;
  void add(std::int64_t time) {
    if (last == 0) first = time;
    last = time;
  }
  bool operator==(const Stamps&) const = default;
};

inline constexpr std::size_t kStampBytes = 2 * sizeof(std::int64_t);  // a submit begins with them

struct Submit {
  Stamps stamps;
  std::vector<std::uint32_t> cached;  // ids, ascending after decoding
  std::vector<Request> requests;
};

struct Response {
  enum class Form : std::uint8_t {
    kCached = 0,
    kFull = 1,
    kError = 2,
    kAbsent = 3,
    kTune = 4,
    kCut = 5,
    kLeftOut = 6,
  };
  Form form = Form::kCached;
  std::uint32_t cache_id = kNotCached;  // kCached: which; kFull: remember it as this, if any
  // kFull; kError: process_set and name only, and of a send the kind and the ranks.
  Request request;
  // kFull: the rows that come from each member, by position in the set: of an allgather tensor by
  // tensor; of an alltoall what this member receives (as the coordinator decides it, what every
  // member receives, member by member). Empty for the other kinds.
  std::vector<std::int64_t> first_dimensions;
  int set_id = -1;       // kFull, a change of the process sets: the set that comes or goes
  int last_joined = -1;  // kFull, a join: the last rank to join
  // Members of the set that had joined and take no part, ascending, and the generation of the group
  // of the others (transport/topology.h).
  std::vector<int> absent;
  std::uint32_t generation = 0;
  // Of late gradients: the members, ascending, whose own tensors do not count.
  std::vector<int> left_out;
  Status error;  // kError
  // Does not travel: the only ranks that get it, ascending; empty: all that it concerns.
  std::vector<int> recipients;
  Tunables tunables{};   // kTune
  bool settled = false;  // kTune: the search is over
  // Whether it concerns every rank of the world, and no request.
  bool of_all() const { return form == Form::kTune || form == Form::kCut; }
};

// Where two ranks' requests of the same name differ: a message that names the tensor, both ranks
// and both values; nothing when they agree.
std::optional<std::string> describe_mismatch(int rank_a, const Request& a, int rank_b,
                                             const Request& b);

// Says for each position in a process set whether the member takes part, not having joined.
using Presence = std::vector<bool>;

// What is wrong with the splits of an alltoall or a reducescatter: a message that names tensor,
// rank and values; nothing when they can be used.
std::optional<std::string> describe_bad_splits(int rank, const Request& request,
                                               const Presence& present);
// What is wrong with the ranks of a new process set in a world of `size`; nothing when it can be.
std::optional<std::string> describe_bad_ranks(const Request& request, int size);
// The rows that a member gives: of an allgather by tensor, of an alltoall (whose splits are good)
// by receiving member; nothing for other kinds.
std::vector<std::int64_t> rows_given(const Request& request, const Presence& present);

// Whole messages as one frame, however long; the control plane sends long ones in pieces.
Writer begin_frame(FrameType type);
Bytes finish_frame(Writer& writer);
Bytes encode_submit(const Submit& submit);
Bytes encode_respond(const std::vector<Response>& responses);
Bytes encode_abort(const Status& cause);
Bytes encode_goodbye(std::uint64_t collectives);
Bytes encode_report(const Bytes& body);

bool decode_submit(std::span<const std::byte> body, Submit& submit);
bool decode_respond(std::span<const std::byte> body, std::vector<Response>& responses);
bool decode_abort(std::span<const std::byte> body, Status& cause);
bool decode_goodbye(std::span<const std::byte> body, std::uint64_t& collectives);

}  // namespace hvdlite
