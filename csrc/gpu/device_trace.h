// Measures the time that batches take on a GPU, for the timeline.
//
// While the trace is on, two events enclose the work that a batch gives to the device's
// communication stream. Once the device has passed the second event, the distances of both from a
// *reference* make a span. The reference is an event whose time on the host is known, because it
// was recorded on a stream that never has other work. It is renewed every second, because clocks
// drift apart and the driver gives distances as a float. No thread waits for the device, and while
// the trace is off there are no such events. An error of the driver drops a span. The engine's
// Timeline owns this object. Runner only.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>

#include "gpu/cuda_device.h"
#include "trace/trace.h"

namespace hvdlite {

class DeviceTrace {
 public:
  explicit DeviceTrace(Trace& trace) : trace_(trace) {}  // borrowed
  ~DeviceTrace();
  DeviceTrace(const DeviceTrace&) = delete;
  DeviceTrace& operator=(const DeviceTrace&) = delete;

  // The work that the device's communication stream is given between begin() and end() is one span.
  void begin(CudaDevice& device);
  void end(std::string name, std::uint64_t bytes);
  // True while some spans are not written yet.
  bool waits() const { return !spans_.empty(); }
  // Writes the spans whose end the device has passed.
  void write();

 private:
  struct Reference {
    CudaEventPtr event;
    TraceTime time;
  };
  struct Clock {
    std::shared_ptr<CudaDevice> device;
    CudaStream stream;
    std::shared_ptr<const Reference> reference;  // It is null until the first one is taken.
  };
  struct Span {
    std::shared_ptr<const Reference> reference;
    CudaEventPtr begin;
    CudaEventPtr end;
    std::string name;
    std::uint64_t bytes;
  };

  // The latest reference, or a new one; nullptr when the driver fails.
  std::shared_ptr<const Reference> reference_of(CudaDevice& device);
  void write(const Span& span);

  Trace& trace_;
  std::map<int, Clock> clocks_;  // The key is a device.
  Span current_{};               // between begin() and end(); no event otherwise
  std::deque<Span> spans_;
};

}  // namespace hvdlite
