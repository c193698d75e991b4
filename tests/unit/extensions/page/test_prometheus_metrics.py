"""GET /metrics: what Prometheus is told of each number."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.extensions.page.prometheus_metrics import COUNTERS, LABELLED, fields_of, metrics_of
from swarmnode.training.records import TrainReport
from tests.shown_page import STATUS


def test_what_only_grows_is_a_counter_and_each_number_is_explained_by_the_sentence_under_its_field() -> None:
    families = {one.name: one for one in text_string_to_metric_families(metrics_of(STATUS).decode())}
    accepted, buffered = families["swarmnode_exchange_accepted"], families["swarmnode_exchange_buffered"]
    assert (accepted.type, buffered.type) == ("counter", "gauge")
    assert [sample.name for sample in accepted.samples] == ["swarmnode_exchange_accepted_total"]
    assert accepted.documentation == "Groups of others that passed all checks."
    assert families["swarmnode_exchange_dropped"].type == "counter", "by reason"
    assert "swarmnode_progress_round" in families and families["swarmnode_progress_round"].type == "gauge"


def test_counters_are_numbers_of_a_status() -> None:
    assert {name.removesuffix(".NAME") for name, is_number, _ in fields_of() if is_number} >= COUNTERS


def test_a_name_of_a_stranger_stays_in_its_label() -> None:
    odd = msgspec.structs.replace(STATUS.exchange, trained={'a"b\\n\n': 2})
    text = metrics_of(msgspec.structs.replace(STATUS, exchange=odd)).decode()
    (family,) = (
        one for one in text_string_to_metric_families(text) if one.name == "swarmnode_exchange_trained"
    )
    assert family.samples[0].labels == {LABELLED["exchange.trained"]: 'a"b\\n\n'}


def test_a_learner_of_ones_own_may_report_more_numbers() -> None:
    class Report(TrainReport, frozen=True, kw_only=True):
        agreement: float = 0.5

    text = metrics_of(msgspec.structs.replace(STATUS, training=Report())).decode()
    assert "swarmnode_training_agreement 0.5" in text
