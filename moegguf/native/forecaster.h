// forecaster.h: predicts what a pass will use, on a thread of its own, and acts on it: protects slots, asks for
// prefetches. Compute threads leave what a layer showed in a ring, and go on.
#pragma once

#include "calibration.h"
#include "predictors/predictor.h"
#include "transfers.h"

#include <array>

namespace moegguf {

// Only passes of one token are predicted: a prompt's needs every layer once, in order, which the sweep covers better.
// With several lanes each of their events is followed as it comes; a pass of another lane ends what was predicted.
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

    // Any thread. When set() returns, the predictor before is used no longer, nor are its arrays. Throws Error.
    void set(const moegguf_predictor * chosen);
    void prefetch(bool on) { prefetching_ = on; }            // from the next prediction on
    void read(float * probabilities, uint8_t * known) const; // as predicted, by layer, of what is not yet routed

    // Compute threads; no lock of the store's is held.
    bool on() const { return on_; }
    bool wants_inputs(int n_tokens) const { return wants_inputs_ && n_tokens == 1; }
    void token(int token, uint64_t pass); // -1: several, or unknown
    void routing(const Observation & seen, uint64_t pass);
    void settle(); // in lockstep: returns when everything was predicted that could be

  private:
    struct Record {
        uint64_t pass = 0;
        int token = -1;
        Observation seen; // il -1: a token comes
        std::vector<int32_t> ids;
        std::vector<float> input;
    };
    struct Row {                    // what is predicted of a layer
        int distance = 0;           // 0: nothing
        bool told = false;          // the store knows
        std::vector<float> likely;  // [n_expert_max] as predicted
        std::vector<float> chances; // [n_expert_max] calibrated
    };

    void start(const moegguf_predictor & chosen);
    void stop();
    void post(const Observation & seen, int token, uint64_t pass);
    void run();
    void follow(const Record & record, bool newest);
    void begin_pass(const Record & record);
    void forget(); // what was predicted
    void compare(const Observation & seen);
    int rank(const Row & row, int il, int most);
    void predict();
    void act();
    void wish_for_row(int row, uint64_t turn);
    uint64_t turn_of(int row) const { return pass_ * layout_.layers.size() + layout_.moe_layers[row]; }

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
    std::condition_variable settled_;
    std::array<Record, 64> ring_;
    size_t head_ = 0;
    size_t size_ = 0;
    bool busy_ = false;
    bool stopping_ = false;
    std::thread thread_;

    // Of the thread that predicts.
    std::unique_ptr<Predictor> predictor_;
    moegguf_predictor options_{};
    Calibration calibration_;
    Record current_;
    uint64_t pass_ = 0;
    int row_ = -1;           // the last one observed of the pass
    bool single_ = false;    // the pass is of one token
    uint64_t n_started_ = 0; // prefetches before this pass
    std::vector<Row> rows_;  // [n_moe_layers]
    std::vector<int> best_;  // scratch
    std::vector<Wish> wishes_;
    mutable std::mutex rows_mutex_; // read() looks at rows_ from other threads
};

} // namespace moegguf
