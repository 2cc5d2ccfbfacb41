// Elastic worlds in one process: each worker is a thread with an engine and pending operations, and
// a test can let one of them die at a chosen point. The test itself plays the registrar.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "check.h"
#include "engine/engine_worlds.h"
#include "engine/pending_operations.h"
#include "host/host_backend.h"

namespace hvdlite::testing {

// Where the victim dies. The batch or commit is counted per epoch from 0.
enum class Point {
  kBeforeBatch,   // the others lose it in the batch
  kInBatch,       // it has sent some chunks, so the others' outputs are torn
  kBeforeCommit,  // it has executed all that is due, and the others lose it in the commit
  kCommitByOne,   // one other rank completes the commit, the rest loses it there
  kAfterCommit,   // every rank has completed the commit
};

struct Fault {
  int victim = -1;  // a worker
  Point point = Point::kBeforeBatch;
  int at = 0;        // the number of the batch, or of the commit
  int survivor = 0;  // kCommitByOne: the worker that completes the commit
  int epoch = 0;
};

// What the workers of one epoch share: who meets in a commit whose outcome is scripted.
class Meeting {
 public:
  explicit Meeting(std::size_t size) : size_(size) {}
  // Returns when all have arrived.
  void arrive() {
    MutexLock lock(mutex_);
    if (++arrived_ == size_) changed_.notify_all();
    while (arrived_ < size_) changed_.wait(mutex_);
  }

 private:
  const std::size_t size_;
  Mutex mutex_;
  Condition changed_;
  std::size_t arrived_ HVDLITE_GUARDED_BY(mutex_) = 0;
};

// A host's data plane that acts out a fault. `die` lets this worker's connections break.
class FaultyBackend : public HostBackend {
 public:
  FaultyBackend(Fabric& fabric, const Config& config, int worker, int victim_rank, Fault fault,
                std::shared_ptr<Meeting> meeting, std::function<void()> die)
      : HostBackend(fabric, config),
        fabric_(fabric),
        config_(config),
        worker_(worker),
        victim_rank_(victim_rank),
        fault_(fault),
        meeting_(std::move(meeting)),
        die_(std::move(die)) {}

  Status allreduce(const Allreduce& call, Patience patience) override {
    const bool now = dies_now();
    if (!now || worker_ != fault_.victim) return HostBackend::allreduce(call, patience);
    if (fault_.point == Point::kInBatch) (void)reduce_head(call);
    return die();
  }
  Status allgather(const Allgather& call, Patience patience) override {
    return dies_now() && worker_ == fault_.victim ? die() : HostBackend::allgather(call, patience);
  }
  Status broadcast(const Broadcast& call, Patience patience) override {
    return dies_now() && worker_ == fault_.victim ? die() : HostBackend::broadcast(call, patience);
  }
  Status alltoall(const Alltoall& call, Patience patience) override {
    return dies_now() && worker_ == fault_.victim ? die() : HostBackend::alltoall(call, patience);
  }
  Status reducescatter(const Reducescatter& call, Patience patience) override {
    return dies_now() && worker_ == fault_.victim ? die()
                                                  : HostBackend::reducescatter(call, patience);
  }
  Status barrier(const Group& group, Patience patience) override {
    const bool now = acts() && fault_.point >= Point::kBeforeCommit && commits_++ == fault_.at;
    if (!now) return HostBackend::barrier(group, patience);
    const bool victim = worker_ == fault_.victim;
    if (fault_.point == Point::kAfterCommit) {
      const Status status = HostBackend::barrier(group, patience);
      meeting_->arrive();  // so that everybody has completed it
      return victim ? die() : status;
    }
    if (fault_.point == Point::kBeforeCommit) {
      return victim ? die() : HostBackend::barrier(group, patience);
    }
    meeting_->arrive();
    if (victim) return die();
    if (worker_ == fault_.survivor) return Status();
    return Status(StatusCode::kRankFailed, "lost in the commit", victim_rank_);
  }

