"""The claims of sapo.py: which rule is compared with which, in which swarm.

Table -> [claims_of] -> name -> Estimate; what was not run is not claimed
"""

from statistics import fmean

from sapo_plan import Outcome
from sapo_swarms import SWARMS
from sapo_table import Estimate, Table, estimate, gap, ratio

OURS = "book"
"""The rule that is shipped."""

UNDEFENDED = "book_unmended"
"""The same without what keeps injected text out of it."""

WINDOW = 5
"""Rounds over which a newcomer is compared with the others, and over which injected text is counted."""


def claims_of(table: Table, longer: Table) -> dict[str, Estimate]:
    """Returns every claim of which both sides were run. `longer`: nodes that share nothing, for as many CPU
    seconds as those of `table` that share."""
    found = {
        "specialists_cumulative_vs_alone": table.paired(ratio, "specialists", OURS, "alone"),
        "specialists_cumulative_vs_own_book": table.paired(ratio, "specialists", OURS, "own_book"),
        "specialists_cumulative_vs_filter": table.paired(ratio, "specialists", OURS, "filter"),
        "specialists_last_minus_alone": table.paired(gap, "specialists", OURS, "alone"),
        "specialists_equal_cpu_minus_alone": _equal_cpu(table, longer, "alone"),
        "specialists_equal_cpu_minus_own_book": _equal_cpu(table, longer, "own_book"),
        "specialists_sapo_vs_alone": table.paired(ratio, "specialists", "sapo", "alone"),
        "equals_cumulative_vs_alone": table.paired(ratio, "equals", OURS, "alone"),
        "equals_cumulative_vs_own_book": table.paired(ratio, "equals", OURS, "own_book"),
        "equals_last_minus_alone": table.paired(gap, "equals", OURS, "alone"),
        "equals_sapo_vs_alone": table.paired(ratio, "equals", "sapo", "alone"),
        "strangers_cumulative_vs_alone": table.paired(ratio, "strangers", OURS, "alone"),
        "speeds_cumulative_vs_alone": table.paired(ratio, "speeds", OURS, "alone"),
        "speeds_worst_node_vs_alone": table.paired(worst_node, "speeds", OURS, "alone"),
        "sizes_cumulative_vs_alone": table.paired(ratio, "sizes", OURS, "alone"),
        "sizes_worst_node_vs_alone": table.paired(worst_node, "sizes", OURS, "alone"),
        "fresh_rounds_saved": _of_each(table, "fresh"),
    }
    found |= _under_attack(table, "poison", "peaceful") | _under_attack(table, "poison_lax", "peaceful_lax")
    claims = {name: value for name, value in found.items() if value is not None}
    whole = claims.get("specialists_cumulative_vs_alone")
    if whole is not None and whole.half < float("inf"):
        claims["specialists_cumulative_vs_alone_low"] = Estimate(whole.low, 0.0)
    return claims


def worst_node(ours: Outcome, alone: Outcome) -> float:
    """The smallest ratio of cumulative rewards of any node."""
    return min(ours.cumulative_of(node) / alone.cumulative_of(node) for node in range(len(ours.rewards)))


def rounds_saved(outcome: Outcome, joins: int) -> float:
    """How many rounds earlier than the others the newcomer had the reward that they had when it came.

    Means over WINDOW rounds are compared. One that never gets there has saved none, and counts with all the
    rounds that it did.
    """
    newcomer = outcome.joined.index(joins)
    others = [rewards for node, rewards in enumerate(outcome.rewards) if node != newcomer]
    goal = fmean(fmean(rewards[joins - WINDOW : joins]) for rewards in others)
    rewards = outcome.rewards[newcomer]
    reached = (
        number
        for number in range(WINDOW, len(rewards) + 1)
        if fmean(rewards[number - WINDOW : number]) >= goal
    )
    return joins - next(reached, len(rewards))


def gain_kept(attacked: Outcome, peaceful: Outcome, alone: Outcome) -> float:
    """What of the gain over being alone is left to the honest nodes when others attack. They are the same
    nodes, the first ones, in all three."""
    honest = range(len(attacked.rewards))

    def total(outcome: Outcome) -> float:
        return sum(outcome.cumulative_of(node) for node in honest)

    return (total(attacked) - total(alone)) / (total(peaceful) - total(alone))


def injected_rate(outcome: Outcome) -> float:
    """Share of the victims' answers that carry the injected text, in the last WINDOW rounds."""
    return fmean(fmean(shares[-WINDOW:]) for shares in outcome.injected)


def _equal_cpu(table: Table, longer: Table, against: str) -> Estimate | None:
    """Held-out reward of nodes that share over that of nodes that trained alone for as long."""
    ours, theirs = table.tuned("specialists", OURS), longer.tuned("specialists", against)
    values = [gap(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    return estimate(values) if values else None


def _under_attack(table: Table, attacked: str, peaceful: str) -> dict[str, Estimate | None]:
    """By rule: the gain that is kept, and what of the attackers' text is said."""
    found: dict[str, Estimate | None] = {}
    for rule in (OURS, UNDEFENDED, "sapo"):
        kept, rate = f"{attacked}3of8_gain_kept", f"{attacked}_injected_rate"
        if (attacked, rule) == ("poison", OURS):
            rate = "injected_rate"
        elif rule != OURS:
            kept, rate = f"{kept}_{rule}", f"{rate}_{rule}"
        ours, base = table.tuned(attacked, rule), table.tuned(attacked, "alone")
        calm = table.tuned(peaceful, rule)
        both = [seed for seed in ours if seed in base and seed in calm]
        if both:
            found[kept] = estimate([gain_kept(ours[s], calm[s], base[s]) for s in both])
        if ours:
            found[rate] = estimate([injected_rate(outcome) for outcome in ours.values()])
            found[f"{attacked}_vs_alone_{rule}"] = table.paired(ratio, attacked, rule, "alone")
    return found


def _of_each(table: Table, swarm: str) -> Estimate | None:
    joins = max(SWARMS[swarm].joins)
    values = [rounds_saved(outcome, joins) for outcome in table.tuned(swarm, OURS).values()]
    return estimate(values) if values else None
