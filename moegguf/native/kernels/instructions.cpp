#include "instructions.h"

#include <cstdlib>
#include <cstring>

namespace moegguf::kernels {
namespace {

Instructions detect() {
#if defined(__x86_64__)
    const char * forced = getenv("MOEGGUF_KERNELS");
    const auto is = [forced](const char * name) { return forced && strcmp(forced, name) == 0; };
    __builtin_cpu_init();
    if (!is("upstream") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        const bool has_512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
        return has_512 && !is("avx2") ? Instructions::avx512 : Instructions::avx2;
    }
#endif
    return Instructions::upstream;
}

} // namespace

Instructions instructions() {
    static const Instructions found = detect();
    return found;
}

} // namespace moegguf::kernels
