#include "gpu/device_adasum.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace hvdlite {
namespace {

// The type that vectors are combined in.
DataType work_type(DataType dtype) {
  return dtype == DataType::kFloat64 ? DataType::kFloat64 : DataType::kFloat32;
}

std::span<std::byte> bytes_at(CudaPointer address, std::uint64_t bytes) {
  return {static_cast<std::byte*>(pointer(address)), bytes};
}

// Plain bytes, because it travels.
struct Answer {
  StatusCode code = StatusCode::kOk;
  char reason[256] = {};
};

}  // namespace

Status DeviceAdasum::prepare(Backend& host, const Group& group, int index, DataType dtype,
                             std::span<const std::uint64_t> counts, Patience patience) {
  std::uint64_t beside = 0;
  for (const AdasumRound& round : lay_out(dtype, counts, group.ranks.size())) {
    if (round.bytes > room_) beside = std::max(beside, round.bytes);
  }
  if (prepared_ && beside <= agreed_) return Status();
  HVDLITE_RETURN_IF_ERROR(agree(host, group, index, workspace_.reserve_adasum(beside), patience));
  prepared_ = true;
  agreed_ = std::max(agreed_, beside);
  return Status();
}

Status DeviceAdasum::agree(Backend& host, const Group& group, int index, const Status& own,
                           Patience patience) {
  std::vector<Answer> answers(group.ranks.size());
  Answer& mine = answers[static_cast<std::size_t>(index)];
  mine.code = own.code();
  std::strncpy(mine.reason, own.message().c_str(), sizeof(mine.reason) - 1);
  const Answer given = mine;
  const std::vector<std::size_t> bytes(answers.size(), sizeof(Answer));
  HVDLITE_RETURN_IF_ERROR(host.allgather({group, std::as_bytes(std::span(&given, 1)), bytes,
                                          std::as_writable_bytes(std::span(answers))},
                                         patience));
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (answers[i].code == StatusCode::kOk) continue;
    const bool memory = answers[i].code == StatusCode::kOutOfMemory;
    const std::string rank = std::to_string(group.ranks[i]);
    const std::string what = memory ? "no memory for Adasum on rank " : "no Adasum on rank ";
    return Status(memory ? StatusCode::kOutOfMemory : StatusCode::kInvalidArgument,
                  what + rank + " (" + answers[i].reason + ")" +
                      (memory ? "; send smaller tensors, or let the framework take less" : ""),
                  group.ranks[i]);
  }
  return Status();
}

std::vector<AdasumRound> DeviceAdasum::lay_out(DataType dtype,
                                               std::span<const std::uint64_t> counts,
                                               std::uint64_t members) const {
  return lay_out_adasum(counts, size_of(dtype), members, room_);
}

Status DeviceAdasum::run(DeviceBackend& plane, const Group& group, int index, DataType dtype,
                         std::span<const Piece> pieces, const std::uint32_t* nonfinite,
                         Patience patience) {
  std::vector<std::uint64_t> counts;
  for (const Piece& piece : pieces) counts.push_back(piece.count);
  const std::uint64_t members = group.ranks.size();
  for (const AdasumRound& round : lay_out(dtype, counts, members)) {
    if (round.elements == 0) continue;
    Work work = set_up(round, dtype, members, index);
    work.nonfinite = nonfinite;
    HVDLITE_RETURN_IF_ERROR(run_round(plane, group, round, work,
                                      pieces.subspan(round.first, round.counts.size()), patience));
  }
  return Status();
}

DeviceAdasum::Work DeviceAdasum::set_up(const AdasumRound& round, DataType dtype,
                                        std::uint64_t members, int index) const {
  const bool fits = round.bytes <= room_;
  const CudaPointer scratch =
      fits ? workspace_.fusion.address() : workspace_.adasum_scratch.address();
  const Range part =
      part_of({0, round.elements}, size_of(dtype), members, static_cast<std::uint64_t>(index));
  AdasumArgs table{};
  table.partials = scratch + round.partials;
  table.dots = scratch + round.dots;
  table.tensors = static_cast<unsigned>(round.counts.size());
  const AdasumArgs empty = table;
  Work work{dtype, members, part, scratch, scratch + round.received, table.dots, {}, nullptr};
  for (std::size_t i = 0; i < round.counts.size(); ++i) {
    const std::uint64_t begin = std::max(round.begins[i], part.begin);
    const std::uint64_t end = std::min(round.begins[i] + round.counts[i], part.end);
    if (begin >= end) continue;
    const AdasumSegment segment{begin - part.begin, end - begin, i};
    if (add(table, segment)) continue;
    work.tables.push_back(table);
    table = empty;
    (void)add(table, segment);
  }
  if (table.count > 0) work.tables.push_back(table);
  return work;
}

