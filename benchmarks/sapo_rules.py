"""The rules that sapo.py compares, by name, as settings of the product.

[RULES] -> sapo_run.py -> Config -> PolicyLearner, Exchange
"""

from sapo_plan import Rule

RULES: dict[str, Rule] = {
    # 8/0: the controls of a node that shares nothing.
    "alone": Rule({"exchange.external_groups": 0}, shares=False),
    "alone_successes": Rule({"exchange.external_groups": 0}, shares=False, drops_own_failures=True),
    "filter": Rule(
        {"exchange.external_groups": 0, "rollout.dynamic_sampling": 3.0}, shares=False, equal_answers=True
    ),
    "sapo": Rule({}),
}
