// The data path: all sends and receives of an exchange make progress together, so messages larger
// than the socket buffers cannot block each other. Set-up is in tcp_join.cc.
#include "engine/comm/tcp_transport.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <utility>

#include "engine/base/strings.h"
#include "engine/comm/exchange_errors.h"
#include "engine/comm/little_endian.h"
#include "engine/comm/socket.h"
#include "engine/comm/tcp_join.h"

namespace ds4 {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kFrameMagic = 0x46345344;    // "DS4F"
constexpr uint32_t kGoodbyeMagic = 0x42345344;  // "DS4B": the body is why the sender leaves
constexpr size_t kHeaderBytes = 24;
constexpr size_t kMaxGoodbyeBytes = 512;
using Header = std::array<std::byte, kHeaderBytes>;

Header MakeHeader(uint32_t magic, uint64_t sequence, uint64_t size) {
  Header header{};
  StoreLittleEndian(magic, header.data());
  StoreLittleEndian(sequence, header.data() + 8);
  StoreLittleEndian(size, header.data() + 16);
  return header;
}

struct Sending {
  int peer = 0;
  Header header{};
  std::span<const std::byte> body;
  size_t done = 0;  // bytes of header and body together

  bool is_done() const { return done == kHeaderBytes + body.size(); }
};

struct Receiving {
  int peer = 0;
  Header header{};
  std::span<std::byte> body;
  size_t done = 0;

  bool is_done() const { return done == kHeaderBytes + body.size(); }
};

class TcpTransport : public Transport {
 public:
  TcpTransport(const TcpGroup& group, std::vector<Socket> sockets)
      : rank_(group.rank),
        spin_(std::chrono::microseconds(group.spin_us)),
        sockets_(std::move(sockets)) {
    for (int peer = 0; peer < world_size(); ++peer) names_.push_back(TcpPeerName(group, peer));
  }

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(sockets_.size()); }
  std::string name() const override { return "tcp"; }
  std::string peer_name(int peer) const override { return names_[peer]; }

  Status Exchange(uint64_t sequence, std::span<const SendOp> sends, std::span<const RecvOp> recvs,
                  Clock::time_point deadline) override {
    if (is_broken_) return Reason();
    Start(sequence, sends, recvs);
    const Status status = Drive(sequence, deadline);
    if (status.ok()) return status;
    SayGoodbye(status);
    Abort(status);
    return Reason();  // of an Abort from elsewhere, when that came first
  }

  void Abort(Status why) override {
    {
      const std::lock_guard lock(mutex_);
      if (is_broken_) return;
      reason_ = std::move(why);
      is_broken_ = true;
    }
    // Wakes the rank thread from its poll, and tells the peers at once.
    for (Socket& socket : sockets_) socket.Shutdown();
  }

 private:
  void Start(uint64_t sequence, std::span<const SendOp> sends, std::span<const RecvOp> recvs) {
    sending_.clear();
    receiving_.clear();
    for (const SendOp& op : sends) {
      sending_.push_back({op.peer, MakeHeader(kFrameMagic, sequence, op.data.size()), op.data});
    }
    for (const RecvOp& op : recvs) receiving_.push_back({op.peer, {}, op.data});
  }

  Status Drive(uint64_t sequence, Clock::time_point deadline) {
    Clock::time_point last_progress = Clock::now();
    while (true) {
      bool moved = false;
      RETURN_IF_ERROR(Progress(sequence, &moved));
      if (IsDone()) return OkStatus();
      if (is_broken_) return Reason();
      const Clock::time_point now = Clock::now();
      if (now >= deadline) return NoProgressError(now - last_progress, PendingPeers());
      if (moved) last_progress = now;
      if (now - last_progress >= spin_) RETURN_IF_ERROR(Sleep(deadline - now));
    }
  }

  Status Progress(uint64_t sequence, bool* moved) {
    for (Sending& op : sending_) {
      if (!op.is_done()) RETURN_IF_ERROR(Continue(op, moved));
    }
    for (Receiving& op : receiving_) {
      if (!op.is_done()) RETURN_IF_ERROR(Continue(op, sequence, moved));
    }
    return OkStatus();
  }

  Status Continue(Sending& op, bool* moved) {
    const size_t of_header = std::min(op.done, kHeaderBytes);
    const auto sent = sockets_[op.peer].Send(std::span(op.header).subspan(of_header),
                                             op.body.subspan(op.done - of_header));
    if (!sent.ok()) return LostPeerError(names_[op.peer], sent.status().message());
    op.done += *sent;
    *moved |= *sent > 0;
    return OkStatus();
  }

  Status Continue(Receiving& op, uint64_t sequence, bool* moved) {
    if (op.done < kHeaderBytes) {
      RETURN_IF_ERROR(ReceiveInto(op, std::span(op.header).subspan(op.done), moved));
      if (op.done < kHeaderBytes) return OkStatus();
      RETURN_IF_ERROR(CheckHeader(op, sequence));
    }
    if (op.is_done()) return OkStatus();
    return ReceiveInto(op, op.body.subspan(op.done - kHeaderBytes), moved);
  }

