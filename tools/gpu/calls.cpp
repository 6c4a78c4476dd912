// calls.cpp: counts and times calls to four functions of the CUDA runtime. The library is loaded with LD_PRELOAD, and
// tools/gpu/measure.py reads the sums.
#include <cuda_runtime.h>

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <string>

namespace {

struct Sum {
    std::atomic<uint64_t> n = 0;
    std::atomic<uint64_t> ns = 0;
};

uint64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// If another library has loaded the CUDA runtime privately (RTLD_LOCAL), dlsym(RTLD_NEXT) does not find the runtime.
template <typename F>
F * next(const char * name) {
    static const std::string file = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);
    static void * runtime = dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    return (F *)dlsym(runtime ? runtime : RTLD_NEXT, name);
}

template <typename F, typename... Arguments>
cudaError_t counted(Sum & sum, F * call, Arguments... arguments) {
    const uint64_t start = now_ns();
    const cudaError_t error = call(arguments...);
    sum.n += 1;
    sum.ns += now_ns() - start;
    return error;
}

Sum graph_launches, async_copies, synchronisations, event_waits;

} // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    static auto * call = next<decltype(cudaGraphLaunch)>("cudaGraphLaunch");
    return counted(graph_launches, call, graph, stream);
}

EXPORTED cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
    using Call = cudaError_t(void *, const void *, size_t, cudaMemcpyKind, cudaStream_t);
    static Call * call = next<Call>("cudaMemcpyAsync");
    return counted(async_copies, call, to, from, n, kind, stream);
}

EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    static auto * call = next<decltype(cudaStreamSynchronize)>("cudaStreamSynchronize");
    return counted(synchronisations, call, stream);
}

EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    using Call = cudaError_t(cudaStream_t, cudaEvent_t, unsigned int);
    static Call * call = next<Call>("cudaStreamWaitEvent");
    return counted(event_waits, call, stream, event, flags);
}

// Writes two sums for each function, in the order of CALLS in measure.py: the number of calls since the start of the
// process, and their total time in nanoseconds.
EXPORTED void moegguf_calls(uint64_t * sums) {
    for (const Sum * sum : {&graph_launches, &async_copies, &synchronisations, &event_waits}) {
        *sums++ = sum->n;
        *sums++ = sum->ns;
    }
}
