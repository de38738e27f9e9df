// How ranks find each other: the higher rank of each pair dials the lower one, sends a hello of
// fixed size and gets one back. Everything runs on the caller's thread inside one io_context, as
// coroutines: one that accepts, one for each connection that has not said who it is, one for each
// rank to dial.
#include "engine/comm/tcp_join.h"

#include <algorithm>
#include <array>
#include <boost/asio.hpp>
#include <cstddef>
#include <set>
#include <string>
#include <utility>

#include "engine/base/strings.h"
#include "engine/comm/exchange_errors.h"
#include "engine/comm/little_endian.h"

namespace ds4 {

namespace asio = boost::asio;
using Tcp = asio::ip::tcp;
using std::chrono::milliseconds;
namespace {
using Clock = std::chrono::steady_clock;
}  // namespace

struct TcpListener::Impl {
  asio::io_context io;
  // Without it a loop with nothing to do would return instead of waiting.
  asio::executor_work_guard<asio::io_context::executor_type> work{io.get_executor()};
  Tcp::acceptor acceptor{io};
  uint16_t port = 0;
};

namespace {

constexpr uint32_t kCallMagic = 0x48345344;   // "DS4H"
constexpr uint32_t kReplyMagic = 0x52345344;  // "DS4R"
constexpr uint32_t kVersion = 1;
constexpr milliseconds kHelloTimeout{1000};  // for a caller to say who it is
constexpr int kMaxUnknownCallers = 64;       // at the same time
constexpr milliseconds kFirstPause{10};      // before a rank is dialled again
constexpr milliseconds kLongestPause{500};
constexpr milliseconds kStopCheck{20};

enum class Verdict : uint32_t {
  kAccepted,
  kOtherVersion,
  kOtherEpoch,
  kOtherWorldSize,
  kOtherRank
};

// magic, version u32; epoch u64; from, to, world_size i32; verdict u32 (0 in a call).
struct Hello {
  uint32_t magic = 0;
  uint32_t version = kVersion;
  uint64_t epoch = 0;
  int32_t from = 0;
  int32_t to = 0;
  int32_t world_size = 0;
  Verdict verdict = Verdict::kAccepted;
};
using HelloBytes = std::array<std::byte, 32>;

HelloBytes Encode(const Hello& hello) {
  HelloBytes bytes{};
  StoreLittleEndian(hello.magic, bytes.data());
  StoreLittleEndian(hello.version, bytes.data() + 4);
  StoreLittleEndian(hello.epoch, bytes.data() + 8);
  StoreLittleEndian(hello.from, bytes.data() + 16);
  StoreLittleEndian(hello.to, bytes.data() + 20);
  StoreLittleEndian(hello.world_size, bytes.data() + 24);
  StoreLittleEndian(static_cast<uint32_t>(hello.verdict), bytes.data() + 28);
  return bytes;
}

Hello Decode(const HelloBytes& bytes) {
  Hello hello;
  hello.magic = LoadLittleEndian<uint32_t>(bytes.data());
  hello.version = LoadLittleEndian<uint32_t>(bytes.data() + 4);
  hello.epoch = LoadLittleEndian<uint64_t>(bytes.data() + 8);
  hello.from = LoadLittleEndian<int32_t>(bytes.data() + 16);
  hello.to = LoadLittleEndian<int32_t>(bytes.data() + 20);
  hello.world_size = LoadLittleEndian<int32_t>(bytes.data() + 24);
  hello.verdict = static_cast<Verdict>(LoadLittleEndian<uint32_t>(bytes.data() + 28));
  return hello;
}

// One attempt to join one group. Coroutines share it: one of them may outlive the attempt by a slow
// name look-up, and then finds is_over_ set.
class Join : public std::enable_shared_from_this<Join> {
 public:
  Join(TcpListener::Impl& listener, const TcpGroup& group)
      : io_(listener.io),
        acceptor_(listener.acceptor),
        group_(group),
        world_size_(static_cast<int>(group.peers.size())),
        sockets_(group.peers.size()),
        why_missing_(group.peers.size(), "it has not called") {}

  Result<std::vector<Socket>> Run();

 private:
  using SocketPtr = std::shared_ptr<Tcp::socket>;
  using Task = asio::awaitable<void>;

