"""What `swarmnode doctor` says of the sandbox."""

from swarmnode.extensions.sandbox.isolation import UNCONFINED, Isolation
from swarmnode.extensions.sandbox.sandbox_check import sandbox_finding


def test_the_sandbox_that_programs_would_run_in_is_named() -> None:
    found = sandbox_finding(Isolation(namespaces=True, landlock=7, seccomp=True), optional=False)
    assert found.text == "programs run in a sandbox of namespaces, landlock 7 and seccomp"
    assert (found.verdict, found.advice) == ("ok", "")
    refused = sandbox_finding(UNCONFINED, optional=False)
    assert refused.verdict == "note" and "so none are run" in refused.text
    assert "user namespaces" in refused.advice
    assert "tasks.sandbox=optional" in sandbox_finding(UNCONFINED, optional=True).text
