// forecaster.h: predicts on its own thread, the predictor thread, which experts a pass will use, and issues prefetches.
// Compute threads put routers' choices into a ring, and wait for predictions only with MOEGGUF_PREDICT_LOCKSTEP. In a
// simulation there is no predictor thread, and the calling thread predicts.
//
// Under the store's lock, the forecaster passes forecasts to the eviction policies of tiers, and prefetches to the
// transfer queue. It pins and evicts nothing itself. A forecast affects only speed, never a token.
#pragma once

#include "predictors/predictor.h"
#include "supply.h"

#include <array>
#include <optional>

namespace moegguf {

// Corrects a predictor's probabilities: counts how often experts with a similar predicted probability were actually
// used. This is needed because only the order of a predictor's probabilities is reliable, and predictions further ahead
// are less certain. Each distance in layers has its own bins of equal width; distances of n_distances or more share
// bins. Old counts fade: a bin's counts are halved whenever `seen` exceeds most_seen.
class Calibration {
  public:
    Calibration() {
        for (auto & bins : bins_) {
            for (int i = 0; i < n_bins; i++) { bins[i] = {first_weight * (i + 0.5f) / n_bins, first_weight}; }
        }
    }

    // Returns the share of used experts among the experts whose predicted probability at this distance was about p.
    // Before any were observed, returns about p.
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
    static constexpr float first_weight = 8.0f; // weight of a bin's initial value, as a number of observed experts
    static constexpr float most_seen = 8192.0f;

    static int row(int distance) { return std::clamp(distance, 1, n_distances) - 1; }
    static int index(float p) { return p > 0.0f ? std::min((int)(p * n_bins), n_bins - 1) : 0; } // NaN: bin 0

    std::array<std::array<Bin, n_bins>, n_distances> bins_;
};

// Predicts passes in which every sequence decodes one token. Passes of prompts are not predicted, because MOEGGUF_SWEEP
// works better for them. Each predicted sequence of a pass has its own predictor, which sees only this sequence. An
// expert's chance is the chance that any sequence uses it, 1 - prod(1 - p). If there are more than most_selected
// sequences, only most_selected evenly spaced ones are predicted, and each other sequence is treated as an average
// predicted one. Passes of more than most_sequences sequences are not predicted, because they use most experts.
class Forecaster {
  public:
    Forecaster(const Layout & layout, Shared & shared, Tiers & tiers, Transfers & transfers)
        : layout_(layout),
          shared_(shared),
          tiers_(tiers),
          transfers_(transfers) {}
    ~Forecaster() { set(nullptr); }

    // Any thread may call the following three functions. set() replaces the predictor; nullptr: no predictor. When
    // set() returns, the earlier predictor's arrays are no longer used. The calibration is kept until a predictor with
    // another name is set. Throws Error(INVALID) for an unsuitable predictor, and Error(MEMORY) if the thread cannot
    // start.
    void set(const moegguf_predictor * chosen);
    void prefetch(bool on) { prefetching_ = on; } // switches prefetches on or off
    // Writes the forecasts of layers that have not been routed yet.
    void read(float * probabilities, uint8_t * known) const;

    // Compute threads call the following functions without the store's lock.
    bool on() const { return on_; }
    bool wants_inputs(int n_tokens) const { return wants_inputs_ && n_tokens <= most_sequences; }
    // Returns the number of later layers whose routers' scores the graph of a layer on a device should compute; 0:
    // none.
    int scored_layers() const { return scored_layers_; }
    void announce(const moegguf_tokens_event & of, uint64_t pass);
    // Records a router's choice. `of`: the tokens for which the layer is computed. The last layer may be computed for
    // fewer tokens than the others.
    void routing(const Choice & choice, const moegguf_tokens_event & of, uint64_t pass);
    void keep_step(); // waits until all predictions are made, if MOEGGUF_PREDICT_LOCKSTEP is set

  private:
    static constexpr int most_selected = 8;
    static constexpr int most_sequences = 64; // a pass with more sequences is not predicted
    // A predictor receives at most this many of its sequence's last tokens per pass.
    static constexpr int most_known = 512;

