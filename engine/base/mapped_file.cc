#include "engine/base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "engine/base/errno_status.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

// Maps the open descriptor; the mapping outlives the descriptor.
Result<std::span<const std::byte>> MapDescriptor(int fd, const std::string& path) {
  struct stat info = {};
  if (fstat(fd, &info) != 0) return ErrnoStatus("stat", path, errno);
  if (!S_ISREG(info.st_mode)) return InvalidArgumentError(StrCat(path, " is not a regular file"));
  if (info.st_size == 0) return std::span<const std::byte>();
  const size_t size = static_cast<size_t>(info.st_size);
  void* address = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return ErrnoStatus("map", path, errno);
  return std::span<const std::byte>(static_cast<const std::byte*>(address), size);
}

void Unmap(std::span<const std::byte> bytes) {
  if (!bytes.empty()) munmap(const_cast<std::byte*>(bytes.data()), bytes.size());
}

}  // namespace

Result<MappedFile> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a named pipe must not wait for a writer; it has no effect on regular files.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ErrnoStatus("open", path, errno);
  auto mapped = MapDescriptor(fd, path);
  close(fd);
  if (!mapped.ok()) return mapped.status();
  return MappedFile(*mapped);
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    Unmap(bytes_);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

MappedFile::~MappedFile() { Unmap(bytes_); }

void Prefetch(std::span<const std::byte> mapped) {
  if (mapped.empty()) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(mapped.data());
  const uintptr_t first_page = start / page * page;
  madvise(reinterpret_cast<void*>(first_page), mapped.size() + (start - first_page), MADV_WILLNEED);
}

}  // namespace ds4
