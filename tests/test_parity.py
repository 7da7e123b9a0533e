"""Our losses against those of TRL and verl, loss and gradient, to 1e-5 on fixed random tensors.

The expected values in tests/parity were written by the peers' own code (`make test-parity`, which
also checks that they still are what the peers compute), never by ours.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coa.errors import TrainingError  # noqa: E402
from coa.train.experience import group_advantages, overlong_penalty  # noqa: E402
from coa.train.losses import (  # noqa: E402
    PolicyTokens,
    Totals,
    gae,
    kl_estimate,
    masked_cross_entropy,
    policy_loss,
    sampler_correction,
    token_logprobs,
    value_loss,
    whiten,
)
from coa.train.settings import RlLossSettings  # noqa: E402
from parity.cases import GROUPS, LENGTH, PAIRED, SEQUENCES, inputs, masks  # noqa: E402

HERE = Path(__file__).with_name("parity")
ROOT = HERE.parent.parent
PEERS = Path(os.environ.get("COA_TEST_PEERS") or ROOT / ".cache" / "peers")
NAMES = ("trl", "verl")
EXPECTED = {
    name: json.loads((HERE / f"expected_{name}.json").read_text(encoding="utf-8"))["cases"]
    for name in NAMES
}
WHOSE = torch.arange(SEQUENCES).repeat_interleave(LENGTH)
MODES: dict[str, dict[str, Any]] = {
    "token-mean": {"normalise": "token"},
    "seq-mean-token-mean": {"normalise": "sequence"},
    "seq-mean-token-sum": {"normalise": "constant", "constant_length": 1},
    "seq-mean-token-sum-norm": {"normalise": "constant", "constant_length": LENGTH},
}
"""verl's aggregation -> ours."""
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"normalise": "sequence"},
    "bnpo": {"normalise": "token"},
    "dr_grpo": {"normalise": "constant", "constant_length": LENGTH},
    "dapo": {"normalise": "token"},
    "luspo": {"normalise": "constant", "constant_length": 1},
    "cispo": {"normalise": "token", "surrogate": "cispo"},
}
"""TRL's loss_type -> ours."""


def starting(peer: str, *prefixes: str) -> list[str]:
    found = [name for name in EXPECTED[peer] if name.startswith(prefixes)]
    assert found, prefixes
    return found


def close(found: Any, expected: Any) -> None:
    found = found.detach() if isinstance(found, torch.Tensor) else torch.tensor(found)
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def flat(given: dict[str, Any], name: str) -> Any:
    return torch.tensor(given[name]).flatten()


def tokens_of(
    given: dict[str, Any], *, by_token: bool = False, empty: tuple[int, ...] = (), seed: int = 1
) -> PolicyTokens:
    """All places of the padded tables, those of weight 0 too."""
    advantages = torch.tensor(given["advantages"])[WHOSE]
    return PolicyTokens(
        weights=torch.tensor(masks(seed, empty)).flatten(),
        sequence=WHOSE,
        advantages=flat(given, "token_advantages") if by_token else advantages,
        old=flat(given, "old"),
        sampled=flat(given, "sampled"),
        reference=flat(given, "reference"),
    )


def correction_settings(level: str, threshold: Any) -> dict[str, Any]:
    level = {"token": "token", "sequence": "trajectory"}[level]  # verl's weights are products
    if isinstance(threshold, str):
        floor, cap = map(float, threshold.split("_"))
        bounds = {"correction_cap": cap, "correction_floor": floor}
        return {"correction": level, "correction_mode": "mask", **bounds}
    return {"correction": level, "correction_cap": threshold}


VERL_POLICY = starting("verl", "ppo", "dual", "part", "empty", "gspo", "cispo", "correction")


@pytest.mark.parametrize("name", VERL_POLICY)
def test_policy_loss_is_that_of_verl(name: str) -> None:
    expected = EXPECTED["verl"][name]
    asked = expected["asked"]
    given = inputs(asked["seed"], asked["spread"])
    settings: dict[str, Any] = {"clip_low": asked["low"], "clip_high": asked["high"]}
    settings |= {"dual_clip": asked["dual"], **MODES[asked["mode"]]}
    if name.startswith("gspo"):
        settings["ratio"] = "sequence"
    settings["surrogate"] = "cispo" if name.startswith("cispo") else "clip"
    if asked["correct"] is not None:
        settings |= correction_settings(*asked["correct"])
    totals = None
    if asked["batch"] is not None:
        totals = Totals(asked["batch"]["batch_num_tokens"], asked["batch"]["global_batch_size"], {})
    tokens = tokens_of(given, by_token=asked["by_token"], empty=tuple(asked["empty"]))
    new = flat(given, "new").requires_grad_()
    found = policy_loss(new, tokens, RlLossSettings(**settings), totals)
    found.loss.backward()
    close(found.loss, expected["loss"])
    close(new.grad.view(SEQUENCES, LENGTH), expected["grad"])
    metrics = expected["metrics"]
    assert found.metrics["clip_low"] + found.metrics["clip_high"] == pytest.approx(
        metrics["actor/pg_clipfrac"], abs=1e-5
    )
    assert found.metrics["clip_dual"] == pytest.approx(metrics["actor/pg_clipfrac_lower"], abs=1e-5)
    assert found.metrics["kl_old"] == pytest.approx(metrics["actor/ppo_kl"], abs=1e-5)


