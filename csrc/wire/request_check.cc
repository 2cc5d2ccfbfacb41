// The functions of message.h that compare requests of several ranks, and check what they give.
#include <algorithm>
#include <sstream>

#include "wire/message.h"

namespace hvdlite {
namespace {

// The first field in which two requests differ, in words.
struct Difference {
  std::string field, a, b;
};

std::string text_of(const std::vector<std::int64_t>& dims) {
  std::ostringstream text;
  text << '[';
  for (std::size_t i = 0; i < dims.size(); ++i) text << (i == 0 ? "" : ", ") << dims[i];
  text << ']';
  return text.str();
}

template <typename T>
std::string text_of(const T& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

std::optional<Difference> difference(const TensorShape& a, const TensorShape& b, Kind kind) {
  if (a.dtype != b.dtype) {
    return Difference{"dtype", std::string(name_of(a.dtype)), std::string(name_of(b.dtype))};
  }
  if (a.wire != b.wire) {
    return Difference{"wire dtype", std::string(name_of(a.wire)), std::string(name_of(b.wire))};
  }
  if (a.device != b.device) {
    return Difference{"device", std::string(name_of(a.device)), std::string(name_of(b.device))};
  }
  if (kind == Kind::kSend && a.dims != b.dims) {
    return Difference{"number of elements", text_of(a.count()), text_of(b.count())};
  }
  // Ranks give different first dimensions to an allgather and to an alltoall.
  const bool rows_differ = kind == Kind::kAllgather || kind == Kind::kAlltoall;
  const std::size_t skip = rows_differ && !a.dims.empty() && !b.dims.empty() ? 1 : 0;
  if (a.dims.size() != b.dims.size() ||
      !std::equal(a.dims.begin() + skip, a.dims.end(), b.dims.begin() + skip)) {
    return Difference{"shape", text_of(a.dims), text_of(b.dims)};
  }
  return std::nullopt;
}

// `a` and `b` are not equal.
Difference difference(const LateTerms& a, const LateTerms& b) {
  if (a.key != b.key) {
    return {"key of late gradients", "'" + a.key + "'", "'" + b.key + "'"};
  }
  if (a.quorum != b.quorum) {
    return {"quorum of late gradients", text_of(a.quorum), text_of(b.quorum)};
  }
  if (a.grace_us != b.grace_us) {
    return {"grace of late gradients", text_of(a.grace_us) + " us", text_of(b.grace_us) + " us"};
  }
  if (a.bound != b.bound) return {"bound of late gradients", text_of(a.bound), text_of(b.bound)};
  return {"policy of late gradients", a.fold ? "fold" : "drop", b.fold ? "fold" : "drop"};
}

std::optional<Difference> difference(const Request& a, const Request& b) {
  if (a.kind != b.kind) {
    return Difference{"operation", std::string(name_of(a.kind)), std::string(name_of(b.kind))};
  }
  if (a.transaction != b.transaction) {
    return Difference{"transaction", text_of(a.transaction), text_of(b.transaction)};
  }
  if (a.op != b.op) {
    return Difference{"reduce op", std::string(name_of(a.op)), std::string(name_of(b.op))};
  }
  if (a.root != b.root) return Difference{"root rank", text_of(a.root), text_of(b.root)};
  if (a.late.has_value() != b.late.has_value()) {
    return Difference{"late gradients", a.late ? "one" : "none", b.late ? "one" : "none"};
  }
  if (a.late && *a.late != *b.late) return difference(*a.late, *b.late);
  if (a.weighted != b.weighted) {
    return Difference{"weight", a.weighted ? "one" : "none", b.weighted ? "one" : "none"};
  }
  if (a.prescale != b.prescale) {
    return Difference{"prescale factor", text_of(a.prescale), text_of(b.prescale)};
  }
  if (a.postscale != b.postscale) {
    return Difference{"postscale factor", text_of(a.postscale), text_of(b.postscale)};
  }
  if (a.changes_process_sets() && a.ranks != b.ranks) {
    return Difference{"ranks of the set", text_of(a.ranks), text_of(b.ranks)};
  }
  if (a.tensors.size() != b.tensors.size()) {
    return Difference{"number of tensors", text_of(a.tensors.size()), text_of(b.tensors.size())};
  }
  return std::nullopt;
}

// Continues `subject`, "alltoall 'x': rank 1": why these splits do not divide so many rows.
std::optional<std::string> describe_bad_division(const std::string& subject,
                                                 const std::vector<std::int64_t>& splits,
                                                 std::int64_t rows) {
  std::int64_t sum = 0;
  for (const std::int64_t split : splits) {
    if (split < 0) return subject + " has a negative split: " + text_of(splits);
    if (__builtin_add_overflow(sum, split, &sum)) sum = INT64_MAX;
  }
  if (sum == rows) return std::nullopt;
  return subject + " has splits " + text_of(splits) + ", which add up to " + std::to_string(sum) +
         ", but " + std::to_string(rows) + " rows";
}

std::optional<std::string> describe_bad_shares(int rank, const Request& request,
                                               std::size_t members) {
  const std::vector<std::int64_t>& splits = request.splits;
  if (splits.empty()) return std::nullopt;
  const std::string whose = ": rank " + std::to_string(rank);
  if (splits.size() != members * request.tensors.size()) {
    return describe(request) + whose + " has " + std::to_string(splits.size()) +
           " splits in a process set of " + std::to_string(members) + "; give one for each member" +
           (request.tensors.size() == 1 ? "" : " and tensor");
  }
  auto begin = splits.begin();
  for (const TensorShape& tensor : request.tensors) {
    const auto end = begin + static_cast<std::ptrdiff_t>(members);
    const std::int64_t rows = tensor.dims.empty() ? 0 : tensor.dims[0];
    auto text = describe_bad_division("reducescatter '" + request.tensor_name(tensor) + "'" + whose,
                                      {begin, end}, rows);
    if (text) return text;
    begin = end;
  }
  return std::nullopt;
}

// hvdlite makes the other names, of the function and a number: "#broadcast_parameters.0".
bool is_own_name(const Request& request, const std::string& name) {
  return request.is_send() || !name.starts_with('#');
}

std::string operation(const Request& request, const std::string& name) {
  if (!is_own_name(request, name)) return name.substr(1);
  return std::string(name_of(request.kind)) + " '" + name + "'";
}

std::int64_t count_present(const Presence& present) {
  return std::count(present.begin(), present.end(), true);
}

}  // namespace

std::string describe(const Request& request) {
  if (request.kind == Kind::kJoin) return "join()";
  const std::string text = operation(request, request.name);
  if (!request.is_send()) return text;
  return text + " from rank " + std::to_string(request.source()) + " to rank " +
         std::to_string(request.destination());
}

std::string trace_label(const Request& request) {
  constexpr std::size_t kLongest = 4096;
  std::string label = request.name;
  if (request.tensors.size() < 2) return label;
  char separator = '\0';
  for (const TensorShape& tensor : request.tensors) {
    if (label.size() + tensor.name.size() > kLongest) return label + " ...";
    label += separator;
    label += tensor.name;
    separator = ' ';
  }
  return label;
}

std::optional<std::string> describe_mismatch(int rank_a, const Request& a, int rank_b,
                                             const Request& b) {
  std::string name = a.name;
  std::optional<Difference> found = difference(a, b);
  for (std::size_t i = 0; !found && i < a.tensors.size(); ++i) {
    found = difference(a.tensors[i], b.tensors[i], a.kind);
    if (found && !a.tensors[i].name.empty()) name = a.tensors[i].name;
  }
  if (!found && a.kind == Kind::kReducescatter && a.splits != b.splits) {
    found = Difference{"splits", text_of(a.splits), text_of(b.splits)};
  }
  if (!found) return std::nullopt;
  const std::string advice =
      is_own_name(a, a.name)
          ? ""
          : "; calls without a name meet in their order: make the same ones on all ranks, and none "
            "of them under `if hvd.rank() == 0:`";
  return operation(a, name) + ": ranks disagree about the " + found->field + ": rank " +
         std::to_string(rank_a) + " has " + found->a + ", rank " + std::to_string(rank_b) +
         " has " + found->b + advice;
}

std::optional<std::string> describe_bad_splits(int rank, const Request& request,
                                               const Presence& present) {
  const std::size_t members = present.size();
  if (request.kind == Kind::kReducescatter) return describe_bad_shares(rank, request, members);
  if (request.tensors.size() != 1 || request.tensors[0].dims.empty()) {
    return "alltoall '" + request.name + "': it takes one tensor with a first dimension";
  }
  const std::int64_t rows = request.tensors[0].dims[0];
  const std::string subject = "alltoall '" + request.name + "': rank " + std::to_string(rank);
  const std::string size = std::to_string(members);
  if (request.splits.empty()) {
    const std::int64_t parts = count_present(present);
    if (rows % parts == 0) return std::nullopt;
    const std::int64_t joined = std::ssize(present) - parts;
    return subject + " has " + std::to_string(rows) +
           " rows, which cannot be split evenly in a process set of " + size +
           (joined == 0 ? "" : ", " + std::to_string(joined) + " of which have joined") +
           "; give splits";
  }
  if (request.splits.size() != members) {
    return subject + " has " + std::to_string(request.splits.size()) +
           " splits in a process set of " + size + "; give one for each member";
  }
  return describe_bad_division(subject, request.splits, rows);
}

std::optional<std::string> describe_bad_ranks(const Request& request, int size) {
  const std::vector<std::int64_t>& ranks = request.ranks;
  const auto not_above = [](std::int64_t a, std::int64_t b) { return b <= a; };
  if (!ranks.empty() && ranks.front() >= 0 && ranks.back() < size &&
      std::adjacent_find(ranks.begin(), ranks.end(), not_above) == ranks.end()) {
    return std::nullopt;
  }
  return "add_process_set of " + text_of(ranks) +
         ": a process set takes different ranks from 0 to " + std::to_string(size - 1) +
         ", at least one";
}

std::vector<std::int64_t> rows_given(const Request& request, const Presence& present) {
  std::vector<std::int64_t> rows;
  if (request.kind == Kind::kAllgather) {
    for (const TensorShape& tensor : request.tensors) {
      rows.push_back(tensor.dims.empty() ? 0 : tensor.dims[0]);
    }
  } else if (request.kind == Kind::kAlltoall) {
    rows = request.splits;
    if (rows.empty()) {
      const std::int64_t share = request.tensors[0].dims[0] / count_present(present);
      for (const bool here : present) rows.push_back(here ? share : 0);
    }
  }
  return rows;
}

}  // namespace hvdlite
