// device_failure.cpp: one line about a device that does not answer any more, before its backend ends the process.
//
// ggml's backends call ggml_abort() then, from any thread, and expect no return. Who started the process finds the line
// on its stderr (moegguf/serving/worker_process.py), and goes on without the device.
// It writes one line and changes nothing of a store.
#include "api.h"

#include "ggml-impl.h" // ggml_print_backtrace
#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <mutex>

namespace moegguf {
namespace {

ggml_abort_callback_t next = nullptr;

// "FILE:LINE: text" of a backend other than the CPU's. ggml's own checks, and the CPU's, are faults of a program.
bool of_a_device(const char * message) {
    const char * text = strstr(message, ": ");
    const auto names = [&](const char * part) {
        const char * at = strstr(message, part);
        return at && (!text || at < text);
    };
    return names("ggml-") && !names("ggml-cpu") && !names("ggml-backend") && !names("ggml-alloc");
}

void report(const char * message) {
    if (of_a_device(message)) {
        const char * text = strstr(message, ": ");
        fprintf(stderr,
                "moegguf: the device failed: %s. This process ends; run again, and without vram_cache on the CPU.\n",
                text ? text + 2 : message);
    }
    if (next) {
        next(message);
    } else {
        fprintf(stderr, "%s\n", message);
        ggml_print_backtrace();
    }
}

} // namespace

void report_device_failures() {
    static std::once_flag once;
    std::call_once(once, [] { next = ggml_set_abort_callback(report); });
}

} // namespace moegguf
