// Backends in worlds of threads, and tensors with known values, for the conformance suite.
#pragma once

#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "base/dtype.h"
#include "check.h"
#include "host/host_backend.h"
#include "negotiation/process_set.h"
#include "support/inproc_world.h"

namespace hvdlite::testing {

inline constexpr Patience kPatience = std::chrono::seconds(20);
using Hosts = std::vector<int>;
using Body = std::function<void(int rank, Backend& backend, const Group& world)>;

inline Config small_config() {
  Config config;
  config.shm_chunk = 4096;  // so that small tests take many chunks
  config.tcp_chunk = 8192;
  config.shm_small = 512;
  return config;
}

// Runs the body on a thread per rank, each with a host backend.
inline void run_hosts(const Hosts& hosts, const Body& body) {
  const Config config = small_config();
  auto fabrics = make_inproc_world(hosts, config);
  CHECK_OK(fabrics.status());
  const ProcessSets sets(static_cast<int>(hosts.size()));
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    threads.emplace_back([&, rank] {
      HostBackend backend(*fabrics.value()[rank], config);
      body(static_cast<int>(rank), backend, *sets.get(0));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

using EveryBody = std::function<void(int size, int rank, Backend& backend, const Group& world)>;

// Runs the body in every shape of world that the host backend treats differently, with backends
// whose results do not depend on how tensors were batched.
inline void for_every_host_world(const EveryBody& body) {
  SelfBackend self;
  const ProcessSets alone(1);
  body(1, 0, self, *alone.get(0));
  const std::vector<Hosts> worlds = {
      {0},          {0, 0},       {0, 0, 0},    {0, 0, 0, 0, 0, 0, 0, 0}, {0, 1}, {0, 1, 2},
      {0, 0, 1, 1}, {0, 1, 1, 0}, {0, 0, 0, 1}, {0, 1, 0, 2, 1, 0}};
  for (const Hosts& hosts : worlds) {
    run_hosts(hosts, [&](int rank, Backend& backend, const Group& world) {
      body(static_cast<int>(hosts.size()), rank, backend, world);
    });
  }
}

// The data planes of GPUs, on fake GPUs: NCCL in several states, through the host, one rank alone.
void for_every_gpu_world(const EveryBody& body);  // gpu_worlds.cc

inline void for_every_world(const EveryBody& body) {
  for_every_host_world(body);
  for_every_gpu_world(body);
}

// Every type that has arithmetic.
inline std::vector<DataType> reducible_types() {
  std::vector<DataType> types;
  for (int dtype = 0; dtype < kDataTypeCount; ++dtype) {
    if (computes(static_cast<DataType>(dtype))) types.push_back(static_cast<DataType>(dtype));
  }
  return types;
}
inline bool is_unsigned(DataType dtype) {
  return dtype == DataType::kUint8 || (dtype >= DataType::kUint16 && dtype <= DataType::kUint64);
}
// False for types and ops for which expected() does not hold: some of the values are negative, and
// wrap around in a type without a sign.
inline bool has_expected(DataType dtype, ReduceOp op) {
  return op == ReduceOp::kSum || !(is_unsigned(dtype) || is_complex(dtype));
}

inline double value_of(int rank, std::size_t i) {
  return static_cast<double>((rank * 7 + i) % 11) - 3;
}

inline double expected(ReduceOp op, int size, std::size_t i) {
  double total = value_of(0, i);
  for (int rank = 1; rank < size; ++rank) {
    const double value = value_of(rank, i);
    if (op == ReduceOp::kMin) total = std::min(total, value);
    if (op == ReduceOp::kMax) total = std::max(total, value);
    if (op == ReduceOp::kSum) total += value;
  }
  return total;
}

inline void store(DataType dtype, std::byte* at, double value) {
  const auto put = [&](auto typed) { std::memcpy(at, &typed, sizeof typed); };
  switch (dtype) {
    case DataType::kFloat16:
      return put(to_float16(static_cast<float>(value)).bits);
    case DataType::kBfloat16:
      return put(to_bfloat16(static_cast<float>(value)).bits);
    case DataType::kFloat32:
      return put(static_cast<float>(value));
    case DataType::kFloat64:
      return put(value);
    case DataType::kComplex64:
    case DataType::kComplex128:
      store(component_of(dtype), at, value);
      return store(component_of(dtype), at + size_of(dtype) / 2, 2 * value);
    default:
      break;
  }
  const auto whole = static_cast<std::int64_t>(value);
  std::memcpy(at, &whole, size_of(dtype));  // little-endian: the low bytes
}

// The value of a real float.
inline double load(DataType dtype, const std::byte* at) {
  const auto get = [&](auto typed) {
    std::memcpy(&typed, at, sizeof typed);
    return typed;
  };
  switch (dtype) {
    case DataType::kFloat16:
      return to_float(get(Float16{}));
    case DataType::kBfloat16:
      return to_float(get(Bfloat16{}));
    case DataType::kFloat32:
      return get(float{});
    default:
      return get(double{});
  }
}

inline std::vector<std::byte> make_tensor(DataType dtype, std::size_t count,
                                          const std::function<double(std::size_t)>& value) {
  std::vector<std::byte> bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) store(dtype, bytes.data() + i * size_of(dtype), value(i));
  return bytes;
}

}  // namespace hvdlite::testing
