// drives.cpp: slows the store's reads of some files down to the speed of a given drive. When the first file is slowed
// down, the store's table of operations (os.h) is replaced with a table whose reads wait.
#include "api.h"
#include "file_id.h"
#include "os.h"
#include "testing.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <vector>

namespace moegguf {
namespace {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::duration<double, std::nano>;

struct Drive {
    FileId file;
    double bytes_per_ns;
    double latency_ns;
    Clock::time_point free_at; // time at which the drive has transferred the bytes of all reads so far
};

constexpr size_t most_drives = 8;

std::mutex mutex;
std::vector<Drive> drives;

Clock::duration to_duration(double ns) { return std::chrono::duration_cast<Clock::duration>(Nanoseconds(ns)); }

// Returns the time at which the drive will finish a read of n bytes that is requested now, and reserves the drive for
// the read. Returns the current time for a file that is not slowed down.
Clock::time_point end_of_read(int fd, size_t n) {
    const Clock::time_point now = Clock::now();
    const std::lock_guard<std::mutex> lock(mutex);
    if (drives.empty()) { return now; }
    const FileId file = file_id(fd);
    for (Drive & drive : drives) {
        if (drive.file == file) {
            drive.free_at = std::max(drive.free_at, now) + to_duration((double)n / drive.bytes_per_ns);
            return drive.free_at + to_duration(drive.latency_ns);
        }
    }
    return now;
}

const OperatingSystem & before();

ssize_t slow_pread(int fd, void * buffer, size_t n, off_t offset) {
    const Clock::time_point end = end_of_read(fd, n);
    const ssize_t got = before().pread(fd, buffer, n, offset);
    std::this_thread::sleep_until(end);
    return got;
}

const OperatingSystem & before() {
    static const OperatingSystem slow = [] {
        OperatingSystem table = os();
        table.pread = slow_pread;
        return table;
    }();
    static const OperatingSystem & replaced = replace_os(slow);
    return replaced;
}

void slow_down(const char * path, double bytes_per_ns, double latency_ns) {
    const FileId file = file_id(path);
    if (file.inode == 0) { throw Error(MOEGGUF_INVALID, "there is no file '" + std::string(path) + "'"); }
    if (!(bytes_per_ns >= 0) || !(latency_ns >= 0)) {
        throw Error(MOEGGUF_INVALID, "a drive's bandwidth and latency are not negative");
    }
    before();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto is_file = [&](const Drive & drive) { return drive.file == file; };
    drives.erase(std::remove_if(drives.begin(), drives.end(), is_file), drives.end());
    if (bytes_per_ns == 0) { return; }
    if (drives.size() == most_drives) { throw Error(MOEGGUF_INVALID, "at most 8 files are slowed down"); }
    drives.push_back({file, bytes_per_ns, latency_ns, Clock::now()});
}

} // namespace
} // namespace moegguf

using namespace moegguf;

int moegguf_drive_slow(const char * path, double bytes_per_ns, double latency_ns) {
    return guarded([&] { slow_down(&given(path), bytes_per_ns, latency_ns); });
}
