// Knobs from the environment, and the times that they mean.
#include <clocale>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

#include "base/config.h"
#include "base/deadline.h"
#include "base/text.h"
#include "check.h"
#include "cpp/engine/engine_worlds.h"
#include "cpp/host/backend_worlds.h"
#include "support/inproc_world.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

// Sets a variable of the environment for as long as this object lives.
class Variable {
 public:
  Variable(std::string name, const std::string& value) : name_(std::move(name)) {
    ::setenv(name_.c_str(), value.c_str(), 1);
  }
  ~Variable() { ::unsetenv(name_.c_str()); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const std::string name_;
};

std::string refusal(const std::string& name, const std::string& value) {
  const Variable set(name, value);
  return Config::from_environment().status().message();
}

}  // namespace

TEST(config_every_integer_has_a_range_and_its_default_lies_in_it) {
  for (const Knob& knob : knobs()) {
    if (knob.type != "int") continue;
    CHECK(knob.range.has_value());
    if (!knob.range) continue;
    const std::int64_t value = std::stoll(knob.fallback);
    CHECK(knob.range->least <= value && value <= knob.range->most);
    for (const std::int64_t beyond : {knob.range->least - 1, knob.range->most + 1}) {
      const std::string text = std::to_string(beyond);
      CHECK(has(refusal(knob.environment, text),
                knob.environment + "=" + text + " cannot be used: it takes a whole number from " +
                    std::to_string(knob.range->least) + " to "));
    }
    for (const std::int64_t last : {knob.range->least, knob.range->most}) {
      CHECK_EQ(refusal(knob.environment, std::to_string(last)), std::string());
    }
  }
}

TEST(config_every_time_takes_huge_numbers_and_refuses_what_is_not_a_time) {
  for (const Knob& knob : knobs()) {
    if (knob.type != "float") continue;
    for (const char* fine : {"0", "inf", "1e10", "1e308", "2.5", "0.001"}) {
      CHECK_EQ(refusal(knob.environment, fine), std::string());
    }
    for (const char* wrong : {"-1", "nan", "-inf", "2,5", "1e999", "soon", "1 s"}) {
      CHECK(
          has(refusal(knob.environment, wrong),
              knob.environment + "=" + wrong + " cannot be used: it takes a number of at least 0"));
    }
  }
}

TEST(config_a_shorter_collective_timeout_holds_for_missing_ranks_too_unless_they_have_a_limit) {
  const auto shutdown = [] { return Config::from_environment().value().stall_shutdown; };
  CHECK_EQ(shutdown(), 600.0);
  {
    const Variable timeout("HVDLITE_COLLECTIVE_TIMEOUT", "2");
    CHECK_EQ(shutdown(), 2.0);
    const Variable own("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0");
    CHECK_EQ(shutdown(), 0.0);
  }
  {
    const Variable timeout("HOROVOD_GLOO_TIMEOUT_SECONDS", "2");
    CHECK_EQ(shutdown(), 600.0);
  }
  for (const char* longer : {"0", "1000"}) {
    const Variable timeout("HVDLITE_COLLECTIVE_TIMEOUT", longer);
    CHECK_EQ(shutdown(), 600.0);
  }
}

TEST(config_is_read_alike_in_every_locale) {
  // Without an installed locale that has a decimal comma, this test cannot fail.
  const bool comma = std::setlocale(LC_NUMERIC, "de_DE.UTF-8") != nullptr;
  const Variable set("HVDLITE_STALL_WARNING", "2.5");
  const Result<Config> config = Config::from_environment();
  CHECK_OK(config.status());
  if (config.ok()) CHECK_EQ(config.value().stall_warning, 2.5);
  CHECK_EQ(text_of_double(2.5), std::string("2.5"));
  CHECK_EQ(text_of_fixed(1234.56, 1), std::string("1234.6"));
  CHECK_EQ(text_of_double(300), std::string("300"));
  if (comma) std::setlocale(LC_NUMERIC, "C");
}

TEST(deadline_of_any_number_of_seconds) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double huge : {1e9, 1e10, 1e300, infinity, std::nan("")}) {
    CHECK(Deadline::after_seconds(huge).is_never());
    CHECK(!Deadline::after_knob(huge).passed());
  }
  for (const double none : {0.0, -1.0, -1e300, -infinity}) {
    CHECK(Deadline::after_seconds(none).passed());
  }
  CHECK(Deadline::after_knob(0).is_never());
  CHECK(!Deadline::after_seconds(1e8).passed());
  CHECK(!Deadline::after(Patience::max()).passed());
  CHECK_EQ(Deadline::after_knob(0).remaining_ms(), -1);
}

TEST(config_a_timeout_of_never_is_none) {
  for (const double never : {0.0, 1e10, std::numeric_limits<double>::infinity()}) {
    Config config = quick_config();
    config.collective_timeout = config.shutdown_timeout = never;
    config.stall_warning = config.stall_shutdown = never;
    run_world(
        {0, 0, 1},
        [](int rank, Engine& engine) {
          for (int step = 0; step < 3; ++step) {
            if (rank == step) std::this_thread::sleep_for(std::chrono::milliseconds(30));
            std::vector<float> values(3000, 1.0F);
            CHECK_OK(run(engine, allreduce_entry("x", values)));
            CHECK_EQ(values[2999], 3.0F);
          }
        },
        config);
  }
}

TEST(config_chunks_of_nothing_are_some_bytes_all_the_same) {
  Config config = small_config();
  config.shm_chunk = config.tcp_chunk = config.shm_small = 0;
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 1}}) {
    auto fabrics = make_inproc_world(hosts, config);
    CHECK_OK(fabrics.status());
    const ProcessSets sets(2);
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      threads.emplace_back([&, rank] {
        HostBackend backend(*fabrics.value()[rank], config);
        std::vector<float> values(100, 1.0F);
        const Piece piece{values.data(), values.data(), values.size()};
        CHECK_OK(backend.allreduce({*sets.get(0), DataType::kFloat32, ReduceOp::kSum, {&piece, 1}},
                                   kPatience));
        CHECK_EQ(values[99], 2.0F);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}