def test_clips_of_every_kind_happen_in_the_cases() -> None:
    low = EXPECTED["verl"]["ppo token-mean"]["metrics"]["actor/pg_clipfrac"]
    dual = EXPECTED["verl"]["dual clip token-mean"]["metrics"]["actor/pg_clipfrac_lower"]
    assert 0 < low < 1 and 0 < dual < 1
    logged = EXPECTED["trl"]["dapo"]["metrics"]
    assert 0 < logged["clip_ratio/low_mean"] < 1 and 0 < logged["clip_ratio/high_mean"] < 1
    grad = EXPECTED["verl"]["gspo seq-mean-token-mean"]["grad"]
    moved = [any(row) for row in grad]
    assert any(moved) and not all(moved)


TRL_POLICY = [
    *starting("trl", *KINDS),
    *("kl reweighted", "correction", "part of a batch", "fresh samples"),
]


@pytest.mark.parametrize("name", TRL_POLICY)
def test_policy_loss_is_that_of_trl(name: str) -> None:
    expected = EXPECTED["trl"][name]
    asked = expected["asked"]
    given = inputs(asked["seed"], asked["spread"])
    clips = {"clip_low": asked["low"], "clip_high": asked["high"]}
    if (
        asked["kind"] == "cispo"
    ):  # TRL's epsilon_high is the bound itself, and there is no lower one
        clips = {"clip_low": 1.0, "clip_high": asked["high"] - 1}
    settings = RlLossSettings(
        **clips,
        ratio=asked["level"],
        dual_clip=asked["delta"],
        kl=asked["beta"],
        kl_reweighted=asked["reweighted"],
        correction="token" if asked["correct"] else "none",
        correction_cap=1.1,
        **KINDS[asked["kind"]],
    )
    tokens = tokens_of(given)
    if asked["fresh"]:
        tokens = PolicyTokens(tokens.weights, tokens.sequence, tokens.advantages)
    totals = None if asked["items"] is None else Totals(asked["items"], SEQUENCES, {})
    new = flat(given, "new").requires_grad_()
    found = policy_loss(new, tokens, settings, totals)
    found.loss.backward()
    close(found.loss, expected["loss"])
    close(new.grad.view(SEQUENCES, LENGTH), expected["grad"])
    logged = expected["metrics"]
    if asked["level"] == "token" and asked["kind"] != "cispo":
        assert found.metrics["clip_high"] == pytest.approx(logged["clip_ratio/high_mean"], abs=1e-5)
        assert found.metrics["clip_low"] == pytest.approx(logged["clip_ratio/low_mean"], abs=1e-5)
    if asked["beta"] and not asked["reweighted"]:
        assert found.metrics["kl_reference"] == pytest.approx(logged["kl"], abs=1e-5)


def test_a_sequence_without_a_trained_token_counts_in_trl_and_not_in_verl_or_ours() -> None:
    """TRL divides by the rows of the tensor, verl and we by the sequences that are trained on."""
    expected = EXPECTED["trl"]["empty sequence"]
    given = inputs(1, 0.3)
    tokens = tokens_of(given, empty=(1, 4))
    settings = RlLossSettings(normalise="sequence")
    new = flat(given, "new").requires_grad_()
    as_trl = Totals(float(tokens.weights.sum()), SEQUENCES, {})
    found = policy_loss(new, tokens, settings, as_trl)
    found.loss.backward()
    close(found.loss, expected["loss"])
    close(new.grad.view(SEQUENCES, LENGTH), expected["grad"])
    ours = policy_loss(new.detach(), tokens, settings)
    close(ours.loss, EXPECTED["verl"]["empty sequence seq-mean-token-mean"]["loss"])
    assert float(ours.loss) == pytest.approx(expected["loss"] * SEQUENCES / (SEQUENCES - 2))


def test_rloo_loss_is_that_of_trl() -> None:
    expected = EXPECTED["trl"]["rloo"]
    given = inputs(expected["asked"]["seed"], expected["asked"]["spread"])
    new = flat(given, "new").requires_grad_()
    settings = RlLossSettings(ratio="trajectory", normalise="sequence", scale="none")
    found = policy_loss(new, tokens_of(given), settings)
    found.loss.backward()
    close(found.loss, expected["loss"])
    close(new.grad.view(SEQUENCES, LENGTH), expected["grad"])


