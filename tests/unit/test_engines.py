"""What engines refuse, and their estimated costs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparo_train.core.config import resolve
from sparo_train.core.contracts import Loss, Objective, Progress
from sparo_train.core.ema import Follow
from sparo_train.core.errors import ConfigError
from sparo_train.core.registries import ENGINES
from sparo_train.core.world import World
from sparo_train.engine.deepspeed import DeepSpeedEngine
from sparo_train.engine.engine_kind import Sizes
from sparo_train.engine.fsdp2 import Fsdp2Engine
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import AdamWConfig
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.recipes import dino_recipe, tiny_recipe

SIZES = Sizes(parameters=1000, largest_unit=100, outside=200)


class Teaching(Objective):
    """A stand-in for an objective with an average of its student."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    follows = {"layer": Follow("layer", "decay")}  # noqa: RUF012

    def decay(self, progress):
        return 0.5

    def forward(self, batch, progress):
        return Loss(self.layer.weight.sum(), {})


def config(**keys):
    return ENGINES.get(keys["kind"]).config.model_validate({"device": "cpu", "precision": "fp32", **keys})


def among(size):
    return SimpleNamespace(rank=0, size=size, world=World(0, size, 0), rank0_broadcast=lambda call: call())


@pytest.mark.parametrize(
    ("engine", "keys", "size", "message"),
    [
        (DeepSpeedEngine, {"kind": "deepspeed"}, 1, "needs several ranks, got one. Use engine.kind=local"),
        (Fsdp2Engine, {"kind": "fsdp2", "cpu_offload": True}, 1, "engine.cpu_offload: needs several ranks, got one"),
        (Fsdp2Engine, {"kind": "fsdp2", "shard_size": 3}, 4, "engine.shard_size=3: does not divide 4 ranks"),
    ],
)
def test_unsupported_engine_options_are_refused_before_anything_is_created(engine, keys, size, message):
    with pytest.raises(ConfigError, match=message):
        engine(config(**keys), AdamWConfig(), among(size)).prepare(Teaching())


def test_a_missing_engine_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[deepspeed\]' in sparo's checkout"):
        objective = nn.Linear(2, 2)
        running = DeepSpeedEngine(config(kind="deepspeed"), AdamWConfig(), among(2))
        running._build_optimizer(objective)


@pytest.mark.parametrize(
    ("keys", "ranks", "states", "gathered", "sent"),
    [
        ({"kind": "local"}, 1, 16_000, 0, 0),
        ({"kind": "ddp"}, 4, 16_000, 0, 2 * 3 / 4 * 4_000),
        ({"kind": "fsdp2"}, 4, 4_000, 4 * 400, 3 / 4 * (4 * 1_800 + 4_000)),
        ({"kind": "fsdp2", "reshard_after_forward": False}, 4, 4_000, 4_000, 3 / 4 * 8_000),
        ({"kind": "fsdp2", "shard_size": 2}, 4, 8_000, 4 * 400, 1 / 2 * (4 * 1_800 + 4_000) + 2 * 1 / 2 * 2_000),
        ({"kind": "fsdp2", "precision": "bf16"}, 4, 4_000, 2 * 400, 3 / 4 * (2 * 1_800 + 4_000)),
        ({"kind": "fsdp2", "cpu_offload": True}, 4, 0, 4 * 400, 3 / 4 * (4 * 1_800 + 4_000)),
        ({"kind": "deepspeed", "stage": 1}, 4, 8_000 + 3_000, 0, 3 / 4 * 12_000),
        ({"kind": "deepspeed", "stage": 2}, 4, 4_000 + 1_000 + 3_000, 0, 3 / 4 * 12_000),
        ({"kind": "deepspeed", "stage": 3, "precision": "bf16"}, 4, 4_000, 4_000 + 2_000 + 200e6, 3 / 4 * 12_000),
    ],
)
def test_costs_are_those_of_the_formulas(keys, ranks, states, gathered, sent):
    found = ENGINES.get(keys["kind"]).costs(config(**keys), SIZES, ranks)
    assert (found.states, found.gathered, found.sent) == pytest.approx((states, gathered, sent))
    assert found.host == (4_000 if "cpu_offload" in keys else 0)
    # Frozen parameters have neither gradients nor moments.
    half = ENGINES.get(keys["kind"]).costs(config(**keys), SIZES._replace(trained=500), ranks)
    assert half.gradients == found.gradients / 2 and half.optimizer == found.optimizer / 2
    assert half.weights == found.weights and (half.sent < found.sent or ranks == 1)


