// network.cpp: implements network.h: multiplication by a matrix, and the other steps of a network.
//
// A predictor's weights do not stay in the processor's cache, because the model's weights displace them. So memory
// bandwidth determines the time, and a one-byte weight takes a quarter of the time of a float. Each dense layer rounds
// its input vector to 16 bits once, so that the inner loop adds integers. Compilers vectorise sums of integers, but may
// not reorder sums of floats.
#include "predictors/network.h"

#include <limits>

// Compiles a function for several instruction sets, so that one binary serves all x86 machines. Sanitizers cannot run
// the resolver that chooses a version.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define MOEGGUF_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define MOEGGUF_CLONES
#endif

namespace moegguf {
namespace {

constexpr float norm_eps = 1e-6f;

constexpr int32_t part_cols = 512;
static_assert(INT64_C(128) * 32767 * part_cols <= INT32_MAX, "sums of parts fit");

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
        sum += x[i] * 0.0f; // becomes NaN if a value is not finite
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

void Positions::keep(std::vector<float> & x, int position) {
    const auto value = x.end() - width_, key = value - width_;
    std::copy(key, value, keys_.begin() + (size_t)position * width_);
    std::copy(value, x.end(), values_.begin() + (size_t)position * width_);
    n_ = position + 1;
    x.erase(key, x.end());
}

void Positions::attend(std::vector<float> & query) {
    const int size = width_ / n_head_;
    mixed_.assign(width_, 0.0f);
    scores_.resize(n_);
    for (int from = 0; from < width_; from += size) {
        for (int i = 0; i < n_; i++) {
            const float * key = &keys_[size_t(i) * width_ + from];
            float sum = 0.0f;
            for (int j = 0; j < size; j++) { sum += query[from + j] * key[j]; }
            scores_[i] = sum;
        }
        softmax(scores_.data(), n_, 1.0f);
        for (int i = 0; i < n_; i++) {
            const float * value = &values_[size_t(i) * width_ + from];
            for (int j = 0; j < size; j++) { mixed_[from + j] += scores_[i] * value[j]; }
        }
    }
    query = mixed_;
}

Network & Network::add(const Step & step) {
    steps_.push_back(step);
    return *this;
}

Network & Network::dense(const ByteMatrix & w, bool relu) { return add({Op::dense, w, relu}); }
Network & Network::norm() { return add({Op::norm, {}}); }
Network & Network::keep(Positions & positions) { return add({Op::keep, {}, false, &positions}); }
Network & Network::attend(Positions & positions) { return add({Op::attend, {}, false, &positions}); }
Network & Network::save() { return add({Op::save, {}}); }
Network & Network::add() { return add({Op::add, {}}); }

bool Network::take(const Step & step, std::vector<float> & x, int position) {
    switch (step.op) {
        case Op::dense: {
            const bool is_finite = rounded_.round(x.data(), step.matrix.n_cols);
            x.resize(step.matrix.n_rows);
            multiply(step.matrix, rounded_, step.relu, x.data());
            return is_finite;
        }
        case Op::norm: {
            float sum = 0.0f;
            for (const float value : x) { sum += value * value; }
            const float scale = 1.0f / std::sqrt(sum / x.size() + norm_eps);
            for (float & value : x) { value *= scale; }
            break;
        }
        case Op::keep:
            step.positions->keep(x, position);
            break;
        case Op::attend:
            step.positions->attend(x);
            break;
        case Op::save:
            saved_ = x;
            break;
        case Op::add:
            moegguf::add(x.data(), saved_.data(), (int)x.size());
            break;
    }
    return true;
}

bool Network::run(std::vector<float> & x, int position) {
    bool is_finite = true;
    for (const Step & step : steps_) { is_finite &= take(step, x, position); }
    return is_finite;
}

bool Network::run(const RoundedVector & input, std::vector<float> & x) {
    const Step & first = steps_[0];
    x.resize(first.matrix.n_rows);
    multiply(first.matrix, input, first.relu, x.data());
    bool is_finite = true;
    for (size_t i = 1; i < steps_.size(); i++) { is_finite &= take(steps_[i], x, 0); }
    return is_finite;
}

} // namespace moegguf
