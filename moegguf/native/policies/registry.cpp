// registry.cpp: the table of policies that can be chosen by name. Makes policies, changes none.
#include "policies/policy.h"

// One line per policy; NAME_policy is defined in policies/NAME.cpp.
#define MOEGGUF_POLICIES(_) \
    _(lru)                  \
    _(decayed_frequency)    \
    _(next_use)             \
    _(slru)                 \
    _(locality)             \
    _(sparsity)

namespace moegguf {

#define MOEGGUF_DECLARE(name) extern const PolicyType name##_policy;
MOEGGUF_POLICIES(MOEGGUF_DECLARE)

namespace {

#define MOEGGUF_LIST(name) &name##_policy,
const PolicyType * const types[] = {MOEGGUF_POLICIES(MOEGGUF_LIST)};

} // namespace

std::unique_ptr<EvictionPolicy> make_policy(const Layout & layout, const std::string & name, const Values & values) {
    std::string known;
    for (const PolicyType * type : types) {
        if (name != type->name) {
            known += (known.empty() ? "" : ", ") + std::string(type->name);
        } else if (values.size() <= type->most_values) {
            return type->make(layout, values);
        } else {
            throw Error(MOEGGUF_INVALID, "the policy '" + name + "' has at most " + std::to_string(type->most_values) +
                                             " values, not " + std::to_string(values.size()));
        }
    }
    throw Error(MOEGGUF_INVALID, "there is no eviction policy '" + name + "'; known are " + known);
}

const PolicyType * policy_at(int index) {
    return index >= 0 && index < (int)std::size(types) ? types[index] : nullptr;
}

} // namespace moegguf
