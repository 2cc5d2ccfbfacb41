#include "transport/channel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <sstream>
#include <system_error>
#include <utility>

namespace hvdlite {
namespace {

constexpr int kProbes = 6;           // An idle connection gets so many within the patience.
constexpr double kLongestIdle = 60;  // seconds; firewalls forget silent connections
constexpr int kMostUnread = 16384;   // pieces of it that close() takes away

void set(int socket, int level, int name, int value) {
  // This fails on a socket that is not TCP (in tests), which does not need it.
  ::setsockopt(socket, level, name, &value, sizeof value);
}

void set_patience(int socket, double seconds) {
  // 0 would mean the system's own limit, a quarter of an hour.
  const bool forever = !(seconds > 0 && seconds * 1000 < INT_MAX);
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT,
      forever ? INT_MAX : std::max(1, static_cast<int>(std::ceil(seconds * 1000))));
  // With that timeout set, the kernel uses it for idle connections too, not the number of probes.
  const double interval = std::clamp(forever ? kLongestIdle : seconds / kProbes, 1.0, kLongestIdle);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(interval));
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, static_cast<int>(interval));
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
}

// True for errors that do not come from the peer itself: a timeout, or what routers answered in its
// place.
bool is_silence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == EHOSTDOWN || error == ENETDOWN;
}

bool try_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

Status peer_silent(int rank, double seconds, int error) {
  std::ostringstream text;
  text << "rank " << rank << " has not answered for " << seconds << " s ("
       << std::generic_category().message(error)
       << "): its host or the network to it is down, or it was stopped while data was on its way; "
          "HVDLITE_PEER_TIMEOUT sets the time";
  return Status(StatusCode::kTimeout, text.str(), rank);
}

TcpChannel::TcpChannel(int peer, Fd socket, double patience)
    : peer_(peer), socket_(std::move(socket)), patience_(patience) {
  close_in_forked_child(socket_.get());
  const int flags = ::fcntl(socket_.get(), F_GETFL);
  ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK);
  set(socket_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  set_patience(socket_.get(), patience);
}

Status TcpChannel::gone(int error) {
  if (!gone_.ok()) return gone_;
  gone_ = is_silence(error) ? peer_silent(peer_, patience_, error) : peer_gone(peer_);
  return gone_;
}

Result<std::size_t> TcpChannel::try_write(std::span<const std::byte> bytes) {
  if (!socket_.valid()) return peer_gone(peer_);
  if (bytes.empty()) return std::size_t{0};
  const ssize_t count = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (count >= 0) return static_cast<std::size_t>(count);
  return try_later(errno) ? Result<std::size_t>(0) : gone(errno);
}

Result<std::size_t> TcpChannel::try_read(std::span<std::byte> bytes) {
  if (!socket_.valid()) return peer_gone(peer_);
  if (bytes.empty()) return std::size_t{0};
  const ssize_t count = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
  if (count > 0) return static_cast<std::size_t>(count);
  return count < 0 && try_later(errno) ? Result<std::size_t>(0) : gone(count < 0 ? errno : 0);
}

Status TcpChannel::attach(Waiter& waiter) { return waiter.watch(socket_.get(), peer_); }

void TcpChannel::close() {
  if (!socket_.valid()) return;
  // Closes one direction only: the peer still reads the data on its way, then sees the end.
  ::shutdown(socket_.get(), SHUT_WR);
  // With something unread the kernel would break the connection, and drop what is still on its way
  // to the peer, such as this rank's last words.
  std::byte unread[4096];
  for (int pieces = 0; pieces < kMostUnread; ++pieces) {
    if (::recv(socket_.get(), unread, sizeof unread, 0) <= 0) break;
  }
  socket_.reset();
}

}  // namespace hvdlite