 private:
  // Takes part in the first chunks of the call, as if it were to go on. The others, which go on,
  // need not end the last one without it.
  Status reduce_head(const Allreduce& call) {
    constexpr Patience kPatience = std::chrono::milliseconds(100);
    constexpr std::size_t kChunks = 2;
    const bool spans = fabric_.topology.host_count() > 1;
    const std::int64_t chunk = spans ? config_.tcp_chunk : config_.shm_chunk;
    std::size_t left = kChunks * static_cast<std::size_t>(chunk) / size_of(call.types.wire);
    std::vector<Piece> head;
    for (Piece piece : call.pieces) {
      piece.count = std::min(piece.count, left);
      left -= piece.count;
      head.push_back(piece);
    }
    if (left > 0) return Status();  // the call has fewer chunks
    return HostBackend::allreduce({call.group, call.types, call.op, head}, kPatience);
  }
  bool acts() const { return fault_.victim >= 0; }
  // Counts a batch, and says whether it is that of the fault.
  bool dies_now() { return acts() && batches_++ == fault_.at && fault_.point <= Point::kInBatch; }
  Status die() {
    fabric_.close();
    die_();
    return Status(StatusCode::kInternal, "this worker has died");
  }

  Fabric& fabric_;
  const Config config_;
  const int worker_;
  const int victim_rank_;
  const Fault fault_;
  const std::shared_ptr<Meeting> meeting_;
  const std::function<void()> die_;
  int batches_ = 0;
  int commits_ = 0;
};

class ElasticJob {
 public:
  struct Worker {
    int number = 0;
    std::shared_ptr<PendingOperations> pending = std::make_shared<PendingOperations>();
    std::atomic<bool> dead{false};
    Mutex mutex;                                   // guards the rest
    std::vector<std::unique_ptr<Engine>> engines;  // of all epochs
    std::vector<std::vector<int>> members;         // by epoch: its workers in rank order
    Engine& engine() {
      const MutexLock lock(mutex);
      return *engines.back();
    }
    // Submits what `make` returns for an epoch to that epoch's engine. Another epoch may begin
    // meanwhile, so `back` epochs ago is as good.
    Status submit(const std::function<EntryPtr(const std::vector<int>&)>& make, EntryPtr& entry,
                  std::size_t back = 0) {
      Engine* engine = nullptr;
      {
        const MutexLock lock(mutex);
        const std::size_t epoch = engines.size() - 1 - std::min(back, engines.size() - 1);
        engine = engines[epoch].get();
        entry = make(members[epoch]);
      }
      return engine->enqueue(entry, false);
    }
  };

  // Workers 0, 1, ... on these hosts. The faults are of different epochs.
  ElasticJob(Hosts hosts, std::vector<Fault> faults, Config config = quick_config(),
             GpuLibraries libraries = GpuLibraries::search(Config(), {}))
      : hosts_(std::move(hosts)),
        faults_(std::move(faults)),
        config_(std::move(config)),
        libraries_(std::move(libraries)) {
    for (std::size_t i = 0; i < hosts_.size(); ++i) {
      workers_.push_back(std::make_unique<Worker>());
      workers_.back()->number = static_cast<int>(i);
      members_.push_back(static_cast<int>(i));
    }
  }

  // Runs body(worker) on a thread per worker, and re-forms the world after each death. Returns when
  // the workers that live on have returned.
  void run(const std::function<void(Worker&)>& body) {
    form({});
    std::vector<std::thread> threads;
    std::atomic<std::size_t> ended{0};
    for (auto& worker : workers_) {
      threads.emplace_back([&, one = worker.get()] {
        body(*one);
        ++ended;
      });
    }
    const bool done = soon([&] {
      recover();
      return ended == workers_.size();
    });
    CHECK(done);
    if (!done) std::abort();  // the threads would never end
    for (std::thread& thread : threads) thread.join();
    std::vector<std::thread> leaving;  // rank 0 may wait for the others
    for (const int number : members_) {
      leaving.emplace_back([this, number] { workers_[number]->engine().shutdown(); });
    }
    for (std::thread& thread : leaving) thread.join();
  }

  // By epoch, its workers in rank order. After run().
  const std::vector<std::vector<int>>& history() const { return history_; }
  const std::vector<std::unique_ptr<Worker>>& workers() const { return workers_; }
  // Whether something could not be redone. After run().
  const std::string& stuck() const { return stuck_; }

