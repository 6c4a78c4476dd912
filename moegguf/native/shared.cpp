#include "shared.h"

#include <pthread.h>

namespace moegguf {
namespace {

std::atomic<uint32_t> generation{0};

// getpid() would be a system call at every routing event.
const int registered = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });

} // namespace

uint32_t fork_generation() {
    (void)registered;
    return generation.load(std::memory_order_relaxed);
}

} // namespace moegguf
