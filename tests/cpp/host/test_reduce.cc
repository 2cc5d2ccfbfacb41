#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "check.h"
#include "kernels/reduce.h"

using namespace hvdlite;

namespace {

template <typename T>
std::vector<T> reduce_vectors(DataType dtype, ReduceOp op, std::vector<std::vector<T>> inputs,
                              Finish finish = {}) {
  std::vector<const void*> sources;
  for (const auto& input : inputs) sources.push_back(input.data());
  std::vector<T> result(inputs[0].size());
  reduce(dtype, op, sources, result.data(), result.size(), finish);
  return result;
}

}  // namespace

TEST(half_float16_round_trips_every_value) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const Float16 value{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(value);
    if (std::isnan(wide)) {
      CHECK(std::isnan(to_float(to_float16(wide))));
    } else {
      CHECK_EQ(to_float16(wide).bits, value.bits);
    }
  }
}

TEST(half_bfloat16_rounds_to_nearest_even) {
  CHECK_EQ(to_bfloat16(1.0f).bits, 0x3f80);
  CHECK_EQ(to_bfloat16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);  // a tie, to even
  CHECK_EQ(to_bfloat16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);  // a tie, to even
  CHECK_EQ(to_bfloat16(std::bit_cast<float>(0x3f808001u)).bits, 0x3f81);
  CHECK(std::isnan(to_float(to_bfloat16(std::numeric_limits<float>::quiet_NaN()))));
  CHECK(std::isinf(to_float(to_bfloat16(std::numeric_limits<float>::max()))));
}

TEST(half_float16_limits) {
  CHECK_EQ(to_float(to_float16(65504.0f)), 65504.0f);
  CHECK(std::isinf(to_float(to_float16(65520.0f))));
  CHECK_EQ(to_float(to_float16(0x1p-24f)), 0x1p-24f);
  CHECK_EQ(to_float(to_float16(0x1p-26f)), 0.0f);
  CHECK(std::signbit(to_float(to_float16(-0.0f))));
}

namespace {

// Runs `body` in a child process; returns what that wrote to standard error, and how it ended.
std::string last_words(const std::function<void()>& body, int& status) {
  int ends[2] = {};
  CHECK_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    (void)::dup2(ends[1], STDERR_FILENO);
    ::close(ends[0]);
    body();
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string words;
  char text[256];
  for (ssize_t got = 0; (got = ::read(ends[0], text, sizeof(text))) > 0;) words.append(text, got);
  ::close(ends[0]);
  (void)::waitpid(child, &status, 0);
  return words;
}

}  // namespace

TEST(reduce_of_what_does_not_exist_aborts_and_gives_no_number) {
  const struct {
    DataType dtype;
    ReduceOp op;
  } kNone[] = {{DataType::kFloat32, ReduceOp::kAdasum},
               {DataType::kComplex64, ReduceOp::kMax},
               {DataType::kComplex128, ReduceOp::kAdasum},
               {DataType::kBool, ReduceOp::kSum}};
  for (const auto& none : kNone) {
    for (const ReduceFunction variant : {best_reduce(), &portable::reduce_any}) {
      int status = 0;
      const std::string words = last_words(
          [&] {
            std::byte values[32] = {};
            const std::vector<const void*> sources{values, values};
            variant(none.dtype, none.op, sources, values, 1, {});
          },
          status);
      CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
      CHECK(testing::has(words, "reduce " + std::string(name_of(none.dtype)) + " by " +
                                    std::string(name_of(none.op))));
    }
  }
}

