// A thread with a name, owned by this object. The destructor waits for the end of `body`.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace hvdlite {

class Thread {
 public:
  // `name` shows in debuggers and top; the system keeps 15 characters.
  Thread(const std::string& name, std::function<void()> body);
  ~Thread();
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

 private:
  std::thread thread_;
};

}  // namespace hvdlite
