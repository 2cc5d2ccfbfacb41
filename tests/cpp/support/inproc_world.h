// A world inside one process, for tests: its ranks are threads. Not part of the shipped library.
#pragma once

#include <memory>
#include <vector>

#include "transport/fabric.h"

namespace hvdlite {

// Makes a segment and maps it, for threads as ranks.
Result<std::shared_ptr<Segment>> make_segment(const SegmentLayout& layout);

// Makes one fabric for each of `host_of.size()` ranks. Ranks with the same number in it share
// segments as processes do; in-process channels connect all of them, those for control messages
// only along the tree if there is one. The fabrics may be destroyed in any order.
Result<std::vector<std::unique_ptr<Fabric>>> make_inproc_world(const std::vector<int>& host_of,
                                                               const Config& config,
                                                               bool control_tree = false);

}  // namespace hvdlite
