#include "transport/segment.h"

#include <algorithm>
#include <new>

#include "base/fd.h"

namespace hvdlite {
namespace {

constexpr std::uint64_t kMagic = 0x68766c6974653035;  // "hvlite05"
constexpr std::uint64_t kRingBytes = 64 << 10;
constexpr std::uint64_t kDataRingBytes = 256 << 10;
constexpr std::uint64_t kLargestLocalSize = 4096;

struct Header {
  std::uint64_t magic;
  SegmentLayout layout;
  alignas(64) std::atomic<std::uint32_t> sleeping;
};

constexpr std::uint64_t kRingsAt = 256;
static_assert(sizeof(Header) <= kRingsAt);

std::uint64_t data_rings_at(const SegmentLayout& layout) {
  return kRingsAt + layout.local_size * ByteRing::footprint(layout.ring_bytes);
}

std::uint64_t lanes_at(const SegmentLayout& layout) {
  return data_rings_at(layout) + layout.local_size * ByteRing::footprint(layout.data_ring_bytes);
}

std::uint64_t buffers_at(const SegmentLayout& layout) {
  return round_up(lanes_at(layout) + kLaneCount * sizeof(Lane), kPage);
}

std::uint64_t gradients_at(const SegmentLayout& layout) {
  const std::uint64_t end = buffers_at(layout) + kStagingBuffers * layout.buffer_bytes;
  return layout.gradient_bytes == 0 ? end : round_up(end, kHugePage);
}

}  // namespace

std::uint64_t SegmentLayout::total_bytes() const { return gradients_at(*this) + gradient_bytes; }

SegmentLayout SegmentLayout::make(int local_size, const Config& config) {
  SegmentLayout layout;
  layout.local_size = static_cast<std::uint64_t>(local_size);
  layout.ring_bytes = kRingBytes;
  layout.data_ring_bytes = kDataRingBytes;
  // At least one page, even when all chunks are smaller.
  layout.buffer_bytes = round_up(
      static_cast<std::uint64_t>(
          std::max({std::int64_t{1}, config.shm_chunk, config.tcp_chunk, config.shm_small})),
      kPage);
  // A rank that has its host to itself shares them with nobody. Peers map all of the room.
  if (local_size > 1 && !address_space_is_limited()) {
    layout.gradient_bytes = round_up(
        static_cast<std::uint64_t>(std::max(std::int64_t{0}, config.shm_gradients)), kPage);
  }
  return layout;
}

Result<Fd> Segment::create(const SegmentLayout& layout) {
  HVDLITE_ASSIGN_OR_RETURN(Fd memfd, create_memfd(layout.total_bytes()));
  HVDLITE_ASSIGN_OR_RETURN(Mapping mapping, Mapping::shared(memfd, layout.total_bytes()));
  new (mapping.data()) Header{kMagic, layout, 0};
  return memfd;
}

Result<std::shared_ptr<Segment>> Segment::map(const Fd& memfd) {
  HVDLITE_RETURN_IF_ERROR(check_sealed(memfd));
  HVDLITE_ASSIGN_OR_RETURN(std::uint64_t bytes, file_bytes(memfd));
  if (bytes < kRingsAt) return Status(StatusCode::kInternal, "a segment is too small");
  HVDLITE_ASSIGN_OR_RETURN(Mapping mapping, Mapping::shared(memfd, bytes));
  const auto* header = reinterpret_cast<const Header*>(mapping.data());
  const SegmentLayout layout = header->layout;
  if (header->magic != kMagic || layout.local_size > kLargestLocalSize ||
      layout.ring_bytes != kRingBytes || layout.data_ring_bytes != kDataRingBytes ||
      layout.buffer_bytes > bytes || layout.gradient_bytes > bytes ||
      layout.total_bytes() != bytes) {
    return Status(
        StatusCode::kInternal,
        "a shared segment has another layout; run the same version of hvdlite on all ranks");
  }
  mapping.keep_out_of_dumps(gradients_at(layout), layout.gradient_bytes);
  return std::shared_ptr<Segment>(new Segment(std::move(mapping), layout));
}

std::atomic<std::uint32_t>* Segment::sleeping() const {
  return &reinterpret_cast<Header*>(mapping_.data())->sleeping;
}

ByteRing Segment::control_ring(int local_index) const {
  const std::uint64_t ring_bytes = layout_.ring_bytes;
  return ByteRing(mapping_.data() + kRingsAt +
                      static_cast<std::uint64_t>(local_index) * ByteRing::footprint(ring_bytes),
                  ring_bytes);
}

ByteRing Segment::data_ring(int local_index) const {
  const std::uint64_t ring_bytes = layout_.data_ring_bytes;
  return ByteRing(mapping_.data() + data_rings_at(layout_) +
                      static_cast<std::uint64_t>(local_index) * ByteRing::footprint(ring_bytes),
                  ring_bytes);
}

Lane& Segment::lane(int index) const {
  return reinterpret_cast<Lane*>(mapping_.data() + lanes_at(layout_))[index];
}

std::byte* Segment::staging_buffer(int index) const {
  return mapping_.data() + buffers_at(layout_) +
         static_cast<std::uint64_t>(index) * layout_.buffer_bytes;
}

std::span<std::byte> Segment::gradients() const {
  return {mapping_.data() + gradients_at(layout_), layout_.gradient_bytes};
}

void Segment::discard_gradients(std::uint64_t begin, std::uint64_t bytes) const {
  mapping_.discard(gradients_at(layout_) + begin, bytes);
}

GradientArea::Part GradientArea::lend(std::size_t bytes) {
  const std::span<std::byte> area = segment_->gradients();
  if (bytes == 0 || bytes > area.size()) return nullptr;
  const std::uint64_t unit = bytes < kHugePage ? kPage : kHugePage;
  const std::uint64_t length = round_up(bytes, kPage);
  std::uint64_t begin = 0;
  {
    MutexLock lock(mutex_);
    for (const auto& [next, end] : lent_) {  // the first gap that is long enough
      if (begin + length <= next) break;
      begin = round_up(end, unit);
    }
    if (begin + length > area.size()) return nullptr;
    lent_[begin] = begin + length;
  }
  const std::span<std::byte> part = area.subspan(begin, bytes);
  prefer_huge_pages(part.data(), part.size());
  return {new std::span<std::byte>(part),
          [self = shared_from_this(), begin](const std::span<std::byte>* ended) {
            delete ended;
            self->take_back(begin);
          }};
}

void GradientArea::take_back(std::uint64_t begin) {
  MutexLock lock(mutex_);
  const auto part = lent_.find(begin);
  segment_->discard_gradients(begin, part->second - begin);
  lent_.erase(part);
}

}  // namespace hvdlite