def after_four_steps(kind, device, on_host):
    """Return weights, buffers and moments of a small objective after four steps, the second of which is not finite."""
    torch.manual_seed(0)
    tree = (tiny_recipe if kind == "clip" else dino_recipe)(Path("x"), Path("x"))
    tree["optim"] = {**tree["optim"], "clip_grad_norm": 0.5}
    run = resolve(RunConfig, tree, "x")
    objective = build_objective(run)
    engine = LocalEngine(LocalEngineConfig(device=device, precision="fp32"), run.optim)
    engine.prepare(objective)
    engine.decides_on_host = on_host
    made = torch.Generator().manual_seed(1)
    applied = []
    for step in range(4):
        batch = {
            "image": torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=made),
            "text": torch.randint(1, 40000, (8, 16), generator=made),
            "global_crops": torch.randint(0, 256, (8, 2, 3, 32, 32), dtype=torch.uint8, generator=made),
            "local_crops": torch.randint(0, 256, (8, 2, 3, 16, 16), dtype=torch.uint8, generator=made),
            "patches": torch.arange(3).expand(8, 3),
        }
        progress = Progress(step, 10, 8 * step, 4)
        loss = engine.forward(batch, progress, last=True)
        engine.backward(loss.total * (float("nan") if step == 1 else 1.0), last=True)
        applied.append(bool(engine.step(progress).applied))
    assert applied == [True, False, True, True]
    moments = {
        f"{n}/{k}": v for n, p in objective.named_parameters() for k, v in engine.optimizer.state.get(p, {}).items()
    }
    return {**objective.state_dict(), **moments}


@pytest.mark.parametrize(("kind", "tolerance"), [("clip", 0.0), ("dino", 1e-6)])
def test_steps_decided_by_device_and_host_end_equally(kind, tolerance):
    on_host, on_device = (after_four_steps(kind, "cpu", on_host) for on_host in (True, False))
    assert on_host.keys() == on_device.keys() and all(
        v.isfinite().all() for v in on_host.values() if v.is_floating_point()
    )
    for name, value in on_host.items():
        torch.testing.assert_close(on_device[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_attention_is_chosen_by_key_and_checkpoint_and_never_by_time(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "sparo").mkdir()
    (tmp_path / "sparo/attention.json").write_text("{}")  # older versions stored their measurements here
    batch = {"image": torch.zeros(4, 3, 32, 32, dtype=torch.uint8), "text": torch.ones(4, 16, dtype=torch.int64)}
    run = resolve(RunConfig, tiny_recipe(Path("x"), Path("x")), "x")
    for key, kernel in (("auto", "fused"), ("plain", "plain"), ("fused", "fused")):
        engine = LocalEngine(LocalEngineConfig(device="cpu", precision="fp32", attention=key), run.optim)
        engine.prepare(build_objective(run))
        engine.forward(batch, Progress(0, 10, 0), last=True)
        assert engine.device_context.kernel == kernel
        warning = engine.device_context.restore_kernel("plain")  # the kernel of the checkpoint
        assert engine.device_context.kernel == ("fused" if key == "fused" else "plain")
        assert (warning is not None) == (key == "fused")
    assert "trained with plain attention, got fused" in warning
    assert (tmp_path / "sparo/attention.json").read_text() == "{}"
