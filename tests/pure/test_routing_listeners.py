"""Tests the listeners of a store's routing events without a store: exceptions, and the
log of evictions."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from moegguf.engine import eviction_log
from moegguf.engine.session import RoutingListener, RoutingListeners
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.store import ListenOptions


class FailingListener(RoutingListener):
    listen_options = ListenOptions()

    def announce(self, announcement: Announcement) -> None:
        raise ValueError("announced")

    def observe(self, event: RoutingEvent) -> None:
        raise ValueError("observed")


@pytest.mark.parametrize(
    ("method", "message"), [("_announce", "announced"), ("_observe", "observed")]
)
def test_listener_that_failed_is_not_called_again_after_another_is_added(
    method: str, message: str
) -> None:
    listeners = RoutingListeners(Mock())
    listeners.add(FailingListener())
    with pytest.raises(ValueError, match=message):
        getattr(listeners, method)(Mock())
    added = Mock(listen_options=ListenOptions())
    listeners.add(added)
    getattr(listeners, method)(Mock())
    assert added.announce.called or added.observe.called


def test_eviction_log_names_layers_of_a_model_whose_first_layer_is_dense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(
        eviction_log, "log_decision", lambda name, **fields: logged.append(fields)
    )
    before, now = np.zeros((3, 4), np.uint8), np.zeros((3, 4), np.uint8)
    before[2, 1], now[1, 3] = 2, 2  # layer 0 has no experts
    session = Mock()
    session.store.residency.side_effect = [before, now]
    log = eviction_log.EvictionLog(session)
    for _ in range(2):
        log.observe(Mock(il=1, phase=Phase.DECODE))
    assert [(fields["evicted"], fields["for_experts"]) for fields in logged] == [
        (["2/1"], ["1/3"])
    ]
