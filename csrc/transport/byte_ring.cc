#include "transport/byte_ring.h"

#include <algorithm>
#include <cstring>

namespace hvdlite {

Result<std::uint64_t> ByteRing::used(std::uint64_t head, std::uint64_t tail) const {
  if (head - tail <= capacity_) return head - tail;
  return Status(StatusCode::kInternal, "a ring in shared memory was overwritten by its other side");
}

Result<std::size_t> ByteRing::write(std::span<const std::byte> bytes) {
  const std::uint64_t head = counters_->head.value.load(std::memory_order_relaxed);
  const Result<std::uint64_t> held = used(head, counters_->tail.value.load());
  if (!held.ok()) return held.status();
  const std::size_t count = std::min<std::size_t>(bytes.size(), capacity_ - held.value());
  if (count == 0) return count;
  const std::size_t at = head % capacity_;
  const std::size_t first = std::min(count, capacity_ - at);
  std::memcpy(data_ + at, bytes.data(), first);
  std::memcpy(data_, bytes.data() + first, count - first);
  counters_->head.value.store(head + count);
  return count;
}

Result<std::size_t> ByteRing::read(std::span<std::byte> bytes, bool& was_full) {
  const std::uint64_t tail = counters_->tail.value.load(std::memory_order_relaxed);
  const Result<std::uint64_t> held = used(counters_->head.value.load(), tail);
  if (!held.ok()) return held.status();
  was_full = false;
  const std::size_t count = std::min<std::size_t>(bytes.size(), held.value());
  if (count == 0) return count;
  const std::size_t at = tail % capacity_;
  const std::size_t first = std::min(count, capacity_ - at);
  std::memcpy(bytes.data(), data_ + at, first);
  std::memcpy(bytes.data() + first, data_, count - first);
  counters_->tail.value.store(tail + count);
  // Asked only now: the writer may have filled the ring since `head` was loaded above, and gone to
  // sleep for the room that this store makes.
  was_full = counters_->head.value.load() - tail >= capacity_;
  return count;
}

}  // namespace hvdlite
