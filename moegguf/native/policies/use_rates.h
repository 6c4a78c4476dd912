// use_rates.h: the probability that a token uses an expert, as estimated from what routers chose so far. Arithmetic
// only: no threads, no locks.
#pragma once

#include "policies/policy.h"

#include <algorithm>
#include <array>

namespace moegguf {

// A mixture of predictions: fading averages of use, and recall: what tokens used after earlier ones that had been
// routed as the last one. They are mixed as a logistic regression of each layer, whose weights are learned while it
// runs (Duchi et al. 2011: AdaGrad), as models and layers differ in how long they keep to the same experts. Where
// weights are given, they add up averages as they are, and there is no recall.
class UseRates {
  public:
    static constexpr size_t most_averages = 7;

    // Throws Error(INVALID).
    UseRates(const Layout & layout, const std::vector<float> & half_lives_tokens, const std::vector<float> & weights);

    // A routing event of n_tokens tokens, whose uses count in averages as if spread evenly over them.
    void count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);

    const float * row(int il) const { return &rates_[layout_.key(il, 0)]; } // [n_expert], above 0

  private:
    static constexpr size_t n_inputs = most_averages + 1, recalled = most_averages; // the last one
    static constexpr int window = 1536, n_after = 6; // earlier tokens that recall knows, those that it expects again
    using Inputs = std::array<float, n_inputs>;

    struct History {              // of a layer
        std::vector<int16_t> ids; // [2 * window][n_used], n_expert behind those of a token that used fewer
        int n_tokens = 0, n_used = 0;
        std::array<int16_t, window> n_alike{}; // experts that each token before the last one shares with it
        int n_earlier() const { return std::min(n_tokens - 1, window); }
        const int16_t * last() const { return &ids[(n_tokens - 1) * n_used]; }
    };

    void reserve_for_learning();
    void learn(int il);
    void average(int il, int n_tokens);
    void remember(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);
    void count_alike(int il);
    void recall(int il);

    const Layout & layout_;
    const bool learns_;
    const size_t n_averages_;
    Inputs given_{};                          // weights
    Inputs kept_{};                           // of each average after a token
    std::vector<Inputs> weights_, gradients_; // [n_layer], learned; squares of their gradients so far, added up
    std::vector<Inputs> averages_;            // [n_layer * n_expert_max]
    std::vector<Inputs> inputs_;              // [n_layer * n_expert_max], logits
    std::vector<float> rates_;                // [n_layer * n_expert_max]
    std::vector<float> used_;                 // [n_expert_max] of this event, by share of its tokens
    std::vector<History> histories_;          // [n_layer]
    std::vector<float> alike_weights_;        // of a token that shares 0, 1, ... experts less than the one most alike
    std::array<int, window> n_alike_{};       // of all layers; as in what follows, the last earlier token comes last
    std::array<float, n_after + window> alike_{};
    std::array<float, 1 + window> expected_{}; // how much of each token, the last one included, is expected next
    std::vector<uint8_t> marked_;              // [n_expert_max + 1], the last token's experts
    std::vector<float> sums_;                  // [n_expert_max + 1]
};

} // namespace moegguf