    struct LastToken { // the last token of one sequence in a pass
        int sequence;
        int index;              // index of the token in the event's tokens
        int n_tokens;           // number of the sequence's tokens in the event
        size_t first_known = 0; // index of the sequence's first known token in Record::tokens
        int n_known = 0;        // number of the sequence's known tokens in Record::tokens
    };
    struct Record {
        uint64_t pass = 0;
        int il = -1;         // layer of the router's choice; -1: the record announces tokens
        int n_sequences = 0; // number of sequences in the pass
        int n_expert_used = 0;
        int n_embd = 0;
        int n_scored = 0;            // number of later layers in `scores`
        std::vector<LastToken> last; // last token of each kept sequence (see choose_last())
        std::vector<int32_t> tokens; // known tokens of the kept sequences, one sequence after another
        std::vector<int32_t> ids;    // [last.size()][n_expert_used] experts of the tokens in `last`
        std::vector<float> inputs;   // [last.size()][n_embd] router inputs of the tokens in `last`, or empty
        // [last.size()][n_scored][n_expert of the layer] scores of the routers of later layers for the tokens in
        // `last`, or empty
        std::vector<float> scores;
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
    struct LayerForecast {          // the forecast for one layer
        int distance = 0;           // number of MoE layers from the last observed layer to this one; 0: no forecast
        bool is_published = false;  // true: the forecast has been passed to the eviction policies
        std::vector<int> sequences; // sequences for which there is a prediction
        std::vector<float> each;    // [sequences.size()][n_expert_max] raw probabilities
        std::vector<float> likely;  // [n_expert_max] raw probability that any sequence uses the expert
        std::vector<float> chances; // [n_expert_max] calibrated probability that any sequence uses the expert
    };

    void stop();
    void choose_last(const moegguf_tokens_event & of, Record & record);
    template <typename Fill>
    void post(const moegguf_tokens_event & of, int il, uint64_t pass, Fill fill);
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

    std::mutex control_; // lets only one set() run at a time
    std::atomic<bool> on_{false};
    std::atomic<bool> wants_inputs_{false};
    std::atomic<int> scored_layers_{0};
    std::atomic<bool> lockstep_{false};
    std::atomic<bool> prefetching_{true};

    // The ring has its own lock. If the ring is full, its oldest record is dropped.
    std::mutex inbox_mutex_;
    std::condition_variable arrived_;
    std::condition_variable caught_up_;
    std::array<Record, 64> ring_;
    size_t head_ = 0;
    size_t size_ = 0;
    bool busy_ = false;
    bool stopping_ = false;
    std::thread thread_;

    // The predictor thread uses the following fields. set() changes them while this thread is not running, and read()
    // reads layers_.
    std::optional<PredictorFactory> factory_;   // kept while prediction is off, because calibration_ belongs to it
    std::vector<SequencePredictor> predictors_; // one per sequence, at most most_sequences
    std::vector<size_t> selected_; // indices in predictors_ of this pass's sequences, in the order of Record::last
    uint64_t n_uses_ = 0;
    moegguf_predictor options_{};
    Calibration calibration_;
    Record current_;
    uint64_t pass_ = 0;
    int row_ = -1;              // layer observed last in the pass, as an index among layers with experts; -1: none
    int n_sequences_ = 0;       // number of sequences in the pass
    bool is_predicted_ = false; // true: the pass is predicted
    uint64_t n_started_ = 0;    // value of the counter prefetch_started when this pass began
    std::vector<LayerForecast> layers_; // [n_moe_layers] forecast for each layer with experts
    std::vector<float> each_;           // [most_selected][n_expert_max] probabilities for predicted_sequences_, scratch
    std::vector<int> predicted_sequences_;
    std::vector<int> best_;
    std::vector<Want> wants_;
    mutable std::mutex layers_mutex_; // guards layers_, because read() runs on other threads
};

} // namespace moegguf
