#include "engine/base/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "engine/base/errno_status.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;

}  // namespace

Result<OutputFile> OutputFile::Create(const std::string& path) {
  const std::string temporary = StrCat(path, ".partial.", getpid());
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus("create", temporary, errno);
  return OutputFile(path, temporary, fd);
}

OutputFile::OutputFile(std::string path, std::string temporary, int fd)
    : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {
  buffer_.reserve(kBufferBytes);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)),
      bytes_written_(other.bytes_written_),
      buffer_(std::move(other.buffer_)) {}

OutputFile::~OutputFile() {
  if (fd_ >= 0) close(fd_);
  if (!temporary_.empty()) std::remove(temporary_.c_str());
}

Status OutputFile::Write(std::span<const std::byte> bytes) {
  CHECK(fd_ >= 0) << "write to " << path_ << " after Commit";
  bytes_written_ += static_cast<int64_t>(bytes.size());
  while (!bytes.empty()) {
    const size_t count = std::min(bytes.size(), kBufferBytes - buffer_.size());
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(count));
    bytes = bytes.subspan(count);
    if (buffer_.size() == kBufferBytes) RETURN_IF_ERROR(Flush());
  }
  return OkStatus();
}

Status OutputFile::Flush() {
  size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t count = write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrnoStatus("write", temporary_, errno);
    done += static_cast<size_t>(count);
  }
  buffer_.clear();
  return OkStatus();
}

Status OutputFile::Commit() {
  RETURN_IF_ERROR(Flush());
  if (fsync(fd_) != 0) return ErrnoStatus("flush", temporary_, errno);
  if (close(std::exchange(fd_, -1)) != 0) return ErrnoStatus("close", temporary_, errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return ErrnoStatus(StrCat("rename ", temporary_, " to"), path_, errno);
  }
  temporary_.clear();
  return OkStatus();
}

}  // namespace ds4
