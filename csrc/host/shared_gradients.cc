#include "host/shared_gradients.h"

namespace hvdlite {
namespace {

std::uint64_t number_of(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

// Nothing is staged, so chunks need not fit into a cache: longer ones than staging has save waits.
constexpr std::uint64_t kLonger = 16;

// FNV-1a over 64-bit numbers.
constexpr std::uint64_t kCheckBegin = 0xcbf29ce484222325;
std::uint64_t mix(std::uint64_t check, std::uint64_t number) {
  return (check ^ number) * 0x100000001b3;
}

}  // namespace

Staging::Place SharedGradients::place_of(const AllreduceBatch& batch) const {
  const HostLayout& layout = batch.layout;
  if (layout.spans_hosts() || batch.types.cast() || batch.pieces.prescaled()) return {};
  const std::span<std::byte> area =
      plane_.staging().gradients_of(layout.locals, layout.locals.index);
  const std::uint64_t from = number_of(area.data());
  Staging::Place place{0, kCheckBegin};
  bool inside = true;
  bool first = true;
  batch.pieces.for_each(
      {0, batch.pieces.elements()}, [&](const Piece&, const std::byte* input, std::byte* output,
                                        std::uint64_t, std::uint64_t count) {
        const std::uint64_t begin = number_of(output) - from;  // huge where it lies before the area
        inside = inside && input == output && begin < area.size() &&
                 count * batch.element_bytes <= area.size() - begin;
        if (first) place.begin = begin;
        first = false;
        place.check = mix(place.check, begin - place.begin);
      });
  return inside ? place : Staging::Place();
}

void SharedGradients::show(const AllreduceBatch& batch, const Staging::Step& step) {
  plane_.staging().show(step, place_of(batch));
}

bool SharedGradients::found(const AllreduceBatch& batch, const Staging::Step& step) {
  const Staging& staging = plane_.staging();
  const Staging::Locals& locals = batch.layout.locals;
  const auto begin_of = [&](int local, Staging::Place place) {
    return number_of(staging.gradients_of(locals, local).data()) + place.begin;
  };
  const Staging::Place own = staging.place_of(step, locals.index);
  members_.clear();
  for (int local = 0; local < static_cast<int>(locals.group.ranks.size()); ++local) {
    const Staging::Place place = staging.place_of(step, local);
    if (place.begin == Staging::Place::kNowhere || place.check != own.check) return false;
    members_.push_back(
        static_cast<std::ptrdiff_t>(begin_of(local, place) - begin_of(locals.index, own)));
  }
  return true;
}

Status SharedGradients::reduce(const AllreduceBatch& batch, Range elements) {
  const HostLayout& layout = batch.layout;
  Staging& staging = plane_.staging();
  plane_.count_unstaged(elements.count() * batch.element_bytes);
  const std::uint64_t per_chunk = kLonger * plane_.chunk_bytes(layout) / batch.element_bytes;
  const auto chunk = [&](std::uint64_t k) -> Range {
    const Range behind = chunk_at(elements.count(), per_chunk, k);
    return {elements.begin + behind.begin, elements.begin + behind.end};
  };
  const auto slice = [&](std::uint64_t k, int driver) {
    return batch.part(chunk(k), layout.drivers, driver);
  };
  Staging::Step step;
  const auto publish = [&](const Staging::Step& begun, std::uint64_t k) -> Status {
    batch.save_inputs(chunk(k));
    batch.finish_in_place(slice(k, layout.locals.index), members_);
    staging.reduced(begun);
    return Status();
  };
  const auto take = [&](const Staging::Step& reduced, std::uint64_t k) -> Status {
    HVDLITE_RETURN_IF_ERROR(staging.await_reduced(reduced, layout.drivers));
    for (int driver = 0; driver < layout.drivers; ++driver) {
      if (driver != layout.locals.index) batch.copy_from(slice(k, driver), members_[driver]);
    }
    staging.done(reduced);
    step = reduced;
    return Status();
  };
  const std::uint64_t steps = chunk_count(elements.count(), per_chunk);
  HVDLITE_RETURN_IF_ERROR(
      plane_.pipeline(layout, batch.patience, kAllreduce, steps, publish, take));
  return staging.await_done(step);
}

}  // namespace hvdlite
