#include "policies/use_rates.h"

#include <cstring>
#include <numeric>

namespace moegguf {
namespace {

constexpr float least_rate = 1e-4f;  // a token uses no expert less often than this
constexpr float least_input = 1e-3f; // whose logit is taken
constexpr float learning_rate = 0.03f, first_gradient = 1e-3f;
constexpr float first_recall = 0.4f;    // its weight
constexpr int most_learned_tokens = 64; // of a prompt only the average is known
constexpr float sharpness = 16.0f;      // a token that shares nothing counts exp(-16) of one that shares every expert

// How much what came 1, 2, ... tokens after an earlier one says about the next.
constexpr std::array<float, 6> after = {0.4f, 0.25f, 0.15f, 0.1f, 0.05f, 0.05f};

// The logarithm in it is linear between powers of two, which is near enough and takes no call.
float logit(float p) {
    p = std::clamp(p, least_input, 1.0f - least_input);
    const float rest = 1.0f - p;
    int32_t bits, bits_of_rest;
    std::memcpy(&bits, &p, sizeof p);
    std::memcpy(&bits_of_rest, &rest, sizeof rest);
    return (float)(bits - bits_of_rest) * (0.6931472f / (1 << 23));
}

} // namespace

UseRates::UseRates(const Layout & layout, const std::vector<float> & half_lives_tokens,
                   const std::vector<float> & weights)
    : layout_(layout),
      learns_(weights.empty()),
      n_averages_(half_lives_tokens.size()),
      averages_(layout.n_keys(), Inputs{}),
      rates_(layout.n_keys(), least_rate),
      used_(layout.n_expert_max) {
    const size_t n = n_averages_;
    if (n == 0 || n > most_averages || (!learns_ && weights.size() != n)) {
        throw Error(MOEGGUF_INVALID, "there are 1 to " + std::to_string(most_averages) + " half-lives, not " +
                                         std::to_string(n) + ", with a weight each or none, not " +
                                         std::to_string(weights.size()));
    }
    float sum = 0.0f;
    for (size_t i = 0; i < n; i++) {
        kept_[i] = kept_after(half_lives_tokens[i], 1);
        given_[i] = learns_ ? (1.0f - first_recall) / n : weights[i];
        if (!at_least_zero(given_[i])) {
            throw Error(MOEGGUF_INVALID, "an average's weight is 0 or more, not " + std::to_string(given_[i]));
        }
        sum += given_[i];
    }
    if (sum <= 0.0f || !std::isfinite(sum)) {
        throw Error(MOEGGUF_INVALID, "the weights of the averages add up to " + std::to_string(sum));
    }
    if (learns_) {
        given_[recalled] = first_recall;
        reserve_for_learning();
    }
}

void UseRates::reserve_for_learning() {
    Inputs first;
    first.fill(first_gradient);
    weights_.assign(layout_.layers.size(), given_);
    gradients_.assign(layout_.layers.size(), first);
    inputs_.assign(layout_.n_keys(), Inputs{});
    marked_.resize(layout_.n_expert_max + 1);
    sums_.resize(layout_.n_expert_max + 1);
    histories_.resize(layout_.layers.size());
    int n_used = 0; // of all layers
    for (int il : layout_.moe_layers) {
        histories_[il].n_used = layout_.layers[il].n_expert_used;
        histories_[il].ids.resize(2 * window * histories_[il].n_used);
        n_used += histories_[il].n_used;
    }
    for (int i = 0; i <= n_used; i++) { alike_weights_.push_back(std::exp(-sharpness * i / n_used)); }
}

void UseRates::count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
    const int n_expert = layout_.layers[il].n_expert;
    std::fill_n(used_.begin(), n_expert, 0.0f);
    for (int64_t use = 0; use < (int64_t)n_expert_used * n_tokens; use++) { used_[expert_ids[use]] += 1.0f / n_tokens; }
    if (learns_ && n_tokens <= most_learned_tokens && histories_[il].n_tokens > 0) { learn(il); }
    average(il, n_tokens);
    if (learns_) {
        remember(il, expert_ids, n_expert_used, n_tokens);
        count_alike(il);
        recall(il);
    }
    const Inputs & weights = learns_ ? weights_[il] : given_;
    const std::vector<Inputs> & inputs = learns_ ? inputs_ : averages_;
    for (int key = layout_.key(il, 0); key < layout_.key(il, n_expert); key++) {
        const float sum = std::inner_product(weights.begin(), weights.end(), inputs[key].begin(), 0.0f);
        rates_[key] = std::max(learns_ ? 1.0f / (1.0f + std::exp(-sum)) : sum, least_rate);
    }
}

