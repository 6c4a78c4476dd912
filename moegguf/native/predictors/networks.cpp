// networks.cpp: predictors that multiply by matrices. Skip prediction and ProMoE's learned networks (mlp) use the input
// of a layer's router. DuoServe-MoE's ExpertMLP uses the experts that routers chose. The predictors touch only their
// own tables (predictor.h).
#include "predictors/predictor.h"

#include <numeric>

namespace moegguf {
namespace {

// The base of predictors that use a router's input. Keeps a rounded copy of the last router input, if the sequence has
// one token in this pass. Inputs of prompts are not kept, because prompts use most experts anyway.
class InputPredictor : public Predictor {
  public:
    void on_token(int) override { source_ = -1; }

    void on_routing(const Observation & seen) override {
        const bool known = seen.input && seen.n_embd == n_embd_ && seen.n_tokens == 1;
        source_ = known && input_.round(seen.input, n_embd_) ? seen.il : -1;
    }

  protected:
    InputPredictor(const Layout & layout, const Arrays & arrays) : layout_(layout), n_embd_(arrays.integer("n_embd")) {
        if (n_embd_ <= 0) {
            throw Error(MOEGGUF_INVALID,
                        "the number of values in a router's input must be above 0, not " + std::to_string(n_embd_));
        }
    }

    int source() const { return source_; } // layer of the kept input; -1: no input is kept
    const RoundedVector & input() const { return input_; }

    const Layout & layout_;
    const int n_embd_;

  private:
    RoundedVector input_;
    int source_ = -1;
};

// The values of llama_expert_gating_func_type. With SOFTMAX_WEIGHT, the experts are chosen by their logits, which have
// the same order as their softmax.
enum Gating { softmax_gating = 1, sigmoid_gating = 2, softmax_weight_gating = 3, sqrt_softplus_gating = 4 };

// Skip prediction: applies a later layer's router to an earlier router's input. It computes the scores by which
// llama.cpp's build_moe_ffn would choose, and turns them into probabilities. If a token uses k experts, an expert whose
// score is 1/k of the sum of all scores gets the probability 0.5. If the graph has already multiplied by the routers,
// its products are used (router_scores.h).
class Skip final : public InputPredictor {
  public:
    Skip(const Layout & layout, const Arrays & arrays);

    void on_token(int token) override {
        InputPredictor::on_token(token);
        seen_ = {};
    }

    void on_routing(const Observation & seen) override {
        InputPredictor::on_routing(seen);
        seen_ = seen;
    }

    bool predict(int il, int distance, float * probabilities) override;

  private:
    struct Router {
        ByteMatrix logits; // computes the logits from the router's input
        // [n_expert] bias that is added to the scores before experts are chosen; NULL: none.
        const float * choice_bias = nullptr;
    };

    // Computes a router's logits for the last observed layer. Returns false if they are not known, or not finite.
    bool compute_logits(int il, int distance, float * logits) const;
    void keep_best_groups(float * scores, int n_expert);

