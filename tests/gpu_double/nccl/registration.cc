#include "nccl/registration.h"

namespace fakegpu {
namespace {

struct Registration {
  int device = 0;
};

Handles<Registration>& registrations() {
  static auto* all = new Handles<Registration>;
  return *all;
}

}  // namespace

ncclResult_t register_buffer(void* handle, void* buffer, std::size_t bytes, void** out) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr) return fail(ncclInvalidArgument, "comm is no communicator");
  if (fake_resolve(communicator->device, buffer, bytes) == nullptr) {
    return fail(ncclInvalidArgument, "the buffer is not the device's memory");
  }
  *out = registrations().add(std::make_shared<Registration>(Registration{communicator->device}));
  FAKE_NCCL_COUNT(*communicator, live_registrations, 1);
  return ncclSuccess;
}

ncclResult_t deregister_buffer(void* handle, void* registration) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr || registrations().remove(registration) == nullptr) {
    return fail(ncclInvalidArgument, "no such registration");
  }
  FAKE_NCCL_COUNT(*communicator, live_registrations, -1);
  return ncclSuccess;
}

}  // namespace fakegpu
