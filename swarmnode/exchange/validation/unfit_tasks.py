"""Tasks whose episodes take too long on this machine, so that next to nothing of them is fetched.

Fetcher -> [UnfitTasks] -> Fetcher
"""

from swarmnode.exchange.limits import UNFIT_AUTHORS, UNFIT_S, UNFIT_TRIAL_S


class UnfitTasks:
    """Tasks whose episodes our own environment does not play in time, whoever sends them.

    Identities are free, so newcomers shut a task to newcomers alone: an author who gave us groups is heard
    until several of its kind overran. While a task is shut, one group is tried now and then; one that fits,
    whoever sent it, opens the task to all.
    """

    def __init__(self) -> None:
        self._overran: dict[tuple[str, bool], set[str]] = {}
        """Authors, by task and whether they are known."""
        self._fitted_at: dict[str, float] = {}
        self._until: dict[tuple[str, bool], float] = {}
        self._try_at: dict[tuple[str, bool], float] = {}

    def overran(self, task: str, author: str, now: float, *, known: bool) -> bool:
        """An author's episodes took too long; True: so the task is given up for a while. Not one of which
        others' episodes fitted lately. `known`: the author gave us groups before."""
        kind = task, known
        authors = self._overran.setdefault(kind, set())
        if len(authors) < UNFIT_AUTHORS:
            authors.add(author)
        if len(authors) < UNFIT_AUTHORS or now < self._fitted_at.get(task, -UNFIT_S) + UNFIT_S:
            return False
        was_open = now >= self._until.get(kind, now)
        self._until[kind], self._try_at[kind] = now + UNFIT_S, now + UNFIT_TRIAL_S
        del self._overran[kind]
        return was_open

    def fitted(self, task: str, now: float) -> None:
        """A group of the task was judged in time."""
        self._fitted_at[task] = now
        for known in (False, True):
            self._overran.pop((task, known), None)
            self._until.pop((task, known), None)

    def tried(self, task: str, now: float, *, known: bool) -> None:
        """A group of the task is fetched from an author of this kind."""
        self._try_at[task, known] = now + UNFIT_TRIAL_S

    def tasks(self, now: float, *, known: bool) -> frozenset[str]:
        """Returns the tasks that nothing of such authors is fetched of now."""
        return frozenset(
            task
            for (task, of), until in self._until.items()
            # Given up for longer than any: our clock was set back since.
            if of == known and now < until <= now + UNFIT_S and now < self._try_at[task, of]
        )
