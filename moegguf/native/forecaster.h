// forecaster.h: predicts, on a thread of its own, which experts a pass will use, and issues prefetches. Compute threads
// put the choice of a layer's router into a ring, and go on.
//
// It passes forecasts to the policies of tiers and prefetches to the transfer queue, under the store's lock. It pins
// and evicts nothing, and a forecast changes speed, never a token.
#pragma once

#include "predictors/predictor.h"
#include "transfers.h"

#include <array>
#include <optional>

namespace moegguf {

// The tokens of a pass, or of its last layer, which may compute fewer tokens.
struct PassTokens {
    int n_tokens = 0;
    int sequence = -1;                   // sequence of all tokens
    const int32_t * sequences = nullptr; // [n_tokens] sequence of each token, consecutive ones; NULL: all `sequence`
    const int32_t * tokens = nullptr;    // [n_tokens]; NULL: unknown
};

// Counts how often experts that were predicted with a probability were used, and corrects later probabilities by this.
// Predictors promise an order, not a scale, and a layer further ahead is less certain. Each distance has bins of equal
// width. The last several thousand experts count most.
class Calibration {
  public:
    Calibration() {
        for (auto & bins : bins_) {
            for (int i = 0; i < n_bins; i++) { bins[i] = {first_weight * (i + 0.5f) / n_bins, first_weight}; }
        }
    }

    // Returns the share of the experts predicted with p at this distance that were used.
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
    static constexpr float first_weight = 8.0f; // weight of the predictor's own probability, in experts
    static constexpr float most_seen = 8192.0f;

    static int row(int distance) { return std::clamp(distance, 1, n_distances) - 1; }
    static int index(float p) { return p > 0.0f ? std::min((int)(p * n_bins), n_bins - 1) : 0; } // NaN: 0

    std::array<std::array<Bin, n_bins>, n_distances> bins_;
};

// Predicts passes in which every sequence decodes one token. A prompt's pass needs every layer once, in order, which
// the sweep covers better. Each sequence has a predictor of its own, which sees only this sequence. An expert's chance
// is the chance that any sequence uses it, 1 - prod(1 - p). If there are more than most_selected sequences,
// most_selected of them are predicted, at even distances, and each other one counts as their average. Passes of more
// than most_sequences are not predicted: they use most experts.
class Forecaster {
  public:
    Forecaster(const Layout & layout, Shared & shared, Tiers & tiers, Transfers & transfers)
        : layout_(layout),
          shared_(shared),
          tiers_(tiers),
          transfers_(transfers) {}
    ~Forecaster() { set(nullptr); }

    // Any thread may call these. When set() returns, the earlier predictor and its arrays are no longer used. The
    // calibration stays until a predictor with another name is set. Throws Error.
    void set(const moegguf_predictor * chosen);
    void prefetch(bool on) { prefetching_ = on; }            // acts from the next prediction on
    void read(float * probabilities, uint8_t * known) const; // predictions of the layers that are not routed yet

    // Compute threads call these without the store's lock.
    bool on() const { return on_; }
    bool wants_inputs(int n_tokens) const { return wants_inputs_ && n_tokens <= most_sequences; }
    void announce(const PassTokens & of, uint64_t pass);
    // expert_ids [n_tokens][n_expert_used]; inputs [n_tokens][n_embd], NULL: wants_inputs() is false.
    void routing(int il, const PassTokens & of, const int32_t * expert_ids, int n_expert_used, const float * inputs,
                 int n_embd, uint64_t pass);
    void keep_step(); // waits until all predictions are made (lockstep)

  private:
    static constexpr int most_selected = 8;
    static constexpr int most_sequences = 64; // sequences of a pass that is predicted
    static constexpr int most_known = 512;    // tokens of a sequence's prompt that predictors get

