// faults.cpp: operations of the system that fail. The first fault that is armed puts a table in which the Nth operation
// of a kind fails in the place of the store's own (os.h).
#include "os.h"
#include "testing.h"

#include <atomic>
#include <cerrno>
#include <chrono>
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

// True when this operation is the one that must fail; errno is set.
bool fault(moegguf_fault_kind kind) {
    Arm & arm = arms[kind];
    const uint64_t nth = arm.nth.load(std::memory_order_relaxed);
    if (nth == 0) { return false; }
    const uint64_t seen = arm.seen.fetch_add(1) + 1;
    if (seen == nth || (seen > nth && arm.sticky)) {
        errno = arm.error;
        return true;
    }
    return false;
}

// The store's own table; reads before the first fault is armed come here, too.
const OperatingSystem & real();

const OperatingSystem failing = {
    [](const char * path, int flags) { return fault(MOEGGUF_FAULT_OPEN) ? -1 : real().open(path, flags); },
    [](int fd, struct stat * status) { return fault(MOEGGUF_FAULT_STAT) ? -1 : real().fstat(fd, status); },
    [](int fd, void * buffer, size_t n, off_t offset) -> ssize_t {
        if (fault(MOEGGUF_FAULT_SLOW_READ)) { std::this_thread::sleep_for(std::chrono::seconds(2)); }
        if (fault(MOEGGUF_FAULT_EINTR)) {
            errno = EINTR;
            return -1;
        }
        if (fault(MOEGGUF_FAULT_READ)) { return -1; }
        // A short read keeps the alignment that O_DIRECT requires, as a real one does.
        if (n > 4096 && fault(MOEGGUF_FAULT_SHORT_READ)) { n = 4096; }
        return real().pread(fd, buffer, n, offset);
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

extern "C" uint64_t moegguf_fault_count(int kind) {
    return kind >= 0 && kind < MOEGGUF_FAULT_KINDS ? moegguf::arms[kind].seen.load() : 0;
}
