// corrupt.cpp: breaks rules that moegguf_store_check verifies, one at a time. It writes to slots directly, without the
// functions of class Residency.
#include "api.h"
#include "testing.h"

namespace moegguf {
namespace {

// Calls `breaks(tier, s)` for slots that hold an expert, until one call returns true because it has broken a rule.
// Throws Error(INVALID) if no call returns true.
template <typename Breaks>
void corrupt(Store & store, Breaks breaks) {
    for (Tier * tier : store.tiers.all) {
        for (int s = 0; s < tier->residency.n_slots(); s++) {
            if (tier->residency.slot(s).expert >= 0 && breaks(*tier, s)) { return; }
        }
    }
    throw Error(MOEGGUF_INVALID, "no slot is in a state in which this rule could be broken");
}

Slot & slot_of(Tier & tier, int s) { return const_cast<Slot &>(tier.residency.slot(s)); }

bool unpin_source(Tier & tier, int s) {
    const int source = tier.source(s);
    if (source >= 0) { slot_of(tier.source_tier(s), source).pins = 0; }
    return source >= 0;
}

void corrupt(Store & store, int what) {
    Lock lock(store.shared.mutex);
    switch (what) {
        case MOEGGUF_CORRUPT_FREE:
            return corrupt(store, [](Tier & tier, int s) {
                slot_of(tier, s).il = slot_of(tier, s).expert = -1;
                return true;
            });
        case MOEGGUF_CORRUPT_PINS:
            return corrupt(store, [](Tier & tier, int s) {
                slot_of(tier, s).pins = -1;
                return true;
            });
        case MOEGGUF_CORRUPT_MAP:
            return corrupt(store, [](Tier & tier, int s) {
                slot_of(tier, s).expert ^= 1;
                return true;
            });
        case MOEGGUF_CORRUPT_SOURCE:
            return corrupt(store, unpin_source);
        default:
            throw Error(MOEGGUF_INVALID, "there is no rule " + std::to_string(what));
    }
}

} // namespace
} // namespace moegguf

using namespace moegguf;

int moegguf_corrupt(moegguf_store * store, int what) {
    return guarded([&] { corrupt(given(store).store, what); });
}

const char * moegguf_testing_last_error(void) { return last_error.c_str(); }
