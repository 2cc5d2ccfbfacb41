// Little-endian encoding of plain values. A Reader never reads past its bytes: the first value that
// does not fit makes the Reader bad() for good, and every later value is zero or empty, so that a
// decoder checks once, at its end. A Reader compares lengths with the bytes that are left before it
// allocates. A Writer owns its bytes, a Reader borrows them. One thread at a time.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace hvdlite {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

using Bytes = std::vector<std::byte>;

class Writer {
 public:
  template <typename T>
  void put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    append(&value, sizeof(T));
  }
  // Writes the length as u16, then the characters. A text that is longer is cut: only messages for
  // people can be that long.
  void put_text(std::string_view text) {
    text = text.substr(0, UINT16_MAX);
    put(static_cast<std::uint16_t>(text.size()));
    append(text.data(), text.size());
  }
  void put_all(const Bytes& bytes) { append(bytes.data(), bytes.size()); }
  Bytes take() { return std::move(bytes_); }

 private:
  void append(const void* from, std::size_t length) {
    const auto* raw = static_cast<const std::byte*>(from);
    bytes_.insert(bytes_.end(), raw, raw + length);
  }
  Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    T value{};
    if (const std::byte* from = advance(sizeof(T))) std::memcpy(&value, from, sizeof(T));
    return value;
  }
  std::string get_text(std::size_t longest) {
    const auto length = get<std::uint16_t>();
    if (length > longest) bad_ = true;
    const std::byte* from = advance(length);
    return from == nullptr ? std::string()
                           : std::string(reinterpret_cast<const char*>(from), length);
  }
  // Reads a number of items that have at least `item_bytes` each. The Reader is bad() when so many
  // cannot fit into the bytes that are left.
  std::uint32_t get_count(std::size_t item_bytes) {
    const auto count = get<std::uint32_t>();
    if (count * static_cast<std::uint64_t>(item_bytes) > bytes_.size() - at_) bad_ = true;
    return bad_ ? 0 : count;
  }
  // The next bytes, which the Reader's owner keeps; empty when there are not so many.
  std::span<const std::byte> get_bytes(std::size_t length) {
    const std::byte* from = advance(length);
    return {from, from == nullptr ? 0 : length};
  }
  void reject() { bad_ = true; }
  bool bad() const { return bad_; }
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  const std::byte* advance(std::size_t length) {
    if (bad_ || length > bytes_.size() - at_) {
      bad_ = true;
      return nullptr;
    }
    const std::byte* from = bytes_.data() + at_;
    at_ += length;
    return from;
  }
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  bool bad_ = false;
};

}  // namespace hvdlite
