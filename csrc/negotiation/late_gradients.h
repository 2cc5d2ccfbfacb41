// Late gradients: an all-reduce with terms (wire/late_terms.h) goes on without the
// gradients of ranks that are late. This extension of the coordinator answers its tensors when a
// quorum of ranks is there and the grace has passed, and names the late ranks in the response.
// participation.h says which ranks are late.
//
// Rank 0's negotiator owns it, and only the runner calls it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "negotiation/coordinator.h"
#include "negotiation/extension.h"
#include "negotiation/participation.h"

namespace hvdlite {

class LateGradients : public Extension {
 public:
  explicit LateGradients(Coordinator& coordinator) : coordinator_(coordinator) {}  // borrowed

  bool decides() const override { return true; }
  bool take(PendingTable& table, std::size_t member, const Request& request,
            TimePoint now) override;
  void submitted(PendingTable& table, PendingTensor& pending, std::size_t member,
                 const Request& request, TimePoint now) override;
  bool awaits(const PendingTable& table, const PendingTensor& pending,
              std::size_t member) const override;
  void complete(const PendingTable& table, const PendingTensor& pending,
                Response& response) override;
  void joined(int rank, TimePoint now) override;
  void all_joined() override;
  void forget(std::uint32_t set) override { sets_.erase(set); }
  std::optional<TimePoint> due() const override;
  void tick(TimePoint now, std::vector<Notice>& notices) override;

 private:
  using ByKey = std::map<std::string, Participation>;  // The key is LateTerms::key.

  static std::uint32_t id_of(const PendingTable& table) {
    return static_cast<std::uint32_t>(table.group.id);
  }
  // What decides about a tensor that has submitted() behind it.
  Participation& of(const PendingTable& table, const PendingTensor& pending) {
    return sets_.at(id_of(table)).at(LateTerms::of(pending.request.terms).key);
  }
  // Answers what can be answered because a step of this key can be closed.
  void close(PendingTable& table, Participation& one, const std::string& key, TimePoint now);
  void answer_if_complete(PendingTable& table, const std::string& key, TimePoint now);

  Coordinator& coordinator_;
  std::map<std::uint32_t, ByKey> sets_;  // The key is a process set.
};

}  // namespace hvdlite
