// network.h: a small interpreter of arrays. A network is a list of steps that each change one vector: dense layers,
// T5's norm, attention and sums. ProMoE's, DuoServe-MoE's and ExpertFlow's networks are such lists.
//
// Arithmetic only: no threads, no locks, and no allocation once warm.
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

// Keys and values of the positions that an attention looks at, [n][width] of all heads.
class Positions {
  public:
    Positions(int n_positions, int n_head, int width)
        : n_head_(n_head),
          width_(width),
          keys_((size_t)n_positions * width),
          values_(keys_.size()) {}

    void keep(std::vector<float> & x,
              int position);                 // takes a key and a value from the end of x; it is the last position
    void attend(std::vector<float> & query); // already scaled; it becomes the mixture of values

  private:
    const int n_head_, width_;
    int n_ = 0;
    std::vector<float> keys_, values_;
    std::vector<float> scores_, mixed_; // scratch
};

// Steps are added once, and read in place what they are given.
class Network {
  public:
    Network & dense(const ByteMatrix & w, bool relu = false); // x = W x + bias; relu: max(that, 0)
    Network & norm();                                         // x /= its root mean square: T5's norm
    Network & keep(Positions & positions);
    Network & attend(Positions & positions);
    Network & save(); // the residual
    Network & add();  // x += what was saved

    // Takes the steps, at this position of those that `keep` fills. Returns false where numbers were not finite.
    bool run(std::vector<float> & x, int position = 0);
    // Takes the steps from the first dense layer's input, which is rounded already; the result is in `x`.
    bool run(const RoundedVector & input, std::vector<float> & x);
    void set_saved(const std::vector<float> & x) { saved_ = x; }

  private:
    enum class Op { dense, norm, keep, attend, save, add };
    struct Step {
        Op op;
        ByteMatrix matrix;
        bool relu = false;
        Positions * positions = nullptr;
    };

    Network & add(const Step & step);
    bool take(const Step & step, std::vector<float> & x, int position);

    std::vector<Step> steps_;
    RoundedVector rounded_;
    std::vector<float> saved_;
};

} // namespace moegguf
