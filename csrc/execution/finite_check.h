// HVDLITE_CHECK_FINITE: a rank that gives infinities or NaN to an allreduce or a reducescatter says
// so, because the result does not tell whose they were. A warning, not an error: under a loss scale
// that adapts itself, infinities are nothing unusual.
//
// What is looked at is what travels: scaled, and cast where there is a wire dtype. On the host each
// tensor, before it is copied; on a GPU each batch of allreduces, by the kernels that move it,
// whose finding is read when the device has ended the batch. At most one line in kQuiet; what is
// found meanwhile waits for the next one. The executor owns the check, and only the runner calls
// it.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/counter.h"
#include "base/deadline.h"
#include "execution/events.h"
#include "kernels/pieces.h"

namespace hvdlite {

// "a, b and 3 more".
class NameList {
 public:
  void add(std::string name);
  bool empty() const { return first_.empty(); }
  std::string text() const;

 private:
  static constexpr std::size_t kMost = 5;
  std::vector<std::string> first_;
  std::size_t more_ = 0;
};

class FiniteCheck {
 public:
  static constexpr std::chrono::seconds kQuiet{10};

  // `found` counts tensors (of a GPU: batches), for the statistics. It and `events` are borrowed.
  FiniteCheck(int rank, bool on, Counter& found, Events& events)
      : rank_(rank), on_(on), found_(found), events_(events) {}

  bool on() const { return on_; }
  // Looks at a tensor in host memory that this rank is about to give.
  void look(const std::string& name, ElementTypes types, const Piece& piece);
  // Says what was found, unless a line was written a moment ago.
  void report();
  // A batch on a GPU, of these tensors, was not finite.
  void found_in(const NameList& names);

 private:
  const int rank_;
  const bool on_;
  Counter& found_;
  Events& events_;
  NameList waiting_;        // what was found since the last line
  std::string first_name_;  // The first of them on the host has this name.
  Deadline quiet_ = Deadline::after({});
};

}  // namespace hvdlite
