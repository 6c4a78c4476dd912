// use_rates.h: the probability that a token uses an expert, as estimated from what routers chose so far. Arithmetic
// only: no threads, no locks.
#pragma once

#include "policies/averages.h"

#include <array>

namespace moegguf {

// A mixture of predictions: fading averages of use, and recall: what tokens used after earlier ones that had been
// routed as the last one. Its weights are learned while it runs, by exponentiated gradients of the logarithmic loss
// (Kivinen and Warmuth 1997), as models differ in how long they keep to the same experts. Given weights stay as they
// are, and there is no recall then.
class UseRates {
  public:
    static constexpr size_t most_averages = 7;

    // Throws Error(INVALID).
    UseRates(const Layout & layout, const std::vector<float> & half_lives_tokens, const std::vector<float> & weights);

    // A routing event of n_tokens tokens, whose uses count in averages as if spread evenly over them.
    void count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);

    const float * row(int il) const { return &rates_[layout_.key(il, 0)]; } // [n_expert], above 0

  private:
    static constexpr size_t n_predictions = most_averages + 1, recalled = most_averages; // the last one
    static constexpr int window = 64;                                                    // tokens that recall knows
    using Predictions = std::array<float, n_predictions>;
    using ByAge = std::array<float, window>; // [a token's age]

    float mixed(const Predictions & of) const;
    void learn_weights(int first, int n_expert, int n_expert_used);
    void remember(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);
    void recall(int il, int n_expert_used);

    const Layout & layout_;
    const bool learns_;
    Predictions weights_{};
    Predictions kept_{};                               // of each average after a token
    std::vector<Predictions> predictions_;             // [n_layer * n_expert_max]
    std::vector<float> rates_;                         // [n_layer * n_expert_max]
    std::vector<float> used_;                          // [n_expert_max] of this event, by share of its tokens
    std::vector<uint64_t> history_;                    // [n_layer * n_expert_max], bit i: used i tokens ago
    std::vector<std::array<int16_t, window>> n_alike_; // [n_layer], experts that a token of that age shares
    std::array<int, window> n_alike_all_{};            // with the last one; over all layers
};

} // namespace moegguf
