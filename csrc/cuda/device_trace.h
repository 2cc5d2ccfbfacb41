// How long batches take on a GPU, for the timeline.
//
// While the trace is on, two events enclose what a batch gives to the device's communication
// stream. Once the device has come past the second, their distances from a *reference* make a span:
// the reference is an event whose time on the host is known, because it was recorded on a stream
// that never has anything else to do. It is renewed every second: clocks drift apart, and the
// driver tells distances as a float. Nobody waits for the device, and while the trace is off there
// are no such events. Errors of the driver drop a span. Thread: the runner.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>

#include "cuda/cuda_device.h"
#include "trace/trace.h"

namespace hvdlite {

class DeviceTrace {
 public:
  explicit DeviceTrace(Trace& trace) : trace_(trace) {}  // borrowed
  ~DeviceTrace();
  DeviceTrace(const DeviceTrace&) = delete;
  DeviceTrace& operator=(const DeviceTrace&) = delete;

  // What the device's communication stream is given until end() is one span.
  void begin(CudaDevice& device);
  void end(std::string name, std::uint64_t bytes);
  // Some spans are not written yet.
  bool waits() const { return !spans_.empty(); }
  // Writes those whose end the device has come past.
  void write();

 private:
  struct Reference {
    CudaEventPtr event;
    TraceTime time;
  };
  struct Clock {
    std::shared_ptr<CudaDevice> device;
    CudaStream stream;
    std::shared_ptr<const Reference> reference;  // null until the first
  };
  struct Span {
    std::shared_ptr<const Reference> reference;
    CudaEventPtr begin;
    CudaEventPtr end;
    std::string name;
    std::uint64_t bytes;
  };

  // nullptr where the driver fails.
  std::shared_ptr<const Reference> reference_of(CudaDevice& device);
  void write(const Span& span);

  Trace& trace_;
  std::map<int, Clock> clocks_;  // by device
  Span current_{};               // between begin() and end(); no event otherwise
  std::deque<Span> spans_;
};

}  // namespace hvdlite
