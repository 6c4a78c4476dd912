// registry.cpp: the table of policies that can be chosen by name, and their parameters. Makes policies, changes none.
#include "policies/policy.h"

#include <algorithm>

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

constexpr int max_parameters = 64, max_values = 1 << 20;

template <typename Names>
std::string listed(const Names & names) {
    std::string text;
    for (const auto & name : names) {
        text += (text.empty() ? "" : ", ") + std::string(name);
    }
    return text.empty() ? "none" : text;
}

const PolicyType & type_of(const std::string & name) {
    std::vector<const char *> known;
    for (const PolicyType * type : types) {
        if (name == type->name) {
            return *type;
        }
        known.push_back(type->name);
    }
    throw Error(MOEGGUF_INVALID, "there is no eviction policy '" + name + "'; known are " + listed(known));
}

} // namespace

Parameters::Parameters(const moegguf_policy & given) {
    if (given.n_parameters < 0 || given.n_parameters > max_parameters ||
        (given.n_parameters > 0 && !given.parameters)) {
        throw Error(MOEGGUF_INVALID, "a policy has 0 to " + std::to_string(max_parameters) + " parameters");
    }
    for (int i = 0; i < given.n_parameters; i++) {
        const moegguf_parameter & p = given.parameters[i];
        if (!p.name || p.n < 0 || p.n > max_values || (p.n > 0 && !p.values)) {
            throw Error(MOEGGUF_INVALID, "a policy's parameter has a name and its values");
        }
        names_.push_back(p.name);
        values_.emplace_back(p.values, p.values + p.n);
    }
}

std::vector<float> Parameters::values(const char * name, std::vector<float> otherwise) const {
    const auto found = std::find(names_.begin(), names_.end(), name);
    return found == names_.end() ? otherwise : values_[found - names_.begin()];
}

float Parameters::value(const char * name, float otherwise) const {
    const std::vector<float> found = values(name, {otherwise});
    if (found.size() != 1) {
        throw Error(MOEGGUF_INVALID,
                    "the parameter '" + std::string(name) + "' is one value, not " + std::to_string(found.size()));
    }
    return found[0];
}

std::unique_ptr<EvictionPolicy> make_policy(const Layout & layout, const moegguf_policy & chosen) {
    if (!chosen.name) {
        throw Error(MOEGGUF_INVALID, "a policy has a name");
    }
    const PolicyType & type = type_of(chosen.name);
    const Parameters parameters(chosen);
    for (const std::string & name : parameters.names()) {
        if (std::find(type.parameters.begin(), type.parameters.end(), name) == type.parameters.end()) {
            throw Error(MOEGGUF_INVALID, "the policy '" + std::string(type.name) + "' has no parameter '" + name +
                                             "'; known are " + listed(type.parameters));
        }
    }
    return type.make(layout, parameters);
}

const PolicyType * policy_at(int index) {
    return index >= 0 && index < (int)std::size(types) ? types[index] : nullptr;
}

} // namespace moegguf
