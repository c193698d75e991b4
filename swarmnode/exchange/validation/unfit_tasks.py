"""Tasks whose episodes take too long on this machine, so that almost none of them are fetched.

Fetcher -> [UnfitTasks] -> Fetcher
"""

from swarmnode.exchange.limits import UNFIT_AUTHORS, UNFIT_S, UNFIT_TRIAL_S


class UnfitTasks:
    """Tasks whose episodes our own environment does not play in time, regardless of their author.

    Identities are free, so newcomers shut a task for newcomers alone: authors that gave us groups are heard
    until several of their kind overran. While a task is shut, one group is tried now and then; one that fits,
    from any author, opens the task to all.
    """

    def __init__(self) -> None:
        self._overran: dict[tuple[str, bool], set[str]] = {}
        """Authors, by task and by whether they are known."""
        self._fitted_at: dict[str, float] = {}
        self._until: dict[tuple[str, bool], float] = {}
        self._try_at: dict[tuple[str, bool], float] = {}

    def note_overrun(self, task: str, author: str, now: float, *, known: bool) -> bool:
        """Notes that an author's episodes took too long. Returns True if the task is now given up for a
        while; a task of which a group fitted lately is not. `known`: the author gave us groups before."""
        kind = task, known
        authors = self._overran.setdefault(kind, set())
        authors.add(author)
        if len(authors) < UNFIT_AUTHORS or now < self._fitted_at.get(task, -UNFIT_S) + UNFIT_S:
            return False
        was_open = now >= self._until.get(kind, now)
        self._until[kind], self._try_at[kind] = now + UNFIT_S, now + UNFIT_TRIAL_S
        del self._overran[kind]
        return was_open

    def note_fit(self, task: str, now: float) -> None:
        """Notes that a group of the task was judged in time."""
        self._fitted_at[task] = now
        for known in (False, True):
            self._overran.pop((task, known), None)
            self._until.pop((task, known), None)

    def note_try(self, task: str, now: float, *, known: bool) -> None:
        """Notes that a group of the task is being fetched from an author of this kind."""
        self._try_at[task, known] = now + UNFIT_TRIAL_S

    def tasks(self, now: float, *, known: bool) -> frozenset[str]:
        """Returns the tasks of which nothing is fetched from authors of this kind now."""
        return frozenset(
            task
            for (task, of), until in self._until.items()
            # A time beyond UNFIT_S was set before our clock was set back.
            if of == known and now < until <= now + UNFIT_S and now < self._try_at[task, of]
        )
