#include "fault.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

namespace moegguf {
namespace {

struct Arm {
    std::atomic<uint64_t> nth{0};
    std::atomic<uint64_t> seen{0};
    std::atomic<int> sticky{0};
    std::atomic<int> error{EIO};
};

Arm arms[MOEGGUF_FAULT_KINDS];

} // namespace

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

int sys_open(const char * path, int flags) { return fault(MOEGGUF_FAULT_OPEN) ? -1 : open(path, flags | O_CLOEXEC); }

int sys_fstat(int fd, struct stat * st) { return fault(MOEGGUF_FAULT_STAT) ? -1 : fstat(fd, st); }

ssize_t sys_pread(int fd, void * buffer, size_t n, off_t offset) {
    if (fault(MOEGGUF_FAULT_SLOW_READ)) {
        struct timespec pause = {2, 0};
        nanosleep(&pause, nullptr);
    }
    if (fault(MOEGGUF_FAULT_EINTR)) {
        errno = EINTR;
        return -1;
    }
    if (fault(MOEGGUF_FAULT_READ)) { return -1; }
    // A short read keeps the alignment that O_DIRECT asks for, as a real one does.
    if (n > 4096 && fault(MOEGGUF_FAULT_SHORT_READ)) { n = 4096; }
    return pread(fd, buffer, n, offset);
}

void * sys_aligned_alloc(size_t alignment, size_t n) {
    if (fault(MOEGGUF_FAULT_ALLOC)) { return nullptr; }
    void * memory = nullptr;
    return posix_memalign(&memory, alignment, n) == 0 ? memory : nullptr;
}

} // namespace moegguf

extern "C" void moegguf_fault_arm(int kind, uint64_t nth, int sticky, int sys_errno) {
    if (kind < 0 || kind >= MOEGGUF_FAULT_KINDS) { return; }
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
