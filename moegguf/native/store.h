// store.h: the expert store: puts its parts together and answers what is asked of all of them. What each does is said
// in its own header.
//
// It may call every part, under the store's lock. It changes no slot itself.
#pragma once

#include "acquire.h"
#include "arrivals.h"
#include "events.h"
#include "forecaster.h"
#include "staged_supply.h"

namespace moegguf {

class Store {
  public:
    explicit Store(const moegguf_config & config);
    ~Store();
    Store(const Store &) = delete;
    Store & operator=(const Store &) = delete;

    // Each is used by those that follow.
    const Layout layout;
    Shared shared;
    Events events;
    Tiers tiers;
    Context context;
    const std::vector<std::unique_ptr<Copies>> copies; // to tiers that are filled from RAM
    Transfers transfers;
    Supply slots;
    StreamedSupply streamed;
    StagedSupply staged;
    Arrivals arrivals;
    Forecaster forecaster;
    Acquire acquire;
    std::atomic<bool> has_graph{false}; // of a model, which is loaded by then

    ggml_backend_buffer_type_t buft() { return buft_.get(); }
    ggml_tensor * pool_tensor(const char * name, int n_tokens) const;

    void set_policy(int tier, const std::string & name, const Values & values);
    void set_scores(const float * scores, size_t n);
    void set_forecast(const float * probabilities, const uint8_t * known, size_t n);
    // Experts that are worth having; replace: in place of those wanted before for this cause.
    void want(Cause cause, const int32_t * il, const int32_t * experts, size_t n, bool replace);
    void hold_fill(bool hold);
    void resize(int tier, int n_slots, bool at_once);
    void cancel(bool on);
    bool drain(double timeout_s);
    void advance(uint64_t ns);
    int64_t replay(const moegguf_routing & routing); // events done

    void read_counters(moegguf_counters & out) const;
    void info(moegguf_pool_info & out);
    void tier_info(int tier, moegguf_tier_info & out);
    void residency(int tier, uint8_t * map, size_t n);
    void activity(uint32_t * uses, uint32_t * loads, size_t n);
    void read_slot(int matrix, int slot, void * out, size_t n) const;

  private:
    void start_links(const moegguf_config & config);
    void stop_links();
    std::vector<Tier *> tiers_at(int index); // enum moegguf_tier; all of them one kind. Throws Error(INVALID).
    // Those that share out a number of slots: the CPU's beside devices are in RAM, and keep theirs.
    std::vector<Tier *> resized_at(int index);

    std::unique_ptr<ggml_backend_buffer_type, void (*)(ggml_backend_buffer_type *)> buft_;
};

} // namespace moegguf

struct moegguf_store {
    explicit moegguf_store(const moegguf_config & config) : store(config) {}
    moegguf::Store store;
};
