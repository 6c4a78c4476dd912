// cpu_misses.h: experts that the device lacks, computed by the CPU from slots in RAM meanwhile ("--misses compute").
// All of it is in this folder: the supply of slots with this in addition (store.h names it), and its calls of the C
// ABI.
//
// The device computes every choice, those that it lacks with slots of other experts: no backend takes an id for none,
// and kernels want distinct ones within a token. The rows of these choices in the product with the down matrices are
// then replaced by the CPU's. What comes before is not used elsewhere, and what follows finds every row as it was
// meant. Not exact: processors round otherwise than devices, so an answer depends on what was resident.
//
// It may do what the supply of slots may, pin and take slots in RAM, and write rows of nodes behind down matrices.
#pragma once

#include "cpu_misses/admission.h"
#include "cpu_misses/expert_chain.h"
#include "slot_supply.h"

namespace moegguf {

// A layer's experts that the CPU computes. A context fills it before it is begun; then it is the thread's until it is
// done.
struct MissJob {
    struct Expert {
        int expert;
        int slot;         // in RAM, pinned
        int first_choice; // in `choices`
        int n_choices;
        bool computed;
    };

    int il = -1;
    int n_expert_used = 0;
    const ExpertChain * chain = nullptr; // nullptr: modelled
    std::vector<Expert> experts;
    std::vector<int> choices; // of [n_tokens][n_expert_used], each expert's one after another
    int n_embd = 0;
    std::vector<float> inputs;  // [n_tokens][n_embd]
    std::vector<float> weights; // [n_tokens][n_expert_used] where the chain wants them
    std::vector<float> rows;    // [n_tokens][n_expert_used][n_embd], those of choices that are computed
    uint64_t queued_ns = 0;     // when it was begun
    bool wanted = false;        // by a context; under the lock, as what follows
    bool begun = false;
    bool done = false;
    bool given_up = false; // cancelled
    bool measures = false; // how long it takes: no context waits for it
    int failed_expert = -1;
    std::string why;          // it could not be computed; empty: it could
    uint64_t computed_ns = 0; // in virtual time
};

class CpuMisses final : public SlotSupply {
  public:
    CpuMisses(const Layout & layout, Shared & shared, Contexts & contexts, Transfers & transfers, Tiers & tiers)
        : SlotSupply(layout, shared, contexts, transfers),
          tiers_(tiers),
          admission_(layout) {}
    ~CpuMisses() override;

    void start(int n_threads); // Throws Error(INVALID) where nothing lies in RAM below a device, Error(MEMORY)
    void start_modelled(double bytes_per_ns, double layer_ns); // in virtual time. Throws likewise.
    void info(moegguf_computed & out);

    // Supply.
    void observe(Context & context, Lock & lock) override;
    void release(Context & context, int next_il = -1) override;
    bool busy() const override { return !queue_.empty() || computing_; }
    void wait(Context & context, uint8_t kinds) override;
    void finish(Context & context) override;
    bool changes(const Context & context, const ggml_tensor * node) const override;
    void change(Context & context,
                ggml_tensor * node) override; // waits for the rows; the context says why there are none
    void read_graph(const ggml_cgraph & graph) override;

  private:
    static constexpr int most_tokens = 8; // of a pass; larger ones are prompts, whose experts many tokens share

    struct Kept {                     // of a context
        MissJob * job = nullptr;      // of the event; nullptr: none
        std::vector<int> dummy_slots; // whose products are replaced by the CPU's
    };

    bool pin_absent(Context & context, Lock & lock) override;
    void check_tiers(bool possible) const;
    void set_on();
    bool serves(int il, int n_tokens) const;
    const ExpertChain * keep(ExpertChain chain);
    static Kept & kept(Context & context);
    static MissJob * job_of(const Context & context);
    void choose(Context & context);
    bool find_dummies(Context & context);
    void forget(Context & context);
    bool comes_as_fast(int il, int expert) const;
    int count_fastest(int il, int least, int n_missed) const;
    void measure(Context & context, const ExpertChain * chain);
    MissJob & new_job(Context & context, const ExpertChain * chain);
    bool take(MissJob & job, const Event & event, int expert, LookUps & in_ram);
    void release(MissJob & job);
    void write_slot_ids(Context & context);
    void begin(Context & context);
    void begin_modelled(Context & context);
    void end_modelled(Context & context);
    bool awaits_file(const MissJob & job) const;
    void await_rows(Context & context, const MissJob & job, Lock & lock);
    void run();
    void compute(MissJob & job, Lock & lock);
    void compute_ready(MissJob & job);
    bool find_ready(MissJob & job);

    Tiers & tiers_;
    Admission admission_;
    ggml_backend_ptr backend_;
    std::atomic<bool> on_{false};
    bool modelled_ = false;
    std::mutex chains_mutex_;
    std::vector<std::unique_ptr<const ExpertChain>> chains_; // graphs hold their addresses
    std::vector<std::unique_ptr<MissJob>> jobs_;             // of all contexts, used again
    Ring<MissJob *> queue_;
    bool computing_ = false;
    bool stopping_ = false;
    std::condition_variable work_;
    std::vector<MissJob::Expert *> ready_; // of the thread
    std::vector<uint8_t> memory_;          // of its graphs
    std::vector<int> missing_;             // scratch of choose()
    uint64_t n_computed_ = 0;              // under the lock, as the figures below
    uint64_t compute_ns_ = 0;
    uint64_t stall_ns_ = 0; // of compute threads, for rows
    double bytes_ns_ = 0;   // of the thread, per byte, on average
    double start_ns_ = 0;   // until it begins with a layer
    double write_ns_ = 0;   // of what it has computed to the device, with a layer
    int n_copied_ = 0;      // events whose misses were all copied, since the processor's time was measured
    int n_layers_ = -1;     // whose misses can be computed, in the graph read last
    std::string note_;
    std::thread thread_;
};

} // namespace moegguf
