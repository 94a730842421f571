"""Counters of the accelerators: read side by side with a run, and only where there are any. No accelerator runs these tests: NVML and libtpu are stand-ins."""

import itertools
import sys
import types

import jax
import pytest

from tlt_jax.runtime import hardware_counters
from tlt_jax.runtime.hardware_counters import HardwareCounters, Sample, metrics, reader, visible_gpus


def devices(monkeypatch, platform, ids):
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(platform=platform, local_hardware_id=number) for number in ids])


@pytest.fixture
def nvml(monkeypatch):
    """Four GPUs; a handle is the number or the UUID."""
    class NVMLError(Exception):
        pass

    nvml = types.ModuleType("pynvml")
    nvml.NVMLError, nvml.nvmlInit, nvml.nvmlDeviceGetCount = NVMLError, lambda: None, lambda: 4
    nvml.nvmlDeviceGetHandleByIndex = nvml.nvmlDeviceGetHandleByUUID = lambda name: name
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=10 * handle, memory=1)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=100 + handle, total=999)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_a_cpu_has_no_counters():
    assert reader() is None


def test_the_gpus_that_a_process_uses_are_read_and_no_others(monkeypatch, nvml):
    devices(monkeypatch, "gpu", (0, 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    assert reader()() == Sample([30, 10], [103, 101])


@pytest.mark.parametrize(("named", "expected"), [(None, [0, 1, 2]), ("2", [2]), ("2, 0", [2, 0]), ("GPU-5a,GPU-7b", ["GPU-5a", "GPU-7b"])])
def test_gpus_are_found_by_the_names_that_cuda_is_given(named, expected):
    assert visible_gpus({} if named is None else {"CUDA_VISIBLE_DEVICES": named}, 3) == expected


def test_a_machine_without_the_package_or_its_driver_has_no_counters(monkeypatch, nvml):
    devices(monkeypatch, "gpu", (0,))

    def fails():
        raise nvml.NVMLError

    nvml.nvmlInit = fails
    assert reader() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert reader() is None
    devices(monkeypatch, "tpu", (0,))
    monkeypatch.setitem(sys.modules, "libtpu.sdk", None)
    assert reader() is None


def test_a_tpu_tells_numbers_as_text(monkeypatch):
    told = {"duty_cycle_pct": ["20.0", "40.0"], "hbm_capacity_usage": ["1000", "3000"]}
    monitoring = types.SimpleNamespace(get_metric=lambda name: types.SimpleNamespace(data=lambda: told[name]))
    sdk = types.ModuleType("libtpu.sdk")
    sdk.tpumonitoring = monitoring
    monkeypatch.setitem(sys.modules, "libtpu", types.ModuleType("libtpu"))
    monkeypatch.setitem(sys.modules, "libtpu.sdk", sdk)
    devices(monkeypatch, "tpu", (0, 1))
    assert metrics([reader()()]) == {"hardware/busy": 30.0, "hardware/memory_max": 3000.0}
    told["duty_cycle_pct"] = []  # before the first program
    assert metrics([reader()()]) == {"hardware/memory_max": 3000.0}


def test_samples_are_taken_while_the_run_goes_on_and_each_counts_for_one_step(monkeypatch):
    monkeypatch.setattr(hardware_counters, "SAMPLE_SECONDS", 0.001)
    count = itertools.count()
    with HardwareCounters(lambda: Sample([float(next(count))], [])) as counters:
        first, second = [], []
        while len(first) < 3:
            first += counters.taken()
        while len(second) < 3:
            second += counters.taken()
    rest = counters.taken()
    assert [sample.busy[0] for sample in (*first, *second, *rest)] == list(range(next(count)))
    with HardwareCounters(None) as none:
        assert none.taken() == [] and metrics([]) == {}