    struct LastToken { // the last token of a sequence in a pass
        int sequence;
        int index;              // place of the token in the pass
        int n_tokens;           // tokens of the sequence in the pass
        size_t first_known = 0; // place of the sequence's last tokens in Record::tokens
        int n_known = 0;        // number of these tokens
    };
    struct Record {
        uint64_t pass = 0;
        int il = -1;         // -1: the record announces tokens
        int n_sequences = 0; // sequences of the pass
        int n_expert_used = 0;
        int n_embd = 0;
        std::vector<LastToken> last; // one for each sequence whose predictor runs
        std::vector<int32_t> tokens; // known tokens of these sequences, one sequence after another
        std::vector<int32_t> ids;    // [last][n_expert_used]
        std::vector<float> inputs;   // [last][n_embd], or empty
    };
    struct PredictorFactory {
        const PredictorType * type;
        Arrays arrays;
    };
    struct SequencePredictor { // the predictor that follows one sequence
        int sequence = -1;
        uint64_t last_use = 0;
        std::unique_ptr<Predictor> predictor;
    };
    struct LayerForecast {          // the prediction of a layer
        int distance = 0;           // layers with experts between prediction and layer; 0: there is no forecast
        bool is_published = false;  // the policies have the forecast
        std::vector<int> sequences; // sequences that have a prediction
        std::vector<float> each;    // [sequences][n_expert_max] raw probabilities
        std::vector<float> likely;  // [n_expert_max] raw probability that any sequence uses the expert
        std::vector<float> chances; // [n_expert_max] calibrated probability that any sequence uses the expert
    };

    void stop();
    void choose_last(const PassTokens & of, Record & record);
    template <typename Fill>
    void post(const PassTokens & of, int il, uint64_t pass, Fill fill);
    void run();
    void follow(const Record & record, bool newest);
    void begin_pass(const Record & record);
    void select_sequences(const Record & record);
    SequencePredictor & predictor_of(int sequence);
    void forget(); // drops all forecasts
    void compare(const Record & record);
    int rank(const float * likely, int il, int most);
    void predict(int from, int last);
    bool predict_sequences(int il, int distance);
    void combine(LayerForecast & row, int il, int distance);
    void publish_forecast(int row);
    void issue_prefetches();
    void want_layer(int row, uint64_t deadline);
    uint64_t step_of(int row) const { return pass_ * layout_.layers.size() + layout_.moe_layers[row]; }

    const Layout & layout_;
    Shared & shared_;
    Tiers & tiers_;
    Transfers & transfers_;

    std::mutex control_; // lets one set() run at a time
    std::atomic<bool> on_{false};
    std::atomic<bool> wants_inputs_{false};
    std::atomic<bool> lockstep_{false};
    std::atomic<bool> prefetching_{true};

    // The ring has its own lock. A full ring loses its oldest record.
    std::mutex inbox_mutex_;
    std::condition_variable arrived_;
    std::condition_variable caught_up_;
    std::array<Record, 64> ring_;
    size_t head_ = 0;
    size_t size_ = 0;
    bool busy_ = false;
    bool stopping_ = false;
    std::thread thread_;

    // Only the thread that predicts uses the next fields.
    std::optional<PredictorFactory>
        factory_; // makes each predictor; calibration_ is about its predictions, also while nothing is predicted
    std::vector<SequencePredictor> predictors_; // most_sequences at most
    std::vector<size_t> selected_;              // indices of the predictors that this pass selected, in its order
    uint64_t n_uses_ = 0;
    moegguf_predictor options_{};
    Calibration calibration_;
    Record current_;
    uint64_t pass_ = 0;
    int row_ = -1;                      // row of the layer observed last in the pass
    int n_sequences_ = 0;               // sequences of the pass
    bool is_predicted_ = false;         // the pass is predicted
    uint64_t n_started_ = 0;            // prefetches that were started before this pass
    std::vector<LayerForecast> layers_; // [n_moe_layers]
    std::vector<float> each_;           // [most_selected][n_expert_max] scratch for predicted_sequences_
    std::vector<int> predicted_sequences_;
    std::vector<int> best_;
    std::vector<Want> wants_;
    mutable std::mutex layers_mutex_; // read() looks at layers_ from other threads
};

} // namespace moegguf
