#include "tensorflow/attachment.h"

#include "base/mutex.h"
#include "base/status.h"

namespace hvdlite::tensorflow {
namespace {

struct Attachment {
  Mutex mutex;
  Condition idle;
  int calls HVDLITE_GUARDED_BY(mutex) = 0;  // submit() calls under way; the core stays for them
  const HvdliteCore* core HVDLITE_GUARDED_BY(mutex) = nullptr;
  World world HVDLITE_GUARDED_BY(mutex) = {};

  const HvdliteCore* enter() {
    MutexLock lock(mutex);
    ++calls;
    return core;
  }
  void leave() {
    MutexLock lock(mutex);
    if (--calls == 0) idle.notify_all();
  }
};

Attachment& attachment() {
  static Attachment instance;  // never read after main: kernels run before
  return instance;
}

}  // namespace

void submit(const HvdliteCall& call) {
  // Without the lock, because in a world of one `done` runs in here, and may submit again.
  const HvdliteCore* core = attachment().enter();
  if (core != nullptr) {
    core->submit(core->engine, &call);
  } else {
    HvdliteResult result{};
    result.code = static_cast<std::int32_t>(StatusCode::kShutdown);
    result.message = "hvdlite has not been initialized; call hvd.init() first";
    call.done(call.context, &result);
  }
  attachment().leave();
}

World world() {
  Attachment& attached = attachment();
  MutexLock lock(attached.mutex);
  return attached.world;
}

bool find_process_set(std::uint32_t process_set, HvdlitePlace* place) {
  const HvdliteCore* core = attachment().enter();
  const bool found = core != nullptr && core->find(core->engine, process_set, place);
  attachment().leave();
  return found;
}

}  // namespace hvdlite::tensorflow

bool hvdlite_tensorflow_attach(const hvdlite::HvdliteCore* core,
                               const hvdlite::tensorflow::World* world) {
  if (core != nullptr && core->version != hvdlite::kCoreTableVersion) return false;
  hvdlite::tensorflow::Attachment& attached = hvdlite::tensorflow::attachment();
  hvdlite::MutexLock lock(attached.mutex);
  while (attached.calls > 0) attached.idle.wait(attached.mutex);
  attached.core = core;
  attached.world = world != nullptr ? *world : hvdlite::tensorflow::World{};
  return true;
}
