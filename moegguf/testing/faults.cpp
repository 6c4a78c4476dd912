// faults.cpp: makes operations of the system fail. When the first fault is armed, the store's table of operations
// (os.h) is replaced with a table in which the Nth operation of an armed kind fails.
#include "api.h"
#include "file_id.h"
#include "os.h"
#include "testing.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <system_error>

namespace moegguf {
namespace {

struct Arm {
    std::atomic<uint64_t> nth{0};
    std::atomic<uint64_t> seen{0};
    std::atomic<int> sticky{0};
    std::atomic<int> error{EIO};
};

Arm arms[MOEGGUF_FAULT_KINDS];

std::mutex limiting;
FileId limited; // the only file for which faults of reads and fstat occur; inode 0: they occur for all files

bool may_fail(int fd) {
    const std::lock_guard<std::mutex> lock(limiting);
    return limited.inode == 0 || file_id(fd) == limited;
}

// Counts an operation of an armed kind. Returns true, and sets errno, if the fault must occur in this operation. fd:
// the file of a read or an fstat; -1: any other operation.
bool fault(moegguf_fault_kind kind, int fd = -1) {
    Arm & arm = arms[kind];
    const uint64_t nth = arm.nth.load(std::memory_order_relaxed);
    if (nth == 0 || (fd >= 0 && !may_fail(fd))) { return false; }
    const uint64_t seen = arm.seen.fetch_add(1) + 1;
    if (seen == nth || (seen > nth && arm.sticky)) {
        errno = arm.error;
        return true;
    }
    return false;
}

// Returns the table of operations that was in use before the first call. The first call puts the table `failing` in its
// place.
const OperatingSystem & real();

const OperatingSystem failing = {
    [](const char * path, int flags) { return fault(MOEGGUF_FAULT_OPEN) ? -1 : real().open(path, flags); },
    [](int fd, struct stat * status) { return fault(MOEGGUF_FAULT_STAT, fd) ? -1 : real().fstat(fd, status); },
    [](int fd, void * buffer, size_t n, off_t offset) -> ssize_t {
        if (fault(MOEGGUF_FAULT_SLOW_READ, fd)) { std::this_thread::sleep_for(std::chrono::seconds(2)); }
        if (fault(MOEGGUF_FAULT_EINTR, fd)) {
            errno = EINTR;
            return -1;
        }
        if (fault(MOEGGUF_FAULT_READ, fd)) { return -1; }
        // A read of 4096 bytes keeps the alignment that O_DIRECT requires, as real short reads do.
        if (n > 4096 && fault(MOEGGUF_FAULT_SHORT_READ, fd)) { n = 4096; }
        return real().pread(fd, buffer, n, offset);
    },
    [](int, void *, size_t, off_t) -> ssize_t {
        errno = EAGAIN; // every byte is read with pread, so that its faults occur
        return -1;
    },
    [](size_t alignment, size_t n) -> void * {
        return fault(MOEGGUF_FAULT_ALLOC) ? nullptr : real().aligned_alloc(alignment, n);
    },
    [](ggml_backend_buffer_type_t buft, size_t n) -> ggml_backend_buffer_t {
        return fault(MOEGGUF_FAULT_ALLOC) ? nullptr : real().alloc_buffer(buft, n);
    },
    [](std::function<void()> body) {
        if (fault(MOEGGUF_FAULT_THREAD)) { throw std::system_error(errno, std::generic_category()); }
        return real().start_thread(std::move(body));
    },
    [](ggml_backend_t backend, ggml_tensor * to, const void * data, size_t offset, size_t n) {
        if (fault(MOEGGUF_FAULT_COPY)) { throw std::runtime_error("a copy to the device failed"); }
        real().copy_to_device(backend, to, data, offset, n);
    },
};

const OperatingSystem & real() {
    static const OperatingSystem & before = replace_os(failing);
    return before;
}

} // namespace
} // namespace moegguf

extern "C" void moegguf_fault_arm(int kind, uint64_t nth, int sticky, int sys_errno) {
    if (kind < 0 || kind >= MOEGGUF_FAULT_KINDS) { return; }
    moegguf::real();
    moegguf::Arm & arm = moegguf::arms[kind];
    arm.nth = 0;
    arm.seen = 0;
    arm.sticky = sticky;
    arm.error = sys_errno ? sys_errno : EIO;
    arm.nth = nth;
}

extern "C" int moegguf_fault_file(const char * path) {
    using namespace moegguf;
    return guarded([&] {
        const FileId file = path ? file_id(path) : FileId();
        if (path && file.inode == 0) { throw Error(MOEGGUF_INVALID, "there is no file '" + std::string(path) + "'"); }
        const std::lock_guard<std::mutex> lock(limiting);
        limited = file;
    });
}

extern "C" uint64_t moegguf_fault_count(int kind) {
    return kind >= 0 && kind < MOEGGUF_FAULT_KINDS ? moegguf::arms[kind].seen.load() : 0;
}
