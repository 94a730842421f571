"""What the accelerators say of themselves while a run goes on: how busy they are, and the memory in use.

NVIDIA's come from NVML (package nvidia-ml-py), a TPU's from libtpu's monitoring, which is installed with jax[tpu]. Where there is neither, nothing is recorded.
"""

import collections
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

SAMPLE_SECONDS = 1.0  # NVML averages over up to a second


class Sample(NamedTuple):
    """This process's devices at one moment."""

    busy: list[float]  # percent of the time
    memory: list[float]  # bytes in use


class HardwareCounters:
    """Context manager with a thread that reads the devices every second; without a `read` there is none."""

    def __init__(self, read: Callable[[], Sample] | None):
        self._read, self._samples = read, collections.deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "HardwareCounters":
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        if self._read is not None:
            self._thread.join()

    def taken(self) -> list[Sample]:
        """The samples since they were taken last."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._samples.append(self._read())


def metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """hardware/ metrics of samples; none without any, and of what a device does not tell."""
    busy, memory = [one for sample in samples for one in sample.busy], [one for sample in samples for one in sample.memory]
    return ({"hardware/busy": sum(busy) / len(busy)} if busy else {}) | ({"hardware/memory_max": max(memory)} if memory else {})


def reader() -> Callable[[], Sample] | None:
    """Reads this process's devices; None where the package or the driver that could is missing, and on a CPU."""
    devices = jax.local_devices()
    if devices[0].platform == "tpu":
        return _libtpu()
    return _nvml([device.local_hardware_id for device in devices]) if devices[0].platform == "gpu" else None


def _nvml(hardware_ids: list[int]) -> Callable[[], Sample] | None:
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver that it knows
        return None
    chosen = [visible_gpus(os.environ, nvml.nvmlDeviceGetCount())[number] for number in hardware_ids]
    handles = [nvml.nvmlDeviceGetHandleByIndex(one) if isinstance(one, int) else nvml.nvmlDeviceGetHandleByUUID(one) for one in chosen]
    return lambda: Sample(
        [nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles], [nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles])


def visible_gpus(environment: Mapping[str, str], count: int) -> list[int | str]:
    """NVML's numbers, or the UUIDs, of the GPUs that CUDA shows this process, in CUDA's order, by CUDA_VISIBLE_DEVICES; there are `count` in all."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(range(count))
    return [int(name) if name.isdigit() else name for name in (name.strip() for name in named.split(","))]


def _libtpu() -> Callable[[], Sample] | None:
    try:
        from libtpu.sdk import tpumonitoring
    except ImportError:
        return None

    def numbers(name: str) -> list[float]:
        return [float(text) for text in tpumonitoring.get_metric(name).data()]  # of all chips of the host

    return lambda: Sample(numbers("duty_cycle_pct"), numbers("hbm_capacity_usage"))