// One step along the gradient of the logarithm of what was predicted of what came.
void UseRates::learn(int il) {
    Inputs gradient{};
    for (int e = 0; e < layout_.layers[il].n_expert; e++) {
        const int key = layout_.key(il, e);
        const float error = (used_[e] - rates_[key]) / layout_.layers[il].n_expert_used;
        for (size_t i = 0; i < n_inputs; i++) { gradient[i] += error * inputs_[key][i]; }
    }
    for (size_t i = 0; i < n_inputs; i++) {
        gradients_[il][i] += gradient[i] * gradient[i];
        weights_[il][i] += learning_rate * gradient[i] / std::sqrt(gradients_[il][i]);
    }
}

// As inputs, averages begin as if half a token had used every expert alike.
void UseRates::average(int il, int n_tokens) {
    const Layer & layer = layout_.layers[il];
    const float alike = (float)layer.n_expert_used / layer.n_expert;
    Inputs kept = kept_, prior{};
    for (size_t i = 0; i < most_averages; i++) {
        kept[i] = n_tokens > 1 ? std::pow(kept[i], (float)n_tokens) : kept[i];
        prior[i] = 0.5f * (1.0f - kept_[i]);
    }
    for (int e = 0; e < layer.n_expert; e++) {
        const int key = layout_.key(il, e);
        for (size_t i = 0; i < most_averages; i++) {
            averages_[key][i] = used_[e] + kept[i] * (averages_[key][i] - used_[e]);
        }
        for (size_t i = 0; learns_ && i < n_averages_; i++) {
            inputs_[key][i] = logit((averages_[key][i] + prior[i] * alike) / (1.0f + prior[i]));
        }
    }
}

// Tokens of an event come one after another, also where they are of several sequences.
void UseRates::remember(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
    History & history = histories_[il];
    const int n_used = history.n_used;
    for (int token = std::max(0, n_tokens - window); token < n_tokens; token++) {
        if (history.n_tokens == 2 * window) {
            std::copy_n(&history.ids[window * n_used], window * n_used, history.ids.begin());
            history.n_tokens = window;
        }
        const auto ids = history.ids.begin() + history.n_tokens++ * n_used;
        std::fill_n(ids, n_used, layout_.layers[il].n_expert);
        std::copy_n(expert_ids + (int64_t)token * n_expert_used, std::min(n_expert_used, n_used), ids);
    }
}

void UseRates::count_alike(int il) {
    History & history = histories_[il];
    const int n_used = history.n_used, n_earlier = history.n_earlier();
    std::fill(marked_.begin(), marked_.end(), 0);
    for (int i = 0; i < n_used; i++) { marked_[history.last()[i]] = history.last()[i] < layout_.layers[il].n_expert; }
    const int16_t * ids = history.last() - n_earlier * n_used;
    for (int at = window - n_earlier; at < window; at++, ids += n_used) {
        int n = 0;
        for (int i = 0; i < n_used; i++) { n += marked_[ids[i]]; }
        n_alike_[at] += n - history.n_alike[at];
        history.n_alike[at] = n;
    }
}

// Each earlier token counts by how much of its routing, over all layers, is the last token's.
void UseRates::recall(int il) {
    const History & history = histories_[il];
    const int n_used = history.n_used, n_earlier = history.n_earlier(), first = window - n_earlier;
    if (n_earlier == 0) { return; }
    const int most_alike = *std::max_element(n_alike_.begin() + first, n_alike_.end());
    float sum = 0.0f;
    std::fill_n(alike_.begin(), n_after + first, 0.0f);
    for (int at = first; at < window; at++) { sum += alike_[n_after + at] = alike_weights_[most_alike - n_alike_[at]]; }
    for (int at = first; at <= window; at++) {
        expected_[at] = 0.0f;
        for (int i = 0; i < n_after; i++) { expected_[at] += after[i] * alike_[n_after + at - 1 - i]; }
    }
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    const int16_t * ids = history.last() - n_earlier * n_used;
    for (int at = first; at <= window; at++, ids += n_used) {
        for (int i = 0; i < n_used; i++) { sums_[ids[i]] += expected_[at]; }
    }
    for (int e = 0; e < layout_.layers[il].n_expert; e++) {
        inputs_[layout_.key(il, e)][recalled] = logit(sums_[e] / sum);
    }
}

} // namespace moegguf
