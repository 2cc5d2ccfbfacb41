// Makes an entry from what a caller of another language says: numbers for ops and dtypes,
// addresses, the ordinal of a GPU. Both ways into the engine build with it, Python's
// (python/engine.cc) and that of the C functions (engine/c_api.cc).
//
// A builder remembers the first thing that is wrong, and build() returns it. It belongs to one
// thread. The memory that tensors point to is not the builder's: the caller keeps it alive as Entry
// says.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/entry.h"

namespace hvdlite {

inline constexpr int kHostMemory = -1;  // in place of a GPU's ordinal

// The shape of a tensor in host memory. kInvalidArgument where `dtype` or `wire` is not the number
// of a DataType, or a dimension is negative.
Result<TensorShape> make_shape(std::string name, int dtype, int wire,
                               std::vector<std::int64_t> dims);

class EntryBuilder {
 public:
  EntryBuilder(Kind kind, std::string name, std::uint32_t process_set = 0);

  // `op` is the number of a ReduceOp.
  EntryBuilder& reduce(int op, double prescale, double postscale);
  EntryBuilder& weigh(std::optional<double> weight);
  EntryBuilder& transaction(std::string name) {
    entry_->request.transaction = std::move(name);
    return *this;
  }
  EntryBuilder& root(int rank) {
    entry_->request.root = rank;
    return *this;
  }
  // Gives an average a weight of 1, unless it has one.
  EntryBuilder& weighted() {
    entry_->request.weighted = true;
    return *this;
  }
  // For the extension that decides about entries with terms.
  EntryBuilder& terms(TermsPtr terms, std::unique_ptr<Attachment> attachment) {
    entry_->request.terms = std::move(terms);
    entry_->attachment = std::move(attachment);
    return *this;
  }
  EntryBuilder& splits(std::vector<std::int64_t> rows) {
    entry_->request.splits = std::move(rows);
    return *this;
  }
  // The process set that is added has these ranks.
  EntryBuilder& ranks(std::vector<std::int64_t> ranks) {
    entry_->request.ranks = std::move(ranks);
    return *this;
  }
  EntryBuilder& removes(std::uint32_t process_set) {
    entry_->removes = process_set;
    return *this;
  }
  // Adds a tensor on this GPU, where it is ready at the point that `stream` has come to, or one in
  // kHostMemory. All GPU tensors of an entry are on the same GPU.
  EntryBuilder& tensor(TensorShape shape, const void* input, void* output, int gpu,
                       CudaStream stream);
  // Says that a result of so many bytes fits at the output of the last tensor, see
  // Entry::capacities.
  EntryBuilder& capacity(std::uint64_t bytes);

  // The error of this call that something else has found.
  Status refused(const Status& why) const;
  // Once, and last. kInvalidArgument: the caller's numbers are wrong.
  Result<EntryPtr> build();

 private:
  void refuse(const std::string& why);

  EntryPtr entry_ = std::make_shared<Entry>();
  Status wrong_;  // the first thing that is
};

}  // namespace hvdlite
