"""The number of compute threads, from times and loads that are made up."""

import pytest

from moegguf.engine.threadpool import MEMORY_S, ThreadGovernor


class Machine:
    """A clock, and a governor that is asked every quarter of a second."""

    def __init__(self, n_cpu: int, n_max: int | None = None) -> None:
        self.governor = ThreadGovernor(n_cpu, n_max or n_cpu)
        self.now_s = 100.0

    def decide(self, others: float, token_s: dict[int, float] | None = None) -> int:
        self.now_s += 0.25
        return self.governor.decide(self.now_s, others, token_s[self.governor.n_threads] if token_s else None)

    def steps(self, n: int, others: float, token_s: dict[int, float] | None = None) -> list[int]:
        return [self.decide(others, token_s) for _ in range(n)]


QUIET = {1: 0.020, 2: 0.011}
BUSY = {1: 0.021, 2: 0.190}


def test_quiet_machine_keeps_every_thread() -> None:
    assert set(Machine(2).steps(100, 0.05, QUIET)) == {2}


def test_one_busy_process_takes_one_thread_within_a_step_and_gives_it_back_within_another() -> None:
    machine = Machine(2)
    machine.steps(4, 0.0, QUIET)
    assert machine.steps(200, 0.7, BUSY) == [1] * 200  # and no probing in between
    assert machine.steps(3, 0.05, QUIET) == [2, 2, 2]


def test_a_load_that_came_within_the_last_step_makes_it_look_once_more() -> None:
    machine = Machine(2)
    assert machine.decide(0.5, {2: 0.012}) == 1  # mostly measured before the load came
    assert machine.decide(1.0, BUSY) == 2  # slower than that
    assert machine.steps(30, 1.0, BUSY) == [1] * 30


def test_a_load_beside_which_fewer_threads_are_slower_leaves_them_all() -> None:
    harmless, machine = {1: 0.020, 2: 0.012}, Machine(2)
    n_steps = int(10 * MEMORY_S / 0.25)
    n_fewer = machine.steps(n_steps, 0.6, harmless).count(1)
    assert 1 <= n_fewer <= 12  # asked again every MEMORY_S


def test_load_between_the_thresholds_changes_nothing() -> None:
    machine = Machine(2)
    assert machine.steps(9, 0.35, QUIET) == [2] * 9
    machine.decide(1.0, BUSY)
    assert machine.steps(9, 0.35, QUIET) == [1] * 9


@pytest.mark.parametrize(("others", "expected"), [(0.1, 8), (1.0, 7), (3.0, 5), (7.9, 1), (8.0, 1)])
def test_many_processors(others: float, expected: int) -> None:
    assert Machine(8).decide(others) == expected


def test_a_quota_below_the_processors_leaves_room_for_others() -> None:
    assert Machine(64, n_max=4).steps(3, 40.0) == [4, 4, 4]
    assert Machine(64, n_max=4).steps(3, 62.0) == [2, 2, 2]


def test_prompts_follow_the_load_alone() -> None:
    machine = Machine(2)
    assert machine.steps(3, 1.0) + machine.steps(2, 0.0) == [1, 1, 1, 2, 2]
