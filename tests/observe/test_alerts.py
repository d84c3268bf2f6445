"""Alarms and the dashboard: they are valid, use metrics that exist, and each alarm fires and clears."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kafka_eos_source.observe.metrics import APPLICATION, METRICS
from tests import ROOT

RULES = ROOT / "docker" / "prometheus" / "kafka-eos-alerts.yml"
DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "kafka-eos.json"
NAMES = {
    each.prometheus_name: {label.replace(".", "_") for label in (APPLICATION, *each.labels)}
    for each in METRICS
}
QUERY = 'kafka_eos_application_id="a"'
TOPIC = f'{QUERY},messaging_destination_name="t"'
FAILED = f'{QUERY},condition="KAFKA_EOS.TOKEN_MISSING",action="operator"'

#: An alarm; series as promtool writes them, one value per minute; when it fires; when it does not fire.
CASES: list[tuple[str, dict[str, str], list[str], list[str]]] = [
    (
        "KafkaEosQueryStandsStill",
        {f"kafka_eos_query_standstill_seconds{{{QUERY}}}": "0+60x20 0x10"},
        ["13m"],
        ["10m", "22m"],
    ),
    (
        "KafkaEosLagGrows",
        {
            f'kafka_eos_source_lag{{{TOPIC},messaging_destination_partition_id="0"}}': "0+100x30 3000x30",
            f"kafka_eos_source_lag_time_seconds{{{TOPIC}}}": "0+60x60",
        },
        ["20m"],
        ["9m", "45m"],
    ),
    (
        "KafkaEosCommitFatal",
        {f"kafka_eos_query_failed{{{FAILED}}}": "_ _ 1x3 stale _x10"},
        ["3m"],
        ["1m", "8m"],
    ),
    (  # nobody has asked the brokers how long they keep the token
        "KafkaEosTokenCloseToExpiry",
        {f"kafka_eos_token_age_seconds{{{QUERY}}}": "431900+60x5 0x5"},
        ["3m"],
        ["1m", "8m"],
    ),
    (  # they keep it for 100 minutes
        "KafkaEosTokenCloseToExpiry",
        {
            f"kafka_eos_token_age_seconds{{{QUERY}}}": "4080+60x5 0x5",
            f"kafka_eos_token_expiry_seconds{{{QUERY}}}": "1920-60x5 6000x5",
        },
        ["3m"],
        ["1m", "8m"],
    ),
    (  # they keep it for 30 days
        "KafkaEosTokenCloseToExpiry",
        {
            f"kafka_eos_token_age_seconds{{{QUERY}}}": "431900+60x20",
            f"kafka_eos_token_expiry_seconds{{{QUERY}}}": "2160100-60x20",
        },
        [],
        ["1m", "10m"],
    ),
    (
        "KafkaEosSinkHeldBack",
        {f"kafka_eos_sink_held_back_time_seconds{{{QUERY}}}": "0+60x5 0x5"},
        ["4m"],
        ["2m", "7m"],
    ),
    (
        "KafkaEosRestartLoop",
        {f"kafka_eos_query_run_start_time_seconds{{{QUERY}}}": "1 1 2 3 4 5 5x30"},
        ["6m"],
        ["4m", "30m"],
    ),
    (
        "KafkaEosHiddenByTransaction",
        {f"kafka_eos_source_hidden_time_seconds{{{QUERY}}}": "0+60x10 0x5"},
        ["7m"],
        ["5m", "12m"],
    ),
    (
        "KafkaEosInvalidRecords",
        {f'kafka_eos_invalid_records_total{{{QUERY},action="dead_lettered"}}': "_ _ 3x30 5x30"},
        ["3m", "35m"],
        ["1m", "25m", "60m"],
    ),
]


def rules() -> list[dict[str, Any]]:
    return list(yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"])


def dashboard_queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.parametrize("expression", [each["expr"] for each in rules()] + dashboard_queries())
def test_expressions_use_metrics_and_labels_that_exist(expression: str) -> None:
    used = re.findall(r"\b((?:kafka_eos|messaging_client)_\w+)(?:\{([^}]*)\}|[^\w{]|$)", expression)
    metrics = [(name, labels) for name, labels in used if name in NAMES]
    labels_used = {label for labels in NAMES.values() for label in labels}
    assert metrics
    assert {name for name, _ in used} <= {*NAMES, *labels_used}
    for name, labels in metrics:
        assert set(re.findall(r"(\w+)(?:=~|!~|!=|=)", labels)) <= NAMES[name]


def test_each_alarm_has_a_runbook_and_a_row_in_the_docs() -> None:
    runbooks = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (.*)$", runbooks, re.MULTILINE)
    }
    for each in rules():
        path, _, anchor = each["annotations"]["runbook_url"].partition("#")
        assert path == "docs/runbooks.md"
        assert anchor in anchors
        assert f"`{each['alert']}`" in runbooks
        assert f"| `{each['alert']}` |" in page
        assert f"runbooks.md#{anchor}" in page


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_each_metric_of_the_table_is_on_the_dashboard_or_in_a_rule() -> None:
    shown = " ".join([*dashboard_queries(), *(each["expr"] for each in rules())])
    # a number that only grows, a point in time, and what the panel of restarts shows
    assert {name for name in NAMES if name not in shown} == {
        "kafka_eos_token_sequence",
        "kafka_eos_batch_end_time_seconds",
        "kafka_eos_query_runs_total",
    }


def test_compose_provisions_the_dashboard() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            assert (ROOT / volume.split(":")[0]).is_dir()
    provisioning = ROOT / "docker" / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kafka-eos.yml").read_text())["providers"]
    assert f"./docker/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_each_alarm_fires_and_clears(tmp_path: Path) -> None:
    assert {alarm for alarm, *_ in CASES} == {each["alert"] for each in rules()}
    tests = []
    for alarm, series, firing, silent in CASES:
        labels = next(each["labels"] for each in rules() if each["alert"] == alarm)
        fires = f'ALERTS{{alertname="{alarm}",alertstate="firing",severity="{labels["severity"]}",{QUERY}}}'
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f"count({fires}) or vector(0)",
                        "eval_time": at,
                        "exp_samples": [{"labels": "{}", "value": number}],
                    }
                    for times, number in ((firing, 1), (silent, 0))
                    for at in times
                ],
            }
        )
    written = tmp_path / "test.yml"
    written.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    found = subprocess.run(["promtool", "test", "rules", str(written)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    config = subprocess.run(
        ["promtool", "check", "config", str(RULES.parent / "prometheus.yml")], capture_output=True, text=True
    )
    assert config.returncode == 0, config.stdout + config.stderr
