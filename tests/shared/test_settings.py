"""Settings: from environment, file and defaults, with errors that an operator can act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.messages.cluster import ModelSpec
from shared.runtime.settings import (
    BusSettings,
    GatewaySettings,
    InstanceSettings,
    PlacementSettings,
    SchedulerSettings,
    SettingsError,
    WorkerSettings,
    default_id,
    load,
)

ALL = [BusSettings, GatewaySettings, SchedulerSettings, PlacementSettings, WorkerSettings, InstanceSettings]


@pytest.mark.parametrize("kind", ALL)
def test_defaults_need_no_environment(kind: type[BusSettings]) -> None:
    settings = load(kind, {})
    assert settings == kind()
    assert settings.nats_url == "nats://127.0.0.1:4222"


def test_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "tideway.toml"
    file.write_text('port = 9000\nhost = "0.0.0.0"\ndeveloper_mode = true\nunknown_to_this_service = 1\n')
    settings = load(GatewaySettings, {"TIDEWAY_CONFIG": str(file), "TIDEWAY_PORT": "9001"})
    assert (settings.port, settings.host, settings.developer_mode) == (9001, "0.0.0.0", True)
    assert settings.max_in_flight == GatewaySettings().max_in_flight


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("TRUE", True), (" on ", True), ("yes", True), ("no", False), ("0", False), ("", False)],
)
def test_booleans(text: str, value: bool) -> None:
    assert load(GatewaySettings, {"TIDEWAY_DEVELOPER_MODE": text}).developer_mode is value


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("TIDEWAY_PORT", "eighty", "int"),
        ("TIDEWAY_REQUEST_TIMEOUT_S", "soon", "float"),
        ("TIDEWAY_DEVELOPER_MODE", "perhaps", "true or false"),
    ],
)
def test_a_bad_value_names_variable_value_and_type(variable: str, text: str, expected: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(GatewaySettings, {variable: text})
    assert variable in str(raised.value) and text in str(raised.value) and expected in str(raised.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(SettingsError, match=r"missing\.toml"):
        load(BusSettings, {"TIDEWAY_CONFIG": str(missing)})
    broken = tmp_path / "broken.toml"
    broken.write_text("port = = 1")
    with pytest.raises(SettingsError, match=r"broken\.toml"):
        load(BusSettings, {"TIDEWAY_CONFIG": str(broken)})
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('port = "eighty"')
    with pytest.raises(SettingsError, match=r"wrong\.toml: port"):
        load(GatewaySettings, {"TIDEWAY_CONFIG": str(wrong)})


def test_models_as_pairs_as_json_and_from_a_file(tmp_path: Path) -> None:
    expected = [ModelSpec("a", "/models/a"), ModelSpec("org/b", "org/b")]
    assert load(PlacementSettings, {"TIDEWAY_MODELS": "a=/models/a, org/b,"}).model_specs() == expected
    text = '[{"name": "a", "source": "/models/a"}, {"name": "org/b", "source": "org/b"}]'
    assert load(PlacementSettings, {"TIDEWAY_MODELS": text}).model_specs() == expected
    file = tmp_path / "tideway.toml"
    file.write_text('[[models]]\nname = "a"\nsource = "/models/a"\n[[models]]\nname = "org/b"\nsource = "org/b"\n')
    assert load(PlacementSettings, {"TIDEWAY_CONFIG": str(file)}).model_specs() == expected
    assert load(PlacementSettings, {}).model_specs() == []
    text = '[{"name": "a", "source": "/a", "quantization": "int4"}, {"name": "b", "source": "/b"}]'
    settings = load(PlacementSettings, {"TIDEWAY_MODELS": text, "TIDEWAY_QUANTIZATION": "int8"})
    assert [spec.quantization for spec in settings.model_specs()] == ["int4", "int8"]
    with pytest.raises(SettingsError, match="TIDEWAY_MODELS"):
        load(PlacementSettings, {"TIDEWAY_MODELS": '[{"name": 1}]'}).model_specs()


def test_default_ids_fit_into_subjects() -> None:
    assert not set(default_id("gateway")) & set(". *>\t\r\n")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (SchedulerSettings, "TIDEWAY_MAX_WAITING_PER_MODEL", "0"),
        (SchedulerSettings, "TIDEWAY_TRACE_SAMPLE_RATIO", "2"),
        (GatewaySettings, "TIDEWAY_GATEWAY_ID", "gw.1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(kind: type, name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}='{value}': expected"):
        load(kind, {name: value})
