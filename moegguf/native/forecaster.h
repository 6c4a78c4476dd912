// forecaster.h: predicts what a pass will use, on a thread of its own, and acts on it: protects slots, asks for
// prefetches. Compute threads leave what a layer showed in a ring, and go on.
//
// It may tell policies and the transfer queue of a tier's layers what it expects, under the store's lock. It pins and
// evicts nothing, and what it says changes speed, never a token.
#pragma once

#include "calibration.h"
#include "predictors/predictor.h"
#include "transfers.h"

#include <array>
#include <optional>

namespace moegguf {

// The tokens of a pass, or of its last layer, which may compute fewer.
struct PassTokens {
    int n_tokens = 0;
    bool several = false; // of several sequences, or phases
    int token = -1;       // the only one; -1: not known
};

// Passes of one token are predicted: a prompt's needs every layer once, in order, which the sweep covers better, and
// one of several sequences leaves the link no time. Of a prompt the last token is learned from.
class Forecaster {
  public:
    Forecaster(const Layout & layout, Shared & shared, Tiers & tiers, Transfers & transfers)
        : layout_(layout),
          shared_(shared),
          tiers_(tiers),
          transfers_(transfers) {}
    ~Forecaster() { set(nullptr); }
    Forecaster(const Forecaster &) = delete;
    Forecaster & operator=(const Forecaster &) = delete;

    // Any thread. When set() returns, the predictor before is used no longer, nor are its arrays. What its
    // probabilities were worth stays known until another one is set. Throws Error.
    void set(const moegguf_predictor * chosen);
    void prefetch(bool on) { prefetching_ = on; }            // from the next prediction on
    void read(float * probabilities, uint8_t * known) const; // as predicted, by layer, of what is not yet routed

    // Compute threads; no lock of the store's is held.
    bool on() const { return on_; }
    bool wants_inputs(int n_tokens) const { return wants_inputs_ && n_tokens == 1; }
    void announce(const PassTokens & of, uint64_t pass);
    // expert_ids [n_tokens][n_expert_used]; inputs [n_tokens][n_embd], NULL: not asked for.
    void routing(int il, const PassTokens & of, const int32_t * expert_ids, int n_expert_used, const float * inputs,
                 int n_embd, uint64_t pass);
    void keep_step(); // in lockstep: returns when everything was predicted that could be

  private:
    struct Record {
        uint64_t pass = 0;
        int il = -1; // -1: tokens come
        PassTokens of;
        int n_expert_used = 0;
        std::vector<int32_t> ids;  // [n_expert_used] of the last token
        std::vector<float> inputs; // [n_embd] of the only token, or none
    };
    struct Row {                    // what is predicted of a layer
        int distance = 0;           // 0: nothing
        bool told = false;          // the store knows
        std::vector<float> likely;  // [n_expert_max]
        std::vector<float> chances; // [n_expert_max] likewise, calibrated
    };

    void start(const moegguf_predictor & chosen);
    void stop();
    template <typename Fill>
    void post(const PassTokens & of, int il, uint64_t pass, Fill fill);
    void run();
    void follow(const Record & record, bool newest);
    void begin_pass(const Record & record);
    void forget(); // what was predicted
    void compare(const Record & record);
    int rank(const float * likely, int il, int most);
    void predict();
    void act();
    void want_row(int row, uint64_t deadline);
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

    // Of the thread that predicts.
    const PredictorType * type_ = nullptr; // of the predictor, with arrays_; calibration_ is of them, also in pauses
    std::optional<Arrays> arrays_;
    std::unique_ptr<Predictor> predictor_;
    moegguf_predictor options_{};
    Calibration calibration_;
    Record current_;
    uint64_t pass_ = 0;
    int row_ = -1;              // the last one observed of the pass
    uint64_t n_started_ = 0;    // prefetches before this pass
    std::vector<Row> rows_;     // [n_moe_layers]
    std::vector<float> likely_; // [n_expert_max] scratch
    std::vector<int> best_;
    std::vector<Want> wants_;
    mutable std::mutex rows_mutex_; // read() looks at rows_ from other threads
};

} // namespace moegguf
