"""The benchmark of a miss penalty on a tiny model: what it measures, predicts and complains of."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import miss_penalty
import miss_penalty_report
import pytest

from octavo.paged.cost_model import HARDWARE, MODEL_SHAPES, CostModel

from .valkey_server import PROGRAM, ValkeyServer

SIZES = "--shortest 32 --longest 128 --repeats 1 --chunk 32"
SHAPE = "--layers 1 --heads 2 --kv-heads 1 --width 64"


@pytest.mark.slow
def test_every_state_is_measured_equal_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(miss_penalty, "FITTED", 64)
    files = {"json": tmp_path / "a.json", "table": tmp_path / "a.md", "plot": tmp_path / "a.png"}
    arguments = f"{SIZES} {SHAPE}".split() + [
        text for name in files for text in (f"--{name}", str(files[name]))
    ]
    modes = ["hit", "host", "disk"]
    server = None
    if PROGRAM is not None:
        server = ValkeyServer(tmp_path)
        server.start()
        arguments += ["--remote-cache-url", server.url]
        modes.append("remote")
    try:
        monkeypatch.setattr("sys.argv", ["miss_penalty.py", *arguments])
        miss_penalty.main()  # so small a model misses the targets
    finally:
        if server is not None:
            server.kill()
    rows = json.loads(files["json"].read_text())["rows"]
    assert [row["length"] for row in rows] == [32, 64, 128]
    for row in rows:
        assert row["equal"] and set(row["seconds"]) == {"miss", *modes}
        assert set(row["choice"]) == set(modes[1:])
    assert [row["predicted"] is None for row in rows] == [True, True, False]
    assert set(rows[-1]["predicted"]) == {"miss", *modes}
    assert files["table"].read_text().count("\n") == 5 and files["plot"].stat().st_size > 10_000
    assert "answers differ" not in capsys.readouterr().out

    bad = copy.deepcopy(rows)
    bad[0]["equal"] = False
    bad[-1]["seconds"] = dict.fromkeys(bad[-1]["seconds"], 1.0)
    bad[-1]["seconds"]["host"] = 2.0
    bad[-1]["predicted"] = dict.fromkeys(bad[-1]["predicted"], 2.0)
    told = "\n".join(miss_penalty_report.missed(bad))
    faults = ("32: answers differ", "host takes 2.0", "hit takes 1.0", "128 miss: predicted")
    for words in (*faults, "of its floor"):
        assert words in told


def test_hits_that_noise_puts_out_of_order_teach_no_bandwidth() -> None:
    costs = CostModel(MODEL_SHAPES["llama-3.1-8b"], HARDWARE["h200"], chunk_size=32)
    # The last took longer than the first, yet the line through all of them falls.
    hits = {32: 5.43e-3, 64: 6.69e-3, 96: 5.45e-3, 128: 5.44e-3}
    rows = [{"length": n, "seconds": {"hit": t, "miss": 2 * t}} for n, t in hits.items()]
    fitted = miss_penalty.learned(costs, rows, ["hit"])
    context = costs.hardware.efficiency.context
    assert fitted.hardware.efficiency.context == context
    assert fitted.hardware.efficiency.matmul != costs.hardware.efficiency.matmul
    rows[-1]["seconds"]["hit"] = 9e-3
    assert miss_penalty.learned(costs, rows, ["hit"]).hardware.efficiency.context != context
