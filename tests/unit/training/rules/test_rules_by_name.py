import random
import re

import pytest

from swarmnode.errors import ConfigError
from swarmnode.registry import SEAMS
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.training.rules.lessons import Rule
from swarmnode.training.rules.rules import (
    groups_wanted,
    keeps_own,
    make_rule,
    own_to_learn_from,
    rule_of,
    sharing_rule,
)
from tests.answered import own
from tests.own_rules import OWN_RULE, OnlyTheBest

RIGHT, WRONG = ([3], 1.0), ([2], 0.0)


def config(*settings: str) -> Config:
    return load_config(environ={}, assignments=list(settings)).config


def test_the_config_knows_our_rules_and_no_others() -> None:
    with pytest.raises(ConfigError, match=r"no such rule; available: sapo, .* as mymodule:name"):
        config("exchange.rule=boko")


@pytest.mark.parametrize("path", ["rules.rescue:Rescue", "rules.hacpo:Hacpo"])
def test_the_rules_among_the_examples_are_rules(path: str) -> None:
    assert issubclass(rule_of(f"examples.{path}"), Rule)


@pytest.mark.parametrize("name", [*SEAMS["rule"].ours, OWN_RULE])
def test_every_name_is_a_rule_that_says_itself_what_it_asks_of_a_node(name: str) -> None:
    chosen = config(f"exchange.rule={name}", "exchange.external_groups=9")
    rule = make_rule(sharing_rule(chosen), seed=0)
    assert rule.keeps_own == keeps_own(chosen) == (name in ("book", "own_book", OWN_RULE))
    assert groups_wanted(chosen) == (0 if name == "own_book" else 9)


def test_a_rule_of_ones_own_is_named_by_its_import_path() -> None:
    rule = make_rule(sharing_rule(config(f"exchange.rule={OWN_RULE}")), seed=0)
    assert isinstance(rule, OnlyTheBest)
    (lesson,) = rule.lessons([], [own(WRONG, RIGHT, WRONG)], version=0).external
    assert lesson.advantages == (None, 1.0, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Rule", "cannot be imported: No module named 'no_such_module'. install"),
        (
            "tests.own_rules:Missing",
            "module 'tests.own_rules' has no attribute 'Missing'. tests",
        ),
        ("tests.own_rules:NoRule", "is not a subclass of Rule. write class NoRule(Rule), from swarmnode."),
        ("tests.own_rules:best_of", "is not a subclass of Rule. write class best_of(Rule), from swarmnode."),
    ],
)
def test_a_rule_that_cannot_be_had_says_why_and_what_to_do(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        rule_of(name)


@pytest.mark.parametrize(
    ("name", "becomes"),
    [("sapo", "sapo"), ("book", "successes"), (OWN_RULE, "successes")],
)
def test_a_pipeline_replays_nothing(name: str, becomes: str) -> None:
    assert sharing_rule(config("pipeline.name=attic", f"exchange.rule={name}")).name == becomes


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("book", "own_book"),
        ("own_book", "own_book"),
        ("sapo", "sapo"),
        (OWN_RULE, "sapo"),
    ],
)
def test_without_an_exchange_the_book_is_of_own_answers_and_the_others_are_plain_grpo(
    name: str, becomes: str
) -> None:
    assert sharing_rule(config("exchange.enabled=false", f"exchange.rule={name}")).name == becomes


def test_the_own_book_wants_no_groups_of_others() -> None:
    assert groups_wanted(config("exchange.rule=own_book", "exchange.external_groups=9")) == 0
    assert groups_wanted(config("exchange.rule=book", "exchange.external_groups=9")) == 9


@pytest.mark.parametrize("name", ["book", "own_book"])
def test_a_rule_that_keeps_own_groups_is_handed_all_of_them(name: str) -> None:
    groups = [own(RIGHT, WRONG, index=n) for n in range(20)] + [own(RIGHT, RIGHT, index=30)]
    chosen = own_to_learn_from(groups, 4, config(f"exchange.rule={name}"), random.Random(0))
    assert chosen == groups


@pytest.mark.parametrize("name", ["sapo", "successes"])
def test_under_the_others_external_groups_take_the_places_of_own_ones(name: str) -> None:
    groups = [own(RIGHT, WRONG, index=n) for n in range(20)] + [own(RIGHT, RIGHT, index=30)]
    settings = config(f"exchange.rule={name}", "exchange.local_groups=4", "exchange.external_groups=4")
    counts = [len(own_to_learn_from(groups, arrived, settings, random.Random(0))) for arrived in (0, 3, 9)]
    assert counts == [8, 5, 0]


def test_without_an_exchange_all_own_groups_with_a_gradient_are_trained_on() -> None:
    groups = [own(RIGHT, WRONG, index=n) for n in range(7)] + [own(RIGHT, RIGHT, index=30)]
    off = config("exchange.enabled=false", "exchange.rule=sapo", "rollout.groups=8")
    assert list(own_to_learn_from(groups, 0, off, random.Random(0))) == groups[:7]
