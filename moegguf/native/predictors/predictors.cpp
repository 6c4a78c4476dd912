// predictors.cpp: the table of predictors that can be chosen by name, their arrays, and how they multiply with them.
// Makes predictors, changes none.
//
// A predictor's weights do not fit in cache beside the model's, so its time is their bytes over the memory's bandwidth:
// one byte a weight takes a quarter of float32's. The vector is rounded to 16 bits once, so that the inner loop is
// whole numbers, which compilers vectorise without being allowed to reorder floats.
#include "predictors/predictor.h"

#include <algorithm>
#include <limits>

// One binary for all x86 machines; sanitizers cannot run the resolver that picks the clone.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define MOEGGUF_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define MOEGGUF_CLONES
#endif

namespace moegguf {
namespace {

const PredictorType * const types[] = {
    &previous_token_predictor, &token_table_predictor,  &affinity_predictor, &skip_predictor, &mlp_predictor,
    &expert_mlp_predictor,     &routing_path_predictor, &eamc_predictor,
};

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

Arrays::Arrays(const moegguf_predictor & given) {
    constexpr int max_arrays = 1 << 16;
    if (given.n_arrays < 0 || given.n_arrays > max_arrays || (given.n_arrays > 0 && !given.arrays)) {
        throw Error(MOEGGUF_INVALID, "a predictor has 0 to " + std::to_string(max_arrays) + " arrays");
    }
    for (int i = 0; i < given.n_arrays; i++) {
        const moegguf_array & array = given.arrays[i];
        if (!array.name || (array.n > 0 && !array.data)) {
            throw Error(MOEGGUF_INVALID, "a predictor's array has a name and its values");
        }
        arrays_[array.name] = array;
    }
}

const void * Arrays::find(const std::string & name, int type, size_t n) const {
    const auto found = arrays_.find(name);
    if (found == arrays_.end()) { throw Error(MOEGGUF_INVALID, "the predictor needs an array '" + name + "'"); }
    const moegguf_array & array = found->second;
    if (array.type != type || array.n == 0 || (n > 0 && array.n != n)) {
        throw Error(MOEGGUF_INVALID, "the array '" + name + "' has " + std::to_string(array.n) + " values of type " +
                                         std::to_string(array.type) + ", not " + std::to_string(n) + " of type " +
                                         std::to_string(type));
    }
    return array.data;
}

size_t Arrays::size(const std::string & name) const {
    const auto found = arrays_.find(name);
    return found == arrays_.end() ? 0 : found->second.n;
}

const PredictorType & predictor_type(const char * name) {
    std::string known;
    for (const PredictorType * type : types) {
        if (name && std::string(name) == type->name) { return *type; }
        known += (known.empty() ? "" : ", ") + std::string(type->name);
    }
    throw Error(MOEGGUF_INVALID,
                "there is no native predictor '" + std::string(name ? name : "") + "'; known are " + known);
}

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
