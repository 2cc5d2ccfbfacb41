#include "wire/message.h"

#include <algorithm>

namespace hvdlite {
namespace {

constexpr std::size_t kMaxMessageBytes = UINT16_MAX;
constexpr std::size_t kMinTensorBytes = 6;    // dtype, wire, device, ndim, an empty name
constexpr std::size_t kMinRequestBytes = 39;  // fixed fields, empty texts, no tensor
constexpr std::size_t kEnds = 2;              // A send has two.
constexpr std::uint8_t kWeighted = 1;         // flags of a request
constexpr std::uint8_t kLate = 2;
constexpr std::uint32_t kMaxCacheWords = kMaxCacheIds / 64;

void put_bits(Writer& writer, const std::vector<std::uint32_t>& ids) {
  const auto [low, high] = std::minmax_element(ids.begin(), ids.end());
  const std::uint32_t first = ids.empty() ? 0 : *low / 64;
  std::vector<std::uint64_t> words(ids.empty() ? 0 : *high / 64 - first + 1);
  for (const std::uint32_t id : ids) words[id / 64 - first] |= std::uint64_t{1} << (id % 64);
  writer.put(first);
  writer.put(static_cast<std::uint32_t>(words.size()));
  for (const std::uint64_t word : words) writer.put(word);
}

void get_bits(Reader& reader, std::vector<std::uint32_t>& ids) {
  const auto first = reader.get<std::uint32_t>();
  const std::uint32_t count = reader.get_count(sizeof(std::uint64_t));
  if (first > kMaxCacheWords || count > kMaxCacheWords) return reader.reject();
  for (std::uint32_t i = 0; i < count; ++i) {
    auto word = reader.get<std::uint64_t>();
    for (; word != 0; word &= word - 1) {
      ids.push_back((first + i) * 64 + static_cast<std::uint32_t>(std::countr_zero(word)));
    }
  }
}

void put_numbers(Writer& writer, const std::vector<std::int64_t>& numbers) {
  writer.put(static_cast<std::uint32_t>(numbers.size()));
  for (const std::int64_t number : numbers) writer.put(number);
}

void get_numbers(Reader& reader, std::vector<std::int64_t>& numbers) {
  numbers.resize(reader.get_count(sizeof(std::int64_t)));
  for (std::int64_t& number : numbers) number = reader.get<std::int64_t>();
}

bool names_ranks(const Request& request) {
  return request.changes_process_sets() || request.is_send();
}

void put_late_terms(Writer& writer, const LateTerms& terms) {
  writer.put_text(terms.key);
  writer.put(terms.step);
  writer.put(terms.quorum);
  writer.put(terms.grace_us);
  writer.put(terms.bound);
  writer.put(static_cast<std::uint8_t>(terms.fold));
}

void get_late_terms(Reader& reader, LateTerms& terms) {
  terms.key = reader.get_text(kMaxNameBytes);
  terms.step = reader.get<std::uint64_t>();
  terms.quorum = reader.get<std::uint32_t>();
  terms.grace_us = reader.get<std::int64_t>();
  terms.bound = reader.get<std::uint32_t>();
  terms.fold = reader.get<std::uint8_t>() != 0;
  const bool timed = terms.grace_us >= 0 && terms.grace_us <= kMaxGraceUs;
  if (!timed || terms.quorum == 0 || terms.bound == 0) reader.reject();
}

void put_request(Writer& writer, const Request& request) {
  writer.put(request.kind);
  writer.put(request.op);
  writer.put(
      static_cast<std::uint8_t>((request.weighted ? kWeighted : 0) | (request.late ? kLate : 0)));
  writer.put(request.root);
  writer.put(request.process_set);
  writer.put(request.prescale);
  writer.put(request.postscale);
  writer.put_text(request.name);
  writer.put_text(request.transaction);
  writer.put(static_cast<std::uint32_t>(request.tensors.size()));
  for (const TensorShape& tensor : request.tensors) {
    writer.put(tensor.dtype);
    writer.put(tensor.wire);
    writer.put(tensor.device);
    writer.put(static_cast<std::uint8_t>(tensor.dims.size()));
    writer.put_text(tensor.name);
    for (const std::int64_t dim : tensor.dims) writer.put(dim);
  }
  put_numbers(writer, names_ranks(request) ? request.ranks : request.splits);
  if (request.late) put_late_terms(writer, *request.late);
}

void get_tensor(Reader& reader, TensorShape& tensor) {
  const auto dtype = reader.get<std::uint8_t>();
  const auto wire = reader.get<std::uint8_t>();
  const auto device = reader.get<std::uint8_t>();
  const auto ndim = reader.get<std::uint8_t>();
  if (!is_valid_dtype(dtype) || !is_valid_dtype(wire) ||
      device > static_cast<int>(DeviceType::kGpu) || ndim > kMaxDimensions) {
    return reader.reject();
  }
  tensor.dtype = static_cast<DataType>(dtype);
  tensor.wire = static_cast<DataType>(wire);
  tensor.device = static_cast<DeviceType>(device);
  tensor.name = reader.get_text(kMaxNameBytes);
  tensor.dims.resize(ndim);
  for (std::int64_t& dim : tensor.dims) dim = reader.get<std::int64_t>();
  if (!shape_travels(tensor.dims)) reader.reject();
}

void get_request(Reader& reader, Request& request) {
  const auto kind = reader.get<std::uint8_t>();
  const auto op = reader.get<std::uint8_t>();
  if (kind > static_cast<int>(kLastKind) || !is_valid_op(op)) return reader.reject();
  request.kind = static_cast<Kind>(kind);
  request.op = static_cast<ReduceOp>(op);
  const auto flags = reader.get<std::uint8_t>();
  if (flags > (kWeighted | kLate)) return reader.reject();
  request.weighted = (flags & kWeighted) != 0;
  request.root = reader.get<std::int32_t>();
  request.process_set = reader.get<std::uint32_t>();
  request.prescale = reader.get<double>();
  request.postscale = reader.get<double>();
  request.name = reader.get_text(kMaxNameBytes);
  request.transaction = reader.get_text(kMaxNameBytes);
  request.tensors.resize(reader.get_count(kMinTensorBytes));
  for (TensorShape& tensor : request.tensors) {
    get_tensor(reader, tensor);
    if (reader.bad()) return;
  }
  get_numbers(reader, names_ranks(request) ? request.ranks : request.splits);
  if (request.is_send() && request.ranks.size() != kEnds) reader.reject();
  if ((flags & kLate) != 0) get_late_terms(reader, request.late.emplace());
}

void put_status(Writer& writer, const Status& status) {
  writer.put(status.code());
  writer.put(static_cast<std::int32_t>(status.failed_rank()));
}

Status get_status(Reader& reader) {
  const auto code = reader.get<std::uint8_t>();
  const auto rank = reader.get<std::int32_t>();
  if (code == 0 || code > static_cast<int>(kLastStatusCode)) reader.reject();
  return Status(static_cast<StatusCode>(code), "", rank);
}

void put_tunables(Writer& writer, const Response& response) {
  writer.put(static_cast<std::uint8_t>(kTunables.size()));
  for (const Tunable& one : kTunables) writer.put(response.tunables.*one.field);
  writer.put(static_cast<std::uint8_t>(response.settled));
}

void get_tunables(Reader& reader, Response& response) {
  if (reader.get<std::uint8_t>() != kTunables.size()) return reader.reject();
  for (const Tunable& one : kTunables) response.tunables.*one.field = reader.get<std::int64_t>();
  response.settled = reader.get<std::uint8_t>() != 0;
}

using Ranks = std::vector<std::int64_t>;

std::vector<std::int64_t> numbers_of(const Response& response) {
  if (response.set_id >= 0) return {response.set_id};
  if (response.last_joined >= 0) return {response.last_joined};
  return response.first_dimensions;
}

// A wrong count of numbers stays in first_dimensions, where it does not fit the request.
void get_numbers(Reader& reader, Response& response) {
  std::vector<std::int64_t>& numbers = response.first_dimensions;
  get_numbers(reader, numbers);
  for (const std::int64_t number : numbers) {
    if (number < 0) reader.reject();
  }
  const bool joins = response.request.kind == Kind::kJoin;
  if (numbers.size() != 1 || !(joins || response.request.changes_process_sets())) return;
  if (numbers[0] > INT32_MAX) return reader.reject();
  (joins ? response.last_joined : response.set_id) = static_cast<int>(numbers[0]);
  numbers.clear();
}

void put_response(Writer& writer, const Response& response) {
  writer.put(response.form);
  if (response.form == Response::Form::kCut) return;
  if (response.form == Response::Form::kTune) return put_tunables(writer, response);
  if (response.form == Response::Form::kError) {
    put_status(writer, response.error);
    writer.put(response.request.process_set);
    writer.put_text(response.request.name);
    put_numbers(writer, response.request.is_send() ? response.request.ranks : Ranks());
    writer.put_text(response.error.message());
    return;
  }
  writer.put(response.cache_id);
  if (response.form == Response::Form::kCached) return;
  put_request(writer, response.request);
  put_numbers(writer, numbers_of(response));
}

void put_ranks(Writer& writer, const std::vector<int>& ranks) {
  writer.put(static_cast<std::uint32_t>(ranks.size()));
  for (const int rank : ranks) writer.put(static_cast<std::int32_t>(rank));
}

void get_ranks(Reader& reader, std::vector<int>& ranks) {
  ranks.resize(reader.get_count(sizeof(std::int32_t)));
  for (int& rank : ranks) rank = reader.get<std::int32_t>();
}

void put_absent(Writer& writer, const Response& response) {
  writer.put(Response::Form::kAbsent);
  writer.put(response.generation);
  put_ranks(writer, response.absent);
}

void get_absent(Reader& reader, Response& response) {
  response.generation = reader.get<std::uint32_t>();
  get_ranks(reader, response.absent);
}

void put_left_out(Writer& writer, const Response& response) {
  writer.put(Response::Form::kLeftOut);
  put_ranks(writer, response.left_out);
}

void get_response(Reader& reader, Response& response) {
  const auto form = reader.get<std::uint8_t>();
  if (form > static_cast<int>(Response::Form::kLeftOut)) return reader.reject();
  response.form = static_cast<Response::Form>(form);
  if (response.form == Response::Form::kLeftOut) return get_ranks(reader, response.left_out);
  if (response.form == Response::Form::kAbsent) return get_absent(reader, response);
  if (response.form == Response::Form::kTune) return get_tunables(reader, response);
  if (response.form == Response::Form::kCut) return;
  if (response.form == Response::Form::kError) {
    const Status status = get_status(reader);
    response.request.process_set = reader.get<std::uint32_t>();
    response.request.name = reader.get_text(kMaxNameBytes);
    get_numbers(reader, response.request.ranks);
    const std::size_t ends = response.request.ranks.size();
    if (ends != 0 && ends != kEnds) return reader.reject();
    if (ends == kEnds) response.request.kind = Kind::kSend;
    response.error = Status(status.code(), reader.get_text(kMaxMessageBytes), status.failed_rank());
    return;
  }
  response.cache_id = reader.get<std::uint32_t>();
  if (response.form == Response::Form::kCached) return;
  get_request(reader, response.request);
  get_numbers(reader, response);
}

bool complete(const Reader& reader) { return !reader.bad() && reader.at_end(); }

}  // namespace

std::string_view name_of(Kind kind) {
  constexpr std::string_view kNames[] = {
      "allreduce", "allgather",       "broadcast",          "barrier", "alltoall", "reducescatter",
      "join",      "add_process_set", "remove_process_set", "commit",  "send"};
  return kNames[static_cast<int>(kind)];
}

std::string Request::key() const {
  const std::string set = std::to_string(process_set);
  if (!is_send()) return set + ":" + name;
  return set + ">" + std::to_string(source()) + ">" + std::to_string(destination()) + ":" + name;
}

bool shape_travels(const std::vector<std::int64_t>& dims) {
  std::uint64_t elements = 1;
  return std::all_of(dims.begin(), dims.end(), [&](std::int64_t dim) {
    return dim >= 0 &&
           !__builtin_mul_overflow(elements, std::max<std::int64_t>(dim, 1), &elements) &&
           elements <= std::uint64_t{1} << 56;
  });
}

std::uint64_t TensorShape::count() const {
  std::uint64_t elements = 1;
  for (const std::int64_t dim : dims) elements *= static_cast<std::uint64_t>(dim);
  return elements;
}

Writer begin_frame(FrameType type) {
  Writer writer;
  writer.put(std::uint32_t{0});
  writer.put(type);
  return writer;
}

Bytes finish_frame(Writer& writer) {
  Bytes frame = writer.take();
  const auto length = static_cast<std::uint32_t>(frame.size() - sizeof(std::uint32_t));
  std::memcpy(frame.data(), &length, sizeof(length));
  return frame;
}

Bytes encode_submit(const Submit& submit) {
  Writer writer = begin_frame(FrameType::kSubmit);
  writer.put(submit.stamps.first);
  writer.put(submit.stamps.last);
  put_bits(writer, submit.cached);
  writer.put(static_cast<std::uint32_t>(submit.requests.size()));
  for (const Request& request : submit.requests) put_request(writer, request);
  return finish_frame(writer);
}

Bytes encode_respond(const std::vector<Response>& responses) {
  Writer writer = begin_frame(FrameType::kRespond);
  Writer list;
  std::uint32_t count = 0;
  std::uint32_t generation = 0;
  const std::vector<int>* left_out = nullptr;  // It is null where nobody is left out.
  for (const Response& response : responses) {
    const bool collective =
        response.form == Response::Form::kCached || response.form == Response::Form::kFull;
    if (collective && response.generation != generation) {
      put_absent(list, response);
      generation = response.generation;
      ++count;
    }
    if (left_out == nullptr ? !response.left_out.empty() : response.left_out != *left_out) {
      put_left_out(list, response);
      left_out = &response.left_out;
      ++count;
    }
    put_response(list, response);
    ++count;
  }
  writer.put(count);
  writer.put_all(list.take());
  return finish_frame(writer);
}

Bytes encode_abort(const Status& cause) {
  Writer writer = begin_frame(FrameType::kAbort);
  put_status(writer, cause);
  writer.put_text(cause.message());
  return finish_frame(writer);
}

Bytes encode_goodbye(std::uint64_t collectives) {
  Writer writer = begin_frame(FrameType::kGoodbye);
  writer.put(collectives);
  return finish_frame(writer);
}

Bytes encode_report(const Bytes& body) {
  Writer writer = begin_frame(FrameType::kReport);
  writer.put_all(body);
  return finish_frame(writer);
}

bool decode_submit(std::span<const std::byte> body, Submit& submit) {
  Reader reader(body);
  submit.stamps.first = reader.get<std::int64_t>();
  submit.stamps.last = reader.get<std::int64_t>();
  get_bits(reader, submit.cached);
  submit.requests.resize(reader.get_count(kMinRequestBytes));
  for (Request& request : submit.requests) {
    get_request(reader, request);
    if (reader.bad()) return false;
  }
  return complete(reader);
}

bool decode_respond(std::span<const std::byte> body, std::vector<Response>& responses) {
  Reader reader(body);
  Response last;  // those that it names absent or left out are so in the next responses, too
  for (std::uint32_t left = reader.get_count(1); left > 0; --left) {
    Response response;
    response.absent = last.absent;
    response.generation = last.generation;
    response.left_out = last.left_out;
    get_response(reader, response);
    if (reader.bad()) return false;
    if (response.form == Response::Form::kAbsent || response.form == Response::Form::kLeftOut) {
      last = std::move(response);
    } else {
      responses.push_back(std::move(response));
    }
  }
  return complete(reader);
}

bool decode_abort(std::span<const std::byte> body, Status& cause) {
  Reader reader(body);
  const Status status = get_status(reader);
  cause = Status(status.code(), reader.get_text(kMaxMessageBytes), status.failed_rank());
  return complete(reader);
}

bool decode_goodbye(std::span<const std::byte> body, std::uint64_t& collectives) {
  Reader reader(body);
  collectives = reader.get<std::uint64_t>();
  return complete(reader);
}

}  // namespace hvdlite
