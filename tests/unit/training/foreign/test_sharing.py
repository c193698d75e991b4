import random
from typing import get_args

import pytest

from swarmnode.config import Config, RuleName
from swarmnode.config_layers import load_config
from swarmnode.training.foreign.mix import own_to_learn_from
from swarmnode.training.foreign.rules import groups_wanted, keeps_own, make_rule, sharing_rule
from tests.answered import own

RIGHT, WRONG = ([3], 1.0), ([2], 0.0)


def config(*settings: str) -> Config:
    return load_config(environ={}, assignments=list(settings)).config


def test_every_setting_reaches_the_rule() -> None:
    rule = sharing_rule(
        config(
            "exchange.rule=own_book",
            "exchange.book_size=7",
            "exchange.book_replayed=3",
            "exchange.book_weight=1.5",
            "exchange.shaped=true",
        )
    )
    assert (rule.name, rule.book_size, rule.book_replayed, rule.book_weight, rule.shaped) == (
        "own_book", 7, 3, 1.5, True,
    )  # fmt: skip


@pytest.mark.parametrize("name", get_args(RuleName))
def test_every_name_is_a_rule_that_says_itself_whether_it_keeps_own_groups(name: str) -> None:
    chosen = config(f"exchange.rule={name}")
    assert make_rule(sharing_rule(chosen), seed=0).keeps_own == keeps_own(chosen)


@pytest.mark.parametrize(
    ("name", "becomes"), [("sapo", "sapo"), ("book", "successes"), ("rescue", "successes")]
)
def test_a_pipeline_replays_nothing(name: str, becomes: str) -> None:
    assert sharing_rule(config("pipeline.name=attic", f"exchange.rule={name}")).name == becomes


@pytest.mark.parametrize(
    ("name", "becomes"),
    [("book", "own_book"), ("own_book", "own_book"), ("sapo", "sapo"), ("rescue", "sapo"), ("hacpo", "sapo")],
)
def test_without_an_exchange_the_book_is_of_own_answers_and_the_others_are_plain_grpo(
    name: str, becomes: str
) -> None:
    assert sharing_rule(config("exchange.enabled=false", f"exchange.rule={name}")).name == becomes


def test_the_own_book_wants_no_groups_of_others() -> None:
    assert groups_wanted(config("exchange.rule=own_book", "exchange.external_groups=9")) == 0
    assert groups_wanted(config("exchange.rule=book", "exchange.external_groups=9")) == 9


@pytest.mark.parametrize("name", ["book", "own_book", "rescue"])
def test_a_rule_that_keeps_own_groups_is_handed_all_of_them(name: str) -> None:
    groups = [own(RIGHT, WRONG, index=n) for n in range(20)] + [own(RIGHT, RIGHT, index=30)]
    chosen = own_to_learn_from(groups, 4, config(f"exchange.rule={name}"), random.Random(0))
    assert chosen == groups


@pytest.mark.parametrize("name", ["sapo", "successes", "hacpo"])
def test_under_the_others_external_groups_take_the_places_of_own_ones(name: str) -> None:
    groups = [own(RIGHT, WRONG, index=n) for n in range(20)] + [own(RIGHT, RIGHT, index=30)]
    settings = config(f"exchange.rule={name}", "exchange.local_groups=4", "exchange.external_groups=4")
    counts = [len(own_to_learn_from(groups, arrived, settings, random.Random(0))) for arrived in (0, 3, 9)]
    assert counts == [8, 5, 0]


def test_without_an_exchange_all_own_groups_with_a_gradient_are_trained_on() -> None:
    groups = [own(RIGHT, WRONG, index=n) for n in range(7)] + [own(RIGHT, RIGHT, index=30)]
    off = config("exchange.enabled=false", "exchange.rule=sapo", "rollout.groups=8")
    assert list(own_to_learn_from(groups, 0, off, random.Random(0))) == groups[:7]
