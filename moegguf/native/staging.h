// staging.h: prompts on a device. A layer's experts are copied into a tensor of the layer's full shape, where the
// router's own ids find them: kernels compute as if every expert were resident, and slots keep what they hold.
#pragma once

#include "lane.h"
#include "transfers.h"

namespace moegguf {

// Layers take a device's tensors in turn: while one is computed, the experts of the next are copied into another. One
// for all devices of a store. Everything here comes under the store's lock, on compute threads.
class PromptStaging {
  public:
    PromptStaging(const Layout & layout, Shared & shared, Tiers & tiers, Transfers & transfers);

    bool on() const { return on_; }

    // A place for each expert of the lane's event, pinned, and its copies queued. Slots are left alone meanwhile. What
    // came ahead is there when this returns, so that what is chosen then does not depend on how fast it came. false:
    // the lane says why.
    bool place(Lane & lane, const Moment & now, Lock & lock);
    // Experts are where they are multiplied: learns from the event, gives the last pass of a prompt's to slots, and
    // copies those of the next layers ahead.
    void finish(Lane & lane, const int32_t * ids, int n_expert_used, int n_tokens, Lock & lock);

    // What is on its way ahead will not come, and the slots that it comes from are free: with the lock given, when this
    // returns; else once the copies that have begun are done.
    void drop_ahead();
    void drop_ahead(Lock & lock);
    void note_pass(const Lane & lane, int n_tokens); // of any event

  private:
    template <typename Done>
    bool wait(Done done, Lock & lock);
    template <typename Done>
    bool wait_for_bytes(Lane & lane, Done done, Lock & lock);
    bool settle(Lane & lane, int il, Lock & lock);
    void count_look_ups(const Lane & lane, int il);
    void pin_there(Lane & lane, int il);
    void pin_rest(Lane & lane, const Moment & now);
    void drop(Tier & tier, const Lane * keep, int il);
    void learn(const Lane & lane, const int32_t * ids, int n_expert_used, int n_tokens);
    void adopt(Lane & lane, Lock & lock);
    void copy_ahead(const Lane & lane);
    bool next_layer(const Lane & lane, int & il, int & n_tokens) const;
    void copy_layer_ahead(int il, int n_tokens, int computing);
    bool borrow(Tier & to, int il, int expert);
    float chance(int il, int expert, int n_tokens) const;

    const Layout & layout_;
    Shared & shared_;
    Tiers & tiers_;
    Transfers & transfers_;
    const bool on_;
    bool settling_ = false;         // a lane waits for what came ahead of its layer
    bool ahead_ = false;            // something may be on its way
    std::vector<float> uses_;       // [n_layer * n_expert_max] by tokens of prompts so far
    std::vector<float> tokens_;     // [n_layer]
    std::vector<uint8_t> shortens_; // [n_layer] computes fewer tokens than the pass has: those whose logits are wanted
    int last_il_ = -1;              // of the event before, as the tokens of its pass
    int last_tokens_ = 0;
    std::vector<int> counts_; // [n_expert_max] scratch: tokens of an event that use an expert
};

} // namespace moegguf
