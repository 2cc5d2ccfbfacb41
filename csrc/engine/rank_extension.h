// An optional feature of the engine, as this rank's side of it sees it: the counterpart of
// negotiation/extension.h, which is rank 0's. The engine calls each extension that it was given
// (engine/features.h) and knows none of them by name.
//
// One extension *decides* about entries whose requests have terms (wire/terms.h): rank 0 may answer
// such a request without this rank, which then is *left out*. What takes part instead of this
// rank's entry, and when that entry ends, is the extension's. It may keep what it needs for that in
// the attachment of an entry. One extension *tunes*: it changes settings while the world runs
// (base/tunables.h). One extension *reports* to its counterpart.
//
// Every hook does nothing unless an extension overrides it. Only the runner calls them, except
// check(), which any thread calls. An entry without terms costs no call.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/tunables.h"
#include "engine/entry.h"
#include "transport/topology.h"
#include "wire/message.h"

namespace hvdlite {

// What this rank has submitted in a world of several ranks.
struct Submissions {
  const std::unordered_map<std::string, EntryPtr>& pending;  // Entries without an answer, by key.
  std::uint64_t count = 0;                                   // includes those that have one
  bool quiet = false;  // Nothing that this rank is to run or to read is waiting.
};

class RankExtension {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  RankExtension() = default;
  virtual ~RankExtension() = default;
  RankExtension(const RankExtension&) = delete;
  RankExtension& operator=(const RankExtension&) = delete;

  // Whether it decides about entries with terms. RankExtensions asks once.
  virtual bool decides() const { return false; }

  // The engine calls the next five only where the extension decides.
  // What is wrong with an entry of this process set, which has passed check_entry():
  // kInvalidArgument.
  virtual Status check(const Entry& /*entry*/, const Group& /*group*/, bool /*elastic*/) const {
    return Status();
  }
  // This rank has submitted the entry. True: its request was answered without it, and the extension
  // ends it.
  virtual bool take(const EntryPtr& /*entry*/) { return false; }
  // The answer to an entry that counts, without these members.
  virtual void answered(Entry& /*entry*/, const std::vector<int>& /*left_out*/) {}
  // The answer to a request that leaves this rank out. `crossed`: its entry, where that came before
  // the answer, or null; the extension ends it. Returns what takes part instead. An error ends the
  // world.
  virtual Result<EntryPtr> answered_without(const Request& /*request*/,
                                            const std::vector<int>& /*left_out*/,
                                            EntryPtr crossed) {
    return crossed;
  }
  // The request of this key has ended with an error, without this rank's entry.
  virtual void failed_without(const std::string& /*key*/, const Status& /*error*/) {}

  // Whether it tunes. RankExtensions asks once.
  virtual bool tunes() const { return false; }
  // The engine calls this only where the extension tunes, and on rank 0 only: the round runs next.
  // Returns settings that all ranks are to change to.
  virtual std::optional<NewTunables> retune(const Round& /*round*/, TimePoint /*now*/) {
    return std::nullopt;
  }

  // Whether it reports. RankExtensions asks once.
  virtual bool reports() const { return false; }
  // The engine calls this only where the extension reports, and has asked for it
  // (RankExtensions::ask_for_report()). Returns what its counterpart reads on rank 0
  // (Extension::reported()), which comes behind these submissions.
  virtual std::optional<Bytes> report(const Submissions& /*own*/) { return std::nullopt; }

  // The world of several ranks runs nothing any more.
  virtual void world_ended() {}
  // A process set is gone. All ranks have joined, and take part again.
  virtual void forget(std::uint32_t /*process_set*/) {}
  virtual void all_joined() {}
};

// The extensions of an engine, whose parts own them.
class RankExtensions {
 public:
  // Before the engine takes entries. Only one extension may decide, only one may tune, and only one
  // may report.
  void add(std::unique_ptr<RankExtension> extension) {
    if (extension->decides()) decider_ = extension.get();
    if (extension->tunes()) tuner_ = extension.get();
    if (extension->reports()) reporter_ = extension.get();
    all_.push_back(std::move(extension));
  }
  // Returns the extension that decides about the request, or null where it waits for all members.
  RankExtension* decider_of(const Request& request) const {
    return request.waits_for_all() ? nullptr : decider_;
  }
  RankExtension* decider() const { return decider_; }
  RankExtension* tuner() const { return tuner_; }
  RankExtension* reporter() const { return reporter_; }
  // Makes the runner of a world of several ranks call the reporter soon. Any thread.
  void ask_for_report() {
    report_asked_.store(true, std::memory_order_seq_cst);
    if (wake_runner_) wake_runner_();
  }
  // Whether it was asked for, since the runner has taken it.
  bool report_asked() const { return report_asked_.load(std::memory_order_seq_cst); }
  bool take_report_asked() { return report_asked() && report_asked_.exchange(false); }
  // Before the engine takes entries: how its world wakes the runner, from any thread.
  void set_wake_runner(std::function<void()> wake) { wake_runner_ = std::move(wake); }
  void world_ended() {
    for (const auto& extension : all_) extension->world_ended();
  }
  void forget(std::uint32_t process_set) {
    for (const auto& extension : all_) extension->forget(process_set);
  }
  void all_joined() {
    for (const auto& extension : all_) extension->all_joined();
  }
  // The extension of this class, for callers that know it; null where there is none.
  template <typename Feature>
  Feature* find() const {
    for (const auto& extension : all_) {
      if (auto* found = dynamic_cast<Feature*>(extension.get())) return found;
    }
    return nullptr;
  }

 private:
  std::vector<std::unique_ptr<RankExtension>> all_;
  RankExtension* decider_ = nullptr;   // the one of them that decides
  RankExtension* tuner_ = nullptr;     // the one of them that tunes
  RankExtension* reporter_ = nullptr;  // the one of them that reports
  std::function<void()> wake_runner_;
  std::atomic<bool> report_asked_{false};
};

}  // namespace hvdlite