    Observation seen_;            // the last observation in the pass
    std::vector<Router> routers_; // [n_layer]; a layer without a router has a matrix with 0 rows
    const int gating_, n_group_, n_group_used_;
    std::vector<float> group_, best_; // scratch
    std::vector<int> order_;
};

Skip::Skip(const Layout & layout, const Arrays & arrays)
    : InputPredictor(layout, arrays),
      routers_(layout.layers.size()),
      gating_(arrays.integer("gating")),
      n_group_(arrays.integer("n_group")),
      n_group_used_(arrays.integer("n_group_used")) {
    if (gating_ < softmax_gating || gating_ > sqrt_softplus_gating || n_group_ < 1 || n_group_used_ < 1 ||
        n_group_used_ > n_group_) {
        throw Error(
            MOEGGUF_INVALID,
            "a router must have a known gating function, and must use at least one and at most all of its groups");
    }
    for (int il : layout.moe_layers) {
        const std::string name = std::to_string(il);
        if (arrays.size(name + ".weights") == 0) {
            continue; // no router is known for this layer, for example because token ids choose its experts
        }
        const int n_expert = layout.layers[il].n_expert;
        if (n_expert % n_group_ != 0) {
            throw Error(MOEGGUF_INVALID, "the groups of a router's experts must have the same size");
        }
        routers_[il] = {arrays.matrix(name, n_expert, n_embd_),
                        arrays.optional_floats(name + ".choice_bias", n_expert)};
    }
    group_.resize(layout.n_expert_max);
    best_.resize(n_group_);
    order_.resize(n_group_);
}

bool Skip::compute_logits(int il, int distance, float * logits) const {
    const ByteMatrix & router = routers_[il].logits;
    const int row = layout_.row_of[il], from = row - distance;
    if (router.n_rows == 0 || from < 0) { return false; }
    const int source_il = layout_.moe_layers[from];
    if (seen_.scores && seen_.n_tokens == 1 && seen_.il == source_il && distance <= seen_.n_scored) {
        const float * scores = seen_.scores;
        for (int at = from + 1; at < row; at++) { scores += layout_.layers[layout_.moe_layers[at]].n_expert; }
        for (int e = 0; e < router.n_rows; e++) { logits[e] = scores[e] + (router.bias ? router.bias[e] : 0.0f); }
        return std::all_of(logits, logits + router.n_rows, [](float x) { return std::isfinite(x); });
    }
    if (source() != source_il) { return false; }
    multiply(router, input(), false, logits);
    return true;
}

bool Skip::predict(int il, int distance, float * probabilities) {
    const Router & router = routers_[il];
    float * scores = probabilities;
    if (!compute_logits(il, distance, scores)) { return false; }
    const int n = router.logits.n_rows;
    if (gating_ == sigmoid_gating) {
        std::transform(scores, scores + n, scores, [](float x) { return 0.5f + 0.5f * std::tanh(0.5f * x); });
    } else if (gating_ == sqrt_softplus_gating) {
        std::transform(scores, scores + n, scores,
                       [](float x) { return std::sqrt(std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x)))); });
    } else {
        softmax(scores, n, 1.0f);
    }
    for (int e = 0; router.choice_bias && e < n; e++) { scores[e] += router.choice_bias[e]; }
    if (n_group_ > 1) { keep_best_groups(scores, n); }
    float lowest = 0.0f;
    for (int e = 0; e < n; e++) { lowest = std::isfinite(scores[e]) ? std::min(lowest, scores[e]) : lowest; }
    float sum = 0.0f;
    for (int e = 0; e < n; e++) {
        scores[e] = std::max(scores[e] - lowest, 0.0f);
        sum += scores[e];
    }
    const float scale = layout_.layers[il].n_expert_used / std::max(sum, 1e-30f);
    for (int e = 0; e < n; e++) {
        const float share = scores[e] * scale;
        probabilities[e] = share / (1.0f + share);
    }
    return true;
}

// Sets to -infinity the scores of all experts in groups that the router would not choose. The score of a group is the
// sum of the two highest scores in the group.
void Skip::keep_best_groups(float * scores, int n_expert) {
    const int size = n_expert / n_group_, n_best = std::min(2, size);
    for (int group = 0; group < n_group_; group++) {
        std::partial_sort_copy(scores + group * size, scores + (group + 1) * size, group_.begin(),
                               group_.begin() + n_best, std::greater<float>());
        const float best = std::accumulate(group_.begin(), group_.begin() + n_best, 0.0f);
        best_[group] = std::isnan(best) ? -INFINITY : best; // sort() cannot order NaN
    }
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(),
              [this](int a, int b) { return best_[a] != best_[b] ? best_[a] > best_[b] : a < b; });
    for (int i = n_group_used_; i < n_group_; i++) { std::fill_n(scores + order_[i] * size, size, -INFINITY); }
}

// ProMoE's learned networks. Each network belongs to a pair of layers: it predicts the experts of the second layer from
// the input of the first layer's router.
class Mlp final : public InputPredictor {
  public:
    Mlp(const Layout & layout, const Arrays & arrays) : InputPredictor(layout, arrays) {
        const size_t n_pairs = arrays.size("pairs") / 2;
        const int32_t * pairs = arrays.integers("pairs", 2 * n_pairs);
        const int n_hidden = arrays.integer("n_hidden");
        if (n_hidden <= 0) {
            throw Error(MOEGGUF_INVALID,
                        "a network's number of hidden values must be above 0, not " + std::to_string(n_hidden));
        }
        for (size_t i = 0; i < n_pairs; i++) {
            const int source = pairs[2 * i], target = pairs[2 * i + 1];
            if (!layout.has_experts(source) || !layout.has_experts(target)) {
                throw Error(MOEGGUF_INVALID, "a network must be for two layers with experts");
            }
            const std::string name = std::to_string(source) + "." + std::to_string(target) + ".";
            networks_[{source, target}]
                .dense(arrays.matrix(name + "hidden", n_hidden, n_embd_), true)
                .dense(arrays.matrix(name + "out", layout.layers[target].n_expert, n_hidden));
        }
    }

