// store.h: the expert store: its parts, put together. What each does is said in its own header, and what may be asked
// of all of them in moegguf.h.
#pragma once

#include "acquire.h"
#include "events.h"
#include "forecaster.h"
#include "staged_supply.h"
#include "streamed_supply.h"

namespace moegguf {

// A buffer type that only reserves address space (hook.cpp); Store's own.
ggml_backend_buffer_type * make_reserved_buft(Store * store);
void free_reserved_buft(ggml_backend_buffer_type * buft);

class Store {
  public:
    explicit Store(const moegguf_config & config);
    ~Store();

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

    std::vector<Tier *> tiers_at(int index); // enum moegguf_tier; all of them one kind. Throws Error(INVALID).

  private:
    void start_links(const moegguf_config & config);
    void stop_links();

    std::unique_ptr<ggml_backend_buffer_type, void (*)(ggml_backend_buffer_type *)> buft_;
};

} // namespace moegguf

struct moegguf_store {
    explicit moegguf_store(const moegguf_config & config) : store(config) {}
    moegguf::Store store;
};
