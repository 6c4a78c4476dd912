// expected_use.cpp: policies that estimate when each expert will be used next, and evict the expert whose expected next
// use is furthest away.
//
// Time is counted in passes of one token. Let p be the share of a layer's tokens that use an expert. The expert's next
// use is then expected 1 / p - 1 passes after its layer is next computed. With a forecast of probability q, the use is
// expected (1 - q) / p passes after the layer is next computed.
//
// The wait until the layer is next computed is a fraction of a pass, or a whole pass for the layer that is being
// computed. The policies multiply this wait by a distance weight, and add the product. They touch only their own tables
// (policy.h).
#include "policies/policy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

namespace moegguf {
namespace {

constexpr float least_rate = 1e-4f; // smallest estimate of the share of tokens that use an expert

// The base of policies that evict the expert whose expected next use is furthest away. Rates: the class that estimates
// the share of tokens that use each expert.
template <class Rates>
class ExpectedUse : public EvictionPolicy {
  public:
    template <typename... Args>
    ExpectedUse(const Layout & layout, float distance_weight, Args... args)
        : layout_(layout),
          rates_(layout, args...),
          wait_(layout.n_keys(), 1.0f / least_rate),
          forecast_(layout.layers.size(), nullptr) {
        // Fills distance_ with the fraction of a pass until a layer is computed, times distance_weight, for each
        // difference `ahead` between that layer and the current one. A later layer is computed in this pass, and an
        // earlier one in the next pass. The current layer counts as a whole pass ahead: its chosen experts are pinned,
        // and its remaining experts wait for the next pass.
        const int n_row = layout.n_moe_layers;
        for (int ahead = 1 - n_row; ahead < n_row; ahead++) {
            distance_.push_back(distance_weight * (ahead > 0 ? ahead : ahead + n_row) / n_row);
        }
    }

    bool orders(const LayerStep & now) const override { return now.decodes; }

    bool on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) override {
        rates_.count(il, expert_ids, n_expert_used, n_tokens);
        const float * rates = rates_.row(il);
        std::transform(rates, rates + layout_.layers[il].n_expert, &wait_[layout_.key(il, 0)],
                       [](float p) { return 1.0f / std::max(p, least_rate); });
        return true;
    }

    bool on_forecast(int il, const float * probabilities) override {
        const float * before = std::exchange(forecast_[il], probabilities);
        return before || probabilities;
    }

    // Returns the negated expected number of passes from the next computation of layer il until the expert is used.
    float score(int il, int expert) const override {
        const float wait = wait_[layout_.key(il, expert)], *forecast = forecast_[il];
        return forecast ? -wait * (1.0f - forecast[expert]) : 1.0f - wait;
    }

    // Returns the wait until layer il is next computed, as a fraction of a pass, times -distance_weight. Layer now.il
    // is being computed.
    float layer_offset(int il, const LayerStep & now) const override {
        return -distance_[layout_.row_of[il] - layout_.row_of[now.il] + layout_.n_moe_layers - 1];
    }

  protected:
    const Layout & layout_;

  private:
    Rates rates_;
    std::vector<float> wait_;             // [n_layer * n_expert_max] expected number of passes from one use to the next
    std::vector<const float *> forecast_; // [n_layer][n_expert] probabilities of use; nullptr: there is no forecast
    // [2 * n_moe_layers - 1] fraction of a pass until a layer is computed, times distance_weight.
    std::vector<float> distance_;
};

// ExpertFlow's predictive locality-aware expert caching with real-time correction (sections 3.2.1 and 3.2.2). It keeps
// the experts that are predicted for this pass, nearest layers first.
//
// Victims are chosen roughly in this order:
// - experts that were prefetched, but not chosen by their layer's router;
// - experts that are not predicted for this pass, or whose layer has already been computed;
// - predicted experts, the farthest layer first.
//
// The paper gives this order, but no order within each of the three groups. It explains "locality" only by an example:
// a cache of 8 experts holds the two nearest of four layers, and the third layer when the first one is done. Here,
// predicted experts are ordered by their layer's distance. Experts that are not predicted are ordered by the average
// number of passes until their next use, plus their layer's distance.
class Locality final : public ExpectedUse<FadingAverage> {
  public:
    explicit Locality(const Layout & layout)
        : ExpectedUse(layout, 1.0f, half_life_tokens),
          prefetched_(layout.n_keys(), Early::no),
          active_(layout.n_keys()) {}

