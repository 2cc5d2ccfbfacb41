// Ranks as threads with one fake GPU each, for the conformance suite and for tests of what only
// GPUs have.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cpp/host/backend_worlds.h"
#include "gpu/gpu_plane.h"
#include "hooks.h"
#include "host/host_backend.h"
#include "negotiation/process_set.h"
#include "support/inproc_world.h"

namespace hvdlite::testing {

// The fake libcuda and libnccl (tests/fakes/gpu) are built beside the tests.

// The folder that holds libcuda.so.1 and libnccl.so.2.
inline const std::string& fake_gpu_folder() {
  static const std::string folder = FAKE_GPU_FOLDER;
  return folder;
}

// Set before main(): the fake counts its devices at the first call, and the devices of all ranks
// then live as long as the process.
inline const bool gpus_set = ::setenv("FAKE_CUDA_DEVICES", "8", 1) == 0;

// Looks up a function of a fake library, with the type `Function`. Ends the process when the
// library has no such function.
template <typename Function>
Function* fake_function(const char* library, const char* name) {
  void* handle = ::dlopen((fake_gpu_folder() + "/" + library).c_str(), RTLD_NOW | RTLD_LOCAL);
  void* function = handle != nullptr ? ::dlsym(handle, name) : nullptr;
  if (function == nullptr) {
    std::fprintf(stderr, "%s of %s: %s\n", name, library, ::dlerror());
    std::abort();
  }
  return reinterpret_cast<Function*>(function);
}

// Calls a function of the fake libcuda and returns its status.
template <typename... Arguments>
int cuda(const char* name, Arguments... arguments) {
  return fake_function<int(Arguments...)>("libcuda.so.1", name)(arguments...);
}

inline constexpr const char* kCuda = "libcuda.so.1";

inline void set_gpu_option(const char* name, const char* value, int device = -1) {
  fake_function<decltype(fake_set_option)>(kCuda, "fake_set_option")(name, device, value);
}

inline void synchronize(CudaStream stream) { CHECK_EQ(cuda("cuStreamSynchronize", stream), 0); }

inline Config gpu_config() {
  Config config = small_config();
  config.collective_timeout = 120;
  config.log_level = "error";
  return config;
}

// The fake libraries. A name of no file stands for a machine without NCCL.
inline GpuLibraries gpu_libraries(const std::string& nccl = "libnccl.so.2") {
  return {[] { return CudaApi::load(fake_gpu_folder() + "/" + kCuda); },
          [nccl]() -> Result<std::shared_ptr<const NcclApi>> {
            Result<Dylib> library = Dylib::open(fake_gpu_folder() + "/" + nccl);
            HVDLITE_RETURN_IF_ERROR(library.status());
            return NcclApi::take(std::move(library.value()), "of the tests");
          }};
}

inline CudaPointer device_address(const void* pointer) {
  return reinterpret_cast<CudaPointer>(pointer);
}

// Device memory that a test fills and reads through a stream of its own, as a framework does.
class OnDevice {
 public:
  OnDevice(CudaDevice& device, CudaStream stream, std::size_t bytes)
      : device_(device),
        stream_(stream),
        memory_(must(device.allocate(std::max<std::size_t>(bytes, 1)))) {}

  std::byte* data() const { return reinterpret_cast<std::byte*>(memory_.address()); }
  void write(const void* from, std::size_t bytes) {
    const CudaDevice::Current current(device_);
    if (bytes == 0) return;
    CHECK_EQ(device_.api().copy_to_device(memory_.address(), from, bytes, stream_), 0);
  }
  // Waits for the stream.
  void read(void* to, std::size_t bytes) {
    const CudaDevice::Current current(device_);
    if (bytes == 0) return;
    CHECK_EQ(device_.api().copy_to_host(to, memory_.address(), bytes, stream_), 0);
    synchronize(stream_);
  }

  template <typename T>
  static T must(Result<T> result) {
    CHECK_OK(result.status());
    return std::move(result.value());
  }

 private:
  CudaDevice& device_;
  CudaStream stream_;
  DeviceMemory memory_;
};

// Makes a data plane of GPUs look like one of the host: it takes host memory, and waits for the
// result. One stream writes the tensors and another reads them; they wait for each other by events
// alone.
class ThroughDevice : public Backend {
 public:
  ThroughDevice(GpuPlane& plane, int ordinal) : plane_(plane), ordinal_(ordinal) {
    const CudaEventPtr event = OnDevice::must(plane.mark(0, ordinal, nullptr));
    device_ = event->device().shared_from_this();
    const CudaDevice::Current current(*device_);
    CHECK_EQ(device_->api().stream_create(&producer_, kCudaStreamNonBlocking, 0), 0);
    CHECK_EQ(device_->api().stream_create(&consumer_, kCudaStreamNonBlocking, 0), 0);
  }
  ~ThroughDevice() override {
    const CudaDevice::Current current(*device_);
    (void)device_->api().stream_destroy(producer_);
    (void)device_->api().stream_destroy(consumer_);
  }

