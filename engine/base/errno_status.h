// What errno means to a caller who named a file.
#pragma once

#include <string>

#include "engine/base/status.h"

namespace ds4 {

// "cannot <action> <path>: <what errno says>", with the code that fits: kNotFound,
// kPermissionDenied, kResourceExhausted for a full disk, else kInternal.
Status ErrnoStatus(const std::string& action, const std::string& path, int error);

}  // namespace ds4
