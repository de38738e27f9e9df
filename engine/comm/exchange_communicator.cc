#include "engine/comm/exchange_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/strings.h"

namespace ds4 {

std::unique_ptr<Communicator> MakeExchangeCommunicator(std::unique_ptr<Transport> transport,
                                                       LaneLayout layout) {
  return std::make_unique<ExchangeCommunicator>(std::move(transport), std::move(layout));
}

ExchangeCommunicator::ExchangeCommunicator(std::unique_ptr<Transport> transport, LaneLayout layout)
    : transport_(std::move(transport)), layout_(std::move(layout)) {
  CHECK(layout_.world_size() == transport_->world_size())
      << "layout has " << layout_.world_size() << " ranks, transport " << transport_->world_size();
  CHECK(layout_.Validate().ok()) << layout_.Validate().ToString();
  first_root_.push_back(0);
  for (int r = 0; r < world_size(); ++r) {
    const auto num_roots =
        static_cast<int64_t>(SubtreesOf(layout_.begin[r], layout_.begin[r + 1]).size());
    first_root_.push_back(first_root_.back() + num_roots);
    max_roots_ = std::max(max_roots_, num_roots);
  }
  sends_.reserve(world_size());
  recvs_.reserve(world_size());
}

bool ExchangeCommunicator::UsesFullExchange(int64_t count) const {
  // The same on every rank, although their messages differ: so by the largest.
  const int64_t limit = world_size() == 2 ? kFullExchangeBytesOfTwo : kFullExchangeBytes;
  return max_roots_ * count * static_cast<int64_t>(sizeof(float)) <= limit;
}

Status ExchangeCommunicator::AllReduceLanes(std::span<const float> roots, std::span<float> out) {
  const auto count = static_cast<int64_t>(out.size());
  const int64_t own_roots = first_root_[rank() + 1] - first_root_[rank()];
  CHECK(static_cast<int64_t>(roots.size()) == own_roots * count)
      << roots.size() << " floats for " << own_roots << " roots of " << count;
  RETURN_IF_ERROR(Begin());
  if (world_size() == 1) {
    RETURN_IF_ERROR(Exchange());  // nothing to send, but an Abort must be seen
    AddReceived(roots, count, 0, count, out.data());
    return OkStatus();
  }
  if (UsesFullExchange(count)) {
    QueueAllRoots(roots, count);
    RETURN_IF_ERROR(Exchange());
    AddReceived(roots, count, 0, count, out.data());
    return OkStatus();
  }
  QueueChunks(roots, count);
  RETURN_IF_ERROR(Exchange());
  const int64_t first = ChunkBegin(rank(), count);
  AddReceived(roots, count, first, ChunkSize(rank(), count), out.data() + first);
  return GatherChunks(out);
}

void ExchangeCommunicator::QueueAllRoots(std::span<const float> roots, int64_t count) {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) sends_.push_back({peer, std::as_bytes(roots)});
  }
  QueueReceivedRoots(count);
}

// To each peer its columns of all own roots; more than one root has to be packed together.
void ExchangeCommunicator::QueueChunks(std::span<const float> roots, int64_t count) {
  const int64_t own_roots = first_root_[rank() + 1] - first_root_[rank()];
  packed_.resize(std::max(packed_.size(), own_roots > 1 ? roots.size() : size_t{0}));
  float* packed = packed_.data();
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    const int64_t first = ChunkBegin(peer, count);
    const int64_t n = ChunkSize(peer, count);
    if (own_roots == 1) {
      sends_.push_back({peer, std::as_bytes(roots.subspan(first, n))});
      continue;
    }
    for (int64_t root = 0; root < own_roots; ++root) {
      std::memcpy(packed + root * n, roots.data() + root * count + first, n * sizeof(float));
    }
    sends_.push_back({peer, std::as_bytes(std::span<const float>(packed, own_roots * n))});
    packed += own_roots * n;
  }
  QueueReceivedRoots(ChunkSize(rank(), count));
}

void ExchangeCommunicator::QueueReceivedRoots(int64_t n) {
  const auto needed = static_cast<size_t>(first_root_.back() * n);
  if (received_.size() < needed) received_.resize(needed);
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    const int64_t num_roots = first_root_[peer + 1] - first_root_[peer];
    const std::span<float> block(received_.data() + first_root_[peer] * n, num_roots * n);
    recvs_.push_back({peer, std::as_writable_bytes(block)});
  }
}

void ExchangeCommunicator::AddReceived(std::span<const float> roots, int64_t count, int64_t first,
                                       int64_t n, float* out) {
  root_ptrs_.clear();
  for (int64_t root = 0; root < first_root_.back(); ++root) {
    const bool is_own = root >= first_root_[rank()] && root < first_root_[rank() + 1];
    root_ptrs_.push_back(is_own ? roots.data() + (root - first_root_[rank()]) * count + first
                                : received_.data() + root * n);
  }
  AddRoots(layout_, root_ptrs_, n, out);
}

Status ExchangeCommunicator::GatherChunks(std::span<float> out) {
  const auto count = static_cast<int64_t>(out.size());
  const auto chunk = [&](int r) { return out.subspan(ChunkBegin(r, count), ChunkSize(r, count)); };
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    sends_.push_back({peer, std::as_bytes(chunk(rank()))});
    recvs_.push_back({peer, std::as_writable_bytes(chunk(peer))});
  }
  return Exchange();
}

Status ExchangeCommunicator::AllGather(std::span<const std::byte> mine, std::span<std::byte> all) {
  CHECK(all.size() == mine.size() * world_size())
      << all.size() << " bytes for " << world_size() << " blocks of " << mine.size();
  RETURN_IF_ERROR(Begin());
  for (int peer = 0; peer < world_size(); ++peer) {
    const std::span<std::byte> block = all.subspan(peer * mine.size(), mine.size());
    if (peer != rank()) {
      sends_.push_back({peer, mine});
      recvs_.push_back({peer, block});
    } else if (!mine.empty() && block.data() != mine.data()) {
      std::memcpy(block.data(), mine.data(), mine.size());
    }
  }
  return Exchange();
}

Status ExchangeCommunicator::Broadcast(int root, std::span<std::byte> data) {
  CHECK(root >= 0 && root < world_size()) << "root " << root << " of " << world_size();
  RETURN_IF_ERROR(Begin());
  if (rank() != root) recvs_.push_back({root, data});
  for (int peer = 0; rank() == root && peer < world_size(); ++peer) {
    if (peer != root) sends_.push_back({peer, data});
  }
  return Exchange();
}

Status ExchangeCommunicator::Barrier() { return AllGather({}, {}); }

Status ExchangeCommunicator::Begin() {
  deadline_ = Clock::now() + timeout_;
  return broken_;
}

Status ExchangeCommunicator::Exchange() {
  const Clock::time_point start = Clock::now();
  const Status status = transport_->Exchange(++sequence_, sends_, recvs_, deadline_);
  waited_ += Clock::now() - start;
  sends_.clear();
  recvs_.clear();
  if (!status.ok()) broken_ = status.WithContext(Site());
  return broken_;
}

double ExchangeCommunicator::wait_seconds() const {
  return std::chrono::duration<double>(waited_).count();
}

void ExchangeCommunicator::set_site(int layer, const char* what) {
  site_layer_ = layer;
  site_what_ = what;
}

std::string ExchangeCommunicator::Site() const {
  std::string site = StrCat("rank ", rank());
  if (site_layer_ >= 0) site += StrCat(", layer ", site_layer_);
  if (*site_what_ != '\0') site += StrCat(", ", site_what_);
  return site;
}

}  // namespace ds4