  static Task AcceptCallers(std::shared_ptr<Join> self);
  static Task HearCaller(std::shared_ptr<Join> self, SocketPtr socket);
  static Task DialUntilConnected(std::shared_ptr<Join> self, int peer);
  static Task DialOnce(std::shared_ptr<Join> self, int peer);

  void Spawn(Task task) { asio::co_spawn(io_, std::move(task), asio::detached); }
  bool IsWaiting() const { return num_missing_ > 0 && fatal_.ok(); }
  void Loop();
  void Finish();
  void Take(int peer, Tcp::socket& socket);
  Verdict Judge(const Hello& call) const;
  Hello MakeHello(uint32_t magic, int to, Verdict verdict) const;
  void NoteRefusal(const Hello& call, Verdict verdict);
  bool AcceptReply(int peer, const Hello& reply);
  std::string Me() const {
    return StrCat("rank ", group_.rank, "/", world_size_, " epoch ", group_.epoch);
  }
  Status MissingError() const;

  asio::io_context& io_;
  Tcp::acceptor& acceptor_;
  const TcpGroup group_;
  const int world_size_;

  std::vector<Socket> sockets_;
  std::vector<std::string> why_missing_;
  int num_missing_ = 0;
  Status fatal_;  // no use in trying on
  bool is_over_ = false;
  std::set<SocketPtr> unfinished_;  // handshakes on their way
};

// Keeps a handshake's socket where Finish can close it.
class Unfinished {
 public:
  Unfinished(std::set<std::shared_ptr<Tcp::socket>>& all, std::shared_ptr<Tcp::socket> socket)
      : all_(all), socket_(std::move(socket)) {
    all_.insert(socket_);
  }
  ~Unfinished() { all_.erase(socket_); }
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;

 private:
  std::set<std::shared_ptr<Tcp::socket>>& all_;
  const std::shared_ptr<Tcp::socket> socket_;
};

Result<std::vector<Socket>> Join::Run() {
  num_missing_ = world_size_ - 1;
  if (group_.rank + 1 < world_size_) Spawn(AcceptCallers(shared_from_this()));
  for (int peer = 0; peer < group_.rank; ++peer) {
    Spawn(DialUntilConnected(shared_from_this(), peer));
  }
  Loop();
  Finish();
  if (!fatal_.ok()) return fatal_.WithContext(Me());
  if (num_missing_ > 0) return MissingError();
  return std::move(sockets_);
}

void Join::Loop() {
  io_.restart();
  while (IsWaiting()) {
    const Clock::time_point now = Clock::now();
    if (group_.stop.stop_requested()) {
      fatal_ = CancelledError("the join was called off");
    } else if (now >= group_.join_deadline) {
      return;
    } else {
      io_.run_one_until(std::min<Clock::time_point>(group_.join_deadline, now + kStopCheck));
    }
  }
}

void Join::Finish() {
  is_over_ = true;
  boost::system::error_code ignored;
  acceptor_.cancel(ignored);
  for (const SocketPtr& socket : std::set<SocketPtr>(unfinished_)) socket->close(ignored);
  io_.restart();
  io_.poll();  // lets the coroutines see it and end
}

Status Join::MissingError() const {
  std::vector<std::string> missing;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == group_.rank || sockets_[peer].is_open()) continue;
    missing.push_back(StrCat(TcpPeerName(group_, peer), ": ", why_missing_[peer]));
  }
  return DeadlineExceededError(
      StrCat(Me(), ": ", missing.size(), " of ", world_size_ - 1,
             " peers missing at the join deadline: ", StrJoin(missing, "; ")));
}

// A second connection replaces the first: its rank has given the first one up.
void Join::Take(int peer, Tcp::socket& socket) {
  boost::system::error_code error;
  const int fd = socket.release(error);
  if (error) {
    why_missing_[peer] = error.message();
    return;
  }
  auto adopted = Socket::Adopt(fd);
  if (!adopted.ok()) {
    why_missing_[peer] = adopted.status().message();
    return;
  }
  if (!sockets_[peer].is_open()) --num_missing_;
  sockets_[peer] = std::move(adopted).value();
}

