// Which optional features the engine has: each has one line in features.cc.
#pragma once

#include <memory>
#include <vector>

#include "engine/parts.h"
#include "negotiation/coordinator.h"
#include "negotiation/extension.h"

namespace hvdlite {

// On rank 0: makes the extensions of the coordinator, and adds them. Both must outlive it.
std::vector<std::unique_ptr<Extension>> add_features(Coordinator& coordinator, EngineParts& parts);
// On every rank: makes the extensions of an engine, before its world begins. `settled`: an earlier
// world of the job has found settings, which hold in this one.
void add_features(EngineParts& parts, bool settled);

}  // namespace hvdlite
