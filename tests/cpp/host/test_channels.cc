// One conformance suite for channels of every kind, then tests of each kind alone.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "check.h"
#include "support/inproc_world.h"
#include "transport/channel.h"
#include "transport/fabric.h"

using namespace hvdlite;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kCapacity = 4096;

struct End {
  std::atomic<std::uint32_t> sleeping{0};
  std::unique_ptr<Waiter> waiter;
  std::unique_ptr<Channel> channel;
};

// Two connected ends: rank 0 and rank 1.
struct Pair {
  End ends[2];
  std::vector<std::byte> rings;  // shm: the memory of both
};

void make_waiters(Pair& pair) {
  for (End& end : pair.ends) {
    auto waiter = Waiter::make(&end.sleeping, make_event(), AwakeTimes{}, 2);
    CHECK_OK(waiter.status());
    end.waiter = std::move(waiter.value());
  }
}

std::pair<Fd, Fd> connected_sockets() {
  int fds[2] = {-1, -1};
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
  return {Fd(fds[0]), Fd(fds[1])};
}

std::unique_ptr<Pair> make_inproc() {
  auto pair = std::make_unique<Pair>();
  make_waiters(*pair);
  const auto link = std::make_shared<InprocLink>(kCapacity);
  for (int i = 0; i < 2; ++i) {
    pair->ends[i].channel =
        std::make_unique<InprocChannel>(1 - i, i, link, pair->ends[1 - i].waiter->wake_up());
  }
  return pair;
}

std::unique_ptr<Pair> make_shm() {
  auto pair = std::make_unique<Pair>();
  make_waiters(*pair);
  auto sockets = connected_sockets();
  pair->rings.resize(2 * ByteRing::footprint(kCapacity) + 128);
  const auto start = reinterpret_cast<std::uintptr_t>(pair->rings.data());
  std::byte* memory = pair->rings.data() + (64 - start % 64) % 64;
  const ByteRing rings[2] = {{memory, kCapacity},
                             {memory + ByteRing::footprint(kCapacity), kCapacity}};
  for (int i = 0; i < 2; ++i) {
    pair->ends[i].channel = std::make_unique<ShmChannel>(
        1 - i, rings[i], rings[1 - i], pair->ends[1 - i].waiter->wake_up(),
        std::move(i == 0 ? sockets.first : sockets.second));
  }
  return pair;
}

