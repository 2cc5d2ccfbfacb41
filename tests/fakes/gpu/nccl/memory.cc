// Memory that NCCL hands out, and registrations of it with communicators, whose faults are counted.
#include <map>

#include "nccl/communicator.h"

extern "C" int cuMemAlloc_v2(unsigned long long* out, std::size_t bytes);
extern "C" int cuMemFree_v2(unsigned long long address);

namespace fakegpu {
namespace {

struct Registration {
  void* communicator = nullptr;
  int device = 0;
  const void* buffer = nullptr;
};

struct Registrations {
  hvdlite::Mutex mutex;
  std::map<void*, std::unique_ptr<Registration>> all HVDLITE_GUARDED_BY(mutex);
};

Registrations& registrations() {
  static auto* all = new Registrations;
  return *all;
}

void count_fault(int device) { fake_count(device, offsetof(FakeCounters, registration_faults), 1); }

}  // namespace

void end_registrations(void* communicator, bool abort) {
  hvdlite::MutexLock lock(registrations().mutex);
  std::erase_if(registrations().all, [&](const auto& at) {
    if (at.second->communicator != communicator) return false;
    if (!abort) count_fault(at.second->device);
    fake_count(at.second->device, offsetof(FakeCounters, live_registrations), -1);
    return true;
  });
}

}  // namespace fakegpu

using namespace fakegpu;

FAKE_API ncclResult_t ncclMemAlloc(void** out, std::size_t bytes) {
  if (const int failure = fake_take_failure("ncclMemAlloc", fake_current_device())) {
    return fail(static_cast<ncclResult_t>(failure), "injected failure of ncclMemAlloc");
  }
  unsigned long long address = 0;
  if (const int error = cuMemAlloc_v2(&address, bytes)) {
    return fail(ncclUnhandledCudaError,
                "Cuda failure " + std::to_string(error) + (error == 2 ? " 'out of memory'" : ""));
  }
  *out = reinterpret_cast<void*>(address);
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclMemFree(void* address) {
  {
    hvdlite::MutexLock lock(registrations().mutex);
    for (const auto& [key, registration] : registrations().all) {
      if (registration->buffer == address) count_fault(registration->device);
    }
  }
  const int error = cuMemFree_v2(reinterpret_cast<unsigned long long>(address));
  return error == 0 ? ncclSuccess
                    : fail(ncclUnhandledCudaError, "Cuda failure " + std::to_string(error));
}

FAKE_API ncclResult_t ncclCommRegister(ncclComm_t handle, void* buffer, std::size_t bytes,
                                       void** out) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr) return fail(ncclInvalidArgument, "comm is not a communicator");
  const int device = communicator->device;
  if (const int failure = fake_take_failure("ncclCommRegister", device)) {
    return fail(static_cast<ncclResult_t>(failure), "injected failure of ncclCommRegister");
  }
  if (fake_resolve(device, buffer, bytes) == nullptr) {
    return fail(ncclInvalidArgument, "the buffer is not the device's memory");
  }
  auto made = std::make_unique<Registration>(Registration{handle, device, buffer});
  hvdlite::MutexLock lock(registrations().mutex);
  for (const auto& [key, other] : registrations().all) {
    if (other->communicator == handle && other->buffer == buffer) count_fault(device);
  }
  *out = made.get();
  registrations().all[*out] = std::move(made);
  FAKE_NCCL_COUNT(*communicator, live_registrations, 1);
  FAKE_NCCL_COUNT(*communicator, registrations, 1);
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclCommDeregister(ncclComm_t handle, void* registration) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  hvdlite::MutexLock lock(registrations().mutex);
  const auto at = registrations().all.find(registration);
  if (communicator == nullptr || at == registrations().all.end() ||
      at->second->communicator != handle) {
    return fail(ncclInvalidArgument, "no such registration");
  }
  registrations().all.erase(at);
  FAKE_NCCL_COUNT(*communicator, live_registrations, -1);
  return ncclSuccess;
}
