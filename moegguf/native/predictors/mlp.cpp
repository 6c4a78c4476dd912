// mlp.cpp: ProMoE's learned predictor (section 4.3): a two-layer MLP from the router's input of one layer to the
// experts of a later one.
// Touches its own tables only (predictor.h).
#include "predictors/input_predictor.h"

namespace moegguf {
namespace {

struct Network {
    ByteMatrix hidden; // [n_hidden][n_embd], ReLU
    ByteMatrix out;    // [n_expert][n_hidden]
};

// Predicts the pairs of layers that there are networks for.
class Mlp final : public InputPredictor {
  public:
    Mlp(const Layout & layout, const Arrays & arrays) : InputPredictor(layout, arrays) {
        const size_t n_pairs = arrays.size("pairs") / 2;
        const int32_t * pairs = arrays.integers("pairs", 2 * n_pairs);
        const int n_hidden = arrays.integer("n_hidden");
        if (n_hidden <= 0) {
            throw Error(MOEGGUF_INVALID, "a network has hidden values, not " + std::to_string(n_hidden));
        }
        hidden_.resize(n_hidden);
        for (size_t i = 0; i < n_pairs; i++) {
            const int source = pairs[2 * i], target = pairs[2 * i + 1];
            if (!layout.has_experts(source) || !layout.has_experts(target)) {
                throw Error(MOEGGUF_INVALID, "a network is about two layers with experts");
            }
            const std::string name = std::to_string(source) + "." + std::to_string(target) + ".";
            networks_[{source, target}] = {
                arrays.matrix(name + "hidden", n_hidden, n_embd_),
                arrays.matrix(name + "out", layout.layers[target].n_expert, n_hidden),
            };
        }
    }

    bool predict(int il, int, float * probabilities) override {
        const auto found = networks_.find({source(), il});
        if (found == networks_.end()) {
            return false;
        }
        const Network & network = found->second;
        multiply(network.hidden, input(), true, hidden_.data());
        if (!rounded_.round(hidden_.data(), (int)hidden_.size())) {
            return false;
        }
        multiply(network.out, rounded_, false, probabilities);
        const int n_expert = layout_.layers[il].n_expert;
        softmax(probabilities, n_expert, (float)layout_.layers[il].n_expert_used);
        for (int e = 0; e < n_expert; e++) {
            probabilities[e] = std::min(probabilities[e], 1.0f);
        }
        return true;
    }

  private:
    std::map<std::pair<int, int>, Network> networks_;
    std::vector<float> hidden_;
    RoundedVector rounded_;
};

} // namespace

extern const PredictorType mlp_predictor;
const PredictorType mlp_predictor = {"mlp", true, false, make_predictor<Mlp>};

} // namespace moegguf