  Status ReceiveInto(Receiving& op, std::span<std::byte> data, bool* moved) {
    const auto received = sockets_[op.peer].Receive(data);
    if (!received.ok()) return LostPeerError(names_[op.peer], received.status().message());
    op.done += *received;
    *moved |= *received > 0;
    return OkStatus();
  }

  // Tells every peer why, so that the first cause is in everyone's error; as far as that is
  // possible at once and not in the middle of a frame.
  void SayGoodbye(const Status& why) {
    const std::string text = why.message().substr(0, kMaxGoodbyeBytes);
    const Header header = MakeHeader(kGoodbyeMagic, 0, text.size());
    for (int peer = 0; peer < world_size(); ++peer) {
      const bool is_mid_frame = std::any_of(
          sending_.begin(), sending_.end(),
          [peer](const Sending& op) { return op.peer == peer && op.done > 0 && !op.is_done(); });
      if (!sockets_[peer].is_open() || is_mid_frame) continue;
      (void)sockets_[peer].Send(header, std::as_bytes(std::span(text)));
    }
  }

  // The peer's own words, from a frame whose header has been read; what has come of them by now.
  Status HearGoodbye(const Receiving& op) {
    std::array<char, kMaxGoodbyeBytes> text{};
    const auto announced = LoadLittleEndian<uint64_t>(op.header.data() + 16);
    const size_t room = std::min<uint64_t>(announced, text.size());
    size_t size = 0;
    if (room > 0) {
      const auto received =
          sockets_[op.peer].Receive(std::as_writable_bytes(std::span(text).first(room)));
      if (received.ok()) size = *received;
    }
    const auto is_control = [](char c) { return static_cast<unsigned char>(c) < ' '; };
    std::replace_if(text.begin(), text.end(), is_control, ' ');
    return LostPeerError(names_[op.peer],
                         StrCat("it left the group: ", std::string(text.data(), size)));
  }

  Status CheckHeader(const Receiving& op, uint64_t sequence) {
    const auto magic = LoadLittleEndian<uint32_t>(op.header.data());
    if (magic == kGoodbyeMagic) return HearGoodbye(op);
    if (magic != kFrameMagic) {
      return InternalError(StrCat("frame from ", names_[op.peer], " begins with ", magic,
                                  ", must be ", kFrameMagic, ": the stream is out of step"));
    }
    return CheckFrame(names_[op.peer], LoadLittleEndian<uint64_t>(op.header.data() + 8),
                      LoadLittleEndian<uint64_t>(op.header.data() + 16), sequence, op.body.size());
  }

  bool IsDone() const {
    const auto is_done = [](const auto& op) { return op.is_done(); };
    return std::all_of(sending_.begin(), sending_.end(), is_done) &&
           std::all_of(receiving_.begin(), receiving_.end(), is_done);
  }

  std::vector<std::string> PendingPeers() const {
    std::vector<bool> is_pending(world_size(), false);
    for (const Sending& op : sending_) is_pending[op.peer] = is_pending[op.peer] || !op.is_done();
    for (const Receiving& op : receiving_) {
      is_pending[op.peer] = is_pending[op.peer] || !op.is_done();
    }
    std::vector<std::string> pending;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (is_pending[peer]) pending.push_back(names_[peer]);
    }
    return pending;
  }

  // Until a pending socket can move, the group is aborted, or `limit` has passed.
  Status Sleep(Clock::duration limit) {
    polled_.clear();
    for (const Sending& op : sending_) {
      if (!op.is_done()) polled_.push_back({sockets_[op.peer].fd(), POLLOUT, 0});
    }
    for (const Receiving& op : receiving_) {
      if (!op.is_done()) polled_.push_back({sockets_[op.peer].fd(), POLLIN, 0});
    }
    const auto limit_ms = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
    const int timeout_ms = static_cast<int>(std::clamp<int64_t>(limit_ms, 0, 60'000));
    if (poll(polled_.data(), static_cast<nfds_t>(polled_.size()), timeout_ms) < 0 &&
        errno != EINTR) {
      return InternalError(StrCat("poll of ", polled_.size(), " sockets: errno ", errno));
    }
    return OkStatus();
  }

  Status Reason() {
    const std::lock_guard lock(mutex_);
    return reason_;
  }

  const int rank_;
  const Clock::duration spin_;
  std::vector<Socket> sockets_;  // by rank; our own is closed. Open until the end, so any thread
                                 // may shut them down.
  std::vector<std::string> names_;

  std::vector<Sending> sending_;
  std::vector<Receiving> receiving_;
  std::vector<pollfd> polled_;

  std::mutex mutex_;
  Status reason_;  // guarded by mutex_
  std::atomic<bool> is_broken_ = false;
};

}  // namespace

Result<std::unique_ptr<Transport>> ConnectTcpTransport(TcpListener& listener,
                                                       const TcpGroup& group) {
  ASSIGN_OR_RETURN(std::vector<Socket> sockets, JoinTcpGroup(listener, group));
  return std::unique_ptr<Transport>(std::make_unique<TcpTransport>(group, std::move(sockets)));
}

}  // namespace ds4