Hello Join::MakeHello(uint32_t magic, int to, Verdict verdict) const {
  return {magic, kVersion, group_.epoch, group_.rank, to, world_size_, verdict};
}

// --- The side that is called.

Join::Task Join::AcceptCallers(std::shared_ptr<Join> self) {
  asio::steady_timer pause(self->io_);
  while (!self->is_over_) {
    auto socket = std::make_shared<Tcp::socket>(self->io_);
    boost::system::error_code error;
    co_await self->acceptor_.async_accept(*socket,
                                          asio::redirect_error(asio::use_awaitable, error));
    if (self->is_over_) co_return;
    if (error) {  // out of descriptors, or the caller is gone again: not the end of the join
      pause.expires_after(kFirstPause);
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
    } else if (self->unfinished_.size() < kMaxUnknownCallers) {
      self->Spawn(HearCaller(self, std::move(socket)));
    }
  }
}

Join::Task Join::HearCaller(std::shared_ptr<Join> self, SocketPtr socket) {
  const Unfinished unfinished(self->unfinished_, socket);
  asio::steady_timer limit(self->io_, kHelloTimeout);
  limit.async_wait([socket](const boost::system::error_code& error) {
    boost::system::error_code ignored;
    if (!error) socket->close(ignored);
  });
  HelloBytes bytes{};
  boost::system::error_code error;
  co_await asio::async_read(*socket, asio::buffer(bytes),
                            asio::redirect_error(asio::use_awaitable, error));
  const Hello call = Decode(bytes);
  if (error || self->is_over_ || call.magic != kCallMagic) co_return;  // a stray: no answer
  const Verdict verdict = self->Judge(call);
  bytes = Encode(self->MakeHello(kReplyMagic, call.from, verdict));
  co_await asio::async_write(*socket, asio::buffer(bytes),
                             asio::redirect_error(asio::use_awaitable, error));
  limit.cancel();
  if (error || self->is_over_) co_return;
  if (verdict == Verdict::kAccepted) {
    self->Take(call.from, *socket);
  } else {
    self->NoteRefusal(call, verdict);
  }
}

Verdict Join::Judge(const Hello& call) const {
  if (call.version != kVersion) return Verdict::kOtherVersion;
  if (call.epoch != group_.epoch) return Verdict::kOtherEpoch;
  if (call.world_size != world_size_) return Verdict::kOtherWorldSize;
  const bool is_above = call.from > group_.rank && call.from < world_size_;
  if (call.to != group_.rank || !is_above) return Verdict::kOtherRank;
  return Verdict::kAccepted;
}

void Join::NoteRefusal(const Hello& call, Verdict verdict) {
  if (call.from <= group_.rank || call.from >= world_size_) return;
  std::string& why = why_missing_[call.from];
  if (verdict == Verdict::kOtherVersion) {
    why = StrCat("it called with protocol version ", call.version, ", ours is ", kVersion);
  } else if (verdict == Verdict::kOtherEpoch) {
    why = StrCat("it called for epoch ", call.epoch, ", this group is ", group_.epoch);
  } else if (verdict == Verdict::kOtherWorldSize) {
    why = StrCat("it called for world_size ", call.world_size, ", this group has ", world_size_);
  } else {
    why = StrCat("it called for rank ", call.to, ", this is rank ", group_.rank);
  }
}

// --- The side that calls.

Join::Task Join::DialUntilConnected(std::shared_ptr<Join> self, int peer) {
  self->why_missing_[peer] = "not reached yet";
  asio::steady_timer timer(self->io_);
  milliseconds pause = kFirstPause;
  while (true) {
    co_await DialOnce(self, peer);
    if (self->is_over_ || !self->fatal_.ok() || self->sockets_[peer].is_open()) co_return;
    boost::system::error_code error;
    timer.expires_after(pause);
    co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, error));
    pause = std::min(2 * pause, kLongestPause);
  }
}

