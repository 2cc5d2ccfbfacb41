// The GPU kernels: the fake driver runs the CUDA source, and plain C++ gives the expected result.
// The PTX must declare all of them. tests/gpu shows what the PTX does on a device.
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/half.h"
#include "check.h"
#include "cuda/cuda_abi.h"
#include "fake_gpu.h"
#include "gpu/cuda/kernel_args.h"
#include "gpu/cuda/pack_ptx.h"
#include "hooks.h"

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

// One process-wide device with the module loaded, never taken down: tests share it.
struct Gpu {
  CUstream stream = nullptr;
  CUmodule module = nullptr;

  Gpu() {
    CUcontext context = nullptr;
    CHECK_EQ(cuda("cuInit", 0u), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuDevicePrimaryCtxRetain", &context, 0), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuCtxSetCurrent", context), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuStreamCreate", &stream, 1u), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuModuleLoadData", &module, static_cast<const void*>(pack_ptx())), CUDA_SUCCESS);
  }
  ~Gpu() {
    CHECK_EQ(cuda("cuModuleUnload", module), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuStreamDestroy_v2", stream), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuDevicePrimaryCtxRelease_v2", 0), CUDA_SUCCESS);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Returns the status of the wait for the kernel.
  int launch(const std::string& name, const CopyArgs& args, unsigned blocks,
             unsigned threads) const {
    CUfunction function = nullptr;
    CHECK_EQ(cuda("cuModuleGetFunction", &function, module, name.c_str()), CUDA_SUCCESS);
    CopyArgs copied = args;
    void* params[] = {&copied};
    CHECK_EQ(cuda("cuLaunchKernel", function, blocks, 1u, 1u, threads, 1u, 1u, 0u, stream,
                  static_cast<void**>(params), static_cast<void**>(nullptr)),
             CUDA_SUCCESS);
    return cuda("cuStreamSynchronize", stream);
  }
};

struct DeviceBuffer {
  explicit DeviceBuffer(std::size_t bytes) : bytes(bytes) {
    CHECK_EQ(cuda("cuMemAlloc_v2", &address, bytes), CUDA_SUCCESS);
  }
  ~DeviceBuffer() { CHECK_EQ(cuda("cuMemFree_v2", address), CUDA_SUCCESS); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void write(const std::vector<char>& from) const {
    CHECK(fake_function<bool(std::uint64_t, const void*, std::size_t)>(
        "libcuda.so.1", "fake_write")(address, from.data(), from.size()));
  }
  std::vector<char> read() const {
    std::vector<char> to(bytes);
    CHECK(fake_function<bool(std::uint64_t, void*, std::size_t)>("libcuda.so.1", "fake_read")(
        address, to.data(), bytes));
    return to;
  }

  std::size_t bytes;
  CUdeviceptr address = 0;
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
void check_kernel(const Gpu& gpu, const std::string& name, bool tame, unsigned blocks,
                  unsigned threads) {
  const std::vector<Place> places = make_places(sizeof(Source), sizeof(Target));
  const DeviceBuffer source(places.back().source + 64);
  const DeviceBuffer target(places.back().target + 64);
  const std::vector<char> input = make_input<Source>(source.bytes, tame);
  source.write(input);
  std::vector<char> wanted(target.bytes, 0x5a);
  target.write(wanted);

  CopyArgs args;
  clear(args);
  for (const Place& place : places) {
    CHECK(add(args, {source.address + place.source, target.address + place.target, place.count,
                     place.scale}));
    for (std::size_t i = 0; i < place.count; ++i) {
      const auto value = expected<Source, Target>(
          load<Source>(input, place.source + i * sizeof(Source)), place.scale);
      std::memcpy(wanted.data() + place.target + i * sizeof(Target), &value, sizeof value);
    }
  }
  CHECK_EQ(gpu.launch(name, args, blocks > 0 ? blocks : launch_blocks(args, 4), threads),
           CUDA_SUCCESS);

  const std::vector<char> got = target.read();
  int wrong = 0;
  for (std::size_t at = 0; at + sizeof(Target) <= got.size(); at += sizeof(Target)) {
    if (!is_same(load<Target>(wanted, at), load<Target>(got, at))) ++wrong;
  }
  if (wrong > 0) report_failure(__FILE__, __LINE__, name + ": " + std::to_string(wrong) + " wrong");
}

template <typename Source, typename Target>
void check_shapes(const Gpu& gpu, const std::string& name) {
  for (const bool tame : {true, false}) {
    check_kernel<Source, Target>(gpu, name, tame, 0, kThreadsPerBlock);
  }
  check_kernel<Source, Target>(gpu, name, true, 3, 32);
  check_kernel<Source, Target>(gpu, name, true, 1, 1);
}

std::set<std::string> names_of_header() {
#define NAME_COPY(bytes) "hvdlite_copy_" #bytes,
#define NAME_CAST(source, target) "hvdlite_cast_" #source "_" #target,
  return {HVDLITE_KERNELS(NAME_COPY, NAME_CAST)};
#undef NAME_COPY
#undef NAME_CAST
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

TEST(kernels_take_a_full_table_and_no_more) {
  const Gpu gpu;
  const DeviceBuffer source(kMaxSegments);
  const DeviceBuffer target(kMaxSegments);
  std::vector<char> input(kMaxSegments);
  for (unsigned i = 0; i < kMaxSegments; ++i) input[i] = static_cast<char>(i);
  source.write(input);
  CopyArgs args;
  clear(args);
  for (unsigned i = 0; i < kMaxSegments; ++i) {  // in reverse order
    CHECK(add(args, {source.address + i, target.address + kMaxSegments - 1 - i, 1, 1.0}));
  }
  CHECK(!add(args, {source.address, target.address, 1, 1.0}));
  CHECK_EQ(gpu.launch("hvdlite_copy_1", args, launch_blocks(args, 4), 64), CUDA_SUCCESS);
  CHECK(target.read() == std::vector<char>(input.rbegin(), input.rend()));
}

TEST(kernels_that_leave_their_memory_are_a_sticky_error) {
  const Gpu gpu;
  const DeviceBuffer buffer(64);
  CopyArgs args;
  clear(args);
  CHECK(add(args, {buffer.address, buffer.address, 17, 1.0}));
  CHECK_EQ(gpu.launch("hvdlite_copy_4", args, 1, 32), CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK_EQ(cuda("cuStreamSynchronize", gpu.stream), CUDA_ERROR_ILLEGAL_ADDRESS);
  fake_function<void(int, int)>("libcuda.so.1", "fake_set_sticky_error")(0, 0);
}

TEST(ptx_declares_the_kernels_of_the_header_and_their_parameter) {
  const std::string ptx = pack_ptx();
  constexpr std::string_view kEntry = ".visible .entry ";
  std::set<std::string> names;
  for (std::size_t at = ptx.find(kEntry); at != std::string::npos; at = ptx.find(kEntry, at)) {
    at += kEntry.size();
    const std::string name = ptx.substr(at, ptx.find('(', at) - at);
    names.insert(name);
    const std::string parameter = name + "_param_0[" + std::to_string(sizeof(CopyArgs)) + "]\n)";
    CHECK(ptx.compare(ptx.find(name + "_param_0", at), parameter.size(), parameter) == 0);
  }
  CHECK(names == names_of_header());
  CHECK(ptx.find(".target sm_70") != std::string::npos);
}
