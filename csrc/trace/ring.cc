#include "trace/ring.h"

#include <algorithm>
#include <cstring>

namespace hvdlite {

TraceRing::TraceRing(std::size_t cells) : count_(cells), cells_(std::make_unique<Cell[]>(cells)) {
  for (std::uint64_t i = 0; i < count_; ++i) {
    cells_[i].ticket.store(i, std::memory_order_relaxed);
  }
}

bool TraceRing::claim(std::uint64_t count, std::uint64_t& first) {
  first = tail_.load(std::memory_order_relaxed);
  while (true) {
    // Cells are freed in order: when the last one is free, all are.
    const std::uint64_t last = first + count - 1;
    const std::uint64_t ticket = cell(last).ticket.load(std::memory_order_acquire);
    if (ticket < last) return false;
    if (ticket > last) {
      first = tail_.load(std::memory_order_relaxed);
    } else if (tail_.compare_exchange_weak(first, first + count, std::memory_order_relaxed)) {
      return true;
    }
  }
}

bool TraceRing::push(const TraceRecord& record, std::string_view text) {
  std::uint64_t first = 0;
  if (!claim(cells_for(text.size()), first)) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  TraceRecord stored = record;
  stored.text_bytes = static_cast<std::uint32_t>(text.size());
  std::memcpy(cell(first).payload, &stored, sizeof stored);
  for (std::uint64_t at = first + 1; !text.empty(); ++at) {
    const std::size_t bytes = std::min(text.size(), kTextBytes);
    std::memcpy(cell(at).payload, text.data(), bytes);
    text.remove_prefix(bytes);
  }
  cell(first).ticket.store(first + 1, std::memory_order_release);
  return true;
}

bool TraceRing::pop(TraceRecord& record, std::string& text) {
  if (cell(head_).ticket.load(std::memory_order_acquire) != head_ + 1) return false;
  std::memcpy(&record, cell(head_).payload, sizeof record);
  text.clear();
  const std::uint64_t end = head_ + cells_for(record.text_bytes);
  for (std::uint64_t at = head_ + 1; at < end; ++at) {
    const std::size_t bytes = std::min<std::size_t>(record.text_bytes - text.size(), kTextBytes);
    text.append(reinterpret_cast<const char*>(cell(at).payload), bytes);
  }
  for (; head_ < end; ++head_) cell(head_).ticket.store(head_ + count_, std::memory_order_release);
  return true;
}

}  // namespace hvdlite
