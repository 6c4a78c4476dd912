// os.cpp: implements os.h: the table of the system's real operations, and the function that replaces this table.
#include "os.h"

#include <atomic>
#include <cstdlib>

#include <fcntl.h>
#include <unistd.h>

namespace moegguf {
namespace {

constexpr OperatingSystem real = {
    [](const char * path, int flags) { return ::open(path, flags); },
    [](int fd, struct stat * status) { return ::fstat(fd, status); },
    ::pread,
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