 private:
  void form(const std::vector<int>& former) {
    const int epoch = static_cast<int>(history_.size());
    history_.push_back(members_);
    Hosts hosts;
    for (const int number : members_) hosts.push_back(hosts_[number]);
    Fault fault;
    for (const Fault& one : faults_) {
      if (one.epoch == epoch) fault = one;
    }
    const auto found = std::find(members_.begin(), members_.end(), fault.victim);
    const int victim_rank = static_cast<int>(found - members_.begin());
    const auto meeting = std::make_shared<Meeting>(members_.size());
    std::vector<int> rank_of(former.size(), -1);
    for (std::size_t old = 0; old < former.size(); ++old) {
      const auto at = std::find(members_.begin(), members_.end(), former[old]);
      if (at != members_.end()) rank_of[old] = static_cast<int>(at - members_.begin());
    }
    std::vector<std::unique_ptr<Fabric>> fabrics;
    if (members_.size() > 1) {
      auto world = make_inproc_world(hosts, config_);
      CHECK_OK(world.status());
      fabrics = std::move(world.value());
    } else {
      fabrics.resize(1);
    }
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
      Worker& worker = *workers_[members_[rank]];
      std::unique_ptr<Backend> backend = std::make_unique<SelfBackend>();
      if (fabrics[rank] != nullptr) {
        backend =
            std::make_unique<FaultyBackend>(*fabrics[rank], config_, worker.number, victim_rank,
                                            fault, meeting, [&worker] { worker.dead = true; });
      }
      const Engine::Elastic elastic{{epoch, worker.pending->process_sets(rank_of)}, worker.pending};
      auto engine = std::make_unique<Engine>(std::move(fabrics[rank]), std::move(backend), config_,
                                             libraries_, std::make_unique<Trace>(), elastic);
      {
        // Before resume(): what it resumes may end before anything else is done here.
        const MutexLock lock(worker.mutex);
        worker.members.push_back(members_);
      }
      worker.pending->resume(*engine, rank_of);
      const MutexLock lock(worker.mutex);
      worker.engines.push_back(std::move(engine));
    }
  }

  // The registrar's part: once a member has died, all others are suspended, the commit point is
  // taken and given out, and the next epoch is formed.
  void recover() {
    std::vector<int> gone;
    std::vector<int> alive;
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
      const bool dead = workers_[members_[rank]]->dead;
      (dead ? gone : alive).push_back(dead ? static_cast<int>(rank) : members_[rank]);
    }
    if (gone.empty()) return;
    CommitCounts commit_point;
    for (const int number : alive) {
      Worker& worker = *workers_[number];
      worker.engine().suspend("a worker has died");
      const PendingOperations::Report report = worker.pending->report(gone);
      if (!report.stuck.empty()) stuck_ = report.stuck;
      for (const auto& [set, count] : report.commits)
        commit_point[set] = std::max(commit_point[set], count);
    }
    for (const int number : alive) {
      PendingOperations& pending = *workers_[number]->pending;
      if (stuck_.empty()) {
        pending.deliver(commit_point);
      } else {
        pending.fail(Status(StatusCode::kRankFailed, stuck_));
      }
    }
    const std::vector<int> former = std::exchange(members_, alive);
    form(former);
  }

  const Hosts hosts_;  // by worker
  const std::vector<Fault> faults_;
  const Config config_;
  const GpuLibraries libraries_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<int> members_;
  std::vector<std::vector<int>> history_;
  std::string stuck_;
};

// Waits for the entry, in whichever world it ends. False: the worker has died.
inline bool await(ElasticJob::Worker& worker, const EntryPtr& entry) {
  while (!entry->completion->wait_until(Deadline::after(std::chrono::milliseconds(5)))) {
    if (worker.dead) return false;
  }
  return !worker.dead;
}

inline EntryPtr commit_entry(const std::string& transaction, std::uint32_t set = 0) {
  auto entry = change_entry(Kind::kCommit, "commit." + transaction);
  entry->request.process_set = set;
  entry->request.transaction = transaction;
  return entry;
}

}  // namespace hvdlite::testing
