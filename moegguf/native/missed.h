// missed.h: experts that the device lacks, computed by the CPU from slots below meanwhile ("--misses compute").
//
// The device computes every choice, those that it lacks with slots of other experts: no backend takes an id for none,
// and kernels want distinct ones within a token. The rows of these choices in the product with the down matrices are
// then replaced by the CPU's. What comes before is not used elsewhere, and what follows finds every row as it was
// meant. Not exact: processors round otherwise than devices, so an answer depends on what was resident.
#pragma once

#include "admission.h"
#include "expert_chain.h"
#include "lane.h"
#include "transfers.h"

namespace moegguf {

// A layer's missed experts. Lanes fill it before it is begun; then it is the thread's until it is done.
struct MissedJob {
    struct Expert {
        int expert;
        int slot;         // below, pinned
        int first_choice; // in `choices`
        int n_choices;
        bool computed;
    };

    int il = -1;
    int n_expert_used = 0;
    const ExpertChain * chain = nullptr; // nullptr: simulated
    std::vector<Expert> experts;
    std::vector<int> choices; // of [n_tokens][n_expert_used], each expert's one after another
    int n_embd = 0;
    std::vector<float> inputs;  // [n_tokens][n_embd]
    std::vector<float> weights; // [n_tokens][n_expert_used] where the chain wants them
    std::vector<float> rows;    // [n_tokens][n_expert_used][n_embd], those of choices that are computed
    uint64_t queued_ns = 0;     // when it was begun
    bool wanted = false;        // by a lane; under the lock, as what follows
    bool begun = false;
    bool done = false;
    bool given_up = false; // cancelled
    bool measures = false; // how long it takes: no lane waits for it
    int failed_expert = -1;
    std::string why;          // it could not be computed; empty: it could
    uint64_t computed_ns = 0; // simulation: of the modelled clock
};

class Missed {
  public:
    static constexpr int most_tokens = 8; // of a pass; larger ones are prompts, whose experts many tokens share

    Missed(const Layout & layout, Shared & shared, Tiers & tiers, Transfers & transfers, Admission & admission)
        : layout_(layout),
          shared_(shared),
          tiers_(tiers),
          transfers_(transfers),
          admission_(admission) {}
    ~Missed();
    Missed(const Missed &) = delete;
    Missed & operator=(const Missed &) = delete;

    void start(int n_threads); // Throws Error(INVALID) where nothing lies below a device, Error(MEMORY)
    void start_modelled(double bytes_per_ns, double layer_ns); // simulation. Throws likewise.
    bool serves(int il, int n_tokens) const;     // whether a layer's misses are computed in passes of so many tokens
    const ExpertChain * keep(ExpertChain chain); // the same, for as long as the store is there; throws std::bad_alloc
    void set_layers(int n_layers, const std::string & note);
    void info(moegguf_computed & out);

    // At a routing event, under the store's lock. note_uses: of any number of tokens. choose: marks experts that the
    // CPU computes as Lane::computed_below. find_stand_ins, when the others have slots: false where there are too few.
    void note_uses(const Lane & lane, int il);
    void choose(Lane & lane, const Moment & now, const int32_t * ids, int n_expert_used, int n_tokens);
    bool find_stand_ins(Lane & lane) const;
    void forget(Lane & lane); // what was chosen at the event before
    bool busy() const { return !queue_.empty() || computing_; }

    // Simulation, under the store's lock: begins, and ends when what the link copies meanwhile is there.
    void begin_modelled(Lane & lane);
    void end_modelled(Lane & lane);

    // By the thread that computes. begin: with the layer's input and weights, [n_tokens] rows each, as the router has
    // them; nullptr: they cannot be read.
    void begin(Lane & lane, const float * inputs, int n_embd, const float * weights, int n_tokens);
    bool must_write(const Lane & lane, const ggml_tensor * t) const { return lane.missed && is_next(lane, t); }
    void write(Lane & lane, ggml_tensor * t); // waits for the rows; the lane says why there are none

  private:
    void check_tiers(bool possible) const;
    bool is_next(const Lane & lane, const ggml_tensor * t) const;
    bool comes_as_fast(int il, int expert) const;
    int count_fastest(int il, int least, int n_missed) const;
    void measure(Lane & lane, int il, int n_expert_used);
    MissedJob & new_job(Lane & lane, int il, int n_expert_used);
    bool take(MissedJob & job, const Moment & now, int expert, const int32_t * ids, int n_choices);
    void release(MissedJob & job);
    void count_modelled_stall(const Lane & lane, uint64_t since_ns);
    bool awaits_file(const MissedJob & job) const;
    void wait(Lane & lane, const MissedJob & job, Lock & lock);
    uint64_t expert_bytes(int il) const;
    void run();
    void compute(MissedJob & job, Lock & lock);
    void compute_ready(MissedJob & job);
    bool find_ready(MissedJob & job);

    const Layout & layout_;
    Shared & shared_;
    Tiers & tiers_;
    Transfers & transfers_;
    Admission & admission_;
    ggml_backend_ptr backend_;
    std::atomic<bool> on_{false};
    std::mutex chains_mutex_;
    std::vector<std::unique_ptr<const ExpertChain>> chains_; // graphs hold their addresses
    std::vector<std::unique_ptr<MissedJob>> jobs_;           // of all lanes, used again
    Ring<MissedJob *> queue_;
    bool computing_ = false;
    bool stopping_ = false;
    std::condition_variable work_;
    std::vector<MissedJob::Expert *> ready_; // of the thread
    std::vector<uint8_t> memory_;            // of its graphs
    std::vector<int> missing_;               // scratch of choose()
    uint64_t n_computed_ = 0;                // under the lock, as the figures below
    uint64_t compute_ns_ = 0;
    uint64_t stall_ns_ = 0; // of compute threads, for rows
    double bytes_ns_ = 0;   // of the thread, per byte, on average
    double start_ns_ = 0;   // until it begins with a layer
    double write_ns_ = 0;   // of what it has computed to the device, with a layer
    int n_copied_ = 0;      // events whose misses were all copied, since the processor's time was measured
    int n_layers_ = -1;
    std::string note_;
    std::thread thread_;
};

} // namespace moegguf
