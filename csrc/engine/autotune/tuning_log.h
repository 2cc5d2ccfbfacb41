// What autotune measured and decided, as lines of JSON in a file: one object each, with its "event"
// first and the settings that it is about last. docs/autotune.md says what the fields mean. Without
// a file nothing is written. Thread: the runner. Errors: a file that cannot be made is warned of.
#pragma once

#include <fstream>
#include <string>

#include "engine/autotune/step_sampler.h"
#include "engine/autotune/tuning_search.h"

namespace hvdlite {

class TuningLog {
 public:
  explicit TuningLog(const std::string& path);  // "" for none; what was there is overwritten

  void sample(int number, const char* phase, const Sample& sample, const Tunables& tunables);
  void duel(const Duel& duel, bool final);
  // The end; `finished` is false where the world ended before the search.
  void result(bool finished, int samples, int trials, double gain, const Tunables& tunables);

 private:
  void write(const std::string& fields, const Tunables& tunables);
  std::ofstream file_;
};

}  // namespace hvdlite
