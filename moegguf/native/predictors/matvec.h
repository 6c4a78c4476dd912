// matvec.h: a matrix of signed bytes times a vector, and softmax, for predictors.
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

// e^x of all, scaled to add up to `sum`.
inline void softmax(float * x, int n, float sum) {
    const float peak = *std::max_element(x, x + n);
    float total = 0.0f;
    for (int i = 0; i < n; i++) {
        x[i] = std::exp(x[i] - peak);
        total += x[i];
    }
    for (int i = 0; i < n; i++) {
        x[i] *= sum / total;
    }
}

} // namespace moegguf
