"""Compares the store with a model of it, under random calls, on small files and on the
modelled link.

In an exact run, one device has fewer slots than experts, `sweep` and `fill` are off,
and all reads finish before the next call. The store must then hold the same experts as
`reference_store.py`, slot for slot. In every run:

- slots of the last event keep its experts until the next event or the pass's end, unless streaming reuses slots;
- no tier uses more slots than it has;
- the number of look-ups is the sum of hits and misses;
- a call fails only with a typed error that the test provokes or expects;
- no expert is still being read after the last call and a drain.

MOEGGUF_STORE_EXAMPLES=N runs N random sequences of calls instead of the 240 fixed ones.
"""

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import FakeModel, check_counters, make_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from product import Product, aborts
from reference_store import POLICIES, ReferenceStore

from moegguf.controller.shape import MoeShape
from moegguf.errors import ExpertIOError, GenerationCancelled, MoeggufError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.store import DeviceSlots, Store, StoreOptions, Tier
from moegguf.testing.library import arm_fault

EXAMPLES = int(os.environ.get("MOEGGUF_STORE_EXAMPLES", "0"))
Ids = npt.NDArray[np.int32]

# Drawn layers and experts are taken modulo the model's numbers of layers and experts. A
# share becomes a number of slots.
layers, seeds = st.integers(0, 5), st.integers(0, 1 << 16)
experts = st.tuples(layers, st.integers(0, 8))
shares = st.floats(0, 1)


def prompt(layout: ExpertLayout) -> Ids:
    """Returns the expert ids of 12 tokens. They use every expert of a layer; with 5
    experts, only expert 0."""
    n_used = layout.n_expert_used
    return (np.arange(12 * n_used).reshape(12, n_used) * 5 % layout.n_expert).astype(
        np.int32
    )


