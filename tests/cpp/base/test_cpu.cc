// The number of processors that quotas of cgroups leave to a process.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "check.h"

using namespace hvdlite;

namespace {

namespace fs = std::filesystem;

struct File {
  std::string path;
  std::string text;
};

// A folder that looks like mounted cgroups, and goes with the test.
class Cgroups {
 public:
  explicit Cgroups(const std::vector<File>& files)
      : root_(fs::temp_directory_path() / ("hvdlite-cgroups-" + std::to_string(::getpid()))) {
    for (const File& file : files) {
      const fs::path path = root_ / file.path;
      fs::create_directories(path.parent_path());
      std::ofstream(path) << file.text;
    }
  }
  ~Cgroups() { fs::remove_all(root_); }
  Cgroups(const Cgroups&) = delete;
  Cgroups& operator=(const Cgroups&) = delete;
  int cores(const std::string& membership) const { return quota_cores(root_, membership); }

 private:
  fs::path root_;
};

}  // namespace

TEST(a_quota_of_version_two_is_the_strictest_on_the_way_up) {
  const Cgroups cgroups({{"cpu.max", "max 100000\n"},
                         {"pods/cpu.max", "250000 100000\n"},
                         {"pods/one/cpu.max", "400000 100000\n"},
                         {"small/cpu.max", "50000 100000\n"}});
  CHECK_EQ(cgroups.cores("0::/\n"), 0);
  CHECK_EQ(cgroups.cores("0::/pods\n"), 2);
  CHECK_EQ(cgroups.cores("0::/pods/one\n"), 2);
  CHECK_EQ(cgroups.cores("0::/small\n"), 1);
}

TEST(a_containers_quota_is_found_where_its_path_is_the_hosts) {
  const Cgroups cgroups(std::vector<File>{{"cpu.max", "300000 100000\n"}});
  CHECK_EQ(cgroups.cores("0::/docker/0123\n"), 3);
  CHECK_EQ(cgroups.cores("0::/../other\n"), 3);
}

TEST(a_quota_of_version_one_is_found_in_the_folder_of_its_controllers) {
  const Cgroups cgroups({{"cpu,cpuacct/cpu.cfs_quota_us", "-1\n"},
                         {"cpu,cpuacct/cpu.cfs_period_us", "100000\n"},
                         {"cpu,cpuacct/job/cpu.cfs_quota_us", "200000\n"},
                         {"cpu,cpuacct/job/cpu.cfs_period_us", "100000\n"}});
  const std::string others = "9:cpuset:/job\n8:memory:/job\n";
  CHECK_EQ(cgroups.cores(others + "4:cpu,cpuacct:/job\n0::/\n"), 2);
  CHECK_EQ(cgroups.cores(others + "4:cpu,cpuacct:/\n0::/\n"), 0);
  CHECK_EQ(cgroups.cores(others), 0);
}

TEST(what_is_not_a_quota_changes_nothing) {
  const Cgroups cgroups({{"cpu.max", "some text\n"}, {"zero/cpu.max", "0 0\n"}});
  CHECK_EQ(cgroups.cores("0::/\n"), 0);
  CHECK_EQ(cgroups.cores("0::/zero\n"), 0);
  CHECK_EQ(cgroups.cores("no colon\n"), 0);
  CHECK_EQ(cgroups.cores(""), 0);
  CHECK(available_cores() >= 1);
}