def spread_out(values: list[float | None], seed: int) -> list[list[float]]:
    return [
        [(value or 0.0) * one for one in row]
        for value, row in zip(values, masks(seed), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "baseline", "scale"),
    [
        ("advantage grpo", "group", "group"),
        ("advantage grpo no std", "group", "none"),
        ("advantage rloo", "leave_one_out", "none"),
    ],
)
def test_group_advantages_are_those_of_verl(name: str, baseline: Any, scale: Any) -> None:
    expected = EXPECTED["verl"][name]["advantages"]
    rewards = inputs(2)["rewards"]
    found = group_advantages(rewards, GROUPS, baseline, scale)
    table = spread_out(found, 2)
    close([table[at] for at in PAIRED], [expected[at] for at in PAIRED])
    # By design: who is alone in a group is compared with nobody, and is not trained on. verl
    # takes the raw reward, so that every answer with a positive reward is made more likely.
    alone = GROUPS.index("rome")
    assert found[alone] is None
    # GRPO's std of 1 is increased by epsilon in verl.
    assert max(expected[alone]) == pytest.approx(rewards[alone], rel=1e-5)


def test_whitened_group_advantages_are_those_of_verl() -> None:
    """REINFORCE++ with a group baseline: mean of the group, then whitened over the tokens."""
    expected = EXPECTED["verl"]["advantage rf++"]["advantages"]
    found = group_advantages(inputs(2)["rewards"], GROUPS, "group", "none")
    values = [inputs(2)["rewards"][at] if v is None else v for at, v in enumerate(found)]
    weights = torch.tensor(masks(2)).flatten()
    close(whiten(torch.tensor(values)[WHOSE], weights).view(SEQUENCES, LENGTH), expected)


@pytest.mark.parametrize("name", starting("trl", "advantage"))
def test_group_advantages_are_those_of_trl(name: str) -> None:
    expected = EXPECTED["trl"][name]
    asked = expected["asked"]
    baseline: Any = "group" if asked["kind"] == "grpo" else "leave_one_out"
    found = group_advantages(
        asked["rewards"], asked["groups"], baseline, asked["scale"], epsilon=1e-4
    )
    values = [0.0 if value is None else value for value in found]
    close(values, expected["advantages"])
    if "unjudged" in name:
        # TRL keeps them with advantage 0: they still count in the loss's denominator, and in KL.
        assert found[1] is None and found[3] is None


@pytest.mark.parametrize("name", ["gae", "gae of the paper"])
def test_gae_is_that_of_verl(name: str) -> None:
    expected = EXPECTED["verl"][name]
    given, weights = inputs(3), torch.tensor(masks(3)).flatten()
    asked = expected["asked"]
    rewards = flat(given, "returns") * weights
    found = gae(rewards, flat(given, "values"), weights, WHOSE, asked["gamma"], asked["lam"])
    mask = weights.view(SEQUENCES, LENGTH)
    close(
        found.returns.view(SEQUENCES, LENGTH), (torch.tensor(expected["returns"]) * mask).tolist()
    )
    whitened = whiten(found.advantages, weights).view(SEQUENCES, LENGTH)
    close(whitened, (torch.tensor(expected["advantages"]) * mask).tolist())


def test_verl_loses_a_reward_on_an_observation_and_we_refuse_it() -> None:
    assert EXPECTED["verl"]["gae lost reward"]["returns"] == [[0.0, 0.0, 0.0]]
    rewards, weights = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])
    with pytest.raises(TrainingError, match=r"Token 2 \(sequence 0\) has the reward 1.0 and wei"):
        gae(rewards, torch.zeros(3), weights, torch.zeros(3, dtype=torch.long))


def test_overlong_penalties_are_those_of_verl_up_to_the_limit() -> None:
    asked = EXPECTED["verl"]["overlong"]["asked"]
    expected = EXPECTED["verl"]["overlong"]["rewards"]
    limit, share = asked["limit"], asked["buffer"] / asked["limit"]
    found = [overlong_penalty(length, limit, share) for length in asked["lengths"]]
    close(found[:-1], expected[:-1])
    # Beyond the limit DAPO's equation stays at -1, and verl's penalty grows on.
    assert (found[-1], expected[-1]) == (-1.0, -2.0)