    bool predict(int il, int, float * probabilities) override {
        const auto found = networks_.find({source(), il});
        if (found == networks_.end() || !found->second.run(input(), logits_)) { return false; }
        const Layer & layer = layout_.layers[il];
        std::copy_n(logits_.begin(), layer.n_expert, probabilities);
        softmax(probabilities, layer.n_expert, (float)layer.n_expert_used);
        scale_probabilities(probabilities, layer.n_expert, 1.0f);
        return true;
    }

  private:
    std::map<std::pair<int, int>, Network> networks_;
    std::vector<float> logits_; // scratch
};

// DuoServe-MoE's ExpertMLP (section 4.2): one network for all layers. Its inputs are all choices so far in the pass,
// the popularity of the next layer's experts, and the affinity rows of the experts that were chosen last. It predicts
// one layer ahead, if the sequence has one token in this pass and every layer so far has been observed.
class ExpertMlp final : public Predictor {
  public:
    ExpertMlp(const Layout & layout, const Arrays & arrays)
        : layout_(layout),
          n_expert_(layout.n_expert_max),
          n_used_(arrays.integer("n_expert_used")),
          popularity_(arrays.floats("popularity", size_t(layout.n_moe_layers) * n_expert_)),
          affinity_(affinity_of(layout, arrays)) {
        const size_t n_sizes = arrays.size("sizes");
        const int32_t * sizes = arrays.integers("sizes", 0);
        state_.assign(size_t(std::max(0, n_used_)) * (layout.n_moe_layers - 1 + n_expert_) + n_expert_, 0.0f);
        if (n_used_ <= 0 || n_sizes < 2 || sizes[0] != (int)state_.size() || sizes[n_sizes - 1] != n_expert_) {
            throw Error(MOEGGUF_INVALID, "the network's state or its output has another size than the model needs");
        }
        for (size_t i = 0; i + 1 < n_sizes; i++) {
            network_.dense(arrays.matrix("layers." + std::to_string(i), sizes[i + 1], sizes[i]), i + 2 < n_sizes);
        }
    }

    void on_token(int) override { n_seen_ = 0; }

    // Stops predictions until the next pass if a layer was missed, had several tokens, or used a different number of
    // experts than the network expects.
    void on_routing(const Observation & seen) override {
        if (seen.n_tokens != 1 || seen.n_expert_used != n_used_ || layout_.row_of[seen.il] != n_seen_) {
            n_seen_ = -1;
            return;
        }
        chosen_.assign(seen.expert_ids, seen.expert_ids + n_used_);
        for (int i = 0; i < n_used_ && n_seen_ + 1 < layout_.n_moe_layers; i++) {
            state_[size_t(n_seen_) * n_used_ + i] = float(chosen_[i] + 1) / n_expert_; // 0 is padding
        }
        n_seen_ += 1;
    }

    bool predict(int il, int distance, float * probabilities) override {
        const int row = layout_.row_of[il];
        if (distance != 1 || row < 1 || row != n_seen_) { return false; }
        // The network's input: [choices of earlier layers, padded with 0][popularity of the layer's experts][affinity
        // row of each expert that the previous layer chose]
        float * at = state_.data() + size_t(layout_.n_moe_layers - 1) * n_used_;
        std::fill(state_.data() + size_t(row) * n_used_, at, 0.0f);
        at = std::copy_n(popularity_ + size_t(row) * n_expert_, n_expert_, at);
        for (int expert : chosen_) {
            at = std::copy_n(affinity_ + (size_t(row - 1) * n_expert_ + expert) * n_expert_, n_expert_, at);
        }
        logits_ = state_;
        const bool is_finite = network_.run(logits_);
        if (is_finite) { sigmoid(logits_.data(), layout_.layers[il].n_expert, probabilities); }
        return is_finite;
    }

  private:
    const Layout & layout_;
    const int n_expert_;
    const int n_used_;
    const float * popularity_; // [n_moe_layers][n_expert] popularity of each expert
    const float * affinity_;
    Network network_;
    std::vector<float> state_;
    std::vector<int> chosen_;   // experts that the router of the last observed layer chose
    std::vector<float> logits_; // scratch
    int n_seen_ = -1;           // number of layers observed in this pass; -1: no prediction is possible in this pass
};

} // namespace

const PredictorType skip_predictor = {"skip", true, false, make_predictor<Skip>, true};
const PredictorType mlp_predictor = {"mlp", true, false, make_predictor<Mlp>};
const PredictorType expert_mlp_predictor = {"expert-mlp", false, false, make_predictor<ExpertMlp>};

} // namespace moegguf
