"""What docker/observability asks for is there: metrics, labels, files, passwords, images with a version."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.extensions.page.prometheus_metrics import LABELLED, metrics_of, name_of
from tests.shown_page import STATUS
from tests.test_docker import module

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docker" / "observability"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yml").read_text())
BESIDE = {name: each for name, each in COMPOSE["services"].items() if "profiles" in each}
NUMBERS = {name for name, is_number, _ in module(ROOT / "checks/metrics_page.py").fields_of() if is_number}
METRICS = {name_of(name.removesuffix(".NAME")) for name in NUMBERS}


def asked() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_what_has_names_of_its_own_has_them_as_labels() -> None:
    assert {name.removesuffix(".NAME") for name in NUMBERS if name.endswith(".NAME")} == set(LABELLED)


@pytest.mark.parametrize("expression", asked())
def test_each_metric_that_a_panel_asks_for_is_one_of_the_nodes(expression: str) -> None:
    named = set(re.findall(r"swarmnode_\w+", expression)) - {"swarmnode_info"}
    assert named <= METRICS
    for by, metric in re.findall(r"by \((\w+)\) \(.*?(swarmnode_\w+)", expression):
        (dotted,) = [name for name in LABELLED if name_of(name) == metric]
        assert LABELLED[dotted] == by


def test_each_curve_has_a_name_that_its_query_knows() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"(by|group_left) \({label}\)", target["expr"]), panel["title"]


def test_the_name_by_which_nodes_are_told_apart_is_in_their_metrics() -> None:
    families = {each.name: each for each in text_string_to_metric_families(metrics_of(STATUS).decode())}
    assert families["swarmnode_info"].samples[0].labels["name"] == STATUS.name


def test_panels_stand_beside_and_below_each_other() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_panels_ask_the_prometheus_that_is_provisioned() -> None:
    (source,) = yaml.safe_load((FOLDER / "datasource.yml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090" and "prometheus" in BESIDE
    (provider,) = yaml.safe_load((FOLDER / "dashboards.yml").read_text())["providers"]
    assert f"{provider['options']['path']}/dashboard.json" in str(BESIDE["grafana"]["volumes"])


def test_prometheus_asks_the_nodes_of_compose_at_their_port_with_the_password() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    nodes = {name: each for name, each in COMPOSE["services"].items() if name.startswith("node-")}
    assert set(found["names"]) == set(nodes)
    for node in nodes.values():
        assert f"--set node.http_port={found['port']}}}" in node["entrypoint"][2]
    assert job["basic_auth"]["password_file"] in {f"/run/secrets/{name}" for name in COMPOSE["secrets"]}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_beside_the_nodes_has_a_version_and_files_that_exist(name: str) -> None:
    service: dict[str, Any] = BESIDE[name]
    assert service["profiles"] == ["observability"]
    assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
    for source in (volume.partition(":")[0] for volume in service["volumes"]):
        assert (ROOT / "docker" / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_only_grafana_has_a_port_and_only_on_loopback() -> None:
    ports = {name: each["ports"] for name, each in COMPOSE["services"].items() if "ports" in each}
    assert ports == {"grafana": ["127.0.0.1:3000:3000"]}


def test_no_password_is_written_down() -> None:
    assert COMPOSE["secrets"] == {"page": {"environment": "PAGE_PASSWORD"}}
    for name, service in COMPOSE["services"].items():
        for key, value in service.get("environment", {}).items():
            if "PASSWORD" in key:
                assert value in ("${PAGE_PASSWORD:-}", "/run/secrets/page"), f"{name}: {key}"
