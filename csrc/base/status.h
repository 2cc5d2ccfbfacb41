// The outcome of an operation. Every fallible call of the core returns a Status or a Result<T>; the
// core throws nothing. Immutable after construction, safe to copy between threads.
#pragma once

#include <cstdint>
#include <string>
#include <system_error>
#include <utility>
#include <variant>

namespace hvdlite {

// Keep in step with hvdlite/errors.py: the binding raises the class of the same code.
enum class StatusCode : std::uint8_t {
  kOk = 0,
  kInvalidArgument,  // a caller's mistake, here or on failed_rank; the engine stays usable
  kMismatch,         // ranks submitted different things under one name; the engine stays usable
  kDuplicateName,    // the name is already in flight on this rank; the engine stays usable
  kOutOfMemory,      // no memory for this operation; the engine stays usable
  kRankFailed,       // a peer died, left, or raised; sticky
  kTimeout,          // a deadline passed; sticky
  kStalled,          // some rank did not submit a tensor within stall_shutdown; sticky
  kShutdown,         // this rank has shut down, or the operation was in flight when it did
  kForked,           // called in a child of fork()
  kInternal,         // a bug of ours, or a failing system call; sticky
  kDeadlock,         // ranks wait for each other in different operations; the engine stays usable
};
inline constexpr StatusCode kLastStatusCode = StatusCode::kDeadlock;

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, int failed_rank = -1)
      : code_(code), failed_rank_(failed_rank), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  // A text for the user: it names rank, tensor and reason, and says what to do where we know.
  const std::string& message() const { return message_; }
  // The rank that caused the error, or -1.
  int failed_rank() const { return failed_rank_; }
  // True for errors after which no further collective can succeed on this engine.
  bool sticky() const {
    return code_ == StatusCode::kRankFailed || code_ == StatusCode::kTimeout ||
           code_ == StatusCode::kStalled || code_ == StatusCode::kShutdown ||
           code_ == StatusCode::kInternal;
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  int failed_rank_ = -1;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT: implicit by intent
  Result(Status status) : state_(std::move(status)) {}  // NOLINT: implicit by intent

  bool ok() const { return std::holds_alternative<T>(state_); }
  T& value() { return std::get<T>(state_); }
  const T& value() const { return std::get<T>(state_); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }

 private:
  std::variant<T, Status> state_;
};

// The kInternal Status of a failed system call: "<what>: <strerror(error)>".
inline Status system_error(const std::string& what, int error) {
  return Status(StatusCode::kInternal, what + ": " + std::generic_category().message(error));
}

}  // namespace hvdlite

#define HVDLITE_RETURN_IF_ERROR(expression)                                                        \
  do {                                                                                             \
    if (::hvdlite::Status status_ = (expression); !status_.ok()) {                                 \
      return status_;                                                                              \
    }                                                                                              \
  } while (false)

// HVDLITE_ASSIGN_OR_RETURN(Fd memfd, create_memfd(bytes)): the value of a Result, or its Status to
// the caller.
#define HVDLITE_ASSIGN_OR_RETURN(target, ...)                                                      \
  HVDLITE_ASSIGN_BY(HVDLITE_NAME(result_, __LINE__), target, __VA_ARGS__)
#define HVDLITE_ASSIGN_BY(result, target, ...)                                                     \
  auto result = (__VA_ARGS__);                                                                     \
  if (!result.ok()) return result.status();                                                        \
  target = std::move(result.value())
#define HVDLITE_NAME(name, line) HVDLITE_NAME_OF(name, line)
#define HVDLITE_NAME_OF(name, line) name##line
