"""`flambeau doctor`: a healthy machine passes, and each thing that is missing is named with its remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flambeau.cli import doctor, main
from flambeau.config import SETTINGS, Config, config


def findings() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "Everything that Flambeau needs is here." in printed and "FLAMBEAU_JOBS" not in printed


def test_settings_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"settings": doctor._settings})
    assert main(["doctor", "--settings"]) == 0
    printed = capsys.readouterr().out
    assert all(setting.name in printed for setting in SETTINGS)


def test_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "config", Config({"FLAMBEAU_NUMERICS": "eager"}))
    monkeypatch.setattr(doctor, "CHECKS", {"Python": doctor._python, "settings": doctor._settings})
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] and found["settings"] == {"FLAMBEAU_NUMERICS": "eager"}
    assert [(c["check"], c["verdict"]) for c in found["checks"]] == [("Python", "ok"), ("settings", "ok")]


def test_a_variable_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "config", Config({"FLAMBEAU_NUMERIC": "eager", "FLAMBEAU_DEBGU": "1"}))
    found = findings()["settings"]
    assert found.verdict == "invalid"
    assert found.remedy == ("FLAMBEAU_DEBGU: did you mean FLAMBEAU_DEBUG?; "
                            "FLAMBEAU_NUMERIC: did you mean FLAMBEAU_NUMERICS?")
    monkeypatch.setattr(doctor, "config", Config({"FLAMBEAU_ZZZ": "1"}))
    assert findings()["settings"].remedy == "FLAMBEAU_ZZZ is no setting (flambeau doctor --settings lists all)"


def test_the_main_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is wrong, the exit status says so."""
    monkeypatch.setattr(doctor, "CHECKS", {"compiles": doctor._main_job})
    assert main(["doctor"]) == 0
    torch.compiler.reset()
    monkeypatch.setattr("flambeau.compile.backend.compiled_backend", lambda *_: 1 / 0)
    assert main(["doctor"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "config", Config({"FLAMBEAU_CXX": "no-such-compiler"}))
    assert main(["doctor"]) == 1
    assert "install g++" in capsys.readouterr().out


def test_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE", "#error this is what the compiler says")
    assert "this is what the compiler says" in findings()["test compile"].detail
    assert "g++" in findings()["test compile"].remedy


def test_compiler_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE", 'extern "C" int flambeau_probe(int, float*) { return 1; }')
    assert "wrong results" in findings()["test compile"].detail


def test_no_openmp_is_slow_and_not_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PROBE", "#ifdef _OPENMP\n#error no OpenMP\n#endif\n" + doctor.PROBE)
    assert main(["doctor"]) == 0
    assert "install libgomp" in capsys.readouterr().out


def test_cache_folder_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(doctor, "config", Config({"FLAMBEAU_CACHE_DIR": str(file)}))
    found = findings()["kernel cache"]
    assert "FLAMBEAU_CACHE_DIR" in found.remedy and found.verdict == "slow"  # a temporary folder takes its place


def test_bad_setting_is_named_and_does_not_stop_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "config", Config({"FLAMBEAU_JOBS": "many"}))
    assert "FLAMBEAU_JOBS is 'many'" in findings()["settings"].detail
    assert [name for name, finding in findings().items() if finding.remedy] == ["settings"]


def test_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.4.1+cpu")
    assert findings()["torch"].remedy == "pip install 'torch>=2.11'"


def test_the_device_and_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
    from flambeau.targets.opencl.device import devices

    assert findings()["device"].detail == f'torch.device("flambeau"), opencl: {", ".join(d.name for d in devices())}'
    with config.override(device="cpu"):
        assert "none: the target cpu has no driver" in findings()["device"].detail
    assert not findings()["device"].remedy