    bool takes_as_predicted() const override { return true; }

    // Marks the layer's unused prefetched experts as prefetched in vain. on_use() then removes the mark from each
    // expert that the router chose.
    bool on_routed(int il) override {
        Early * prefetched = &prefetched_[layout_.key(il, 0)];
        std::replace(prefetched, prefetched + layout_.layers[il].n_expert, Early::yes, Early::in_vain);
        return true;
    }

    // Turns probabilities into 1 (active) or 0 (idle), because the paper predicts only whether an expert is active or
    // idle (section 3.1). If a token uses k experts, the k most probable experts are active. Every other expert with a
    // probability of at least `likely` is active, too. An expert with probability 0 is always idle.
    bool on_forecast(int il, const float * probabilities) override {
        if (!probabilities) { return ExpectedUse::on_forecast(il, nullptr); }
        const Layer & layer = layout_.layers[il];
        sorted_.resize(layer.n_expert);
        std::transform(probabilities, probabilities + layer.n_expert, sorted_.begin(), probability);
        const auto last = sorted_.begin() + std::min(layer.n_expert_used, layer.n_expert) - 1;
        std::nth_element(sorted_.begin(), last, sorted_.end(), std::greater<float>());
        const float least = std::min(*last, likely);
        float * active = &active_[layout_.key(il, 0)];
        std::transform(probabilities, probabilities + layer.n_expert, active,
                       [least](float p) { return p > 0.0f && p >= least ? 1.0f : 0.0f; });
        return ExpectedUse::on_forecast(il, active);
    }

    void on_prefetch(int il, int expert) override { prefetched_[layout_.key(il, expert)] = Early::yes; }
    void on_use(int il, int expert) override { prefetched_[layout_.key(il, expert)] = Early::no; }
    void on_evict(int il, int expert) override { prefetched_[layout_.key(il, expert)] = Early::no; }

    float score(int il, int expert) const override {
        // Score of an expert that was prefetched in vain; every other score is higher.
        constexpr float first_to_go = -1e6f;
        const bool is_in_vain = prefetched_[layout_.key(il, expert)] == Early::in_vain;
        return is_in_vain ? first_to_go : ExpectedUse::score(il, expert);
    }

  private:
    enum class Early : uint8_t { no, yes, in_vain };
    static constexpr float half_life_tokens = 14.0f;
    static constexpr float likely = 0.5f; // every expert with at least this probability is active

    // [n_layer * n_expert_max] `yes`: prefetched but not used yet; `in_vain`: the layer's router then chose other
    // experts; `no`: neither.
    std::vector<Early> prefetched_;
    std::vector<float> active_; // [n_layer * n_expert_max] 1: the expert is active
    std::vector<float> sorted_; // scratch
};

constexpr float least_input = 1e-3f; // smallest probability that logit() uses; smaller ones are raised to it

// Returns an approximation of log(p / (1 - p)), with p limited to [least_input, 1 - least_input]. The approximate
// logarithm is linear between powers of two, which is precise enough and fast.
float logit(float p) {
    p = std::clamp(p, least_input, 1.0f - least_input);
    const float rest = 1.0f - p;
    int32_t bits, bits_of_rest;
    std::memcpy(&bits, &p, sizeof p);
    std::memcpy(&bits_of_rest, &rest, sizeof rest);
    return (float)(bits - bits_of_rest) * (0.6931472f / (1 << 23));
}

// Estimates the probability that a token uses an expert, as a mixture of predictions. The predictions are fading
// averages of use, and recall: the experts that were used after earlier tokens whose routing resembled the last
// token's. Each layer mixes them by logistic regression, because layers differ in how long they keep using the same
// experts. The weights are learned while the model runs (Duchi et al. 2011: AdaGrad).
class LearnedRates {
  public:
    explicit LearnedRates(const Layout & layout);

    // Counts a routing event of n_tokens tokens, and updates the layer's probabilities. Events of many tokens do not
    // change the weights. The averages count the event's uses as if they were spread evenly over its tokens.
    void count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);

    const float * row(int il) const { return &rates_[layout_.key(il, 0)]; } // [n_expert] probabilities, above 0

