#include "host/packed_exchange.h"

#include <algorithm>

#include "kernels/packed.h"

namespace hvdlite {
namespace {

// Calls visit(piece, elements, bytes, count) for what of each piece lies within `part`: how many
// elements lie before it in the part, how many packed bytes, and its own number of elements.
template <typename Visit>
void for_each_packed(const PieceList& pieces, Range part, Visit visit) {
  std::size_t bytes = 0;
  pieces.for_each(part, [&](const Piece& piece, const std::byte*, std::byte*, std::uint64_t at,
                            std::uint64_t count) {
    visit(piece, at, bytes, count);
    bytes += packed_bytes(count);
  });
}

std::size_t packed_bytes_of(const PieceList& pieces, Range part) {
  std::size_t end = 0;
  for_each_packed(pieces, part, [&](const Piece&, auto, std::size_t bytes, std::uint64_t count) {
    end = bytes + packed_bytes(count);
  });
  return end;
}

}  // namespace

std::vector<std::span<std::byte>> PackedExchange::pack_parts(const PieceList& pieces,
                                                             DataType dtype, const Slice& slice) {
  const TraceSpan traced = plane_.part("pack");
  std::vector<std::size_t> sizes;
  std::size_t total = 0;
  for (const Range part : slice.parts) {
    sizes.push_back(packed_bytes_of(pieces, part));
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
    for_each_packed(pieces, part, [&](const Piece&, auto at, auto bytes, auto count) {
      pack(dtype, from + at * size_of(dtype), count, packed.back().data() + bytes);
    });
  }
  return packed;
}

void PackedExchange::sum(const PieceList& pieces, const HostReduction& reduction, Range part,
                         std::span<const std::byte* const> sources, std::byte* to) {
  const TraceSpan traced = plane_.part("reduce");
  std::vector<const std::byte*> at_piece(sources.size());
  for_each_packed(pieces, part, [&](const Piece& piece, auto, std::size_t bytes, auto count) {
    std::transform(sources.begin(), sources.end(), at_piece.begin(),
                   [&](const std::byte* source) { return source + bytes; });
    reduction.finish_packed(at_piece, to + bytes, count, piece.postscale);
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
  sum(pieces, reduction, slice.parts[layout.host], sources, own.data());
  HVDLITE_RETURN_IF_ERROR(plane_.exchange_with_ranks(gather, patience, kAllreduce));
  const TraceSpan traced = plane_.part("unpack");
  for (std::size_t h = 0; h < packed.size(); ++h) {
    const Range part = slice.parts[h];
    std::byte* to = slice.lies_at + (part.begin - slice.parts[0].begin) * size_of(dtype);
    for_each_packed(pieces, part, [&](const Piece&, auto at, auto bytes, auto count) {
      unpack(dtype, packed[h].data() + bytes, count, to + at * size_of(dtype));
    });
  }
  return Status();
}

}  // namespace hvdlite
