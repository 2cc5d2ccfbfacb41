#include "base/cpu.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

namespace hvdlite {
namespace {

constexpr const char* kCgroups = "/sys/fs/cgroup";
constexpr const char* kMembership = "/proc/self/cgroup";

std::string file_text(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// The number of processors that a quota of microseconds in each period gives; nothing without a
// quota.
std::optional<double> cores_of_quota(std::istream& quota_and_period) {
  double quota = 0;
  double period = 0;
  if (!(quota_and_period >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// The quota of one cgroup. Version 2 has both numbers in one file, with "max" for no quota; version
// 1 has two files, with -1.
std::optional<double> quota_in(const std::string& folder) {
  std::istringstream both(file_text(folder + "/cpu.max"));
  if (const auto cores = cores_of_quota(both)) return cores;
  std::istringstream two(file_text(folder + "/cpu.cfs_quota_us") + ' ' +
                         file_text(folder + "/cpu.cfs_period_us"));
  return cores_of_quota(two);
}

// The strictest quota of a cgroup and of those above it. In a container the path may be one of the
// host's: then only the last step, to the mount itself, finds a file.
std::optional<double> strictest_quota(const std::string& mount, std::string path) {
  std::optional<double> least;
  while (true) {
    const auto cores = quota_in(mount + path);
    if (cores && (!least || *cores < *least)) least = cores;
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) return least;
    path.resize(slash);
  }
}

// True when the list of controllers in a line of version 1 names the processor.
bool names_processor(const std::string& controllers) {
  std::istringstream names(controllers);
  std::string name;
  while (std::getline(names, name, ',')) {
    if (name == "cpu") return true;
  }
  return false;
}

}  // namespace

int quota_cores(const std::string& cgroups, const std::string& membership) {
  std::optional<double> least;
  std::istringstream lines(membership);
  std::string number;
  std::string controllers;
  std::string path;
  while (std::getline(lines, number, ':') && std::getline(lines, controllers, ':') &&
         std::getline(lines, path)) {
    if (!controllers.empty() && !names_processor(controllers)) continue;
    for (const std::string& mount : {cgroups, cgroups + "/cpu", cgroups + "/" + controllers}) {
      const auto cores = strictest_quota(mount, path);
      if (cores && (!least || *cores < *least)) least = cores;
    }
  }
  return least ? std::max(1, static_cast<int>(std::min(*least, 1e6))) : 0;
}

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  const int cores = std::max(1, CPU_COUNT(&set));
  const int quota = quota_cores(kCgroups, file_text(kMembership));
  return quota > 0 ? std::min(cores, quota) : cores;
}

bool has_avx2_f16c() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hvdlite