  private:
    static constexpr std::array<float, 6> half_lives_tokens = {1.0f, 4.0f, 16.0f, 64.0f, 256.0f, 4000.0f};
    // Weights in recall: experts that were used 1, 2, ... tokens after a similar earlier token have these weights.
    static constexpr std::array<float, 6> after = {0.4f, 0.25f, 0.15f, 0.1f, 0.05f, 0.05f};
    // `recalled` is the index of recall's input.
    static constexpr size_t n_averages = half_lives_tokens.size(), recalled = n_averages;
    static constexpr int n_after = after.size();
    static constexpr int window = 1536; // largest number of earlier tokens that recall compares with the last one
    using Averages = std::array<float, n_averages>;
    using Inputs = std::array<float, n_averages + 1>;

    struct History { // the experts that the most recent tokens used in one layer
        // [2 * window][n_used] experts of each token; a row with fewer experts is padded with the id n_expert.
        std::vector<int16_t> ids;
        int n_tokens = 0, n_used = 0;
        std::array<int16_t, window> n_alike{}; // number of experts that each earlier token shares with the last token
        int n_earlier() const { return std::min(n_tokens - 1, window); }
        const int16_t * last() const { return &ids[(n_tokens - 1) * n_used]; }
    };

    void learn(int il);
    void average(int il, int n_tokens);
    void remember(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens);
    void count_alike(int il);
    void recall(int il);

    const Layout & layout_;
    Averages kept_{};                         // share of its value that each average keeps after one token
    std::vector<Inputs> weights_, gradients_; // [n_layer] learned weights; sums of the squares of their gradients
    std::vector<Averages> averages_;          // [n_layer * n_expert_max] fading averages of an expert's use
    std::vector<Inputs> inputs_;              // [n_layer * n_expert_max] logits of the predictions
    std::vector<float> rates_;       // [n_layer * n_expert_max] estimated probability that a token uses the expert
    std::vector<float> used_;        // [n_expert_max] share of this event's tokens that use the expert
    std::vector<History> histories_; // [n_layer]
    // [i] weight of an earlier token that shares i fewer experts with the last token than the most similar token does.
    std::vector<float> alike_weights_;
    std::array<int, window> n_alike_{}; // sum of History::n_alike over all layers; the latest token comes last
    std::array<float, n_after + window> alike_{};
    // [earlier tokens, then the last token] weight of the token's experts in the prediction.
    std::array<float, 1 + window> expected_{};
    std::vector<uint8_t> marked_; // [n_expert_max + 1] 1: the last token used the expert
    std::vector<float> sums_; // [n_expert_max + 1] for each expert, the sum of expected_ over the tokens that used it
};

LearnedRates::LearnedRates(const Layout & layout)
    : layout_(layout),
      averages_(layout.n_keys(), Averages{}),
      inputs_(layout.n_keys(), Inputs{}),
      rates_(layout.n_keys(), least_rate),
      used_(layout.n_expert_max),
      histories_(layout.layers.size()),
      marked_(layout.n_expert_max + 1),
      sums_(layout.n_expert_max + 1) {
    // The initial weight of recall, and the initial sum of squared gradients.
    constexpr float first_recall = 0.4f, first_gradient = 1e-3f;
    // A token that shares no expert with the last token has exp(-16) times the weight of a token that shares every
    // expert.
    constexpr float sharpness = 16.0f;
    Inputs weights, gradients;
    weights.fill((1.0f - first_recall) / n_averages);
    weights[recalled] = first_recall;
    gradients.fill(first_gradient);
    weights_.assign(layout.layers.size(), weights);
    gradients_.assign(layout.layers.size(), gradients);
    for (size_t i = 0; i < n_averages; i++) { kept_[i] = kept_after(half_lives_tokens[i], 1); }
    int n_used = 0; // total number of experts that a token uses in all layers
    for (int il : layout.moe_layers) {
        histories_[il].n_used = layout.layers[il].n_expert_used;
        histories_[il].ids.resize(2 * window * histories_[il].n_used);
        n_used += histories_[il].n_used;
    }
    for (int i = 0; i <= n_used; i++) { alike_weights_.push_back(std::exp(-sharpness * i / n_used)); }
}

