"""The bounds of the exchange, each with its reason.

[limits] -> messages, validation, gossip, bodies, peers

All nodes of a swarm must agree on the bounds of what travels.
"""

PROTOCOL = 4
"""Version of the messages. It is part of the topic and stream names, so that two versions never meet. In
version 2, requests for a body did not name its author; in version 3 a group could have 512 answers."""

MAX_HEADER_BYTES = 1024
"""A whole signed header. Gossip multiplies each byte by about 16 on the wire."""

MAX_BODY_BYTES = 1024 * 1024
"""A compressed body. 4 x 8 completions of 1024 tokens are about 130 KiB before compression."""

MAX_RAW_BODY_BYTES = 4 * 1024 * 1024
"""A decompressed body: the most that one hostile body can make us allocate, whatever its compression
ratio."""

MIN_GROUP_SIZE = 2
"""One completion has no advantage over anything."""

MAX_GROUP_SIZE = 64
"""The widest group, eight times the usual one."""

MAX_COMPLETION_CHARS = 128 * 1024
"""The longest completion, about 32k tokens: more than any policy that fits a home machine writes."""

MAX_EPISODE_TURNS = 64
"""Turns of one answer of an environment's task: the most that any environment grants."""

MAX_NAME_CHARS = 64
"""Swarm, task, version and model names. Four of them must fit into MAX_HEADER_BYTES."""

MAX_CLOCK_SKEW_S = 120.0
"""Seconds that an author's clock may be ahead of ours. Clocks of home machines without NTP are off by about
this much."""

CLAIM_TOLERANCE = 1e-3
"""Tolerance between claimed and own rewards, for rounding; relative to their size (absolute below 1)."""

MAX_POOL_HEADERS = 1024
"""Headers waiting for selection, about 1 MiB. Selection is uniform, so a sample of the swarm will do."""

MAX_POOL_HEADERS_PER_AUTHOR = 32
"""A few rounds' worth of one node; it cannot fill the pool by talking more."""

MAX_SEEN = 32_768
"""Remembered headers and group contents, against replays: 5 to 7 MiB each."""

MAX_AUTHOR_SHARE = 0.25
"""Share of the replay buffer that one author may hold."""

MIN_AUTHOR_GROUPS = 16
"""Groups of a small buffer that one author may hold all the same: in a swarm of two there is no other."""

MAX_TRACKED_PEERS = 4096
"""Peers whose conduct we remember, about 2 MiB. Those not heard of for longest are forgotten first."""

MAX_OWN_BODIES = 4096
"""Bodies kept for others to fetch, besides the bound in bytes."""

MAX_ANSWERED = 4096
"""Examples that we remember having answered, so as to fetch what others answered to them."""

PROVEN_AFTER = 4
"""Accepted groups that make an author a proven one: some rounds in which it was of use."""

NEWCOMER_SHARE = 0.25
"""Share of a draw, and of the choices of an author to fetch from, that all newcomers together may have. Large
enough that a new node is heard within rounds, small enough that free identities cannot fill a batch."""

DELAYED_SHARE = 0.25
"""Share of the fetches under way that may wait for newcomers; as much again may wait for slow authors."""

SLOW_S = 1.0
"""A fetch that takes longer no longer occupies the place of a proven author: a body has about 30 KiB."""

NEWCOMER_PATIENCE_S = 2.0
"""Seconds that we wait for the body of an author that never gave us one; doubled with each failure, so that a
far one is not shut out, up to the deadline of all fetches."""

LEAST_NEED = 0.02
"""Weight of a header of a task that we master, next to one of a task that we always fail on (1): others may
yet know a better answer, and we may forget what we knew."""

MAX_WAIT_SHARE = 0.1
"""Share of the time of its own work that a round may wait for others."""

HEADERS_PER_S = 32.0
"""Sustained headers of one peer, half a percent of a core to hear: a round of 32 groups every second is as
fast as the demonstration policy goes, and far faster than a real model."""

