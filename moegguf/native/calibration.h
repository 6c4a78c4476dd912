// calibration.h: what a predictor's probabilities are worth: how often experts predicted with one were used.
// Arithmetic only: it knows no layer, no slot and no thread.
#pragma once

#include <algorithm>
#include <array>

namespace moegguf {

// Predictors promise an order, not a scale, and a layer further ahead is less certain. Each distance counts in bins of
// equal width, the last some thousand experts most.
class Calibration {
  public:
    Calibration() {
        for (auto & bins : bins_) {
            for (int i = 0; i < n_bins; i++) { bins[i] = {first_weight * (i + 0.5f) / n_bins, first_weight}; }
        }
    }

    // The share of experts predicted with p at this distance that were used.
    float of(int distance, float p) const {
        const Bin & bin = bins_[row(distance)][index(p)];
        return bin.used / bin.seen;
    }

    void count(int distance, float p, bool used) {
        Bin & bin = bins_[row(distance)][index(p)];
        bin.used += used;
        bin.seen += 1.0f;
        if (bin.seen > most_seen) {
            bin.used *= 0.5f;
            bin.seen *= 0.5f;
        }
    }

  private:
    struct Bin {
        float used;
        float seen;
    };
    static constexpr int n_bins = 16, n_distances = 16;
    static constexpr float first_weight = 8.0f; // of the predictor's own word
    static constexpr float most_seen = 8192.0f;

    static int row(int distance) { return std::clamp(distance, 1, n_distances) - 1; }
    static int index(float p) { return p > 0.0f ? std::min((int)(p * n_bins), n_bins - 1) : 0; } // not a number: 0

    std::array<std::array<Bin, n_bins>, n_distances> bins_;
};

} // namespace moegguf
