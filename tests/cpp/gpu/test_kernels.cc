// The GPU kernels: the fake driver runs the CUDA source, and plain C++ gives the expected result.
// The fake driver finds a kernel only if the PTX declares it. tests/gpu shows what the PTX does on
// a device.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "check.h"
#include "gpu/kernel_args.h"
#include "gpu/kernels.h"
#include "gpu_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

// The element types, by the names that kernels have for them.
struct Names {
  using copy_1 = std::uint8_t;
  using copy_2 = std::uint16_t;
  using copy_4 = std::uint32_t;
  using copy_8 = std::uint64_t;
  using f16 = Float16;
  using bf16 = Bfloat16;
  using f32 = float;
  using f64 = double;
};

float plain_value(Float16 value) { return to_float(value); }
float plain_value(Bfloat16 value) { return to_float(value); }
float plain_value(float value) { return value; }
double plain_value(double value) { return value; }

template <typename T>
T rounded(double value);
template <>
double rounded<double>(double value) {
  return value;
}
template <>
float rounded<float>(double value) {
  return static_cast<float>(value);
}
template <>
Float16 rounded<Float16>(double value) {
  return to_float16(static_cast<float>(value));
}
template <>
Bfloat16 rounded<Bfloat16>(double value) {
  return to_bfloat16(static_cast<float>(value));
}

// The kernels that copy take no notice of the scale.
template <typename Source, typename Target>
Target expected(Source source, double scale) {
  if constexpr (std::is_integral_v<Source>) {
    return source;
  } else if constexpr (std::is_same_v<Source, double>) {
    return rounded<Target>(static_cast<double>(plain_value(source)) * scale);
  } else {
    return rounded<Target>(plain_value(source) * static_cast<float>(scale));
  }
}

template <typename T>
bool is_same(T a, T b) {
  if constexpr (!std::is_integral_v<T>) {
    if (std::isnan(plain_value(a))) return std::isnan(plain_value(b));
  }
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// A device with the kernels loaded.
struct Gpu {
  std::shared_ptr<CudaDevice> device =
      OnDevice::must(CudaDevice::open(OnDevice::must(gpu_libraries().cuda()), 0));
  std::unique_ptr<SegmentCopies> kernels = OnDevice::must(SegmentCopies::load(device));
  OnDevice buffer(const std::vector<char>& content) const {
    OnDevice made(*device, device->stream(), content.size());
    made.write(content.data(), content.size());
    const CudaDevice::Current current(*device);
    synchronize(device->stream());  // the content may change
    return made;
  }
};

template <typename T>
T load(const std::vector<char>& bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// The place of one segment within the two buffers, in bytes.
struct Place {
  std::size_t source;
  std::size_t target;
  std::size_t count;
  double scale;
};

// Lengths around the sizes of vectors and tiles, aligned and not, with a gap after each.
std::vector<Place> make_places(std::size_t source_bytes, std::size_t target_bytes) {
  constexpr std::size_t kCounts[] = {0, 1, 7, 64, 0, 4095, 4096, 4097, 9000, 3, 0};
  std::vector<Place> places;
  std::size_t source = 0;
  std::size_t target = 0;
  for (std::size_t i = 0; i < std::size(kCounts) * 2; ++i) {
    const std::size_t count = kCounts[i % std::size(kCounts)];
    const std::size_t skew = i < std::size(kCounts) ? 0 : 1;
    const double scale = i % 3 == 0 ? 1.0 : 1.0 / 3.0 + static_cast<double>(i);
    places.push_back({source + skew * source_bytes, target + skew * target_bytes, count, scale});
    source = (source + (count + 2) * source_bytes + 31) / 16 * 16;
    target = (target + (count + 2) * target_bytes + 31) / 16 * 16;
  }
  places.push_back({source, target, 0, 1.0});
  return places;
}

// Random bits, so that every value of a type appears, also infinities and NaN; or small numbers.
template <typename Source>
std::vector<char> make_input(std::size_t bytes, bool tame) {
  std::mt19937 random(7);
  std::vector<char> input(bytes);
  for (std::size_t at = 0; at + sizeof(Source) <= bytes; at += sizeof(Source)) {
    if constexpr (!std::is_integral_v<Source>) {
      const Source small = rounded<Source>(std::uniform_real_distribution(-2.0, 2.0)(random));
      std::memcpy(input.data() + at, &small, sizeof small);
      if (tame) continue;
    }
    for (std::size_t b = 0; b < sizeof(Source); ++b) input[at + b] = static_cast<char>(random());
  }
  return input;
}

template <typename Source, typename Target>
void check_kernel(const Gpu& gpu, const std::string& name, bool tame, unsigned blocks) {
  const std::vector<Place> places = make_places(sizeof(Source), sizeof(Target));
  std::vector<char> input = make_input<Source>(places.back().source + 64, tame);
  std::vector<char> wanted(places.back().target + 64, 0x5a);
  const OnDevice source = gpu.buffer(input);
  OnDevice target = gpu.buffer(wanted);

  CopyArgs args;
  clear(args);
  for (const Place& place : places) {
    CHECK(add(args, {device_address(source.data()) + place.source,
                     device_address(target.data()) + place.target, place.count, place.scale}));
    for (std::size_t i = 0; i < place.count; ++i) {
      const auto value = expected<Source, Target>(
          load<Source>(input, place.source + i * sizeof(Source)), place.scale);
      std::memcpy(wanted.data() + place.target + i * sizeof(Target), &value, sizeof value);
    }
  }
  CHECK_OK(gpu.kernels->launch(name, blocks > 0 ? blocks : launch_blocks(args, 4), args));

  std::vector<char> got(wanted.size());
  target.read(got.data(), got.size());
  int wrong = 0;
  for (std::size_t at = 0; at + sizeof(Target) <= got.size(); at += sizeof(Target)) {
    if (!is_same(load<Target>(wanted, at), load<Target>(got, at))) ++wrong;
  }
  if (wrong > 0) report_failure(__FILE__, __LINE__, name + ": " + std::to_string(wrong) + " wrong");
}

template <typename Source, typename Target>
void check_shapes(const Gpu& gpu, const std::string& name) {
  for (const bool tame : {true, false}) check_kernel<Source, Target>(gpu, name, tame, 0);
  for (const unsigned blocks : {1, 3}) check_kernel<Source, Target>(gpu, name, true, blocks);
}

}  // namespace

TEST(kernels_copy_cast_and_scale_as_the_header_says) {
  const Gpu gpu;
#define CHECK_COPY(bytes)                                                                          \
  check_shapes<Names::copy_##bytes, Names::copy_##bytes>(gpu, "hvdlite_copy_" #bytes);
#define CHECK_CAST(source, target)                                                                 \
  check_shapes<Names::source, Names::target>(gpu, "hvdlite_cast_" #source "_" #target);
  HVDLITE_KERNELS(CHECK_COPY, CHECK_CAST)
#undef CHECK_COPY
#undef CHECK_CAST
}