std::pair<Fd, Fd> connected_tcp_sockets() {
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Fd dialled(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  CHECK_EQ(::bind(listener.get(), generic, length), 0);
  CHECK_EQ(::listen(listener.get(), 1), 0);
  CHECK_EQ(::getsockname(listener.get(), generic, &length), 0);
  CHECK_EQ(::connect(dialled.get(), generic, length), 0);
  Fd accepted(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(accepted.valid());
  return {std::move(dialled), std::move(accepted)};
}

std::unique_ptr<Pair> make_patient_tcp(double patience) {
  auto pair = std::make_unique<Pair>();
  make_waiters(*pair);
  auto sockets = connected_tcp_sockets();
  pair->ends[0].channel = std::make_unique<TcpChannel>(1, std::move(sockets.first), patience);
  pair->ends[1].channel = std::make_unique<TcpChannel>(0, std::move(sockets.second), patience);
  return pair;
}

std::unique_ptr<Pair> make_tcp() { return make_patient_tcp(Config().peer_timeout); }

void for_every_kind(const std::function<void(Pair&)>& body) {
  for (const auto make : {&make_inproc, &make_shm, &make_tcp}) {
    const auto pair = make();
    for (End& end : pair->ends) CHECK_OK(end.channel->attach(*end.waiter));
    body(*pair);
  }
}

Status never_fails() { return Status(); }

// Sends and receives `total` pseudo-random bytes at once, in pieces of random length.
void talk(End& end, unsigned own_seed, unsigned peer_seed, std::size_t total) {
  std::mt19937 outgoing(own_seed);
  std::mt19937 incoming(peer_seed);
  std::mt19937 lengths(own_seed + 100);
  std::vector<std::byte> unsent;
  std::size_t sent = 0;
  std::size_t received = 0;
  bool right = true;
  const auto progress = [&] {
    if (unsent.empty() && sent < total) {
      unsent.resize(std::min<std::size_t>(1 + lengths() % 9000, total - sent));
      for (std::byte& byte : unsent) byte = static_cast<std::byte>(outgoing());
    }
    const auto written = end.channel->try_write(unsent);
    CHECK_OK(written.status());
    sent += written.value();
    unsent.erase(unsent.begin(), unsent.begin() + static_cast<std::ptrdiff_t>(written.value()));
    std::vector<std::byte> buffer(std::min<std::size_t>(1 + lengths() % 9000, total - received));
    const auto got = end.channel->try_read(buffer);
    CHECK_OK(got.status());
    for (std::size_t i = 0; i < got.value(); ++i) {
      right = right && buffer[i] == static_cast<std::byte>(incoming());
    }
    received += got.value();
    return written.value() + got.value() > 0 || (sent == total && received == total);
  };
  while (sent < total || received < total) {
    const Status status = end.waiter->wait(progress, never_fails, Deadline::after(20s));
    CHECK_OK(status);
    if (!status.ok()) return;
  }
  CHECK(right);
}

}  // namespace

TEST(channels_carry_bytes_both_ways_in_order) {
  for_every_kind([](Pair& pair) {
    std::thread other([&] { talk(pair.ends[1], 2, 1, 1'000'000); });
    talk(pair.ends[0], 1, 2, 1'000'000);
    other.join();
  });
}

TEST(channels_take_no_more_than_fits) {
  for_every_kind([](Pair& pair) {
    const std::vector<std::byte> large(32 << 20);
    const auto written = pair.ends[0].channel->try_write(large);
    CHECK_OK(written.status());
    CHECK(written.value() > 0 && written.value() < large.size());
  });
}

TEST(channels_deliver_what_was_written_before_the_close_then_end) {
  for_every_kind([](Pair& pair) {
    const std::vector<std::byte> last(100, std::byte{7});
    CHECK_EQ(pair.ends[0].channel->try_write(last).value(), last.size());
    pair.ends[0].channel->close();
    pair.ends[0].channel->close();  // once more does nothing
    const auto lost = [&] { return pair.ends[1].waiter->lost(0); };
    CHECK_OK(pair.ends[1].waiter->wait(lost, never_fails, Deadline::after(5s)));
    std::vector<std::byte> buffer(1000);
    CHECK_EQ(pair.ends[1].channel->try_read(buffer).value(), last.size());
    CHECK(buffer[99] == std::byte{7});
    const auto end = pair.ends[1].channel->try_read(buffer);
    CHECK_STATUS(end.status(), StatusCode::kRankFailed);
    CHECK_EQ(end.status().failed_rank(), 0);
  });
}

TEST(channels_wake_a_sleeping_reader_writer_and_mourner) {
  for_every_kind([](Pair& pair) {
    std::vector<std::byte> buffer(1 << 20);
    End& own = pair.ends[0];
    std::atomic<int> sleeps{1};  // for the how manieth time this thread is about to sleep
    std::thread other([&] {
      std::vector<std::byte> theirs(1 << 20);
      const auto wait_for = [&](int time) {
        while (sleeps < time) std::this_thread::sleep_for(1ms);
        std::this_thread::sleep_for(30ms);
      };
      wait_for(1);
      CHECK_EQ(pair.ends[1].channel->try_write(std::span(theirs).first(3)).value(), std::size_t{3});
      wait_for(2);
      while (pair.ends[1].channel->try_read(theirs).value() > 0) {
      }
      wait_for(3);
      pair.ends[1].channel->close();
    });
    const auto readable = [&] { return own.channel->try_read(buffer).value() > 0; };
    CHECK_OK(own.waiter->wait(readable, never_fails, Deadline::after(5s)));
    while (own.channel->try_write(buffer).value() > 0) {
    }
    sleeps = 2;
    const auto writable = [&] {
      const auto written = own.channel->try_write(buffer);
      return !written.ok() || written.value() > 0;
    };
    CHECK_OK(own.waiter->wait(writable, never_fails, Deadline::after(5s)));
    sleeps = 3;
    const auto lost = [&] { return own.waiter->lost(1); };
    CHECK_OK(own.waiter->wait(lost, never_fails, Deadline::after(5s)));
    other.join();
  });
}

TEST(channels_wake_a_writer_that_filled_the_ring_while_it_was_being_read) {
  for (int round = 0; round < 20; ++round) {
    const auto pair = make_shm();
    for (End& end : pair->ends) CHECK_OK(end.channel->attach(*end.waiter));
    std::thread reader([&] {
      std::vector<std::byte> buffer(kCapacity);
      std::size_t received = 0;
      const auto progress = [&] {
        const std::size_t got = pair->ends[1].channel->try_read(buffer).value();
        received += got;
        return got > 0;
      };
      while (received < 400 * kCapacity) {
        if (!pair->ends[1].waiter->wait(progress, never_fails, Deadline::after(5s)).ok()) return;
      }
    });
    const std::vector<std::byte> data(400 * kCapacity);
    std::span<const std::byte> left = data;
    const auto progress = [&] {
      const std::size_t written = pair->ends[0].channel->try_write(left).value();
      left = left.subspan(written);
      return written > 0;
    };
    while (!left.empty()) {
      const Status status = pair->ends[0].waiter->wait(progress, never_fails, Deadline::after(5s));
      CHECK_OK(status);
      if (!status.ok()) break;
    }
    reader.join();
  }
}

TEST(tcp_channel_that_is_taken_nothing_from_says_so_and_for_how_long) {
  const auto pair = make_patient_tcp(0.5);
  for (End& end : pair->ends) CHECK_OK(end.channel->attach(*end.waiter));
  Channel& channel = *pair->ends[0].channel;
  std::vector<std::byte> buffer(1 << 20);
  CHECK_EQ(pair->ends[1].channel->try_write(std::span(buffer).first(3)).value(), std::size_t{3});
  const auto failed = [&] { return !channel.try_write(buffer).ok(); };
  CHECK_OK(pair->ends[0].waiter->wait(failed, never_fails, Deadline::after(20s)));
  CHECK(pair->ends[0].waiter->lost(1));
  // The data that the peer had sent before is still there, and later calls give the same reason.
  CHECK_EQ(channel.try_read(buffer).value(), std::size_t{3});
  for (const auto& end : {channel.try_write(buffer), channel.try_read(buffer)}) {
    CHECK_STATUS(end.status(), StatusCode::kTimeout);
    CHECK_EQ(end.status().failed_rank(), 1);
    const std::string start = "rank 1 has not answered for 0.5 s (Connection timed out)";
    CHECK(end.status().message().find(start) == 0);
  }
}

TEST(tcp_channel_gives_its_last_words_although_it_has_not_read_all) {
  const auto pair = make_tcp();
  for (End& end : pair->ends) CHECK_OK(end.channel->attach(*end.waiter));
  Channel& leaver = *pair->ends[0].channel;
  Channel& reader = *pair->ends[1].channel;
  std::vector<std::byte> buffer(1 << 20);
  CHECK_EQ(reader.try_write(std::span(buffer).first(1000)).value(), std::size_t{1000});
  const auto arrives = [&] { return leaver.try_read(std::span(buffer).first(1)).value() == 1; };
  CHECK_OK(pair->ends[0].waiter->wait(arrives, never_fails, Deadline::after(20s)));
  std::size_t sent = 0;
  while (const std::size_t more = leaver.try_write(buffer).value()) sent += more;
  leaver.close();
  std::size_t received = 0;
  Status last;
  const auto ends = [&] {
    while (last.ok()) {
      const Result<std::size_t> got = reader.try_read(buffer);
      last = got.status();
      if (got.ok() && got.value() == 0) break;
      if (got.ok()) received += got.value();
    }
    return !last.ok();
  };
  CHECK_OK(pair->ends[1].waiter->wait(ends, never_fails, Deadline::after(20s)));
  CHECK_STATUS(last, StatusCode::kRankFailed);
  CHECK_EQ(received, sent);
}

TEST(tcp_channel_asks_the_kernel_for_its_patience_whatever_the_number) {
  struct Row {
    double seconds;
    int unconfirmed_ms;
    int idle;
  };
  const std::vector<Row> rows = {
      {60, 60'000, 10},
      {Config().peer_timeout, 60'000, 10},
      {1e-9, 1, 1},
      {0.5, 500, 1},
      {86400, 86'400'000, 60},
      {INFINITY, INT_MAX, 60},
      {0, INT_MAX, 60},
      {1e10, INT_MAX, 60},
      {1e300, INT_MAX, 60},
  };
  for (const Row& row : rows) {
    auto sockets = connected_tcp_sockets();
    const Fd copy(::dup(sockets.first.get()));
    const TcpChannel channel(1, std::move(sockets.first), row.seconds);
    const auto option = [&](int level, int name) {
      int value = -1;
      socklen_t length = sizeof value;
      CHECK_EQ(::getsockopt(copy.get(), level, name, &value, &length), 0);
      return value;
    };
    CHECK_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
    CHECK_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), row.unconfirmed_ms);
    CHECK_EQ(option(IPPROTO_TCP, TCP_KEEPIDLE), row.idle);
    CHECK_EQ(option(IPPROTO_TCP, TCP_KEEPINTVL), row.idle);
  }
}

TEST(waiter_spins_while_that_pays_and_tries_it_again_now_and_then) {
  const auto tries = [](SpinRecord& record, int waits, const auto& outcome) {
    int spins = 0;
    for (int i = 0; i < waits; ++i) {
      if (!record.pays()) continue;
      ++spins;
      outcome(record);
    }
    return spins;
  };
  const auto paid = [](SpinRecord& record) { record.paid(); };
  const auto wasted = [](SpinRecord& record) { record.wasted(); };
  const auto late = [](SpinRecord&) {};
  SpinRecord record;
  CHECK_EQ(tries(record, 100, paid), 100);
  CHECK_EQ(tries(record, 100, late), 100);
  CHECK(tries(record, 10, wasted) < 10);
  const int probes = tries(record, 400, wasted);
  CHECK(probes > 10 && probes < 100);
  CHECK(tries(record, 100, paid) > 50);
  CHECK_EQ(tries(record, 100, paid), 100);
}

TEST(waiter_yields_while_that_pays_and_ever_less_beside_what_computes) {
  const auto yields = [](YieldRecord& record, int waits, const auto& outcome) {
    int count = 0;
    for (int i = 0; i < waits; ++i) {
      if (!record.pays()) continue;
      ++count;
      outcome(record);
    }
    return count;
  };
  YieldRecord record;
  CHECK_EQ(yields(record, 100, [](YieldRecord& one) { one.paid(); }), 100);
  const int wasted = yields(record, 1000, [](YieldRecord& one) { one.wasted(); });
  CHECK(wasted > 10 && wasted < 30);
  CHECK(yields(record, 100'000, [](YieldRecord& one) { one.dear(); }) < 40);
  CHECK(yields(record, 5000, [](YieldRecord& one) { one.paid(); }) > 500);
}

TEST(waiter_can_be_lent_while_a_thread_stands_by) {
  const auto pair = make_inproc();
  Waiter& waiter = *pair->ends[0].waiter;
  std::atomic<bool> work{false};
  std::atomic<bool> given{false};
  const auto ready = [&] { return work.load(); };
  const auto stand_by = [&] {
    return waiter.stand_by(ready, [&] { given = true; }, false, Deadline::never());
  };
  work = true;
  CHECK(!stand_by());
  CHECK(!given);
  work = false;
  std::thread sleeper([&] { CHECK(stand_by()); });
  while (!given) std::this_thread::yield();
  waiter.disarm();  // as who borrows it; a ring does nothing now
  waiter.wake_up().send();
  CHECK_STATUS(waiter.wait(ready, never_fails, Deadline::after(5ms)), StatusCode::kTimeout);
  waiter.wake_sleeper();
  sleeper.join();
}

TEST(waiter_ends_at_its_deadline_and_when_interrupted) {
  const auto pair = make_inproc();
  Waiter& waiter = *pair->ends[0].waiter;
  const auto never = [] { return false; };
  CHECK_STATUS(waiter.wait(never, never_fails, Deadline::after(20ms)), StatusCode::kTimeout);
  std::thread other([&] {
    std::this_thread::sleep_for(20ms);
    waiter.interrupt();
  });
  CHECK_STATUS(waiter.wait(never, never_fails, Deadline::after(5s)), StatusCode::kShutdown);
  other.join();
}

TEST(byte_ring_refuses_counters_that_its_other_side_broke) {
  alignas(64) std::byte memory[ByteRing::footprint(64)] = {};
  ByteRing ring(memory, 64);
  std::byte buffer[16] = {};
  const std::uint64_t broken = 1'000'000;
  std::memcpy(memory, &broken, sizeof broken);  // the writer's counter
  bool was_full = false;
  CHECK_STATUS(ring.read(buffer, was_full).status(), StatusCode::kInternal);
  CHECK_STATUS(ring.write(buffer).status(), StatusCode::kInternal);
}

TEST(segment_refuses_memory_of_another_layout) {
  const SegmentLayout layout = SegmentLayout::make(2, Config());
  const auto memfd = Segment::create(layout);
  CHECK_OK(memfd.status());
  CHECK_OK(Segment::map(memfd.value()).status());
  const auto other = create_memfd(layout.total_bytes());
  CHECK_OK(other.status());
  CHECK_STATUS(Segment::map(other.value()).status(), StatusCode::kInternal);
}

TEST(segment_refuses_memory_that_its_owner_could_shrink) {
  const SegmentLayout layout = SegmentLayout::make(2, Config());
  const auto sealed = Segment::create(layout);
  CHECK_OK(sealed.status());
  // The same bytes, in memory without a seal, and in a file that cannot have one.
  const Fd open(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const Fd file(::open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  for (const Fd* target : {&open, &file}) {
    const auto bytes = static_cast<off_t>(layout.total_bytes());
    CHECK_EQ(::ftruncate(target->get(), bytes), 0);
    off_t from = 0;
    CHECK(::sendfile(target->get(), sealed.value().get(), &from, 4096) == 4096);
    const auto mapped = Segment::map(*target);
    CHECK_STATUS(mapped.status(), StatusCode::kInternal);
    CHECK(mapped.status().message().find("seal") != std::string::npos);
  }
  CHECK_EQ(::ftruncate(sealed.value().get(), 4096), -1);
}