  Status allreduce(const Allreduce& call, Patience patience) override {
    const auto& [group, types, op, pieces] = call;
    std::vector<OnDevice> inputs, outputs;
    std::vector<Piece> moved(pieces.begin(), pieces.end());
    inputs.reserve(pieces.size());
    outputs.reserve(pieces.size());
    for (Piece& piece : moved) {
      const std::size_t bytes = piece.count * size_of(types.memory);
      inputs.emplace_back(*device_, producer_, bytes).write(piece.input, bytes);
      if (piece.output == piece.input) {
        outputs.emplace_back(*device_, consumer_, 1);
        piece.input = piece.output = inputs.back().data();
      } else {
        outputs.emplace_back(*device_, consumer_, bytes);
        piece.input = inputs.back().data();
        piece.output = outputs.back().data();
      }
    }
    HVDLITE_RETURN_IF_ERROR(run(group, patience, [&](DeviceBackend& plane) {
      return plane.allreduce({call.group, call.types, call.op, moved}, patience);
    }));
    for (std::size_t i = 0; i < moved.size(); ++i) {
      fetch(moved[i].output, pieces[i].output, moved[i].count * size_of(types.memory));
    }
    return Status();
  }
  Status allgather(const Allgather& call, Patience patience) override {
    return move(call.group, call.input, call.output, patience,
                [&](DeviceBackend& plane, auto in, auto out) {
                  return plane.allgather({call.group, in, call.bytes, out}, patience);
                });
  }
  Status broadcast(const Broadcast& call, Patience patience) override {
    return move(call.group, call.input, call.output, patience,
                [&](DeviceBackend& plane, auto in, auto out) {
                  return plane.broadcast({call.group, call.root, in, out}, patience);
                });
  }
  Status alltoall(const Alltoall& call, Patience patience) override {
    return move(call.group, call.input, call.output, patience,
                [&](DeviceBackend& plane, auto in, auto out) {
                  return plane.alltoall({call.group, in, call.send_bytes, out, call.receive_bytes},
                                        patience);
                });
  }
  Status reducescatter(const Reducescatter& call, Patience patience) override {
    const auto& [group, dtype, op, piece, counts] = call;
    const auto own = counts[counts.size() == 1 ? 0 : group.index_of(rank)];
    const std::span<const std::byte> input(static_cast<const std::byte*>(piece.input),
                                           piece.count * size_of(dtype));
    const std::span<std::byte> output(static_cast<std::byte*>(piece.output), own * size_of(dtype));
    return move(group, input, output, patience, [&](DeviceBackend& plane, auto in, auto out) {
      const Piece moved{in.data(), out.data(), call.piece.count, call.piece.prescale,
                        call.piece.postscale};
      return plane.reducescatter({call.group, call.dtype, call.op, moved, call.counts}, patience);
    });
  }
  Status barrier(const Group& group, Patience patience) override {
    const Result<DeviceBackend*> plane = plane_.open(group, ordinal_, patience);
    HVDLITE_RETURN_IF_ERROR(plane.status());
    return plane.value()->barrier(group, patience);
  }

  int rank = 0;  // of the thread

 private:
  template <typename Call>
  Status run(const Group& group, Patience patience, const Call& body) {
    const Result<DeviceBackend*> plane = plane_.open(group, ordinal_, patience);
    HVDLITE_RETURN_IF_ERROR(plane.status());
    const CudaEventPtr ready = OnDevice::must(device_->record(producer_));
    HVDLITE_RETURN_IF_ERROR(plane.value()->after_events({&ready, 1}));
    HVDLITE_RETURN_IF_ERROR(body(*plane.value()));
    const CudaEventPtr end = OnDevice::must(plane.value()->record());
    return device_->wait(consumer_, *end);
  }
  template <typename Call>
  Status move(const Group& group, std::span<const std::byte> input, std::span<std::byte> output,
              Patience patience, const Call& body) {
    OnDevice in(*device_, producer_, input.size());
    OnDevice out(*device_, consumer_, output.size());
    in.write(input.data(), input.size());
    HVDLITE_RETURN_IF_ERROR(run(group, patience, [&](DeviceBackend& plane) {
      return body(plane, std::span<const std::byte>(in.data(), input.size()),
                  std::span<std::byte>(out.data(), output.size()));
    }));
    fetch(out.data(), output.data(), output.size());
    return Status();
  }
  void fetch(const void* from, void* to, std::size_t bytes) {
    const CudaDevice::Current current(*device_);
    if (bytes == 0) return;
    CHECK_EQ(device_->api().copy_to_host(to, device_address(from), bytes, consumer_), 0);
    synchronize(consumer_);
  }

  GpuPlane& plane_;
  const int ordinal_;
  std::shared_ptr<CudaDevice> device_;
  CudaStream producer_ = nullptr;
  CudaStream consumer_ = nullptr;
};

// Runs the body on a thread per rank, each with a GPU of its own.
inline void run_gpus(const Hosts& hosts, const Config& config, const Body& body,
                     const GpuLibraries& libraries = gpu_libraries()) {
  auto fabrics = make_inproc_world(hosts, config);
  CHECK_OK(fabrics.status());
  const ProcessSets sets(static_cast<int>(hosts.size()));
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    threads.emplace_back([&, rank] {
      HostBackend host(*fabrics.value()[rank], config);
      GpuPlane plane(host, hosts.size() == 1 ? nullptr : fabrics.value()[rank].get(), config,
                     libraries);
      {
        ThroughDevice backend(plane, static_cast<int>(rank));
        backend.rank = static_cast<int>(rank);
        body(static_cast<int>(rank), backend, *sets.get(0));
      }
      plane.close(Deadline::after_seconds(5));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace hvdlite::testing
