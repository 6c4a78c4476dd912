// network.h: a small interpreter of neural networks. A network is a list of steps that each change one vector: dense
// layers, T5's norm, attention and sums. The networks of ProMoE, DuoServe-MoE and ExpertFlow are such lists.
//
// A network contains only arithmetic. It uses neither threads nor locks, and allocates no memory after the first runs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace moegguf {

// A weight matrix W [n_rows][n_cols] of int8 with one scale for each row: a weight is its int8 value times the row's
// scale. bias [n_rows] may be NULL.
struct ByteMatrix {
    const int8_t * weights = nullptr;
    const float * scale = nullptr;
    const float * bias = nullptr;
    int n_rows = 0;
    int n_cols = 0;
};

// A vector that is rounded to 16-bit integers. Each value is its integer times step().
class RoundedVector {
  public:
    // Rounds n values. Returns false and stores zeros if a value in x is not finite.
    bool round(const float * x, int n);

    int size() const { return (int)values_.size(); }
    const int16_t * values() const { return values_.data(); }
    float step() const { return step_; }

  private:
    std::vector<int16_t> values_; // kept between calls, so that most calls allocate no memory
    float step_ = 0.0f;
};

// Computes out [n_rows] = W x + bias. relu: negative results become 0.
void multiply(const ByteMatrix & w, const RoundedVector & x, bool relu, float * out);

inline void add(float * x, const float * y, int n) {
    std::transform(x, x + n, y, x, [](float a, float b) { return a + b; });
}

// Multiplies each probability by a factor. Results above 1 become 1.
inline void scale_probabilities(float * p, int n, float factor) {
    std::transform(p, p + n, p, [factor](float value) { return std::min(value * factor, 1.0f); });
}

inline void sigmoid(const float * logits, int n, float * p) {
    std::transform(logits, logits + n, p, [](float logit) { return 1.0f / (1.0f + std::exp(-logit)); });
}

// Replaces each x with e^x, scaled so that all results add up to `sum`.
inline void softmax(float * x, int n, float sum) {
    const float peak = *std::max_element(x, x + n);
    float total = 0.0f;
    for (int i = 0; i < n; i++) {
        x[i] = std::exp(x[i] - peak);
        total += x[i];
    }
    for (int i = 0; i < n; i++) { x[i] *= sum / total; }
}

// The keys and values of an attention layer: [n_positions][width], with all heads side by side.
class Positions {
  public:
    Positions(int n_positions, int n_head, int width)
        : n_head_(n_head),
          width_(width),
          keys_((size_t)n_positions * width),
          values_(keys_.size()) {}

    // Moves a key and a value from the end of x to this position. Later positions become invalid.
    void keep(std::vector<float> & x, int position);
    void attend(std::vector<float> & query); // replaces a scaled query with the attention's weighted mean of the values

  private:
    const int n_head_, width_;
    int n_ = 0;
    std::vector<float> keys_, values_;
    std::vector<float> scores_, mixed_; // scratch
};

// A network: a list of steps. Steps refer to the caller's weights and positions, which must stay valid.
class Network {
  public:
    Network & dense(const ByteMatrix & w, bool relu = false); // x = W x + bias; relu: negative results become 0
    Network & norm();                                         // x /= its root mean square: T5's norm
    Network & keep(Positions & positions);
    Network & attend(Positions & positions);
    Network & save(); // saves x for the next add()
    Network & add();  // x += the saved vector

    // Applies all steps to x. Each `keep` step stores its key and value at this position. Returns false if a dense
    // layer had an input that was not finite.
    bool run(std::vector<float> & x, int position = 0);
    // Applies all steps to an input that is already rounded for the first dense layer. The result is in `x`. Returns
    // false if a later dense layer had an input that was not finite.
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
