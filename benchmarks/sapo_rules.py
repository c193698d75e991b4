"""The rules that sapo.py compares, by name, as settings of the product.

[RULES] -> sapo_run.py -> Config -> PolicyLearner, Exchange

Own answers are as many under every rule. `sapo` and its like train on half as many own groups and as many of
others, 4/4 as published; the book's rules keep all own groups, and read those of others on top.
"""

from sapo_plan import Rule

LONE = {"exchange.enabled": False, "exchange.rule": "sapo"}

RULES: dict[str, Rule] = {
    # 8/0: the controls of a node that shares nothing.
    "alone": Rule(LONE, shares=False),
    "alone_successes": Rule(LONE, shares=False, drops_own_failures=True),
    "filter": Rule({**LONE, "rollout.dynamic_sampling": 3.0}, shares=False, equal_answers=True),
    "own_book": Rule({"exchange.enabled": False, "exchange.rule": "own_book"}, shares=False),
    "sapo": Rule({"exchange.rule": "sapo"}, halves=True),
    "successes": Rule({"exchange.rule": "successes"}, halves=True),
    "book": Rule({"exchange.rule": "book"}),
    # One thing changed at a time.
    "sapo_on_top": Rule({"exchange.rule": "sapo"}),
    "successes_on_top": Rule({"exchange.rule": "successes"}),
    "sapo_shaped": Rule({"exchange.rule": "sapo_own_rules:ShapedSapo"}, halves=True),
    "book_unmended": Rule({"exchange.rule": "sapo_own_rules:BookUnmended"}),
    "book_unmeasured": Rule({"exchange.rule": "sapo_own_rules:BookUnmeasured"}),
    "book_open": Rule({"exchange.rule": "sapo_own_rules:BookOpen"}),
    "book_shaped": Rule({"exchange.rule": "sapo_own_rules:ShapedBook"}),
    "book_light": Rule({"exchange.rule": "sapo_own_rules:BookLight"}),
    "book_heavy": Rule({"exchange.rule": "sapo_own_rules:BookHeavy"}),
    "book_of_64": Rule({"exchange.rule": "sapo_own_rules:BookOf64"}),
    "book_of_anybody": Rule({"exchange.rule": "sapo_own_rules:BookOfAnybody"}),
    "book_of_8": Rule({"exchange.rule": "book", "exchange.external_groups": 8}),
    "book_of_24": Rule({"exchange.rule": "book", "exchange.external_groups": 24}),
    # They need the root of this repository on PYTHONPATH.
    "rescue": Rule({"exchange.rule": "examples.rules.rescue:Rescue"}),
    "hacpo": Rule({"exchange.rule": "examples.rules.hacpo:Hacpo"}, halves=True),
}
