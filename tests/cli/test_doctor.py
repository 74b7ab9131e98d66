"""`flambeau doctor`: a healthy machine passes, and each thing that is missing is named with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.cli import doctor, main
from flambeau.config import SETTINGS, Config, config


def findings() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "Everything that Flambeau needs is here." in printed
    assert all(setting.name in printed for setting in SETTINGS)


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
    assert "FLAMBEAU_CACHE_DIR" in findings()["kernel cache"].remedy


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
        assert "none: the target cpu is no device" in findings()["device"].detail
    assert not findings()["device"].remedy
