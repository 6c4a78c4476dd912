// processor.cpp: which of the kernels this processor has.
#include "kernels.h"

#include <cstdlib>
#include <cstring>

namespace moegguf::kernels {
namespace {

const Kernels * detect() {
#if defined(__x86_64__)
    const char * forced = getenv("MOEGGUF_KERNELS");
    const auto is = [forced](const char * name) { return forced && strcmp(forced, name) == 0; };
    __builtin_cpu_init();
    if (!is("upstream") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        const bool has_512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
        return has_512 && !is("avx2") ? &avx512 : &avx2;
    }
#endif
    return nullptr;
}

} // namespace

const Kernels * processor_kernels() {
    static const Kernels * found = detect();
    return found;
}

} // namespace moegguf::kernels
