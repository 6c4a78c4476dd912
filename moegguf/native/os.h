// os.h: a table of operations that the operating system or a device may refuse. Most code of the store calls these
// operations only through the table.
//
// Tests replace the table with one in which the Nth operation fails (moegguf/testing/faults.cpp).
#pragma once

#include "moegguf.h"

#include <functional>
#include <thread>

#include <sys/stat.h>
#include <sys/types.h>

namespace moegguf {

struct OperatingSystem {
    int (*open)(const char * path, int flags); // like open(2): -1 and errno on failure
    int (*fstat)(int fd, struct stat * status);
    ssize_t (*pread)(int fd, void * buffer, size_t n, off_t offset);
    ssize_t (*pread_cached)(int fd, void * buffer, size_t n, off_t offset); // fails if it would wait for a drive
    void * (*aligned_alloc)(size_t alignment, size_t n);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t buft, size_t n); // returns nullptr if refused
    std::thread (*start_thread)(std::function<void()> body); // throws std::system_error if refused
    void (*copy_to_device)(ggml_backend_t backend, ggml_tensor * to, const void * data, size_t offset, size_t n);
};

MOEGGUF_API const OperatingSystem & os();

// Replaces the table, and returns the previous one. `other` must stay valid. Any thread may call this.
MOEGGUF_API const OperatingSystem & replace_os(const OperatingSystem & other);

} // namespace moegguf
