#include "policies/use_rates.h"

#include <algorithm>

namespace moegguf {
namespace {

constexpr float least_rate = 1e-4f; // a token uses no expert less often than this
constexpr float learning_rate = 0.1f;
constexpr float least_learned = 0.01f, most_learned = 0.99f; // predictions, as far as weights are learned from them
constexpr float least_weight = 1e-3f;                        // so that any can come back
constexpr int most_learned_tokens = 64;                      // of a prompt only the average is known

// How much what came 1, 2, ... tokens after an earlier one says about the next.
constexpr float after[] = {0.4f, 0.28f, 0.19f, 0.13f};

} // namespace

UseRates::UseRates(const Layout & layout, const std::vector<float> & half_lives_tokens,
                   const std::vector<float> & weights)
    : layout_(layout),
      learns_(weights.empty()),
      predictions_(layout.n_keys(), Predictions{}),
      rates_(layout.n_keys(), least_rate),
      used_(layout.n_expert_max) {
    const size_t n = half_lives_tokens.size();
    if (n == 0 || n > most_averages || (!learns_ && weights.size() != n)) {
        throw Error(MOEGGUF_INVALID, "there are 1 to " + std::to_string(most_averages) + " half-lives, not " +
                                         std::to_string(n) + ", with a weight each or none, not " +
                                         std::to_string(weights.size()));
    }
    float sum = 0.0f;
    for (size_t i = 0; i < n; i++) {
        kept_[i] = kept_after(half_lives_tokens[i], 1);
        weights_[i] = learns_ ? 1.0f / (n + 1) : weights[i];
        if (!at_least_zero(weights_[i])) {
            throw Error(MOEGGUF_INVALID, "an average's weight is 0 or more, not " + std::to_string(weights_[i]));
        }
        sum += weights_[i];
    }
    if (sum <= 0.0f || !std::isfinite(sum)) {
        throw Error(MOEGGUF_INVALID, "the weights of the averages add up to " + std::to_string(sum));
    }
    if (learns_) {
        weights_[recalled] = 1.0f / (n + 1);
        history_.assign(layout.n_keys(), 0);
        n_alike_.assign(layout.layers.size(), {});
    }
}

float UseRates::mixed(const Predictions & of) const {
    float sum = 0.0f;
    for (size_t i = 0; i < n_predictions; i++) {
        sum += weights_[i] * of[i];
    }
    return sum;
}

void UseRates::count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
    const int first = layout_.key(il, 0), n_expert = layout_.layers[il].n_expert;
    std::fill_n(used_.begin(), n_expert, 0.0f);
    for (int64_t use = 0; use < (int64_t)n_expert_used * n_tokens; use++) {
        used_[expert_ids[use]] += 1.0f / n_tokens;
    }
    if (learns_ && n_tokens <= most_learned_tokens) {
        learn_weights(first, n_expert, n_expert_used);
    }
    Predictions kept = kept_;
    for (size_t i = 0; n_tokens > 1 && i < most_averages; i++) {
        kept[i] = std::pow(kept[i], (float)n_tokens);
    }
    for (int e = 0; e < n_expert; e++) {
        Predictions & of = predictions_[first + e];
        for (size_t i = 0; i < most_averages; i++) {
            of[i] = used_[e] + kept[i] * (of[i] - used_[e]);
        }
    }
    if (learns_) {
        remember(il, expert_ids, n_expert_used, n_tokens);
        recall(il, n_expert_used);
    }
    for (int e = 0; e < n_expert; e++) {
        rates_[first + e] = std::max(mixed(predictions_[first + e]), least_rate);
    }
}

// One step along the gradient of the logarithm of what was predicted of what came.
void UseRates::learn_weights(int first, int n_expert, int n_expert_used) {
    Predictions gradient{};
    for (int e = 0; e < n_expert; e++) {
        const Predictions & of = predictions_[first + e];
        const float p = std::clamp(mixed(of), least_learned, most_learned);
        const float error = (used_[e] - p) / (p * (1.0f - p));
        for (size_t i = 0; i < n_predictions; i++) {
            gradient[i] += error * of[i];
        }
    }
    for (size_t i = 0; i < n_predictions; i++) {
        const float step = std::clamp(learning_rate * gradient[i] / n_expert_used, -1.0f, 1.0f);
        if (weights_[i] > 0.0f) {
            weights_[i] = std::max(weights_[i] * std::exp(step), least_weight);
        }
    }
}

// Tokens of an event come one after another, also where they are of several sequences.
void UseRates::remember(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
    uint64_t * history = &history_[layout_.key(il, 0)];
    std::array<int16_t, window> n_alike{};
    for (int token = std::max(0, n_tokens - window); token < n_tokens; token++) {
        const int32_t * ids = expert_ids + (int64_t)token * n_expert_used;
        for (int e = 0; e < layout_.layers[il].n_expert; e++) {
            history[e] <<= 1;
        }
        for (int i = 0; i < n_expert_used; i++) {
            for (uint64_t earlier = history[ids[i]]; token == n_tokens - 1 && earlier; earlier &= earlier - 1) {
                n_alike[__builtin_ctzll(earlier)] += 1;
            }
        }
        for (int i = 0; i < n_expert_used; i++) {
            history[ids[i]] |= 1;
        }
    }
    for (int age = 1; age < window; age++) {
        n_alike_all_[age] += n_alike[age] - n_alike_[il][age];
    }
    n_alike_[il] = n_alike;
}

// Each earlier token counts by how much of its routing, over all layers, is the last token's.
void UseRates::recall(int il, int n_expert_used) {
    const int most_alike = *std::max_element(n_alike_all_.begin(), n_alike_all_.end());
    ByAge weights{};
    float sum = 0.0f;
    for (int age = 1; age < window; age++) {
        const float weight = std::exp(float(n_alike_all_[age] - most_alike) / n_expert_used);
        sum += weight;
        for (int i = 0; i < std::min((int)std::size(after), age); i++) {
            weights[age - 1 - i] += weight * after[i];
        }
    }
    for (int e = 0; e < layout_.layers[il].n_expert; e++) {
        float p = 0.0f;
        for (uint64_t used = history_[layout_.key(il, e)]; used; used &= used - 1) {
            p += weights[__builtin_ctzll(used)];
        }
        predictions_[layout_.key(il, e)][recalled] = p / sum;
    }
}

} // namespace moegguf
