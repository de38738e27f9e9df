#include "engine/base/errno_status.h"

#include <cerrno>
#include <cstring>

#include "engine/base/strings.h"

namespace ds4 {

Status ErrnoStatus(const std::string& action, const std::string& path, int error) {
  const std::string message = StrCat("cannot ", action, " ", path, ": ", std::strerror(error));
  if (error == ENOENT) return NotFoundError(message);
  if (error == EACCES || error == EPERM) return Status(StatusCode::kPermissionDenied, message);
  if (error == ENOSPC) return ResourceExhaustedError(message);
  return InternalError(message);
}

}  // namespace ds4