class StoreMachine(RuleBasedStateMachine):
    """Makes random calls to a store.

    In an exact run, each call is repeated on the reference store, which must then have
    the same experts in the same slots.
    """

    # Each model, and the bytes of a prompt's product that was computed with every
    # expert in a slot.
    models: Sequence[tuple[FakeModel, bytes]]

    @initialize(
        model=st.integers(0, 2), share=shares, share_below=st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.3, 1.0]),
        simulate=st.booleans(), exact=st.booleans(), readers=st.integers(1, 3), staging=st.integers(0, 2),
        policy=st.sampled_from(POLICIES), switches=st.data(),
    )  # fmt: skip
    def open(
        self, model: int, share: float, share_below: float, simulate: bool, exact: bool, readers: int, staging: int,
        policy: str, switches: Any,
    ) -> None:  # fmt: skip
        self.fake, self.expected = self.models[model]
        self.layout = self.fake.layout
        self.n_all, self.n_used = self.layout.n_expert_total, self.layout.n_expert_used
        n_ram = math.ceil(share_below * self.n_all)
        self.exact = exact and share < 1
        names = ("chunked", "preempt", "overlap", "demand_first", "direct")
        options = {name: switches.draw(st.booleans(), name) for name in names}
        if self.exact:
            n_ram, ahead, n_devices = 0, {"sweep": False, "fill": False}, 1
        else:
            ahead = {
                name: switches.draw(st.booleans(), name)
                for name in ("sweep", "fill", "stream")
            }
            n_devices = switches.draw(
                st.integers(1, min(2, len(self.layout.layers))), "devices"
            )
        self.layers = [
            [layer.il for layer in self.layout.layers[d::n_devices]]
            for d in range(n_devices)
        ]
        self.slots = [self.n_of(share, len(layers)) for layers in self.layers]
        self.usable = list(self.slots)  # the number of usable slots on each device
        link = switches.draw(st.sampled_from([0.0, 1e9]), "link") if simulate else 0.0
        self.n_ram, self.simulate = n_ram, simulate
        self.staging = staging if n_ram and share < 1 else 0
        devices = [
            DeviceSlots(None, n, layers, through_ram=n_ram > 0, staging=self.staging)
            for n, layers in zip(self.slots, self.layers, strict=True)
        ]
        self.store = Store(
            self.layout, devices,
            StoreOptions(
                repack=False, simulate=simulate, readers=readers, link_bytes_per_s=link, copy_bytes_per_s=4 * link,
                **options, **ahead,
            ),
            n_ram,
        )  # fmt: skip
        self.model = (
            ReferenceStore(MoeShape.of(self.layout), self.slots[0])
            if self.exact
            else MagicMock()
        )
        self.product: Product | None = None
        self.context = self.store.context
        # Layer, ids and slots of the last event; None: not checked.
        self.held: tuple[int, Ids, Ids] | None = None
        self.failed: type[MoeggufError] | None = None
        self.set_policy(policy)

    def n_of(self, share: float, n_layers: int) -> int:
        """Returns the number of slots for `n_layers` layers.

        Share 0 stands for the experts of one token in one layer, and share 1 for every
        expert.
        """
        return self.n_used + int(
            share * (n_layers * self.layout.n_expert - self.n_used)
        )

    def usable_for(self, il: int) -> int:
        return self.usable[self.store.device_of(il)]

    def expert(self, of: tuple[int, int]) -> tuple[int, int]:
        return self.layout.layers[of[0] % len(self.layout.layers)].il, of[
            1
        ] % self.layout.n_expert

    # Routing events.

    def end_pass(self) -> None:
        """Ends the pass and clears its failure, as an engine does.

        Asserts that the store has a failure if and only if a call of the pass has
        raised an error.
        """
        failed, self.held, self.failed = self.failed, None, None
        assert (self.context.take_failure() is None) == (failed is None)
        self.model.end_pass()

    def acquire(self, il: int, ids: Ids) -> Ids:
        """Routes an event in a pass that has not failed. Raises the error of the store.

        Keeps the event's slots in `held` for later checks.
        """
        self.held = None
        try:
            slots = self.context.acquire(il, ids)
        except MoeggufError as error:
            self.failed = type(error)
            raise
        fits = (
            np.unique(ids).size <= self.usable_for(il) and not self.store.options.stream
        )
        if fits or len(ids) == 1 or self.n_ram or not self.simulate:
            # Stays None if streaming may have reused this event's slots.
            self.held = (il, ids, slots)
        return slots

    def route(self, seed: int, il: int, n_tokens: int) -> Ids:
        """Returns random expert ids (n_tokens, n_used), which name no more experts than
        layer `il` has usable slots.

        Some experts are chosen more often than others, so that they stay in slots.
        """
        rng = np.random.default_rng(seed)
        some = np.sort(rng.permutation(self.layout.n_expert)[: self.usable_for(il)])
        share = 1 / (1 + np.arange(some.size))
        one = [
            rng.choice(some, self.n_used, replace=False, p=share / share.sum())
            for _ in range(n_tokens)
        ]
        return np.array(one, np.int32)

    @rule(il=layers, seed=seeds, n_tokens=st.sampled_from([1, 1, 1, 2, 12]))
    def event(self, il: int, seed: int, n_tokens: int) -> None:
        self.do_event(self.expert((il, 0))[0], seed, n_tokens)

    @rule(
        seed=seeds, n_passes=st.integers(1, 5), n_tokens=st.sampled_from([1, 1, 1, 2, 12]),
        ahead=st.booleans(),
    )  # fmt: skip
    def passes(self, seed: int, n_passes: int, n_tokens: int, ahead: bool) -> None:
        """Runs whole passes. With `ahead`, sets a forecast before each pass, and requests
        a prefetch after each layer."""
        for pass_ in range(n_passes):
            if ahead:
                self.set_forecast(seed + pass_)
            for row, layer in enumerate(self.layout.layers):
                self.do_event(layer.il, seed + 100 * pass_ + layer.il, n_tokens)
                if ahead:
                    self.the_reference_agrees()
                    self.prefetch((row + 1, seed + pass_))
                self.the_reference_agrees()

    def do_event(self, il: int, seed: int, n_tokens: int) -> None:
        ids = self.route(seed, il, n_tokens)
        if self.failed is not None:
            with pytest.raises(self.failed):
                self.context.acquire(il, ids)
            self.held = None
            self.model.begin(il, n_tokens)
            return
        slots = self.acquire(il, ids)
        expected = self.model.acquire(il, ids)
        if self.exact:
            assert slots.tolist() == expected

    @rule(il=layers)
    def crowded_event(self, il: int) -> None:
        """Routes an event that may need more experts than there are slots."""
        (il, _), n_expert = self.expert((il, 0)), self.layout.n_expert
        ids = (
            np.arange(n_expert, dtype=np.int32)[None]
            if self.exact
            else prompt(self.layout)
        )
        self.end_pass()
        with suppress(MoeggufError):
            self.acquire(il, ids)
        self.model.acquire(il, ids)
        assert self.failed is None or self.usable_for(il) < n_expert

    @precondition(
        lambda self: (
            not (self.exact or self.simulate or self.n_ram) and len(self.slots) == 1
        )
    )
    @rule()
    def product_of_a_prompt(self) -> None:
        """Multiplies a prompt with ggml's kernels, which read one pool, and checks the
        bytes of the product.

        Experts without a slot are streamed.
        """
        self.end_pass()
        self.product = self.product or Product(
            self.store, self.context, self.fake, prompt(self.layout)
        )
        self.product.set_ids(prompt(self.layout))
        self.product.acquire()
        bits = self.product.compute()
        # Pinned slots of this layer cannot be reused for its other experts if overlap
        # is off.
        if aborts(self.context):
            self.failed = MoeggufError
            assert (
                self.usable_for(0) < self.layout.n_expert
                and not self.store.options.overlap
            )
        else:
            assert bits == self.expected
        self.end_pass()

    @rule(expert=st.sampled_from([-1, 0, 1 << 20]), il=layers)
    def event_of_no_expert(self, expert: int, il: int) -> None:
        n_expert, (il, _) = self.layout.n_expert, self.expert((il, 0))
        self.end_pass()
        with pytest.raises(MoeggufError, match=f"of {n_expert}"):
            self.acquire(il, np.array([[0, expert or n_expert]], np.int32))
        self.model.begin(il, 1)

    @rule()
    def take_failure(self) -> None:
        self.end_pass()

    @rule(n_tokens=st.integers(0, 30))
    def announce(self, n_tokens: int) -> None:
        self.context.announce(0, 0, range(n_tokens))
        self.model.il = 1 << 30

    # Calls other than routing events.

    @rule(of=experts)
    def prefetch(self, of: tuple[int, int]) -> None:
        of = self.expert(of)
        self.store.prefetch([of[0]], [of[1]])
        self.model.prefetch(of)

    @precondition(lambda self: not self.exact)
    @rule(of=st.lists(experts, max_size=8))
    def prefetch_some(self, of: list[tuple[int, int]]) -> None:
        self.store.prefetch([*(il for il, _ in of), 99], [*(e for _, e in of), 0])

    @rule(of=st.lists(experts, max_size=5))
    def warm(self, of: list[tuple[int, int]]) -> None:
        of = list(map(self.expert, of))
        self.store.warm([il for il, _ in of], [e for _, e in of])
        self.model.warm(of)

    @rule(seed=st.none() | seeds)
    def set_scores(self, seed: int | None) -> None:
        table = (
            None
            if seed is None
            else np.random.default_rng(seed).integers(0, 4, self.store.shape)
        )
        self.model.scores = None if table is None else table.astype(np.float32)
        self.store.set_scores(self.model.scores)

    @rule(seed=st.none() | seeds)
    def set_forecast(self, seed: int | None) -> None:
        rng = np.random.default_rng(seed)
        table = (rng.integers(0, 5, self.store.shape) / 4).astype(np.float32)
        known = [layer.il for layer in self.layout.layers if rng.integers(0, 2)]
        self.store.set_forecast(None if seed is None else table, known)
        self.model.set_forecast(None if seed is None else table, known)

    @rule(name=st.sampled_from(POLICIES))
    def set_policy(self, name: str) -> None:
        self.store.set_policy(name)
        self.model.set_policy(name)

    @rule(share=shares, d=st.integers(0, 1))
    def resize(self, share: float, d: int) -> None:
        d %= len(self.slots)
        n_slots = self.n_of(share, len(self.layers[d]))
        if n_slots > self.slots[d]:
            with pytest.raises(OptionError, match="slots, not"):
                self.store.resize(n_slots, device=d)
            return
        self.end_pass()
        self.store.resize(n_slots, device=d)
        self.model.resize(n_slots)
        self.usable[d] = n_slots

    @precondition(lambda self: self.n_ram)
    @rule(share=shares)
    def resize_below(self, share: float) -> None:
        self.end_pass()
        self.store.resize(max(1, round(share * self.n_ram)), Tier.RAM)

    @precondition(lambda self: self.simulate)
    @rule(us=st.integers(0, 20))
    def advance(self, us: int) -> None:
        self.store.advance(1000 * us)

    @rule()
    def drain(self) -> None:
        self.store.drain(10)

    # Cancelled and failing calls.

    @rule(il=layers, seed=seeds)
    def cancelled_event(self, il: int, seed: int) -> None:
        """Routes an event while the store is cancelled. The event fails, but the
        experts that it needs are still read."""
        il, _ = self.expert((il, 0))
        ids = self.route(seed, il, 1)
        self.end_pass()
        self.store.cancel()
        with pytest.raises(GenerationCancelled):
            self.acquire(il, ids)
        self.store.cancel(False)
        self.model.acquire(il, ids)

    @precondition(lambda self: not self.simulate)
    @rule(
        il=layers,
        seed=seeds,
        kind=st.sampled_from(["read", "copy"]),
        nth=st.integers(1, 4),
    )
    def failing_event(self, il: int, seed: int, kind: str, nth: int) -> None:
        il, _ = self.expert((il, 0))
        ids = self.route(seed, il, 1)
        self.end_pass()
        if self.exact:
            kind, nth = "read", 1
        arm_fault(kind, nth, sticky=True)
        with suppress(ExpertIOError):
            self.acquire(il, ids)
        self.store.drain(10)
        arm_fault(kind, 0)
        self.model.acquire(il, ids, reads_fail=True)
        if self.exact:
            assert (self.failed is not None) == any(
                slot and slot.broken for slot in self.model.slots
            )
        self.end_pass()

    @precondition(lambda self: not self.simulate)
    @rule(of=experts, warms=st.booleans())
    def failing_prefetch(self, of: tuple[int, int], warms: bool) -> None:
        of = self.expert(of)
        self.store.drain(10)
        arm_fault("read", 1, sticky=True)
        (self.store.warm if warms else self.store.prefetch)([of[0]], [of[1]])
        self.store.drain(10)
        arm_fault("read", 0)
        self.model.warm([of], reads_fail=True) if warms else self.model.prefetch(
            of, reads_fail=True
        )

    # Conditions that hold after each call.

    @invariant()
    def what_is_handed_out_stays(self) -> None:
        if self.held:
            self.check_held(*self.held)

    def check_held(self, il: int, ids: Ids, slots: Ids) -> None:
        if self.staging and len(ids) > 1:
            assert np.array_equal(ids, slots), (
                "a prompt's experts are staged by their own ids"
            )
        elif self.simulate:
            assert (self.store.residency()[il, np.unique(ids)] == 2).all()
        if not self.simulate:
            self.fake.check(self.store, il, ids, slots)

    @invariant()
    def the_reference_agrees(self) -> None:
        if not self.exact:
            return
        self.store.drain(10)
        assert np.array_equal(self.store.residency(), self.model.residency())
        counters = self.store.counters()
        assert {
            name: counters[name] for name in self.model.counters
        } == self.model.counters
        assert counters["slots_pinned"] == len(self.model.pinned)
        check_counters(counters, sum(self.slots))
        if not self.simulate:
            for s, slot in enumerate(self.model.slots):
                if slot is not None and not slot.broken:
                    self.fake.check_slot(self.store, *slot.expert, s)

    @invariant()
    def counters_and_budgets_hold(self) -> None:
        of_devices = map(self.store.device, range(len(self.slots)))
        for tier, of in [
            *((Tier.COMPUTE, of) for of in of_devices),
            *((tier, self.store.tier(tier)) for tier in self.store.tiers),
        ]:
            assert of["lookups"] == of["hits_ready"] + of["hits_late"] + of["misses"]
            n_coming = int((self.store.residency(tier) == 1).sum())
            # Slots beyond the limit of a shrunken tier stay occupied while their
            # experts are pinned or still being read.
            over = of["slots_pinned"] + n_coming
            assert (
                of["slots_used"] <= of["n_slots_usable"] + over
                and of["slots_used"] <= of["n_slots"]
            )
        counters = self.store.counters()
        n_done = counters["prefetch_started"] + counters["prefetch_dropped"]
        assert n_done <= counters["prefetch_requested"]
        assert (
            sum(counters[f"prefetch_{how}"] for how in ("useful", "late", "wasted"))
            <= counters["prefetch_started"]
        )

    def teardown(self) -> None:
        arm_fault("read", 0)
        arm_fault("copy", 0)
        if not hasattr(self, "store"):
            return
        try:
            # Skipped after an error, which pytest reports.
            if sys.exc_info()[0] is None:
                self.check_all_that_is_there()
        finally:
            if self.product is not None:
                self.product.close()
            self.store.close()

    def check_all_that_is_there(self) -> None:
        """Asserts that no expert is still being read and no slot is pinned.

        Also asserts that every resident expert is a hit. With files, its slot must hold
        the file's bytes.
        """
        self.end_pass()
        # A pool whose shrinking was postponed has shrunk after this event.
        self.context.acquire(self.layout.layers[0].il, [[0]])
        self.end_pass()
        self.store.drain(10)
        check_counters(self.store.counters(), sum(self.slots))
        whole, of_devices = (
            self.store.tier(),
            list(map(self.store.device, range(len(self.slots)))),
        )
        for name in (
            "lookups",
            "hits_ready",
            "hits_late",
            "misses",
            "evictions",
            "slots_used",
        ):
            assert (
                whole[name]
                == self.store.counters()[name]
                == sum(of[name] for of in of_devices)
            )
        there = self.store.residency()
        assert (there != 1).all()
        for il, expert in np.argwhere(there == 2).tolist():
            n_misses = self.store.counters()["misses"]
            slots = self.context.acquire(il, [[expert]])
            assert self.store.counters()["misses"] == n_misses
            self.check_held(il, np.array([[expert]], np.int32), slots)
        self.end_pass()
        assert all(
            self.store.tier(tier)["slots_pinned"] == 0 for tier in self.store.tiers
        )


def bits(model: FakeModel) -> bytes:
    """Returns the bytes of a prompt's product from a store with a slot for every
    expert."""
    store = Store(model.layout, model.layout.n_expert_total, StoreOptions(repack=False))
    context = store.context
    product = Product(store, context, model, prompt(model.layout))
    product.acquire()
    found = product.compute()
    product.close()
    store.close()
    return found


def test_store_equals_the_reference_store_under_random_calls(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = (
        make_model(
            tmp_path_factory.mktemp("model"),
            n_layer=n_layer,
            n_expert=n_expert,
            n_used=n_used,
            dense_layers=of,
        )
        for n_layer, n_expert, n_used, of in (
            (3, 6, 2, ()),
            (6, 8, 3, (1, 4)),
            (1, 5, 1, ()),
        )
    )
    kind = type(
        "StoreMachine",
        (StoreMachine,),
        {"models": [(model, bits(model)) for model in made]},
    )
    options = settings(
        max_examples=EXAMPLES or 240, stateful_step_count=40, derandomize=not EXAMPLES, print_blob=bool(EXAMPLES),
        deadline=None, database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(kind, settings=options)
