#include "host/packed_exchange.h"

#include <cstring>

#include "kernels/packed.h"

namespace hvdlite {
namespace {

// Calls visit(piece, at, bytes, count) for what of each piece lies within `part`: how many elements
// lie before it in the part, how many bytes before it as it travels, and its number of elements.
// Returns the bytes of the part as it travels.
template <typename Visit>
std::size_t for_each_sent(const PieceList& pieces, DataType dtype, Range part, Visit visit) {
  std::size_t bytes = 0;
  pieces.for_each(part, [&](const Piece& piece, const std::byte*, std::byte*, std::uint64_t at,
                            std::uint64_t count) {
    visit(piece, at, bytes, count);
    bytes += piece.packed ? packed_bytes(count) : count * size_of(dtype);
  });
  return bytes;
}

}  // namespace

std::vector<std::span<std::byte>> PackedExchange::pack_parts(const PieceList& pieces,
                                                             DataType dtype, const Slice& slice) {
  const TraceSpan traced = plane_.part("pack");
  std::vector<std::size_t> sizes;
  std::size_t total = 0;
  for (const Range part : slice.parts) {
    sizes.push_back(for_each_sent(pieces, dtype, part, [](auto&&...) {}));
    total += sizes.back();
  }
  if (packed_.size() < total) packed_.resize(total);
  std::vector<std::span<std::byte>> packed;
  std::span<std::byte> rest(packed_);
  for (std::size_t h = 0; h < sizes.size(); ++h) {
    const Range part = slice.parts[h];
    const std::byte* from = slice.lies_at + (part.begin - slice.parts[0].begin) * size_of(dtype);
    packed.push_back(rest.first(sizes[h]));
    rest = rest.subspan(sizes[h]);
    for_each_sent(pieces, dtype, part, [&](const Piece& piece, auto at, auto bytes, auto count) {
      const std::byte* numbers = from + at * size_of(dtype);
      std::byte* to = packed.back().data() + bytes;
      if (piece.packed) {
        pack(dtype, numbers, count, to);
      } else {
        std::memcpy(to, numbers, count * size_of(dtype));
      }
    });
  }
  return packed;
}

void PackedExchange::sum(const PieceList& pieces, DataType dtype, const HostReduction& reduction,
                         Range part, std::span<const std::byte* const> sources, std::byte* to) {
  const TraceSpan traced = plane_.part("reduce");
  std::vector<const std::byte*> packed(sources.size());
  std::vector<const void*> exact(sources.size());
  for_each_sent(pieces, dtype, part, [&](const Piece& piece, auto, std::size_t bytes, auto count) {
    for (std::size_t s = 0; s < sources.size(); ++s) exact[s] = packed[s] = sources[s] + bytes;
    if (piece.packed) {
      reduction.finish_packed(packed, to + bytes, count, piece.postscale);
    } else {
      reduction.finish(exact, to + bytes, count, piece.postscale);
    }
  });
}

Status PackedExchange::run(const HostLayout& layout, const PieceList& pieces, DataType dtype,
                           const HostReduction& reduction, const Slice& slice, Patience patience) {
  const std::vector<std::span<std::byte>> packed = pack_parts(pieces, dtype, slice);
  const std::span<std::byte> own = packed[layout.host];
  if (received_.size() < packed.size() * own.size()) received_.resize(packed.size() * own.size());
  std::vector<Transfer> scatter;  // part h to host h
  std::vector<Transfer> gather;   // the results to all
  std::vector<const std::byte*> sources;
  for (std::size_t h = 0; h < packed.size(); ++h) {
    std::byte* incoming = received_.data() + h * own.size();
    sources.push_back(h == layout.host ? own.data() : incoming);
    if (h == layout.host) continue;
    scatter.push_back({layout.peers[h], packed[h], {incoming, own.size()}});
    gather.push_back({layout.peers[h], own, packed[h]});
  }
  HVDLITE_RETURN_IF_ERROR(plane_.exchange_with_ranks(scatter, patience, kAllreduce));
  sum(pieces, dtype, reduction, slice.parts[layout.host], sources, own.data());
  HVDLITE_RETURN_IF_ERROR(plane_.exchange_with_ranks(gather, patience, kAllreduce));
  const TraceSpan traced = plane_.part("unpack");
  for (std::size_t h = 0; h < packed.size(); ++h) {
    const Range part = slice.parts[h];
    std::byte* to = slice.lies_at + (part.begin - slice.parts[0].begin) * size_of(dtype);
    for_each_sent(pieces, dtype, part, [&](const Piece& piece, auto at, auto bytes, auto count) {
      const std::byte* from = packed[h].data() + bytes;
      std::byte* numbers = to + at * size_of(dtype);
      if (piece.packed) {
        unpack(dtype, from, count, numbers);
      } else {
        std::memcpy(numbers, from, count * size_of(dtype));
      }
    });
  }
  return Status();
}

}  // namespace hvdlite
