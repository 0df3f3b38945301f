"""`explain(measure=True)`: what is measured beside what is predicted, and that nothing is left changed. Runs are made
once here, and take as long as the test says."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from typer.testing import CliRunner

import multihead as mh
from multihead import cli
from multihead.explaining import machine, measured
from multihead.explaining.costs import Cost
from multihead.explaining.explanation import span
from multihead.explaining.machine import Machine
from test_explain import LAYERS, E, H

MACHINE = Machine(flops=100e9, bandwidth=10e9, told="float32 on cpu, 1 thread")
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture
def once(monkeypatch):
    """Each run is made once, and a millisecond long; the machine is `MACHINE`."""

    def run_once(run, *_):
        run()
        return 1e-3, 1

    monkeypatch.setattr(measured, "fastest", run_once)
    monkeypatch.setattr("multihead.explaining.explain.calibrate", lambda *_: MACHINE)


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", LAYERS)
def test_each_step_is_measured_and_the_memory_is_as_predicted(name, training):
    layer = mh.Attention(E, H, **LAYERS[name]())
    found = mh.explain(layer, batch=2, length=160, training=training, measure=True)
    assert found.measured is not None
    assert list(found.measured.steps) == ([] if found.kernel == "whole" else list(found.costs))
    assert all(found.took(step) == 1e-3 for step in found.measured.steps)
    assert found.took("total") == 1e-3
    if found.kernel == "native":  # others also need room to work in; what a position makes on its way is not predicted
        assert found.peak == pytest.approx(found.measured.peak, rel=0.25), (found.peak, found.measured.peak)


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("source_length", [None, 200])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_drop_in(batch_first, source_length):
    layer = mh.MultiheadAttention(E, H, batch_first=batch_first)
    found = mh.explain(layer, length=150, source_length=source_length, measure=True)
    assert found.measured is not None
    assert set(found.measured.steps) == set(found.costs)


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("own", [mh.ALiBi(H), mh.T5Bias(H)], ids=["alibi", "t5"])
@pytest.mark.parametrize("given", [torch.zeros(1, 300), mh.ALiBi(H)], ids=["tensor", "alibi"])
def test_two_biases_are_a_table(own, given, training):
    found = mh.explain(mh.Attention(E, H, position=own), length=300, bias=given, training=training, measure=True)
    assert any("sum of two biases" in table.what for table in found.tables)
    # Some of the tables are gone by the time that most is there.
    assert found.peak == pytest.approx(found.measured.peak, rel=0.4)
    if found.kernel == "native":
        alone = mh.explain(mh.Attention(E, H, position=mh.ALiBi(H)), length=300)
        assert not alone.tables


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("kind", [mh.Attention, mh.MultiheadAttention])
@pytest.mark.parametrize("training", [True, False])
def test_keys_and_values_of_other_widths(kind, training):
    layer = kind(E, H, kdim=33, vdim=44)
    with pytest.raises(ValueError, match="source_length: expected given, for a layer with kdim=33 and vdim=44"):
        mh.explain(layer)
    found = mh.explain(layer, batch=2, length=7, source_length=9, training=training, measure=True)
    shape = (2, 9) if kind is mh.Attention else (9, 2)
    assert f"key {(*shape, 33)}, value {(*shape, 44)}" in found.inputs
    assert set(found.measured.steps) == set(found.costs)


@pytest.mark.usefixtures("once")
def test_layers_and_places_that_are_not_plain():
    wrapped = mh.Attention(E, H)
    wrapped.out_proj = torch.nn.Sequential(wrapped.out_proj)
    assert mh.explain(wrapped, length=300, measure=True).measured
    layer = mh.Attention(E, H)
    with torch.inference_mode():
        assert mh.explain(layer, training=True, measure=True).measured
    try:
        torch.set_default_device("meta")
        assert mh.explain({"embed_dim": E, "num_heads": H, "device": "cpu"}, measure=True).measured
    finally:
        torch.set_default_device(None)


@pytest.mark.usefixtures("once")
def test_the_operation_is_the_one_that_ran(native):
    for options, given, operation in (
        # Long enough to take more time than an interruption of what is beside it.
        ({"mask": mh.causal()}, {"length": 900, "training": True}, "multihead::forward" if native else None),
        ({"mask": mh.causal()}, {"length": 900}, "multihead::forward" if native else FLASH),
        ({"dtype": torch.float64}, {"length": 900}, FLASH),
        ({}, {"length": 20}, "aten::_native_multi_head_attention"),
    ):
        found = mh.explain(mh.Attention(E, H, **options).eval(), measure=True, **given).measured
        assert found is not None
        assert operation is None or found.operation == operation
        assert 0 < found.share <= 1


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("training", [True, False])
def test_measuring_changes_nothing(training):
    layer = mh.Attention(E, H, dropout=0.3, qk_norm=True, gate=True, out_dropout=0.2)
    layer.out_proj.eval()
    layer.qkv_proj.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    modes = [module.training for module in layer.modules()]
    state = torch.get_rng_state()
    mh.explain(layer, training=training, measure=True)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    assert modes == [module.training for module in layer.modules()]
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert [p.requires_grad for p in layer.parameters()].count(False) == 1


def test_what_can_not_be_measured():
    layer = mh.Attention(E, H)
    with pytest.raises(ValueError, match=r"^measure: expected sizes of at least 1 to run, got batch=0"):
        mh.explain(layer, batch=0, measure=True)
    with pytest.raises(ValueError, match=r"^measure: expected the layer's own kind, torch.float32 on cpu, got"):
        mh.explain(layer, dtype=torch.float64, measure=True)


def test_times_that_are_predicted():
    assert MACHINE.balance == 10
    assert MACHINE.seconds(Cost(flops=10**9, bytes=10)) == pytest.approx(0.01)
    assert MACHINE.seconds(Cost(flops=10, bytes=10**9)) == pytest.approx(0.1)


def test_without_measuring_nothing_is_predicted():
    found = mh.explain({"embed_dim": E, "num_heads": H})
    assert (found.machine, found.measured, found.predicted("total"), found.took("attention")) == (None,) * 4
    assert "an assumption, nothing was measured" in str(found)
    assert "predicted" not in str(found)


def test_the_machine_is_seen_to_multiply_and_to_copy(monkeypatch):
    monkeypatch.setattr(machine, "_WIDTH", 16)
    monkeypatch.setattr(machine, "_COPIED", 1024)
    ran = []

    def fastest(run, _):
        ran.append(run())
        return 0.5, 3

    monkeypatch.setattr(machine, "fastest", fastest)
    found = machine.calibrate(torch.device("cpu"), torch.float32)
    assert found.flops == 2 * 16**3 / 0.5
    assert found.bandwidth == 2 * 1024 / 0.5
    assert [tuple(tensor.shape) for tensor in ran] == [(16, 16), (256,)]
    assert found.told == "float32 on cpu, 1 thread"


def test_half_precision_is_no_slower_than_what_it_is_computed_in(monkeypatch):
    monkeypatch.setattr(machine, "_WIDTH", 16)
    monkeypatch.setattr(machine, "_COPIED", 1024)
    times = iter([4.0, 0.5, 1.0])  # torch's product in bfloat16, in float32, and the copy
    monkeypatch.setattr(machine, "fastest", lambda run, _: (next(times), 3) if run() is not None else None)
    found = machine.calibrate(torch.device("cpu"), torch.bfloat16)
    assert found.flops == 2 * 16**3 / 0.5


def test_the_fastest_run_counts(monkeypatch):
    clock = iter([0.0, 0.0, 3.0, 9.0, 9.0, 10.0, 20.0, 20.0, 22.0, 30.0, 30.0, 35.0, 40.0, 40.0, 44.0, 50.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine, "_LEAST_RUNS", 1)
    calls = []
    assert machine.fastest(lambda: calls.append(1), torch.device("cpu"), seconds=25.0) == (1.0, 3)
    assert len(calls) == 4  # one does not count


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (2.5, "2.5 s"), (0.00321, "3.21 ms"), (4.5e-6, "4.5 us"), (3e-8, "30 ns")]
)
def test_spans(seconds, text):
    assert span(seconds) == text


# As text, JSON, picture and page --------------------------------------------------------------------------------------


@pytest.fixture
def found(once):  # noqa: ARG001
    return mh.explain({"embed_dim": 32, "num_heads": 4, "mask": mh.causal()}, length=150, training=True, measure=True)


def test_text(found):
    lines = str(found).splitlines()
    row = next(line for line in lines if line.startswith("  attention ") and "FLOP" not in line and "ms" in line)
    assert row.split()[-2:] == ["1", "ms"]
    assert any("calibrated: 100 GFLOP/s, 10 GB/s in float32 on cpu, 1 thread" in line for line in lines)
    assert any("the fastest of 1 runs; attention's forward pass spent" in line for line in lines)


def test_as_json(found):
    told = json.loads(json.dumps(found.to_dict()))
    assert told["schema"] == "multihead-explanation/1"
    assert told["costs"]["attention"]["measured"] == 1e-3
    assert told["costs"]["total"]["predicted"] == pytest.approx(found.predicted("total"))
    assert told["machine"]["balance"] == 10
    assert told["measured"]["operation"] == found.measured.operation
    unmeasured = mh.explain({"embed_dim": 32, "num_heads": 4, "position": mh.T5Bias(4)}).to_dict()
    assert unmeasured["machine"] is unmeasured["measured"] is None
    assert set(unmeasured["tables"][0]) == {"what", "why", "bytes"}
    json.dumps(unmeasured)


def test_plot(found):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    own = Figure().add_subplot()
    assert found.plot(ax=own) is own
    points = [line for line in own.lines if line.get_marker() in ("o", "x")]
    assert len(points) == 2 * len(found.rows())
    by_name = {line.get_label(): line for line in points}
    cost = found.costs["attention"]
    (x,), (y,) = by_name["attention"].get_data()
    assert (x, y) == (pytest.approx(cost.intensity), pytest.approx(min(100, 10 * cost.intensity)))
    crosses = sorted(line.get_ydata()[0] for line in points if line.get_marker() == "x")
    assert crosses == pytest.approx(sorted(c.flops / 1e-3 / 1e9 for _, c in found.rows()))
    assert own.get_xscale() == own.get_yscale() == "log"
    assert own.get_ylabel() == "GFLOP/s"


def test_a_step_that_memory_bounds_lies_on_the_slope(once):  # noqa: ARG001
    pytest.importorskip("matplotlib")
    found = mh.explain({"embed_dim": 32, "num_heads": 4}, length=1, source_length=100, measure=True)
    (point,) = [line for line in found.plot().lines if line.get_label() == "attention"]
    (x,), (y,) = point.get_data()
    assert x < 1
    assert y == pytest.approx(10 * x)


def test_plot_without_calibration():
    pytest.importorskip("matplotlib")
    ax = mh.explain({"embed_dim": 32, "num_heads": 4}, length=150).plot()
    assert ax.get_ylabel() == "share of the machine's best"
    assert "not calibrated: a balance of 10 FLOP/byte is assumed" in ax.texts[0].get_text()
    assert not [line for line in ax.lines if line.get_marker() == "x"]
    mh.explain({"embed_dim": 32, "num_heads": 4}, batch=0).plot()  # no step does anything


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page(found):
    pytest.importorskip("matplotlib")
    text = found.to_html()
    tags = _Tags(text)
    assert not tags.open
    assert not tags.names & {"script", "link", "iframe"}
    assert len(tags.sources) == 1
    assert tags.sources[0].startswith("data:image/png;base64,")
    for part in (found.measured.operation, "1 ms", "predicted", "Kernel: native" if found.kernel == "native" else ""):
        assert part in text
    odd = mh.explain({"embed_dim": 32, "num_heads": 4}, length=1000)
    assert "predicted" not in odd.to_html()
    part = odd._repr_html_()
    assert "<html" not in part
    assert "<img" not in part
    assert "can&#x27;t" in part
    style = re.sub(r"@\w+ [^{]*{|/\*.*?\*/", "", part[part.index("<style>") + 7 : part.index("</style>")])
    rules = [rule.split("{")[0].strip() for rule in style.split("}") if "{" in rule]
    assert len(rules) > 5
    assert all(one.strip().startswith(".multihead") for rule in rules for one in rule.split(","))


LINE = ["explain", "--embed-dim", "32", "--heads", "4", "--length", "150"]


@pytest.mark.usefixtures("once")
def test_command(tmp_path):
    pytest.importorskip("matplotlib")
    html, png = tmp_path / "a.html", tmp_path / "a.png"
    line = [*LINE, "--causal", "--measure", "--html", str(html), "--png", str(png)]
    result = CliRunner().invoke(cli.app, line, prog_name="multihead")
    assert result.exit_code == 0
    assert "measured: the fastest of 1 runs" in result.stdout
    assert html.read_text("utf-8").startswith("<!doctype html>")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.png"]


def test_command_with_a_place_that_is_not_there(tmp_path):
    pytest.importorskip("matplotlib")
    for option in ("--html", "--png"):
        place = str(tmp_path / "no" / f"a.{option[2:]}")
        result = CliRunner().invoke(cli.app, [*LINE, option, place], prog_name="multihead")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"multihead: {option}: expected a file that can be written, got")
        assert len(result.stderr.splitlines()) == 1
