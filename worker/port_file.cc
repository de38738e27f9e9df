#include "worker/port_file.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <system_error>

#include "engine/base/strings.h"

namespace ds4 {

Status WritePortFile(const std::string& path, uint16_t control_port, uint16_t data_port) {
  // Beside the target, so that the rename stays on one file system.
  const std::string partial = StrCat(path, ".", getpid(), ".part");
  {
    std::ofstream file(partial, std::ios::trunc);
    file << control_port << ' ' << data_port << '\n';
    file.close();
    if (!file)
      return InvalidArgumentError(StrCat("--port-file ", path, ": cannot write ", partial));
  }
  std::error_code error;
  std::filesystem::rename(partial, path, error);
  if (!error) return OkStatus();
  std::error_code ignored;
  std::filesystem::remove(partial, ignored);
  return InvalidArgumentError(StrCat("--port-file ", path, ": ", error.message()));
}

}  // namespace ds4