Join::Task Join::DialOnce(std::shared_ptr<Join> self, int peer) {
  auto socket = std::make_shared<Tcp::socket>(self->io_);
  const Unfinished unfinished(self->unfinished_, socket);
  const TcpAddress& address = self->group_.peers[peer];
  std::string& why = self->why_missing_[peer];
  boost::system::error_code error;

  Tcp::resolver resolver(self->io_);
  const Tcp::resolver::results_type endpoints = co_await resolver.async_resolve(
      address.host, std::to_string(address.port), asio::redirect_error(asio::use_awaitable, error));
  if (self->is_over_) co_return;
  if (!error) {
    co_await asio::async_connect(*socket, endpoints,
                                 asio::redirect_error(asio::use_awaitable, error));
  }
  if (self->is_over_) co_return;
  if (error) {
    why = error.message();
    co_return;
  }

  HelloBytes bytes = Encode(self->MakeHello(kCallMagic, peer, Verdict::kAccepted));
  co_await asio::async_write(*socket, asio::buffer(bytes),
                             asio::redirect_error(asio::use_awaitable, error));
  if (self->is_over_) co_return;
  // It answers when it joins this group itself, which may be as late as the join deadline.
  why = "connected, but it does not answer: it is not joining a group";
  if (!error) {
    co_await asio::async_read(*socket, asio::buffer(bytes),
                              asio::redirect_error(asio::use_awaitable, error));
  }
  if (self->is_over_) co_return;
  if (error) {
    why = StrCat("connected, then: ", error.message());
  } else if (self->AcceptReply(peer, Decode(bytes))) {
    self->Take(peer, *socket);
  }
}

// False with the reason noted; fatal_ set when another attempt could not end otherwise.
bool Join::AcceptReply(int peer, const Hello& reply) {
  std::string& why = why_missing_[peer];
  if (reply.magic != kReplyMagic) {
    why = "what answers there is not a worker of this project";
    return false;
  }
  const bool is_same = reply.version == kVersion && reply.epoch == group_.epoch &&
                       reply.from == peer && reply.to == group_.rank &&
                       reply.world_size == world_size_;
  if (reply.verdict == Verdict::kAccepted && is_same) return true;
  why = StrCat("it is rank ", reply.from, "/", reply.world_size, " epoch ", reply.epoch,
               " protocol version ", reply.version, ", this group has epoch ", group_.epoch,
               ", world_size ", world_size_, ", protocol version ", kVersion);
  // A peer that is still in an earlier group may come; all else stays as it is.
  const bool may_come = reply.version == kVersion && reply.epoch < group_.epoch;
  if (!may_come) fatal_ = FailedPreconditionError(StrCat(TcpPeerName(group_, peer), ": ", why));
  return false;
}

Status CheckGroup(const TcpGroup& group) {
  const auto world_size = static_cast<int>(group.peers.size());
  if (group.rank >= 0 && group.rank < world_size) return OkStatus();
  return InvalidArgumentError(
      StrCat("epoch ", group.epoch, ": rank ", group.rank, " of ", world_size, " peers"));
}

}  // namespace

std::string TcpPeerName(const TcpGroup& group, int peer) {
  return PeerName(peer, StrCat(group.peers[peer].host, ":", group.peers[peer].port));
}

Result<std::vector<Socket>> JoinTcpGroup(TcpListener& listener, const TcpGroup& group) {
  RETURN_IF_ERROR(CheckGroup(group));
  return std::make_shared<Join>(listener.impl(), group)->Run();
}

TcpListener::TcpListener(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TcpListener::~TcpListener() = default;

uint16_t TcpListener::port() const { return impl_->port; }

Result<std::unique_ptr<TcpListener>> TcpListener::Listen(const std::string& host, uint16_t port) {
  auto impl = std::make_unique<Impl>();
  boost::system::error_code error;
  const auto endpoints =
      Tcp::resolver(impl->io).resolve(host, std::to_string(port), Tcp::resolver::passive, error);
  if (error || endpoints.empty()) {
    return InvalidArgumentError(
        StrCat("cannot listen on ", host, ":", port, ": ", error.message()));
  }
  const Tcp::endpoint endpoint = *endpoints.begin();
  Tcp::acceptor& acceptor = impl->acceptor;
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(Tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (!error) impl->port = acceptor.local_endpoint(error).port();
  if (error) {
    return UnavailableError(StrCat("cannot listen on ", host, ":", port, ": ", error.message()));
  }
  return std::unique_ptr<TcpListener>(new TcpListener(std::move(impl)));
}

}  // namespace ds4
