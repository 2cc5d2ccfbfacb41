// The table of all knobs. config.cc is the only file of the core that reads the environment. Each
// knob is one row: field, name, type, default, unit and one line of help. HVDLITE_<NAME> sets a
// knob; Horovod's name, where there is one, is a fallback. Python reads the same rows through
// `_core.knobs()`, so that docs/knobs.md and hvdlite-run's flags always match them. A Config is a
// plain value.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

// X(type, field, default, range of values, unit, horovod_name, help)
// Every knob of type double is a time; deadline.h says what 0 and huge values mean. The help is one
// sentence without a full stop.
#define HVDLITE_KNOBS(X)                                                                           \
  X(std::int64_t, fusion_threshold, 64 << 20, between(0, std::int64_t{1} << 40), "bytes",          \
    "HOROVOD_FUSION_THRESHOLD", "Largest batch of small tensors that travels as one all-reduce")   \
  X(std::int64_t, cache_capacity, 4096, between(0, 1 << 24), "tensors", "HOROVOD_CACHE_CAPACITY",  \
    "Tensors whose negotiation is remembered; 0: none")                                            \
  X(double, stall_warning, 10.0, std::nullopt, "seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS",      \
    "Warn when a tensor has waited this long for some rank")                                       \
  X(double, stall_shutdown, 600.0, std::nullopt, "seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", \
    "Fail when a tensor has waited this long for some rank; where it is not set, a shorter "       \
    "`HVDLITE_COLLECTIVE_TIMEOUT` that is set counts")                                             \
  X(double, deadlock_grace, 1.0, std::nullopt, "seconds", "",                                      \
    "Fail when ranks have provably waited for each other for this long")                           \
  X(double, collective_timeout, 300.0, std::nullopt, "seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS",    \
    "Fail when a peer makes no progress for this long inside a collective, or, unless "            \
    "`HVDLITE_STALL_SHUTDOWN` is set, has not called it")                                          \
  X(double, peer_timeout, 60.0, std::nullopt, "seconds", "",                                       \
    "Fail when a rank of another host, even an idle one, has not answered for this long")          \
  X(double, shutdown_timeout, 2.0, std::nullopt, "seconds", "",                                    \
    "Longest time that shutdown waits for collectives in flight; 0: no limit")                     \
  X(std::int64_t, spin_us, -1, between(-1, 60'000'000), "microseconds", "",                        \
    "Time that a wait spins before it sleeps; -1 chooses by cores and local ranks")                \
  X(std::int64_t, shm_chunk, 256 << 10, between(64, 1 << 30), "bytes", "",                         \
    "Chunk of the shared-memory pipeline; staging of one chunk should stay in the cache")          \
  X(std::int64_t, shm_small, 16 << 10, between(0, 1 << 30), "bytes", "",                           \
    "Up to this size an all-reduce in shared memory takes one synchronisation instead of two")     \
  X(std::int64_t, shm_gradients, std::int64_t{4} << 30, between(0, std::int64_t{1} << 40),         \
    "bytes", "",                                                                                   \
    "Room for gradient memory that the ranks of a host share, for each rank; 0 for none")          \
  X(std::int64_t, tcp_chunk, 4 << 20, between(64, 1 << 30), "bytes", "",                           \
    "Chunk of the pipeline when the ranks span several hosts")                                     \
  X(std::int64_t, autotune, 0, between(0, 1), "", "HOROVOD_AUTOTUNE",                              \
    "1 searches faster values of the fusion threshold and the chunks")                             \
  X(std::string, autotune_log, "", std::nullopt, "path", "HOROVOD_AUTOTUNE_LOG",                   \
    "File to which rank 0 writes what autotune measures, as lines of JSON")                        \
  X(std::int64_t, autotune_warmup_samples, 3, between(0, 1'000'000), "samples",                    \
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "Samples that autotune throws away at the start")           \
  X(std::int64_t, autotune_steps_per_sample, 10, between(1, 1'000'000), "steps",                   \
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "Fewest training steps of a sample of autotune")          \
  X(std::int64_t, autotune_trials, 20, between(0, 1'000'000), "settings",                          \
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "Most settings that autotune tries")                 \
  X(std::string, timeline, "", std::nullopt, "path", "HOROVOD_TIMELINE",                           \
    "File to which a timeline of all ranks is written, from hvd.init() to the end")                \
  X(std::int64_t, timeline_mark_cycles, 0, between(0, 1), "", "HOROVOD_TIMELINE_MARK_CYCLES",      \
    "1 also marks the engine's rounds in the timeline")                                            \
  X(std::string, nccl_library, "", std::nullopt, "path", "",                                       \
    "libnccl.so.2 to use where the framework has loaded none; by default that of wheels or the "   \
    "system")                                                                                      \
  X(std::string, cuda_library, "", std::nullopt, "path", "",                                       \
    "libcuda.so.1 to use; by default the system's")                                                \
  X(std::int64_t, require_nccl, 0, between(0, 1), "", "",                                          \
    "1 makes GPU tensors fail where NCCL cannot be used, instead of passing through the host")     \
  X(std::int64_t, tensorflow_gpu, 1, between(0, 1), "", "",                                        \
    "0 makes TensorFlow copy tensors of GPUs to the host")                                         \
  X(std::int64_t, average_over_joined, 0, between(0, 1), "", "",                                   \
    "1 divides an average by all ranks while some have joined, as Horovod does")                   \
  X(std::int64_t, check_finite, 0, between(0, 2), "", "",                                          \
    "1 ends the job when a gradient has a NaN or an infinity, and names the rank, the gradient "   \
    "and the step; 2 warns and goes on, as with a loss scale")                                     \
  X(std::int64_t, check_replicas, 0, between(0, 1'000'000'000), "steps", "",                       \
    "Compare the bits of the trained parameters of all ranks once in so many steps, and fail "     \
    "where they differ")                                                                           \
  X(double, lateness_interval, 60.0, std::nullopt, "seconds", "",                                  \
    "Shortest time between two lines about a rank that is late in most steps; 0: no lines")        \
  X(std::string, log_level, "warning", std::nullopt, "", "HOROVOD_LOG_LEVEL",                      \
    "Least severe message that is printed: trace, debug, info, warning, error or fatal")

namespace hvdlite {

struct IntegerRange {
  std::int64_t least;
  std::int64_t most;
};
constexpr IntegerRange between(std::int64_t least, std::int64_t most) { return {least, most}; }

struct Config {
#define HVDLITE_FIELD(type, field, value, range, unit, horovod, help) type field = value;
  HVDLITE_KNOBS(HVDLITE_FIELD)
#undef HVDLITE_FIELD

  // The knobs that every rank must have alike, because ranks plan the same batches and chunks from
  // them: rows of variable and value.
  std::vector<std::pair<std::string, std::string>> agreed() const;
  // Reads the environment. kInvalidArgument names the variable, its text and the values it takes.
  static Result<Config> from_environment();
};

// One row of the table, as text; `current` is the value in the given config.
struct Knob {
  std::string name;         // "fusion_threshold"
  std::string environment;  // "HVDLITE_FUSION_THRESHOLD"
  std::string horovod;      // fallback variable, or ""
  std::string type;         // "int", "float" or "str"
  std::string fallback;     // the default, as text
  std::string unit;
  std::string help;
  std::optional<IntegerRange> range;  // Only an "int" has one.
};
const std::vector<Knob>& knobs();

// The knobs that may change while a world runs (Autotune::retune). Ranks plan batches, chunks
// and paths from them, so all ranks change them between the same two rounds. Plain values.
struct Tunables {
  std::int64_t fusion_threshold = 0;
  std::int64_t shm_chunk = 0;
  std::int64_t shm_small = 0;
  std::int64_t tcp_chunk = 0;

  bool operator==(const Tunables&) const = default;
};

// What all ranks are to change to.
struct NewTunables {
  Tunables tunables;
  bool settled = false;  // nothing changes them any more
};

struct Tunable {
  const char* name;  // The knob has this name.
  std::int64_t Tunables::* field;
};
inline constexpr std::array<Tunable, 4> kTunables = {
    {{"fusion_threshold", &Tunables::fusion_threshold},
     {"shm_chunk", &Tunables::shm_chunk},
     {"shm_small", &Tunables::shm_small},
     {"tcp_chunk", &Tunables::tcp_chunk}}};

// The values of the knobs, with which every world begins.
inline Tunables tunables_of(const Config& config) {
  return {config.fusion_threshold, config.shm_chunk, config.shm_small, config.tcp_chunk};
}

}  // namespace hvdlite
