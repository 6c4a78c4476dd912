// matvec.h: a matrix of signed bytes times a vector, and what predictors do with the result.
// Arithmetic only: it knows no layer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace moegguf {

// W [n_rows][n_cols] with a scale per row; bias [n_rows] may be NULL.
struct ByteMatrix {
    const int8_t * weights = nullptr;
    const float * scale = nullptr;
    const float * bias = nullptr;
    int n_rows = 0;
    int n_cols = 0;
};

// A vector in steps of 16 bits.
class RoundedVector {
  public:
    // False, and a vector of zeros, when x holds numbers that are not finite.
    bool round(const float * x, int n);

    int size() const { return (int)values_.size(); }
    const int16_t * values() const { return values_.data(); }
    float step() const { return step_; }

  private:
    std::vector<int16_t> values_; // keeps its memory
    float step_ = 0.0f;
};

// out [n_rows] = W x + bias; relu: max(that, 0).
void multiply(const ByteMatrix & w, const RoundedVector & x, bool relu, float * out);

inline void add(float * x, const float * y, int n) {
    std::transform(x, x + n, y, x, [](float a, float b) { return a + b; });
}

// Each times a factor, 1 at most.
inline void scale_probabilities(float * p, int n, float factor) {
    std::transform(p, p + n, p, [factor](float value) { return std::min(value * factor, 1.0f); });
}

inline void sigmoid(const float * logits, int n, float * p) {
    std::transform(logits, logits + n, p, [](float logit) { return 1.0f / (1.0f + std::exp(-logit)); });
}

// e^x of all, scaled to add up to `sum`.
inline void softmax(float * x, int n, float sum) {
    const float peak = *std::max_element(x, x + n);
    float total = 0.0f;
    for (int i = 0; i < n; i++) {
        x[i] = std::exp(x[i] - peak);
        total += x[i];
    }
    for (int i = 0; i < n; i++) { x[i] *= sum / total; }
}

} // namespace moegguf
