// One grouped allreduce as an XLA custom call on CPU. A function compiled with jit_compile=True
// uses it instead of the asynchronous operations.
//
// Threads: run_call() runs on a thread of XLA and blocks it until the core has ended the entry; the
// core's own deadlines bound that wait. XLA (2.21) runs calls that do not depend on each other in
// any order, and ranks that wait in different calls would wait for ever. So each call takes a
// number, its *turn*, and gives one to the next call, which thereby depends on it.
// The functions of XLA are looked up in libtensorflow_cc.so.2 when Python registers the call. Their
// mangled names do not depend on abseil's version, and are in 2.16 to 2.21.
#include <dlfcn.h>

#include <bit>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "tensorflow/attachment.h"
#include "wire/message.h"

namespace hvdlite::tensorflow {
namespace {

constexpr const char* kTarget = "hvdlite_allreduce";

// XLA gives every failed call the same code, so the end of the message names the class of the error
// that hvd.elastic.run catches. _MARK in hvdlite/tensorflow/library.py is the same text.
constexpr const char* kMark = " [hvdlite.errors.CollectiveError]";

// The custom call's description, as _describe() in hvdlite/tensorflow/requests.py writes it:
//   op;process set;prescale;postscale;name;dtype,wire dtype,name,dim,dim...;...
// Numbers are decimal, scales the 16 hexadecimal digits of their bits (which are the same in every
// locale), and names have %XX for all but letters, digits and "_.-~".
struct Description {
  std::int32_t op = 0;
  std::uint32_t process_set = 0;
  double prescale = 1;
  double postscale = 1;
  std::string name;
  struct Tensor {
    std::int32_t dtype = 0;
    std::int32_t wire = 0;
    std::string name;
    std::vector<std::int64_t> dims;
  };
  std::vector<Tensor> tensors;
};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  std::size_t end = text.find(separator);
  for (; end != text.npos; end = text.find(separator)) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.push_back(text);
  return parts;
}

// Parses a number; false unless it is the whole text.
template <typename T>
bool number(std::string_view text, T& value, int base = 10) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value, base);
  return error == std::errc() && stop == end;
}

bool scale(std::string_view text, double& value) {
  std::uint64_t bits = 0;
  if (text.size() != 16 || !number(text, bits, 16)) return false;
  value = std::bit_cast<double>(bits);
  return true;
}

bool unquote(std::string_view text, std::string& plain) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    auto value = static_cast<unsigned char>(text[i]);
    if (text[i] == '%') {
      if (i + 2 >= text.size() || !number(text.substr(i + 1, 2), value, 16)) return false;
      i += 2;
    }
    if (value == 0) return false;  // the core's names end there
    plain += static_cast<char>(value);
  }
  return true;
}

bool parse_tensor(std::string_view text, Description::Tensor& tensor) {
  const std::vector<std::string_view> parts = split(text, ',');
  if (parts.size() < 3 || !number(parts[0], tensor.dtype) || !is_valid_dtype(tensor.dtype) ||
      !number(parts[1], tensor.wire) || !is_valid_dtype(tensor.wire) ||
      !unquote(parts[2], tensor.name)) {
    return false;
  }
  for (std::size_t i = 3; i < parts.size(); ++i) {
    if (!number(parts[i], tensor.dims.emplace_back()) || tensor.dims.back() < 0) return false;
  }
  return true;
}

bool parse(std::string_view text, Description& description) {
  const std::vector<std::string_view> parts = split(text, ';');
  if (parts.size() < 6 || !number(parts[0], description.op) ||
      !number(parts[1], description.process_set) || !scale(parts[2], description.prescale) ||
      !scale(parts[3], description.postscale) || !unquote(parts[4], description.name)) {
    return false;
  }
  description.tensors.resize(parts.size() - 5);
  for (std::size_t i = 5; i < parts.size(); ++i) {
    if (!parse_tensor(parts[i], description.tensors[i - 5])) return false;
  }
  return true;
}

// XLA's status of a custom call: nothing, or the reason of its failure. The function that sets it
// is not exported. register_xla() checks this layout by the function that reads the status.
using CallStatus = std::optional<std::string>;
using ReadStatus = std::optional<std::string_view> (*)(const CallStatus*);

