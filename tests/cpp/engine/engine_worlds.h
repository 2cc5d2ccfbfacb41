// Worlds of whole engines in one process: each rank is an engine with a thread that calls it.
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "host/host_backend.h"
#include "support/inproc_world.h"

namespace hvdlite::testing {

using Hosts = std::vector<int>;

// Waits until `condition` holds, which another thread or a device makes true. False if it did not
// in time.
template <typename Condition>
bool soon(const Condition& condition, std::chrono::milliseconds within = std::chrono::minutes(2)) {
  const auto late = std::chrono::steady_clock::now() + within;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > late) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}
inline bool ends_soon(const Engine& engine, std::chrono::milliseconds within) {
  return soon([&] { return !engine.status().ok(); }, within);
}

inline Config quick_config() {
  Config config;
  config.collective_timeout = 120;
  config.log_level = "error";
  return config;
}

// The configuration of a rank where only rank 0 gives up a tensor that stalls. On a busy machine
// another rank might otherwise give up rank 0 first, whose engine has no core for so long.
inline Config stalls_end_at_rank_0(Config config, std::size_t rank) {
  if (rank > 0) config.stall_shutdown = 0;
  return config;
}

using BackendOf = std::function<std::unique_ptr<Backend>(Fabric&, std::size_t)>;

inline std::vector<std::unique_ptr<Engine>> make_engines(const Hosts& hosts, const Config& config,
                                                         bool control_tree = false,
                                                         const BackendOf& backend_of = {}) {
  auto fabrics = make_inproc_world(hosts, config, control_tree);
  CHECK_OK(fabrics.status());
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& fabric : fabrics.value()) {
    auto backend = backend_of ? backend_of(*fabric, engines.size())
                              : std::make_unique<HostBackend>(*fabric, config);
    engines.push_back(std::make_unique<Engine>(std::move(fabric), std::move(backend), config));
  }
  return engines;
}

// Runs body(rank, engine) on a thread per rank; then all engines shut down together.
inline void run_world(const Hosts& hosts, const std::function<void(int, Engine&)>& body,
                      const Config& config = quick_config(), bool control_tree = false) {
  auto engines = make_engines(hosts, config, control_tree);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < engines.size(); ++rank) {
    threads.emplace_back([&, rank] {
      body(static_cast<int>(rank), *engines[rank]);
      engines[rank]->shutdown();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline EntryPtr allreduce_entry(const std::string& name, std::vector<float>& values,
                                ReduceOp op = ReduceOp::kSum) {
  auto entry = std::make_shared<Entry>();
  entry->request.name = name;
  entry->request.op = op;
  entry->request.tensors = {{name, DataType::kFloat32, {static_cast<std::int64_t>(values.size())}}};
  entry->inputs = {values.data()};
  entry->outputs = {values.data()};
  return entry;
}

// An entry with rows of `width` elements each. The engine allocates its result.
inline EntryPtr rows_entry(Kind kind, const std::string& name, std::vector<float>& values,
                           std::int64_t width = 1) {
  EntryPtr entry = allreduce_entry(name, values);
  entry->request.kind = kind;
  entry->request.tensors[0].dims = {static_cast<std::int64_t>(values.size()) / width, width};
  entry->outputs = {nullptr};
  return entry;
}

inline std::vector<float> output_of(const EntryPtr& entry, std::size_t index = 0) {
  const Completion::Output& output = entry->completion->outputs.at(index);
  std::vector<float> values(output.bytes / sizeof(float));
  if (output.bytes > 0) std::memcpy(values.data(), output.data.get(), output.bytes);
  return values;
}

inline Status finish(Engine& engine, const EntryPtr& entry, bool blocking = false) {
  if (!engine.wait(*entry, blocking, Deadline::after(std::chrono::minutes(2)))) {
    return Status(StatusCode::kTimeout, "the test's own deadline passed");
  }
  return entry->completion->status();
}

inline Status run(Engine& engine, const EntryPtr& entry, bool blocking = true) {
  const Status status = engine.enqueue(entry, blocking);
  return status.ok() ? finish(engine, entry, blocking) : status;
}

inline EntryPtr change_entry(Kind kind, const std::string& name) {
  auto entry = std::make_shared<Entry>();
  entry->request.kind = kind;
  entry->request.name = name;
  return entry;
}

inline EntryPtr join_entry() { return change_entry(Kind::kJoin, std::string(kJoinName)); }

inline EntryPtr in_set(EntryPtr entry, std::uint32_t set) {
  entry->request.process_set = set;
  return entry;
}

inline EntryPtr addition(const std::vector<int>& ranks, const std::string& name = "add") {
  auto entry = change_entry(Kind::kAddProcessSet, name);
  entry->request.ranks = {ranks.begin(), ranks.end()};
  return entry;
}

inline EntryPtr removal(std::uint32_t set, const std::string& name = "remove") {
  auto entry = change_entry(Kind::kRemoveProcessSet, name);
  entry->removes = set;
  return entry;
}

inline std::uint32_t add_set(Engine& engine, const std::vector<int>& ranks) {
  const EntryPtr entry = addition(ranks);
  CHECK_OK(run(engine, entry));
  return static_cast<std::uint32_t>(entry->completion->set_id);
}

}  // namespace hvdlite::testing