Status DeviceAdasum::run_round(DeviceBackend& plane, const Group& group, const AdasumRound& round,
                               const Work& work, std::span<const Piece> pieces, Patience patience) {
  const std::uint64_t element_bytes = size_of(work.dtype);
  const std::uint64_t part_bytes = work.part.count() * element_bytes;
  std::vector<std::size_t> bytes;
  for (std::uint64_t i = 0; i < work.members; ++i) {
    const Range part = part_of({0, round.elements}, element_bytes, work.members, i);
    bytes.push_back(part.count() * element_bytes);
  }
  const std::span<std::byte> whole = bytes_at(work.run, round.elements * element_bytes);
  HVDLITE_RETURN_IF_ERROR(pack(round, work, pieces));
  HVDLITE_RETURN_IF_ERROR(
      plane.alltoall({group, whole, bytes, bytes_at(work.received, work.members * part_bytes),
                      std::vector<std::size_t>(work.members, part_bytes)},
                     patience));
  HVDLITE_RETURN_IF_ERROR(combine(plane, group, work, round.counts.size(), patience));
  HVDLITE_RETURN_IF_ERROR(
      plane.allgather({group, bytes_at(work.received, part_bytes), bytes, whole}, patience));
  return unpack(round, work, pieces);
}

Status DeviceAdasum::pack(const AdasumRound& round, const Work& work,
                          std::span<const Piece> pieces) {
  const CudaDevice::Current current(device());
  segments_.clear();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const CudaPointer place = work.run + round.begins[i] * size_of(work.dtype);
    if (pieces[i].input != nullptr) {
      segments_.push_back({address(pieces[i].input), place, pieces[i].count, pieces[i].prescale});
    } else if (pieces[i].count > 0) {
      HVDLITE_RETURN_IF_ERROR(device().check(
          device().api().fill(place, 0, pieces[i].count * size_of(work.dtype), device().stream()),
          "filling memory"));
    }
  }
  return workspace_.copies->enqueue(work.dtype, work.dtype, segments_, work.nonfinite);
}

Status DeviceAdasum::unpack(const AdasumRound& round, const Work& work,
                            std::span<const Piece> pieces) {
  segments_.clear();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const CudaPointer place = work.run + round.begins[i] * size_of(work.dtype);
    segments_.push_back({place, address(pieces[i].output), pieces[i].count, pieces[i].postscale});
  }
  return workspace_.copies->enqueue(work.dtype, work.dtype, segments_);
}

Status DeviceAdasum::combine(DeviceBackend& plane, const Group& group, Work work,
                             std::uint64_t tensors, Patience patience) {
  const DataType wide = work_type(work.dtype);
  const std::uint64_t count = work.part.count();
  // What was sent has gone: its place serves the wider vectors until the results come.
  const CudaPointer vectors = size_of(wide) == size_of(work.dtype) ? work.received : work.run;
  const CopySegment widened{work.received, vectors, work.members * count, 1.0};
  if (vectors != work.received) {
    HVDLITE_RETURN_IF_ERROR(workspace_.copies->enqueue(work.dtype, wide, {&widened, 1}));
  }
  std::uint64_t stride = count;
  for (std::uint64_t left = work.members; left > 1; left = (left + 1) / 2) {
    for (AdasumArgs& table : work.tables) {
      table.vectors = vectors;
      table.stride = stride;
      table.pairs = static_cast<unsigned>(left / 2);
    }
    HVDLITE_RETURN_IF_ERROR(combine_pairs(plane, group, work, tensors * (left / 2), patience));
    stride *= 2;  // the first of each pair goes on, and the odd one out
  }
  if (vectors == work.received) return Status();
  const CopySegment narrowed{vectors, work.received, count, 1.0};
  return workspace_.copies->enqueue(wide, work.dtype, {&narrowed, 1});
}

Status DeviceAdasum::combine_pairs(DeviceBackend& plane, const Group& group, Work& work,
                                   std::uint64_t dots, Patience patience) {
  const bool wide = work.dtype == DataType::kFloat64;
  {
    const CudaDevice::Current current(device());
    HVDLITE_RETURN_IF_ERROR(device().check(
        device().api().fill(work.dots, 0, dots * adasum_layout::kDotsBytes, device().stream()),
        "filling memory"));
  }
  for (AdasumArgs& table : work.tables) {
    const std::uint64_t tiles = std::uint64_t{table.pairs} * table.first_tile[table.count];
    HVDLITE_RETURN_IF_ERROR(
        launch(wide ? "hvdlite_adasum_dots_f64" : "hvdlite_adasum_dots_f32", table, tiles));
    const std::uint64_t sums = std::uint64_t{table.pairs} * table.count;
    HVDLITE_RETURN_IF_ERROR(launch("hvdlite_adasum_sum", table, sums));
  }
  void* const place = pointer(work.dots);
  const Piece sums{place, place, 3 * dots, 1.0, 1.0};
  HVDLITE_RETURN_IF_ERROR(
      plane.allreduce({group, DataType::kFloat64, ReduceOp::kSum, {&sums, 1}}, patience));
  for (AdasumArgs& table : work.tables) {
    const std::uint64_t tiles = std::uint64_t{table.pairs} * table.first_tile[table.count];
    HVDLITE_RETURN_IF_ERROR(
        launch(wide ? "hvdlite_adasum_combine_f64" : "hvdlite_adasum_combine_f32", table, tiles));
  }
  return Status();
}

Status DeviceAdasum::launch(const char* kernel, AdasumArgs& table, std::uint64_t items) {
  return workspace_.adasum->launch(kernel, launch_blocks(items, device().processors()), &table);
}

}  // namespace hvdlite