TEST(reduce_variants_give_the_same_bits) {
  if (best_reduce() == &portable::reduce_any) return;  // this processor has one variant only
  std::mt19937 random(3);
  int tried = 0;
  for (int dtype = 0; dtype < kDataTypeCount; ++dtype) {
    const auto type = static_cast<DataType>(dtype);
    if (!computes(type)) continue;
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      const std::size_t count = 1500;
      std::vector<std::vector<std::byte>> inputs(3);
      std::vector<const void*> sources;
      for (auto& input : inputs) {
        input.resize(count * size_of(type));
        // Small positive numbers: without NaN, whose payload no rule fixes.
        for (std::size_t i = 0; i < count; ++i) {
          const double value = 1.0 + static_cast<double>(random() % 1000) / 256;
          if (is_complex(type)) {
            const float parts[] = {static_cast<float>(value), static_cast<float>(value) - 2};
            const double wide[] = {value, value - 2};
            std::memcpy(input.data() + i * size_of(type),
                        type == DataType::kComplex64 ? static_cast<const void*>(parts) : wide,
                        size_of(type));
          } else if (type == DataType::kFloat64) {
            std::memcpy(input.data() + i * 8, &value, 8);
          } else if (type == DataType::kFloat32) {
            const auto narrow = static_cast<float>(value);
            std::memcpy(input.data() + i * 4, &narrow, 4);
          } else {
            const std::uint64_t bits = type == DataType::kFloat16    ? to_float16(value).bits
                                       : type == DataType::kBfloat16 ? to_bfloat16(value).bits
                                                                     : random();
            std::memcpy(input.data() + i * size_of(type), &bits, size_of(type));
          }
        }
        sources.push_back(input.data());
      }
      std::vector<std::byte> best(inputs[0].size());
      std::vector<std::byte> plain(inputs[0].size());
      if (is_complex(type) && (op == ReduceOp::kMin || op == ReduceOp::kMax)) continue;
      const Finish finish{op == ReduceOp::kAverage ? 3 : 1, tried++ % 2 == 0 ? 1.0 : 0.7};
      best_reduce()(type, op, sources, best.data(), count, finish);
      portable::reduce_any(type, op, sources, plain.data(), count, finish);
      CHECK(best == plain);
    }
  }
}

TEST(reduce_variants_round_16_bit_floats_alike) {
  if (best_reduce() == &portable::reduce_any) return;  // this processor has one variant only
  // Every 16-bit value, scaled so that subnormals, ties, overflow, infinities and NaN all occur.
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  const void* source = all.data();
  for (const DataType type : {DataType::kFloat16, DataType::kBfloat16}) {
    for (const double factor : {1.0, 0.5, 0.75, 1.0009765625, 1.5, 3.0, 1e-3, 6e-5, 1e4}) {
      std::vector<std::uint16_t> best(all.size());
      std::vector<std::uint16_t> plain(all.size());
      best_reduce()(type, ReduceOp::kSum, {&source, 1}, best.data(), all.size(), {1, factor});
      portable::reduce_any(type, ReduceOp::kSum, {&source, 1}, plain.data(), all.size(),
                           {1, factor});
      CHECK(best == plain);
    }
  }
}

TEST(reduce_scales_integers_towards_zero_and_stays_in_range) {
  const auto scaled = [](DataType dtype, auto value, double factor) {
    auto result = value;
    scale_copy(dtype, &value, &result, 1, factor);
    return result;
  };
  CHECK_EQ(scaled(DataType::kInt32, std::int32_t{7}, 0.5), 3);
  CHECK_EQ(scaled(DataType::kInt32, std::int32_t{-7}, 0.5), -3);
  CHECK_EQ(scaled(DataType::kInt8, std::int8_t{100}, 2.0), std::int8_t{127});
  CHECK_EQ(scaled(DataType::kInt8, std::int8_t{100}, -2.0), std::int8_t{-128});
  CHECK_EQ(scaled(DataType::kUint16, std::uint16_t{5}, -1.0), std::uint16_t{0});
  CHECK_EQ(scaled(DataType::kUint32, std::uint32_t{4'000'000'000}, 0.5), 2'000'000'000U);
  CHECK_EQ(scaled(DataType::kUint64, std::uint64_t{1} << 63, 2.0), ~std::uint64_t{0});
  CHECK_EQ(scaled(DataType::kInt64, std::int64_t{1} << 62, 1e300),
           std::numeric_limits<std::int64_t>::max());
  CHECK_EQ(scaled(DataType::kInt64, std::int64_t{1} << 62, -1e300),
           std::numeric_limits<std::int64_t>::min());
  // Exact where nothing is scaled.
  CHECK_EQ(scaled(DataType::kInt64, (std::int64_t{1} << 53) + 1, 1.0), (std::int64_t{1} << 53) + 1);
}

TEST(reduce_min_and_max_let_nan_through) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const auto result = reduce_vectors<float>(DataType::kFloat32, op, {{nan, 1, 1}, {1, nan, 2}});
    CHECK(std::isnan(result[0]));
    CHECK(std::isnan(result[1]));
    CHECK(!std::isnan(result[2]));
  }
}
