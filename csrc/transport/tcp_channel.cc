#include "transport/tcp_channel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "transport/waiter.h"

namespace hvdlite {
namespace {

// Unacknowledged data for so long means that the peer's host or the link is gone.
constexpr unsigned kUserTimeoutMs = 10'000;

Result<std::size_t> transferred(ssize_t count, int peer) {
  if (count > 0) return static_cast<std::size_t>(count);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    return std::size_t{0};
  }
  return peer_gone(peer);
}

}  // namespace

TcpChannel::TcpChannel(int peer, Fd socket) : peer_(peer), socket_(std::move(socket)) {
  close_in_forked_child(socket_.get());
  const int flags = ::fcntl(socket_.get(), F_GETFL);
  ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK);
  // Both fail on a socket that is not TCP (tests), where they are not needed.
  const int on = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs,
               sizeof kUserTimeoutMs);
}

Result<std::size_t> TcpChannel::try_write(std::span<const std::byte> bytes) {
  if (!socket_.valid()) return peer_gone(peer_);
  if (bytes.empty()) return std::size_t{0};
  return transferred(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), peer_);
}

Result<std::size_t> TcpChannel::try_read(std::span<std::byte> bytes) {
  if (!socket_.valid()) return peer_gone(peer_);
  if (bytes.empty()) return std::size_t{0};
  return transferred(::recv(socket_.get(), bytes.data(), bytes.size(), 0), peer_);
}

Status TcpChannel::attach(Waiter& waiter) { return waiter.watch(socket_.get(), peer_); }

void TcpChannel::close() {
  if (!socket_.valid()) return;
  // Half: the peer still reads what is on its way, then sees the end.
  ::shutdown(socket_.get(), SHUT_WR);
  socket_.reset();
}

}  // namespace hvdlite
