// os.cpp: implements os.h: the table of the system's real operations, and the function that replaces this table.
#include "os.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

namespace moegguf {
namespace {

ssize_t pread_cached(int fd, void * buffer, size_t n, off_t offset) {
#ifdef RWF_NOWAIT
    const iovec to = {buffer, n};
    return ::preadv2(fd, &to, 1, offset, RWF_NOWAIT);
#else
    (void)fd, (void)buffer, (void)n, (void)offset;
    errno = ENOTSUP;
    return -1;
#endif
}

constexpr OperatingSystem real = {
    [](const char * path, int flags) { return ::open(path, flags); },
    [](int fd, struct stat * status) { return ::fstat(fd, status); },
    ::pread,
    pread_cached,
    ::aligned_alloc,
    ggml_backend_buft_alloc_buffer,
    [](std::function<void()> body) { return std::thread(std::move(body)); },
    ggml_backend_tensor_set_async,
};

std::atomic<const OperatingSystem *> current{&real};

} // namespace

const OperatingSystem & os() { return *current.load(std::memory_order_acquire); }

const OperatingSystem & replace_os(const OperatingSystem & other) { return *current.exchange(&other); }

} // namespace moegguf
