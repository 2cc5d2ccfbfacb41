#include <algorithm>
#include <random>

#include "check.h"
#include "negotiation/deadlock_watch.h"
#include "wire/message.h"

using namespace hvdlite;

namespace {

std::span<const std::byte> body_of(const Bytes& frame) { return std::span(frame).subspan(5); }

Request sample_request() {
  Request request;
  request.op = ReduceOp::kAverage;
  request.process_set = 3;
  request.postscale = 0.5;
  request.name = "group";
  request.tensors = {{"layer.weight", DataType::kFloat16, {2, 3}},
                     {"layer.bias", DataType::kInt64, {}},
                     {"narrow", DataType::kFloat32, {4}, DeviceType::kGpu, DataType::kFloat16}};
  return request;
}

}  // namespace

TEST(wire_submit_survives_a_round_trip_and_is_refused_where_it_is_cut) {
  Submit submit;
  submit.stamps.add(1'000'000'007);
  submit.stamps.add(1'000'000'100);
  submit.stamps.add(1'000'000'200);
  submit.cached = {3, 70, 200};
  submit.requests = {sample_request(), sample_request()};
  submit.requests[0].transaction = "step";
  submit.requests[1].kind = Kind::kAlltoall;
  submit.requests[1].splits = {3, 0, -1};  // judged by the coordinator, not by the decoder
  Submit read;
  const Bytes frame = encode_submit(submit);
  CHECK(decode_submit(body_of(frame), read));
  CHECK(read.stamps == Stamps{1'000'000'007, 1'000'000'200});
  CHECK(read.cached == submit.cached);
  CHECK(read.requests == submit.requests);
  submit.stamps = {INT64_MIN, INT64_MAX};  // judged by rank 0, not by the decoder
  const Bytes stamped = encode_submit(submit);
  CHECK(decode_submit(body_of(stamped), read));
  CHECK(read.stamps == submit.stamps);
  const auto body = body_of(frame);
  for (std::size_t bytes = 0; bytes < body.size(); ++bytes) {
    Submit cut;
    CHECK(!decode_submit(body.first(bytes), cut));
  }
}

TEST(wire_respond_survives_a_round_trip) {
  std::vector<Response> responses(5);
  responses[0].cache_id = 17;
  responses[1].form = Response::Form::kFull;
  responses[1].request = sample_request();
  responses[1].first_dimensions = {4, 0, 9};
  responses[2].form = Response::Form::kError;
  responses[2].request.name = "bad";
  responses[2].error = Status(StatusCode::kMismatch, "they differ", 2);
  responses[3].form = Response::Form::kTune;
  responses[3].tunables = {1, 2, 3, 4};
  responses[3].settled = true;
  responses[4].form = Response::Form::kCut;
  std::vector<Response> read;
  const Bytes frame = encode_respond(responses);
  CHECK(decode_respond(body_of(frame), read));
  CHECK_EQ(read.size(), std::size_t{5});
  CHECK(read[4].form == Response::Form::kCut);
  CHECK(read[3].tunables == responses[3].tunables);
  CHECK(read[3].settled);
  CHECK_EQ(read[0].cache_id, 17u);
  CHECK(read[1].request == responses[1].request);
  CHECK(read[1].first_dimensions == responses[1].first_dimensions);
  CHECK_EQ(read[2].error.message(), std::string("they differ"));
  CHECK_EQ(read[2].error.failed_rank(), 2);
}

TEST(wire_refuses_a_set_that_no_number_of_a_set_can_be) {
  Response response;
  response.form = Response::Form::kFull;
  response.request.kind = Kind::kAddProcessSet;
  response.request.ranks = {0, 2};
  for (const std::int64_t number : {std::int64_t{INT32_MAX}, std::int64_t{INT32_MAX} + 1}) {
    response.first_dimensions = {number};
    std::vector<Response> read;
    const Bytes frame = encode_respond({response});
    CHECK_EQ(decode_respond(body_of(frame), read), number <= INT32_MAX);
  }
}

TEST(wire_random_bytes_never_crash_a_decoder) {
  std::mt19937 random(7);
  for (int round = 0; round < 20000; ++round) {
    Bytes bytes(random() % 80);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 6 == 0 ? random() : 0);
    Submit submit;
    std::vector<Response> responses;
    Status cause;
    std::uint64_t collectives = 0;
    (void)decode_submit(bytes, submit);
    (void)decode_respond(bytes, responses);
    (void)decode_abort(bytes, cause);
    Blocked blocked;
    (void)decode(bytes, blocked);
    CHECK_EQ(decode_goodbye(bytes, collectives), bytes.size() == 8);
  }
}

TEST(wire_huge_counts_are_refused_before_anything_is_allocated) {
  Writer writer;
  writer.put(std::uint32_t{0});
  writer.put(std::uint32_t{0});
  writer.put(UINT32_MAX);
  Submit submit;
  CHECK(!decode_submit(writer.take(), submit));
  CHECK(submit.requests.empty());
}

TEST(wire_mismatch_names_tensor_ranks_and_values) {
  const Request a = sample_request();
  Request b = a;
  CHECK(!describe_mismatch(0, a, 1, b).has_value());
  b.tensors[0].dims = {3, 2};
  CHECK_EQ(describe_mismatch(0, a, 5, b).value(),
           std::string("allreduce 'layer.weight': ranks disagree about the shape: rank 0 has "
                       "[2, 3], rank 5 has [3, 2]"));
  b = a;
  b.tensors[1].dtype = DataType::kFloat64;
  CHECK(describe_mismatch(0, a, 5, b).value().find("dtype") != std::string::npos);
  b = a;
  b.tensors[2].wire = DataType::kBfloat16;
  CHECK_EQ(describe_mismatch(0, a, 5, b).value(),
           std::string("allreduce 'narrow': ranks disagree about the wire dtype: rank 0 has "
                       "float16, rank 5 has bfloat16"));
}

TEST(wire_mismatch_is_told_of_every_field_of_a_request) {
  const Request a = sample_request();
  const std::vector<std::pair<std::string, void (*)(Request&)>> changes = {
      {"operation", [](Request& b) { b.kind = Kind::kBroadcast; }},
      {"reduce op", [](Request& b) { b.op = ReduceOp::kSum; }},
      {"root rank", [](Request& b) { b.root = 1; }},
      {"weight", [](Request& b) { b.weighted = true; }},
      {"prescale factor", [](Request& b) { b.prescale = 3; }},
      {"postscale factor", [](Request& b) { b.postscale = 3; }},
      {"number of tensors", [](Request& b) { b.tensors.pop_back(); }},
  };
  for (const auto& [field, change] : changes) {
    Request b = a;
    change(b);
    const std::string text = describe_mismatch(0, a, 5, b).value_or("");
    CHECK(text.find("ranks disagree about the " + field + ": rank 0 has ") != std::string::npos);
  }
}

TEST(wire_mismatch_is_told_of_rows_where_all_ranks_give_as_many) {
  for (const Kind kind : {Kind::kAllreduce, Kind::kReducescatter, Kind::kBroadcast, Kind::kSend,
                          Kind::kAllgather, Kind::kAlltoall}) {
    Request a = sample_request();
    a.kind = kind;
    Request b = a;
    b.tensors[0].dims[0] += 1;
    const bool may_differ = kind == Kind::kAllgather || kind == Kind::kAlltoall;
    CHECK_EQ(describe_mismatch(0, a, 1, b).has_value(), !may_differ);
    b.tensors[0].dims = {2, 4};
    CHECK(describe_mismatch(0, a, 1, b).has_value());
  }
}

TEST(wire_length_arithmetic_goes_beyond_32_bits) {
  TensorShape tensor{"huge", DataType::kFloat64, {3, std::int64_t{1} << 31}};
  CHECK_EQ(tensor.count(), std::uint64_t{3} << 31);
  CHECK_EQ(tensor.bytes(), std::uint64_t{3} << 34);
}

TEST(wire_transactions_of_two_ranks_are_compared) {
  Request a = sample_request();
  Request b = a;
  b.transaction = "step";
  const auto text = describe_mismatch(0, a, 1, b);
  CHECK(text && text->find("transaction") != std::string::npos);
  a.transaction = "step";
  CHECK(!describe_mismatch(0, a, 1, b));
  // A commit has no tensors; what it commits makes it another one.
  a.kind = b.kind = Kind::kCommit;
  a.tensors.clear();
  b.tensors.clear();
  b.transaction = "other";
  CHECK(describe_mismatch(0, a, 1, b).has_value());
}
