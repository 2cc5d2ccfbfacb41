// Allgathers into memory that the callers give, while workers die.
#include "elastic_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

constexpr int kGathers = 5;
constexpr std::size_t kRows = 2;  // of each worker

float row_of(int worker, int step) { return static_cast<float>((worker + 1) * 100 + step); }

struct GatheredRows {
  int epoch = -1;
  std::vector<float> memory;
};

// The input lies in the memory of the result, at the part that the worker had in the first epoch:
// after a death this is the part of another worker, or behind the result.
bool gather_in_place(ElasticJob::Worker& worker, std::size_t workers, int step, GatheredRows& log) {
  log.memory.assign(kRows * workers, -1.0F);
  float* own = log.memory.data() + kRows * static_cast<std::size_t>(worker.number);
  std::fill_n(own, kRows, row_of(worker.number, step));
  EntryPtr entry;
  const Status status = worker.submit(
      [&](const std::vector<int>&) {
        EntryPtr made = rows_entry(Kind::kAllgather, "rows", log.memory);
        made->request.tensors[0].dims = {kRows};
        made->inputs = {own};
        made->outputs = {log.memory.data()};
        made->capacities = {log.memory.size() * sizeof(float)};
        return made;
      },
      entry);
  if (worker.dead) return false;
  CHECK_OK(status);
  if (!await(worker, entry)) return false;
  CHECK_OK(entry->completion->status());
  log.epoch = entry->completion->epoch;
  return true;
}

void gather_while_one_dies(const Hosts& hosts, const Fault& fault) {
  ElasticJob job(hosts, {fault});
  std::vector<std::vector<GatheredRows>> logs(hosts.size(), std::vector<GatheredRows>(kGathers));
  job.run([&](ElasticJob::Worker& worker) {
    for (int step = 0; step < kGathers; ++step) {
      GatheredRows& log =
          logs[static_cast<std::size_t>(worker.number)][static_cast<std::size_t>(step)];
      if (!gather_in_place(worker, hosts.size(), step, log)) return;
    }
  });
  CHECK_EQ(job.stuck(), std::string());
  for (const int worker : job.history().back()) {
    for (int step = 0; step < kGathers; ++step) {
      const GatheredRows& log =
          logs[static_cast<std::size_t>(worker)][static_cast<std::size_t>(step)];
      std::vector<float> expected;
      for (const int member : job.history()[static_cast<std::size_t>(log.epoch)]) {
        expected.insert(expected.end(), kRows, row_of(member, step));
      }
      const auto end = log.memory.begin() + static_cast<std::ptrdiff_t>(expected.size());
      CHECK_EQ(std::vector<float>(log.memory.begin(), end), expected);
    }
  }
}

}  // namespace

TEST(elastic_rows_in_given_memory_are_gathered_again_from_kept_inputs) {
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 0, 0}, Hosts{0, 1, 0}}) {
    for (int victim = 0; victim < static_cast<int>(hosts.size()); ++victim) {
      for (const Point point : {Point::kBeforeBatch, Point::kBeforeCommit, Point::kAfterCommit}) {
        gather_while_one_dies(hosts, {victim, point, 2});
      }
      const int survivor = victim == 0 ? 1 : 0;
      gather_while_one_dies(hosts, {victim, Point::kCommitByOne, 2, survivor});
    }
  }
}
