#include "base/thread.h"

#include <pthread.h>

#include <utility>

namespace hvdlite {

Thread::Thread(const std::string& name, std::function<void()> body) : thread_(std::move(body)) {
  ::pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

Thread::~Thread() { thread_.join(); }

}  // namespace hvdlite
