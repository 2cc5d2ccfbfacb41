#include "engine/autotune/tuning_log.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/log.h"
#include "base/text.h"

namespace hvdlite {
namespace {

constexpr int kSearchingRank = 0;

// JSON has no number for what is not finite; rates and ratios always are.
std::string number(double value) { return text_of_double(value, 6); }

const char* boolean(bool value) { return value ? "true" : "false"; }

}  // namespace

TuningLog::TuningLog(const std::string& path) {
  if (path.empty()) return;
  errno = 0;
  file_.open(path, std::ios::trunc);
  if (file_.is_open()) return;
  log(LogLevel::kWarning, kSearchingRank,
      "autotune goes on without a log: it cannot write " + path + " (" + std::strerror(errno) +
          ")");
}

void TuningLog::sample(int number_of_it, const char* phase, const Sample& sample,
                       const Tunables& tunables) {
  write("\"event\": \"sample\", \"sample\": " + std::to_string(number_of_it) + ", \"phase\": \"" +
            phase + "\", \"steps\": " + std::to_string(sample.steps) + ", \"bytes\": " +
            std::to_string(sample.bytes) + ", \"seconds\": " + number(sample.seconds) +
            ", \"bytes_per_second\": " + number(sample.rate),
        tunables);
}

void TuningLog::duel(const Duel& duel, bool final) {
  write("\"event\": \"" + std::string(final ? "check" : "trial") +
            "\", \"won\": " + boolean(duel.won()) + ", \"wins\": " + std::to_string(duel.wins) +
            ", \"losses\": " + std::to_string(duel.losses) + ", \"gain\": " + number(duel.gain()),
        duel.candidate);
}

void TuningLog::result(bool finished, int samples, int trials, double gain,
                       const Tunables& tunables) {
  write("\"event\": \"result\", \"finished\": " + std::string(boolean(finished)) +
            ", \"samples\": " + std::to_string(samples) +
            ", \"trials\": " + std::to_string(trials) + ", \"gain\": " + number(gain),
        tunables);
}

void TuningLog::write(const std::string& fields, const Tunables& tunables) {
  if (!file_.is_open()) return;
  file_ << "{" << fields;
  for (const Tunable& one : kTunables) {
    file_ << ", \"" << one.name << "\": " << tunables.*one.field;
  }
  file_ << "}\n" << std::flush;
}

}  // namespace hvdlite