void LearnedRates::count(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
    constexpr int most_learned_tokens = 64; // events with more tokens do not change the weights
    const int n_expert = layout_.layers[il].n_expert;
    std::fill_n(used_.begin(), n_expert, 0.0f);
    for (int64_t use = 0; use < (int64_t)n_expert_used * n_tokens; use++) { used_[expert_ids[use]] += 1.0f / n_tokens; }
    if (n_tokens <= most_learned_tokens && histories_[il].n_tokens > 0) { learn(il); }
    average(il, n_tokens);
    remember(il, expert_ids, n_expert_used, n_tokens);
    count_alike(il);
    recall(il);
    const Inputs & weights = weights_[il];
    for (int key = layout_.key(il, 0); key < layout_.key(il, n_expert); key++) {
        const float sum = std::inner_product(weights.begin(), weights.end(), inputs_[key].begin(), 0.0f);
        rates_[key] = std::max(1.0f / (1.0f + std::exp(-sum)), least_rate);
    }
}

// Moves the layer's weights by one step of AdaGrad, along the gradient of the log-likelihood of the event's uses.
void LearnedRates::learn(int il) {
    constexpr float learning_rate = 0.03f;
    Inputs gradient{};
    for (int e = 0; e < layout_.layers[il].n_expert; e++) {
        const int key = layout_.key(il, e);
        const float error = (used_[e] - rates_[key]) / layout_.layers[il].n_expert_used;
        for (size_t i = 0; i < gradient.size(); i++) { gradient[i] += error * inputs_[key][i]; }
    }
    for (size_t i = 0; i < gradient.size(); i++) {
        gradients_[il][i] += gradient[i] * gradient[i];
        weights_[il][i] += learning_rate * gradient[i] / std::sqrt(gradients_[il][i]);
    }
}

// Updates the layer's averages, and the inputs that come from them. Each input also includes half an imaginary token
// that used all experts equally, so that an unused expert keeps a small probability.
void LearnedRates::average(int il, int n_tokens) {
    const Layer & layer = layout_.layers[il];
    const float alike = (float)layer.n_expert_used / layer.n_expert;
    Averages kept = kept_, prior{};
    for (size_t i = 0; i < n_averages; i++) {
        kept[i] = n_tokens > 1 ? std::pow(kept[i], (float)n_tokens) : kept[i];
        prior[i] = 0.5f * (1.0f - kept_[i]);
    }
    for (int e = 0; e < layer.n_expert; e++) {
        const int key = layout_.key(il, e);
        for (size_t i = 0; i < n_averages; i++) {
            float & average = averages_[key][i];
            average = used_[e] + kept[i] * (average - used_[e]);
            inputs_[key][i] = logit((average + prior[i] * alike) / (1.0f + prior[i]));
        }
    }
}

// Adds the tokens of an event to the layer's history, as if they followed one another, even if they belong to several
// sequences.
void LearnedRates::remember(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
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

void LearnedRates::count_alike(int il) {
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

// Computes the input `recalled` of each expert in a layer. Does nothing without earlier tokens. The more experts an
// earlier token shares with the last token over all layers, the more weight it has.
void LearnedRates::recall(int il) {
    const History & history = histories_[il];
    const int n_used = history.n_used, n_earlier = history.n_earlier(), first = window - n_earlier;
    if (n_earlier == 0) { return; }
    constexpr float least_expected = 1e-3f; // tokens with a smaller weight are skipped
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
        if (expected_[at] <= least_expected) { continue; }
        for (int i = 0; i < n_used; i++) { sums_[ids[i]] += expected_[at]; }
    }
    for (int e = 0; e < layout_.layers[il].n_expert; e++) {
        inputs_[layout_.key(il, e)][recalled] = logit(sums_[e] / sum);
    }
}

// The policy next-use: Belady's rule with an estimated future. Its scores choose victims in passes that decode. For
// several sequences that decode together, the estimates are only approximate. In all other passes, the policy only
// updates its estimates. Victims are then chosen by recency or, in a sweep, by layer (Residency::victim).
class NextUse final : public ExpectedUse<LearnedRates> {
  public:
    explicit NextUse(const Layout & layout) : ExpectedUse(layout, 4.0f) {}
};

} // namespace

const PolicyType next_use_policy = {"next-use", true, make_policy_of<NextUse>};
const PolicyType locality_policy = {"locality", true, make_policy_of<Locality>};

} // namespace moegguf