PACE = 0.9
"""Share of that rate at which we announce: jitter on the way must not make honest headers too many."""

HEADERS_BURST = 64.0
"""A node announces all groups of a round at once."""

TOTAL_HEADERS_PER_S = 500.0
"""Headers of all proven authors together, and of all others together: the others cannot use up the allowance
of proven ones. A header costs 0.16 ms, so this bounds listening to 16 % of a core."""

TOTAL_HEADERS_BURST = 2000.0

LATE_S = 120.0
"""A header this much older than its arrival may be a replay: gossip has forgotten by then what it passed on,
and anybody can send signed messages of others again. It is not taken from its author's allowance."""

LATE_HEADERS_PER_S = 16.0
"""Headers of all authors together that come this late, after a partition or from clocks that are behind."""

LATE_HEADERS_BURST = 256.0

REQUESTS_PER_S = 32.0
"""Sustained body requests of one peer: as many as the headers that it may announce."""

REQUESTS_BURST = 64.0

VAIN_ASKS_PER_S = 2.0
"""Rate of vain requests to other peers for bodies of authors that are not proven: names of authors that
nobody can reach cost nothing. Requests that are answered are bounded by the fetches themselves."""

VAIN_ASKS_BURST = 8.0

TAKEN_PER_GIVEN = 8.0
"""Bytes that a peer may take for each byte that came from it and still count as a giver: one group of a node
is of use to several others. Identities are free, so a peer that has given nothing yet has its part only of
what is not kept for givers."""

VAIN_DIALS_PER_S = 2.0
"""Rate of vain requests to newcomers that we have to dial first, all together: names that announce bodies and
that nobody can reach cost nothing, and a dial with its look-up costs as much as many headers."""

VAIN_DIALS_BURST = 16

VAIN_BYTES_PER_S = 64.0 * 1024
"""Rate of useless bodies from newcomers, all together; beyond it, no newcomer is asked until time has made up
for it."""

VAIN_BYTES_BURST = 2.0 * MAX_BODY_BYTES

MAX_BYTES_PER_TOKEN = 16
"""Most bytes of a compressed body for each token of its answers: text has 2, noise 8. The header alone shows
that a larger body could only hold answers too long for us."""

MAX_CHARS_PER_TOKEN = 64
"""Text with more characters per allowed token counts as too long without being tokenized, which would take
seconds."""

LOOK_S = 0.25
"""Seconds after which no further group of a library is judged in one go."""

PLAY_S = 3.0
"""Seconds for which a group's episodes are played again, one after the other; a single reply of the
environment may not take longer either. Episodes that were not played to their end are not used."""

JUDGE_S_PER_S = 0.2
"""Seconds in each second that the judge may work for strangers: for proven authors together, and as much for
all others together. Before this limit, turns that cost seconds took the cores from training and held up the
rest."""

JUDGE_BURST_S = 5.0
"""The groups of a round come at once: a hundred of the usual ones, or one that overruns."""

AUTHOR_JUDGE_S_PER_S = 0.1
"""Seconds of it for one author: several groups a second if they take 30 ms each, one in ten seconds if they
take one second."""

AUTHOR_JUDGE_BURST_S = 2.0

THRIFTY_S = 0.1
"""Authors whose groups take the judge no longer than this are fetched from alike; others less often, the
longer they take."""

UNFIT_AUTHORS = 3
"""Number of different authors whose episodes overran PLAY_S, with none that did not, after which our
environment itself counts as too slow for the task."""

UNFIT_S = 600.0
"""Seconds for which such a task is given up; a task of which a group fitted within this time is not."""

UNFIT_TRIAL_S = 60.0
"""Seconds between groups of a given-up task that are tried all the same, for PLAY_S at most."""

MAX_STUCK_JUDGEMENTS = 4
"""Scoring threads that overran and cannot be killed; with this many, nothing is judged until one returns.
Nothing is fetched from an author on whose group a thread is stuck."""
