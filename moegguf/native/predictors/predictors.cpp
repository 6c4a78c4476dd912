// predictors.cpp: the table of predictors that can be chosen by name, and the class that finds their trained arrays.
// The file changes neither a predictor nor an array.
#include "predictors/predictor.h"

namespace moegguf {
namespace {

const PredictorType * const types[] = {
    &previous_token_predictor, &token_table_predictor,  &affinity_predictor, &skip_predictor, &mlp_predictor,
    &expert_mlp_predictor,     &routing_path_predictor, &eamc_predictor,
};

} // namespace

Arrays::Arrays(const moegguf_predictor & given) {
    constexpr int max_arrays = 1 << 16;
    if (given.n_arrays < 0 || given.n_arrays > max_arrays || (given.n_arrays > 0 && !given.arrays)) {
        throw Error(MOEGGUF_INVALID, "a predictor must have 0 to " + std::to_string(max_arrays) + " arrays");
    }
    for (int i = 0; i < given.n_arrays; i++) {
        const moegguf_array & array = given.arrays[i];
        if (!array.name || (array.n > 0 && !array.data)) {
            throw Error(MOEGGUF_INVALID, "each array of a predictor must have a name and values");
        }
        arrays_[array.name] = array;
    }
}

const void * Arrays::find(const std::string & name, int type, size_t n) const {
    const auto found = arrays_.find(name);
    if (found == arrays_.end()) { throw Error(MOEGGUF_INVALID, "the predictor needs an array '" + name + "'"); }
    const moegguf_array & array = found->second;
    if (array.type != type || array.n == 0 || (n > 0 && array.n != n)) {
        throw Error(MOEGGUF_INVALID, "the array '" + name + "' has " + std::to_string(array.n) + " values of type " +
                                         std::to_string(array.type) + ", not " + std::to_string(n) + " of type " +
                                         std::to_string(type));
    }
    return array.data;
}

size_t Arrays::size(const std::string & name) const {
    const auto found = arrays_.find(name);
    return found == arrays_.end() ? 0 : found->second.n;
}

const PredictorType & predictor_type(const char * name) {
    std::string known;
    for (const PredictorType * type : types) {
        if (name && std::string(name) == type->name) { return *type; }
        known += (known.empty() ? "" : ", ") + std::string(type->name);
    }
    throw Error(MOEGGUF_INVALID, "there is no native predictor '" + std::string(name ? name : "") +
                                     "'; the known predictors are " + known);
}

} // namespace moegguf
