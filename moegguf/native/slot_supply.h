// slot_supply.h: experts from slots of their own: those that are there are used, and each of the others gets the slot
// of a victim. The supply of single tokens everywhere, and of prompts on the CPU that fit.
//
// It may pin, take and evict slots of the layer's tier, and order transfers into them.
#pragma once

#include "supply.h"

namespace moegguf {

class SlotSupply final : public Supply {
  public:
    using Supply::Supply;

    bool place(Context & context, Lock & lock) override;

  private:
    bool pin_absent(Context & context, Lock & lock); // experts of the event that have no slot yet
};

} // namespace moegguf
