// matvec.cpp: a matrix of signed bytes times a vector, for predictors.
//
// A predictor's weights do not fit in cache beside the model's, so its time is their bytes over the memory's
// bandwidth: one byte a weight takes a quarter of float32's. The vector is rounded to 16 bits once per call, so that
// the inner loop is whole numbers, which compilers vectorise without being allowed to reorder floats.
#include "moegguf.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

// One binary for all x86 machines; sanitizers cannot run the resolver that picks the clone.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define MOEGGUF_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define MOEGGUF_CLONES
#endif

namespace {

constexpr int32_t part_cols = 512; // |int8 * int16| * 512 stays within int32

// Rounds x to 16 bits; returns the size of one step.
float round_vector(const float * x, int32_t n, int16_t * out) {
    float peak = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        peak = std::max(peak, std::fabs(x[i]));
    }
    if (!(peak > 0.0f) || !std::isfinite(peak)) {
        std::fill(out, out + n, int16_t(0));
        return 0.0f;
    }
    const float steps = 32767.0f / peak;
    for (int32_t i = 0; i < n; i++) {
        out[i] = int16_t(std::lrintf(x[i] * steps));
    }
    return peak / 32767.0f;
}

MOEGGUF_CLONES
int64_t dot(const int8_t * w, const int16_t * x, int32_t n) {
    int64_t total = 0;
    for (int32_t start = 0; start < n; start += part_cols) {
        const int32_t end = std::min(n, start + part_cols);
        int32_t sum = 0;
        for (int32_t i = start; i < end; i++) {
            const int16_t wide = w[i];
            sum += int32_t(wide) * int32_t(x[i]);
        }
        total += sum;
    }
    return total;
}

} // namespace

int moegguf_matvec_q8(const int8_t * w, const float * scale, const float * bias, int32_t n_rows, int32_t n_cols,
                      const float * x, int relu, float * out) {
    if (!w || !scale || !x || !out || n_rows < 0 || n_cols < 0) {
        return MOEGGUF_INVALID;
    }
    try {
        static thread_local std::vector<int16_t> rounded;
        rounded.resize(n_cols);
        const float step = round_vector(x, n_cols, rounded.data());
        for (int32_t row = 0; row < n_rows; row++) {
            float y = float(dot(w + size_t(row) * n_cols, rounded.data(), n_cols)) * (scale[row] * step);
            y += bias ? bias[row] : 0.0f;
            out[row] = relu ? std::max(y, 0.0f) : y;
        }
    } catch (...) {
        return MOEGGUF_MEMORY;
    }
    return MOEGGUF_OK;
}
