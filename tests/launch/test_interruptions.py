"""Interruptions as they are written, and as they are drawn."""

import random

import pytest

from launch.errors import Refused
from launch.rehearsal.interruptions import KINDS, Interruption, draw, parse


def test_they_are_read_with_or_without_a_kind_and_sorted_by_step():
    assert parse(["30:kill", "7", "12:host"], 60) == [
        Interruption(7, "reclaim"),
        Interruption(12, "host"),
        Interruption(30, "kill"),
    ]
    assert [str(one) for one in parse(["7"], 60)] == ["7:reclaim"]


def test_every_mistake_is_told_at_once():
    with pytest.raises(Refused) as refused:
        parse(["0", "60", "x:kill", "-3", "5:flood"], 60)
    assert [str(problem).split(" ")[1] for problem in refused.value.problems] == [
        *("0", "60", "x:kill", "-3", "5:flood")
    ]


def test_drawn_ones_are_inside_the_run_of_all_kinds_and_repeatable():
    drawn = draw(21, 60, random.Random(3))
    assert drawn == draw(21, 60, random.Random(3)) != draw(21, 60, random.Random(4))
    assert sorted(one.kind for one in drawn) == sorted(KINDS * 3)
    assert all(1 <= one.step < 60 for one in drawn)
    assert drawn == sorted(drawn, key=lambda one: one.step)
    assert all(one.step == 1 for one in draw(5, 2, random.Random(0)))
