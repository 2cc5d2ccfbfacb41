// What all members of a process set remember of a negotiated request, so that it travels as one bit
// from then on. Ids are given out by the coordinator and reach every member in the same order of
// responses; a changed request takes over the id of its predecessor. A full cache forgets nothing:
// later names are negotiated in full each time. Each negotiator and the coordinator own one; only
// the runner calls it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "wire/message.h"

namespace hvdlite {

class ResponseCache {
 public:
  explicit ResponseCache(std::size_t capacity) : capacity_(capacity) {}

  // The id of exactly this request, if every member knows it.
  std::optional<std::uint32_t> find(const std::string& key, const Request& request) const {
    const auto found = ids_.find(key);
    if (found == ids_.end() || !(requests_[found->second] == request)) return std::nullopt;
    return found->second;
  }
  // Coordinator: the id under which to remember `key` from now on, or kNotCached.
  std::uint32_t assign(const std::string& key) const {
    if (const auto found = ids_.find(key); found != ids_.end()) return found->second;
    if (!free_.empty()) return free_.back();
    return requests_.size() < capacity_ ? static_cast<std::uint32_t>(requests_.size()) : kNotCached;
  }
  void remember(std::uint32_t id, const std::string& key, const Request& request) {
    if (id == kNotCached) return;
    if (id >= requests_.size()) requests_.resize(id + 1);
    requests_[id] = request;
    ids_[key] = id;
    std::erase(free_, id);
  }
  // The process set was removed: its ids are free for other requests.
  void forget(std::uint32_t process_set) {
    std::erase_if(ids_, [&](const auto& known) {
      if (requests_[known.second].process_set != process_set) return false;
      free_.push_back(known.second);
      return true;
    });
  }
  // nullptr for an id that was never given out.
  const Request* at(std::uint32_t id) const {
    return id < requests_.size() ? &requests_[id] : nullptr;
  }

 private:
  std::size_t capacity_;
  std::unordered_map<std::string, std::uint32_t> ids_;
  std::vector<Request> requests_;  // Each id has one, default-made where this rank is not a member.
  // Ids of removed sets that this rank has not seen again. Only the coordinator, which sees all of
  // them, gives ids out.
  std::vector<std::uint32_t> free_;
};

}  // namespace hvdlite
