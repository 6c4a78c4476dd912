// matvec.cpp: a predictor's weights do not fit in cache beside the model's, so its time is their bytes over the
// memory's bandwidth: one byte a weight takes a quarter of float32's. The vector is rounded to 16 bits once, so that
// the inner loop is whole numbers, which compilers vectorise without being allowed to reorder floats.
#include "predictors/matvec.h"

#include "moegguf.h"

#include <algorithm>
#include <cmath>
#include <limits>

// One binary for all x86 machines; sanitizers cannot run the resolver that picks the clone.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define MOEGGUF_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define MOEGGUF_CLONES
#endif

namespace moegguf {
namespace {

constexpr int32_t part_cols = 512; // |int8 * int16| * 512 stays within int32

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

bool RoundedVector::round(const float * x, int n) {
    values_.resize(n);
    float peak = 0.0f, sum = 0.0f;
    for (int i = 0; i < n; i++) {
        peak = std::max(peak, std::fabs(x[i]));
        sum += x[i] * 0.0f; // not a number as soon as one is not finite
    }
    const bool finite = sum == 0.0f;
    if (!finite || peak < std::numeric_limits<float>::min()) {
        std::fill(values_.begin(), values_.end(), int16_t(0));
        step_ = 0.0f;
        return finite;
    }
    const float steps = 32767.0f / peak;
    for (int i = 0; i < n; i++) { values_[i] = int16_t(std::lrintf(x[i] * steps)); }
    step_ = peak / 32767.0f;
    return true;
}

void multiply(const ByteMatrix & w, const RoundedVector & x, bool relu, float * out) {
    for (int row = 0; row < w.n_rows; row++) {
        float y = float(dot(w.weights + size_t(row) * w.n_cols, x.values(), w.n_cols)) * (w.scale[row] * x.step());
        y += w.bias ? w.bias[row] : 0.0f;
        out[row] = relu ? std::max(y, 0.0f) : y;
    }
}

} // namespace moegguf

int moegguf_matvec_q8(const int8_t * w, const float * scale, const float * bias, int32_t n_rows, int32_t n_cols,
                      const float * x, int relu, float * out) {
    if (!w || !scale || !x || !out || n_rows < 0 || n_cols < 0) { return MOEGGUF_INVALID; }
    try {
        static thread_local moegguf::RoundedVector rounded;
        rounded.round(x, n_cols);
        moegguf::multiply({w, scale, bias, n_rows, n_cols}, rounded, relu, out);
    } catch (...) { return MOEGGUF_MEMORY; }
    return MOEGGUF_OK;
}
