#include "base/status.h"

#include <system_error>

namespace hvdlite {

Status system_error(const std::string& what, int error) {
  return Status(StatusCode::kInternal, what + ": " + std::generic_category().message(error));
}

}  // namespace hvdlite
