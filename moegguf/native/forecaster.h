// forecaster.h: predicts, on a thread of its own, which experts a pass will use, and issues prefetches. Compute threads
// leave what a layer's router chose in a ring, and go on.
//
// It passes forecasts to the policies of tiers and prefetches to the transfer queue, under the store's lock. It pins
// and evicts nothing, and a forecast changes speed, never a token.
#pragma once

#include "predictors/predictor.h"
#include "transfers.h"

#include <array>
#include <optional>

namespace moegguf {

// The tokens of a pass, or of its last layer, which may compute fewer.
struct PassTokens {
    int n_tokens = 0;
    int sequence = -1;                   // of all of them
    const int32_t * sequences = nullptr; // [n_tokens] of each, a sequence's in a row; NULL: as above
    const int32_t * tokens = nullptr;    // [n_tokens]; NULL: unknown
};

// What a predictor's probabilities are worth: how often experts predicted with one were used. Predictors promise an
// order, not a scale, and a layer further ahead is less certain. Each distance counts in bins of equal width, the last
// some thousand experts most.
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

// Predicts passes in which every sequence decodes one token: a prompt's pass needs every layer once, in order, which
// the sweep covers better. Each sequence has a predictor of its own, which sees what it would see alone. An expert's
// chance is that any of them uses it, 1 - prod(1 - p). Of more than most_selected sequences that many are predicted, at
// even distances, and the others count as their average. Passes of more than most_sequences are not predicted: they use
// most experts.
class Forecaster {
  public:
    Forecaster(const Layout & layout, Shared & shared, Tiers & tiers, Transfers & transfers)
        : layout_(layout),
          shared_(shared),
          tiers_(tiers),
          transfers_(transfers) {}
    ~Forecaster() { set(nullptr); }

    // Any thread. When set() returns, the predictor before is used no longer, nor are its arrays. What its
    // probabilities were worth stays known until one of another name is set. Throws Error.
    void set(const moegguf_predictor * chosen);
    void prefetch(bool on) { prefetching_ = on; }            // from the next prediction on
    void read(float * probabilities, uint8_t * known) const; // as predicted, by layer, of what is not yet routed

    // Compute threads; no lock of the store's is held.
    bool on() const { return on_; }
    bool wants_inputs(int n_tokens) const { return wants_inputs_ && n_tokens <= most_sequences; }
    void announce(const PassTokens & of, uint64_t pass);
    // expert_ids [n_tokens][n_expert_used]; inputs [n_tokens][n_embd], NULL: not asked for.
    void routing(int il, const PassTokens & of, const int32_t * expert_ids, int n_expert_used, const float * inputs,
                 int n_embd, uint64_t pass);
    void keep_step(); // in lockstep: returns when everything was predicted that could be

  private:
    static constexpr int most_selected = 8;
    static constexpr int most_sequences = 64; // of a pass that is predicted; followed at once
    static constexpr int most_known = 512;    // tokens of a sequence's prompt

    struct LastToken { // of a sequence in a pass
        int sequence;
        int index;              // in the pass
        int n_tokens;           // of its sequence there
        size_t first_known = 0; // of these tokens the last ones, in the record's
        int n_known = 0;
    };
    struct Record {
        uint64_t pass = 0;
        int il = -1;         // -1: tokens come
        int n_sequences = 0; // of the pass
        int n_expert_used = 0;
        int n_embd = 0;
        std::vector<LastToken> last; // of those that are asked
        std::vector<int32_t> tokens; // of one after another, where they are known
        std::vector<int32_t> ids;    // [last][n_expert_used]
        std::vector<float> inputs;   // [last][n_embd], or none
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
    struct LayerForecast {          // what is predicted of a layer
        int distance = 0;           // in layers with experts, when it was predicted; 0: there is no forecast
        bool is_published = false;  // the policies have it
        std::vector<int> sequences; // that have a prediction
        std::vector<float> each;    // [sequences][n_expert_max] as predicted
        std::vector<float> likely;  // [n_expert_max] of any sequence
        std::vector<float> chances; // [n_expert_max] likewise, calibrated
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
    void forget(); // what was predicted
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

    std::mutex control_; // set(): one at a time
    std::atomic<bool> on_{false};
    std::atomic<bool> wants_inputs_{false};
    std::atomic<bool> lockstep_{false};
    std::atomic<bool> prefetching_{true};

    // The ring, under its own lock. When it is full the oldest record goes.
    std::mutex inbox_mutex_;
    std::condition_variable arrived_;
    std::condition_variable caught_up_;
    std::array<Record, 64> ring_;
    size_t head_ = 0;
    size_t size_ = 0;
    bool busy_ = false;
    bool stopping_ = false;
    std::thread thread_;

    // These belong to the thread that predicts.
    std::optional<PredictorFactory>
        factory_; // makes each predictor; calibration_ is about its predictions, also while nothing is predicted
    std::vector<SequencePredictor> predictors_; // most_sequences at most
    std::vector<size_t> selected_;              // indices of the predictors that this pass selected, in its order
    uint64_t n_uses_ = 0;
    moegguf_predictor options_{};
    Calibration calibration_;
    Record current_;
    uint64_t pass_ = 0;
    int row_ = -1;                      // the last one observed of the pass
    int n_sequences_ = 0;               // of the pass
    bool is_predicted_ = false;         // the pass is one that is predicted
    uint64_t n_started_ = 0;            // prefetches before this pass
    std::vector<LayerForecast> layers_; // [n_moe_layers]
    std::vector<float> each_;           // [most_selected][n_expert_max] scratch, of predicted_sequences_
    std::vector<int> predicted_sequences_;
    std::vector<int> best_;
    std::vector<Want> wants_;
    mutable std::mutex layers_mutex_; // read() looks at layers_ from other threads
};

} // namespace moegguf
