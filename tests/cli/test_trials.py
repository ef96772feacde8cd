"""In which order strategies are run, and for how long; without any ranks: who takes turns is made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from soap.cli.trials import DUELS, LEAST_DUELS, ROUNDS, TOO_LATE, TRIED_SHARE, Times, take_turns

NAMES = ["data_parallel", "found 1", "megatron", "found 2"]


class MadeUp:
    """Strategies with given times; each turn of one takes a second, and so does its beginning. ``events``: what was asked for."""

    def __init__(self, times: Mapping[str, int]) -> None:
        self.times, self.events, self.now = times, list[tuple[str, str]](), 0

    def begin(self, name: str) -> None:
        self.events.append(("begin", name))
        self.now += 1

    def turn(self, name: str) -> int:
        self.events.append(("turn", name))
        self.now += 1
        return self.times[name]

    def end(self, name: str) -> None:
        self.events.append(("end", name))

    def after(self, seconds: float) -> Callable[[float], bool]:
        return lambda share: self.now > share * seconds

    def names(self, event: str) -> list[str]:
        return [name for own, name in self.events if own == event]


def tried(times: Mapping[str, int], seconds: float = 1e9, to_beat: bool = True) -> tuple[Times, MadeUp]:
    made = MadeUp(times)
    return take_turns(list(times), made, made.after(seconds), to_beat), made


def test_the_fastest_meets_data_parallelism_in_turns_that_had_no_part_in_choosing_it() -> None:
    times, made = tried(dict(zip(NAMES, (100, 90, 120, 80), strict=True)))
    assert {name: len(own) for name, own in times.rounds.items()} == dict.fromkeys(NAMES, ROUNDS)
    assert times.duels == {"data_parallel": (100,) * DUELS, "found 2": (80,) * DUELS}
    assert made.names("begin") == NAMES and made.names("end") == ["found 1", "megatron"]
    duels = made.names("turn")[ROUNDS * len(NAMES) :]
    assert set(duels) == {"data_parallel", "found 2"} and len(duels) == 2 * DUELS


def test_turns_change_their_order() -> None:
    _, made = tried({"data_parallel": 100, "found 1": 90})
    pairs = list(zip(*2 * [iter(made.names("turn"))], strict=True))
    assert all(set(pair) == {"data_parallel", "found 1"} for pair in pairs)
    first = [pair[0] for pair in pairs]
    assert first.count("data_parallel") == first.count("found 1") == (ROUNDS + DUELS) // 2


def test_luck_in_the_rounds_does_not_count_in_the_duels() -> None:
    class Lucky(MadeUp):
        def turn(self, name: str) -> int:
            self.events.append(("turn", name))
            of_rounds = len(self.names("turn")) <= 3 * ROUNDS
            return {"data_parallel": 100, "found 1": 50 if of_rounds else 110}.get(name, 90)

    made = Lucky({})
    times = take_turns(NAMES[:3], made, made.after(1e9), True)
    assert set(times.rounds["found 1"]) == {50} and set(times.duels["found 1"]) == {110}
    assert set(times.duels) == {"data_parallel", "found 1"}


@pytest.mark.parametrize(("times", "to_beat"), [((100, 120, 130, 110), True), ((100, 90, 80, 70), False)])
def test_nobody_meets_data_parallelism_if_it_is_the_fastest_or_not_allowed(times: tuple[int, ...], to_beat: bool) -> None:
    found, made = tried(dict(zip(NAMES, times, strict=True)), to_beat=to_beat)
    assert found.duels == {} and len(made.names("turn")) == ROUNDS * len(NAMES)


def test_time_that_is_over_leaves_out_the_last_strategies_then_rounds_and_duels() -> None:
    times, made = tried(dict(zip(NAMES, (100, 90, 80, 70), strict=True)), seconds=7)
    assert made.names("begin") == NAMES[:2]  # two seconds are more than a quarter of seven
    assert [len(own) for own in times.rounds.values()] == [1, 1]  # four seconds are more than half of seven
    assert made.now == 12 and [len(own) for own in times.duels.values()] == [LEAST_DUELS] * 2  # the round was a duel, and four more tell
    assert (TRIED_SHARE, TOO_LATE) == (0.5, 1.5)


def test_of_several_the_rounds_in_which_one_was_chosen_are_no_duels() -> None:
    times, _ = tried(dict(zip(NAMES[:3], (100, 90, 80), strict=True)), seconds=9)
    assert [len(own) for own in times.rounds.values()] == [1, 1, 1]
    assert {name: len(own) for name, own in times.duels.items()} == {"data_parallel": LEAST_DUELS, "megatron": LEAST_DUELS}


def test_however_slow_both_take_a_turn_but_no_duel_long_after_the_time() -> None:
    times, made = tried({"data_parallel": 100, "found 1": 90}, seconds=0)
    assert times == Times({"data_parallel": (100,), "found 1": (90,)}, {}) and made.names("end") == []


def test_the_bar_says_how_much_faster_the_fastest_is() -> None:
    made, said = MadeUp({"data_parallel": 3_000_000, "found 1": 2_000_000}), list[str]()
    take_turns(["data_parallel", "found 1"], made, made.after(1e9), True, said.append)
    assert said == ["found 1 2.000 ms, 1.50x data_parallel"] * (ROUNDS + DUELS)