bool reads_as_written(ReadStatus read) {
  const CallStatus failed = "a failure that is too long for the string itself to hold";
  const CallStatus fine;
  return read(&failed) == std::string_view(*failed) && read(&fine) == std::nullopt;
}

// The place where the caller waits, and the result that it waits for.
struct Ending {
  Mutex mutex;
  Condition changed;
  bool ended HVDLITE_GUARDED_BY(mutex) = false;
  CallStatus failure HVDLITE_GUARDED_BY(mutex);

  static void take(void* context, const HvdliteResult* result) {
    auto& self = *static_cast<Ending*>(context);
    MutexLock lock(self.mutex);
    self.ended = true;
    if (result->code != 0) {
      self.failure = result->message;
      if (code_of(*result) == TF_ABORTED) *self.failure += kMark;
    }
    self.changed.notify_all();
  }
  CallStatus wait() {
    MutexLock lock(mutex);
    while (!ended) changed.wait(mutex);
    return failure;
  }
};

CallStatus allreduce(const Description& description, const void* const* inputs,
                     void* const* outputs) {
  std::vector<HvdliteTensor> tensors;
  for (std::size_t i = 0; i < description.tensors.size(); ++i) {
    const Description::Tensor& tensor = description.tensors[i];
    tensors.push_back({tensor.name.c_str(), tensor.dtype, tensor.wire,
                       static_cast<std::int32_t>(DeviceType::kHost),
                       static_cast<std::int32_t>(tensor.dims.size()), tensor.dims.data(), inputs[i],
                       outputs[i]});
  }
  Ending ending;
  HvdliteCall call{};
  call.kind = static_cast<std::int32_t>(Kind::kAllreduce);
  call.op = description.op;
  call.root = -1;
  call.process_set = description.process_set;
  call.prescale = description.prescale;
  call.postscale = description.postscale;
  call.weight = std::nan("");
  call.name = description.name.c_str();
  call.count = static_cast<std::int32_t>(tensors.size());
  call.tensors = tensors.data();
  call.done = &Ending::take;
  call.context = &ending;
  submit(call);
  return ending.wait();
}

// XLA's convention API_VERSION_STATUS_RETURNING_UNIFIED on CPU. With a single result `outputs`
// would be its buffer; here there are at least two results, because the turn is one.
void run_call(void* outputs, const void** inputs, const char* opaque, std::size_t length,
              CallStatus* status) {
  Description description;
  if (!parse(std::string_view(opaque, length), description)) {
    *status = "hvdlite: another version of hvdlite made this custom call";
    return;
  }
  const auto results = static_cast<void**>(outputs);
  *status = allreduce(description, inputs, results);
  const std::size_t turn = description.tensors.size();
  std::memcpy(results[turn], inputs[turn], sizeof(std::int64_t));
}

bool refuse(const std::string& why, char* error, std::size_t size) {
  (void)std::snprintf(error, size, "%s", why.c_str());
  return false;
}

}  // namespace
}  // namespace hvdlite::tensorflow

extern "C" {

// Registers the custom call with XLA, once. False when XLA cannot take it; `error` says why.
__attribute__((visibility("default"))) bool hvdlite_tensorflow_register_xla(char* error,
                                                                            std::size_t size) {
  namespace tf = hvdlite::tensorflow;
  using Global = void* (*)();
  using Register = void (*)(void*, const std::string&, void*, const std::string&);
  void* library = ::dlopen("libtensorflow_cc.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return tf::refuse(::dlerror(), error, size);
  const auto find = [library](const char* symbol) { return ::dlsym(library, symbol); };
  const auto global = reinterpret_cast<Global>(find("_ZN3xla24CustomCallTargetRegistry6GlobalEv"));
  const auto enroll = reinterpret_cast<Register>(
      find("_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_stringIcSt11char_"
           "traitsIcESaIcEEEPvS8_"));
  const auto read = reinterpret_cast<tf::ReadStatus>(
      find("_ZN3xla26CustomCallStatusGetMessageEPK20XlaCustomCallStatus_"));
  if (global == nullptr || enroll == nullptr || read == nullptr || !tf::reads_as_written(read)) {
    return tf::refuse("this TensorFlow does not offer XLA's custom calls", error, size);
  }
  enroll(global(), tf::kTarget, reinterpret_cast<void*>(&tf::run_call), "Host");
  return true;
}
}
