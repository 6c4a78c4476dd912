// staged_supply.h: prompts on a device. A layer's experts are copied into a tensor of the layer's full shape, where the
// router's own ids find them: kernels compute as if every expert were resident, and slots keep what they hold.
//
// It may pin, take and empty slots of staging tiers, fill slots of the same device with what a prompt leaves, and order
// copies into both.
#pragma once

#include "supply.h"

namespace moegguf {

// Layers take a device's tensors in turn: while one is computed, the experts of the next are copied into another. One
// for all devices of a store.
class StagedSupply final : public Supply {
  public:
    StagedSupply(const Layout & layout, Shared & shared, Transfers & transfers, Tiers & tiers);

    bool on() const { return on_; }

    // Any event, whoever supplies it, before place(): what is on its way ahead of one that is not staged is dropped.
    void observe(Context & context, Lock & lock);
    // What came ahead is there when this returns, so that what is chosen then does not depend on how fast it came.
    bool place(Context & context, Lock & lock) override;
    // Gives experts of the last pass of a prompt's to slots, and copies those of the next layer ahead.
    void finish(Context & context) override;
    // What is on its way ahead will not come: slots that it comes from are free once the copies under way are done.
    void drop_ahead();

  private:
    bool take_tensor(Context & context, Lock & lock);
    void pin_there(Context & context);
    void pin_rest(Context & context);
    void drop(Tier & tier, const Event * keep);
    void count_tokens(const Event & event);
    void keep_most_used(Context & context, Lock & lock);
    void copy_ahead(const Context & context);
    bool next_layer(const Context & context, int & il, int & n_tokens) const;
    void copy_layer_ahead(int il, int n_tokens, int computing);
    bool borrow(Tier & to, int il, int expert);

    Tiers & tiers_;
    const bool on_;
    bool ahead_ = false;            // something may be on its way
    std::vector<uint8_t> shortens_; // [n_layer] computes fewer tokens than the pass has: those whose logits are wanted
    int last_il_ = -1;              // of the event before, as the tokens of its pass
    int last_tokens_ = 0;
    std::vector<int> counts_; // [n_expert_max] tokens of the event that use an expert
};

} // namespace moegguf
