"""The live panel on a terminal: what the node does, learns, hears, drops and waits for.

status.py -> [panel] -> rich. `render` is a pure function of a status, so a picture of it is a real one.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarmnode.node.monitors import policy_label, shown
from swarmnode.node.status import NodeStatus, PipelineStatus, invitation

LOG_LINES = 6
HISTORY_ROUNDS = 60
SPARKS = "▁▂▃▄▅▆▇█"


class PanelMonitor(logging.Handler):
    """Draws the panel in place and shows the latest log lines inside it."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._rewards: deque[float] = deque(maxlen=HISTORY_ROUNDS)
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{time.strftime('%H:%M:%S')} {policy_label.get()}{record.getMessage()}")

    def round_done(self, status: NodeStatus) -> None:
        if status.reward.own is not None:
            self._rewards.append(status.reward.own)
        self.tick(status)

    def evaluated(self, status: NodeStatus) -> None:
        self.tick(status)

    def tick(self, status: NodeStatus) -> None:
        self._live.update(render(status, tuple(self._rewards), tuple(self._lines), time.time()), refresh=True)

    def close(self) -> None:
        self._live.stop()
        super().close()


def render(status: NodeStatus, rewards: Sequence[float], lines: Sequence[str], now: float) -> RenderableType:
    """The whole panel for one moment."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", justify="right")
    grid.add_column()
    for label, content in _rows(status, rewards, now):
        # Names, reasons and details are text: what looks like markup in them is not ours.
        grid.add_row(label, Text(content) if isinstance(content, str) else content)
    title = Text.assemble((status.name, "bold"), f"  {status.peer_id[:6]}..{status.peer_id[-6:]}")
    body = Group(
        grid, Text(), *(Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in lines)
    )
    return Panel(body, title=title, border_style=_colour(status))


def _rows(status: NodeStatus, rewards: Sequence[float], now: float) -> list[tuple[str, RenderableType]]:
    reward, training, sharing, speed = status.reward, status.training, status.exchange, status.speed
    return [
        ("doing", f"{status.phase.name} for {age(now - status.phase.since)}  {status.phase.detail}"),
        ("policy", f"{status.model}, version {status.progress.policy_version}, swarm {status.swarm}"),
        ("round", _progress(status)),
        ("reward", f"own {shown(reward.own)}  external {shown(reward.external)}  {sparkline(rewards)}"),
        (
            "held out",
            f"{shown(reward.eval_first)} at first, {shown(reward.eval_last)}"
            f" after {_none(reward.eval_round)} rounds",
        ),
        (
            "trained on",
            f"{training.own_groups} own + {training.external_groups} external groups; "
            f"{training.zero_advantage_own} own ones had no gradient",
        ),
        (
            "speed",
            f"{shown(speed.tokens_per_s, '.0f')} tokens/s, round {shown(speed.round_s, '.2f')} s "
            f"(generate {shown(speed.generate_s, '.2f')}, train {shown(speed.train_s, '.2f')})",
        ),
        ("rollouts", _generation(status)),
        *([("pipeline", _pipeline(status.pipeline))] if status.pipeline.name else []),
        ("network", _network(status, now)),
        (
            "exchange",
            f"published {sharing.published}, served {sharing.served}, heard {sharing.headers}, "
            f"fetched {sharing.fetched}, accepted {sharing.accepted}, waiting {sharing.buffered}",
        ),
        ("dropped", _reasons(sharing.dropped)),
        ("kept back", _reasons(sharing.unpublished)),
        ("saved", _saved(status, now)),
        ("join us", _invitation(status)),
    ]


def _progress(status: NodeStatus) -> RenderableType:
    progress = status.progress
    if progress.rounds_limit is None:
        return f"{progress.round} (until stopped), {progress.tokens:,} tokens"
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(progress.rounds_limit, 1), completed=progress.round, width=40)
    row.add_row(f"{progress.round}/{progress.rounds_limit}", bar, f"{progress.tokens:,} tokens")
    return row


def _pipeline(pipeline: PipelineStatus) -> str:
    if pipeline.stage is None or pipeline.end_layer is None:
        return f"{pipeline.name}, {pipeline.members} members, no stage for us yet"
    return (
        f"{pipeline.name}: stage {pipeline.stage} of {_none(pipeline.stages)}"
        f" (layers {pipeline.first_layer} to {pipeline.end_layer - 1}), {pipeline.members} members;"
        f" iteration {pipeline.iteration} in {shown(pipeline.iteration_s, '.2f')} s"
        f" (planned {shown(pipeline.planned_s, '.2f')});"
        f" {pipeline.repaired} paths repaired, {pipeline.lost} members lost{_idle(pipeline)}"
    )


def _idle(pipeline: PipelineStatus) -> str:
    if pipeline.idle_share is None:
        return ""
    return f"; {pipeline.idle_tokens:,} tokens in {pipeline.idle_share:.0%} of its waiting time"


def _generation(status: NodeStatus) -> str:
    generation, training = status.generation, status.training
    if not generation.engine:
        return "-"
    return (
        f"{generation.engine}, {generation.mode}; {generation.groups_in_flight} groups in flight;"
        f" off-policy {shown(training.off_policy_share, '.0%')}, oldest {_none(training.max_age)} versions"
    )


def _network(status: NodeStatus, now: float) -> str:
    network = status.network
    restarts = f", restarted {network.restarts} times" if network.restarts else ""
    story = f": {network.detail}" if network.detail else ""
    since = f" for {age(now - network.since)}" if network.since else ""
    return f"{network.peers} peers, {network.state}{since}{restarts}{story}"


def _saved(status: NodeStatus, now: float) -> RenderableType:
    saved = status.checkpoint
    if saved.error:
        return Text(saved.error, style="red")
    if saved.round is None or saved.at is None:
        return "nothing yet"
    return f"round {saved.round}, {age(now - saved.at)} ago"


def _invitation(status: NodeStatus) -> Text:
    """The command for another machine. It folds rather than being cut: people copy it."""
    return Text(invitation(status) or "-", overflow="fold")


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())) or "nothing"


def _colour(status: NodeStatus) -> str:
    return "red" if status.checkpoint.error else "yellow" if status.network.state == "restarting" else "green"


def _none(value: int | None) -> str:
    return "-" if value is None else str(value)


def sparkline(values: Sequence[float]) -> str:
    """A curve in characters, from the lowest to the highest value shown.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[int((value - low) * scale)] for value in values)


def age(seconds: float) -> str:
    """A duration as a person would say it.

    >>> age(75), age(7300)
    ('1 min 15 s', '2 h 1 min')
    """
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
