"""The bounds of the exchange, each with its reason.

[limits] -> messages, validation, gossip, bodies, peers

Every node of a swarm must agree on those of what may travel.
"""

PROTOCOL = 4
"""Version of the messages. It is part of the topic and stream names, so that two versions never meet. In
version 2 a body was asked for without its author; in version 3 a group could have 512 answers."""

MAX_HEADER_BYTES = 1024
"""A signed header, whole. Gossip multiplies each byte by about 16 on the wire."""

MAX_BODY_BYTES = 1024 * 1024
"""A compressed body. 4 x 8 completions of 1024 tokens are about 130 KiB before compression."""

MAX_RAW_BODY_BYTES = 4 * 1024 * 1024
"""A body once decompressed: what one hostile body can make us allocate, whatever its compression ratio."""

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
"""Seconds that an author's clock may be ahead of ours. Home machines without NTP drift by about this much."""

CLAIM_TOLERANCE = 1e-3
"""Claimed and own reward may differ by rounding, relative to their size (absolute below 1)."""

MAX_POOL_HEADERS = 1024
"""Headers waiting for selection, about 1 MiB. Selection is uniform, so a sample of the swarm will do."""

MAX_POOL_HEADERS_PER_AUTHOR = 32
"""A few rounds' worth of one node; it cannot fill the pool by talking more."""

MAX_SEEN = 32_768
"""Remembered headers and group contents, against replays: 5 to 7 MiB each."""

MAX_AUTHOR_SHARE = 0.25
"""Share of the replay buffer that one author may hold."""

MIN_AUTHOR_GROUPS = 16
"""Groups that one author may hold of a small buffer all the same: in a swarm of two there is nobody else."""

MAX_TRACKED_PEERS = 4096
"""Peers whose conduct we remember, about 2 MiB. Those not heard of for longest are forgotten first."""

MAX_OWN_BODIES = 4096
"""Bodies kept for others to fetch, besides the bound in bytes."""

MAX_ANSWERED = 4096
"""Examples that we remember to have answered, so as to fetch what others answered to them."""

PROVEN_AFTER = 4
"""Accepted groups that make an author a proven one: some rounds in which it was of use."""

NEWCOMER_SHARE = 0.25
"""Share of a draw that all newcomers together may have, and of the choices of whom to fetch from. Large
enough that a new node is heard within rounds, small enough that those who cost nothing cannot fill a
batch."""

DELAYED_SHARE = 0.25
"""Share of the fetches under way that may wait for newcomers; as much again may wait for slow authors."""

SLOW_S = 1.0
"""A fetch that takes longer does not occupy the place of a proven author any more: a body has about 30
KiB."""

NEWCOMER_PATIENCE_S = 2.0
"""Seconds that we wait for the body of an author that never gave us one; doubled with each failure, so that a
far one is not shut out, up to the deadline of all fetches."""

LEAST_NEED = 0.02
"""Weight of a header of a task that we master beside one of a task that we always fail on: others may yet
know a better answer, and what we knew may be forgotten."""

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
"""All proven authors together, and all others together: these cannot use up what those have. A header costs
0.16 ms, so this bounds listening to 16 % of a core."""

TOTAL_HEADERS_BURST = 2000.0

LATE_S = 120.0
"""A header this much older than its arrival may be a replay: gossip forgets what it has passed on by then,
and signed messages of others can be sent again by anybody. It is not taken from its author's allowance."""

LATE_HEADERS_PER_S = 16.0
"""Headers of all authors together that come so late, after a partition or from clocks that are behind."""

LATE_HEADERS_BURST = 256.0

REQUESTS_PER_S = 32.0
"""Sustained body requests of one peer: whoever may announce so much may also ask for so much."""

REQUESTS_BURST = 64.0

VAIN_ASKS_PER_S = 2.0
"""Rate of asking others in vain for bodies of authors that are not proven: names of authors that nobody can
reach cost nothing. What is asked for and given is bounded by the fetches themselves."""

VAIN_ASKS_BURST = 8.0

TAKEN_PER_GIVEN = 8.0
"""Bytes that a peer may take for each that came from it, to be served as one who gives: one group of a node
is of use to several others. Nothing is free, as identities are: who has given nothing yet has its part of
what is not kept for givers."""

VAIN_DIALS_PER_S = 2.0
"""Rate of asking newcomers in vain whom we have to dial first, all together: names that announce bodies and
that nobody can reach cost nothing, and a dial with its look-up costs as much as many headers."""

VAIN_DIALS_BURST = 16

VAIN_BYTES_PER_S = 64.0 * 1024
"""Bodies that newcomers gave us and that were of no use, all together; when there were more, no newcomer is
asked until the time has made up for it."""

VAIN_BYTES_BURST = 2.0 * MAX_BODY_BYTES

MAX_BYTES_PER_TOKEN = 16
"""A compressed body has no more for each token of its answers: text has 2, noise 8. From the header alone we
see that a larger one could only hold answers too long for us."""

MAX_CHARS_PER_TOKEN = 64
"""Text with more characters per allowed token is too long without being tokenized, which would take
seconds."""

LOOK_S = 0.25
"""Of the groups of a page of a library no further one is judged after this time."""

PLAY_S = 3.0
"""A group's episodes are played again one after the other, and none goes on after this time; nor may a single
answer of the environment take longer. What was not played to its end is not used."""

JUDGE_S_PER_S = 0.2
"""Seconds that the judge may work for strangers in each second: for proven authors together, and as much for
all others together. Turns that cost seconds took the cores from training before, and held up the rest."""

JUDGE_BURST_S = 5.0
"""A round's groups come at once: a hundred of the usual ones, or one that overruns."""

AUTHOR_JUDGE_S_PER_S = 0.1
"""Seconds of it for one author: several groups a second where they take 30 ms, one in ten seconds where they
take one."""

AUTHOR_JUDGE_BURST_S = 2.0

THRIFTY_S = 0.1
"""Authors whose groups take the judge no longer are fetched from alike; others the less often, the longer."""

UNFIT_AUTHORS = 3
"""So many different authors whose episodes overran PLAY_S, and nobody's that did not: our environment itself
is too slow for it."""

UNFIT_S = 600.0
"""So long such a task is given up; nor is one given up that fitted so lately."""

UNFIT_TRIAL_S = 60.0
"""So often one group of a task that is given up is tried all the same, for PLAY_S at most."""

MAX_STUCK_JUDGEMENTS = 4
"""Scoring threads that overran and cannot be killed; with more, nothing is judged until one returns. Of an
author on whose group a thread is stuck, nothing is fetched."""
