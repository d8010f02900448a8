"""Measuring this machine: what is divided by what, and that nothing is left behind."""

import math

import jax
import pytest

from octavo.paged.cost_model import CostModel, ModelShape, calibrate, calibration

SHAPE = ModelShape(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    num_params=1000,
    kv_dtype_bytes=4,
    param_dtype_bytes=4,
)


@pytest.fixture
def half_a_second(monkeypatch):
    """Everything that is timed runs once, and takes half a second."""

    def run_once(run):
        jax.block_until_ready(run())
        return 0.5

    monkeypatch.setattr(calibration, "median_seconds", run_once)


def test_rates_are_work_over_time(half_a_second):
    assert calibration.matmul_rate(SHAPE, 32) == 2 * 32 * 64 * 128 / 0.5
    seen = 32 * 4096 - 32 * 32 / 2
    assert calibration.attention_rate(SHAPE, 32) == 4 * 4 * 16 * seen / 0.5
    assert calibration.memory_rate(1 << 20) == 2 * (1 << 20) / 0.5
    assert calibration.link_rate(1 << 25) == (1 << 25) / 0.5

    machine = calibrate(SHAPE, chunk_size=32)
    assert machine.attention_flops_per_second == pytest.approx(4 * 4 * 16 * seen / 0.5)
    assert machine.matmul_flops_per_second == 2 * 32 * 64 * 128 / 0.5
    assert (machine.dispatch_seconds, machine.restore_rates.keys()) == (0.5, {"host"})


def test_a_chunk_longer_than_the_context_sees_itself_only(half_a_second):
    assert calibration.attention_rate(SHAPE, 5000) == 4 * 4 * 16 * 5000**2 / 2 / 0.5


def test_a_machine_is_measured_and_its_disk_left_as_it_was(tmp_path):
    machine = calibrate(SHAPE, chunk_size=32, disk_folder=tmp_path, file_bytes=1 << 20)
    assert list(tmp_path.iterdir()) == []
    rates = [
        *(machine.peak_flops, machine.peak_memory_bytes, machine.memory_bytes),
        *(machine.peak_link_bytes, machine.peak_disk_read_bytes, machine.peak_disk_write_bytes),
    ]
    assert all(rate is not None and math.isfinite(rate) and rate > 1e5 for rate in rates)
    assert 0 < machine.dispatch_seconds < 1
    costs = CostModel(SHAPE, machine, chunk_size=32)
    assert costs.tiers == ("host", "disk")  # no network was measured
    assert 0 < costs.seconds_to_recompute(0, 32) < costs.seconds_to_recompute(0, 3200)


def test_a_disk_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OSError, match="none"):
        calibrate(SHAPE, disk_folder=tmp_path / "none")


def test_elements_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match="1 bytes"):
        calibrate(ModelShape(**(vars(SHAPE) | {"param_dtype_bytes": 1})))