@pytest.mark.parametrize("name", starting("verl", "value"))
def test_value_loss_is_that_of_verl(name: str) -> None:
    expected = EXPECTED["verl"][name]
    given = inputs(4)
    values = flat(given, "values").requires_grad_()
    weights = torch.tensor(masks(4)).flatten()
    tokens = PolicyTokens(weights, WHOSE, torch.zeros(len(weights)))
    mode = MODES[expected["asked"]["mode"]]
    settings = RlLossSettings(value_clip=expected["asked"]["clip"], **mode)
    returns, old = flat(given, "returns"), flat(given, "old_values")
    found = value_loss(values, returns, old, tokens, settings)
    found.backward()
    close(found, expected["loss"])
    close(values.grad.view(SEQUENCES, LENGTH), expected["grad"])


@pytest.mark.parametrize("name", [n for n in starting("verl", "kl") if "+" not in n])
def test_kl_estimates_are_those_of_verl(name: str) -> None:
    expected = EXPECTED["verl"][name]
    kind: Any = expected["asked"]["kind"]
    given = inputs(5)
    new = flat(given, "new").requires_grad_()
    found = kl_estimate(new, flat(given, "reference"), kind)
    found.sum().backward()
    close(found.view(SEQUENCES, LENGTH), expected["values"])
    close(new.grad.view(SEQUENCES, LENGTH), expected["grad"])


@pytest.mark.parametrize("name", starting("verl", "weights"))
def test_sampler_corrections_are_those_of_verl(name: str) -> None:
    expected = EXPECTED["verl"][name]
    given, weights = inputs(7), torch.tensor(masks(7)).flatten()
    kept = weights > 0
    old, sampled = flat(given, "old")[kept], flat(given, "sampled")[kept]
    asked = expected["asked"]
    chosen = RlLossSettings(**correction_settings(asked["level"], asked["threshold"]))
    factors = torch.zeros(len(weights))
    factors[kept] = sampler_correction(old, sampled, WHOSE[kept], chosen).factors
    close(factors.view(SEQUENCES, LENGTH), expected["weights"])
    mean = float(factors[kept].mean())
    assert mean == pytest.approx(expected["mean"], abs=1e-5)
    ess = mean**2 / float(factors[kept].square().mean())
    assert ess == pytest.approx(expected["ess"], abs=1e-5)


@pytest.mark.parametrize("name", ["forward", "forward at 0.7"])
def test_logprobs_are_those_of_trl(name: str) -> None:
    expected = EXPECTED["trl"][name]
    asked = expected["asked"]
    logits = torch.tensor(expected["hidden"]).flatten(0, 1) @ torch.tensor(expected["head"]).T
    targets = torch.tensor(asked["targets"])
    found = token_logprobs(logits, targets.flatten(), asked["temperature"])
    close(found.view_as(targets), expected["logprobs"])


@pytest.mark.parametrize("name", ["sft", "sft part of a batch"])
def test_cross_entropy_is_that_of_trl(name: str) -> None:
    """Loss and gradient of the output layer, from the hidden states of TRL's forward pass."""
    expected = EXPECTED["trl"][name]
    hidden, head = torch.tensor(expected["hidden"]), torch.tensor(expected["head"])
    head.requires_grad_()
    labels = torch.tensor(expected["asked"]["labels"])[:, 1:].flatten()
    weights = (labels != -100).float()
    logits = hidden[:, :-1].flatten(0, 1) @ head.T
    logprobs = token_logprobs(logits, labels.clamp_min(0))
    loss = masked_cross_entropy(logprobs, weights, expected["items"])
    loss.backward()
    close(loss, expected["loss"])
    close(head.grad, expected["grad"])


@pytest.mark.slow
@pytest.mark.parametrize("peer", NAMES)
def test_the_expected_values_are_what_the_peer_computes(peer: str, tmp_path: Path) -> None:
    python = PEERS / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no trainers in {PEERS}: make test-parity")
    script, out = HERE / f"{peer}_losses.py", tmp_path / "expected.json"
    done = subprocess.run(
        [str(python), str(script), str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    held = json.loads((HERE / f"expected_{peer}.json").read_text(encoding="utf-8"))
    assert found["versions"] == held["versions"]
    assert list(found["cases"]) == list(held["cases"])
    different = [
        name for name in held["cases"] if not same(found["cases"][name], EXPECTED[peer][name])
    ]
    assert not different, (
        f"{peer} has changed: {different}. If that is right: {python} {script} FILE"
    )


def same(found: Any, held: Any) -> bool:
    """Equal, numbers up to the last digits that float32 has."""
    if isinstance(found, dict) and isinstance(held, dict):
        return found.keys() == held.keys() and all(same(found[k], held[k]) for k in held)
    if isinstance(found, list) and isinstance(held, list):
        return len(found) == len(held) and all(map(same, found, held))
    if isinstance(found, float) and isinstance(held, float):
        return math.isclose(found, held, rel_tol=1e-6, abs_tol=1e-7)
    return bool(found == held)
